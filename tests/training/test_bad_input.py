"""Bad input: nothing is compiled, nothing is written."""

import pytest

import podracer
from podracer import nets, spaces
from tests.support.small_run import AGENT, RUN, Cliff, train


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("vtrac", "catch"), ValueError, "unknown agent 'vtrac'; did you mean 'vtrace'"),
        (("vtrace", "catsh"), ValueError, "unknown environment 'catsh'; did you mean 'catch'"),
        ((podracer.agents.vtrace.make, "catch"), TypeError, "agent is a function; give a name"),
        ((podracer.agents.VTraceConfig(), "catch"), TypeError, "agent is a VTraceConfig; give a name"),
        (("vtrace", object()), TypeError, "a object is no environment; give a name"),
        (("vtrace", None), TypeError, "a NoneType is no environment; give a name"),
    ],
)
def test_wrong_parts(arguments, error, message, tmp_path):
    with pytest.raises(error, match=message):
        podracer.train(*arguments, run_dir=tmp_path / "run", **RUN)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_envs": 10, "num_shards": 4}, "num_envs=10 is not divisible by the 4 shards; use 8 or 12"),
        ({"num_env": 8}, "RunConfig has no field 'num_env'; did you mean 'num_envs'"),
        ({"seed": "zero"}, r"RunConfig\.seed='zero': expected an integer"),
        ({"seed": 2**31 - 1, "population": 2}, "seed=2147483647: must be at most 2147483646 with population=2, whose"),
        ({"total_steps": 0}, r"RunConfig\.total_steps=0: must be at least 1"),
        ({"total_steps": 1.5}, r"RunConfig\.total_steps=1\.5: expected an integer"),
        ({"population": True}, r"RunConfig\.population=True: expected an integer"),
        ({"env_options": {"row": 3}}, "no option 'row'; did you mean 'rows'"),
        ({"env_options": {"rows": 1}}, r"CatchOptions\(rows=1\)"),
        ({"config": {"learning_rte": 1.0}}, "did you mean 'learning_rate'"),
        ({"config": {"learning_rate": "fast"}}, r"VTraceConfig\.learning_rate='fast': expected"),
        ({"config": {"hidden_sizes": (0,)}}, "must be at least 1"),
        ({"config": {"torso": "resnet"}}, "use torso='mlp'"),
        ({"config": podracer.agents.PPOConfig()}, "agent 'vtrace' takes a VTraceConfig, not PPOConfig"),
    ],
)
def test_wrong_settings(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        podracer.train("vtrace", "catch", run_dir=tmp_path / "run", **(RUN | changes))
    assert not (tmp_path / "run").exists()


def test_what_only_tracing_finds_is_found_before_anything_is_written(tmp_path):
    settings = RUN | {"num_envs": 3}
    with pytest.raises(ValueError, match="num_minibatches=4 does not divide"):
        podracer.train("ppo", "catch", config={"rollout_length": 5}, run_dir=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists(), "or the corrected command would find a run of another configuration"


def test_a_network_of_the_wrong_shape(tmp_path):
    network = nets.feed_forward(lambda key: {}, lambda params, observation: (observation, observation))
    with pytest.raises(ValueError, match=r"it must return outputs \[6, P\] and values \[6\]"):
        podracer.train("vtrace", Cliff(), network=network, run_dir=tmp_path / "run", **RUN)
    assert not (tmp_path / "run").exists()


def test_options_for_an_object():
    with pytest.raises(ValueError, match="env_options belong to an environment given by name"):
        podracer.train("vtrace", Cliff(), env_options={"good_steps": 1}, **RUN)
    agent = podracer.agents.vtrace.make(Cliff().spec)
    with pytest.raises(ValueError, match="config, network and optimizer belong to an agent given by name"):
        podracer.train(agent, Cliff(), config=AGENT, **RUN)


@pytest.mark.parametrize(
    ("field", "value"), [("action_space", spaces.Discrete(9)), ("observation_space", spaces.Box(-7, 7, (2,)))]
)
def test_an_agent_that_was_made_for_another_environment(field, value):
    """Equal shapes do not suffice: other bounds would be learnt in silence."""
    agent = podracer.agents.vtrace.make(Cliff().spec._replace(**{field: value}))
    with pytest.raises(ValueError, match=rf"agent: it was made for .*, whose {field} is .*; make it with the spec"):
        podracer.train(agent, Cliff(), **RUN)


def test_a_run_directory_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"cannot write to run directory .*file"):
        train(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
