"""Action distributions: actions, log-probabilities and entropies from the outputs of a policy head.

`for_space(action_space)` returns a bundle of pure functions over arrays of any leading shape. Log-probabilities are of
the `sample`; `to_action` converts it to the environment's action (they differ for Gaussians).
"""

from podracer.distributions.boxes import UnitBox, unit_box
from podracer.distributions.choices import (
    FEW_VALUES,
    categorical,
    dirichlet,
    epsilon_greedy,
    greedy,
    multi_categorical,
    value_of,
)
from podracer.distributions.distribution import Distribution
from podracer.distributions.gaussians import (
    Gaussian,
    Squashing,
    Std,
    TanhGaussian,
    bounded_log_std,
    check_std,
    clipped_gaussian,
    raw_of_std,
    standard_normal,
    tanh_gaussian,
)
from podracer.distributions.of_spaces import for_space

__all__ = [
    "FEW_VALUES",
    "Distribution",
    "Gaussian",
    "Squashing",
    "Std",
    "TanhGaussian",
    "UnitBox",
    "bounded_log_std",
    "categorical",
    "check_std",
    "clipped_gaussian",
    "dirichlet",
    "epsilon_greedy",
    "for_space",
    "greedy",
    "multi_categorical",
    "raw_of_std",
    "standard_normal",
    "tanh_gaussian",
    "unit_box",
    "value_of",
]
