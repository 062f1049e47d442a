"""The small run that tests of training share, and environments and a network of one's own for it."""

import dataclasses
import json

import jax
import jax.numpy as jnp

import podracer
from podracer import nets, spaces
from podracer.result.result import Result
from podracer.run import checkpoint, rundir
from podracer.run.config import RunConfig
from podracer.training import resolve
from podracer.types import EnvSpec, Transition

AGENT = {"rollout_length": 10, "hidden_sizes": (8,)}
RUN = {
    "total_steps": 2000,
    "num_envs": 8,
    "eval_every": 500,
    "eval_episodes": 16,
    "checkpoint_every": 500,
    "progress": False,
}
STEPS_PER_UPDATE = 72  # of 8 x 10 rows: an episode of catch is 9 transitions and a masked one
SUMMARY_KEYS = {
    *("agent", "env", "arch", "seed", "complete", "env_steps", "updates", "compile_seconds", "train_seconds"),
    *("steps_per_second", "eval_return_mean", "eval_return_std", "eval_return_interval", "eval_episodes"),
}


def train(run_dir, **changes):
    """The small run that most tests share: one compilation for all of them."""
    return podracer.train("vtrace", "catch", config=AGENT, run_dir=run_dir, **(RUN | changes))


def rows_of(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def steps_of(directory):
    return sorted(int(path.name) for path in (directory / "checkpoints").iterdir() if path.name.isdigit())


def untrained(agent, environment, run_dir=None, **parts):
    """A result and, in `run_dir`, a run, all of whose numbers are 0: for what does not need training to be seen."""
    made = resolve.resolve(agent, environment, RunConfig(total_steps=1, num_envs=8), **parts)

    def zeros(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jnp.broadcast_to(jax.random.key(0), x.shape) if is_key else jnp.zeros(x.shape, x.dtype)

    state = jax.tree.map(zeros, made.driver.like())
    if run_dir:
        rundir.prepare(run_dir, made.description, resume=False)
        checkpoints = checkpoint.Checkpoints(run_dir)
        checkpoints.save(0, state)
        checkpoints.close()
    return Result(made, state.learner, [], run_dir)


@dataclasses.dataclass(frozen=True)
class Cliff:
    """Somebody's own environment: two steps, reward for action 1, and something wrong from step `good_steps` on."""

    good_steps: int = 10**6
    bad_reward: float = 0.0
    name: str = "cliff"

    @property
    def spec(self):
        return EnvSpec(self.name, spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(2), 2)

    def reset(self, key):
        return {"time": jnp.int32(0), "side": jax.random.uniform(key)}

    def step(self, state, action, key):
        state = state | {"time": state["time"] + 1}
        last = state["time"] >= 2
        reward = jnp.where(action == 1, jnp.float32(1), jnp.float32(0))
        return state, Transition(reward, 1.0 - last.astype(jnp.float32), last)

    def observe(self, state):
        return jnp.stack([state["time"].astype(jnp.float32) / 2, state["side"]])


class EverLonger(Cliff):
    """Pays `bad_reward` once its lane has taken `good_steps` steps; the count outlives episodes, as a bug would."""

    spec = EnvSpec("ever_longer", spaces.Box(-1.0, 1.0, (1,)), spaces.Discrete(2), None)

    def reset(self, key):
        return jnp.int32(0)

    def step(self, state, action, key):
        reward = jnp.where(state >= self.good_steps, jnp.float32(self.bad_reward), jnp.float32(1))
        return state + 1, Transition(reward, jnp.float32(1), jnp.asarray(False))

    def observe(self, state):
        return jnp.zeros(1)


def my_network(num_features=2):
    def init(key):
        return {"w": 0.1 * jax.random.normal(key, (num_features, 3))}

    def apply(params, observation):
        out = observation @ params["w"]
        return out[:, :2], out[:, 2]

    return nets.feed_forward(init, apply)
