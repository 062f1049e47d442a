"""`podracer serve-envs`: a worker that steps environments for a learner elsewhere; it needs no JAX."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated, Any

import tyro

from podracer import configs, environments
from podracer.cli.arguments import InputError, asks_for_help, parse
from podracer.remote import supervisor
from podracer.system import console, own_code

USAGE = "usage: podracer serve-envs ENV --connect HOST:PORT [options]; add --help after ENV to see them"


@dataclasses.dataclass(frozen=True)
class ServeArguments:
    """Step environments for a learner that runs elsewhere.

    Attributes:
      connect: HOST:PORT of the learner, unix:PATH, several with commas, or file:PATH that it announces; the variable
        PODRACER_CONNECT if None.
      lanes: number of environments of each process.
      processes: number of worker processes.
      name: the worker's name in messages; the machine's if None.
      tls_ca: file of the authority that signed the learner's certificate.
      tls_cert: file of this worker's own certificate, if the learner wants one.
      tls_key: file of the key of `tls_cert`.
      tls_name: the name in the learner's certificate, if it is not the address.
      token_file: file of the token shared with the learner; the variable PODRACER_TOKEN_FILE if None.
      insecure: connect to another machine without encryption.
      give_up_after: seconds without a learner until the worker ends; 0 waits for ever.
      quiet: print errors only.
    """

    connect: str | None = None
    lanes: int = configs.field(64, low=1)
    processes: int = configs.field(1, low=1)
    name: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_name: str | None = None
    token_file: str | None = None
    insecure: bool = False
    give_up_after: float = 600.0
    quiet: bool = False

    def __post_init__(self):
        configs.check(self)


def run(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    try:
        return serve(argv)
    except (ValueError, TypeError) as error:
        own_code.show(error)
        console.say(f"podracer: error: {' '.join(own_code.said(error).split())}")
        return 2


def serve(argv: list[str]) -> int:
    if not argv or argv[0].startswith("-"):
        if not argv or asks_for_help(argv):
            print(USAGE)
            return 0
        raise InputError("serve-envs needs an environment: podracer serve-envs ENV --connect HOST:PORT.")
    environment, *rest = argv
    if environment.startswith(environments.REMOTE):
        raise InputError(f"{environment} is what a learner calls it; give the environment's own name.")
    options = environments.options(environment)
    cls = dataclasses.make_dataclass(
        "ServeEnvsArguments",
        [
            ("serve", Annotated[ServeArguments, tyro.conf.arg(name="", prefix_name=False)], ServeArguments()),
            ("env", options, options()),
        ],
        kw_only=True,
    )
    try:
        arguments: Any = parse(cls, rest, f"podracer serve-envs {environment}")
    except SystemExit:
        return 0
    settings = vars(arguments.serve) | {
        "connect": arguments.serve.connect or os.environ.get("PODRACER_CONNECT"),
        "token_file": arguments.serve.token_file or os.environ.get("PODRACER_TOKEN_FILE"),
    }
    if not settings["connect"]:
        raise InputError("serve-envs needs the learner's address: --connect HOST:PORT, or PODRACER_CONNECT.")
    processes = settings.pop("processes")
    check(settings)
    changes = {name: value for name, value in vars(arguments.env).items() if value != getattr(options(), name)}
    return supervisor.run(environment, settings | {"env_options": changes}, processes)


def check(settings: dict[str, Any]) -> None:
    """Checks the settings before any process is started."""
    from podracer.remote import settings as remote

    remote.require_grpc()
    from podracer.remote.connection import Connection  # gRPC, which this process starts nothing of

    Connection(**{field.name: settings[field.name] for field in dataclasses.fields(Connection)})
    remote.read_token(settings["token_file"])
    for name in ("tls_ca", "tls_cert", "tls_key"):
        if settings[name]:
            remote.read(settings[name], name)
