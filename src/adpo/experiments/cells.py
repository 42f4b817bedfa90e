"""Long jobs as a list of cells: each is computed on its own and kept on disk as it ends, so that a job can be
stopped at any moment and resumed.

A cell is a name and a function that returns something JSON can hold. Finished cells are files under ``cells/``
of the output folder, with the provenance of the code that computed them, written under a temporary name and
renamed; what takes hours may have a folder of its own there until it has ended. Cells may be computed side by side
in worker processes; the results depend on the cells alone, wall-clock figures are kept apart.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

from adpo.system import files
from adpo.system.files import write_json
from adpo.system.provenance import typed

Report = Callable[[float], None]
"""Tells how much of a cell is done, from 0 to 1."""


@dataclass(frozen=True)
class Cell:
    """A piece of work with a name that is unique in its job; for worker processes it must pickle."""

    name: str
    compute: Callable[[Report], Any]
    weight: float = 1.0  # its share of the job's work, for the progress bar and the order


LAST_SEED = 999
"""Seeds of reported runs end here; those after it chose the settings."""


def seeds_from(first: int, count: int) -> range:
    """The seeds of reported runs; none of them may have chosen the settings."""
    if first + count > LAST_SEED + 1:
        raise ValueError(
            f"--first-seed {first} with {count} seeds goes beyond {LAST_SEED}: settings were chosen by later seeds"
        )
    return range(first, first + count)


def fingerprint(description: dict[str, Any]) -> str:
    """What jobs of the same description have in common."""
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()[:16]


MARKER = "job.json"


def check_folder(folder: Path, resume: bool) -> None:
    """See that results can go there and none are lost; a job that takes time to prepare asks before it does."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file; expected a folder")
    if (folder / MARKER).exists():
        if not resume:
            raise ValueError(f"{folder} already holds results: add --resume, or choose another --out")
    elif folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty and holds no results of this command: choose another --out")


class Job:
    """The output folder of a job, its description, and the cells it has finished."""

    def __init__(
        self, folder: Path, description: dict[str, Any], resume: bool, provenance: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.provenance = provenance or {}  # as it was before the first cell was computed
        self.cells = folder / "cells"
        self._timing = folder / "timing.json"
        self.fingerprint = fingerprint(description)
        marker = folder / MARKER
        check_folder(folder, resume)
        if marker.exists():
            known = read_json(marker)
            if known.get("fingerprint") != self.fingerprint:
                raise ValueError(
                    f"{folder} holds a job with other settings: resume it as it was, or choose another --out"
                )
        self.cells.mkdir(parents=True, exist_ok=True)
        write_json(marker, {"fingerprint": self.fingerprint, "description": description, "command": typed()})

    def run(
        self,
        cells: Sequence[Cell],
        on_progress: Callable[[Cell, float], None],
        workers: int = 1,
        prepare: Callable[[], None] | None = None,
        until: float | None = None,
    ) -> dict[str, Any]:
        """Every cell's result by name; ``on_progress`` hears how much of each is done, 1 at its end.

        ``prepare`` is called once in every process that computes cells. After ``until``, a time of the monotonic
        clock, nothing more is begun, and what is missing is not in the result.
        """
        missing = []
        for cell in cells:
            if self.has(cell):
                read_json(self._path(cell))
                shutil.rmtree(self.unfinished(cell.name), ignore_errors=True)
                on_progress(cell, 1.0)
            else:
                missing.append(cell)
        compute = _here if workers == 1 or len(missing) < 2 else _side_by_side
        with closing(compute(missing, on_progress, min(workers, len(missing)), prepare, until)) as computed:
            for cell, result, seconds in computed:
                write_json(self._path(cell), {"provenance": self.provenance, "result": result})
                shutil.rmtree(self.unfinished(cell.name), ignore_errors=True)
                self._note_time(cell.name, seconds)
                on_progress(cell, 1.0)
        return {cell.name: self.result(cell) for cell in cells if until is None or self.has(cell)}

    def provenances(self, cells: Sequence[Cell]) -> list[dict[str, str]]:
        """What computed these cells: one entry, or several for a job that was resumed by other code."""
        found: list[dict[str, str]] = []
        for cell in cells:
            provenance = read_json(self._path(cell))["provenance"]
            if provenance not in found:
                found.append(provenance)
        return found

    def has(self, cell: Cell) -> bool:
        """Whether a cell has ended."""
        return self._path(cell).exists()

    def unfinished(self, name: str) -> Path:
        """A folder for what a cell keeps while it is computed; gone when its result is there."""
        return self.cells / f"{name}.unfinished"

    def result(self, cell: Cell) -> Any:
        """Of a cell that has ended."""
        return read_json(self._path(cell))["result"]

    def seconds(self, cell: Cell) -> float:
        """How long a cell that has ended took."""
        return float(read_json(self._timing).get(cell.name, 0.0)) if self._timing.exists() else 0.0

    def _path(self, cell: Cell) -> Path:
        return self.cells / f"{cell.name}.json"

    def _note_time(self, name: str, seconds: float) -> None:
        timing = read_json(self._timing) if self._timing.exists() else {}
        write_json(self._timing, {**timing, name: round(seconds, 3)})


Computed = Generator[tuple[Cell, Any, float], None, None]
"""Cells as they end, with result and seconds; closing it ends the work."""


def _over(until: float | None) -> bool:
    return until is not None and time.monotonic() >= until


def _here(
    cells: Sequence[Cell],
    on_progress: Callable[[Cell, float], None],
    _: int,
    prepare: Callable[[], None] | None,
    until: float | None,
) -> Computed:
    if prepare is not None and cells:
        prepare()
    for cell in cells:
        if _over(until):
            return
        yield cell, *_timed(cell, partial(on_progress, cell))


def _side_by_side(
    cells: Sequence[Cell],
    on_progress: Callable[[Cell, float], None],
    workers: int,
    prepare: Callable[[], None] | None,
    until: float | None,
) -> Computed:
    """Heaviest first, no more than there are workers: what is not begun can be left.

    When a cell fails, those under way end and are kept, and nothing is begun; when the user interrupts, no worker
    is left running.
    """
    context = multiprocessing.get_context("spawn")
    reports = context.SimpleQueue()
    by_name = {cell.name: cell for cell in cells}
    waiting = deque(sorted(cells, key=lambda cell: -cell.weight))
    running: dict[Future[Any], Cell] = {}
    failure: BaseException | None = None
    with ProcessPoolExecutor(workers, context, _start_worker, (prepare, reports)) as pool:
        try:
            while running or waiting:
                while waiting and len(running) < workers and failure is None and not _over(until):
                    cell = waiting.popleft()
                    running[pool.submit(_reported, cell)] = cell
                if not running:
                    break
                ended, _ = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                while not reports.empty():
                    name, share = reports.get()
                    on_progress(by_name[name], share)
                for future in ended:
                    cell = running.pop(future)
                    if (error := future.exception()) is None:
                        yield cell, *future.result()
                    else:
                        failure = failure or error
            if failure is not None:
                raise failure
        except BaseException as error:
            for process in multiprocessing.active_children():
                process.terminate()
            pool.shutdown(cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise ValueError("a worker process was killed; memory? go on with --resume --workers 1") from None
            raise


POLL_SECONDS = 0.5  # between looks at what the workers report
_reports: SimpleQueue[tuple[str, float]]  # of a worker process, to its parent


def _start_worker(prepare: Callable[[], None] | None, reports: SimpleQueue[tuple[str, float]]) -> None:
    global _reports
    _reports = reports
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if prepare is not None:
        prepare()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _reported(cell: Cell) -> tuple[Any, float]:
    return _timed(cell, lambda share: _reports.put((cell.name, share)))


def _timed(cell: Cell, report: Report) -> tuple[Any, float]:
    started = time.perf_counter()
    return cell.compute(report), time.perf_counter() - started


def read_json(path: Path) -> Any:
    return files.read_json(path, "delete it and resume")
