"""The queue of long runs: one at a time, in order, and on from any stop. Fake runs are shell scripts."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest

from podracer.bench import measure
from podracer.cli import train

BENCHMARKS = measure.SOURCE / "benchmarks"
JOBS = """
from queue_jobs import Job
JOBS = ({})
"""
TINY = '"vtrace catch --num-envs 16"'

RUN = """
mkdir {run_dir}/alone || {{ echo 'podracer: error: two at once' >&2; exit 3; }}
trap 'rmdir {run_dir}/alone; exit 143' TERM
echo {name} >> {runs}/order
{body}
rmdir {run_dir}/alone
echo '{{"command": "{command}", "holds": true, "newest_checkpoint": {{"mean": 7.0}}}}' > {results}/{name}.json
"""
"""A run that leaves a result, if its `body` does not end it before."""


@pytest.fixture
def queue(monkeypatch, tmp_path):
    """Makes a queue of jobs, whose runs do a `body` by their name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import job_queue

    monkeypatch.setattr(job_queue, "POLL_SECONDS", 0.005)
    runs, results = tmp_path / "runs", tmp_path / "results"

    class FakeQueue(job_queue.Queue):
        bodies: dict[str, str] = {}  # noqa: RUF012

        def commands(self, run):
            self.run_dir(run).mkdir(parents=True, exist_ok=True)
            results.mkdir(exist_ok=True)
            facts = {"run_dir": self.run_dir(run), "runs": runs, "results": results, "name": run.name}
            script = RUN.format(**facts, command=run.command, body=self.bodies.get(run.name, ":"))
            return [["true"], ["sh", "-c", script]]

    def make(jobs, **bodies):
        file = tmp_path / "jobs.py"
        file.write_text(JOBS.format(jobs))
        made = FakeQueue(file, runs, results)
        made.bodies = {name.replace("_", "-"): body for name, body in bodies.items()}
        return made

    return make


def order(tmp_path):
    path = tmp_path / "runs" / "order"
    return path.read_text().split() if path.exists() else []


TWO = f'Job("a", {TINY}, 100, 5, 3, 2.0), Job("b", {TINY}, 100, 9, 3, 0.1, seeds=(0, 1)),'


def test_runs_in_order_and_further_seeds_of_long_jobs_last(queue, tmp_path):
    made = queue(TWO)
    assert [made.state(run) for run in made.runs()] == ["waiting"] * 3
    assert made.follow(made.runs, lambda: False) == []
    assert order(tmp_path) == ["a-0", "b-0", "b-1", "a-1", "a-2"]
    assert {made.state(run) for run in made.chosen(["a"])} == {"done, 7 at the end, holds >= 5"}
    assert made.follow(made.runs, lambda: False) == []
    assert len(order(tmp_path)) == 5, "a run that is done is not done again"
    longer = queue(TWO.replace("100, 5", "200, 5"))
    assert longer.state(longer.chosen(["a-0"])[0]) == "going on, 0 of 200 rows (0%)", "the result is of other settings"


def test_a_long_job_that_misses_its_bound_has_no_further_seeds(queue, tmp_path):
    made = queue(TWO)
    (tmp_path / "results").mkdir()
    missed = {"command": made.chosen(["a-0"])[0].command, "holds": False, "newest_checkpoint": {"mean": 1}}
    (tmp_path / "results" / "a-0.json").write_text(json.dumps(missed))
    assert made.follow(made.runs, lambda: False) == []
    assert order(tmp_path) == ["b-0", "b-1"]
    assert made.state(made.chosen(["a-0"])[0]) == "done, 1 at the end, misses >= 5"


def test_a_failure_leaves_the_others_alone_and_is_tried_again_at_the_next_start(queue, tmp_path):
    run_dir, error = tmp_path / "runs" / "a-0", tmp_path / "runs" / "a-0.error.json"
    made = queue(TWO, a_0=f"rmdir {run_dir}/alone; echo 'podracer: error: no such game.' >&2; exit 2")
    assert [run.name for run in made.follow(made.runs, lambda: False)] == ["a-0"]
    assert order(tmp_path) == ["a-0", "b-0", "b-1"]
    assert made.state(made.chosen(["a-0"])[0]) == "failed: no such game."
    again = queue(TWO, a_0=f"test ! -e {error} || exit 9")
    assert again.follow(again.runs, lambda: False) == [], "it does not say that it failed while it goes on"
    assert order(tmp_path)[3:] == ["a-0", "a-1", "a-2"]


def test_a_killed_run_goes_on_at_once_if_it_has_a_new_checkpoint(queue, tmp_path):
    """As after the kernel took its memory; without one it would be killed for ever."""
    run_dir = tmp_path / "runs" / "b-0"
    once = f"if [ ! -d {run_dir}/checkpoints/50 ]; then mkdir -p {run_dir}/checkpoints/50; rmdir {run_dir}/alone; kill -9 $$; fi"
    made = queue(TWO, b_0=once)
    assert made.follow(lambda: made.chosen(["b"]), lambda: False) == []
    assert order(tmp_path) == ["b-0", "b-0", "b-1"]
    assert [len(made.starts(run)) for run in made.chosen(["b"])] == [2, 1]


def test_a_stop_ends_the_run_in_good_order(queue, tmp_path):
    made = queue(TWO, a_0="sleep 30 & wait $!")
    begin = time.monotonic()
    assert made.follow(made.runs, lambda: order(tmp_path) == ["a-0"]) == []
    assert time.monotonic() - begin < 15
    assert not (tmp_path / "runs" / "a-0" / "alone").exists(), "it had the time to write"
    assert order(tmp_path) == ["a-0"]
    assert made.state(made.chosen(["a-0"])[0]).startswith("going on, 0 of 100 rows")


def test_a_run_whose_report_was_cut_off_is_reported_and_not_trained(queue, tmp_path):
    import job_queue

    run = queue(TWO).chosen(["a-0"])[0]
    real = job_queue.Queue(tmp_path / "jobs.py", tmp_path / "runs", tmp_path / "results")
    train, report = real.commands(run)
    assert train[1:5] == ["-m", "podracer", "train", "vtrace"]
    assert train[-3:] == ["--run-dir", str(tmp_path / "runs" / "a-0"), "--resume"]
    (tmp_path / "runs" / "a-0").mkdir(parents=True)
    for complete, left in ((False, [train, report]), (True, [report])):
        (tmp_path / "runs" / "a-0" / "summary.json").write_text(json.dumps({"complete": complete}))
        assert real.commands(run) == left
    (tmp_path / "runs" / "a-0" / "summary.json").unlink()
    (tmp_path / "runs" / "a-0" / "config.json").touch()
    goes_on = [sys.executable, "-m", "podracer", "resume", str(tmp_path / "runs" / "a-0")]
    assert real.commands(run) == [goes_on, report], "with its settings, whatever the preset has become"
    real.note_start(run)
    assert real.commands(run) == [goes_on, report]
    other = run._replace(job=run.job._replace(train=f"{run.job.train} --num-envs 4"))
    assert real.commands(other)[0][-1] == "--resume", "which refuses what the job has become"


def test_a_report_before_the_end_is_no_result(queue, tmp_path, monkeypatch):
    """It stands on the page of results, and the queue goes on with its run."""
    import job_queue
    import run_result
    from pages import queue as page

    jobs = 'Job("a", "vtrace catch", 100, 0.5, 20, 0.1, seeds=(0,)),'
    run = queue(jobs).chosen(["a"])[0]
    real = job_queue.Queue(tmp_path / "jobs.py", tmp_path / "runs", tmp_path / "results")
    for folder in ("runs/a-0", "results"):
        (tmp_path / folder).mkdir(parents=True)
    real.note_start(run)
    monkeypatch.setattr(run_result, "draw", lambda *_: None)
    cells = []
    for steps in (60, 101):
        score = {"env_steps": steps, "mean": 0.7, "interval": [0.6, 0.8]}
        found = {"env_steps": steps, "train_seconds": 60.0, "newest_checkpoint": score, "best_checkpoint": score}
        reader = mock.Mock(return_value=found)
        monkeypatch.setattr(run_result, "read", reader)
        (tmp_path / "runs" / "a-0" / "summary.json").write_text(json.dumps({"complete": steps > 100}))
        real.report(run)
        cells.append(page._row(run, json.loads((tmp_path / "results" / "a-0.json").read_text())))
        assert (real.result(run) is None) == (steps == 60)
        assert reader.call_args.kwargs["best_actions"] == (steps > 100), "which take long before the end"
    assert [row[1] for row in cells] == ["60 of 100", "101"]
    assert [row[5] for row in cells] == [">= 0.5 at the end", ">= 0.5: yes"]


def test_the_process_of_a_killed_queue_ends_first(queue, tmp_path):
    """It writes its checkpoint, and would refuse the run directory to the next one."""
    import job_queue

    made = queue(TWO)
    (tmp_path / "runs").mkdir()
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.7)"])
    signature = {"machine": job_queue.machine(), "process": job_queue.identity(left.pid)}
    (tmp_path / "runs" / job_queue.PROCESS).write_text(json.dumps(signature))
    begin = time.monotonic()
    assert made.follow(lambda: made.chosen(["b-0"]), lambda: False) == []
    assert time.monotonic() - begin > 0.4
    assert left.wait(10) == 0


def test_names_and_progress(queue, tmp_path, capsys, monkeypatch):
    import job_queue

    made = queue(TWO)
    assert [run.name for run in made.chosen(["b-1", "a"])] == ["b-1", "a-0", "a-1", "a-2"]
    run_dir = tmp_path / "runs" / "b-0"
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text('{"env_steps": 20}\n{"env_steps": 25}\n{"env_st')
    places = ["--jobs", str(tmp_path / "jobs.py"), "--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "no")]
    assert job_queue.main([*places, "--list"]) == 0
    assert [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()] == [
        ["a-0", "waiting"],
        ["b-0", "going on, 25 of 100 rows (25%)"],
        ["b-1", "waiting"],
    ]
    assert job_queue.main([*places, "--list", "--only", "c"]) == 2
    assert capsys.readouterr().err == "job_queue: error: c: no such job; known: a, b.\n"


def test_a_second_queue_is_refused(queue, tmp_path, capsys):
    import job_queue

    queue(TWO)
    places = ["--jobs", str(tmp_path / "jobs.py"), "--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "no")]
    with contextlib.closing(job_queue.RunLock(tmp_path / "runs")) as first:
        first.take()
        assert job_queue.main([*places, "--stop-after", "0"]) == 2
    assert f"is in use: process {os.getpid()}" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "order").exists()


@pytest.mark.slow
def test_the_jobs_are_commands_that_podracer_takes(monkeypatch):
    """Agents, environments, presets and flags, without making any."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import queue_jobs

    runs = [queue_jobs.Run(job, seed) for job in queue_jobs.JOBS for seed in job.seeds]
    names = [run.name for run in runs]
    assert len(set(names)) == len(names)
    for run in (queue_jobs.Run(job, 0) for job in queue_jobs.JOBS):
        train.settings(run.command.split()[2:])
    others = {path.stem for path in (BENCHMARKS / "results").rglob("*.json") if path.parent.name != "queue"}
    assert not others & set(names), "the site has a page for each file of results"
    control = [job for job in queue_jobs.JOBS if job.at_most]
    assert [(job.holds(0.5), job.holds(0.7), job.claim) for job in control] == [(True, False, "<= 0.6")]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_that_is_killed_goes_on_and_has_a_result(tmp_path):
    """A real run: kill -9 of the queue in the middle, another start meanwhile, and the result of both starts."""
    (tmp_path / "jobs.py").write_text(
        JOBS.format('Job("tiny", "vtrace catch --num-envs 16", 3_000_000, -1, 20, 0.1, seeds=(0,)),')
    )
    places = [f"--{name}={tmp_path / name}" for name in ("runs", "results")]
    command = [sys.executable, str(BENCHMARKS / "job_queue.py"), f"--jobs={tmp_path / 'jobs.py'}", *places]
    environment = os.environ | {"PYTHONPATH": str(measure.SOURCE)}
    first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    checkpoints = tmp_path / "runs" / "tiny-0" / "checkpoints"
    deadline = time.monotonic() + 300
    while not [path for path in checkpoints.glob("*") if path.name.isdigit()]:
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert second.returncode == 2
    assert f"is in use: process {first.pid}" in second.stderr
    first.send_signal(signal.SIGKILL)
    assert first.wait(30) == -signal.SIGKILL
    assert not (tmp_path / "results" / "tiny-0.json").exists()
    third = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert third.returncode == 0, third.stderr
    result = json.loads((tmp_path / "results" / "tiny-0.json").read_text())
    assert (len(result["starts"]), len(result["commits"])) == (2, 1)
    assert result["newest_checkpoint"]["env_steps"] == result["env_steps"] >= 3_000_000
    assert result["newest_checkpoint"]["episodes"] == 20
    assert result["holds"] is True
    assert (tmp_path / "results" / "tiny-0.png").stat().st_size > 5_000
    said = pathlib.Path(tmp_path / "runs" / "tiny-0.log").read_text()
    assert "resum" in said
