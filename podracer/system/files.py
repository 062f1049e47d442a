"""Files that others see as a whole or not at all, and that outlive a power cut."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import re
import uuid
from collections.abc import Iterator


def local(directory: str | pathlib.Path) -> pathlib.Path:
    """The path of a local directory.

    Raises:
      ValueError: for an address such as gs://bucket/run, of which a local folder would be made.
    """
    if found := re.match(r"([A-Za-z][\w+.-]+):/", str(directory)):
        raise ValueError(
            f"{directory} is no directory: podracer writes to file systems; mount what is at {found[1]}:// and give "
            "the path."
        )
    return pathlib.Path(directory)


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The path of a new file that replaces `path` once it is written; the old file stays until then.

        with replacing(path) as partial:
            partial.write_text("whole")

    If writing fails, the old file is unchanged.
    """
    if path.exists() and not path.is_file():  # such as /dev/stdout
        yield path
        return
    # Its suffix says what is written. Processes of two hosts may have one number.
    partial = path.with_name(f".{path.stem}.{uuid.uuid4().hex}.partial{path.suffix}")
    try:
        yield partial
        to_disk(partial)  # else a machine that loses power may keep the new name without its bytes
        partial.replace(path)
        _sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def write(path: pathlib.Path, data: str | bytes) -> None:
    """Writes a file, text as UTF-8, that takes the place of `path` at once."""
    with replacing(path) as partial:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)


def to_disk(path: pathlib.Path) -> None:
    """Waits until a file, or a folder with all that is in it, is on the disk under its name.

    Raises:
      OSError: if the disk has lost some of it.
    """
    for item in (*path.rglob("*"), path, path.parent):
        _sync(item)


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of a file system that cannot be asked
            raise
    finally:
        os.close(descriptor)
