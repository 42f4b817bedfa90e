"""The results as tables: on the terminal, and as `docs/results/bandits.md` quotes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

from adpo.experiments.bandits.jobs import SENSITIVITY, WIDTHS
from adpo.experiments.bandits.protocol import SCENARIOS
from adpo.experiments.bandits.summary import METRICS, Records, by_width, divergences, joined, sensitivity
from adpo.experiments.rows import column, distinct, grouped
from adpo.experiments.statistics import Interval, interval, means
from adpo.experiments.tables import Columns, Lines, table

MARGIN = 0.02
"""How far below the closest baseline an interval may reach and still count as level with it."""
PAPER = ("dpo-hard", "dpo-soft", "adpo-pairwise", "adpo-raw", "adpo-kde", "ppo-clip", "kl-penalty", "trpo")
SHORT = {scenario.name: f"{scenario.corruption[:5]} {scenario.level[:1].upper()}" for scenario in SCENARIOS}


def tables(results: dict[str, Any]) -> list[Lines]:
    """All tables of the preset that was run."""
    summary, cells = results["summary"], results["cells"]
    made = [_winmass(summary[metric], metric) for metric in METRICS]
    made += [_winners(summary), _over_dpo(summary["sampled"])]
    made += [_verdicts(results["against_baselines"], metric) for metric in ("sampled", "greedy")]
    if "sensitivity" in cells:
        made += [_capacity(cells), _sensitivity(cells["sensitivity"]), _popular(cells)]
        made += [_divergences(cells), _variance(cells)]
    return made


def overview(rows: dict[str, Any], metric: str) -> Lines:
    """On the terminal: methods by scenarios, means alone; the best of each column in bold."""
    names = [*_scenarios(rows), "all"]
    forms = {(_leader(rows, tuple(rows), name), name): "[bold]{:.3f}[/bold]" for name in names}
    lines = [
        [method, *(forms.get((method, name), "{:.3f}").format(cells[name][0]) for name in names)]
        for method, cells in rows.items()
    ]
    headings = [SHORT.get(name, name) for name in names[:-1]]
    return Lines(f"WinMass, {metric} (mean over seeds)", ["method", *headings, "mean"], lines)


def verdicts(comparisons: dict[str, Any], metric: str) -> Lines:
    """On the terminal: in how many scenarios each of our methods is better than, or level with, every baseline."""
    rows = []
    for ours, scenarios in comparisons.items():
        lows = {scenario: cell["difference"] - cell["half"] for scenario, cell in scenarios.items()}
        worst = min(lows, key=lambda scenario: lows[scenario])
        above = [f"{sum(low > bound for low in lows.values())} of {len(lows)}" for bound in (0, -MARGIN)]
        rows.append([ours, *above, f"{lows[worst]:+.3f}", worst, scenarios[worst]["baseline"]])
    title = f"ADPO less the closest baseline, {metric}: 95 % paired intervals"
    return Lines(title, ["method", "above 0", f"above -{MARGIN}", "lowest", "in", "against"], rows)


def _scenarios(rows: dict[str, Any]) -> list[str]:
    return [name for name in next(iter(rows.values())) if name != "all"]


def _winmass(rows: dict[str, Any], metric: str) -> Lines:
    columns = list(next(iter(rows.values())))
    lines = [[method, *(str(Interval(*cells[name])) for name in columns)] for method, cells in rows.items()]
    return Lines(f"WinMass, {metric}", ["method", *columns], lines)


def _winners(summary: dict[str, Any]) -> Lines:
    """Who leads, among all methods and among those of the paper's figure."""
    lines = []
    for metric in ("sampled", "greedy"):
        rows = summary[metric]
        for label, among in (("all methods", tuple(rows)), ("the paper's methods", PAPER)):
            leaders = Counter(_leader(rows, among, scenario) for scenario in _scenarios(rows))
            lines.append([metric, label, ", ".join(f"{name} {count}" for name, count in leaders.most_common())])
    return Lines("Scenarios in which a method has the highest mean", ["WinMass", "among", "leads"], lines)


def _leader(rows: dict[str, Any], among: Sequence[str], scenario: str) -> str:
    return max(among, key=lambda method: float(rows[method][scenario][0]))


def _over_dpo(rows: dict[str, Any]) -> Lines:
    """Sampled WinMass over that of the better DPO, in per cent, mean over the levels of each corruption."""
    kinds: dict[str, list[str]] = {}
    for scenario in _scenarios(rows):
        kinds.setdefault(scenario.split("-")[0], []).append(scenario)
    lines = []
    for method in ("trpo", "kl-penalty", "ppo-clip", "adpo-raw", "adpo-natural"):
        gains = {kind: [_gain(rows, method, scenario) for scenario in kinds[kind]] for kind in kinds}
        every = [gain for of_kind in gains.values() for gain in of_kind]
        averages = [f"{sum(of_kind) / len(of_kind):+.1f}" for of_kind in gains.values()]
        lines.append([method, *averages, f"{min(every):+.1f} to {max(every):+.1f}"])
    return Lines("Over the better DPO, per cent of sampled WinMass", ["method", *kinds, "range"], lines)


def _gain(rows: dict[str, Any], method: str, scenario: str) -> float:
    dpo = max(float(rows[name][scenario][0]) for name in ("dpo-hard", "dpo-soft"))
    return 100 * (float(rows[method][scenario][0]) / dpo - 1)


def _verdicts(comparisons: dict[str, Any], metric: str) -> Lines:
    columns: Columns = [
        ("scenario", "{scenario}"),
        ("difference", "{difference:+.3f} ± {half:.3f}"),
        ("lower end", lambda cell: f"{cell['difference'] - cell['half']:+.3f}"),
        ("closest baseline", "{baseline}"),
        ("p (Holm)", "{holm_p:.1g}"),
    ]
    natural = comparisons[metric]["adpo-natural"]
    rows = [{"scenario": scenario, **cell} for scenario, cell in natural.items()]
    return table(f"adpo-natural less the closest baseline, {metric}", columns, rows)


def _capacity(cells: dict[str, Records]) -> Lines:
    rows = by_width(cells)
    places = list(product(distinct(rows, "scenario"), WIDTHS))
    runs = grouped(rows, "method", "scenario", "hidden")
    lines = [
        [method, *(str(interval(column(runs[method, *place], "sampled"))) for place in places)]
        for method in distinct(rows, "method")
    ]
    header = ["method", *(f"{scenario}, {hidden}" for scenario, hidden in places)]
    return Lines("Capacity: WinMass, sampled, by hidden units", header, lines)


def _sensitivity(records: Records) -> Lines:
    grids = [sensitivity(records, metric) for metric in ("sampled", "greedy")]
    lines = [
        [f"{tau:g}", *(" / ".join(f"{value:.3f}" for value in both) for both in zip(*rows, strict=True))]
        for tau, *rows in zip(SENSITIVITY["tau"], *grids, strict=True)
    ]
    header = ["tau", *(f"beta {beta:g}" for beta in SENSITIVITY["beta"])]
    return Lines("Sensitivity: adpo-kde, gaussian-medium, WinMass sampled / greedy", header, lines)


def _popular(cells: dict[str, Records]) -> Lines:
    columns: Columns = [
        ("reference", "{reference}"),
        ("method", "{method}"),
        ("mass on wrong", "{wrong}"),
        ("smeared", "{smeared}"),
        ("mass on best", "{best}"),
        ("steps to suppress", "{steps:.0f}"),
    ]
    runs = joined(cells, "popular-", "reference")
    rows = means(runs, ("reference", "method"), ("wrong", "smeared", "best", "steps"))
    return table("Popular but wrong", columns, rows)


def _divergences(cells: dict[str, Records]) -> Lines:
    columns: Columns = [
        ("scenario", "{scenario}"),
        ("divergence", "{method}"),
        ("sampled", "{sampled}"),
        ("greedy", "{greedy}"),
        ("entropy", "{entropy}"),
        ("collapsed", lambda row: f"{sum(column(row['runs'], 'collapsed')):.0f} of {len(row['runs'])}"),
    ]
    return table("Divergences", columns, divergences(cells))


def _variance(cells: dict[str, Records]) -> Lines:
    columns: Columns = [
        ("moment", "{moment}"),
        ("estimator", "{estimator}"),
        ("trace of the covariance", "{trace.mean:.3g} ± {trace.half:.2g}"),
        ("over squared mean gradient", "{relative.mean:.3g} ± {relative.half:.2g}"),
    ]
    rows = means(joined(cells, "variance-", "moment"), ("moment", "estimator"), ("trace", "relative"))
    return table("Gradient variance over resampled groups", columns, rows)
