"""Lanes of one environment: no statistics of their own, no random generator in common, no instance too many."""

import multiprocessing
import queue
import sys
import threading
import types
from typing import Any

import gymnasium
import jax
import numpy as np
import pandas
import pytest

from podracer import environments
from podracer.environments import gymnasium_processes, gymnasium_state

WRAPPERS = gymnasium.wrappers


class Walk(gymnasium.Env):
    """Shows a random number at each of ten steps."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def observe(self):
        return self.np_random.uniform(-1, 1, 1).astype(np.float32)

    def step(self, action):
        self.t += 1
        return self.observe(), 1.0, self.t == 10, False, {}


class RunningMoments:
    mean, var, count = 0.0, 1.0, 0

    def update(self, value): ...


def kept(attribute, wrapper=gymnasium.Wrapper, training=True):
    """A wrapper of a third party with running statistics under a name."""

    def make():
        made = wrapper(Walk())
        setattr(made, attribute, RunningMoments())
        made.training = training
        return made

    return make


def frozen():
    made = WRAPPERS.NormalizeObservation(Walk())
    made.update_running_mean = False
    return made


def with_a_table():
    made = gymnasium.Wrapper(Walk())
    made.prices = pandas.DataFrame({"price": [1.0, 2.0]})
    return made


def itself():
    made = Walk()
    made.obs_rms = RunningMoments()
    return made


@pytest.mark.parametrize(
    ("make", "layer", "setting"),
    [
        (lambda: WRAPPERS.NormalizeObservation(Walk()), "NormalizeObservation", "normalize_observations"),
        (lambda: WRAPPERS.TimeLimit(WRAPPERS.NormalizeReward(Walk()), 9), "NormalizeReward", "normalize_rewards"),
        (kept("running"), "Wrapper", "normalize_observations"),
        (kept("ret_rms"), "Wrapper", "normalize_rewards"),
        (kept("running", lambda env: WRAPPERS.TransformReward(env, float)), "TransformReward", "normalize_rewards"),
        (itself, "Walk", "normalize_observations"),
    ],
)
def test_running_statistics_are_refused(make, layer, setting):
    with pytest.raises(
        ValueError, match=rf"^Walk: {layer} keeps running statistics .* the agent's own {setting}=True \(ppo\), or Tr"
    ):
        environments.adopt(make)


@pytest.mark.parametrize(
    "make", [frozen, kept("rms", training=False), with_a_table, lambda: WRAPPERS.RecordEpisodeStatistics(Walk())]
)
def test_what_does_not_learn_is_no_statistics(make):
    assert environments.adopt(make).spec.name == "Walk"


class Deaf(Walk):
    """Its generator is its own, and its `reset` does not seed it."""

    def __init__(self, generator):
        self.world = types.SimpleNamespace(generator=generator)

    def observe(self):
        draw = self.world.generator.uniform  # of every kind of generator
        return np.float32([draw(-1, 1)])


def first_rows(source, lanes=3):
    running = source.make(lanes, 5)
    try:
        return running.recv()[1].timestep.observation
    finally:
        running.close()


@pytest.mark.parametrize("generator", [np.random.default_rng(0), np.random.RandomState(0)])
def test_lanes_that_share_a_generator_are_noticed_once(generator, capsys):
    source = environments.adopt(Deaf(generator))
    assert len(np.unique(first_rows(source))) == 1
    first_rows(source)
    said = capsys.readouterr().err
    assert said.startswith("podracer: note: all 3 lanes of Deaf begin alike, for Deaf.world.generator is the same in")
    assert said.count("\n") == 1


@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey])
def test_lanes_that_share_a_key_are_noticed(key, capsys):
    first_rows(environments.adopt(Deaf(types.SimpleNamespace(key=key(3), uniform=max))))
    assert "for Deaf.world.generator.key is the same in each" in capsys.readouterr().err


def test_lanes_that_differ_are_not_noticed(capsys):
    for source in (Walk(), Walk, lambda: Deaf(np.random.default_rng())):
        assert len(np.unique(first_rows(environments.adopt(source)))) == 3
    first_rows(environments.adopt(Deaf(np.random.default_rng(0))), lanes=1)
    assert capsys.readouterr().err == ""


class Informed(Walk):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"action_mask": np.int8([1, 0])}


class Asked(Walk):
    def legal_actions(self): ...


@pytest.mark.parametrize(
    ("made", "said"), [(Informed, "Informed has action_mask in its info"), (Asked, "Asked has a method legal_actions")]
)
def test_a_mask_that_is_in_no_observation_is_noticed(made, said, capsys):
    first_rows(environments.adopt(lambda: WRAPPERS.TimeLimit(made(), 9)))
    assert capsys.readouterr().err.startswith(f"podracer: note: {said}, which agents do not follow: they take action_m")
    seen = gymnasium.spaces.Dict({"action_mask": gymnasium.spaces.MultiBinary(2)})
    assert gymnasium_state.unseen_mask(seen, {"action_mask": 1}, made()) is None


def test_generators_of_lanes_in_processes_are_asked_for():
    lane = gymnasium_processes.Lane(WRAPPERS.TimeLimit(Deaf(np.random.default_rng(0)), 9))
    vector = gymnasium.vector.SyncVectorEnv([lambda: lane])
    assert list(vector.call("generators")) == [gymnasium_state.generators(lane)]
    assert list(vector.call("generators")[0]) == ["Deaf.world.generator"]


class Only(Walk):
    """There may be one at a time, as of a simulator that has a port."""

    alive = 0

    def __init__(self):
        assert not Only.alive, "there is another one"
        Only.alive += 1

    def close(self):
        Only.alive -= 1


def test_an_instance_is_closed_before_the_next_is_made():
    source = environments.adopt(Only)
    assert Only.alive == 0
    running = source.make(1, 0)
    assert Only.alive == 1
    running.close()
    assert Only.alive == 0


def test_an_environment_that_cannot_be_reached_says_so():
    """And not that its script cannot be imported, which is what ends a process of a lane."""

    class Far(Walk):
        gone = False

        def __init__(self):
            if Far.gone:
                raise ConnectionRefusedError("nobody listens")

    source = environments.adopt(Far)
    Far.gone = True
    with pytest.raises(ConnectionRefusedError, match="nobody listens"):
        source.make(1, 0)


def test_an_evaluation_takes_the_place_of_training_where_both_cannot_be(capsys):
    """Training waits for it, and goes on with another episode as a break in its stream."""
    source = environments.adopt(Only)
    training, action, rows = source.make(1, 0), np.zeros(1, np.int32), queue.SimpleQueue()
    seen = [training.recv()[1].timestep.observation[0, 0]]
    for _ in range(2):
        training.send(np.arange(1), action)
        assert not training.recv()[1].timestep.first[0]
        evaluation = source.make(1, 7, evaluation=True)
        assert Only.alive == 1
        assert evaluation.recv()[1].timestep.first[0]
        training.send(np.arange(1), action)
        waits = threading.Thread(target=lambda: rows.put(training.recv()[1].timestep))
        waits.start()
        evaluation.send(np.arange(1), action)
        assert not evaluation.recv()[1].timestep.first[0]
        assert rows.empty()
        evaluation.close()
        row = rows.get(timeout=5)
        waits.join()
        assert (row.first[0], row.reward[0]) == (True, 0.0)
        seen.append(row.observation[0, 0])
    assert len(set(seen)) == 3
    with pytest.raises(AssertionError, match="there is another one"):  # of two lanes one is too many
        source.make(2, 7, evaluation=True)
    assert Only.alive == 0, "the first of them is closed"
    training.send(np.arange(1), action)
    assert training.recv()[1].timestep.first[0]
    training.close()
    assert Only.alive == 0
    assert capsys.readouterr().err.count("note: Only cannot be made twice (AssertionError: there is another one") == 1


def test_an_instance_that_cannot_be_copied():
    instance = Walk()
    instance.lock = threading.Lock()
    with pytest.raises(
        TypeError, match=r"^Walk cannot be copied \(TypeError: .*lock.*every lane is a copy; give the cl"
    ):
        environments.adopt(instance)


def test_what_cannot_be_sent_to_a_process(monkeypatch):
    monkeypatch.setattr(gymnasium_processes, "require_guard", lambda: None)
    lock = threading.Lock()
    source = environments.adopt(lambda: Walk() if lock else None, {"vectorization": "async"})
    with pytest.raises(
        TypeError, match=r"^Walk cannot be sent to the process of a lane \(.*pickle.*; use a class or fun"
    ):
        source.make(1, 0)


def test_an_error_in_a_process_says_where():
    def step(self, action):
        raise KeyError("b")

    lane = gymnasium_processes.Lane(type("Broken", (Walk,), {"step": step})())
    lane.reset(seed=1)
    with pytest.raises(
        gymnasium_processes.LaneError, match=r"^KeyError: 'b', in step, .*lanes\.py, line \d+, `raise Key"
    ):
        lane.step(0)


@pytest.mark.parametrize(
    ("script", "refused"),
    [
        ("import logging\nlogging.getLogger(__name__)\n", True),
        ('if __name__ == "__main__":\n    pass\n', False),
        ('if "__main__" != __name__:\n    raise SystemExit\n', False),
        ("\x00", False),
    ],
)
def test_a_script_that_processes_cannot_import(script, refused, tmp_path, monkeypatch):
    path = tmp_path / "script.py"
    path.write_text(script)
    main: Any = types.SimpleNamespace(__file__=str(path))
    monkeypatch.setitem(sys.modules, "__main__", main)
    options = {"vectorization": "async"}
    if refused:
        with pytest.raises(
            ValueError,
            match=r'^vectorization="async": every lane .*script\.py, so what .* if __name__ == "__main__"\.$',
        ):
            environments.adopt(Walk, options)
    else:
        environments.adopt(Walk, options)
    # A process that gets as far has begun as a lane; who began it says why.
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {}, raising=False)
    monkeypatch.setattr(multiprocessing.current_process(), "_name", "Worker<AsyncVectorEnv>-0")
    with pytest.raises(SystemExit):
        environments.adopt(Walk, options)
