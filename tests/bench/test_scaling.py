"""`python benchmarks/scaling.py`, made small, and the model of what nobody here can measure."""

import importlib.util
import itertools
import json
import pathlib
import sys

import pytest

import podracer
from tests.support import benchmarks

scaling, script = benchmarks.load("scaling"), benchmarks.load("script")

ROOT = pathlib.Path(podracer.__file__).parents[1]


@pytest.fixture(scope="module")
def interconnects():
    spec = importlib.util.spec_from_file_location("interconnects", ROOT / "benchmarks" / "interconnects.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


@pytest.mark.parametrize(
    ("network", "device", "expected"),
    [
        (0, "v4", (6, 16, 40)),
        (0, "v5e", (9, 30, 332)),
        (0, "H200", (16, 64, 112)),
        (3, "v5e", (139, 129, 422)),
        (4, "v4", (230, 143, 168)),
        (4, "v5e", (345, 284, 562)),
        (4, "H200", (318, 528, 586)),
    ],
)
def test_an_all_reduce_takes_what_arithmetic_says(interconnects, network, device, expected):
    """By hand: hops of the longest way, and twice the array over what all axes carry."""
    call, _ = interconnects.DEVICES[device]
    size = interconnects.NETWORKS[network].bytes
    assert tuple(round(1e6 * call(size, n)) for n in interconnects.SIZES) == expected


@pytest.mark.parametrize(
    ("network", "device", "packed", "expected"),
    [
        (0, "v4", False, (0.97, 0.93, 0.83)),
        (0, "v5e", True, (0.98, 0.94, 0.60)),
        (3, "H200", False, (0.95, 0.91, 0.88)),
        (4, "v5e", False, (0.99, 0.99, 0.93)),
    ],
)
def test_efficiency_is_what_is_left(interconnects, network, device, packed, expected):
    found = [interconnects.efficiency(interconnects.NETWORKS[network], device, n, packed) for n in interconnects.SIZES]
    assert tuple(round(x, 2) for x in found) == expected


def one(preset, lanes, seconds, **more):
    return {"preset": preset, "lanes": lanes, "rows": 20 * lanes, "update_seconds": seconds, "jitter": seconds} | more


def test_layouts_are_compared_with_the_first():
    found = {
        ("vtrace", 1, 1): [one("vtrace", 64, 0.1, all_reduces=0, bytes=0), one("vtrace", 64, 0.3, all_reduces=0)],
        ("vtrace", 2, 2): [one("vtrace", 256, 0.2, all_reduces=5, bytes=4000), one("vtrace", 256, 0.3, all_reduces=5)],
    }
    _, more = (scaling._summary(key, several, found) for key, several in found.items())
    assert (more["devices"], more["processes"]) == (4, 2)
    assert more["time_ratio"] == pytest.approx((2 + 1) / 2)
    assert more["jitter"] == pytest.approx(0.25)
    assert more["efficiency"] == pytest.approx((4 / 2 + 4 / 1) / 2 / 4)
    lines = scaling._table([more], strong=False).splitlines()
    assert "efficiency of the first" in lines[0]
    assert [cell for cell in lines[1].split("  ") if cell][1].strip() == "2 x 2"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--layouts", "2"], "layout '2': use PROCESSESxDEVICES, such as 2x4."),
        (["--presets", "dqn"], "unknown preset 'dqn'"),
    ],
)
def test_mistakes_get_one_line(typed, message, capsys):
    assert script.run("scaling", scaling.ScalingArguments, scaling.main, typed) == 2
    assert message in capsys.readouterr().err


def test_a_jitter_is_of_single_updates(monkeypatch):
    monkeypatch.setattr(scaling.time, "perf_counter", iter(0.1 * x for x in range(10**6)).__next__)
    assert scaling._jitter(lambda n: n) == pytest.approx(0.0, abs=1e-9)
    slow = itertools.cycle([0, 2])
    clock = itertools.count()
    monkeypatch.setattr(scaling.time, "perf_counter", lambda: next(clock))
    assert scaling._jitter(lambda n: [next(clock) for _ in range(next(slow))]) == pytest.approx(0.5)


MEASURED = ROOT / "benchmarks" / "results" / "scaling.json"


def test_what_was_measured_is_within_the_bars():
    """The bars are for updates that are long enough, on simulated devices: docs/results/scaling.md."""
    results = {(r["preset"], r["processes"], r["devices"]): r for r in json.loads(MEASURED.read_text())["results"]}
    assert {preset for preset, _, _ in results} == set(scaling.LANES)
    long = {preset for (preset, p, n), r in results.items() if (p, n) == (1, 1) and r["update_seconds"] >= 0.05}
    assert long
    for preset in long:
        assert results[preset, 1, 4]["time_ratio"] <= 1.3
        assert results[preset, 2, 4]["time_ratio"] <= 2.0


@pytest.mark.slow
@pytest.mark.nightly
def test_layouts_are_measured(tmp_path, capsys):
    path = tmp_path / "scaling.json"
    tiny = ["--num-envs", "16", "--repeats", "1", "--seconds", "0.02", "--presets", "vtrace", "sebulba"]
    typed = ["--layouts", "1x1", "2x1", *tiny, "--json", str(path)]
    assert script.run("scaling", scaling.ScalingArguments, scaling.main, typed) == 0
    results = {(r["preset"], r["processes"]): r for r in json.loads(path.read_text())["results"]}
    assert len(results) == 4
    assert results["vtrace", 1]["all_reduces"] == 0
    assert 0 < results["vtrace", 2]["all_reduces"] < 12
    assert results["vtrace", 2]["bytes"] > 4 * 7_000
    assert results["vtrace", 2]["all_reduce_seconds"] > 0
    assert results["sebulba", 2]["wait_share"] is not None
    assert all(r["jitter"] > 0 for r in results.values())
    assert all(r["time_ratio"] > 0 and r["devices"] == r["processes"] for r in results.values())
    assert "waiting: share of the time" in capsys.readouterr().out
