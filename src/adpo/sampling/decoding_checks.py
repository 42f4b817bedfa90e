"""Whether a model can be sampled by our own decoder: what its configuration says, and what a trial shows."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from adpo.sampling.decoding import Decoder
from adpo.scoring.packed.packing_checks import carries_state

PLAIN = {
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "min_new_tokens": (None, 0),
    "suppress_tokens": (None, []),
    "bad_words_ids": (None, []),
    "forced_eos_token_id": (None,),
    "sequence_bias": (None, {}),
}
"""Settings of a model's own sampling that change its distribution, and values with which they do not."""
PROMPTS = ([2, 3], [4, 1, 3, 2])
STEPS = 3
"""Of the trial: prompts of two lengths, one of them padded, and the tokens that follow."""
TOLERANCE, TOLERANCE_NARROW = 1e-3, 0.1
"""Mean difference of a log-probability that rounding may make, in float32 and in 16 bits."""


def why_not_decoded(model: Any) -> str | None:
    """What keeps this model from being sampled so, if anything does."""
    return _by_configuration(model) or _by_trial(model)


def _by_configuration(model: Any) -> str | None:
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        return "an encoder"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
        return "layers that attend through a window, or do not attend"
    if (state := carries_state(model)) is not None:
        return f"a state beside keys and values ({state})"
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"attention by {config._attn_implementation}"
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "logits_to_keep" not in inspect.signature(inner.forward).parameters:
        return "logits of all tokens"
    asked = [name for name, plain in PLAIN.items() if getattr(model.generation_config, name, None) not in plain]
    return f"its own {asked[0]} in sampling" if asked else None


class _Observed(Decoder):
    """Keeps the log-probabilities of every step."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.recorded, self.steps = False, list[Tensor]()

    def _logits(self, *arguments: Any) -> Tensor:
        found = super()._logits(*arguments)
        self.steps.append(found.log_softmax(1))
        return found


@torch.no_grad()
def _by_trial(model: Any) -> str | None:
    """Every step of two rows, one of them padded, beside the row alone without a cache."""
    parameter, width = next(model.parameters()), max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in PROMPTS])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in PROMPTS])
    was_training = model.training
    try:
        decoder = _Observed(model, len(PROMPTS), width, STEPS, 0.0, [], 0)
        sampled = decoder(ids, mask).tolist()
        model.eval()
        off = 0.0
        for row, (prompt, tokens) in enumerate(zip(PROMPTS, sampled, strict=True)):
            whole = torch.tensor([[*prompt, *tokens[:-1]]], device=parameter.device)
            expected = model(input_ids=whole, use_cache=False).logits[0, -STEPS:].float().log_softmax(1)
            found = torch.stack([step[row] for step in decoder.steps])
            off = max(off, float((found - expected).abs().mean(1).max()))
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    finally:
        model.train(was_training)
    tolerance = TOLERANCE if parameter.dtype == torch.float32 else TOLERANCE_NARROW
    return None if off < tolerance else f"its log-probabilities would differ by {off:.3g}"
