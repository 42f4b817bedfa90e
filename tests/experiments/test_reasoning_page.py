"""docs/results/reasoning.md says what docs/results/reasoning.json says."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from adpo.experiments.reasoning import comparisons, summary
from adpo.experiments.reasoning.presets import PRESETS
from adpo.experiments.reasoning.tables import tables
from adpo.experiments.statistics import holm

RESULTS = Path(__file__).parents[2] / "docs" / "results"
KEPT = json.loads((RESULTS / "reasoning.json").read_text())
PAGE = (RESULTS / "reasoning.md").read_text()


def drawn(kept):
    """The tables of the command, from what is kept of its runs."""
    exams = PRESETS[kept["preset"]].exams
    rows = summary.rows_of(kept["runs"], (*exams, *kept.get("parts", ())))
    start = {**kept["start"], "exams": kept["start"]}
    return tables(
        {"exams": exams, "parts": kept.get("parts", ()), "start": start, "rows": rows, "against": kept["against"]}
    )


def cells(line):
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))


def shown():
    """The tables of the page, but for those of words and claims."""
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        columns, _, *rows = map(cells, table.splitlines())
        if columns[0] not in ("word", "asked", "the paper"):
            yield columns, rows


TABLES = [lines for kept in KEPT for lines in drawn(kept)]


def holds(lines, columns, rows):
    if not set(columns) <= set(lines.columns):
        return False
    places = [lines.columns.index(column) for column in columns]
    known = {tuple(row[place] for place in places) for row in lines.rows}
    return set(rows) <= known if "against" in columns else set(rows) == known  # no unwelcome row is left out


@pytest.mark.parametrize(("columns", "rows"), list(shown()))
def test_every_row_is_drawn_from_the_runs(columns, rows):
    assert rows
    assert "against" not in columns or {"problems", "asked"} <= set(columns)  # or a row might be that of another
    assert any(holds(lines, columns, rows) for lines in TABLES)


def test_a_row_that_was_not_measured_is_found():
    columns, rows = next(shown())
    changed = [tuple(cell.replace("67.8%", "68.8%") for cell in row) for row in rows]
    assert changed != rows
    assert not any(holds(lines, columns, changed) for lines in TABLES)
    assert not any(holds(lines, columns, rows[1:]) for lines in TABLES)


PAIRS = (
    ("ADPO", "GRPO"),
    ("ADPO", "GSPO"),
    ("ADPO", "Boltzmann, no anchor"),
    ("ADPO Plackett-Luce", "Plackett-Luce, no anchor"),
)
"""What the page compares, whatever was asked, and ours with what was changed in it."""


def test_no_unwelcome_comparison_is_left_out():
    there = {row for columns, rows in shown() if "against" in columns for row in rows}
    for lines in (lines for lines in TABLES if "against" in lines.columns):
        ours, other = (lines.columns.index(column) for column in ("method", "against"))
        for row in lines.rows:
            if (row[ours], row[other]) in PAIRS or row[other].startswith(f"{row[ours]},"):
                assert row in there


def test_every_difference_in_the_text_was_measured():
    """A figure and its interval, of ours against the other or, without their signs, of the other against ours."""
    number = r"([+−-]?\d+\.\d)"
    prose = "\n".join(line for line in PAGE.splitlines() if not line.startswith("|"))
    said = re.findall(rf"{number}[^\[\]\d]*\[{number}, {number}\]", prose)
    assert len(said) == len(re.findall(rf"\[{number}, {number}\]", prose)) > 10
    measured = {
        tuple(round(100 * sign * row[name], 1) for name in names)
        for kept in KEPT
        for row in kept["against"]
        for sign, names in ((1, ("mean", "low", "high")), (-1, ("mean", "high", "low")))
    }
    for triple in said:
        assert tuple(float(figure.replace("−", "-")) for figure in triple) in measured, triple


def measured_shares():
    found = {cell for lines in TABLES for row in lines.rows for cell in row}
    return {share for cell in found for share in re.findall(r"(\d+\.\d)%", cell)}


@pytest.mark.parametrize("where", ["the paper's claims", "the README"])
def test_shares_beside_the_tables_are_in_them(where):
    readme = (RESULTS.parents[1] / "README.md").read_text()
    said = {
        "the paper's claims": PAGE[PAGE.index("## The paper's claims") : PAGE.index("## Where the numbers")],
        "the README": "\n".join(line for line in readme.splitlines() if line.startswith("| verifiable rewards")),
    }[where]
    shares = set(re.findall(r"(\d+\.\d) %", said)) - {"0.1"}  # "under 0.1 %"
    known = measured_shares() | {f"{100 * share:.1f}" for share in numbers("agreed, wrong", "right")}
    assert len(shares) > 5
    assert shares <= known, shares - known


def numbers(*columns):
    """What the tables give as a number from 0 to 1: groups that agree on a wrong answer, right completions."""
    for lines in TABLES:
        for place in (lines.columns.index(column) for column in columns if column in lines.columns):
            yield from (float(row[place]) for row in lines.rows if row[place])


def right(preset, methods):
    """Share of right completions in the last rollouts, at each method's best, as the command prints it."""
    (kept,) = [each for each in KEPT if each["preset"] == preset]
    (lines,) = [each for each in drawn(kept) if each.title.startswith("each method at its own best")]
    place = lines.columns.index("right")
    rows = {row[0].split(",")[0]: row[place] for row in lines.rows if "no anchor" not in row[0]}
    return [f"{100 * float(rows[method]):.1f} %" for method in methods]


@pytest.mark.parametrize("preset", ["embedded", "sums"])
def test_the_lead_is_said_to_be_one_of_greedy_accuracy(preset):
    """What training optimises is beside it, of the same methods in the same order."""
    methods = ("ADPO", "GRPO", "GSPO")
    ours, grpo, gspo = right(preset, methods)
    row = {"embedded": "10 seeds: **greedy** accuracy on the test set", "sums": "as b+a, 10 seeds: **greedy**"}[
        preset
    ]
    readme = (RESULTS.parents[1] / "README.md").read_text()
    (line,) = [line for line in readme.splitlines() if row in line]
    assert f"{ours}, {grpo} and {gspo} are right in the last rollouts" in line
    together = " ".join(PAGE.split())
    assert f"{ours} ADPO, {grpo} GRPO, {gspo} GSPO" in together or f"{ours}, {grpo} and {gspo}" in together


def test_what_a_correction_over_all_questions_would_leave():
    """Of those asked beside the first: the page says which."""
    beside = [line for line in KEPT[0]["against"] if line["what"] and line["ours"] == "ADPO"]
    beside = [line for line in beside if line["other"] in ("GRPO", "GSPO")]
    assert f"all {len(beside)} comparisons of ADPO with GRPO and GSPO" in PAGE.replace("\n", " ")
    left = {}
    for line, p in zip(beside, holm([line["p"] for line in beside]), strict=True):
        if p < comparisons.DOUBT:
            left.setdefault((line["other"], line["verdict"]), []).append(line["what"])
    taken_back = [f"steps taken back, {times} times the rate" for times in (1, 10, 30, 100)]
    assert left == {
        ("GRPO", "ahead"): taken_back[1:],
        ("GSPO", "ahead"): ["1 step a rollout", "hackable reward", "noisy reward", *taken_back, "format reward"],
        ("GRPO", "behind"): ["rollouts of 4 batches", "rollouts of 12 batches"],
        ("GSPO", "behind"): ["rollouts of 12 batches"],
    }
    beside = [line for line in KEPT[1]["against"] if line["what"] and line["ours"] == "ADPO"]
    beside = [line for line in beside if line["other"] in ("GRPO", "GSPO")]
    assert len(beside) == 10
    beyond = [
        (line["what"], line["other"])
        for line, p in zip(beside, holm([line["p"] for line in beside]), strict=True)
        if p < comparisons.DOUBT
    ]
    assert beyond == [("hackable reward", "GRPO")]


def test_where_no_mirror_image_is_trained_on():
    """What the page says of it that no table has."""
    of_six = {
        (line["ours"], line["other"])
        for line in KEPT[2]["against"]
        if (line["exam"], line["what"], line["verdict"]) == ("sums", "", "ahead")
    }
    theirs = ("GRPO", "GSPO", "Dr. GRPO")
    assert of_six == {("ADPO", "Dr. GRPO"), *(("ADPO Plackett-Luce", other) for other in theirs)}
    alone = [line["p"] for line in KEPT[2]["against"] if (line["exam"], line["ours"]) == ("sums", "ADPO")]
    assert [round(p, 2) for p in alone[:2]] == [0.02, 0.02]
    assert KEPT[2]["start_digest"] in PAGE


SEEDS = {"embedded": 10, "gpu": 5, "sums": 10}
"""Of the headline, as the page says."""


def test_seeds_and_collapses_are_those_of_the_runs():
    for kept in KEPT:
        exam = PRESETS[kept["preset"]].exams[0]
        for run in kept["runs"]:
            if exam in run:
                below = run[exam]["greedy"] < kept["start"][exam]["greedy"]
                assert run["collapsed"] >= below, run
                if run["collapsed"] and not below:  # fell to less than half of its peak, which is not kept
                    assert run["watched"] < 0.5, run
        reported = [run for run in kept["runs"] if run["study"] == "seeds"]
        counts = Counter(run["method"] for run in reported)
        assert counts == dict.fromkeys(kept["best"], SEEDS[kept["preset"]])
        assert all(run["rate"] == kept["best"][run["method"]]["rate"] for run in reported)


def test_settings_follow_from_the_short_runs():
    for kept in KEPT:
        for method, best in kept["best"].items():
            short = [run for run in kept["runs"] if run["study"] == "rates" and run["method"] == method]
            first = max(short, key=lambda run: run["chosen_by"])
            settings = "".join(f", {name} {best[name]}" for name in sorted(best) if name != "rate")
            assert (first["rate"], first["changes"]) == (best["rate"], settings)


def test_what_is_said_of_the_anchor_and_of_what_is_left():
    words = KEPT[1]
    short = [run for run in words["runs"] if run["study"] == "rates" and run["method"].endswith("no anchor")]
    assert all(run["watched"] < words["start"]["watched"] for run in short)
    assert len(short) == 14
    assert "All fourteen short runs without an anchor" in PAGE
    full = [run for run in words["runs"] if run["study"] == "seeds" and run["method"].endswith("no anchor")]
    assert all(run["watched"] < words["start"]["watched"] for run in full)
    assert all(run["svamp"]["greedy"] < words["start"]["svamp"]["greedy"] for run in full)
    assert len(full) == 10
    assert "All ten runs without an anchor collapsed" in PAGE
    readme = (RESULTS.parents[1] / "README.md").read_text()
    assert "without the anchor 3.6 %, and every run ends below the start" in readme
    assert f"({len(words['not_yet'])} trials of the command are left" in PAGE
    assert KEPT[0]["not_yet"] == KEPT[2]["not_yet"] == []  # of the embedded model everything was run
