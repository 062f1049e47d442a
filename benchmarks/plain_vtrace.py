"""Plain V-trace actor-critic on Catch in one file: the yardstick the library's speed is compared with.

Written the way a researcher would write it in an afternoon: bsuite's Catch, rollout, rlax's V-trace and RMSProp inside one jitted
program, nothing tuned beyond that. It does not import podracer.

    python benchmarks/plain_vtrace.py [--num-envs 1024] [--num-steps 20] [--updates 50] [--calls 5]
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
import rlax

ROWS, COLUMNS = 10, 5
DISCOUNT, VF_COEF, ENT_COEF = 0.99, 0.5, 0.01


class EnvState(NamedTuple):
    ball_x: jax.Array
    ball_y: jax.Array
    paddle_x: jax.Array
    last_return: jax.Array  # of the last finished episode


def env_reset(key):
    zero = jnp.zeros((), jnp.int32)
    return EnvState(jax.random.randint(key, (), 0, COLUMNS), zero, zero + COLUMNS // 2, jnp.zeros(()))


def env_observe(state):
    board = jnp.zeros((ROWS, COLUMNS))
    return board.at[state.ball_y, state.ball_x].set(1.0).at[ROWS - 1, state.paddle_x].set(1.0)


def env_step(key, state, action):
    """Move the paddle by action - 1, drop the ball by a row; the next episode's first state replaces the last one's end."""
    paddle_x = jnp.clip(state.paddle_x + action - 1, 0, COLUMNS - 1)
    ball_y = state.ball_y + 1
    done = ball_y == ROWS - 1
    reward = jnp.where(done, jnp.where(paddle_x == state.ball_x, 1.0, -1.0), 0.0)
    stepped = state._replace(ball_y=ball_y, paddle_x=paddle_x)
    fresh = env_reset(key)._replace(last_return=reward)
    return jax.tree.map(lambda a, b: jnp.where(done, a, b), fresh, stepped), reward, done


class ActorCritic(nn.Module):
    num_actions: int

    @nn.compact
    def __call__(self, x):
        x = x.reshape(*x.shape[:-2], -1)
        x = nn.relu(nn.Dense(64)(x))
        x = nn.relu(nn.Dense(64)(x))
        return nn.Dense(self.num_actions)(x), nn.Dense(1)(x)[..., 0]


class Transition(NamedTuple):
    obs: jax.Array
    action: jax.Array
    logits: jax.Array
    reward: jax.Array
    discount: jax.Array


class State(NamedTuple):
    params: dict
    opt_state: optax.OptState
    env_state: EnvState
    key: jax.Array


def make(num_envs: int = 1024, num_steps: int = 20, updates_per_call: int = 50):
    net = ActorCritic(3)
    optimiser = optax.chain(optax.clip_by_global_norm(40.0), optax.rmsprop(6e-4, decay=0.99, eps=0.01))

    def init(key):
        key, net_key, env_key = jax.random.split(key, 3)
        params = net.init(net_key, jnp.zeros((1, ROWS, COLUMNS)))
        env_state = jax.vmap(env_reset)(jax.random.split(env_key, num_envs))
        return State(params, optimiser.init(params), env_state, key)

    def rollout_step(params, carry, _):
        env_state, key = carry
        key, action_key, env_key = jax.random.split(key, 3)
        obs = jax.vmap(env_observe)(env_state)
        logits, _ = net.apply(params, obs)
        action = jax.random.categorical(action_key, logits)
        env_state, reward, done = jax.vmap(env_step)(jax.random.split(env_key, num_envs), env_state, action)
        return (env_state, key), Transition(obs, action, logits, reward, DISCOUNT * (1.0 - done))

    vtrace = jax.vmap(rlax.vtrace_td_error_and_advantage, in_axes=1, out_axes=1)

    def loss_fn(params, traj, last_obs):
        logits, value = net.apply(params, jnp.concatenate([traj.obs, last_obs[None]]))
        logits = logits[:-1]
        log_probs = jax.nn.log_softmax(logits)
        logp = jnp.take_along_axis(log_probs, traj.action[..., None], axis=-1)[..., 0]
        behaviour = jnp.take_along_axis(jax.nn.log_softmax(traj.logits), traj.action[..., None], axis=-1)[..., 0]
        rho = jax.lax.stop_gradient(jnp.exp(logp - behaviour))
        targets = vtrace(value[:-1], value[1:], traj.reward, traj.discount, rho)
        policy_loss = -(logp * jax.lax.stop_gradient(targets.pg_advantage)).sum()
        value_loss = 0.5 * (targets.errors**2).sum()
        entropy = -(jnp.exp(log_probs) * log_probs).sum()
        return policy_loss + VF_COEF * value_loss - ENT_COEF * entropy, (policy_loss, value_loss, entropy)

    def update(state, _):
        (env_state, key), traj = jax.lax.scan(
            functools.partial(rollout_step, state.params), (state.env_state, state.key), None, num_steps
        )
        last_obs = jax.vmap(env_observe)(env_state)
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, traj, last_obs)
        updates, opt_state = optimiser.update(grads, state.opt_state, state.params)
        metrics = dict(zip(("loss", "policy_loss", "value_loss", "entropy"), (loss, *aux)))
        metrics["episode_return"] = env_state.last_return.mean()
        return State(optax.apply_updates(state.params, updates), opt_state, env_state, key), metrics

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state):
        return jax.lax.scan(update, state, None, updates_per_call)

    return init, step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-envs", type=int, default=1024)
    parser.add_argument("--num-steps", type=int, default=20)
    parser.add_argument("--updates", type=int, default=50, help="updates per call")
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
        f"{rate:,.0f} steps/s, compile {compile_seconds:.1f} s, episode return {metrics['episode_return'][-1]:.2f}, "
        f"after {args.num_envs * args.num_steps * args.updates * (args.calls + 1):,} steps"
    )


if __name__ == "__main__":
    main()
