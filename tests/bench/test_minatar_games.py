"""The gates of MinAtar's benchmark."""

from podracer.bench import measure


def test_a_gate_is_a_share_of_published_returns_on_enough_games(monkeypatch):
    monkeypatch.syspath_prepend(measure.SOURCE / "benchmarks")
    import minatar_games as minatar

    def held(agent, means):
        scores = {game: {"mean": mean, "curves": [[(5_000_000, mean)]]} for game, mean in zip(minatar.GAMES, means)}
        return [gate["holds"] for gate in minatar.gates({agent: scores}) if gate["agent"] == agent]

    assert {gate["agent"] for gate in minatar.gates({})} == set(minatar.STEPS)
    assert not any(gate["holds"] for gate in minatar.gates({}))
    assert held("ppo", (13.6, 25.3, 52.3, 0, 0)) == [True], "0.9 of theirs, on three of four games"
    assert held("ppo", (13.4, 25.3, 52.3, 0, 0)) == [False]
    assert held("dqn", (16.8, 10.0, 50.1, 20.0, 43.7)) == [True], "theirs, on all games"
    assert held("dqn", (16.8, 10.0, 50.1, 19.9, 43.7)) == [False]


def test_muzero_has_to_be_ahead_of_dqn_after_as_many_steps(monkeypatch):
    monkeypatch.syspath_prepend(measure.SOURCE / "benchmarks")
    import minatar_games as minatar

    def found(*means):
        dqn = {game: {"mean": 9.0, "curves": [[(1_000_001, 2.0), (5_000_000, 9.0)]] * 2} for game in minatar.GAMES}
        muzero = {game: {"mean": mean} for game, mean in zip(minatar.GAMES, means)}
        return minatar.ahead({"dqn": dqn, "muzero": muzero})

    assert set(found()["bounds"].values()) == {2.0}
    assert found(2.1, 2.1, 2.1, 0, 0)["holds"]
    assert not found(2.1, 2.1, 2.0, 0, 0)["holds"]
    assert not minatar.ahead({})["holds"]
