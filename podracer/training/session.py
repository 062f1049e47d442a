"""One stretch of training: logging, evaluation, checkpoints and signals around a driver."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import re
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from podracer import configs, errors, topology
from podracer.errors import Closed, PeerError, TrainingDivergedError
from podracer.evaluation import evaluation
from podracer.result.result import Result
from podracer.run import checkpoint, metrics, rundir
from podracer.run.driver import Progress, RunState, counter_values, only_learner, without_replay
from podracer.run.record import Experiment
from podracer.system.stopping import StopSignal
from podracer.topology.processes import ALONE, Processes
from podracer.training import choices
from podracer.training.transfer import transferred
from podracer.types import ActorParams
from podracer.version import __version__


class Session:
    """One stretch of training, from a fresh or restored state to the end or a signal."""

    def __init__(
        self,
        experiment: Experiment,
        directory: pathlib.Path | None,
        resume: bool,
        log: metrics.LogCallback | None,
        progress: bool,
        stop: StopSignal,
        init_from: Result | None = None,
        notes: Sequence[str] = (),
        processes: Processes = ALONE,
        began: float | None = None,
    ):
        self._began = time.monotonic() if began is None else began
        self._experiment, self._directory, self._stop, self._processes = experiment, directory, stop, processes
        keep = experiment.run.keep_checkpoints
        self._checkpoints = checkpoint.Checkpoints(directory, keep, processes=processes) if directory else None
        self._notes = list(notes)
        self._state = self._begin(resume, init_from)
        # Process 0 writes and speaks for all; the others keep the same rows, but for `time/...`, of their own clocks.
        self._watcher = _Watcher(log if processes.is_first else None)
        at = self._position(self._state) if resume else None
        self._log = metrics.Log(directory, self._watcher, at, write=processes.is_first)
        self._notes += self._log.notes
        # They decide what is evaluated and saved, and so what process 0 has read of them counts.
        evaluated = processes.told(self._evaluated())
        here = self._env_steps(self._state)
        self._best = checkpoint.Best(directory, evaluated, here, processes) if directory else None
        if self._best and (scores := [score for steps, score in evaluated if steps == here]):
            self._best.offer(here, max(scores), only_learner(self._state))  # a run that was killed before it could
        before = [row for row in self._log.rows if "time/train_seconds" in row][-1:]
        self._snapshots = None
        if directory and experiment.environment.spec.num_players == 2:
            self._snapshots = checkpoint.Checkpoints(
                directory, keep=None, name=checkpoint.SNAPSHOTS, processes=processes
            )
            self._snapshots.forget(here)
        self._train_seconds = sum(row["time/train_seconds"] for row in before)
        self._began -= sum(row.get("time/wall_seconds", 0.0) for row in before)
        self._rate = 0.0
        self._cpu_seconds = sum(row.get("time/cpu_seconds", 0.0) for row in before)
        title = f"{experiment.agent.name} {experiment.description['env']}"
        shown = progress and processes.is_first
        self._display = metrics.Display(experiment.run.total_steps, title, shown, self._position(self._state)[1])
        self._evaluator = evaluation.Evaluator(
            experiment.agent,
            experiment.environment,
            experiment.run.eval_episodes,  # type: ignore[arg-type]
            experiment.run.env_timeout,
            experiment.run.env_restarts,
            self._asked_to_stop,
            evaluation.step_limit(
                experiment.environment.spec,
                experiment.run.eval_episodes,  # type: ignore[arg-type]
                experiment.run.eval_every,  # type: ignore[arg-type]
            ),
        )
        self._endless = False
        self._cautions = list(experiment.agent.cautions) if processes.is_first else []
        self._cut = False
        self._last_evaluation: list[evaluation.Evaluation] = []
        self._diverged = np.zeros(experiment.run.population, bool)
        self._evaluated_at = max((steps for steps, _ in evaluated), default=-1)

    def _begin(self, resume: bool, init_from: Result | None) -> RunState:
        experiment = self._experiment
        if resume and self._checkpoints and self._checkpoints.steps():
            try:
                like = experiment.driver.like()
                _, state, problems = self._checkpoints.restore(self._saved(like))
                self._notes += problems
            except errors.CheckpointError:
                self._checkpoints.close()
                raise
            if not experiment.run.checkpoint_replay:
                empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), like.experience)
                state = state._replace(experience=empty._replace(counts=state.experience.counts.emptied()))
            return state
        state = experiment.driver.init()
        if init_from:
            state = state._replace(learner=transferred(init_from, state.learner))
            if self._checkpoints:  # a run that goes on needs nothing of the other any more
                self._checkpoints.save(0, self._saved(state))
        return state

    def _saved(self, state: RunState) -> RunState:
        """What a checkpoint holds of a state."""
        return state if self._experiment.run.checkpoint_replay else without_replay(state)

    def _evaluated(self) -> list[tuple[int, float]]:
        """Steps and returns of the evaluations so far."""
        return [(row["env_steps"], row["eval/return_mean"]) for row in self._log.rows if "eval/return_mean" in row]

    def _env_steps(self, state: RunState) -> int:
        """Steps that every member has taken, by which evaluations and checkpoints are dated."""
        return int(counter_values(self._here(state).env_steps).min())

    def _position(self, state: RunState) -> tuple[int, int]:
        """The newest update and step."""
        own = self._here(state)
        return self._updates(own), int(counter_values(own.env_steps).max())

    @staticmethod
    def _updates(state: RunState) -> int:
        return int(np.max(jax.device_get(state.learner.num_updates)))

    def run(self) -> Result:
        driver, run = self._experiment.driver, self._experiment.run
        try:
            for note in self._notes:
                self._display.say(note)
            if done := self._done():
                self._display.say(f"complete at {done.summary['env_steps']:,} steps")
                return done
            self._display.say(driver.describe())
            if line := choices.line(self._experiment.description["chosen"]):
                self._display.say(line)
            self._display.say("compiling ...")
            self._processes.doing("compiling")
            self._display.doing("compiling")
            compile_seconds = driver.compile(self._state)
            self._processes.barrier()  # nobody waits in a collective for another's compiler
            self._saved_at = time.monotonic()
            self._evaluate_at(self._state, self._env_steps(self._state))
            self._processes.doing("training")
            self._display.doing("training")
            self._cpu_clock = time.process_time()
            self._state, complete = driver.run(
                self._state,
                total_steps=run.total_steps,
                next_milestone=self._next_milestone,
                on_progress=self._on_progress,
                on_milestone=self._on_milestone,
                should_stop=self._should_stop,
                should_save=lambda: self._processes.is_first and self._is_late(),
                processes=self._processes,
            )
            result = self._finish(compile_seconds, complete)
            if self._watcher.error:
                self._watcher.error.add_note(f"podracer: {self._ending(result.summary)}")
                raise self._watcher.error
            return result
        except TrainingDivergedError as error:
            raise TrainingDivergedError(f"{error} {self._last_good()}") from None
        except (errors.CheckpointError, rundir.WriteError) as error:
            raise type(error)(f"{error} {self._last_good()} Make room and continue with {self._resume()}.") from error
        finally:
            self._display.close()
            self._log.close()
            for checkpoints in (self._checkpoints, self._best, self._snapshots):
                if checkpoints:
                    checkpoints.close()

    def _should_stop(self) -> bool:
        if self._watcher.stop:
            self._processes.stop()
            return True
        return self._asked_to_stop()

    def _asked_to_stop(self) -> bool:
        """True once a signal has come, here or to another process."""
        if self._stop.requested:
            self._processes.stop()
            return True
        return self._processes.stopping

    def _done(self) -> Result | None:
        """A finished run that is resumed, as its files have it."""
        own = self._here(self._state)
        env_steps = int(counter_values(own.env_steps).min())
        path = self._directory / "summary.json" if self._directory else None
        if path is None or env_steps < self._experiment.run.total_steps:
            return None
        there = self._processes.is_first and path.exists()
        summary = self._processes.told(json.loads(path.read_text()) if there else {})
        wanted = {"complete": True, "env_steps": env_steps, "eval_episodes": self._experiment.run.eval_episodes}
        if not wanted.items() <= summary.items():
            return None
        result = Result(self._experiment, own.learner, self._log.rows, self._directory)
        result.summary = summary
        return result

    def _last_good(self) -> str:
        steps = self._checkpoints.steps() if self._checkpoints else []
        return f"The last good checkpoint is {self._checkpoints.directory / str(steps[-1])}." if steps else ""  # type: ignore[union-attr]

    def _resume(self) -> str:
        assert self._directory is not None
        return rundir.how_to_resume(self._directory, self._experiment.description["own"])

    def _next_milestone(self, env_steps: int) -> int:
        run = self._experiment.run
        every = [run.eval_every] + ([run.checkpoint_every] if self._checkpoints else [])
        every += [self._snapshot_every] if self._snapshots else []
        return min([run.total_steps] + [(env_steps // n + 1) * n for n in every if n])

    @property
    def _snapshot_every(self) -> int:
        return max(1, self._experiment.run.total_steps // checkpoint.SNAPSHOTS_A_RUN)

    def _on_progress(self, now: Progress) -> None:
        self._train_seconds += now.seconds
        self._cpu_seconds += time.process_time() - self._cpu_clock
        self._cpu_clock = time.process_time()
        timing = {"time/train_seconds": self._train_seconds}
        if now.seconds:
            self._rate = now.transitions / now.seconds
            timing["time/steps_per_second"] = self._rate
        # Next to the seconds they tell a slow machine from a slow program (docs/adr/0012-spread.md).
        timing["time/cpu_seconds"] = self._cpu_seconds
        timing["time/wall_seconds"] = time.monotonic() - self._began
        # Only an environment of a host may have them (docs/adr/0025-remote.md).
        measured = getattr(self._experiment.environment, "metrics", None)
        if measured is not None:
            timing |= measured()
        for member, steps in enumerate(now.member_steps):
            row: metrics.Row = {"env_steps": int(steps), "updates": now.updates}
            if self._experiment.run.population > 1:
                row["member"] = member
            self._log.write(row | {name: float(value[member]) for name, value in now.metrics.items()} | timing)
        self._caution(now.metrics)
        returns = now.metrics["episode/return"]
        returns = returns[np.isfinite(returns)]
        mean = float(returns.mean()) if returns.size else math.nan
        self._display.update(now.env_steps, self._rate, mean, _where_time_goes(now.metrics))

    def _caution(self, found: Mapping[str, np.ndarray]) -> None:
        """Says, once, which setting a metric shows not to fit."""
        for caution in self._cautions[:]:
            values = found.get(caution.metric, np.zeros(1))
            if np.nanmax(values, initial=0.0) > caution.above:
                self._cautions.remove(caution)
                self._display.warn(f"{caution.metric} is {np.nanmax(values):.2f}: {caution.advice}")

    def _on_milestone(self, state: RunState, env_steps: int) -> None:
        run = self._experiment.run
        final = env_steps >= run.total_steps and not self._in_final_updates(state)
        self._processes.doing("evaluating and saving")
        self._display.doing("evaluating and saving")
        # Before the checkpoint: of a run that ends between the two, the snapshot is removed and made again.
        taken = max(self._snapshots.steps(), default=-1) if self._snapshots else env_steps
        if self._snapshots and _crossed(taken, env_steps, self._snapshot_every):
            everywhere = NamedSharding(self._experiment.driver.mesh, PartitionSpec())
            self._snapshots.save(env_steps, topology.spread(self._actor_params(state), everywhere))
        newest = max(self._saved_steps(), default=-1)
        late = self._processes.told(self._is_late())
        if final or late or _crossed(newest, env_steps, run.checkpoint_every):
            self._save(state, env_steps)
        self._evaluate_at(state, env_steps, final)
        self._processes.doing("training")
        self._display.doing("training")
        self._cpu_clock = time.process_time()

    def _save(self, state: RunState, env_steps: int) -> None:
        """Writes a checkpoint, if there is a directory."""
        if self._checkpoints is None:
            return
        # A stop among the updates after the last step has left one of these steps.
        if self._experiment.run.total_steps <= env_steps in self._saved_steps():
            self._checkpoints.delete(env_steps)
        self._checkpoints.save(env_steps, self._saved(state))
        self._log.to_disk()
        self._saved_at = time.monotonic()

    def _is_late(self) -> bool:
        """True where the newest checkpoint is older than `checkpoint_minutes`."""
        late = time.monotonic() - self._saved_at > 60 * self._experiment.run.checkpoint_minutes
        return self._checkpoints is not None and late

    def _in_final_updates(self, state: RunState) -> bool:
        """True for a state that still owes final updates."""
        return self._experiment.run.final_updates > 0 and bool(topology.here(state.experience.counts.pending))

    def _saved_steps(self) -> list[int]:
        return self._checkpoints.steps() if self._checkpoints else []

    def _evaluate_at(self, state: RunState, env_steps: int, final: bool = False) -> None:
        """Evaluates where it is time, after the checkpoint: environments may hang. A run that goes on does it then."""
        if not final and env_steps >= self._experiment.run.total_steps and self._in_final_updates(state):
            return  # of this step the last state is evaluated
        if final or _crossed(self._evaluated_at, env_steps, self._experiment.run.eval_every):
            self._evaluate(state, env_steps)

    def _evaluate(self, state: RunState, env_steps: int) -> None:
        own = self._here(state)
        diverged = _not_finite(own)
        for member in np.flatnonzero(diverged & ~self._diverged):
            seed = self._experiment.seeds[member]
            self._display.say(
                f"member {member} (seed {seed}) has diverged: its parameters are not finite; others go on"
            )
        self._diverged = diverged
        played = self._played(self._actor_params(state))
        if not played:
            self._cut = True
            return
        self._last_evaluation = played
        mean = np.mean([result.mean for result in self._last_evaluation])
        cut = evaluation.cut(played)
        self._display.detail(f"{env_steps:>12,} steps   evaluation return {mean:.3f}{cut}")
        self._say_endless(cut)
        if self._evaluated_at == env_steps:
            return  # a finished run that was resumed: its rows are there
        self._evaluated_at = env_steps
        for member, result in enumerate(self._last_evaluation):
            row: metrics.Row = {"env_steps": env_steps, "updates": self._updates(own)}
            if self._experiment.run.population > 1:
                row["member"] = member
            if not diverged[member]:
                row |= {"eval/return_mean": result.mean, "eval/return_std": result.std}
                row |= {"eval/episodes": result.episodes, "eval/unfinished": result.unfinished}
            self._log.write(row)
        if self._best and not diverged.all():
            best = max(result.mean for result, bad in zip(self._last_evaluation, diverged) if not bad)
            if self._best.wants(best) and env_steps not in self._saved_steps():
                self._save(state, env_steps)  # a run that goes on goes never back before its best
            self._best.offer(env_steps, best, only_learner(state))

    def _say_endless(self, cut: str) -> None:
        """Says once that episodes do not end, and what to do."""
        if not cut or self._endless:
            return
        self._endless = True
        ended = any(row.get("episode/count") for row in self._log.rows)
        training = "" if ended else "; in training none has ended either"
        self._display.say(
            f"{cut.removeprefix(', ')}: the evaluation's returns are those until then{training}. max_episode_steps (in "
            "env_options, or of EnvSpec) says how long an episode is."
        )

    def _played(self, params: ActorParams) -> list[evaluation.Evaluation]:
        """What process 0 finds on its own device, and tells the others; nothing if it was to stop meanwhile."""
        if not self._processes.is_first:
            return [evaluation.of(told) for told in self._processes.told()]
        try:
            found = self._evaluator(params, self._experiment.seeds)
        except Closed:
            found = []
        self._processes.told([configs.to_json(dataclasses.asdict(one)) for one in found])
        return found

    def _here(self, state: RunState) -> RunState:
        """The learner and the steps [P] as this process's own arrays; what acted and the ring are left out."""
        return topology.here(only_learner(state))

    def _actor_params(self, state: RunState) -> ActorParams:
        """What acts in evaluation, [P]."""
        learner = jax.device_put(self._here(state).learner, jax.local_devices()[0])
        return jax.vmap(self._experiment.agent.actor_params)(learner, jnp.ones(self._experiment.run.population))

    def _finish(self, compile_seconds: float, complete: bool) -> Result:
        state, experiment, own = self._state, self._experiment, self._here(self._state)
        env_steps = self._env_steps(state)
        trained, complete = complete, complete and not self._cut
        if complete and not self._last_evaluation:
            self._evaluate(state, env_steps)  # a finished run that was resumed
            complete = not self._cut
        if not complete and not (trained and env_steps in self._saved_steps()):  # whose evaluation alone was cut
            self._save(state, env_steps)
        result = Result(experiment, own.learner, self._log.rows, self._directory)
        stopped_by, failed = self._agree_on_the_end()
        # Of process 0, whose clocks are others than ours.
        result.summary = self._processes.told(
            configs.to_json(self._summary(compile_seconds, env_steps, complete, self._updates(own), stopped_by))
        )
        if self._directory and self._processes.is_first:
            with rundir.writing(self._directory / "summary.json"):
                rundir.write_json(self._directory / "summary.json", result.summary)
            if any("episode/return" in row for row in self._log.rows):
                with rundir.writing(self._directory / "curve.png"):
                    result.plot()
        if failed:
            self._processes.barrier()  # who left now would end process 0 while it writes
            if not self._processes.is_first:
                raise PeerError(f"the run has ended with an error in log: {failed}")
        if not complete:
            self._display.say(self._ending(result.summary))
        elif left := self._left():
            self._display.say(
                f"{left:,} updates were due when the run was stopped and are not done: checkpoint_replay=False left "
                "nothing to learn them from."
            )
        return result

    def _left(self) -> int:
        """Updates that a complete run owes, for its replay was lost and not filled again."""
        experiment, counts = self._experiment, self._state.experience.counts
        if experiment.agent.replay is None or isinstance(counts.filled, tuple):
            return 0
        updates, put_off, filled = (int(x) for x in topology.here([counts.updates, counts.put_off, counts.filled]))
        behind = experiment.run.final_updates if updates and not filled else 0
        return put_off * experiment.agent.replay.group + behind

    def _agree_on_the_end(self) -> tuple[int, str | None]:
        """The signal that stopped any of the processes, or 0, and the error of process 0's `log`, if there is one."""
        error = self._watcher.error
        ends = self._processes.everyones([self._stop.number, f"{type(error).__name__}: {error}" if error else None])
        return next((number for number, _ in ends if number), 0), ends[0][1]

    def _ending(self, summary: dict[str, Any]) -> str:
        """How a run ended that did not simply end."""
        by = "a signal"
        if self._watcher.stop:
            by = f"an error in log ({type(self._watcher.error).__name__})" if self._watcher.error else "log"
        if summary["complete"]:
            return f"the run was complete at {summary['env_steps']:,} steps"
        how = f"continue with {self._resume()}" if self._directory else "nothing was kept, for want of a run_dir"
        return f"stopped by {by} at {summary['env_steps']:,} steps; {how}"

    def _summary(
        self, compile_seconds: float, env_steps: int, complete: bool, updates: int, stopped_by: int
    ) -> dict[str, Any]:
        experiment = self._experiment
        rates = [row["time/steps_per_second"] for row in self._log.rows if "time/steps_per_second" in row]
        devices = experiment.driver.devices
        summary = {
            "agent": experiment.agent.name,
            "env": experiment.description["env"],
            **experiment.description["chosen"],
            "seed": experiment.run.seed,
            "complete": complete,
            "stopped_by": signal.Signals(stopped_by).name if stopped_by and not complete else None,
            "env_steps": env_steps,
            "updates": updates,
            "wall_seconds": time.monotonic() - self._began,
            "compile_seconds": compile_seconds,
            "train_seconds": self._train_seconds,
            "cpu_seconds": self._cpu_seconds,
            "steps_per_second": env_steps * experiment.run.population / self._train_seconds if rates else 0.0,
            "devices": len(devices),
            "processes": self._processes.count,
            "hosts": self._processes.hosts,
            "replicas": experiment.description["run"].get("replicas"),
            "device": f"{devices[0].platform}: {devices[0].device_kind}",
            "deterministic_ops": _deterministic_ops(os.environ.get("XLA_FLAGS", "")),
            "jax": jax.__version__,
            "podracer": __version__,
        }
        if not self._last_evaluation:  # stopped before the first
            return summary | {"eval_return_mean": None, "eval_return_std": None, "eval_episodes": 0}
        summary |= evaluation.scores(self._last_evaluation)
        if experiment.run.population > 1:
            summary["best_member"] = metrics.best_member(self._log.rows)
            summary["members"] = [
                {"seed": int(seed), "eval_return_mean": e.mean, "diverged": bool(self._diverged[i])}
                | {name: float(values[i]) for name, values in experiment.hyper.items()}
                for i, (seed, e) in enumerate(zip(experiment.seeds, self._last_evaluation))
            ]
        return summary


class _Watcher:
    """The user's `log` callback, which may end the run: in good order where it returns True, and where it raises."""

    def __init__(self, log: metrics.LogCallback | None):
        self._log = log
        self.stop = False
        self.error: Exception | None = None

    def __call__(self, env_steps: int, row: Mapping[str, Any]) -> None:
        if self._log is None or self.error:
            return
        try:
            self.stop = self._log(env_steps, row) is True or self.stop
        except Exception as error:
            self.stop, self.error = True, error


def _not_finite(state: RunState) -> np.ndarray:
    """Members some of whose parameters are not finite numbers, bool [P]."""
    leaves = [x for x in jax.tree.leaves(state.learner.params) if jnp.issubdtype(x.dtype, jnp.inexact)]
    finite = [np.isfinite(jax.device_get(x)).reshape(x.shape[0], -1).all(axis=1) for x in leaves]
    return ~np.all(finite, axis=0)


def _deterministic_ops(flags: str) -> bool:
    """Whether XLA was told to repeat itself bit for bit on a GPU; on CPUs it does so anyway."""
    values = re.findall(r"--xla_gpu_deterministic_ops(?:=(\S+))?(?=\s|$)", flags)
    return bool(values) and values[-1].lower() in ("", "true", "1")


def _where_time_goes(metrics: dict[str, np.ndarray]) -> str:
    """Sebulba's stages for the progress bar; nothing for Anakin, which has none, and where nobody acts."""
    stages = ("environment", "inference", "learn")
    if "sebulba/policy_lag" not in metrics or f"sebulba/{stages[0]}_share" not in metrics:
        return ""
    shares = " ".join(f"{stage} {float(metrics[f'sebulba/{stage}_share'][0]):.0%}" for stage in stages)
    return f"  {shares} lag {float(metrics['sebulba/policy_lag'][0]):.1f}"


def _crossed(before: int, now: int, every: int | None) -> bool:
    """Whether a multiple of `every` lies in (before, now]."""
    return bool(every) and now // every > max(before, 0) // every  # type: ignore[operator]
