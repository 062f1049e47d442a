"""Workers: every job is run once and to its end, whatever happens to them."""

import concurrent.futures
import itertools
import json
import signal
import subprocess
import threading
import time

import pytest

from podracer.suite import claims, jobs, processes, progress, runner
from podracer.system.stopping import StopSignal
from tests.support import fakes


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.005)
    monkeypatch.setattr(runner, "SCAN_SECONDS", 0.05)


def run(suite, workers=2, share=None):
    suite.register()
    with StopSignal() as stop:
        return runner.Runner(
            suite,
            share or suite.jobs,
            workers,
            stop,
            progress.Display(suite, 0, ""),
            lambda suite, job: suite.result(job),
        ).run()


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_every_job_once(tmp_path, capsys):
    suite = fakes.FakeSuite(tmp_path, seeds=(0, 1))
    found = run(suite)
    assert sorted(found.done) == sorted(suite.jobs)
    assert found[1:] == ([], [], [], [])
    assert all(suite.starts(job) == 1 and suite.done(job) for job in suite.jobs)
    assert all(suite.start_path(job).exists() for job in suite.jobs)
    assert all(claims.state(suite.claims, job.name) == "free" for job in suite.jobs)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6
    assert "A-0: 1.0, after 4 frames at 2 a second" in lines
    # Again there is nothing to do; more seeds are more jobs.
    assert len(run(suite).done) == 6
    more = fakes.FakeSuite(tmp_path, seeds=(1, 2))
    assert len(run(more).done) == 6
    assert [suite.starts(jobs.Job("A", seed)) for seed in (0, 1, 2)] == [1, 1, 1]
    assert json.loads((tmp_path / "suite.json").read_text())["seeds"] == [0, 1, 2]
    assert not list(tmp_path.rglob("*.partial*"))


def test_workers_that_ask_for_different_games_at_once(tmp_path, monkeypatch):
    """Each reads what was asked for before any of them writes."""
    both, write = threading.Barrier(2), jobs.write_json
    read = fakes.FakeSuite._merge_stored
    first = threading.local()

    def read_together(self):
        found = read(self)
        if not hasattr(first, "seen"):
            first.seen = both.wait(10)
        return found

    def write_slowly(path, value):
        time.sleep(0.1)
        write(path, value)

    monkeypatch.setattr(fakes.FakeSuite, "_merge_stored", read_together)
    monkeypatch.setattr(jobs, "write_json", write_slowly)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(fakes.FakeSuite(tmp_path, games=games).register) for games in ("AB", "CD")]:
            done.result(20)
    assert sorted(json.loads((tmp_path / "suite.json").read_text())["games"]) == ["A", "B", "C", "D"]
    assert not list(tmp_path.rglob("*.partial*"))


def test_a_process_that_a_claim_cannot_name_is_stopped(tmp_path, monkeypatch):
    sign = claims.Claim.sign

    def refuse(self, *processes):
        if processes:
            raise OSError("no room")
        sign(self)

    monkeypatch.setattr(claims.Claim, "sign", refuse)
    begin = time.monotonic()
    with pytest.raises(OSError, match="no room"):
        run(fakes.FakeSuite(tmp_path, games="A", body="sleep 30"))
    assert time.monotonic() - begin < 15
    assert claims.state(tmp_path / "claims", "A-0") == "free"
    assert not subprocess.run(["pgrep", "-f", f"{tmp_path}/runs"], capture_output=True).stdout


def test_seeds_side_by_side(tmp_path):
    """One run trains the seeds of a game that are new, and keeps them; each has a result, or the run's error."""
    run(fakes.FakeSuite(tmp_path, games="A"))
    seeds = {"games": "AB", "seeds": (0, 1, 2)}
    broken = fakes.FakeSuite(tmp_path, bodies={"B-1-2": "exit 7"}, side_by_side=True, **seeds)
    found = run(broken)
    assert [job.name for job in found.done] == ["A-0", "B-0", "A-1-2"]
    assert [job.name for job in found.failed] == ["B-1-2"]
    assert all(broken.done(jobs.Job("A", seed)) for seed in (0, 1, 2))
    assert all(broken.error_path(jobs.Job("B", seed)).exists() for seed in (1, 2))
    (broken.run_dir(found.failed[0]) / "alone").rmdir()
    mended = fakes.FakeSuite(tmp_path, **seeds)
    assert [job.name for job in run(mended).done] == ["A-0", "B-0", "A-1-2", "B-1-2"], "though apart was asked for"
    assert not list((tmp_path / "results").glob("*.error.json"))
    assert [mended.starts(jobs.Job(game, 1, (2,))) for game in "AB"] == [1, 2]
    more = fakes.FakeSuite(tmp_path, games="A", seeds=(2, 4, 3), side_by_side=True)
    assert [job.name for job in more.jobs] == ["A-1-2", "A-4-3"]


def test_workers_agree_on_what_is_side_by_side(tmp_path):
    """The first one decides, so no seed has two runs."""
    together, apart = (fakes.FakeSuite(tmp_path, "A", (0, 1), side_by_side=both) for both in (True, False))
    assert [job.name for job in apart.jobs] == ["A-0", "A-1"], "nobody has begun"
    together.register()
    apart.register()
    assert [job.name for job in apart.jobs] == ["A-0-1"]


def test_a_seed_may_fail_beside_others(tmp_path):
    class Diverged(fakes.FakeSuite):
        def result(self, job):
            return [super().result(job)[0], ValueError("its parameters became infinite")]

    suite = Diverged(tmp_path, "A", (0, 1), side_by_side=True)
    assert [job.name for job in run(suite).failed] == ["A-0-1"]
    assert suite.done(jobs.Job("A", 0))
    assert not suite.error_path(jobs.Job("A", 0)).exists()
    assert json.loads(suite.error_path(jobs.Job("A", 1)).read_text())["error"] == "its parameters became infinite"


def test_one_failure_among_others(tmp_path, capsys, monkeypatch):
    fail = {"B-0": "echo gone; echo 'podracer: error: B is out of order.' >&2; exit 7"}
    broken = fakes.FakeSuite(tmp_path, bodies=fail | {"C-0": "exit 1"})
    found = run(broken)
    assert [job.name for job in found.done] == ["A-0"]
    assert sorted(job.name for job in found.failed) == ["B-0", "C-0"]
    error = json.loads(broken.error_path(jobs.Job("B", 0)).read_text())
    assert (error["error"], error["exit_code"]) == ("B is out of order.", 7)
    assert error["tail"] == ["gone", "podracer: error: B is out of order."]
    assert "B-0 failed: B is out of order. (see " in capsys.readouterr().err
    # The next call, of a machine whose clock is slow, tries again, and takes the error back.
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    (broken.run_dir(jobs.Job("B", 0)) / "alone").rmdir()
    (broken.run_dir(jobs.Job("C", 0)) / "alone").rmdir()
    assert len(run(fakes.FakeSuite(tmp_path)).done) == 3
    assert not broken.error_path(jobs.Job("B", 0)).exists()


def test_a_process_that_ends_well_without_a_result_has_failed(tmp_path):
    suite = fakes.FakeSuite(tmp_path, games="A", body=f"rmdir {tmp_path}/runs/A-0/alone; exit 0")
    assert [job.name for job in run(suite).failed] == ["A-0"]
    assert "has no result: it is not complete" in suite.error_path(suite.jobs[0]).read_text()


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ("read", FileNotFoundError(2, "metrics.jsonl")),
        ("read", TypeError("no number")),
        ("write", OSError("disk full")),
    ],
)
def test_a_result_that_cannot_be_had_is_a_failure_among_others(tmp_path, monkeypatch, capsys, broken, error):
    suite = fakes.FakeSuite(tmp_path, games="AB")
    result, write = suite.result, runner.write_json

    def read(job):
        if broken == "read" and job.game == "A":
            raise error
        return result(job)

    def refuse(path, value):
        if broken == "write" and path.name.startswith("A"):
            raise error
        write(path, value)

    monkeypatch.setattr(suite, "result", read)
    monkeypatch.setattr(runner, "write_json", refuse)
    found = run(suite)
    assert ([job.name for job in found.done], [job.name for job in found.failed]) == (["B-0"], ["A-0"])
    assert str(error) in capsys.readouterr().err


@pytest.mark.parametrize("error", [OSError("the directory is away"), KeyboardInterrupt()])
def test_an_error_lets_the_others_save(tmp_path, monkeypatch, error):
    """All but a second Ctrl-C, which says that there is no time for it."""
    body = f"trap 'sleep 0.2; echo >> {tmp_path}/saved; exit 143' TERM; echo >> {tmp_path}/trapped; sleep 30 & wait"
    suite = fakes.FakeSuite(tmp_path, games="AB", body=body)
    look = runner.Runner._look

    def fail(worker):
        look(worker)
        if (tmp_path / "trapped").exists() and (tmp_path / "trapped").read_text() == "\n\n":
            raise error

    monkeypatch.setattr(runner.Runner, "_look", fail)
    with pytest.raises(type(error)):
        run(suite)
    interrupted = isinstance(error, KeyboardInterrupt)
    assert not interrupted or not (tmp_path / "saved").exists()
    assert interrupted or (tmp_path / "saved").read_text() == "\n\n"
    assert all(claims.state(suite.claims, job.name) == "free" for job in suite.jobs)


def test_who_does_not_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "STOP_SECONDS", 0.2)
    suite = fakes.FakeSuite(tmp_path, games="A", body=f"trap '' TERM; touch {tmp_path}/trapped; exec sleep 30")
    monkeypatch.setattr(
        runner.Runner,
        "_look",
        lambda worker: (tmp_path / "trapped").exists() and (_ for _ in ()).throw(OSError("gone")),
    )
    began = time.monotonic()
    with pytest.raises(OSError, match="gone"):
        run(suite)
    assert time.monotonic() - began < 15


def test_a_torn_result_is_none(tmp_path):
    suite = fakes.FakeSuite(tmp_path)
    run(suite)
    path = suite.result_path(suite.jobs[1])
    path.write_text(path.read_text()[:40])
    assert len(run(suite).done) == 3
    assert [suite.starts(job) for job in suite.jobs] == [1, 2, 1]
    assert suite.done(suite.jobs[1])


def test_other_settings_are_refused_with_the_difference(tmp_path):
    run(fakes.FakeSuite(tmp_path, games="A"))
    other = fakes.FakeSuite(tmp_path, games="A", settings={"agent": "fake", "agent_config": {"learning_rate": 0.2}})
    with pytest.raises(
        ValueError, match=r"suite.json is of other settings: agent_config.learning_rate: 0.1 -> 0.2; give"
    ):
        other.register()
    (tmp_path / "suite.json").unlink()
    with pytest.raises(
        ValueError, match=r"A-0.json is of other settings: agent_config.learning_rate: 0.1 -> 0.2; give"
    ):
        other.register()


def test_jobs_of_others_are_left_to_them(tmp_path):
    suite = fakes.FakeSuite(tmp_path)
    suite.register()
    held = claims.claim(suite.claims, "B-0")
    found = run(suite)
    assert ({job.name for job in found.done}, [job.name for job in found.elsewhere]) == ({"A-0", "C-0"}, ["B-0"])
    held.release()
    assert len(run(suite).done) == 3


def test_who_loses_a_claim_leaves_the_job(tmp_path, monkeypatch, capsys):
    """As after a night in which this machine slept: another one has the job now."""
    monkeypatch.setattr(claims, "TOUCH_SECONDS", 0.0)
    suite = fakes.FakeSuite(tmp_path, games="A", body="sleep 30")
    suite.register()
    touch = claims.Claim.touch

    def taken(claim):
        claim._replace(number=2).path.touch()
        return touch(claim)

    monkeypatch.setattr(claims.Claim, "touch", taken)
    found = run(suite)
    assert [job.name for job in found.elsewhere] == ["A-0"]
    assert not suite.done(suite.jobs[0])
    assert "another worker has taken it over" in capsys.readouterr().err


@pytest.mark.parametrize(("jobs_", "count"), [(6, 4), (171, 57), (5, 5), (3, 7)])
def test_parts_have_every_job_once(jobs_, count):
    all_ = list(range(jobs_))
    shares = [jobs.part(all_, f"{i + 1}/{count}") for i in range(count)]
    assert sorted(itertools.chain(*shares)) == all_
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("text", "nearest"), [("0/4", "1/4"), ("5/4", "4/4"), ("1/0", None), ("3", None), ("-1/4", None), ("a/b", None)]
)
def test_no_part(text, nearest):
    with pytest.raises(ValueError, match=f"part='{text}': write I/N") as error:
        jobs.part([1], text)
    assert ("nearest" in str(error.value)) == bool(nearest)
    assert (nearest or "") in str(error.value)


def test_two_workers_never_share_a_job(tmp_path):
    """Processes that race over small jobs, each of which fails where another is at it."""
    settings = {"games": [f"G{i}" for i in range(12)], "body": "sleep 0.02"}
    suite = fakes.FakeSuite(tmp_path, **settings)
    together = "(suite.directory / str(__import__('os').getpid())).touch()\nwhile len(list(suite.directory.glob('[0-9]*'))) < 2: __import__('time').sleep(0.001)"
    workers = [fakes.worker(tmp_path, together, **settings) for _ in range(2)]
    for process in workers:
        (_, failed, stopped, _, left), said = fakes.outcome(process)
        assert (failed, stopped, left) == (0, 0, 0), said
    assert all(suite.done(job) for job in suite.jobs)
    assert [suite.starts(job) for job in suite.jobs] == [1] * 12
    by = {json.loads((suite.claims / f"{job.name}.1").read_text())["processes"][0][0] for job in suite.jobs}
    assert by == {process.pid for process in workers}


def test_sigterm_stops_the_processes_and_gives_their_jobs_back(tmp_path):
    settings = {
        "games": "ABC",
        "body": f"trap 'echo >> {tmp_path}/saved; exit 143' TERM; echo >> {tmp_path}/trapped; sleep 30 & wait",
    }
    process = fakes.worker(tmp_path, **settings)
    suite = fakes.FakeSuite(tmp_path, **settings)
    trapped = tmp_path / "trapped"
    wait_until(lambda: trapped.exists() and trapped.read_text() == "\n\n")
    process.send_signal(signal.SIGTERM)
    (done, failed, stopped, elsewhere, left), _ = fakes.outcome(process)
    assert (done, failed, stopped, elsewhere, left) == (0, 0, 0, 0, 3)
    assert (tmp_path / "saved").read_text() == "\n\n"
    assert all(claims.state(suite.claims, job.name) == "free" for job in suite.jobs)
    assert not list((tmp_path / "results").iterdir())


def test_a_closed_terminal_stops_a_run_as_other_signals_do():
    assert {-signal.SIGHUP, 128 + signal.SIGHUP, 130, 143} < set(processes.STOPPED)
    assert 1 not in processes.STOPPED


def test_sigkill_and_again(tmp_path):
    """The process of the killed worker ends with it, and the next worker waits for that and finishes."""
    body = f"trap 'sleep 0.2; rmdir {tmp_path}/runs/*/alone; exit 143' TERM; touch {tmp_path}/trapped; sleep 30 & wait"
    process = fakes.worker(tmp_path, games="AB", bodies={"B-0": body})
    suite = fakes.FakeSuite(tmp_path, games="AB")
    wait_until(lambda: (tmp_path / "trapped").exists() and suite.done(suite.jobs[0]))
    process.kill()
    process.communicate()
    began = time.monotonic()
    found = run(suite)
    assert time.monotonic() - began < 15
    assert len(found.done) == 2, found
    assert suite.starts(suite.jobs[1]) == 2


def test_one_of_two_workers_is_killed(tmp_path):
    """The other one finishes what it had begun, beside its own."""
    stop = "trap 'rmdir {0}/runs/{1}-0/alone; exit 143' TERM; echo >> {0}/begun; "
    wait = "while [ ! -e {0}/go ]; do sleep 0.02; done"
    bodies = {f"{game}-0": (stop + wait).format(tmp_path, game) for game in "ABCD"}
    suite = fakes.FakeSuite(tmp_path, games="ABCD", bodies=bodies)
    killed, other = [fakes.worker(tmp_path, games="ABCD", bodies=bodies) for _ in range(2)]
    begun = tmp_path / "begun"
    wait_until(lambda: begun.exists() and begun.read_text() == "\n" * 4)
    killed.kill()
    killed.communicate()
    (tmp_path / "go").touch()
    outcome, said = fakes.outcome(other)
    assert outcome == (4, 0, 0, 0, 0), said
    assert sorted(suite.starts(job) for job in suite.jobs) == [1, 1, 2, 2]
    assert all(suite.done(job) for job in suite.jobs)


def test_a_bar_on_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # Rich's word for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    suite = fakes.FakeSuite(tmp_path)
    suite.run_dir(suite.jobs[0]).mkdir(parents=True)
    (suite.run_dir(suite.jobs[0]) / "metrics.jsonl").write_text('{"env_steps": 1}\n{"env_steps": 12345}\n{"env_st')
    display = progress.Display(suite, 3, "runs")
    display.show(1, suite.jobs[:2])
    display.say("one line [of it]")
    display.show(3, [])
    display.close()
    err = capsys.readouterr().err
    assert "A-0 12,345, B-0" in err
    assert "one line [of it]" in err
    assert "3/3" in err
