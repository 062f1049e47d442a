"""Parses flags into dataclasses; errors take one line."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

import tyro

from podracer import configs

Arguments = TypeVar("Arguments")
REGISTRY = tyro.constructors.ConstructorRegistry()
INSTEAD = {"--seed": "; --seeds trains a run for each"}
"""The hint for an option that was given more values than it takes."""


class InputError(ValueError):
    """An error in what the user typed."""


def parse(cls: type[Arguments], argv: list[str], prog: str, flags: Iterable[str] = ()) -> Arguments:
    """Parses flags into a dataclass; tyro's box of an error becomes one line.

    Args:
      cls: the dataclass.
      argv: the words that the user typed.
      prog: the command's name.
      flags: flags to suggest for another library's names.
    """
    return _parse(cls, argv, prog, flags, False)


def parse_known(cls: type[Arguments], argv: list[str], prog: str) -> tuple[Arguments, list[str]]:
    """The same as `parse`, and the words that the dataclass does not know."""
    return _parse(cls, argv, prog, (), True)


def _parse(cls: type[Any], argv: list[str], prog: str, flags: Iterable[str], unknown_too: bool) -> Any:
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(cls, args=argv, prog=prog, registry=REGISTRY, return_unknown_args=unknown_too)  # type: ignore[call-overload]
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        message, meant = _unbox(captured.getvalue())
        unknown = message.removeprefix("Unrecognized options: ").split(", ") if "Unrecognized" in message else []
        if unknown and (hint := _other_name(unknown[0], flags) or meant):
            message += f"; did you mean {hint}?"
        elif unknown:
            message = _too_many(argv, unknown) or message
        raise InputError(f"{message} (see {prog} --help)") from None


@REGISTRY.primitive_rule
def _numbers(info: Any) -> Any:
    """Lets users write integers as 1e5, and several numbers with commas between them."""
    if info.type is int:
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="INT",
            instance_from_str=lambda texts: _integer(texts[0]),
            is_instance=lambda x: isinstance(x, int),
            str_from_instance=lambda x: [str(x)],
        )
    if info.type_origin is tuple and typing.get_args(info.type) in ((int, ...), (float, ...)):
        number, name = (_integer, "INT") if typing.get_args(info.type)[0] is int else (float, "FLOAT")
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs="*",
            metavar=f"[{name} [{name} ...]]",
            instance_from_str=lambda texts: tuple(number(x) for text in texts for x in text.split(",")),
            is_instance=lambda x: isinstance(x, tuple),
            str_from_instance=lambda x: [str(number) for number in x],
        )
    return None


def _integer(text: str) -> int:
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        if float(text).is_integer():
            return int(float(text))
    raise ValueError(f"{text!r} is not an integer")


def _unbox(box: str) -> tuple[str, str]:
    """Returns the message of tyro's box in one line, without title, borders and help, and the flag that it suggests, or
    ''."""
    # Sections are separated by lines of box characters, or of hyphens where the terminal has no others.
    sections = [" ".join(section.split()) for section in re.split(r".*[─-]{5,}.*", re.sub("[│╭╮╰╯]", " ", box))]
    message, hints = sections[1], sections[2:]
    message = re.sub(r"^Error parsing (?:(--\S+): |\S+: )", lambda found: f"{found[1]}: " if found[1] else "", message)
    message = re.sub(r"no type matching .* Got errors: .*: (?=')", "", message)  # of None and INT: what INT says
    message = re.sub(r"could not convert string to float: ('.*')", r"\1 is not a number", message)
    flag = next((re.search(r"--\S+", hint) for hint in hints if hint.startswith("Perhaps you meant")), None)
    return message, flag[0] if flag else ""


def _other_name(unknown: str, flags: Iterable[str]) -> str:
    """The flag for a name in `configs.OTHER_NAMES`, with its unit where that is another, or ''."""
    setting = lambda flag: flag.partition("=")[0].rpartition(".")[2].strip("-").replace("-", "_")  # noqa: E731
    name, part = setting(unknown), unknown.partition("=")[0].rpartition(".")[0]
    # A tunable number has two flags: that of the part that was typed is the last, and counts.
    known = {setting(flag): flag for flag in sorted(flags, key=lambda flag: flag.startswith(f"{part}."))}
    unit = f", {configs.OTHER_UNITS[name]}" if name in configs.OTHER_UNITS else ""
    return next((known[ours] + unit for ours in configs.OTHER_NAMES.get(name, ()) if ours in known), "")


def _too_many(argv: list[str], unknown: list[str]) -> str:
    """Returns the message for values after an option that takes fewer, or '' if that is not the error."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    flags = [i for i, word in enumerate(words) if re.match("--?[a-z]", word)] + [len(words)]
    for i, end in itertools.pairwise(flags):
        values = words[i + 1 : end]
        for num_values, number in enumerate(("no value", "one value")):
            if values[num_values:] and values[num_values:] == unknown[: len(values) - num_values]:
                return f"{words[i]} takes {number}, but got {' '.join(values)}{INSTEAD.get(words[i], '')}"
    return ""


def asks_for_help(argv: list[str]) -> bool:
    """Returns True if the arguments ask for help."""
    return not {"-h", "--help"}.isdisjoint(argv)


def refuse_arguments(command: str, argv: list[str]) -> None:
    """Refuses arguments of a command that takes none."""
    if argv and not asks_for_help(argv):
        raise InputError(f"{command} takes no arguments, but got {' '.join(argv)}.")
