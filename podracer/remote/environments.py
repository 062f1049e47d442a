"""Environments of a learner that others step (see `podracer.types.HostEnvironments`)."""

from __future__ import annotations

from typing import Any

from podracer.errors import RemoteError
from podracer.remote import session_pb2 as pb
from podracer.remote import specs, wire
from podracer.remote.blocks import Batching, Timeouts
from podracer.remote.hub import Hub
from podracer.remote.pool import RemoteEnvironment
from podracer.remote.prometheus import Exporter
from podracer.remote.settings import DEFAULT_BLOCK, Remote, require_grpc
from podracer.types import EnvSpec, HostEnvironments


class RemoteEnvironments:
    """Environments that workers step, for actors and, if asked for, for evaluations.

    Args:
      name: of the environment.
      local: the environment as this process makes it, or None where it cannot: the first worker says what it is.
      options: of the environment as canonical JSON, which workers must have; None compares nothing.
      settings: where to listen.
      answer_timeout: seconds that a worker may take for a step.
      strict: whether a lost worker ends the run.

    Raises:
      OSError: where the address cannot be listened at, or announced.
      ValueError: for settings that make no sense.
      RemoteError: where no worker says in time what the environment is.
    """

    def __init__(
        self,
        name: str,
        local: HostEnvironments | None,
        options: str | None,
        settings: Remote,
        *,
        answer_timeout: float,
        strict: bool,
    ):
        require_grpc()
        from podracer.remote import server

        if settings.evaluation == "local" and local is None:
            raise ValueError(f"remote: evaluation='local' needs an environment that can be made here, not {name!r}.")
        if local is not None:
            specs.to_proto(local.spec)  # what cannot cross the wire is said before anybody listens
        self._local, self._settings, self._closed = local, settings, False
        self._exporter: Exporter | None = None
        self._server = server.Server(settings, options, local.spec if local else None)
        try:
            spec = self._server.wait_for_spec(settings.join_timeout)
            if spec is None:
                raise RemoteError(
                    f"no worker has said in {settings.join_timeout:.0f} s what {name} is: start `podracer serve-envs` "
                    f"with --connect {self._server.where}, or raise join_timeout."
                )
            self.spec: EnvSpec = spec._replace(name=name)
            timeouts = Timeouts(answer_timeout, settings.join_timeout, 1.0 if strict else settings.min_live, strict)
            self._hub = Hub(wire.Layout(self.spec, settings.max_magnitude), timeouts)
            self._exporter = (
                Exporter(settings.metrics, self.metrics, self._hub.labelled, self._hub.histograms)
                if settings.metrics
                else None
            )
            self._server.serve(self._hub)
        except BaseException:
            self.close(pb.Goodbye.FAILED)
            raise

    @property
    def where(self) -> str:
        """The address at which it listens."""
        return self._server.where

    def make(self, num_lanes: int, seed: int, *, evaluation: bool = False) -> Any:
        """Asks workers for lanes.

        Raises:
          RemoteError: where they have been sent home.
        """
        if evaluation and self._local is not None and self._settings.evaluation != "remote":
            return self._local.make(num_lanes, seed, evaluation=True)
        if self._closed:
            raise RemoteError(f"the workers of {self.spec.name} have been sent home.")
        batching = None if evaluation else self._batching(num_lanes)
        pool = self._hub.open_pool(num_lanes, self._block(num_lanes), seed, evaluation, batching)
        return RemoteEnvironment(self._hub, pool, self.spec)

    def lanes_at_once(self, num_lanes: int) -> int | None:
        """The most of so many lanes whose rows an actor gets at once; None where it gets those of all."""
        batching = self._batching(num_lanes)
        return batching and batching.most

    def _block(self, num_lanes: int) -> int:
        if self._settings.block:
            return min(self._settings.block, num_lanes)
        # Of one block alone, none could be ready before the others.
        most = DEFAULT_BLOCK if self._settings.mode == "all" else min(DEFAULT_BLOCK, max(1, num_lanes // 4))
        return max(n for n in range(1, most + 1) if num_lanes % n == 0)

    def _batching(self, num_lanes: int) -> Batching | None:
        settings, block = self._settings, self._block(num_lanes)
        if settings.mode == "all":
            return None
        most = settings.max_lanes or max(num_lanes // 2, block)
        least = settings.min_lanes or block
        if not block <= most or least > most:
            raise ValueError(
                f"remote: min_lanes={least} and max_lanes={most} do not go with blocks of {block} lanes: use "
                "min_lanes <= max_lanes, and block <= max_lanes."
            )
        return Batching(least, min(most, num_lanes), settings.deadline_ms / 1000)

    def render(self, seed: int) -> Any:
        """One lane that can be drawn, here; None where that cannot be."""
        make = getattr(self._local, "render", None)
        return make(seed) if make else None

    def metrics(self) -> dict[str, float]:
        """Metrics of the workers by name."""
        return self._hub.metrics() | {"remote/loop_busy": self._server.busy}

    def close(self, why: int, text: str = "") -> None:
        """Sends the workers home, or tells them to wait; who waits for their rows is woken."""
        if not self._closed:
            self._closed = True
            if self._exporter:
                self._exporter.close()
            if self._server.hub:
                self._server.hub.wake()
            self._server.close(why, text)
