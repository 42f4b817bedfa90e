"""Log-probabilities of completions from packed sequences: no padding, shared prompts, no table of logits."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import adpo.lm.attention  # noqa: F401  (teaches the models what a plan is)
from adpo.lm.head import fused_token_logp
from adpo.lm.packing import Packed, repacked
from adpo.lm.scoring import Reduction, Sequences, seq_logp, sequences


def packed_seq_logp(model: Any, batch: Packed, reduction: Reduction = "sum") -> Tensor:
    """Log-probability of every completion given its prompt, ``[rows]``, as `adpo.lm.scoring.seq_logp` gives it."""
    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    states = inner.base_model(
        input_ids=batch.input_ids.unsqueeze(0),
        position_ids=batch.position_ids.unsqueeze(0),
        attention_mask=torch.zeros(
            1, 1, 1, 1, device=batch.input_ids.device
        ),  # a mask in its last form: none is made
        use_cache=False,
        plan=batch.plan,
    ).last_hidden_state.squeeze(0)
    head = inner.get_output_embeddings()
    logp = fused_token_logp(states[batch.before], head.weight, batch.targets, getattr(head, "bias", None)).double()
    total = torch.zeros(batch.rows, dtype=torch.float64, device=logp.device).index_add(0, batch.row, logp)
    if reduction == "sum":
        return total
    return total / torch.bincount(batch.row, minlength=batch.rows).clamp(min=1)


def accept_packed(model: Any) -> None:
    """Let ``model(packed=batch, reduction=...)`` give log-probabilities.

    What wraps a model (data parallelism, autocast) must see a forward pass: this makes scoring one.
    """
    plain = model.forward

    @functools.wraps(plain)
    def forward(
        *arguments: Any, packed: Packed | None = None, reduction: Reduction = "sum", **options: Any
    ) -> Any:
        if packed is None:
            return plain(*arguments, **options)
        return packed_seq_logp(model, packed, reduction)

    model.forward = forward


@torch.no_grad()
def why_not_packed(model: Any) -> str | None:
    """Nothing if packed and padded rows give the same log-probabilities; else what is in the way."""
    device = next(model.parameters()).device
    rows = sequences([[1, 2, 3], [1, 2, 3], [2]], [[4, 5], [6], [1, 3, 2, 5]], pad=0)
    rows = Sequences(*(part.to(device) for part in rows))
    was_training = model.training
    model.eval()
    try:
        found, expected = packed_seq_logp(model, repacked(rows)), seq_logp(model, rows)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    finally:
        model.train(was_training)
    off = float((found - expected).abs().max())
    tolerance = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.1
    return None if off < tolerance else f"its log-probabilities would differ by {off:.3g}"
