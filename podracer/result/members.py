"""Members of runs: their settings, seeds and rows, in groups that differ only in the seed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from podracer.run import metrics, rundir
from podracer.run.config import seeds_of

PLACEMENT = ("seed", "population", "member_seeds", "num_shards", "actor_devices", "replay_memory", "checkpoint_replay")
"""Run settings that place seeds on devices; all others, except `rundir.FREE_TO_CHANGE`, decide the result."""


class Member(NamedTuple):
    """One member of a population, or a run without a population.

    Attributes:
      name: the run's name.
      agent: the agent's name.
      env: the environment's name.
      seed: the member's seed.
      settings: all other settings that decide its result, by flat names such as `agent_config.learning_rate`.
      rows: its metric rows.
    """

    name: str
    agent: str
    env: str
    seed: int
    settings: dict[str, Any]
    rows: list[metrics.Row]


def from_run(description: Mapping[str, Any], history: Sequence[metrics.Row], name: str = "") -> list[Member]:
    """The members of a run, from its description and its rows."""
    run = description["run"]
    rows: dict[int, list[metrics.Row]] = {}
    for row in history:
        rows.setdefault(row.get("member", 0), []).append(row)
    ignored = (*PLACEMENT, *rundir.FREE_TO_CHANGE)
    common = {key: description[key] for key in ("own", "init_from", "wrap") if key in description}
    evolves = description.get("pbt") or {"hyper": ()}
    if "pbt" in description:
        common["pbt"] = ", ".join(f"{key}={value}" for key, value in evolves.items() if value is not None)
    common |= {f"run.{key}": run[key] for key in run if key not in ignored}
    common |= {f"env_options.{key}": value for key, value in description["env_options"].items()}
    members = []
    for i, seed in enumerate(seeds_of(run)):
        config = description["agent_config"] | {
            key: value[i] if isinstance(value, list) else value for key, value in description["hyper"].items()
        }
        # Numbers that evolve are no settings; rows have them as `hyper/NAME`.
        config = {key: value for key, value in config.items() if key not in evolves["hyper"]}
        settings = common | {f"agent_config.{key}": value for key, value in config.items()}
        members.append(Member(name, description["agent"], description["env"], int(seed), settings, rows.get(i, [])))
    return members


def curves(members: Sequence[Member], *, group: bool = True) -> dict[str, list[metrics.Row]]:
    """The rows of every line of a learning curve, by label; seeds of one setting are the `member`s of one line.

    Args:
      members: members of one run or of several.
      group: True lets runs that differ only in their seeds share a line. Runs of equal seeds, such as copies, do not.
    """
    lines: dict[tuple[str, ...], list[Member]] = {}
    for _, equal in _by(_setting, members).items():
        apart = not group or len({member.seed for member in equal}) < len(equal)
        lines |= _by(lambda member, apart=apart: (member.name if apart else "", *_setting(member)), equal)
    for precision in (".4g", ".17g"):  # as short as it can be
        labels = _labels(lines, precision)
        if len(set(labels)) == len(labels):
            break
    return {
        label: [row | {"member": i} for i, member in enumerate(line) for row in member.rows]
        for label, line in zip(labels, lines.values())
    }


def table(members: Sequence[Member], tunables: Sequence[str]) -> list[dict[str, Any]]:
    """Rows for a data frame: one for each update and member, with its seed and its tunable numbers.

    Several rows may share an update: training and evaluation, or all rows before a replay allows the first update. Then
    the newest value of each metric counts, and the steps of the training row.
    """
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for i, member in enumerate(members):
        own = {name: member.settings.get(f"agent_config.{name}") for name in tunables}
        numbers = {name: float(value) for name, value in own.items() if value is not None}
        for row in member.rows:
            at = row["updates"], i
            before = found.get(at, {})
            trained = any("/" in name and not name.startswith("eval/") for name in row)
            steps = None if trained else before.get("env_steps")
            head = {"updates": row["updates"], "member": i, "seed": member.seed, "env_steps": steps or row["env_steps"]}
            found[at] = head | numbers | before | row | head
    return [found[at] for at in sorted(found)]


def _setting(member: Member) -> tuple[str, ...]:
    return member.agent, member.env, json.dumps(member.settings, sort_keys=True)


def _by(key: Any, members: Sequence[Member]) -> dict[tuple[str, ...], list[Member]]:
    groups: dict[tuple[str, ...], list[Member]] = {}
    for member in members:
        groups.setdefault(key(member), []).append(member)
    return groups


def _labels(lines: Mapping[tuple[str, ...], Sequence[Member]], precision: str) -> list[str]:
    """The label of each line: its run, its agent and environment, and the settings in which runs of the same two
    differ."""
    of_all = {(member.agent, member.env) for member, *_ in lines.values()}
    labels = []
    for (name, *_), (member, *_) in lines.items():
        like = [m.settings for m, *_ in lines.values() if (m.agent, m.env) == (member.agent, member.env)]
        parts = [name] if name else []
        for key, value in member.settings.items():
            if any(settings.get(key) != value for settings in like):
                parts.append(f"{key.rpartition('.')[2]}={_text(value, precision)}")
        if len(of_all) > 1 or not parts:
            parts.insert(0, f"{member.agent} on {member.env}")
        labels.append(", ".join(parts))
    return labels


def _text(value: Any, precision: str) -> str:
    return format(value, precision) if isinstance(value, float) else str(value)
