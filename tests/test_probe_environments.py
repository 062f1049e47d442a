"""Probe environments: the values in their tables, and how far apart right and wrong answers are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.types import Environment
from tests.support import probes

GAMMA = 0.9


@pytest.mark.parametrize("probe", probes.ALL, ids=lambda probe: probe.spec.name.removeprefix("probe:"))
def test_probe_values(probe: probes.Probe) -> None:
    """The tables agree with what the best policy (any policy, if none is best) earns, and rows obey the contract."""
    assert isinstance(probe, Environment)
    spec = probe.spec
    reset, step, observe = jax.jit(probe.reset), jax.jit(probe.step), jax.jit(probe.observe)
    values = {observation.tobytes(): value for observation, value in probe.values(GAMMA)}
    best = None if probe.optimal_actions is None else {x.tobytes(): a for x, a in probe.optimal_actions}
    if best is not None:
        assert set(best) == set(values)
    seen = set()
    for episode in range(8):
        key = jax.random.key(episode)
        state = reset(key)
        observations, rewards, transition = [np.asarray(observe(state))], [], None
        while transition is None or not transition.last:
            action = spec.action_space.sample(key) if best is None else best[observations[-1].tobytes()]
            assert spec.action_space.contains(action)
            state, transition = step(state, jnp.asarray(action), key)
            assert [x.dtype for x in transition[:3]] == [jnp.float32, jnp.float32, jnp.bool_]
            assert [x.shape for x in transition[:3]] == [(), (), ()]
            observations.append(np.asarray(observe(state)))
            rewards.append(float(transition.reward))
            assert len(rewards) <= (spec.max_episode_steps or 0)
            assert bool(transition.last) or transition.discount == 1
        assert all(spec.observation_space.contains(observation) for observation in observations)
        # A truncated episode goes on: its last row has a value, a terminated one's has not.
        total = values[observations[-1].tobytes()] if transition.discount else 0.0
        for observation, reward in zip(observations[-2::-1], rewards[::-1], strict=True):
            total = reward + GAMMA * total
            np.testing.assert_allclose(total, values[observation.tobytes()], rtol=1e-6)
            seen.add(observation.tobytes())
    assert seen == set(values)


def test_probes_traps_are_far_from_the_truth() -> None:
    """The best policy beats every other action, and treating truncation as a death shows."""
    for probe in probes.ALL:
        for observation, best in probe.optimal_actions or ():
            state = probes.State(jnp.asarray(observation), jnp.int32(0))
            choices = [np.int32(0), np.int32(1)] if best.ndim == 0 else [best, best + np.float32(0.1)]
            if probe.spec.action_space == probes.ConstantReward().spec.action_space:
                continue
            rewards = [float(probe.step(state, jnp.asarray(a), jax.random.key(0))[1].reward) for a in choices]
            assert np.array_equal(choices[int(np.argmax(rewards))], best)
            assert rewards[0] != rewards[1]
    truncated = probes.TruncatedReward(4)
    assert truncated.finite_sum(GAMMA) < 0.4 * truncated.values(GAMMA)[0][1]
    # Monte Carlo and TD(0) are below the bound.
    mean = np.mean([(1 - GAMMA**k) / (1 - GAMMA) for k in range(1, 5)])
    assert max(mean, 1 / (1 - GAMMA * (1 - 1 / 4))) < truncated.finite_sum(GAMMA)
