"""All of it: seconds, the same on every machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adpo.experiments.geometry import comparison, shapes
from adpo.experiments.geometry.figures import draw
from adpo.experiments.tables import Lines, markdown
from adpo.system.files import write_json
from adpo.system.provenance import provenance


def reproduce(out: Path) -> dict[str, Any]:
    """Writes ``results.json``, ``tables.md`` and the figures."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; expected a folder")
    out.mkdir(parents=True, exist_ok=True)
    results = {
        "experiment": "geometry",
        "provenance": provenance(),
        "paths": shapes.paths(),
        "sft_landscape": shapes.sft_landscape(),
        "bowls": [shapes.bowl(tau) for tau in shapes.TAUS],
        "curvature": shapes.curvature(),
        "trust_region": shapes.trust_region(),
        "forces": shapes.forces(),
        "two_ways": shapes.two_ways(),
        "taxonomy": [[cell._asdict() for cell in row] for row in comparison.taxonomy()],
        "geometry": [[cell._asdict() for cell in row] for row in comparison.GEOMETRY],
    }
    write_json(out / "results.json", results)
    (out / "tables.md").write_text(markdown([_curvature(results), *comparison.linked()]))
    draw(results, out)
    return results


def tables(results: dict[str, Any]) -> list[Lines]:
    """For the terminal."""
    return [_curvature(results), *comparison.tables()]


def _curvature(results: dict[str, Any]) -> Lines:
    rows = [
        (f"{row['tau']:g}", *(f"{value:.4g}" for value in (*row["measured"], *row["expected"])))
        for row in results["curvature"]
    ]
    columns = ("tau", "Hessian, 1st", "2nd", "(Diag(q) − qqᵀ)/tau², 1st", "2nd")
    return Lines("curvature at the minimum, in log-probabilities", columns, rows)
