"""The network's settings, which the configs of agents without a model inherit."""

from __future__ import annotations

import dataclasses
from typing import Any

from podracer import configs
from podracer.nets import action_masks
from podracer.nets.actor_state import stacked_spec
from podracer.nets.cores import CoreName, CoreSettings
from podracer.nets.layers import Activation
from podracer.nets.network import Network
from podracer.nets.network_check import check
from podracer.nets.networks import ComputeDtype, Torso, make, make_q
from podracer.types import EnvSpec


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
    """The network's settings.

    Attributes:
      frame_stack: the number of newest observations that the network sees (papers on Atari: 4).
      torso: see `podracer.nets.make`.
      width: of "resnet"; multiplies its channels (SEED RL, table 4: 1, 2 or 4).
      depth: of "resnet"; residual blocks of each of its three sections.
      hidden_sizes: of the MLP.
      activation: of the MLP.
      layer_norm: whether each layer of the torso is normalised before its activation (Ba et al. 2016).
      core: a memory after the torso, fed with the previous action (one-hot) and the reward too: "none", "lstm", "gru",
        "mingru", "lru" or "gtrxl".
      core_size: D, units of the core.
      core_layers: L, layers of mingru, lru and gtrxl; the others have one.
      core_memory: M, rows before a row that each layer of gtrxl attends to; its state is L M D numbers a lane.
      compute_dtype: of the torso, "float32" or "bfloat16" (see `podracer.nets.make`).
    """

    frame_stack: int = configs.field(1, low=1)
    torso: Torso = "auto"
    width: int = configs.field(1, low=1)
    depth: int = configs.field(2, low=1)
    hidden_sizes: tuple[int, ...] = configs.field((64, 64), low=1)
    activation: Activation = "relu"
    layer_norm: bool = False
    core: CoreName = "none"
    core_size: int = configs.field(64, low=1)
    core_layers: int = configs.field(1, low=1)
    core_memory: int = configs.field(32, low=1)
    compute_dtype: ComputeDtype = "float32"

    def __post_init__(self):
        configs.check(self)
        _ = self.core_settings  # refuses what the core does not have
        if self.torso != "resnet" and (self.width, self.depth) != (1, 2):
            raise ValueError(
                f"width={self.width} and depth={self.depth}: torso={self.torso!r} has neither; use torso='resnet', or "
                "width=1 and depth=2."
            )

    @property
    def core_settings(self) -> CoreSettings:
        """The core's settings."""
        return CoreSettings(self.core, self.core_size, self.core_layers, self.core_memory)

    def actor_critic(self, agent: str, spec: EnvSpec, network: Network | None, **others: Any) -> Network:
        """The network of a policy and a value; illegal outputs are lowered (`action_masks.masked`).

        Args:
          agent: the agent's name, for errors.
          spec: of the environment.
          network: the user's own; the config's if None.
          others: further arguments of `make`.

        Raises:
          ValueError: for a torso, a network or a mask of actions that does not fit the environment.
        """
        action_masks.check(spec)
        stacked = stacked_spec(spec, self.frame_stack)
        if network is None:
            network = make(stacked, **self._arguments(), **others)
        else:
            check(network, stacked, agent)
        return action_masks.masked(network, spec)

    def action_values(
        self, agent: str, spec: EnvSpec, network: Network | None, *, masked: bool = True, **others: Any
    ) -> Network:
        """The network of action values; arguments as in `actor_critic`, `others` those of `make_q`.

        Values of illegal actions are lowered, unless `masked` is False and the agent does so itself.

        Raises:
          ValueError: for an action space, torso, network or mask that does not fit.
        """
        action_masks.check(spec)
        stacked = stacked_spec(spec, self.frame_stack)
        if network is None:
            network = make_q(stacked, **self._arguments(), **others)
        else:
            check(network, stacked, agent, action_values=True, num_bins=others.get("num_bins", 1))
        return action_masks.masked(network, spec) if masked else network

    def _arguments(self) -> dict[str, Any]:
        return {
            "torso": self.torso,
            "hidden_sizes": self.hidden_sizes,
            "activation": self.activation,
            "layer_norm": self.layer_norm,
            "width": self.width,
            "depth": self.depth,
            "core": self.core_settings,
            "compute_dtype": self.compute_dtype,
        }
