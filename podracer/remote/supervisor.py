"""`podracer serve-envs`: worker processes, replaced where they die or hang. It knows neither gRPC nor JAX."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from typing import Any

from podracer.system import console, own_code

BACK_OFF = (0.5, 10.0)
"""Seconds before a process is replaced, the first and the longest."""

FINAL = {0: 0, 2: 2, 3: 3, 76: 1}
"""Exit codes of a process that is not replaced, and what becomes of them: the learner is finished, does not want it,
has failed, or does not understand it."""

UNMADE, UNMADE_TRIES, SOUND_SECONDS = 77, 3, 600.0
"""The exit code of a process whose environments could not be made or failed again and again, how many in a row end all
with code 1, and how long one must have lived for those before it to count no more."""

GRACE_SECONDS = 5.0


def run(environment: str, settings: dict[str, Any], processes: int) -> int:
    """Runs workers until the learner has no use for them; returns the exit code.

    Args:
      environment: a name.
      settings: of `worker.serve_envs`.
      processes: how many.
    """
    # A fork of a process with threads may hang, and one that has used gRPC does.
    context = multiprocessing.get_context("spawn")
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stopped.append(number))
    host = settings.pop("name", None) or socket.gethostname()
    one_learner = "," not in settings.get("connect", "")

    def start(place: int) -> Any:
        named = settings | {"name": f"{host}-{place}" if processes > 1 else host}
        # No daemon, which may have no processes of its own; they end with it by `_end`.
        child = context.Process(target=_child, args=(environment, named), name=named["name"], daemon=False)
        child.start()
        return child

    children: dict[int, Any] = {}
    again: dict[int, float] = {}
    failures = dict.fromkeys(range(processes), 0)
    unmade = dict.fromkeys(range(processes), 0)
    started = dict.fromkeys(range(processes), time.monotonic())
    code, until = 0, float("inf")
    try:
        for place in range(processes):
            children[place] = start(place)
        while (children or again) and not stopped and time.monotonic() < until:
            time.sleep(0.1)
            now = time.monotonic()
            for place, child in list(children.items()):
                if child.exitcode is None:
                    continue
                del children[place]
                _end(child)
                before = unmade[place] if now - started[place] < SOUND_SECONDS else 0
                unmade[place] = before + 1 if child.exitcode == UNMADE else 0
                final = 1 if unmade[place] >= UNMADE_TRIES else FINAL.get(child.exitcode)
                if final is not None:
                    code = max(code, final)
                    # What the learner said to one it says to all, but to those it does not reach any more.
                    if one_learner or child.exitcode == UNMADE:
                        until, again = min(until, now + GRACE_SECONDS), {}
                    continue
                if until < float("inf"):
                    continue
                failures[place] = 0 if now - started[place] > 60.0 else failures[place] + 1
                delay = min(BACK_OFF[0] * 2 ** failures[place], BACK_OFF[1]) * random.uniform(0.5, 1.5)
                known = {75: "its environments hang", UNMADE: "its environments cannot be made, or fail"}
                why = known.get(child.exitcode, f"exit code {child.exitcode}")
                console.say(f"{child.name} ended ({why}); a new one in {delay:.1f} s.")
                again[place] = now + delay
            for place in [place for place, when in again.items() if when <= now]:
                del again[place]
                started[place] = now
                children[place] = start(place)
    finally:
        for child in children.values():
            child.terminate()
        until = time.monotonic() + GRACE_SECONDS
        for child in children.values():
            child.join(max(0.0, until - time.monotonic()))
            _end(child)
    return 128 + stopped[0] if stopped else code


def _end(child: Any) -> None:
    """Ends a process and those that its environments started, which hear nothing where it was killed, or hang."""
    for end in (lambda: os.killpg(child.pid, signal.SIGKILL), child.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end()
    child.join()


def _child(environment: str, settings: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor hears it too, and ends all
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    os.setpgid(0, 0)  # with the processes of its environments, which the supervisor ends with it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from podracer.remote import worker

    try:
        worker.serve_envs(environment, **settings)
    except (ValueError, TypeError) as error:
        _die(error, 2)
    except (worker.MakingError, worker.FailingError) as error:
        _die(error, worker.UNMADE)
    except worker.MisunderstoodError as error:
        _die(error, worker.MISUNDERSTOOD)
    except worker.LearnerError as error:
        _die(error, worker.FAILED)
    except worker.HungError as error:
        _die(error, worker.HUNG)
    os._exit(0)


def _end_with_parent() -> None:
    """A supervisor that is killed can end nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _die(error: Exception, code: int) -> None:
    own_code.show(error)
    console.say(f"podracer: error: {' '.join(own_code.said(error).split())}")
    os._exit(code)  # threads of environments that hang must not be waited for
