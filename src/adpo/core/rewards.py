"""Statistics of the rewards inside a group: z-scores and the kernel distribution function.

Both are taken over the real candidates, whose ties have been merged (`adpo.core.ties`), are unchanged by a
positive affine map that keeps the ties, and know a tied group exactly (rounding of a mean must not turn equal
rewards into unit z-scores).
"""

from __future__ import annotations

import torch
from torch import Tensor


def standardized(rewards: Tensor, mask: Tensor) -> Tensor:
    """``(r - mean) / std`` within each group, ``[groups, K]`` float64, over its real candidates.

    The standard deviation is that of the population; a group without spread is zero.

    >>> standardized(torch.tensor([[3.0, 1.0, 9.0]]), torch.tensor([[True, True, False]])).tolist()
    [[1.0, -1.0, 0.0]]
    """
    size = mask.sum(-1, keepdim=True).clamp(min=1)
    deviation, std = _deviation(_unit_interval(rewards, mask), mask, size)
    return torch.where(std > 0, deviation / torch.where(std > 0, std, 1.0), 0.0)


def kernel_cdf(rewards: Tensor, mask: Tensor, cells: int = 1 << 22) -> Tensor:
    """``F_i = mean_j Phi((r_i - r_j)/h)`` within each group, ``[groups, K]``; 1/2 for groups without spread.

    Groups are taken in blocks of at most ``cells`` kernel values (one group at least): memory stays bounded.

    >>> kernel_cdf(torch.tensor([[3.0, 1.0, 2.0]]), torch.ones(1, 3, dtype=torch.bool)).round(decimals=2).tolist()
    [[0.81, 0.19, 0.5]]
    """
    size = mask.sum(-1, keepdim=True).clamp(min=1)
    unit = _unit_interval(rewards, mask)
    _, std = _deviation(unit, mask, size)
    ascending = torch.where(mask, unit, torch.inf).sort(-1).values
    iqr = _quantile(ascending, size, 0.75) - _quantile(ascending, size, 0.25)
    scale = torch.where(iqr > 0, torch.minimum(std, iqr / 1.34), std)
    bandwidth = 1.06 * scale * size.to(torch.float64) ** -0.2
    h = torch.where(bandwidth > 0, bandwidth, 1.0)
    per_block = max(1, cells // max(1, mask.shape[1] ** 2))
    blocks = [
        (torch.special.ndtr((r.unsqueeze(-1) - r.unsqueeze(-2)) / hb.unsqueeze(-1)) * m.unsqueeze(-2)).sum(-1)
        for r, hb, m in zip(*(torch.split(table, per_block) for table in (unit, h, mask)), strict=True)
    ]
    return torch.where(bandwidth > 0, torch.cat(blocks) / size, 0.5)


def _unit_interval(rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards mapped to [0, 1] by each group's range: exactly zero for a tied group, safe for huge values."""
    low = torch.where(mask, rewards, torch.inf).amin(-1, keepdim=True)
    high = torch.where(mask, rewards, -torch.inf).amax(-1, keepdim=True)
    spread = high / 2 - low / 2  # halves: the range of two huge rewards of opposite sign overflows
    inside = mask & (spread > 0)
    return torch.where(inside, (rewards / 2 - low / 2) / torch.where(spread > 0, spread, 1.0), 0.0)


def _deviation(values: Tensor, mask: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """Real candidates' distance from their mean, ``[groups, K]``, and its standard deviation, ``[groups, 1]``."""
    deviation = torch.where(mask, values - values.sum(-1, keepdim=True) / size, 0.0)
    return deviation, (deviation.square().sum(-1, keepdim=True) / size).sqrt()


def _quantile(ascending: Tensor, size: Tensor, share: float) -> Tensor:
    """Linearly interpolated quantile of the first ``size`` values of each row."""
    place = share * (size - 1).to(torch.float64)
    below = place.floor().long()
    low = ascending.gather(-1, below)
    high = ascending.gather(-1, torch.minimum(below + 1, size - 1))
    return torch.where(place > below, low + (high - low) * (place - below), low)
