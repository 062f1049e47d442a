"""The settings by which a worker finds its learner, and what it must not talk to."""

from __future__ import annotations

import dataclasses
import hashlib

from podracer import configs
from podracer.remote.settings import address, is_private

MAX_FILE = 4096
"""Characters of a file that says where learners are."""


@dataclasses.dataclass(frozen=True)
class Connection:
    """Settings of the way from a worker to its learner.

    Attributes:
      connect: HOST:PORT, unix:PATH, several with commas of which a worker takes one by its name and number, or
        file:PATH of what a learner announces.
      tls_ca: file of the authority that signed the learner's certificate.
      tls_cert: file of the worker's own certificate, where the learner wants one.
      tls_key: file of its key.
      tls_name: what the learner's certificate is for, where that is not its address.
      token_file: file of the token that the learner has too.
      insecure: talks without encryption to another machine.
      give_up_after: seconds without a learner after which a worker ends; 0 never does.
    """

    connect: str
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_name: str | None = None
    token_file: str | None = None
    insecure: bool = False
    give_up_after: float = configs.field(600.0, low=0.0)

    def __post_init__(self):
        configs.check(self)
        if not self.connect.startswith("file:"):
            self._checked(self.connect)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("connect: a certificate needs its key: give both tls_cert and tls_key.")
        if self.tls_cert and not self.tls_ca:
            raise ValueError("connect: tls_cert needs tls_ca: without it nothing is encrypted.")

    def target(self, worker: str) -> str:
        """The address of the learner, or "" where that is not known yet.

        Raises:
          ValueError: where a file says an address that this worker must not talk to.
        """
        text = self.connect
        if text.startswith("file:"):
            try:
                with open(text.removeprefix("file:")) as file:
                    text = file.read(MAX_FILE).strip()
            except OSError:
                return ""
        choices = self._checked(text) if text else [""]
        # Processes and hosts are numbered: those of one name go to the learners in turn.
        name = worker.rstrip("0123456789")
        first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        return choices[(first + int(worker[len(name) :][-9:] or 0)) % len(choices)]

    def _checked(self, text: str) -> list[str]:
        """The addresses in a list, all of which may be talked to: whoever writes a file must not get the token."""
        choices = text.split(",")
        for target in choices:
            named = target.removeprefix("dns:///")
            address(named)
            private = is_private(named) and not (named != target and named.startswith("unix:"))  # a host called unix
            if not (self.tls_ca or self.insecure or private):
                raise ValueError(
                    f"connect: {target} is on another machine, so tls_ca must say whose certificate it has; "
                    "insecure=True talks to it in the clear, in a network that you trust."
                )
        return choices
