"""A release: the files around it agree, and the wheel installs and trains in an environment of its own."""

import email
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import types
import zipfile

import pytest

import podracer

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_tag_agrees_with_version_and_changelog():
    notes = load(ROOT / ".ci" / "release.py").notes
    changelog = "# Changelog\n\n## 0.2.0 (2026-01-31)\n\n*   New.\n\n## 0.1.0\n\n*   Old.\n"
    assert notes("v0.2.0", "0.2.0", changelog) == "*   New."
    for tag, version in (("v0.1.0", "0.2.0"), ("0.2.0", "0.2.0"), ("v0.1.0", "0.1.0"), ("v0.2.00", "0.2.00")):
        with pytest.raises(ValueError):
            notes(tag, version, changelog)
    with pytest.raises(ValueError, match="unreleased"):
        notes("v0.2.0", "0.2.0", changelog.replace("2026-01-31", "unreleased"))


def test_a_release_has_the_address_of_where_it_is_made():
    release = load(ROOT / ".ci" / "release.py")
    release.check_address("https://github.com/a/b", "https://github.com/a/b")
    for address, published in (("https://github.com/OWNER/NAME", "https://github.com/a/b"), ("https://x.org/a/b", "")):
        with pytest.raises(ValueError, match="--address"):
            release.check_address(address, published)


def test_version_changelog_and_citation_agree():
    yaml = pytest.importorskip("yaml")
    version = podracer.__version__
    heading = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading
    assert heading[1] == "Unreleased" or heading[1].startswith((f"{version} (", version))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version
    assert citation["license"] == PROJECT["license"]
    assert len(citation["references"]) == 5


@pytest.mark.parametrize(
    "path",
    [*sorted(ROOT.glob(".github/workflows/*.yml")), ROOT / ".pre-commit-config.yaml"],
    ids=lambda path: path.name,
)
def test_yaml_files_parse_and_run_what_there_is(path):
    yaml = pytest.importorskip("yaml")
    tree = yaml.safe_load(path.read_text())
    targets = set(re.findall(r"^([\w-]+|\$\(VENV\)/\.\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets = {target.replace("$(VENV)", ".venv") for target in targets}
    for job in tree.get("jobs", {}).values():
        assert all({"uses", "run"} & set(step) for step in job["steps"])
        for command in re.findall(r"make (\S+)", " ".join(step.get("run", "") for step in job["steps"])):
            assert command in targets, (path, command)


def test_make_compilers_knows_what_to_install():
    """Without the compilers the nightly tests of compiled programs are skipped."""
    makefile = (ROOT / "Makefile").read_text()
    script = re.search(r"\$\(BIN\)/python (.*compilers) requirements", makefile)
    command = [sys.executable, *script[1].split(), "requirements"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {line.partition("=")[0] for line in found.split()} >= {"libtpu", "jax-cuda13-plugin"}


def test_what_is_supported_is_tested():
    yaml = pytest.importorskip("yaml")
    ci, nightly = (
        yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())["jobs"]
        for name in ("ci", "nightly")
    )
    matrix = ci["test"]["strategy"]["matrix"]["include"]
    named = [word.removeprefix("Programming Language :: Python :: ") for word in PROJECT["classifiers"]]
    supported = [version for version in named if re.fullmatch(r"3\.\d+", version)]
    assert [entry["python"] for entry in matrix if "constraints" not in entry] == supported
    (lowest,) = (entry for entry in matrix if "constraints" in entry)
    assert f">={lowest['python']}" == PROJECT["requires-python"] == f">={supported[0]}"
    assert (ROOT / lowest["constraints"]).exists()
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in nightly.items()}
    assert commands["everything"] == [".ci/run", "make test-nightly"]
    assert commands["notebooks"] == ["make notebooks"]
    assert {"make lint", "make test", "make docs", "make dist"} <= {
        step.get("run") for job in ci.values() for step in job["steps"]
    }


def test_lowest_constraints_are_the_bounds():
    bound = re.compile(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)")
    lowest = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints" / "lowest.txt").read_text(), re.MULTILINE))
    extras = [text for name in ("sebulba", "gym", "games") for text in PROJECT["optional-dependencies"][name]]
    bounds = dict(bound.match(text).groups() for text in (*PROJECT["dependencies"], *extras))
    assert set(lowest) == {*bounds, "jaxlib"}
    for name, version in bounds.items():
        assert f"{lowest[name]}.".startswith(f"{version}."), name


def test_the_image_installs_extras_that_there_are():
    text = (ROOT / "Dockerfile").read_text()
    named = set(re.findall(r"extras=\"?([\w,]+)", text)[0].split(",")) | {"cuda12", "cuda13", "tpu"}
    assert named <= set(PROJECT["optional-dependencies"])
    needed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert all((ROOT / name).exists() for name in needed)
    assert {"podracer", "envs_jax", "pyproject.toml", "setup.py", "README.md"} <= needed


def test_links_of_a_readme_become_absolute(monkeypatch):
    # Virtual environments come without setuptools since Python 3.12, and this needs nothing of it.
    monkeypatch.setitem(sys.modules, "setuptools", types.SimpleNamespace(setup=None))
    text = "[a](docs/a.md#b) ![p](c/p.png) [![badge](b.svg)](nb.ipynb) [x](https://x.org) [here](#there)"
    assert load(ROOT / "setup.py").absolute(text, "https://h/o/r/", "1.2") == (
        "[a](https://h/o/r/blob/v1.2/docs/a.md#b) ![p](https://h/o/r/raw/v1.2/c/p.png) "
        "[![badge](https://h/o/r/raw/v1.2/b.svg)](https://h/o/r/blob/v1.2/nb.ipynb) [x](https://x.org) [here](#there)"
    )


def tracked():
    """The files that git tracks, or all files where there is no git, as in an unpacked sdist."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a clone")
    return listed.stdout.splitlines()


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Sdist and wheel, of a copy: building leaves files beside the source."""
    pytest.importorskip("build")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--outdir", out, source]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    return out


@pytest.mark.slow
def test_what_is_built_is_whole(dist):
    (wheel,) = dist.glob("*.whl")
    (sdist,) = dist.glob("*.tar.gz")
    packages = {name for name in tracked() if name.startswith(("podracer/", "envs_jax/"))}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = email.message_from_bytes(archive.read(next(name for name in names if name.endswith("/METADATA"))))
    assert {name for name in names if ".dist-info/" not in name} == packages
    assert {"podracer/py.typed", "envs_jax/py.typed"} <= names
    assert metadata["Version"] == podracer.__version__
    readme = metadata.get_payload()
    assert re.search(rf"!\[[^\]]+\]\({REPOSITORY}/raw/v{re.escape(podracer.__version__)}/benchmarks/", readme)
    assert not re.search(r"\]\((?!https?:|#)", readme)
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert set(tracked()) - inside == set()
    checks = ([sys.executable, "-m", "twine", "check", "--strict", wheel, sdist], ["check-wheel-contents", wheel])
    for command in checks:
        if command[0] == "check-wheel-contents":
            command = [pathlib.Path(sys.executable).parent / command[0], *command[1:]]
        checked = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.fixture
def installed(dist, tmp_path):
    """Runs commands in a fresh environment that has the wheel, in a directory and a home of their own."""
    (wheel,) = dist.glob("*.whl")
    venv, here, home = tmp_path / "venv", tmp_path / "here", tmp_path / "home"
    here.mkdir()
    home.mkdir()
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JAX_", "XLA_"))}
    subprocess.run([sys.executable, "-m", "venv", venv], check=True, env=outside)
    install = [venv / "bin" / "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", wheel]
    subprocess.run(install, check=True, env=outside, cwd=here)
    env = {"HOME": str(home), "PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}

    def run(*command):
        done = subprocess.run(
            [venv / "bin" / command[0], *command[1:]], cwd=here, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done

    yield run, here, home
    shutil.rmtree(venv)


@pytest.mark.slow
@pytest.mark.nightly  # in the slow tier: the wheel is whole; the workflow of a release tests it as well
def test_the_wheel_trains_in_an_environment_of_its_own(installed, tmp_path):
    run, here, home = installed
    run("pip", "check")
    where = run("python", "-c", "import podracer, envs_jax; print(podracer.__file__, envs_jax.__file__)").stdout
    assert where.count(str(tmp_path / "venv")) == 2
    train = ("train", "ppo", "catch", "--total-steps", "20000")
    run("podracer", *train, "--run-dir", "run", "--gif", "run/policy.gif")  # as `make demo` does
    assert json.loads((here / "run" / "summary.json").read_text())["complete"]
    assert (here / "run" / "policy.gif").read_bytes().startswith(b"GIF89a")
    assert (here / "run" / "curve.png").exists()
    launch = ("python", "-m", "podracer", "launch", "--processes", "2", "--")
    run(*launch, *train, "--topology", "pod", "--run-dir", "pod")
    summary = json.loads((here / "pod" / "summary.json").read_text())
    assert (summary["complete"], summary["processes"], summary["devices"]) == (True, 2, 2)
    assert run("podracer", "--version").stdout == f"podracer {podracer.__version__}\n"
    quick = ("--agents", "vtrace", "--num-envs", "64", "--repeats", "1", "--seconds", "0.05")
    assert "no yardstick" in run("podracer", "bench", "anakin", *quick).stderr
    assert {path.name for path in here.iterdir()} == {"run", "pod"}
    assert {path.name for path in home.iterdir()} <= {".cache", ".config"}
