"""Pieces of work that are computed one after the other, or side by side in worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import SimpleQueue
from typing import Any

Report = Callable[[float], None]
"""Called with how much of a cell is done, from 0 to 1."""


@dataclass(frozen=True)
class Cell:
    """A piece of work with a name that is unique in its job; for worker processes it must pickle."""

    name: str
    compute: Callable[[Report], Any]
    weight: float = 1.0  # its share of the job's work, for the progress bar and the order


Computed = Generator[tuple[Cell, Any, float], None, None]
"""Cells as they end, with result and seconds; closing it ends the work."""


def computed(
    cells: Sequence[Cell],
    on_progress: Callable[[Cell, float], None],
    workers: int,
    prepare: Callable[[], None] | None,
    out_of_time: Callable[[], bool],
) -> Computed:
    """Begin nothing more when it is ``out_of_time``; ``prepare`` is called once in every process that computes."""
    if workers > 1 and len(cells) > 1:
        yield from _side_by_side(cells, on_progress, min(workers, len(cells)), prepare, out_of_time)
        return
    if prepare is not None and cells:
        prepare()
    for cell in cells:
        if out_of_time():
            return
        yield cell, *_timed(cell, partial(on_progress, cell))


def _side_by_side(
    cells: Sequence[Cell],
    on_progress: Callable[[Cell, float], None],
    workers: int,
    prepare: Callable[[], None] | None,
    out_of_time: Callable[[], bool],
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
                while waiting and len(running) < workers and failure is None and not out_of_time():
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
