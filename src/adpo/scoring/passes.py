"""Which rows go through the model together: as many tokens as fit, the rows of a group side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adpo.scoring.packed.packing import Lengths


@dataclass(frozen=True)
class Sizes:
    """Tokens of the rows of a step, looked at once; rows of a group have one prompt, which they may share."""

    lengths: Lengths
    groups: Tensor
    share: bool

    def tokens(self, chosen: Tensor) -> int:
        """How many go through the model with these rows.

        >>> lengths = Lengths(torch.tensor([2, 2, 2]), torch.tensor([3, 5, 1]), torch.tensor([False] * 3))
        >>> sizes = Sizes(lengths, torch.tensor([0, 0, 1]), True)
        >>> sizes.tokens(torch.tensor([0, 1])), sizes.tokens(torch.tensor([1, 2]))
        (10, 10)
        """
        rows = chosen.cpu()
        prompt, groups = self.lengths.prompt[rows], self.groups[rows]
        if self.share and len(rows):
            prompt[1:] *= groups[1:] != groups[:-1]
        return int((prompt + self.lengths.completion[rows]).sum())

    def of(self, chosen: Tensor) -> Sizes:
        """Of some rows alone."""
        rows = chosen.cpu()
        return Sizes(Lengths(*(part[rows] for part in self.lengths)), self.groups[rows], self.share)

    def passes(self, budget: int, device: torch.device) -> list[Tensor]:
        """Row indices of every pass, within a budget of tokens."""
        return [part.to(device) for part in token_passes(self.lengths, self.groups, budget, self.share)]


def token_passes(lengths: Lengths, groups: Tensor, budget: int, share: bool = True) -> list[Tensor]:
    """Row indices of every pass, at most ``budget`` tokens each (or one row), the largest pass first.

    Rows of a group stand side by side, where they share their prompt, and a group that fits is not split. Passes
    are of about the same size, for their number is what the budget says, not the rest of the last one.

    >>> prompt, completion = torch.tensor([2, 2, 2, 2]), torch.tensor([3, 5, 1, 1])
    >>> lengths = Lengths(prompt, completion, torch.tensor([False] * 4))
    >>> [part.tolist() for part in token_passes(lengths, torch.tensor([0, 1, 0, 1]), 8)]
    [[1, 3], [0, 2]]
    """
    prompt, completion = lengths.prompt.tolist(), lengths.completion.tolist()
    pieces: list[tuple[int, list[int]]] = []  # tokens, rows
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups.tolist()):
        members.setdefault(group, []).append(row)
    for rows in members.values():
        tokens = 0
        piece: list[int] = []
        for row in rows:
            more = completion[row] + (0 if piece and share else prompt[row])
            if piece and tokens + more > budget:
                pieces.append((tokens, piece))
                tokens, piece, more = 0, [], completion[row] + prompt[row]
            tokens += more
            piece.append(row)
        pieces.append((tokens, piece))
    pieces.sort(key=lambda piece: -piece[0])
    least = min(len(pieces), -(-sum(tokens for tokens, _ in pieces) // budget))
    bins = next(
        found for count in range(least, len(pieces) + 1) if (found := _even(pieces, count, budget)) is not None
    )
    return [torch.tensor(rows, device=groups.device) for _, rows in sorted(bins, key=lambda found: -found[0])]


def whole_groups(groups: Tensor, most: int | None) -> list[Tensor]:
    """Rows that go through the model together, at most so many: whole groups where they fit.

    Groups are counted from zero, and their rows stand side by side.

    >>> [part.tolist() for part in whole_groups(torch.tensor([0, 0, 1, 1, 2, 2, 2]), 4)]
    [[0, 1, 2, 3], [4, 5, 6]]
    >>> [part.tolist() for part in whole_groups(torch.tensor([0, 0, 0]), 2)]
    [[0, 1], [2]]
    """
    rows = torch.arange(len(groups), device=groups.device)
    if most is None or len(rows) <= most:
        return [rows]
    parts: list[Tensor] = []
    for members in torch.split(rows, torch.bincount(groups).tolist()):
        if parts and len(parts[-1]) + len(members) <= most:
            parts[-1] = torch.cat([parts[-1], members])
        else:
            parts.extend(torch.split(members, most))
    return parts


def _even(pieces: list[tuple[int, list[int]]], count: int, budget: int) -> list[tuple[int, list[int]]] | None:
    """So many passes, each piece in the emptiest; None where one of them would overflow."""
    bins: list[tuple[int, list[int]]] = [(0, []) for _ in range(count)]
    for tokens, rows in pieces:
        place = min(range(count), key=lambda number: bins[number][0])
        held, there = bins[place]
        if there and held + tokens > budget:
            return None
        bins[place] = held + tokens, there + rows
    return bins
