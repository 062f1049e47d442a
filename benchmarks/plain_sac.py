"""Plain SAC in one file: the yardstick that the speed of `sac`'s updates is compared with (benchmarks/continuous.py).

Written as CleanRL's JAX files and sbx (Raffin et al.) are: a replay in NumPy, from which a call draws the samples of all its
updates, Flax modules and Optax's Adam, critics stacked by `vmap`, and updates in a loop within one jitted call (sbx) or one
call each (CleanRL). It does not import podracer.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

GAMMA, TAU, RATE = 0.99, 0.005, 3e-4


class Actor(nn.Module):
    """Means and log standard deviations of a tanh Gaussian."""

    num_actions: int
    sizes: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        for size in self.sizes:
            x = nn.relu(nn.Dense(size)(x))
        mean, log_std = nn.Dense(self.num_actions)(x), nn.Dense(self.num_actions)(x)
        return mean, jnp.clip(log_std, -5.0, 2.0)


class Critic(nn.Module):
    """One value of an observation and an action."""

    sizes: tuple[int, ...]

    @nn.compact
    def __call__(self, x, action):
        x = jnp.concatenate([x, action], axis=-1)
        for size in self.sizes:
            x = nn.relu(nn.Dense(size)(x))
        return nn.Dense(1)(x)[..., 0]


class Replay:
    """Rows of a NumPy ring that is full."""

    def __init__(self, capacity: int, num_inputs: int, num_actions: int):
        self.rng = np.random.default_rng(0)
        normal = lambda *shape: self.rng.normal(size=shape).astype(np.float32)  # noqa: E731
        self.observation, self.next = normal(capacity, num_inputs), normal(capacity, num_inputs)
        self.action, self.reward = np.tanh(normal(capacity, num_actions)), normal(capacity)
        self.ended = (self.rng.random(capacity) < 0.001).astype(np.float32)

    def sample(self, n: int) -> tuple[np.ndarray, ...]:
        """Observations, actions, rewards, ends and next observations of n rows."""
        i = self.rng.integers(0, len(self.reward), n)
        return self.observation[i], self.action[i], self.reward[i], self.ended[i], self.next[i]


class State(NamedTuple):
    """The learner's."""

    actor: Any
    critic: Any
    target: Any
    log_alpha: Any
    optimizers: Any
    key: Any


class SAC:
    """The learner's functions for observations and actions of a size."""

    def __init__(self, num_inputs: int, num_actions: int, sizes: tuple[int, ...]):
        self.actor, self.num_actions, self.num_inputs = Actor(num_actions, sizes), num_actions, num_inputs
        vectorized = nn.vmap(
            Critic, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, out_axes=0, axis_size=2
        )
        self.critic, self.adam = vectorized(sizes), optax.adam(RATE)

    def init(self, key):
        """The first state."""
        x, a = jnp.zeros((1, self.num_inputs)), jnp.zeros((1, self.num_actions))
        actor, critic = self.actor.init(key, x), self.critic.init(key, x, a)
        log_alpha = jnp.zeros(())
        optimizers = [self.adam.init(tree) for tree in (actor, critic, log_alpha)]
        return State(actor, critic, critic, log_alpha, optimizers, key)

    def sample(self, actor, x, key):
        """Actions and their log-probabilities."""
        mean, log_std = self.actor.apply(actor, x)
        u = mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)
        gaussian = -0.5 * ((u - mean) / jnp.exp(log_std)) ** 2 - log_std - 0.5 * jnp.log(2 * jnp.pi)
        return jnp.tanh(u), jnp.sum(gaussian - 2 * (jnp.log(2) - u - jax.nn.softplus(-2 * u)), axis=-1)

    def update(self, state, batch):
        """One update of critics, actor and alpha."""
        x, action, reward, ended, following = batch
        key, target_key, actor_key = jax.random.split(state.key, 3)
        alpha = jnp.exp(state.log_alpha)
        next_action, log_prob = self.sample(state.actor, following, target_key)
        q = jnp.min(self.critic.apply(state.target, following, next_action), axis=0)
        y = reward + GAMMA * (1 - ended) * (q - alpha * log_prob)
        critic_loss = lambda p: 0.5 * jnp.mean(jnp.sum((self.critic.apply(p, x, action) - y) ** 2, axis=0))  # noqa: E731
        critic, of_critic = self.step(jax.grad(critic_loss)(state.critic), state.optimizers[1], state.critic)

        def actor_loss(actor):
            action, log_prob = self.sample(actor, x, actor_key)
            return jnp.mean(alpha * log_prob - jnp.min(self.critic.apply(critic, x, action), axis=0)), log_prob

        grads, log_prob = jax.grad(actor_loss, has_aux=True)(state.actor)
        actor, of_actor = self.step(grads, state.optimizers[0], state.actor)
        alpha_loss = lambda p: jnp.exp(p) * jnp.mean(-log_prob + self.num_actions)  # noqa: E731
        log_alpha, of_alpha = self.step(jax.grad(alpha_loss)(state.log_alpha), state.optimizers[2], state.log_alpha)
        target = optax.incremental_update(critic, state.target, TAU)
        return State(actor, critic, target, log_alpha, [of_actor, of_critic, of_alpha], key)

    def step(self, grads, state, params):
        """Adam's."""
        updates, state = self.adam.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @functools.partial(jax.jit, static_argnums=(0, 3))
    def updates(self, state, samples, count: int):
        """`count` updates on as many parts of samples."""
        parts = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), samples)
        one = lambda i, state: self.update(state, jax.tree.map(lambda x: x[i], parts))  # noqa: E731
        return one(0, state) if count == 1 else jax.lax.fori_loop(0, count, one, state)
