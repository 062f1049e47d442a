"""Pods of two processes that train, with a fault in one of them, and what is done to them from outside."""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from unittest import mock

import jax
import numpy as np

from podracer import cli
from podracer.environments.from_jax import SteppedEnvironment
from podracer.pod import peers
from podracer.pod.launch import Launch, environment
from podracer.run import checkpoint
from podracer.sebulba import learner_loop
from podracer.training import shared
from podracer.training.session import Session
from tests.support import pods

HEARTBEAT, STALL = 4, 3
COMMAND = ["train", "ppo", "catch", "--num-envs", "8", "--total-steps", "100000000", "--eval-every", "4000"]
COMMAND += ["--eval-episodes", "2", "--checkpoint-every", "8000", "--agent.rollout-length", "10"]
COMMAND += ["--agent.num-minibatches", "1", "--agent.num-epochs", "1", "--topology", "pod", "--resume"]
COMMAND += ["--pod.heartbeat", str(HEARTBEAT), "--pod.stall-timeout", str(STALL)]
SEBULBA = ("--arch", "sebulba", "--mode", "lockstep", "--env-timeout", "2")


# In the processes of the pod


def trains(run_dir, fault, *flags):
    """A long run, in which `fault` happens in process 1 (or where it says) after the first checkpoint."""
    name, _, where = fault.partition("@")
    arguments = [*COMMAND, "--run-dir", run_dir, *flags]
    if int(os.environ["JAX_PROCESS_ID"]) == int(where or 1):
        FAULTS.get(name, lambda: None)()
    mock.patch.object(shared, "SHARED_SECONDS", 2.0).start()
    cli.main(arguments)


def _in_place_of(name, function):
    """Calls `function` before a method of the session, once there is a checkpoint."""
    method = getattr(Session, name)

    def patched(self, *args):
        function() if self._saved_steps() else None
        return method(self, *args)

    mock.patch.object(Session, name, patched).start()


def _raise():
    _note()
    raise KeyError("the actor's own error")


def _note():
    """Prints the time of the fault, for `Pod.seconds`."""
    print(f"fault at {time.time():.2f}", flush=True)


def _hang():
    _note()
    time.sleep(100)


def _in_an_environment(function):
    """Calls `function` in one step of an environment, once there is a checkpoint."""
    send, calls = SteppedEnvironment.send, []

    def patched(self, *args):
        calls.pop()() if calls else None
        return send(self, *args)

    once = iter([function])
    _in_place_of("_on_progress", lambda: calls.extend(once))
    mock.patch.object(SteppedEnvironment, "send", patched).start()


def _spoils_its_rewards():
    recv, spoilt = SteppedEnvironment.recv, []

    def patched(self):
        lanes, step = recv(self)
        if spoilt:
            step.scalars[0] = np.inf
        return lanes, step

    _in_place_of("_on_progress", lambda: spoilt.append(True))
    mock.patch.object(SteppedEnvironment, "recv", patched).start()


def _in_its_learner(function):
    """Calls `function` before parameters are published, once there is a checkpoint."""
    publish, calls = learner_loop.LearnerLoop.publish_to, []

    def patched(self, *args):
        calls.pop()() if calls else None
        return publish(self, *args)

    once = iter([function])
    _in_place_of("_on_progress", lambda: calls.extend(once))
    mock.patch.object(learner_loop.LearnerLoop, "publish_to", patched).start()


def _in_its_log(function):
    """Calls `function` for a row of metrics, once there is a checkpoint."""
    begin = Session.__init__

    def patched(self, *args):
        experiment, directory, resume, _, *rest = args
        log = lambda steps, row: function() if checkpoint.has_checkpoints(directory) else None  # noqa: E731
        begin(self, experiment, directory, resume, log, *rest)

    mock.patch.object(Session, "__init__", patched).start()


def _takes_its_time(name):
    _in_place_of(name, lambda: (print(f"now {name}", flush=True), time.sleep(1)))


def _drifts():
    saved = Session._saved

    def patched(self, state):
        state = saved(self, state)
        leaves, tree = jax.tree.flatten(state.learner.params)
        copies = [shard.data for shard in leaves[0].addressable_shards]
        copies[0] = copies[0].at[(0,) * copies[0].ndim].add(1e-6)
        leaves[0] = jax.make_array_from_single_device_arrays(leaves[0].shape, leaves[0].sharding, copies)
        return state._replace(learner=state.learner._replace(params=jax.tree.unflatten(tree, leaves)))

    mock.patch.object(Session, "_saved", patched).start()


def _fills_the_disk():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _in_place_of("_saved", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY)))


def _dies_in_a_save(hook):
    save = checkpoint.Checkpoints.save

    def patched(self, step, state):
        if self.steps() and self.directory.name == "checkpoints":
            die = mock.Mock(side_effect=lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            mock.patch.object(self._ocp.PyTreeCheckpointHandler, hook, die).start()
        return save(self, step, state)

    mock.patch.object(checkpoint.Checkpoints, "save", patched).start()


FAULTS = {
    "is elsewhere": lambda: os.chdir(tempfile.gettempdir()),
    "raises": lambda: _in_place_of("_on_progress", _raise),
    "its environment raises": lambda: _in_an_environment(_raise),
    "its environment hangs": lambda: _in_an_environment(_hang),
    "its log raises": lambda: _in_its_log(_raise),
    "is of another version": lambda: mock.patch.object(peers, "__version__", "0.0.1").start(),
    "evaluates": lambda: _takes_its_time("_evaluate"),
    "saves": lambda: _takes_its_time("_saved"),
    "is stuck": lambda: _in_place_of("_on_progress", lambda: time.sleep(100)),
    "its learner is stuck": lambda: _in_its_learner(lambda: time.sleep(100)),
    "its rewards are not finite": _spoils_its_rewards,
    "drifts": _drifts,
    "disk": _fills_the_disk,
    "dies before it writes": lambda: _dies_in_a_save("async_save"),
    "dies before what it wrote counts": lambda: _dies_in_a_save("finalize"),
}


# Around them


class Pod:
    """Two processes of `trains`, by their index."""

    def __init__(self, directory, fault="", flags=((), ()), run_dir=None, absent=(), port=None):
        self.run_dir = run_dir or directory / "run"
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = port or found.getsockname()[1]
        arguments = Launch(processes=2)
        self.processes = {}
        for i in set(range(2)) - set(absent):
            code = f"from tests.support import pod_faults as t; t.trains({str(self.run_dir)!r}, {fault!r}, *{tuple(flags[i])!r})"
            variables = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": pods.ROOT}
            with mock.patch.dict(os.environ, variables):
                variables = environment(arguments, i, port)
            self.processes[i] = subprocess.Popen(
                [sys.executable, "-c", code], env=variables, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True
            )

    def train(self):
        """Waits until there is a checkpoint."""
        pods.until(
            lambda: checkpoint.has_checkpoints(self.run_dir) or self.processes[0].poll() is not None, 120, "checkpoint"
        )
        time.sleep(0.5)  # in the midst of updates
        return self

    def hear(self, text, index=0):
        """Waits until a process has said something."""
        assert any(text in line for line in iter(self.processes[index].stdout.readline, ""))
        return self

    def send(self, index, number):
        self.processes[index].send_signal(number)
        self.since = time.monotonic()
        return self

    def end(self, timeout=120):
        """Exit codes and what was said, by process."""
        try:
            said = {i: p.communicate(timeout=timeout)[0] for i, p in self.processes.items()}
            if fault := re.search(r"fault at (\S+)", "".join(said.values())):
                self.seconds = time.time() - float(fault[1])  # from the fault to the end of all
        finally:
            self.close()
        return {i: p.returncode for i, p in self.processes.items()}, said

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.wait()
            process.stdout.close()

    def steps(self):
        """The steps of its checkpoints."""
        return sorted(int(path.name) for path in (self.run_dir / "checkpoints").iterdir() if path.name.isdigit())
