"""The same training one run at a time, as one would first write it: the oracle of the stacked computation, and
what its speed is measured against.

``python -m adpo.bench bandits`` prints the ratio of the two, measured in one run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from adpo.experiments.bandits import fleet
from adpo.experiments.bandits.methods import Batch, Method, make
from adpo.experiments.bandits.protocol import MEDIUM, Protocol
from adpo.experiments.bandits.train import train
from adpo.experiments.bandits.world import Replica, Worlds
from adpo.experiments.stacked import Weights


def train_alone(protocol: Protocol, replica: Replica, method: Method) -> nn.Sequential:
    """One method on one replica with ordinary modules; fixed, on-policy and zero anchors, AdamW."""
    worlds = Worlds(protocol, [replica])
    start = fleet.reference_weights(protocol, worlds)
    policy, reference = _module(protocol, start), _module(protocol, start)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=protocol.learning_rate, weight_decay=protocol.weight_decay
    )
    for _ in range(protocol.iterations):
        draws = worlds.draw()
        with torch.no_grad():
            log_old, log_reference = (_log_policy(module, draws.contexts) for module in (policy, reference))
            items = draws.items
            if method.samples == "policy":
                items = (log_old.unsqueeze(-2) + draws.gumbel).argmax(-1)
            rewards = worlds.observed(draws, items)
        anchor = {"zero": None, "reference": log_reference, "old": log_old}[method.anchor]
        for _ in range(protocol.inner_steps):
            log_policy = _log_policy(policy, draws.contexts)
            loss = method.loss(Batch(log_policy, log_old, anchor, log_reference, items, rewards))
            optimizer.zero_grad()
            loss.sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return policy


def weights_of(policy: nn.Sequential) -> Weights:
    """A module's weights in the layout of a fleet of one."""
    layers = [layer for layer in policy if isinstance(layer, nn.Linear)]
    return [w for layer in layers for w in (layer.weight.detach().T[None], layer.bias.detach()[None, None])]


def _module(protocol: Protocol, weights: Weights) -> nn.Sequential:
    width = protocol.hidden
    layers = [nn.Linear(protocol.dimensions, width), nn.Linear(width, width), nn.Linear(width, protocol.items)]
    with torch.no_grad():
        for layer, matrix, bias in zip(layers, weights[0::2], weights[1::2], strict=True):
            layer.weight.copy_(matrix[0].T)
            layer.bias.copy_(bias[0, 0])
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def _log_policy(module: nn.Module, contexts: Tensor) -> Tensor:
    return torch.log_softmax(module(contexts[0]), -1)[None]


def run(iterations: int = 20, seeds: Sequence[int] = range(12)) -> float:
    """How many times faster 120 runs (ten settings, twelve seeds) go together than one after the other.

    The pre-training of references is left out of both.
    """
    protocol = replace(Protocol(), iterations=iterations, reference_steps=0)
    methods = [make("adpo-ranking", {"tau": 1.0 + i}) for i in range(10)]
    replicas = [Replica(MEDIUM["gaussian"], seed) for seed in seeds]
    warm = replace(protocol, iterations=2)
    train(warm, replicas, methods)
    train_alone(warm, replicas[0], methods[0])
    started = time.perf_counter()
    train(protocol, replicas, methods)
    together = time.perf_counter() - started
    started = time.perf_counter()
    for replica in replicas:
        for method in methods:
            train_alone(protocol, replica, method)
    alone = time.perf_counter() - started
    sys.stdout.write(
        f"{len(replicas) * len(methods)} runs, batch {protocol.contexts}, hidden {protocol.hidden}, "
        f"{iterations} iterations of {protocol.inner_steps} steps: together {together:.2f} s, one after the other "
        f"{alone:.1f} s: {alone / together:.1f}x\n"
    )
    return alone / together
