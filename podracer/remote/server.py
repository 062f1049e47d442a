"""The learner's end of the sessions: streams of gRPC in one thread, between workers and the hub."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import pathlib
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from podracer.remote import session_pb2 as pb
from podracer.remote import specs, wire
from podracer.remote.announcement import Announcement
from podracer.remote.blocks import WorkerSession
from podracer.remote.certificates import Certificates
from podracer.remote.descriptors import RESERVED, room
from podracer.remote.event_loop import lost_peer, shared_loop
from podracer.remote.hub import SAY_SECONDS, Hub
from podracer.remote.settings import DEFAULT_BLOCK, Remote, address, is_taken, make_private, read_token
from podracer.remote.stream import Gone, Outbox, Refused, Stream
from podracer.system import console
from podracer.types import EnvSpec
from podracer.version import __version__

METHOD = "/podracer.env.v1.Environments/Session"
HELLO_SECONDS, READY_SECONDS = 10.0, 300.0
ALIVE_SECONDS = 5.0
TICK_SECONDS = 0.2
GOODBYE_SECONDS = 2.0
MAX_SESSIONS, MAX_SILENT = 1024, 64
MAX_CONNECTIONS = 2 * MAX_SESSIONS
"""The most connections of workers and silent strangers together; one more is closed at once."""

MAX_SPEC = 1024 * 1024
"""Bytes of a message before it is known what the environment is."""

MAX_CONTROL = 100
"""Messages a second without rows that a worker may send."""

LOGINS, LOGIN_SECONDS = 5, 60.0
"""After so many wrong tokens from an address in so many seconds, the answer to the next one waits."""

ANSWERS = 100
"""Wrong tokens a second that are answered of those that wait, however many there are; none waits less than a second."""

Why = pb.Goodbye.Why


class Server:
    """Listens for workers.

    Args:
      settings: where, and who may come.
      options: of the environment, as canonical JSON that workers must have too; None compares nothing.
      spec: of the environment, or None to take that of the first worker.
      say: takes a line for the user.
      clock: seconds, monotonic.

    Raises:
      OSError: where the address cannot be listened at, or announced.
      ValueError: where a file or folder that settings name cannot be used.
    """

    def __init__(
        self,
        settings: Remote,
        options: str | None,
        spec: EnvSpec | None,
        say: Callable[[str], None] = console.say,
        clock: Callable[[], float] = time.monotonic,
    ):
        assert settings.listen is not None
        self._clock = clock
        self._settings, self._options, self.spec, self._say = settings, options, spec, say
        self._spec_known = threading.Event()
        if spec:
            self._spec_known.set()
        self.hub: Hub | None = None
        self.busy = 0.0  # share of its time that the loop's thread computes
        self._hub_known = asyncio.Event()
        self._token = read_token(settings.token_file)
        self._streams: dict[int, Stream] = {}
        self._live = 0  # streams that have said Hello, of which one may end while another of its process begins
        self._silent: dict[Stream, asyncio.Task[Any]] = {}  # the oldest first
        self._logins: dict[str, list[float]] = {}
        self._waiting = 0  # wrong tokens whose answer waits
        self._unlogged: dict[str, float] = {}
        self._loop = shared_loop()
        self._outbox = Outbox(self._loop.loop)
        self._connections = room(MAX_CONNECTIONS)
        if self._connections < MAX_SESSIONS:
            self._tell(
                f"remote: the limit of open files leaves room for {self._connections} connections of workers; for more "
                f"of them raise it before the learner starts (ulimit -n {MAX_CONNECTIONS + RESERVED})."
            )
        try:
            self.where = self._loop.run(self._start(settings.listen))
        except RuntimeError as error:  # of gRPC, which says no more than that it cannot
            pair = ", or tls_cert and tls_key are no pair" if settings.tls_cert else ""
            why = f"the address is in use, or not ours{pair}."
            raise OSError(f"remote: cannot listen at {settings.listen}: {why}") from error
        try:
            self._announcement = Announcement(settings.announce, self.where) if settings.announce else None
        except OSError:
            self._loop.run(self._close(Why.FAILED, ""))
            raise

    def _most(self) -> int:
        """Bytes of the largest message that may come: rows of the largest block, or Ready."""
        if self.spec is None:
            return MAX_SPEC
        rows = wire.Layout(self.spec).row_bytes * (self._settings.block or DEFAULT_BLOCK)
        return min(max(rows, specs.to_proto(self.spec).ByteSize()) + wire.OVERHEAD, 2**31 - 1)

    async def _start(self, listen: str) -> str:
        settings = self._settings
        self._sized = self.spec is not None
        if listen.startswith("unix:") and not settings.insecure:
            make_private(pathlib.Path(address(listen)[0]).absolute().parent)
        if listen.startswith("unix:") and is_taken(address(listen)[0]):
            raise RuntimeError("in use")
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),  # or a second learner would share the port, and nobody would notice
                ("grpc.max_receive_message_length", self._most()),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", 16384),
                ("grpc.max_allowed_incoming_connections", self._connections),
                ("grpc.max_concurrent_streams", 4),
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.ping_timeout_ms", 10_000),  # of other pings, in whose place none of keepalive is sent
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.server_handshake_timeout_ms", 10_000),
                ("grpc.max_connection_idle_ms", 9_000),  # give or take a tenth
                ("grpc.compression_enabled_algorithms_bitset", 1),
            ]
        )
        handler = grpc.stream_stream_rpc_method_handler(self._session)
        service, _, method = METHOD[1:].partition("/")
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        if settings.tls_cert:
            port = self._server.add_secure_port(listen, Certificates(settings).credentials())
        else:
            port = self._server.add_insecure_port(listen)
        if not port:
            raise RuntimeError("no port")
        await self._server.start()
        self._ticking = asyncio.get_running_loop().create_task(self._tick())
        return listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"

    def serve(self, hub: Hub) -> None:
        """Lets workers in."""
        self.hub, hub.where = hub, self.where
        self._loop.loop.call_soon_threadsafe(self._hub_known.set)

    def wait_for_spec(self, seconds: float) -> EnvSpec | None:
        """The spec of the first worker, or None if none came.

        Raises:
          OSError: where another process took the address meanwhile.
        """
        until = time.monotonic() + seconds
        left = lambda: max(0.0, until - time.monotonic())  # noqa: E731
        while not self._spec_known.wait(min(SAY_SECONDS, left())) and left():
            self._tell(f"remote: nobody has said yet what the environment is; workers connect to {self.where}.")
        if self.spec and not self._sized:
            self._loop.run(self._restart())
        return self.spec

    async def _restart(self) -> None:
        """Listens anew: gRPC takes the size of messages, which follows from the spec, when it begins to listen only."""
        self._ticking.cancel()
        await self._server.stop(GOODBYE_SECONDS)
        until = time.monotonic() + GOODBYE_SECONDS
        while True:
            try:
                await self._start(self.where)
                return
            except RuntimeError as error:
                if time.monotonic() > until:
                    raise OSError(f"remote: cannot listen at {self.where} again: the address is in use.") from error
                await asyncio.sleep(0.05)

    def close(self, why: int, text: str = "") -> None:
        """Says goodbye to all workers, and why, and stops listening."""
        with contextlib.suppress(TimeoutError):
            self._loop.run(self._close(why, text), GOODBYE_SECONDS + 5.0)
        if self._announcement:
            self._announcement.withdraw()

    async def _close(self, why: int, text: str) -> None:
        self._ticking.cancel()
        goodbye = wire.pack(pb.ToWorker(goodbye=pb.Goodbye(why=why, text=text[: wire.MAX_TEXT])))  # type: ignore[arg-type]
        for stream in list(self._streams.values()):
            stream.queue.put_nowait(goodbye)
            stream.queue.put_nowait(None)
        await self._server.stop(GOODBYE_SECONDS)

    async def _tick(self) -> None:
        loop, said = asyncio.get_running_loop(), ""
        while True:
            cpu, clock = time.thread_time(), time.monotonic()
            await asyncio.sleep(TICK_SECONDS)
            self.busy = (time.thread_time() - cpu) / (time.monotonic() - clock)
            try:
                if self.hub:
                    self.hub.tick()
            except Exception as error:  # or nobody would look any more who is late
                if repr(error) != said:
                    said = repr(error)
                    loop.call_exception_handler({"message": "remote: who is late is not known", "exception": error})

    # One stream

    async def _session(self, _: Any, context: Any) -> None:
        peer = context.peer()
        stream = Stream(context, self._outbox)
        try:
            await self._talk(stream, peer)
        except Gone:
            pass
        except Refused as refused:
            await self._reject(stream, peer, refused.code, "is sent away", str(refused))
        except wire.ProtocolError as error:
            await self._reject(stream, peer, grpc.StatusCode.INVALID_ARGUMENT, "broke the protocol", str(error))
        except Exception as error:
            if not lost_peer(error):
                raise

    async def _reject(self, stream: Stream, peer: str, code: grpc.StatusCode, what: str, text: str) -> None:
        self._log(peer, f"remote: {stream.name or peer} {what}: {text}")
        if self.hub:
            self.hub.reject(code.name.lower())
        await stream.context.abort(code, wire.printable(text))

    def _log(self, peer: str, line: str) -> None:
        """Says it, once a minute of an address."""
        host, now = peer.rpartition(":")[0], self._clock()
        if now - self._unlogged.get(host, -60.0) >= 60.0 or not peer.startswith("ipv"):
            self._unlogged = {h: at for h, at in self._unlogged.items() if now - at < 60.0} | {host: now}
            self._tell(line)

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads standard error any more
            self._say(line)

    async def _talk(self, stream: Stream, peer: str) -> None:
        await self._authenticate(stream.context, peer)
        hello = await self._hear(stream)
        if self._live >= MAX_SESSIONS:
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many workers at once; try again.")
        older = self._streams.get(hello.run)
        if older:
            older.end("the same process has come again.")
        self._streams[hello.run] = stream
        self._live += 1
        session = WorkerSession(stream.name, hello.lanes, stream.post, stream.end)
        why, reason = "it went away", "left"
        try:
            await self._converse(stream, session)
        except (Refused, wire.ProtocolError) as error:
            why, reason = str(error), "left" if isinstance(error, Refused) else "violation"
            raise
        finally:
            if self._streams.get(hello.run) is stream:
                del self._streams[hello.run]
            self._live -= 1
            if self.hub:
                self.hub.leave(session, f"{stream.name}: {why}", reason)

    async def _authenticate(self, context: Any, peer: str) -> None:
        """Lets in who has the token, whatever others of the same address say: one of 16 characters is not guessed."""
        if self._token is None:
            return
        said = dict(context.invocation_metadata() or ()).get("authorization", "")
        said = said if isinstance(said, bytes) else said.encode()
        if hmac.compare_digest(said, b"Bearer " + self._token):
            return
        host, now = peer.rpartition(":")[0], self._clock()
        failed = [at for at in self._logins.get(host, ()) if at > now - LOGIN_SECONDS]
        self._logins = {h: x for h, x in self._logins.items() if x[-1] > now - LOGIN_SECONDS}
        self._logins[host] = [*failed, now][-LOGINS:]
        if len(failed) >= LOGINS:
            self._waiting += 1
            try:
                await asyncio.sleep(max(1.0, self._waiting / ANSWERS))
            finally:
                self._waiting -= 1
        raise Refused(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong.")

    async def _hear(self, stream: Stream) -> Any:
        """A worker's Hello. Of too many who have not said it, the one that has waited longest makes room."""
        if len(self._silent) >= MAX_SILENT:
            self._silent.pop(next(iter(self._silent))).cancel()
        task = self._silent[stream] = asyncio.create_task(self._greet(stream))
        try:
            return await task
        except asyncio.CancelledError:
            if stream in self._silent:
                raise
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "it said nothing, and others wait.") from None
        finally:
            self._silent.pop(stream, None)

    async def _greet(self, stream: Stream) -> Any:
        message, _ = await stream.receive(HELLO_SECONDS)
        if message.WhichOneof("kind") != "hello":
            raise wire.ProtocolError("the first message is no Hello.")
        hello = message.hello
        stream.name = f"worker {wire.printable(hello.worker)[:80]}"
        if hello.protocol != wire.PROTOCOL:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"protocol {hello.protocol} at the worker (podracer {wire.printable(hello.version)[:40]}) and "
                f"{wire.PROTOCOL} at the learner (podracer {__version__}); install the same version.",
            )
        if not 1 <= hello.lanes <= wire.MAX_LANES:
            raise wire.ProtocolError(f"{hello.lanes} lanes; a worker has 1 to {wire.MAX_LANES}.")
        return hello

    async def _compare(self, stream: Stream) -> None:
        message, _ = await stream.receive(READY_SECONDS)
        if message.WhichOneof("kind") != "ready":
            raise wire.ProtocolError("the second message is not Ready.")
        spec = specs.from_proto(message.ready.spec)
        if len(message.ready.options) > specs.MAX_OPTIONS:
            raise wire.ProtocolError("its options are too long.")
        if self.spec is None:
            self.spec = spec
            self._spec_known.set()
        difference = specs.difference(self.spec, spec)
        if not difference and self._options is not None:
            difference = specs.options_difference(self._options, message.ready.options)
        if difference:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, f"another environment: {difference}.")

    async def _serve(self, stream: Stream, session: WorkerSession) -> None:
        welcome = pb.Welcome(
            session=secrets.randbits(63), options=self._options or "", alive_ms=int(1000 * ALIVE_SECONDS)
        )
        await stream.send(pb.ToWorker(welcome=welcome))
        await self._compare(stream)
        if not self._sized:  # it comes again once there is room for its rows
            await stream.send(pb.ToWorker(goodbye=pb.Goodbye(why=Why.RESTARTING)))
            return
        await self._hub_known.wait()
        assert self.hub is not None
        self.hub.join(session)
        await self._listen(stream, session)

    async def _converse(self, stream: Stream, session: WorkerSession) -> None:
        loop = asyncio.get_running_loop()
        # One task each for as long as the stream lasts: one for every message would cost more than the message.
        # Whatever it waits for, what is posted is written: that another stream has taken its place, or goodbye.
        tasks = [loop.create_task(stream.write()), loop.create_task(self._serve(stream, session))]
        for task in tasks:  # of two that end at once one is told of below, and asyncio complains of the other
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await stream.settle()
            for task in tasks:
                task.cancel()

    async def _listen(self, stream: Stream, session: WorkerSession) -> None:
        assert self.hub is not None
        control, second = 0, time.monotonic()
        while (data := await stream.read()) is not None:
            message, payload = wire.unpack(pb.FromWorker, data)
            kind = message.WhichOneof("kind")
            if kind == "rows":
                self.hub.rows(session, message.rows, payload)
                continue
            if len(data) > wire.OVERHEAD:
                raise wire.ProtocolError(f"{len(data)} bytes of {kind}: too large.")
            now = time.monotonic()
            control, second = (control + 1, second) if now - second < 1.0 else (1, now)
            if control > MAX_CONTROL:
                raise wire.ProtocolError("a flood of messages.")
            if kind == "alive":
                self.hub.alive(session, message.alive)
            elif kind == "failed":
                self.hub.failed(session, message.failed.block, wire.printable(message.failed.error))
            elif kind == "leave":
                return
            else:
                raise wire.ProtocolError(f"a message that does not belong here: {kind}.")
