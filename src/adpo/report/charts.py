"""What is drawn of an experiment: lines and bars that can be hovered over, and switched off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adpo.experiments.distill.protocol import STUDIES
from adpo.experiments.statistics import interval
from adpo.report.parts import Chart, Frame, Series, Surface
from adpo.system.files import read_lines

LOOKS = {"validation/accuracy": "accuracy", "validation/reward": "mean reward"}
Results = dict[str, Any]
Runs = list[dict[str, Any]]


def charts_of(experiment: str, results: Results) -> list[Chart]:
    """Of an experiment of this name; none of those that have pictures alone."""
    made = CHARTS[experiment](results) if experiment in CHARTS else []
    return [chart for chart in made if chart.series]


def surfaces_of(experiment: str, results: Results) -> list[Surface]:
    return [_bowls(results)] if experiment == "geometry" else []


def of_trials(folder: Path) -> list[Chart]:
    """How the trials of a study went: a line for each that has been evaluated on the validation set."""
    made = []
    logs = {path.parent.name: read_lines(path) for path in sorted(folder.glob("*/metrics.jsonl"))}
    for name, title in LOOKS.items():
        lines = []
        for trial, rows in logs.items():
            found = [(row["step"], float(row[name])) for row in rows if name in row]
            if found:
                lines.append(Series(trial, [step for step, _ in found], [value for _, value in found]))
        if lines:
            made.append(Chart(f"{title} on the validation set, by trial", "step", title, lines))
    return made


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
    """The paper's Figure 3: accuracy on the way, reward and length; a line for each method, its seeds behind.

    Of runs that were known from an earlier job no curves are kept.
    """
    runs = [run for run in results["runs"] if run["trial"]["study"] == "seeds" and "known" not in run]
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


def _bandits(results: Results) -> list[Chart]:
    """The paper's Figure 2, how the policies got there, and what tau and beta do."""
    cells, reached = results.get("cells", {}), "WinMass, sampled"
    found = [
        Chart(f"WinMass of the {metric} policy", "scenario", "WinMass", _by_scenario(results["summary"][metric]))
        for metric in ("sampled", "greedy")
    ]
    main = [run for name, runs in cells.items() if name.startswith("main-") for run in runs]
    found.append(Chart("WinMass on the way, all scenarios", "iterations", reached, _curves(main)))
    wide: dict[float, Runs] = {}
    for name, runs in cells.items():
        if name.startswith("capacity-"):
            wide.setdefault(int(name.split("-")[1]), []).extend(runs)
    methods = dict.fromkeys(run["method"] for runs in wide.values() for run in runs)
    lines = [_ends(name, {width: _by(name, runs) for width, runs in wide.items()}, "sampled") for name in methods]
    found.append(Chart("heavy noise: the width of the policy", "hidden units", reached, lines, log_x=True))
    by_beta: dict[float, dict[float, Runs]] = {}
    for run in cells.get("sensitivity", []):
        if run["settings"]:  # not the reference
            taus = by_beta.setdefault(run["settings"]["beta"], {})
            taus.setdefault(run["settings"]["tau"], []).append(run)
    for metric in ("sampled", "greedy"):
        lines = [_ends(f"beta {beta:g}", taus, metric) for beta, taus in sorted(by_beta.items())]
        found.append(Chart(f"kernel estimate: tau and beta, {metric}", "tau", "WinMass", lines, log_x=True))
    return found


def _by(method: str, runs: Runs) -> Runs:
    return [run for run in runs if run["method"] == method]


def _by_scenario(summary: dict[str, dict[str, Sequence[float]]]) -> list[Series]:
    lines = []
    for method, cells in summary.items():
        names = [name for name in cells if name != "all"]
        means, halves = ([cells[name][part] for name in names] for part in (0, 1))
        lines.append(Series(method, names, means, half=halves))
    return lines


def _curves(runs: Runs) -> list[Series]:
    by_method: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        for point in run["curve"]:
            by_method.setdefault(run["method"], {}).setdefault(point["iteration"], []).append(point["sampled"])
    return [
        Series(method, list(points), [sum(values) / len(values) for values in points.values()])
        for method, points in by_method.items()
        if len(points) > 1
    ]


def _ends(name: str, groups: dict[float, Runs], metric: str) -> Series:
    """What runs end with, over what their groups stand for."""
    found = [interval([run["curve"][-1][metric] for run in groups[at]]) for at in sorted(groups)]
    return Series(name, sorted(groups), [each.mean for each in found], half=[each.half for each in found])


WIDE = 4
"""Beyond it an axis is a logarithm."""
DISTANCES = {"stochastic_share": "return with noise, of the teacher's", "kl": "KL(teacher, student)"}


def _distill(results: Results) -> list[Chart]:
    """Every method in the main study, then return and distance against what a study changes."""
    rows = results["summary"]
    main = [row for row in rows if row["study"] == "main"]
    found = []
    for measure, title in DISTANCES.items():
        lines = _lines(main, "environment", "method", measure)
        found.append(Chart(f"all methods: {title}", "", title, lines, log_y=measure == "kl", bars=True))
    for study, label in STUDIES.items():
        of_study = sorted((row for row in rows if row["study"] == study), key=lambda row: float(row["value"]))
        for world in dict.fromkeys(row["environment"] for row in of_study):
            here = [row for row in of_study if row["environment"] == world]
            for measure, title in DISTANCES.items():
                logs = (here[-1]["value"] > WIDE, measure == "kl")
                lines = _lines(here, "method", "value", measure)
                found.append(Chart(f"{world}: {title}", label, title, lines, *logs))
    return found


def _lines(rows: Runs, name: str, across: str, measure: str) -> list[Series]:
    """A line for each name."""
    lines = []
    for each in dict.fromkeys(row[name] for row in rows):
        mine = [row for row in rows if row[name] == each]
        at, middle, half = ([row[key] for row in mine] for key in (across, measure, f"{measure}_ci"))
        lines.append(Series(each, at, middle, half=half))
    return lines


STOCK = "TRL GRPO, defaults"


def _efficiency(results: Results) -> list[Chart]:
    """How fast the contenders are in each cell, stock TRL with its defaults as one."""
    cells: dict[str, Runs] = {}
    for row in results["rows"]:
        cells.setdefault(row["cell"], []).append(row)
    found = []
    for cell, rows in cells.items():
        slow = next((row["seconds"] for row in rows if row["contender"] == STOCK), None)
        if slow is None:  # not measured yet
            continue
        speeds = [slow / row["seconds"] for row in rows]
        lines = [Series("speed", [row["contender"] for row in rows], speeds)]
        found.append(Chart(cell, "", "updates, times TRL GRPO with its defaults", lines, bars=True))
    return found


CHARTS: dict[str, Callable[[Results], list[Chart]]] = {
    "geometry": _geometry,
    "reasoning": _learning,
    "bandits": _bandits,
    "distill": _distill,
    "efficiency": _efficiency,
}
