"""The files in deploy/: they parse, and what they run can be typed. None of them was run where it belongs."""

import pathlib
import re
import shlex
import subprocess

import pytest
import yaml

import podracer
import podracer.cli.train

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
