"""Pictures of EnvPool's MuJoCo tasks without a display."""

from __future__ import annotations

import functools
import pathlib
import subprocess
import sys
import tempfile


def opengl() -> list[str]:
    """Returns the paths of EnvPool's own EGL, for drawing without a display: MuJoCo looks for it in the process."""
    import envpool

    libraries = pathlib.Path(envpool.__file__).parent.with_name("envpool.libs")
    return [str(path) for path in libraries.glob("libEGL-*")]


def is_mujoco(task: str) -> bool:
    """True for a task that MuJoCo draws."""
    from envpool.registration import registry

    return str(registry.specs[task][0]).startswith("envpool.mujoco")


DRAW = """
import ctypes, sys, envpool
for library in sys.argv[2:]:
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
pool = envpool.make(sys.argv[1], env_type="gymnasium", num_envs=1, render_mode="rgb_array")
pool.reset()
pool.render()
"""


@functools.cache
def problem(task: str) -> str:
    """Returns the reason why a picture of a task cannot be drawn, or "".

    It tries in another process, because MuJoCo ends a process without OpenGL.
    """
    with tempfile.TemporaryDirectory() as elsewhere:  # it leaves a log
        command = [sys.executable, "-c", DRAW, task, *opengl()]
        try:
            ran = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, errors="replace", timeout=120)
        except subprocess.TimeoutExpired:
            return "it took more than two minutes"
    if not ran.returncode:
        return ""
    lines = (ran.stdout + ran.stderr).strip().splitlines() or [f"exit code {ran.returncode}"]
    return lines[-1].removeprefix("ERROR: ").partition(", this most likely")[0].rstrip(".")
