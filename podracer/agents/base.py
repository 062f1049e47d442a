"""The functions that agents share, and their bundle."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from podracer import configs, nets, spaces
from podracer.learning import optimizer as optimizers
from podracer.learning import update
from podracer.types import ActorParams, Agent, ArrayTree, EnvSpec, LearnerState, Metrics


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
    optimizer: update.Optimizer
    loss: Callable[..., Any]

    def init(self, key: jax.Array, hyper: Mapping[str, jax.Array]) -> LearnerState:
        """The learner's state before its first update."""
        params = self.network.init(key)
        return update.init(params, self.optimizer, hyper, self.aux(params))

    def aux(self, params: ArrayTree) -> ArrayTree:
        """The part of the learner's first state beside its parameters, such as a target network."""
        return ()

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
        return update.learning_rate(learner, progress, config.learning_rate_schedule, config.learning_rate_warmup)

    def update(
        self, loss: update.Loss, learner: LearnerState, batch: Any, learning_rate: jax.Array | None, **how: Any
    ) -> tuple[LearnerState, Metrics, Any]:
        """`learning.update.apply` with the agent's optimiser; `how` are its further arguments."""
        return update.apply(loss, learner, batch, optimizer=self.optimizer, learning_rate=learning_rate, **how)

    def bundle(self, name: str, **others: Any) -> Agent:
        """The agent of these functions; `others` are further fields of it.

        Raises:
          OptimizerError: for an optimiser of the user's that does not fit.
        """
        unused = set(optimizers.TUNABLE) - set(self.optimizer.uses)
        hyper = {name: value for name, value in configs.tunables(self.config).items() if name not in unused}
        if isinstance(self.optimizer, optimizers.Optimizer) and self.optimizer.own:
            numbers = {name: jnp.float32(value) for name, value in hyper.items()}
            learner = jax.eval_shape(self.init, jax.random.key(0), numbers)
            optimizers.check(self.optimizer, learner.params, learner.opt_state, numbers)
        return Agent(
            name=name,
            config=self.config,
            init=self.init,
            actor_params=self.actor_params,
            start=self.start,
            act=self.act,
            learn=self.learn,
            hyper=hyper,
            **others,
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
