"""Log-probabilities of completions from packed sequences: no padding, shared prompts, no table of logits."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

import adpo.lm.attention  # noqa: F401  (teaches the models what a plan is)
from adpo.lm.attention_kernels import prepared
from adpo.lm.head import TokenScores, fused_token_scores, weighted_token_logp
from adpo.lm.packing import Packed, repacked
from adpo.lm.scoring import Reduction, Sequences, seq_logp, sequences

ACCEPTS = "_accepts_scoring"
CHANGE_LOGITS = {  # configuration: what leaves the logits as they are
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1.0),
    "output_multiplier": (None, 1.0),
    "lm_head_multiplier": (None, 1.0),
    "logits_scaling": (None, 1.0),
}


def packed_token_scores(
    model: Any, batch: Packed, temperature: float = 1.0, *, entropy: bool = False
) -> TokenScores:
    """Of every token of every completion, ``[targets]``."""
    states, head = hidden_states(model, batch)
    bias = getattr(head, "bias", None)
    return fused_token_scores(states, head.weight, batch.targets, bias, temperature, entropy=entropy)


def packed_seq_logp(model: Any, batch: Packed, reduction: Reduction = "sum", temperature: float = 1.0) -> Tensor:
    """Log-probability of every completion given its prompt, ``[rows]``, as `adpo.lm.scoring.seq_logp` gives it."""
    return _of_rows(packed_token_scores(model, batch, temperature).logp, batch, reduction)


def packed_weighted_logp(
    model: Any, batch: Packed, coefficients: Tensor, reduction: Reduction = "sum", temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """``sum coefficients * logp`` over completions, to be differentiated, and their log-probabilities ``[rows]``.

    Coefficients that are known before the pass make it cheaper: see `adpo.lm.head`.
    """
    states, head = hidden_states(model, batch)
    c = coefficients / _counts(batch) if reduction == "mean" else coefficients
    bias = getattr(head, "bias", None)
    total, logp = weighted_token_logp(states, head.weight, batch.targets, c[batch.row], bias, temperature)
    return total, _of_rows(logp, batch, reduction)


def hidden_states(model: Any, batch: Packed) -> tuple[Tensor, Any]:
    """What predicts each token of a completion, and the output layer."""
    inner = _inner(model)
    device = batch.input_ids.device
    states = inner.base_model(
        input_ids=batch.input_ids.unsqueeze(0),
        position_ids=batch.position_ids.unsqueeze(0),
        attention_mask=torch.zeros(1, 1, 1, 1, device=device),  # a mask in its last form: none is made
        use_cache=False,
        plan=batch.plan,
    ).last_hidden_state
    return states.squeeze(0)[batch.before], inner.get_output_embeddings()


def _inner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") else model


def head_width(model: Any) -> int:
    """Of the attention; 0 if the model does not say."""
    settings = _inner(model).config.get_text_config()
    width = getattr(settings, "head_dim", None)
    heads = getattr(settings, "num_attention_heads", 0)
    return int(width or (settings.hidden_size // heads if heads else 0))


def _of_rows(per_token: Tensor, batch: Packed, reduction: Reduction) -> Tensor:
    total = torch.zeros(batch.rows, dtype=torch.float64, device=per_token.device)
    total = total.index_add(0, batch.row, per_token.double())
    return total / _counts(batch) if reduction == "mean" else total


def _counts(batch: Packed) -> Tensor:
    return torch.bincount(batch.row, minlength=batch.rows).clamp(min=1)


def accept_scoring(model: Any) -> None:
    """Let ``model(score=function)`` give what ``function(model)`` gives.

    What wraps a model (data parallelism, sharding, autocast) must see a forward pass: this makes scoring one.
    """
    if getattr(model, ACCEPTS, False):
        return
    plain = model.forward

    @functools.wraps(plain)
    def forward(*arguments: Any, score: Any = None, **options: Any) -> Any:
        return plain(*arguments, **options) if score is None else score(model)

    model.forward = forward
    setattr(model, ACCEPTS, True)


def _drops(module: Any) -> bool:
    """Whether this is an attention that forgets some of its weights in training."""
    for name in ("attention_dropout", "attn_dropout", "dropout"):
        value = getattr(module, name, 0)
        share = value.p if isinstance(value, torch.nn.Dropout) and name != "dropout" else value
        if isinstance(share, int | float) and share > 0:
            return True
    return False


@torch.no_grad()
def why_not_packed(model: Any, precision: torch.dtype | None = None, kernel: str | None = None) -> str | None:
    """Nothing if packed and padded rows give the same log-probabilities; else what is in the way.

    ``precision`` is that of the passes, where autocast makes it another than that of the weights.
    """
    head = _inner(model).get_output_embeddings()
    if hasattr(head, "base_layer"):
        return "its output layer has an adapter"
    if any(_drops(module) for module in model.modules()):
        return "its attention has dropout"
    settings = _inner(model).config.get_text_config()
    if getattr(settings, "_attn_implementation", None) != "sdpa":
        return f"its attention is {getattr(settings, '_attn_implementation', 'its own')}, not sdpa"
    for name in ("sliding_window", "attention_chunk_size"):
        if (getattr(settings, name, None) or math.inf) < (getattr(settings, "max_position_embeddings", 0) or 0):
            return f"it attends through a window ({name} = {getattr(settings, name)})"
    if head.weight.dtype != next(_inner(model).base_model.parameters()).dtype:
        return f"its output layer is in another precision ({head.weight.dtype})"
    for name, harmless in CHANGE_LOGITS.items():
        if getattr(settings, name, None) not in harmless:
            return f"it changes its logits ({name} = {getattr(settings, name)})"
    device = next(model.parameters()).device
    rows = sequences([[1, 2, 3], [1, 2, 3], [2]], [[4, 5], [6], [1, 3, 2, 5]], pad=0)
    rows = Sequences(*(part.to(device) for part in rows))
    batch = repacked(rows)
    was_training = model.training
    model.eval()
    try:
        if kernel is not None:
            batch = batch._replace(plan=prepared(batch.plan, kernel))
        with torch.autocast(device.type, precision, enabled=precision is not None):
            found, expected = packed_seq_logp(model, batch), seq_logp(model, rows)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    finally:
        model.train(was_training)
    off = float((found - expected).abs().max())
    tolerance = 1e-3 if (precision or next(model.parameters()).dtype) == torch.float32 else 0.1
    return None if off < tolerance else f"its log-probabilities would differ by {off:.3g}"
