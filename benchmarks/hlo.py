"""Reads a compiled program: the text of an optimised HLO module."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

FREE = frozenset(
    [
        "parameter",
        "constant",
        "bitcast",
        "tuple",
        "get-tuple-element",
        "while",
        "conditional",
        "call",
        "after-all",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "add-dependency",
        "copy-done",
        "all-reduce-done",
        "async-start",
        "async-update",
        "async-done",
        "domain",
    ]
)
"""Operations that launch nothing themselves."""

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = ")
_CALLED = re.compile(r"(body|condition|to_apply|calls|branch_computations)=(?:\{([^}]*)\}|%?([\w.\-]+))")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BOUND = re.compile(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_BELOW = re.compile(r"ROOT .* compare\(%?[\w.\-]+, %?([\w.\-]+)\), direction=LT")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def _opcode(line: str) -> str:
    """The operation of an instruction `%name = type opcode(...)`; tuple types hold spaces and parentheses."""
    rest = line.split(" = ", 1)[1]
    depth = 0
    for i, character in enumerate(rest):
        depth += (character in "([{") - (character in ")]}")
        if character == " " and not depth:
            return rest[i + 1 :].split("(", 1)[0]
    raise ValueError(f"not an instruction: {line}")


def _bytes(line: str) -> int:
    """The size in bytes of an instruction's result."""
    types = line.split(" = ", 1)[1].split(" all-reduce", 1)[0]
    arrays = re.findall(r"[a-z]+(\d+)\[([\d,]*)\]", types)  # `pred` has no number and is not reduced
    return sum(int(bits) // 8 * math.prod(int(n) for n in dims.split(",") if n) for bits, dims in arrays)


@dataclasses.dataclass
class Counted:
    """Sums over the instructions that a call of a program executes.

    Attributes:
      kernels: launches: every operation except those that only name an existing array.
      cycles: the estimates of the TPU's compiler.
      reductions: all-reduces.
      sizes: number of all-reduces by their bytes.
    """

    kernels: int = 0
    cycles: int = 0
    reductions: int = 0
    sizes: dict[int, int] = dataclasses.field(default_factory=dict)

    def add(self, other: Counted, times: int) -> None:
        """Adds the counts of a computation that runs `times` times."""
        for name in ("kernels", "cycles", "reductions"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        for size, number in other.sizes.items():
            self.sizes[size] = self.sizes.get(size, 0) + times * number


class _Module:
    """An optimised HLO module: the instructions of its computations, by name."""

    def __init__(self, text: str):
        self.computations: dict[str, list[str]] = {}
        self.entry, lines = "", []
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                lines = self.computations.setdefault(header[2], [])
                self.entry = header[2] if header[1] else self.entry
            elif _INSTRUCTION.match(line):
                lines.append(line)

    def turns(self, line: str, condition: str) -> int | None:
        """The number of iterations of a loop, or None if unknown: loops of JAX count up from 0 by 1."""
        if known := _TURNS.search(line):
            return int(known[1])
        text = "\n".join(self.computations[condition])
        below, bounds = _BELOW.search(text), dict(_BOUND.findall(text))
        return int(bounds[below[1]]) if below and below[1] in bounds else None

    def called(self, line: str, opcode: str) -> Iterator[tuple[str, int]]:
        """The computations that an instruction executes, and how often each; once in a loop of unknown length."""
        called = {role: (many or one).replace("%", "") for role, many, one in _CALLED.findall(line)}
        if opcode == "while":
            known = self.turns(line, called["condition"])
            yield called["body"], 1 if known is None else known
            if known is None:  # a loop of known length does not ask
                yield called["condition"], 1
        elif opcode in ("call", "conditional", "async-start"):
            for part in called.values():
                for branch in part.split(", "):
                    yield branch, 1


def count(text: str) -> Counted:
    """Counts over the text of an optimised HLO module.

    The counts of a loop's body are multiplied by its number of iterations if the compiler knows it; else they count
    once, as in the loop over updates.
    """
    module = _Module(text)
    done: dict[str, Counted] = {}

    def visit(name: str) -> Counted:
        if name not in done:
            done[name] = total = Counted()
            for line in module.computations[name]:
                opcode = _opcode(line)
                cycles = _CYCLES.search(line)
                total.kernels += opcode not in FREE
                total.cycles += int(cycles[1]) if cycles else 0
                if opcode in ("all-reduce", "all-reduce-start"):
                    total.reductions += 1
                    total.sizes[_bytes(line)] = total.sizes.get(_bytes(line), 0) + 1
                for called, times in module.called(line, opcode):
                    total.add(visit(called), times)
        return done[name]

    return visit(module.entry)


KINDS = {
    "gemm": "products",
    "reduce": "sums",
    "dynamic_update_slice": "writes",
    "copy": "copies",
    "wrapped_slice": "slices",
}
"""Kinds of launches, by a word in the name that XLA gives them; all others are elementwise."""


def parts(text: str) -> list[tuple[int, dict[str, int]]]:
    """Splits the launches that `count` counts by loop and kind, for a program whose outer loop is over updates.

    Returns:
      Outside of inner loops, and then for each inner loop in their order: the number of its iterations, and for each of
      `KINDS` the launches of all of them.
    """
    module = _Module(text)
    found: list[tuple[int, dict[str, int]]] = [(1, {})]

    def visit(name: str, times: int, part: dict[str, int]) -> None:
        for line in module.computations[name]:
            opcode = _opcode(line)
            if opcode not in FREE:
                launched = line.split(" = ", 1)[0]
                kind = next((kind for word, kind in KINDS.items() if word in launched), "elementwise")
                part[kind] = part.get(kind, 0) + times
            for called, turns in module.called(line, opcode):
                inner = part
                if opcode == "while" and turns > 1 and times == 1:
                    inner = {}
                    found.append((turns, inner))
                visit(called, times * turns, inner)

    visit(module.entry, 1, found[0][1])
    return found
