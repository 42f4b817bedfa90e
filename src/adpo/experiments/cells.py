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
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from adpo.experiments.workers import Cell, computed
from adpo.system import files
from adpo.system.files import write_json
from adpo.system.provenance import typed

MARKER = "job.json"


def fingerprint(description: dict[str, Any]) -> str:
    """What jobs of the same description have in common."""
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()[:16]


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
        if marker.exists() and read_json(marker).get("fingerprint") != self.fingerprint:
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
        out_of_time: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """Results by name; ``on_progress`` is called with how much of a cell is done, 1 at its end.

        ``prepare`` is called once in every process that computes cells. When it is ``out_of_time``, nothing more
        is begun, and what is missing is not in the result.
        """
        missing = []
        for cell in cells:
            if self.has(cell):
                self.result(cell)  # complains about a file that cannot be read before anything is computed
                shutil.rmtree(self.unfinished(cell.name), ignore_errors=True)
                on_progress(cell, 1.0)
            else:
                missing.append(cell)
        with closing(computed(missing, on_progress, workers, prepare, out_of_time)) as ended:
            for cell, result, seconds in ended:
                write_json(self._path(cell), {"provenance": self.provenance, "result": result})
                shutil.rmtree(self.unfinished(cell.name), ignore_errors=True)
                write_json(self._timing, {**self._seconds(), cell.name: round(seconds, 3)})
                on_progress(cell, 1.0)
        return {cell.name: self.result(cell) for cell in cells if self.has(cell)}

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
        return self._seconds().get(cell.name, 0.0)

    def _seconds(self) -> dict[str, float]:
        found: dict[str, float] = read_json(self._timing) if self._timing.exists() else {}
        return found

    def _path(self, cell: Cell) -> Path:
        return self.cells / f"{cell.name}.json"


def read_json(path: Path) -> Any:
    return files.read_json(path, "delete it and resume")
