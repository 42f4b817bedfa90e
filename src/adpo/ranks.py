"""The processes that hold parts of a batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """The ranks that hold parts of the batch: all those of a process group, or this process alone."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = process_group
        together = dist.is_available() and dist.is_initialized()
        self.world = dist.get_world_size(process_group) if together else 1
        self.rank = dist.get_rank(process_group) if together else 0

    def gather(self, values: Tensor) -> list[Tensor]:
        """The ``[rows]`` values of every rank; the ranks may hold different numbers of rows."""
        if self.world == 1:
            return [values]
        length = torch.tensor([len(values)], device=values.device)
        lengths = [torch.empty_like(length) for _ in range(self.world)]
        dist.all_gather(lengths, length, group=self.process_group)
        padded = torch.zeros(int(max(lengths)), dtype=values.dtype, device=values.device)
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(parts, padded, group=self.process_group)
        return [part[: int(n)] for part, n in zip(parts, lengths, strict=True)]
