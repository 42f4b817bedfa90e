"""Layers of bitsandbytes whose weights have four bits."""

from __future__ import annotations

from torch import nn


def keep_differentiable(model: nn.Module) -> None:
    """Their weights stay in the form that gradients go through.

    On a CPU with bfloat16 instructions such a layer repacks its weights in the first pass of evaluation, for good;
    from then on no gradient goes through it, in training either, and nothing says so.
    """
    for layer in model.modules():
        if not hasattr(layer, "support_avx512bf16_for_cpu"):
            continue
        layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
        if getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False):
            layer.state_dict()  # which unpacks them
