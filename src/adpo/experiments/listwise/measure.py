"""How well a score orders the responses of held-out prompts: one number per prompt, higher = better.

Responses with equal scores share what their places are worth; pairs with equal labels do not count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adpo.experiments.listwise.corpus import Corpus

DEPTH = 16
"""Places that count in NDCG."""


def pair_accuracy(scores: Tensor, labels: Tensor) -> float:
    """Share of the pairs with different labels whose better one has the higher score.

    >>> round(pair_accuracy(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0.9, 0.5, 0.1])), 4)
    0.6667
    """
    return float(_right(scores)[_above(labels)].mean())


def despite_length(scores: Tensor, labels: Tensor, lengths: Tensor) -> float | None:
    """The same, among the pairs whose better response is not the longer one; None where a list has no such pair.

    Long responses tend to be liked: a score that only measures length is below 1/2 here.
    """
    pairs = _above(labels) & ~_above(lengths)
    return float(_right(scores)[pairs].mean()) if bool(pairs.any()) else None


def ndcg(scores: Tensor, labels: Tensor, depth: int = DEPTH) -> float:
    """Discounted gain, ``sum label / log2(1 + place)``, over that of the best order: the label is the gain."""
    return float(_dcg(scores, labels, depth) / _dcg(labels, labels, depth))


def top1(scores: Tensor, labels: Tensor) -> float:
    """Whether the response with the highest score has the highest label."""
    first = scores == scores.max()
    return float((labels[first] == labels.max()).double().mean())


def _above(values: Tensor) -> Tensor:
    """``[K, K]``: whether the one of the row is above the one of the column."""
    return values.unsqueeze(1) > values.unsqueeze(0)


def _right(scores: Tensor) -> Tensor:
    """``[K, K]``: what a pair counts whose better one is that of the row."""
    return _above(scores) + 0.5 * (scores.unsqueeze(1) == scores.unsqueeze(0)).double()


def _dcg(scores: Tensor, labels: Tensor, depth: int) -> Tensor:
    place = torch.arange(len(scores), dtype=torch.float64)
    discount = torch.where(place < depth, 1 / torch.log2(place + 2), 0.0)
    up_to = torch.cat([torch.zeros(1, dtype=torch.float64), discount.cumsum(0)])
    ahead = (scores.unsqueeze(0) > scores.unsqueeze(1)).sum(1)
    tied = (scores.unsqueeze(0) == scores.unsqueeze(1)).sum(1)
    return (labels * (up_to[ahead + tied] - up_to[ahead]) / tied).sum()


MEASURES = ("pair_accuracy", "despite_length", "ndcg", "top1")


def measured(corpus: Corpus, prompts: Sequence[int], scores: Tensor) -> dict[str, list[float | None]]:
    """Every measure of every prompt; ``scores`` is of all sequences. A score that is no number comes last."""
    known = scores.double().cpu().nan_to_num(nan=-torch.inf, neginf=-torch.inf, posinf=torch.inf)
    lengths = corpus.response_lengths()
    found: dict[str, list[float | None]] = {name: [] for name in MEASURES}
    for prompt in prompts:
        row = corpus.rows[prompt][corpus.rows[prompt] >= 0]
        mine, labels = known[row], corpus.labels[row]
        found["pair_accuracy"].append(pair_accuracy(mine, labels))
        found["despite_length"].append(despite_length(mine, labels, lengths[row]))
        found["ndcg"].append(ndcg(mine, labels))
        found["top1"].append(top1(mine, labels))
    return {name: [_rounded(value) for value in values] for name, values in found.items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
