"""Certificates of a learner, which are renewed while it runs."""

from __future__ import annotations

from typing import Any

import grpc

from podracer.remote.settings import Remote, identity, read

FILES = ("tls_cert", "tls_key", "client_ca")


class Certificates:
    """Certificates for the next connection of gRPC: read again when a file has changed."""

    def __init__(self, settings: Remote):
        self._paths = {name: path for name in FILES if (path := getattr(settings, name))}
        self._seen: list[tuple[int, ...]] = []

    def credentials(self) -> Any:
        """Credentials of a server that stay up to date.

        Raises:
          ValueError: where a file cannot be read.
        """
        return grpc.dynamic_ssl_server_credentials(self._read([]), self.renewed, "client_ca" in self._paths)

    def renewed(self) -> Any:
        """New certificates, or None where there are none, or they cannot be read; called by any thread of gRPC."""
        try:
            seen = self._identities()
            return None if seen == self._seen else self._read(seen)
        except (OSError, ValueError):
            return None

    def _read(self, seen: list[tuple[int, ...]]) -> Any:
        found = {name: read(path, name) for name, path in self._paths.items()}
        self._seen = seen
        pair = (found["tls_key"], found["tls_cert"])
        return grpc.ssl_server_certificate_configuration([pair], found.get("client_ca"))

    def _identities(self) -> list[tuple[int, ...]]:
        return [identity(path) for path in self._paths.values()]
