"""The generated module is what the protocol's compiler makes of the protocol."""

import os
import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "podracer" / "remote"
COMPILER = pathlib.Path(os.environ.get("PODRACER_PROTOC", f"{sys.prefix}/protoc"))
COMPILE = (
    "import sys; from grpc_tools import _protoc_compiler as compiler; "
    "sys.exit(compiler.run_main([word.encode() for word in sys.argv]))"
)


def test_the_generated_module_is_what_the_compiler_makes(tmp_path):
    """Byte for byte, by the compiler alone: what it comes with needs an older protobuf than we have."""
    command = [sys.executable, "-c", COMPILE, f"-I{FOLDER}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    variables = os.environ | {"PYTHONPATH": str(COMPILER)}
    there = [sys.executable, "-c", "import grpc_tools._protoc_compiler"]
    if subprocess.run(there, env=variables, capture_output=True, check=False).returncode:
        pytest.skip(f"no grpcio-tools in {COMPILER}: `make protoc` installs them")
    subprocess.run([*command, str(FOLDER / "session.proto")], env=variables, check=True)
    for name in ("session_pb2.py", "session_pb2.pyi"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes(), (
            f"{name}: see docs/development/releases.md"
        )
