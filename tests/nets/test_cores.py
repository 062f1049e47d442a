"""Cores: acting equals learning, resets cut all memory, and each computes what an independent oracle does."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import agents, nets, topology
from podracer.nets import transformer

T, B, F, D = 8, 3, 4, 6
KEY = jax.random.key(0)
SETTINGS = {
    "lstm": nets.CoreSettings("lstm", D),
    "gru": nets.CoreSettings("gru", D),
    "mingru": nets.CoreSettings("mingru", D, 2),
    "lru": nets.CoreSettings("lru", D, 2),
    "gtrxl": nets.CoreSettings("gtrxl", D, 2, 3),
}

cores = pytest.mark.parametrize("name", list(SETTINGS))


def rows(seed: int, T: int = T) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(T, B, F)), jnp.float32)


def resets(seed: int, T: int = T, share: float = 0.25) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).random((T, B)) < share)


@functools.cache
def made(name: str) -> tuple[Any, Any, Any, Any]:
    """A core, its parameters, its compiled unroll, and a state in the middle of episodes."""
    core: Any = SETTINGS[name].make()
    start = core.start(B)
    params = jax.jit(lambda: core.init(KEY, rows(0), resets(0), start))()
    unroll = jax.jit(core.apply)
    return core, params, unroll, unroll(params, rows(1), resets(1), start)[1]


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), found, expected)


# One row or many


FIRSTS = {
    "none": jnp.zeros((T, B), bool),
    "all": jnp.ones((T, B), bool),
    "row 0": jnp.zeros((T, B), bool).at[0].set(True),
    "last row": jnp.zeros((T, B), bool).at[-1, 1:].set(True),
    **{f"random {seed}": resets(seed) for seed in range(2, 6)},
}


@pytest.mark.parametrize("name", ["lstm", "gru", "mingru", "lru", pytest.param("gtrxl", marks=pytest.mark.slow)])
def test_any_cut_of_the_rows_gives_the_same(name: str) -> None:
    """Row by row, as acting is, and in two halves: outputs and states of the unroll, as learning is."""
    core, params, unroll, middle = made(name)
    for first in FIRSTS.values():
        for state in (core.start(B), middle):
            x = rows(7)
            expected, after = unroll(params, x, first, state)
            for size in (1, T // 2):
                found, now = [], state
                for t in range(0, T, size):
                    y, now = unroll(params, x[t : t + size], first[t : t + size], now)
                    found.append(y)
                close((jnp.concatenate(found), now), (expected, after))
            assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


@pytest.mark.parametrize("name", ["lstm", "gru", "mingru", "lru", pytest.param("gtrxl", marks=pytest.mark.slow)])
def test_a_first_row_cuts_all_that_was_before_it(name: str) -> None:
    """Neither earlier rows nor the state reach it, nor a NaN in the state; without it they do."""
    core, params, unroll, middle = made(name)
    row = 3
    first = jnp.zeros((T, B), bool).at[row, 0].set(True)
    spoilt = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan) if x.dtype == jnp.float32 else x, middle)
    every = unroll(params, rows(7), first.at[0].set(True), spoilt)
    close(every, unroll(params, rows(7), first.at[0].set(True), core.start(B)))

    def later(x: jax.Array, state: Any) -> jax.Array:
        return jnp.sum(jnp.sin(core.apply(params, x, first, state)[0][row:]), axis=(0, 2))

    of_rows, of_state = jax.jit(jax.jacrev(later, (0, 1), allow_int=True))(rows(7), middle)
    of_state = [x for x in jax.tree.leaves(of_state) if x.dtype == jnp.float32]
    assert not np.any(of_rows[0, :row, 0])
    assert not any(np.any(x[0]) for x in of_state)
    assert np.all(np.any(of_rows[1, :row, 1] != 0, axis=-1))
    if name != "gtrxl":  # whose window has no gradient
        assert all(np.any(x[1, 1]) for x in of_state)


@cores
def test_parameters_are_as_many_as_documented(name: str) -> None:
    count = {
        "lstm": 4 * D * (F + D + 1),
        "gru": 3 * D * (F + D) + 4 * D,
        "mingru": 2 * D * (F + 1) + 2 * D * (D + 1),
        "lru": D * (F + 1) + 2 * (6 * D * D + 8 * D),
        "gtrxl": D * (F + 1) + 2 * (19 * D * D + 11 * D),
    }
    params = made(name)[1]
    assert sum(x.size for x in jax.tree.leaves(params)) == count[name]


# Each against an oracle


def test_the_gru_is_flaxs() -> None:
    _, params, unroll, _ = made("gru")
    p = params["params"]
    kernels, biases = jnp.split(p["input"]["kernel"], 3, 1), jnp.split(p["input"]["bias"], 3)
    cell = nn.GRUCell(D)
    theirs: dict[str, Any] = {f"i{k}": {"kernel": w, "bias": b} for k, w, b in zip("rzn", kernels, biases)}
    theirs |= {f"h{k}": {"kernel": w} for k, w in zip("rzn", jnp.split(p["recurrent"], 3, 1))}
    bias = jnp.arange(1.0, D + 1)
    theirs["hn"]["bias"] = bias
    params = {"params": p | {"recurrent_bias": bias}}
    first = resets(3)
    y, after = unroll(params, rows(2), first, jnp.ones((B, D)))
    h = jnp.ones((B, D))
    with jax.numpy_rank_promotion("allow"):
        for t in range(T):
            h, _ = cell.apply({"params": theirs}, jnp.where(first[t, :, None], 0.0, h), rows(2)[t])
            close(y[t], h)
    close(after, h)


def test_mingru_is_its_log_form() -> None:
    """The cumulative sum in logarithms of the paper's appendix B.3, in float64, from each episode's start on."""
    _, params, unroll, _ = made("mingru")
    first, state = resets(3), jnp.asarray(np.random.default_rng(1).random((B, 2, D)), jnp.float32)
    y, after = unroll(params, rows(2), first, state)

    def log_form(x: np.ndarray, state: np.ndarray) -> np.ndarray:
        """One layer and lane without resets: x [T, 2 D] and a positive state [D] to h [T, D]."""
        z, c = np.split(x, 2, 1)
        log_g = np.where(c >= 0, np.log(np.maximum(c, 0) + 0.5), -np.log1p(np.exp(-c)))
        with np.errstate(divide="ignore"):
            inputs = np.concatenate([np.log(state)[None], -np.log1p(np.exp(-z)) + log_g])
        decay = np.concatenate([np.zeros((1, D)), np.cumsum(-np.log1p(np.exp(z)), 0)])
        return np.exp(decay + np.logaddexp.accumulate(inputs - decay))[1:]

    layers = [jax.tree.map(lambda x: np.asarray(x, float), params["params"][f"input_{i}"]) for i in range(2)]
    for lane in range(B):
        cuts = sorted({0, T, *np.flatnonzero(first[:, lane])})
        for begin, end in itertools.pairwise(cuts):
            x, last = np.asarray(rows(2)[begin:end, lane], float), []
            for i, p in enumerate(layers):
                h0 = np.zeros(D) if first[begin, lane] else np.asarray(state[lane, i], float)
                h = log_form(x @ p["kernel"] + p["bias"], h0)
                last.append(h[-1])
                x = x + h if i else h
            close(y[begin:end, lane], x)
        close(after[lane], np.stack(last))


def test_the_lru_is_powers_of_a_dense_complex_matrix() -> None:
    """By the definition in float64: the input of each row of the episode times a power of Lambda, and the start."""
    _, params, unroll, _ = made("lru")
    first, rng = np.asarray(resets(3)), np.random.default_rng(1)
    state = tuple(rng.normal(size=(B, 2, D)).astype(np.float32) for _ in range(2))
    y, (real, imaginary) = jax.tree.map(np.asarray, unroll(params, rows(2), first, state))
    p, power = jax.tree.map(lambda x: np.asarray(x, float), params["params"]), np.linalg.matrix_power
    for lane in range(B):
        x = np.asarray(rows(2)[:, lane], float) @ p["input"]["kernel"] + p["input"]["bias"]
        for i in range(2):
            q = p[f"layer_{i}"]
            v = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6)
            v = v * q["norm"]["scale"] + q["norm"]["bias"]
            A = np.diag(np.exp(-np.exp(q["nu"]) + 1j * np.exp(q["theta"])))
            entering = np.exp(q["gamma"]) * (v @ (q["B"][:, :D] + 1j * q["B"][:, D:]))
            begin, s = -1, []
            for t in range(T):
                begin = t if first[t, lane] else begin
                s.append(sum(power(A, t - k) @ entering[k] for k in range(max(begin, 0), t + 1)))
                if begin < 0:
                    s[-1] = s[-1] + power(A, t + 1) @ (state[0][lane, i] + 1j * state[1][lane, i])
            C = q["C"][:D] - 1j * q["C"][D:]
            out = np.asarray(jax.nn.gelu((np.array(s) @ C).real + q["d"] * v))
            value, gate = np.split(out @ q["output"]["kernel"] + q["output"]["bias"], 2, 1)
            x = x + value / (1.0 + np.exp(-gate))
            close((real[lane, i], imaginary[lane, i]), (s[-1].real, s[-1].imag))
        close(y[:, lane], x)


M, L = 3, 2


def list_gtrxl(p: Any, x: np.ndarray, first: np.ndarray) -> np.ndarray:
    """GTrXL of one lane, row by row, over a list of the episode's last M rows of each layer: [T, F] to [T, D]."""
    sigmoid = lambda v: 1.0 / (1.0 + np.exp(-v))  # noqa: E731
    dense = lambda q, v: v @ q["kernel"] + q["bias"]  # noqa: E731

    def norm(q: Any, v: np.ndarray) -> np.ndarray:
        return (v - v.mean()) / np.sqrt(v.var() + 1e-6) * q["scale"] + q["bias"]

    def gate(q: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        (W_r, W_z, W_g), (U_r, U_z) = np.split(q["y"], 3, 1), np.split(q["x"], 2, 1)
        r, z = sigmoid(y @ W_r + x @ U_r), sigmoid(y @ W_z + x @ U_z + q["bias"])
        return (1.0 - z) * x + z * np.tanh(y @ W_g + (r * x) @ q["reset_x"])

    def position(age: int) -> np.ndarray:
        angles = age * 10_000.0 ** (-np.arange(0, D, 2) / D)
        return np.concatenate([np.sin(angles), np.cos(angles)])

    found, past = [], [[] for _ in range(L)]
    for t in range(len(x)):
        if first[t]:
            past = [[] for _ in range(L)]
        h = dense(p["input"], x[t])
        for i in range(L):
            q, seen = p[f"layer_{i}"], [*past[i], h]
            past[i] = seen[-M:]
            query = norm(q["attention_norm"], h) @ q["query"]
            H = transformer.num_heads(D)
            key_bias, position_bias = (q[name].reshape(H, D // H) for name in ("key_bias", "position_bias"))
            attended = []
            for head in range(H):
                part = slice(head * D // H, (head + 1) * D // H)
                scores, values = [], []
                for age, row in zip(range(len(seen))[::-1], seen, strict=True):
                    key, value = np.split(norm(q["attention_norm"], row) @ q["key_value"], 2)
                    place = (position(age) @ q["position"])[part]
                    score = (query[part] + key_bias[head]) @ key[part] + (query[part] + position_bias[head]) @ place
                    scores.append(score / np.sqrt(D / H))
                    values.append(value[part])
                weights = np.exp(scores - np.max(scores))
                attended.append(weights / weights.sum() @ np.array(values))
            y = np.maximum(dense(q["attention_output"], np.concatenate(attended)), 0.0)
            h = gate(q["attention_gate"], h, y)
            hidden = np.maximum(dense(q["hidden"], norm(q["hidden_norm"], h)), 0.0)
            h = gate(q["output_gate"], h, np.maximum(dense(q["output"], hidden), 0.0))
        found.append(h)
    return np.array(found)


def test_gtrxl_is_a_loop_over_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two heads and biases that are not 0; acting and learning by the state are compared above."""
    monkeypatch.setattr(transformer, "HEAD_SIZE", D // 2)
    core: Any = nets.CoreSettings("gtrxl", D, L, M).make()
    T, start = 12, core.start(B)
    x, first = rows(2, T), resets(3, T, 0.15)
    params = jax.jit(lambda: core.init(KEY, x, first, start))()
    rng = np.random.default_rng(4)
    params = jax.tree.map(lambda v: v + jnp.asarray(0.3 * rng.normal(size=v.shape), jnp.float32), params)
    y, _ = jax.jit(core.apply)(params, x, first, start)
    biases = [v for path, v in jax.tree.leaves_with_path(params) if "bias" in jax.tree_util.keystr(path)]
    assert {v.ndim for v in biases} == {1}, "optimisers let matrices decay, and not biases"
    p = jax.tree.map(lambda v: np.asarray(v, float), params["params"])
    for lane in range(B):
        close(y[:, lane], list_gtrxl(p, np.asarray(x[:, lane], float), np.asarray(first[:, lane])))


@pytest.mark.slow
def test_slots_that_hold_nothing_stay_empty() -> None:
    """A NaN in them does no harm, forwards and backwards, and they leave as zeros; nothing learns through the window."""
    core, params, unroll, (window, count) = made("gtrxl")
    count = jnp.asarray([0, 1, M], jnp.int32)
    empty = (jnp.arange(M)[None] < M - count[:, None])[:, None, :, None]
    clean, spoilt = jnp.where(empty, 0.0, window), jnp.where(empty, jnp.nan, window)
    first = jnp.zeros((T, B), bool).at[T - 2, 1].set(True)
    expected = unroll(params, rows(5), first, (clean, count))
    found = unroll(params, rows(5), first, (spoilt, count))
    close(found, expected)
    window, after = found[1]
    np.testing.assert_array_equal(after, [M, 2, M])
    assert not np.any(window[1, :, : M - 2])
    assert np.all(np.any(window[0] != 0, axis=-1))
    loss = lambda p, w: jnp.sum(jnp.sin(core.apply(p, rows(5), first, (w, count))[0]))  # noqa: E731
    of_params, of_window = jax.jit(jax.grad(loss, (0, 1)))(params, spoilt)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(of_params))
    assert not np.any(of_window)


@pytest.mark.slow
def test_gtrxl_forgets_what_no_layer_reaches() -> None:
    """A row sees L M rows before it, and no further: after so many, an empty state is as good as the right one."""
    core, params, unroll, (window, _) = made("gtrxl")
    state, nothing = (window, jnp.full(B, M, jnp.int32)), jnp.zeros((T, B), bool)
    right, _ = unroll(params, rows(5), nothing, state)
    empty, _ = unroll(params, rows(5), nothing, core.start(B))
    assert nets.CoreSettings("gtrxl", D, L, M).rows_to_rebuild == L * M == 6
    close(empty[L * M :], right[L * M :])
    assert np.max(np.abs(empty[L * M - 1] - right[L * M - 1])) > 1e-5


@pytest.mark.slow
def test_units_of_linear_cores_begin_with_many_horizons() -> None:
    x, first = jnp.zeros((1, 1, 1)), jnp.zeros((1, 1), bool)
    cores: dict[str, Any] = {name: nets.CoreSettings(name, 256).make() for name in ("mingru", "lru")}  # type: ignore[arg-type]
    init = jax.jit(lambda: {name: core.init(KEY, x, first, core.start(1))["params"] for name, core in cores.items()})
    params = init()
    keep = jax.nn.sigmoid(-params["mingru"]["input_0"]["bias"][:256])
    assert 0.4 < float(jnp.mean(keep**20)) < 0.7
    q = params["lru"]["layer_0"]
    radius = jnp.exp(-jnp.exp(q["nu"]))
    assert 0.9 < float(jnp.min(radius)) < 0.91
    assert 0.99 < float(jnp.max(radius)) < 0.999
    close(jnp.exp(2 * q["gamma"]), 1 - radius**2)
    assert float(jnp.max(jnp.exp(q["theta"]))) < np.pi / 10
    close([jnp.std(q["B"]), jnp.std(q["C"])], [512**-0.5, 256**-0.5], 0.05)


@pytest.mark.slow
def test_units_of_the_gru_begin_with_many_horizons() -> None:
    """A bit is still there after 20 rows, where biases of 0 leave a millionth."""
    core: Any = nets.CoreSettings("gru", 256).make()
    x = jnp.zeros((1, 1, 1))
    params = core.init(KEY, x, jnp.zeros((1, 1), bool), core.start(1))["params"]
    keep = jax.nn.sigmoid(params["input"]["bias"][256:512])
    assert 0.4 < float(jnp.mean(keep**20)) < 0.7
    blocks = jnp.split(params["recurrent"], 3, 1)
    close([b.T @ b for b in blocks], [jnp.eye(256)] * 3, 1e-4)


@pytest.mark.slow
def test_the_gru_off_cpu_is_the_gru() -> None:
    core, params, _, state = made("gru")

    def run() -> Any:
        loss = lambda p, s: jnp.sum(jnp.sin(core.apply(p, rows(2), resets(2), s)[0]))  # noqa: E731
        return jax.jit(lambda p, s: jax.grad(loss, (0, 1))(p, s))(params, state)

    expected = run()
    with topology.compiling_for("gpu"):
        close(run(), expected)


def test_what_a_core_does_not_have() -> None:
    assert not nets.NO_CORE
    assert nets.NO_CORE.start(3) == ()
    assert nets.CoreSettings("gru", 32).describe() == "gru of 32"
    assert nets.CoreSettings("lru", 32, 2).describe() == "lru of 2 layers of 32"
    with pytest.raises(ValueError, match=r"core_layers=2: core='gru' has one layer; use 1, or core=mingru or lru or"):
        agents.PPOConfig(core="gru", core_layers=2)
    with pytest.raises(ValueError, match=r"core_size=100: gtrxl divides it by 3 heads; use 99"):
        agents.PPOConfig(core="gtrxl", core_size=100)
