"""V-trace that learns its own discount and lambda by gradients (Xu et al. 2018): `python examples/meta_gradient.py`.

The first action of a chain decides the reward of its last step, and the rewards before are noise. At a discount of 0.5
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

START = {"discount": 0.5, "trace_lambda": 0.98}
"""The first gamma and lambda."""


def numbers_of(eta):
    """Makes gamma and lambda, between 0 and 1, of eta."""
    return {name: jax.nn.sigmoid(x) for name, x in eta.items()}


def make(num_envs=128, updates=50):
    """Makes the agent, and functions that begin a run and do some updates of it."""
    environment = envs_jax.make("gridworld", task="delayed_chain", noisy_rewards=True)
    config = podracer.agents.VTraceConfig(
        rollout_length=22,  # an episode has 11 rows
        hidden_sizes=(32,),
        learning_rate=3e-3,
        learning_rate_schedule="constant",
        optimizer="rmsprop",
        rmsprop_decay=0.95,
    )
    agent = podracer.agents.vtrace.make(environment.spec, config)
    update = podracer.anakin.update(agent, environment, num_envs=num_envs)

    def begin(seed):
        """Makes eta, the state of its optimiser, and a member."""
        eta = {name: jax.scipy.special.logit(jnp.float32(x)) for name, x in START.items()}
        return eta, optax.adam(0.0).init(eta), update.init(seed)

    def outer_loss(eta, member):
        # The inner update by eta: theta' = theta + f(tau, theta, eta) (equation 1).
        after, _, report = update.step(member, 0.0, numbers_of(eta))
        # J'(tau', theta', eta') on the next rollout tau', which is data (cross-validation, section 2.1).
        _, trajectory, _ = update.rollout(jax.lax.stop_gradient(after), 0.0)
        judge = after.learner._replace(hyper=after.learner.hyper | JUDGE)
        loss, _ = agent.loss(after.learner.params, judge, trajectory, 0.0)
        return loss, (after, report.episodes)

    def train(run, meta_rate):
        """Does some updates; the second result is the mean return of their episodes."""

        def step(run, _):
            # eta goes down the gradient of J', through the inner update (equation 4).
            eta, state, member = run
            gradient, (member, episodes) = jax.grad(outer_loss, has_aux=True)(eta, member)
            moves, state = optax.adam(meta_rate).update(gradient, state)
            return (optax.apply_updates(eta, moves), state, member), episodes

        run, episodes = jax.lax.scan(step, run, length=updates)
        return run, episodes.return_sum.sum() / episodes.count.sum()

    return agent, begin, train, num_envs * config.rollout_length * updates


def main(total_steps=2_000_000, seed=0, meta_rate=0.03):
    """Trains, and prints a line every so many updates."""
    _, begin, train, steps = make()
    run, train = jax.jit(begin)(seed), jax.jit(train)
    for _ in range(total_steps // steps):
        run, mean = train(run, meta_rate)
        gamma, trace_lambda = numbers_of(run[0]).values()
        env_steps = run[2].env_steps.to_float()  # without the rows of resets
        print(f"{env_steps:9,.0f} steps   gamma {gamma:.3f}   lambda {trace_lambda:.3f}   return {mean:+.2f}")


if __name__ == "__main__":
    main()
