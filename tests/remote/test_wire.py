"""The wire's encoding: round trips of random spaces, and no message of a peer raises anything but the wire's own
error."""

import contextlib
import itertools
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from podracer import remote, spaces
from podracer.remote import bounds
from podracer.types import EnvSpec, HostStep

pb = pytest.importorskip("podracer.remote.session_pb2")
specs = pytest.importorskip("podracer.remote.specs")
wire = pytest.importorskip("podracer.remote.wire")

DTYPES = ("u1", "i1", "u2", "i2", "u4", "i4", "i8", "f2", "f4")


def random_space(rng, depth=0):
    kind = rng.integers(4 if depth < 2 else 3)
    if kind == 3:
        return spaces.Dict({f"k{i}": random_space(rng, depth + 1) for i in range(rng.integers(1, 4))})
    if kind == 2:
        return spaces.Discrete(int(rng.integers(1, 9)))
    if kind == 1:
        n = rng.integers(1, 4)
        return spaces.MultiDiscrete(tuple(rng.integers(1, 5, n)), tuple(rng.integers(-1, 2, n)))
    shape = tuple(int(x) for x in rng.integers(0 if rng.random() < 0.2 else 1, 5, rng.integers(0, 4)))
    low = rng.integers(0, 3, shape).tolist() if rng.integers(2) and np.prod(shape) else 0
    return spaces.Box(low, 7, shape, np.dtype(str(rng.choice(DTYPES))))


def random_spec(rng):
    action = spaces.Discrete(5, -3) if rng.integers(2) else spaces.MultiDiscrete((3, 2))
    names = ("one", "two")[: rng.integers(3)]
    limit = int(rng.integers(2)) * 100 or None
    return EnvSpec("random", random_space(rng), action, limit, tuple(names), raw_scores=bool(rng.integers(2)))


def random_rows(rng, spec, n):
    def values(space):
        if isinstance(space, spaces.Dict):
            return {name: values(item) for name, item in space.items}
        if isinstance(space, spaces.Box):
            return rng.integers(0, 8, (n, *space.shape)).astype(space.dtype)
        return rng.integers(0, space.num_values, (n, *space.shape)).astype(space.dtype)

    first, last = rng.integers(0, 2, n) > 0, rng.integers(0, 2, n) > 0
    last &= ~first
    more = (rng.normal(size=n), last) if spec.raw_scores else ()
    measured = rng.normal(size=(len(spec.metrics), n)) if spec.metrics else None
    rows = HostStep.of(values(spec.observation_space), rng.normal(size=n), last, first, last, *more, metrics=measured)
    return rows, first


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("seed", range(40))
def test_round_trips(seed):
    rng = np.random.default_rng(seed)
    spec, n = random_spec(rng), int(rng.integers(1, 6))
    message = specs.to_proto(spec)
    assert specs.from_proto(pb.Spec.FromString(message.SerializeToString())) == spec
    layout = wire.Layout(spec)
    rows, first = random_rows(rng, spec, n)
    data = wire.pack(pb.FromWorker(rows=pb.Rows(block=3, step=2**40)), layout.pack_rows(rows))
    told, payload = wire.unpack(pb.FromWorker, data)
    assert (told.rows.block, told.rows.step) == (3, 2**40)
    back = layout.unpack_rows(payload, n)
    assert_same(back, rows)
    layout.check_rows(back, first)
    # As other senders may have it: fields in order of their numbers, or in any other.
    halves = [pb.FromWorker(rows=part).SerializeToString() for part in (pb.Rows(block=3), pb.Rows(step=2**40))]
    with_payload = pb.FromWorker(payload=bytes(payload)).SerializeToString()
    for fields in itertools.permutations([*halves, with_payload]):
        other, again = wire.unpack(pb.FromWorker, b"".join(fields))
        assert_same(layout.unpack_rows(again, n), rows)
        assert other.rows == told.rows
    zeros = HostStep.zeros(spec, n)
    assert_same(layout.unpack_rows(memoryview(b"".join(layout.pack_rows(zeros))), n), zeros)
    actions = rng.integers(0, 2, (n, *spec.action_space.shape)).astype(np.int32)
    assert_same(layout.unpack_actions(memoryview(b"".join(layout.pack_actions(actions))), n), actions)


SPEC = EnvSpec(
    "mine",
    spaces.Dict({"x": spaces.Box(-1.0, 1.0, (2,)), "room": spaces.Discrete(3)}),
    spaces.Discrete(2),
    metrics=("hits",),
)
N = 3


def rows(**changes):
    scalars = {"reward": [1, 0, 2], "discount": [1, 1, 0], "first": [0, 1, 0], "last": [0, 0, 1]} | changes
    observation = {
        "room": np.asarray(changes.get("room", [0, 1, 2]), np.int32),
        "x": np.asarray(changes.get("x", np.zeros((N, 2))), np.float32),
    }
    numbers = np.asarray([scalars[name] for name in ("reward", "discount", "first", "last")], np.float32)
    return HostStep(observation, numbers, np.asarray([changes.get("hits", [0, 1, 2])], np.float32))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"reward": [1, 0, np.nan]}, "lane 2: reward is nan"),
        ({"reward": [np.inf, 0, 0]}, "lane 0: reward is inf"),
        ({"reward": [np.inf, 0, -np.inf]}, "lane 0: reward is inf"),
        ({"discount": [1, 0.5, 0]}, "lane 1: discount is 0.5"),
        ({"discount": [1, 1, -1]}, "lane 2: discount is -1"),
        ({"first": [1, 1, 0]}, "lane 0: first is 1"),
        ({"first": [0, 0, 0]}, "lane 1: first is 0"),
        ({"last": [0, 1, 1]}, "lane 1: last is 1"),
        ({"last": [0, 2, 1]}, "lane 1: last is 2"),
        ({"reward": [1, 3, 2]}, "lane 1: reward of a first row is 3"),
        ({"hits": [0, np.nan, 0]}, "lane 1: metric hits is nan"),
        ({"room": [0, 3, 0]}, r"lane 1: observation\['room'\] is 3"),
        ({"room": [0, 0, -1]}, r"lane 2: observation\['room'\] is -1"),
        ({"x": [[0, 0], [0, np.inf], [0, 0]]}, r"lane 1: observation\['x'\]\[1\] is inf"),
        ({"x": [[0, np.nan], [0, 0], [0, 0]]}, r"lane 0: observation\['x'\]\[1\] is nan"),
    ],
)
def test_rows_that_break_the_contract_are_named(changes, complaint):
    layout, opens = wire.Layout(SPEC), np.array([False, True, False])
    layout.check_rows(rows(), opens)
    with pytest.raises(wire.ProtocolError, match=complaint):
        layout.check_rows(rows(**changes), opens)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"reward": [1e6, 0, -1e6], "x": [[0, -21], [21, 0], [0, 0]]}, ""),
        ({"reward": [1, 0, 3e38]}, r"lane 2: reward is 3e\+38, beyond the learner's max_magnitude=1e\+06\.$"),
        ({"reward": [-2e6, 0, 0]}, r"lane 0: reward is -2e\+06, beyond"),
        ({"x": [[0, 0], [0, 3e38], [0, 0]]}, r"lane 1: observation\['x'\]\[1\] is 3e\+38, .* allows -21 to 21\.$"),
    ],
)
def test_numbers_that_would_end_a_run_are_named(changes, complaint):
    layout, opens = wire.Layout(SPEC, 1e6), np.array([False, True, False])
    with pytest.raises(wire.ProtocolError, match=complaint) if complaint else contextlib.nullcontext():
        layout.check_rows(rows(**changes), opens)


@pytest.mark.parametrize(
    ("low", "high", "dtype", "expected"),
    [
        (-np.inf, np.inf, np.float32, (-1e6, 1e6)),
        (-np.finfo(np.float32).max, np.finfo(np.float32).max, np.float32, (-1e6, 1e6)),
        (0.0, 0.5, np.float32, (-10.0, 10.5)),
        (np.array([0.0, -np.inf]), np.array([2.0, np.inf]), np.float32, ([-20.0, -1e6], [22.0, 1e6])),
        (-np.inf, np.inf, np.float16, (-65504.0, 65504.0)),
        (0, 255, np.uint8, None),
        (0, 2, np.int32, (-20, 22)),
        (0, 2, np.uint32, (-20, 22)),
        (-(2**63), 2**63 - 1, np.int64, (-1e6, 1e6)),
    ],
)
def test_limits_of_observations(low, high, dtype, expected):
    found = bounds.limits(spaces.Box(low, high, (2,), dtype), 1e6)
    if expected is None:
        assert found is None
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("length", [-1, 1])
def test_a_payload_of_another_length_is_refused(length):
    layout = wire.Layout(SPEC)
    data = b"".join(layout.pack_rows(rows()))
    data = data[:length] if length < 0 else data + b"\0"
    with pytest.raises(
        wire.ProtocolError, match=rf"rows of 3 lanes have {len(data)} bytes, not {N * layout.row_bytes}"
    ):
        layout.unpack_rows(memoryview(data), N)


def test_every_truncation_and_ten_thousand_mutations_are_one_error():
    layout, rng = wire.Layout(SPEC), np.random.default_rng(0)
    whole = wire.pack(pb.FromWorker(rows=pb.Rows(block=1, step=5, env_us=9)), layout.pack_rows(rows()))
    ready = wire.pack(pb.FromWorker(ready=pb.Ready(spec=specs.to_proto(SPEC), options="{}")))

    def take(data):
        with contextlib.suppress(wire.ProtocolError):
            message, payload = wire.unpack(pb.FromWorker, data)
            if message.WhichOneof("kind") == "rows":
                layout.check_rows(layout.unpack_rows(payload, N), np.array([False, True, False]))
            if message.WhichOneof("kind") == "ready":
                specs.from_proto(message.ready.spec)
            return True
        return False

    assert take(whole)
    assert take(ready)
    for data in (whole, ready):
        for length in range(len(data)):
            take(data[:length])
        survived = 0
        for _ in range(5000):
            changed = bytearray(data)
            for _ in range(rng.integers(1, 4)):
                changed[rng.integers(len(changed))] = rng.integers(256)
            survived += take(bytes(changed))
        assert survived < 5000
    with pytest.raises(wire.ProtocolError, match="cut short"):
        wire.unpack(pb.FromWorker, whole[:20])
    with pytest.raises(wire.ProtocolError, match="no length"):
        wire.unpack(pb.FromWorker, whole[:1] + b"\xff" * 9)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda m: m.observation.box.shape.extend([2**20, 2**20]), "too large"),
        (lambda m: m.observation.box.shape.extend([1] * 9), "too large"),
        (lambda m: m.observation.box.shape.extend([2**32 - 1] * 100_000), "too large"),
        (lambda m: setattr(m.observation.box, "dtype", "O"), "Box of 'O'"),
        (lambda m: m.observation.box.low.extend([1.0, 2.0]), "3 bounds for 4 elements"),
        (lambda m: m.observation.ClearField("box"), "no kind"),
        (lambda m: setattr(m, "scalar_rows", 5), "5 scalars"),
        (lambda m: setattr(m.action, "discrete", 0), "makes no sense"),
        (lambda m: m.action.dict.SetInParent(), "without names"),
        (lambda m: m.metrics.extend(["x"] * 100), "too large"),
    ],
)
def test_specs_that_make_no_sense_are_refused(change, complaint):
    message = specs.to_proto(EnvSpec("mine", spaces.Box(0.0, 1.0, (4,)), spaces.Discrete(2)))
    change(message)
    with pytest.raises(wire.ProtocolError, match=complaint):
        specs.from_proto(message)


def test_what_differs_is_named_with_both_values():
    mine = EnvSpec("mine", spaces.Box(0.0, 1.0, (4,)), spaces.Discrete(2), 100)
    assert specs.difference(mine, mine._replace(name="theirs")) == ""
    for theirs, said in (
        (mine._replace(action_space=spaces.Discrete(3)), "action is Discrete(num_values=3) at the worker and Discrete"),
        (mine._replace(observation_space=spaces.Box(0.0, 1.0, (5,))), "observation is Box("),
        (mine._replace(observation_space=spaces.Box(0.0, 1.0, (4,), np.uint8)), "observation is Box("),
        (mine._replace(max_episode_steps=5), "max_episode_steps is 5 at the worker and 100 at the learner"),
        (mine._replace(raw_scores=True), "raw_scores is True at the worker"),
        (
            mine._replace(observation_space=spaces.Dict({"x": spaces.Discrete(2)})),
            "observation is [\"observation['x']\"]",
        ),
        (mine._replace(action_space=spaces.Discrete(2, start=1)), "action is Discrete(num_values=2, start=1) at the w"),
    ):
        assert said in specs.difference(mine, theirs)


def test_options_that_differ_are_named():
    assert specs.options_difference('{"a": 1, "b": 2}', '{"a": 1, "b": 2}') == ""
    assert (
        specs.options_difference('{"a": 1, "b": 2}', '{"a": 1, "b": 3}') == "b is 3 at the worker and 2 at the learner"
    )
    assert (
        specs.options_difference('{"a": 1}', '{"a": 1, "c": "\\n"}') == "c is   at the worker and None at the learner"
    )
    assert specs.options_difference('{"a": 1}', '{"a": true}') == "its options are written otherwise than the learner's"
    assert specs.options_difference('{"a": 1}', '{ "a": 1}') == ""


def test_where_environments_run_is_not_compared():
    mine, theirs = '{"a": 1, "num_threads": 2}', '{"a": %d, "num_threads": null, "vectorization": "async"}'
    assert specs.options_difference(mine, theirs % 1) == ""
    assert specs.options_difference(mine, theirs % 2) == "a is 2 at the worker and 1 at the learner"


@pytest.mark.parametrize("change", ["dtype", "shape", "leaf", "scalars"])
def test_rows_that_are_not_of_the_spec_are_not_sent(change):
    """An int32 has the size of a float32, so the learner would see numbers."""
    parts = {"a": spaces.Box(0.0, 1.0, (2, 3)), "b": spaces.Discrete(5)}
    spec = EnvSpec("mine", spaces.Dict(parts), spaces.Discrete(2))
    layout, rows = wire.Layout(spec), HostStep.zeros(spec, 4)
    layout.require(rows, 4)
    rows.observation["a"] = rows.observation["a"].astype(">f4")
    layout.require(rows, 4)
    if change == "dtype":
        rows.observation["a"] = rows.observation["a"].astype(np.int32)
        said = r"observation\['a'\] is int32\[4, 2, 3\], and not float32\[4, 2, 3\]"
    elif change == "shape":
        rows.observation["a"] = rows.observation["a"].reshape(4, 3, 2)
        said = r"observation\['a'\] is .*\[4, 3, 2\], and not float32\[4, 2, 3\]"
    elif change == "leaf":
        del rows.observation["b"]
        said = "observations have 1 leaves, not 2"
    else:
        rows = rows._replace(scalars=rows.scalars.astype(np.int32))
        said = r"scalars is int32\[4, 4\], and not float32\[4, 4\]"
    with pytest.raises(ValueError, match=said):
        layout.require(rows, 4)


def test_the_generated_module_is_that_of_the_protocol():
    """Word for word where its compiler is installed; everywhere the messages and their numbers."""
    folder = pathlib.Path(remote.__file__).parent
    found = dict.fromkeys(pb.DESCRIPTOR.message_types_by_name)
    text = (folder / "session.proto").read_text()
    assert set(found) == {line.split()[1] for line in text.splitlines() if line.startswith("message ")}
    for name in found:
        body = text[text.index(f"message {name} ") :]
        for field in pb.DESCRIPTOR.message_types_by_name[name].fields:
            assert f" {field.name} = {field.number};" in body, (name, field.name)


def test_clocks_that_jump_are_not_looked_at():
    """Only those count that measure how long something takes, and none of another machine."""
    for path in pathlib.Path(remote.__file__).parent.glob("*.py"):
        assert not any(word in path.read_text() for word in ("time.time(", "time.ctime", "datetime")), path.name


def test_nothing_that_a_peer_sends_is_evaluated():
    for path in pathlib.Path(remote.__file__).parent.glob("*.py"):
        words = set(path.read_text().replace("(", " ").replace(".", " ").split())
        assert not {"pickle", "eval", "exec", "marshal"} & words, path.name
    done = subprocess.run(
        [sys.executable, "-c", "import podracer.remote.wire, sys; sys.exit('jax' in sys.modules)"], check=False
    )
    assert done.returncode == 0, "a worker has no use for JAX"
