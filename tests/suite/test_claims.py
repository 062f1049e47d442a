"""Claims: one holder each, whoever looks when."""

import errno
import itertools
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import time
from unittest import mock

import pytest

from podracer.suite import claims


def newest_path(directory, name):
    return directory / f"{name}.{claims.newest(directory, name)}"


def stale(directory, name="job", age=claims.STALE_SECONDS + 1):
    """A claim that another machine has not touched for so long."""
    claim = claims.claim(directory, name)
    claim.path.write_text(json.dumps({"machine": "elsewhere", "processes": [[1, 1]]}))
    then = time.time() - age
    os.utime(claim.path, (then, then))
    return claim


def test_one_at_a_time(tmp_path):
    first = claims.claim(tmp_path, "job")
    assert claims.claim(tmp_path, "job") is None
    assert claims.state(tmp_path, "job") == "held"
    assert claims.claim(tmp_path, "job-2") is not None, "another job"
    first.release()
    assert claims.state(tmp_path, "job") == "free"
    again = claims.claim(tmp_path, "job")
    assert again.number == 2
    assert claims.claim(tmp_path, "job") is None


def test_stale_claims_are_taken_and_their_holders_notice(tmp_path):
    young = stale(tmp_path, "young", age=claims.STALE_SECONDS - 60)
    assert claims.claim(tmp_path, "young") is None
    assert young.touch()
    old = stale(tmp_path)
    assert old.touch(), "nobody has taken it"
    assert claims.claim(tmp_path, "job") is None, "it was touched"
    old = stale_again(old)
    taken = claims.claim(tmp_path, "job")
    assert taken is not None
    assert not old.touch()
    assert taken.touch()
    old.release()
    assert claims.state(tmp_path, "job") == "held", "what the old one gives back is not his"


def test_a_disk_that_is_away_ends_no_training(tmp_path, monkeypatch):
    claim = claims.claim(tmp_path, "job")
    monkeypatch.setattr(pathlib.Path, "exists", mock.Mock(side_effect=OSError(errno.ESTALE, "stale file handle")))
    assert claim.touch()


@pytest.mark.parametrize("ahead", [-3600, 3600])
def test_the_clock_of_a_machine_does_not_matter(ahead, tmp_path, monkeypatch):
    """Claims are dated by the disk's, which need not agree with that of who looks."""
    stale(tmp_path, "young", age=claims.STALE_SECONDS - 60)
    stale(tmp_path, "old")
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead)
    assert claims.claim(tmp_path, "young") is None
    assert claims.claim(tmp_path, "old") is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.1", "old.2", "young.1"]


def stale_again(claim):
    then = time.time() - claims.STALE_SECONDS - 1
    os.utime(claim.path, (then, then))
    return claim


def test_a_slow_taker_loses_however_late(tmp_path, monkeypatch):
    """It looked when the claim was stale; since then another took the job, and gave it back or has it."""
    for gives_back in (False, True):
        name = f"job-{gives_back}"
        stale(tmp_path, name)
        look = claims._state
        taken = []

        def looks_slowly(*arguments, name=name, taken=taken, gives_back=gives_back, look=look):
            found = look(*arguments)
            monkeypatch.setattr(claims, "_state", look)
            taken.append(claims.claim(tmp_path, name))
            if gives_back:
                taken[0].release()
            return found

        monkeypatch.setattr(claims, "_state", looks_slowly)
        assert claims.claim(tmp_path, name) is None
        assert taken[0].number == 2


def test_a_claim_without_a_signature_is_held_until_it_is_stale(tmp_path):
    claim = claims.claim(tmp_path, "job")
    for text in ("", '{"machine": "el'):
        claim.path.write_text(text)
        assert claims.state(tmp_path, "job") == "held"
    stale_again(claim)
    assert claims.state(tmp_path, "job") == "free"


def test_processes_of_this_machine_are_asked(tmp_path):
    """A worker that was killed holds nothing, however young its claim; its process that still ends does."""
    claim = claims.claim(tmp_path, "job")
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    try:
        claim.sign(child.pid)
        stale_again(claim)
        assert claims.state(tmp_path, "job") == "held", "this process lives, and so it is not stale"
        signature = json.loads(claim.path.read_text())
        signature["processes"][0] = [2**22 + 1, 5]
        claim.path.write_text(json.dumps(signature))
        assert claims.state(tmp_path, "job") == "ending"
        assert claims.claim(tmp_path, "job") is None
    finally:
        child.kill()
        child.wait()
    assert claims.state(tmp_path, "job") == "free"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_process_numbers_are_used_again(tmp_path):
    claim = claims.claim(tmp_path, "job")
    signature = json.loads(claim.path.read_text())
    signature["processes"][0][1] -= 1  # this process, had it begun earlier
    claim.path.write_text(json.dumps(signature))
    assert claims.state(tmp_path, "job") == "free"


def take_all(directory, names, ready, go, won, over):
    ready.release()
    go.wait()
    won.put([name for name in names if claims.claim(directory, name)])
    over.wait()  # the dead hold nothing


def test_of_many_takers_one_wins(tmp_path):
    """Real processes, half of the jobs with a stale claim on them."""
    names = [f"job{i}" for i in range(60)]
    for name in names[::2]:
        stale(tmp_path, name)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["podracer.suite.claims"])
    ready, go, won, over = context.Semaphore(0), context.Event(), context.Queue(), context.Event()
    takers = [context.Process(target=take_all, args=(tmp_path, names, ready, go, won, over)) for _ in range(4)]
    for taker in takers:
        taker.start()
    for _ in takers:
        assert ready.acquire(timeout=60)
    go.set()
    shares = [won.get(timeout=60) for _ in takers]
    over.set()
    for taker in takers:
        taker.join()
    assert sorted(itertools.chain(*shares)) == sorted(names)
    assert sum(map(bool, shares)) > 1, "there was no race"
