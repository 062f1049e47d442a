"""The commands of `podracer`: train, resume, launch, serve-envs, eval, elo, export, plot, envs, agents,
bench, suite and sweep.

Bad input gives one line on stderr and exit code 2; a run that fails gives one line and exit code 1. A run that was
stopped by a closed terminal, Ctrl-C or SIGTERM gives 129, 130 or 143, as in shells, though it can be resumed: with 0 it
is complete. A process of a pod that ends because of another one gives 3.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
from collections.abc import Callable

import jax

import podracer
from podracer import configs
from podracer.cli.arguments import InputError
from podracer.errors import LOST
from podracer.run.driver import memory_explained
from podracer.system import console, own_code, spans

USAGE = """podracer: reinforcement learning on the accelerator

  podracer train AGENT ENV [options]      train; `podracer train ppo cartpole --help` lists the options
  podracer resume RUN_DIR [options]       continue a run that was stopped, or train it further
  podracer serve-envs ENV [options]       step environments for a learner that runs elsewhere
  podracer eval RUN_DIR [options]         evaluate a trained policy
  podracer elo RUN_DIR...                 rate the players that runs of a game for two became
  podracer export RUN_DIR -o DIR          write a policy that runs without the agent's code
  podracer plot RUN_DIR... [-o FILE]      draw learning curves
  podracer envs [PATTERN] | agents        what there is
  podracer bench anakin|sebulba|replay|search  measure speed
  podracer launch -n 2 -- COMMAND         run a command in several processes of this machine, as a pod
  podracer sweep AGENT ENV [options]      train many values of tunable numbers side by side
  podracer suite atari57 AGENT [options]  train on many games; podracer suite report DIR... aggregates the scores
  podracer --version"""

FAILURES = (
    podracer.ActorError,
    podracer.CheckpointError,
    podracer.OutOfMemoryError,
    podracer.RemoteError,
    podracer.TrainingDivergedError,
    OSError,
)
"""The errors that can end a run whose arguments are sound."""


def run(argv: list[str]) -> int:
    """Runs a command; returns its exit code."""
    try:
        with memory_explained():
            code = _dispatch(argv)
            if code < 128:  # after a signal the terminal may be closed, and its code stands
                print(end="", flush=True)  # whose reader may be gone
            return code
    except (ValueError, TypeError) as error:
        return _complain(error, 2)
    except podracer.PeerError as error:
        return LOST if error.said else _complain(error, LOST)
    except podracer.ActorError as error:
        return _complain(error, 1, f"{str(error).rstrip('.')}; {own_code.HOW}.")
    except BrokenPipeError as error:
        return 128 + signal.SIGPIPE if _reader_is_gone() else _complain(error, 1)
    except FAILURES as error:
        return _complain(error, 1)
    except jax.errors.JaxRuntimeError as error:
        reason = own_code.describe(error) if own_code.quotes(error) else str(error).partition("\n")[0]
        return _complain(error, 1, reason)
    except KeyboardInterrupt as error:
        notes = (note.removeprefix("podracer: ") for note in getattr(error, "__notes__", ()))  # of a run's checkpoint
        return _complain(" ".join(["interrupted.", *notes]), 130)
    except Exception as error:
        if not own_code.is_fault(error):
            raise  # a fault of this library, of which every line counts
        return _complain(error, 1, f"{own_code.describe(error)}; {own_code.HOW}.")


def _dispatch(argv: list[str]) -> int:
    command = argv[0] if argv else "--help"
    if command == "help" and argv[1:]:
        return _dispatch([*argv[1:], "--help"])
    if command in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if command == "--version":
        print(f"podracer {podracer.__version__}")
        return 0
    if command not in COMMANDS:
        raise InputError(f"unknown command {command!r}; {configs.suggest(command, COMMANDS)}")
    try:
        return _function(command)(argv[1:])
    except SystemExit as exit_:  # tyro's way out of --help
        if exit_.code in (0, None):
            return 0
        raise


def _reader_is_gone() -> bool:
    """True if standard output has no reader any more, as in `podracer envs | head -1`; discards the rest."""
    if not sys.stdout:
        return False
    printed, poll = sys.stdout.fileno(), select.poll()
    poll.register(printed, 0)
    if not poll.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), printed)  # else Python complains of it at its end
    return True


def _complain(error: object, code: int, text: str | None = None) -> int:
    """Prints an error in one line, by its own text unless another is given; returns the code."""
    if isinstance(error, BaseException):
        own_code.show(error)
        text = text or own_code.said(error)
    console.say(f"podracer: error: {' '.join((text or str(error)).split())}")
    return code


COMMANDS = {
    "train": "train.train",
    "resume": "train.resume",
    "launch": "launch.run",
    "serve-envs": "serve.run",
    "eval": "results.evaluate",
    "elo": "elo.rate",
    "export": "results.export",
    "plot": "results.plot",
    "envs": "listing.envs",
    "agents": "listing.agents",
    "bench": "bench.bench",
    "suite": "suite.suite",
    "sweep": "sweep.sweep",
}
"""The modules in `podracer.cli` and their functions, which are imported when they are asked for."""


def _function(command: str) -> Callable[[list[str]], int]:
    module, _, name = COMMANDS[command].partition(".")
    with spans.span("imports"):
        return getattr(importlib.import_module(f"podracer.cli.{module}"), name)
