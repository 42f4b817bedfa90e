"""Dropout, wherever a model keeps its rate."""

from __future__ import annotations

from torch import nn


def without_dropout(model: nn.Module) -> None:
    """Set every rate to zero: of dropout modules, and those that attention keeps as a number of its own.

    >>> layer = nn.Sequential(nn.Dropout(0.5))
    >>> without_dropout(layer)
    >>> layer[0].p
    0.0
    """
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_rate = "dropout" in name or (name == "p" and "Dropout" in type(module).__name__)
            if is_rate and isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
