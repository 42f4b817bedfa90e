"""One call of an experiment's command: its job on disk, the time that is left, how much of the work is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adpo.experiments.cells import Job
from adpo.experiments.workers import Cell
from adpo.system.provenance import provenance

one_thread = partial(torch.set_num_threads, 1)
"""For small matrices, which gain nothing from more threads; results are then those of any number of cores."""


@dataclass(frozen=True)
class Options:
    """Where results go, and how the work is done."""

    out: Path
    resume: bool = False
    workers: int = 1
    on_progress: Callable[[float], None] = lambda _: None  # is given the share of the work that is done


def in_minutes(minutes: float | None) -> float | None:
    """A time of the monotonic clock."""
    return None if minutes is None else time.monotonic() + 60 * minutes


class Session:
    """Runs cells of a job, a few at a time, as long as there is time.

    ``weight`` is that of all its cells, where it is known before the first are run. Nothing is begun after
    ``end``, a time of the monotonic clock; with ``in_time`` nothing either that would end later if it took as long
    as the longest cell of this session. ``on_end`` is called with every cell that was computed.
    """

    def __init__(
        self,
        options: Options,
        description: dict[str, Any],
        *,
        weight: float = 0.0,
        end: float | None = None,
        in_time: bool = False,
        on_end: Callable[[Cell], None] = lambda _: None,
    ) -> None:
        self.options, self.end, self.in_time, self.on_end = options, end, in_time, on_end
        self.job = Job(options.out, description, options.resume, provenance())
        self.ended: list[Cell] = []
        self.pending: list[str] = []  # names of the cells that there was no time for
        self.weight, self._passed, self._longest = weight, 0.0, 0.0

    def run(self, cells: Sequence[Cell], prepare: Callable[[], None] | None = None) -> dict[str, Any]:
        """Results by name, of the cells that have ended."""
        shares = dict.fromkeys((cell.name for cell in cells), 0.0)
        pending, missing = set(shares), {cell.name for cell in cells if not self.job.has(cell)}
        weight = sum(cell.weight for cell in cells)
        self.weight = max(self.weight, self._passed + weight)

        def on_progress(cell: Cell, share: float) -> None:
            shares[cell.name] = share * cell.weight
            self.options.on_progress((self._passed + sum(shares.values())) / self.weight)
            if cell.name in pending and self.job.has(cell):
                pending.remove(cell.name)
                self.ended.append(cell)
                if cell.name in missing:
                    self._longest = max(self._longest, self.job.seconds(cell))
                    self.on_end(cell)

        results = self.job.run(cells, on_progress, self.options.workers, prepare, self._out_of_time)
        self._passed += weight
        self.pending += [cell.name for cell in cells if cell.name in pending]
        return results

    def finish(self, cell: Cell) -> Any:
        """The result of a cell that has to be there, whatever the time."""
        if not self.job.has(cell):
            self.job.run([cell], lambda *_: None)
            self.pending.remove(cell.name)
            self.ended.append(cell)
        return self.job.result(cell)

    def provenances(self) -> list[dict[str, str]]:
        """The code that computed what has ended."""
        return self.job.provenances(self.ended)

    def _out_of_time(self) -> bool:
        needed = self._longest if self.in_time else 0.0
        return self.end is not None and time.monotonic() + needed >= self.end
