"""Evaluations: one episode a lane, and endless ones."""

import jax
import jax.numpy as jnp
import numpy as np

import podracer
from podracer.evaluation import evaluation
from tests.support.counting import CountingEnvironment
from tests.support.small_run import AGENT, EverLonger, my_network


def play(env, episodes, **limit):
    """An evaluation of a policy that knows nothing."""
    agent = podracer.agents.vtrace.make(env.spec, network=my_network(*env.spec.observation_space.shape))
    learner = agent.init(jax.random.key(0), {name: jnp.float32(value) for name, value in agent.hyper.items()})
    evaluator = evaluation.make(agent, env, episodes, **limit)
    return evaluation.summarize(*evaluator(agent.actor_params(learner, jnp.float32(1)), jax.random.key(0)))


def test_every_lane_plays_one_episode_whatever_its_length():
    result = play(CountingEnvironment(num_actions=2), 64)  # rewards 1, 2, ..., n
    assert set(result.lengths) == {1, 2, 3, 4, 5, 6}
    np.testing.assert_array_equal(result.returns, result.lengths * (result.lengths + 1) / 2)
    assert result.unfinished == 0


def test_evaluation_cuts_endless_episodes():
    result = play(EverLonger(), 3, max_steps=25)
    np.testing.assert_array_equal(result.returns, [25.0] * 3)
    assert result.unfinished == 3
    assert "3 cut at the step limit" in str(result)


def test_evaluations_take_no_more_steps_than_training():
    spec = EverLonger().spec
    limit = lambda episodes, every: evaluation.step_limit(spec, episodes, every)  # noqa: E731
    assert [limit(32, 10**6), limit(32, 200_000), limit(32, 100)] == [10_000, 6_250, 1_000]
    assert evaluation.step_limit(spec._replace(max_episode_steps=27_000), 32, 100) == 27_000


def test_a_run_whose_episodes_never_end_says_so(capsys, monkeypatch):
    monkeypatch.setattr(evaluation, "LEAST_MAX_STEPS", 10)
    settings = {"total_steps": 160, "num_envs": 8, "eval_every": 80, "eval_episodes": 4, "config": AGENT}
    result = podracer.train("vtrace", EverLonger(), check=False, **settings)
    assert (result.summary["eval_unfinished"], result.summary["eval_longest_episode"]) == (4, 20)
    out, err = capsys.readouterr()
    assert "vtrace on ever_longer: return 20.000 ± 0.000 over 4 episodes (4 cut at 20 steps) after 160 steps" in out
    assert err.count("evaluation return 20.000, 4 of 4 episodes cut at 20 steps\n") == 2
    assert (
        err.count("4 of 4 episodes cut at 20 steps: the evaluation's returns are those until then; in training non")
        == 1
    )
    assert "max_episode_steps (in env_options" in err
