"""`podracer bench`: measures speed."""

from __future__ import annotations

from collections.abc import Callable

from podracer.bench import anakin, replay, search, sebulba
from podracer.cli.arguments import InputError, parse


def bench(argv: list[str]) -> int:
    if argv[:1] in (["-h"], ["--help"]):
        print(f"usage: podracer bench {'|'.join(BENCHES)} [options]; podracer bench anakin --help lists the options")
        return 0
    if not argv or argv[0] not in BENCHES:
        given = f", not {argv[0]!r}" if argv else ""
        raise InputError(f"bench needs what to measure: podracer bench {'|'.join(BENCHES)}{given}.")
    arguments, main = BENCHES[argv[0]]
    return main(parse(arguments, argv[1:], f"podracer bench {argv[0]}"))


BENCHES: dict[str, tuple[type, Callable[..., int]]] = {
    "anakin": (anakin.AnakinArguments, anakin.main),
    "sebulba": (sebulba.SebulbaArguments, sebulba.main),
    "replay": (replay.ReplayArguments, replay.main),
    "search": (search.SearchArguments, search.main),
}
