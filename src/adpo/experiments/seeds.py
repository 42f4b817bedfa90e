"""Seeds of reported runs."""

from __future__ import annotations

LAST_SEED = 999
"""Seeds of reported runs end here; those after it chose the settings."""


def seeds_from(first: int, count: int) -> range:
    """The seeds of reported runs; none of them may have chosen the settings."""
    if first + count > LAST_SEED + 1:
        raise ValueError(
            f"--first-seed {first} with {count} seeds goes beyond {LAST_SEED}: settings were chosen by later seeds"
        )
    return range(first, first + count)
