"""A result in a notebook: one line, one sentence, a table with the curve, and pictures that show themselves."""

import base64
import io
import re
import sys
import tempfile

import numpy as np
import pytest
from PIL import Image

import podracer
from podracer.result import plots
from podracer.result.result import Result
from podracer.run import config
from podracer.training import resolve

RATES = [1e-3, 1e-3, 1e-4, 1e-4]
SUMMARY = {
    **{"env_steps": 12_345, "train_seconds": 2.0, "steps_per_second": 6172.5, "compile_seconds": 1.25, "devices": 1},
    **{"device": "cpu: cpu", "eval_return_mean": 0.5, "eval_return_std": 0.25, "eval_episodes": 16, "complete": True},
}


def result_of(history=(), summary=None, run_dir=None, **settings):
    """A result of catch that nothing was trained for."""
    hyper = settings.pop("hyper", None)
    run = config.RunConfig(total_steps=100, num_envs=8, **settings)
    result = Result(resolve.resolve("vtrace", "catch", run, hyper=hyper), None, list(history), run_dir)
    result.summary = summary or {}
    return result


def member(seed, value, rate, diverged=False):
    return {"seed": seed, "eval_return_mean": value, "diverged": diverged, "learning_rate": rate, "discount": 0.99}


def rows(members=1, updates=3):
    """Training rows and, at every update but the first, evaluation rows."""
    many = {"member": 0} if members > 1 else {}
    for update in range(1, updates + 1):
        for i in range(members):
            row = {"env_steps": 10 * update + i, "updates": update} | (many and {"member": i})
            yield row | {"episode/return": float(update + i), "loss/value": 0.5}
        for i in range(members if update > 1 else 0):
            yield {"env_steps": 10 * update, "updates": update} | (many and {"member": i}) | {"eval/return_mean": 2.0}


def test_a_result_in_one_line_and_in_a_sentence():
    nothing = result_of()
    assert repr(nothing) == "<Result: vtrace on catch: not evaluated after 0 steps>"
    assert str(nothing) == "vtrace on catch: not evaluated after 0 steps"
    result = result_of(rows(), SUMMARY)
    line = "vtrace on catch: return 0.500 ± 0.250 over 16 episodes after 12,345 steps"
    assert repr(result) == f"<Result: {line}>"
    assert str(result) == f"{line} (training 2.0 s at 6,172 steps/s, compiling 1.2 s)"
    waited = str(result_of(rows(), SUMMARY | {"wall_seconds": 9.96}))
    parts = "training 2.0 s at 6,172 steps/s, compiling 1.2 s, the rest set-up, evaluation and files"
    assert waited == f"{line} (10.0 s: {parts})"
    assert "after 30 steps" in repr(result_of(rows())), "a run that was stopped has no summary yet"


def test_a_populations_sentence_is_about_all_its_members():
    members = [member(0, 345.0, 1e-3), member(1, 500.0, 1e-3), member(2, 497.5, 1e-3)]
    result = result_of(rows(3), SUMMARY | {"members": members}, population=3)
    assert "3 members: mean 447.5 (345.0 to 500.0); best: member 1 (seed 1), 500.0 after 12,345 st" in str(result)
    members = [member(0, -0.5, 1e-3), member(1, 9.0, 1e-2, diverged=True), member(2, 0.5, 1e-4)]
    result = result_of(rows(3), SUMMARY | {"members": members}, population=3)
    expected = (
        "3 members, 1 diverged: mean 3.000 (-0.500 to 9.000); best: member 2 (seed 2, learning_rate=0.0001), 0.500"
    )
    assert expected in str(result)
    assert "best: member 1" in str(result_of((), SUMMARY | {"members": [member(i, i, 1, True) for i in (0, 1)]}))


def test_a_history_as_a_data_frame():
    pytest.importorskip("pandas")
    frame = result_of(rows(4), population=4, seed=5, hyper={"learning_rate": RATES}).frame()
    assert list(frame.columns[:4]) == ["updates", "member", "seed", "env_steps"]
    assert len(frame) == 12, "evaluations are in the rows of their updates"
    returns = frame.pivot(index="updates", columns="member", values="episode/return")
    np.testing.assert_array_equal(returns, [[1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]])
    assert frame["eval/return_mean"].notna().sum() == 8
    assert list(frame.groupby("learning_rate")["seed"].unique().map(list)) == [[7, 8], [5, 6]]
    assert frame["env_steps"].nunique() == 12
    assert set(frame["env_steps"]) == {10 * update + i for update in (1, 2, 3) for i in range(4)}, "those of training"
    single = result_of(
        [{"env_steps": 8, "updates": 0, "replay/size": 1}, *rows(), {"env_steps": 9, "updates": 0, "replay/size": 2}]
    ).frame()
    assert list(single["updates"]) == [0, 1, 2, 3]
    assert list(single.iloc[0][["env_steps", "replay/size", "member", "seed"]]) == [9, 2, 0, 0]
    assert result_of().frame().empty


def test_a_data_frame_without_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        result_of(rows()).frame()


def text_of(html):
    return [re.sub(r"<.*?>", "|", row) for row in re.findall("<tr>(.*?)</tr>", html)]


def picture_in(html):
    ((kind, data),) = re.findall(r'<img src="data:(image/\w+);base64,([^"]+)"', html)
    return kind, Image.open(io.BytesIO(base64.b64decode(data)))


def test_a_result_in_a_notebook(tmp_path):
    html = result_of(rows(), SUMMARY, tmp_path / "<run>")._repr_html_()
    table = text_of(html)
    assert "|result||return 0.500 ± 0.250 over 16 episodes|" in table
    assert "|steps||12,345|" in table
    assert "|devices||1 x cpu|" in table
    assert f"|run directory||{tmp_path}/&lt;run&gt;|" in table
    assert picture_in(html)[0] == "image/png"
    assert not list(tmp_path.iterdir()), "looking at a result writes nothing"

    table = text_of(result_of()._repr_html_())
    assert "|result||not evaluated|" in table
    assert "<img" not in result_of()._repr_html_()

    members = [member(i, float(i), 10.0**-i) for i in range(15)]
    table = text_of(result_of((), SUMMARY | {"members": members})._repr_html_())
    assert "|member||seed||learning_rate||return|" in table
    assert "|3||3||0.001||3.000|" in table
    assert table[-1] == "|and 3 more|"


def test_an_evaluation_is_its_sentence():
    evaluation = podracer.Evaluation(np.float32([3.0]), np.float32([7.0]), 0)
    assert repr(evaluation) == str(evaluation) == "return 3.000 ± 0.000 (95% interval 3.000 to 3.000, 1 episodes)"


def test_pictures_show_themselves(tmp_path):
    curve = result_of(rows()).plot(tmp_path / "curve.png")
    assert curve == tmp_path / "curve.png"
    assert curve._repr_png_() == (tmp_path / "curve.png").read_bytes()
    assert curve._repr_html_() is None
    assert curve.parent._repr_png_() is None
    gif = plots.animation(np.uint8([[[[i] * 3]] for i in range(2)]), tmp_path / "a.gif")
    kind, picture = picture_in(gif._repr_html_())
    assert (kind, picture.n_frames, gif._repr_png_()) == ("image/gif", 2, None)
    assert "data:image/svg+xml;base64," in result_of(rows()).plot(tmp_path / "curve.svg")._repr_html_()
    gif.unlink()
    assert gif._repr_html_() is None


def test_where_pictures_go(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    assert result_of(rows(), run_dir=run_dir).plot() == run_dir / "curve.png"
    assert plots.default_path(run_dir, "policy.gif") == run_dir / "policy.gif"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    here = set(tmp_path.iterdir())
    paths = [result_of(rows()).plot() for _ in range(2)]
    assert all(path.name == "curve.png" and path.is_file() for path in paths)
    assert paths[0] != paths[1]
    assert set(tmp_path.iterdir()) == here, "nothing lands in the working directory"
    with pytest.raises(ValueError, match="nothing to plot"):
        result_of().plot()
