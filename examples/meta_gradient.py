"""V-trace that learns its own discount and lambda by gradients (Xu et al. 2018): `python examples/meta_gradient.py`.

The first action of a chain decides the reward of its last step, and the rewards before are noise. With a discount of 0.5
that is too far away. An update moves the parameters by a rollout. The next rollout, judged by a discount and a lambda
that stay, tells which discount and lambda would have moved them better ("Meta-Gradient Reinforcement Learning",
https://arxiv.org/abs/1805.09801, section 2).
"""

import jax
import jax.numpy as jnp
import optax

import envs_jax
import podracer

JUDGE = {"discount": 0.99, "trace_lambda": 1.0, "value_cost": 0.0, "entropy_cost": 0.0}
"""The numbers of the outer loss: gamma' and lambda', and of the loss the policy gradient alone."""


def numbers_of(eta):
    """Makes gamma and lambda, between 0 and 1, of eta."""
    return {name: jax.nn.sigmoid(x) for name, x in eta.items()}


def main(total_steps=2_000_000, *, meta_rate=1e-2, discount=0.5, seed=0, num_envs=64, report_every=100):
    """Trains; returns the agent, its learner, and (env_steps, gamma, lambda, mean return) of every report."""
    environment = envs_jax.make("gridworld", task="delayed_chain", noisy_rewards=True)
    config = podracer.agents.VTraceConfig(optimizer="rmsprop", learning_rate_schedule="constant", hidden_sizes=(32,))
    agent = podracer.agents.vtrace.make(environment.spec, config)
    update = podracer.anakin.update(agent, environment, num_envs=num_envs)
    optimizer = optax.adam(meta_rate)

    def outer_loss(eta, member):
        # The inner update by eta: theta' = theta + f(tau, theta, eta) (equation 1).
        after, _, report = update.step(member, 0.0, numbers_of(eta))
        # J'(tau', theta', eta') on the next rollout tau', which is data (cross-validation, section 2.1).
        _, trajectory, _ = update.rollout(jax.lax.stop_gradient(after), 0.0)
        judge = {**after.learner.hyper, **{name: jnp.float32(x) for name, x in JUDGE.items()}}
        loss, _ = agent.loss(after.learner.params, after.learner._replace(hyper=judge), trajectory, 0.0)
        return loss, (after, report.episodes)

    def step(carry, _):
        # eta goes down the gradient of J', through the inner update (equation 4).
        eta, state, member = carry
        gradient, (member, episodes) = jax.grad(outer_loss, has_aux=True)(eta, member)
        moves, state = optimizer.update(gradient, state)
        return (optax.apply_updates(eta, moves), state, member), episodes

    train = jax.jit(lambda carry: jax.lax.scan(step, carry, length=report_every))
    start = {"discount": discount, "trace_lambda": 0.9}
    eta = {name: jax.scipy.special.logit(jnp.float32(x)) for name, x in start.items()}
    carry, rows = (eta, optimizer.init(eta), jax.jit(update.init)(seed)), []
    steps = num_envs * config.rollout_length * report_every
    for number in range(1, total_steps // steps + 1):
        carry, episodes = train(carry)
        now = numbers_of(carry[0])
        mean = episodes.return_sum.sum() / episodes.count.sum()
        rows.append((number * steps, float(now["discount"]), float(now["trace_lambda"]), float(mean)))
        print("{:9,} steps   gamma {:.3f}   lambda {:.3f}   return {:+.2f}".format(*rows[-1]))
    return agent, carry[2].learner, rows


if __name__ == "__main__":
    main()
