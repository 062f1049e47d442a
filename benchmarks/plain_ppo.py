"""Plain PPO on CartPole in one file: the yardstick the library's speed is compared with.

Written the way a researcher would write it in an afternoon (compare purejaxrl): environments, rollout, GAE, epochs of shuffled
minibatches and Adam inside one jitted program, nothing tuned beyond that. It does not import podracer.

    python benchmarks/plain_ppo.py [--num-envs 1024] [--num-steps 32] [--updates 20] [--calls 5]
"""

import argparse
import functools
import statistics
import time
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

GAMMA, LAMBDA, CLIP, VF_COEF, ENT_COEF, EPOCHS, MINIBATCHES = 0.99, 0.95, 0.2, 0.5, 0.01, 4, 4


class EnvState(NamedTuple):
    obs: jax.Array  # x, x_dot, theta, theta_dot
    time: jax.Array
    episode_return: jax.Array  # of the running episode
    last_return: jax.Array  # of the last finished one


def env_reset(key):
    obs = jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)
    return EnvState(obs, jnp.zeros((), jnp.int32), jnp.zeros(()), jnp.zeros(()))


def env_step(key, state, action):
    """CartPole-v1, with the next episode's first state returned in place of the last one's end."""
    x, x_dot, theta, theta_dot = state.obs
    force = jnp.where(action == 1, 10.0, -10.0)
    cos, sin = jnp.cos(theta), jnp.sin(theta)
    temp = (force + 0.05 * theta_dot**2 * sin) / 1.1
    theta_acc = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
    x_acc = temp - 0.05 * theta_acc * cos / 1.1
    obs = jnp.stack([x + 0.02 * x_dot, x_dot + 0.02 * x_acc, theta + 0.02 * theta_dot, theta_dot + 0.02 * theta_acc])
    t = state.time + 1
    done = (jnp.abs(obs[0]) > 2.4) | (jnp.abs(obs[2]) > 12 * 2 * jnp.pi / 360) | (t >= 500)
    reward = jnp.ones(())
    episode_return = state.episode_return + reward
    stepped = EnvState(obs, t, episode_return, state.last_return)
    fresh = env_reset(key)._replace(last_return=episode_return)
    return jax.tree.map(lambda a, b: jnp.where(done, a, b), fresh, stepped), reward, done


class ActorCritic(nn.Module):
    num_actions: int

    @nn.compact
    def __call__(self, x):
        def dense(size, scale):
            return nn.Dense(size, kernel_init=nn.initializers.orthogonal(scale), bias_init=nn.initializers.zeros)

        h = nn.tanh(dense(64, 2**0.5)(x))
        h = nn.tanh(dense(64, 2**0.5)(h))
        logits = dense(self.num_actions, 0.01)(h)
        h = nn.tanh(dense(64, 2**0.5)(x))
        h = nn.tanh(dense(64, 2**0.5)(h))
        value = dense(1, 1.0)(h)
        return logits, value[..., 0]


class Transition(NamedTuple):
    obs: jax.Array
    action: jax.Array
    logp: jax.Array
    value: jax.Array
    reward: jax.Array
    done: jax.Array


class State(NamedTuple):
    params: dict
    opt_state: optax.OptState
    env_state: EnvState
    key: jax.Array


def make(num_envs: int = 1024, num_steps: int = 32, updates_per_call: int = 20):
    net = ActorCritic(2)
    optimiser = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-4, eps=1e-5))
    batch_size = num_envs * num_steps

    def init(key):
        key, net_key, env_key = jax.random.split(key, 3)
        params = net.init(net_key, jnp.zeros((1, 4)))
        env_state = jax.vmap(env_reset)(jax.random.split(env_key, num_envs))
        return State(params, optimiser.init(params), env_state, key)

    def rollout_step(params, carry, _):
        env_state, key = carry
        key, action_key, env_key = jax.random.split(key, 3)
        obs = env_state.obs
        logits, value = net.apply(params, obs)
        action = jax.random.categorical(action_key, logits)
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=1)[:, 0]
        env_state, reward, done = jax.vmap(env_step)(jax.random.split(env_key, num_envs), env_state, action)
        return (env_state, key), Transition(obs, action, logp, value, reward, done)

    def gae(traj, last_value):
        def scan_step(carry, row):
            advantage, next_value = carry
            mask = 1.0 - row.done
            delta = row.reward + GAMMA * next_value * mask - row.value
            advantage = delta + GAMMA * LAMBDA * mask * advantage
            return (advantage, row.value), advantage

        _, advantages = jax.lax.scan(scan_step, (jnp.zeros_like(last_value), last_value), traj, reverse=True)
        return advantages, advantages + traj.value

    def loss_fn(params, batch):
        traj, advantage, target = batch
        logits, value = net.apply(params, traj.obs)
        log_probs = jax.nn.log_softmax(logits)
        logp = jnp.take_along_axis(log_probs, traj.action[:, None], axis=1)[:, 0]
        value_clipped = traj.value + (value - traj.value).clip(-CLIP, CLIP)
        value_loss = 0.5 * jnp.maximum((value - target) ** 2, (value_clipped - target) ** 2).mean()
        ratio = jnp.exp(logp - traj.logp)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy_loss = -jnp.minimum(ratio * advantage, ratio.clip(1 - CLIP, 1 + CLIP) * advantage).mean()
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
        return policy_loss + VF_COEF * value_loss - ENT_COEF * entropy, (policy_loss, value_loss, entropy)

    def minibatch_step(carry, batch):
        params, opt_state = carry
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, opt_state = optimiser.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (loss, *aux)

    def epoch(batch, carry, key):
        order = jax.random.permutation(key, batch_size)
        shuffled = jax.tree.map(lambda x: x[order].reshape(MINIBATCHES, -1, *x.shape[1:]), batch)
        return jax.lax.scan(minibatch_step, carry, shuffled)

    def update(state, _):
        (env_state, key), traj = jax.lax.scan(
            functools.partial(rollout_step, state.params), (state.env_state, state.key), None, num_steps
        )
        _, last_value = net.apply(state.params, env_state.obs)
        advantages, targets = gae(traj, last_value)
        batch = jax.tree.map(lambda x: x.reshape(batch_size, *x.shape[2:]), (traj, advantages, targets))
        key, epoch_key = jax.random.split(key)
        (params, opt_state), losses = jax.lax.scan(
            functools.partial(epoch, batch), (state.params, state.opt_state), jax.random.split(epoch_key, EPOCHS)
        )
        metrics = dict(zip(("loss", "policy_loss", "value_loss", "entropy"), jax.tree.map(jnp.mean, losses)))
        metrics["episode_return"] = env_state.last_return.mean()
        return State(params, opt_state, env_state, key), metrics

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state):
        return jax.lax.scan(update, state, None, updates_per_call)

    return init, step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-envs", type=int, default=1024)
    parser.add_argument("--num-steps", type=int, default=32)
    parser.add_argument("--updates", type=int, default=20, help="updates per call")
    parser.add_argument("--calls", type=int, default=5)
    args = parser.parse_args()
    init, step = make(args.num_envs, args.num_steps, args.updates)
    state = init(jax.random.key(0))
    start = time.perf_counter()
    step = step.lower(state).compile()
    compile_seconds = time.perf_counter() - start
    state, metrics = jax.block_until_ready(step(state))
    seconds = []
    for _ in range(args.calls):
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(step(state))
        seconds.append(time.perf_counter() - start)
    rate = args.num_envs * args.num_steps * args.updates / statistics.median(seconds)
    print(
        f"{rate:,.0f} steps/s, compile {compile_seconds:.1f} s, episode return {metrics['episode_return'][-1]:.1f}, "
        f"after {args.num_envs * args.num_steps * args.updates * (args.calls + 1):,} steps"
    )


if __name__ == "__main__":
    main()
