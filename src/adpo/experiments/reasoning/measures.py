"""How far a policy has gone from its start: entropy, divergence, and what it has forgotten."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Sequence
from typing import Any

import torch

from adpo.scoring.sequences import sequences, token_logp

BATCH = 4  # all logits are there at once
TEXTS, TEXT_TOKENS = 64, 256
"""Of ordinary English: the reference of the Python language, which every Python carries."""


@torch.no_grad()
def distance(
    model: Any, start: Any, tokenizer: Any, prompts: list[list[int]], said: Sequence[str], longest: int
) -> dict[str, float]:
    """From completions sampled from the model: nats a token (its entropy), and KL to the start a completion."""
    # What ended before the limit ended by its end token.
    completions = [
        [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id][:longest] for text in said
    ]
    own, others, tokens = 0.0, 0.0, 0
    for first in range(0, len(prompts), BATCH):
        part = slice(first, first + BATCH)
        batch = sequences(prompts[part], completions[part], tokenizer.pad_token_id)
        batch = type(batch)(*(each.to(model.device) for each in batch))
        mask = batch.completion_mask[:, 1:].bool()
        own += float(token_logp(model, batch)[mask].double().sum())
        others += float(token_logp(start, batch)[mask].double().sum())
        tokens += int(mask.sum())
    return {"entropy": -own / tokens, "kl_to_start": (own - others) / len(prompts)}


@torch.no_grad()
def forgetting(model: Any, tokenizer: Any) -> float:
    """Loss on ordinary text, in nats a token."""
    texts = [text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) > 4 * TEXT_TOKENS][:TEXTS]
    total, tokens = 0.0, 0
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)[:TEXT_TOKENS]
        batch = sequences([ids[:1]], [ids[1:]], tokenizer.pad_token_id)
        batch = type(batch)(*(each.to(model.device) for each in batch))
        total -= float(token_logp(model, batch).double().sum())
        tokens += len(ids) - 1
    return total / tokens
