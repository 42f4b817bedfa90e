"""The results as tables: the paper's layout, our numbers beside the paper's."""

from __future__ import annotations

from typing import Any

from adpo.experiments.distill.summary import PAPER, WAYS
from adpo.experiments.rows import Row, where
from adpo.experiments.tables import Columns, Lines, table


def tables(results: dict[str, Any]) -> list[Lines]:
    made = [_main(results, name) for name in results["own"]]
    if results["claims"]:
        made.append(_claims(results))
    return [*made, _against_kd(results), *(_study(results, name) for name in results["own"])]


def _main(results: dict[str, Any], name: str) -> Lines:
    """As the paper has it; returns with the policy's noise and without."""
    card, paper = results["teachers"][name], PAPER.get(name, {})
    columns: Columns = [
        ("method", "{method}"),
        ("return, noise", "{stochastic:.0f} ± {stochastic_ci:.0f}"),
        ("return", "{deterministic:.0f} ± {deterministic_ci:.0f}"),
        ("of teacher", "{stochastic_share:.1%}"),
        ("NDCG", "{ndcg:.3f}"),
        ("KL(T‖S)", lambda row: _readable(row["kl"])),
        ("KL(S‖T)", lambda row: _readable(row["reverse_kl"])),
        ("std", lambda row: f"{_readable(row['std'], 2)} ({row['teacher_std']:.2f})"),
        ("paper: return", lambda row: _of_paper(paper, row, "{0:.0f} ± {1:.0f}")),
        ("NDCG", lambda row: _of_paper(paper, row, "{2:.3f}")),
        ("KL", lambda row: _of_paper(paper, row, "{3:.2f}")),
    ]
    steps = f", {card['steps']:,} steps" if "steps" in card else ""
    title = f"{name} ({card.get('algorithm', 'teacher')}{steps})"
    found = table(title, columns, where(results["summary"], environment=name, study="main"))
    earned = [f"{sum(own) / len(own):.0f}" for own in (results["own"][name][way] for way in reversed(WAYS))]
    teacher = ("teacher", *earned, *[""] * 5, f"{paper['teacher']:.0f}" if paper else "", "", "")
    return found._replace(rows=[teacher, *found.rows])


def _of_paper(paper: dict[str, Any], row: Row, form: str) -> str:
    return form.format(*paper[row["method"]]) if row["method"] in paper else ""


def _readable(value: float, digits: int = 3) -> str:
    """What has run away is told by its magnitude; what has shrunk, too.

    >>> _readable(0.0151), _readable(6.97e21), _readable(2e-6)
    ('0.015', '7e+21', '2e-06')
    """
    plain = value == 0 or 0.5 * 10**-digits <= value < 1e5
    return f"{value:.{digits}f}" if plain else f"{value:.1g}"


def _claims(results: dict[str, Any]) -> Lines:
    columns: Columns = [
        ("environment", "{environment}"),
        ("method", "{method}"),
        ("claim", "{claim}"),
        ("found", "{found}"),
        ("", lambda row: "holds" if row["holds"] else "does not"),
    ]
    return table("What must hold", columns, results["claims"])


def _against_kd(results: dict[str, Any]) -> Lines:
    columns: Columns = [
        ("environment", "{environment}"),
        ("study", lambda row: "main" if row["study"] == "main" else f"{row['study']} {row['value']:g}"),
        ("method", "{method}"),
        ("return, of the teacher's", "{return:+.1%} ± {return_ci:.1%}"),
        ("", "{return_verdict}"),
        ("KL less", "{kl:+.3g} ± {kl_ci:.2g}"),
        ("", "{kl_verdict}"),
    ]
    return table("Against KD over candidates, seed by seed, 95 %", columns, results["against_kd"])


def _study(results: dict[str, Any], name: str) -> Lines:
    columns: Columns = [
        ("study", "{study} {value:g}"),
        ("method", "{method}"),
        ("return with noise, of the teacher's", "{stochastic_share:.1%} ± {stochastic_share_ci:.1%}"),
        ("without", "{deterministic_share:.1%} ± {deterministic_share_ci:.1%}"),
        ("KL(T‖S)", lambda row: _readable(row["kl"])),
        ("NDCG", "{ndcg:.3f}"),
    ]
    rows = [row for row in where(results["summary"], environment=name) if row["study"] != "main"]
    return table(f"{name}: studies", columns, rows)


def shown(results: dict[str, Any]) -> list[Lines]:
    """On the terminal: without the long lists, which are in ``tables.md``."""
    return tables(results)[: len(results["own"]) + bool(results["claims"])]
