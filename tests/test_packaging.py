"""The distribution: its name, and install lines that work."""

import pathlib
import re
import subprocess
import sys
import tomllib

import podracer

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KNOWN = {"gymnasium", "envpool", "pandas", "flatbuffers", "ipywidgets", "optuna"} | {
    re.split(r"[\[>=<]", requirement)[0] for group in PROJECT["optional-dependencies"].values() for requirement in group
}


def install_lines():
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/**/*.md",
        "podracer/**/*.py",
        "envs_jax/**/*.py",
        "examples/*",
    ):
        for path in ROOT.glob(pattern):
            if path.is_file():
                for found in re.finditer(r"pip install ([^\n`;#){]+)", path.read_text()):
                    yield path, found[1].strip().rstrip("\"',. ")


def test_install_lines_work():
    """`podracer` is another project's name on the public index: lines name a clone, or other packages that exist."""
    lines = list(install_lines())
    assert len(lines) >= 4
    for path, line in lines:
        for argument in line.replace("'", "").replace('"', "").split():
            local = re.fullmatch(r"\.(?:\[([\w,]+)\])?", argument)
            if local:
                extras = set((local[1] or "").split(",")) - {""}
                assert extras <= set(PROJECT["optional-dependencies"]), (path, line)
            else:
                assert argument in {"-e", "--editable", "-U", *KNOWN}, (path, line)


def test_the_distribution_is_not_the_podcast_client():
    assert PROJECT["name"] == "podracer-rl"


def test_importing_is_cheap_and_lists_what_there_is():
    """Names are imported when they are used: no agent, no checkpointing, no flax."""
    script = "import podracer, sys; print(*(m for m in ('flax', 'orbax', 'podracer.agents') if m in sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip() == ""
    )
    assert set(podracer.__all__) <= set(dir(podracer))
    for name in podracer.__all__:
        assert getattr(podracer, name) is not None
    assert not hasattr(podracer, "nothing")
