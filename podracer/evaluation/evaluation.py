"""Evaluation of a policy: whole episodes, every one counted.

Every lane plays exactly one episode: counting those that end first would favour short ones. Pure-JAX environments are
evaluated in one compiled program, host environments step by step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from podracer import topology
from podracer.atari.scores import of_returns
from podracer.environments import autoreset, tasks
from podracer.environments.seeds import first_seed
from podracer.evaluation import matches, players
from podracer.evaluation.failures import playing
from podracer.evaluation.watchdog import UnansweredError, Watch, watched
from podracer.run.driver import run_keys
from podracer.system import console
from podracer.topology import ahead
from podracer.types import ActorParams, Agent, ArrayTree, Environment, EnvSpec, HostEnvironments

DEFAULT_MAX_STEPS = 10_000
"""Rows after which an episode is cut if the environment does not bound its episodes."""

LEAST_MAX_STEPS = 1_000
"""The least of these limits in the evaluations of a run, however short it is."""


def step_limit(spec: EnvSpec, episodes: int, every: int) -> int:
    """Rows after which the episodes of a run's evaluations are cut.

    If the environment does not bound them, evaluations take no more steps than training.

    Args:
      spec: the environment's.
      episodes: number of episodes of an evaluation.
      every: training steps between evaluations.
    """
    return spec.max_episode_steps or min(DEFAULT_MAX_STEPS, max(LEAST_MAX_STEPS, every // episodes))


@dataclasses.dataclass(frozen=True, repr=False)
class Evaluation:
    """Returns of independent episodes.

    Attributes:
      returns: float32 [episodes]; undiscounted raw returns.
      lengths: float32 [episodes]; transitions.
      unfinished: number of episodes that were cut at the step limit; their return so far is counted.
      tasks: of several tasks, the evaluation of each by name; all have equally many episodes.
    """

    returns: np.ndarray
    lengths: np.ndarray
    unfinished: int
    tasks: dict[str, Evaluation] = dataclasses.field(default_factory=dict)

    @property
    def episodes(self) -> int:
        return len(self.returns)

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    @property
    def std(self) -> float:
        """The sample standard deviation over episodes (0 for one episode); of several tasks, that within them."""
        if self.tasks:
            return math.sqrt(np.mean([task.std**2 for task in self.tasks.values()]))
        return float(np.std(self.returns, ddof=1)) if self.episodes > 1 else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """A 95% interval for the mean (normal approximation over episodes)."""
        return _interval(self.mean, self.std, self.episodes)

    def __repr__(self) -> str:
        low, high = self.interval
        text = (
            f"return {self.mean:.3f} ± {self.std:.3f} (95% interval {low:.3f} to {high:.3f}, {self.episodes} episodes)"
        )
        text += f", {self.unfinished} cut at the step limit" if self.unfinished else ""
        return text + "".join(f"; {name}: {task.mean:.3f}" for name, task in self.tasks.items())


def of(fields: Mapping[str, Any]) -> Evaluation:
    """An evaluation from the JSON of `configs.to_json`."""
    arrays = {name: np.asarray(fields[name], np.float32) for name in ("returns", "lengths")}
    tasks = {name: of(task) for name, task in fields["tasks"].items()}
    return Evaluation(**arrays, unfinished=fields["unfinished"], tasks=tasks)


def together(tasks: Mapping[str, Evaluation]) -> Evaluation:
    """Joins the evaluations of several tasks, of equally many episodes each."""
    found = list(tasks.values())
    returns, lengths = (np.concatenate([getattr(one, name) for one in found]) for name in ("returns", "lengths"))
    return Evaluation(returns, lengths, sum(one.unfinished for one in found), dict(tasks))


def cut(evaluations: Sequence[Evaluation]) -> str:
    """`, 3 of 4 episodes cut at 1,000 steps`, or "" if all have ended."""
    unfinished, played = (sum(getattr(e, name) for e in evaluations) for name in ("unfinished", "episodes"))
    longest = int(max(e.lengths.max() for e in evaluations))
    return f", {unfinished} of {played} episodes cut at {longest:,} steps" if unfinished else ""


def _interval(mean: float, std: float, n: int) -> tuple[float, float]:
    half = 1.96 * std / math.sqrt(n)
    return mean - half, mean + half


def scores(evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """The fields of a run's summary about its evaluation; of several tasks, with the same of each in `tasks`.

    For several members, mean, deviation and interval are over the members' means, not over the best one's episodes: a
    sweep or several seeds are to show how members vary.
    """
    first = evaluations[0]
    if len(evaluations) == 1:
        mean, std, interval, spread = first.mean, first.std, first.interval, {}
    else:
        means = np.array([evaluation.mean for evaluation in evaluations])
        mean, std = float(means.mean()), float(means.std(ddof=1))
        interval = _interval(mean, std, len(means))
        spread = {"eval_return_range": [float(means.min()), float(means.max())]}
    return {
        "eval_return_mean": mean,
        "eval_return_std": std,
        "eval_return_interval": list(interval),
        "eval_episodes": first.episodes,
        "eval_unfinished": sum(evaluation.unfinished for evaluation in evaluations),
        "eval_longest_episode": int(max(evaluation.lengths.max() for evaluation in evaluations)),
    } | (spread | _scores_of_tasks(evaluations))


def _scores_of_tasks(evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """Fields of each task, and scores where all have them; {} for a single task."""
    if not evaluations[0].tasks:
        return {}
    of_tasks = {name: scores([one.tasks[name] for one in evaluations]) for name in evaluations[0].tasks}
    found = of_returns({name: task["eval_return_mean"] for name, task in of_tasks.items()})
    score = {"score": {"table": "atari57"} | {name: float(value) for name, value in found.items()}} if found else {}
    return {"tasks": of_tasks} | score


class Evaluator:
    """Plays whole episodes as an agent acts in evaluation; games for two are against random moves (`games`).

    Of several tasks it plays each by itself, as it would alone.

    Args:
      agent: the agent.
      environment: pure JAX, or host environments.
      episodes: how many to play at once; of each task.
      timeout: seconds that host environments may take to answer.
      restarts: number of restarts of an evaluation without an answer.
      should_stop: polled; True ends the evaluation.
      max_steps: rows after which an episode is cut; the environment's own, or `DEFAULT_MAX_STEPS`, if None.
    """

    def __init__(
        self,
        agent: Agent,
        environment: Environment | HostEnvironments,
        episodes: int,
        timeout: float = 60.0,
        restarts: int = 0,
        should_stop: Callable[[], bool] = lambda: False,
        max_steps: int | None = None,
    ):
        self._environment, self._timeout, self._restarts = environment, timeout, restarts
        self._should_stop = should_stop
        self._plays: dict[str, HostEvaluationFn | ahead.Program] = {}
        for name, one in tasks.alone(environment).items():
            limit = one.spec.max_episode_steps or max_steps if environment.spec.tasks else max_steps
            if isinstance(one, HostEnvironments):
                self._plays[name] = on_host(agent, one, episodes, limit)
            else:
                play = games if one.spec.num_players == 2 else functools.partial(make, max_steps=limit)
                title = f"evaluation {name}" if environment.spec.tasks else "evaluation"
                self._plays[name] = ahead.Program(title, _of_members(play(agent, one, episodes)))

    def prepare(self, params: ActorParams, population: int) -> None:
        """Begins to compile for parameters of these shapes; nothing for host environments."""
        for play in self._plays.values():
            if isinstance(play, ahead.Program):
                play.prepare(params, jax.ShapeDtypeStruct((population,), jnp.int32))

    def __call__(self, params: ActorParams, seeds: np.ndarray) -> list[Evaluation]:
        """Evaluates every member of a population.

        Args:
          params: leading dim [P].
          seeds: int [P]; the members' seeds.

        Raises:
          Closed: if it should stop.
          ActorError: if host environments do not answer.
        """
        while True:
            try:
                play = functools.partial(self._evaluate, params, seeds)
                return watched(play, self._environment.spec.name, self._should_stop, self._timeout)
            except UnansweredError as error:
                if not self._restarts:
                    raise
                self._restarts -= 1
                console.say(f"{error} Evaluating again ({self._restarts} restart(s) left).")

    def _evaluate(self, params: ActorParams, seeds: np.ndarray, watch: Watch) -> list[Evaluation]:
        found = [self._members(play, params, seeds, watch) for play in self._plays.values()]
        if not self._environment.spec.tasks:
            return found[0]
        return [together(dict(zip(self._plays, member))) for member in zip(*found)]

    def _members(
        self, play: HostEvaluationFn | ahead.Program, params: ActorParams, seeds: np.ndarray, watch: Watch
    ) -> list[Evaluation]:
        """Evaluates every member in one task."""
        if isinstance(play, ahead.Program):
            found = jax.device_get(play(params, np.asarray(seeds, np.int32)))
            return [summarize(*member) for member in zip(*found)]
        members = [jax.tree.map(lambda x, i=i: x[i], params) for i in range(len(seeds))]
        return [play(member, int(seed), watch) for member, seed in zip(members, seeds)]


def _of_members(play: Callable[[ActorParams, jax.Array], ArrayTree]) -> Callable[[ActorParams, jax.Array], ArrayTree]:
    """The jitted evaluation of members by their seeds."""

    def evaluate(params: ActorParams, seeds: jax.Array) -> ArrayTree:
        # Their keys are drawn in the program: each small function of its own takes a while to compile.
        return jax.vmap(lambda member, seed: play(member, run_keys(seed)[2]))(params, seeds)

    return jax.jit(evaluate, compiler_options=topology.evaluation_options(topology.platform()))


def make(
    agent: Agent, environment: Environment, episodes: int, max_steps: int | None = None
) -> Callable[[ActorParams, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]:
    """A jitted `(actor_params, key) -> (returns, lengths, finished)`, each [episodes], in a pure-JAX environment."""
    limit = max_steps or environment.spec.max_episode_steps or DEFAULT_MAX_STEPS

    def evaluate(params: ActorParams, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        reset_key, key = jax.random.split(key)
        lanes = jax.vmap(lambda k: autoreset.reset(environment, k))(jax.random.split(reset_key, episodes))
        memory = agent.start(jnp.arange(episodes, dtype=jnp.int32), episodes)

        def body(carry: Any) -> Any:
            lanes, memory, done, returns, lengths, key, t = carry
            key, act_key, env_key = jax.random.split(key, 3)
            action, _, memory = agent.act(params, memory, lanes.timestep, act_key, True)
            keys = jax.random.split(env_key, episodes)
            # A lane plays one episode only, so what would open the next does not matter.
            lanes = jax.vmap(functools.partial(autoreset.step, environment))(lanes, action, keys, lanes.env)
            returns = jnp.where(done, returns, lanes.episode_return)
            lengths = jnp.where(done, lengths, lanes.episode_length)
            return lanes, memory, done | lanes.timestep.last, returns, lengths, key, t + 1

        zeros = jnp.zeros(episodes)
        start = (lanes, memory, jnp.zeros(episodes, bool), zeros, zeros, key, jnp.int32(0))
        end = lax.while_loop(lambda carry: ~jnp.all(carry[2]) & (carry[6] < limit), body, start)
        return end[3], end[4], end[2]

    return jax.jit(evaluate)


def games(
    agent: Agent, environment: Environment, episodes: int
) -> Callable[[ActorParams, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]:
    """The same function for a game for two: returns are 1, 0 or -1 against random moves, from each seat in half of the
    games.

    A return of self-play belongs to neither player.
    """
    lanes = -(-episodes // 2)
    opponent = players.player(environment, "random")

    def evaluate(params: ActorParams, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        opening_key, first_key, second_key = jax.random.split(key, 3)
        player = players.from_agent(agent, params, agent.name)
        opened = matches.opened(environment, lanes, 0, opening_key)
        won, plies = matches.outcome(environment, player, opponent, *opened, first_key)
        lost, second_plies = matches.outcome(environment, opponent, player, *opened, second_key)
        returns, lengths = jnp.concatenate([won, -lost]), jnp.concatenate([plies, second_plies])
        return returns[:episodes], lengths[:episodes], jnp.ones(episodes, bool)

    return evaluate


class HostEvaluationFn(Protocol):
    """Plays episodes in host environments."""

    def __call__(self, params: ActorParams, seed: int, watch: Watch | None = None, /) -> Evaluation:
        """Plays them; `watch` is told of waits for the environments."""
        ...


def on_host(
    agent: Agent,
    environments: HostEnvironments,
    episodes: int,
    max_steps: int | None = None,
) -> HostEvaluationFn:
    """Makes a function that plays episodes in host environments."""
    limit = max_steps or environments.spec.max_episode_steps or DEFAULT_MAX_STEPS
    act = host_act(agent)

    @playing(environments.spec.name)
    def play(params: ActorParams, seed: int, watch: Watch | None = None) -> Evaluation:
        watch = watch or Watch()
        with watch.waiting():
            environment = environments.make(episodes, first_seed(seed, "evaluation"), evaluation=True)
        watch.wake = getattr(environment, "wake", None)
        memory = agent.start(jnp.arange(episodes, dtype=jnp.int32), episodes)
        key = run_keys(seed)[2]
        returns, lengths = np.zeros(episodes, np.float32), np.zeros(episodes, np.float32)
        playing, sign = np.ones(episodes, bool), np.ones(episodes, np.float32)
        try:
            with watch.waiting():
                lanes, step = environment.recv()
            while playing.any() and lengths.max() < limit:
                last = step.timestep.last
                watch.check()
                action, memory, key = act(params, memory, step.timestep, key)
                with watch.waiting():
                    environment.send(lanes, jax.tree.map(np.asarray, action))
                    lanes, step = environment.recv()
                if (broken := playing & step.timestep.first & ~last).any():  # an episode that begins again
                    returns[broken], lengths[broken], sign[broken] = 0.0, 0.0, 1.0
                returns += np.where(playing, sign * step.raw_reward, 0)
                if environments.spec.num_players == 2:
                    sign *= step.timestep.discount
                lengths += playing & ~step.timestep.first
                playing &= ~step.game_over
        finally:
            with watch.waiting():
                environment.close()
        return Evaluation(returns, lengths, int(playing.sum()))

    return play


def host_act(
    agent: Agent,
) -> Callable[[ActorParams, ArrayTree, Any, jax.Array], tuple[ArrayTree, ArrayTree, jax.Array]]:
    """A jitted `(params, memory, timestep, key) -> (actions, memory, key)` of acting in evaluation."""

    @jax.jit
    def act(params: ActorParams, memory: ArrayTree, timestep: Any, key: jax.Array) -> Any:
        key, act_key = jax.random.split(key)
        action, _, memory = agent.act(params, memory, jax.tree.map(jnp.asarray, timestep), act_key, True)
        return action, memory, key

    return act


def summarize(returns: ArrayTree, lengths: ArrayTree, finished: ArrayTree) -> Evaluation:
    """Device results of one `make` call as an `Evaluation`."""
    returns, lengths, finished = jax.device_get((returns, lengths, finished))
    return Evaluation(np.asarray(returns), np.asarray(lengths), int(np.sum(~finished)))
