"""Errors of environments that a run plays outside of training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from podracer.errors import ActorError, Closed, RemoteError, failed


@contextlib.contextmanager
def playing(environment: str) -> Iterator[None]:
    """Turns an error of an environment into an `ActorError`, as in training; also a decorator.

    Args:
      environment: the environment's name, for the message.

    Raises:
      ActorError: for an error that the library does not know.
    """
    try:
        yield
    except (ActorError, Closed, RemoteError):
        raise
    except Exception as error:
        raise failed("evaluation", environment, error) from error
