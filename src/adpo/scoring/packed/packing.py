"""Sequences without padding: one row of tokens, and a plan of who attends to whom.

Completions of one prompt may share a copy of it: the prompt goes through the model once, and every completion
attends to the prompt and to itself. Positions, log-probabilities and gradients are those of the sequences one by
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adpo.scoring.sequences import Sequences


class Keys(NamedTuple):
    """Which tokens the gathered keys are: those of a shared prompt stand there once for each completion."""

    tokens: Tensor  # [gathered keys]
    first: Tensor  # [tokens]: where each of them stands first
    again: Tensor  # where a token stands that has stood before
    again_tokens: Tensor  # which one that is


@dataclass(frozen=True)
class Plan:
    """Stretches of queries, each with its stretch of keys; the last query is aligned with the last key."""

    query_starts: Tensor  # [stretches + 1], int32: where each stretch begins, and the end
    key_starts: Tensor  # [stretches + 1], int32, in the row of gathered keys
    keys: Keys | None  # None where they are all tokens in their order
    longest_query: int
    longest_key: int
    kernel: str | None = None  # of `adpo.scoring.packed.attention_kernels`; None is by device
    blocks: Any = None  # what one of them needs

    def to(self, device: torch.device) -> Plan:
        keys = None if self.keys is None else Keys(*(part.to(device, non_blocking=True) for part in self.keys))
        queries = self.query_starts.to(device, non_blocking=True)
        starts = self.key_starts.to(device, non_blocking=True)
        return replace(self, query_starts=queries, key_starts=starts, keys=keys)


class Packed(NamedTuple):
    """All tokens of a batch, and where the completions are in it."""

    input_ids: Tensor  # [tokens]
    position_ids: Tensor  # [tokens]
    plan: Plan
    before: Tensor  # [targets]: the token whose state predicts each token of a completion
    targets: Tensor  # [targets]: that token
    row: Tensor  # [targets]: the completion it belongs to
    rows: int

    def to(self, device: torch.device) -> Packed:
        moved = (
            value.to(device)
            if isinstance(value, Plan)
            else value.to(device, non_blocking=True)
            if isinstance(value, Tensor)
            else value
            for value in self
        )
        return Packed(*moved)  # type: ignore[arg-type]


class Lengths(NamedTuple):
    """Of every row: tokens of prompt and completion, and whether its prompt is that of the row before."""

    prompt: Tensor
    completion: Tensor
    repeats: Tensor

    @classmethod
    def of(cls, batch: Sequences) -> Lengths:
        of_completion = batch.completion_mask.sum(1)
        prompt = batch.attention_mask.sum(1) - of_completion
        in_prompt = (batch.attention_mask * (1 - batch.completion_mask)).bool()
        same = torch.where(in_prompt, batch.input_ids, -1)
        repeats = torch.zeros(len(same), dtype=torch.bool, device=same.device)
        repeats[1:] = (same[1:] == same[:-1]).all(1)
        return cls(prompt, of_completion, repeats)

    def tokens(self, share: bool = True) -> int:
        """How many go through the model."""
        prompts = self.prompt * ~self.repeats if share else self.prompt
        return int((prompts + self.completion).sum())


def packed(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], share: bool = True) -> Packed:
    """Prompts with their completions, row by row; neighbours with the same prompt share it, if asked to.

    The first token of a completion without a prompt has nothing to follow: it takes the prompt's place.

    >>> batch = packed([[5, 6], [5, 6]], [[7], [8, 9]])
    >>> batch.input_ids.tolist(), batch.position_ids.tolist()
    ([5, 6, 7, 8, 9], [0, 1, 2, 2, 3])
    >>> batch.before.tolist(), batch.targets.tolist(), batch.row.tolist()
    ([1, 1, 3], [7, 8, 9], [0, 1, 1])
    """
    pairs = zip(prompts, completions, strict=True)
    rows = [(prompt, after) if len(prompt) else (after[:1], after[1:]) for prompt, after in pairs]
    flat = torch.tensor([token for prompt, completion in rows for token in (*prompt, *completion)])
    lengths = torch.tensor([[len(prompt), len(completion)] for prompt, completion in rows])
    repeats = [number > 0 and rows[number - 1][0] == prompt for number, (prompt, _) in enumerate(rows)]
    return _packed(flat, Lengths(lengths[:, 0], lengths[:, 1], torch.tensor(repeats)), share)


def repacked(batch: Sequences, share: bool = True, scored: Tensor | None = None) -> Packed:
    """Padded rows without their padding, on the device they are on; put together on the CPU.

    Padding may be on either side, or between prompt and completion. ``scored``, ``[rows, length]``, marks the
    tokens of completions that count, where not all do; the first token of a row never does.
    """
    here = Sequences(*(part.cpu() for part in batch)).following()
    found = _packed(here.input_ids[here.attention_mask.bool()], Lengths.of(here), share)
    if scored is not None:
        counts = scored.cpu()[here.completion_mask.bool()].bool()
        found = found._replace(before=found.before[counts], targets=found.targets[counts], row=found.row[counts])
    return found.to(batch.input_ids.device)


def _packed(flat: Tensor, lengths: Lengths, share: bool) -> Packed:
    """From all tokens of all rows, one after the other."""
    prompt, completion = lengths.prompt, lengths.completion
    empty = (prompt == 0).nonzero()
    if len(empty):
        raise ValueError(f"row {int(empty[0])} has no tokens")
    rows = len(prompt)
    own = ~lengths.repeats if share else torch.ones(rows, dtype=torch.bool)  # brings its prompt along
    lender = torch.where(own, torch.arange(rows), 0).cummax(0).values  # the row that brings the prompt
    brought = torch.where(own, prompt, 0)
    at = _starts(brought + completion)  # of each row, in the packed row
    prompt_at, completion_at = at[lender], at + brought
    in_flat = _starts(prompt + completion)
    # What stays: of every row its prompt, if it brings one, and its completion.
    counts = torch.stack([brought, completion], 1).view(-1)
    source = _intervals(torch.stack([in_flat, in_flat + prompt], 1).view(-1), counts)
    position = _intervals(torch.stack([torch.zeros_like(prompt), prompt], 1).view(-1), counts)
    before = _intervals(completion_at - 1, completion)
    written = completion > 0
    before[_starts(completion)[written]] = (prompt_at + prompt - 1)[written]
    return Packed(
        flat[source],
        position,
        _plan(lengths, own, prompt_at, completion_at),
        before,
        flat[_intervals(in_flat + prompt, completion)],
        torch.repeat_interleave(torch.arange(rows), completion),
        rows,
    )


def _plan(lengths: Lengths, own: Tensor, prompt_at: Tensor, completion_at: Tensor) -> Plan:
    """A prompt that is shared is a stretch of its own; one with a single completion is one stretch with it."""
    prompt, completion = lengths.prompt, lengths.completion
    last = torch.ones_like(own)
    last[:-1] = own[1:]
    alone = own & last
    # Every row has two candidates: its prompt and its completion. Each attends to one or two intervals of tokens.
    zero = torch.zeros_like(prompt)
    queries = torch.stack([torch.where(own & ~alone, prompt, 0), completion + torch.where(alone, prompt, 0)], 1)
    begins = torch.stack([torch.stack([prompt_at, zero], 1), torch.stack([prompt_at, completion_at], 1)], 1)
    counts = torch.stack([torch.stack([prompt, zero], 1), torch.stack([prompt, completion], 1)], 1)
    again = torch.zeros_like(counts, dtype=torch.bool)
    again[:, 1, 0] = ~alone  # the prompt of a completion that has a stretch of its own
    real = queries > 0
    queries, begins, counts, again = queries[real], begins[real].view(-1), counts[real], again[real].view(-1)
    of_stretch, counts = counts.sum(1), counts.view(-1)
    keys = None
    if not torch.equal(of_stretch, queries):
        tokens, repeated = _intervals(begins, counts), torch.repeat_interleave(again, counts)
        places = repeated.nonzero().squeeze(1)
        keys = Keys(tokens, (~repeated).nonzero().squeeze(1), places, tokens[places])
    return Plan(
        torch.cat([_starts(queries), queries.sum().view(1)]).int(),
        torch.cat([_starts(of_stretch), of_stretch.sum().view(1)]).int(),
        keys,
        int(queries.max()),
        int(of_stretch.max()),
    )


def _intervals(begins: Tensor, counts: Tensor) -> Tensor:
    """Numbers of several intervals, one after the other.

    >>> _intervals(torch.tensor([5, 1]), torch.tensor([2, 3])).tolist()
    [5, 6, 1, 2, 3]
    """
    return torch.repeat_interleave(begins - _starts(counts), counts) + torch.arange(int(counts.sum()))


def _starts(counts: Tensor) -> Tensor:
    """Where each stretch begins."""
    return counts.cumsum(0) - counts
