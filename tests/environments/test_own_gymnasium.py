"""Gymnasium environments of one's own: every form in which they can be given, and what is said of their mistakes."""

import dataclasses
import functools
import importlib.util
import json
import sys
import textwrap

import gymnasium
import numpy as np
import pytest

import envs_jax
import podracer
from podracer import environments, spaces
from podracer.environments import imports
from podracer.environments.gymnasium import GymnasiumEnvironments
from podracer.run.config import RunConfig
from podracer.training.resolve import resolve

BOX = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)


class Reach(gymnasium.Env):
    """Ends after `length` steps; the observation is a random place, and the step."""

    def __init__(self, length=5, render_mode=None):
        self.observation_space = gymnasium.spaces.Dict({"place": BOX, "step": gymnasium.spaces.Discrete(100)})
        self.action_space = gymnasium.spaces.Discrete(3)
        self.length, self.render_mode = length, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def observe(self):
        return {"place": self.np_random.uniform(-1, 1, 2).astype(np.float32), "step": self.t}

    def step(self, action):
        self.t += 1
        return self.observe(), float(self.t), self.t == self.length, False, {"halfway": self.t == 2}

    def render(self):
        return np.full((4, 6, 3), self.t, np.uint8)


def play(source, steps, num_lanes=3):
    environment = source.make(num_lanes, 7)
    rows = []
    for _ in range(steps):
        lanes, row = environment.recv()
        rows.append(row)
        environment.send(lanes, np.zeros(num_lanes, np.int32))
    environment.close()
    return rows


@pytest.mark.parametrize("form", [Reach, Reach(), lambda: Reach(), lambda: gymnasium.wrappers.TimeLimit(Reach(), 99)])
def test_every_form_gives_the_same_rows(form):
    source = environments.adopt(form)
    assert isinstance(source, GymnasiumEnvironments)
    assert source.spec.name == "Reach"
    assert source.spec.action_space == spaces.Discrete(3)
    assert source.spec.max_episode_steps in (None, 99)
    rows = play(source, 14)
    np.testing.assert_array_equal(
        [row.timestep.observation["step"][1] for row in rows], [0, 1, 2, 3, 4, 5] * 2 + [0, 1]
    )
    np.testing.assert_array_equal([row.timestep.first[1] for row in rows], ([True] + [False] * 5) * 2 + [True, False])
    np.testing.assert_array_equal([row.timestep.reward[2] for row in rows], [0, 1, 2, 3, 4, 5] * 2 + [0, 1])
    places = np.stack([row.timestep.observation["place"] for row in rows])
    assert len(np.unique(places)) == places.size, "lanes share a stream of random numbers, or an environment"
    expected = np.stack([row.timestep.observation["place"] for row in play(environments.adopt(Reach), 14)])
    np.testing.assert_array_equal(places, expected)


def test_options_of_ones_own():
    source = environments.adopt(Reach, {"max_episode_steps": 3, "settings": ["length=50"]})
    assert source.spec.max_episode_steps == 3
    ends = [(row.timestep.last[0], row.timestep.discount[0]) for row in play(source, 4, 1)]
    assert ends[-1] == (True, 1.0)
    with pytest.raises(ValueError, match=r"settings=\('length=3',\): <Reach.*> is made already"):
        environments.adopt(Reach(), {"settings": ("length=3",)})
    with pytest.raises(ValueError, match="GymnasiumOptions has no field 'size'"):
        environments.adopt(Reach, {"size": 3})


def test_pictures(monkeypatch):
    shown = environments.adopt(Reach).render(0)
    shown.recv()
    assert shown.frame().shape == (4, 6, 3)
    source, closed = environments.adopt(lambda: Reach()), []
    monkeypatch.setattr(Reach, "close", lambda self: closed.append(self))
    with pytest.raises(ValueError, match="Reach cannot be rendered: let its __init__ take render_mode='rgb_array'"):
        source.render(0)
    assert len(closed) == 1


def test_a_library_that_cannot_draw_is_one_line(monkeypatch):
    """As MuJoCo's without a display, which may raise anything."""

    def draw(self):
        raise AttributeError("'NoneType' object has no attribute 'eglQueryString'\nand more")

    monkeypatch.setattr(Reach, "render", draw)
    monkeypatch.setitem(sys.modules, "mujoco", json)
    shown = environments.adopt(Reach).render(0)
    shown.recv()
    with pytest.raises(
        ValueError, match=r"Reach cannot be rendered: Attrib.*eglQueryString'; without a display, set MUJOCO_GL"
    ):
        shown.frame()


def test_one_object_cannot_be_every_lane():
    one = Reach()
    with pytest.raises(ValueError, match="returned the same Reach twice; every lane needs its own"):
        environments.adopt(lambda: one).make(2, 0)


def test_what_is_not_accepted():
    batch = gymnasium.vector.SyncVectorEnv([Reach])
    with pytest.raises(TypeError, match="SyncVectorEnv is a batch of environments already; give the class of one"):
        environments.adopt(batch)
    with pytest.raises(
        TypeError, match=r"<lambda> takes arguments \(missing .*'size'\); give a function without, that calls it"
    ):
        environments.adopt(lambda size: Reach(size))
    for thing, name in ((3, "a int"), (dict, r"dict\(\)"), (lambda: None, r".*<lambda>\(\)")):
        with pytest.raises(TypeError, match=rf"{name} is no environment; give a name .*, a gymnasium\.Env, or a class"):
            environments.adopt(thing)


def test_classes_of_our_own_protocol():
    class Mine:
        spec = podracer.types.EnvSpec("mine", spaces.Box(0, 1, (1,)), spaces.Discrete(2))

        def reset(self, key): ...
        def step(self, state, action, key): ...
        def observe(self, state): ...

    for form in (Mine, lambda: Mine(), Mine()):
        assert type(environments.adopt(form)) is Mine
    with pytest.raises(ValueError, match="env_options belong to an environment given by name"):
        environments.adopt(Mine, {"settings": ()})


RUN = RunConfig(total_steps=60, num_envs=2, eval_episodes=2, seed=1)
CONFIG = {"rollout_length": 10, "hidden_sizes": (8,)}


@pytest.mark.slow
def test_train_and_load(tmp_path):
    """The run remembers its options, but not the object."""
    options = {"max_episode_steps": 4, "metrics": ("halfway",)}
    settings = {"total_steps": 60, "num_envs": 2, "eval_episodes": 2, "config": CONFIG, "progress": False}
    result = podracer.train("vtrace", Reach, env_options=options, run_dir=tmp_path / "run", **settings)
    assert result.environment.spec.max_episode_steps == 4
    assert result.description["env"] == "Reach"
    row = next(row for row in result.history if row.get("episode/count"))
    assert (row["episode/return"], row["episode/halfway"]) == (10.0, 1.0)
    named = r"was trained with your own environment, tests.environments.test_own_gymnasium:Reach"
    with pytest.raises(ValueError, match=named + ": add --trust to import it, which runs its code"):
        podracer.load(tmp_path / "run")
    assert podracer.load(tmp_path / "run", trust=True).environment.spec == result.environment.spec
    begin = functools.partial(podracer.train, "vtrace", Reach, env_options=options, **settings)
    with pytest.raises(ValueError, match=named + ": add --trust to import it, which runs its code"):
        begin(init_from=tmp_path / "run")
    assert begin(init_from=tmp_path / "run", trust=True).description["init_from"] == str(tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    for path, problem in (("nowhere:Reach", "cannot be imported here"), ("json:Reach", "json has no Reach any more")):
        changed = config | {"imports": {"environment": path}}
        (tmp_path / "run" / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=problem):
            podracer.load(tmp_path / "run", trust=True)
    del config["imports"]
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="was trained with your own environment; in Python, give it as environment="):
        podracer.load(tmp_path / "run", trust=True)
    again = podracer.load(tmp_path / "run", environment=Reach())
    assert again.environment.spec == result.environment.spec
    assert again.evaluate(2).mean == result.evaluate(2).mean == 10.0


def test_modules_are_imported(tmp_path, monkeypatch):
    """`gymnasium:module:ID`, as Gymnasium writes it."""
    (tmp_path / "own_reach.py").write_text(
        textwrap.dedent("""
            import gymnasium
            gymnasium.register("OwnReach-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=9)
            """)
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    experiment = resolve("vtrace", "gymnasium:own_reach:OwnReach-v0", RUN, config=CONFIG)
    assert experiment.environment.spec.max_episode_steps == 9
    assert experiment.description["own"] == []
    with pytest.raises(ValueError, match="Gymnasium cannot make 'no_such_module:X-v0': .*no_such_module"):
        environments.make("gymnasium:no_such_module:X-v0")


def test_a_module_that_a_run_names_is_not_imported_without_consent(tmp_path, monkeypatch):
    (tmp_path / "whose.py").write_text("raise SystemExit('it ran')")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    run = dataclasses.asdict(RUN)
    stored = {"env": "gymnasium:whose:Any-v0", "env_options": {}, "own": [], "hyper": {}, "run": run}
    stored |= {"agent": "vtrace", "agent_config": {}, "podracer": "0"}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    for load in (podracer.load, podracer.resume):
        with pytest.raises(ValueError, match=r"the module whose is imported, which runs its code: add --trust \(in Py"):
            load(tmp_path)
    with pytest.raises(SystemExit, match="it ran"):
        podracer.load(tmp_path, trust=True)
    monkeypatch.setitem(sys.modules, "whose", json)
    imports.check_name(tmp_path, stored, trust=False)  # whoever has imported it knows


def test_the_way_to_a_class_or_function():
    assert imports.import_path(Reach) == "tests.environments.test_own_gymnasium:Reach"
    assert imports.import_path(environments.make) == "podracer.environments:make"
    for unnamed in (lambda: Reach(), Reach(), "catch", type("Reach", (Reach,), {})):
        assert imports.import_path(unnamed) is None


def test_packages_that_are_missing(monkeypatch):
    """The error blames the missing package, and asks for one that anybody can install."""
    missing = set()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    for packages, name, message in (
        ({"gymnasium"}, "gymnasium:X-v0", r"need gymnasium, not installed here: pip install gymnasium$"),
        ({"gymnasium"}, "envpool:X-v0", r"need gymnasium, not installed here: pip install envpool gymnasium$"),
        ({"envpool"}, "envpool:X-v0", r"need envpool, not installed here: pip install envpool gymnasium$"),
        ({"envpool", "gymnasium"}, "envpool:X-v0", r"need envpool and gymnasium, not installed here: pip install env"),
    ):
        missing |= packages
        with pytest.raises(ValueError, match=message):
            environments.make(name)
        missing.clear()
    missing |= {"envpool", "gymnasium", "pgx"}
    assert environments.names() == list(envs_jax.names())
    with pytest.raises(
        ValueError, match=r"unknown environment 'CartPole-v1'; did you mean 'cartpole'\? `podracer envs PATTERN`"
    ):
        environments.make("CartPole-v1")


def mistaken(**methods):
    """A class with a few methods replaced."""
    return type("Mine", (Reach,), methods)


def observed(observation):
    return mistaken(reset=lambda self, seed=None, options=None: (observation, {}))


def stepped(*result):
    return mistaken(step=lambda self, action: result)


SEEN = {"place": np.zeros(2, np.float32), "step": 0}
MISTAKES = {
    "no space": (mistaken(__init__=lambda self: None), r"Mine\.observation_space is None: set it to a space of gymn"),
    "space of ours": (
        mistaken(__init__=lambda self: (Reach.__init__(self), setattr(self, "action_space", spaces.Discrete(2)))[0]),
        r"Mine\.action_space is Discrete\(num_values=2\): set it to a space of gymnasium\.spaces in Mine\.__init__",
    ),
    "old reset": (
        mistaken(reset=lambda self, seed=None, options=None: np.zeros(2)),
        r"Mine\.reset returned float64 \[2\]; expected a pair: observation, info \(a dict\)",
    ),
    "reset without a seed": (
        mistaken(reset=lambda self: (SEEN, {})),
        r"Mine\.reset: got an unexpected keyword argument 'seed'; define reset\(self, \*, seed=None, options=None\)",
    ),
    "names": (observed({"place": SEEN["place"]}), r"Mine\.reset returned observation \['place'\]; expected a dict of"),
    "shape": (
        observed(SEEN | {"place": np.zeros(3, np.float32)}),
        r"Mine\.reset returned observation\['place'\] float32 \[3\]; expected float32 \[2\] as in the observation_space",
    ),
    "dtype": (observed(SEEN | {"step": 0.5}), r"Mine\.reset returned observation\['step'\] 0\.5; expected int64 \[\]"),
    "old step": (
        stepped(SEEN, 0.0, False, {}),
        r"Mine\.step returned a tuple of 4; expected five values: observation, reward, terminated, truncated, info",
    ),
    "reward": (stepped(SEEN, None, False, False, {}), r"Mine\.step returned reward None; expected a number"),
    "end": (stepped(SEEN, 0.0, {}, False, {}), r"Mine\.step returned terminated a dict; expected True or False"),
    "info": (stepped(SEEN, 0.0, False, False, []), r"Mine\.step returned info a list; expected a dict"),
    "step's shape": (stepped(np.zeros(2), 0.0, False, False, {}), r"Mine\.step returned observation float64 \[2\]"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("wrapped", [False, True])
def test_mistakes_are_named(mistake, wrapped):
    made, message = MISTAKES[mistake]
    if wrapped and "space" not in mistake:
        wrapped_class, made = made, lambda: gymnasium.wrappers.TimeLimit(wrapped_class(), 9)
    with pytest.raises(TypeError, match=message) as caught:
        environments.adopt(made)
    assert "\n" not in str(caught.value)


def test_errors_of_ones_own_keep_their_traceback():
    def step(self, action):
        return [][3]

    with pytest.raises(IndexError) as caught:
        environments.adopt(mistaken(step=step))
    assert caught.traceback[-1].path.name == "test_own_gymnasium.py"
