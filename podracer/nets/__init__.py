"""Networks: torsos, cores with a memory, heads, and what an agent remembers for them; your own plug in too.

network = nets.feed_forward(init, apply)     # apply(params, observation [N, ...]) -> (outputs [N, A], value [N])
"""

from podracer.nets import action_masks, critics
from podracer.nets.actor_state import (
    FRAME_STACKER,
    ActorState,
    frame_context,
    inputs,
    stack_frames,
    stacked_spec,
    start,
    step,
    unroll,
    with_frames,
    without_frames,
)
from podracer.nets.boards import make_board
from podracer.nets.cores import NO_CORE, Core, CoreName, CoreSettings
from podracer.nets.critics import ActorCritic, Critic
from podracer.nets.critics_config import CriticsConfig
from podracer.nets.encoding import encode, is_image
from podracer.nets.layers import Activation
from podracer.nets.network import Inputs, Network, NetworkError, feed_forward
from podracer.nets.network_check import check
from podracer.nets.network_config import NetworkConfig
from podracer.nets.networks import (
    ComputeDtype,
    Torso,
    choose_torso,
    make,
    make_q,
    num_actions,
    value_head,
    with_value_head,
)
from podracer.nets.noise import perturb
from podracer.nets.policy_config import PolicyConfig

__all__ = [
    "FRAME_STACKER",
    "NO_CORE",
    "Activation",
    "ActorCritic",
    "ActorState",
    "ComputeDtype",
    "Core",
    "CoreName",
    "CoreSettings",
    "Critic",
    "CriticsConfig",
    "Inputs",
    "Network",
    "NetworkConfig",
    "NetworkError",
    "PolicyConfig",
    "Torso",
    "action_masks",
    "check",
    "choose_torso",
    "critics",
    "encode",
    "feed_forward",
    "frame_context",
    "inputs",
    "is_image",
    "make",
    "make_board",
    "make_q",
    "num_actions",
    "perturb",
    "stack_frames",
    "stacked_spec",
    "start",
    "step",
    "unroll",
    "value_head",
    "with_frames",
    "with_value_head",
    "without_frames",
]
