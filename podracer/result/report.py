"""The summary of a run: in a line, in a sentence, and as a notebook shows it."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from podracer.result import plots

MAX_ROWS = 12
"""The most members in a table; a notebook is no place for a thousand rows."""


class RunFacts(Protocol):
    """The parts of a `podracer.Result` that a report needs."""

    @property
    def agent(self) -> Any: ...

    @property
    def history(self) -> Sequence[Mapping[str, Any]]: ...

    @property
    def summary(self) -> Mapping[str, Any]: ...

    @property
    def description(self) -> Mapping[str, Any]: ...

    @property
    def run_dir(self) -> Any: ...

    def curves(self) -> Mapping[str, Sequence[Mapping[str, Any]]]: ...


def line(result: RunFacts) -> str:
    """Agent, environment, return and steps: `ppo on cartpole: return 500.000 ± 0.000 over 128 episodes after ...`."""
    return f"{_name(result)}: {_returns(result)} after {_steps(result):,} steps"


def sentence(result: RunFacts) -> str:
    """The line, and the run's time."""
    summary = result.summary
    if "train_seconds" not in summary:
        return line(result)
    return f"{line(result)} ({_seconds(summary)})"


def _seconds(summary: Mapping[str, Any]) -> str:
    """Seconds of the whole wait, and of its parts."""
    training = f"training {summary['train_seconds']:.1f} s at {summary['steps_per_second']:,.0f} steps/s"
    parts = f"{training}, compiling {summary['compile_seconds']:.1f} s"
    if "wall_seconds" not in summary:  # of an earlier version
        return parts
    return f"{summary['wall_seconds']:.1f} s: {parts}, the rest set-up, evaluation and files"


def as_html(result: RunFacts) -> str:
    """HTML with a table of the summary, and if available a table of the members and the curve."""
    summary = result.summary
    facts = {"agent": result.agent.name, "environment": result.description["env"], "steps": f"{_steps(result):,}"}
    facts["result"] = _returns(result)
    if "train_seconds" in summary:
        facts["time"] = _seconds(summary)
    if "device" in summary:
        facts["devices"] = f"{summary['devices']} x {summary['device'].rpartition(': ')[2]}"
    if result.run_dir:
        facts["run directory"] = str(result.run_dir)
    parts = [table(list(facts.items()))]
    if summary.get("members"):
        parts.append(_members(summary["members"], _varying_names(result)))
    try:
        picture = io.BytesIO()
        plots.figure(result.curves()).savefig(picture, format="png", dpi=80)  # beside the text of a page
        parts.append(plots.image_tag(picture.getvalue(), "image/png"))
    except ValueError:  # no rows yet
        pass
    return "".join(parts)


def _name(result: RunFacts) -> str:
    return f"{result.agent.name} on {result.description['env']}"


def _steps(result: RunFacts) -> int:
    newest = max((row["env_steps"] for row in result.history), default=0)
    return result.summary.get("env_steps", newest)


def _returns(result: RunFacts) -> str:
    summary = result.summary
    if summary.get("members"):
        return _population_returns(summary["members"], _varying_names(result)) + _unfinished_note(summary)
    if not summary and (found := _evaluation_row(result)):
        return _return_line(found["eval/return_mean"], found["eval/return_std"], found["eval/episodes"])
    if summary.get("eval_return_mean") is None:
        return "not evaluated"
    line = _return_line(summary["eval_return_mean"], summary["eval_return_std"], summary["eval_episodes"])
    return line + _unfinished_note(summary)


def _return_line(mean: float, std: float, episodes: int) -> str:
    return f"return {mean:.3f} ± {std:.3f} over {episodes} episodes"


def _evaluation_row(result: RunFacts) -> Mapping[str, Any] | None:
    """The row of the evaluation of an earlier checkpoint, of which there is no summary; None for a population."""
    rows = (row for row in reversed(result.history) if "eval/episodes" in row and "member" not in row)
    newest = next(rows, None)
    return newest if newest and newest["env_steps"] == _steps(result) else None


def _unfinished_note(summary: Mapping[str, Any]) -> str:
    """Episodes that did not end, in brackets; a summary of an earlier version has no number of them."""
    unfinished = summary.get("eval_unfinished", 0)
    return f" ({unfinished} cut at {summary['eval_longest_episode']:,} steps)" if unfinished else ""


def _population_returns(members: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Mean and range of a population, diverged members included, and the best of the others."""
    sound = [i for i, member in enumerate(members) if not member["diverged"]] or list(range(len(members)))
    returns = [member["eval_return_mean"] for member in members]
    best = max(sound, key=lambda i: members[i]["eval_return_mean"])
    chosen = [f"seed {members[best]['seed']}"]
    chosen += [f"{name}={members[best][name]:.6g}" for name in names]
    diverged = sum(member["diverged"] for member in members)
    return (
        f"{len(members)} members{f', {diverged} diverged' if diverged else ''}: "
        f"mean {_number(sum(returns) / len(returns))} ({_number(min(returns))} to {_number(max(returns))}); "
        f"best: member {best} ({', '.join(chosen)}), {_number(members[best]['eval_return_mean'])}"
    )


def _varying_names(result: RunFacts) -> list[str]:
    """The tunable numbers in which the members of a population differ."""
    values = {name: {member.get(name) for member in result.summary["members"]} for name in result.agent.hyper}
    return [name for name, different in values.items() if len(different) > 1]


def _number(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3f}"


def _members(members: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    rows: list[tuple[str, ...]] = [("member", "seed", *names, "return")]
    for i, member in enumerate(members[:MAX_ROWS]):
        outcome = "diverged" if member["diverged"] else _number(member["eval_return_mean"])
        rows.append((str(i), str(member["seed"]), *(f"{member[name]:.6g}" for name in names), outcome))
    if len(members) > MAX_ROWS:
        rows.append((f"and {len(members) - MAX_ROWS} more",))
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """HTML of rows of cells."""
    cells = ("".join(f'<td style="text-align:left">{html.escape(cell)}</td>' for cell in row) for row in rows)
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"
