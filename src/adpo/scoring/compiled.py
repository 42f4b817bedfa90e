"""Compiled decoder layers, for packed passes alone.

All layers share one compiled form, for any number of tokens. What is not packed, such as generation, goes through
the layers as they are, and compiles nothing. Layers that the compiler does not take (kernels that others put into
a model, for one) are used as they are, too.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any

import torch

log = logging.getLogger("adpo")


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


class CompiledLayers:
    """Every layer of a model, compiled for calls that bring a plan; options are those of `torch.compile`."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.why_not: str | None = None  # what the compiler said when it gave up
        for layer in decoder_layers(model):
            plain: Any = layer.forward
            layer.forward = self._choosing(plain, torch.compile(plain, dynamic=True, **options))

    def _choosing(self, plain: Any, made: Any) -> Any:
        @functools.wraps(plain)
        def forward(*arguments: Any, plan: Any = None, **options: Any) -> Any:
            if plan is None:
                return plain(*arguments, **options)
            if self.why_not is None:
                try:
                    return made(*arguments, plan=plan, **options)
                except RuntimeError as error:
                    if not isinstance(error, torch._dynamo.exc.TorchDynamoException):
                        raise
                    said = str(error).strip().split("\n", 1)[0]
                    self.why_not = f"the compiler gave up: {type(error).__name__} {said}".strip()[:200]
                    log.warning("layers are not compiled: %s", self.why_not)
            return plain(*arguments, plan=plan, **options)

        return forward
