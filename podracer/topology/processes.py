"""The processes that share a run: one of a local run, several of a pod (`podracer.pod.peers.Peers`)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any


class Processes:
    """The single process of a local run; the base class of a pod's.

    Attributes:
      index: int; index of this process.
      count: int; P, number of processes.
      hosts: int; number of machines.
    """

    index = 0
    count = hosts = 1

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: Any) -> None:
        """Tells the other processes of an error."""

    @property
    def is_first(self) -> bool:
        """True in process 0, which writes files and prints for all."""
        return self.index == 0

    def check_equal(self, facts: Mapping[str, Any]) -> None:
        """Checks that all processes have the same facts, which JSON can hold.

        Raises:
          DisagreementError: in every process, with the first fact that differs and its value in each process.
        """

    def broadcast(self, value: Any = None) -> Any:
        """Broadcasts a JSON value from process 0; returns it in every process."""
        return value

    def all_gather(self, value: Any) -> list[Any]:
        """Gathers a JSON value from every process; returns all of them, by process."""
        return [value]

    def set_status(self, what: str) -> None:
        """Sets this process's status, for the messages of processes that wait for it."""

    def collective(self) -> contextlib.AbstractContextManager[None]:
        """Marks a collective: code within waits for the other processes, which must all run it in the same order.

        During training, each wait for a program of all processes belongs in a collective of its own, and nothing else
        does: a process that stays out of another's collective for too long counts as stuck.
        """
        return contextlib.nullcontext()

    @property
    def stopping(self) -> bool:
        """True if another process wants to stop; votes then decide for all."""
        return False

    def stop(self) -> None:
        """Tells the other processes that this one wants to stop."""

    def barrier(self) -> None:
        """Waits until all processes have called it."""


ALONE = Processes()
"""The process of a local run."""
