"""Small policies of the bandits, all runs as one stack: MLPs with two tanh layers and a softmax over the items."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from adpo.experiments.bandits.protocol import Protocol
from adpo.experiments.bandits.world import Worlds
from adpo.experiments.stacked import Weights, outputs


def initial_weights(protocol: Protocol, worlds: Worlds) -> Weights:
    """Uniform in ±1/sqrt(fan_in), the same for every run of a seed; ``[replicas, ...]``."""
    sizes = (protocol.dimensions, protocol.hidden, protocol.hidden, protocol.items)
    weights = []
    for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        bound = 1 / math.sqrt(fan_in)
        weights.append(bound * worlds.initial((fan_in, fan_out), f"matrix {layer} {fan_in}x{fan_out}"))
        weights.append(bound * worlds.initial((1, fan_out), f"bias {layer} {fan_out}"))
    return weights


def log_policy(weights: Weights, contexts: Tensor) -> Tensor:
    """Log-probabilities of all items, ``[runs, n, items]``, for contexts ``[runs, n, dimensions]``."""
    return torch.log_softmax(outputs(weights, contexts), -1)


def repeated(weights: Weights, times: int) -> Weights:
    """A copy for each method: ``[times * replicas, ...]``, methods first, ready to be trained."""
    return [weight.repeat(times, 1, 1).requires_grad_() for weight in weights]


def part(weights: Weights, number: int, replicas: int) -> Weights:
    """The weights of one method's runs."""
    return [weight[number * replicas : (number + 1) * replicas] for weight in weights]


def adamw(weights: Weights, protocol: Protocol) -> torch.optim.AdamW:
    return torch.optim.AdamW(weights, lr=protocol.learning_rate, weight_decay=protocol.weight_decay, fused=True)


def reference_weights(protocol: Protocol, worlds: Worlds) -> Weights:
    """Policies pre-trained for a few steps on the best items of clean contexts; ``[replicas, ...]``."""
    weights = repeated(initial_weights(protocol, worlds), 1)
    optimizer = adamw(weights, protocol)
    for step in range(protocol.reference_steps):
        contexts = worlds.reference_contexts(step)
        best = worlds.clean_rewards(contexts).argmax(-1, keepdim=True)
        loss = -log_policy(weights, contexts).gather(-1, best).mean((1, 2)).sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [weight.detach() for weight in weights]
