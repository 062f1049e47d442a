"""The tasks of the package `minigrid`, set to states of ours in `envs_jax.minigrid`, and played beside them."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np

import envs_jax

KINDS = ("unseen", "empty", "wall", "floor", "door", "key", "ball", "box", "goal", "lava", "door", "door")
"""The type in the package of each kind of ours."""


def original(name: str, **options: Any) -> Any:
    """The environment of the package for a task of ours with options."""
    os.environ["PYGAME_HIDE_SUPPORT_PROMPT"] = "1"
    from minigrid import envs
    from minigrid.core.world_object import Lava, Wall

    if "random_start" in options:
        options["agent_start_pos"] = None if options.pop("random_start") else (1, 1)
    if "num_obstacles" in options:
        options["n_obstacles"] = options.pop("num_obstacles")
    if name in ("lava_gap", "memory"):  # the only one without a default, and one whose own is refused
        options.setdefault("size", 7)
    if name == "lava_gap":
        options["obstacle_type"] = {"lava": Lava, "wall": Wall}[options.pop("obstacle", "lava")]
    if name == "crossings":
        options["obstacle_type"] = options.pop("obstacle", "lava")
    if name == "multi_room":
        number = options.pop("num_rooms")
        options |= {"minNumRooms": number, "maxNumRooms": number, "maxRoomSize": options.pop("max_room_size")}
    made = {
        "crossings": envs.CrossingEnv,
        "doorkey": envs.DoorKeyEnv,
        "dynamic_obstacles": envs.DynamicObstaclesEnv,
        "empty": envs.EmptyEnv,
        "four_rooms": envs.FourRoomsEnv,
        "key_corridor": envs.KeyCorridorEnv,
        "lava_gap": envs.LavaGapEnv,
        "memory": envs.MemoryEnv,
        "multi_room": envs.MultiRoomEnv,
        "unlock": envs.UnlockEnv,
    }
    return made[name](**options)


def decode(code: int) -> tuple[int, int, int]:
    """Type, colour and state of a code of ours, as the package numbers them."""
    kind = int(code) & 15
    return (4 if kind > 9 else kind), int(code) >> 4, max(kind - 9, 0)


def encode(kind: Any, colour: Any, state: Any) -> Any:
    """The code of ours for a type, a colour and a state of the package."""
    return np.where((kind == 4) & (state > 0), 9 + state, kind) | colour << 4


def thing(code: int) -> Any:
    """A new object of the package, or None."""
    from minigrid.core.world_object import WorldObj

    return WorldObj.decode(*decode(code))


def put(name: str, env: Any, state: Any) -> None:
    """Sets an environment of the package to a state of ours."""
    from minigrid.core.grid import Grid

    height, width = state.cells.shape
    env.grid = Grid(width, height)
    for y in range(height):
        for x in range(width):
            env.grid.set(x, y, thing(state.cells[y, x]))
    env.agent_pos, env.agent_dir = (int(state.x), int(state.y)), int(state.direction)
    env.carrying, env.step_count = thing(state.carried), int(state.num_steps)
    if name == "memory":
        middle, (end,) = height // 2, np.flatnonzero(np.isin(state.cells[height // 2 - 2] & 15, (5, 6)))
        like = state.cells[middle - 2, end] == state.cells[middle - 1, 1]
        places = [(end, middle - 1), (end, middle + 1)]
        env.success_pos, env.failure_pos = places if like else places[::-1]
    if name == "unlock":
        (env.door,) = (cell for cell in env.grid.grid if cell and cell.type == "door")
    if name == "key_corridor":
        (env.obj,) = (cell for cell in env.grid.grid if cell and cell.type == "ball")
    if name == "dynamic_obstacles":
        env.obstacles = [env.grid.get(*ball) for ball in state.task.tolist()]
        for ball, place in zip(env.obstacles, state.task.tolist()):
            ball.cur_pos = tuple(place)


def layout(env: Any) -> dict[str, Any]:
    """The package's state after a reset or a step, in our numbers."""
    codes = encode(*np.moveaxis(env.grid.encode().astype(int), -1, 0)).T
    carried = encode(*map(np.array, env.carrying.encode())) if env.carrying else 1
    place = {"x": int(env.agent_pos[0]), "y": int(env.agent_pos[1])}
    return {"cells": codes, **place, "direction": int(env.agent_dir), "carried": carried, "num_steps": env.step_count}


def compare(
    name: str,
    options: dict[str, Any],
    num_lanes: int,
    num_steps: int,
    seed: int,
    change: Any = lambda state, rng: state,
) -> dict[str, int]:
    """Plays the package and our task side by side with random actions, and asserts that they are equal in every step.

    Equal are the observation, the reward, the two kinds of ends, every cell, the agent and what it carries. Of the
    episodes every other one begins at any time before the limit.

    Args:
      name: of the task.
      options: of ours.
      num_lanes: episodes at a time.
      num_steps: steps of each; an episode that is over is followed by another one.
      seed: of starts and actions.
      change: of each start, (state, rng) -> state.

    Returns:
      The number of steps that were rewarded, that terminated and that truncated.
    """
    environment, rng = envs_jax.make(f"minigrid_{name}", **options), np.random.default_rng(seed)
    env_actions = environment.spec.action_space.num_values

    @jax.jit
    @jax.vmap
    def step(state: Any, action: jax.Array, words: jax.Array) -> Any:
        state, transition = environment.advance(state, action, words)
        return state, transition, environment.observe(state)

    fresh = jax.jit(jax.vmap(environment.start))
    observe = jax.jit(jax.vmap(environment.observe))

    def starts() -> Any:
        words = rng.integers(0, 2**32, (num_lanes, environment.start_words), np.uint32)
        states = jax.tree.map(np.array, fresh(words))
        states.num_steps[::2] = rng.integers(0, environment.spec.max_episode_steps, len(states.num_steps[::2]))
        lanes = [change(jax.tree.map(lambda x, i=i: x[i], states), rng) for i in range(num_lanes)]
        return jax.tree.map(lambda *x: np.stack(x), *lanes)

    states, spare, found = starts(), starts(), {"rewards": 0, "terminated": 0, "truncated": 0}
    envs = [original(name, **options) for _ in range(num_lanes)]
    seen = observe(states)
    for i, env in enumerate(envs):
        env.reset(seed=seed + i)
        put(name, env, jax.tree.map(lambda x, i=i: x[i], states))
        np.testing.assert_array_equal(seen["image"][i], env.gen_obs()["image"], f"{name}, start of lane {i}")
    actions_like = np.array([0, 1, 2, 2, 2, 3, 4, 5, 5, 6])
    for t in range(num_steps):
        actions = rng.choice(actions_like[actions_like < env_actions], num_lanes).astype(np.int32)
        words = np.zeros((num_lanes, environment.step_words), np.uint32)
        theirs = []
        for i, env in enumerate(envs):
            balls = [tuple(map(int, ball.cur_pos)) for ball in env.obstacles] if environment.step_words else []
            before = layout(env) | {"balls": balls}
            theirs.append(env.step(int(actions[i])))
            if environment.step_words:
                words[i] = chance(env, before)
        states, transitions, seen = jax.tree.map(np.array, step(states, actions, words))
        used = False
        for i, env in enumerate(envs):
            where = f"{name}, lane {i}, step {t}, action {actions[i]}"
            observation, reward, terminated, truncated, _ = theirs[i]
            np.testing.assert_array_equal(seen["image"][i], observation["image"], where)
            assert seen["direction"][i] == observation["direction"], where
            assert transitions.reward[i] == np.float32(reward), where
            assert transitions.discount[i] == 1 - terminated, where
            assert transitions.last[i] == (terminated or truncated), where
            for field, value in layout(env).items():
                np.testing.assert_array_equal(getattr(states, field)[i], value, f"{where}: {field}")
            found["rewards"] += reward > 0
            found["terminated"] += terminated
            found["truncated"] += truncated and not terminated
            if terminated or truncated:
                state, used = jax.tree.map(lambda x, i=i: x[i], spare), True
                jax.tree.map(lambda x, y, i=i: x.__setitem__(i, y), states, state)
                put(name, env, state)
        spare = starts() if used else spare
    return found


def chance(env: Any, before: dict[str, Any]) -> np.ndarray:
    """The words of a step of ours, in which balls move as those of the package have just done."""
    cells, words = before["cells"].copy(), []
    for (x, y), ball in zip(before["balls"], env.obstacles):
        near = [(x + i, y + j) for j in (-1, 0, 1) for i in (-1, 0, 1)]
        free = [place for place in near if cells[place[::-1]] == 1 and place != (before["x"], before["y"])]
        new = tuple(map(int, ball.cur_pos))
        assert new in free or (not free and new == (x, y))
        words.append(int((free.index(new) + 0.5) / len(free) * 2**24) << 8 if free else 0)
        cells[new[::-1]], cells[y, x] = cells[y, x], cells[new[::-1]]
    return np.array(words, np.uint32)
