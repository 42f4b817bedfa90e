"""The results as Markdown: what `docs/results/bandits.md` quotes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from adpo.experiments.bandits.jobs import SENSITIVITY, WIDTHS
from adpo.experiments.bandits.studies import COLLAPSED
from adpo.experiments.bandits.summary import METRICS, Records, final_values, methods_in, scenarios_in
from adpo.experiments.statistics import Interval, interval


def markdown(results: dict[str, Any]) -> str:
    """All tables of the preset that was run."""
    parts = [_winmass(results["summary"], metric) for metric in METRICS]
    parts += [_winners(results["summary"]), _over_dpo(results["summary"]["sampled"])]
    parts += [_verdicts(results["against_baselines"], metric) for metric in ("sampled", "greedy")]
    if "sensitivity" in results["cells"]:
        cells: dict[str, Records] = results["cells"]
        parts += [
            _capacity(cells),
            _sensitivity(cells["sensitivity"]),
            _popular(cells),
            _divergences(joined(cells, "divergences-")),
            _variance(cells),
        ]
    return "\n\n".join(parts) + "\n"


def named(cells: dict[str, Records], prefix: str) -> dict[str, Records]:
    """The cells whose name begins with ``prefix``, by the rest of their name."""
    return {name.removeprefix(prefix): records for name, records in cells.items() if name.startswith(prefix)}


def joined(cells: dict[str, Records], prefix: str) -> Records:
    return [record for records in named(cells, prefix).values() for record in records]


def _winmass(summary: dict[str, Any], metric: str) -> str:
    rows = summary[metric]
    columns = list(next(iter(rows.values())))
    body = [[method, *(_shown(Interval(*cells[c])) for c in columns)] for method, cells in rows.items()]
    return _table(f"WinMass, {metric}", ["method", *columns], body)


PAPER = ("dpo-hard", "dpo-soft", "adpo-pairwise", "adpo-raw", "adpo-kde", "ppo-clip", "kl-penalty", "trpo")


def _winners(summary: dict[str, Any]) -> str:
    """Who leads, among all methods and among those of the paper's figure."""
    body = []
    for metric in ("sampled", "greedy"):
        rows = summary[metric]
        scenarios = [name for name in next(iter(rows.values())) if name != "all"]
        for label, among in (("all methods", tuple(rows)), ("the paper's methods", PAPER)):
            leaders = Counter(_leader(rows, among, scenario) for scenario in scenarios)
            body.append([metric, label, ", ".join(f"{name} {count}" for name, count in leaders.most_common())])
    return _table("Scenarios in which a method has the highest mean", ["WinMass", "among", "leads"], body)


def _leader(rows: dict[str, Any], among: Sequence[str], scenario: str) -> str:
    return max(among, key=lambda method: float(rows[method][scenario][0]))


def _over_dpo(rows: dict[str, Any]) -> str:
    """Sampled WinMass over that of the better DPO, in per cent, mean over the levels of each corruption."""
    scenarios = [name for name in next(iter(rows.values())) if name != "all"]
    kinds = list(dict.fromkeys(name.split("-")[0] for name in scenarios))

    def gain(method: str, scenario: str) -> float:
        dpo = max(float(rows[name][scenario][0]) for name in ("dpo-hard", "dpo-soft"))
        return 100 * (float(rows[method][scenario][0]) / dpo - 1)

    body = []
    for method in ("trpo", "kl-penalty", "ppo-clip", "adpo-raw", "adpo-natural"):
        gains = {scenario: gain(method, scenario) for scenario in scenarios}
        means = []
        for kind in kinds:
            own = [value for scenario, value in gains.items() if scenario.startswith(f"{kind}-")]
            means.append(f"{sum(own) / len(own):+.1f}")
        body.append([method, *means, f"{min(gains.values()):+.1f} to {max(gains.values()):+.1f}"])
    return _table("Over the better DPO, per cent of sampled WinMass", ["method", *kinds, "range"], body)


def _verdicts(verdicts: dict[str, Any], metric: str) -> str:
    natural = verdicts[metric]["adpo-natural"]
    body = [
        [
            scenario,
            f"{cell['difference']:+.3f} ± {cell['half']:.3f}",
            f"{cell['difference'] - cell['half']:+.3f}",
            cell["baseline"],
            f"{cell['holm_p']:.1g}",
        ]
        for scenario, cell in natural.items()
    ]
    header = ["scenario", "difference", "lower end", "closest baseline", "p (Holm)"]
    return _table(f"adpo-natural less the closest baseline, {metric}", header, body)


def _capacity(cells: dict[str, Records]) -> str:
    at = {hidden: joined(cells, f"capacity-{hidden}-") for hidden in WIDTHS}
    scenarios = scenarios_in(at[WIDTHS[0]])
    header = ["method", *(f"{scenario}, {hidden}" for scenario in scenarios for hidden in WIDTHS)]
    body = [
        [
            method,
            *(
                _shown(interval(final_values(at[hidden], scenario, method, "sampled")))
                for scenario in scenarios
                for hidden in WIDTHS
            ),
        ]
        for method in methods_in(at[WIDTHS[0]])
    ]
    return _table("Capacity: WinMass, sampled, by hidden units", header, body)


def _sensitivity(records: Records) -> str:
    def cell(tau: float, beta: float) -> str:
        chosen = [r["curve"][-1] for r in records if r["settings"] == {"tau": tau, "beta": beta}]
        return " / ".join(f"{sum(end[m] for end in chosen) / len(chosen):.3f}" for m in ("sampled", "greedy"))

    body = [[f"{tau:g}", *(cell(tau, beta) for beta in SENSITIVITY["beta"])] for tau in SENSITIVITY["tau"]]
    header = ["tau", *(f"beta {beta:g}" for beta in SENSITIVITY["beta"])]
    return _table("Sensitivity: adpo-kde, gaussian-medium, WinMass sampled / greedy", header, body)


def _popular(cells: dict[str, Records]) -> str:
    body = []
    for name, records in named(cells, "popular-").items():
        for method in methods_in(records):
            mine = [record for record in records if record["method"] == method]
            measured = [interval([r[key] for r in mine]) for key in ("wrong", "smeared", "best")]
            steps = interval([r["steps"] for r in mine])
            body.append([name, method, *map(_shown, measured), f"{steps.mean:.0f} ± {steps.half:.0f}"])
    header = ["reference", "method", "mass on wrong", "smeared", "mass on best", "steps to suppress"]
    return _table("Popular but wrong", header, body)


def _divergences(records: Records) -> str:
    body = []
    for scenario in scenarios_in(records):
        for method in methods_in(records):
            if method != "reference":
                entropies = final_values(records, scenario, method, "entropy")
                shown = [
                    *(_shown(interval(final_values(records, scenario, method, m))) for m in ("sampled", "greedy")),
                    _shown(interval(entropies)),
                    f"{sum(value < COLLAPSED for value in entropies)} of {len(entropies)}",
                ]
                body.append([scenario, method, *shown])
    return _table("Divergences", ["scenario", "divergence", "sampled", "greedy", "entropy", "collapsed"], body)


def _variance(cells: dict[str, Records]) -> str:
    body = []
    for moment, records in named(cells, "variance-").items():
        for name in dict.fromkeys(record["estimator"] for record in records):
            mine = [record for record in records if record["estimator"] == name]
            found = [interval([record[key] for record in mine]) for key in ("trace", "relative")]
            body.append([moment, name, *(f"{f.mean:.3g} ± {f.half:.2g}" for f in found)])
    header = ["moment", "estimator", "trace of the covariance", "over squared mean gradient"]
    return _table("Gradient variance over resampled groups", header, body)


def _shown(found: Interval) -> str:
    return f"{found.mean:.3f} ± {found.half:.3f}"


def _table(title: str, header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return f"### {title}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)
