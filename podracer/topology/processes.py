"""The processes that share a run: of a local one there is one, of a pod several (`podracer.pod.peers.Peers`)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any


class Processes:
    """One process, which has nobody to ask.

    Attributes:
      index: of this process.
      count: P.
      hosts: machines that they are on.
    """

    index = 0
    count = hosts = 1

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: Any) -> None:
        """Tells the others of an error."""

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which writes and speaks for all."""
        return self.index == 0

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Checks that all processes have the same facts, which JSON can hold.

        Raises:
          DisagreementError: in every process, with the first fact that differs and who has what.
        """

    def told(self, value: Any = None) -> Any:
        """What process 0 says here, in every process; JSON can hold it."""
        return value

    def everyones(self, value: Any) -> list[Any]:
        """What every process says here, by process; JSON can hold it."""
        return [value]

    def doing(self, what: str) -> None:
        """Notes what this process does now, for those that wait for it."""

    def together(self) -> contextlib.AbstractContextManager[None]:
        """A round: what is done within waits for the other processes, which must all do it in the same order.

        Whatever waits for a program of all processes while training belongs into one of its own, and nothing else: who
        stays out of a round that another is in for too long is stuck.
        """
        return contextlib.nullcontext()

    @property
    def stopping(self) -> bool:
        """Whether another process wants to stop; what all do is decided by votes."""
        return False

    def stop(self) -> None:
        """Tells the others that this one wants to stop."""

    def barrier(self) -> None:
        """Waits until all processes are here."""


ALONE = Processes()
"""Of a local run."""
