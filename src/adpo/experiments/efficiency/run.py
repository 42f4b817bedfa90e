"""``adpo reproduce efficiency``: which cells are measured, in which order, and what becomes of them."""

from __future__ import annotations

import csv
import importlib.util
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from adpo.experiments.cells import Cell, Job
from adpo.experiments.efficiency import limits, measures
from adpo.experiments.efficiency.protocol import (
    ADPO,
    EXACT,
    PRESETS,
    TRL_DEFAULT,
    TRL_LIGER,
    TRL_PLAIN,
    Contender,
    Preset,
    Work,
    contenders,
    described,
)
from adpo.experiments.efficiency.summary import goals, remarks, rows_of, tables, update_name, whole_name
from adpo.experiments.tables import markdown, terminal
from adpo.files import write_json
from adpo.provenance import provenance


def reproduce(
    name: str, out: Path, resume: bool, on_progress: Callable[[float], None], minutes: float | None = None
) -> dict[str, Any]:
    """Measure, cell by cell, and write ``results.json``, ``updates.csv``, ``tables.md`` and the figures.

    No cell is begun after so many minutes: what is there by then is shown, and a later run goes on.
    """
    preset = PRESETS[name]
    if name == "gpu" and minutes != 0 and not torch.cuda.is_available():
        raise ValueError("--preset gpu needs a CUDA device; --preset smoke runs anywhere")
    job = Job(out, {"experiment": "efficiency", "preset": name, **described(preset)}, resume, provenance())
    cells = cells_of(preset, job)
    total, done = sum(cell.weight for cell in cells), 0.0
    found: dict[str, Any] = {}
    refused: dict[str, str] = {}
    end = None if minutes is None else time.monotonic() + 60 * minutes
    for cell in cells:
        if job.has(cell) or end is None or time.monotonic() < end:
            try:
                found |= job.run([cell], lambda *_: None)
            except measures.OtherWorkError as error:  # the others go on; it is tried again with --resume
                refused[cell.name] = str(error)
        done += cell.weight
        on_progress(done / total)
    if not any(cell.startswith("update-") for cell in found):
        raise ValueError(f"{out} holds no update yet: give it more --minutes")
    ended = [cell for cell in cells if cell.name in found]
    results: dict[str, Any] = {
        "preset": name,
        "provenance": job.provenances(ended),
        "limits": found["limits"],
        "loss_alone": found["loss_alone"],
        "repeatability": found.get("repeatability", {}),
        "updates": {cell: measured for cell, measured in found.items() if cell.startswith("update-")},
        "whole_steps": {cell: measured for cell, measured in found.items() if cell.startswith("whole-")},
        "largest_passes": {cell: measured for cell, measured in found.items() if cell.startswith("fits-")},
        "left_out": [
            f"{one.name}: it needs a GPU and its package"
            for one in contenders(preset.base, preset)
            if update_name(preset.base, one) not in {cell.name for cell in cells}
        ],
        "refused": refused,
        "not_yet": [
            cell.name
            for cell in cells
            if cell.name not in {*found, *refused} and not cell.name.startswith("exact-")
        ],
    }
    results["rows"] = rows_of(results, preset)
    results["goals"] = goals(results, preset)
    write_json(out / "results.json", results)
    with (out / "updates.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, fieldnames=list(results["rows"][0]))
        table.writeheader()
        table.writerows(results["rows"])
    beside = "".join(f"- {line}\n" for line in remarks(results))
    (out / "tables.md").write_text(f"{markdown(tables(results))}\n{beside}")
    if importlib.util.find_spec("matplotlib") is not None:
        from adpo.experiments.efficiency.figures import draw

        draw(results, out)
    return results


def cells_of(preset: Preset, job: Job) -> list[Cell]:
    """The exact gradients of a cell before those who are held against them."""
    cells = [
        Cell("limits", lambda _: limits.limits(preset)),
        Cell("loss_alone", lambda _: limits.loss_alone(preset.base)),
        Cell("repeatability", lambda _: measures.repeatability(preset)),
    ]
    whole = [Cell(whole_name(one), partial(_whole, one, preset), 3.0) for one in (TRL_DEFAULT, ADPO)]
    for work in (preset.base, *preset.axes):
        present = [one for one in contenders(work, preset) if _able(one, job, preset, work) and one != TRL_LIGER]
        methods = dict.fromkeys(one.method for one in present)
        cells += [Cell(exact_name(work, one), partial(_exact, EXACT[one], work)) for one in methods]
        cells += [_update(job, preset, work, one) for one in present]
        cells += whole if work == preset.base else []
    cells += [Cell(fits_name(one), partial(_fits, one, preset), 2.0) for one in (TRL_DEFAULT, TRL_PLAIN, ADPO)]
    if _able(TRL_LIGER, job, preset, preset.base):  # the last one: it puts its kernels into this process's models
        cells.append(_update(job, preset, preset.base, TRL_LIGER))
    return cells


def exact_name(work: Work, method: str) -> str:
    return f"exact-{work.name}-{method}"


def fits_name(contender: Contender) -> str:
    return f"fits-{contender.name}"


def _update(job: Job, preset: Preset, work: Work, contender: Contender) -> Cell:
    def compute(_: Any) -> Any:
        exact = job.result(Cell(exact_name(work, contender.method), lambda _: None))["gradient"]
        return measures.update(contender, work, preset, exact)

    return Cell(update_name(work, contender), compute)


def _exact(contender: Contender, work: Work, _: Any) -> Any:
    return measures.exact_gradient(contender, work)


def _whole(contender: Contender, preset: Preset, _: Any) -> Any:
    return measures.whole_step(contender, preset)


def _fits(contender: Contender, preset: Preset, _: Any) -> Any:
    return measures.largest_that_fits(contender, preset)


def _able(contender: Contender, job: Job, preset: Preset, work: Work) -> bool:
    """Whether this machine can run it, or has its result."""
    if contender.needs is None or job.has(_update(job, preset, work, contender)):
        return True
    return torch.cuda.is_available() and importlib.util.find_spec(contender.needs) is not None


def show(results: dict[str, Any], console: Console) -> None:
    """The tables, on the terminal."""
    for each in (*terminal(tables(results)), *remarks(results)):
        console.print(each)
