"""The processes that hold parts of a batch."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def processes() -> int:
    """How many there are in this training."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Ranks:
    """The ranks that hold parts of the batch: all those of a process group, or this process alone."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = process_group
        together = dist.is_available() and dist.is_initialized()
        self.world = dist.get_world_size(process_group) if together else 1
        self.rank = dist.get_rank(process_group) if together else 0

    def together(self, check: Callable[[], object], device: torch.device) -> None:
        """Run a check on every rank: what it raises on one, all raise, and what it returns must be equal on all.

        A rank that gave up alone would leave the others waiting for it in the next collective call.
        """
        if self.world == 1:
            check()
            return
        fault: Exception | None = None
        report = ["", ""]
        try:
            report[1] = str(check())
        except (ValueError, TypeError) as error:
            fault, report[0] = error, str(error)
        encoded = torch.tensor(list(json.dumps(report).encode()), dtype=torch.uint8, device=device)
        reports = [json.loads(bytes(part.tolist())) for part in self.gather(encoded)]
        if fault is not None:
            raise fault
        for rank, (message, facts) in enumerate(reports):
            if message:
                raise ValueError(f"rank {rank}: {message}")
            if facts != report[1]:
                raise ValueError(
                    f"ranks must be called alike; rank {self.rank}: {report[1]}, rank {rank}: {facts}"
                )

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
