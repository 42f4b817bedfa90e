"""Compiled decoder layers, for packed passes alone.

All layers share one compiled form, for any number of tokens. What is not packed, such as generation, goes through
the layers as they are, and compiles nothing.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch


def why_not_compiled(model: Any) -> str | None:
    """Nothing if compiling the layers is possible and worth its time; else what is in the way."""
    if next(model.parameters()).device.type != "cuda":
        return "layers are compiled on a GPU"
    if not importlib.util.find_spec("triton"):
        return "triton is missing"
    return None if decoder_layers(model) else "its layers were not found"


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The repeated part of a model."""
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    return list(getattr(inner.base_model, "layers", []))


def compile_layers(model: Any, **options: Any) -> None:
    """Compile every layer for calls that bring a plan; options are those of `torch.compile`."""
    for layer in decoder_layers(model):
        plain: Any = layer.forward
        made = torch.compile(plain, dynamic=True, **options)
        layer.forward = _choosing(plain, made)


def _choosing(plain: Any, made: Any) -> Any:
    @functools.wraps(plain)
    def forward(*arguments: Any, plan: Any = None, **options: Any) -> Any:
        return plain(*arguments, **options) if plan is None else made(*arguments, plan=plan, **options)

    return forward
