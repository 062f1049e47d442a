"""The settings of DQN: the replay that they ask for, and what is refused."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, nets, spaces
from podracer.agents import DQNConfig
from tests.support.small_dqn import SPEC, made


def test_the_replay_is_what_the_settings_say() -> None:
    agent = made(n_step=3, frame_stack=4, batch_size=32, replay_ratio=8.0, importance_exponent=0.4)
    spec: Any = agent.replay
    assert (spec.starts, spec.length, spec.context, spec.ratio) == ("rows", 4, 3, 8.0)
    assert (spec.capacity, spec.min_size, spec.batch_size) == (20_000, 1_000, 32)
    assert spec.priority is None
    found = [float(spec.importance_exponent(jnp.float32(x))) for x in (0.0, 0.5, 1.0)]
    np.testing.assert_allclose(found, [0.4, 0.7, 1.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replay_capacity": 100}, "replay_min_size=1000 must be at most replay_capacity=100"),
        ({"max_value": float("inf")}, "max_value=inf must be finite"),
        ({"max_value": 10.0}, 'max_value=10.0 is of distributions, not of values="mean"; leave it out.'),
        ({"num_bins": 50}, 'num_bins=50 is of distributions, not of values="mean"; leave it out.'),
        ({"importance_exponent": 0.5}, "importance_exponent=0.5 corrects for priorities, of which there are none with"),
        ({"importance_exponent_final": 0.5}, "importance_exponent_final=0.5 corrects for priorities"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    """Beside those of tests/cli/test_cli_mistakes.py."""
    with pytest.raises(ValueError, match=message):
        DQNConfig(**settings)


def test_networks_that_do_not_fit_are_refused() -> None:
    plain = nets.make_q(SPEC, hidden_sizes=(4,), head_size=0)
    with pytest.raises(nets.NetworkError, match=r"noise=0.5: only the library's own network"):
        agents.dqn.make(SPEC, DQNConfig(noise=0.5), plain)
    for ours in ({"dueling": True}, {"head_size": 64}):
        with pytest.raises(nets.NetworkError, match="is of the library's own network; leave it out"):
            agents.dqn.make(SPEC, DQNConfig(**ours), plain)
    for values in ("categorical", "quantile"):
        with pytest.raises(
            nets.NetworkError, match=r"Discrete\(4\) needs P = 204 outputs: 51 numbers for the value of"
        ):
            agents.dqn.make(SPEC, DQNConfig(values=values), plain)
    with pytest.raises(nets.NetworkError, match="dqn replays single rows, .* r2d2 replays sequences"):
        agents.dqn.make(SPEC, DQNConfig(), nets.make_q(SPEC, hidden_sizes=(4,), core=nets.CoreSettings("lstm", 3)))
    with pytest.raises(ValueError, match="action values need Discrete"):
        agents.dqn.make(SPEC._replace(action_space=spaces.Box(-1.0, 1.0, (2,))))
