"""Addresses and time limits of remote environments."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import ipaddress
import os
import pathlib
import socket
import stat
from typing import Literal

from podracer import configs

DEFAULT_BLOCK = 64
"""Lanes that a worker steps together at most, unless `Remote.block` says otherwise."""

PER_PROCESS = ("listen", "tls_cert", "tls_key", "client_ca", "token_file", "metrics", "announce")
"""Fields of `Remote` in which the processes of a pod may differ: addresses and files."""


@dataclasses.dataclass(frozen=True)
class Remote:
    """Environments are stepped by workers that connect (docs/remote.md).

    Attributes:
      listen: HOST:PORT, port 0 for any that is free, or unix:PATH; None steps environments in this process.
      tls_cert: file of the server's certificate, with those between it and its authority.
      tls_key: file of its key.
      client_ca: file of the authority whose certificates workers must have.
      token_file: file of at least 16 bytes that workers must have too.
      insecure: listens without encryption or without knowing who comes, where others than this machine can reach it.
      metrics: HOST:PORT at which Prometheus reads numbers of the workers, as http://HOST:PORT/metrics.
      announce: file that says where workers find the learner, once it listens.
      block: lanes that a worker steps together, fewer where it has less room; the largest divisor of an actor's lanes
        up to 64 if None, in mode "ready" up to a quarter of them.
      mode: what actors wait for: rows of "all" lanes that are at work, or of those that are "ready" (SEED RL's way),
        which is for environments whose steps take unequal times.
      min_lanes: in mode "ready", lanes that must be ready before any are acted for, unless no worker owes rows; those
        of a block if None.
      max_lanes: in mode "ready", lanes that are acted for at once, without waiting; half of an actor's if None.
      deadline_ms: in mode "ready", milliseconds that rows of `min_lanes` or more wait for those of other lanes.
      join_timeout: seconds to wait for workers before the run ends with an error.
      min_live: share of an actor's lanes that must have a worker, or it waits.
      max_magnitude: how large rewards, and numbers of observations without bounds, may be in either direction; a worker
        that shows others is sent away.
      on_loss: what a lost worker is in lockstep: the "error" that ends the run, or a "break" in its lanes' streams, as
        it always is in runs of mode "async".
      evaluation: whether evaluations play here, "local", or on workers, "remote"; here, if the learner can make the
        environment, with "auto".
    """

    listen: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    client_ca: str | None = None
    token_file: str | None = None
    insecure: bool = False
    metrics: str | None = None
    announce: str | None = None
    block: int | None = configs.field(None, low=1)
    mode: Literal["all", "ready"] = "all"
    min_lanes: int | None = configs.field(None, low=1)
    max_lanes: int | None = configs.field(None, low=1)
    deadline_ms: float = configs.field(5.0, low=0.0)
    join_timeout: float = configs.field(600.0, low=0.1)
    min_live: float = configs.field(0.5, low=0.0, high=1.0)
    max_magnitude: float = configs.field(1e6, low=1.0)
    on_loss: Literal["error", "break"] = "error"
    evaluation: Literal["auto", "local", "remote"] = "auto"

    def __post_init__(self):
        configs.check(self)
        if self.listen is not None:
            address(self.listen)
        if self.announce and self.listen and _is_wildcard(self.listen):
            raise ValueError(
                f"remote: announce needs an address at which workers find this machine, not {self.listen}."
            )
        if self.metrics is not None and not address(self.metrics)[0]:
            raise ValueError(f"remote: metrics={self.metrics!r}: use HOST:PORT, such as 127.0.0.1:9777.")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("remote: a certificate needs its key: give both tls_cert and tls_key.")
        if self.client_ca and not self.tls_cert:
            raise ValueError("remote: client_ca needs tls_cert and tls_key: without them nothing is encrypted.")
        if self.listen and not self.insecure and not is_private(self.listen):
            if not self.tls_cert:
                raise ValueError(
                    f"remote: {self.listen} can be reached from elsewhere, so it needs tls_cert and tls_key, and "
                    "token_file or client_ca; insecure=True does without, in a network that you trust."
                )
            if not self.token_file and not self.client_ca:
                raise ValueError(
                    f"remote: {self.listen} can be reached from elsewhere, so workers must show who they are: give "
                    "token_file or client_ca; insecure=True does without, in a network that you trust."
                )


def require_grpc() -> None:
    """Raises ValueError where it is not installed."""
    if importlib.util.find_spec("grpc") is None:
        raise ValueError("remote environments need grpcio, not installed here: pip install grpcio protobuf.")


def address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, or (path, 0) of unix:PATH.

    Raises:
      ValueError: for anything else.
    """
    if text.startswith("unix:"):
        return text.removeprefix("unix:"), 0
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"remote: address {text!r}: use HOST:PORT, such as 127.0.0.1:7777, or unix:PATH.")
    return host.strip("[]"), int(port)


def _is_wildcard(text: str) -> bool:
    """Returns True if an address stands for all of this machine's."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address(text)[0]).is_unspecified
    return False


def is_private(text: str) -> bool:
    """Returns True if only processes of this machine reach an address."""
    if text.startswith("unix:"):
        return True
    host = address(text)[0]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def make_private(folder: pathlib.Path) -> None:
    """Makes a folder that none but this user can enter, or sees that it is one.

    Raises:
      ValueError: where others can.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid() or mode & 0o077:
        whose = "another user's" if found.st_uid != os.geteuid() else f"open to others (mode {mode:o})"
        raise ValueError(
            f"remote: the folder {folder} of the socket is {whose}: use one of your own with mode 700, which is made "
            "if it is not there; insecure=True does without."
        )


def read_token(path: str | None) -> bytes | None:
    """The token in a file.

    Raises:
      ValueError: where it cannot be read, is too short to be a secret, or cannot be sent.
    """
    if path is None:
        return None
    token = read(path, "token_file").strip()
    if len(token) < 16:
        raise ValueError(f"remote: token_file {path} holds {len(token)} bytes; a secret has at least 16.")
    if not all(33 <= byte <= 126 for byte in token):
        raise ValueError(f"remote: token_file {path} must hold one line of printable ASCII without spaces.")
    return token


def read(path: str, name: str) -> bytes:
    """A file that a setting names.

    Raises:
      ValueError: where it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ValueError(f"remote: {name} {path} cannot be read ({error.strerror}).") from None


def identity(path: str | pathlib.Path) -> tuple[int, ...]:
    """The identity of a file, which differs from that of a later file of the same name.

    Raises:
      OSError: where there is none.
    """
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_mtime_ns


def is_taken(path: str) -> bool:
    """True where somebody listens at a socket, which gRPC would take away from them."""
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(1.0)
        try:
            one.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            return True  # of others, or too busy to say so
    return True
