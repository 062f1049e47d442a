"""Numbers that are not finite, from environments and in losses."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs_jax
import podracer
from podracer import spaces
from podracer.anakin import random_play
from podracer.types import EnvSpec, Transition
from tests.support.small_run import RUN, Cliff, EverLonger, my_network, rows_of, steps_of


class Unseen(Cliff):
    """Observations are numbers until a lane has taken 100 steps."""

    def reset(self, key):
        return jnp.int32(0)

    spec = EnvSpec("unseen", spaces.Box(-1.0, 1.0, (1,)), spaces.Discrete(2), None)

    def step(self, state, action, key):
        return state + 1, Transition(jnp.float32(1), jnp.float32(1), jnp.asarray(False))

    def observe(self, state):
        return jnp.where(state >= 100, jnp.nan, jnp.zeros(1))


def test_observations_that_are_not_finite_are_named():
    settings = RUN | {"eval_every": 10**6, "network": my_network(1)}
    with pytest.raises(
        podracer.TrainingDivergedError, match="^the environment's observation is not finite in lane 0, and"
    ):
        podracer.train("vtrace", Unseen(), config={"rollout_length": 10}, check=False, **settings)
    # As where actions are numbers, which are not finite either by then.
    said = "the environment's observation is not finite after 100 steps of random actions"
    assert random_play.not_finite(Unseen()) == said
    assert not random_play.not_finite(envs_jax.make("pendulum"))


@pytest.mark.parametrize(
    ("agent", "bad_reward"), [("ppo", math.inf), pytest.param("vtrace", math.nan, marks=pytest.mark.slow)]
)
def test_a_loss_that_is_not_finite(agent, bad_reward, tmp_path):
    env, network = EverLonger(good_steps=100, bad_reward=bad_reward), my_network(1)  # 8 lanes: at step 800
    settings = RUN | {"eval_every": 10**6, "checkpoint_every": 240, "network": network, "run_dir": tmp_path / "run"}
    with pytest.raises(
        podracer.TrainingDivergedError,
        match=r"^the environment's reward is not finite in lane 0, and so .*loss/.* not finite after 880 .*\(11 updates\)",
    ) as caught:
        podracer.train(agent, env, config={"rollout_length": 10}, check=False, **settings)
    assert steps_of(tmp_path / "run") == [240, 480, 720]
    assert str(tmp_path / "run" / "checkpoints" / "720") in str(caught.value)
    good = podracer.load(tmp_path / "run", environment=env, network=network)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(good.learner.params))
    assert good.history[-1]["env_steps"] == 720
    rows = rows_of(tmp_path / "run")
    assert all(math.isfinite(value) for row in rows for value in row.values())
