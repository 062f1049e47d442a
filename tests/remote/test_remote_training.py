"""Training on environments that workers step: equal to local ones in lockstep, and its end when one of them fails."""

import threading
import time

import jax
import numpy as np
import pytest

import envs_jax
import podracer
from podracer import environments, spaces
from podracer.environments.from_jax import SteppedEnvironments
from podracer.environments.seeds import first_seed
from podracer.remote import environments as remote_environments
from tests.support import benchmarks, peers, tiers, workers

grpc = pytest.importorskip("grpc")

SETTINGS = {"num_envs": 8, "eval_episodes": 2, "progress": False}
CONFIGS = {
    "vtrace": {"rollout_length": 5, "hidden_sizes": (8,)},
    "ppo": {"rollout_length": 5, "hidden_sizes": (8,), "num_minibatches": 2, "normalize_observations": True},
    "r2d2": {
        **{"rollout_length": 5, "hidden_sizes": (8,), "burn_in": 1, "trace_length": 4, "batch_size": 4},
        **{"replay_min_size": 20, "replay_ratio": 0.8},
    },
}


@pytest.fixture
def listening(monkeypatch):
    """An event that is set, with the address as its `where`, when a learner listens."""
    event = threading.Event()
    there = remote_environments.RemoteEnvironments.__init__

    def announced(self, *args, **kwargs):
        there(self, *args, **kwargs)
        event.where = self.where
        event.set()

    monkeypatch.setattr(remote_environments.RemoteEnvironments, "__init__", announced)
    return event


def train(agent, environments, event, made, total_steps=400, settings=None, config=None, **run):
    """Trains, with a worker for each of `made` once the learner listens; returns the result and the workers."""
    threads = []

    def begin():
        assert event.wait(60.0)
        for each, more in made:
            threads.append(workers.Thread(each, event.where, **more))

    starter = threading.Thread(target=begin, daemon=True)
    starter.start()
    remote = {"listen": "127.0.0.1:0", "block": 2, "join_timeout": 30.0} | (settings or {})
    config = CONFIGS[agent] if config is None else config
    result = podracer.train(
        agent, environments, config=config, remote=remote, total_steps=total_steps, **(SETTINGS | run)
    )
    starter.join()
    return result, threads


def catch():
    return SteppedEnvironments(envs_jax.make("catch"))


@pytest.mark.slow
@pytest.mark.nightly
def test_masks_come_with_the_rows_of_workers(listening):
    """The masked probe is learnt from frames and a replay, without an illegal action."""
    masks, rows = benchmarks.load("masks"), []
    made = SteppedEnvironments(masks.MaskedAction())
    workers_of = [(made, {"lanes": 8, "name": f"w{i}"}) for i in range(2)]
    run = {"num_envs": 16, "eval_episodes": 200, "log": lambda steps, row: rows.append(dict(row))}
    config = masks.SETTINGS["dqn"] | {"frame_stack": 2}
    result, _ = train("dqn", made, listening, workers_of, total_steps=20_000, config=config, **run)
    assert result.summary["eval_return_mean"] >= 0.99
    assert {row["episode/illegal"] for row in rows if np.isfinite(row.get("episode/illegal", np.nan))} == {0.0}


class Shuffled:
    """Environments whose rows take now longer and now shorter to come, so that workers overtake each other."""

    def __init__(self, environments, seed):
        self._environments, self.spec, self._chance = environments, environments.spec, np.random.default_rng(seed)

    def make(self, *args, **kwargs):
        made = self._environments.make(*args, **kwargs)
        recv = made.recv

        def later():
            time.sleep(0.004 * self._chance.random())
            return recv()

        made.recv = later
        return made


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["ppo", "r2d2", *tiers.nightly("vtrace")])
def test_lockstep_is_as_local_for_any_number_of_workers(agent, listening):
    """And in whatever order their rows arrive."""
    run = {"mode": "lockstep", "actor_threads": 2, "seed": 3}
    local = podracer.train(agent, catch(), config=CONFIGS[agent], total_steps=400, **(SETTINGS | run))
    for number in (1, 2, 4) if agent == "vtrace" else (2, 4):
        listening.clear()
        made = [(Shuffled(catch(), i), {"lanes": 8 // number, "name": f"w{i}"}) for i in range(number)]
        remote, threads = train(agent, catch(), listening, made, **run)
        jax.tree.map(np.testing.assert_array_equal, remote.learner.params, local.learner.params)
        for thread in threads:
            thread.join(10.0)
            assert thread.error is None
            assert not thread.is_alive()


@pytest.mark.slow  # quick: random schedules against a model (test_hub_schedules.py)
def test_rows_and_actions_belong_together(listening, monkeypatch):
    """Environments fail at random (of processes that are killed, and of mode "ready", test_remote_processes.py); on unmasked transitions the step advances by 1, and the action is the one shown next."""
    seen, chance = workers.consumed(monkeypatch), np.random.default_rng(0)

    def misbehave(running):
        if running.number > 3 and chance.random() < 0.01:
            raise RuntimeError("the plug was pulled")

    # It is sent away after five failures in a minute, and comes back.
    made_here = [(workers.Counting(misbehave=misbehave), {"lanes": 4, "name": f"w{i}"}) for i in range(2)]
    result, _ = train("vtrace", workers.Counting(), listening, made_here, total_steps=3000, actor_threads=2)
    assert result.summary["complete"]
    rows = [row for row in result.history if "remote/breaks" in row][-1]
    assert rows["remote/breaks"] > 3
    assert result.summary["env_steps"] == workers.check_consumed(seen)
    lengths = {row["episode/length"] for row in result.history if np.isfinite(row.get("episode/length", np.nan))}
    assert lengths == {5.0}, "no broken episode is counted"


class Labelled(workers.Counting):
    """Counting environments that show a label, one of three, beside the count."""

    def __init__(self):
        super().__init__()
        parts = {"count": self.spec.observation_space, "label": spaces.Discrete(3)}
        self.spec = self.spec._replace(observation_space=spaces.Dict(parts))

    def make(self, num_lanes, seed, *, evaluation=False):
        made = super().make(num_lanes, seed)
        recv = made.recv

        def labelled():
            lanes, rows = recv()
            label = (rows.observation[:, 1] % 3).astype(np.int32)
            return lanes, rows._replace(observation={"count": rows.observation, "label": label})

        made.recv = labelled
        return made


SPOILT = {  # step: what is wrong in its rows, and what is said of it; episodes have five transitions
    "lane 2: reward is nan": (3, lambda rows: (rows.scalars, (0, 2), np.nan)),
    "lane 1: first is 1": (4, lambda rows: (rows.scalars, (2, 1), 1.0)),
    "lane 3: first is 0": (6, lambda rows: (rows.scalars, (2, 3), 0.0)),
    "lane 1: last is 1": (6, lambda rows: (rows.scalars, (3, 1), 1.0)),
    "lane 3: observation['count'][1] is nan": (7, lambda rows: (rows.observation["count"], (3, 1), np.nan)),
    "lane 2: observation['label'] is 3": (8, lambda rows: (rows.observation["label"], 2, 3)),
}


@pytest.mark.slow
def test_bad_rows_end_their_stream_and_reach_no_number_of_a_run(listening, monkeypatch, tmp_path, capfd):
    """Workers that begin well and then show what cannot be come one after another; another one plays on."""
    seen, ends, since = workers.consumed(monkeypatch), [], []

    def spoil():
        assert listening.wait(60.0)
        for run, (at, what) in enumerate(SPOILT.values()):

            def spoilt(step, rows, at=at, what=what):
                if step == at:
                    array, where, value = what(rows)
                    array[where] = value

            with peers.peer(listening.where) as bad:
                ends.append(bad.play(Labelled(), spoilt, run))

    def log(env_steps, row):
        if len(ends) == len(SPOILT):
            since.append(env_steps)
        return bool(since) and env_steps > since[0] + 400

    threading.Thread(target=spoil, daemon=True).start()
    made, settings = (
        [(Labelled(), {"lanes": 4, "give_up_after": 0.1})],
        {"listen": f"unix:{tmp_path}/socket", "block": 4},
    )
    result, (sound,) = train("vtrace", Labelled(), listening, made, 10**6, settings, log=log)
    err = capfd.readouterr().err
    for said, (code, details) in zip(SPOILT, ends, strict=True):
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert said in details
        assert f"remote: worker by hand broke the protocol: {details}" in err
    for row in result.history:
        ended = row.get("episode/count", 1) > 0
        assert all(np.isfinite(x) for name, x in row.items() if ended or not name.startswith("episode/")), row
    seen = [(steps._replace(observation=steps.observation["count"]), actions) for steps, actions in seen]
    assert result.summary["env_steps"] == workers.check_consumed(seen)
    seeds = np.concatenate([steps.observation[:-1, :, 0] for steps, _ in seen])
    others = [len(np.unique(lane)) for lane in seeds.T]
    assert sorted(others) == [1] * 4 + [max(others)] * 4, "the sound worker's lanes never broke"
    assert max(others) > len(SPOILT) / 2
    assert result.history[-1]["remote/rejected"] == result.history[-1]["remote/breaks"] == len(SPOILT)
    sound.join(10.0)
    assert "no learner at" in str(sound.error), "it has waited for the run to go on"


@pytest.mark.slow
def test_a_slow_worker_holds_up_nobody_for_a_rollout(listening):
    """If lanes are acted for as they come, the others are as fast as before until they are a rollout ahead."""
    from podracer.sebulba.actor import Actor

    slow_seeds, T, usual = set(), CONFIGS["vtrace"]["rollout_length"], 0.03

    def slow(running):
        slow_seeds.add(running.seed[0])
        time.sleep(usual if running.number <= 4 * T else 20 * usual)

    taken, started = [], Actor.start

    def start(actor):
        make = actor._make_environment

        def watched():
            environment = make()
            recv = environment.recv

            def timed():
                lanes, rows = recv()
                taken.append((time.monotonic(), rows.observation[0, 0]))
                return lanes, rows

            environment.recv = timed
            return environment

        actor._make_environment = watched
        started(actor)

    made = [
        (workers.Counting(misbehave=f), {"lanes": 4, "name": n})
        for f, n in ((slow, "slow"), (lambda running: time.sleep(usual), "fast"))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Actor, "start", start)
        settings = {"mode": "ready", "block": 4, "max_lanes": 4, "deadline_ms": 1.0}
        train("vtrace", workers.Counting(), listening, made, total_steps=200, settings=settings)
    is_slow = [seed in slow_seeds for _, seed in taken]
    times = [at for at, seed in taken if seed not in slow_seeds]
    ahead = [2 * is_slow[:i].count(False) - i for i in range(len(is_slow))]
    assert T - 1 <= max(ahead) <= 2 * T
    waits = np.diff(times)
    before, after = waits[2 * T : 4 * T], waits[4 * T + 1 :]
    until_ahead = after[: int(np.argmax(after > 5 * usual))] if np.any(after > 5 * usual) else after
    assert len(until_ahead) >= T - 2
    assert np.median(until_ahead) <= np.median(before) / 0.9, "it waits for the slow one"


@pytest.mark.slow
@pytest.mark.nightly
def test_what_is_acted_for_as_it_comes_is_what_it_is_where_all_are_waited_for(listening, monkeypatch):
    """With parameters that do not change, and actions that are not drawn."""
    monkeypatch.setitem(CONFIGS, "r2d2", CONFIGS["r2d2"] | {"epsilon_base": 0.0, "learning_rate": 1e-30})
    seen = workers.consumed(monkeypatch)
    podracer.train("r2d2", catch(), config=CONFIGS["r2d2"], total_steps=400, **SETTINGS)
    local = [*seen]
    seen.clear()
    made = [(Shuffled(catch(), i), {"lanes": 4, "name": f"w{i}"}) for i in range(2)]
    settings = {"mode": "ready", "block": 2, "max_lanes": 4, "deadline_ms": 1.0}
    train("r2d2", catch(), listening, made, settings=settings)
    assert min(len(local), len(seen)) >= 5
    for each, other in zip(local[:5], seen[:5]):
        jax.tree.map(np.testing.assert_array_equal, each, other)


def test_a_lost_worker_ends_a_run_in_lockstep_and_hears_why(listening):
    def misbehave(running):
        if running.number == 30:
            raise RuntimeError("the plug was pulled")

    threads = []
    made = [(workers.Counting(misbehave=misbehave), {})]
    begin = workers.Thread.__init__

    def keep(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        threads.append(self)

    lost = r"lanes \d to \d: its environments failed: RuntimeError: the plug"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers.Thread, "__init__", keep)
        with pytest.raises(podracer.ActorError, match=lost):
            train("vtrace", workers.Counting(), listening, made, mode="lockstep", total_steps=10**5)
    assert listening.is_set()
    (thread,) = threads
    thread.join(5.0)
    assert "the learner failed: ActorError" in str(thread.error)


@pytest.mark.slow
def test_what_only_workers_know(listening, tmp_path):
    """The spec comes from the first worker, and evaluations are played there too; a resumed run listens where it did."""
    where, token = f"unix:{tmp_path}/socket", tmp_path / "token"
    token.write_text("what-nobody-else-may-read")
    remote, proof = {"listen": where, "token_file": str(token)}, {"token_file": str(token)}
    thread = workers.Thread(workers.Counting(raw=True), where, **proof)
    settings = SETTINGS | {"config": CONFIGS["vtrace"], "run_dir": tmp_path / "run"}
    result = podracer.train("vtrace", "remote:mine", total_steps=400, remote=remote, **settings)
    assert result.summary["complete"]
    assert result.summary["env"] == "remote:mine"
    assert {row["episode/length"] for row in result.history if np.isfinite(row.get("episode/length", np.nan))} == {5.0}
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(written) > 5
    assert not any(token.read_bytes() in path.read_bytes() for path in written)
    thread.join(10.0)
    assert thread.error is None
    thread = workers.Thread(workers.Counting(raw=True), where, **proof)
    again = podracer.resume(tmp_path / "run", total_steps=800, progress=False)
    assert again.summary["complete"]
    assert again.summary["env_steps"] >= 800
    with pytest.raises(ValueError, match="stepped by workers alone"):
        podracer.load(tmp_path / "run")
    with pytest.raises(podracer.RemoteError, match="sent home"):
        again.evaluate(episodes=2)


@pytest.mark.slow
@pytest.mark.nightly
def test_pong_is_trained_at_a_worker(tmp_path, monkeypatch):
    """The frames learnt from are those of the game that the actions make here, every one of them counted."""
    pytest.importorskip("envpool")
    seen, options, where = workers.consumed(monkeypatch), {"max_episode_steps": 60}, f"unix:{tmp_path}/socket"
    small = {
        "rollout_length": 8,
        "torso": "mlp",
        "hidden_sizes": (8,),
        "frame_stack": 4,
        "num_minibatches": 2,
        "num_epochs": 1,
    }
    with workers.process("envpool:Pong-v5", where, "--lanes", "8") as worker:
        result = podracer.train(
            "pqn",
            "envpool:Pong-v5",
            env_options=options,
            config=small,
            total_steps=2000,
            mode="lockstep",
            remote={"listen": where},
            **SETTINGS,
        )
        assert worker.wait(15) == 0
    here = environments.make("envpool:Pong-v5", **options).make(8, first_seed(0, "training"))
    lanes, rows = here.recv()
    played, frames = 0, set()
    for steps, actions in seen:
        for t, taken in enumerate(actions):
            np.testing.assert_array_equal(steps.observation[t][lanes], rows.observation)
            np.testing.assert_array_equal(steps.reward[t][lanes], rows.timestep.reward)
            np.testing.assert_array_equal(steps.first[t][lanes], rows.timestep.first)
            frames.update(frame.tobytes() for frame in rows.observation)
            here.send(lanes, taken[lanes])
            lanes, rows = here.recv()
        played += int((~steps.first[1:]).sum())
    here.close()
    assert result.summary["complete"]
    assert result.summary["env_steps"] == played >= 2000
    assert len(frames) > 100, "something moves"
