"""What outlives a power cut, or a virtual machine that is taken away."""

from __future__ import annotations

import errno
import os
import pathlib


def to_disk(path: pathlib.Path) -> None:
    """Waits until a file, or a folder with all that is in it, is on the disk under its name.

    Raises:
      OSError: where the disk has lost some of it.
    """
    for there in (*path.rglob("*"), path, path.parent):
        descriptor = os.open(there, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of a file system that cannot be asked
                raise
        finally:
            os.close(descriptor)


def write(path: pathlib.Path, text: str) -> None:
    """Writes a file, whole or not at all.

    Raises:
      OSError: where the disk refuses.
    """
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    to_disk(path)
