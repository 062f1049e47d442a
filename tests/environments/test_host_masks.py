"""Masks of actions of EnvPool's and Gymnasium's environments: as a member, by a method, from info, of combinations."""

from __future__ import annotations

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import environments, spaces
from podracer.agents.registry import make_agent
from podracer.environments import host_masks
from podracer.result import policy
from podracer.types import HostStep

LANES = 3


class Wheel(gymnasium.Env):
    """The number of steps, modulo 4, is legal, and so is the next number; the mask is where `place` says."""

    observation_space: gymnasium.Space = gymnasium.spaces.Box(0.0, 9.0, (1,), np.float32)
    action_space: gymnasium.Space = gymnasium.spaces.Discrete(4)
    place = "info"

    def mask(self) -> np.ndarray:
        return np.isin(np.arange(4), [self.t % 4, (self.t + 1) % 4])

    def _results(self) -> Any:
        info = {"action_mask": self.mask()} if self.place == "info" else {}
        return np.array([self.t], np.float32), info

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._results()

    def step(self, action: Any) -> Any:
        self.t += 1
        observation, info = self._results()
        return observation, 1.0, self.t == 5, False, info


class Method(Wheel):
    """The mask comes from a method."""

    place = "method"

    def action_masks(self) -> Any:
        return self.mask()


class Wrapped(gymnasium.Wrapper):
    """A wrapper that has the method, around an environment that has none."""

    def action_masks(self) -> Any:
        return self.env.unwrapped.mask()  # type: ignore[attr-defined]


class Pairs(gymnasium.Env):
    """Two choices of 3 and of 2; a combination is legal where their sum is the number of steps modulo 4."""

    observation_space = gymnasium.spaces.Dict(
        {"t": gymnasium.spaces.Discrete(99), "action_mask": gymnasium.spaces.Box(0, 1, (3, 2), np.int8)}
    )
    action_space = gymnasium.spaces.MultiDiscrete([3, 2], start=[5, 0])
    illegal = 0

    def _observe(self) -> Any:
        self.legal = np.add.outer(np.arange(3), np.arange(2)) == self.t % 4
        return {"t": self.t, "action_mask": self.legal.astype(np.int8)}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        assert action[0] >= 5
        legal = self.legal[action[0] - 5, action[1]]
        self.t += 1
        return self._observe(), float(legal), False, self.t == 7, {}


def steps(made: Any, number: int) -> list[HostStep]:
    """Rows of lanes that take the first legal action, and have taken it everywhere."""
    running, rows = made.make(LANES, 0), []
    try:
        for _ in range(number):
            lanes, row = running.recv()
            rows.append(row)
            running.send(lanes, np.argmax(row.observation["action_mask"], -1).astype(np.int32))
    finally:
        running.close()
    return rows


# Gymnasium.


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        (Method, {}),
        (lambda: Wrapped(gymnasium.wrappers.TimeLimit(Wheel(), 9)), {}),
        (Wheel, {"mask": "info"}),
        pytest.param(Method, {"vectorization": "async"}, marks=pytest.mark.slow),
    ],
    ids=["method", "wrapper", "info", "async"],
)
def test_a_mask_beside_observations_becomes_a_member_of_every_row(source: Any, settings: Any) -> None:
    made = environments.adopt(source, settings)
    assert made.spec.observation_space == spaces.Dict(
        {"observation": spaces.Box(0.0, 9.0, (1,)), "action_mask": spaces.Box(0, 1, (4,), np.int8)}
    )
    firsts = 0
    for row in steps(made, 9):
        t = row.observation["observation"][:, 0].astype(int)
        expected = [np.isin(np.arange(4), [i % 4, (i + 1) % 4]) for i in t]
        np.testing.assert_array_equal(row.observation["action_mask"], expected)
        firsts += int(row.scalars[2, 0])
    assert firsts == 2, "reset rows have theirs too"


def test_a_mask_in_info_is_used_when_asked_for_and_none_hides_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert environments.adopt(Wheel).spec.observation_space == spaces.Box(0.0, 9.0, (1,))
    assert environments.adopt(Method, {"mask": "none"}).spec.observation_space == spaces.Box(0.0, 9.0, (1,))
    hidden = environments.adopt(Pairs, {"mask": "none"}).spec
    assert hidden.observation_space == spaces.Dict({"t": spaces.Discrete(99)})
    assert hidden.action_space == spaces.MultiDiscrete((3, 2), (5, 0))
    wheel: Any = environments.adopt(Wheel)
    running = wheel.make(1, 0)
    running.recv()
    running.close()
    assert "has action_mask in its info, which agents do not follow" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (np.ones(4), r"action_masks\(\) returned float64 \[4\]: return truth values \[4\]"),
        (np.ones(3, bool), r"action_masks\(\) returned bool \[3\]"),
    ],
)
def test_masks_that_are_no_masks_are_refused(returned: Any, message: str) -> None:
    class Wrong(Method):
        def action_masks(self) -> Any:
            return returned

    with pytest.raises(ValueError, match=message):
        environments.adopt(Wrong)


def test_an_info_without_a_mask_is_said() -> None:
    with pytest.raises(ValueError, match="Method: info has no 'action_mask', which mask=\"info\" needs"):
        steps(environments.adopt(Method, {"mask": "info"}), 1)


def test_combinations_are_one_choice_and_arrive_as_they_were_meant() -> None:
    made = environments.adopt(Pairs)
    assert made.spec.action_space == spaces.Discrete(6)
    rows = steps(made, 7)
    assert rows[0].observation["action_mask"].tolist() == [[1, 0, 0, 0, 0, 0]] * LANES
    assert rows[1].observation["action_mask"].tolist() == [[0, 1, 1, 0, 0, 0]] * LANES
    assert all(row.scalars[0].tolist() == [1.0] * LANES for row in rows[1:])


def test_an_actor_takes_the_environments_own_observations_and_answers_with_an_index() -> None:
    made: Any = environments.adopt(Pairs)
    agent = make_agent("ppo", made, {"hidden_sizes": (4,)})
    learner = jax.jit(agent.init)(jax.random.key(0), {name: jnp.float32(x) for name, x in agent.hyper.items()})
    actor = policy.Actor(policy.from_agent(agent, made.spec, agent.actor_params(learner, jnp.float32(1.0))))
    environment = Pairs()
    observation, _ = environment.reset()
    for _ in range(7):
        choices = np.unravel_index(actor(observation), (3, 2))
        observation, reward, *_ = environment.step(np.array(choices) + environment.action_space.start)
        assert reward == 1.0


def flat(size: int) -> spaces.Dict:
    """Observations with a mask of one axis."""
    return spaces.Dict({"t": spaces.Discrete(3), "action_mask": spaces.Box(0, 1, (size,), np.int8)})


def test_heads_and_combinations_of_one_shape_are_asked_for() -> None:
    actions = spaces.MultiDiscrete((2, 2))
    shown = spaces.Dict({"t": spaces.Discrete(3), "action_mask": spaces.Box(0, 1, (2, 2), np.int8)})
    with pytest.raises(ValueError, match=r'may be of 4 combinations or of 2 choices of 2; say mask="joint" or'):
        host_masks.fit(shown, actions, "shop", "auto")
    assert host_masks.fit(shown, actions, "shop", "joint").action_space == spaces.Discrete(4)
    by_head = host_masks.fit(shown, actions, "shop", "heads")
    assert by_head.action_space == actions
    observed = by_head.observation({"t": np.zeros(1), "action_mask": np.array([[[1, 0], [0, 1]]])})
    assert observed["action_mask"].tolist() == [[1, 0, 0, 1]]
    assert host_masks.fit(flat(6), spaces.MultiDiscrete((3, 2)), "shop", "joint").action_space == spaces.Discrete(6)
    assert host_masks.fit(flat(5), spaces.MultiDiscrete((3, 2)), "shop", "heads").action_space == spaces.MultiDiscrete(
        (3, 2)
    )
    wrong: Any = ((5, "joint", r"\[3, 2\] or \[6\]"), (6, "heads", r"\[5\], or a row for each choice"))
    for size, shape, form in wrong:
        with pytest.raises(ValueError, match=f'action_mask is .{size}., and mask="{shape}" needs {form}; leave it out'):
            host_masks.fit(flat(size), spaces.MultiDiscrete((3, 2)), "shop", shape)
    many = spaces.Dict({"t": spaces.Discrete(3), "action_mask": spaces.Box(0, 1, (101, 100), np.int8)})
    with pytest.raises(ValueError, match="is of 10,100 combinations, of which at most 10,000"):
        host_masks.fit(many, spaces.MultiDiscrete((101, 100)), "shop", "auto")
    wide = spaces.Dict({"t": spaces.Discrete(3), "action_mask": spaces.Box(0, 1, (2, 6_000), np.int8)})
    wide_heads: Any = host_masks.fit(wide, spaces.MultiDiscrete((6_000, 6_000)), "shop", "auto").observation_space
    assert dict(wide_heads.items)["action_mask"].shape == (12_000,)


@pytest.mark.parametrize(
    ("space", "mask"),
    [
        (gymnasium.spaces.Discrete(4, start=2), [0, 1, 0, 1]),
        (gymnasium.spaces.MultiDiscrete([3, 2], start=[5, 0]), [[0, 1], [0, 0], [1, 0]]),
        (gymnasium.spaces.MultiDiscrete([3, 2], start=[5, 0]), [1, 0, 1, 0, 1]),
        (gymnasium.spaces.MultiDiscrete([3, 3]), [[1, 0, 1], [0, 1, 0]]),
        (gymnasium.spaces.MultiDiscrete([3, 2], start=[5, 0]), [0, 1, 0, 0, 1, 0]),
    ],
    ids=["one", "combinations", "flat", "heads", "flat combinations"],
)
def test_the_check_before_training_draws_legal_actions(space: Any, mask: Any) -> None:
    space.seed(0)
    drawn = {str(np.asarray(host_masks.sample(space, {"action_mask": np.array(mask)}))) for _ in range(50)}
    legal = {1: ["3", "5"], 2: ["[5 1]", "[7 0]"], 5: ["[5 1]", "[7 1]"], 6: ["[0 1]", "[2 1]"]}
    assert drawn == set(legal[{"(4,)": 1, "(3, 2)": 2, "(6,)": 2, "(5,)": 5, "(2, 3)": 6}[str(np.shape(mask))]])


# EnvPool.


@pytest.mark.parametrize(
    ("task", "actions"),
    [
        ("Game2048-v1", spaces.Discrete(4)),
        ("FlatPack-v0", spaces.Discrete(8_100)),
        ("JobShop-v0", spaces.MultiDiscrete((21,) * 10)),
        ("Cleaner-v0", spaces.MultiDiscrete((4,) * 3)),
    ],
)
def test_masks_of_envpool_fit_the_actions(task: str, actions: Any) -> None:
    from podracer.nets import action_masks

    made: Any = environments.make(f"envpool:{task}")
    assert made.spec.action_space == actions
    action_masks.check(made.spec)
    running = made.make(LANES, 0)
    rng = np.random.default_rng(0)
    for _ in range(3):
        lanes, row = running.recv()
        legal = np.asarray(row.observation["action_mask"]) > 0
        heads = np.split(legal, np.cumsum(np.atleast_1d(actions.num_values))[:-1], -1)
        chosen = np.stack([np.argmax(head * rng.random(head.shape), -1) for head in heads], -1).astype(np.int32)
        assert all(np.all(head.any(-1)) for head in heads)
        running.send(lanes, chosen[:, 0] if isinstance(actions, spaces.Discrete) else chosen)
    running.close()
