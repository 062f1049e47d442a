"""The processes of a pod from the view of one of them: they start together, check that they agree, and exchange values.

Values go through the "board", the key-value store of JAX's distributed runtime in process 0. A key is written once.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import platform
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jaxlib.version

from podracer.errors import LOST, DisagreementError, PeerError
from podracer.pod import heartbeat, rendezvous
from podracer.pod.settings import Pod, find
from podracer.system import console
from podracer.topology.processes import Processes
from podracer.version import __version__

POLL = 0.2
"""Seconds between reads of the board while a process waits for a key."""


_MESSAGES = itertools.count()
"""Numbers of the messages since this process began; a key is written once."""


@dataclasses.dataclass(frozen=True)
class Peer:
    """One process of a pod."""

    index: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.index} ({self.host}, pid {self.pid})"


class Peers(Processes):
    """The P processes of a pod.

    Attributes:
      all: the processes, by number.
      local_index: number of this process on its host.
      local_count: number of processes on its host.
    """

    def __init__(self, pod: Pod):
        self._pod, self._client = pod, _client()
        self._heartbeats: heartbeat.Heartbeats | None = None
        self._rounds = 0
        self.all: tuple[Peer, ...] = ()
        self.index, self.count = jax.process_index(), jax.process_count()
        me = {"host": socket.gethostname(), "pid": os.getpid()}
        facts = self.all_gather(me)
        self.all = tuple(Peer(i, **one) for i, one in enumerate(facts))
        self.hosts = len({peer.host for peer in self.all})
        neighbours = [peer.index for peer in self.all if peer.host == self.all[self.index].host]
        self.local_index, self.local_count = neighbours.index(self.index), len(neighbours)

    def __enter__(self) -> Peers:
        """Starts heartbeats: from here on a process that is gone, is stuck or has failed ends the run in all."""
        server, address = heartbeat.offer(_coordinator_host()) if self.is_first else (None, None)
        address, names = self.broadcast(address), [str(peer) for peer in self.all]
        try:
            self._heartbeats = heartbeat.Heartbeats(
                self.index, names, address, silence=self._pod.heartbeat, stall=self._pod.stall_timeout, server=server
            )
        except OSError as error:
            raise PeerError(f"cannot reach {self.all[0]} at {address['host']}:{address['port']}: {error}.") from error
        self._heartbeats.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        assert self._heartbeats is not None
        if of_runtime := _is_of_runtime(error):
            self._heartbeats.wait(heartbeat.GRACE)  # what broke a collective is known soon
        ended = self._heartbeats.ended
        broken = PeerError(ended, self._heartbeats.was_printed) if ended and of_runtime else None
        if error is not None:
            if not ended and not isinstance(error, PeerError):  # whose origin knows
                message = " ".join(str(error).split())
                self._heartbeats.end(f"{self.all[self.index]} has failed: {type(error).__name__}: {message}")
            _leave_without_waiting(broken or error)
        self._heartbeats.__exit__()
        self._heartbeats = None
        if broken:
            raise broken from error

    def set_status(self, what: str) -> None:
        if self._heartbeats:
            self._heartbeats.set_status(what, self._rounds)

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        self._rounds += 1
        self.set_status(heartbeat.WAITING)
        yield
        self.set_status(heartbeat.WORKING)

    @property
    def stopping(self) -> bool:
        return bool(self._heartbeats and self._heartbeats.stopping)

    def stop(self) -> None:
        if self._heartbeats:
            self._heartbeats.stop()

    def check_equal(self, facts: Mapping[str, Any]) -> None:
        everyone = [dict(_flatten(each)) for each in self.all_gather(facts)]
        for name in sorted({name for each in everyone for name in each}):
            values = [json.dumps(each.get(name), sort_keys=True) for each in everyone]
            if len(set(values)) > 1:
                usual = max(values, key=values.count)
                odd = next(i for i, value in enumerate(values) if value != usual)
                raise DisagreementError(
                    f"the processes of a pod must be asked for the same: {self.all[odd]} has {name} {values[odd]}, "
                    f"{'the others' if self.count > 2 else self.all[1 - odd]} {usual}."
                )

    def broadcast(self, value: Any = None) -> Any:
        key = self._next("told")
        if self.is_first:
            self._client.key_value_set(key, json.dumps(value))
        return json.loads(self._wait(key, 0))

    def all_gather(self, value: Any) -> list[Any]:
        key = self._next("said")
        self._client.key_value_set(f"{key}/{self.index}", json.dumps(value))
        return [json.loads(self._wait(f"{key}/{i}", i)) for i in range(self.count)]

    def barrier(self) -> None:
        self.all_gather(None)

    def _next(self, name: str) -> str:
        return f"podracer/{next(_MESSAGES)}/{name}"

    def _wait(self, key: str, index: int) -> str:
        name = str(self.all[index]) if self.all else f"process {index}"
        start, is_printed = time.monotonic(), False
        while True:
            try:
                return self._client.blocking_key_value_get(key, int(1000 * POLL))
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    ended = self._heartbeats.wait(heartbeat.GRACE) if self._heartbeats else None
                    was_printed = bool(self._heartbeats and self._heartbeats.was_printed)
                    raise PeerError(ended or f"the pod's board is gone: {_first_line(error)}", was_printed) from error
                if self._heartbeats and self._heartbeats.ended:
                    raise PeerError(self._heartbeats.ended, self._heartbeats.was_printed) from None
                waited = time.monotonic() - start
                if not self._heartbeats and waited > self._pod.start_timeout:
                    raise PeerError(f"{name} has not come to {key} in {self._pod.start_timeout} s.") from None
                if waited > self._pod.stall_timeout / 6 and not is_printed:
                    is_printed = True
                    console.say(f"podracer: waiting for {name}")


def start(pod: Pod) -> Peers:
    """Starts JAX's distributed runtime, unless it runs already, and meets the other processes.

    Raises:
      NoClusterError: if nothing says where they are, or not all come in time.
      ValueError: if JAX has begun to compute before, or for settings that make no sense.
      DisagreementError: if a process has another version of a package.
    """
    if not jax.distributed.is_initialized():
        place = find(pod, os.environ, _cluster())
        if _has_begun():
            raise ValueError(
                "topology='pod': JAX has computed something before; call train(topology='pod') before any other JAX "
                "computation."
            )
        if place.coordinator and place.processes and place.process_id is not None:
            if place.process_id == 0:
                rendezvous.hold(place.coordinator, place.processes, pod.start_timeout)
            else:
                rendezvous.attend(place.coordinator, place.process_id, pod.start_timeout)
                _reach(place.coordinator, pod.start_timeout)
        # It would take SIGTERM for itself: a pod stops by votes (docs/adr/0023-pods.md).
        jax.config.update("jax_enable_preemption_service", False)
        where = place.coordinator or f"the coordinator that {place.source} names"
        # JAX aborts a process that waits in vain, without a line that people could use.
        missing = rendezvous.meeting_error(where, pod.start_timeout, "not all processes came")
        patience = threading.Timer(pod.start_timeout, _end, [missing])
        patience.start()
        try:
            jax.distributed.initialize(
                place.coordinator,
                place.processes,
                place.process_id,
                place.local_devices,
                heartbeat_timeout_seconds=pod.heartbeat + 10,  # ours, which names who is lost, comes first
                initialization_timeout=pod.start_timeout + 10,
                shutdown_timeout_seconds=30,
            )
        except RuntimeError as error:
            raise rendezvous.meeting_error(where, pod.start_timeout, _first_line(error)) from error
        finally:
            patience.cancel()
    peers = Peers(pod)
    peers.check_equal(_versions())
    atexit.unregister(_leave)  # all are here again, and will end together
    return peers


def _reach(coordinator: str, seconds: float) -> None:
    """Waits until process 0 listens. Without that, JAX would abort this process without a message.

    Raises:
      NoClusterError: if it does not listen in time.
    """
    host, _, port = coordinator.rpartition(":")
    until = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
        except OSError as error:
            if time.monotonic() > until:
                raise rendezvous.meeting_error(
                    coordinator, seconds, f"process 0 does not answer there: {error.strerror}"
                ) from None
        time.sleep(POLL)


def _end(error: Exception) -> None:
    console.say(f"podracer: error: {error}", at_once=True)
    os._exit(2)


def _is_of_runtime(error: BaseException | None) -> bool:
    """Returns True if a program failed and not its caller, as when a process has left a collective."""
    # Where an array is waited for decides which of the two it is.
    status = isinstance(error, ValueError) and re.match(r"(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED)", str(error))
    return isinstance(error, jax.errors.JaxRuntimeError) or bool(status)


def _leave_without_waiting(error: BaseException) -> None:
    """Makes this process end, when it does, without JAX's wait for the others, which will not come."""
    codes = ((PeerError, LOST), (KeyboardInterrupt, 130), ((ValueError, TypeError), 2))  # as the command line has them
    code = next((code for kind, code in codes if isinstance(error, kind)), 1)

    atexit.register(_leave, code)  # what is registered last is called first


def _leave(code: int) -> None:
    console.write(sys.stdout, "")
    console.write(sys.stderr, "")
    os._exit(code)


def _flatten(facts: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested facts, with names such as run.seed."""
    if isinstance(facts, Mapping) and facts:
        for key, value in facts.items():
            yield from _flatten(value, f"{name}.{key}" if name else key)
    else:
        yield name, facts


def _versions() -> dict[str, Any]:
    device = jax.local_devices()[0]
    return {
        "podracer": __version__,
        "podracer's code": _code(pathlib.Path(__file__).parents[1]),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "platform": f"{device.platform}: {device.device_kind}",
        "local devices": jax.local_device_count(),
        **{name: getattr(jax.config, name) for name in ("jax_enable_x64", "jax_default_prng_impl")},
        "jax_default_matmul_precision": jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
    }


def _code(package: pathlib.Path) -> str:
    """A hash of a package's source files, which may differ within a version."""
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def _client() -> Any:
    """The client of JAX's key-value store; it has no public name."""
    from jax._src import distributed

    return distributed.global_state.client


def _coordinator_host() -> str:
    """The host at which the others reach process 0."""
    from jax._src import distributed

    address = distributed.global_state.coordinator_address or socket.gethostname()
    return address.rpartition(":")[0].strip("[]") or address


def _cluster() -> str | None:
    """The cluster that JAX recognises, by name."""
    from jax._src.clusters import ClusterEnv

    found = (env for env in ClusterEnv._cluster_types if not env.opt_in_only_method and env.is_env_present())
    return next((env.name or env.__name__ for env in found), None)


def _has_begun() -> bool:
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()
