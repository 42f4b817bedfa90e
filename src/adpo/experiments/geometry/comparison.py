"""The paper's tables of methods, each cell with the test that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from adpo.core import presets
from adpo.experiments.tables import Lines

PRESETS, PAPER, RANKING = (
    "tests/test_presets.py",
    "tests/laws/test_paper_laws.py",
    "tests/laws/test_ranking_laws.py",
)
BASELINES, TARGETS, ANCHORS = "tests/test_baselines.py", "tests/test_targets.py", "tests/test_anchors.py"
ALGORITHM, DIVERGENCES = "tests/test_algorithm.py", "tests/test_divergences.py"
EQUATION = f"{ALGORITHM}::test_offline_learns_with_every_anchor"


class Shown(NamedTuple):
    """What is said, and the test of it."""

    text: str
    test: str

    @property
    def link(self) -> str:
        """In Markdown."""
        file, name = self.test.split("::")
        return f"[{self.text}]({file} '{name}')"


LOSSES = {
    "sft": f"{PRESETS}::test_sft_over_the_full_support",
    "kd": f"{PRESETS}::test_kd_over_the_full_support",
    "dpo": f"{PRESETS}::test_dpo",
    "soft_dpo": f"{PRESETS}::test_soft_dpo",
    "adpo": f"{PRESETS}::test_listwise_raw_and_adpo_by_their_formula",
    "listwise_raw": f"{PRESETS}::test_listwise_raw_and_adpo_by_their_formula",
    "anchored_ranking": f"{PRESETS}::test_rankings_by_their_formula",
    "anchored_top1": f"{PRESETS}::test_rankings_by_their_formula",
    "reverse_adpo": f"{PAPER}::test_the_corrected_gradient_of_reverse_adpo",
}
"""That a preset is the loss of its name."""
QUALITIES = {
    "one_hot": f"{TARGETS}::test_one_hot",
    "teacher": f"{TARGETS}::test_teacher_plain_and_anchored",
    "bradley_terry": f"{TARGETS}::test_bradley_terry_winner_silence_and_preference",
    "boltzmann": f"{TARGETS}::test_boltzmann_raw_standardised_and_with_the_prior",
    "plackett_luce": f"{RANKING}::test_without_ties_it_is_the_likelihood_of_the_order",
    "top1": f"{TARGETS}::test_top1_shares_the_mass_among_tied_winners",
}
ANCHORED = {
    "zero": f"{ANCHORS}::test_zero_has_no_log_probabilities",
    "fixed": f"{ANCHORS}::test_fixed_is_another_module_and_never_moves",
    "any": EQUATION,
}
TAU = "tests/laws/test_objective_laws.py::test_a_temperature_per_group_equals_groups_on_their_own"
TEMPERATURES = {"dpo": f"{PRESETS}::test_dpo_defaults_to_beta_a_tenth", "soft_dpo": f"{PRESETS}::test_soft_dpo"}
DIVERGENCE = f"{DIVERGENCES}::test_kullback_leibler_both_ways"


def taxonomy() -> list[list[Shown]]:
    """A line for each preset; target, divergence and tau are read off the objective itself."""
    lines = []
    for row in presets.TAXONOMY:
        name, objective = row.preset.__name__, row.objective
        lines.append(
            [
                Shown(row.algorithm, LOSSES[name]),
                Shown(row.anchor, ANCHORED[row.anchor]),
                Shown(str(objective.target), QUALITIES[str(objective.target).split("(")[0]]),
                Shown(str(objective.divergence), DIVERGENCE),
                Shown(f"{objective.tau:g}", TEMPERATURES.get(name, TAU)),
            ]
        )
    return lines


GEOMETRY: list[list[Shown]] = [
    [
        Shown("KD", f"{PRESETS}::test_kd_over_the_full_support"),
        Shown("log-probabilities, from zero", f"{ANCHORS}::test_zero_has_no_log_probabilities"),
        Shown("the teacher", f"{DIVERGENCES}::test_every_divergence_is_zero_at_the_target_and_positive_elsewhere"),
        Shown("Fisher matrix of softmax", f"{PAPER}::test_forward_kl_is_locally_the_fisher_quadratic_form"),
        Shown("none", f"{PAPER}::test_without_an_anchor_nothing_holds_a_student_back"),
    ],
    [
        Shown("TRPO", f"{BASELINES}::test_trpo_improves_and_stays_in_its_region"),
        Shown("parameters", f"{BASELINES}::test_trpo_follows_the_natural_gradient"),
        Shown("the old policy", f"{BASELINES}::test_trpo_backs_off_and_gives_up_without_moving"),
        Shown("Fisher matrix of the parameters", f"{BASELINES}::test_trpo_follows_the_natural_gradient"),
        Shown("a bound on the KL", f"{BASELINES}::test_trpo_improves_and_stays_in_its_region"),
    ],
    [
        Shown("ADPO", f"{PRESETS}::test_listwise_raw_and_adpo_by_their_formula"),
        Shown("log-ratios to the anchor, over tau", f"{PAPER}::test_the_anchor_is_a_constant"),
        Shown("anchor + tau log q", f"{PAPER}::test_the_closed_form_optimum"),
        Shown(
            "Fisher matrix of softmax over tau²",
            f"{PAPER}::test_the_hessian_is_the_fisher_matrix_over_tau_squared",
        ),
        Shown("a force that never exceeds 1/tau", f"{PAPER}::test_one_stage_forces_are_bounded_by_one_over_tau"),
    ],
]
"""The paper's table of KD, TRPO and ADPO, corrected."""


def tables() -> list[Lines]:
    return [
        _lines("taxonomy", ("algorithm", "anchor", "target Q", "divergence D", "tau"), taxonomy()),
        _lines("geometry", ("method", "space", "centre", "metric", "trust region"), GEOMETRY),
    ]


def _lines(title: str, columns: Sequence[str], rows: Sequence[Sequence[Shown]]) -> Lines:
    return Lines(title, columns, [[cell.text for cell in row] for row in rows])


def linked() -> list[Lines]:
    """The same, each cell a link to its test."""
    found = []
    for (title, columns, _), rows in zip(tables(), (taxonomy(), GEOMETRY), strict=True):
        links = [
            [f"[{cell.text}]({cell.test.split('::')[0]} '{cell.test.split('::')[1]}')" for cell in row]
            for row in rows
        ]
        found.append(Lines(title, columns, links))
    return found
