"""The files of benchmarks/, which are no package: they import each other as scripts do."""

import importlib
import pathlib
from typing import Any

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> Any:
    """Imports a file; the folder is not left in `sys.path`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        return importlib.import_module(name)
