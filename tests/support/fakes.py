"""A suite whose jobs train nothing, and workers for it in processes of their own."""

import os
import pathlib
import subprocess
import sys
import textwrap

from podracer.suite.jobs import Suite

ROOT = pathlib.Path(__file__).parents[2]
SETTINGS = {"agent": "fake", "agent_config": {"learning_rate": 0.1}}

TRAINER = """
mkdir -p {run_dir}
echo started >> {run_dir}/starts
mkdir {run_dir}/alone || exit 9
{body}
rmdir {run_dir}/alone
touch {run_dir}/complete
"""
"""Two of them at a time in one directory fail."""


class FakeSuite(Suite):
    """Jobs are shell scripts: `body` is what they do, by name of the job or of all."""

    def __init__(self, directory, games="ABC", seeds=(0,), settings=SETTINGS, body=":", bodies=None, **options):
        super().__init__(pathlib.Path(directory), settings, games, seeds, **options)
        self._body, self._bodies = body, bodies or {}

    def command(self, job):
        body = self._bodies.get(job.name, self._body)
        return ["sh", "-c", TRAINER.format(run_dir=self.run_dir(job), body=body)]

    def result(self, job):
        if not (self.run_dir(job) / "complete").exists():
            raise ValueError("it is not complete")
        fields = {"game": job.game, "settings": self.settings, "score": 1.0, "hns": None, "frames": 4}
        return [fields | {"seed": one.seed, "frames_per_second": 2.0} for one in job.members]

    def starts(self, job):
        path = self.run_dir(job) / "starts"
        return len(path.read_text().splitlines()) if path.exists() else 0


def worker(directory, code="", **arguments):
    """A process that runs the jobs of a fake suite; `code` runs first. It prints the outcome's lengths."""
    script = """
        from tests.support.fakes import FakeSuite
        from podracer.system.stopping import StopSignal
        from podracer.suite import claims, jobs, progress, runner
        runner.POLL_SECONDS, runner.SCAN_SECONDS = 0.005, 0.1
        suite = FakeSuite({directory!r}, **{arguments!r})
        suite.register()
        exec({code!r})
        with StopSignal() as stop:
            outcome = runner.Runner(suite, suite.jobs, 2, stop, progress.Display(suite, 0, ""), FakeSuite.result).run()
        print(*(len(part) for part in outcome))
    """
    script = textwrap.dedent(script).format(directory=str(directory), arguments=arguments, code=code)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def outcome(process, timeout=60):
    """The numbers that a worker printed, (done, failed, stopped, elsewhere, left), and its stderr."""
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    return tuple(map(int, out.split())), err
