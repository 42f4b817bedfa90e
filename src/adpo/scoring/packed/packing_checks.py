"""Whether a model's rows may be packed: what its configuration and modules say, and what a trial shows.

Packed rows stand in one sequence. Attention is told where each of them begins; a layer that carries a state from
token to token (convolutions, state-space models, linear attention) is not, and would carry it into the next row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from adpo.scoring.context import context_length
from adpo.scoring.packed.attention_kernels import prepared
from adpo.scoring.packed.packed_scoring import dtype_of_layers, inner_model, packed_seq_logp
from adpo.scoring.packed.packing import Packed, repacked
from adpo.scoring.sequences import Sequences, seq_logp, sequences

CHANGE_LOGITS = {  # configuration: what leaves the logits as they are
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1.0),
    "output_multiplier": (None, 1.0),
    "lm_head_multiplier": (None, 1.0),
    "logits_scaling": (None, 1.0),
}
ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
"""Types of layers without a state; windows are looked at by their size."""
STATEFUL = (nn.Conv1d, nn.RNNBase)
"""Modules that mix neighbouring tokens."""
ROWS = ([[1, 2, 3], [1, 2, 3], [2], [3, 1]], [[4, 5], [6, 4, 1], [1, 3, 2, 5], [6]])
"""Prompts and completions of the trial; the first two share their prompt."""
OWN_TOKENS = (slice(3, 5), slice(5, 8), slice(8, 13), slice(13, 16))
"""Tokens of each of these rows that no other shares, in the packed row."""
TOLERANCE, TOLERANCE_NARROW = 1e-3, 0.1
"""Nats a completion that rounding may make, in float32 and in 16 bits."""


def why_not_packed(
    model: Any,
    precision: torch.dtype | None = None,
    kernel: str | None = None,
    head_precision: torch.dtype | None = None,
) -> str | None:
    """Nothing if packed and padded rows give the same log-probabilities; else what is in the way.

    ``precision`` is that of the passes, where autocast makes it another than that of the weights;
    ``head_precision`` that of the output layer's product, where it is asked to be another than theirs.
    """
    return _by_configuration(model, head_precision) or _by_trial(model, precision, kernel, head_precision)


def carries_state(model: Any) -> str | None:
    """What in a model carries a state from token to token, if anything is known to."""
    settings = inner_model(model).config.get_text_config()
    for name in ("layer_types", "layers_block_type", "block_types"):
        kinds = getattr(settings, name, None) or ()
        for kind in kinds if isinstance(kinds, list | tuple) else ():
            if kind not in ATTENTION_TYPES:
                return f"layers of type {kind}"
    for name, module in inner_model(model).base_model.named_modules():
        if isinstance(module, STATEFUL):
            return f"{name}, a {type(module).__name__}"
    return None


def _by_configuration(model: Any, head_precision: torch.dtype | None) -> str | None:
    inner = inner_model(model)
    head = inner.get_output_embeddings()
    if hasattr(head, "base_layer"):
        return "its output layer has an adapter"
    if any(_drops(module) for module in model.modules()):
        return "its attention has dropout"
    if (state := carries_state(model)) is not None:
        return f"it carries a state from token to token ({state}), which would reach the next row"
    settings = inner.config.get_text_config()
    if getattr(settings, "_attn_implementation", None) != "sdpa":
        return f"its attention is {getattr(settings, '_attn_implementation', 'its own')}, not sdpa"
    for name in ("sliding_window", "attention_chunk_size"):
        if (getattr(settings, name, None) or math.inf) < (context_length(settings) or 0):
            return f"it attends through a window ({name} = {getattr(settings, name)})"
    if head_precision is None and head.weight.dtype != dtype_of_layers(model):
        return f"its output layer is in another precision ({head.weight.dtype})"
    for name, harmless in CHANGE_LOGITS.items():
        if getattr(settings, name, None) not in harmless:
            return f"it changes its logits ({name} = {getattr(settings, name)})"
    return None


def _drops(module: Any) -> bool:
    """Whether this is an attention with dropout."""
    for name in ("attention_dropout", "attn_dropout", "dropout"):
        value = getattr(module, name, 0)
        share = value.p if isinstance(value, nn.Dropout) and name != "dropout" else value
        if isinstance(share, int | float) and share > 0:
            return True
    return False


@torch.no_grad()
def _by_trial(
    model: Any, precision: torch.dtype | None, kernel: str | None, head_precision: torch.dtype | None
) -> str | None:
    """A few rows packed and padded, and each of them beside neighbours that are no numbers."""
    device, passes = next(model.parameters()).device, precision or dtype_of_layers(model)
    rows = Sequences(*(part.to(device) for part in sequences(*ROWS, pad=0)))
    batch = repacked(rows)
    was_training = model.training
    model.eval()
    try:
        with torch.autocast(device.type, precision, enabled=precision is not None):
            planned = batch if kernel is None else batch._replace(plan=prepared(batch.plan, kernel))
            found = packed_seq_logp(model, planned, head_precision=head_precision)
            expected = seq_logp(model, rows)
            reached = [row for row in range(batch.rows) if _reaches_others(model, batch, row)]
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    finally:
        model.train(was_training)
    if reached:
        return "what a row computes would depend on its neighbours"
    off = float((found - expected).abs().max())
    tolerance = TOLERANCE if passes == torch.float32 else TOLERANCE_NARROW
    return None if off < tolerance else f"its log-probabilities would differ by {off:.3g}"


def _reaches_others(model: Any, batch: Packed, row: int) -> bool:
    """Whether another row turns NaN when the tokens of this one are.

    Neither rounding nor a gate that is still zero hides a NaN. Attention goes stretch by stretch: kernels that
    compute masked scores would multiply it by zero.
    """
    batch = batch._replace(plan=prepared(batch.plan, "stretches"))
    tokens = torch.zeros(len(batch.input_ids), dtype=torch.bool, device=batch.input_ids.device)
    tokens[OWN_TOKENS[row]] = True
    with _made_nan(inner_model(model).get_input_embeddings(), tokens):
        logp = packed_seq_logp(model, batch)
    others = torch.arange(batch.rows, device=logp.device) != row
    return not bool(torch.isfinite(logp[others]).all())


@contextmanager
def _made_nan(embeddings: nn.Module, tokens: Tensor) -> Iterator[None]:
    def hook(_: nn.Module, __: Any, found: Tensor) -> Tensor:
        return found.masked_fill(tokens.view(1, -1, 1), math.nan)

    handle = embeddings.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
