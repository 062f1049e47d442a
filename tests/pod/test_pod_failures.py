"""Reactions of a pod's processes when one of them is killed, stopped, stuck, wrong or told to end."""

import pathlib
import re
import signal
import socket
import time

import pytest

import podracer
from tests.support import pods
from tests.support.pod_faults import HEARTBEAT, SEBULBA, STALL, Pod

pytestmark = pytest.mark.slow

SOON = 5 + 5
"""Seconds from an error to the end of all processes, and what a machine with other work may add."""


@pytest.fixture
def begin(tmp_path):
    """Makes pods, which end with the test."""
    pods = []

    def make(*args, **settings):
        pods.append(Pod(tmp_path, *args, **settings))
        return pods[-1]

    yield make
    for pod in pods:
        pod.close()


def assert_resumes(pod, begin, index=0, flags=()):
    """All go on from the newest checkpoint, stopped by SIGTERM to one of them, at one step."""
    before = pod.steps()
    again = begin(run_dir=pod.run_dir, flags=(flags, flags))
    pods.until(lambda: max(again.steps()) > max(before) or again.processes[0].poll() is not None, 120, "resumed")
    codes, said = again.send(index, signal.SIGTERM).end()
    assert codes == {0: -15, 1: -15}, said
    assert "stopped by a signal" in said[0]
    assert "error" not in said[0] + said[1]


def test_a_killed_process(begin):
    pod = begin().train().send(1, signal.SIGKILL)
    codes, said = pod.end(timeout=5)
    assert codes == {0: 3, 1: -9}
    assert re.search(rf"podracer: error: lost process 1 \(\S+, pid {pod.processes[1].pid}\), which is gone\n", said[0])
    assert "Traceback" not in said[0]
    assert_resumes(pod, begin, index=1)
    before = max(pod.steps())
    alone = podracer.resume(pod.run_dir, progress=False, log=lambda steps, row: steps > before)
    assert (alone.summary["processes"], alone.summary["hosts"], alone.summary["complete"]) == (1, 1, False)
    assert alone.summary["env_steps"] > before


def test_a_killed_coordinator(begin):
    pod = begin().train().send(0, signal.SIGKILL)
    codes, said = pod.end(timeout=5)
    assert codes[0] == -9, said[0]
    assert codes[1] not in (0, None)
    assert re.search(rf"lost process 0 \(\S+, pid {pod.processes[0].pid}\), the coordinator, which is gone", said[1])


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.nightly
def test_a_process_that_does_nothing_any_more(index, begin):
    pod = begin().train().send(index, signal.SIGSTOP)
    other = pod.processes[1 - index]
    pods.until(lambda: other.poll() is not None, HEARTBEAT + 15, "the other has ended")
    pod.send(index, signal.SIGCONT)
    codes, said = pod.end(timeout=15)
    assert 0 not in codes.values()
    assert re.search(rf"lost process {index} .* silent for {HEARTBEAT} s", said[1 - index])


def test_an_error_in_one_process(begin):
    pod = begin("raises")
    codes, said = pod.end()
    assert codes == {0: 3, 1: 1}, said
    assert pod.seconds < SOON
    assert 'KeyError: "the actor\'s own error"' in said[1]
    assert re.search(r"error: process 1 \(\S+, pid \d+\) has failed: KeyError: \"the actor's own error\"", said[0])


def test_a_signal_to_one_process_of_sebulba(begin):
    """To process 1 at first, and to 0 when it goes on."""
    pod = begin(flags=(SEBULBA, SEBULBA)).train()
    codes, said = pod.send(1, signal.SIGTERM).end(timeout=15)
    assert codes == {0: -15, 1: -15}, said
    assert_resumes(pod, begin, 0, SEBULBA)


@pytest.mark.nightly
def test_a_signal_does_not_wait_for_the_others_environments(begin):
    """Process 1 has one that takes a minute and a half for a step, and hears of the signal to process 0 at once."""
    flags = (*SEBULBA, "--env-timeout", "90", "--pod.stall-timeout", "90")
    pod = begin("its environment hangs", (flags, flags)).train()
    time.sleep(1)
    codes, said = pod.send(0, signal.SIGTERM).end(timeout=15)
    assert codes == {0: -15, 1: -15}, said


@pytest.mark.nightly
def test_an_actor_that_fails_in_one_process(begin):
    pod = begin("its environment raises", (SEBULBA, SEBULBA))
    codes, said = pod.end()
    assert codes == {0: 3, 1: 1}, said
    assert pod.seconds < SOON
    own = r"actor 1 on \S+ failed in catch: KeyError: \"the actor's own error\""
    assert re.search(own, said[1])
    assert re.search(r"error: process 1 \(\S+, pid \d+\) has failed: ActorError: " + own, said[0])


def test_an_environment_that_hangs_in_one_process(begin):
    pod = begin("its environment hangs", (SEBULBA, SEBULBA))
    codes, said = pod.end()
    assert codes == {0: 3, 1: 1}, said
    assert pod.seconds < 2 + SOON
    own = r"actor 1 on \S+: catch has not answered for 2 s"
    assert re.search(own, said[1])
    assert re.search(r"error: process 1 \(\S+, pid \d+\) has failed: ActorError: " + own, said[0])


@pytest.mark.nightly
def test_an_environment_that_is_replaced_in_one_process(begin):
    flags = (*SEBULBA, "--env-timeout", "4", "--env-restarts", "1")
    pod = begin("its environment hangs", (flags, flags)).train()
    seen = pod.steps()
    time.sleep(3)
    pods.until(lambda: max(pod.steps()) > max(seen) + 8000, 60, "after the environment was replaced")
    codes, said = pod.send(0, signal.SIGTERM).end(timeout=15)
    assert codes == {0: -15, 1: -15}, said
    assert "starting new ones (0 restart(s) left)" in said[1]
    assert re.search(r"podracer: waiting for process 1 \(\S+, pid \d+\): waiting for its environments", said[0])


@pytest.mark.parametrize(
    ("fault", "flags"),
    [("is stuck", ()), pytest.param("its learner is stuck", SEBULBA, marks=pytest.mark.nightly)],
)
def test_a_process_that_is_stuck(fault, flags, begin):
    """Under Sebulba the others wait for it in the next ballot, and so do not get ahead of it by a report."""
    codes, said = begin(fault, (flags, flags)).end(timeout=60)
    assert codes == {0: 3, 1: 3}
    for text in said.values():
        assert re.search(rf"lost process 1 .* stuck in round \d+ for {STALL} s \(training\)", text)


@pytest.mark.nightly
def test_training_that_diverges(begin):
    """By the rewards of process 1; all learn from them."""
    pod = begin("its rewards are not finite", (SEBULBA, SEBULBA))
    codes, said = pod.end()
    assert codes == {0: 1, 1: 1}, said
    lines = [re.search(r"error: .* not finite after \d+ environment steps.*", text)[0] for text in said.values()]
    assert lines[0] == lines[1]
    assert re.search(
        r"reward is not finite in row \d+ of a rollout, lane \d+ of its actor of process 1, and so", lines[0]
    )
    for text in said.values():
        assert f"The last good checkpoint is {pod.run_dir / 'checkpoints' / str(max(pod.steps()))}" in text


def test_a_signal_while_compiling_stops_all(begin):
    pod = begin().hear("compiling")
    codes, said = pod.send(1, signal.SIGTERM).end()
    assert codes == {0: -15, 1: -15}, said
    assert len(pod.steps()) == 1


@pytest.mark.parametrize("fault", ["evaluates", "saves"])
@pytest.mark.nightly
def test_a_signal_at_a_milestone_stops_all(fault, begin):
    """To process 1, while process 0 evaluates, or is about to write a checkpoint."""
    pod = begin(f"{fault}@0").hear("now _")
    codes, said = pod.send(1, signal.SIGTERM).end(timeout=30)
    assert codes == {0: -15, 1: -15}, said
    assert "stopped by a signal" in said[0]


def test_a_signal_to_both_is_one(begin):
    pod = begin().train().send(0, signal.SIGTERM)
    codes, said = pod.send(1, signal.SIGTERM).end(timeout=30)
    assert codes == {0: -15, 1: -15}, said


@pytest.mark.nightly
def test_a_log_that_raises_ends_all_in_order(begin):
    codes, said = begin("its log raises@0").end()
    assert codes == {0: 1, 1: 3}, said
    assert 'KeyError: "the actor\'s own error"' in said[0]
    assert 'the run has ended with an error in log: KeyError: "the actor\'s own error"' in said[1]


@pytest.mark.parametrize(
    ("fault", "flags", "index"),
    [
        pytest.param("is stuck@0", (), 0, id="itself"),
        pytest.param("its learner is stuck@0", SEBULBA, 1, id="other"),
    ],
)
@pytest.mark.nightly
def test_a_second_interrupt_does_not_wait(fault, flags, index, begin):
    """It reaches the process that is stuck, or the one that waits for it in a collective."""
    flags = (*flags, "--pod.stall-timeout", "60")
    pod = begin(fault, (flags, flags)).train()
    time.sleep(1)
    pod.send(index, signal.SIGINT)
    time.sleep(0.5)  # two at once are one
    codes, said = pod.send(index, signal.SIGINT).end(timeout=10)
    assert codes == {index: 130, 1 - index: 3}, said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--seed", "1"), r"process 1 \(\S+, pid \d+\) has run.seed 1, process 0 \(\S+, pid \d+\) 0"),
        (("--agent.discount", "0.9"), r"has agent_config.discount 0.9, .* 0.99"),
    ],
    ids=["seed", "agent"],
)
def test_processes_that_were_asked_for_different_things(flags, message, begin):
    codes, said = begin(flags=((), flags)).end()
    assert codes == {0: 2, 1: 2}
    for text in said.values():
        assert re.search(message, text)
        assert "compiling" not in text


def test_a_process_of_another_version(begin):
    codes, said = begin("is of another version").end()
    assert codes == {0: 2, 1: 2}
    for text in said.values():
        assert re.search(r'process 1 \(\S+, pid \d+\) has podracer "0\.0\.1", process 0 .* "\d', text)


def test_a_port_that_is_taken(begin):
    flags = ("--pod.start-timeout", "3")
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        codes, said = begin(flags=(flags, flags), port=stranger.getsockname()[1]).end(timeout=30)
    assert codes == {0: 2, 1: 2}, said
    assert re.search(r"the pod cannot come together at 127.0.0.1:\d+: Address already in use", said[0])
    assert "the pod did not come together at 127.0.0.1:" in said[1]


def test_a_process_that_never_comes(begin):
    flags = ("--pod.start-timeout", "3")
    for absent in (0, 1):
        since = time.monotonic()
        codes, said = begin(flags=(flags, flags), absent=[absent]).end()
        assert codes == {1 - absent: 2}, said
        why = "process 1 did not come" if absent else "process 0 does not answer there"
        assert re.search(rf"did not come together at 127\.0\.0\.1:\d+ in 3 s \({why}", said[1 - absent])
        assert time.monotonic() - since < 20


@pytest.mark.nightly
def test_parameters_that_drift_apart(begin):
    codes, said = begin("drifts").end()
    assert codes == {0: 1, 1: 1}
    assert "process 1 has another learner.params" in said[0]


def test_a_disk_that_is_full(begin):
    pod = begin("disk")
    codes, said = pod.end()
    assert codes == {0: 3, 1: 1}, said
    assert re.search(r"could not write checkpoint .* File too large\. Earlier checkpoints are intact", said[1])
    assert_resumes(pod, begin)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("dies before it writes", 3),
        ("dies before what it wrote counts@0", None),
    ],
)
@pytest.mark.nightly
def test_a_process_that_dies_in_a_save(fault, code, begin):
    pod = begin(fault)
    codes, said = pod.end()
    assert -9 in codes.values(), said
    assert 0 not in codes.values(), said
    assert code in (None, codes[0]), said
    assert len(pod.steps()) == 1
    assert_resumes(pod, begin)


@pytest.mark.nightly
def test_a_damaged_part_of_one_process(begin):
    """Bits that flipped, a file cut short, and one that is gone: of the three newest."""
    keep = ("--keep-checkpoints", "4")
    pod = begin(flags=(keep, keep)).train()
    pods.until(lambda: len(pod.steps()) > 3 or pod.processes[0].poll() is not None, 120)
    codes, said = pod.send(1, signal.SIGTERM).end()
    assert codes == {0: -15, 1: -15}, said
    before, *newest = pod.steps()
    assert len(newest) == 3
    for step, damage in zip(newest, (_flip, _truncate, pathlib.Path.unlink)):
        part = pod.run_dir / "checkpoints" / str(step) / "state" / "ocdbt.process_1"
        files = [path for path in part.rglob("*") if path.is_file()]
        assert files
        for path in files:
            damage(path)
    again = begin(run_dir=pod.run_dir, flags=(keep, keep))
    pods.until(lambda: (pod.run_dir / "damaged").exists() or again.processes[0].poll() is not None, 60)
    pods.until(lambda: max(pod.steps()) > before or again.processes[0].poll() is not None, 60)
    codes, said = again.send(0, signal.SIGTERM).end()
    assert codes == {0: -15, 1: -15}, said
    for step in newest:
        assert re.search(rf"checkpoint {step} is damaged .*; used {before}\.", said[0])
    assert {path.name for path in (pod.run_dir / "damaged").iterdir()} == set(map(str, newest))


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_a_directory_that_is_not_shared(begin):
    """A relative path is another one for each."""
    codes, said = begin("is elsewhere", run_dir=pathlib.Path("run")).end()
    assert codes == {0: 2, 1: 2}
    for text in said.values():
        assert re.search(r"run_dir \S+ is not shared: process 1 cannot see what 0 writes there", text)
