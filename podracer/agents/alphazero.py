"""AlphaZero (Silver et al. 2018): plays itself with the rules of a game as its model, and learns from a replay.

    act      the network's policy and value at a board; a search over the environment's own `step` gives the policy pi,
             the value nu and the move; pi and nu are recorded
    learn    the policy is moved to pi, and the value to z = r + d r' + ... + d^n nu' (d = -1 where players alternate)

With n as long as a game, z is the game's outcome, or the search's value of a game that is not over yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from podracer import configs, nets, returns, spaces
from podracer.agents import base
from podracer.learning import update
from podracer.learning.optimizer import Own
from podracer.learning.optimizer_config import OptimizerConfig
from podracer.search import search
from podracer.topology import collectives
from podracer.types import (
    ActorParams,
    Agent,
    ArrayTree,
    Batch,
    Environment,
    EnvSpec,
    LearnerState,
    Metrics,
    TimeStep,
)


@dataclasses.dataclass(frozen=True)
class AlphaZeroConfig(search.AgentSettings, OptimizerConfig):
    """The agent's settings, beside those of `search.AgentSettings` and
    `podracer.learning.optimizer_config.OptimizerConfig`. Paper values are those of Silver et al. 2018, unless they say
    else.

    Attributes:
      envs_per_device: games at a time per device when `num_envs` is not given (paper: 5,000 actors).
      rollout_length: T, moves of a lane between one round of updates and the next.
      search: "gumbel" (Danihelka et al. 2022), which improves a policy with few simulations, or "puct" (paper).
      dirichlet_alpha: of noise at the root (paper: 0.3 in chess, 0.15 in shogi, 0.03 in Go); None for
        min(1, 10 / moves).
      sampled_plies: moves of a game that are drawn from pi; later ones are the search's best (paper: 30).
      n_step: n, moves until a value's target is the search's instead of the outcome (paper: the game).
      value_mix: part of a value's target that is the search's value at once (paper: 0).
      value_cost: weight of the value's loss (paper: 1).
      symmetries: whether a sample is turned and mirrored at random, where the game has symmetries (paper: False;
        AlphaGo Zero: True).
      batch_size: positions per update, over all devices (paper: 4,096).
      replay_ratio: rows sampled to learn from per row added; a sample is one row, a position.
      replay_capacity: rows that are kept at least, over all devices (paper: those of 1,000,000 games).
      replay_min_size: rows before the first update.
      learning_rate: (paper: 0.2 falling to 0.0002, with SGD).
      learning_rate_schedule: (paper: to a tenth, in steps).
      optimizer_eps: of Adam.
      max_grad_norm: clip by global norm, inf for none (paper: inf).
      l2_cost: weight of the parameters' squared norm in the loss (paper: 1e-4).
      hidden_sizes: of the network's dense layers, where it has no tower.
      blocks: of the network's tower, 0 for none (paper: 19).
      channels: of the tower (paper: 256).
    """

    envs_per_device: int = configs.field(128, low=1)
    rollout_length: int = configs.field(16, low=1)
    search: Literal["gumbel", "puct"] = "gumbel"
    dirichlet_alpha: float | None = configs.field(None, low=1e-3)
    sampled_plies: int = configs.field(8, low=0)
    n_step: int = configs.field(9, low=1)
    value_mix: float = configs.field(0.0, low=0.0, high=1.0, tunable=True)
    value_cost: float = configs.field(1.0, low=0.0, tunable=True)
    symmetries: bool = True
    batch_size: int = configs.field(512, low=1)
    replay_ratio: float = configs.field(4.0, low=1e-4)
    replay_capacity: int = configs.field(50_000, low=1)
    replay_min_size: int = configs.field(4_000, low=1, at_most=("replay_capacity", ", or learning would never begin"))
    learning_rate: float = configs.field(1e-3, low=0.0, tunable=True)
    learning_rate_schedule: update.Schedule = "constant"
    optimizer_eps: float = configs.field(1e-8, low=1e-30, tunable=True)
    max_grad_norm: float = configs.field(5.0, low=0.0, tunable=True)
    l2_cost: float = configs.field(0.0, low=0.0)
    hidden_sizes: tuple[int, ...] = configs.field((128, 128), low=1)
    blocks: int = configs.field(0, low=0)
    channels: int = configs.field(64, low=1)

    def __post_init__(self):
        configs.check(self)


class Memory(NamedTuple):
    """Acting's memory of a game: int32 [B], the moves made."""

    ply: jax.Array


class Samples(NamedTuple):
    """Positions [B]: the board with its legal moves, and the targets pi and z."""

    observation: ArrayTree
    policy: jax.Array
    value: jax.Array


def loss(
    logits: jax.Array,
    value: jax.Array,
    batch: Samples,
    weight: jax.Array,
    hyper: Mapping[str, jax.Array],
    config: AlphaZeroConfig,
    batch_size: jax.Array,
) -> tuple[jax.Array, Metrics]:
    """The loss and metrics of some samples: the sums over all samples are those of the batch.

    Args:
      logits: [B, A]; of moves, the lowest number where they are illegal.
      value: [B]; v.
      batch: [B].
      weight: float32 [B].
      hyper: tunable numbers.
      config: the static settings.
      batch_size: samples of all shards.
    """
    # (z - v)^2 - pi log p (equation 1).
    log_policy = jax.nn.log_softmax(logits)
    terms = {
        "loss/policy": -jnp.sum(jnp.where(batch.policy > 0, batch.policy * log_policy, 0.0), axis=-1),
        "loss/value": jnp.square(value - batch.value),
        "policy/target_entropy": jnp.sum(jax.scipy.special.entr(batch.policy), axis=-1),
        "value/decisive": jnp.abs(batch.value),
    }
    metrics = {name: jnp.sum(weight * x) / batch_size for name, x in terms.items()}
    # The term c |theta|^2 of equation 1 is the optimiser's (`l2_cost`).
    total = metrics["loss/policy"] + hyper["value_cost"] * metrics["loss/value"]
    return total, metrics | {"loss/total": total}


@base.maker("alphazero", AlphaZeroConfig, loss, two_players=True)
def make(
    game: Environment, config: AlphaZeroConfig, network: nets.Network | None, loss: base.LossFn, optimizer: Own | None
) -> Agent:
    """The AlphaZero agent for a game; `podracer.agents` says what the other arguments are.

    Args:
      game: a pure-JAX game of two players without chance, whose observations have a `board` and an
        `action_mask`, and whose `position(observation)` is the state that shows it.
      config: settings; defaults if None.
      network: your own, feed-forward, whose outputs are logits of moves and whose values lie in [-1, 1].
      loss: your own.

    Raises:
      ValueError: for an environment or a network that does not fit.
    """
    check_game(game)
    spec = game.spec
    if network is not None:
        nets.check(network, spec, "alphazero")
        if network.recurrent:
            raise nets.NetworkError("alphazero searches from single positions: give a feed-forward network.")
    network = network or _network(spec, config)
    symmetries = getattr(game, "symmetries", None) if config.symmetries else None
    rule = config.make_optimizer(optimizer, l2_cost=config.l2_cost)
    replay = base.replay_of_rows(
        config,
        config.n_step + 2,  # one more than it takes, for the last row of a sequence comes without extras
        observation_rows=1,
        context=0,
        keep=lambda memory: (),
        restore=lambda kept, observation, first: kept,
    )
    functions = _AlphaZero(spec, config, network, rule, loss, planner(game, config, network), symmetries)
    return functions.bundle("alphazero", replay=replay)


@dataclasses.dataclass(frozen=True, eq=False)
class _AlphaZero(base.Functions):
    config: AlphaZeroConfig
    planner: search.Planner
    symmetries: Any

    def start(self, lanes: jax.Array, num_lanes: int) -> Memory:
        return Memory(jnp.zeros(lanes.shape, jnp.int32))

    def act(
        self, actor: ActorParams, memory: Memory, timestep: TimeStep, key: jax.Array, evaluation: bool
    ) -> tuple[jax.Array, ArrayTree, Memory]:
        search_key, key = jax.random.split(key)
        model, explore = self.planner.model, not evaluation
        # The search from this position, with noise at the root in training.
        root = model.root(actor.params, timestep.observation)
        result = search.search(
            model, actor.params, root, search_key, self.planner.config, explore=explore, temperature=0.0
        )
        # The first plies are drawn from pi, later ones are the best (AlphaGo Zero: Silver et al. 2017, self-play).
        ply = jnp.where(timestep.first, 0, memory.ply)
        action = result.action
        if explore:
            drawn = jax.random.categorical(key, jnp.log(result.policy))
            action = jnp.where(ply < self.config.sampled_plies, drawn.astype(action.dtype), action)
        return action, {"policy": result.policy, "value": result.value}, Memory(ply + 1)

    def learn(
        self, learner: LearnerState, batch: Batch, progress: jax.Array, key: jax.Array
    ) -> tuple[LearnerState, Metrics, jax.Array]:
        B = batch.weight.shape[0]
        batch_size = collectives.global_size(B)
        # Positions with their targets pi and z, each as seen by a random symmetry (Silver et al. 2017).
        samples = _samples(batch, self.config.n_step, learner.hyper["value_mix"])
        if self.symmetries is not None:
            samples = transform(samples, self.symmetries, key)
        evaluate = evaluator(self.network, self.spec)

        # (p, v) = f(s) of each position, and one gradient step.
        def loss(params: ArrayTree, part: tuple[Samples, jax.Array]) -> tuple[jax.Array, tuple[Metrics, tuple[()]]]:
            samples, weight = part
            logits, value, _ = evaluate(params, samples.observation)
            total, metrics = self.loss(logits, value, samples, weight, learner.hyper, self.config, batch_size)
            return total, (metrics, ())

        rate = self.learning_rate(learner, progress)
        learner, metrics, _ = self.update(loss, learner, (samples, batch.weight), rate)
        return learner, metrics, jnp.ones(B)


def _network(spec: EnvSpec, config: AlphaZeroConfig) -> nets.Network:
    """The config's network."""
    return nets.make_board(spec, hidden_sizes=config.hidden_sizes, blocks=config.blocks, channels=config.channels)


def evaluator(
    network: nets.Network, spec: EnvSpec
) -> Callable[[ArrayTree, ArrayTree], tuple[jax.Array, jax.Array, jax.Array]]:
    """`(params, observation [N]) -> (logits [N, A], value [N], legal bool [N, A])`."""

    def evaluate(params: ArrayTree, observation: ArrayTree) -> tuple[jax.Array, jax.Array, jax.Array]:
        row = jax.tree.map(lambda x: x[None], observation)
        zeros = jnp.zeros(row["action_mask"].shape[:2])
        logits, value, _ = network.apply(params, nets.Inputs(row, zeros, zeros > 0, ()), ())
        legal = nets.action_masks.legal(spec, observation)
        return nets.action_masks.lower(logits[0], legal), value[0], legal  # type: ignore[return-value]

    return evaluate


def planner(environment: Environment, config: AlphaZeroConfig, network: nets.Network | None = None) -> search.Planner:
    """The agent's search in the environment's own rules, with a network (the config's if None)."""
    evaluate = evaluator(network or _network(environment.spec, config), environment.spec)

    def root(params: ArrayTree, observation: ArrayTree) -> search.Root:
        logits, value, legal = evaluate(params, observation)
        state = jax.vmap(environment.position)(observation)  # type: ignore[attr-defined]
        return search.Root(logits, value, state, legal)

    def step(params: ArrayTree, state: ArrayTree, action: jax.Array) -> search.Step:
        # The model is the game itself, which is without chance: the key is not used.
        state, transition = jax.vmap(environment.step, (0, 0, None))(state, action, jax.random.key(0))
        logits, value, legal = evaluate(params, jax.vmap(environment.observe)(state))
        # A position where the game is over has no value of its own: its reward is the outcome.
        value = jnp.where(transition.discount == 0, 0.0, value)
        return search.Step(transition.reward, transition.discount, logits, value, state, legal)

    return search.Planner(
        environment.spec.observation_space,
        search.Model(root, step),
        lambda actor: actor.params,
        search.settings(config, bounds=(-1.0, 1.0)),
    )


def transform(samples: Samples, symmetries: Any, key: jax.Array) -> Samples:
    """Turns or mirrors each position, and its moves likewise, by a random symmetry of the game.

    Args:
      samples: [B].
      symmetries: int32 `cells` [G, H W] and `actions` [G, A] (`envs_jax.board_game.Symmetries`).
      key: consumed.
    """
    cells, moves = jnp.asarray(symmetries.cells), jnp.asarray(symmetries.actions)
    B = samples.value.shape[0]
    # One of the G symmetries for each position (AlphaGo Zero: Silver et al. 2017, eight of Go).
    number = jax.random.randint(key, (B,), 0, len(cells))
    board = samples.observation["board"]
    flat = board.reshape(B, -1, board.shape[-1])
    board = jnp.take_along_axis(flat, cells[number][..., None], axis=1).reshape(board.shape)
    take = lambda x: jnp.take_along_axis(x, moves[number], axis=1)  # noqa: E731
    observation = samples.observation | {"board": board, "action_mask": take(samples.observation["action_mask"])}
    return samples._replace(observation=observation, policy=take(samples.policy))


def _samples(batch: Batch, n: int, value_mix: jax.Array) -> Samples:
    """The first rows of windows [n+2, B] with their targets."""
    trajectory = batch.trajectory
    step = jax.tree.map(lambda x: x[:n], returns.transitions(trajectory))
    policy, value = trajectory.extras["policy"], trajectory.extras["value"]
    # z bootstraps from the search's value after n moves or where a game was cut, and from 0 where it ended.
    over = trajectory.timesteps.discount[: n + 1] == 0
    z = returns.n_step(jnp.where(over, 0.0, value), step, n)[0]
    observation = jax.tree.map(lambda x: x[0], trajectory.timesteps.observation)
    return lax.stop_gradient(Samples(observation, policy[0], (1.0 - value_mix) * z + value_mix * value[0]))


def check_game(environment: Environment) -> None:
    """Checks that an environment can be a search's model.

    Raises:
      ValueError: where it is not a game of two players without chance, or its actions are not discrete.
    """
    spec = environment.spec
    what = f"alphazero plays board games against itself, and {spec.name}"
    if spec.num_players != 2:
        raise ValueError(f"{what} has one player; use muzero, which learns a model of any environment.")
    if not isinstance(spec.action_space, spaces.Discrete):
        raise ValueError(f"{what} takes actions in {spec.action_space}; a search needs Discrete ones.")
    names = dict(spec.observation_space.items) if isinstance(spec.observation_space, spaces.Dict) else {}
    if not {"board", "action_mask"} <= set(names) or not hasattr(environment, "position"):
        raise ValueError(
            f"{what} lacks what a search begins with: observations with a board and an action_mask, and "
            "position(observation), the state that shows them."
        )
    state = jax.eval_shape(lambda: environment.reset(jax.random.key(0)))
    action, key = jax.ShapeDtypeStruct((), jnp.int32), jax.eval_shape(lambda: jax.random.key(0))
    jax.eval_shape(environment.step, state, action, key)  # an error here is the environment's own
    try:
        jax.eval_shape(lambda state, action: environment.step(state, action, None), state, action)  # type: ignore[arg-type]
    except Exception as error:
        raise ValueError(f"{what} has chance: its step uses its key, which games without chance ignore.") from error
