"""Log-probabilities of completions under a causal language model."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Reduction = Literal["sum", "mean"]


class Sequences(NamedTuple):
    """Prompts with their completions, padded on the right, one row each."""

    input_ids: Tensor  # [rows, length]
    attention_mask: Tensor  # [rows, length], 1 for real tokens
    completion_mask: Tensor  # [rows, length], 1 for the tokens of the completion

    def take(self, rows: Tensor) -> Sequences:
        """Some of the rows, as they are."""
        return Sequences(*(part[rows] for part in self))

    def pick(self, rows: Tensor) -> Sequences:
        """Some of the rows, without padding on the right that they do not need."""
        mask = self.attention_mask[rows]
        length = int(mask.sum(1).max()) if len(rows) else 0
        return Sequences(self.input_ids[rows, :length], mask[:, :length], self.completion_mask[rows, :length])

    def following(self) -> Sequences:
        """With completions that begin at a row's second token at the earliest: its first has nothing to follow."""
        follows = self.attention_mask.cumsum(1) > 1
        return self._replace(completion_mask=self.completion_mask * follows)


def sequences(prompts: list[list[int]], completions: list[list[int]], pad: int) -> Sequences:
    """Token ids as a batch.

    >>> sequences([[5], [5, 6]], [[7, 8], [7]], pad=0).completion_mask.tolist()
    [[0, 1, 1], [0, 0, 1]]
    """
    rows = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    lengths = torch.tensor([[len(prompt), len(row)] for prompt, row in zip(prompts, rows, strict=True)])
    place = torch.arange(width)
    real = place < lengths[:, 1:]
    return Sequences(ids, real.long(), (real & (place >= lengths[:, :1])).long())


def token_logp(model: Any, batch: Sequences) -> Tensor:
    """Log-probability of every token given those before it, ``[rows, length - 1]``: of tokens 1 to the last."""
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    logits = logits[:, :-1].float()
    chosen = logits.gather(2, batch.input_ids[:, 1:, None]).squeeze(2)
    found: Tensor = chosen - logits.logsumexp(2)
    return found


def seq_logp(model: Any, batch: Sequences, reduction: Reduction = "sum") -> Tensor:
    """Log-probability of every completion given its prompt, ``[rows]``; the ``mean`` is over its tokens."""
    mask = batch.completion_mask[:, 1:].bool()
    total = torch.where(mask, token_logp(model, batch).double(), 0.0).sum(1)
    return total / mask.sum(1).clamp(min=1) if reduction == "mean" else total
