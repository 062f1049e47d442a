"""Matches and ratings in the shell: what is printed, what is kept for it, and one line for every mistake."""

import itertools
import json
import pathlib
import re
import shutil
import types

import jax
import numpy as np
import pytest
from PIL import Image

import envs_jax
import podracer
from podracer.cli import elo
from podracer.evaluation import matches
from tests.support import harness
from tests.support.shell import complaint, run

TRAIN = (
    "train alphazero tic_tac_toe --num-envs 4 --eval-episodes 4 --agent.rollout-length 5 --agent.hidden-sizes 4 "
    "--agent.simulations 2 --agent.n-step 2 --agent.batch-size 8 --agent.replay-min-size 40 --quiet"
)
TOTAL = 400
"""Two rollouts or three are a tenth of it."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("games") / "ttt"
    assert run(f"{TRAIN} --total-steps {TOTAL} --checkpoint-every {TOTAL // 5} --run-dir {directory}") == 0
    return directory


@pytest.fixture
def here(trained, monkeypatch):
    """The run is `ttt`; there are an empty directory and one with another program's files."""
    monkeypatch.chdir(trained.parent)
    for name in ("empty", "other"):
        pathlib.Path(name).mkdir(exist_ok=True)
    pathlib.Path("other/config.json").write_text("{}")
    return trained


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train alphazero catch", "alphazero plays board games against itself, and catch has one player; use muzero"),
        ("train alphazero envpool:CartPole-v1", "and envpool:CartPole-v1 has one player; use muzero"),
        ("train alphazero gymnasium:CartPole-v1", "and gymnasium:CartPole-v1 has one player; use muzero"),
        ("train alphazero catch --arch sebulba", "catch has one player; use muzero"),
        ("train muzero pendulum", "; muzero searches among Discrete ones: use ppo or vtrace."),
        ("train muzero gymnasium:Pendulum-v1", "; muzero searches among Discrete ones: use ppo or vtrace."),
        ("train ppo tic_tac_toe", "tic_tac_toe is a game for two, and ppo cannot play against itself"),
        ("train alphazero tic_tac_toe --agent.simulations 0", "AlphaZeroConfig.simulations=0: must be at least 1."),
        ("train alphazero tic_tac_toe --agent.max-depth 0", "AlphaZeroConfig.max_depth=0: must be at least 1."),
        ("train alphazero tic_tac_toe --agent.considered 0", "AlphaZeroConfig.considered=0: must be at least 1."),
        ("train alphazero tic_tac_toe --agent.search mcts", "invalid choice 'mcts' for argument '--agent.search'"),
        ("train muzero catch --agent.simulations 0", "MuZeroConfig.simulations=0: must be at least 1."),
        ("train muzero catch --agent.max-depth 0", "MuZeroConfig.max_depth=0: must be at least 1."),
        ("train muzero catch --agent.considered 0", "MuZeroConfig.considered=0: must be at least 1."),
        ("eval nowhere --opponent random", "nowhere holds no run: there is no config.json in it."),
        ("elo", "elo needs one or more run directories."),
        ("elo nowhere", "nowhere holds no run: there is no config.json in it."),
    ],
)
def test_mistakes_get_one_line(command, message, capsys):
    assert message in complaint(capsys, command)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("eval ttt --step 17", "no checkpoint 17 in "),
        ("eval ttt --opponent nobody", "no player is called 'nobody'; there are random, tactical, perfect, mcts:SIM"),
        ("eval ttt --opponent mcts:0", "no player is called 'mcts:0'; there are random, tactical"),
        ("eval ttt --opponent nowhere@3", "no player is called 'nowhere@3'; there are random, tactical"),
        ("eval ttt --opponent empty", "empty holds no run: there is no config.json in it."),
        ("eval ttt --opponent other", "other holds no run of podracer"),
        ("eval ttt --opponent ttt@17", "no checkpoint 17 in "),
        ("eval ttt --opponent ttt@last", "no player is called 'ttt@last'; "),
        ("eval ttt --opponent random --games 3", "games=3 must be an even number, so that both"),
        ("eval ttt --opponent random --episodes 0", "games=0 must be an even number, so that both"),
        ("eval ttt --opponent random --seed 2147483648", "seed=2147483648: must be 0 to 2,147,483,647."),
        ("eval ttt --opponent random --simulations -1", "simulations=-1: must be at least 0, which is the network's"),
        ("eval ttt --opponent random --member 1", "member=1: this run has members 0 to 0."),
        ("eval ttt --opponent random --greedy False", "--greedy is for the policy alone; leave out --opponent"),
        ("eval ttt --opponent random --gif x.gif", "--gif shows the policy alone; leave out --opponent"),
        ("elo empty", "empty holds no run: there is no config.json in it."),
        ("elo ttt ttt", " is there twice."),
        ("elo ttt@17", "no checkpoint 17 in "),
        ("elo ttt@best --seed 2147483647", "--seed 2147483647: must be 0 to 2,147,483,646, because each match has the"),
        ("elo ttt@best --output x.png", "--output: a picture is of the snapshots of run directories, and none"),
        ("elo ttt --games 3", "games=3 must be an even number, so that both"),
        ("elo ttt --simulations -1", "simulations=-1: must be at least 0"),
    ],
)
def test_mistakes_about_a_run_get_one_line(command, message, here, capsys):
    assert message in complaint(capsys, command)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["eval ttt --opponent empty", "elo ttt@best empty"])
def test_runs_of_two_games_do_not_meet(command, here, capsys, monkeypatch):
    load, other = podracer.load, types.SimpleNamespace(environment=envs_jax.make("connect_four"))
    monkeypatch.setattr(podracer, "load", lambda path, **rest: other if path.name == "empty" else load(path, **rest))
    assert complaint(capsys, command) == "empty is of connect_four, not of tic_tac_toe.\n"


@pytest.mark.slow
def test_names_of_players(here):
    path = pathlib.Path("ttt")
    assert elo.parse_name("ttt") == elo.parse_name("ttt/") == (path, None, False, None)
    assert elo.parse_name("ttt@100") == (path, 100, False, None)
    assert elo.parse_name("ttt@best") == (path, None, True, None)
    assert elo.parse_name("ttt:0") == (path, None, False, 0)
    assert elo.parse_name("ttt@100:25") == (path, 100, False, 25)
    assert elo.parse_name("random") is elo.parse_name("mcts:25") is elo.parse_name("nowhere@3:4") is None
    pathlib.Path("a@1:2").mkdir(exist_ok=True)
    assert elo.parse_name("a@1:2") == (pathlib.Path("a@1:2"), None, False, None)
    assert elo.parse_name("a@1:2@3:4") == (pathlib.Path("a@1:2"), 3, False, 4)


@pytest.mark.slow
def test_a_match_is_told_in_words_and_numbers(here, capsys):
    assert run("eval ttt --opponent random --games 12 --simulations 0") == 0
    out, err = capsys.readouterr()
    assert err == ""
    number = r"([\d.]+)"
    found = re.fullmatch(
        rf"ttt against random: {number}% of the points \(95% interval {number}% to {number}%\) in 12 games; moving first "
        r"(\d) won, (\d) drawn, (\d) lost; second (\d) won, (\d) drawn, (\d) lost\n",
        out,
    )
    assert found, out
    mean, low, high = map(float, found.groups()[:3])
    first, second = (tuple(map(int, found.groups()[i : i + 3])) for i in (3, 6))
    assert sum(first) == sum(second) == 6
    assert 0 <= low <= mean <= high <= 100
    assert mean == pytest.approx(100 * (first[0] + second[0] + 0.5 * (first[1] + second[1])) / 12, abs=0.06)


# What a run keeps for its history of players.


def newest(directory, folder="checkpoints"):
    return max(int(path.name) for path in (directory / folder).iterdir())


@pytest.mark.slow
def test_a_game_keeps_what_acted_at_every_tenth(trained):
    result = podracer.load(trained)
    steps = result.snapshots()
    assert [step // (TOTAL // 10) for step in steps] == list(range(1, 11))
    assert steps[-1] == newest(trained)
    last, before, own = result.actor_params(step=steps[-1]), result.actor_params(step=steps[0]), result.actor_params()
    harness.assert_same(last, own)
    assert int(before.version) < int(own.version)
    assert any(np.any(x != y) for x, y in zip(jax.tree.leaves(before.params), jax.tree.leaves(own.params)))
    harness.assert_same(result.player(step=steps[0]).params, before)
    size = sum(path.stat().st_size for path in (trained / "snapshots" / str(steps[0])).rglob("*") if path.is_file())
    assert size < 100_000, "what acts, without the optimiser and the replay"


@pytest.mark.slow
def test_a_run_that_goes_on_makes_its_snapshots_again(trained, tmp_path):
    """Snapshots after the checkpoint at which the run resumes are of another future."""
    directory = pathlib.Path(shutil.copytree(trained, tmp_path / "run"))
    steps = podracer.load(trained).snapshots()
    shutil.rmtree(directory / "checkpoints" / str(newest(directory)))
    begin = newest(directory)
    assert sum(step > begin for step in steps) >= 2
    # What is there of later steps is not of this run any more.
    for step in steps[-2:]:
        shutil.rmtree(directory / "snapshots" / str(step))
        shutil.copytree(trained / "snapshots" / str(steps[0]), directory / "snapshots" / str(step))
    assert run(f"resume {directory} --quiet") == 0
    expected, found = podracer.load(trained), podracer.load(directory)
    assert expected.snapshots() == found.snapshots() == steps
    for step in steps:
        harness.assert_same(found.actor_params(step=step), expected.actor_params(step=step))


@pytest.mark.slow
def test_a_run_that_is_stopped_and_trained_further_has_all_its_snapshots(trained, tmp_path):
    directory = tmp_path / "run"
    names = dict(zip(("agent", "environment"), TRAIN.split()[1:3]))
    stored = json.loads((trained / "config.json").read_text())
    settings = {name: stored["run"][name] for name in ("total_steps", "num_envs", "eval_episodes", "eval_every")}
    stops = lambda steps, row: steps >= 170  # noqa: E731
    podracer.train(**names, config=stored["agent_config"], run_dir=directory, log=stops, progress=False, **settings)
    kept = podracer.load(directory).snapshots()
    steps = podracer.load(trained).snapshots()
    assert kept == steps[: len(kept)]
    assert 3 <= len(kept) < 10
    assert run(f"resume {directory} --quiet") == 0
    assert podracer.load(directory).snapshots() == steps
    assert run(f"resume {directory} --quiet --total-steps {2 * TOTAL}") == 0
    further = podracer.load(directory).snapshots()
    assert further[:10] == steps
    assert [step // 80 for step in further[10:]] == list(range(6, 11)), "tenths of the longer run"


@pytest.fixture
def strengths(monkeypatch):
    """Matches are not played: a snapshot beats an earlier one and random play in 3 games of 4, and loses to tactics."""

    def play(environment, a, b, played, seed):
        steps = [re.search(r"@(\d+)", x.name) for x in (a, b)]
        rank = [10_000 if x.name == "tactical" else int(step[1]) if step else 0 for x, step in zip((a, b), steps)]
        scores = np.tile([[1.0, 1.0], [0.5, 0.5]], (played // 4, 1))
        return matches.Match((a.name, b.name), scores if rank[0] > rank[1] else 1.0 - scores)

    monkeypatch.setattr(elo.matches, "play", play)


@pytest.mark.slow
def test_ratings_are_a_table_and_a_picture(here, strengths, capsys):
    steps = podracer.load("ttt").snapshots()
    assert run("elo ttt --games 40") == 0
    out, err = capsys.readouterr()
    lines = [re.fullmatch(r"(\S+) +(-?\d+)  \((-?\d+) to (-?\d+)\)", line) for line in out.splitlines()]
    assert all(lines), out
    rows = [(line[1], *map(int, line.groups()[1:])) for line in lines]
    names = [name for name, *_ in rows if name != "random"]
    assert names == ["tactical", *(f"ttt@{step}" for step in reversed(steps))]
    assert [elo for _, elo, *_ in rows] == sorted((elo for _, elo, *_ in rows), reverse=True)
    assert ("random", 0, 0, 0) in rows
    assert all(low <= elo <= high for _, elo, low, high in rows)
    *played, picture = err.splitlines()
    assert [line.split(":")[0] for line in played] == [
        "tactical against random",
        *(f"ttt@{step} against tactical" for step in steps),
        *(f"ttt@{later} against ttt@{earlier}" for earlier, later in itertools.pairwise(steps)),
    ]
    assert picture == "picture: ttt/elo.png"
    with Image.open("ttt/elo.png") as image:
        assert image.size == (840, 504)


@pytest.mark.slow
def test_several_runs_and_players_by_name(here, strengths, capsys):
    shutil.copytree("ttt", "again")
    assert run("elo ttt again --games 40 --json") == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)) == 22
    assert err.endswith("picture: elo.png\n")
    first = podracer.load("ttt").snapshots()[0]
    assert run(f"elo ttt@best:0 again@{first}:4 --games 40") == 0
    out, err = capsys.readouterr()
    names = {"random", "tactical", "ttt@best:0", f"again@{first}:4"}
    assert {line.split()[0] for line in out.splitlines()} == names
    assert "picture" not in err


@pytest.mark.slow
def test_ratings_are_of_games_that_were_played(here, capsys):
    assert run("elo ttt:4 --games 40 --json") == 0
    best, worst, last = json.loads(capsys.readouterr().out)
    assert (best["name"], worst["name"], last["name"]) == ("tactical", "ttt:4", "random")
    assert run("eval ttt --opponent ttt@best:1 --games 4 --json") == 0
    figures = json.loads(capsys.readouterr().out)
    counts = figures["won_drawn_lost"]
    assert counts["all"] == [a + b for a, b in zip(counts["first"], counts["second"])]
    assert sum(counts["all"]) == 4
    assert figures["mean"] == (counts["all"][0] + 0.5 * counts["all"][1]) / 4
