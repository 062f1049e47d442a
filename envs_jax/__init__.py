"""Pure-JAX environments: one file each, all following `podracer.types.Environment`.

`make("catch", rows=20)` builds one by name. The environments are imported on first use, so that this package imports
nothing of podracer, and either of the two can be imported first.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podracer.types import Environment

__all__ = ["make", "names", "options"]

# Name, which is also the module's, to class, with its module if that has another name. The options, if there are any,
# are the class <class>Options beside it.
_CLASSES = {
    "acrobot": "Acrobot",
    "bandit": "Bandit",
    "cartpole": "CartPole",
    "catch": "Catch",
    "connect_four": "ConnectFour",
    "deep_sea": "DeepSea",
    "discounting_chain": "DiscountingChain",
    "gridworld": "Gridworld",
    "memory_chain": "MemoryChain",
    "memory_maze": "MemoryMaze",
    "minatar_asterix": "minatar.asterix.Asterix",
    "minatar_breakout": "minatar.breakout.Breakout",
    "minatar_freeway": "minatar.freeway.Freeway",
    "minatar_seaquest": "minatar.seaquest.Seaquest",
    "minatar_space_invaders": "minatar.space_invaders.SpaceInvaders",
    "minigrid_crossings": "minigrid.crossings.Crossings",
    "minigrid_doorkey": "minigrid.doorkey.DoorKey",
    "minigrid_dynamic_obstacles": "minigrid.dynamic_obstacles.DynamicObstacles",
    "minigrid_empty": "minigrid.empty.Empty",
    "minigrid_four_rooms": "minigrid.four_rooms.FourRooms",
    "minigrid_key_corridor": "minigrid.key_corridor.KeyCorridor",
    "minigrid_lava_gap": "minigrid.lava_gap.LavaGap",
    "minigrid_memory": "minigrid.memory.Memory",
    "minigrid_multi_room": "minigrid.multi_room.MultiRoom",
    "minigrid_unlock": "minigrid.unlock.Unlock",
    "mountain_car": "MountainCar",
    "mountain_car_continuous": "MountainCarContinuous",
    "othello": "Othello",
    "pendulum": "Pendulum",
    "pixel_catch": "PixelCatch",
    "t_maze": "TMaze",
    "tic_tac_toe": "TicTacToe",
    "umbrella_chain": "UmbrellaChain",
}


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The options of environments without any."""


def names() -> tuple[str, ...]:
    """Returns the names that `make` knows, in alphabetical order."""
    return tuple(_CLASSES)


def options(name: str) -> type:
    """Returns the frozen dataclass of an environment's options, with their defaults.

    Raises:
      ValueError: for an unknown name.
    """
    module, class_name = _find(name)
    return getattr(module, f"{class_name}Options", NoOptions)


def make(name: str, **options: Any) -> Environment:
    """Builds an environment.

    Args:
      name: one of `names()`.
      **options: fields of the environment's options dataclass; the others keep their defaults.

    Raises:
      ValueError: for an unknown name, an unknown option, or a value that the options refuse.
    """
    module, class_name = _find(name)
    environment, options_class = getattr(module, class_name), globals()["options"](name)
    known = [field.name for field in dataclasses.fields(options_class)]
    for option in options:
        if option not in known:
            raise ValueError(f"environment {name!r} has no option {option!r}; {_suggest(option, known)}")
    return environment() if options_class is NoOptions else environment(options_class(**options))


def _find(name: str) -> tuple[Any, str]:
    """The module of an environment, and the name of its class there."""
    if name not in _CLASSES:
        raise ValueError(f"unknown environment {name!r}; {_suggest(name, _CLASSES)}")
    module, _, class_name = _CLASSES[name].rpartition(".")
    return importlib.import_module(f"{__name__}.{module or name}"), class_name


def _suggest(name: str, known: Iterable[str]) -> str:
    """'did you mean ...? Known: ...' for an unknown name."""
    close = difflib.get_close_matches(name, known, n=2)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{hint}Known: {', '.join(sorted(known))}."
