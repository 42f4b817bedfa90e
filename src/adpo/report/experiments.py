"""An experiment of `adpo reproduce`, or a study of `adpo tune`: tables and figures, and what the paper says."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adpo.experiments import tables
from adpo.files import read_json, read_lines
from adpo.report.claims import claims_of
from adpo.report.parts import Chart, Frame, Section, Series, Surface

RESULTS, JOB, TABLES, STUDY = "results.json", "job.json", "tables.md", "study.json"
LOOK = "dev/accuracy"


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
    if name == "geometry" and results:
        made.surfaces = [_bowls(results)]
        made.charts = _geometry(results)
    if name == "reasoning" and results:
        made.charts = _learning(results)
    if study:
        words = [str(word) for word in (study["job"], *study["words"], "--seed", study["seed"])]
        made.facts = {"command": shlex.join(["adpo", "tune", *words]), **made.facts}
        made.charts = _trials(folder)
    if not results:
        made.notes.append("no results yet: they are written when the experiment ends, or its time")
    return made


def _trials(folder: Path) -> list[Chart]:
    """How the trials of a study went: a line for each that has looked at watched problems."""
    lines = []
    for path in sorted(folder.glob("*/metrics.jsonl")):
        looks = [(row["step"], float(row[LOOK])) for row in read_lines(path) if LOOK in row]
        if looks:
            lines.append(Series(path.parent.name, [step for step, _ in looks], [value for _, value in looks]))
    return [Chart("accuracy on watched problems, by trial", "step", "accuracy", lines)] if lines else []


def _facts(results: dict[str, Any]) -> dict[str, str]:
    known = results.get("provenance")
    origins = known if isinstance(known, list) else [known] if isinstance(known, dict) else []
    found: dict[str, set[str]] = {}
    for origin in origins:
        for key, value in origin.items():
            found.setdefault(key, set()).add(str(value))
    return {key: ", ".join(sorted(values)) for key, values in found.items()}


def _bowls(results: dict[str, Any]) -> Surface:
    frames = [
        Frame(f"{bowl['tau']:g}", bowl["axis"], bowl["loss"], {"anchor": [0.0, 0.0], "minimum": bowl["minimum"]})
        for bowl in results["bowls"]
    ]
    axes = ("log-ratio of the first", "log-ratio of the second")
    return Surface("the anchored loss above its minimum; curvature is 1/tau²", *axes, "tau", frames)


def _geometry(results: dict[str, Any]) -> list[Chart]:
    region, forces, ways = results["trust_region"], results["forces"], results["two_ways"]
    return [
        Chart(
            "tau: near at the end, hard at the start",
            "tau",
            "nats, force",
            [
                Series("KL of the optimum from the reference", region["tau"], region["kl"]),
                Series("largest force at the first step", region["tau"], region["force"]),
            ],
        ),
        Chart(
            "force on the better of two candidates",
            "log-ratio to the anchor",
            "force upwards",
            [Series(name, forces["moved"], values) for name, values in forces["forces"].items()],
        ),
        Chart(
            "forward and reverse KL",
            "candidate",
            "probability",
            [
                Series("target", ways["places"], ways["target"]),
                *(Series(name, ways["places"], values) for name, values in ways["fitted"].items()),
            ],
        ),
    ]


def _learning(results: dict[str, Any]) -> list[Chart]:
    """The paper's Figure 3: accuracy on the way, reward and length; a line for each method, its seeds behind."""
    runs = [run for run in results["runs"] if run["trial"]["study"] == "seeds"]
    looks: list[Series] = []
    by_rollout: dict[str, list[Series]] = {"right": [], "length": [], "distinct": []}
    for method in dict.fromkeys(run["trial"]["method"] for run in runs):
        mine = [run for run in runs if run["trial"]["method"] == method]
        looks += _with_mean(method, [[(at, value) for at, value in run["curve"]] for run in mine])
        for measure, lines in by_rollout.items():
            curves = [[(at + 1, each[measure]) for at, each in enumerate(run["rollouts"])] for run in mine]
            lines += _with_mean(method, curves)
    titles = {
        "right": "share of right completions in a rollout",
        "length": "tokens a completion",
        "distinct": "different answers in a group",
    }
    watched = Chart("accuracy on problems that are watched", "rollouts", "accuracy", looks)
    rest = [Chart(titles[name], "rollouts", titles[name], lines) for name, lines in by_rollout.items()]
    return [chart for chart in (watched, *rest) if chart.series]


def _with_mean(name: str, curves: Sequence[Sequence[tuple[int, float]]]) -> list[Series]:
    """The seeds, faint, and their mean as far as all have come."""
    lines = [Series(name, [at for at, _ in curve], [v for _, v in curve], faint=True) for curve in curves]
    shortest = min(map(len, curves), default=0)
    means = [sum(curve[i][1] for curve in curves) / len(curves) for i in range(shortest)]
    return [*lines, Series(name, [at for at, _ in curves[0][:shortest]], means)] if shortest else lines
