"""Optimisers as agents use them: the tunable numbers are arrays, so that a population can vary them.

Those with a name work on few arrays: small arrays of parameters and gradients are one vector (`joined`). A network has
dozens of them, and an operation on each costs more in launches and compilation than the copies do. AdamW, Muon and the
user's own see the tree of parameters, for they treat matrices otherwise than vectors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from podracer import errors
from podracer.types import ArrayTree

Name = Literal["rmsprop", "centred_rmsprop", "adam", "radam", "sgd", "adamw", "muon"]

Own = optax.GradientTransformation | Callable[[jax.Array], optax.GradientTransformation]
"""A user's optimiser: a function of the learning rate, float32 [], or a transformation with a rate of its own."""

Numbers = Mapping[str, jax.Array]
"""Tunable numbers, float32 [], with `learning_rate` as it is now."""

Parts = tuple[jax.Array, ...]
"""Parameters, or gradients or moments of them, as few arrays."""

TUNABLE = ("learning_rate", "optimizer_eps", "weight_decay")
"""The tunable numbers that not every optimiser uses."""

HEADS = ("policy", "std", "value", "advantage", "q", "reward", "prefix")
"""The names of heads in networks and models."""


class OptimizerError(ValueError):
    """A user's optimiser does not fit; the message says where, and what to do."""


class Optimizer(NamedTuple):
    """An optimiser of trees of float32 arrays.

    Attributes:
      build: `(numbers) -> transformation` of the packed gradient, whose updates are added to the parameters.
      uses: those of `TUNABLE` that it uses.
      joins: whether it works on `joined` arrays, and not on the tree.
      own: whether it is the user's.
      l2_cost: c of a further loss c |params|^2; 0 for none.
      l2_clipped: whether the gradient of that loss is part of the one that is clipped. As PyTorch's weight decay, it is
        otherwise not in the norm that `step` returns.
    """

    build: Callable[[Numbers], optax.GradientTransformation]
    uses: tuple[str, ...]
    joins: bool = True
    own: bool = False
    l2_cost: float = 0.0
    l2_clipped: bool = True

    def pack(self, tree: ArrayTree) -> tuple[Any, Callable[[Any], ArrayTree]]:
        """Parameters, or a gradient, as `step` takes them; the second result makes the tree again."""
        return joined(tree) if self.joins else (tree, lambda packed: packed)

    def init(self, params: ArrayTree, hyper: Numbers) -> ArrayTree:
        """The optimiser's state for a tree of parameters.

        Raises:
          OptimizerError: where the user's cannot make one, or a number that the optimiser uses is missing.
        """
        if missing := [name for name in (*self.uses, "max_grad_norm") if name not in hyper]:
            raise OptimizerError(
                f"the optimiser needs {', '.join(missing)}, and hyper has {', '.join(sorted(hyper))}; give the agent's "
                "config these fields: configs.field(..., tunable=True)."
            )
        if not self.own:
            return self.build(hyper).init(self.pack(params)[0])
        with explained("init"):
            return strong(self.build(hyper).init(params))

    def step(
        self,
        grads: Any,
        opt_state: ArrayTree,
        params: Any,
        *,
        learning_rate: jax.Array | None,
        hyper: Numbers,
    ) -> tuple[Any, ArrayTree, jax.Array]:
        """Clips by global norm, transforms, and moves the parameters.

        Args:
          grads: of the loss, packed.
          opt_state: of `init`, or the last step's.
          params: the parameters, packed.
          learning_rate: float32 []; None for an optimiser that does not use it.
          hyper: tunable numbers: `max_grad_norm`, the gradient's largest global norm, and those that are used.

        Returns:
          New parameters, packed, the new optimiser state, and the gradient's norm before clipping.
        """
        if self.l2_cost and self.l2_clipped:
            grads = self._with_l2(grads, params)
        norm, scale = clipping(grads, hyper["max_grad_norm"])
        clipped = jax.tree.map(lambda x: scale * x, grads)
        # PyTorch's order: decay joins the gradient after clipping.
        if self.l2_cost and not self.l2_clipped:
            clipped = self._with_l2(clipped, params)
        numbers = hyper if learning_rate is None else {**hyper, "learning_rate": learning_rate}
        with lenient():
            updates, opt_state = self.build(numbers).update(clipped, opt_state, params)  # type: ignore[assignment]
        return jax.tree.map(jnp.add, params, updates), strong(opt_state), norm

    def _with_l2(self, grads: Any, params: Any) -> Any:
        return jax.tree.map(lambda g, x: g + 2.0 * self.l2_cost * x, grads, params)


def clipping(grads: Any, largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The global norm of a gradient, and the factor that clips it (Pascanu et al. 2013, algorithm 1)."""
    norm = _sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(grads)))
    return norm, jnp.minimum(1.0, largest / jnp.maximum(norm, 1e-12))


def _sqrt(x: Any) -> jax.Array:
    """The square root, with a derivative of 0 at 0: that of a gradient's norm is infinite there, and times 0 not a
    number."""
    return jnp.where(x == 0, 0.0, jnp.sqrt(jnp.where(x == 0, 1.0, x)))


def make(
    name: Name,
    *,
    decay: float = 0.99,
    momentum: float = 0.0,
    b2: float = 0.999,
    eps_root: float = 0.0,
    stacked: bool = False,
) -> Optimizer:
    """The optimiser of a name. Its epsilon is the tunable number `optimizer_eps`.

    Args:
      name: "rmsprop" is TensorFlow 1's form, g / sqrt(nu + eps) with nu_0 = 1, that IMPALA's epsilon belongs to
        (papers quote epsilon for this form); "centred_rmsprop" is that of Graves (2013, equations 38 to 41), as DQN
        has it: g / sqrt(E[g^2] - E[g]^2 + eps) from moments of 0; "adam" is Kingma and Ba's; "radam" is Liu et al.'s
        (2020), momentum alone for five steps; "sgd" leaves gradients as they are; "adamw" is Loshchilov and Hutter's
        (2019), which decays matrices alone; "muon" is Jordan et al.'s (2024), see `_muon`.
      decay: RMSProp's decay.
      momentum: heavy-ball momentum for RMSProp and SGD.
      b2: of Adam, RAdam and AdamW, also for what Muon leaves to it: the decay of their running mean of squares.
      eps_root: added to Adam's second moment, under its square root. Above 0, gradients through a step are finite where
        the moment is 0.
      stacked: whether the first axis of every array numbers networks, so that AdamW and Muon take arrays of one more
        dimension for matrices.

    Raises:
      ValueError: for an `eps_root` of another optimiser than "adam".
    """
    if eps_root and name != "adam":
        raise ValueError(
            f"optimizer_eps_root={eps_root} is a number of optimizer='adam'; leave it out of optimizer={name!r}."
        )
    if name in ("adamw", "muon"):
        build = _adamw if name == "adamw" else _muon
        return Optimizer(lambda numbers: build(numbers, b2, int(stacked)), TUNABLE, joins=False)
    uses = ("learning_rate",) if name == "sgd" else ("learning_rate", "optimizer_eps")
    return Optimizer(lambda numbers: _transformation(name, numbers, decay, momentum, b2, eps_root), uses)


def _transformation(
    name: Name, numbers: Numbers, decay: float, momentum: float, b2: float, eps_root: float
) -> optax.GradientTransformation:
    parts, eps = [], 0.0 if name == "sgd" else numbers["optimizer_eps"]
    if name == "adam":
        parts.append(optax.scale_by_adam(b2=b2, eps=eps, eps_root=eps_root))
    if name == "radam":
        parts.append(optax.scale_by_radam(b2=b2, eps=eps))
    if name == "rmsprop":
        parts.append(optax.scale_by_rms(decay=decay, eps=eps, initial_scale=1.0, eps_in_sqrt=True))
    if name == "centred_rmsprop":
        parts.append(_scale_by_deviation(decay, eps))
    if momentum and name in ("rmsprop", "centred_rmsprop", "sgd"):
        parts.append(optax.trace(decay=momentum))
    return optax.chain(*parts, optax.scale_by_learning_rate(numbers["learning_rate"]))


def _scale_by_deviation(decay: float, eps: Any) -> optax.GradientTransformation:
    def init(parts: Parts) -> tuple[Parts, Parts]:
        return jax.tree.map(jnp.zeros_like, parts), jax.tree.map(jnp.zeros_like, parts)

    def towards(moments: Parts, parts: Parts) -> Parts:
        return jax.tree.map(lambda m, x: decay * m + (1.0 - decay) * x, moments, parts)

    def scaled(gradient: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
        # `optax.scale_by_stddev`, but for the floor: rounding leaves a negative variance of a steady gradient.
        return gradient * lax.rsqrt(jnp.maximum(square - jnp.square(mean), 0.0) + eps)

    def update(gradient: Parts, moments: tuple[Parts, Parts], _: Any = None) -> Any:
        # Running E[g] and E[g^2] (Graves 2013, equations 38 and 39), then g / sqrt(E[g^2] - E[g]^2 + eps).
        mean = towards(moments[0], gradient)
        square = towards(moments[1], jax.tree.map(jnp.square, gradient))
        return jax.tree.map(scaled, gradient, mean, square), (mean, square)

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]


_LARGE = 2**15
"""The size of the smallest array that stays by itself. XLA:CPU searches for each number of a vector's array where it
fuses their concatenation: with an Atari network's 678 thousand numbers, that took nearly half of an update of DQN."""


def joined(tree: ArrayTree) -> tuple[Parts, Callable[[Parts], ArrayTree]]:
    """Joins the small arrays of a tree to one vector, which comes first; the second result makes the tree again."""
    # The vector first, if there is one, then the large arrays in their order.
    leaves, structure = jax.tree.flatten(tree)
    alone = [leaf.size >= _LARGE for leaf in leaves]
    vector, separate = ravel_pytree([leaf for leaf, large in zip(leaves, alone) if not large])
    parts = tuple(leaf for leaf, large in zip(leaves, alone) if large)

    def restore(parts: Parts) -> ArrayTree:
        small, large = (separate(parts[0]), parts[1:]) if vector.size else ([], parts)
        each = {True: iter(large), False: iter(small)}
        return structure.unflatten([next(each[is_large]) for is_large in alone])

    return (vector, *parts) if vector.size else parts, restore


def _adamw(numbers: Numbers, b2: float, first: int) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019), whose decay is of arrays with two dims or more after the `first` ones."""
    return optax.adamw(
        numbers["learning_rate"],
        b2=b2,
        eps=numbers["optimizer_eps"],
        weight_decay=numbers["weight_decay"],
        mask=lambda params: jax.tree.map(lambda x: x.ndim > first + 1, params),
    )


def _muon(numbers: Numbers, b2: float, first: int) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024), with steps as large as AdamW's (Liu et al. 2025): of matrices, and of kernels of
    convolutions [k, k, C, O] as matrices [k k C, O], each after the `first` dims. Vectors, other arrays and what is
    under a head's name (`HEADS`) go by AdamW."""
    dims = {
        first + 2: optax.contrib.MuonDimensionNumbers(first, first + 1),
        first + 4: optax.contrib.MuonDimensionNumbers((first, first + 1, first + 2), first + 3),
    }

    def label(path: tuple[Any, ...], x: jax.Array) -> str:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        return "muon" if x.ndim in dims and not set(names) & set(HEADS) else "adamw"

    muon = optax.contrib.muon(
        numbers["learning_rate"],
        weight_decay=numbers["weight_decay"],
        muon_weight_dimension_numbers=lambda params: jax.tree.map(lambda x: dims[x.ndim], params),
        consistent_rms=0.2,
    )
    labels = lambda params: jax.tree.map_with_path(label, params)  # noqa: E731
    return optax.partition({"muon": muon, "adamw": _adamw(numbers, b2, first)}, labels)


def of(own: Own, scheduled: str = "") -> Optimizer:
    """The user's optimiser, on the tree of parameters.

    Args:
      own: the user's.
      scheduled: the settings under which the agent's learning rate would not change, if it does.

    Raises:
      OptimizerError: where it is neither a transformation nor a function, or has a rate of its own and `scheduled` is
        given.
    """
    if _is_transformation(own):
        if scheduled:
            raise OptimizerError(
                "optimizer= has a learning rate of its own, which no schedule of the agent's reaches: give a function, "
                f"such as optimizer=lambda learning_rate: optax.adam(learning_rate), or {scheduled}."
            )
        return Optimizer(lambda _: own, (), joins=False, own=True)  # type: ignore[arg-type, return-value]
    if not callable(own):
        raise OptimizerError(
            f"optimizer={own!r}: give an optax.GradientTransformation, or a function learning_rate -> transformation; "
            "names belong into the config."
        )

    def build(numbers: Numbers) -> optax.GradientTransformation:
        made = own(numbers["learning_rate"])
        if not _is_transformation(made):
            raise OptimizerError(f"optimizer= returned a {type(made).__name__}, not an optax.GradientTransformation.")
        return made

    return Optimizer(build, ("learning_rate",), joins=False, own=True)


def _is_transformation(x: Any) -> bool:
    return hasattr(x, "init") and hasattr(x, "update")


def check(optimizer: Optimizer, params: ArrayTree, opt_state: ArrayTree, hyper: Numbers) -> None:
    """Traces a step of the user's optimiser; arguments may be shapes.

    Raises:
      OptimizerError: where it needs more arguments than optax's `update`, or changes structure, shapes or dtypes.
    """
    is_free = lambda x: isinstance(x, optax.contrib.ScheduleFreeState)  # noqa: E731
    if any(is_free(x) for x in jax.tree.leaves(opt_state, is_leaf=is_free)):
        raise OptimizerError(
            "optimizer= is schedule-free, which evaluates other parameters than it trains, and an agent acts with the "
            "ones it trains: use the plain optimiser with a learning_rate_schedule."
        )
    keeps_rate = lambda x: "learning_rate" in getattr(x, "hyperparams", ())  # noqa: E731
    if "learning_rate" in optimizer.uses and any(map(keeps_rate, jax.tree.leaves(opt_state, is_leaf=keeps_rate))):
        raise OptimizerError(
            "optimizer= keeps its learning rate in its state (optax.inject_hyperparams), where no schedule reaches it: "
            "give the transformation itself, or a function that makes the plain optimiser of a learning rate."
        )

    def update(params: ArrayTree, opt_state: ArrayTree, hyper: Numbers) -> Any:
        with lenient():
            return optimizer.build(hyper).update(params, opt_state, params)

    with explained("update"):
        updates, after = jax.eval_shape(update, params, opt_state, hyper)
    for what, old, new in (("updates", params, updates), ("state", opt_state, after)):
        if difference := first_difference(described(old), described(new)):
            raise OptimizerError(
                f"optimizer=: update changes the {what}: {difference}; keep structure, shapes and dtypes."
            )


def described(tree: ArrayTree) -> dict[str, str]:
    """The dtype and shape of every array of a tree, by its path."""
    named = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): f"{x.dtype} {list(x.shape)}" for path, x in named}


def first_difference(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """`LEAF was ... and is ...` for the first leaf of two descriptions that differs; "" where none does."""
    for leaf in [*old, *new]:
        before, after = old.get(leaf, "absent"), new.get(leaf, "absent")
        if before != after:
            return f"{leaf} was {before} and is {after}"
    return ""


def strong(tree: ArrayTree) -> ArrayTree:
    """The arrays of a state without weak types, which the next step would have no more."""
    is_number = lambda x: not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    cast = lambda x: lax.convert_element_type(x, x.dtype) if is_number(x) else x  # noqa: E731
    return jax.tree.map(cast, jax.tree.map(jnp.asarray, tree))


@contextlib.contextmanager
def lenient() -> Iterator[None]:
    """A context with JAX's usual rules of promotion, which code of others expects."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@contextlib.contextmanager
def explained(step: str) -> Iterator[None]:
    """A context that says that the user's optimiser failed.

    Raises:
      OptimizerError: for an error, chained.
    """
    try:
        with lenient():
            yield
    except OptimizerError:
        raise
    except Exception as error:
        raise OptimizerError(
            f"optimizer=: {step} failed: {errors.explain(error)}; it is called as init(params) and "
            "update(gradient, state, params), without further arguments."
        ) from error
