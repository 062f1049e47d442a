"""The gates of MinAtar's benchmark."""

from podracer.bench import measure


def test_a_gate_is_a_share_of_published_returns_on_enough_games(monkeypatch):
    monkeypatch.syspath_prepend(measure.SOURCE / "benchmarks")
    import minatar_games as minatar

    def held(agent, means):
        scores = {game: {"mean": mean} for game, mean in zip(minatar.GAMES, means)}
        return [gate["holds"] for gate in minatar.gates({agent: scores}) if gate["agent"] == agent]

    assert {gate["agent"] for gate in minatar.gates({})} == set(minatar.STEPS)
    assert not any(gate["holds"] for gate in minatar.gates({}))
    assert held("ppo", (13.6, 25.3, 52.3, 0, 0)) == [True], "0.9 of theirs, on three of four games"
    assert held("ppo", (13.4, 25.3, 52.3, 0, 0)) == [False]
    assert held("dqn", (16.8, 10.0, 50.1, 20.0, 43.7)) == [True], "theirs, on all games"
    assert held("dqn", (16.8, 10.0, 50.1, 19.9, 43.7)) == [False]
