"""The functions that agents share, and their bundle."""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from podracer import configs, distributions, nets, returns, spaces
from podracer.learning import optimizer as optimizers
from podracer.learning import resets, update
from podracer.topology import collectives
from podracer.types import (
    ActorParams,
    Agent,
    ArrayTree,
    Caution,
    EnvSpec,
    LearnerState,
    Metrics,
    ReplaySpec,
    TimeStep,
    Trajectory,
    check_one_player,
)

NONE_LEGAL = Caution(
    "mask/none_legal", 0.0, "in this share of steps action_mask has no legal action, and any of them may be taken"
)
"""A warning for runs in which an agent had to act where nothing is legal."""


class LossFn(Protocol):
    """An agent's loss, or the user's own in its place."""

    def __call__(self, *args: Any, **settings: Any) -> Any:
        """Computes what the agent's own `loss` documents, of the arguments that it documents."""


class MakeFn(Protocol):
    """The `make` of an agent."""

    def __call__(
        self,
        spec: Any,
        config: Any = None,
        network: Any = None,
        loss: LossFn | None = None,
        optimizer: optimizers.Own | None = None,
    ) -> Agent:
        """Makes the agent for an environment.

        Args:
          spec: the environment's `EnvSpec`; AlphaZero takes the environment.
          config: settings; the defaults if None.
          network: the user's own network (`podracer.nets.Network`) or model; the config's if None.
          loss: the user's own loss, called as the agent's own is, with metrics of any names.
          optimizer: the user's own optimiser; the config's if None.

        Raises:
          ValueError: for settings, or parts of the user's own, that do not fit the environment.
        """
        ...


def maker(
    name: str, config_class: type, loss: LossFn, two_players: bool = False
) -> Callable[[Callable[[Any, Any, Any, LossFn, Any], Agent]], MakeFn]:
    """Completes an agent's `make`, which then takes its arguments whole: defaults are filled in, players are counted.

    Args:
      name: of the agent.
      config_class: makes the default settings.
      loss: the agent's own.
      two_players: the agent can play against itself.
    """

    def complete(function: Callable[[Any, Any, Any, LossFn, Any], Agent]) -> MakeFn:
        default = loss

        @functools.wraps(function)
        def make(spec: Any, config: Any = None, network: Any = None, loss: Any = None, optimizer: Any = None) -> Agent:
            if not two_players:
                check_one_player(spec, name)
            config = config_class() if config is None else config
            if not isinstance(config, config_class):
                raise ValueError(f"agent {name!r} takes a {config_class.__name__}, not {type(config).__name__}.")
            return function(spec, config, network, loss or default, optimizer)

        # So that help() shows the arguments that may be left out.
        make.__signature__ = inspect.signature(make, follow_wrapped=False)  # type: ignore[attr-defined]
        return make

    return complete


@dataclasses.dataclass(frozen=True, eq=False)
class Functions(abc.ABC):
    """An agent's functions (see `podracer.types.Agent`); `bundle` makes the agent of them.

    Attributes:
      spec: of the environment.
      config: the agent's settings.
      network: `nets.Network`, or a model that is searched.
      optimizer: of the network's parameters.
      loss: of the agent, or the user's own.
    """

    spec: EnvSpec
    config: Any
    network: Any
    optimizer: update.OptimizerLike
    loss: LossFn

    def init(self, key: jax.Array, hyper: Mapping[str, jax.Array]) -> LearnerState:
        """The learner's state before its first update."""
        return self._begin(self.network.init(key), hyper)

    def _begin(self, params: ArrayTree, hyper: Mapping[str, jax.Array]) -> LearnerState:
        """The first state of parameters."""
        return update.init(params, self.optimizer, hyper, self.aux(params))

    def aux(self, params: ArrayTree) -> ArrayTree:
        """The part of the learner's first state beside its parameters, such as a target network."""
        return ()

    def optimized(self, learner: LearnerState) -> list[tuple[ArrayTree, ArrayTree]]:
        """The trees of parameters that the optimiser moves, each with its state."""
        return [(learner.params, learner.opt_state)]

    def actor_params(self, learner: LearnerState, progress: jax.Array) -> ActorParams:
        """The parameters that are published to actors."""
        return ActorParams(learner.params, learner.num_updates, self.actor_aux(learner, progress))

    def actor_aux(self, learner: LearnerState, progress: jax.Array) -> ArrayTree:
        """Numbers that acting needs beside the parameters, such as epsilon."""
        return ()

    def start(self, lanes: jax.Array, num_lanes: int) -> Any:
        """The memory of lanes before their first row: the network's. A model that is searched has frames alone."""
        network = self.network if isinstance(self.network, nets.Network) else nets.FRAME_STACKER
        return nets.start(network, self.spec, lanes.shape[0], self.config.frame_stack)

    @abc.abstractmethod
    def act(self, *args: Any) -> tuple[ArrayTree, ArrayTree, Any]: ...

    @abc.abstractmethod
    def learn(self, *args: Any) -> Any: ...

    def learning_rate(self, learner: LearnerState, progress: jax.Array) -> jax.Array | None:
        """`learning.update.learning_rate` by the config's schedule."""
        config = self.config
        return update.learning_rate(
            learner, progress, config.learning_rate_schedule, config.learning_rate_warmup, config.final_rate
        )

    def update(
        self, loss: update.Loss, learner: LearnerState, batch: Any, learning_rate: jax.Array | None, **how: Any
    ) -> tuple[LearnerState, Metrics, Any]:
        """`learning.update.apply` with the agent's optimiser; `how` are its further arguments."""
        return update.apply(loss, learner, batch, optimizer=self.optimizer, learning_rate=learning_rate, **how)

    def bundle(
        self,
        name: str,
        *,
        cautions: tuple[Caution, ...] = (),
        unused: tuple[str, ...] = (),
        **others: Any,
    ) -> Agent:
        """The agent of these functions.

        Args:
          name: of the agent.
          cautions: of its metrics.
          unused: tunable numbers that it does not use with its settings, beside those of its optimiser.
          others: further fields of the agent.

        Raises:
          ValueError: for a mask of actions that does not fit the actions, or resets that do not fit the network.
          OptimizerError: for an optimiser of the user's that does not fit.
        """
        nets.action_masks.check(self.spec)
        masked, learn = nets.action_masks.present(self.spec), self.learn
        if isinstance(self.config, resets.ResetConfig) and self.config.reset_interval:
            resets.check(self.config, jax.eval_shape(self.network.init, jax.random.key(0)))
            before = resets.updates_while_filling(others.get("replay"))
            learn = functools.partial(self._learn_with_resets, before)
        if masked:
            learn = functools.partial(self._learn_with_mask, learn)
        without = {*unused, *(set(optimizers.TUNABLE) - set(self.optimizer.uses))}
        hyper = {name: value for name, value in configs.tunables(self.config).items() if name not in without}
        if isinstance(self.optimizer, optimizers.Optimizer) and self.optimizer.own:
            numbers = {name: jnp.float32(value) for name, value in hyper.items()}
            learner = jax.eval_shape(self.init, jax.random.key(0), numbers)
            for params, opt_state in self.optimized(learner):
                optimizers.check(self.optimizer, params, opt_state, numbers)
        return Agent(
            name=name,
            config=self.config,
            init=self.init,
            actor_params=self.actor_params,
            start=self.start,
            act=self.act,
            learn=learn,
            hyper=hyper,
            cautions=(*cautions, NONE_LEGAL) if masked else cautions,
            spec=self.spec,
            **others,
        )

    def _learn_with_resets(
        self, before: float, learner: LearnerState, experience: Any, progress: jax.Array, key: jax.Array
    ) -> tuple[Any, ...]:
        """`learn`, and every `reset_interval` updates a reset; `before` is of `resets.when_due`."""
        key, reset_key = jax.random.split(key)
        learner, metrics, *results = self.learn(learner, experience, progress, key)
        fresh = functools.partial(self.network.init, resets.shared(reset_key))
        begin = functools.partial(self._begin, hyper=learner.hyper)
        learner, counted = resets.when_due(learner, progress, self.config, before, fresh, begin)
        return learner, metrics | counted, *results

    def _learn_with_mask(
        self,
        learn: Callable[..., Any],
        learner: LearnerState,
        experience: Any,
        progress: jax.Array,
        key: jax.Array,
    ) -> tuple[Any, ...]:
        """`learn`, with metrics of the mask of actions."""
        learner, metrics, *priorities = learn(learner, experience, progress, key)
        trajectory: Trajectory = getattr(experience, "trajectory", experience)
        observation, weight = trajectory.timesteps.observation, returns.transitions(trajectory).mask
        # The rows of actions, as far as they come with observations (`ReplaySpec.observation_rows`).
        n = min(weight.shape[0], jax.tree.leaves(observation)[0].shape[0])
        sums = nets.action_masks.shares(self.spec, jax.tree.map(lambda x: x[:n], observation), weight[:n])
        sums, count = collectives.global_sum((sums, jnp.sum(weight[:n])))
        shares = {name: x / jnp.maximum(count, 1.0) for name, x in sums.items()}
        return learner, metrics | shares, *priorities


EvaluationPolicy = Literal["mode", "sample"]
"""The actions of a policy in evaluation: the most likely ones, or samples as in training."""


@dataclasses.dataclass(frozen=True, eq=False)
class PolicyFunctions(Functions):
    """The functions of an agent that learns a policy from its rollouts, by one loss that others may differentiate too.

    Attributes:
      distribution: of the policy's actions.

    The config has `evaluation_policy`, an `EvaluationPolicy`.
    """

    distribution: distributions.Distribution

    @abc.abstractmethod
    def play(
        self, actor: ActorParams, state: Any, timestep: TimeStep, key: jax.Array, mode: bool
    ) -> tuple[Any, Any, Any]:
        """Acts as `Agent.act` does, by the policy's most likely actions where `mode`, and else by samples."""

    def act(
        self, actor: ActorParams, state: Any, timestep: TimeStep, key: jax.Array, evaluation: bool
    ) -> tuple[Any, Any, Any]:
        return self.play(actor, state, timestep, key, evaluation and self.config.evaluation_policy == "mode")

    def best(self, actor: ActorParams, state: Any, timestep: TimeStep) -> tuple[Any, Any]:
        action, _, state = self.play(actor, state, timestep, jax.random.key(0), True)
        return action, state

    @abc.abstractmethod
    def batch_loss(
        self, params: ArrayTree, learner: LearnerState, trajectory: Trajectory, progress: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """The loss that `learn` follows, and its metrics, under `DATA_AXES`; `Agent.loss` is made of it."""

    def bundle(self, name: str, **others: Any) -> Agent:
        """`Functions.bundle`, with the loss, and with `best` where an evaluation samples."""
        if self.config.evaluation_policy == "sample":
            others["best"] = self.best
        return super().bundle(name, loss=collectives.alone(self.batch_loss), **others)


def replay_of_rows(config: Any, length: int, **others: Any) -> ReplaySpec:
    """The replay of an agent whose sequences begin at any row, by the settings that all such agents have.

    Args:
      config: the agent's settings.
      length: rows of a sequence, the bootstrap row included.
      others: further fields of the replay.
    """
    return ReplaySpec(
        starts="rows",
        capacity=config.replay_capacity,
        length=length,
        min_size=config.replay_min_size,
        batch_size=config.batch_size,
        ratio=config.replay_ratio,
        **others,
    )


def check_bounded(spec: EnvSpec, agent: str) -> None:
    """Checks that an agent can squash its actions into those of an environment.

    Raises:
      ValueError: where they are not a Box of floats with finite bounds.
    """
    space = spec.action_space
    if not isinstance(space, spaces.Box):
        raise ValueError(f"action space {space} is not supported by {agent}, which needs a Box; use dqn or ppo.")
    if not space.bounded:
        raise ValueError(
            f"action space Box({space.low}, {space.high}): {agent} squashes actions into finite bounds; bound them in "
            "the environment, such as +-1."
        )


def check_discrete(spec: EnvSpec, agent: str) -> None:
    """Checks that an agent can search among an environment's actions.

    Raises:
      ValueError: where they are not discrete.
    """
    if not isinstance(spec.action_space, spaces.Discrete):
        raise ValueError(
            f"{spec.name} takes actions in {spec.action_space}; {agent} searches among Discrete ones: use ppo or "
            "vtrace."
        )
