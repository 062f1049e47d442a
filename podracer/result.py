"""What a run leaves behind: the trained agent, its history, and what to do with them."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.run import evaluation, members, metrics, plots, report
from podracer.run.experiment import Experiment
from podracer.types import ActorParams, ArrayTree, LearnerState, TimeStep


class Result:
    """A trained agent with its history: what `train` and `load` return.

    Attributes:
      agent: the agent.
      environment: what it was trained on.
      learner: the LearnerState, leading dim [population].
      history: metric rows.
      summary: figures of the run, as in `summary.json`.
      run_dir: where its files are, or None.
      description: the resolved configuration, as in `config.json`.
    """

    def __init__(
        self, experiment: Experiment, learner: LearnerState, history: list[metrics.Row], run_dir: pathlib.Path | None
    ):
        self.agent = experiment.agent
        self.environment = experiment.environment
        self.description = experiment.description
        self.learner = learner
        self.history = history
        self.run_dir = run_dir
        self.summary: dict[str, Any] = {}
        self._evaluators: dict[int, evaluation.Evaluator] = {}

    @property
    def population(self) -> int:
        return self.description["run"]["population"]

    def actor_params(self, member: int = 0) -> ActorParams:
        """What acting needs, of one member."""
        self._check_member(member)
        learner = jax.tree.map(lambda x: x[member], self.learner)
        return self.agent.actor_params(learner, jnp.float32(1.0))

    def _check_member(self, member: int) -> None:
        if not 0 <= member < self.population:
            raise ValueError(f"member={member}: this run has members 0 to {self.population - 1}.")

    def evaluate(self, episodes: int = 128, *, seed: int = 0, member: int = 0) -> evaluation.Evaluation:
        """Plays whole episodes with the greedy policy."""
        if episodes < 1:
            raise ValueError(f"episodes={episodes}: must be at least 1.")
        if episodes not in self._evaluators:
            self._evaluators[episodes] = evaluation.Evaluator(self.agent, self.environment, episodes)
        params = jax.tree.map(lambda x: x[None], self.actor_params(member))
        return self._evaluators[episodes](params, np.asarray([seed], np.int32))[0]

    def policy(self, observation: ArrayTree, *, member: int = 0) -> Any:
        """The greedy action for one observation.

        Raises:
          ValueError: for a recurrent agent, which needs the whole episode (see `agent.act`), or an observation that
            the environment could not show.
        """
        if self.agent.recurrent:
            raise ValueError("this agent remembers earlier rows; drive it with agent.start and agent.act instead.")
        self._check_member(member)
        space = self.environment.spec.observation_space
        row = jax.tree.map(functools.partial(_fit, space), spaces.zeros(space), observation)
        return jax.tree.map(np.asarray, self._greedy_action(self.learner, member, row))

    @functools.cached_property
    def _greedy_action(self) -> Callable[..., ArrayTree]:
        agent = self.agent

        def act(learner: LearnerState, member: jax.Array, row: ArrayTree) -> ArrayTree:
            params = agent.actor_params(jax.tree.map(lambda x: x[member], learner), jnp.float32(1.0))
            yes, no = jnp.ones(1, bool), jnp.zeros(1, bool)
            step = TimeStep(jax.tree.map(lambda x: x[None], row), jnp.zeros(1), jnp.ones(1), yes, no)
            action, _, _ = agent.act(params, agent.start(jnp.zeros(1, jnp.int32), 1), step, jax.random.key(0), True)
            return jax.tree.map(lambda x: x[0], action)

        return jax.jit(act)

    def plot(self, path: str | pathlib.Path | None = None) -> plots.Picture:
        """Draws the learning curve; as `curve.png` in the run directory, or in a temporary one, by default.

        Returns:
          The path, which a notebook shows as the picture.

        Raises:
          ValueError: where there is nothing to draw yet.
        """
        path = path or plots.default_path(self.run_dir, "curve.png")
        return plots.learning_curve(self.curves(), path, title=f"{self.agent.name} on {self.description['env']}")

    def curves(self) -> dict[str, list[metrics.Row]]:
        """The rows of each line of the learning curve, by label: one line for each setting of a population."""
        return members.curves(members.of(self.description, self.history))

    def animate(self, path: str | pathlib.Path | None = None, *, seed: int = 0, member: int = 0) -> plots.Picture:
        """Writes a GIF of one greedy episode; as `policy.gif` in the run directory, or in a temporary one, by default.

        Returns:
          The path, which a notebook shows as the animation.

        Raises:
          ValueError: where the environment cannot be rendered.
        """
        images = evaluation.frames(self.agent, self.environment, self.actor_params(member), seed)
        return plots.animation(images, path or plots.default_path(self.run_dir, "policy.gif"))

    def frame(self) -> Any:
        """The history as a pandas DataFrame: a row for each update and member, with their settings and all metrics.

            result.frame().pivot(index="updates", columns="member", values="episode/return")

        Returns:
          Columns `updates`, `member`, `seed`, `env_steps`, one for each tunable number, and one for each metric (NaN
          where a row has none). Members share their updates; their steps differ.

        Raises:
          ImportError: where pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise ImportError("frame() needs pandas: pip install pandas.") from None
        return pandas.DataFrame(members.table(members.of(self.description, self.history), list(self.agent.hyper)))

    def __repr__(self) -> str:
        return f"<Result: {report.line(self)}>"

    def __str__(self) -> str:
        return report.sentence(self)

    def _repr_html_(self) -> str:
        return report.as_html(self)


def _fit(space: spaces.Space, expected: jax.Array, value: Any) -> np.ndarray:
    """A part of an observation as an array of the dtype and shape that the environment shows."""
    array = np.asarray(value)
    if array.shape != expected.shape or not np.can_cast(array.dtype, expected.dtype, "same_kind"):
        raise ValueError(f"the observation holds {array.dtype} {array.shape}; the environment shows {space}.")
    return array.astype(expected.dtype)
