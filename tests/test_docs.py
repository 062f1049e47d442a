"""The guides: what they link to is there, and what they show runs, or is parsed, as it stands."""

import importlib
import json
import pathlib
import re
import sys
import types

import pytest

import podracer
import podracer.cli.bench
import podracer.cli.elo
import podracer.cli.results
import podracer.cli.serve
import podracer.cli.suite
import podracer.cli.train
import podracer.sweeps.sweep
from tests.support import tiers

ROOT = pathlib.Path(podracer.__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "generated" not in page.relative_to(DOCS).parts)
LONG = ("adapters", "deployment", "meta_gradients", "populations", "remote", "search", "sweeps", "tasks")
"""Guides that run nightly alone: each takes several trainings."""
GUIDES = [page for page in PAGES if "```python" in page.read_text()]


def name_of(page):
    return page.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/")


def lines_of(page, *languages):
    """The lines of a page, of which those outside of blocks in these languages are empty."""
    lines, language = [], None
    for line in page.read_text().splitlines():
        fence = line.startswith("```")
        lines.append(line if language in languages and not fence else "")
        if fence:
            language = line[3:].strip() if language is None else None
    return lines


def code_of(page):
    """The Python of a page, at the lines where it is in the page."""
    return compile("\n".join(lines_of(page, "python")), str(page), "exec")


def test_there_are_guides():
    runnable = {
        "start",
        "environments",
        "add_agent",
        "add_network",
        "resume",
        "sweeps",
        "tasks",
        "deployment",
        "atari",
        "search",
        "remote",
    }
    assert {name_of(page) for page in GUIDES} >= {"index", *runnable}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_parses_and_links_to_what_is_there(page):
    code_of(page)
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


class Parsed(BaseException):
    """Raised when a command line has been parsed."""


def command_lines(page):
    """The `podracer` commands of a page, with an example where they leave something open."""
    for line in "\n".join(lines_of(page, "", "sh")).replace("\\\n", "").splitlines():
        for part in re.split(r"\s{2,}|[;&>#]", line):
            found = re.match(r"(?:until |srun |[A-Z_]+=\S+ )?podracer(?: launch .* --)? (.*)", part.strip())
            if found and not re.search(r"\||\b(AGENT|ENV|DIR|RUN_DIR|PATTERN|TASK)\b", found[1]):
                yield re.sub(r"\$\w+", "1", found[1]).replace("[", "").replace("]", "").split()


COMMANDS = dict.fromkeys(
    " ".join(line) for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES) for line in command_lines(page)
)


def test_there_are_commands():
    assert len(COMMANDS) > 25
    assert "train ppo cartpole --topology pod" in COMMANDS, "behind the launcher's --"
    assert {command.split()[0] for command in COMMANDS} >= {"train", "resume", "eval", "export", "plot", "suite"}


@pytest.mark.parametrize("typed", COMMANDS)
def test_a_command_in_a_guide_can_be_typed(typed, monkeypatch, capsys):
    def parse(original):
        def and_stop(*args):
            original(*args)
            raise Parsed

        return and_stop

    for module in (
        podracer.cli.bench,
        podracer.cli.elo,
        podracer.cli.results,
        podracer.cli.serve,
        podracer.cli.suite,
    ):
        monkeypatch.setattr(module, "parse", parse(module.parse))
    command, *rest = typed.split()
    if command == "train":
        podracer.cli.train.settings(rest)
    elif command == "resume":
        podracer.cli.train.parse(podracer.cli.train.ResumeArguments, rest, "podracer resume")
    elif command == "sweep":
        monkeypatch.setattr(podracer.sweeps.sweep.Sweeper, "run", parse(lambda sweeper: None))
        with pytest.raises(Parsed):
            podracer.cli.run([command, *rest])
    elif command == "suite" and rest[0] != "report":
        assert podracer.cli.run([command, *rest, "--dry-run"]) == 0, capsys.readouterr().err
    elif command == "agents":
        assert not rest
    else:
        with pytest.raises(Parsed):
            podracer.cli.run([command, *rest])


class Tracker:
    """Weights & Biases as far as a guide uses it: a step is a row, and one before the newest is dropped."""

    def __init__(self):
        self.runs = []

    def init(self, *, project, name=None, reinit=None):
        if not self.runs or reinit == "create_new":
            self.runs.append(
                types.SimpleNamespace(name=name, rows={}, define_metric=lambda *_, **__: None, finish=print)
            )
            self.runs[-1].log = lambda row, step=None, rows=self.runs[-1].rows: self.add(rows, row, step)
        return self.runs[-1]

    @staticmethod
    def add(rows, row, step):
        newest = max(rows, default=-1)
        step = newest + 1 if step is None else step
        if step >= newest:
            rows[step] = rows.get(step, {}) | row


def test_a_tracker_keeps_all_rows_of_a_population(monkeypatch):
    """The guide's own lines, of members whose steps differ and whose evaluations come at the steps of the slowest."""
    tracker, logged = Tracker(), []
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    for update in range(1, 4):
        for member in range(3):
            logged.append(
                {"env_steps": 100 * update - 9 * member, "updates": update, "member": member, "loss/total": 1.0}
            )
        for member in range(3):
            logged.append(
                {"env_steps": 100 * update - 18, "updates": update, "member": member, "eval/return_mean": 2.0}
            )
    (block,) = [block for block in (DOCS / "sweeps.md").read_text().split("```") if "import wandb" in block]
    train = lambda *_, log, **__: [log(row["env_steps"], row) for row in logged]  # noqa: E731
    exec(block.removeprefix("python"), {"podracer": types.SimpleNamespace(train=train)})
    assert [run.name for run in tracker.runs] == ["member 0", "member 1", "member 2"]
    for member, run in enumerate(tracker.runs):
        assert list(run.rows.values()) == [row for row in logged if row["member"] == member]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", tiers.all_but([page for page in GUIDES if name_of(page) not in LONG], GUIDES), ids=name_of
)
def test_a_guide_runs(page, monkeypatch, tmp_path):
    import jax

    monkeypatch.setitem(sys.modules, "wandb", Tracker())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as a user has it
        exec(code_of(page), {"__name__": page.stem})


def test_the_first_screen_of_the_readme_shows_what_it_says():
    """Two commands, a curve and a trained policy, in words that need no glossary."""
    import json

    from PIL import Image

    screen = (ROOT / "README.md").read_text().partition("\n## ")[0]
    install, train = (line.partition("#")[0].strip() for line in screen.split("```")[1].strip().splitlines())
    assert install == "pip install ."
    assert len((ROOT / "README.md").read_bytes()) <= 7_000
    podracer.cli.train.settings(train.removeprefix("podracer train ").split())
    result = json.loads((ROOT / "benchmarks" / "results" / "learning" / "cartpole-ppo.json").read_text())
    assert train == result["command"]
    assert len(result["seeds"]) == 3
    assert all(seed["mean"] == 500 and round(seed["env_steps"], -4) == 500_000 for seed in result["seeds"])
    seconds = [seed["train_seconds"] for seed in result["seeds"]]
    (said,) = re.findall(r"train in \[<!-- [\w: -]+ -->([\d.]+) to ([\d.]+) seconds<!-- end -->\]", screen)
    assert [float(each) for each in said] == pytest.approx([min(seconds), max(seconds)], abs=0.051)
    curve, policy = re.findall(r"!\[[^\]]+\]\(((?!https:)[^)]+)\)", screen)
    assert curve == "benchmarks/results/learning/cartpole-ppo.png"
    with Image.open(ROOT / curve) as drawn, Image.open(ROOT / policy) as played:
        assert drawn.size[0] > 400
        assert played.n_frames > 50
    script = (DOCS / "pictures.py").read_text()
    for picture in ("before-and-after.gif", "search-bars.png", "search-tree.png"):
        assert f'IMAGES / "{picture}"' in script, "made by `make pictures`"
        assert (DOCS / "images" / picture).exists()
    assert policy == "docs/images/before-and-after.gif"
    assert "docs/pictures.py" in (ROOT / "Makefile").read_text().split("\npictures:")[1]
    words = re.compile(r"\b(XLA|vmap\w*|pmap|jit|gRPC|HBM|shards?|lanes?|rollouts?|StableHLO|lockstep)\b")
    assert words.findall(screen) == []


def test_pages_have_the_results_that_are_committed(monkeypatch):
    """`python benchmarks/readme.py` writes them, from benchmarks/results."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # as `python benchmarks/readme.py` has it
    for name in [name for name in sys.modules if name.split(".")[0] in ("interconnects", "learn", "pages", "readme")]:
        monkeypatch.delitem(sys.modules, name)
    learn, readme = importlib.import_module("learn"), importlib.import_module("readme")
    assert {page.stem for page in (DOCS / "results").glob("*.md")} == {"index", *readme.RESULT_PAGES}
    used = {}
    for page, module in readme.PAGES.items():
        text = page.read_text()
        assert readme.filled(page) == text
        assert "<!-- table" in text
        used.setdefault(module, set()).update(re.findall(r"<!-- \w+: ([\w-]+) -->", text))
    for module, names in used.items():
        assert names == {*module.TABLES, *module.VALUES}, module
    assert {line.split("`")[1] for line in learn.table()[2:]} <= {f"train {row.arguments}" for row in learn.ROWS}


def test_the_glossary_is_short():
    terms = re.findall(r"^\| \*\*(.+?)\*\* \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    assert 0 < len(terms) <= 12


def test_figures_of_searches_are_those_that_are_committed():
    """The table of ADR 20, which no script writes."""
    results = {"search": json.loads((ROOT / "benchmarks" / "results" / "search.json").read_text())}
    decision = (DOCS / "adr" / "0020-own-tree-search.md").read_text()
    assert results["search"]["commit"] in decision
    for row in results["search"]["results"]:
        cells = [
            "{1:.1f} ({0:.1f} to {2:.1f})".format(*row["ratios"][pair])
            for pair in ("puct / muzero_policy", "puct / mctx without draws", "gumbel / gumbel_muzero_policy")
        ]
        assert " | ".join([f"| {row['N']}, {row['A']}", *cells]) + " |" in decision
