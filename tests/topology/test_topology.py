"""The layout of lanes and shards over devices, and the errors where they do not divide."""

from __future__ import annotations

import contextlib
import itertools
import re

import jax
import numpy as np
import pytest

import envs_jax
from podracer import topology
from podracer.environments.from_jax import SteppedEnvironments


def devices(number: int) -> list[jax.Device]:
    """Stand-ins: laying out needs objects only, and running on several devices is tested elsewhere."""
    return [jax.devices()[0]] * number


@pytest.mark.parametrize(
    ("number", "population", "num_shards", "num_envs", "expected"),
    [
        # mesh, shards, environments, environments of a shard
        (1, 1, None, None, ((1, 1), 1, 10, 10)),
        (1, 1, 4, None, ((1, 1), 4, 40, 10)),
        (1, 1, 4, 8, ((1, 1), 4, 8, 2)),
        (4, 1, None, None, ((1, 4), 4, 40, 10)),
        (4, 1, 8, None, ((1, 4), 8, 80, 10)),
        (8, 1, 8, 16, ((1, 8), 8, 16, 2)),
        (1, 3, None, None, ((1, 1), 1, 10, 10)),
        (8, 2, None, None, ((2, 4), 4, 40, 10)),
        (8, 8, None, None, ((8, 1), 1, 10, 10)),
        (8, 12, None, None, ((4, 2), 2, 20, 10)),
        (8, 3, None, None, ((1, 8), 8, 80, 10)),
    ],
)
def test_layout(number: int, population: int, num_shards: int | None, num_envs: int | None, expected: tuple) -> None:
    made = topology.make(
        num_envs=num_envs,
        envs_per_device=10,
        num_shards=num_shards,
        population=population,
        devices=devices(number),
    )
    assert (made.mesh.devices.shape, made.num_shards, made.num_envs, made.envs_per_shard) == expected
    assert made.mesh.axis_names == ("population", "data")
    assert made.population == population
    assert made.num_devices == number
    assert str(made.num_envs) in made.describe()
    assert (f"{population} members" in made.describe()) == (population > 1)


def test_equal_shards_are_equal_runs() -> None:
    """By default S shards have the same lanes on any devices: this makes runs equal."""
    for number in (1, 2, 4, 8):
        made = topology.make(num_envs=None, envs_per_device=16, num_shards=8, devices=devices(number))
        assert (made.num_shards, made.num_envs) == (8, 128)


def test_all_local_devices_by_default() -> None:
    made = topology.make(num_envs=None, envs_per_device=3)
    assert np.ravel(made.mesh.devices).tolist() == jax.local_devices()
    assert made.num_envs == 3 * len(jax.local_devices())


def test_shards_must_divide_over_devices() -> None:
    with pytest.raises(ValueError, match=r"num_shards=6 is not divisible by the 4 devices .*use a multiple of 4"):
        topology.make(num_envs=None, envs_per_device=1, num_shards=6, devices=devices(4))
    with pytest.raises(ValueError, match=r"num_shards=2 is not divisible by the 4 devices"):
        topology.make(num_envs=None, envs_per_device=1, num_shards=2, population=2, devices=devices(8))


@pytest.mark.parametrize(("num_envs", "advice"), [(9, "use 8 or 12"), (3, "use 4")])
def test_lanes_must_divide_over_shards(num_envs: int, advice: str) -> None:
    with pytest.raises(ValueError, match=rf"num_envs={num_envs} is not divisible by the 4 shards; {advice}\."):
        topology.make(num_envs=num_envs, envs_per_device=1, num_shards=4, devices=devices(2))


class Remote:
    """A device of another process."""

    def __init__(self, process_index: int):
        self.process_index = process_index
        self.platform = "cpu"


@pytest.mark.parametrize(
    ("processes", "each", "settings", "expected"),
    [
        # actors here, threads of a replica, learners, shards, environments of an actor, all of them
        (1, 1, {}, (1, 1, 1, 1, 4, 4)),
        (1, 8, {"actor_threads": 2}, (4, 4, 6, 6, 6, 24)),
        (2, 2, {}, (1, 1, 2, 2, 4, 8)),
        (1, 4, {"replicas": 2, "actor_devices": 2}, (2, 1, 2, 2, 4, 8)),
        (1, 1, {"replicas": 2}, (2, 1, 1, 2, 4, 8)),
        (1, 1, {"replicas": 2, "num_shards": 8, "actor_threads": 3}, (6, 3, 1, 8, 4, 24)),
        (2, 8, {"replicas": 4, "actor_devices": 4}, (4, 2, 8, 8, 4, 32)),
        (2, 3, {"replicas": 8, "actor_devices": 1}, (4, 1, 4, 8, 4, 32)),
    ],
)
def test_layout_of_replicas(processes: int, each: int, settings: dict, expected: tuple) -> None:
    """Equal replicas, shards and threads are equal runs, on any processes."""
    own = [Remote(0) for _ in range(each)]
    there = own + [Remote(i) for i in range(1, processes) for _ in range(each)]
    made = topology.make_host(num_envs=None, envs_per_actor=4, devices=there, **settings)
    found = (len(made.actors), made.threads, made.mesh.size, made.num_shards, made.envs_per_actor, made.num_envs)
    assert found == expected
    assert set(made.actors) <= set(own)
    assert made.replicas_here * processes == made.replicas
    assert made.devices == tuple(there)
    assert str(made.num_envs) in made.describe()


@pytest.mark.parametrize(
    ("processes", "each", "settings", "message"),
    [
        (2, 1, {"replicas": 3}, r"replicas=3 is not divisible by the 2 processes; use a multiple of 2\."),
        (1, 4, {"replicas": 2}, r"replicas=2: the 2 of a process cannot share its 3 learner devices out evenly"),
        (1, 8, {"replicas": 2, "actor_devices": 3}, r"cannot share its 3 actor devices out evenly"),
        (2, 2, {"num_shards": 3}, r"num_shards=3 is not divisible by the 2 learner devices and 2 replicas; .* of 2\."),
        (2, 2, {"num_envs": 3}, r"num_envs=3 is not divisible by 2 actor thread\(s\) .* use 2 or 4\."),
        (2, 2, {"actor_devices": 2}, r"actor_devices=2: of 2 devices at least one must learn"),
    ],
)
def test_replicas_must_divide(processes: int, each: int, settings: dict, message: str) -> None:
    there = [Remote(i) for i in range(processes) for _ in range(each)]
    with pytest.raises(ValueError, match=message):
        topology.make_host(**{"num_envs": None, "envs_per_actor": 4, "devices": there} | settings)


@pytest.mark.parametrize(
    ("each", "settings", "expected"),
    [
        (4, {}, None),
        (4, {"reanalyser_devices": 2}, (1, 2, 1)),
        (8, {"reanalyser_devices": 4}, None),
        (8, {"reanalyser_devices": 4, "num_envs": 16}, (2, 4, 2)),
    ],
)
def test_eight_shards_on_the_devices_of_the_guide(each: int, settings: dict, expected: tuple | None) -> None:
    """docs/search.md: `speedyzero` on 4 and 8, where it fits no other split."""
    layout = {"num_envs": 8, "envs_per_actor": 16, "num_shards": 8, "devices": [Remote(0) for _ in range(each)]}
    if expected is None:
        with pytest.raises(ValueError, match="not divisible"):
            topology.make_host(**layout | settings)
        return
    made = topology.make_host(**layout | settings)
    assert made.reanalysers is not None
    assert (len(made.actors), made.reanalysers.size, made.mesh.size) == expected


@pytest.mark.parametrize(
    ("num_shards", "replicas", "said"),
    [
        (8, None, "8 shards: it continues on 1, 2, 4 or 8 devices"),
        (3, 1, "3 shards: it continues on 1 process(es) with 1 or 3 learner devices each"),
        (
            24,
            4,
            "4 replicas and 24 shards: it continues on 1 process(es) with 1, 2, 4, 8, 12 or 24 learner devices each; "
            "2 process(es) with 1, 2, 4, 6 or 12 learner devices each; 4 process(es) with 1, 2, 3 or 6 learner devices each",
        ),
    ],
)
def test_what_a_run_continues_on(num_shards: int, replicas: int | None, said: str) -> None:
    assert topology.continues_on(num_shards, replicas) == f"this run has {said}"


@pytest.mark.parametrize(("replicas", "num_shards"), [(4, 24), (6, 12)])
def test_a_run_continues_on_what_is_said_and_on_nothing_else(replicas: int, num_shards: int) -> None:
    said = topology.continues_on(num_shards, replicas)
    ways = {
        (int(processes), int(learners))
        for processes, each in re.findall(r"(\d+) process\(es\) with ([\d, or]+) learner", said)
        for learners in re.findall(r"\d+", each)
    }
    fits = set()
    for processes, learners in itertools.product(range(1, 7), range(1, 25)):
        there = [Remote(i) for i in range(processes) for _ in range(learners + (learners > 1))]
        layout = {"num_shards": num_shards, "replicas": replicas, "actor_devices": 1}
        with contextlib.suppress(topology.LayoutError):
            topology.make_host(num_envs=None, envs_per_actor=1, devices=there, **layout)
            fits.add((processes, learners))
    assert ways == fits


@pytest.mark.parametrize(("population", "num_shards"), [(4, 2), (6, 4), (1, 6)])
def test_a_population_continues_on_what_is_said_and_on_nothing_else(population: int, num_shards: int) -> None:
    said = topology.continues_on(num_shards, population=population).partition("continues on")[2]
    fits = set()
    for number in range(1, 2 * population * num_shards):
        there, layout = [Remote(i) for i in range(number)], {"num_shards": num_shards, "population": population}
        with contextlib.suppress(topology.LayoutError):
            topology.make(num_envs=None, envs_per_device=1, devices=there, **layout)
            fits.add(number)
    assert set(map(int, re.findall(r"\d+", said))) == fits


class Afar:
    """An array of a mesh of several processes, of which each has a part."""

    is_fully_addressable = is_fully_replicated = False

    def __init__(self, mesh: jax.sharding.Mesh):
        self.sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("afar"))

    def addressable_data(self, index: int) -> int:
        return index


def test_what_is_made_whole_here_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(jax, "jit", lambda function, **_: made.append(function) or function)
    for _ in range(2):
        assert topology.here([Afar(jax.sharding.Mesh(np.asarray(devices(1)), ("afar",)))]) == [0]
    assert len(made) == 1


def test_a_level_of_ones_own_is_kept_by_all_programs_that_run_for_long(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    each = topology.evaluation_options, topology.compiler_options
    assert [options("cpu")["xla_backend_optimization_level"] for options in each] == [2, 2]
    assert [options("gpu") for options in each] == [None, None]
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=1")
    assert [options("cpu") for options in each] == [None, None]
    assert topology.quick_to_compile("cpu")["xla_backend_optimization_level"] == 0


def test_what_is_traced_is_for_the_platform_that_was_said():
    assert topology.platform() == jax.default_backend() == "cpu"
    assert topology.on_cpu()
    with topology.compiling_for("gpu"):
        assert not topology.on_cpu()
        with topology.compiling_for("cpu"):
            assert topology.on_cpu()
        assert topology.platform() == "gpu"
    assert topology.on_cpu()
    with pytest.raises(ZeroDivisionError), topology.compiling_for("tpu"):
        _ = 1 // 0
    assert topology.on_cpu()


def test_a_function_knows_its_platform_whenever_it_is_traced():
    seen = []
    function = jax.jit(topology.compiling_for("tpu")(lambda x: seen.append(topology.platform()) or x))
    function(1.0), function(jax.numpy.ones(3))
    assert seen == ["tpu", "tpu"]


@pytest.mark.parametrize(("length", "expected"), [(1, 1), (20, 20), (64, 64), (65, 16), (0, 1)])
def test_short_recursions_unroll_off_cpu(length, expected):
    assert topology.unroll(length) == 1
    with topology.compiling_for("gpu"):
        assert topology.unroll(length) == expected


class Device:
    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        if isinstance(self.stats, Exception):
            raise self.stats
        return self.stats


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        ({"bytes_limit": 2**34}, 2**34),
        ({"bytes_in_use": 1}, None),
        (None, None),
        (jax.errors.JaxRuntimeError("INVALID_ARGUMENT: MemoryStats is only supported for addressable devices."), None),
        (NotImplementedError(), None),
    ],
)
def test_devices_without_memory_have_no_limit(stats, expected):
    assert topology.memory_limit([Device(stats)]) == expected


def test_what_needs_the_hosts_cpu_says_so(monkeypatch):
    def refuse(backend):
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(jax, "local_devices", refuse)
    with pytest.raises(ValueError, match=r"^something needs JAX's CPU backend .* JAX_PLATFORMS=cuda,cpu\.$"):
        topology.host_cpu("something")
    with pytest.raises(ValueError, match=r"^arch='sebulba' on catch, a pure-JAX environment, needs JAX's CPU backend"):
        SteppedEnvironments(envs_jax.make("catch"))
