"""Channels between threads: trajectories to the learner, parameters to the actors. Nothing here waits for ever."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, NamedTuple

import jax

from podracer.errors import Closed
from podracer.types import ActorParams


class Message(NamedTuple):
    """A message of a `Channel`: the number of its actor, and its content."""

    source: int
    content: Any


class Channel:
    """A queue that many actors fill and one learner empties; closing it wakes everyone.

    Args:
      capacity: messages of each source that may wait: a fast actor takes no room from a slow one.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._messages: deque[Message] = deque()
        self._condition = threading.Condition()
        self._closed = False

    def put(self, source: int, content: Any) -> None:
        """Appends, waiting for room.

        Raises:
          Closed: if the channel is closed.
        """

        def room() -> bool:
            return self._closed or sum(message.source == source for message in self._messages) < self._capacity

        with self._condition:
            self._condition.wait_for(room)
            if self._closed:
                raise Closed
            self._messages.append(Message(source, content))
            self._condition.notify_all()

    def get(self, timeout: float, source: int | None = None) -> Any | None:
        """The oldest message (from `source` if given), or None after `timeout` seconds or when closed."""

        def ready() -> bool:
            return self._closed or self._find(source) is not None

        with self._condition:
            self._condition.wait_for(ready, timeout)
            message = self._find(source)
            if message is None:
                return None
            self._messages.remove(message)
            self._condition.notify_all()
            return message.content

    def _find(self, source: int | None) -> Message | None:
        return next((m for m in self._messages if source is None or m.source == source), None)

    def close(self) -> None:
        """Ends the channel: waiting `put`s raise, `get` drains what is there and then returns None at once."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def __len__(self) -> int:
        return len(self._messages)


class Published(NamedTuple):
    """Published parameters.

    Attributes:
      number: counts publications.
      version: of the parameters: the updates they come from.
      params: a copy per actor device.
    """

    number: int
    version: int
    params: dict[Any, Any]


class ParamsStore:
    """The published parameters: immutable snapshots that actors take without a lock."""

    def __init__(self, devices: list[Any], keep: int):
        self._devices, self._keep = devices, keep
        self._versions: dict[int, Published] = {}
        self._newest: Published | None = None
        self._condition = threading.Condition()
        self._closed = False

    def publish(self, number: int, params: ActorParams) -> None:
        """Makes parameters the newest version once they are computed, and forgets all but the `keep` newest.

        Args:
          number: of the publication; each one more than the last.
          params: arrays on one device that nobody donates: a copy for every actor device is made of them.
        """
        # Reading the version waits for the program that made all of them: parameters that are not there yet would hold
        # up the actors that take them.
        newest = int(params.version)
        copies = {device: jax.device_put(params, device) for device in self._devices}
        version = Published(number, newest, copies)
        with self._condition:
            self._versions[number] = version
            self._versions.pop(number - self._keep, None)
            self._newest = version
            self._condition.notify_all()

    def newest(self) -> Published:
        """The newest parameters."""
        assert self._newest is not None
        return self._newest

    def wait(self, number: int) -> Published:
        """The parameters of a publication, waiting for it.

        Raises:
          Closed: if the store is closed first.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._closed or number in self._versions)
            if self._closed:
                raise Closed
            return self._versions[number]

    def snapshot(self) -> list[Published]:
        """All versions that are kept, oldest first."""
        with self._condition:
            return [self._versions[number] for number in sorted(self._versions)]

    def close(self) -> None:
        """Wakes everyone who waits."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
