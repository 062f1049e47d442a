"""One rule for a population of gridworlds, learnt by gradients: `python examples/meta_gradient_population.py`.

As LPG (Oh et al. 2020, "Discovering Reinforcement Learning Algorithms", https://arxiv.org/abs/2007.08794) does, each
member learns in a grid of its own, several updates by a rule that all share, and the rule follows the mean gradient of
all members. LPG's rule is a network. Here it is four of V-trace's numbers.
"""

import jax
import jax.numpy as jnp
import optax

import envs_jax
import podracer

START = {"discount": 0.5, "trace_lambda": 0.9, "entropy_cost": 0.05, "learning_rate": 1e-3}
JUDGE = {"discount": 0.99, "trace_lambda": 1.0, "value_cost": 0.0, "entropy_cost": 0.0}


def numbers_of(eta):
    """Makes the rule's numbers, between 0 and 1, of eta."""
    return {name: jax.nn.sigmoid(x) for name, x in eta.items()}


def main(members=16, outer_steps=200, inner_updates=3, meta_rate=0.03, num_envs=16):
    """Trains, and prints a line every ten outer steps."""
    grid = envs_jax.make("gridworld", task="random_goals", height=4, width=4)
    config = podracer.agents.VTraceConfig(optimizer="rmsprop", learning_rate_schedule="constant", hidden_sizes=(32,))
    agent = podracer.agents.vtrace.make(grid.spec, config)
    update = podracer.anakin.update(agent, grid, num_envs=num_envs, remat=True)
    optimizer = optax.adam(meta_rate)

    def outer_loss(eta, member, parameters):
        learn = lambda member, _: update.step(member, 0.0, numbers_of(eta), parameters)[::2]  # noqa: E731
        member, reports = jax.lax.scan(learn, member, length=inner_updates)
        _, trajectory, _ = update.rollout(jax.lax.stop_gradient(member), 0.0, parameters)
        judge = member.learner._replace(hyper=member.learner.hyper | JUDGE)
        return agent.loss(member.learner.params, judge, trajectory, 0.0)[0], (member, reports.episodes)

    def mean_loss(eta, population, grids):
        losses, results = jax.vmap(outer_loss, (None, 0, 0))(eta, population, grids)
        return jnp.mean(losses), results

    @jax.jit
    def step(eta, state, population, grids):
        gradient, (population, episodes) = jax.grad(mean_loss, has_aux=True)(eta, population, grids)
        moves, state = optimizer.update(gradient, state)
        mean_return = jnp.mean(jnp.sum(episodes.return_sum, 1) / jnp.maximum(jnp.sum(episodes.count, 1), 1.0))
        return optax.apply_updates(eta, moves), state, population, mean_return

    grids = jax.vmap(grid.parameters)(jax.random.split(jax.random.key(0), members))
    begin = jax.vmap(lambda seed, parameters: update.init(seed, parameters=parameters))
    population = jax.jit(begin)(jnp.arange(members), grids)
    eta = {name: jax.scipy.special.logit(jnp.float32(x)) for name, x in START.items()}
    state = optimizer.init(eta)
    for number in range(1, outer_steps + 1):
        eta, state, population, mean_return = step(eta, state, population, grids)
        if number % 10 == 0 or number == outer_steps:
            numbers = "   ".join(f"{name} {float(x):.4f}" for name, x in numbers_of(eta).items())
            print(f"{number:4}   {numbers}   return {mean_return:+.2f}")
    return numbers_of(eta)


if __name__ == "__main__":
    main()
