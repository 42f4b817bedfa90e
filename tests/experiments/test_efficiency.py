"""The efficiency experiment: the same work for everyone, refused where it is not, resumed where it stopped."""

import csv
import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("trl")

from typer.testing import CliRunner

from adpo.cli import app
from adpo.experiments.cells import Cell, Job
from adpo.experiments.efficiency import measures, run, summary
from adpo.experiments.efficiency.protocol import (
    ADPO,
    ADPO_SECOND,
    BASE,
    EXACT,
    GRPO,
    PRESETS,
    SPLIT_SECOND,
    TINY,
    TRL_DEFAULT,
    TRL_LIGER,
    completion_lengths,
    rollout,
)


def test_the_lengths_are_those_of_the_issue():
    """900 to 1024 for the long ones; a mean near 371 and nothing above 1024 for the mixed ones."""
    draw = torch.Generator().manual_seed(0)
    long = completion_lengths(replace(BASE, lengths="long", groups=500), draw)
    mixed = completion_lengths(replace(BASE, groups=500), draw)
    assert (int(long.min()), int(long.max())) == (901, 1024)
    assert 340 < float(mixed.float().mean()) < 400
    assert (int(mixed.min()) >= 32, int(mixed.max())) == (True, 1024)


def test_a_rollout_counts_useful_tokens_and_dead_groups():
    given = rollout(replace(TINY, dead=0.5), 100, end=1)
    assert len(given.completions) == 16
    assert given.useful == 16 * 8 + sum(map(len, given.completions))
    assert given.rewards[:8] == [1.0] * 8
    assert len(set(given.rewards[8:])) == 8
    assert all(completion[-1] == 1 for completion in given.completions)


SPLIT = replace(SPLIT_SECOND, arguments=(("tokens_per_pass", 24),))  # as small as the groups here


@pytest.mark.parametrize("contender", [GRPO, ADPO, ADPO_SECOND, SPLIT], ids=lambda one: one.name)
def test_gradients_are_compared_before_anything_is_timed(caplog, contender):
    preset = PRESETS["smoke"]
    expected = measures.exact_gradient(EXACT[contender.method], TINY)["gradient"]
    found = measures.update(contender, TINY, preset, expected)
    assert found["gradient_off"] < 1e-4
    assert found["form"].startswith("packed")
    assert len(found["all_seconds"]) == preset.updates
    assert found["rows_scored"] == (1.0 if contender == SPLIT else 0.0)
    assert "nothing was learnt" not in caplog.text  # nothing is to move here
    wrong = [-value for value in expected]
    with pytest.raises(ValueError, match=r"its gradient differs by 200\.0% from that in float32"):
        measures.update(contender, TINY, preset, wrong)


def test_the_same_weights_give_the_same_log_probabilities_in_other_passes():
    found = measures.repeatability(PRESETS["smoke"])
    assert {"as in training, without gradient", "as in training, in smaller passes", "in float32, padded"} <= set(
        found
    )
    assert all(0 <= entry["mean"] <= entry["most"] < 1e-4 for entry in found.values())  # float32 here


def test_whole_steps_train_on_what_they_sampled():
    """Nothing that was sampled ends, and it counts all the same."""
    found = measures.whole_step(ADPO, replace(PRESETS["smoke"], updates=1))
    assert found["rows_left_out"] == 0
    assert found["sampling"].startswith("by the means of TRL")


def test_the_command_writes_everything_and_resumes(tmp_path, monkeypatch):
    small = replace(PRESETS["smoke"], axes=(replace(TINY, lengths="long"),), updates=1)
    monkeypatch.setitem(PRESETS, "smoke", small)
    chosen = {TINY: (TRL_DEFAULT, GRPO, ADPO), small.axes[0]: (ADPO,)}
    monkeypatch.setattr(run, "contenders", lambda work, _: chosen[work])
    measured = []
    update = measures.update

    def watched(contender, *rest):
        measured.append(contender.name)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return update(contender, *rest)

    monkeypatch.setattr(measures, "update", watched)
    out = tmp_path / "out"
    command = ["reproduce", "efficiency", "--out", str(out)]
    assert CliRunner().invoke(app, command).exit_code == 130
    some = CliRunner().invoke(app, [*command, "--resume", "--minutes", "0"])
    assert some.exit_code == 0, some.output
    assert "Not measured yet: update-tiny-4x4-prompt8-mixed32-dead0-ours: ADPO" in some.output
    assert len(json.loads((out / "results.json").read_text())["rows"]) == 1
    done = CliRunner().invoke(app, [*command, "--resume"])
    assert done.exit_code == 0, done.output
    assert measured == [TRL_DEFAULT.name, GRPO.name, GRPO.name, ADPO.name, ADPO.name]
    results = json.loads((out / "results.json").read_text())
    assert len(results["rows"]) == 4
    assert results["not_yet"] == []
    assert {goal["met"] for goal in results["goals"]} == {None}  # no verdict from a CPU
    rows = list(csv.DictReader((out / "updates.csv").open()))
    assert [row["contender"] for row in rows] == [row["contender"] for row in results["rows"]]
    assert "| ours: ADPO |" in (out / "tables.md").read_text()
    assert (out / "updates.svg").exists()
    assert "ours: ADPO" in done.output
    for row in results["rows"]:
        assert row["tokens_per_second"] == pytest.approx(_useful(row, results) / row["seconds"], rel=0.05)


def test_a_refused_gradient_stops_nobody_else(tmp_path, monkeypatch):
    long = replace(TINY, lengths="long")
    monkeypatch.setitem(PRESETS, "smoke", replace(PRESETS["smoke"], axes=(long,), updates=1))
    chosen = {TINY: (TRL_DEFAULT, GRPO, ADPO), long: ()}
    monkeypatch.setattr(run, "contenders", lambda work, _: chosen[work])
    for name in ("repeatability", "whole_step", "largest_that_fits"):
        monkeypatch.setattr(run.measures, name, lambda *_: {})
    monkeypatch.setattr(run, "whole_name", lambda one: f"skipped-{one.name}")
    monkeypatch.setattr(run, "fits_name", lambda one: f"skipped-fits-{one.name}")
    real = measures.exact_gradient

    def wrong(contender, work):
        found = real(contender, work)
        return {"gradient": [-value for value in found["gradient"]]} if contender.method == "grpo" else found

    monkeypatch.setattr(measures, "exact_gradient", wrong)
    results = run.reproduce("smoke", tmp_path / "out", False, lambda _: None)
    assert [row["contender"] for row in results["rows"]] == [ADPO.name]
    assert len(results["refused"]) == 2
    assert results["not_yet"] == []
    assert "Refused: TRL GRPO, defaults on" in (tmp_path / "out" / "tables.md").read_text()


def test_a_contender_that_was_measured_elsewhere_is_not_lost(tmp_path):
    job = Job(tmp_path / "out", {}, False, {})
    name = summary.update_name(TINY, TRL_LIGER)
    assert name not in [cell.name for cell in run.cells_of(PRESETS["smoke"], job)]
    job.run([Cell(name, lambda _: {})], lambda *_: None)
    assert [cell.name for cell in run.cells_of(PRESETS["smoke"], job)][-1] == name


def test_nothing_measured_is_one_line(tmp_path):
    done = CliRunner().invoke(app, ["reproduce", "efficiency", "--out", str(tmp_path / "out"), "--minutes", "0"])
    assert isinstance(done.exception, ValueError)
    assert "holds no update yet" in str(done.exception)


def _useful(row, results):
    return results["updates"][f"update-{row['cell']}-{row['contender']}"]["useful_tokens"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without one")
def test_a_gpu_is_asked_for_in_one_line(tmp_path):
    done = CliRunner().invoke(app, ["reproduce", "efficiency", "--preset", "gpu", "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, ValueError)
    assert "needs a CUDA device" in str(done.exception)
    assert not (tmp_path / "out").exists()
