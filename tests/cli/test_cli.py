"""The command line, in-process: exit codes, one line for every mistake, and the way from training to a picture."""

import errno
import json
import os
import pathlib
import re
import shutil
import signal
import sys
import tomllib
import types

import jax
import pytest
from PIL import Image

import envs_jax
import podracer
from podracer import cli, environments
from podracer.agents.registry import AGENTS
from podracer.cli import results
from podracer.run import metrics, rundir
from tests.support import harness

# That of tests/support/small_run.py: the same program, so that one compilation serves both.
SMALL = (
    "--total-steps 2000 --num-envs 8 --eval-every 500 --eval-episodes 16 --checkpoint-every 500 "
    "--agent.rollout-length 10 --agent.hidden-sizes 8"
)
TRAIN = f"train vtrace catch {SMALL}"


def run(command):
    return cli.run(command.split() if isinstance(command, str) else command)


@pytest.fixture(scope="module", autouse=True)
def _programs_are_shared():
    with harness.shared_programs():
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cli") / "catch-run"
    assert run(f"{TRAIN} --quiet --run-dir {directory}") == 0
    return directory


@pytest.fixture
def copied(trained, tmp_path):
    return pathlib.Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def asked(monkeypatch):
    """The settings of every `podracer.train`, which goes no further."""
    settings_of_all = []

    def train(agent, environment, **settings):
        settings_of_all.append(settings)
        raise ValueError("enough")

    monkeypatch.setattr(podracer, "train", train)
    return settings_of_all


def complaint(capsys, command):
    """The one line that a mistake gets: exit code 2, nothing on stdout."""
    code = run(command)
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert err.startswith("podracer: error: ")
    assert not any(c in err for c in "│─╭╰"), "a box that lost its lines"
    assert "---" not in err
    return err.removeprefix("podracer: error: ")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("trian", "unknown command 'trian'; did you mean 'train'?"),
        ("--verbose", "unknown command '--verbose'"),
        ("train vtrace", "train needs an agent and an environment"),
        ("train --resume vtrace catch", "train needs an agent and an environment"),
        (
            "train vtrac catch",
            "unknown agent 'vtrac'; did you mean 'vtrace' or 'sac'? known: alphazero, dqn, efficientzero, muzero, ppo, pqn, r2d2, sac, vtrace.",
        ),
        ("train PPO catch", "unknown agent 'PPO'; did you mean 'ppo'?"),
        ("train td3 pendulum", "unknown agent 'td3'; use sac with --preset td3."),
        ("train PPO", "unknown agent 'PPO'; did you mean 'ppo'?"),
        ("train catch ppo --seed 1", "unknown agent 'catch'; did you mean: podracer train ppo catch?"),
        ("train vtrace cach", "unknown environment 'cach'; did you mean 'catch'?"),
        ("train vtrace zzz", "unknown environment 'zzz'; Known: acrobot, bandit,"),
        ("train vtrace catch --tota-steps 5", "--tota-steps, 5; did you mean --total-steps?"),
        ("train vtrace catch --agent.learning-rte 1", "--agent.learning-rte, 1; did you mean --agent.learning-rate?"),
        ("train vtrace catch --agent.lr 1", "--agent.lr, 1; did you mean --agent.learning-rate?"),
        ("train vtrace catch --gamma=1", "--gamma=1; did you mean --agent.discount?"),
        ("train vtrace catch --agent.gae-lambda 1", "--agent.gae-lambda, 1; did you mean --agent.trace-lambda?"),
        ("train ppo catch --agent.n-envs 1", "--agent.n-envs, 1; did you mean --num-envs?"),
        ("train vtrace catch --agent.clip-epsilon 1", "Unrecognized options: --agent.clip-epsilon, 1"),
        ("train vtrace catch --env.size 5", "Unrecognized options: --env.size, 5"),
        ("train vtrace catch more", "Unrecognized options: more"),
        ("train vtrace catch --seed 0 1 2", "--seed takes one value, but got 0 1 2; --seeds trains a run for each"),
        ("train vtrace catch --quiet --agent.core-size=4 5", "--agent.core-size takes one value, but got 4 5"),
        ("train vtrace catch --resume runs --quiet", "--resume takes no value, but got runs"),
        ("train vtrace catch --seed", "Missing value for argument '--seed'"),
        ("train vtrace catch --total-steps many", "--total-steps: 'many' is not an integer"),
        ("train vtrace catch --total-steps 1.5", "--total-steps: '1.5' is not an integer"),
        ("train vtrace catch --num-envs 1e-3", "--num-envs: '1e-3' is not an integer"),
        ("train vtrace catch --agent.hidden-sizes 8,x", "--agent.hidden-sizes: 'x' is not an integer"),
        ("train vtrace catch --agent.learning-rate fast", "--agent.learning-rate: 'fast' is not a number"),
        ("train vtrace catch --agent.torso transformer", "invalid choice 'transformer' for argument '--agent.torso'"),
        ("train vtrace catch --agent.learning-rate nan", "VTraceConfig.learning_rate=nan: must be a number"),
        ("train vtrace catch --total-steps 0", "RunConfig.total_steps=0: must be at least 1."),
        ("train vtrace catch --seed -1", "RunConfig.seed=-1: must be at least 0."),
        ("train vtrace catch --agent.learning-rate -1", "VTraceConfig.learning_rate=-1.0: must be at least 0"),
        ("train vtrace catch --agent.hidden-sizes 8 0", "VTraceConfig.hidden_sizes=(8, 0): must be at least 1."),
        ("train vtrace catch --agent.discount 1.5", "VTraceConfig.discount=1.5: must be at most 1"),
        ("train vtrace catch --env.rows 1", "CatchOptions(rows=1): use an integer of at least 2"),
        ("train vtrace catch --wrap time_limt=3", "unknown wrapper 'time_limt'; did you mean 'time_limit'?"),
        ("train vtrace catch --wrap flatten sticky_actions=2", "sticky_actions(p=2.0): must be between 0 and 1"),
        ("train vtrace catch --wrap hide=0", "hide([0]): observations of catch are Box("),
        (
            "train vtrace envpool:CartPole-v1 --wrap time_limit=3",
            "wrap='time_limit=3': wrappers are for environments in pure JAX, not for envpool:CartPole-v1; set its "
            "options, --env.*",
        ),
        (
            "train vtrace gymnasium:CartPole-v1 --wrap time_limit=3",
            "not for gymnasium:CartPole-v1; use Gymnasium's own wrappers, in a function that makes the environment.",
        ),
        ("train vtrace catch --preset atari", "preset='atari': catch is not a game of Atari"),
        ("train vtrace envpool:CartPole-v1 --preset atari", "preset='atari': envpool:CartPole-v1 is not a game of"),
        (
            "train ppo envpool:CartPole-v1 --preset classic",
            "preset='classic': there is none for ppo on envpool:CartPole",
        ),
        ("train vtrace catch --preset atary", "preset='atary': unknown; did you mean 'atari' or 'minatar'?"),
        (
            "train vtrace envpool:Pong-v5 --preset fast_dqn",
            "preset='fast_dqn' is of dqn; the presets of vtrace: atari, minatar.",
        ),
        ("train vtrace catch --preset", "Missing value for argument '--preset"),
        ("train dqn envpool:Pong-v5 --preset fast_dqn --protocol machao", "did you mean 'machado'"),
        (
            "train dqn envpool:Pong-v5 --preset fast_dqn --num-envs 12",
            "num_envs=12 must divide the 10000 rows of target_interval=2500 updates of 4 rows, for its rollouts together are one period; use 10 or 16",
        ),
        (
            "train dqn envpool:Pong-v5 --preset fast_dqn --actor-threads 2",
            "actor_threads=2: rollouts of this preset are one period between copies to the target network, which one",
        ),
        ("train dqn catch --agent.max-error 0", "DQNConfig.max_error=0.0: must be at least 1e-06."),
        # Names of earlier versions.
        (
            "train dqn catch --agent.target-period 8000",
            "--agent.target-period, 8000; did you mean --agent.target-interval, in updates, each of batch_size / replay_ratio",
        ),
        ("train pqn catch --agent.radam-eps 1e-8", "--agent.radam-eps, 1e-8; did you mean --agent.optimizer-eps? (see"),
        ("train vtrace catch --hyper.lambda_ 1", "--hyper.lambda_, 1; did you mean --hyper.trace-lambda? (see"),
        # What a replay, a distribution and exploration have to be, and who has pending updates.
        (
            "train dqn catch --agent.replay-min-size 30000",
            "replay_min_size=30000 must be at most replay_capacity=20000, or learning would never begin; use 20000.",
        ),
        (
            "train dqn catch --agent.replay-capacity 48 --agent.replay-min-size 9",
            "replay_capacity=48 is less than one rollout: 16 lanes of rollout_length=4 bring 64 rows; raise it to 64 or",
        ),
        ("train dqn catch --agent.num-bins 1", "DQNConfig.num_bins=1: must be at least 2."),
        ("train dqn catch --agent.max-value 0", "max_value=0.0 must be finite and above 0, such as 10.0."),
        ("train dqn catch --agent.max-value -1", "max_value=-1.0 must be finite and above 0, such as 10.0."),
        (
            "train dqn catch --agent.epsilon-start 0.2 --agent.epsilon-final 0.5",
            "epsilon_final=0.5 must be at most epsilon_start=0.2: exploration falls; use 0.2.",
        ),
        (
            "train pqn catch --agent.epsilon-start 0.1",
            "epsilon_final=0.2 must be at most epsilon_start=0.1: exploration falls; use 0.1.",
        ),
        (
            "train ppo catch --arch sebulba --updates-per-call 4",
            "updates_per_call=4: ppo has no pending updates; leave it out.",
        ),
        (
            "train dqn catch --updates-per-call 4",
            "updates_per_call=4: only Sebulba has it, whose learner looks at signals in between; leave it out, or add",
        ),
        (
            "train vtrace catch --arch sebulba --mode serial --updates-per-batch 2",
            "updates_per_batch=2: with mode='serial' actors wait for the learner, so that every update is on rollouts of "
            "the newest parameters; use mode='lockstep', or 1.",
        ),
        ("train vtrace catch --agent.torso nature", "torso='nature' needs uint8 images"),
        (
            "train vtrace catch --num-envs 10 --num-shards 4",
            "num_envs=10 is not divisible by the 4 shards; use 8 or 12.",
        ),
        (
            "train ppo catch --num-envs 3 --agent.rollout-length 5 --agent.num-minibatches 4",
            "num_minibatches=4 does not divide the 15 units of a shard",
        ),
        ("resume", "Missing from podracer resume: PATH"),
        ("resume nowhere", "nowhere holds no run: there is no config.json in it."),
        ("eval", "Missing from podracer eval: PATH"),
        ("eval nowhere", "nowhere holds no run: there is no config.json in it."),
        ("eval . --episodes few", "--episodes: 'few' is not an integer"),
        ("plot", "plot needs one or more run directories."),
        ("plot nowhere", "nowhere holds no run: there is no metrics.jsonl in it."),
        ("envs catch maze", "envs takes one pattern at most, but got catch maze."),
        ("envs zzz", "no environment that is installed here has 'zzz' in its name."),
        (
            "train ppo Pong-v5",
            "unknown environment 'Pong-v5'; did you mean 'envpool:Pong-v5'? `podracer envs PATTERN` searches for others.",
        ),
        ("train ppo pong", "did you mean 'envpool:Pong-v5'? `podracer envs PATTERN`"),
        (
            "train ppo CartPole-v1",
            "did you mean 'gymnasium:CartPole-v1' or 'envpool:CartPole-v1' or 'cartpole'? `podracer envs PATTERN`",
        ),
        (
            "train ppo lunar_lander",
            "did you mean 'gymnasium:LunarLander-v3' or 'envpool:LunarLander-v3'? `podracer envs PATTERN`",
        ),
        (
            "train ppo LunarLander-v2",
            "did you mean 'envpool:LunarLander-v2' or 'gymnasium:LunarLander-v3'? `podracer envs PATTERN`",
        ),
        ("agents ppo", "agents takes no arguments, but got ppo."),
        ("train vtrace catch --pbt.rule impala", "pbt needs an interval (--pbt.interval)"),
        ("train vtrace catch --pbt.interval 1000", "pbt: population=1 has nobody to copy"),
        ("train vtrace envpool:CartPole-v1 --pbt.interval 1000", "pbt: only Anakin has populations"),
        (
            "bench",
            "bench needs what to measure: podracer bench anakin|sebulba|replay|search.",
        ),
        (
            "bench everything",
            "podracer bench anakin|sebulba|replay|search, not 'everything'.",
        ),
        ("bench anakin --env cach", "unknown environment 'cach'; did you mean 'catch'?"),
        ("bench anakin --env catch --env-options {", "env_options='{' is not JSON: "),
        ("bench anakin --env catch --env-options 3", "env_options='3': must be"),
        ("bench sebulba --torso resnet", "torso='resnet': cartpole has no images"),
        ("bench anakin --agents pppo", "unknown agent 'pppo'; did you mean 'ppo'?"),
    ],
)
def test_mistakes_get_one_line(command, message, capsys, tmp_path):
    assert message in complaint(capsys, command)
    assert list(tmp_path.iterdir()) == [], "a command that was refused leaves nothing behind"


def test_a_run_directory_that_is_a_file(capsys, tmp_path):
    (tmp_path / "file").write_text("mine")
    message = complaint(capsys, f"{TRAIN} --run-dir file")
    assert message.startswith("cannot write to run directory file: ")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_directory_that_is_taken(copied, capsys):
    message = complaint(capsys, f"{TRAIN} --run-dir {copied}")
    assert message == f"{copied} already holds this run; use --resume (resume=True) or another run directory.\n"
    for changes, differs in (
        ("--seed 3", "run.seed: 0 -> 3"),
        ("--agent.discount 0.5 --env.rows 12", "agent_config.discount: 0.99 -> 0.5; env_options.rows: 10 -> 12"),
        ("--total-steps 1000 --resume", "run.total_steps: 2000 -> 1000"),
    ):
        message = complaint(capsys, f"{TRAIN} --run-dir {copied} {changes}")
        assert message == (
            f"{copied} holds a run of another configuration: {differs}. Use another run directory, or "
            f"`podracer resume {copied}`, which goes on with its settings.\n"
        )


def test_eval_of_another_programs_directory(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "something else"}')
    assert "no run of podracer" in complaint(capsys, "eval .")


def test_eval_of_nonsense(trained, capsys):
    assert "episodes=0: must be at least 1" in complaint(capsys, f"eval {trained} --episodes 0")
    assert "member=1: this run has members 0 to 0" in complaint(capsys, f"eval {trained} --member 1")
    assert "there are 1008, 1512, 2016" in complaint(capsys, f"eval {trained} --step 17")


def test_what_is_only_for_games(trained, capsys):
    """Opponents, searches and snapshots."""
    assert (
        complaint(capsys, f"eval {trained} --simulations 4") == "simulations=4: vtrace does not search; leave it out.\n"
    )
    alone = "catch has one player: there is nobody to play against.\n"
    assert complaint(capsys, f"eval {trained} --opponent random") == alone
    assert complaint(capsys, f"elo {trained}") == alone
    assert not (trained / "snapshots").exists()
    assert podracer.load(trained).snapshots() == []


def test_plot_of_nonsense(trained, tmp_path, capsys):
    assert "no rows of loss/totl in vtrace on catch; did you mean 'loss/total'" in complaint(
        capsys, f"plot {trained} --metric loss/totl"
    )
    assert "xyz" in complaint(capsys, f"plot {trained} -o curve.xyz")
    assert "has no generations" in complaint(capsys, f"plot {trained} --pbt")
    assert "--pbt draws one run" in complaint(capsys, f"plot {trained} {trained} --pbt")
    (tmp_path / "metrics.jsonl").write_text("")
    assert "there is no config.json" in complaint(capsys, f"plot {tmp_path}")
    shutil.copy(trained / "config.json", tmp_path)
    assert "nothing to plot" in complaint(capsys, f"plot {tmp_path}")


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("", "podracer train AGENT ENV"),
        ("--help", "podracer train AGENT ENV"),
        ("help", "podracer train AGENT ENV"),
        ("help train", "environments: acrobot, bandit"),
        ("help eval", "--episodes"),
        ("-h", "podracer bench anakin|sebulba|replay|search"),
        ("--version", f"podracer {podracer.__version__}\n"),
        ("train", "environments: acrobot, bandit"),
        ("train --help", "environments: acrobot, bandit"),
        ("train ppo --help", "environments: acrobot, bandit"),
        ("train ppo catch --help", "--agent.clip-epsilon"),
        ("train vtrace gridworld --help", "--env.task"),
        ("eval --help", "--episodes"),
        ("plot --help", "--metric"),
        ("envs --help", "pixel_catch"),
        ("agents --help", "Proximal policy optimisation"),
        ("bench --help", "podracer bench anakin|sebulba|replay|search"),
        ("bench anakin --help", "--repeats"),
    ],
)
def test_help(command, shown, capsys):
    assert run(command) == 0
    out, err = capsys.readouterr()
    assert shown in out
    assert err == ""


@pytest.mark.parametrize("command", ["train ppo gymnasium:Pendulum-v1", "resume run", "eval run"])
def test_an_animation_that_cannot_be_made_is_refused_before_the_work(command, copied, capsys, monkeypatch):
    """Pendulum is drawn by pygame."""
    monkeypatch.setitem(sys.modules, "pygame", None)
    description = rundir.read(copied) | {"env": "gymnasium:Pendulum-v1", "env_options": {"max_episode_steps": None}}
    rundir.write_json(copied / "config.json", description)
    loaded = types.SimpleNamespace(environment=environments.make("gymnasium:Pendulum-v1"), evaluate=pytest.fail)
    monkeypatch.setattr(podracer, "load", lambda directory, step, trust: loaded)
    monkeypatch.setattr(podracer, "train", pytest.fail)
    monkeypatch.setattr(podracer, "resume", pytest.fail)
    message = complaint(capsys, f"{command} --gif pendulum.gif")
    assert message.startswith("gymnasium:Pendulum-v1 cannot be rendered: pygame is not installed, run `pip install")
    assert not pathlib.Path("pendulum.gif").exists()
    assert not pathlib.Path("runs").exists()


def test_an_animation_of_what_has_no_pictures_is_refused_before_the_work(capsys, monkeypatch):
    monkeypatch.setattr(podracer, "train", pytest.fail)
    monkeypatch.delattr(envs_jax.catch.Catch, "render")
    assert complaint(capsys, f"{TRAIN} --gif catch.gif").startswith("catch has no render(state)")


def test_every_setting_has_a_flag(capsys):
    for name, (config, _) in AGENTS.items():
        assert run(f"train {name} catch --arch sebulba --help") == 0
        text = capsys.readouterr().out
        for field in config.__dataclass_fields__:
            assert f"--agent.{field.strip('_').replace('_', '-')}" in text
        for field in podracer.RunConfig.__dataclass_fields__:
            assert f"--{field.replace('_', '-')}" in text


def test_sebulbas_settings_are_shown_where_it_runs(asked, capsys):
    for command in ("catch", "catch --arch=sebulba", "catch --arch sebulba", "envpool:CartPole-v1"):
        assert run(f"train vtrace {command} --help") == 0
        text = capsys.readouterr().out
        assert ("--mode" in text) == ("sebulba options" in text) == (command != "catch"), command
        assert "--seed" in text
    assert run("train vtrace catch --run-dir nowhere --mode=lockstep --env_timeout 5") == 2
    settings = {name: asked[0][name] for name in podracer.RunConfig.__dataclass_fields__ if name in asked[0]}
    assert settings == {"mode": "lockstep", "env_timeout": 5.0, "seed": 0}


def test_integers_may_be_written_as_people_do(asked):
    for command in (
        "--total-steps 1e5 --num-envs 1_000 --agent.hidden-sizes 32,16 --env.rows 1.2e1 --hyper.discount 0.5,1e-3",
        "--total-steps 100000 --num-envs 1000 --agent.hidden-sizes 32 16 --env.rows 12 --hyper.discount 0.5 0.001",
    ):
        assert run(f"train vtrace catch --run-dir nowhere {command}") == 2
    assert asked[0] == asked[1]
    assert (asked[0]["total_steps"], asked[0]["config"]) == (100_000, {"hidden_sizes": (32, 16)})
    assert type(asked[0]["num_envs"]) is int


def test_a_preset_is_passed_on_with_what_was_typed(asked, capsys):
    """Typed settings go before the preset, also where they equal the value that the help shows."""
    game = "envpool:Pong-v5"
    run(f"train r2d2 {game} --preset atari --agent.batch-size 8 --env.noop-max 5 --run-dir nowhere")
    run(
        f"train dqn {game} --preset=fast_dqn --protocol machado --num_envs=8 --agent.rollout-length 1250 --agent.double"
    )
    run(f"train dqn {game} --preset fast_dqn --agent.no-double --checkpoint-replay --env.no-episodic-life")
    asked = [{name: value for name, value in settings.items() if value is not None} for settings in asked]
    for settings in asked:
        for name in ("run_dir", "resume", "progress", "seed", "hyper", "topology", "wrap"):
            del settings[name]
    none = {"config": {}, "env_options": {}}
    assert asked == [
        {"preset": "atari", "config": {"batch_size": 8}, "env_options": {"noop_max": 5}},
        none
        | {"preset": "fast_dqn", "protocol": "machado", "num_envs": 8}
        | {"config": {"rollout_length": 1250, "double": True}},
        {"preset": "fast_dqn", "checkpoint_replay": True}
        | {"config": {"double": False}, "env_options": {"episodic_life": False}},
    ]
    capsys.readouterr()
    assert run(f"train dqn {game} --preset rainbow --help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(name in shown for name in ("nature,fast_dqn,double,c51,qr,noisy,rainbow", "machado", "(default: 2000)"))


def test_envs_and_agents(capsys):
    assert run("envs") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        *envs_jax.names(),
        "pgx:GAME",
        "PREFIX:ID",
        "envpool:TASK",
        "gymnasium:ID",
    ]
    assert lines[envs_jax.names().index("catch")].split("  ")[-1].strip() == (
        "observation float32 [10, 5] in [0.0, 1.0]; action 1 of 3; options: rows=10, columns=5"
    )
    assert max(map(len, lines)) < 240
    assert run("envs pendulum") == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert names[0] == "pendulum"
    assert {"envpool:Pendulum-v1", "gymnasium:Pendulum-v1", "gymnasium:InvertedPendulum-v5"} <= set(names)
    shown = "observation float32 [3] in [-8.0, 8.0]; action float32 [1] in [-2.0, 2.0]"
    assert shown in lines[names.index("gymnasium:Pendulum-v1")]
    assert "cannot be used here: Gymnasium cannot make" in lines[names.index("gymnasium:InvertedPendulum-v4")]
    assert run("envs v5") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "envpool:Pong-v5" in lines, "too many to show what they are like"
    assert run("agents") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(AGENTS)


def test_from_training_to_a_picture(tmp_path, capsys):
    """train -> eval --json -> plot, in directories that the commands choose themselves."""
    assert run(f"{TRAIN} --gif catch.gif") == 0
    out, err = capsys.readouterr()
    run_dir = tmp_path / "runs" / "catch-vtrace-0"
    summary = json.loads((run_dir / "summary.json").read_text())
    first, second, third = out.splitlines()
    assert first.startswith(f"vtrace on catch: return {summary['eval_return_mean']:.3f} ± ")
    assert f"after {summary['env_steps']:,} steps" in first
    assert second == "run directory: runs/catch-vtrace-0 (curve.png, metrics.jsonl, summary.json, checkpoints/)"
    assert third == "animation: catch.gif"
    assert "2,016 steps   evaluation return" in err
    with Image.open("catch.gif") as gif:
        assert gif.n_frames == 10

    assert run(f"eval {run_dir} --episodes 16 --json") == 0
    out, err = capsys.readouterr()
    figures = json.loads(out)
    assert err == ""
    assert set(figures) == {"mean", "std", "interval", "episodes", "unfinished"}
    assert (figures["mean"], figures["std"]) == (summary["eval_return_mean"], summary["eval_return_std"])
    assert figures["interval"] == summary["eval_return_interval"]

    assert run(f"eval {run_dir} --episodes 16 --gif again.gif") == 0
    assert capsys.readouterr().out.startswith(f"vtrace on catch: return {figures['mean']:.3f} ± ")
    assert pathlib.Path("again.gif").read_bytes() == pathlib.Path("catch.gif").read_bytes()

    shutil.copytree(run_dir, tmp_path / "other" / "catch-vtrace-0")  # of the same name
    assert run(f"plot {run_dir} other/catch-vtrace-0 -o pictures/both.svg --metric loss/value") == 0
    assert capsys.readouterr().out == "pictures/both.svg\n"
    assert pathlib.Path("pictures/both.svg").read_text().count("<!-- ") > 0


def test_runs_of_one_name_are_all_drawn(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "a" / "run")
    shutil.copytree(trained, tmp_path / "b" / "run")
    drawn = {}
    monkeypatch.setattr(results.plots, "learning_curve", lambda histories, *rest, **names: drawn.update(histories))
    assert run("plot a/run b/run") == 0
    assert set(drawn) == {"a/run", "b/run"}
    assert all(len(rows) > 10 for rows in drawn.values())


def test_runs_that_differ_in_their_seeds_share_a_line(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "a")
    shutil.copytree(trained, tmp_path / "b")
    description = rundir.read(tmp_path / "b")
    description["run"]["seed"] = 1
    rundir.write_json(tmp_path / "b" / "config.json", description)
    drawn = []
    monkeypatch.setattr(
        results.plots, "learning_curve", lambda histories, *rest, title, **names: drawn.append((title, set(histories)))
    )
    assert run("plot a b") == run("plot a b --no-group") == 0
    assert drawn == [("vtrace on catch", {"vtrace on catch"}), ("vtrace on catch", {"a", "b"})]


def test_resume_without_a_run_dir(tmp_path, capsys, trained):
    """Begins a run if there is none, and finds the newest of its kind otherwise."""
    shutil.copytree(trained, tmp_path / "runs" / "catch-vtrace-0")
    shutil.copytree(trained, tmp_path / "runs" / "catch-vtrace-0-2")
    shutil.rmtree(tmp_path / "runs" / "catch-vtrace-0-2" / "checkpoints" / "2016")
    assert run(f"{TRAIN} --resume") == 0
    assert "run directory: runs/catch-vtrace-0-2 " in capsys.readouterr().out
    assert (tmp_path / "runs" / "catch-vtrace-0-2" / "checkpoints" / "2016").exists()
    assert not (tmp_path / "runs" / "catch-vtrace-0-3").exists()


def test_resume_asks_for_nothing_but_the_directory(copied, capsys):
    shutil.rmtree(copied / "checkpoints" / "2016")
    assert run(f"resume {copied} --gif {copied / 'policy.gif'}") == 0
    out = capsys.readouterr().out
    assert out.startswith("vtrace on catch: return ")
    assert f"animation: {copied / 'policy.gif'}" in out
    assert (copied / "checkpoints" / "2016").exists()
    assert (copied / "policy.gif").stat().st_size > 1000


def test_quiet_says_nothing(copied, capsys):
    assert run(f"{TRAIN} --run-dir {copied} --resume --quiet") == 0
    assert capsys.readouterr() == ("", "")


def test_eval_of_a_damaged_checkpoint_is_still_json(copied, capsys):
    for path in (copied / "checkpoints" / "2016" / "state").rglob("d/*"):
        path.write_bytes(b"")
    assert run(f"eval {copied} --episodes 16 --json") == 0
    out, err = capsys.readouterr()
    json.loads(out)
    assert err.startswith("checkpoint 2016 is damaged (")


# Runs that fail: exit code 1 and one line


@pytest.mark.parametrize(
    "error",
    [
        podracer.TrainingDivergedError("loss/total not finite after 100 environment steps"),
        podracer.CheckpointError("could not write checkpoint 100"),
        OSError(28, "No space left on device"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand many lines\nabout where"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_run_that_fails(error, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(podracer, "train", fail)
    assert run(TRAIN) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert str(error).splitlines()[0] in err


@pytest.mark.parametrize(
    ("kind", "code", "said"),
    [
        (podracer.ActorError, 1, "podracer: error: the price; PODRACER_TRACEBACK=1 shows the whole traceback.\n"),
        (KeyError, 1, "podracer: error: KeyError: 'the price', in fail, {}; PODRACER_TRACEBACK=1 shows the"),
        (ValueError, 2, "podracer: error: ValueError: the price, in fail, {}\n"),
    ],
)
def test_an_error_of_ones_own_code_says_where(kind, code, said, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise kind("the price")

    monkeypatch.setattr(podracer, "train", fail)
    expected = re.escape(said).replace(r"\{\}", r"\S+test_cli\.py, line \d+, `raise kind\(.*\)`")
    assert run(TRAIN) == code
    assert re.match(expected, capsys.readouterr().err)
    monkeypatch.setenv("PODRACER_TRACEBACK", "1")
    assert run(TRAIN) == code
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):\n")


def test_a_disk_that_is_full(copied, monkeypatch, capsys):
    """One whole line, which says how to go on; and going on works."""
    shutil.rmtree(copied / "checkpoints" / "2016")
    write = metrics.Log.write

    def refuse(self, row):
        with rundir.writing(copied / "metrics.jsonl"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(metrics.Log, "write", refuse)
    assert run(f"resume {copied} --quiet") == 1
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        f"podracer: error: could not write {copied}/metrics.jsonl: No space left on device. The last good checkpoint is "
        f"{copied}/checkpoints/1512. Make room and continue with podracer resume {copied}.\n",
    )
    monkeypatch.setattr(metrics.Log, "write", write)
    assert run(f"resume {copied} --quiet") == 0
    assert (copied / "checkpoints" / "2016").exists()


def test_a_run_that_was_stopped_is_not_one_that_is_complete(tmp_path, monkeypatch):
    write = metrics.Log.write

    def stop(self, row):
        write(self, row)
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(metrics.Log, "write", write)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell has it ignored
    monkeypatch.setattr(metrics.Log, "write", stop)
    try:
        assert run(f"{TRAIN} --quiet --run-dir {tmp_path / 'run'}") == 130
    finally:
        signal.signal(signal.SIGINT, handler)
    assert run(f"resume {tmp_path / 'run'} --quiet") == 0


def test_an_interrupted_run(monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(podracer, "train", interrupt)
    assert run(TRAIN) == 130
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow  # what is behind it is quick: tests/training/test_damage.py
@pytest.mark.nightly
def test_all_checkpoints_damaged(copied, capsys):
    for path in (copied / "checkpoints").rglob("d/*"):
        path.write_bytes(b"")
    assert run(f"eval {copied}") == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "can be read: checkpoint 2016 is damaged" in err


def test_type_checkers_read_our_types():
    """The marker is beside the sources, and a wheel takes it along."""
    for package in (podracer, envs_jax):
        assert (pathlib.Path(package.__file__).parent / "py.typed").exists()
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"] == {"*": ["py.typed", "*.proto"]}


def test_main_exits_with_the_code(monkeypatch):
    monkeypatch.setattr("sys.argv", ["podracer", "nonsense"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2


def test_a_reader_that_has_read_enough(monkeypatch, capsys):
    """As in `podracer agents | head -1`: nothing is said, and a shell sees what it sees of other programs."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as printed, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", printed)
        assert run("agents") == 0
        os.close(reader)
        assert run("agents") == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""

    def lost(argv):
        raise BrokenPipeError(errno.EPIPE, "the connection is gone")

    with monkeypatch.context() as patch:
        patch.setattr(cli.commands, "_reader_is_gone", lambda: False)
        patch.setattr("podracer.cli.listing.agents", lost)
        assert run("agents") == 1
        assert "[Errno 32] the connection is gone, in lost" in capsys.readouterr().err


def test_modules_beside_the_shell_are_found_last_and_only_where_one_is_asked_for(tmp_path, monkeypatch):
    """A file tyro.py there would run for every command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "run", lambda argv: 0)
    before = [path for path in sys.path if path != str(tmp_path)]
    for command, there in (
        ("--version", []),
        ("eval runs/x", []),
        ("train ppo gymnasium:CartPole-v1", []),
        ("train ppo gymnasium:mine:Reach-v0", [str(tmp_path)]),
        ("eval runs/x --trust", [str(tmp_path)]),
    ):
        monkeypatch.setattr(sys, "path", [*before])
        with pytest.raises(SystemExit, match="0"):
            cli.main(command.split())
        assert sys.path == [*before, *there]


# Going on, several seeds, sweeps and exports


def test_resume_trains_further(copied, capsys):
    assert run(f"resume {copied} --total-steps 2600") == 0
    assert "total_steps grows from 2,000 to 2,600" in capsys.readouterr().err
    assert json.loads((copied / "summary.json").read_text())["env_steps"] >= 2600


def test_several_seeds_are_several_runs(monkeypatch, tmp_path, capsys):
    asked = []

    def train(agent, environment, **settings):
        asked.append(settings)
        summary = {"complete": True, "eval_return_mean": float(settings["seed"])}
        return types.SimpleNamespace(summary=summary, run_dir=settings["run_dir"])

    monkeypatch.setattr(podracer, "train", train)
    assert run(f"{TRAIN} --seeds 4 7 5 --run-dir {tmp_path / 'run'}") == 0
    assert [settings["seed"] for settings in asked] == [4, 7, 5]
    assert [settings["run_dir"].name for settings in asked] == ["run-4", "run-7", "run-5"]
    assert "3 seeds: mean 5.333 (4.000 to 7.000)" in capsys.readouterr().out


def test_a_signal_at_the_end_of_a_seed_ends_the_others(monkeypatch, tmp_path):
    """Also where that run was complete by then."""
    asked = []

    def train(agent, environment, **settings):
        asked.append(settings["seed"])
        summary = {"complete": True, "env_steps": 10, "eval_return_mean": 1.0}
        result = types.SimpleNamespace(summary=summary, run_dir=settings["run_dir"], description={"own": []})
        raise podracer.Interrupted(result, "SIGINT", "the run was complete")

    monkeypatch.setattr(podracer, "train", train)
    assert run(f"{TRAIN} --seeds 4 7 --run-dir {tmp_path / 'run'}") == 130
    assert asked == [4]
    assert run(f"{TRAIN} --seed 7 --run-dir {tmp_path / 'run'}") == 0, "all that was asked for is there"


def test_a_sweep_in_the_shell(asked):
    run(f"{TRAIN} --hyper.learning-rate 0 1e-2 --hyper.entropy-cost 0 --init-from other --quiet")
    (settings,) = asked
    assert settings["hyper"] == {"learning_rate": [0.0, 0.01], "entropy_cost": 0.0}
    assert settings["init_from"] == pathlib.Path("other")


def test_a_population_that_evolves_in_the_shell(asked, capsys):
    typed = "--population 4 --pbt.interval 1000 --pbt.hyper learning_rate entropy_cost --pbt.score 0 1"
    run(f"{TRAIN} {typed} --agent.learning-rate-schedule constant")
    assert asked[0]["pbt"] == {"interval": 1000, "hyper": ("learning_rate", "entropy_cost"), "score": (0.0, 1.0)}
    run(TRAIN)
    assert asked[1]["pbt"] is None
    capsys.readouterr()
    assert run("train vtrace catch --help") == 0
    assert "--pbt.min-episodes" in capsys.readouterr().out


def test_a_run_starts_from_another_and_is_exported(trained, tmp_path, capsys):
    assert run(f"{TRAIN} --init-from {trained} --run-dir {tmp_path / 'run'} --quiet") == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["init_from"] == str(trained)
    assert run(f"export {tmp_path / 'run'} -o {tmp_path / 'policy'} --step best --episodes 0") == 0
    assert "podracer.load_policy" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "policy").iterdir()}
    assert names == {"policy.stablehlo", "spec.json", "check.npz", "MODEL_CARD.md"}
    assert "--output" in complaint(capsys, f"export {tmp_path / 'run'}")
