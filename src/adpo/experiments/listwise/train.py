"""The training loop: one for all methods.

A step scores its sequences, arranges them as a table ``[groups, K]``, and back-propagates the method's loss of
the table. The graphs of a step's passes live until then, so ``tokens_per_step`` sets the memory. A step with a
gradient that is not finite is refused, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adpo.experiments.listwise.corpus import Corpus, plan
from adpo.experiments.listwise.methods import Method, Table
from adpo.experiments.listwise.protocol import Protocol
from adpo.experiments.listwise.scoring import seq_logp


@dataclass(frozen=True)
class Setting:
    """What the sweep chooses."""

    strength: float
    learning_rate: float


class Trained(NamedTuple):
    """What a run did."""

    steps: int
    tokens: int
    lists: int  # lists or pairs, each time one was seen
    refused: int


def table_of(corpus: Corpus, rows: Tensor, logp: Tensor, ref_logp: Tensor) -> Table:
    """From the log-probabilities of the sequences ``rows[rows >= 0]``; ``ref_logp`` is of all sequences."""
    device, mask = logp.device, rows >= 0
    chosen = rows[mask]

    def arranged(values: Tensor) -> Tensor:
        cells = torch.zeros(rows.shape, dtype=torch.float64, device=device)
        return cells.masked_scatter(mask.to(device), values.to(device, torch.float64))

    lengths = corpus.response_lengths()[chosen].to(device)
    return Table(
        seq_logp=arranged(logp),
        mean_logp=arranged(logp / lengths),
        ref_logp=arranged(ref_logp[chosen]),
        labels=arranged(corpus.labels[chosen]),
        mask=mask.to(device),
    )


def train(
    model: Any,
    corpus: Corpus,
    prompts: Sequence[int],
    ref_logp: Tensor,
    method: Method,
    setting: Setting,
    protocol: Protocol,
    tokens: int,
    seed: int,
) -> Trained:
    """Change the model's weights, for so many tokens of these prompts."""
    steps = plan(corpus, prompts, method.pair, tokens, protocol.tokens_per_step, seed)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(
        weights, setting.learning_rate, weight_decay=protocol.weight_decay, fused=weights[0].is_cuda
    )
    refused = 0
    for number, rows in enumerate(steps):
        optimizer.param_groups[0]["lr"] = setting.learning_rate * rate(number, len(steps), protocol.warm_up)
        sequences = [corpus.sequences[i] for i in rows[rows >= 0].tolist()]
        logp = seq_logp(model, sequences, protocol.micro_batch)
        method.loss(table_of(corpus, rows, logp, ref_logp), setting.strength).backward()  # type: ignore[no-untyped-call]
        if bool(torch.nn.utils.clip_grad_norm_(weights, protocol.clip).isfinite()):
            optimizer.step()
        else:
            refused += 1
        optimizer.zero_grad()
    lengths = corpus.lengths()
    seen = sum(int(lengths[rows[rows >= 0]].sum()) for rows in steps)
    return Trained(len(steps), seen, sum(len(rows) for rows in steps), refused)


def rate(step: int, steps: int, warm_up: float) -> float:
    """Share of the learning rate: up linearly, down linearly, never zero.

    >>> [round(rate(step, 10, 0.2), 3) for step in range(10)]
    [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    """
    rising = max(1, round(warm_up * steps))
    return min((step + 1) / rising, (steps - step) / max(1, steps - rising), 1.0)
