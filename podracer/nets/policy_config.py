"""The settings of a policy and its value: the distribution of actions, and what each of the two networks sees."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from podracer import configs, distributions, spaces
from podracer.nets.encoding import visible
from podracer.nets.network import Network, NetworkError
from podracer.nets.network_config import NetworkConfig
from podracer.types import EnvSpec

OF_BOXES = ("policy", "state_dependent_std", "init_std", "min_std", "max_std")
"""Settings of a Gaussian, which choices do not have."""

MEMBERS = ("policy_observations", "value_observations")
"""Settings of members, which a user's own network chooses itself."""


@dataclasses.dataclass(frozen=True)
class PolicyConfig(NetworkConfig):
    """The settings of a policy and its value, beside those of `NetworkConfig`.

    Attributes:
      policy: of actions in a Box. "clipped": a Gaussian whose samples are clipped to the bounds. "tanh": one whose
        samples are squashed into the bounds, with the entropy of what is squashed. Standard deviations are of the
        Gaussian, in units where the Box is [-1, 1].
      state_dependent_std: whether the network computes standard deviations from the observation; else they are
        parameters (paper).
      init_std: of a new policy; where the network computes it, of outputs of 0 (brax: 0.694).
      min_std: the least standard deviation (brax: 1e-3).
      max_std: the largest one; None for no limit.
      separate: whether policy and value have a torso each.
      value_hidden_sizes: of the value's MLP, where the torsos are separate; None for those of the policy.
      init: of weights: "orthogonal", small ones for the policy's head, or "lecun", uniform ones for heads too (brax).
      policy_observations: names of the members of a `Dict` that the policy sees; () for all.
      value_observations: names of the members that the value sees; () for all.
    """

    policy: distributions.Squashing = "clipped"
    state_dependent_std: bool = False
    init_std: float = configs.field(1.0, low=1e-8)
    min_std: float = configs.field(0.0, low=0.0)
    max_std: float | None = configs.field(None, low=1e-8)
    separate: bool = True
    value_hidden_sizes: tuple[int, ...] | None = configs.field(None, low=1)
    init: Literal["orthogonal", "lecun"] = "orthogonal"
    policy_observations: tuple[str, ...] = ()
    value_observations: tuple[str, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        distributions.check_std(self.init_std, self.min_std, self.max_std)
        if self.value_hidden_sizes is not None and not self.separate:
            raise ValueError(
                f"value_hidden_sizes={self.value_hidden_sizes} needs separate=True: one torso has the sizes of "
                "hidden_sizes; leave it out."
            )
        if set(self.policy_observations) == set(self.value_observations):
            return
        where = f"policy_observations={self.policy_observations} and value_observations={self.value_observations}"
        if not self.separate:
            raise ValueError(f"{where} differ, which needs a torso for each: use separate=True.")
        if self.core != "none":
            raise ValueError(
                f"{where} differ, and core={self.core!r} would show the policy what the value sees; use core='none', "
                "or the same members for both."
            )

    def policy_and_value(
        self, agent: str, spec: EnvSpec, network: Network | None
    ) -> tuple[Network, distributions.Distribution]:
        """The network of a policy and a value, and the distribution of actions.

        Args:
          agent: the agent's name, for errors.
          spec: of the environment.
          network: the user's own; the config's if None.

        Raises:
          ValueError: for an action space, members, a torso or a network that does not fit the environment.
        """
        distribution = self._distribution(spec)
        if network is not None:
            configs.require_defaults(self, MEMBERS, "is of the library's own network", NetworkError)
            return self.actor_critic(agent, spec, network), distribution
        members = {name: checked_members(name, getattr(self, name), spec) for name in MEMBERS}
        network = self.actor_critic(
            *(agent, spec, None),
            separate=self.separate,
            distribution=distribution,
            value_hidden_sizes=self.value_hidden_sizes,
            init=self.init,
            **members,
        )
        return network, distribution

    def _distribution(self, spec: EnvSpec) -> distributions.Distribution:
        if not isinstance(spec.action_space, spaces.Box):
            why = f"is for actions in a Box, and {spec.name} takes {spec.action_space}"
            configs.require_defaults(self, OF_BOXES, why)
        std = distributions.Std(self.state_dependent_std, self.init_std, self.min_std, self.max_std)
        return distributions.for_space(spec.action_space, self.policy, std)


def checked_members(name: str, members: tuple[str, ...], spec: EnvSpec) -> Any:
    """Returns a setting of members of observations, by the name of the setting.

    Raises:
      ValueError: for a member that observations do not have.
    """
    if not members:
        return members
    known = visible(spec.observation_space)
    if not isinstance(spec.observation_space, spaces.Dict):
        raise ValueError(f"{name}={members}: {spec.name} shows {spec.observation_space}, no Dict; leave it out.")
    for member in members:
        if member not in known:
            raise ValueError(f"{name}={members}: no such member; {configs.suggest(member, known)}")
    return members
