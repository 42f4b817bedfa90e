"""Dropout and other noise of training, wherever a model keeps its rate."""

from __future__ import annotations

import torch
from torch import nn

NOISE = ("layerdrop", "jitter_noise", "input_jitter_noise", "moe_jitter_eps")
"""Rates of noise that are no dropout: layers that are left out, factors on what experts are given."""
SEEDS, ROW = 4, [2, 3, 1, 4, 3, 2]


def without_dropout(model: nn.Module) -> None:
    """Set every rate to zero: of dropout modules, and those that attention keeps as a number of its own.

    >>> layer = nn.Sequential(nn.Dropout(0.5))
    >>> without_dropout(layer)
    >>> layer[0].p
    0.0
    """
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_rate = "dropout" in name or name in NOISE or (name == "p" and "Dropout" in type(module).__name__)
            if is_rate and isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)


@torch.no_grad()
def is_random(model: nn.Module) -> bool:
    """Whether a pass of training draws random numbers, and what it gives depends on them."""
    device = next(model.parameters()).device
    ids, was_training = torch.tensor([ROW], device=device), model.training
    outputs, draws = [], False
    try:
        model.train()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for seed in range(SEEDS):
                torch.manual_seed(seed)
                before = _states(device)
                outputs.append(model(input_ids=ids, use_cache=False).logits)
                pairs = zip(before, _states(device), strict=True)
                draws |= any(not torch.equal(one, other) for one, other in pairs)
                if not draws:  # whatever the seed: what differs now is rounding
                    return False
    finally:
        model.train(was_training)
    return any(not torch.equal(outputs[0], other) for other in outputs[1:])


def _states(device: torch.device) -> list[torch.Tensor]:
    of_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *of_device]
