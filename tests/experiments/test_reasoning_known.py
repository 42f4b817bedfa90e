"""Runs of an earlier job: not run again, and as good as new ones in everything that was kept of them."""

import json
import random
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("trl")

from hypothesis import given
from hypothesis import strategies as st
from test_reasoning import ended, seeded, small_start, typed

from adpo import cli
from adpo.experiments import session
from adpo.experiments.reasoning import comparisons, problems, run, summary, trial
from adpo.experiments.reasoning.answers import packed, unpacked
from adpo.experiments.reasoning.methods import SHORT
from adpo.experiments.reasoning.presets import PRESETS
from adpo.experiments.reasoning.protocol import Choice
from adpo.experiments.reasoning.tables import tables
from adpo.experiments.statistics import holm, paired, paired_p
from adpo.report import experiment_page as experiments

PLAN = replace(PRESETS["smoke"], inners=(1, 4), controls=("random",), repeats=2)
START = "0123456789abcdef"
PUBLISHED = Path(__file__).parents[2] / "docs" / "results" / "reasoning.json"


@given(st.text("01", max_size=600))
def test_answers_are_packed_without_loss(right):
    assert unpacked(packed(right)) == right
    assert len(packed(right)) <= len(right) // 4 + 5


@pytest.mark.parametrize(
    "text", ["", "7", "7:", "7:96", "7:016", "0:0", "-4:f", "4:F", "4:_", "4:f\n", "99999999999:0"]
)
def test_what_is_no_packed_text_is_refused(text):
    with pytest.raises(ValueError, match="expected a number of problems"):
        unpacked(text)


def test_lines_keep_the_answers_and_tables_skip_them():
    start = {"watched": 0.3, "exams": {"arithmetic": {"greedy": 0.4}}}
    found = seeded("ADPO", 1, "0011") | {"watched": "01", "logged": []}
    found["exams"]["arithmetic"]["right_of_sampled"] = "12"
    less = seeded("ADPO", 2, "0011") | {"watched": "", "logged": []}
    del less["exams"]["arithmetic"]["right"]
    lines = summary.lines_of([found, less], start, "arithmetic")
    assert lines[0]["arithmetic"] == {"greedy": 0.5, "right": "4:3"}
    assert lines[0]["watched_right"] == "2:1"
    assert lines[1]["arithmetic"] == {"greedy": 0.5}
    assert "watched_right" not in lines[1]
    for order in (lines, lines[::-1]):
        (row,) = summary.rows_of(order, ["arithmetic"])
        assert {name for name in row if name.startswith("arithmetic")} == {"arithmetic: greedy"}


def test_what_a_run_is_chosen_by_is_kept_to_the_last_digit():
    close = [
        ended("GRPO", rate, rollouts=(right,)) | {"logged": []} for rate, right in ((1e-3, 0.4), (1e-2, 0.40001))
    ]
    lines = summary.lines_of(close, {"watched": 0.3, "exams": {"arithmetic": {"greedy": 0.4}}}, "arithmetic")
    again = [found | {"known": line} for found, line in zip(close, lines, strict=True)]
    assert summary.chosen(again) == summary.chosen(close) == {"GRPO": Choice(1e-2)}


def known(method, seed, share):
    """A run of which its accuracies alone were kept."""
    found = seeded(method, seed, "1")
    found["exams"] = {"arithmetic": {"greedy": share}}
    return found | {"known": {"watched": share}, "watched": ""}


def test_without_the_problems_methods_are_compared_over_seeds():
    ours, theirs, others = (0.7, 0.8, 0.9), (0.5, 0.55, 0.8), (0.7, 0.6, 0.9)
    runs = [known(m, n, share) for m, s in (("ADPO", ours), ("GRPO", theirs)) for n, share in enumerate(s)]
    for exam in ("arithmetic", "watched"):
        (line,) = comparisons.against(runs, exam)
        over = paired(ours, theirs)
        assert (line["mean"], line["low"], line["high"]) == (over.mean, over.low, over.high)
        assert (line["p"], line["problems"], line["seeds"]) == (paired_p(ours, theirs), False, 3)
    assert comparisons.against([known("ADPO", 1, 0.5), known("GRPO", 1, 0.4)], "arithmetic") == []
    said = {"exam": "arithmetic", "what": "", "ours": "ADPO", "other": "GRPO"}
    said |= {"seeds": 3, "mean": 0.1, "low": 0.05, "high": 0.15, "p": 0.03, "p_holm": 0.03, "verdict": "ahead"}
    runs += [known("GSPO", n, share) for n, share in enumerate(others)]
    taken, alone = comparisons.against(runs, "arithmetic", [said])
    assert {**taken, "p_holm": 0.03, "verdict": "ahead"} == said | {"problems": True}
    adjusted = holm([0.03, paired_p(ours, others)])
    assert [taken["p_holm"], alone["p_holm"]] == adjusted
    assert (taken["verdict"], alone["verdict"]) == ("level", "level")  # one of two, not the only one
    assert [line["problems"] for line in (taken, alone)] == [True, False]
    start = {"exams": {"arithmetic": {"pass_at_4": 0.5}}}
    shown = tables({"exams": ["arithmetic"], "start": start, "rows": [], "against": [taken, alone]})
    assert [row[-1] for row in shown[0].rows] == ["level", "level, over seeds alone"]
    for other in ({"exam": "watched"}, {"what": "8 steps a rollout"}, {"ours": "GRPO"}, {"seeds": 4}):
        assert not comparisons.against(runs[:6], "arithmetic", [said | other])[0]["problems"]
    new = [seeded("ADPO", 0, "1100"), *runs[1:6]]  # of which that was not said
    assert not comparisons.against(new, "arithmetic", [said])[0]["problems"]
    fewer = said | {"seeds": 2, "problems": False}  # not all had been kept then
    (line,) = comparisons.against(runs[:6], "arithmetic", [fewer])
    assert (line["seeds"], line["mean"], line["problems"]) == (2, 0.1, False)


def told(wanted, preset, *_):
    """As a trial tells it, without one; what it has reached follows from its name."""
    draw = random.Random(wanted.name)
    skill = {"ADPO": 0.8, "GRPO": 0.5}[wanted.method]
    right, watched = ("".join(str(int(draw.random() < skill)) for _ in range(n)) for n in (32, 16))
    shares = {"greedy": right.count("1") / 32, "sampled": draw.random(), "pass_at_4": draw.random()}
    rollout = {"right": draw.random(), "reward": 0.5, "length": 3.0, "distinct": 2.0}
    return {
        "trial": wanted.told(),
        "stopped": None,
        "seconds_per_step": 1.0,
        "tokens_per_step": 5.0,
        "curve": [(1, watched.count("1") / 16)],
        "watched": watched,
        "rollouts": [rollout] * wanted.rollouts,
        "logged": [{"grad_norm": 1.0}],
        "exams": {"arithmetic": {**shares, "right": right, "right_of_sampled": "4" * 16}}
        if wanted.study != "rates"
        else {},
    }


@pytest.fixture
def computed(monkeypatch):
    """Names of the trials that were carried out, in a plan that trains nothing."""
    names = []

    def carried_out(wanted, *more):
        names.append(wanted.name)
        return told(wanted, *more)

    shares = {"greedy": 0.3, "sampled": 0.2, "pass_at_4": 0.5, "right": "01" * 16, "right_of_sampled": "1" * 16}
    start = {"watched": 0.3, "live": 0.5, "exams": {"arithmetic": shares}}
    monkeypatch.setitem(run.PRESETS, "smoke", PLAN)
    monkeypatch.setattr(trial, "carried_out", carried_out)
    monkeypatch.setattr(trial, "examined", lambda *_: start)
    monkeypatch.setattr(run, "placed", lambda preset, _: placed(preset, START))
    return names


def placed(preset, digest):
    start, elsewhere = SimpleNamespace(digest=lambda: digest), SimpleNamespace(train=[], exams={})
    sets = problems.generated(preset) if preset.start == "embedded" else elsewhere
    return SimpleNamespace(preset=preset, start=start, data=None, sets=sets)


def job(out, *arguments):
    done = typed("--out", str(out), *map(str, arguments))
    assert done.exit_code == 0, done.exception
    return json.loads((out / "runs.json").read_text()), done.output


def written(path, content):
    path.write_text(json.dumps(content))
    return path


def older(listed):
    """As it was listed before answers were kept, and parts of an exam told apart."""
    found = deepcopy(listed)
    part = found.pop("parts")[0]
    for line in found["runs"]:
        line.pop("watched_right")
        line.pop(part, None)
        line.get("arithmetic", {}).pop("right", None)
    found["against"] = [line for line in found["against"] if line["exam"] != part]
    for line in found["against"]:
        del line["problems"]
    return found


def test_what_is_known_is_not_run_again(tmp_path, computed):
    first, _ = job(tmp_path / "one")
    assert len(computed) == len(first["runs"]) == 6 + 4 + 4 + 4 + 2  # rates, seeds, inner, control, mean
    computed.clear()
    several = written(
        tmp_path / "several.json", [{**first, "preset": "gpu"}, first, {**first, "start_digest": "other"}]
    )
    for number, file in enumerate((tmp_path / "one" / "runs.json", several)):
        out = tmp_path / f"again{number}"
        again, _ = job(out, "--known", file)
        assert computed == []
        assert again == first
        assert (out / "tables.md").read_text() == (tmp_path / "one" / "tables.md").read_text()
        assert (tmp_path / "one" / "curves.svg").exists()
        assert not (out / "curves.svg").exists()
        assert experiments.section(out).charts == []
        assert len(experiments.section(tmp_path / "one").charts) == 4


def test_known_runs_and_new_ones_are_as_good_as_all_anew(tmp_path, computed):
    job(tmp_path / "two")
    computed.clear()
    more, _ = job(tmp_path / "more", "--seeds", 4, "--known", tmp_path / "two" / "runs.json")
    assert len(computed) == 4
    assert {(name.split("-")[0], name.split("seed")[2][0]) for name in computed} == {
        ("seeds", "3"),
        ("seeds", "4"),
    }
    four, _ = job(tmp_path / "four", "--seeds", 4)
    assert more == four
    assert (tmp_path / "more" / "tables.md").read_text() == (tmp_path / "four" / "tables.md").read_text()
    assert (tmp_path / "more" / "curves.svg").exists()  # of those that have one
    drawn = experiments.section(tmp_path / "more").charts[0].series
    assert [series.faint for series in drawn] == [True, True, False] * 2


def test_lines_without_answers_take_part(tmp_path, computed):
    first, _ = job(tmp_path / "one")
    kept = older(first)
    origin = {"commit": "earlier"}
    kept["provenance"] = [origin, *first["provenance"]]
    kept["runs"][-1]["collapsed"] = not first["runs"][-1]["collapsed"]
    file = written(tmp_path / "kept.json", kept)
    computed.clear()
    same, _ = job(tmp_path / "same", "--known", file)
    said = [line for line in first["against"] if line["exam"] not in first["parts"]]
    assert (same["runs"], same["against"], same["best"]) == (kept["runs"], said, first["best"])
    assert same["provenance"] == kept["provenance"]
    assert computed == []
    more, output = job(tmp_path / "more", "--known", file, "--seeds", 3)
    assert "looked for" not in output
    assert len(computed) == 2
    assert more["provenance"] == kept["provenance"]
    assert {(line["what"], line["problems"], line["seeds"]) for line in more["against"]} == {
        ("", False, 3),
        ("1 step a rollout", True, 2),
        ("random reward", True, 2),
        ("means of log-probabilities", True, 2),
    }
    assert "over seeds alone" in (tmp_path / "more" / "tables.md").read_text()
    rows = json.loads((tmp_path / "more" / "results.json").read_text())["rows"]
    assert [row["collapsed"] for row in rows if row["study"] == "mean"] == [int(kept["runs"][-1]["collapsed"])]
    _, output = job(tmp_path / "fewer", "--known", file, "--methods", "adpo", "--seeds", 2)
    assert "\n9 runs of --known are not among those that were looked for" in output


def test_settings_are_chosen_by_known_lines(tmp_path, computed):
    first, _ = job(tmp_path / "one", "--studies", "seeds")
    short = next(line for line in first["runs"] if (line["study"], line["changes"]) == ("rates", ", epsilon 0.4"))
    assert first["best"]["GRPO"]["epsilon"] != 0.4
    short["chosen_by"] = 9.0
    computed.clear()
    second, _ = job(tmp_path / "two", "--known", written(tmp_path / "kept.json", first), "--studies", "seeds")
    assert second["best"]["GRPO"] == {"rate": 3e-4, "epsilon": 0.4}
    assert computed == [f"seeds-GRPO-0.0003-seed{seed}-inner4, epsilon 0.4" for seed in (1, 2)]


def test_a_run_of_this_job_is_preferred(tmp_path, computed):
    first, _ = job(tmp_path / "one")
    other = deepcopy(first)
    other["provenance"] = [{"commit": "earlier"}]
    for line in other["runs"]:
        line["watched"] = 0.0
    again, _ = job(tmp_path / "one", "--resume", "--known", written(tmp_path / "other.json", other))
    assert again == first


def test_some_studies(tmp_path, computed, monkeypatch):
    out = tmp_path / "out"
    job(out, "--studies", "inner")
    monkeypatch.setattr(session, "provenance", lambda: {"commit": "later"})
    first, _ = job(out, "--studies", "inner,mean", "--resume")
    assert len(first["provenance"]) == 2
    assert {name.split("-")[0] for name in computed} == {"rates", "inner", "mean"}
    assert len(computed) == 6 + 4 + 2
    assert first["not_yet"] == []
    computed.clear()
    left, _ = job(out, "--studies", "control", "--resume", "--minutes", 0)
    assert computed == []
    assert left["provenance"] == first["provenance"]
    assert {name.split("-")[1] for name in left["not_yet"]} == {"control"}
    assert {line["study"] for line in left["runs"]} == {"rates", "inner", "mean"}  # what is there costs nothing
    known, _ = job(tmp_path / "known", "--studies", "control", "--known", out / "runs.json")
    assert {name.split("-")[0] for name in computed} == {"control"}
    assert {line["study"] for line in known["runs"]} == {"rates", "inner", "mean", "control"}
    everything, _ = job(out, "--resume")
    assert everything["runs"] == job(tmp_path / "all")[0]["runs"]


def test_studies_run_in_the_order_in_which_they_are_asked_for(tmp_path, computed):
    listed, _ = job(tmp_path / "out", "--studies", "mean,seeds,inner")
    order = [name.split("-")[0] for name in computed]
    assert order == ["rates"] * 6 + ["mean"] * 2 + ["seeds"] * 4 + ["inner"] * 4
    studies = [line["study"] for line in listed["runs"]]
    assert list(dict.fromkeys(studies)) == ["rates", "seeds", "inner", "mean"]  # as ever, or tables would differ


RUN = {"study": "rates", "method": "ADPO", "rate": 3e-4, "seed": 0, "inner": 4, "changes": ", tau 0.3"}
RUN |= {"collapsed": False, "stopped": None, "watched": 0.5, "chosen_by": 0.9, "measured": {}}
KEPT = {"preset": "smoke", "start_digest": START, "provenance": [], "runs": [RUN], "against": []}
NO_LIST = "expected a runs.json of adpo reproduce reasoning, or a list of them; "


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("3", NO_LIST + "it is '3'"),
        ("[3]", NO_LIST + "it is '3'"),
        ({**KEPT, "runs": {}}, NO_LIST + "it has '{}' as runs"),
        ({"preset": "smoke"}, NO_LIST + "it has no start_digest"),
        ({**KEPT, "runs": [{**RUN, "seed": "1"}]}, "a run has '1' as seed"),
        ({**KEPT, "runs": [RUN, RUN]}, "'rates-ADPO-0.0003-seed0-inner4, tau 0.3' is there twice"),
        ({**KEPT, "runs": [{**RUN, "chosen_by": None}]}, "has 'None' as chosen_by"),
        ({**KEPT, "runs": [{**RUN, "arithmetic": {"greedy": "x"}}]}, "has 'x' as greedy"),
        (
            {**KEPT, "runs": [{**RUN, "arithmetic": {"greedy": 1, "right": "4:1f"}}]},
            "'4:1f': expected a number of",
        ),
        ({**KEPT, "runs": [{**RUN, "watched_right": 3}]}, "has '3' as watched_right"),
        ({**KEPT, "against": [{}]}, "a comparison has no exam"),
        ({**KEPT, "provenance": ["x"]}, "provenance is 'x'"),
        ([], f"expected runs of smoke from the start {START} once; got none"),
        ({**KEPT, "start_digest": "ff"}, f"expected runs of smoke from the start {START} once; got smoke from ff"),
        ([KEPT | {"preset": "gpu"}, KEPT | {"preset": "paper"}], f"got gpu from {START}, paper from {START}"),
        ({**KEPT, "job": "ff"}, "its runs of smoke are of other problems (--data) or other sizes"),
        ([KEPT, KEPT], f"once; got smoke from {START}, smoke from {START}"),
    ],
)
def test_a_file_that_is_of_no_use(tmp_path, computed, content, said):
    file, out = tmp_path / "runs.json", tmp_path / "out"
    if content is not None:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    done = typed("--out", str(out), "--known", str(file))
    assert isinstance(done.exception, ValueError)
    assert said in str(done.exception)
    assert str(file) in str(done.exception)
    assert "\n" not in str(done.exception)
    assert not out.exists()


@pytest.mark.parametrize(
    ("studies", "said"),
    [
        ("seeds,rates", "--studies 'rates': expected some of seeds, inner, control, mean"),
        ("stale", "--studies 'stale': expected some of seeds, inner, control, mean"),  # not of this preset
        ("", "--studies '': expected some of seeds"),
        ("seeds,inner,seeds", "--studies seeds,inner,seeds: expected each once"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(tmp_path, computed, monkeypatch, capsys, studies, said):
    words = ["adpo", "reproduce", "reasoning", "--out", str(tmp_path / "out"), "--studies", studies]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"adpo: {said}")
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_published_can_be_added_to(tmp_path, monkeypatch, place):
    """With no time for a trial it comes out as it went in."""
    kept = json.loads(PUBLISHED.read_text())[place]
    exams = {exam: found for exam, found in kept["start"].items() if isinstance(found, dict)}
    start = {name: value for name, value in kept["start"].items() if name not in exams} | {"exams": exams}
    monkeypatch.setattr(trial, "examined", lambda *_: start)
    monkeypatch.setattr(run, "placed", lambda preset, _: placed(preset, kept["start_digest"]))
    if PRESETS[kept["preset"]].files is not None:  # its problems are files, which are not at hand
        monkeypatch.setattr(run, "_digests", lambda *_: {})
        monkeypatch.setattr(run, "fingerprint", lambda _: kept["job"])
    methods = ",".join(short for short, name in SHORT.items() if name in kept["best"])
    seeds = max(line["seed"] for line in kept["runs"] if line["study"] == "seeds")
    given = ["--preset", kept["preset"], "--methods", methods, "--seeds", seeds, "--known", PUBLISHED]
    found, _ = job(tmp_path / "out", *given, "--minutes", 0)
    assert (found["best"], found["start"]) == (kept["best"], kept["start"])
    assert set(kept["not_yet"]) <= set(found["not_yet"])

    def unordered(lines, **more):
        return sorted(json.dumps(more | line, sort_keys=True) for line in lines)

    assert unordered(found["runs"]) == unordered(kept["runs"])
    assert unordered(found["against"]) == unordered(kept["against"], problems=True)


def test_a_job_that_was_carried_out_is_known(tmp_path, monkeypatch):
    """The smoke preset as typed, from a start that need not be warmed up; then from what it has listed."""
    start = small_start(tmp_path / "model")
    monkeypatch.setattr(run, "embedded_start", lambda *_: start)
    first, _ = job(tmp_path / "one")
    monkeypatch.setattr(trial, "carried_out", lambda *_: 1 / 0)
    again, _ = job(tmp_path / "two", "--known", tmp_path / "one" / "runs.json")
    assert again == first
    assert all(line["problems"] for line in again["against"])
    assert (tmp_path / "two" / "tables.md").read_text() == (tmp_path / "one" / "tables.md").read_text()
