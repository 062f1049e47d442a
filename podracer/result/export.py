"""A policy in files that need none of the agent's code (`podracer export`), and how to use them.

    policy.stablehlo   the policy for CPU, GPU and TPU, its parameters inside, for batches of any size (jax.export)
    spec.json          spaces, and the memory that passes from call to call
    check.npz          observations, rewards and `first` of 16 rows of one lane, and the actions for them
    MODEL_CARD.md      its description, its score and the way to run it, in the form that model hubs read

The exported function is `(memory, observation [b, ...], reward float32 [b], first bool [b]) -> (action, memory)`, where
memory is a flat tuple of arrays [b, ...]; zeros will do where the rows are `first`. Actions are the best ones that the
agent knows, without chance. The function counts choices from 0: where a space of spec.json has a `start`, it is added
outside (`podracer.environments.gate`).
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from podracer import spaces
from podracer.environments import gate
from podracer.result.policy import Actor, Policy
from podracer.system import files
from podracer.types import ArrayTree, EnvSpec
from podracer.version import __version__

PLATFORMS = ("cpu", "cuda", "tpu")
CHECK_ROWS = 16
FORMAT = 1

STABLE_CALLS = frozenset(
    (
        *("AllocateBuffer", "ApproxTopK", "Eigh", "LuDecomposition", "ProductOfElementaryHouseholderReflectors", "Qr"),
        *("SPMDFullToShardShape", "SPMDShardToFullShape", "Sharding", "annotate_device_placement", "shape_assertion"),
        *("stablehlo.dynamic_approx_top_k", "stablehlo.dynamic_reduce_window", "stablehlo.dynamic_rng_bit_generator"),
        "stablehlo.dynamic_top_k",
        *(f"{gpu}_{name}" for gpu in ("cu", "hip") for name in ("lu_pivots_to_permutation", "threefry2x32_ffi")),
        *(
            f"{gpu}solver_{name}_ffi"
            for gpu in ("cu", "hip")
            for name in ("geqrf", "gesdd", "gesvd", "gesvdj", "getrf", "orgqr", "potrf", "syevd", "sytrd")
        ),
        "cusparse_gtsv2_ffi",
        *(
            f"lapack_{dtype}{name}_ffi"
            for dtype in "sdcz"
            for name in (
                *("gees", "geev", "gehrd", "geqrf", "gesdd", "getrf", "gtsv", "heevd", "hetrd", "orgqr", "potrf"),
                *("syevd", "sytrd", "trsm", "ungqr"),
            )
        ),
    )
)
"""Custom calls that JAX guarantees to export for years (`jax.export`), and which compute from their arguments alone.

Others may take addresses, or call back into Python. Kernels (`tpu_custom_call`, `mosaic_gpu_v2`) are left out."""


def save(policy: Policy, directory: str | pathlib.Path, card: Mapping[str, Any]) -> pathlib.Path:
    """Writes a greedy policy, and checks that the files act as it does.

    Args:
      policy: a greedy one.
      directory: made if it does not exist; files of an earlier export are replaced once the new ones are complete.
      card: facts for the model card: `agent`, `environment`, `source`, and `evaluation` (a sentence) with `mean`, or
        None.

    Raises:
      ValueError: if the directory cannot be written, or actions depend on chance.
      RuntimeError: if the files do not act as the policy.
    """
    directory = files.local(directory)
    data = _export(policy).serialize()
    rows = _rows(policy.spec)
    actions = _play(Actor(policy), rows)
    memory = [{"shape": list(x.shape[1:]), "dtype": str(x.dtype)} for x in policy.start(1)]
    description = {
        "format": FORMAT,
        "environment": policy.spec.name,
        "observation_space": spaces.to_json(policy.spec.observation_space),
        "action_space": spaces.to_json(policy.spec.action_space),
        "memory": memory,
        "uses_reward": policy.uses_reward,
        "deterministic": True,
        "platforms": PLATFORMS,
        "jax": jax.__version__,
        "podracer": __version__,
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Beside those of an earlier export, which stay if these cannot be written or act differently.
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=directory, ignore_cleanup_errors=True) as name:
            beside = pathlib.Path(name)
            files.write(beside / "policy.stablehlo", bytes(data))
            files.write(beside / "spec.json", json.dumps(description, indent=2) + "\n")
            with files.replacing(beside / "check.npz") as path:
                np.savez(path, **rows, action=actions)  # type: ignore[arg-type]
            files.write(beside / "MODEL_CARD.md", _card(policy, card, len(data)))
            check(beside)
            for path in beside.iterdir():
                path.replace(directory / path.name)
    except OSError as error:
        raise ValueError(f"cannot write to {directory}: {error.strerror or error}.") from error
    return directory


def load_policy(directory: str | pathlib.Path, batch: int | None = None) -> Actor:
    """An actor that follows an exported policy, which is a program: load those of people whom you trust.

    Args:
      directory: a directory that `podracer export` wrote.
      batch: lanes that act together; None for one, without a dim for lanes.

    Raises:
      ValueError: if the directory has no policy, one of a newer format, or one that calls native code beyond JAX's own
        exports.
    """
    directory = pathlib.Path(directory)
    try:
        description = json.loads((directory / "spec.json").read_text())
        data = (directory / "policy.stablehlo").read_bytes()
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{directory} holds no exported policy ({error}).") from None
    if description.get("format") != FORMAT:
        raise ValueError(
            f"{directory} has format {description.get('format')}, and podracer {__version__} reads format {FORMAT}; it "
            f"was written by podracer {description.get('podracer')}."
        )
    spec = EnvSpec(
        description["environment"],
        spaces.from_json(description["observation_space"]),
        spaces.from_json(description["action_space"]),
    )
    shapes = [(tuple(item["shape"]), np.dtype(item["dtype"])) for item in description["memory"]]
    try:
        exported = jax_export.deserialize(bytearray(data))
        program = str(exported.mlir_module())
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{directory / 'policy.stablehlo'} is damaged ({why}); export it anew.") from None
    if foreign := sorted(_call_targets(program) - STABLE_CALLS):
        raise ValueError(
            f"{directory / 'policy.stablehlo'} calls native code by the name of {', '.join(foreign)}, which podracer's "
            "exports do not: it was not run."
        )
    call = jax.jit(exported.call)
    return Actor(
        Policy(
            spec,
            start=lambda b: tuple(jnp.zeros((b, *shape), dtype) for shape, dtype in shapes),
            step=call,
            uses_reward=description["uses_reward"],
        ),
        batch,
    )


def _call_targets(program: str) -> set[str]:
    """The targets of custom calls in the text of an MLIR module; for a call in another notation, its text."""
    named = re.findall(r'custom_call\s*@("(?:[^"\\]|\\.)*"|[\w$.-]+)', program)
    others = re.findall(r'custom_call"\s*\(.*', program)
    return {name.strip('"') for name in named} | {text[:200] for text in others}


def check(directory: str | pathlib.Path) -> None:
    """Plays the rows of `check.npz` with an exported policy.

    Raises:
      RuntimeError: if an action differs from that of the exporting machine.
    """
    actor = load_policy(directory)
    with np.load(pathlib.Path(directory) / "check.npz") as rows:
        played = _play(actor, rows)
        same = np.isclose(played, rows["action"], rtol=1e-3, atol=1e-3).reshape(CHECK_ROWS, -1).all(axis=1)
    if not same.all():
        raise RuntimeError(
            f"the policy in {directory} acts differently here in rows {np.flatnonzero(~same).tolist()} of check.npz."
        )


def _export(policy: Policy) -> jax_export.Exported:
    """The policy as one function without parameters, for any batch and platform."""

    if not policy.deterministic:
        raise ValueError(
            "only deterministic policies are exported, and the actions of this one depend on chance: export a greedy "
            "one, of an agent that acts without its key in evaluation or has `Agent.best`."
        )
    (b,) = jax_export.symbolic_shape("b")
    lanes = lambda x: jax.ShapeDtypeStruct((b, *x.shape), x.dtype)  # noqa: E731
    memory = tuple(jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in policy.start(1))
    observation = jax.tree.map(lanes, jax.eval_shape(lambda: spaces.zeros(policy.spec.observation_space)))
    reward, first = jax.ShapeDtypeStruct((b,), jnp.float32), jax.ShapeDtypeStruct((b,), jnp.bool_)
    return jax_export.export(jax.jit(policy.step), platforms=PLATFORMS)(memory, observation, reward, first)


def _rows(spec: EnvSpec) -> dict[str, np.ndarray]:
    """Two episodes of random rows of one lane, [CHECK_ROWS, ...]."""
    keys = jax.random.split(jax.random.key(0), CHECK_ROWS)
    sampled = jax.device_get(jax.vmap(spec.observation_space.sample)(keys))
    observations = _flatten("observation", gate.to_environment(sampled, spec.observation_space))
    first = np.arange(CHECK_ROWS) % (CHECK_ROWS // 2) == 0
    reward = np.where(first, 0.0, np.random.default_rng(0).normal(size=CHECK_ROWS)).astype(np.float32)
    return observations | {"reward": reward, "first": first}


def _flatten(name: str, value: ArrayTree) -> dict[str, np.ndarray]:
    """The arrays of an observation by name, such as `observation.image`."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _flatten(f"{name}.{key}", item).items()}
    return {name: np.asarray(value)}


def _unflatten(space: spaces.Space, name: str, rows: Mapping[str, np.ndarray], i: int) -> ArrayTree:
    if isinstance(space, spaces.Dict):
        return {key: _unflatten(item, f"{name}.{key}", rows, i) for key, item in space.items}
    return rows[name][i]


def _play(actor: Actor, rows: Mapping[str, np.ndarray]) -> np.ndarray:
    """The actions for rows of one lane, [CHECK_ROWS, ...]."""
    observation = functools.partial(_unflatten, actor.policy.spec.observation_space, "observation", rows)
    return np.stack([actor(observation(i), rows["reward"][i], rows["first"][i]) for i in range(CHECK_ROWS)])


def _card(policy: Policy, card: Mapping[str, Any], size: int) -> str:
    """The model card: front matter and a page."""
    agent, environment, evaluation = card["agent"], card["environment"], card["evaluation"]
    front = {
        "library_name": "podracer",
        "tags": ["reinforcement-learning", environment, agent],
    }
    lines = ["---", *(f"{name}: {json.dumps(value)}" for name, value in front.items())]
    if evaluation:
        lines += [
            "model-index:",
            f"- name: {json.dumps(f'{agent}-{environment}')}",
            "  results:",
            "  - task: {type: reinforcement-learning, name: reinforcement-learning}",
            f"    dataset: {{name: {json.dumps(environment)}, type: {json.dumps(environment)}}}",
            f"    metrics: [{{type: mean_reward, value: {card['mean']:.4g}, verified: false}}]",
        ]
    memory = "a memory of its own" if policy.start(1) else "no memory"
    lines += [
        "---",
        "",
        f"# {agent} on {environment}",
        "",
        evaluation or "Not evaluated.",
        "",
        f"Observations: {policy.spec.observation_space}. Actions: {policy.spec.action_space}, the best ones; "
        f"{memory}. {size / 1024:,.0f} KiB for {', '.join(PLATFORMS)}, batches of any size. {card['source']}",
        "",
        "```python",
        "import podracer",
        "",
        "actor = podracer.load_policy('.')        # or batch=256",
        "action = actor(observation)              # actor.reset() before the next episode",
        "```",
        "",
        "Without podracer: `jax.export.deserialize(bytearray(open('policy.stablehlo', 'rb').read())).call(memory, "
        "observation, reward, first)`, memory being zeros of the shapes in `spec.json`, each with a first dim b.",
        "",
    ]
    return "\n".join(lines)
