"""The methods: a trainer of the package each, and settings that are chosen for it as its learning rate is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Settings = tuple[tuple[str, Any], ...]
"""Arguments of a trainer."""


@dataclass(frozen=True)
class Method:
    """A trainer of the package, and what its arguments add to those that all share."""

    name: str
    trainer: str  # adpo, grpo, dr_grpo, gspo: as in `adpo train`
    arguments: Settings
    settings: tuple[Settings, ...]  # to choose from; rates are tried with the first


KEEP = ("truncated", "keep")
"""A completion that the limit cut is worth what it is worth, as for the others."""
TEMPERATURES = tuple((("tau", tau),) for tau in (0.3, 0.1, 1.0))
CLIPS = tuple((("epsilon", epsilon),) for epsilon in (0.2, 0.1, 0.4))
SEQUENCE_CLIPS = tuple(
    (("epsilon", low), ("epsilon_high", high)) for low, high in ((3e-4, 4e-4), (0.2, 0.2), (3e-3, 4e-3))
)
"""That of its paper, that of TRL, and one between them."""
METHODS = {
    method.name: method
    for method in (
        Method("ADPO", "adpo", (KEEP, ("target", "boltzmann")), TEMPERATURES),
        Method("GRPO", "grpo", (), CLIPS),
        Method("GSPO", "gspo", (), SEQUENCE_CLIPS),
        Method("ADPO Plackett-Luce", "adpo", (KEEP, ("target", "plackett_luce")), TEMPERATURES),
        Method("Boltzmann, no anchor", "adpo", (KEEP, ("target", "boltzmann"), ("anchor", "none")), TEMPERATURES),
        Method(
            "Plackett-Luce, no anchor",
            "adpo",
            (KEEP, ("target", "plackett_luce"), ("anchor", "none")),
            TEMPERATURES,
        ),
        Method("Dr. GRPO", "dr_grpo", (), CLIPS),
    )
}
SHORT = {
    "adpo": "ADPO",
    "adpo_pl": "ADPO Plackett-Luce",
    "boltzmann": "Boltzmann, no anchor",
    "pl": "Plackett-Luce, no anchor",
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "gspo": "GSPO",
}
"""Names for the command line."""
