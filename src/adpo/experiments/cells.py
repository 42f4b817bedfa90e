"""Long jobs as a list of cells: each is computed on its own and kept on disk as it ends, so that a job can be
stopped at any moment and resumed.

A cell is a name and a function that returns something JSON can hold. Finished cells are files under ``cells/``
of the output folder, written under a temporary name and renamed. The results depend on the cells alone; wall-
clock figures are kept apart.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Cell:
    """A piece of work with a name that is unique in its job."""

    name: str
    compute: Callable[[], Any]


class Job:
    """The output folder of a job, its description, and the cells it has finished."""

    def __init__(self, folder: Path, description: dict[str, Any], resume: bool) -> None:
        self.folder = folder
        self.cells = folder / "cells"
        text = json.dumps(description, sort_keys=True)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        marker = folder / "job.json"
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--out {folder} is a file; expected a folder")
        if marker.exists():
            known = read_json(marker)
            if not resume:
                raise ValueError(f"{folder} already holds results: add --resume, or choose another --out")
            if known.get("fingerprint") != self.fingerprint:
                raise ValueError(
                    f"{folder} holds a job with other settings: resume it as it was, or choose another --out"
                )
        elif folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty and holds no results of this command: choose another --out")
        self.cells.mkdir(parents=True, exist_ok=True)
        write_json(marker, {"fingerprint": self.fingerprint, "description": description})

    def run(self, cells: Sequence[Cell], on_cell: Callable[[Cell, bool], None]) -> dict[str, Any]:
        """Every cell's result by name; ``on_cell`` hears of each, and whether it was there already."""
        results = {}
        for cell in cells:
            path = self.cells / f"{cell.name}.json"
            found = path.exists()
            if not found:
                started = time.perf_counter()
                result = cell.compute()
                write_json(path, {"result": result})
                self._note_time(cell.name, time.perf_counter() - started)
            results[cell.name] = read_json(path)["result"]
            on_cell(cell, found)
        return results

    def _note_time(self, name: str, seconds: float) -> None:
        path = self.folder / "timing.json"
        timing = read_json(path) if path.exists() else {}
        write_json(path, {**timing, name: round(seconds, 3)})


def write_json(path: Path, content: Any) -> None:
    """Write under a temporary name, then rename: a half-written file is never picked up."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    temporary.replace(path)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): delete it and resume") from None
