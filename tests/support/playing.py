"""Playing given actions from given states, many episodes side by side."""

import jax
import numpy as np


def play(environment, states, actions):
    """Observations [B, T + 1, ...] and transitions [B, T]; what follows a last row means nothing."""

    def episode(state, actions):
        def body(state, action):
            state, transition = environment.step(state, action, jax.random.key(0))
            return state, (environment.observe(state), transition)

        observations, transitions = jax.lax.scan(body, state, actions)[1]
        return environment.observe(state), observations, transitions

    first, later, transitions = jax.device_get(jax.jit(jax.vmap(episode))(states, np.array(actions, np.int32)))
    return jax.tree.map(lambda x, y: np.concatenate([x[:, None], y], axis=1), first, later), transitions
