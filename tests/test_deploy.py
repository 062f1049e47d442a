"""The files in deploy/: they parse, and what they run can be typed. None of them was run where it belongs."""

import dataclasses
import pathlib
import re
import shlex
import subprocess

import pytest
import yaml

import podracer
import podracer.cli.train
from podracer.cli.serve import ServeArguments

DEPLOY = pathlib.Path(podracer.__file__).parents[1] / "deploy"
SCRIPTS = ["slurm/pod.sbatch", "tpu-vm/run.sh"]


def typed(text):
    """The arguments of `podracer train` in a script."""
    (line,) = re.findall(r"podracer train ([^\n]*)", text.replace("\\\n", " "))
    return shlex.split(line.rstrip('"') if line.count('"') % 2 else line)


def check(arguments):
    """That a command can be given again after it was stopped, in every process."""
    settings = podracer.cli.train._asked(arguments)[2]
    assert settings.topology == "pod"
    assert settings.resume
    assert settings.run_dir is not None


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_parse(name):
    done = subprocess.run(["bash", "-n", DEPLOY / name], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    check(typed((DEPLOY / name).read_text()))


def test_a_script_that_lacks_something_says_what():
    for environment, arguments in (({}, ["a"] * 5), ({"NFS": "host:/share"}, ["a"])):
        done = subprocess.run(
            [DEPLOY / "tpu-vm/run.sh", *arguments], env={"PATH": "/usr/bin:/bin"} | environment, capture_output=True
        )
        assert done.returncode == 2
        assert b"NFS=10.0.0.2:/share deploy/tpu-vm/run.sh NAME ZONE" in done.stderr


def test_slurm_stops_in_time_and_goes_on():
    text = (DEPLOY / "slurm/pod.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", text, re.MULTILINE))
    assert options["signal"] == "TERM@180"
    assert options["ntasks-per-node"] == "1"
    assert "requeue" in options
    assert "--kill-on-bad-exit=0" in text, "who writes the last checkpoint is not killed"


def served(arguments):
    """The environment and address of a worker's command, which is checked as far as it goes without its files."""
    command, environment, *rest = arguments
    assert command == "serve-envs"
    options = dict(word.removeprefix("--").split("=", 1) if "=" in word else (word[2:], None) for word in rest)
    fields = {field.name.replace("_", "-") for field in dataclasses.fields(ServeArguments)}
    assert set(options) <= fields
    return environment, options


def test_workers_and_learner_of_a_cluster_find_each_other():
    service, job, workers = yaml.safe_load_all((DEPLOY / "remote/kubernetes.yaml").read_text())
    pod, envs = job["spec"]["template"], workers["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert workers["spec"]["selector"]["matchLabels"] == envs["metadata"]["labels"]
    (learner,), (worker,) = pod["spec"]["containers"], envs["spec"]["containers"]
    settings = podracer.cli.train._asked(learner["args"][1:])[2]
    assert settings.resume
    environment, options = served(worker["args"])
    assert environment == learner["args"][2]
    (port,) = service["spec"]["ports"]
    assert options["connect"] == f"dns:///{service['metadata']['name']}:{port['port']}"
    assert settings.remote.listen.endswith(f":{port['port']}")
    assert settings.run.num_envs == workers["spec"]["replicas"] * int(options["lanes"])
    secrets = {item["path"] for volume in envs["spec"]["volumes"] for item in volume["secret"]["items"]}
    assert secrets == {options["tls-ca"].rpartition("/")[2], options["token-file"].rpartition("/")[2]}


def test_workers_and_learner_of_a_composition_find_each_other():
    services = yaml.safe_load((DEPLOY / "remote/compose.yaml").read_text())["services"]
    command = services["learner"]["command"]
    settings = podracer.cli.train._asked(command[2:])[2]
    environment, options = served(services["worker"]["command"][1:])
    assert environment == command[3]
    assert options["connect"] == "learner:" + settings.remote.listen.rpartition(":")[2]
    assert settings.run.num_envs == services["worker"]["deploy"]["replicas"] * int(options["lanes"])


def test_workers_of_a_queue_find_their_learner():
    text = (DEPLOY / "remote/workers.sbatch").read_text()
    done = subprocess.run(["bash", "-n", DEPLOY / "remote/workers.sbatch"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = re.findall(r"srun podracer ([^\n]*)", text.replace("\\\n", " "))
    words = shlex.split(line)
    pairs = dict(zip(words[2::2], words[3::2]))
    assert (words[:2], pairs["--connect"]) == (["serve-envs", "envpool:Pong-v5"], "file:$SHARED/where")
    comment = text.replace("\\\n#", " ")
    (learner,) = re.findall(r"podracer train ([^\n]*)", comment)
    settings = podracer.cli.train._asked(shlex.split(learner.replace("$(hostname -i)", "10.0.0.1")))[2]
    tasks = int(re.search(r"--array=0-(\d+)", text)[1]) + 1
    assert settings.remote.announce == pairs["--connect"].removeprefix("file:")
    assert settings.run.num_envs == tasks * int(pairs["--lanes"])


def test_hosts_of_a_jobset_are_those_of_the_slice():
    job = yaml.safe_load((DEPLOY / "gke/jobset.yaml").read_text())
    (hosts,) = job["spec"]["replicatedJobs"]
    spec = hosts["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    chips = int(container["resources"]["limits"]["google.com/tpu"])
    x, y = map(int, topology.split("x"))
    assert spec["parallelism"] == spec["completions"] == x * y // chips
    assert spec["completionMode"] == "Indexed"
    assert spec["backoffLimit"] == 0
    assert job["spec"]["failurePolicy"]["maxRestarts"] > 0
    assert pod["terminationGracePeriodSeconds"] == 180
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount["name"] == volume["name"]
    check(container["args"][1:])
    assert container["args"][-1].startswith(f"--run-dir={mount['mountPath']}/")
