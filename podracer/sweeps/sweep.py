"""Entry point: `sweep` trains configurations of tunable numbers side by side, and the best one again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from podracer import configs
from podracer.environments import task_lists
from podracer.errors import Interrupted, TrainingDivergedError
from podracer.result.result import Result
from podracer.run import checkpoint, rundir
from podracer.run.config import RunConfig
from podracer.run.record import Experiment
from podracer.sweeps import plan as plans
from podracer.sweeps import table
from podracer.sweeps.plan import Member, Plan
from podracer.sweeps.result import FILE, Sweep
from podracer.system import console, files
from podracer.system.lock import RunLock
from podracer.training import presets
from podracer.training.resolve import resolve
from podracer.training.train import train
from podracer.types import Agent, Environment, HostEnvironments

OWN = {
    "population": "members= is the number of configurations",
    "member_seeds": "seeds= is the number of seeds of each",
    "run_dir": "use out=",
    "resume": "what is in the directory goes on anyway",
    "topology": "a sweep runs on the devices of one process",
    "pbt": "members of a sweep do not copy each other",
    "pbt_dir": "members of a sweep do not copy each other",
    "remote": "a sweep steps its environments itself",
}
"""Settings of `train` that a sweep sets itself, with advice for users."""


def sweep(
    agent: str | Agent,
    environment: str | Environment | HostEnvironments | Any,
    *,
    hyper: Mapping[str, Any],
    members: int | None = None,
    seeds: int = 3,
    seed: int = 0,
    at_once: int | None = None,
    out: str | pathlib.Path | None = None,
    progress: bool = True,
    **settings: Any,
) -> Sweep:
    """Trains an agent with many values of its tunable numbers side by side, and the best ones again on fresh seeds.

        rates = podracer.log_uniform(1e-4, 1e-2)
        print(podracer.sweep("vtrace", "catch", hyper={"learning_rate": rates}, members=16, total_steps=100_000))

    Lists make a grid; ranges are drawn from `seed`. The score of a configuration is the mean over its seeds of the last
    evaluation. The best of many scores is too high by chance, so the winner is trained and evaluated once more, with
    seeds that had no part in the choice.

    Args:
      agent: as in `podracer.train`.
      environment: as in `podracer.train`.
      hyper: for each tunable number a list of values, one value, `podracer.log_uniform(low, high)` or
        `podracer.uniform(low, high)`.
      members: number of configurations; may be left out for a grid, whose points they are.
      seeds: number of seeds that every configuration is trained with, from `seed` on.
      seed: of the draws, and the first one of training.
      at_once: members (configurations times seeds) side by side in one program. More than these are trained in waves.
        What memory allows if None: at most 64 on a CPU, and 1 with host environments.
      out: directory of `sweep.json`, `sweep.png` and a run directory for each wave; a sweep that is there goes on.
        Nothing is written if None.
      progress: as in `podracer.train`.
      **settings: other settings of `podracer.train`, for all members.

    Raises:
      ValueError: for anything wrong in what was asked, or another sweep in the directory.
      Interrupted: where Ctrl-C or SIGTERM stopped a wave.
      TrainingDivergedError: where all configurations have diverged.
      OSError: and all else that `podracer.train` raises.
    """
    for name, advice in OWN.items():
        if name in settings:
            raise ValueError(f"{name} is not for a sweep: {advice}.")
    plan = plans.make(hyper, members, seeds, seed)
    shown = {name: value for name, value in settings.items() if name != "log"}
    return Sweeper(
        agent, environment, plan, at_once, out, progress, settings, python_line(agent, environment, shown)
    ).run()


def python_line(agent: Any, environment: Any, settings: Mapping[str, Any]) -> Callable[[Mapping[str, float]], str]:
    """The line of Python that trains a configuration; objects that have no literal are `...`."""

    def literal(value: Any) -> str:
        plain = isinstance(value, str | int | float | dict | list | tuple) or dataclasses.is_dataclass(value)
        return repr(value) if plain or value is None else "..."

    def line(hyper: Mapping[str, float]) -> str:
        words = [literal(agent) if isinstance(agent, str) else "...", literal(environment)]
        words += [f"{name}={literal(value)}" for name, value in settings.items()]
        return f"podracer.train({', '.join(words)}, hyper={dict(hyper)!r})"

    return line


class Sweeper:
    """Trains the waves of a plan, chooses, and trains the winner again.

    Args:
      agent: as in `sweep`.
      environment: as in `sweep`.
      plan: the configurations.
      at_once: as in `sweep`.
      out: as in `sweep`.
      progress: as in `sweep`.
      settings: of `train`.
      command: the line that trains a configuration.

    Raises:
      ValueError: for a plan that does not fit the agent, or the directory of another sweep.
    """

    def __init__(
        self,
        agent: Any,
        environment: Any,
        plan: Plan,
        at_once: int | None,
        out: str | pathlib.Path | None,
        progress: bool,
        settings: Mapping[str, Any],
        command: Callable[[Mapping[str, float]], str],
    ):
        if at_once is not None and at_once < 1:
            raise ValueError(f"at_once={at_once}: must be at least 1.")
        self._agent, self._environment, self._plan, self._command = agent, environment, plan, command
        self._progress, self._settings = progress, dict(settings)
        self._out = None if out is None else files.local(out)
        stored = _stored(self._out)
        # A sweep that goes on has its own lanes and shards, which the devices of now may not suggest.
        layout = {n: stored["settings"]["run"].get(n) for n in ("num_envs", "num_shards")} if stored else {}
        own = {n: value for n, value in layout.items() if settings.get(n) is None}
        single = _single(agent, environment, {**settings, **own})
        plans.check(plan, single)
        if at_once and at_once > 1 and single.run.arch == "sebulba":
            raise ValueError(f"at_once={at_once}: Sebulba trains one member at a time; leave it out.")
        # All waves have the lanes and shards of a run of one member, however many devices a wave fills.
        self._settings |= {"num_envs": single.run.num_envs, "num_shards": single.run.num_shards}
        self._description = single.description | _source(settings.get("init_from"))
        most: int = at_once or stored.get("at_once") or plans.at_once(single)
        self._at_once = min(most, len(plan.members))
        self._trained: list[table.Trained] = []
        self._diverged: TrainingDivergedError | None = None
        self._is_recut = bool(stored) and stored["at_once"] != self._at_once
        self._was_complete = bool(stored.get("complete")) and not self._is_recut
        if stored:
            self._check_same(stored)

    def _check_same(self, stored: Mapping[str, Any]) -> None:
        """Refuses the directory of another sweep."""
        before, now = (_comparable(x) for x in (stored, configs.to_json(self._sweep().to_json())))
        if any(map(checkpoint.has_checkpoints, self._stored_waves())):
            before["at_once"], now["at_once"] = stored["at_once"], self._at_once
        if different := configs.differences(before, now):
            raise ValueError(f"{self._out} holds another sweep: {'; '.join(different)}. Use another directory.")

    def run(self) -> Sweep:
        """Trains all that is left to train; returns the sweep as far as it came, if the user's `log` ended it."""
        if self._out:
            try:
                self._out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"cannot write to {self._out}: {error}.") from error
            if self._is_recut:
                for wave in self._stored_waves():
                    _remove(wave)
            if self._is_recut or not (self._out / FILE).exists():
                self._sweep().write()
        members = self._plan.members
        complete, _ = self._train("wave", members, self._trained)
        swept = self._sweep()
        if not complete:
            self._write(swept)
            return swept
        if swept.rows[0].mean is None:
            self._write(swept)
            raise TrainingDivergedError(
                f"all {len(members)} members of the sweep have diverged; lower the learning rates, or look at what the "
                "environment gives."
            ) from self._diverged
        best = self._plan.configurations.index(swept.best)
        again: list[table.Trained] = []
        complete, results = self._train("best", self._plan.fresh(best), again)
        if complete:
            (fresh,) = table.rows(self._plan.configurations, again)
            swept = dataclasses.replace(swept, fresh=fresh, results=results, command=self._command(swept.best))
        self._write(swept)
        return swept

    def _stored_waves(self) -> list[pathlib.Path]:
        """The run directories of waves that were begun."""
        return sorted(path for path in self._out.glob("wave-*") if path.is_dir()) if self._out else []

    def _write(self, swept: Sweep) -> None:
        """Writes the files, but not those of a part in place of a whole sweep's."""
        if swept.fresh or not self._was_complete:
            swept.write()

    def _sweep(self) -> Sweep:
        """The sweep so far."""
        rows = table.rows(self._plan.configurations, self._trained)
        return Sweep(self._plan, rows, at_once=self._at_once, settings=self._description, out=self._out)

    def _train(self, name: str, members: list[Member], trained: list[table.Trained]) -> tuple[bool, list[Result]]:
        """Trains members in waves, of whose members it adds the scores to `trained`.

        Returns:
          True unless the user's `log` ended it, and the runs.
        """
        waves, results = plans.waves(members, self._at_once), []
        for i, wave in enumerate(waves):
            if self._progress:
                console.say(f"{name} {i + 1} of {len(waves)}: {len(wave)} members at once")
            result = self._wave(f"{name}-{i}", wave)
            if result and not result.summary["complete"]:
                return False, results
            results += [result] if result else []
            own = wave[: len(members) - i * len(wave)]  # the rest of the last wave repeats its last member
            trained += [_trained(f"{name}-{i}", wave, j, result) for j in range(len(own))]
            if name == "wave":
                self._write(self._sweep())
        return True, results

    def _wave(self, name: str, wave: list[Member]) -> Result | None:
        """The run of a wave; None if all its members have diverged."""
        columns = {n: [self._plan.configurations[one.configuration][n] for one in wave] for n in self._plan.hyper}
        seeds = [one.seed for one in wave]
        alone = len(wave) == 1
        run: dict[str, Any] = {"population": len(wave), "seed": seeds[0]} | ({} if alone else {"member_seeds": seeds})
        hyper = {n: values[0] if alone else values for n, values in columns.items()}
        directory = self._out / name if self._out else None
        goes_on = directory is not None and (directory / "config.json").exists()
        settings = self._settings | run | {"hyper": hyper, "run_dir": directory, "resume": goes_on}
        try:
            return train(self._agent, self._environment, progress=self._progress, **settings)
        except TrainingDivergedError as error:
            console.say(f"{name}: no member is left. {error}")
            self._diverged = self._diverged or error
            return None
        except Interrupted as error:
            then = "the same sweep goes on from there" if self._out else "without out= nothing of the sweep is kept"
            raise Interrupted(error.result, error.signal, then) from None


def _single(agent: Any, environment: Any, settings: Mapping[str, Any]) -> Experiment:
    """The run of one member, resolved but not compiled."""
    environment = task_lists.text(environment)
    names = {item.name for item in dataclasses.fields(RunConfig)}
    run = {name: value for name, value in settings.items() if name in names}
    parts: dict[str, Any] = {name: settings.get(name) for name in ("config", "env_options", "network", "optimizer")}
    preset, protocol = settings.get("preset"), settings.get("protocol")
    if preset or protocol:
        config, env_options = parts["config"], parts["env_options"]
        merged = presets.merge_given(agent, environment, preset, protocol, config, run, env_options)
        parts |= {"config": merged.agent, "env_options": merged.env}
        run = dict(merged.run)
    return resolve(agent, environment, configs.from_json(RunConfig, run), wrap=settings.get("wrap", ()), **parts)


def _trained(name: str, wave: list[Member], place: int, result: Result | None) -> table.Trained:
    run = name if len(wave) == 1 else f"{name}:{place}"
    if result is None:
        return table.Trained(wave[place], None, 0.0, run)
    summary = result.summary
    own = {"diverged": False, **summary, **(summary["members"][place] if "members" in summary else {})}
    score = None if own["diverged"] else own["eval_return_mean"]
    return table.Trained(wave[place], score, summary["train_seconds"] / len(wave), run)


def _source(init_from: Any) -> dict[str, str]:
    """The part of a description that says where parameters come from; {} if nowhere."""
    if init_from is None:
        return {}
    path = init_from if isinstance(init_from, str | pathlib.Path) else init_from.run_dir
    return {"init_from": str(files.local(path).absolute()) if path else "a run without a directory"}


def _remove(wave: pathlib.Path) -> None:
    """Removes the directory of a wave that has nothing to go on with.

    Raises:
      ValueError: where another process trains it.
    """
    with contextlib.closing(RunLock(wave)) as lock:
        lock.take()
        shutil.rmtree(wave, ignore_errors=True)


def _stored(out: pathlib.Path | None) -> dict[str, Any]:
    """The `sweep.json` in a directory; {} if there is none.

    Raises:
      ValueError: for a file that is not JSON.
    """
    path = out / FILE if out else None
    if path is None or not path.exists():
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); restore it from a backup or use another directory.") from None


def _comparable(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `sweep.json` that decides its results, but for `at_once`."""
    free = ("podracer", "chosen", "hyper")
    settings = {name: value for name, value in stored["settings"].items() if name not in free}
    settings["run"] = {n: value for n, value in settings["run"].items() if n not in (*rundir.FREE_TO_CHANGE, "seed")}
    return {**stored["request"], **settings}
