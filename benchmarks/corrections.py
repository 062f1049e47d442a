"""Compares the off-policy corrections of IMPALA's table 2 for policies that act with old parameters.

    python benchmarks/corrections.py [--seeds 5] [--lags 0 8 32]

V-trace learns catch while it acts by the parameters of so many updates ago, with each of the four corrections, without
replay and with half of every batch replayed, five seeds side by side. It is evaluated by its newest parameters. Writes
the mean return over training to `benchmarks/results/corrections.json`, and a picture of it.
"""

from __future__ import annotations

import argparse
import pathlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import envs_jax
import podracer
from podracer import agents
from podracer.agents import VTraceConfig
from podracer.bench import measure
from podracer.types import ActorParams

RESULTS = pathlib.Path(__file__).parent / "results"
STEPS = 300_000
CORRECTIONS = {"vtrace": "V-trace", "one_step": "1-step", "epsilon": "epsilon", "none": "none"}
FRACTIONS = {"without replay": 0.0, "half replayed": 0.5}


def lagged(agent, lag):
    """The agent, acting by the parameters of `lag` updates ago (the first ones, until there are others)."""
    if not lag:
        return agent

    def init(key, hyper):
        state = agent.init(key, hyper)
        return state._replace(aux=jax.tree.map(lambda x: jnp.broadcast_to(x, (lag, *x.shape)), state.params))

    def actor_params(state, progress):
        # What is about to be overwritten is the oldest.
        old = jax.tree.map(lambda x: x[state.num_updates % lag], state.aux)
        return ActorParams(old, jnp.maximum(state.num_updates - lag, 0), aux=state.params)

    def act(actor, memory, timestep, key, evaluation):
        params = actor.aux if evaluation else actor.params
        return agent.act(actor._replace(params=params, aux=()), memory, timestep, key, evaluation)

    def learn(state, trajectory, progress, key):
        new, metrics = agent.learn(state._replace(aux=()), trajectory, progress, key)
        slot = state.num_updates % lag
        return new._replace(aux=jax.tree.map(lambda x, p: x.at[slot].set(p), state.aux, state.params)), metrics

    return agent._replace(init=init, actor_params=actor_params, act=act, learn=learn)


def draw(results, lags, seeds, path):
    """The mean return over training by correction and lag: all seeds, and their mean."""
    figure, axes = plt.subplots(1, len(FRACTIONS), figsize=(9, 3.6), sharey=True, layout="constrained")
    for axis, label in zip(axes, FRACTIONS):
        for i, (name, words) in enumerate(CORRECTIONS.items()):
            areas = np.array([results[f"{label}, {lag} updates, {name}"]["mean_return_over_training"] for lag in lags])
            x = np.arange(len(lags)) + 0.12 * (i - 1.5)
            axis.bar(x, areas.mean(axis=1), 0.11, label=words)
            axis.plot(np.repeat(x[:, None], seeds, 1), areas, "k.", markersize=3)
        axis.set(title=label, xlabel="age of the acting policy, in updates")
        axis.set_xticks(range(len(lags)), map(str, lags))
        axis.axhline(0, color="grey", linewidth=0.5)
    axes[0].set_ylabel("mean return over training")
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, title="correction", fontsize="small", loc="outside right center")
    figure.suptitle(f"catch, {STEPS:,} steps: mean of {seeds} seeds (dots)")
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 8, 32])
    arguments = parser.parse_args()
    env, results = envs_jax.make("catch"), {}
    for label, fraction in FRACTIONS.items():
        for lag in arguments.lags:
            for correction in CORRECTIONS:
                agent = agents.vtrace.make(env.spec, VTraceConfig(correction=correction, replay_fraction=fraction))
                result = podracer.train(
                    lagged(agent, lag),
                    env,
                    total_steps=STEPS,
                    population=arguments.seeds,
                    eval_every=STEPS // 25,
                    progress=False,
                )
                areas = [measure.over_training(result.history, member) for member in range(arguments.seeds)]
                key = f"{label}, {lag} updates, {correction}"
                results[key] = {
                    "mean_return_over_training": areas,
                    "final": [member["eval_return_mean"] for member in result.summary.get("members", [result.summary])],
                }
                print(f"{key}: {np.mean(areas):.3f} ({min(areas):.3f} to {max(areas):.3f})", flush=True)
    draw(results, arguments.lags, arguments.seeds, RESULTS / "corrections.png")
    measure.write(RESULTS / "corrections.json", "python benchmarks/corrections.py", vars(arguments), results)


if __name__ == "__main__":
    main()
