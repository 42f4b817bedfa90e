"""A trial of hours that was stopped goes on from its last checkpoint, and ends as if nothing had happened."""

from dataclasses import replace

import pytest

pytest.importorskip("trl")

from test_reasoning import small_start

from adpo.experiments.cells import Cell, Job
from adpo.experiments.reasoning import problems, trial
from adpo.experiments.reasoning.presets import PRESETS
from adpo.experiments.reasoning.protocol import Trial

SMOKE = PRESETS["smoke"]
LONG = replace(SMOKE, kept_every=2, watch_every=3)
"""What is looked at, and what is kept, at other times."""


def stopped_at(rollout, of):
    """What is told of a trial's progress, and a user who stops it there."""

    def report(share):
        if share >= rollout / of:
            raise KeyboardInterrupt

    return report


@pytest.mark.parametrize("method", ["ADPO", "GRPO"])
@pytest.mark.parametrize("rollout", [1, 5], ids=["before the first checkpoint", "after two"])
def test_it_ends_as_if_it_had_not_been_stopped(tmp_path, method, rollout):
    start, sets = small_start(tmp_path / "model"), problems.generated(SMOKE)
    wanted = Trial("seeds", method, 3e-4, 1, rollouts=6, inner=2, reward="noisy")
    whole = trial.carried_out(wanted, SMOKE, start, sets, lambda _: None)
    unfinished = tmp_path / "cells" / "one.unfinished"
    with pytest.raises(KeyboardInterrupt):
        trial.carried_out(wanted, LONG, start, sets, stopped_at(rollout, 6), unfinished)
    assert [kept.name for kept in unfinished.glob("checkpoint-*")] == ([] if rollout == 1 else ["checkpoint-8"])
    told = []
    again = trial.carried_out(wanted, LONG, start, sets, told.append, unfinished)
    assert told[0] == pytest.approx((1 if rollout == 1 else 5) / 6)  # what is kept is not done again
    assert again["curve"] == [each for each in whole["curve"] if each[0] % LONG.watch_every == 0]
    told.clear()
    cut_off = trial.carried_out(wanted, LONG, start, sets, told.append, unfinished)  # its result was not kept
    assert not told  # nothing was trained
    assert {**cut_off, "seconds_per_step": 0} == {**again, "seconds_per_step": 0}
    for name in ("exams", "rollouts", "logged", "watched", "stopped", "tokens_per_step", "kl_to_start"):
        assert again[name] == whole[name], name
    assert again["seconds_per_step"] > 0


def test_trials_of_minutes_are_not_kept(tmp_path):
    start, sets = small_start(tmp_path / "model"), problems.generated(SMOKE)
    wanted = Trial("rates", "ADPO", 3e-4, 1, rollouts=2, inner=1)
    trial.carried_out(wanted, SMOKE, start, sets, lambda _: None, tmp_path / "unfinished")
    assert not (tmp_path / "unfinished").exists()


@pytest.mark.parametrize("method", ["ADPO", "GRPO"])
def test_one_that_was_stopped_is_not_trained_further(tmp_path, monkeypatch, method):
    """It had diverged, and was cut off in its exam."""
    start, sets = small_start(tmp_path / "model"), problems.generated(SMOKE)
    wild = Trial("seeds", method, 1e9, 1, 12, 1, reward="random")
    whole = trial.carried_out(wild, SMOKE, start, sets, lambda _: None)
    assert whole["stopped"]
    unfinished = tmp_path / "one.unfinished"
    with monkeypatch.context() as patch:
        patch.setattr(trial, "_taken", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trial.carried_out(wild, LONG, start, sets, lambda _: None, unfinished)
    again = trial.carried_out(wild, LONG, start, sets, lambda _: None, unfinished)
    for name in ("stopped", "rollouts", "exams"):
        assert again[name] == whole[name], name
    assert len(again["logged"]) == len(whole["logged"])


def interrupted(*_):
    raise KeyboardInterrupt


def test_what_a_cell_keeps_is_gone_when_its_result_is_there(tmp_path):
    def compute(_):
        (job.unfinished("one") / "part").mkdir(parents=True)
        return 1

    job = Job(tmp_path / "out", {}, resume=False)
    job.run([Cell("one", compute)], lambda *_: None)
    assert [path.name for path in job.cells.iterdir()] == ["one.json"]
    (job.unfinished("one") / "part").mkdir(parents=True)  # killed in between
    job.run([Cell("one", compute)], lambda *_: None)
    assert [path.name for path in job.cells.iterdir()] == ["one.json"]
