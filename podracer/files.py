"""Files that others see as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pathlib
import uuid
from collections.abc import Iterator


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The path of a new file, which takes the place of `path` once it is written; what was there stays until then.

        with replacing(path) as partial:
            partial.write_text("whole")

    Where writing fails, the file that was there is as it was.
    """
    if path.exists() and not path.is_file():  # such as /dev/stdout
        yield path
        return
    # Its suffix says what is written. Processes of two hosts may have one number.
    partial = path.with_name(f".{path.stem}.{uuid.uuid4().hex}.partial{path.suffix}")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())  # else a machine that loses power may keep the new name without its bytes
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def write(path: pathlib.Path, data: str | bytes) -> None:
    """Writes a file, text as UTF-8, that takes the place of `path` at once."""
    with replacing(path) as partial:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)
