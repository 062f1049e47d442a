"""Calls of Orbax: in silence, and with one line for whatever goes wrong."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

ELSEWHERE = tuple(
    os.strerror(code)
    for code in (errno.EACCES, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT)
)
"""Reasons why a file cannot be read although it may be whole."""

LOGGERS = ("absl", "asyncio", "orbax")
"""The loggers of Orbax and its tasks. Records of other libraries are shown."""


def attempt(function: Callable[[], Any]) -> tuple[Any, str | None]:
    """Calls Orbax, which raises anything where a disk is full or a file is damaged.

    Returns:
      What it returned, and None; or None, and a line about why it failed.
    """
    with QUIET:
        try:
            return function(), None
        except Exception as error:
            problem = _reason(error)
        # The other arrays' tasks complain when they end, or are collected, after the first has failed: let them do so
        # here, unheard.
        time.sleep(0.2)
        gc.collect()
        return None, problem


def _reason(error: Exception) -> str:
    """The disk's own words, if it was the disk; else the first line, whole."""
    text = str(error)
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO):
        if os.strerror(code) in text:
            return os.strerror(code)
    for reason in ELSEWHERE:
        if reason in text:
            return reason
    lines = text.partition(". See full TensorStore details")[0].strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


class _Quiet:
    """Silence of Orbax, which warns and logs about things that a user of ours cannot act on.

    Silence is the process': threads that overlap share it, and the last one out gives back what the first one found.
    """

    def __init__(self):
        self._lock, self._inside, self._before = threading.Lock(), 0, contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside > 1:
                return
            self._before.enter_context(warnings.catch_warnings())
            for logger in map(logging.getLogger, LOGGERS):
                self._before.callback(logger.setLevel, logger.level)
                logger.setLevel(logging.CRITICAL)
            self._before.callback(setattr, sys, "unraisablehook", sys.unraisablehook)
            warnings.simplefilter("ignore")
            sys.unraisablehook = lambda unraisable: None

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._before.close()


QUIET = _Quiet()
"""A context in which Orbax is not heard."""
