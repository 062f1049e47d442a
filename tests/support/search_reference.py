"""Tree search of one root as the papers write it, in plain Python, to compare `podracer.search` with.

PUCT: Silver et al. 2018 and Schrittwieser et al. 2020, appendix B, with Q scaled by what the node has seen. Gumbel:
Danihelka et al. 2022, sections 3 to 5, appendix D. Nothing is kept that can be computed: a node knows all its returns.
"""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass
class Node:
    """A state, what the model says of it, and for every action the returns so far and the child."""

    state: int
    reward: float
    discount: float
    value: float
    logits: np.ndarray
    legal: np.ndarray
    returns: list = dataclasses.field(default_factory=list)
    children: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.returns = [[] for _ in self.logits]

    @property
    def n(self):
        return np.array([len(x) for x in self.returns])

    @property
    def prior(self):
        weights = np.where(self.legal, np.exp(self.logits - self.logits[self.legal].max()), 0.0)
        return weights / weights.sum()


class Reference:
    """`step(state, action) -> (state, reward, discount)`, `evaluate(state) -> (value, logits, legal)`."""

    def __init__(self, config, step, evaluate, state, noise, prior=None):
        self.config, self.step, self.evaluate, self.noise, self.root_prior = config, step, evaluate, noise, prior
        self.margin = math.inf  # the least difference between the best and the second best of any choice
        self.nodes = [Node(state, 0.0, 0.0, *evaluate(state))]

    def simulate(self):
        """One simulation."""
        path, node = [], self.nodes[0]
        while True:
            action = self.choose(node)
            path.append((node, action))
            if action not in node.children:
                break
            node = node.children[action]
        state, reward, discount = self.step(node.state, action)
        leaf = Node(state, reward, discount, *self.evaluate(state))
        self.nodes.append(leaf)
        if len(path) < (self.config.max_depth or math.inf):
            node.children[action] = leaf
        G = leaf.value
        for child, (node, action) in zip([leaf, *(node for node, _ in reversed(path))], reversed(path)):
            G = child.reward + child.discount * G
            node.returns[action].append(G)

    def choose(self, node):
        """The action of the next simulation at a node."""
        scores = np.where(
            node.legal, self.puct(node) if self.config.algorithm == "puct" else self.gumbel(node), -np.inf
        )
        first, second = np.argsort(-scores, kind="stable")[:2]
        self.margin = min(self.margin, scores[first] - scores[second])
        return int(first)

    def puct(self, node):
        config, N = self.config, 1 + node.n.sum()
        Q = {a: np.mean(x) for a, x in enumerate(node.returns) if x}
        low, high = config.bounds or self.extremes([*Q.values(), (node.value + sum(map(sum, node.returns))) / N])
        scaled = np.array(
            [(Q[a] - low) / max(high - low, config.epsilon) if a in Q else 0.0 for a in range(len(node.n))]
        )
        prior = self.root_prior if node is self.nodes[0] and self.root_prior is not None else node.prior
        rate = math.sqrt(N) * (config.c_init + math.log((N + config.c_base + 1) / config.c_base))
        return scaled + rate * prior / (1 + node.n) + self.noise

    def gumbel(self, node):
        n, improved = node.n, self.improved(node)
        if node is not self.nodes[0]:
            return np.exp(improved - np.logaddexp.reduce(improved)) - n / (1 + n.sum())
        m = min(self.config.considered, node.legal.sum())
        return np.where(n == self.halving(m)[n.sum()], self.noise + improved, -np.inf)

    def improved(self, node):
        """The logarithm of the improved policy, up to a constant."""
        config, visited = self.config, node.n > 0
        Q = np.array([np.mean(x) if x else 0.0 for x in node.returns])
        mean = node.prior[visited] @ Q[visited] / node.prior[visited].sum() if visited.any() else 0.0
        Q[~visited] = (node.value + node.n.sum() * mean) / (1 + node.n.sum())
        low, high = config.bounds or self.extremes(Q)
        scale = (config.visit_offset + node.n.max()) * config.value_scale
        with np.errstate(divide="ignore"):
            return np.log(node.prior) + scale * (Q - low) / max(high - low, config.epsilon)

    def halving(self, m):
        """Visits that the action of each simulation had before: all m equally often, then half of them, ..."""
        S, sequence, visits, k = self.config.simulations, [], [0] * m, m
        while len(sequence) <= S:
            for _ in range(max(1, int(S / (math.ceil(math.log2(m)) * k))) if m > 1 else 1):
                sequence += visits[:k]
                visits[:k] = [visit + 1 for visit in visits[:k]]
            k = max(2, k // 2) if m > 1 else 1
        return sequence

    @staticmethod
    def extremes(values):
        return min(values), max(values)
