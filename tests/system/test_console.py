"""Output for people ends nothing if its reader has stopped."""

import contextlib
import errno
import io
import os
import pathlib
import re
import signal
import sys
import threading

import pytest

import podracer
from podracer.run import metrics
from podracer.system import console
from podracer.system.stopping import StopSignal


@contextlib.contextmanager
def unread(name="stderr"):
    """Standard error, or output, as a pipe that nobody reads; pytest replaces them between fixtures and tests."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream, pytest.MonkeyPatch.context() as patch:
        for each in (name, f"__{name}__"):
            patch.setattr(sys, each, stream)
        yield stream


@pytest.mark.parametrize("at_once", [False, True])
def test_a_line_that_nobody_reads(at_once):
    with unread() as stream:
        console.say("one", at_once=at_once)
        print("what others write, and Python's end", file=stream, flush=True)


def test_output_that_nobody_reads():
    with unread("stdout") as stream:
        console.write(sys.stdout, "one\n")
        stream.flush()  # nothing is kept that would fail at the end


def test_a_stream_without_unicode_has_the_line_all_the_same(monkeypatch):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    console.write(stream, "return 1.0 ± 0.1\n")
    assert raw.getvalue() == b"return 1.0 \\xb1 0.1\n"


def test_a_stream_that_was_closed_is_not_what_its_descriptor_is_now(monkeypatch):
    monkeypatch.setattr(sys, "__stderr__", None)
    monkeypatch.setattr(os, "write", lambda *arguments: pytest.fail("wrote into another file"))
    console.say("one", at_once=True)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EAGAIN])
def test_no_error_of_a_write_goes_on(monkeypatch, number):
    def refuse(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", refuse)
    with unread():
        console.say("one")
        console.say("two")


def test_a_bar_whose_terminal_is_gone(monkeypatch):
    """Its thread goes on as well."""

    class Gone:
        encoding = "utf-8"
        isatty = lambda self: True  # noqa: E731

        def write(self, text):
            raise OSError(errno.EIO, "gone")

        flush = write

    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    monkeypatch.setattr(sys, "stderr", Gone())
    monkeypatch.setenv("TERM", "xterm")
    display = metrics.Display(100, "ppo catch", True)
    assert display._bar is not None
    display.update(50, 1.0, 1.0)
    display.say("a line")
    display._bar._progress.refresh()
    display.close()
    assert not failed


def test_a_request_to_stop_is_noted_before_it_is_said(monkeypatch):
    """And at all, where nobody reads it."""
    seen = []
    with StopSignal() as stop, monkeypatch.context() as patch:
        patch.setattr(console, "say", lambda *_, **__: seen.append(stop.requested))
        stop._handle(signal.SIGINT, None)
    assert seen == [True]
    with StopSignal() as stop, unread():
        stop._handle(signal.SIGINT, None)
    assert stop.requested


def test_nothing_is_said_in_another_way():
    package = pathlib.Path(podracer.__file__).parent
    sources = [path for path in package.rglob("*.py") if "bench" not in path.parts and path.name != "console.py"]
    ways = re.compile(r"file=sys\.stderr|os\.write\(2|sys\.std(err|out)\.(write|flush)|Console\(stderr=True\)")
    assert len(sources) > 100
    assert [path.name for path in sources if ways.search(path.read_text())] == []
