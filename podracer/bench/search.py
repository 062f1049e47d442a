"""`podracer bench search`: searches a second beside mctx and the network alone, in turns, and the cost of a search."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import itertools
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax

import envs_jax
from envs_jax.connect_four import ConnectFour
from podracer import configs, nets, spaces, topology
from podracer.agents import EfficientZeroConfig, efficientzero
from podracer.agents.registry import make_agent
from podracer.atari import presets as atari
from podracer.bench import anakin
from podracer.bench.measure import describe_machine, in_turns, table, write
from podracer.search import prefix_models
from podracer.search.model import StepFn
from podracer.search.search import Model, Root, SearchConfig, Step, search
from podracer.types import EnvSpec
from podracer.version import __version__

PLANES = (6, 6, 64)
"""The shape of EfficientZero's state on Atari."""


@dataclasses.dataclass(frozen=True)
class SearchArguments:
    """Measure searches of random networks, with mctx beside them where it is installed (the extra `search`).

    Attributes:
      lanes: numbers of roots.
      actions: numbers of actions of the policy; connect_four always has 7.
      simulations: numbers of simulations of a search. For several, the ratio of a simulation's time among the most to
        that among the fewest is printed too.
      network: "toy" and "mlp" are a layer of 64 and three of 256, "planes" three convolutions of 6x6x64 and a layer,
        which compute less than half of what a step of EfficientZero's model does, "efficientzero" that model with its
        preset for Atari, "connect_four" the rules of the game with a layer on its board.
      max_depth: the depth cap of all searches.
      embedding_dtype: dtype in which our trees store embeddings; None: the embeddings' own, for "efficientzero" the
        preset's.
      anakin: also measure PUCT inside of Anakin's program, with an agent that acts by it.
      repeats: measurements of each thing, taken in turns.
      seconds: how long one measurement should take.
      json: also write the figures to this file.
    """

    lanes: tuple[int, ...] = configs.field((32,), low=1)
    actions: tuple[int, ...] = configs.field((6,), low=1)
    simulations: tuple[int, ...] = configs.field((50,), low=1)
    network: Literal["toy", "mlp", "planes", "efficientzero", "connect_four"] = "toy"
    max_depth: int | None = configs.field(None, low=1)
    embedding_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    anakin: bool = False
    repeats: int = configs.field(11, low=1)
    seconds: float = configs.field(0.2, low=0.01)
    json: Annotated[pathlib.Path | None, tyro.conf.arg(name="json")] = None

    def __post_init__(self):
        configs.check(self)


class SearchFn(Protocol):
    """Runs a program of the benchmark, such as a search."""

    def __call__(self, variables: Any, root: Root, key: jax.Array, /) -> Any:
        """Runs it from N roots."""
        ...


def main(arguments: SearchArguments) -> int:
    """Measures, prints tables, writes JSON."""
    if not importlib.util.find_spec("mctx"):
        print("no yardstick: mctx, of the extra [search], is not installed.", file=sys.stderr)
    results = []
    actions = (7,) if arguments.network == "connect_four" else arguments.actions
    for N, A, S in itertools.product(arguments.lanes, actions, arguments.simulations):
        print(f"measuring {N} roots, {A} actions, {S} simulations ...", file=sys.stderr, flush=True)
        results.append(measure(N, A, S, arguments))
    print(f"podracer {__version__}, jax {jax.__version__}, {describe_machine()}; network {arguments.network}")
    lines = [["N", "A", "S", "program", "simulations/s", "ms", "compile s", "temporary/tree", "depth", "deepest"]]
    for r in results:
        for name, p in r["programs"].items():
            memory = f"{p['temporary'] / r['tree_bytes']:.2f}" if p["temporary"] else "-"
            depths = [f"{p['depth']:.1f}", str(p["deepest"])] if "depth" in p else ["-", "-"]
            speed = [f"{p['rate']:,.0f}", f"{p['ms']:.2f}", f"{p['compile']:.1f}"]
            lines.append([*(str(r[x]) for x in ("N", "A", "S")), name, *speed, memory, *depths])
    print(table(lines))
    for r in results:
        for name, (low, median, high) in r["ratios"].items():
            print(f"{r['N']}, {r['A']}, {r['S']}: {name} {median:.2f} ({low:.2f} to {high:.2f})")
    for line in growth(results):
        print(line)
    print("Medians of measurements in turns; ratios of neighbours, with their quartiles.")
    if arguments.json:
        write(arguments.json, "podracer bench search", arguments, results)
    return 0


def growth(results: list[dict[str, Any]]) -> list[str]:
    """The ratio of a simulation's time among many to that among few, by cell and algorithm."""
    lines = []
    for N, A in dict.fromkeys((r["N"], r["A"]) for r in results):
        cells = {r["S"]: r["programs"] for r in results if (r["N"], r["A"]) == (N, A)}
        few, many = min(cells), max(cells)
        if few < many:
            for name in ("puct", "gumbel"):
                ratio = cells[few][name]["rate"] / cells[many][name]["rate"]
                lines.append(f"{N}, {A}: {name}, time of a simulation at {many} / at {few}: {ratio:.2f}")
    return lines


def measure(N: int, A: int, S: int, arguments: SearchArguments) -> dict[str, Any]:
    """All programs of one cell."""
    step, variables, root = _model(N, A, arguments.network)
    model = Model(lambda variables, observation: root, step)
    programs: dict[str, SearchFn] = {"network alone": functools.partial(_alone, step, S)}
    searches, trees = {}, {}
    for algorithm in ("puct", "gumbel"):
        dtype = arguments.embedding_dtype
        if arguments.network == "efficientzero":
            dtype = dtype or atari.resolve("efficientzero", "atari").agent["embedding_dtype"]
        config = SearchConfig(algorithm, simulations=S, max_depth=arguments.max_depth, embedding_dtype=dtype)
        run = searches[algorithm] = functools.partial(search, model, config=config)
        programs[algorithm] = lambda variables, root, key, run=run: run(variables, root, key)[:-1]
        trees[algorithm] = jax.jit(functools.partial(run, keep_tree=True))
    if importlib.util.find_spec("mctx"):
        programs |= _mctx(step, S, arguments.max_depth)

    key, found, measured = jax.random.key(1), {}, {}
    for name, program in programs.items():
        start = time.perf_counter()
        compiled = jax.jit(program).lower(variables, root, key).compile()
        seconds, memory = time.perf_counter() - start, compiled.memory_analysis()
        found[name] = {"compile": seconds, "temporary": memory.temp_size_in_bytes if memory else 0}
        measured[name] = functools.partial(_repeat, compiled, variables, root, key, N * S)
    if arguments.anakin:
        inside = _in_anakin(searches["puct"], variables, root)
        measured["puct in Anakin"] = lambda n: S * inside(n)
        found["puct in Anakin"] = {"compile": inside.compiled.seconds, "temporary": 0}
    for name, tree in trees.items():
        grown = tree(variables, root, key).tree
        found[name] |= _depths(np.asarray(grown.child), arguments.max_depth)
    rates = in_turns(measured, arguments.repeats, arguments.seconds)
    for name, values in rates.items():
        rate = float(np.median(values))
        found[name] |= {"rate": rate, "ms": N * S / rate * 1e3, "rates": values}

    pairs = [(algorithm, other) for algorithm in ("puct", "gumbel") for other in ("network alone",)]
    pairs += [("puct in Anakin", "puct")] if arguments.anakin else []
    pairs += [("puct", "muzero_policy"), ("puct", "mctx without draws"), ("gumbel", "gumbel_muzero_policy")]
    ratios = {
        f"{ours} / {other}": np.percentile(np.divide(rates[ours], rates[other]), (25, 50, 75)).tolist()
        for ours, other in pairs
        if other in rates
    }
    size = N * (S + 1) * (16 * A + 20) + sum(x.nbytes for x in jax.tree.leaves(grown.embedding))
    return {"N": N, "A": A, "S": S, "tree_bytes": size, "programs": found, "ratios": ratios}


def _repeat(compiled: SearchFn, variables: Any, root: Root, key: jax.Array, rows: int, n: int) -> int:
    for _ in range(n):
        jax.block_until_ready(compiled(variables, root, key))
    return n * rows


def _depths(child: np.ndarray, max_depth: int | None) -> dict[str, Any]:
    """Mean and largest depth of the nodes of all trees, from child [N, S+1, A]; a node at the cap is no child."""
    depth = np.zeros(child.shape[:2], int)
    for node in range(child.shape[1]):  # children have larger numbers
        lane, action = np.nonzero(child[:, node] >= 0)
        depth[lane, child[lane, node, action].astype(int)] = depth[lane, node] + 1
    depth = depth[:, 1:]
    depth[depth == 0] = max_depth or 0
    return {"depth": float(depth.mean()), "deepest": int(depth.max())}


def _model(N: int, A: int, network: str) -> tuple[StepFn, Any, Root]:
    """A random network: its time matters, not its output."""
    if network == "connect_four":
        return _game(N)
    if network == "efficientzero":
        return _efficientzero(N, A)
    keys = iter(jax.random.split(jax.random.key(0), 8))
    draw = lambda *shape: jax.random.normal(next(keys), shape) / np.prod(shape[:-1]) ** 0.5  # noqa: E731
    if network == "planes":
        width = int(np.prod(PLANES))
        layers = [draw(3, 3, PLANES[-1], PLANES[-1]) for _ in range(3)]
    else:
        width, depth = (64, 1) if network == "toy" else (256, 3)
        layers = [draw(width, width) for _ in range(depth)]
    shape = PLANES if network == "planes" else (width,)
    variables = {"act": draw(A, width), "layers": layers, "heads": draw(width, A + 2)}

    def step(variables: Any, embedding: jax.Array, action: jax.Array) -> Step:
        x = embedding + variables["act"][action].reshape(-1, *shape)
        for w in variables["layers"]:
            conv = functools.partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME")
            x = jnp.tanh(conv(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC")) if w.ndim == 4 else x @ w)
        out = x.reshape(-1, width) @ variables["heads"]
        return Step(0.1 * out[:, 0], jnp.full(action.shape, 0.97), out[:, 2:], out[:, 1], x)

    first = step(variables, draw(N, *shape), jnp.zeros(N, jnp.int32))
    return step, variables, Root(first.logits, first.value, first.embedding)


def _efficientzero(N: int, A: int) -> tuple[StepFn, Any, Root]:
    """The untrained model of the preset for Atari, at roots of some random images."""
    config = EfficientZeroConfig(**atari.resolve("efficientzero", "atari").agent)
    spec = EnvSpec("atari", spaces.Box(0, 255, (96, 96, 3), np.uint8), spaces.Discrete(A))
    plan = efficientzero.planner(spec, config)
    observation = spaces.zeros(plan.space)
    images = jnp.asarray(np.random.default_rng(0).integers(0, 256, (min(N, 64), *np.shape(observation)), np.uint8))
    network = prefix_models.make(nets.stacked_spec(spec, config.frame_stack), config)
    variables = (*jax.jit(network.init)(jax.random.key(0), images[:1]), jnp.float32(config.discount))
    few = jax.jit(plan.model.root)(variables, images)
    return plan.model.step, variables, jax.tree.map(lambda x: x[jnp.arange(N) % len(images)], few)


def _game(N: int) -> tuple[StepFn, Any, Root]:
    """The rules of connect four, and a layer on the board for policies and values."""
    game = ConnectFour()
    start = jax.tree.map(lambda x: jnp.broadcast_to(x, (N, *jnp.shape(x))), game.start())
    variables = 0.1 * jax.random.normal(jax.random.key(0), (start.board[0].size, 8))

    def evaluate(variables: Any, state: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        out = jnp.tanh(state.board.reshape(len(state.board), -1).astype(jnp.float32) @ variables)
        legal = jax.vmap(game.observe)(state)["action_mask"] > 0
        return jnp.where(legal, out[:, 1:], -1e9), out[:, 0], legal

    def step(variables: Any, state: Any, action: jax.Array) -> Step:
        state, after = jax.vmap(game.step, (0, 0, None))(state, action, jax.random.key(0))
        logits, value, legal = evaluate(variables, state)
        return Step(after.reward, after.discount, logits, value, state, legal)

    logits, value, legal = evaluate(variables, start)
    return step, variables, Root(logits, value, start, legal)


def _in_anakin(run: SearchFn, variables: Any, root: Root) -> anakin.Training:
    """Rollouts of an agent that acts by a search from the same roots, whatever its lanes show, and learns nothing."""
    N, environment = len(root.value), envs_jax.make("catch")
    assert isinstance(environment.spec.action_space, spaces.Discrete)
    number = environment.spec.action_space.num_values

    def act(params: Any, memory: Any, timestep: Any, key: jax.Array, evaluation: bool) -> Any:
        # The reward, which is finite, ties the search to the step that it is made in.
        found = run(variables, root._replace(value=root.value + 1e-6 * timestep.reward), key)
        return found.action % number, {"policy": found.policy, "value": found.value}, memory

    agent = make_agent("ppo", environment, anakin.PRESETS["ppo"])
    agent = agent._replace(act=act, learn=anakin.learn_nothing, start=lambda lanes, num_lanes: ())
    layout = topology.make(num_envs=N, envs_per_device=N, devices=jax.local_devices()[:1])
    return anakin.trainer(agent, environment, layout, 16)


def _alone(step: StepFn, S: int, variables: Any, root: Root, key: jax.Array) -> Any:
    """S calls of the network, each of which waits for the one before."""

    def turn(i: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        new = step(variables, carry[0], carry[1])
        return new.embedding, jnp.argmax(new.logits + (new.value + new.reward)[:, None], -1).astype(jnp.int32)

    return lax.fori_loop(0, S, turn, (root.embedding, jnp.zeros(root.value.shape, jnp.int32)))


def _mctx(step: StepFn, S: int, max_depth: int | None) -> dict[str, SearchFn]:
    """The same searches by mctx; `without draws` is `muzero_policy`'s search with ties to the lowest index."""
    mctx: Any = importlib.import_module("mctx")

    def recurrent(variables: Any, key: jax.Array, action: jax.Array, embedding: Any) -> Any:
        new = step(variables, embedding, action)
        out = {"reward": new.reward, "discount": new.discount, "prior_logits": new.logits, "value": new.value}
        return mctx.RecurrentFnOutput(**out), new.embedding

    def select(key: jax.Array, tree: Any, node: Any, depth: Any = 0) -> jax.Array:
        n, N = tree.children_visits[node], tree.node_visits[node]
        weight = jnp.sqrt(N) * (1.25 + jnp.log((N + 19653.0) / 19652.0))
        P = jax.nn.softmax(tree.children_prior_logits[node])
        return jnp.argmax(mctx.qtransform_by_parent_and_siblings(tree, node) + weight * P / (n + 1)).astype(jnp.int32)

    def given(root: Root) -> Any:
        return mctx.RootFnOutput(prior_logits=root.logits, value=root.value, embedding=root.embedding)

    def policy(function: Callable[..., Any], variables: Any, root: Root, key: jax.Array) -> Any:
        out = function(variables, key, given(root), recurrent, S, max_depth=max_depth)
        return out.action, out.action_weights, out.search_tree.summary()

    def without_draws(variables: Any, root: Root, key: jax.Array) -> Any:
        tree = mctx.search(
            variables,
            key,
            root=given(root),
            recurrent_fn=recurrent,
            root_action_selection_fn=select,
            interior_action_selection_fn=select,
            num_simulations=S,
            max_depth=max_depth,
        )
        return tree.summary()

    return {
        "muzero_policy": functools.partial(policy, mctx.muzero_policy),
        "mctx without draws": without_draws,
        "gumbel_muzero_policy": functools.partial(policy, mctx.gumbel_muzero_policy),
    }
