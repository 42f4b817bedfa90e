"""The smallest real job: Algorithm 1 on a contextual bandit, online and offline.

Protocol. Contexts are standard normal vectors; each item's reward is a random tanh network of the context,
standardised over contexts. The policy is an MLP with a softmax over all items. Online, it samples groups of items
and sees their rewards plus Gaussian noise. Offline, it sees rankings of items drawn uniformly, by rewards with
the same noise. Measured on fresh contexts, without noise: the mean reward of the policy, and the mass on the
best item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adpo.algorithm import Algorithm1, Batch, Step
from adpo.anchors import Snapshot
from adpo.core import presets
from adpo.core.objective import Objective
from adpo.core.temperature import ConstantTau


@dataclass(frozen=True)
class Protocol:
    """Every number of the demonstration."""

    dimensions: int = 16
    items: int = 10
    hidden: int = 64
    contexts: int = 64
    group: int = 8
    noise: float = 0.5
    inner_steps: int = 2
    iterations: int = 200
    learning_rate: float = 3e-3
    beta: float = 0.5
    tau: float = 1.0
    test_contexts: int = 2000


class Bandit:
    """The world: contexts, noisy rewards, and their clean truth."""

    def __init__(self, protocol: Protocol, generator: torch.Generator) -> None:
        self.protocol, self.generator = protocol, generator
        self.hidden = self._normal(protocol.dimensions, 32) / protocol.dimensions**0.5
        self.output = self._normal(32, protocol.items)
        sample = self._raw(self._normal(2000, protocol.dimensions))
        self.mean, self.std = sample.mean(0), sample.std(0)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def _raw(self, contexts: Tensor) -> Tensor:
        return torch.tanh(contexts @ self.hidden) @ self.output

    def truth(self, contexts: Tensor) -> Tensor:
        """Clean rewards of all items, [contexts, items]."""
        return (self._raw(contexts) - self.mean) / self.std

    def contexts(self) -> Tensor:
        return self._normal(self.protocol.contexts, self.protocol.dimensions)

    def sample(self, policy: nn.Module, contexts: Tensor) -> Tensor:
        with torch.no_grad():
            everything = torch.arange(self.protocol.items).expand(len(contexts), -1)
            weights = policy(contexts, everything).exp()
        return torch.multinomial(weights, self.protocol.group, replacement=True, generator=self.generator)

    def rewards(self, contexts: Tensor, candidates: Tensor) -> Tensor:
        clean = self.truth(contexts).gather(-1, candidates)
        return clean + self.protocol.noise * self._normal(*clean.shape)


class Policy(nn.Module):
    """An MLP over contexts; log-probabilities of the candidates named by index."""

    def __init__(self, protocol: Protocol) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(protocol.dimensions, protocol.hidden),
            nn.Tanh(),
            nn.Linear(protocol.hidden, protocol.items),
        )

    def forward(self, contexts: Tensor, candidates: Tensor) -> Tensor:
        return torch.log_softmax(self.net(contexts), -1).gather(-1, candidates)


class Score(NamedTuple):
    """How good a policy is, on clean test contexts."""

    reward: float
    best_mass: float


def evaluate(policy: Policy, bandit: Bandit, contexts: Tensor) -> Score:
    """Mean reward under the policy, and its mass on the best item."""
    with torch.no_grad():
        probabilities = torch.softmax(policy.net(contexts), -1)
    truth = bandit.truth(contexts)
    best = probabilities.gather(-1, truth.argmax(-1, keepdim=True))
    return Score(float((probabilities * truth).sum(-1).mean()), float(best.mean()))


def run(protocol: Protocol, seed: int, on_step: Callable[[str, Step], None]) -> dict[str, tuple[Score, Score]]:
    """Both modes from the same initial policy: ``{mode: (before, after)}``."""
    generator = torch.Generator().manual_seed(seed)
    bandit = Bandit(protocol, generator)
    test = torch.randn(protocol.test_contexts, protocol.dimensions, generator=generator)
    scores = {}
    for mode, train in {"online": _online, "offline": _offline}.items():
        torch.manual_seed(seed)
        policy = Policy(protocol)
        before = evaluate(policy, bandit, test)
        for step in train(policy, bandit, protocol):
            on_step(mode, step)
        scores[mode] = before, evaluate(policy, bandit, test)
    return scores


def _online(policy: Policy, bandit: Bandit, protocol: Protocol) -> Iterator[Step]:
    algorithm = _algorithm(policy, presets.adpo(protocol.beta), protocol)
    return algorithm.online(bandit, iterations=protocol.iterations, inner_steps=protocol.inner_steps)


def _offline(policy: Policy, bandit: Bandit, protocol: Protocol) -> Iterator[Step]:
    def rankings() -> Iterator[Batch]:
        for _ in range(protocol.iterations * protocol.inner_steps):
            contexts = bandit.contexts()
            keys = torch.rand(len(contexts), protocol.items, generator=bandit.generator)
            candidates = keys.argsort(-1)[:, : protocol.group]
            yield Batch(contexts, candidates, {"rewards": bandit.rewards(contexts, candidates)})

    return _algorithm(policy, presets.anchored_ranking(), protocol).offline(rankings(), Snapshot(policy))


def _algorithm(policy: Policy, objective: Objective, protocol: Protocol) -> Algorithm1:
    optimizer = torch.optim.Adam(policy.parameters(), protocol.learning_rate)
    return Algorithm1(policy, objective, ConstantTau(protocol.tau), optimizer)
