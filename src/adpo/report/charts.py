"""What is drawn of an experiment: lines and bars that can be hovered over, and switched off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adpo.experiments.bandits.summary import joined
from adpo.experiments.distill.protocol import STUDIES
from adpo.experiments.rows import column, grouped, where
from adpo.experiments.statistics import means
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
    runs = [{**run, **run["trial"]} for run in results["runs"] if "known" not in run]
    looks: list[Series] = []
    by_rollout: dict[str, list[Series]] = {"right": [], "length": [], "distinct": []}
    for method, mine in grouped(where(runs, study="seeds"), "method").items():
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
    found.append(
        Chart("WinMass on the way, all scenarios", "iterations", reached, _curves(joined(cells, "main-")))
    )
    wide = [
        {"method": run["method"], "width": int(run["cell"].split("-")[0]), **run["curve"][-1]}
        for run in joined(cells, "capacity-")
    ]
    lines = _ends(wide, "method", "width", "sampled")
    found.append(Chart("heavy noise: the width of the policy", "hidden units", reached, lines, log_x=True))
    tried = [
        {"line": f"beta {run['settings']['beta']:g}", **run["settings"], **run["curve"][-1]}
        for run in cells.get("sensitivity", [])
        if run["settings"]  # not the reference
    ]
    tried.sort(key=lambda row: float(row["beta"]))
    for metric in ("sampled", "greedy"):
        lines = _ends(tried, "line", "tau", metric)
        found.append(Chart(f"kernel estimate: tau and beta, {metric}", "tau", "WinMass", lines, log_x=True))
    return found


def _by_scenario(summary: dict[str, dict[str, Sequence[float]]]) -> list[Series]:
    lines = []
    for method, cells in summary.items():
        names = [name for name in cells if name != "all"]
        means, halves = ([cells[name][part] for name in names] for part in (0, 1))
        lines.append(Series(method, names, means, half=halves))
    return lines


def _curves(runs: Runs) -> list[Series]:
    points = [{"method": run["method"], **point} for run in runs for point in run["curve"]]
    lines = []
    for method, mine in grouped(points, "method").items():
        values = {at: column(there, "sampled") for at, there in grouped(mine, "iteration").items()}
        lines.append(Series(method, list(values), [sum(each) / len(each) for each in values.values()]))
    return [line for line in lines if len(line.x) > 1]


def _ends(rows: Runs, by: str, across: str, metric: str) -> list[Series]:
    """A line for each value of ``by``: means and intervals of the runs with the same value ``across``."""
    lines = []
    for name, mine in grouped(sorted(rows, key=lambda row: float(row[across])), by).items():
        points = means(mine, (across,), (metric,))
        found = column(points, metric)
        lines.append(Series(name, column(points, across), [f.mean for f in found], half=[f.half for f in found]))
    return lines


WIDE = 4
"""Beyond it an axis is a logarithm."""
DISTANCES = {"stochastic_share": "return with noise, of the teacher's", "kl": "KL(teacher, student)"}


def _distill(results: Results) -> list[Chart]:
    """Every method in the main study, then return and distance against what a study changes."""
    rows = results["summary"]
    main = where(rows, study="main")
    found = []
    for measure, title in DISTANCES.items():
        lines = _lines(main, "environment", "method", measure)
        found.append(Chart(f"all methods: {title}", "", title, lines, log_y=measure == "kl", bars=True))
    for study, label in STUDIES.items():
        of_study = sorted(where(rows, study=study), key=lambda row: float(row["value"]))
        for world, here in grouped(of_study, "environment").items():
            for measure, title in DISTANCES.items():
                logs = (here[-1]["value"] > WIDE, measure == "kl")
                lines = _lines(here, "method", "value", measure)
                found.append(Chart(f"{world}: {title}", label, title, lines, *logs))
    return found


def _lines(rows: Runs, by: str, across: str, measure: str) -> list[Series]:
    """A line for each value of ``by``."""
    return [
        Series(name, column(mine, across), column(mine, measure), half=column(mine, f"{measure}_ci"))
        for name, mine in grouped(rows, by).items()
    ]


STOCK = "TRL GRPO, defaults"


def _efficiency(results: Results) -> list[Chart]:
    """How fast the contenders are in each cell, stock TRL with its defaults as one."""
    found = []
    for cell, rows in grouped(results["rows"], "cell").items():
        slow = next((row["seconds"] for row in rows if row["contender"] == STOCK), None)
        if slow is None:  # not measured yet
            continue
        speeds = [slow / row["seconds"] for row in rows]
        lines = [Series("speed", column(rows, "contender"), speeds)]
        found.append(Chart(cell, "", "updates, times TRL GRPO with its defaults", lines, bars=True))
    return found


CHARTS: dict[str, Callable[[Results], list[Chart]]] = {
    "geometry": _geometry,
    "reasoning": _learning,
    "bandits": _bandits,
    "distill": _distill,
    "efficiency": _efficiency,
}
