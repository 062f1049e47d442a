"""A file that says where a learner is."""

from __future__ import annotations

import contextlib
import os
import pathlib

from podracer.remote.settings import identity


class Announcement:
    """The address of a learner in a file that appears at once.

    Args:
      path: of the file.
      where: the address.

    Raises:
      OSError: where it cannot be written.
    """

    def __init__(self, path: str, where: str):
        self._path = path
        partial = pathlib.Path(f"{path}.{os.getpid()}.partial")
        try:
            partial.write_text(where + "\n")
            self._identity = identity(partial)
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise OSError(
                f"remote: announce={path} cannot be written ({error.strerror}); name a file in a folder that is there "
                "and yours."
            ) from None

    def withdraw(self) -> None:
        """Removes the file, unless a later learner has written another one in its place."""
        with contextlib.suppress(OSError):
            if identity(self._path) == self._identity:
                os.unlink(self._path)
