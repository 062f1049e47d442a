"""The notebooks in examples/notebooks: `python docs/notebooks.py [NAME ...]` runs them and keeps what they show.

`python docs/notebooks.py --address` only writes the repository's address, which pyproject.toml has, wherever else it
stands: where notebooks install from, in the links that open them in Colab, and in those to pictures of results.

The metadata of a notebook says what is particular to it, under `podracer`: `test`, the values that its cell tagged
`parameters` has in a test, where it must be small; `seconds`, how long a cell may take there; and `code`, which code
its outputs belong to, and is written here. docs/generate.py makes pages of them.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import os
import pathlib
import re
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import nbformat

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "notebooks"

PAGES = (ROOT / "README.md", ROOT / "docs" / "start.md")
"""Pages with links to Colab."""

Notebook = nbformat.NotebookNode


def paths() -> list[pathlib.Path]:
    """The notebooks, in the order in which they are read."""
    return sorted(FOLDER.glob("*.ipynb"))


def read(path: pathlib.Path) -> Notebook:
    return nbformat.read(path, as_version=4)


def repository() -> str:
    """Where the library is published: `project.urls.Repository` of pyproject.toml, the only place that says so."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]


def colab(path: pathlib.Path) -> str:
    """The address that opens a notebook in Colab."""
    name = path.relative_to(ROOT).as_posix()
    return f"https://colab.research.google.com/github/{_account()}/blob/main/{name}"


def addressed(text: str) -> str:
    """A page, or the file of a notebook, with the repository's address where it has one."""
    hosts = r'colab\.research\.google\.com/github/|raw\.githubusercontent\.com/|repository = \\?"https://github\.com/'
    places = rf"({hosts})[\w.-]+/[\w.-]+"
    return re.sub(places, rf"\g<1>{_account()}", text)


def _account() -> str:
    return repository().removeprefix("https://github.com/")


def code_of(notebook: Notebook) -> str:
    """A hash of the code of a notebook, by which its outputs are known to be its own.

    Without the cell that installs: it does nothing where outputs are made, and has the repository's address.
    """
    cells = [cell for cell in notebook.cells if "install" not in cell.metadata.get("tags", ())]
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:16]


def with_values(source: str, values: Mapping[str, Any]) -> str:
    """The code of a `parameters` cell with other values.

    Raises:
      ValueError: for a name that it does not set.
    """
    tree, missing = ast.parse(source), set(values)
    for node in tree.body:
        if isinstance(node, ast.Assign) and (name := ast.unparse(node.targets[0])) in values:
            node.value = ast.parse(repr(values[name]), mode="eval").body
            missing.discard(name)
    if missing:
        raise ValueError(f"the cell tagged `parameters` does not set {', '.join(sorted(missing))}.")
    return ast.unparse(tree)


def executed(
    notebook: Notebook,
    directory: pathlib.Path,
    environment: Mapping[str, str],
    values: Mapping[str, Any] | None = None,
    seconds: int = 1200,
) -> Notebook:
    """A notebook's copy, run from the first cell to the last.

    Args:
      notebook: it stays as it is.
      directory: where its kernel runs.
      environment: variables of its kernel; without MPLBACKEND, as only the kernel's own choice shows pictures, and
        importing some of EnvPool's environments sets it.
      values: of its cell tagged `parameters`, instead of those that it has.
      seconds: that a cell may take.

    Returns:
      With outputs; of what has a picture or a table, these alone.

    Raises:
      nbclient.exceptions.CellExecutionError: where a cell fails.
      nbclient.exceptions.CellTimeoutError: where one takes longer.
    """
    from nbclient import NotebookClient

    notebook = copy.deepcopy(notebook)
    for cell in notebook.cells:
        if values and "parameters" in cell.metadata.get("tags", ()):
            cell.source = with_values(cell.source, values)
    client = NotebookClient(
        notebook,
        timeout=seconds,
        iopub_timeout=60,  # of a busy machine, what a cell shows comes late: without it, it would be lost
        kernel_name="python3",
        resources={"metadata": {"path": str(directory)}},
        record_timing=False,
    )
    client.execute(env={name: value for name, value in environment.items() if name != "MPLBACKEND"})
    for output in [output for cell in notebook.cells for output in cell.get("outputs", ())]:
        if {"text/html", "image/png"} & set(output.get("data", ())):
            output.data.pop("text/plain", None)  # nobody sees it, and of a picture it names a temporary file
    return notebook


def pages() -> Iterator[tuple[str, str | bytes]]:
    """Pages of the site and their pictures, by name."""
    from nbconvert import MarkdownExporter

    index = "# Notebooks\n\nFrom `examples/notebooks`, with what they show on two CPU cores. Colab opens them.\n\n"
    for path in paths():
        notebook = read(path)
        notebook.cells = [cell for cell in notebook.cells if "install" not in cell.metadata.get("tags", ())]
        text, resources = MarkdownExporter().from_notebook_node(notebook, {"output_files_dir": path.stem})
        # The site has the pictures of results itself.
        text = re.sub(r"https://raw\.githubusercontent\.com/[\w./-]+/benchmarks/results/(\w+/)*", "../results/", text)
        title, _, rest = text.partition("\n")
        text = f"{title}\n\n[Open in Colab]({colab(path)})\n{rest}"
        yield f"notebooks/{path.stem}.md", text
        for name, data in resources["outputs"].items():
            yield f"notebooks/{name}", data
        title, about = re.match(r"# (.*)\n+(.*)", notebook.cells[0].source).groups()
        index += f"*   [{title}]({path.stem}.md): {about}\n"
    yield "notebooks/index.md", index


def main(names: Sequence[str]) -> None:
    for path in (*PAGES, *paths()):
        path.write_text(addressed(path.read_text()))
    if "--address" in names:
        return
    for path in [path for path in paths() if not names or path.stem in names]:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            (directory := pathlib.Path(scratch) / "here").mkdir()
            # A cache of its own: what it says of compiling is what somebody sees who runs it for the first time.
            environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": f"{scratch}/cache"}
            notebook = executed(read(path), directory, environment)
        notebook.metadata.podracer["code"] = code_of(notebook)
        nbformat.write(notebook, path)
        print(f"{path.stem}: {time.monotonic() - begin:.0f} s, {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
