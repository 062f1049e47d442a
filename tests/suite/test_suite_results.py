"""The result that is read from a run's files, and the report of several."""

import json

import numpy as np
import pytest
from PIL import Image

from podracer import atari
from podracer.atari import games
from podracer.run.rundir import write_json
from podracer.suite import collection, jobs, pictures, report, result
from podracer.suite.jobs import Job, Suite
from tests.support import fakes

SETTINGS = {"agent": "dqn", "preset": "fast_dqn", "protocol": "fast_dqn", "table": "nature"}
SUMMARY = {
    "complete": True,
    "updates": 7,
    "train_seconds": 100.0,
    "steps_per_second": 6_000.0,
    "devices": 1,
    "device": "cpu: cpu",
}


def run_directory(suite, job, rows, env_steps, **summary):
    """The files of a run that is complete."""
    directory = suite.run_dir(job)
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"env_st')
    write_json(directory / "config.json", {"env_options": {"frame_skip": 4}})
    write_json(directory / "summary.json", SUMMARY | {"env_steps": env_steps} | summary)


def evaluation(env_steps, mean):
    return {
        "env_steps": env_steps,
        "updates": 1,
        "eval/return_mean": mean,
        "eval/return_std": 1.0,
        "eval/episodes": 30,
        "eval/unfinished": 2,
    }


def training(env_steps, mean, count):
    return {"env_steps": env_steps, "updates": 1, "episode/return": mean, "episode/count": count}


ROWS = [
    training(100_000, -20.0, 50.0),
    {"env_steps": 150_000, "updates": 1, "loss": 1.0},  # no game ended
    evaluation(250_000, 3.0),
    training(300_000, -10.0, 80.0),
    evaluation(500_000, 9.3),
    training(500_000, 0.0, 60.0),
    training(500_100, 5.0, 10.0),
    evaluation(500_100, 8.0),
]


def read(tmp_path, protocol, rows=ROWS, game="Pong", **summary):
    table = atari.PROTOCOLS[protocol].table if protocol else "atari57"
    suite = Suite(tmp_path, SETTINGS | {"protocol": protocol, "table": table}, [game], [3], ["dqn", "--preset", "x"])
    (tmp_path / "runs").mkdir(parents=True)
    suite.note_start(suite.jobs[0])
    run_directory(suite, suite.jobs[0], rows, 500_100, **summary)
    return result.read(suite, suite.jobs[0])[0]


def test_seeds_side_by_side_have_a_result_each(tmp_path):
    """Each is of the rows of its member."""
    settings = SETTINGS | {"protocol": None, "table": None}
    suite = Suite(tmp_path, settings, ["minatar_breakout"], [3, 5], ["ppo"], side_by_side=True)
    (job,) = suite.jobs
    assert (job.name, suite.command(job)[-4:]) == ("minatar_breakout-3-5", ["2", "--member-seeds", "3", "5"])
    rows = [training(90, 8.0, 4.0) | {"member": 0}, training(90, 6.0, 4.0) | {"member": 1}]
    rows += [training(203, 9.0, 4.0) | {"member": 1}]  # it has taken more steps than the other, whose 200 are reported
    rows += [evaluation(100, 1.0) | {"member": 0}, evaluation(100, 2.0) | {"member": 1}]
    members = [{"diverged": False}] * 2
    run_directory(suite, job, [*rows, evaluation(200, 3.0) | {"member": 1}], 200, members=members)
    first, second = result.read(suite, job)
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert [one["training_last_100"][-1]["mean"] for one in (first, second)] == [8.0, 7.5]
    assert [one["seed"] for one in (first, second)] == [3, 5]
    assert [one["score"] for one in (first, second)] == [1.0, 3.0]
    assert [point["frames"] for point in second["evaluations"]] == [100, 200]
    assert first["frames_per_second"] == 3_000.0, "half of the program's"
    assert first["side_by_side"] == 2
    write_json(
        suite.run_dir(job) / "summary.json", SUMMARY | {"env_steps": 200, "members": [*members[1:], {"diverged": True}]}
    )
    first, second = result.read(suite, job)
    assert isinstance(first, dict)
    assert str(second).startswith("its parameters became infinite or NaN"), "though it has an evaluation of before"


def test_a_result_has_what_its_run_did(tmp_path):
    found = read(tmp_path, "fast_dqn")
    assert (found["env_steps"], found["frames"], found["frames_per_second"]) == (500_100, 2_000_400, 24_000.0)
    assert found["evaluations"][1] == {"frames": 2_000_000, "mean": 9.3, "std": 1.0, "episodes": 30, "unfinished": 2}
    assert (found["best"], found["final"], found["score"]) == (9.3, 8.0, 9.3)
    assert found["hns"] == pytest.approx(1.0), "a human's score in Nature's table"
    assert found["command"].startswith("podracer train dqn envpool:Pong-v5 --preset x --seed 3 --run-dir ")
    # The newest 100 games: 10 of the last row, 60 before, 30 of the 80 before these.
    assert found["training_last_100"] == [
        {"frames": 2_000_400, "mean": pytest.approx((10 * 5 - 30 * 10) / 100), "episodes": 100}
    ]
    # The rest of 400 frames is no million of its own.
    assert found["training"] == [
        {"frames": 1_000_000, "mean": -20.0, "episodes": 50},
        {"frames": 2_000_000, "mean": pytest.approx((80 * -10 + 10 * 5) / 150), "episodes": 150},
    ]
    assert {"commit", "versions", "machine"} <= set(found)
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("protocol", "score"),
    [("impala", 8.0), (None, 8.0), ("machado", -2.5), ("dopamine", -5.0)],
)
def test_the_score_is_what_the_protocol_reports(tmp_path, protocol, score):
    assert read(tmp_path, protocol)["score"] == pytest.approx(score)


def test_points_of_training_at_which_the_figure_is_reported(tmp_path):
    suite = Suite(tmp_path, SETTINGS | {"protocol": "machado", "table": "atari57"}, ["Pong"], [0], ["dqn"])
    run_directory(suite, suite.jobs[0], [training(2_000_000, 1.0, 200.0), training(4_000_000, 3.0, 50.0)], 4_000_000)
    assert result.read(suite, suite.jobs[0])[0]["training_last_100"] == [
        {"frames": 10_000_000, "mean": 1.0, "episodes": 100},
        {"frames": 16_000_000, "mean": 2.0, "episodes": 100},
    ]


def test_a_game_without_a_human_score_has_no_normalised_one(tmp_path):
    assert read(tmp_path, "nature", game="Skiing")["hns"] is None


def test_runs_without_a_result(tmp_path):
    with pytest.raises(ValueError, match="not complete"):
        read(tmp_path / "a", "impala", complete=False)
    reason = read(tmp_path / "b", "machado", rows=[evaluation(1, 1.0)])
    assert str(reason) == "it has no games of the kind that protocol 'machado' reports; train for longer."
    assert str(read(tmp_path / "d", None, rows=[training(1, 1.0, 1.0)])) == "it has no evaluation; train for longer."
    suite = Suite(tmp_path / "c", SETTINGS, ["Pong"], [0], ["dqn"])
    with pytest.raises(ValueError, match="not complete"):
        result.read(suite, suite.jobs[0])


def test_the_commit_of_a_result_is_the_one_that_its_run_began_with(tmp_path, monkeypatch):
    commits = iter("abcd")
    monkeypatch.setattr(jobs, "commit", lambda: next(commits))
    assert read(tmp_path, "fast_dqn")["commit"] == "a"
    suite = fakes.FakeSuite(tmp_path, ["Pong", "Boxing"], [3])
    suite.note_start(suite.jobs[0])
    assert jobs.read_json(suite.start_path(suite.jobs[0])) == {"commit": "a"}, "it goes on"
    for commit in "bc":
        suite.note_start(suite.jobs[1])
        assert jobs.read_json(suite.start_path(suite.jobs[1])) == {"commit": commit}, "it has not begun to train"


def test_the_commit_is_that_of_the_library():
    commit = jobs.commit()
    assert commit is None or len(commit.removesuffix("-dirty")) == 40


def fill(directory, names, seeds, score=lambda job: 1.0, settings=SETTINGS, skip=()):
    """A suite with results for all jobs but some."""
    suite = fakes.FakeSuite(directory, names, seeds, settings)
    suite.register()
    for job in suite.jobs:
        if job not in skip:
            value = score(job)
            points = [{"frames": at, "mean": value * at / 2e6} for at in (1_000_000, 2_000_000)]
            write_json(
                suite.result_path(job),
                {"game": job.game, "seed": job.seed, "settings": settings, "score": value}
                | {"hns": result.normalise(job.game, value, settings["table"]), "evaluations": points, "training": []},
            )
    return suite


def human(job, times=1.0):
    """So many times a human's score, for seed 1; a little more for every other."""
    random, human = games.NATURE[job.game]
    return random + (human - random) * (times + 0.01 * (job.seed - 1))


def test_a_report_of_all_games(tmp_path):
    fill(tmp_path / "a", games.NATURE49, (0, 1, 2), human)
    fill(tmp_path / "b", games.NATURE49, (0, 1, 2), lambda job: human(job, 0.5 if job.game == "Pong" else 1.0))
    both = [collection.read(tmp_path / name) for name in "ab"]
    assert [one.part for one in both] == ["", ""]
    figures = json.loads(json.dumps(report.report(both)))
    one, other = figures["suites"]
    assert one["games"]["Pong"] == {
        "scores": pytest.approx([9.0, 9.3, 9.6]),
        "mean": pytest.approx(9.3),
        "std": pytest.approx(0.3),
        "hns": pytest.approx(1.0),
        "seeds": 3,
    }
    assert one["aggregates"]["median"]["value"] == pytest.approx(1.0)
    low, high = one["aggregates"]["iqm"]["interval"]
    assert 0.99 < low < 1.0 < high < 1.01
    assert (one["aggregates"]["human_level"]["value"], other["aggregates"]["human_level"]["value"]) == (49, 48)
    assert figures["comparisons"] == [{"a": "a", "b": "b", "games": 49, "better": 1, "worse": 0, "equal": 48}]
    text = report.table(figures)
    assert "a is better than b on 1 of 49 games, worse on 0 and equal on 48." in text
    assert "| Pong | 9.3 ± 0.3 | 100.0% | 3 | -5.7 ± 0.3 | 50.0% | 3 |" in text
    assert "| games of at least 75% | 49 (49 to 49) | 48 (48 to 48) |" in text
    assert "Missing" not in text


def test_different_tables_are_said_to_be(tmp_path):
    fill(tmp_path / "a", ("Pong",), (0,), human)
    fill(tmp_path / "b", ("Pong",), (0,), human, SETTINGS | {"protocol": "impala", "table": "atari57"})
    one, other = [collection.read(tmp_path / name) for name in "ab"]
    assert "Normalised by different tables (atari57, nature): " in report.table(report.report([one, other]))
    assert "different tables" not in report.table(report.report([one, one]))


def test_the_files_of_a_report(tmp_path):
    fill(tmp_path / "a", ("Pong", "Boxing"), (0, 1), human)
    fill(tmp_path / "b", ("Pong", "Enduro"), (0,), human)
    both = [collection.read(tmp_path / name) for name in "ab"]
    without = report.write(both, tmp_path / "out")
    assert [path.name for path in without] == ["table.md", "report.json", "curves.png"]
    paths = report.write(both, tmp_path / "out", partial=True)
    assert [path.name for path in paths] == ["table.md", "report.json", "profile.png", "curves.png"]
    assert json.loads(paths[1].read_text()) == json.loads(json.dumps(report.report(both, partial=True)))
    assert paths[0].read_text() == report.table(report.report(both, partial=True))
    for path in paths[2:]:
        with Image.open(path) as image:
            image.verify()
            assert min(image.size) > 200


def test_part_of_the_games_is_said_to_be_part(tmp_path):
    suite = fill(
        tmp_path, ("Pong", "Boxing", "Enduro"), (0, 1), human, skip={Job("Pong", 1), Job("Enduro", 0), Job("Enduro", 1)}
    )
    write_json(suite.error_path(Job("Enduro", 0)), {"error": "out of memory"})
    suite.result_path(Job("Enduro", 1)).write_text('{"game": "End')
    suite.run_dir(Job("Pong", 1)).mkdir(parents=True)
    one = collection.read(tmp_path)
    assert one.part == "2 of 49 games, and 3 of 6 runs are missing"
    whole = report.report([one])["suites"][0]
    assert whole["aggregates"] == {}
    assert [(cell["game"], cell["seed"], cell["why"]) for cell in whole["missing"]] == [
        ("Pong", 1, "begun"),
        ("Enduro", 0, "failed: out of memory"),
        ("Enduro", 1, "its result is torn"),
    ]
    text = report.table(report.report([one]))
    assert "2 of 49 games, and 3 of 6 runs are missing: no aggregates without --partial" in text
    assert "*   Enduro, seed 0: failed: out of memory" in text
    assert "median" not in text
    part = report.report([one], partial=True)["suites"][0]
    assert part["aggregates"]["median"] == {"value": pytest.approx(0.9925), "interval": None}
    assert "2 of 49 games, and 3 of 6 runs are missing: aggregates are of part of the games" in report.table(
        {"suites": [part], "comparisons": []}
    )
    (written,) = report.write([one], tmp_path / "made" / "here.md")
    assert written.read_text() == text


def test_all_games_of_nature_are_whole_though_others_have_no_human_score(tmp_path):
    fill(tmp_path, games.GAMES57, (0,), lambda job: human(job) if job.game in games.NATURE else 0.0)
    one = collection.read(tmp_path)
    assert one.scores.shape == (1, 49)
    assert report.report([one])["suites"][0]["aggregated_games"] == 49


def test_results_of_other_settings_are_refused(tmp_path):
    suite = fill(tmp_path, ("Pong",), (0,), human)
    (tmp_path / "suite.json").unlink()
    assert collection.read(tmp_path).settings == SETTINGS, "results are enough"
    write_json(
        suite.result_path(Job("Boxing", 0)),
        {"game": "Boxing", "seed": 0, "score": 1.0, "hns": 1.0, "settings": SETTINGS | {"preset": "nature"}},
    )
    with pytest.raises(ValueError, match=r"of other settings: preset: .*fast_dqn|of other settings: preset: .*nature"):
        collection.read(tmp_path)


def test_nothing_to_report(tmp_path):
    with pytest.raises(ValueError, match="holds no result of a suite: it is empty."):
        collection.read(tmp_path)
    with pytest.raises(ValueError, match="it is no directory"):
        collection.read(tmp_path / "nowhere")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match="it holds notes.txt"):
        collection.read(tmp_path)
    suite = fakes.FakeSuite(tmp_path, ("Pong", "Boxing"), (0, 1), SETTINGS)
    suite.register()
    suite.run_dir(suite.jobs[0]).mkdir()
    with pytest.raises(ValueError, match="of 4 jobs 1 are begun, 0 have failed and none is done"):
        collection.read(tmp_path)


def test_a_profile_is_drawn_with_a_band_only_for_several_seeds(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(pictures, "_save", lambda picture, path: drawn.append(picture.axes[0]))
    scores = np.random.default_rng(0).exponential(size=(2, 5))
    pictures.profile({"a": scores, "b": scores[:1]}, tmp_path / "x.png")
    assert (len(drawn[0].lines), len(drawn[0].collections)) == (2, 1)


@pytest.mark.parametrize(
    ("protocol", "evaluations", "drawn"),
    [("fast_dqn", 2, "evaluations"), ("fast_dqn", 1, "training"), ("machado", 2, "training"), (None, 2, "evaluations")],
)
def test_curves_are_of_what_is_reported(protocol, evaluations, drawn):
    ran = {"evaluations": [{"frames": 1e6 * i, "mean": 1.0} for i in range(evaluations)]}
    ran["training"] = [{"frames": 2e6 * i, "mean": 2.0} for i in range(3)]
    expected = [(row["frames"] / 1e6, row["mean"]) for row in ran[drawn]]
    np.testing.assert_allclose(pictures._points(ran, protocol), expected)
    np.testing.assert_allclose(pictures._points(ran | {"training": []}, "machado")[:, 1], 1.0)


def test_a_missing_run_makes_all_games_a_part(tmp_path):
    fill(tmp_path, games.NATURE49, (0, 1), human, skip={Job("Pong", 1)})
    one = collection.read(tmp_path)
    assert one.part == "49 of 49 games, and 1 of 98 runs are missing"
    assert report.report([one])["suites"][0]["aggregates"] == {}
