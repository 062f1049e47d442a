"""The files in deploy/: what they run can be typed, and scripts do what they say, without the clouds they are for."""

import json
import pathlib
import re
import shlex
import subprocess

import pytest
import yaml

import podracer.cli
from podracer.remote import settings as remote_settings
from podracer.remote import supervisor
from podracer.remote.settings import Remote

ROOT = pathlib.Path(podracer.__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
ENTRYPOINT = json.loads(re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)[0])
(USER,) = re.findall(r"useradd .*--uid (\d+)", DOCKERFILE)


class Reached(BaseException):
    """The command line has found nothing wrong, and now begins."""


@pytest.fixture
def run(monkeypatch):
    """Parses a command line: returns a run's settings, or a worker's environment and settings."""

    def train(agent, environment, **settings):
        raise Reached({"environment": environment} | settings)

    def work(environment, settings, processes):
        raise Reached({"environment": environment} | settings)

    monkeypatch.setattr(podracer, "train", train)
    monkeypatch.setattr(supervisor, "run", work)
    monkeypatch.setattr(remote_settings, "read", lambda path, name: b"x" * 16)

    def command(words):
        assert words[0] == "podracer"
        with pytest.raises(Reached) as reached:
            podracer.cli.run(words[1:])
        (settings,) = reached.value.args
        if settings.get("remote"):
            settings["remote"] = Remote(**settings["remote"])
        return settings

    return command


@pytest.fixture
def in_image(run):
    """The same of what a container of the Dockerfile's image is given after its entry point."""
    assert ENTRYPOINT[:2] == ["tini", "--"], "a process 1 that knows of signals"
    return lambda arguments: run([*ENTRYPOINT[2:], *arguments])


def words_after(name, text):
    """A command in a script."""
    (line,) = re.findall(rf"({name} [^\n]*)", text.replace("\\\n#", " ").replace("\\\n", " "))
    return shlex.split(line)


def is_of_a_pod(settings):
    """It can be given again after it was stopped, in every process."""
    return settings["topology"] == "pod" and settings["resume"] and settings["run_dir"] is not None


def executable(path, text):
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def written(path):
    """The commands that a fake has noted."""
    calls = path.read_text().split("\x1e")[:-1] if path.exists() else []
    return [call.split("\0")[:-1] for call in calls]


NOTE = """{ printf '%s\\0' "$@"; printf '\\x1e'; } >> "$HERE/${0##*/}.calls"\n"""


@pytest.fixture
def shell(tmp_path):
    """Runs a script of deploy/ where `fakes` alone are in place of other programs; its exit code and what it said."""

    def script(name, *arguments, fakes, **variables):
        programs = tmp_path / "bin"
        programs.mkdir(exist_ok=True)
        for fake, text in fakes.items():
            executable(programs / fake, NOTE + text)
        environment = {"PATH": f"{programs}:/usr/bin:/bin", "HERE": str(tmp_path), "HOME": str(tmp_path / "home")}
        done = subprocess.run(
            ["bash", DEPLOY / name, *arguments],
            env=environment | variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout + done.stderr

    return script


# The image


@pytest.mark.parametrize("accelerator", ["cpu", "cuda12", "cuda13", "tpu", "gpu"])
def test_the_image_takes_every_accelerator_that_files_ask_for(accelerator):
    (case,) = re.findall(r"(case .*?esac)", DOCKERFILE.replace("\\\n", "\n"), re.DOTALL)
    done = subprocess.run(["bash", "-c", case], env={"ACCELERATOR": accelerator}, capture_output=True)
    assert done.returncode == (2 if accelerator == "gpu" else 0)
    asked = {name for path in DEPLOY.rglob("*.yaml") for name in re.findall(r"ACCELERATOR=(\w+)", path.read_text())}
    assert asked <= {"cpu", "cuda12", "cuda13", "tpu"}


def test_the_image_has_a_user_of_its_own_who_can_write():
    assert re.search(rf"^USER {USER}:{USER}$", DOCKERFILE, re.MULTILINE)
    assert "install -d -o podracer -g podracer /runs" in DOCKERFILE


# Kubernetes and docker compose


def check_user(pod):
    """A container that is anybody but root, and can become nothing else."""
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == int(USER)
    for container in pod["containers"]:
        assert "command" not in container, "the image's entry point stays"
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_workers_and_learner_of_a_cluster_find_each_other(in_image):
    pytest.importorskip("grpc")
    service, job, workers = yaml.safe_load_all((DEPLOY / "remote/kubernetes.yaml").read_text())
    pod, envs = job["spec"]["template"], workers["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    for each in (pod, envs):
        check_user(each["spec"])
        assert each["spec"]["restartPolicy"] == "Never", "or its failures have no policy"
    assert pod["spec"]["securityContext"]["fsGroup"] == int(USER), "the claim is root's"
    (learner,), (worker,) = pod["spec"]["containers"], envs["spec"]["containers"]
    settings, of_worker = in_image(learner["args"]), in_image(worker["args"])
    assert settings["resume"]
    assert of_worker["environment"] == settings["environment"]
    ports = {port["name"]: port["containerPort"] for port in learner["ports"]}
    assert [port["port"] for port in service["spec"]["ports"]] == [ports["workers"]]
    assert of_worker["connect"] == f"dns:///{service['metadata']['name']}:{ports['workers']}"
    assert settings["remote"].listen == f"0.0.0.0:{ports['workers']}"
    assert settings["remote"].metrics == f"0.0.0.0:{ports['metrics']}"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert learner[probe]["httpGet"] == {"path": "/metrics", "port": "metrics"}
    assert settings["num_envs"] == workers["spec"]["parallelism"] * of_worker["lanes"]
    assert workers["spec"]["completions"] == workers["spec"]["parallelism"]
    secrets = {item["path"] for volume in envs["spec"]["volumes"] for item in volume["secret"]["items"]}
    assert secrets == {of_worker[name].rpartition("/")[2] for name in ("tls_ca", "token_file")}


def test_workers_and_learner_of_a_composition_find_each_other(in_image):
    pytest.importorskip("grpc")
    composition = yaml.safe_load((DEPLOY / "remote/compose.yaml").read_text())
    learner, worker = composition["services"]["learner"], composition["services"]["worker"]
    settings, of_worker = in_image(learner["command"]), in_image(worker["command"])
    assert of_worker["environment"] == settings["environment"]
    assert of_worker["connect"] == "learner:" + settings["remote"].listen.rpartition(":")[2]
    assert settings["num_envs"] == worker["deploy"]["replicas"] * of_worker["lanes"]
    (volume,) = learner["volumes"]
    assert volume.partition(":")[0] in composition["volumes"]
    assert volume.endswith(":/runs"), "which is the image's user's"


def test_hosts_of_a_jobset_are_those_of_the_slice(in_image):
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
    check_user(pod)
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount["name"] == volume["name"]
    (owner,) = pod["initContainers"]
    assert owner["command"] == ["chown", f"{USER}:{USER}", mount["mountPath"]]
    assert owner["volumeMounts"] == [mount]
    assert owner["securityContext"]["runAsUser"] == 0
    settings = in_image(container["args"])
    assert is_of_a_pod(settings)
    assert settings["run_dir"].is_relative_to(mount["mountPath"])


# SLURM


@pytest.mark.parametrize(("code", "again"), [(0, False), (1, False), (2, False), (143, True)])
def test_a_job_that_was_stopped_in_time_goes_back_into_the_queue(code, again, run, shell, tmp_path):
    fakes = {"srun": f"exit {code}", "scontrol": ""}
    found, said = shell("slurm/pod.sbatch", fakes=fakes, RUN_DIR="/shared/run 1", SLURM_JOB_ID="7")
    assert (found, said) == (code, "")
    assert written(tmp_path / "scontrol.calls") == [["requeue", "7"]] * again
    (words,) = written(tmp_path / "srun.calls")
    assert "--kill-on-bad-exit=0" in words, "who writes the last checkpoint is not killed"
    settings = run(words[words.index("podracer") :])
    assert is_of_a_pod(settings)
    assert settings["run_dir"] == pathlib.Path("/shared/run 1")
    text = (DEPLOY / "slurm/pod.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", text, re.MULTILINE))
    assert (options["signal"], options["ntasks-per-node"]) == ("TERM@180", "1")
    assert "requeue" in options


def test_workers_of_a_queue_find_their_learner(run, shell, tmp_path):
    pytest.importorskip("grpc")
    code, said = shell("remote/workers.sbatch", fakes={"srun": "exit 3"}, SHARED="/shared")
    assert (code, said) == (3, "")
    (words,) = written(tmp_path / "srun.calls")
    of_worker = run(words)
    text = (DEPLOY / "remote/workers.sbatch").read_text()
    learner = words_after("podracer train", text.replace("$(hostname -i)", "10.0.0.1").replace("$SHARED", "/shared"))
    settings = run(learner)
    assert of_worker["environment"] == settings["environment"]
    assert of_worker["connect"] == f"file:{settings['remote'].announce}"
    tasks = int(re.search(r"--array=0-(\d+)", text)[1]) + 1
    assert settings["num_envs"] == tasks * of_worker["lanes"]


@pytest.mark.parametrize(("name", "missing"), [("slurm/pod.sbatch", "RUN_DIR"), ("remote/workers.sbatch", "SHARED")])
def test_a_job_that_lacks_something_says_what(name, missing, shell, tmp_path):
    code, said = shell(name, fakes={"srun": ""})
    assert code != 0
    assert f"{missing}: set it to a directory that all nodes see" in said
    assert written(tmp_path / "srun.calls") == []


# TPU VMs

GCLOUD = """
verb=$4 last=${*: -3:1}
[[ "$*" = 'compute tpus tpu-vm '*' --zone Z' ]] || exit 9
echo "$verb" >> "$HERE/verbs"; count=$(grep -c "^$verb$" "$HERE/verbs")
slice="$HERE/slice"
drops() { [[ " $DROPS " = *" $verb:$count$1 "* ]] && echo 'connection lost' >&2 && exit 255; }
drops before
case "$verb" in
    list) printf 'other\tREADY\n'; [ ! -e "$slice" ] || printf 'N\t%s\n' "$(cat "$slice")" ;;
    create) [ ! -e "$slice" ] || exit 1; [ -z "${REFUSED:-}" ] || exit 1; echo READY > "$slice" ;;
    delete) rm "$slice" ;;
    scp) [ "$6" = N:/mnt/podracer/N ] || exit 9; cp -r "$HERE/home" "$7" ;;
    ssh) [ "$(cat "$slice")" = READY ] || exit 255
        mkdir -p "$HOME" && cd "$HOME" && bash -c "$last" || exit ;;
esac
drops
exit 0
"""
FAKES = {
    "gcloud": GCLOUD,
    "sudo": '[ -z "${BROKEN:-}" ]',
    "mountpoint": "exit 1",
    "pip": "",
    "uv": '[ "$1" != venv ] || { mkdir -p env/bin; ln -sf "$(command -v podracer)" env/bin; }',
    "podracer": 'echo "trained"; exit "${CODE:-0}"',
    # It trains until it was looked at once.
    "tmux": """
case "$1" in
    new-session) echo "$5" > work; > podracer.log ;;
    has-session) [ -e work ] || exit 1
        [ -z "${PREEMPTED:-}" ] || { echo PREEMPTED > "$HERE/slice"; rm work podracer.log; exit 0; }
        [ -z "${REBOOTED:-}" ] || { rm work; exit 0; }
        bash -c "$(cat work)"; rm work ;;
esac""",
}


@pytest.fixture
def on_tpus(shell, tmp_path):
    """Runs the script; its exit code, what it said, and the verbs that `gcloud` was asked for."""

    def script(**variables):
        given = {"NFS": "10.0.0.2:/share", "PAUSE": "0"} | variables
        code, said = shell("tpu-vm/run.sh", "N", "Z", "v5litepod-16", "v2-alpha", "P[tpu]", fakes=FAKES, **given)
        return code, said, [call[3] for call in written(tmp_path / "gcloud.calls")]

    return script


@pytest.mark.parametrize("code", ["0", "1"])
def test_a_slice_is_deleted_when_training_has_ended_and_its_code_is_returned(code, on_tpus, run, tmp_path):
    found, said, verbs = on_tpus(CODE=code)
    assert found == int(code)
    assert "trained" in said
    assert verbs == ["list", "create", "ssh", "ssh", "ssh", "ssh", "scp", "delete"]
    assert not (tmp_path / "slice").exists()
    assert (tmp_path / "N" / "podracer.log").read_text() == "trained\n", "it was fetched"
    (words,) = written(tmp_path / "podracer.calls")
    settings = run(["podracer", *words])
    assert is_of_a_pod(settings)
    assert settings["run_dir"] == pathlib.Path("/mnt/podracer/N")
    assert ["pip", "install", "-q", "--python", "env/bin/python", "P[tpu]"] in written(tmp_path / "uv.calls")


@pytest.mark.parametrize("drops", [f"{verb}:1{when}" for verb in ("ssh", "scp", "delete") for when in ("before", "")])
def test_a_connection_that_drops_once_ends_nothing(drops, on_tpus, tmp_path):
    if drops == "delete:1":
        drops = "ssh:2 ssh:3before"  # twice in a row while it trains; what is deleted cannot be deleted again
    code, _, verbs = on_tpus(DROPS=drops)
    assert code == 0
    assert verbs.count("create") == 1
    assert verbs[-1] == "delete"
    assert not (tmp_path / "slice").exists()
    assert len(written(tmp_path / "podracer.calls")) == 1, "training began once"


def test_a_slice_that_trains_is_not_deleted_without_a_network(on_tpus, tmp_path):
    code, said, verbs = on_tpus(DROPS=" ".join(f"ssh:{i}before list:{i}before" for i in range(2, 30)))
    assert code == 1
    assert "The same command watches it again" in said
    assert "delete" not in verbs
    code, said, verbs = on_tpus()
    assert code == 0
    assert verbs.count("create") == 1
    assert len(written(tmp_path / "podracer.calls")) == 1
    assert not (tmp_path / "slice").exists()


def test_a_slice_that_is_preempted_goes_on_with_the_same_command(on_tpus, tmp_path):
    code, _, verbs = on_tpus(PREEMPTED="yes")
    assert code == 143
    assert verbs[-1] == "delete"
    (tmp_path / "slice").write_text("PREEMPTED\n")  # as where nobody was there to delete it
    code, _, verbs = on_tpus()
    assert code == 0
    assert verbs.count("create") == 2


def test_what_cannot_be_trained_on_is_deleted_and_said(on_tpus, tmp_path):
    assert on_tpus(REBOOTED="yes")[0] == 1, "training is gone without a code"
    assert not (tmp_path / "slice").exists()
    (tmp_path / "home" / "podracer.log").unlink()
    assert on_tpus(BROKEN="yes")[0] != 0
    assert not (tmp_path / "slice").exists()
    code, _, verbs = on_tpus(REFUSED="yes")
    assert code != 0
    assert verbs[-1] == "create"


def test_a_script_that_lacks_something_says_what(shell):
    for variables, arguments in (({}, ["a"] * 5), ({"NFS": "host:/share"}, ["a"])):
        code, said = shell("tpu-vm/run.sh", *arguments, fakes={}, **variables)
        assert code == 2
        assert "NFS=10.0.0.2:/share deploy/tpu-vm/run.sh NAME ZONE" in said
