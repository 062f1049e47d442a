"""The contract of two-player games, and random play that checks it (see `envs_jax.testing`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from envs_jax.play import COMPILE_QUICKLY, PREFIX, ConformanceError
from podracer import spaces
from podracer.types import Environment

_FAULTS = {
    "nothing legal": "action_mask is all 0 (expected a legal action, such as one that passes)",
    "illegal": "an illegal action did not lose at once (expected reward -1, discount 0 and last)",
    "reward": "a reward is not that of a zero-sum game (expected -1, 0 or 1)",
    "discount": "a legal action that does not end the game has another discount than -1 (expected strict turns)",
    "end": "a game ended by a legal action with another discount than 0 (expected 0)",
    "turn": "to_play stayed the same (expected the other player's number after every ply)",
    "lost": "a legal action lost at once and left the board as it was (expected only illegal ones to)",
    "keys": "step gave two results for two keys (expected a game without chance)",
    "finished": "a finished game went on (expected the same state, a mask of 1, reward 0, discount 0 and last)",
    "symmetry": "a symmetry does not commute with step, reward and mask (see envs_jax.board_game.Symmetries)",
}


def check_game(env: Environment, *, games: int = 8, seed: int = 0) -> None:
    """Plays legal actions at random, tries all others on the way, and checks the rules of games for two.

    A search relies on these: turns alternate, with a discount of -1; an illegal action loses at once, and a legal one
    does not for that alone; nothing depends on the key of `step`; a finished game stays as it is; and symmetries, if
    any, commute with everything. `check_environment` checks the rest.

    Args:
      env: the environment.
      games: number of games, played in parallel, each once.
      seed: seed of the play.

    Raises:
      ConformanceError: with the first breach found.
    """
    name = type(env).__name__
    _check_spec(env, name)
    _check_symmetries(env, name)
    plies = min(env.spec.max_episode_steps or 200, 200) + 2  # two of them after the end
    keys = jax.random.split(jax.random.key(seed), games)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), jax.debug_key_reuse(False):
        play = jax.jit(jax.vmap(lambda key: _play(env, plies, key)), compiler_options=COMPILE_QUICKLY)
        faults, same, lost = jax.device_get(play(keys))
    # An action that leaves the board as it is without ending the game is a pass, which may end the game later.
    passes = np.any(same & ~lost, axis=(0, 1))
    faults["lost"] = np.any(same & lost & ~passes, axis=-1)
    for fault, sentence in _FAULTS.items():
        if faults[fault].any():
            ply = int(np.argwhere(faults[fault])[0][1])
            raise ConformanceError(f"{PREFIX}: {name}: {sentence}; after {ply} plies of a game.")


def _play(env: Any, plies: int, key: jax.Array) -> Any:
    """Plays a game.

    Returns:
      Faults, bool [plies] by name; and for legal actions, bool [plies, A] each: the board stayed the same; the mover
      lost.
    """
    A = env.spec.action_space.num_values
    symmetric = getattr(env, "symmetries", None) is not None

    def ply(carry: Any, key: jax.Array) -> Any:
        state, over = carry
        before = env.observe(state)
        legal = before["action_mask"] > 0
        action_key, step_key, other_key = jax.random.split(key, 3)
        chance = jax.random.uniform(action_key, (A,))
        action = jnp.argmax(jnp.where(legal, chance, -1.0)).astype(jnp.int32)
        # Every action with one key, and the played one with another key too.
        actions = jnp.append(jnp.arange(A, dtype=jnp.int32), action)
        keys = jnp.append(jnp.stack([step_key] * A), other_key)
        states, transitions = jax.vmap(env.step, (None, 0, 0))(state, actions, keys)
        played = jax.tree.map(lambda x: x[action], (states, transitions))
        again = jax.tree.map(lambda x: x[A], (states, transitions))
        states, transitions = jax.tree.map(lambda x: x[:A], (states, transitions))
        after = jax.vmap(env.observe)(states)
        reward, discount, last, _ = transitions
        swapped = before["board"][..., [1, 0, *range(2, before["board"].shape[-1])]]
        faults = {
            "nothing legal": ~jnp.any(legal),
            "illegal": jnp.any(~legal & ((reward != -1) | (discount != 0) | ~last)),
            "reward": ~jnp.all((reward == 0) | (jnp.abs(reward) == 1)),
            "discount": ~over & jnp.any(legal & ~last & (discount != -1)),
            "end": jnp.any(last & (discount != 0)),
            "turn": ~over & jnp.any(after["to_play"] == before["to_play"]),
            "keys": ~_equal(played, again),
            "finished": over & ~(jnp.all(legal & (reward == 0) & (discount == 0) & last) & _equal(states, state)),
            "symmetry": ~_commutes(env, state, legal, action, *played) if symmetric else jnp.asarray(False),
        }
        same = jnp.all(after["board"][..., :2] == swapped[..., :2], axis=(1, 2, 3)) & legal & ~over
        return (played[0], last[action]), (faults, same, last & (reward == -1))

    reset_key, key = jax.random.split(key)
    return jax.lax.scan(ply, (env.reset(reset_key), jnp.asarray(False)), jax.random.split(key, plies))[1]


def _commutes(env: Any, state: Any, legal: jax.Array, action: jax.Array, after: Any, transition: Any) -> jax.Array:
    """Returns True, bool [], if turning a state commutes with playing, for all symmetries."""

    def one(cells: jax.Array, actions: jax.Array) -> jax.Array:
        def turn(state: Any) -> Any:
            return state._replace(board=state.board.reshape(-1)[cells].reshape(state.board.shape))

        turned_state = turn(state)
        mask = env.observe(turned_state)["action_mask"] > 0
        result = env.step(turned_state, jnp.argmax(actions == action).astype(jnp.int32), jax.random.key(0))
        return jnp.all(mask == legal[actions]) & _equal(result, (turn(after), transition))

    return jnp.all(jax.vmap(one)(*(jnp.asarray(x) for x in env.symmetries)))


def _equal(a: Any, b: Any) -> jax.Array:
    """Returns True, bool [], for trees of equal numbers."""
    return jnp.all(jnp.stack([jnp.all(x == y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]))


def _check_spec(env: Environment, name: str) -> None:
    spec = env.spec
    if spec.num_players != 2:
        raise ConformanceError(f"{PREFIX}: {name}.spec.num_players is {spec.num_players} (expected 2).")
    if not isinstance(spec.action_space, spaces.Discrete):
        raise ConformanceError(f"{PREFIX}: {name}.spec.action_space is {spec.action_space} (expected Discrete).")
    items = dict(spec.observation_space.items) if isinstance(spec.observation_space, spaces.Dict) else {}
    A = spec.action_space.num_values
    expected = {
        "board": lambda x: x.dtype == np.uint8 and len(x.shape) == 3 and x.shape[-1] >= 2,
        "action_mask": lambda x: x.dtype == np.uint8 and x.shape == (A,),
        "to_play": lambda x: x == spaces.Discrete(2),
    }
    for item, sound in expected.items():
        if item not in items or not sound(items[item]):
            raise ConformanceError(
                f"{PREFIX}: {name}.spec.observation_space[{item!r}] is {items.get(item)} (expected a Dict of board "
                f"uint8 [H, W, C], action_mask uint8 [{A}] and to_play Discrete(2))."
            )


def _check_symmetries(env: Any, name: str) -> None:
    symmetries = getattr(env, "symmetries", None)
    if symmetries is None:
        return
    for field, rows in symmetries._asdict().items():
        rows = np.asarray(rows)
        identity = np.arange(rows.shape[-1])
        if rows.dtype != np.int32 or (np.sort(rows, axis=-1) != identity).any() or (rows[0] != identity).any():
            raise ConformanceError(
                f"{PREFIX}: {name}.symmetries.{field} does not hold permutations (expected int32 [G, N], each row a "
                "permutation of 0 to N - 1, and the first one the identity)."
            )
