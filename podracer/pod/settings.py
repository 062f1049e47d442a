"""The address and size of a pod, found without starting JAX.

Each of four settings comes from `Pod`, else from an environment variable, else from the cluster that JAX recognises:
Open MPI, SLURM, a TPU's or Kubernetes' own. JAX reads only two of the variables by itself.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from podracer import configs

VARIABLES = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
    "local_devices": "JAX_LOCAL_DEVICE_IDS",
}


@dataclasses.dataclass(frozen=True)
class Pod:
    """Settings by which the processes of a pod find each other, and their timeouts; all may be left out in a cluster.

    Attributes:
      coordinator: host:port, where process 0 listens.
      processes: P.
      process_id: number of this process, 0 to P - 1.
      local_devices: ids of the devices that this process sees; all of its host's if None.
      start_timeout: seconds to wait until all processes have started.
      heartbeat: seconds without a heartbeat after which JAX considers a process lost.
      stall_timeout: seconds that a process may be a round behind the others.
    """

    coordinator: str | None = None
    processes: int | None = configs.field(None, low=1)
    process_id: int | None = configs.field(None, low=0)
    local_devices: tuple[int, ...] | None = None
    start_timeout: int = configs.field(300, low=1)
    heartbeat: int = configs.field(20, low=1)
    stall_timeout: int = configs.field(180, low=1)

    def __post_init__(self):
        configs.check(self)
        if self.coordinator is not None:
            _check_address(f"Pod(coordinator={self.coordinator!r})", self.coordinator)


def _check_address(where: str, address: str) -> None:
    if not re.fullmatch(r".+:\d+", address):
        raise ValueError(f"{where}: use HOST:PORT, such as 10.0.0.1:8476.")


class NoClusterError(ValueError):
    """Nothing says where the processes of a pod are."""


@dataclasses.dataclass(frozen=True)
class Place:
    """The arguments of `jax.distributed.initialize`; JAX finds those that are None.

    Attributes:
      coordinator: host:port.
      processes: P.
      process_id: number of this process.
      local_devices: ids of this process's devices.
      source: the origin of these values, in words.
    """

    coordinator: str | None
    processes: int | None
    process_id: int | None
    local_devices: tuple[int, ...] | None
    source: str


def find(pod: Pod, environ: Mapping[str, str], cluster: str | None) -> Place:
    """Finds the place of this process in its pod.

    Args:
      pod: the user's settings.
      environ: the environment variables.
      cluster: the name of the cluster that JAX recognises, or None.

    Raises:
      NoClusterError: if too little is known.
      ValueError: for settings that make no sense.
    """
    if "COLAB_RELEASE_TAG" in environ:
        raise NoClusterError("topology='pod': Colab is one process; use topology='local', which uses all its devices.")
    given_values = {name: value for name in VARIABLES if (value := getattr(pod, name)) is not None}
    read = {name: _read(name, environ[key]) for name, key in VARIABLES.items() if environ.get(key)}
    known: dict[str, Any] = {**dict.fromkeys(VARIABLES), **read, **given_values}
    meeting = [known[name] is not None for name in ("coordinator", "processes", "process_id")]
    if not cluster and not all(meeting):
        missing = [f"{VARIABLES[name]} (Pod.{name})" for name, is_known in zip(VARIABLES, meeting) if not is_known]
        if any(meeting):
            raise NoClusterError(f"topology='pod': {' and '.join(missing)} missing, beside what is given.")
        raise NoClusterError(
            "topology='pod' needs a cluster: looked for Open MPI, SLURM, TPU, Kubernetes and JAX_COORDINATOR_ADDRESS + "
            "JAX_NUM_PROCESSES + JAX_PROCESS_ID, found none; on one machine use topology='local' or "
            "podracer launch."
        )
    P, process = known["processes"], known["process_id"]
    if P is not None and process is not None and process >= P:
        raise ValueError(f"topology='pod': process_id={process} must be less than processes={P}.")
    if known["local_devices"] is None and cluster in ("slurm", "ompi") and processes_of_host(environ) == 1:
        # There JAX takes one GPU for each process, and the others of the host would be idle without a word.
        known["local_devices"] = _visible(environ)
    source = "Pod" if given_values else ""
    source += " and " if given_values and read else ""
    source += "environment variables" if read else ""
    return Place(**known, source=source if all(meeting) else cluster or source)


def _read(name: str, text: str) -> Any:
    if name == "coordinator":
        _check_address(f"{VARIABLES[name]}={text!r}", text)
        return text
    try:
        return tuple(int(x) for x in text.split(",")) if name == "local_devices" else int(text)
    except ValueError:
        raise ValueError(f"{VARIABLES[name]}={text!r}: must be {_KIND[name]}.") from None


_KIND = {"processes": "a number", "process_id": "a number", "local_devices": "numbers, such as 0,1"}


def processes_of_host(environ: Mapping[str, str]) -> int | None:
    """The number of a pod's processes on this host by the launcher's variables; None if no launcher set one."""
    for key in ("PODRACER_LOCAL_COUNT", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"):
        # SLURM: for hosts in order, such as 2(x3),1; one number where all have as many, and else this is not known.
        if found := re.fullmatch(r"(\d+)(\(x\d+\))?", environ.get(key, "")):
            return int(found[1])
    return None


def _visible(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """The indices of all GPUs that this process may see; None if unknown."""
    for key in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        if environ.get(key):
            return tuple(range(len(environ[key].split(","))))
    return None
