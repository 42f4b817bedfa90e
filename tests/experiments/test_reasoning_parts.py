"""Exam problems whose mirror image was trained on are told from the others."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("trl")

from adpo.experiments.reasoning import comparisons, parts, problems, summary
from adpo.experiments.reasoning.presets import PRESETS
from adpo.experiments.reasoning.tables import tables

PART = "arithmetic, unmirrored"
PAGE = Path(__file__).parents[2] / "docs" / "results" / "reasoning.md"


def sets(train, exam):
    rows = [[{"prompt": prompt} for prompt in prompts] for prompts in (train, exam)]
    return SimpleNamespace(train=rows[0], exams={"arithmetic": rows[1]})


def test_a_problem_says_much_of_its_mirror_image():
    trained = ("47+69=", "5*8=", "9-3=")
    assert parts.of(sets(trained, ["69+47=", "1+2=", "8*5=", "3-9=", "8+5="])) == {PART: [1, 3, 4]}
    assert parts.of(sets(trained, ["1+2=", "3-9="])) == {}  # all of them: no part
    twice = sets(trained, ["1+2=", "2+2=", "2+1=", "3-9=", "9-3="])
    assert parts.of(twice) == {"arithmetic, each pair once": [0, 1, 3, 4]}
    assert parts.of(sets(trained, ["69+47="])) == {}
    chat = [{"role": "user", "content": "What is 69+47?"}]
    assert parts.of(sets(trained, [chat])) == {}


def test_most_of_the_exam_are_mirror_images():
    """The page says how many, and that none of the problems themselves was trained on."""
    found = problems.generated(PRESETS["embedded"])
    asked = [row["prompt"] for row in found.exams["arithmetic"]]
    trained = {row["prompt"] for row in found.train}
    apart = [asked[place] for place in parts.of(found)[PART]]
    assert len(apart) == 116
    assert not trained & set(asked)
    assert all((parts.mirrored(prompt) in trained) == (prompt not in apart) for prompt in asked)


def test_of_sums_no_mirror_image_is_anywhere_else():
    found = problems.generated(PRESETS["sums"])
    places = [found.train, found.watched, found.exams["sums"]]
    prompts = [{row["prompt"] for row in rows} for rows in places]
    turned = [{parts.mirrored(prompt) for prompt in each} for each in prompts]
    for one, other in ((0, 1), (0, 2), (1, 2), (1, 0), (2, 0), (2, 1)):
        assert not prompts[one] & (prompts[other] | turned[other])
    ((name, places),) = parts.of(found).items()
    assert name == "sums, each pair once"
    assert f"{len(prompts[2])} two-digit sums of {len(places)} pairs" in PAGE.read_text()
    assert f"{len(prompts[0]):,} others for training" in PAGE.read_text()
    asked = [found.exams["sums"][place]["prompt"] for place in places]
    assert not {parts.mirrored(prompt) for prompt in asked if parts.mirrored(prompt) != prompt} & set(asked)
    assert prompts[2] <= set(asked) | {parts.mirrored(prompt) for prompt in asked}
    assert PRESETS["sums"].studies() == ("seeds", "beyond")


def run(seed, right, method="ADPO"):
    told = {"study": "seeds", "method": method, "rate": 1e-4, "seed": seed, "inner": 4, "changes": "", "more": {}}
    exams = {"arithmetic": {"greedy": right.count("1") / 4, "pass_at_8": 1.0, "right": right}}
    measures = {"seconds_per_step": 1.0, "tokens_per_step": 1.0, "logged": [], "rollouts": []}
    return {"trial": told, "stopped": None, "curve": [(1, 0.5)], "watched": "10", "exams": exams, **measures}


def test_parts_are_exams_of_their_own():
    start = {"watched": 0.5, "exams": {"arithmetic": {"greedy": 0.5, "pass_at_8": 1.0, "right": "1100"}}}
    runs = [run(1, "1011"), run(2, "1110"), run(1, "1000", "GRPO"), run(2, "1000", "GRPO")]
    parts.add(runs, start, {PART: [1, 2]})
    assert start["exams"][PART] == {"greedy": 0.5, "right": "10"}
    assert [each["exams"][PART]["greedy"] for each in runs] == [0.5, 1.0, 0.0, 0.0]
    (line,) = comparisons.against(runs, PART)
    assert (line["exam"], line["ours"], line["other"], line["mean"]) == (PART, "ADPO", "GRPO", 0.75)
    lines = summary.lines_of(runs, start, "arithmetic")
    assert [each[PART]["right"] for each in lines] == ["2:1", "2:3", "2:0", "2:0"]
    results = {"exams": ["arithmetic"], "parts": [PART], "start": start, "against": []}
    rows = summary.rows_of(lines, ["arithmetic", PART])
    (table,) = tables({**results, "rows": rows})
    place = table.columns.index(f"{PART}: greedy")
    assert [row[place][:5] for row in table.rows] == ["50.0%", "75.0%", "0.0%"]


def test_runs_that_have_not_kept_their_answers_have_no_parts():
    start = {"watched": 0.5, "exams": {"arithmetic": {"greedy": 0.5, "pass_at_8": 1.0}}}
    runs = [run(1, "1011"), run(2, "1110")]
    del runs[1]["exams"]["arithmetic"]["right"]
    kept = {"exam": "kept", "arithmetic": {"greedy": 0.75, "right": "4:b"}}
    runs[0]["known"] = kept
    parts.add(runs, start, {PART: [1, 2]})
    assert PART not in start["exams"]
    assert PART not in runs[1]["exams"]
    assert runs[0]["known"][PART] == {"greedy": 0.5, "right": "2:1"}
    assert PART not in kept  # what was read stays as it was
    del runs[0]["known"]
    (row,) = summary.rows_of(
        summary.lines_of(runs, start | {"exams": {"arithmetic": {"greedy": 0}}}, "arithmetic"), [PART]
    )
    assert f"{PART}: greedy" not in row  # the mean of one of two would be taken for that of both
