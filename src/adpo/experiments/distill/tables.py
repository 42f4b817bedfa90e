"""The results as tables: the paper's layout, our numbers beside the paper's."""

from __future__ import annotations

from typing import Any

from adpo.experiments.distill.summary import PAPER
from adpo.experiments.tables import Lines


def tables(results: dict[str, Any]) -> list[Lines]:
    made = [_main(results, name) for name in results["own"]]
    if results["claims"]:
        made.append(_claims(results))
    return [*made, _against_kd(results), *(_study(results, name) for name in results["own"])]


COLUMNS = (
    *("method", "return, noise", "return", "of teacher", "NDCG", "KL(T‖S)", "KL(S‖T)", "std"),
    *("paper: return", "NDCG", "KL"),
)


def _main(results: dict[str, Any], name: str) -> Lines:
    """As the paper has it; returns with the policy's noise and without."""
    card = results["teachers"][name]
    own = {way: sum(values) / len(values) for way, values in results["own"][name].items()}
    paper: dict[str, Any] = PAPER.get(name, {})
    of_paper = f"{paper['teacher']:.0f}" if paper else ""
    earned = (f"{own['stochastic']:.0f}", f"{own['deterministic']:.0f}")
    rows: list[tuple[str, ...]] = [("teacher", *earned, *[""] * 5, of_paper, "", "")]
    for row in results["summary"]:
        if (row["environment"], row["study"]) != (name, "main"):
            continue
        theirs = paper.get(row["method"])
        rows.append(
            (
                row["method"],
                f"{row['stochastic']:.0f} ± {row['stochastic_ci']:.0f}",
                f"{row['deterministic']:.0f} ± {row['deterministic_ci']:.0f}",
                f"{row['stochastic_share']:.1%}",
                f"{row['ndcg']:.3f}",
                _readable(row["kl"]),
                _readable(row["reverse_kl"]),
                f"{_readable(row['std'], 2)} ({row['teacher_std']:.2f})",
                *(
                    (f"{theirs[0]:.0f} ± {theirs[1]:.0f}", f"{theirs[2]:.3f}", f"{theirs[3]:.2f}")
                    if theirs
                    else ("", "", "")
                ),
            )
        )
    steps = f", {card['steps']:,} steps" if "steps" in card else ""
    return Lines(f"{name} ({card.get('algorithm', 'teacher')}{steps})", COLUMNS, rows)


def _readable(value: float, digits: int = 3) -> str:
    """What has run away is told by its magnitude; what has shrunk, too.

    >>> _readable(0.0151), _readable(6.97e21), _readable(2e-6)
    ('0.015', '7e+21', '2e-06')
    """
    plain = value == 0 or 0.5 * 10**-digits <= value < 1e5
    return f"{value:.{digits}f}" if plain else f"{value:.1g}"


def _claims(results: dict[str, Any]) -> Lines:
    rows = [
        (
            each["environment"],
            each["method"],
            each["claim"],
            each["found"],
            "holds" if each["holds"] else "does not",
        )
        for each in results["claims"]
    ]
    return Lines("What must hold", ("environment", "method", "claim", "found", ""), rows)


def _against_kd(results: dict[str, Any]) -> Lines:
    rows = [
        (
            each["environment"],
            f"{each['study']} {each['value']:g}" if each["study"] != "main" else "main",
            each["method"],
            f"{each['return']:+.1%} ± {each['return_ci']:.1%}",
            each["return_verdict"],
            f"{each['kl']:+.3g} ± {each['kl_ci']:.2g}",
            each["kl_verdict"],
        )
        for each in results["against_kd"]
    ]
    columns = ("environment", "study", "method", "return, of the teacher's", "", "KL less", "")
    return Lines("Against KD over candidates, seed by seed, 95 %", columns, rows)


def _study(results: dict[str, Any], name: str) -> Lines:
    rows = [
        (
            f"{row['study']} {row['value']:g}",
            row["method"],
            f"{row['stochastic_share']:.1%} ± {row['stochastic_share_ci']:.1%}",
            f"{row['deterministic_share']:.1%} ± {row['deterministic_share_ci']:.1%}",
            _readable(row["kl"]),
            f"{row['ndcg']:.3f}",
        )
        for row in results["summary"]
        if row["environment"] == name and row["study"] != "main"
    ]
    columns = ("study", "method", "return with noise, of the teacher's", "without", "KL(T‖S)", "NDCG")
    return Lines(f"{name}: studies", columns, rows)


def shown(results: dict[str, Any]) -> list[Lines]:
    """On the terminal: without the long lists, which are in ``tables.md``."""
    return tables(results)[: len(results["own"]) + bool(results["claims"])]
