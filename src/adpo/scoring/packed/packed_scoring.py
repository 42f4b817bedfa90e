"""Log-probabilities of completions from packed sequences: no padding, shared prompts, no table of logits."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import adpo.scoring.packed.attention  # noqa: F401  (teaches the models what a plan is)
from adpo.scoring.fused_head import TokenScores, fused_token_scores, weighted_token_logp
from adpo.scoring.packed.packing import Packed
from adpo.scoring.sequences import Reduction

ACCEPTS = "_accepts_scoring"


def packed_token_scores(
    model: Any,
    batch: Packed,
    temperature: float = 1.0,
    *,
    entropy: bool = False,
    head_precision: torch.dtype | None = None,
) -> TokenScores:
    """Of every token of every completion, ``[targets]``.

    ``head_precision`` is that of the output layer's product, where it is not that of the pass.
    """
    states, head = hidden_states(model, batch)
    given = (states, head.weight, batch.targets, getattr(head, "bias", None), temperature)
    return fused_token_scores(*given, entropy=entropy, precision=head_precision)


def packed_seq_logp(
    model: Any,
    batch: Packed,
    reduction: Reduction = "sum",
    temperature: float = 1.0,
    *,
    head_precision: torch.dtype | None = None,
) -> Tensor:
    """Log-probability of every completion given its prompt, ``[rows]``, as `adpo.scoring.sequences` gives it."""
    scores = packed_token_scores(model, batch, temperature, head_precision=head_precision)
    return _of_rows(scores.logp, batch, reduction)


def packed_weighted_logp(
    model: Any,
    batch: Packed,
    coefficients: Tensor,
    reduction: Reduction = "sum",
    temperature: float = 1.0,
    *,
    head_precision: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``sum coefficients * logp`` over completions, to be differentiated, and their log-probabilities ``[rows]``.

    Coefficients that are known before the pass make it cheaper: see `adpo.scoring.fused_head`.
    """
    states, head = hidden_states(model, batch)
    c = coefficients / _counts(batch) if reduction == "mean" else coefficients
    given = (states, head.weight, batch.targets, c[batch.row], getattr(head, "bias", None), temperature)
    total, logp = weighted_token_logp(*given, precision=head_precision)
    return total, _of_rows(logp, batch, reduction)


def hidden_states(model: Any, batch: Packed) -> tuple[Tensor, Any]:
    """What predicts each token of a completion, and the output layer."""
    inner = inner_model(model)
    device = batch.input_ids.device
    states = inner.base_model(
        input_ids=batch.input_ids.unsqueeze(0),
        position_ids=batch.position_ids.unsqueeze(0),
        attention_mask=torch.zeros(1, 1, 1, 1, device=device),  # a mask in its last form: none is made
        use_cache=False,
        plan=batch.plan,
    ).last_hidden_state
    return states.squeeze(0)[batch.before], inner.get_output_embeddings()


def inner_model(model: Any) -> Any:
    """The model of transformers, without what an adapter puts around it."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def dtype_of_layers(model: Any) -> torch.dtype:
    """Of the weights between embeddings and output layer, which may be in another."""
    base = inner_model(model).base_model
    layers = getattr(base, "layers", None)
    parameters = base.parameters() if layers is None else layers.parameters()
    found: torch.dtype = next(parameters, next(model.parameters())).dtype
    return found


def head_width(model: Any) -> int:
    """Of the attention; 0 if the model does not say."""
    settings = inner_model(model).config.get_text_config()
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
