"""An experiment of `adpo reproduce`, or a study of `adpo tune`: tables and figures, and what the paper says."""

from __future__ import annotations

import base64
import shlex
from pathlib import Path
from typing import Any

from adpo.experiments import tables
from adpo.report import charts
from adpo.report.claims import claims_of
from adpo.report.parts import Section
from adpo.system.files import read_json

RESULTS, JOB, TABLES, STUDY = "results.json", "job.json", "tables.md", "study.json"


def recognised(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (RESULTS, JOB, STUDY))


def section(folder: Path) -> Section:
    """From the results, or, while there are none, from the cells that have ended."""
    marker: dict[str, Any] = read_json(folder / JOB) if (folder / JOB).is_file() else {}
    job: dict[str, Any] = marker.get("description", {})
    results: dict[str, Any] = read_json(folder / RESULTS) if (folder / RESULTS).is_file() else {}
    study: dict[str, Any] = read_json(folder / STUDY) if (folder / STUDY).is_file() else {}
    name = str(results.get("experiment") or job.get("experiment") or ("tune" if study else folder.name))
    preset = results.get("preset") or job.get("preset")
    made = Section(f"{folder.name}: {name}", "finished" if results and not results.get("not_yet") else "going on")
    made.facts = _facts(results)
    if preset:
        made.facts = {"experiment": name, "preset": str(preset), **made.facts}
    if marker.get("command"):
        made.facts = {"command": str(marker["command"]), **made.facts}
    cells = len(list((folder / "cells").glob("*.json")))
    if cells:
        made.figures["parts that have ended"] = str(cells)
    if (folder / TABLES).is_file():
        made.tables = tables.read((folder / TABLES).read_text(encoding="utf-8"))
    made.pictures = {
        picture.stem: "data:image/svg+xml;base64," + base64.b64encode(picture.read_bytes()).decode()
        for picture in sorted(folder.glob("*.svg"))
    }
    made.claims = claims_of(name, results)
    if results:
        made.surfaces, made.charts = charts.surfaces_of(name, results), charts.charts_of(name, results)
    if study:
        words = [str(word) for word in (study["job"], *study["words"], "--seed", study["seed"])]
        made.facts = {"command": shlex.join(["adpo", "tune", *words]), **made.facts}
        made.charts = charts.of_trials(folder)
    if not results:
        made.notes.append("no results yet: they are written when the experiment ends, or its time")
    return made


def _facts(results: dict[str, Any]) -> dict[str, str]:
    known = results.get("provenance")
    origins = known if isinstance(known, list) else [known] if isinstance(known, dict) else []
    found: dict[str, set[str]] = {}
    for origin in origins:
        for key, value in origin.items():
            found.setdefault(key, set()).add(str(value))
    return {key: ", ".join(sorted(values)) for key, values in found.items()}
