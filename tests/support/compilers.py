"""Compiles real programs for an H200 and for TPU v5e on a machine that has neither, and says what became of them.

    python -m tests.support.compilers requirements [TARGET ...]  pip's lines for this version of jax
    python -m tests.support.compilers h200|v5e [PROGRAM ...]     a JSON line a program; CHECKED by default

Both plugins compile without a device, from a description of one. They are large and no run needs them, so they are not
installed beside podracer but in a directory that only this script looks into (`sys.prefix/compilers`, or
$PODRACER_COMPILERS):

    pip install --no-deps --target .venv/compilers $(python -m tests.support.compilers requirements)     (make compilers)

What is counted (`Program`), with loops multiplied by how often they turn where the compiler knows that, and once where
it does not, as in the loop over updates:

    kernels      launches of the optimised program: every operation that is not a name for something that is there
    cycles       the estimates of the TPU's compiler
    reductions   all-reduces
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.support import benchmarks

count = benchmarks.load("hlo").count
COMPILERS = pathlib.Path(os.environ.get("PODRACER_COMPILERS", f"{sys.prefix}/compilers"))

H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200 141GB HBM3e"
dnn_version_info { major: 9 minor: 10 patch: 0 }
gpu_device_info {
  name: "NVIDIA H200 141GB HBM3e" device_vendor: "NVIDIA Corporation" model_str: "sm_9.0a"
  platform_version: "Compute Capability 9.0a"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: 151397597184 memory_bandwidth: 4800000000000 l2_cache_size: 52428800 ecc_enabled: true
  device_address_bits: 64 pcie_bandwidth: 34359738368 device_interconnect_info { active_links: 18 }
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
}
"""
"""The device's description, which the compiler asks for (figures: NVIDIA's data sheet, and openxla/xla,
target_config/specs/h200.txtpb)."""


# Programs


def _ppo(devices: list[Any], lanes: int = 1024) -> Any:
    settings = {"rollout_length": 32, "num_epochs": 4, "num_minibatches": 4, "normalize_rewards": False}
    return _anakin("ppo", "cartpole", lanes, settings, devices)


def _vtrace(devices: list[Any], lanes: int) -> Any:
    return _anakin("vtrace", "catch", lanes, {"rollout_length": 20}, devices)


def _vtrace_lstm(devices: list[Any]) -> Any:
    return _anakin("vtrace", "memory_chain", 1024, {"rollout_length": 20, "core": "lstm", "core_size": 64}, devices)


def _r2d2(devices: list[Any]) -> Any:
    settings = {
        "torso": "nature",
        "frame_stack": 4,
        "core": "lstm",
        "core_size": 64,
        "head_size": 64,
        "rollout_length": 8,
    }
    settings |= {"burn_in": 4, "trace_length": 8, "batch_size": 8, "replay_capacity": 8 * 8192, "replay_ratio": 0.5}
    return _anakin("r2d2", "pixel_catch", 64, settings, devices)


def _anakin(agent_name: str, task: str, lanes: int, settings: dict[str, Any], devices: list[Any]) -> Any:
    """The program of a run, compiled as its driver does."""
    import envs_jax
    from podracer import topology
    from podracer.agents.registry import make_agent
    from podracer.anakin import program, runner

    environment = envs_jax.make(task)
    agent = make_agent(agent_name, environment, settings)
    layout = topology.make(num_envs=lanes * len(devices), envs_per_device=lanes, devices=devices)
    anakin = program.make(agent, environment, layout, program.RolloutSettings(agent.config.rollout_length))
    return runner.compile_step(anakin, anakin.like()).call


def _resnet(devices: list[Any]) -> Any:
    """The gradient of IMPALA's deep network for 64 frames."""
    import jax
    import jax.numpy as jnp

    from podracer.nets import convolutions

    module = convolutions.ResNet()
    images = jax.ShapeDtypeStruct((64, 84, 84, 4), jnp.float32)
    params = jax.eval_shape(module.init, jax.random.key(0), images)
    return _compile(jax.grad(lambda p, x: jnp.sum(jnp.square(module.apply(p, x)))), devices[0], params, images)


def _lstm(devices: list[Any]) -> Any:
    """R2D2's recurrent core: forward and gradient over 81 rows of 64 sequences, 512 units."""
    import jax
    import jax.numpy as jnp

    from podracer.nets import recurrent

    T, B, units = 81, 64, 512
    module = recurrent.LSTM(units)
    x, first = jax.ShapeDtypeStruct((T, B, units), jnp.float32), jax.ShapeDtypeStruct((T, B), bool)
    state = (jax.ShapeDtypeStruct((B, units), jnp.float32),) * 2
    params = jax.eval_shape(module.init, jax.random.key(0), x, first, state)
    loss = lambda p, *rest: jnp.sum(jnp.square(module.apply(p, *rest)[0]))  # noqa: E731
    return _compile(jax.value_and_grad(loss), devices[0], params, x, first, state)


def _compile(function: Callable[..., Any], device: Any, *shapes: Any) -> Any:
    import jax

    from podracer import topology

    here = jax.sharding.SingleDeviceSharding(device)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
    with topology.compiling_for(device.platform):
        return jax.jit(function).lower(*placed).compile()


PROGRAMS: dict[str, tuple[int, Callable[[list[Any]], Any]]] = {
    "ppo": (1, _ppo),
    "ppo_8_devices": (8, _ppo),
    "ppo_65536_lanes": (1, lambda devices: _ppo(devices, 65_536)),
    "vtrace": (1, lambda devices: _vtrace(devices, 1024)),
    "vtrace_16384_lanes": (1, lambda devices: _vtrace(devices, 16_384)),
    "vtrace_lstm": (1, _vtrace_lstm),
    "r2d2_images": (1, _r2d2),
    "resnet_gradient": (1, _resnet),
    "lstm_unroll": (1, _lstm),
}
"""The number of devices that each program takes, and the function that compiles it for them."""

CHECKED = {
    "h200": ("ppo", "ppo_8_devices", "vtrace", "vtrace_lstm", "r2d2_images", "resnet_gradient", "lstm_unroll"),
    "v5e": ("vtrace_16384_lanes", "r2d2_images"),
}
"""The programs that `test_compile_only.py` reads. Others take minutes, as all that has many convolutions does on
v5e."""


def devices_of(target: str) -> list[Any]:
    """Eight devices to compile for, none of which is there."""
    from jax.experimental import topologies

    if target == "h200":
        described = topologies.get_topology_desc(platform="cuda", topology="1x1x8", target_config=H200)
    else:
        described = topologies.get_topology_desc("v5e:2x4", "tpu", chips_per_host_bounds=[2, 4, 1])
    return list(described.devices)


def measure(name: str, devices: list[Any]) -> dict[str, Any]:
    """Compiles a program and counts."""
    number, compile_for = PROGRAMS[name]
    start = time.perf_counter()
    compiled = compile_for(devices[:number])
    seconds = time.perf_counter() - start
    text, memory = compiled.as_text(), compiled.memory_analysis()
    if dump := os.environ.get("PODRACER_DUMP_HLO"):
        pathlib.Path(dump, f"{devices[0].platform}-{name}.txt").write_text(text)
    return {
        "program": name,
        **dataclasses.asdict(count(text)),
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "compile_seconds": round(seconds, 1),
        "scatter": bool(re.search(r"(?<!select-and-)\bscatter\(|select-and-scatter\(", text)),
    }


# Entry


def requirements(targets: Sequence[str] = ("v5e", "h200")) -> Iterator[str]:
    """The compilers for targets that belong to the installed jax."""
    for line in (importlib.metadata.requires("jax") or []) if "v5e" in targets else ():
        wanted, _, marker = line.partition(";")
        if "tpu" in marker and wanted.startswith("libtpu"):
            yield wanted.strip()
    if "h200" in targets:
        version = importlib.metadata.version("jaxlib")
        yield f"jax-cuda13-plugin=={version}"
        yield f"jax-cuda13-pjrt=={version}"


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["requirements"]:
        print(*requirements(arguments[1:] or ("v5e", "h200")), sep="\n")
        return 0
    if arguments[:1] not in (["h200"], ["v5e"]) or set(arguments[1:]) - set(PROGRAMS):
        print(__doc__, file=sys.stderr)
        return 2
    # The plugins ask for drivers and metadata servers, and for the machine to themselves, unless told not to.
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    sys.path.insert(0, str(COMPILERS))
    devices = devices_of(arguments[0])
    failed = False
    for name in arguments[1:] or CHECKED[arguments[0]]:
        try:
            print(json.dumps(measure(name, devices)), flush=True)
        except Exception as error:  # the others are worth knowing all the same
            failed = True
            print(json.dumps({"program": name, "error": str(error)[:2000]}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
