"""A trained policy, and an actor that follows it with a memory of its own.

    actor = result.actor()                    # for one environment; actor(batch=256) for many
    action = actor(observation)               # the first call opens an episode
    action = actor(observation, reward)       # and so on, until it ends:
    actor.reset()                             # the next observation opens another one

The same actor comes from files that need none of the agent's code: `podracer.load_policy` (`podracer.result.export`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer import spaces
from podracer.environments import gate
from podracer.environments.seeds import check_seed
from podracer.types import ActorParams, Agent, ArrayTree, EnvSpec, TimeStep

Memory = tuple[Any, ...]
"""The memory that later actions depend on: a flat tuple of arrays [b, ...], empty if an action depends on its
observation alone. Where actions depend on chance, the first one is the data of the next random key, without a dim for
lanes."""


MASK = "action_mask"
"""The name that `podracer.nets.action_masks` has, too: exports are loaded without networks."""


class Policy(NamedTuple):
    """A policy: functions that choose actions, with the learnt parameters inside.

    Attributes:
      spec: the environment's; of a `Dict` of observations it has only members that actions depend on.
      start: `(b) -> Memory`, before an episode.
      step: `(Memory, observation [b, ...], reward float32 [b], first bool [b]) -> (action [b, ...], Memory)`; jitted.
        Rewards of `first` rows do not count.
      uses_reward: True if actions depend on rewards.
      deterministic: True if actions do not depend on chance.
    """

    spec: EnvSpec
    start: Callable[[int], Memory]
    step: Callable[[Memory, ArrayTree, Any, Any], tuple[ArrayTree, Memory]]
    uses_reward: bool
    deterministic: bool = True

    @property
    def remembers(self) -> bool:
        """True if an action depends on anything but its observation."""
        return self.uses_reward or bool(jax.eval_shape(lambda: self.start(1)))


def with_actions(agent: Agent, greedy: bool) -> Agent:
    """The agent with an `act` that always takes its best actions, or if not `greedy`, samples as in training."""

    def act(params: ActorParams, memory: Any, row: TimeStep, key: jax.Array, evaluation: bool) -> Any:
        del evaluation
        if greedy and agent.best is not None:
            action, memory = agent.best(params, memory, row)
            return action, (), memory
        return agent.act(params, memory, row, key, greedy)

    return agent._replace(act=act)


def from_agent(agent: Agent, spec: EnvSpec, params: ActorParams, *, greedy: bool = True, seed: int = 0) -> Policy:
    """An agent's policy: its best actions, or samples, as in training.

    The best actions are those of an evaluation without `evaluation_epsilon`.

    The memory has only leaves on which actions depend: PPO's running return, for one, is left out. So are members of
    observations that the value alone sees. Parameters are constants of the program: passing fourteen arrays of a small
    network takes longer than its layers do.

    Args:
      agent: the agent.
      spec: the environment's.
      params: the agent's parameters.
      greedy: True takes the best actions, False samples.
      seed: seed of the samples.

    Raises:
      ValueError: if there is no such seed.
    """
    check_seed(seed)

    def act(leaves: Sequence[Any], observation: Any, reward: Any, first: Any, key: Any) -> Any:
        memory = jax.tree.unflatten(structure, leaves)
        reward = jnp.where(first, 0.0, reward)
        row = TimeStep(observation, reward, jnp.ones_like(reward), first, jnp.zeros_like(first))
        action, _, memory = agent.act(params, memory, row, key, greedy)
        return action, jax.tree.leaves(memory)

    def begin(b: int) -> list[Any]:
        return jax.tree.leaves(agent.start(jnp.arange(b, dtype=jnp.int32), b))

    agent = with_actions(agent, greedy)
    key = jax.random.key(0)
    fresh = begin(1)  # what nothing depends on may stay as it was
    structure = jax.tree.structure(jax.eval_shape(lambda: agent.start(jnp.zeros(1, jnp.int32), 1)))
    leaf_indices, seen, uses_reward, uses_chance = _dependencies(act, begin, spec, key)
    spec, unseen = _divide(spec, seen)

    def start(b: int) -> Memory:
        leaves = begin(b)
        return (
            *((jax.random.key_data(jax.random.key(seed)),) if uses_chance else ()),
            *(leaves[i] for i in leaf_indices),
        )

    @jax.jit
    def step(memory: Memory, observation: Any, reward: Any, first: Any) -> Any:
        leaves, b = [jnp.broadcast_to(x, (first.shape[0], *x.shape[1:])) for x in fresh], first.shape[0]
        if unseen:
            zeros = {name: jax.tree.map(lambda x: jnp.zeros((b, *x.shape), x.dtype), x) for name, x in unseen.items()}
            observation = {**zeros, **{name: observation[name] for name in seen}}
        act_key, rest = key, ()
        if uses_chance:
            (data, *memory) = memory  # type: ignore[assignment]
            after, act_key = jax.random.split(jax.random.wrap_key_data(data))
            rest = (jax.random.key_data(after),)
        for i, x in zip(leaf_indices, memory):
            leaves[i] = x
        action, leaves = act(leaves, observation, reward, first, act_key)
        return action, (*rest, *(leaves[i] for i in leaf_indices))

    return Policy(spec, start, step, uses_reward, not uses_chance)


def _dependencies(
    act: Any, begin: Callable[[int], list[Any]], spec: EnvSpec, key: jax.Array
) -> tuple[list[int], set[str], bool, bool]:
    """Finds the leaves of the memory and the members of observations that later actions depend on, and if they depend
    on rewards and on the key."""
    observation = jax.tree.map(lambda x: x[None], spaces.zeros(spec.observation_space))
    closed, shapes = jax.make_jaxpr(act, return_shape=True)(
        begin(1), observation, jnp.zeros(1), jnp.zeros(1, bool), key
    )
    sources = _sources(closed.jaxpr)
    num_actions, num_leaves = len(jax.tree.leaves(shapes[0])), len(shapes[1])
    needed = frozenset().union(*sources[:num_actions])
    while True:
        closure = needed.union(*(sources[num_actions + i] for i in range(num_leaves) if i in needed))
        if closure == needed:
            break
        needed = closure
    paths = [path for path, _ in jax.tree.leaves_with_path(observation)]
    seen = {path[0].key for i, path in enumerate(paths, num_leaves) if i in needed and path}
    reward = num_leaves + len(paths)
    return [i for i in range(num_leaves) if i in needed], seen, reward in needed, reward + 2 in needed


def _divide(spec: EnvSpec, seen: set[str]) -> tuple[EnvSpec, dict[str, ArrayTree]]:
    """The spec with the members of observations that are seen, and examples of the others; where none is, all are."""
    space = spec.observation_space
    if not isinstance(space, spaces.Dict) or not seen:
        return spec, {}
    members = spaces.Dict({name: item for name, item in space.items if name in seen})
    return spec._replace(observation_space=members), {
        name: spaces.zeros(item) for name, item in space.items if name not in seen
    }


def _sources(jaxpr: Any) -> list[frozenset[int]]:
    """The indices of the arguments on which each result of a jaxpr may depend."""
    known = {variable: frozenset([i]) for i, variable in enumerate(jaxpr.invars)}
    of = lambda atom: frozenset() if hasattr(atom, "val") else known.get(atom, frozenset())  # noqa: E731
    for equation in jaxpr.eqns:
        arguments = [of(atom) for atom in equation.invars]
        if equation.primitive.name in ("jit", "pjit"):
            inner = _sources(equation.params["jaxpr"].jaxpr)
            results = [frozenset().union(*(arguments[i] for i in each)) for each in inner]
        else:
            results = [frozenset().union(*arguments)] * len(equation.outvars)
        known.update(zip(equation.outvars, results))
    return [of(atom) for atom in jaxpr.outvars]


class Actor:
    """Follows a policy in one environment, or in a batch of them, with a memory of its own.

    Args:
      policy: the policy to follow.
      batch: lanes B that act together; None for one, without a dim for lanes.

    Attributes:
      policy: the policy.
    """

    def __init__(self, policy: Policy, batch: int | None = None):
        if batch is not None and batch < 1:
            raise ValueError(f"batch={batch}: must be at least 1, or None for one environment without a batch.")
        self.policy, self._single, self._lanes = policy, batch is None, batch or 1
        self._no, self._yes = np.zeros(self._lanes, bool), np.ones(self._lanes, bool)
        self._no_reward = np.zeros(self._lanes, np.float32)
        self._plain = isinstance(policy.spec.action_space, spaces.Discrete)
        self._memory = policy.start(self._lanes)
        self.reset()

    def reset(self) -> None:
        """Makes the next observations open episodes."""
        self._opens = True

    def __call__(self, observation: ArrayTree, reward: Any = None, first: Any = None) -> Any:
        """The actions for the environments' observations.

        Args:
          observation: the environment's observation, also in its own form (`environments.gate`); [B, ...] for a batch.
            A mask of actions may have the axes that the environment shows.
          reward: the reward that arrived with it, a number or [B]; needed by policies that see rewards, but not on
            first rows.
          first: True if the observation opens an episode, bool or [B]; if None, only the first call and those after
            `reset()` do.

        Returns:
          A NumPy array of the action space's shape and dtype, [B, ...] of a batch; for one `Discrete` action, an int.
          Choices are counted from the space's `start`, as the environment does.

        Raises:
          ValueError: for observations that the environment could not show, a wrong number of lanes, or a reward that
            is missing.
        """
        policy = self.policy
        row = fit(policy.spec.observation_space, observation, None if self._single else self._lanes)
        first = self._firsts(first)
        rewards = self._no_reward
        if policy.uses_reward and first is not self._yes:
            if reward is None:
                raise ValueError("this policy sees rewards: actor(observation, reward), but for first observations.")
            rewards = np.broadcast_to(np.asarray(reward, np.float32), (self._lanes,))
        action, self._memory = policy.step(self._memory, row, rewards, first)
        self._opens = False
        action = gate.to_environment(np.array(action), policy.spec.action_space)
        if not self._single:
            return action
        return int(action[0]) if self._plain else action[0]

    def _firsts(self, first: Any) -> np.ndarray:
        if self._opens:
            return self._yes
        if first is None or first is False:
            return self._no
        firsts = np.asarray(first, bool)
        if firsts.shape != (() if self._single else (self._lanes,)):
            raise ValueError(f"first has shape {list(firsts.shape)}; this actor has {self._describe_lanes()}.")
        return self._yes if firsts.all() else firsts.reshape(self._lanes)

    def _describe_lanes(self) -> str:
        return "one lane without a batch" if self._single else f"a batch of {self._lanes}"


def fit(space: spaces.Space, value: Any, lanes: int | None) -> Any:
    """Converts an observation to arrays [b, ...] in the agent's dtypes and shapes; without lanes, b is 1.

    Raises:
      ValueError: for one that the environment could not show.
    """
    lead = () if lanes is None else (lanes,)
    row = gate.to_agent(_with_flat_mask(value, space, lead), space, lead)
    return row if lanes is not None else jax.tree.map(lambda x: x[None], row)


def _with_flat_mask(value: Any, space: spaces.Space, lead: tuple[int, ...]) -> Any:
    """The observation with its mask of actions as [*lead, P], whatever axes the environment gives it."""
    members: dict[str, Any] = dict(space.items) if isinstance(space, spaces.Dict) else {}
    if MASK not in members or not isinstance(value, Mapping) or MASK not in value:
        return value
    mask, shape = np.asarray(value[MASK]), (*lead, *members[MASK].shape)
    fits = mask.shape[: len(lead)] == lead and mask.size == math.prod(shape)
    return {**value, MASK: mask.reshape(shape)} if fits else value
