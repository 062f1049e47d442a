"""The evaluations of a run: what process 0 plays at some steps, and the rows that all processes keep of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from podracer import configs
from podracer.atari.scores import of_returns
from podracer.errors import Closed
from podracer.evaluation import evaluation
from podracer.run import metrics
from podracer.run.driver import RunState, crossed, local_learner, num_updates
from podracer.run.record import Experiment
from podracer.topology.processes import Processes
from podracer.training.callback import StopRequests
from podracer.types import ActorParams


class Evaluations:
    """Evaluates the members of a run, writes the rows, and says what people should know of them.

    Args:
      experiment: the run.
      log: takes the rows.
      display: takes what is said.
      requests: where a signal comes, an evaluation ends.
      processes: those that share the run.
      scores: the evaluations so far, as (steps, score).

    Attributes:
      at: steps of the newest evaluation; -1 before the first.
      newest: the newest evaluation of each member; empty before the first of this part of the run.
      diverged: members whose parameters were not finite at the newest one, bool [P].
      cut: True once a signal has ended an evaluation.
    """

    def __init__(
        self,
        experiment: Experiment,
        log: metrics.Log,
        display: metrics.Display,
        requests: StopRequests,
        processes: Processes,
        scores: Sequence[tuple[int, float]],
    ):
        run, spec = experiment.run, experiment.environment.spec
        self._experiment, self._log, self._display, self._processes = experiment, log, display, processes
        self._evaluator = evaluation.Evaluator(
            experiment.agent,
            experiment.environment,
            run.eval_episodes,  # type: ignore[arg-type]
            run.env_timeout,
            run.env_restarts,
            requests.signalled,
            evaluation.step_limit(spec, run.eval_episodes, run.eval_every),  # type: ignore[arg-type]
        )
        self._said_endless = False
        self.at = max((steps for steps, _ in scores), default=-1)
        self.newest: list[evaluation.Evaluation] = []
        self.diverged = np.zeros(run.population, bool)
        self.cut = False

    def prepare(self, state: RunState) -> None:
        """Begins to compile the evaluation of such states, in a thread.

        Not in a pod: its processes gather the parameters together.
        """
        if self._processes.count == 1:
            self._evaluator.prepare(actor_params(self._experiment, state), self._experiment.run.population)

    def are_due(self, env_steps: int) -> bool:
        """True where a multiple of `eval_every` was passed since the newest one."""
        return crossed(self.at, env_steps, self._experiment.run.eval_every)

    def evaluate(self, state: RunState, env_steps: int) -> float | None:
        """Plays the episodes of one evaluation.

        Returns:
          The best member's mean return. None where nobody is to be compared by it: the evaluation was cut, its rows
          were there already, or all members have diverged.
        """
        own = local_learner(state)
        self._say_diverged(own)
        results = self._results(actor_params(self._experiment, state))
        if not results:
            self.cut = True
            return None
        self.newest = results
        mean = np.mean([result.mean for result in results])
        cut = evaluation.cut(results)
        self._display.detail(f"{env_steps:>12,} steps   evaluation return {mean:.3f}{cut}")
        self._say_endless(cut)
        if self.at == env_steps:
            return None  # a finished run that was resumed: its rows are there
        self.at = env_steps
        self._write(env_steps, num_updates(own))
        finite = [result.mean for result, bad in zip(results, self.diverged) if not bad]
        return max(finite, default=None)

    def _results(self, params: ActorParams) -> list[evaluation.Evaluation]:
        """The evaluations by process 0 on its own device, in all processes; none if it was to stop meanwhile."""
        if not self._processes.is_first:
            return [evaluation.of(told) for told in self._processes.broadcast()]
        try:
            found = self._evaluator(params, self._experiment.seeds)
        except Closed:
            found = []
        self._processes.broadcast([configs.to_json(dataclasses.asdict(one)) for one in found])
        return found

    def _write(self, env_steps: int, updates: int) -> None:
        """Writes a row for each member; one that has diverged has no score, but its place in the history."""
        for member, result in enumerate(self.newest):
            row: metrics.Row = {"env_steps": env_steps, "updates": updates}
            if self._experiment.run.population > 1:
                row["member"] = member
            if not self.diverged[member]:
                row |= {"eval/return_mean": result.mean, "eval/return_std": result.std}
                row |= {"eval/episodes": result.episodes, "eval/unfinished": result.unfinished}
                returns = {name: task.mean for name, task in result.tasks.items()}
                row |= {f"eval/return/{name}": value for name, value in returns.items()}
                scores = of_returns(returns) if returns else {}
                row |= {f"eval/score/{name}": float(value) for name, value in scores.items()}
            self._log.write(row)

    def _say_diverged(self, own: RunState) -> None:
        """Says which members have diverged since the last evaluation."""
        diverged = _not_finite(own)
        for member in np.flatnonzero(diverged & ~self.diverged):
            seed = self._experiment.seeds[member]
            then = "it is replaced as soon as the rule lets it" if self._experiment.pbt else "others go on"
            self._display.say(f"member {member} (seed {seed}) has diverged: its parameters are not finite; {then}")
        self.diverged = diverged

    def _say_endless(self, cut: str) -> None:
        """Says once that episodes do not end, and what to do."""
        if not cut or self._said_endless:
            return
        self._said_endless = True
        ended = any(row.get("episode/count") for row in self._log.rows)
        training = "" if ended else "; in training none has ended either"
        self._display.say(
            f"{cut.removeprefix(', ')}: the evaluation's returns are those until then{training}. max_episode_steps (in "
            "env_options, or of EnvSpec) says how long an episode is."
        )


def actor_params(experiment: Experiment, state: RunState) -> ActorParams:
    """The parameters that act in evaluation, [P], on this process's first device."""
    learner = jax.device_put(local_learner(state).learner, jax.local_devices()[0])
    progress = np.ones(experiment.run.population, np.float32)  # as an array of JAX it takes two programs to make
    return jax.vmap(experiment.agent.actor_params)(learner, progress)  # type: ignore[arg-type]


def _not_finite(state: RunState) -> np.ndarray:
    """Members some of whose parameters are not finite numbers, bool [P]."""
    leaves = [x for x in jax.tree.leaves(state.learner.params) if jnp.issubdtype(x.dtype, jnp.inexact)]
    finite = [np.isfinite(jax.device_get(x)).reshape(x.shape[0], -1).all(axis=1) for x in leaves]
    return ~np.all(finite, axis=0)
