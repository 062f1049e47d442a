"""A loss of your own: PPO with a penalty on KL divergence instead of clipping: `python examples/own_loss.py`.

Schulman et al. 2017, section 4, with a fixed coefficient. The other agents' losses are replaced in the same way.
"""

import jax.numpy as jnp

import envs_jax
import podracer
from podracer.agents import PPOConfig, ppo

KL_COST = 1.0


def loss(outputs, values, batch, distribution, hyper, config):
    """Takes and returns what `ppo.loss` does: the loss and metrics of some samples, whose sums make the whole."""
    _, metrics = ppo.loss(outputs, values, batch, distribution, hyper, config)  # the other terms are as they were
    log_ratio = jnp.where(batch.weight > 0, distribution.log_prob(outputs, batch.sample) - batch.log_prob, 0.0)
    policy = -jnp.sum(batch.weight * jnp.exp(log_ratio) * batch.advantage)
    penalty = KL_COST * metrics["policy/kl"]
    total = (
        policy
        + penalty
        + hyper["value_cost"] * metrics["loss/value"]
        - hyper["entropy_cost"] * metrics["policy/entropy"]
    )
    return total, metrics | {"loss/total": total, "loss/policy": policy, "loss/kl_penalty": penalty}


def main(total_steps=200_000, **settings):
    environment = envs_jax.make("cartpole")
    agent = ppo.make(environment.spec, PPOConfig(), loss=loss)
    return podracer.train(agent, environment, total_steps=total_steps, **settings)


if __name__ == "__main__":
    result = main()
    print(result.evaluate())
    print("the penalty at the end:", [row for row in result.history if "loss/kl_penalty" in row][-1]["loss/kl_penalty"])
