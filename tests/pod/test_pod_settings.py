"""The place of a process in a pod: the order of its sources, and the errors where too little is known. No JAX is
started."""

import pytest

from podracer.pod.settings import NoClusterError, Place, Pod, find, processes_of_host

WHERE = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:8476", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}


def test_variables_are_read():
    assert find(Pod(), WHERE, None) == Place("10.0.0.1:8476", 4, 3, None, "environment variables")
    assert find(Pod(), WHERE | {"JAX_LOCAL_DEVICE_IDS": "2,3"}, None).local_devices == (2, 3)


def test_what_is_said_goes_before_what_is_read_and_that_before_the_cluster():
    pod = Pod(coordinator="host:1", process_id=0)
    assert find(pod, WHERE, None) == Place("host:1", 4, 0, None, "Pod and environment variables")
    assert find(Pod(coordinator="h:1", processes=2, process_id=1), {}, None).source == "Pod"
    assert find(Pod(), {}, "slurm") == Place(None, None, None, None, "slurm")
    assert find(Pod(processes=2), {}, "slurm") == Place(None, 2, None, None, "slurm")
    assert find(Pod(), WHERE, "slurm").coordinator == "10.0.0.1:8476"


SLURM, OMPI = "SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"


@pytest.mark.parametrize(
    ("cluster", "own", "number"),
    [
        ("slurm", {SLURM: "1"}, 1),
        ("slurm", {SLURM: "1(x4)"}, 1),
        ("slurm", {SLURM: "8(x4)"}, 8),
        ("slurm", {SLURM: "2(x3),1"}, None),
        ("slurm", {}, None),
        ("ompi", {OMPI: "1"}, 1),
        ("ompi", {OMPI: "8"}, 8),
    ],
)
def test_the_only_process_of_a_host_takes_all_its_gpus(cluster, own, number):
    environ = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"} | own
    assert processes_of_host(environ) == number
    assert find(Pod(), environ, cluster).local_devices == (tuple(range(8)) if number == 1 else None)
    assert find(Pod(local_devices=(1,)), environ, cluster).local_devices == (1,)
    assert find(Pod(), own, cluster).local_devices is None
    assert find(Pod(), environ, "tpu").local_devices is None


@pytest.mark.parametrize(
    ("pod", "environ", "error", "message"),
    [
        (Pod(), {}, NoClusterError, "topology='pod' needs a cluster: looked for Open MPI, SLURM, TPU, Kubernetes and"),
        (
            Pod(),
            {"JAX_NUM_PROCESSES": "2"},
            NoClusterError,
            r"JAX_COORDINATOR_ADDRESS \(Pod.coordinator\) and JAX_PROCESS_ID \(Pod.process_id\) missing",
        ),
        (Pod(), WHERE | {"COLAB_RELEASE_TAG": "1"}, NoClusterError, "Colab is one process; use topology='local'"),
        (Pod(process_id=4), WHERE, ValueError, "process_id=4 must be less than processes=4"),
        (Pod(), WHERE | {"JAX_PROCESS_ID": "x"}, ValueError, "JAX_PROCESS_ID='x': must be a number"),
        (Pod(), WHERE | {"JAX_COORDINATOR_ADDRESS": "10.0.0.1"}, ValueError, "_ADDRESS='10.0.0.1': use HOST:PORT"),
        (Pod(), WHERE | {"JAX_LOCAL_DEVICE_IDS": "a"}, ValueError, "must be numbers, such as 0,1"),
    ],
    ids=["nothing", "part", "colab", "beyond", "no number", "no port", "no devices"],
)
def test_too_little_or_nonsense(pod, environ, error, message):
    with pytest.raises(error, match=message):
        find(pod, environ, None)


@pytest.mark.parametrize("coordinator", ["host", "host:", ":1", ":x", "host:port"])
def test_a_coordinator_has_a_port(coordinator):
    with pytest.raises(ValueError, match="use HOST:PORT"):
        Pod(coordinator=coordinator)
