"""Commands as a shell gives them, in-process, and the small run that tests of them share."""

from podracer import cli

# That of tests/support/small_run.py: the same program, so that one compilation serves both.
SMALL = (
    "--total-steps 2000 --num-envs 8 --eval-every 500 --eval-episodes 16 --checkpoint-every 500 "
    "--agent.rollout-length 10 --agent.hidden-sizes 8"
)
TRAIN = f"train vtrace catch {SMALL}"


def run(command):
    return cli.run(command.split() if isinstance(command, str) else command)


def complaint(capsys, command):
    """The one line that a mistake gets: exit code 2, nothing on stdout."""
    code = run(command)
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert err.startswith("podracer: error: ")
    assert not any(c in err for c in "│─╭╰"), "a box that lost its lines"
    assert "---" not in err
    return err.removeprefix("podracer: error: ")
