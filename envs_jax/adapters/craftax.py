"""Craftax (Matthews et al. 2024, https://github.com/MichaelTMatthews/Craftax): an open-ended world of crafting, in JAX.

`craftax:Craftax-Symbolic-v1` is the game with nine floors and 43 actions, `craftax:Craftax-Classic-Symbolic-v1` the one
of Crafter, with 17. Names with `Pixels` show images, float32 of 0 to 1; their textures are made once, which takes a
minute. The time limit, which ends a game in Craftax, truncates here. Achievements are rewards, as there; they are not
logged one by one.
"""

from __future__ import annotations

import dataclasses
import importlib

from envs_jax.adapters import convert, gymnax
from podracer import configs

TASKS = (
    "Craftax-Symbolic-v1",
    "Craftax-Pixels-v1",
    "Craftax-Classic-Symbolic-v1",
    "Craftax-Classic-Pixels-v1",
)


@dataclasses.dataclass(frozen=True)
class CraftaxOptions:
    """Options of Craftax.

    Attributes:
      max_steps: the time limit, a truncation; by default Craftax's, 100,000 steps, or 10,000 of the classic game.
    """

    max_steps: int | None = configs.field(None, low=1)

    def __post_init__(self):
        configs.check(self)


def tasks() -> list[str]:
    """Returns the names of Craftax's environments."""
    return list(TASKS)


def make(name: str, options: CraftaxOptions) -> convert.Adapted:
    """Builds a game of Craftax.

    Raises:
      ValueError: for an unknown name.
    """
    convert.check_known("craftax", name, tasks())
    with convert.making(f"craftax:{name}"):
        env = importlib.import_module("craftax.craftax_env").make_craftax_env_from_name(name, auto_reset=False)
    # Craftax has gymnax's interface. A new world costs as much as many steps.
    return gymnax.from_gymnax(env, max_steps=options.max_steps, name=f"craftax:{name}", costly_reset=True)
