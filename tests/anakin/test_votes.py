"""Hosts that share a program launch the same calls, whatever each knows of clocks and signals; no program is compiled."""

import random
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

from podracer.anakin import runner
from podracer.learning.counter import Counter
from podracer.run.driver import RunHooks
from podracer.types import EpisodeStats

STEPS_AN_UPDATE, TOTAL = 10, 4000


class Shared:
    """A program of several processes, whose calls wait for each other and take the least of the votes."""

    def __init__(self, processes):
        self._votes, self._barrier = [0] * processes, threading.Barrier(processes, timeout=10)
        self.differed = False

    def of(self, index):
        def call(state, limits):
            until, _, self._votes[index] = limits
            self._barrier.wait()
            least, differed = min(self._votes), len(set(self._votes)) > 1
            self._barrier.wait()  # nobody votes again before all have read
            self.differed |= differed and least > 0
            updates = min(least, -(-(until - state.steps) // STEPS_AN_UPDATE))
            state = at(state.steps + updates * STEPS_AN_UPDATE)
            one = lambda x: np.asarray([x], np.float32)  # noqa: E731
            report = types.SimpleNamespace(
                max_updates=[least],
                updates=np.asarray([updates]),
                env_steps=state.env_steps,
                num_updates=state.learner.num_updates,
                metrics={},
                finite=np.asarray([True]),
                episodes=EpisodeStats(one(0), one(0), one(0)),
            )
            return state, report

        return runner.Compiled(call, None, 0.0, None)


def at(steps):
    learner = types.SimpleNamespace(num_updates=jnp.asarray([steps // STEPS_AN_UPDATE]))
    counter = Counter(jnp.asarray([0]), jnp.asarray([steps]))
    return types.SimpleNamespace(steps=steps, learner=learner, env_steps=counter)


@pytest.mark.parametrize("stop_at", [None, (0, 0), (1, 1), (1, 2), (0, 5), (1, 11)], ids=str)
def test_hosts_launch_the_same_calls(stop_at, monkeypatch):
    """Their clocks go at random, and one of them wants to stop at its k-th look."""
    clock = threading.local()

    def tick():
        clock.now += clock.chance.expovariate(1 / clock.mean)
        return clock.now

    monkeypatch.setattr(runner, "time", types.SimpleNamespace(perf_counter=tick))
    shared = Shared(2)

    def host(index):
        clock.now, clock.mean, clock.chance = 0.0, (0.02, 0.2)[index], random.Random(index)
        looks, seen = [], []

        def should_stop():
            looks.append(None)
            return stop_at is not None and index == stop_at[0] and len(looks) > stop_at[1]

        state, complete = runner.run(
            shared.of(index),
            lambda *limits: limits,
            at(0),
            RunHooks(
                next_milestone=lambda steps: min(TOTAL, (steps // 1000 + 1) * 1000),
                on_progress=lambda progress: seen.append(progress.env_steps),
                on_milestone=lambda state, steps: seen.append(-steps),
                should_stop=should_stop,
            ),
            total_steps=TOTAL,
            max_updates_per_call=50,
        )
        return state.steps, complete, seen

    with ThreadPoolExecutor() as pool:
        hosts = [one.result(30) for one in [pool.submit(host, index) for index in range(2)]]
    assert hosts[0] == hosts[1]
    assert hosts[0][1] == (stop_at is None)
    assert shared.differed or (stop_at and stop_at[1] < 5), "what they would have done by themselves"
