"""One stretch of training: logging, evaluation, checkpoints and signals around a driver."""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from podracer import configs, errors
from podracer.errors import PeerError, TrainingDivergedError
from podracer.result.result import Result
from podracer.run import checkpoint, metrics, rundir
from podracer.run.best import SOON_SECONDS, Best, Snapshots
from podracer.run.driver import (
    Progress,
    RunHooks,
    RunState,
    crossed,
    empty_replay,
    least_env_steps,
    local_learner,
    lost_updates,
    num_updates,
    only_learner,
    position,
    without_replay,
)
from podracer.run.record import Experiment
from podracer.system.spans import span
from podracer.system.stopping import StopSignal
from podracer.topology import here as local
from podracer.topology.processes import ALONE, Processes
from podracer.training import choices, summary
from podracer.training.callback import StopRequests, UserCallback
from podracer.training.evaluations import Evaluations, actor_params
from podracer.training.exchange import Exchange
from podracer.training.generations import Generations
from podracer.training.training_log import TrainingLog
from podracer.training.transfer import transferred


class Session:
    """One stretch of training, from a fresh or restored state to the end or a signal.

    Args:
      experiment: the run.
      directory: the run directory, or None.
      resume: whether it goes on from its newest whole checkpoint.
      log: the user's callback.
      progress: whether people see how far it is.
      stop: the signals that end it.
      init_from: another run, whose parameters it begins with.
      notes: lines to say at its beginning.
      processes: those that share it.
      began: when it began, in seconds of `time.monotonic`; now, if None.
    """

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
        began = time.monotonic() if began is None else began
        self._experiment, self._directory, self._processes = experiment, directory, processes
        self._notes = list(notes)
        self._is_new = False
        with contextlib.ExitStack() as opened:
            self._checkpoints: checkpoint.Checkpoints | None = None
            if directory:
                keep = experiment.run.keep_checkpoints
                self._checkpoints = checkpoint.Checkpoints(directory, keep, processes=processes)
                opened.callback(self._checkpoints.close)
            if not resume:
                experiment.driver.prepare()
            self._state = self._begin(resume, init_from)
            # Process 0 writes and speaks for all; the others keep the same rows, but for `time/...` of their clocks.
            self._callback = UserCallback(log if processes.is_first else None)
            self._requests = StopRequests(stop, self._callback, processes)
            start = position(self._state)
            self._log = metrics.Log(directory, self._callback, start if resume else None, write=processes.is_first)
            opened.callback(self._log.close)
            self._notes += self._log.notes
            # They decide what is evaluated and saved, and so what process 0 has read of them counts.
            scores = processes.broadcast(
                [(row["env_steps"], row["eval/return_mean"]) for row in self._log.rows if "eval/return_mean" in row]
            )
            now = least_env_steps(self._state)
            self._best = Best(directory, scores, now, processes) if directory else None
            if self._best:
                opened.callback(self._best.close)
            if self._best and (own := [score for steps, score in scores if steps == now]):
                self._best.offer(now, max(own), only_learner(self._state))  # a run that was killed before it could
            self._snapshots = None
            if directory and experiment.environment.spec.num_players == 2:
                self._snapshots = Snapshots(directory, experiment.run.total_steps, now, processes)
                opened.callback(self._snapshots.close)
            title = f"{experiment.agent.name} {experiment.description['env']}"
            is_shown = progress and processes.is_first
            self._display = metrics.Display(experiment.run.total_steps, title, is_shown, now)
            opened.callback(self._display.close)
            self._training = TrainingLog(experiment, self._log, self._display, began, cautions=processes.is_first)
            self._evaluations = Evaluations(experiment, self._log, self._display, self._requests, processes, scores)
            self._generations: Generations | Exchange | None = None
            if experiment.pbt_dir:
                self._generations = Exchange(experiment, directory, self._state, self._display.say)
            elif experiment.pbt:
                self._generations = Generations(experiment, directory, self._state, processes)
            if self._generations:
                opened.callback(self._generations.close)
                self._training.hyper = self._generations.hyper
            self._opened = opened.pop_all()  # an error before has closed all

    def _begin(self, resume: bool, init_from: Result | None) -> RunState:
        """The state that this stretch begins with: a checkpoint's, or the driver's first one."""
        experiment = self._experiment
        if resume and self._checkpoints and self._checkpoints.steps():
            like = experiment.driver.like()
            _, state, problems = self._checkpoints.restore(self._saved(like))
            self._notes += problems
            if not experiment.run.checkpoint_replay:
                state = empty_replay(state, like)
            return state
        with span("first state"):
            state = experiment.driver.init()
        if init_from:
            state = state._replace(learner=transferred(init_from, state.learner))
            if self._checkpoints:  # a run that goes on needs nothing of the other any more
                self._checkpoints.save(0, self._saved(state))
        return state

    def _saved(self, state: RunState) -> RunState:
        """The part of a state that a checkpoint holds."""
        return state if self._experiment.run.checkpoint_replay else without_replay(state)

    def run(self) -> Result:
        """Compiles, trains and ends in good order: whatever happens, files are closed, and errors say what is left."""
        driver, run = self._experiment.driver, self._experiment.run
        try:
            for note in self._notes:
                self._display.say(note)
            if finished := self._finished_result():
                self._display.say(f"complete at {finished.summary['env_steps']:,} steps")
                return finished
            self._display.say(driver.describe())
            if line := choices.line(self._experiment.description["chosen"]):
                self._display.say(line)
            self._display.say("compiling ...")
            self._doing("compiling")
            self._evaluations.prepare(self._state)
            with span("program"):
                compile_seconds = driver.compile(self._state)
            self._processes.barrier()  # nobody waits in a collective for another's compiler
            self._saved_at = time.monotonic()
            self._evaluate_at(self._state, least_env_steps(self._state))
            self._state = self._evolve_at(self._state, least_env_steps(self._state))
            self._doing("training")
            self._training.start_cpu_clock()
            hooks = RunHooks(
                next_milestone=self._next_milestone,
                on_progress=self._on_progress,
                on_milestone=self._on_milestone,
                should_stop=self._requests.requested,
                should_save=lambda: self._processes.is_first and self._is_late(),
            )
            with span("training"):
                self._state, complete = driver.run(
                    self._state, hooks, total_steps=run.total_steps, processes=self._processes
                )
            result = self._finish(compile_seconds, complete)
            if self._callback.error:
                self.draw(result)
                self._callback.error.add_note(f"podracer: {self._ending(result.summary)}")
                raise self._callback.error
            return result
        except KeyboardInterrupt as error:
            if self._checkpoints:
                error.add_note(f"podracer: {self._last_good()}")
            raise
        except TrainingDivergedError as error:
            raise TrainingDivergedError(f"{error} {self._last_good()}") from None
        except (errors.CheckpointError, rundir.WriteError) as error:
            raise type(error)(f"{error} {self._last_good()} Make room and continue with {self._resume()}.") from error
        finally:
            self._opened.close()

    def draw(self, result: Result) -> None:
        """Draws the run's curve into its directory; the last thing, because it takes a while.

        Raises:
          WriteError: where the disk refuses.
        """
        drawn = any("episode/return" in row for row in result.history)
        if self._directory and self._processes.is_first and drawn and self._is_new:
            with rundir.writing(self._directory / "curve.png"), span("plot"):
                result.plot()

    def _doing(self, what: str) -> None:
        """Notes what this process does now, for people and for the other processes."""
        self._processes.set_status(what)
        self._display.set_status(what)

    def _finished_result(self) -> Result | None:
        """The result of a finished run that is resumed, as its files have it."""
        stored = summary.stored(self._directory, self._experiment, self._processes, least_env_steps(self._state))
        if stored is None:
            return None
        result = Result(self._experiment, local_learner(self._state).learner, self._log.rows, self._directory)
        result.summary = stored
        return result

    def _on_progress(self, now: Progress) -> None:
        self._training.write(now)
        if isinstance(self._generations, Exchange):
            self._generations.add(now)

    def _last_good(self) -> str:
        if self._checkpoints is None:
            return ""
        path = self._checkpoints.newest()
        return f"The last good checkpoint is {path}." if path else "There is no checkpoint yet."

    def _resume(self) -> str:
        assert self._directory is not None
        return rundir.how_to_resume(self._directory, self._experiment.description["own"])

    def _next_milestone(self, env_steps: int) -> int:
        run = self._experiment.run
        every = [run.eval_every] + ([self._checkpoint_every] if self._checkpoints else [])
        every += [self._snapshots.every] if self._snapshots else []
        ends = [run.total_steps] + ([self._generations.next_milestone(env_steps)] if self._generations else [])
        return min(ends + [(env_steps // n + 1) * n for n in every if n])

    def _on_milestone(self, state: RunState, env_steps: int) -> RunState:
        run = self._experiment.run
        final = env_steps >= run.total_steps and not self._owes_updates(state)
        self._doing("evaluating and saving")
        # Before the checkpoint: of a run that ends between the two, the snapshot is removed and made again.
        if self._snapshots and self._snapshots.is_due(env_steps):
            self._snapshots.save(env_steps, actor_params(self._experiment, state), self._experiment.driver.mesh)
        if isinstance(self._generations, Exchange):  # before the checkpoint, because it cannot be done again
            state = self._evolve_at(state, env_steps)
        late, soon = self._processes.broadcast((self._is_late(), run.checkpoint_every is None and self._is_soon()))
        due = crossed(max(self._saved_steps(), default=-1), env_steps, self._checkpoint_every)
        if final or late or (due and not soon):
            self._save(state, env_steps)
        self._evaluate_at(state, env_steps, final)
        self._write_best(state, env_steps, now=False)
        if not isinstance(self._generations, Exchange):
            # At last: what was saved and evaluated is what was trained, and a run that goes on does this again.
            state = self._evolve_at(state, env_steps)
        self._doing("training")
        self._training.start_cpu_clock()
        return state

    def _evolve_at(self, state: RunState, env_steps: int) -> RunState:
        """Ends a generation where it is time, unless a signal has left an evaluation to be done first."""
        if self._generations is None or self._evaluations.cut or not self._generations.is_due(env_steps):
            return state
        state = self._generations.evolve(state, env_steps)
        self._training.hyper = self._generations.hyper
        return state

    def _save(self, state: RunState, env_steps: int) -> None:
        """Writes a checkpoint, if there is a directory."""
        if self._checkpoints is None:
            return
        # A stop among the updates after the last step has left one of these steps.
        is_there = self._experiment.run.total_steps <= env_steps in self._saved_steps()
        save = self._checkpoints.replace if is_there else self._checkpoints.save
        save(env_steps, self._saved(state))
        self._log.to_disk()
        if self._generations:
            self._generations.to_disk()
        if self._best:
            self._best.write_held()  # a run that goes on from here does not make it again
        self._saved_at = time.monotonic()

    def _is_late(self) -> bool:
        """True where the newest checkpoint is older than `checkpoint_minutes`."""
        late = time.monotonic() - self._saved_at > 60 * self._experiment.run.checkpoint_minutes
        return self._checkpoints is not None and late

    def _is_soon(self) -> bool:
        """True where the newest checkpoint was written just now."""
        return time.monotonic() - self._saved_at < SOON_SECONDS

    @property
    def _checkpoint_every(self) -> int:
        return self._experiment.run.checkpoint_every or max(1, self._experiment.run.total_steps // 5)

    def _owes_updates(self, state: RunState) -> bool:
        """True for a state that owes updates after the last step: Sebulba owes those of its last rollout, too."""
        may_owe = self._experiment.run.final_updates > 0 or self._experiment.driver.arch == "sebulba"
        return may_owe and bool(local(state.replay_state.counts.pending_updates))

    def _saved_steps(self) -> list[int]:
        return self._checkpoints.steps() if self._checkpoints else []

    def _evaluate_at(self, state: RunState, env_steps: int, final: bool = False) -> None:
        """Evaluates where it is time, after the checkpoint: environments may hang. A run that goes on does it then."""
        if not final and env_steps >= self._experiment.run.total_steps and self._owes_updates(state):
            return  # of this step the last state is evaluated
        if final or self._evaluations.are_due(env_steps):
            self._evaluate(state, env_steps)

    def _evaluate(self, state: RunState, env_steps: int) -> None:
        """Evaluates, and keeps the state where it is the best so far."""
        with span("evaluation"):
            score = self._evaluations.evaluate(state, env_steps)
        if score is None or self._best is None:
            return
        if not self._best.wants(score):
            return
        if self._best.waits():
            self._best.hold(env_steps, score, only_learner(state))
            return
        self._save_before_best(state, env_steps)
        self._best.offer(env_steps, score, only_learner(state))

    def _save_before_best(self, state: RunState, env_steps: int) -> None:
        """Writes a checkpoint, unless there is one: a run that goes on goes never back before its best."""
        if env_steps not in self._saved_steps():
            self._save(state, env_steps)

    def _write_best(self, state: RunState, env_steps: int, *, now: bool) -> None:
        """Writes the best state that is held, once it has waited, or now."""
        if self._best and self._best.held and (now or not self._best.waits()):
            self._save_before_best(state, env_steps)
            self._best.write_held()

    def _finish(self, compile_seconds: float, complete: bool) -> Result:
        """Evaluates and saves what is left to, and writes the summary."""
        state, at = self._state, least_env_steps(self._state)
        trained, complete = complete, complete and not self._evaluations.cut
        if complete and not self._evaluations.newest:
            self._evaluate(state, at)  # a finished run that was resumed
            complete = not self._evaluations.cut
        if not complete and not (trained and at in self._saved_steps()):  # whose evaluation alone was cut
            self._save(state, at)
        self._write_best(state, at, now=True)
        own = local_learner(state)
        result = Result(self._experiment, own.learner, self._log.rows, self._directory)
        stopped_by, failed = self._requests.gather()
        figures = summary.make(
            self._experiment,
            self._processes,
            self._training,
            self._evaluations,
            self._log.rows,
            compile_seconds=compile_seconds,
            env_steps=at,
            updates=num_updates(own),
            complete=complete,
            stopped_by=stopped_by,
            hyper=_numbers(own) if self._generations else self._experiment.hyper,
        )
        self._is_new = True
        # Of process 0, whose clocks are others than ours.
        result.summary = self._processes.broadcast(configs.to_json(figures))
        if self._directory and self._processes.is_first:
            summary.write(self._directory, result.summary)
        if failed:
            self._processes.barrier()  # who left now would end process 0 while it writes
            if not self._processes.is_first:
                raise PeerError(f"the run has ended with an error in log: {failed}")
        if not complete:
            self._display.say(self._ending(result.summary))
        elif lost := lost_updates(state, self._experiment.agent.replay, self._experiment.run.final_updates):
            self._display.say(
                f"{lost:,} updates were due when the run was stopped and are not done: checkpoint_replay=False left "
                "nothing to learn them from."
            )
        return result

    def _ending(self, figures: dict[str, Any]) -> str:
        """A sentence on how a run ended that did not simply end."""
        if figures["complete"]:
            return f"the run was complete at {figures['env_steps']:,} steps"
        remedy = f"continue with {self._resume()}" if self._directory else "nothing was kept, for want of a run_dir"
        return f"stopped by {self._requests.cause()} at {figures['env_steps']:,} steps; {remedy}"


def _numbers(state: RunState) -> dict[str, np.ndarray]:
    """The tunable numbers of the members as they are now, [P] by name."""
    return {name: np.asarray(value) for name, value in state.learner.hyper.items()}
