"""The settings of a policy and its critics, which the configs of agents with critics of actions inherit."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from podracer import configs, distributions
from podracer.nets import critics
from podracer.nets.critics import ActorCritic
from podracer.nets.encoding import images, seen_spec
from podracer.nets.layers import Activation
from podracer.nets.network import NetworkError
from podracer.nets.policy_config import MEMBERS, checked_members
from podracer.types import EnvSpec


@dataclasses.dataclass(frozen=True)
class CriticsConfig:
    """The settings of a policy of actions in a Box, and of its critics.

    Attributes:
      policy: "gaussian" or "deterministic".
      noise: standard deviation of the noise of acting, (low, high), for "deterministic". Each lane draws its own
        between them at the start of an episode (TD3: 0.1, 0.1).
      target_noise: standard deviation of the noise of a', for "deterministic" (TD3: 0.2).
      target_noise_clip: the largest noise of a' (TD3: 0.5).
      min_std: the least standard deviation of u; the logarithm is squashed between its bounds by tanh.
      max_std: the largest one.
      init_std: that of a new policy, everywhere; None leaves it as drawn, around the middle of the logarithms.
      critics: "min" has one target, of the least critic, and the policy climbs the least; "mean" gives each critic its
        own target, and the policy climbs their mean.
      num_critics: N.
      values: "mean", or "categorical" for the distribution of returns.
      num_bins: atoms of the distribution (FastTD3: 101).
      max_value: the largest return that it knows, the least being -max_value; None for "mean", which has no limit.
      torso: "mlp", or "simba_v2" (Lee et al. 2025), whose blocks are of one width.
      hidden_sizes: of the policy, layers or blocks.
      value_hidden_sizes: of each critic; None for the policy's.
      activation: of MLPs.
      layer_norm: whether each layer of a critic's MLP is normalised before its activation (Ba et al. 2016).
      policy_observations: names of the members of a `Dict` that the policy sees; () for all.
      value_observations: names of the members that the critics see; () for all.
    """

    policy: Literal["gaussian", "deterministic"] = "gaussian"
    noise: tuple[float, ...] = configs.field((0.0, 0.0), low=0.0)
    target_noise: float = configs.field(0.0, low=0.0, tunable=True)
    target_noise_clip: float = configs.field(0.5, low=0.0, tunable=True)
    min_std: float = configs.field(0.006738, low=1e-8, at_most=("max_std", ""))  # exp(-5)
    max_std: float = configs.field(7.389, low=1e-8)  # exp(2)
    init_std: float | None = configs.field(None, low=1e-8)
    critics: Literal["min", "mean"] = "min"
    num_critics: int = configs.field(2, low=1)
    values: Literal["mean", "categorical"] = "mean"
    num_bins: int = configs.field(101, low=2)
    max_value: float | None = configs.field(None, low=1e-6)
    torso: critics.Torso = "mlp"
    hidden_sizes: tuple[int, ...] = configs.field((256, 256), low=1)
    value_hidden_sizes: tuple[int, ...] | None = configs.field(None, low=1)
    activation: Activation = "relu"
    layer_norm: bool = False
    policy_observations: tuple[str, ...] = ()
    value_observations: tuple[str, ...] = ()

    def __post_init__(self):
        configs.check(self)
        self._check_policy()
        if self.torso == "simba_v2":
            for name in ("hidden_sizes", "value_hidden_sizes"):
                sizes = getattr(self, name)
                if sizes is not None and len(set(sizes)) != 1:
                    raise ValueError(f"{name}={sizes}: blocks of torso='simba_v2' have one width; use (128, 128).")
            if self.init_std is not None:
                raise ValueError(
                    f"init_std={self.init_std} is of torso='mlp'; weights of torso='simba_v2' cannot be 0: use None."
                )
            configs.require_defaults(self, ("activation", "layer_norm"), "is of torso='mlp', not torso='simba_v2'")
        if self.max_value == float("inf"):
            raise ValueError("max_value=inf must be finite: the largest return to tell apart, such as 10.0.")
        if self.values == "mean":
            configs.require_defaults(self, ("max_value", "num_bins"), 'is of values="categorical", not values="mean"')

    def _check_policy(self) -> None:
        if len(self.noise) != 2 or self.noise[0] > self.noise[1]:
            use = (min(self.noise, default=0.1), max(self.noise, default=0.1))
            raise ValueError(f"noise={self.noise} must be two numbers that do not fall, (low, high); use {use}.")
        if self.policy == "gaussian":
            why = 'is for policy="deterministic"; a Gaussian policy explores by its own std'
            configs.require_defaults(self, ("noise", "target_noise", "target_noise_clip"), why)
        if self.policy == "deterministic":
            why = 'has no effect with policy="deterministic", whose noise explores'
            configs.require_defaults(self, ("init_std", "min_std", "max_std"), why)
        distributions.check_std(self.init_std, self.min_std, self.max_std)

    def actor_critic(self, agent: str, spec: EnvSpec, network: ActorCritic | None, num_actions: int) -> ActorCritic:
        """The policy and its critics.

        Args:
          agent: the agent's name, for errors.
          spec: of the environment.
          network: the user's own; the config's if None.
          num_actions: A, elements of an action.

        Raises:
          ValueError: for a distribution of returns without a largest one, members that observations do not have, or
            images.
          NetworkError: for a network of the user's that does not fit.
        """
        if self.values == "categorical" and self.max_value is None:
            raise ValueError('values="categorical" needs max_value, the largest return to tell apart, such as 10.0.')
        with_std, num_values = self.policy == "gaussian", 1 if self.values == "mean" else self.num_bins
        if network is not None:
            if self.init_std is not None:
                raise NetworkError(f"init_std={self.init_std} is of the library's own network; use None with yours.")
            configs.require_defaults(self, MEMBERS, "is of the library's own network", NetworkError)
            critics.check(network, spec, agent, num_actions * (1 + with_std), num_actions, num_values)
            return network
        std, settings = self.init_std, ("value_hidden_sizes", "layer_norm", "torso", "num_critics")
        first_std = None if std is None else distributions.raw_of_std(std, self.min_std, self.max_std)
        others: dict[str, Any] = {name: getattr(self, name) for name in settings}
        for name in MEMBERS:
            others[name] = checked_members(name, getattr(self, name), spec)
            space = seen_spec(spec, others[name]).observation_space
            if images(space):
                raise ValueError(
                    f"observation space {space} has images, for which {agent} has no convolutions: use ppo, show other "
                    f"members of a Dict by {name}, or give a network= of your own."
                )
        return critics.make(
            *(spec, self.hidden_sizes, self.activation),
            num_actions=num_actions,
            num_values=num_values,
            with_std=with_std,
            first_std=first_std,
            **others,
        )
