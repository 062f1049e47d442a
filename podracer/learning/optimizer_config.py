"""The optimiser's settings, which configs of agents inherit."""

from __future__ import annotations

import dataclasses
from typing import Any

from podracer import configs
from podracer.learning import optimizer, update


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimiser's settings.

    Attributes:
      optimizer: see `podracer.learning.optimizer.make`; `make(..., optimizer=)` and `train(..., optimizer=)` take your
        own.
      optimizer_eps: its epsilon; above 0, for a step of 0 / 0 is NaN where gradients are 0.
      optimizer_b2: of "adam", "radam", "adamw", and what "muon" leaves to AdamW: the decay of the running mean of
        squared gradients.
      optimizer_eps_root: of "adam": added under its square root. Above 0, such as 1e-12, gradients through an update
        (`podracer.anakin.update`) are finite.
      weight_decay: of "adamw" and "muon": each step takes this share, times the learning rate, of every matrix.
      learning_rate_schedule: the course of the learning rate over `total_steps`: "constant", or "linear" or "cosine",
        which fall to 0.
      final_rate: the share of the learning rate that "linear" falls to.
      learning_rate_warmup: the share of `total_steps` over which the learning rate rises from 0 before.
    """

    optimizer: optimizer.Name = "adam"
    optimizer_eps: float = configs.field(1e-8, low=1e-30, tunable=True)
    optimizer_b2: float = configs.field(0.999, low=0.0, high=0.999999)
    optimizer_eps_root: float = configs.field(0.0, low=0.0)
    weight_decay: float = configs.field(1e-2, low=0.0, tunable=True)
    learning_rate_schedule: update.Schedule = "linear"
    final_rate: float = configs.field(0.0, low=0.0, high=1.0)
    learning_rate_warmup: float = configs.field(0.0, low=0.0, high=1.0)

    def clip_no_gradient(self) -> None:
        """Makes a `max_grad_norm` of None, which agents may allow, inf: a tunable number."""
        if getattr(self, "max_grad_norm", 0.0) is None:
            object.__setattr__(self, "max_grad_norm", float("inf"))

    def check_numbers(self, own: optimizer.Own | None, names: tuple[str, ...], owners: tuple[str, ...]) -> None:
        """Checks that numbers of some optimisers have their defaults where another one is used.

        Args:
          own: the user's.
          names: of the fields.
          owners: values of `optimizer` that use them.

        Raises:
          ValueError: for another value.
        """
        if own is not None or self.optimizer not in owners:
            other = f"optimizer={self.optimizer!r}" if own is None else "an optimizer= of your own"
            configs.require_defaults(self, names, f"is of {', '.join(owners)}, not of {other}")

    def make_optimizer(
        self,
        own: optimizer.Own | None,
        *,
        l2_cost: float = 0.0,
        name: optimizer.Name | None = None,
        factors: tuple[str, ...] = (),
        **others: Any,
    ) -> optimizer.Optimizer:
        """The user's optimiser, or the config's if None.

        Args:
          own: the user's.
          l2_cost: see `optimizer.Optimizer`.
          name: instead of the field's.
          factors: names of settings that multiply the learning rate.
          others: further arguments of `optimizer.make`.

        Raises:
          ValueError: for a `final_rate` of another schedule than "linear", or a number of another optimiser.
          OptimizerError: where the user's has a rate of its own, and the config a schedule or factors of the rate.
        """
        if self.final_rate and self.learning_rate_schedule != "linear":
            raise ValueError(
                f"final_rate={self.final_rate} is of learning_rate_schedule='linear', not "
                f"{self.learning_rate_schedule!r}; use 0.0."
            )
        self.check_numbers(own, ("optimizer_b2",), ("adam", "radam", "adamw", "muon"))
        self.check_numbers(own, ("optimizer_eps_root",), ("adam",))
        self.check_numbers(own, ("weight_decay",), ("adamw", "muon"))
        if own is None:
            numbers = {"b2": self.optimizer_b2, "eps_root": self.optimizer_eps_root}
            return optimizer.make(name or self.optimizer, **numbers, **others)._replace(l2_cost=l2_cost)
        scheduled = self.learning_rate_schedule != "constant" or self.learning_rate_warmup > 0.0
        remedies = ["learning_rate_schedule='constant' and learning_rate_warmup=0"] if scheduled else []
        remedies += [f"{factor}=1" for factor in factors if getattr(self, factor) != 1.0]
        return optimizer.of(own, " and ".join(remedies))._replace(l2_cost=l2_cost)
