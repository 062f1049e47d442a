"""A worker's end of a session: environments, one thread per block of lanes, and one stream of gRPC."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc

from podracer import configs
from podracer import environments as registry
from podracer.remote import session_pb2 as pb
from podracer.remote import specs, wire
from podracer.remote.block_thread import BlockThread
from podracer.remote.connection import Connection
from podracer.remote.settings import read, read_token
from podracer.system import console, own_code
from podracer.types import HostEnvironments
from podracer.version import __version__

METHOD = "/podracer.env.v1.Environments/Session"
FAILED, HUNG, MISUNDERSTOOD, UNMADE = 3, 75, 76, 77
"""Exit codes: the learner failed, or cannot be reached; environments hang, and a new process may not; the learner does
not understand what it is sent; environments cannot be made, or fail again and again."""

LONGEST_DELAY = 8.0
"""Seconds between tries, give or take a quarter: a learner that comes back has its workers within 12."""

RETRIES = 3
"""Times that a worker is sent away before it gives up; it comes back after all but the last."""

SOUND_SECONDS = 300.0
"""Seconds of a stream after which it is no longer counted how often the worker was sent away before."""

WELCOME_SECONDS = 30.0
"""Seconds in which a learner must answer a stream that it accepted; longer than gRPC tries to connect."""

REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION)


class RefusedError(ValueError):
    """The learner does not want this worker; the message says why."""


class LearnerError(RuntimeError):
    """The learner failed, or cannot be reached any more."""


class MisunderstoodError(LearnerError):
    """The learner does not understand what this worker sends."""


class HungError(RuntimeError):
    """Environments do not come back from a step."""


class MakingError(RuntimeError):
    """Environments cannot be made; the message says why."""


class FailingError(RuntimeError):
    """Environments fail again and again; the message says how."""


@contextlib.contextmanager
def _making() -> Iterator[None]:
    """Turns errors of a constructor of environments into `MakingError`, but for those of a wrong call."""
    try:
        yield
    except (ValueError, TypeError):
        raise
    except Exception as error:
        raise MakingError(f"environments cannot be made: {own_code.describe(error)}") from error


def serve_envs(
    environments: str | HostEnvironments | Any,
    connect: str,
    *,
    lanes: int = 64,
    name: str | None = None,
    env_options: Mapping[str, Any] | None = None,
    quiet: bool = False,
    **connection: Any,
) -> None:
    """Steps environments for a learner that runs elsewhere, until it is finished.

    Args:
      environments: a name, or what else `podracer.environments.adopt` takes; nothing of it need be known there.
      connect: the learner's address (see `Connection`).
      lanes: how many to step at once.
      name: of the worker, for messages; that of the machine and process if None.
      env_options: options of environments given by name; numbers, truth values and choices that are not given are the
        learner's.
      quiet: says nothing but errors.
      **connection: fields of `Connection`.

    Raises:
      ValueError: for what makes no sense, or environments that are not the learner's.
      TypeError: where environments are made otherwise than that.
      MakingError: where they cannot be made.
      LearnerError: where the learner failed, or was not there for `give_up_after` seconds.
      HungError: where environments hang.
      FailingError: where they fail so often that the learner sent this worker away three times in a row.
    """
    settings = configs.from_json(Connection, {"connect": connect, **connection})
    worker = name or f"{socket.gethostname()}-{os.getpid()}"
    say = (lambda line: None) if quiet else lambda line: console.say(f"{worker}: {line}")
    if not 1 <= lanes <= wire.MAX_LANES:
        raise ValueError(f"lanes={lanes}: must be 1 to {wire.MAX_LANES}.")
    token = read_token(settings.token_file)
    run, heard, tries, delay = secrets.randbits(63), time.monotonic(), 0, 0.5
    made = _Made(environments, env_options)
    while True:
        session, began = None, time.monotonic()
        target = settings.target(worker)
        if target:
            session = _Session(settings, target, token, worker, lanes, made, say)
            try:
                why = session.talk(run)
                if why == pb.Goodbye.FINISHED:
                    say("the learner is finished.")
                    return
                if why == pb.Goodbye.FAILED:
                    raise LearnerError(f"the learner failed: {session.text}")
                say("the learner stops for now; waiting for it.")
            except grpc.RpcError as error:
                tries = _judge(error, 0 if time.monotonic() - began > SOUND_SECONDS else tries, target)
                why = f"{_status(error)}{_hint(error, settings)}"
                say(f"{session.unheard or why}; trying again.")
            if session.welcomed:
                heard, delay = time.monotonic(), delay if tries else 0.5
        if settings.give_up_after and time.monotonic() - heard > settings.give_up_after:
            raise LearnerError(f"no learner at {target or connect} for {settings.give_up_after:.0f} s.")
        time.sleep(delay * random.uniform(0.75, 1.25))
        delay = min(2 * delay, LONGEST_DELAY)


def _judge(error: Any, tries: int, target: str) -> int:
    """Counts the tries.

    Raises:
      RefusedError: where trying again is no use.
      MisunderstoodError: where it was tried often enough.
      FailingError: likewise, for environments.
    """
    said = wire.printable(error.details() or "")
    if error.code() in REFUSED:
        raise RefusedError(f"{target} refuses this worker: {said}")
    if error.code() not in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ABORTED):
        return tries
    if tries + 1 >= RETRIES:
        if error.code() == grpc.StatusCode.ABORTED:
            raise FailingError(f"{target} has sent this worker away {RETRIES} times: {said}")
        raise MisunderstoodError(f"{target} does not understand this worker: {said}")
    return tries + 1


def _status(error: Any) -> str:
    return f"{error.code().name.lower()}: {wire.printable(error.details() or '')}"


def _hint(error: Any, settings: Connection) -> str:
    """Guesses why a learner closed the connection: gRPC's text does not say which credentials it wants."""
    if "Socket closed" not in (error.details() or "") or (settings.tls_ca and settings.tls_cert):
        return ""
    wants = "a certificate that it knows (tls_cert)" if settings.tls_ca else "TLS (tls_ca)"
    return f" If it is there, it may ask for {wants}"


class _Made:
    """Environments, made once they are needed, with the options that the learner has and nobody gave here."""

    def __init__(self, source: Any, options: Mapping[str, Any] | None):
        self._source, self._given = source, dict(options or {})
        self.environments: Any = None
        self.options = ""
        if not isinstance(source, str):
            with _making():
                self.environments = registry.adopt(source, options)
        else:
            registry.options(source)(**self._given)  # what is wrong is said before anybody is called

    def __call__(self, theirs: str) -> HostEnvironments:
        if isinstance(self._source, str):
            cls = registry.options(self._source)
            taken: dict[str, Any] = {}
            if theirs:
                known = {field.name for field in dataclasses.fields(cls)}
                with contextlib.suppress(ValueError):
                    said = json.loads(theirs)
                    said = {k: v for k, v in said.items() if k in known and k not in specs.MACHINE}
                    taken = {k: v for k, v in said.items() if isinstance(v, str | int | float | None)}
            options = {**taken, **self._given}
            described = canonical(cls(**options))
            if self.environments is None or described != self.options:
                with _making():
                    self.environments = registry.make(self._source, **options)
                self.options = described
        return self.environments


def canonical(options: Any) -> str:
    """Options as JSON that is equal where they are."""
    return json.dumps(configs.to_json(options), sort_keys=True)


class _Session:
    """One stream, from Hello to its end."""

    def __init__(
        self,
        settings: Connection,
        target: str,
        token: bytes | None,
        worker: str,
        lanes: int,
        made: _Made,
        say: Callable[[str], None],
    ):
        self._settings, self._target, self._token = settings, target, token
        self._worker, self._lanes, self._made, self._say = worker, lanes, made, say
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._blocks: dict[int, BlockThread] = {}
        self._leaving: list[BlockThread] = []
        self._over = threading.Event()
        self.welcomed, self.text, self.unheard, self._hung = False, "", "", False

    def talk(self, run: int) -> int:
        """Does what the learner says; returns why it said goodbye.

        Raises:
          grpc.RpcError: where the stream ends otherwise.
          HungError: where environments do not end.
        """
        metadata = [("authorization", f"Bearer {self._token.decode()}")] if self._token else []
        hello = pb.Hello(protocol=wire.PROTOCOL, run=run, worker=self._worker, lanes=self._lanes, version=__version__)
        self._outgoing.put(wire.pack(pb.FromWorker(hello=hello)))
        with self._channel() as channel:
            call = channel.stream_stream(METHOD)(iter(self._outgoing.get, None), metadata=metadata)
            why = pb.Goodbye.RESTARTING
            timeouts = threading.Timer(WELCOME_SECONDS, self._give_up, (call,))
            timeouts.daemon = True
            timeouts.start()
            try:
                why = self._listen(call, timeouts)
            except grpc.RpcError:
                if self._hung:
                    raise HungError("environments hang.") from None
                raise
            finally:
                timeouts.cancel()
                self._over.set()
                self._outgoing.put(None)
                hung = not self._close_all()
                call.cancel()
                # A learner that has ended needs no new process in which they do not.
                if hung and why == pb.Goodbye.RESTARTING:
                    raise HungError("environments hang.")
            return why

    def _channel(self) -> Any:
        settings = self._settings
        options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.ping_timeout_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 500),
            ("grpc.max_reconnect_backoff_ms", 10_000),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if settings.tls_name:
            options.append(("grpc.ssl_target_name_override", settings.tls_name))
        if settings.tls_ca:
            own = [
                read(p, n) if p else None for p, n in ((settings.tls_key, "tls_key"), (settings.tls_cert, "tls_cert"))
            ]
            return grpc.secure_channel(
                self._target, grpc.ssl_channel_credentials(read(settings.tls_ca, "tls_ca"), *own), options
            )
        return grpc.insecure_channel(self._target, options)

    def _give_up(self, call: Any) -> None:
        self.unheard = f"{self._target} has not answered for {WELCOME_SECONDS:g} s"
        call.cancel()

    def _listen(self, call: Any, timeouts: threading.Timer) -> int:
        environments: Any = None
        layout: Any = None
        for data in call:
            message, payload = wire.unpack(pb.ToWorker, data)
            kind = message.WhichOneof("kind")
            if kind == "act":
                if block := self._blocks.get(message.act.block):
                    block.act(message.act.step, payload)
            elif kind == "welcome":
                timeouts.cancel()
                environments = self._made(message.welcome.options)
                layout = wire.Layout(environments.spec)
                ready = pb.Ready(spec=specs.to_proto(environments.spec), options=self._made.options)
                self._outgoing.put(wire.pack(pb.FromWorker(ready=ready)))
                self.welcomed = True
                self._say(f"connected to {self._target}.")
                seconds = max(message.welcome.alive_ms, 100) / 1000
                threading.Thread(target=self._watch, args=(call, seconds), daemon=True).start()
            elif kind == "open" and environments is not None:
                block = BlockThread(message.open, environments, layout, self._outgoing.put, self._failed)
                self._blocks[message.open.block] = block
                block.start()
            elif kind == "close":
                if block := self._blocks.pop(message.close.block, None):
                    block.close()
                    self._leaving.append(block)
            elif kind == "goodbye":
                self.text = wire.printable(message.goodbye.text)
                return message.goodbye.why
        return pb.Goodbye.RESTARTING

    def _failed(self, number: int, error: str) -> None:
        """Says that environments of a block raised an error, here and to the learner, which has it no more."""
        self._say(f"environments of block {number} failed: {error}")
        self._blocks.pop(number, None)
        self._outgoing.put(wire.pack(pb.FromWorker(failed=pb.Failed(block=number, error=error))))

    def _watch(self, call: Any, seconds: float) -> None:
        """Says what blocks are at, and ends the session where one does not come back that nobody waits for."""
        while not self._over.wait(min(seconds, 0.5)):
            now = time.monotonic()
            for block in [block for block in self._leaving if not block.is_alive()]:
                self._leaving.remove(block)  # in place, for another thread appends
            if any(block.hangs for block in list(self._leaving)):
                self._hung = True
                call.cancel()
                return
            if int(now / seconds) != int((now - min(seconds, 0.5)) / seconds):
                busy = {n: b.busy for n, b in list(self._blocks.items()) if b.busy > min(seconds, 1.0)}
                alive = pb.Alive(block=list(busy), busy_ms=[int(1000 * s) for s in busy.values()])
                self._outgoing.put(wire.pack(pb.FromWorker(alive=alive)))

    def _close_all(self) -> bool:
        """Ends all blocks; returns whether they have ended."""
        blocks = [*self._blocks.values(), *self._leaving]
        for block in blocks:
            block.close()
        for block in blocks:
            while block.is_alive() and not block.hangs:
                block.join(0.05)
        return not any(block.is_alive() for block in blocks)
