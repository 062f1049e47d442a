"""The gates of MinAtar's benchmark."""

import json

import pytest

from podracer.bench import measure


def test_a_gate_is_a_share_of_published_returns_on_enough_games(monkeypatch):
    monkeypatch.syspath_prepend(measure.SOURCE / "benchmarks")
    import minatar_games as minatar

    def held(agent, means):
        scores = {game: {"mean": mean, "curves": [[(5_000_000, mean)]]} for game, mean in zip(minatar.GAMES, means)}
        return [gate["holds"] for gate in minatar.gates({agent: scores}, {}) if gate["agent"] == agent]

    assert {gate["agent"] for gate in minatar.gates({}, {})} == set(minatar.STEPS)
    assert not any(gate["holds"] for gate in minatar.gates({}, {}))
    assert held("ppo", (13.6, 25.3, 52.3, 0, 0)) == [True], "0.9 of theirs, on three of four games"
    assert held("ppo", (13.4, 25.3, 52.3, 0, 0)) == [False]
    assert held("dqn", (16.8, 10.0, 50.1, 20.0, 43.7)) == [True], "theirs, on all games"
    assert held("dqn", (16.8, 10.0, 50.1, 19.9, 43.7)) == [False]


@pytest.mark.parametrize("agent", ["muzero", "efficientzero"])
def test_models_have_to_be_ahead_of_dqn_after_as_many_steps(agent, monkeypatch):
    monkeypatch.syspath_prepend(measure.SOURCE / "benchmarks")
    import minatar_games as minatar

    def found(*means):
        dqn = {game: {"mean": 9.0, "curves": [[(1_000_001, 2.0), (5_000_000, 9.0)]] * 2} for game in minatar.GAMES}
        ours = {game: {"mean": mean} for game, mean in zip(minatar.GAMES, means)}
        return minatar.ahead(agent, {"dqn": dqn, agent: ours}, {})

    assert set(found()["bounds"].values()) == {2.0}
    assert found(2.1, 2.1, 2.1, 0, 0)["holds"]
    assert not found(2.1, 2.1, 2.0, 0, 0)["holds"]
    assert not minatar.ahead(agent, {}, {})["holds"]
    # Runs of DQN that go on count once they have come so far.
    curves = ([(500_000, 1.0), (1_000_004, 3.0)], [(500_000, 1.0)])
    going = {"dqn": {game: {"0": {"curve": curve}} for game, curve in zip(minatar.GAMES, curves)}}
    assert minatar.ahead(agent, {}, going)["bounds"] == {minatar.GAMES[0]: 3.0}


def test_a_report_sees_runs_that_go_on(monkeypatch, tmp_path):
    """Runs in folders, and runs of earlier reports, until their games have results."""
    monkeypatch.syspath_prepend(measure.SOURCE / "benchmarks")
    import minatar_games as minatar

    monkeypatch.setattr(minatar, "FILE", tmp_path / "minatar.json")
    first, second = minatar.GAMES[:2]
    runs = tmp_path / "dqn" / "runs"
    (runs / f"{first}-0").mkdir(parents=True)
    rows = ({"env_steps": 5, "updates": 1, "eval/return_mean": 1.5}, {"env_steps": 9, "updates": 2, "loss/total": 1.0})
    (runs / f"{first}-0" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (runs / f"{first}-0.start.json").write_text('{"commit": "abc"}')
    earlier = {second: {"1": {"curve": [[7, 2.0]], "commit": "def"}}}
    minatar.FILE.write_text(json.dumps({"results": {"unfinished": {"dqn": earlier}}}))
    found = minatar.unfinished_runs(tmp_path, {})
    assert found == {"dqn": {first: {"0": {"curve": [(5, 1.5)], "commit": "abc"}}, **earlier}}
    assert minatar.unfinished_runs(tmp_path, {"dqn": {first: {}}}) == {"dqn": earlier}


def test_a_report_keeps_runs_whose_folders_are_elsewhere(monkeypatch, tmp_path):
    """A new run takes the place of that of its seed, and stands beside those of other seeds."""
    monkeypatch.syspath_prepend(measure.SOURCE / "benchmarks")
    import minatar_games as minatar

    monkeypatch.setattr(minatar, "RESULTS", tmp_path)
    monkeypatch.setattr(minatar, "FILE", tmp_path / "minatar.json")
    game = minatar.GAMES[0]

    def reported(folder, scores):
        results = tmp_path / folder / "ppo" / "results"
        results.mkdir(parents=True)
        for seed, score in scores.items():
            evaluations = [{"frames": 100, "mean": 0.0}, {"frames": 200, "mean": score}]
            result = {"game": game, "seed": seed, "score": score, "hns": None, "settings": {}, "training": []}
            result |= {"train_seconds": 60.0, "machine": {"device": "cpu"}, "commit": "abc", "evaluations": evaluations}
            (results / f"{game}-{seed}.json").write_text(json.dumps(result))
        minatar.write(tmp_path / folder)
        return json.loads((tmp_path / "minatar.json").read_text())["results"]["agents"]["ppo"][game]

    first = reported("here", {0: 1.0, 2: 2.0})
    assert first["scores"] == [1.0, 2.0]
    second = reported("there", {1: 3.0, 2: 4.0})
    assert (second["seeds"], second["scores"]) == ([0, 1, 2], [1.0, 3.0, 4.0])
    assert second["curves"][0] == first["curves"][0] == [[100, 0.0], [200, 1.0]]
    assert second["minutes"] == [1.0, 1.0, 1.0]
