"""The notebook of the examples, run from the first cell to the last as a browser would see it."""

import base64
import io
import os
import pathlib
import re

import pytest
from PIL import Image

import podracer

nbformat = pytest.importorskip("nbformat")

ROOT = pathlib.Path(podracer.__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def outputs(notebook, source):
    """What the cell that contains `source` shows, by media type."""
    (cell,) = (cell for cell in notebook.cells if cell.cell_type == "code" and source in cell.source)
    shown = {}
    for output in cell.outputs:
        assert output.output_type != "error", output.evalue
        assert output.get("name") != "stderr", f"a notebook paints stderr red: {output.text}"
        for kind, value in (output.get("data") or {"text": output.get("text")}).items():
            shown.setdefault(kind, []).append(value)
    return shown


def check(notebook):
    trained = outputs(notebook, 'train("ppo"')
    bar, summary = trained["text/html"]
    assert '<progress value="1.000" max="1"' in bar
    assert "ppo catch 100%, " in bar
    assert "".join(trained["text"]).splitlines()[-1].startswith("ppo on catch: return ")
    assert "<table>" in summary
    assert '<img src="data:image/png;base64,' in summary
    assert outputs(notebook, "evaluate(")["text/plain"][0].startswith("return ")
    (gif,) = outputs(notebook, "animate(")["text/html"]
    (data,) = re.findall(r"data:image/gif;base64,([^\"]+)", gif)
    assert Image.open(io.BytesIO(base64.b64decode(data))).n_frames == 10
    (png,) = outputs(notebook, "result.plot(")["image/png"]
    assert min(Image.open(io.BytesIO(base64.b64decode(png))).size) > 300
    bar, members = outputs(notebook, "population=")["text/html"]
    assert '<progress value="1.000" max="1"' in bar
    assert re.sub("<.*?>", " ", members).count("0.001 ") == 3, "three seeds of each rate"
    assert "dataframe" in outputs(notebook, "frame.pivot(")["text/html"][0]


def test_the_notebook_shows_what_it_did():
    assert NOTEBOOK.stat().st_size < 300_000
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    check(notebook)
    assert not re.search(r"/tmp/|/home/|/root/", NOTEBOOK.read_text()), "somebody's own directories"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "elsewhere"))
    for strict in ("JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION"):
        monkeypatch.delenv(strict)  # as a user has it
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    (tmp_path / "here").mkdir()
    resources = {"metadata": {"path": str(tmp_path / "here")}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    check(notebook)
    assert list((tmp_path / "here").iterdir()) == [], "nothing is written without a run_dir"
