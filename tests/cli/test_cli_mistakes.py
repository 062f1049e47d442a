"""Mistakes in the shell: exit code 2, one line for each, and nothing left behind."""

import pathlib
import shutil
import sys
import types

import pytest

import envs_jax
import podracer
from podracer import environments
from podracer.run import rundir
from tests.support.shell import TRAIN, complaint


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
        ("train td3 pendulum", "unknown agent 'td3'; use sac with --preset td3, or preset='td3' in Python."),
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
        (
            "train vtrace catch --seeds 1 2 --seed 5",
            "--seed with --seeds: a run has one of the seeds each; leave --seed",
        ),
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
            "updates_per_call=4 has no effect without arch='sebulba'; leave it out.",
        ),
        (
            "train vtrace catch --no-prepare-ahead",
            "prepare_ahead=False has no effect without arch='sebulba'; leave it out.",
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


def test_an_animation_of_samples_is_refused(trained, capsys):
    refused = "--gif shows the best actions; leave out --greedy False."
    assert refused in complaint(capsys, f"eval {trained} --greedy False --gif x.gif")


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
