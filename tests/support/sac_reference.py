"""SAC and TD3 in NumPy, float64, with gradients by hand: an update that agrees with the agent's, from equal noise."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

Layers = list[tuple[np.ndarray, np.ndarray]]
"""Weights [inputs, outputs] and biases of dense layers, with ReLUs between them."""


def forward(layers: Layers, x: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """The outputs, and the inputs of every layer."""
    inputs = []
    for number, (weights, bias) in enumerate(layers):
        x = np.maximum(x, 0.0) if number else x
        inputs.append(x)
        x = x @ weights + bias
    return x, inputs


def backward(layers: Layers, inputs: list[np.ndarray], dy: np.ndarray) -> tuple[Layers, np.ndarray]:
    """The gradient of every layer, and of the first input."""
    grads: Layers = []
    for number in reversed(range(len(layers))):
        grads.insert(0, (inputs[number].T @ dy, dy.sum(0)))
        dy = dy @ layers[number][0].T
        dy = dy * (inputs[number] > 0) if number else dy
    return grads, dy


@dataclasses.dataclass
class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1) of some arrays, with decay of matrices beside it (AdamW)."""

    rate: float
    b2: float = 0.999
    decay: float = 0.0
    eps: float = 1e-8
    step: int = 0
    moments: Any = None

    def __call__(self, params: list[np.ndarray], grads: list[np.ndarray]) -> list[np.ndarray]:
        if self.moments is None:
            self.moments = [(np.zeros_like(x), np.zeros_like(x)) for x in params]
        self.step += 1
        b2 = self.b2
        self.moments = [(0.9 * m + 0.1 * g, b2 * v + (1 - b2) * g * g) for (m, v), g in zip(self.moments, grads)]
        hats = [(m / (1 - 0.9**self.step), v / (1 - b2**self.step)) for m, v in self.moments]
        decays = [self.decay * x if x.ndim > 1 else 0.0 for x in params]
        moves = [m / (np.sqrt(v) + self.eps) + decay for (m, v), decay in zip(hats, decays)]
        return [x - self.rate * move for x, move in zip(params, moves)]

    def layers(self, params: Layers, grads: Layers) -> Layers:
        flat = self([x for pair in params for x in pair], [x for pair in grads for x in pair])
        return list(zip(flat[::2], flat[1::2]))


class Moments:
    """The mean and variance of all samples so far, which begin as 0 and 1 with the weight of 1e-4 samples."""

    def __init__(self, shape: tuple[int, ...]):
        self.count, self.sum, self.square = 1e-4, np.zeros(shape), 1e-4 * np.ones(shape)

    def add(self, samples: np.ndarray) -> None:
        self.count += len(samples)
        self.sum, self.square = self.sum + samples.sum(0), self.square + np.square(samples).sum(0)

    @property
    def mean(self) -> np.ndarray:
        return self.sum / self.count

    @property
    def variance(self) -> np.ndarray:
        return self.square / self.count - self.mean**2


def softmax(x: np.ndarray) -> np.ndarray:
    exp = np.exp(x - x.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def projected(law: np.ndarray, z: np.ndarray, shift: float, factor: float) -> np.ndarray:
    """One distribution of shift + factor z on the atoms z, atom by atom (Bellemare et al. 2017, algorithm 1)."""
    found = np.zeros_like(law)
    for mass, atom in zip(law, z):
        b = (np.clip(shift + factor * atom, z[0], z[-1]) - z[0]) / (z[1] - z[0])
        low = min(int(np.floor(b)), len(z) - 2)
        found[low] += mass * (low + 1 - b)
        found[low + 1] += mass * (b - low)
    return found


@dataclasses.dataclass
class Reference:
    """The learner; settings are named as the agent's."""

    policy: Layers
    critics: list[Layers]
    log_alpha: float
    settings: dict[str, Any]
    progress: float = 0.0  # of a rate that falls linearly; 0 for one that does not

    def __post_init__(self):
        self.target_critics, self.target_policy = self.critics, self.policy
        s = self.settings
        how = {"b2": s["optimizer_b2"], "decay": s["weight_decay"] if s["optimizer"] == "adamw" else 0.0}
        rate = s["learning_rate"] * (1 - (1 - s["final_rate"]) * self.progress if self.progress else 1)
        self.critic_adams = [Adam(rate, **how) for _ in self.critics]
        self.policy_adam = Adam(rate * s["policy_rate"], **how)
        self.alpha_adam = Adam(rate * s["alpha_rate"], **how)
        self.updates = 0
        self.z = np.linspace(-s["max_value"], s["max_value"], s["num_bins"]) if s["values"] != "mean" else None
        self.moments = Moments((self.policy[0][0].shape[0],))
        self.return_moments, self.largest_return = Moments(()), 0.0

    def mean(self, outputs: np.ndarray) -> np.ndarray:
        """Q of a critic's outputs [B, K]."""
        return outputs[:, 0] if self.z is None else softmax(outputs) @ self.z

    def normalized(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Rows by statistics that have the observation of row 0, and the return of row 1."""
        if self.settings["normalize_observations"]:
            self.moments.add(rows["observation"][0])
            std = np.sqrt(self.moments.variance + self.settings["statistics_min_std"] ** 2)
            limit = self.settings["statistics_clip"]
            rows = rows | {"observation": np.clip((rows["observation"] - self.moments.mean) / std, -limit, limit)}
        if self.settings["normalize_rewards"]:
            G = rows["reward"][1] + self.settings["discount"] * rows["discounted_return"][0]
            self.return_moments.add(G)
            self.largest_return = max(self.largest_return, np.abs(G).max(initial=0.0))
            scale = max(np.sqrt(self.return_moments.variance + 1e-8), self.largest_return / self.settings["max_value"])
            rows = rows | {"reward": rows["reward"] / scale}
        return rows

    def law(self, policy: Layers, x: np.ndarray, e: np.ndarray) -> dict[str, Any]:
        """A sample of a tanh Gaussian by noise e, and all that leads to it."""
        low, high = np.log(self.settings["min_std"]), np.log(self.settings["max_std"])
        outputs, inputs = forward(policy, x)
        mean, raw = np.split(outputs, 2, axis=1)
        log_std = low + (high - low) * (np.tanh(raw) + 1) / 2
        action = np.tanh(mean + np.exp(log_std) * e)
        log_prob = np.sum(-0.5 * e**2 - log_std - 0.5 * np.log(2 * np.pi) - np.log(1 - action**2), axis=1)
        return {"action": action, "log_prob": log_prob, "raw": raw, "log_std": log_std, "inputs": inputs}

    def joined(self, rewards: np.ndarray, discounts: np.ndarray, firsts: np.ndarray) -> tuple[float, float, int]:
        """R, G and m of one lane: at most n rewards, and none beyond the row before another episode."""
        total, weight, m = 0.0, 1.0, 0
        while m < self.settings["n_step"]:
            total += weight * self.settings["reward_scale"] * rewards[m + 1]
            weight *= self.settings["discount"] * discounts[m + 1]
            m += 1
            if firsts[m + 1 : m + 2].any():
                break
        return total, weight, m

    def targets(self, rows: dict[str, np.ndarray], e: np.ndarray) -> np.ndarray:
        """y [N, B, K], or the distributions of it."""
        s, B = self.settings, e.shape[0]
        joined = [self.joined(*(rows[x][:, b] for x in ("reward", "discount", "first"))) for b in range(B)]
        R, G = np.array([x[0] for x in joined]), np.array([x[1] for x in joined])
        last = np.stack([rows["observation"][m, b] for b, (_, _, m) in enumerate(joined)])
        policy = self.target_policy if s["target_policy"] else self.policy
        if s["policy"] == "gaussian":
            law = self.law(policy, last, e)
            action, cost = law["action"], np.exp(self.log_alpha) * law["log_prob"]
        else:
            c = s["target_noise_clip"]
            action = np.clip(np.tanh(forward(policy, last)[0]) + np.clip(s["target_noise"] * e, -c, c), -1, 1)
            cost = 0.0
        found = [forward(critic, np.hstack([last, action]))[0] for critic in self.target_critics]
        if s["critics"] == "min":
            least = np.argmin([self.mean(x) for x in found], axis=0)
            found = [np.stack([found[i][b] for b, i in enumerate(least)])] * len(found)
        if self.z is None:
            return np.stack([R + G * (x[:, 0] - cost) for x in found])[..., None]
        return np.stack([[projected(p, self.z, *at) for p, *at in zip(softmax(x), R - G * cost, G)] for x in found])

    def update(self, rows: dict[str, np.ndarray], actions: np.ndarray, noise: np.ndarray) -> None:
        """An update on rows [n + 1, B], actions [B, A] in [-1, 1], and noise of a' and of a [2, B, A]."""
        rows = self.normalized(rows)
        s, x, B = self.settings, rows["observation"][0], len(actions)
        y = self.targets(rows, noise[0])
        for i, critic in enumerate(self.critics):
            q, inputs = forward(critic, np.hstack([x, actions]))
            # The slope of half the square is q - y; of the cross-entropy it is that of the probabilities.
            grads, _ = backward(critic, inputs, ((q if self.z is None else softmax(q)) - y[i]) / B)
            self.critics[i] = self.critic_adams[i].layers(critic, grads)
        self.updates += 1
        if self.updates % s["policy_interval"] == 0:
            self.update_policy(x, noise[1])
        mix = lambda old, new: old + s["tau"] * (new - old)  # noqa: E731
        move = lambda old, new: [tuple(map(mix, a, b)) for a, b in zip(old, new)]  # noqa: E731
        self.target_critics = [move(old, new) for old, new in zip(self.target_critics, self.critics)]
        self.target_policy = move(self.target_policy, self.policy)

    def update_policy(self, x: np.ndarray, e: np.ndarray) -> None:
        """A step up the new critics, and alpha's."""
        s, (B, A), alpha = self.settings, e.shape, np.exp(self.log_alpha)
        if s["policy"] == "gaussian":
            law = self.law(self.policy, x, e)
            action, inputs = law["action"], law["inputs"]
        else:
            outputs, inputs = forward(self.policy, x)
            action = np.tanh(outputs)
        # dQ/da of the least critic of each sample, or of their mean.
        found = [forward(critic, np.hstack([x, action])) for critic in self.critics]
        means = np.stack([self.mean(q) for q, _ in found])
        least = np.argmin(means, axis=0)
        slope = np.zeros_like(action)
        for i, (critic, (q, kept)) in enumerate(zip(self.critics, found)):
            share = (least == i).astype(float) if s["critics"] == "min" else np.full(B, 1 / len(self.critics))
            # dQ/dz_k of a softmax is p_k (z_k - Q).
            of_outputs = np.ones_like(q) if self.z is None else softmax(q) * (self.z - means[i][:, None])
            slope += backward(critic, kept, share[:, None] * of_outputs)[1][:, -A:]
        du = -slope * (1 - action**2) / B
        if s["policy"] != "gaussian":
            self.policy = self.policy_adam.layers(self.policy, backward(self.policy, inputs, du)[0])
            return
        # log pi = ... - log_std - log(1 - tanh(u)^2), and u = mean + std e.
        du = du + alpha * 2 * action / B
        low, high = np.log(s["min_std"]), np.log(s["max_std"])
        d_log_std = du * np.exp(law["log_std"]) * e - alpha / B
        d_raw = d_log_std * (high - low) / 2 * (1 - np.tanh(law["raw"]) ** 2)
        self.policy = self.policy_adam.layers(self.policy, backward(self.policy, inputs, np.hstack([du, d_raw]))[0])
        d_alpha = alpha * np.mean(-law["log_prob"] - A * s["target_entropy"])
        (log_alpha,) = self.alpha_adam([np.array(self.log_alpha)], [np.array(d_alpha)])
        self.log_alpha = float(log_alpha)
