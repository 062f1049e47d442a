"""Workers that step the environments of a run, as `train` sees them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from podracer import configs
from podracer.errors import PeerError
from podracer.remote.settings import PER_PROCESS, Remote
from podracer.run import rundir
from podracer.run.config import RunConfig
from podracer.types import HostEnvironments


class Workers:
    """The workers that step the environments of a run, if any do: let in, and told how it ended.

    Args:
      remote: where they connect, if they do.
      run_dir: of a resumed run, which knows where it listened; what is given goes before it, field by field.

    Attributes:
      step: `(name, local, options, run) -> HostEnvironments`, made for a run whose workers step them; None where
        nobody connects.
      finished: set once the run has nothing left to do, which workers hear at its end.
    """

    def __init__(self, remote: Remote | Mapping[str, Any] | None, run_dir: str | pathlib.Path | None):
        stored: Mapping[str, Any] = {}
        if run_dir is not None and rundir.has_run(pathlib.Path(run_dir)):
            stored = rundir.read(pathlib.Path(run_dir)).get("remote") or {}
        if isinstance(remote, Remote):
            remote = {name: value for name, value in vars(remote).items() if value != getattr(Remote(), name)}
        settings = configs.from_json(Remote, {**stored, **(remote or {})})
        if settings != Remote() and not settings.listen:
            given = ", ".join(name for name, value in vars(settings).items() if value != getattr(Remote(), name))
            raise ValueError(f"remote: {given} needs listen, for without it environments are stepped in this process.")
        self._settings, self._environments, self.finished = settings, None, False
        self.step = self._step if settings.listen else None

    def described(self) -> dict[str, Any]:
        """The workers' part of a run's description: names of files, never their content."""
        return {"remote": configs.to_json(self._settings)} if self.step else {}

    def shared_description(self, description: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a run's description that all processes of a pod share: without addresses and files."""
        remote = {name: x for name, x in description.get("remote", {}).items() if name not in PER_PROCESS}
        return {**description, **({"remote": remote} if remote else {})}

    def _step(self, name: str, local: Any, options: dict[str, Any] | None, run: RunConfig) -> HostEnvironments:
        if local is not None and not isinstance(local, HostEnvironments):
            raise ValueError(f"remote: {name} is pure JAX, which needs no workers; leave listen out.")
        from podracer.remote.environments import RemoteEnvironments

        ordered = run.mode != "async"
        if ordered and self._settings.mode == "ready":
            raise ValueError(
                f"remote: mode='ready' takes rows as they come, and mode={run.mode!r} of the run in a fixed order; use "
                "mode='all' there, or mode='async' here."
            )
        self._environments = RemoteEnvironments(
            name,
            local,
            json.dumps(options, sort_keys=True) if options else None,
            self._settings,
            answer_timeout=run.env_timeout,
            strict=ordered and self._settings.on_loss == "error",
        )
        return self._environments

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self._environments is None:
            return
        from podracer.remote.session_pb2 import Goodbye

        # After a lost peer, its pod may be started again.
        if error is not None and not isinstance(error, KeyboardInterrupt | PeerError):
            self._environments.close(Goodbye.FAILED, f"{type(error).__name__}: {error}")
        else:
            self._environments.close(Goodbye.FINISHED if self.finished else Goodbye.RESTARTING)
