"""``adpo reproduce efficiency``: which cells are measured, in which order, and what becomes of them."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from adpo.experiments.cells import Job
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
from adpo.experiments.session import Options, Session, in_minutes
from adpo.experiments.tables import markdown, terminal
from adpo.experiments.workers import Cell
from adpo.system.files import write_json


def reproduce(
    name: str, out: Path, resume: bool, on_progress: Callable[[float], None], minutes: float | None = None
) -> dict[str, Any]:
    """Measure, cell by cell, and write ``results.json``, ``updates.csv``, ``tables.md`` and the figures.

    No cell is begun after so many minutes: what is there by then is shown, and a later run goes on.
    """
    preset = PRESETS[name]
    if name == "gpu" and minutes != 0 and not torch.cuda.is_available():
        raise ValueError("--preset gpu needs a CUDA device; --preset smoke runs anywhere")
    description = {"experiment": "efficiency", "preset": name, **described(preset)}
    session = Session(Options(out, resume, on_progress=on_progress), description, end=in_minutes(minutes))
    cells = cells_of(preset, session.job)
    session.weight = sum(cell.weight for cell in cells)
    found: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for cell in cells:
        try:
            found |= session.run([cell])
        except measures.OtherWorkError as error:  # the others go on; it is tried again with --resume
            refused[cell.name] = str(error)
    if not any(cell.startswith("update-") for cell in found):
        raise ValueError(f"{out} holds no update yet: give it more --minutes")
    results: dict[str, Any] = {
        "preset": name,
        "provenance": session.provenances(),
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
        "not_yet": [name for name in session.pending if not name.startswith("exact-")],
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
    for work in (preset.base, *preset.axes):
        present = [one for one in contenders(work, preset) if _able(one, job, preset, work) and one != TRL_LIGER]
        cells += [_exact(work, method) for method in dict.fromkeys(one.method for one in present)]
        cells += [_update(job, preset, work, one) for one in present]
        if work == preset.base:
            cells += [_whole(one, preset) for one in (TRL_DEFAULT, ADPO)]
    cells += [_fits(one, preset) for one in (TRL_DEFAULT, TRL_PLAIN, ADPO)]
    if _able(TRL_LIGER, job, preset, preset.base):  # the last one: it puts its kernels into this process's models
        cells.append(_update(job, preset, preset.base, TRL_LIGER))
    return cells


def fits_name(contender: Contender) -> str:
    return f"fits-{contender.name}"


def _exact(work: Work, method: str) -> Cell:
    return Cell(f"exact-{work.name}-{method}", lambda _: measures.exact_gradient(EXACT[method], work))


def _update(job: Job, preset: Preset, work: Work, contender: Contender) -> Cell:
    def compute(_: Any) -> Any:
        exact = job.result(_exact(work, contender.method))["gradient"]
        return measures.update(contender, work, preset, exact)

    return Cell(update_name(work, contender), compute)


def _whole(contender: Contender, preset: Preset) -> Cell:
    return Cell(whole_name(contender), lambda _: measures.whole_step(contender, preset), 3.0)


def _fits(contender: Contender, preset: Preset) -> Cell:
    return Cell(fits_name(contender), lambda _: measures.largest_that_fits(contender, preset), 2.0)


def _able(contender: Contender, job: Job, preset: Preset, work: Work) -> bool:
    """Whether this machine can run it, or has its result."""
    if contender.needs is None or job.has(_update(job, preset, work, contender)):
        return True
    return torch.cuda.is_available() and importlib.util.find_spec(contender.needs) is not None


def show(results: dict[str, Any], console: Console) -> None:
    """The tables, on the terminal."""
    for each in (*terminal(tables(results)), *remarks(results)):
        console.print(each)
