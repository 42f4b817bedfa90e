"""Means with confidence intervals over seeds, paired comparisons, Holm's correction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from scipy import stats

from adpo.experiments.rows import Rows, column, grouped


class Interval(NamedTuple):
    """A mean and the half-width of its 95 % confidence interval (Student's t over seeds)."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def __str__(self) -> str:
        return format(self, ".3f")

    def __format__(self, form: str) -> str:
        """Mean and half-width in the same form; only the mean has a sign.

        >>> f"{Interval(0.125, 0.02):+.1%}"
        '+12.5% ± 2.0%'
        """
        form = form or ".3f"
        return f"{self.mean:{form}} ± {self.half:{form.removeprefix('+')}}"


def interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Over independent seeds; at least two are needed for a width."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Interval(mean, math.nan)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    quantile = float(stats.t.ppf(0.5 + level / 2, count - 1))
    return Interval(mean, quantile * math.sqrt(variance / count))


def means(rows: Rows, by: Sequence[str], measures: Sequence[str]) -> Rows:
    """One row for each group: the fields ``by``, the interval of each measure, and the ``runs`` themselves.

    >>> rows = [{"method": "ADPO", "seed": 0, "reward": 1.0}, {"method": "ADPO", "seed": 1, "reward": 1.0}]
    >>> means(rows, ["method"], ["reward"])[0]["reward"]
    Interval(mean=1.0, half=0.0)
    """
    return [
        {
            **{field: runs[0][field] for field in by},
            **{measure: interval(column(runs, measure)) for measure in measures},
            "runs": runs,
        }
        for runs in grouped(rows, *by).values()
    ]


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The mean difference, seed by seed."""
    return interval([a - b for a, b in zip(ours, theirs, strict=True)])


def paired_p(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Two-sided p-value of the paired t-test; 1 where all differences are zero."""
    if all(a == b for a, b in zip(ours, theirs, strict=True)):
        return 1.0
    return float(stats.ttest_rel(ours, theirs).pvalue)


def verdict(low: float, high: float) -> str:
    """What the interval of a difference says of the one that is in front."""
    return "ahead" if low > 0 else "behind" if high < 0 else "level"


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values: those of a family are significant together at the usual level."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted
