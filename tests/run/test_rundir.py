"""The directories of runs: new names without races, on file systems."""

import contextlib
import pathlib

import jax
import pytest

import podracer
from podracer.run import rundir
from podracer.run.config import RunConfig
from podracer.system import files
from podracer.training import caches
from podracer.training.resolve import resolve


def test_runs_that_begin_at_once_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with contextlib.ExitStack() as together:
        named = [together.enter_context(rundir.new_default("ppo", "pgx:go_9x9", 3)).name for _ in range(3)]
        assert named == ["pgx-go_9x9-ppo-3", "pgx-go_9x9-ppo-3-2", "pgx-go_9x9-ppo-3-3"]
        (tmp_path / "runs" / named[1] / "config.json").touch()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [named[1]], "others were refused, and wrote nothing"
    default, seen = rundir.default, iter([named[1]])
    late = lambda *of: tmp_path / "runs" / name if (name := next(seen, None)) else default(*of)  # noqa: E731
    monkeypatch.setattr(rundir, "default", late)
    with rundir.new_default("ppo", "pgx:go_9x9", 3) as directory:
        assert directory == pathlib.Path("runs") / named[0], "another run was faster, and the next name is free"
    plain = tmp_path / "runs" / "catch-ppo-0"
    plain.symlink_to(tmp_path / "gone")
    with rundir.new_default("ppo", "catch", 0) as directory:
        assert directory.name == f"{plain.name}-2", "a link to a disk that is gone has the name"
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    with rundir.new_default("ppo", "catch", 0):
        pass
    assert not list((tmp_path / "other").iterdir())


def test_an_address_is_no_directory(tmp_path, monkeypatch):
    """A folder `gs:` was made, and the run trained into it."""
    monkeypatch.chdir(tmp_path)
    for address in ("gs://bucket/run", "gs:/bucket/run", pathlib.Path("s3://bucket/run")):
        for function in (lambda to: podracer.train("ppo", "catch", run_dir=to), podracer.load, podracer.resume):
            with pytest.raises(ValueError, match=r"is no directory: podracer writes to file systems; mount what is at"):
                function(address)
    assert not list(tmp_path.iterdir())
    assert files.local("runs/pgx:go_9x9").name == "pgx:go_9x9"


def test_another_version_that_goes_on_is_said(tmp_path):
    description = resolve("ppo", "catch", RunConfig(total_steps=100, num_envs=8)).description
    assert rundir.prepare(tmp_path / "run", description | {"podracer": "0.0.9"}, resume=False) == []
    longer = description | {"run": description["run"] | {"total_steps": 200}}
    for now, more in ((description, 0), (longer, 1)):
        said = rundir.prepare(tmp_path / "run", now, resume=True)
        assert said[0] == f"the run was begun with podracer 0.0.9, and podracer {podracer.__version__} goes on with it"
        assert len(said) == 1 + more
    assert rundir.read(tmp_path / "run")["podracer"] == "0.0.9"


def test_a_run_without_a_pool_of_resets_goes_on_with_either_value(tmp_path):
    """None and 0 give equal results; a pool gives others."""
    description = resolve("ppo", "catch", RunConfig(total_steps=100, num_envs=8)).description
    with_pool = lambda number: description | {"run": description["run"] | {"reset_pool": number}}  # noqa: E731
    rundir.prepare(tmp_path / "run", with_pool(0), resume=False)
    assert rundir.prepare(tmp_path / "run", with_pool(None), resume=True) == []
    with pytest.raises(ValueError, match=r"run\.reset_pool: 0 -> 4"):
        rundir.prepare(tmp_path / "run", with_pool(4), resume=True)


def test_a_run_of_a_setting_that_has_another_name_now_is_refused(tmp_path):
    description = resolve("r2d2", "catch", RunConfig(total_steps=10_000, num_envs=8)).description
    old = {k: v for k, v in description["agent_config"].items() if k != "target_interval"}
    earlier = description | {"agent_config": old | {"target_update_interval": 200}}
    rundir.prepare(tmp_path / "run", earlier, resume=False)
    with pytest.raises(
        ValueError, match=r"agent_config.target_interval: absent -> 200; .*_update_interval: 200 -> absent"
    ):
        rundir.prepare(tmp_path / "run", description, resume=True)
    for use in (podracer.resume, podracer.load):
        with pytest.raises(
            ValueError, match=r"R2D2Config has no field 'target_update_interval'; did you mean 'target_int"
        ):
            use(tmp_path / "run")


def test_more_updates_than_can_be_counted_are_refused():
    for agent, config in (("ppo", {}), ("dqn", {"replay_capacity": 1000, "replay_min_size": 100})):
        refused = RunConfig(total_steps=2**50, num_envs=8)
        with pytest.raises(ValueError, match=r"updates, and their counter holds 2,147,483,647: use more num_envs"):
            resolve(agent, "catch", refused, config=config)
    resolve("ppo", "catch", RunConfig(total_steps=2**35, num_envs=1024))


def test_without_a_home_there_is_no_cache(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    cache = jax.config.jax_compilation_cache_dir
    monkeypatch.setattr(pathlib.Path, "home", homeless)
    try:
        for elsewhere, expected in (("", None), ("/somewhere", "/somewhere/podracer/xla")):
            monkeypatch.setenv("XDG_CACHE_HOME", elsewhere)
            jax.config.update("jax_compilation_cache_dir", None)
            caches.use_compilation_cache()
            assert jax.config.jax_compilation_cache_dir == expected
    finally:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
