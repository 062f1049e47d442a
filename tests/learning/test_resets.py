"""Resets: at which updates they come, what they keep, and one fresh network for all shards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, nets, spaces
from podracer.learning import resets
from podracer.types import EnvSpec, LearnerState, Metrics
from tests.support import harness

FRESH = {"torso": jnp.float32(8.0), "q": jnp.float32(9.0)}


@jax.jit
def updated(num_updates: jax.Array, progress: jax.Array, before: jax.Array) -> tuple[LearnerState, Metrics]:
    """The state after an update, of parameters 2 and a target and an optimiser's state of 1."""
    params = jax.tree.map(lambda x: jnp.full_like(x, 2.0), FRESH)
    learner = LearnerState(params, jnp.float32(1.0), {"rate": jnp.float32(3.0)}, num_updates, jnp.float32(1.0))
    begin = lambda params: learner._replace(params=params, opt_state=jnp.float32(0.0), aux=params["q"])  # noqa: E731
    return resets.when_due(learner, progress, resets.ResetConfig(3, 0.25), before, lambda: FRESH, begin)  # type: ignore[arg-type]


def after(num_updates: jax.Array, progress: jax.Array) -> LearnerState:
    return updated(num_updates, progress, jnp.float32(0))[0]


def test_resets_come_every_so_many_updates_but_in_the_last_interval() -> None:
    """Among 12 updates: an interval follows the last one. Before the run's first steps nothing is known of its end."""
    found = [n for n in range(1, 13) if after(jnp.int32(n), jnp.float32(n / 12)).opt_state == 0.0]
    assert found == [3, 6, 9]
    assert [n for n in range(1, 13) if after(jnp.int32(n), jnp.float32(1.0)).opt_state == 0.0] == []
    assert after(jnp.int32(3), jnp.float32(0.0)).opt_state == 0.0


def test_the_pace_is_counted_from_the_first_update() -> None:
    """Among 12 updates too, that begin after half of the run."""
    rows = [updated(jnp.int32(n), jnp.float32((n + 12) / 24), jnp.float32(12)) for n in range(1, 13)]
    assert [n for n, (learner, _) in enumerate(rows, 1) if learner.opt_state == 0.0] == [3, 6, 9]
    assert [metrics["reset/count"] for _, metrics in rows] == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    config = agents.DQNConfig(replay_min_size=10_000, batch_size=32, replay_ratio=32.0, reset_interval=2_000)
    spec = EnvSpec("seen", spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(2))
    assert resets.updates_while_filling(agents.dqn.make(spec, config).replay) == 10_000
    assert resets.updates_while_filling(None) == 0


def test_a_network_of_which_nothing_is_kept_is_refused() -> None:
    spec = EnvSpec("seen", spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(2))
    own = nets.feed_forward(lambda key: {"layer": jnp.ones((2, 2))}, lambda params, x: (x @ params["layer"], x[..., 0]))
    with pytest.raises(ValueError, match="reset_shrink=0.5 keeps a part .* and no parameter of the network has torso"):
        agents.dqn.make(spec, agents.DQNConfig(reset_interval=5), own)
    agents.dqn.make(spec, agents.DQNConfig(reset_interval=5, reset_shrink=0.0), own)


def test_a_reset_by_hand() -> None:
    """A quarter of the torso is kept; heads, target and the optimiser's state are fresh; all else stays."""
    reset, plain = (jax.tree.map(float, after(jnp.int32(n), jnp.float32(0.5))) for n in (6, 7))
    assert tuple(reset) == ({"torso": 0.25 * 2 + 0.75 * 8, "q": 9.0}, 0.0, {"rate": 3.0}, 6.0, 9.0)
    assert tuple(plain) == ({"torso": 2.0, "q": 2.0}, 1.0, {"rate": 3.0}, 7.0, 1.0)


def test_torso_and_core_are_known_by_their_names() -> None:
    names = ("torso", "value_torso", "torso_image", "Torso_0", "core", "LSTMCore_0")
    others = ("policy", "value", "q_hidden", "score")
    params = {"params": {name: {"kernel": jnp.ones(2)} for name in (*names, *others)}}
    mixed = resets.shrink_and_perturb(params, jax.tree.map(jnp.zeros_like, params), 0.5)["params"]
    assert {name: float(x["kernel"][0]) for name, x in mixed.items()} == {
        **dict.fromkeys(names, 0.5),
        **dict.fromkeys(others, 0.0),
    }


def test_all_shards_have_one_key() -> None:
    """It differs from update to update, whatever a shard's own key is."""
    keys = jax.random.split(jax.random.key(0), (3, 2, 2))
    found = np.asarray([jax.random.key_data(harness.over_axes(resets.shared)(each)) for each in keys])
    assert (found == found[:, :1, :1]).all()
    assert len(np.unique(found[:, 0, 0], axis=0)) == 3
