"""Which completions of a rollout take part in the loss, with which rewards.

Tables are those of this process, ``[rows]``; ``gather`` gives the rows of all processes, where groups are whole.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from adpo.core.ties import merge_ties
from adpo.trainers.trl.step.rows import Rows

log = logging.getLogger("adpo")
Gather = Callable[[Tensor], Tensor]


def log_left_out(out: Mapping[str, Tensor], step: int, reduce: Callable[..., Tensor]) -> dict[str, float]:
    """Their shares in all processes, for the log; a warning where there are any."""
    shares = {name: float(reduce(chosen.float().mean(), reduction="mean")) for name, chosen in out.items()}
    for name, share in shares.items():
        if share > 0:
            log.warning("step %d: %.1f %% of completions left out: %s", step, 100 * share, name)
    return shares


def member_columns(
    rewards: Tensor,
    cut: Tensor,
    out: Mapping[str, Tensor],
    *,
    truncated: str,
    first: int,
    size: int,
    gather: Gather,
) -> Rows:
    """Columns that the group step needs beside TRL's: rewards, members, numbers of groups, best and worst members.

    ``out`` are those left out, ``cut`` those that the length limit cut, which ``truncated`` says what to do with:
    ``zero``, ``mask`` or ``keep``. ``first`` is the number of this process's first row, ``size`` that of the
    completions in a group.
    """
    member = ~torch.stack(list(out.values())).any(0)
    if truncated == "zero":
        rewards = no_better_than_uncut(rewards, member, cut, first=first, size=size, gather=gather)
    elif truncated == "mask":
        member &= ~cut
    best, worst = extremes(rewards, member, first=first, size=size, gather=gather)
    groups = torch.arange(first, first + len(rewards), device=rewards.device) // size
    return {"rewards": rewards, "member": member, "groups": groups, "best": best, "worst": worst}


def left_out(batch: Rows, rewards: Tensor, empty: Tensor, context: int | None) -> dict[str, Tensor]:
    """Completions that cannot take part, by the reason; ``empty`` are those that were sampled without a token."""
    prompts, lengths = batch["prompt_mask"].sum(1), batch["completion_mask"].sum(1)
    return {
        "no_reward": ~torch.isfinite(rewards),
        "empty": (lengths == 0) | empty,
        "too_long": prompts + lengths > (context or math.inf),
    }


def no_better_than_uncut(
    rewards: Tensor, member: Tensor, cut: Tensor, *, first: int, size: int, gather: Gather
) -> Tensor:
    """A cut completion gets the least of 0, its own reward and those of the uncut members of its group."""
    uncut = torch.where(member & ~cut, rewards, torch.inf)
    table = gather(uncut).view(-1, size)
    worst = table.amin(1, keepdim=True).expand_as(table).reshape(-1)[first : first + len(rewards)]
    return torch.where(cut, torch.minimum(rewards, worst).clamp(max=0.0), rewards)


def extremes(rewards: Tensor, member: Tensor, *, first: int, size: int, gather: Gather) -> tuple[Tensor, Tensor]:
    """Weights, summing to one over a group, of its best and of its worst members; zero where all are tied."""
    table = gather(torch.where(member, rewards, torch.nan)).view(-1, size)
    table = merge_ties(table.double(), torch.isfinite(table))
    high, low = table.nan_to_num(-math.inf).amax(1, True), table.nan_to_num(math.inf).amin(1, True)

    def shares(extreme: Tensor) -> Tensor:
        weight = ((table == extreme) & (high > low)).to(torch.float64)
        share = weight / weight.sum(1, keepdim=True).clamp(min=1)
        return share.view(-1)[first : first + len(rewards)]

    return shares(high), shares(low)
