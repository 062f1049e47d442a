"""A plain act-and-append loop on an EnvPool environment: the yardstick for Sebulba's actors.

One jitted, donated call per step evaluates a 64-64 MLP, samples actions and appends the row to buffers on the device;
nothing else happens. It does not import podracer.

    python benchmarks/plain_actor.py [--task CartPole-v1] [--num-envs 64] [--num-threads 2] [--num-steps 20] [--seconds 3]
"""

import argparse
import time

import envpool
import jax
import jax.numpy as jnp
import numpy as np


def make(task, num_envs, num_threads, num_steps):
    """Returns `call(n) -> rows`, which does n rollouts of num_steps steps."""
    pool = envpool.make(task, env_type="gymnasium", num_envs=num_envs, num_threads=num_threads, seed=0)
    size, actions = int(np.prod(pool.observation_space.shape)), int(pool.action_space.n)
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = (size, 64, 64, actions)
    params = [(jax.random.normal(k, (m, n)) / m**0.5, jnp.zeros(n)) for k, m, n in zip(keys, sizes, sizes[1:])]
    observation, _ = pool.reset()
    shape = (num_steps, num_envs)
    buffers = (
        jnp.zeros((num_steps, *observation.shape), observation.dtype),
        jnp.zeros(shape),
        jnp.zeros(shape, bool),
        jnp.zeros(shape, bool),
        jnp.zeros(shape, jnp.int32),
        jnp.zeros((*shape, actions)),
    )

    def act(params, buffers, t, key, observation, reward, terminated, truncated):
        key, sample_key = jax.random.split(key)
        x = observation.reshape(num_envs, -1)
        for w, b in params[:-1]:
            x = jax.nn.relu(x @ w + b)
        logits = x @ params[-1][0] + params[-1][1]
        action = jax.random.categorical(sample_key, logits)
        row = (observation, reward, terminated, truncated, action, logits)
        buffers = jax.tree.map(lambda buffer, x: jax.lax.dynamic_update_index_in_dim(buffer, x, t, 0), buffers, row)
        return action, buffers, (t + 1) % num_steps, key

    act = jax.jit(act, donate_argnums=(1, 2, 3))
    zeros, no = np.zeros(num_envs, np.float32), np.zeros(num_envs, bool)
    state = [buffers, jnp.int32(0), jax.random.key(1), (observation, zeros, no, no)]

    def call(n):
        buffers, t, key, row = state
        for _ in range(n * num_steps):
            action, buffers, t, key = act(params, buffers, t, key, *row)
            row = pool.step(np.asarray(action))[:4]
        state[:] = [buffers, t, key, row]
        return n * num_steps * num_envs

    return call


def make_raw(task, num_envs, num_threads):
    """Returns `call(n) -> rows`, which does n steps with constant actions: the environments alone."""
    pool = envpool.make(task, env_type="gymnasium", num_envs=num_envs, num_threads=num_threads, seed=0)
    pool.reset()
    actions = np.zeros(num_envs, np.int32)

    def call(n):
        for i in range(n):
            actions[:] = i % 2
            pool.step(actions)
        return n * num_envs

    return call


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--num-steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    for name, call in (
        ("environment", make_raw(args.task, args.num_envs, args.num_threads)),
        ("act and append", make(args.task, args.num_envs, args.num_threads, args.num_steps)),
    ):
        call(2)
        rows, start = 0, time.perf_counter()
        while time.perf_counter() - start < args.seconds:
            rows += call(10)
        print(f"{name}: {rows / (time.perf_counter() - start):,.0f} rows/s")
