"""Parameters of which every process holds a part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule

SHARDED = ("FSDP", "DEEPSPEED")
"""Kinds of distribution where a forward pass is a matter of all processes."""


def is_sharded(model: nn.Module) -> bool:
    """Whether every process holds a part of its parameters: then they make every pass together."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


@contextlib.contextmanager
def then_sharded(model: nn.Module) -> Iterator[None]:
    """For passes without a backward pass: parameters that FSDP gathered would outlive the next optimizer step."""
    try:
        yield
    finally:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
