"""Fast DQN and DQN in plain Python and NumPy, given the chance in them: an oracle that shares no code with the library.

Algorithm 1 of "Human-Level Control without Server-Grade Hardware" (Daley & Amato 2021), and the sequential DQN of Mnih
et al. (2015). What the samplers' environments showed, which actions were taken there and which experiences every
minibatch holds is given; that greedy actions are greedy and drawn experiences lie in D is checked. float64 throughout.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

Theta = list[tuple[np.ndarray, np.ndarray]]
"""Weights [in, out] and bias [out] of every layer of an MLP with relus between them."""

Minibatch = Sequence[tuple[int, int]]
"""(lane, row) of each of its experiences."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """The paper's letters and Lua's RMSProp; `epsilon` maps time steps that were learnt from to a probability.

    The newest `late` experiences of a sampler stay in its buffer when it is flushed; in the paper, none.
    """

    F: int
    C: int
    N: int
    capacity: int
    gamma: float
    learning_rate: float
    decay: float
    stability: float
    epsilon: Callable[[int], float]
    late: int = 0


class Stream(NamedTuple):
    """The rows [R+1] of one environment, and the actions [R] that it was given there."""

    observation: np.ndarray
    reward: np.ndarray
    discount: np.ndarray
    first: np.ndarray
    action: np.ndarray


class Experience(NamedTuple):
    """(s, a, r, s') and where it is from; `discount` is 0 where s' is terminal. Resets are rows, but not `real`."""

    lane: int
    row: int
    state: np.ndarray
    action: int
    reward: float
    discount: float
    next_state: np.ndarray
    real: bool


class Sampler:
    """A sampler thread: an environment and a temporary buffer."""

    def __init__(self, lane: int, stream: Stream):
        self.lane, self.stream, self.row = lane, stream, 0
        self.buffer: list[Experience] = []
        self.explored: list[tuple[float, bool]] = []

    @property
    def state(self) -> np.ndarray:
        return self.stream.observation[self.row].astype(np.float64)

    def step(self, q: np.ndarray | None = None, epsilon: float = 1.0) -> None:
        """One step in the environment, epsilon-greedy on `q` [A] where there is one."""
        stream, row = self.stream, self.row
        action, state = int(stream.action[row]), self.state
        if q is not None:
            greedy = bool(q[action] >= q.max() - 1e-6)
            if epsilon == 0.0 and not greedy:
                raise AssertionError(f"lane {self.lane}, row {row}: action {action} is not greedy on {q}.")
            self.explored.append((epsilon, not greedy))
        self.row = row + 1
        reward, discount = float(stream.reward[row + 1]), float(stream.discount[row + 1])
        real = not stream.first[row + 1]
        self.buffer.append(Experience(self.lane, row, state, action, reward, discount, self.state, real))

    def flush(self, late: int) -> list[Experience]:
        """Empties the buffer but for the newest `late` experiences, and returns the rest."""
        held = len(self.buffer) - late
        flushed, self.buffer = self.buffer[:held], self.buffer[held:]
        return flushed


def forward(theta: Theta, x: np.ndarray) -> list[np.ndarray]:
    """The inputs of every layer, and last the values [B, A]."""
    layers = [x]
    for i, (weights, bias) in enumerate(theta):
        x = x @ weights + bias
        layers.append(x if i == len(theta) - 1 else np.maximum(x, 0.0))
        x = layers[-1]
    return layers


def backward(theta: Theta, layers: list[np.ndarray], gradient: np.ndarray) -> Theta:
    """The gradient of a loss, given that of its values [B, A]."""
    gradients = []
    for i in reversed(range(len(theta))):
        gradients.append((layers[i].T @ gradient, gradient.sum(axis=0)))
        gradient = gradient @ theta[i][0].T * (layers[i] > 0)
    return gradients[::-1]


class Trainer:
    """theta, theta-, and updates of theta."""

    def __init__(self, theta: Theta, setting: Setting):
        self.setting, self.updates = setting, 0
        self.theta: Theta = [(w.astype(np.float64), b.astype(np.float64)) for w, b in theta]
        self.target = self.theta
        self.mean = [np.zeros_like(x) for layer in self.theta for x in layer]
        self.square = [np.zeros_like(x) for layer in self.theta for x in layer]

    def copy(self) -> None:
        """theta- <- theta. Nothing is written in place, so that it stays what it is."""
        self.target = list(self.theta)

    def epsilon(self) -> float:
        return self.setting.epsilon(self.setting.F * self.updates)

    def update(self, memory: list[Experience], minibatch: Minibatch) -> None:
        """One minibatch from D."""
        stored = {(experience.lane, experience.row): experience for experience in memory if experience.real}
        missing = [place for place in minibatch if place not in stored]
        if missing:
            raise AssertionError(f"update {self.updates} drew (lane, row) {missing}, which D does not hold.")
        batch = [stored[place] for place in minibatch]
        states, actions = np.stack([e.state for e in batch]), np.array([e.action for e in batch])
        following = forward(self.target, np.stack([e.next_state for e in batch]))[-1].max(axis=1)
        discount = np.array([e.discount for e in batch])
        targets = np.array([e.reward for e in batch]) + self.setting.gamma * discount * following
        layers = forward(self.theta, states)
        each = np.arange(len(batch))
        errors = targets - layers[-1][each, actions]
        gradient = np.zeros_like(layers[-1])
        gradient[each, actions] = -np.clip(errors, -1.0, 1.0) / len(batch)
        self._step([x for layer in backward(self.theta, layers, gradient) for x in layer])
        self.updates += 1

    def _step(self, gradients: list[np.ndarray]) -> None:
        """Lua's centred RMSProp: moments begin at 0, and the constant is within the root."""
        setting = self.setting
        flat = [x for layer in self.theta for x in layer]
        for i, g in enumerate(gradients):
            self.mean[i] = setting.decay * self.mean[i] + (1.0 - setting.decay) * g
            self.square[i] = setting.decay * self.square[i] + (1.0 - setting.decay) * g**2
            root = np.sqrt(self.square[i] - self.mean[i] ** 2 + setting.stability)
            flat[i] = flat[i] - setting.learning_rate * g / root
        self.theta = list(zip(flat[0::2], flat[1::2], strict=True))


class Begun(NamedTuple):
    """The moment at which parameters began to act: the number of updates done, the parameters, epsilon, and the size of
    D."""

    updates: int
    acting: Theta
    epsilon: float
    size: int


def prepopulated(samplers: list[Sampler], setting: Setting) -> list[Experience]:
    """D with N experiences, or all but those that are late."""
    memory = []
    for _ in range(setting.N // len(samplers)):
        for sampler in samplers:
            sampler.step()
            memory.extend(sampler.flush(setting.late))
    return memory


def fast_dqn(
    samplers: list[Sampler], minibatches: Iterator[Minibatch], theta: Theta, setting: Setting, steps: int
) -> tuple[Trainer, list[Begun]]:
    """Algorithm 1, until `steps` periods of C were acted and learnt from; `begun` is of every period.

    The trainer's task is done when it is waited for: as late as it may be.
    """
    W, F, C = len(samplers), setting.F, setting.C
    memory = prepopulated(samplers, setting)
    trainer, begun = Trainer(theta, setting), []
    dispatched, q, epsilon = 0, np.zeros(()), 0.0

    def wait() -> None:
        for _ in range(dispatched):
            trainer.update(memory, next(minibatches))

    for t in itertools.count(1):
        if t % C == 1:
            wait()
            flushed = [experience for sampler in samplers for experience in sampler.flush(setting.late)]
            memory.extend(sorted(flushed, key=lambda experience: experience.row))  # the oldest leave first
            del memory[: -setting.capacity]
            trainer.copy()
            epsilon = trainer.epsilon()
            begun.append(Begun(trainer.updates, trainer.target, epsilon, len(memory)))
            dispatched = C // F
        if t > steps * C:
            break
        i = (t - 1) % W
        if i == 0:
            q = forward(trainer.target, np.stack([sampler.state for sampler in samplers]))[-1]
        samplers[i].step(q[i], epsilon)
    wait()
    return trainer, begun


def dqn(
    samplers: list[Sampler], minibatches: Iterator[Minibatch], theta: Theta, setting: Setting, steps: int
) -> tuple[Trainer, list[Begun]]:
    """DQN: a minibatch, then F steps on theta, one after the other; theta- <- theta every C steps.

    Until `steps` times F were acted and learnt from; `begun` is of each time.
    """
    W, F = len(samplers), setting.F
    memory = prepopulated(samplers, setting)
    trainer, begun = Trainer(theta, setting), []
    for t in itertools.count(1):
        if (t - 1) % F == 0:
            trainer.update(memory, next(minibatches))
            if trainer.updates * F % setting.C == 0:
                trainer.copy()
            begun.append(Begun(trainer.updates, trainer.theta, trainer.epsilon(), len(memory)))
        if t > steps * F:
            break
        sampler = samplers[(t - 1) % W]
        sampler.step(forward(trainer.theta, sampler.state[None])[-1][0], trainer.epsilon())
        memory.extend(sampler.flush(setting.late))
        del memory[: -setting.capacity]
    return trainer, begun
