"""The result of a run: the trained agent, its history, and what to do with them."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agents.registry import PLANNERS, make_agent, make_planner
from podracer.environments.seeds import check_seed
from podracer.evaluation import evaluation, players, rendering
from podracer.result import explainer, explanation, members, plots, report
from podracer.result import export as exports
from podracer.result import policy as policies
from podracer.run import checkpoint, metrics
from podracer.run.best import SNAPSHOTS
from podracer.run.record import Experiment
from podracer.search.search import SearchConfig, SearchResult
from podracer.types import ActorParams, ArrayTree, LearnerState, TimeStep


class Result:
    """A trained agent with its history: the result of `train` and `load`.

    Attributes:
      agent: the agent.
      environment: the environment of its training.
      learner: the LearnerState, leading dim [population].
      history: metric rows; of more than 20,000, an evenly spread part with the best evaluation and the newest rows. The
        run directory's metrics.jsonl has all.
      summary: figures of the run, as in `summary.json`.
      run_dir: directory of its files, or None.
      description: the resolved configuration, as in `config.json`.
    """

    def __init__(
        self, experiment: Experiment, learner: LearnerState, history: list[metrics.Row], run_dir: pathlib.Path | None
    ):
        self.agent = experiment.agent
        self.environment = experiment.environment
        self.description = experiment.description
        self.learner = learner
        self._network = experiment.network
        self.history = history
        self.run_dir = run_dir
        self.summary: dict[str, Any] = {}
        self._evaluators: dict[tuple[int, bool | None], evaluation.Evaluator] = {}
        self._policies: dict[tuple[bool, int, int], policies.Policy] = {}
        self._actors: dict[int, policies.Actor] = {}
        self._searches: dict[SearchConfig, Callable[[ActorParams, Any], SearchResult]] = {}

    @property
    def population(self) -> int:
        return self.description["run"]["population"]

    @property
    def best_member(self) -> int:
        """The member with the best newest evaluation, or 0 without one; the default member everywhere."""
        return metrics.best_member(self.history)

    def actor_params(self, member: int | None = None, *, step: int | None = None) -> ActorParams:
        """The parameters that acting needs, of one member; of the best one if None.

        Args:
          member: number of a population's member; the best one if None.
          step: one of the `snapshots`; the result's own parameters if None.

        Raises:
          ValueError: if there is no such member or snapshot.
          CheckpointError: if the snapshot cannot be read.
        """
        member = self._member(member)
        if step is None:
            learner = jax.tree.map(lambda x: x[member], self.learner)
            return self.agent.actor_params(learner, jnp.float32(1.0))
        like = jax.vmap(self.agent.actor_params)(self.learner, jnp.ones(self.population))
        with contextlib.closing(self._snapshots()) as checkpoints:
            _, params, _ = checkpoints.restore(like, step)
        return jax.tree.map(lambda x: x[member], params)

    def snapshots(self) -> list[int]:
        """Steps at which the run directory has acting parameters, oldest first: ten for a game's run, none for
        others."""
        if self.run_dir is None:
            return []
        with contextlib.closing(self._snapshots()) as checkpoints:
            return checkpoints.steps()

    def _snapshots(self) -> checkpoint.Checkpoints:
        if self.run_dir is None:
            raise ValueError("this result has no run directory, and so no snapshots.")
        return checkpoint.Checkpoints(self.run_dir, name=SNAPSHOTS, read_only=True)

    def _member(self, member: int | None) -> int:
        if member is None:
            return self.best_member
        if not 0 <= member < self.population:
            raise ValueError(f"member={member}: this run has members 0 to {self.population - 1}.")
        return member

    def evaluate(
        self, episodes: int = 128, *, seed: int = 0, member: int | None = None, greedy: bool | None = None
    ) -> evaluation.Evaluation:
        """Plays whole episodes with the trained policy.

        Args:
          episodes: how many to play.
          seed: seed of the episodes.
          member: number of the policy's member; the best one if None.
          greedy: True takes the best actions, False samples, as in training; None acts as in the run's own evaluations.

        Raises:
          ValueError: if there is no such member or seed, or no episode to play.
        """
        if episodes < 1:
            raise ValueError(f"episodes={episodes}: must be at least 1.")
        check_seed(seed)
        if (episodes, greedy) not in self._evaluators:
            agent = self.agent if greedy is None else policies.with_actions(self.agent, greedy)
            self._evaluators[episodes, greedy] = evaluation.Evaluator(
                agent, self.environment, episodes, self.description["run"].get("env_timeout", 60.0)
            )
        params = jax.tree.map(lambda x: x[None], self.actor_params(member))
        return self._evaluators[episodes, greedy](params, np.asarray([seed], np.int32))[0]

    def actor(
        self, batch: int | None = None, *, greedy: bool = True, member: int | None = None, seed: int = 0
    ) -> policies.Actor:
        """An actor that follows the trained policy, with a memory of its own.

        Args:
          batch: lanes that act together; None for one environment, whose observations have no dim for lanes.
          greedy: True takes the best actions, without random ones; False samples, as in training.
          member: number of the policy's member; the best one if None.
          seed: seed of the samples.
        """
        return policies.Actor(self._policy(greedy, member, seed), batch)

    def player(
        self,
        name: str = "",
        *,
        simulations: int | None = None,
        search: str | None = None,
        member: int | None = None,
        step: int | None = None,
    ) -> players.Player:
        """The trained agent as a player of a game, for `podracer.evaluation.matches`; it acts as in evaluation.

        Args:
          name: the player's name in tables; the agent's name if empty.
          simulations: simulations of its search; as in training if None, and 0 for the network's most likely move.
          search: "puct" or "gumbel"; as in training if None.
          member: number of a population's member; the best one if None.
          step: one of the `snapshots`; the result's own parameters if None.

        Raises:
          ValueError: if the environment is no game, there is no such snapshot, or settings of a search are given for an
            agent that does not search, or that was not made by name.
        """
        agent = self.agent
        if simulations is not None or search is not None:
            option = f"simulations={simulations}" if search is None else f"search={search!r}"
            if agent.name not in PLANNERS:
                raise ValueError(f"{option}: {agent.name} does not search; leave it out.")
            if "agent" in self.description["own"]:
                raise ValueError(f"{option} needs an agent that is given to train() by its name, for it makes it anew.")
            if simulations is not None and simulations < 0:
                raise ValueError(f"{option}: must be at least 0, which is the network's most likely move.")
        players.check(self.environment)
        if simulations is not None or search is not None:
            settings = {"simulations": simulations, "search": search}
            if simulations == 0:  # PUCT's only simulation goes where the prior says
                settings = {"simulations": 1, "search": "puct"}
            settings = {name: value for name, value in settings.items() if value is not None}
            agent = make_agent(
                agent.name, self.environment, dataclasses.replace(agent.config, **settings), self._network
            )
        return players.from_agent(agent, self.actor_params(member, step=step), name or agent.name)

    def policy(self, observation: ArrayTree, *, member: int | None = None) -> Any:
        """The greedy action for one observation: an int if actions are `Discrete`, else a NumPy array.

        Raises:
          ValueError: for a policy that depends on more than one observation (see `actor`), or an observation that the
            environment could not show.
        """
        member = self._member(member)
        if member not in self._actors:
            self._actors[member] = self.actor(member=member)
        actor = self._actors[member]
        if actor.policy.remembers:
            raise ValueError(
                "this policy depends on more than the observation at hand (earlier ones, actions or rewards): "
                "use actor = result.actor(), and actor(observation, reward) for every step of an episode."
            )
        actor.reset()
        return actor(observation)

    def explain(
        self,
        observation: ArrayTree | TimeStep,
        *,
        simulations: int | None = None,
        search: Literal["puct", "gumbel"] | None = None,
        member: int | None = None,
    ) -> explanation.Explanation:
        """Explains the agent's search at one observation, without noise: numbers, a line of play, pictures.

            game = result.environment
            print(result.explain(game.observe(game.start())))

        Args:
          observation: one, without a dim for lanes, or a TimeStep with it; frames stacked as the network sees them.
          simulations: simulations of the search; as in training if None.
          search: "puct" or "gumbel"; as in training if None.
          member: number of a population's member; the best one if None.

        Raises:
          ValueError: for an agent that does not search, or that was not made by name, and an observation that the
            environment could not show.
        """
        if "agent" in self.description["own"]:
            raise ValueError("explain() needs an agent that is given to train() by its name, for it makes it anew.")
        planner = make_planner(self.agent, self.environment, self._network)
        overrides = {"simulations": simulations, "algorithm": search}
        config = dataclasses.replace(
            planner.config, **{name: value for name, value in overrides.items() if value is not None}
        )
        observation = observation.observation if isinstance(observation, TimeStep) else observation
        row = policies.fit(planner.space, observation, None)
        if config not in self._searches:
            self._searches[config] = explainer.make_search(planner, config)
        found = self._searches[config](self.actor_params(member), row)
        board = observation["board"].shape[:2] if isinstance(observation, dict) and "board" in observation else None
        return explainer.from_search(
            found,
            config,
            title=f"{self.agent.name} on {self.description['env']}",
            look=explainer.board_renderer(self.environment, observation),
            board=board,
        )

    def export(self, directory: str | pathlib.Path, *, member: int | None = None, episodes: int = 128) -> pathlib.Path:
        """Writes the greedy policy as files that need none of the agent's code (see `podracer.result.export`).

        Args:
          directory: the directory to write.
          member: number of the policy's member; the best one if None.
          episodes: played for the score in the model card; 0 for none.

        Raises:
          ValueError: if the directory cannot be written.
        """
        score = self.evaluate(episodes, member=member, greedy=True) if episodes else None
        run = f"member {self._member(member)} of " if self.population > 1 else ""
        env_steps = max((row["env_steps"] for row in self.history), default=0)
        card = {
            "agent": self.agent.name,
            "environment": self.description["env"],
            "source": f"Trained for {env_steps:,} environment steps ({run}seed {self.description['run']['seed']}).",
            "evaluation": f"Mean {score} of the greedy policy." if score else None,
            "mean": score and score.mean,
        }
        return exports.save(self._policy(True, member), directory, card)

    def _policy(self, greedy: bool, member: int | None, seed: int = 0) -> policies.Policy:
        key = (greedy, self._member(member), seed)
        if key not in self._policies:
            spec, params = self.environment.spec, self.actor_params(member)
            self._policies[key] = policies.from_agent(self.agent, spec, params, greedy=greedy, seed=seed)
        return self._policies[key]

    def plot(self, path: str | pathlib.Path | None = None) -> plots.Picture:
        """Draws the learning curve; as `curve.png` in the run directory, or in a temporary one, by default.

        Returns:
          The path, which a notebook shows as the picture.

        Raises:
          ValueError: if there is nothing to draw yet.
        """
        path = path or plots.default_path(self.run_dir, "curve.png")
        return plots.learning_curve(self.curves(), path, title=f"{self.agent.name} on {self.description['env']}")

    def curves(self) -> dict[str, list[metrics.Row]]:
        """The rows of each line of the learning curve, by label: one line for each setting of a population."""
        return members.curves(members.from_run(self.description, self.history))

    def animate(
        self, path: str | pathlib.Path | None = None, *, seed: int = 0, member: int | None = None
    ) -> plots.Picture:
        """Writes a GIF of one episode, by the best actions. In a game for two the agent plays both sides.

        Args:
          path: the file's path; `policy.gif` in the run directory, or in a temporary one, if None.
          seed: seed of the episode.
          member: number of the policy's member; the best one if None.

        Returns:
          The path, which a notebook shows as the animation.

        Raises:
          ValueError: if the environment cannot be rendered, or there is no such seed.
        """
        check_seed(seed)
        agent = policies.with_actions(self.agent, True)
        images = rendering.frames(agent, self.environment, self.actor_params(member), seed)
        speed = 1.5 if self.environment.spec.num_players == 2 else 15.0  # moves are to be followed
        return plots.animation(images, path or plots.default_path(self.run_dir, "policy.gif"), speed)

    def frame(self) -> Any:
        """The history as a pandas DataFrame: a row for each update and member, with their settings and all metrics.

            result.frame().pivot(index="updates", columns="member", values="episode/return")

        Returns:
          Columns `updates`, `member`, `seed`, `env_steps`, one for each tunable number, and one for each metric (NaN
          where a row has none). Members share their updates; their steps differ.

        Raises:
          ImportError: if pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise ImportError("frame() needs pandas: pip install pandas.") from None
        return pandas.DataFrame(members.table(members.from_run(self.description, self.history), list(self.agent.hyper)))

    def __repr__(self) -> str:
        return f"<Result: {report.line(self)}>"

    def __str__(self) -> str:
        return report.sentence(self)

    def _repr_html_(self) -> str:
        return report.as_html(self)
