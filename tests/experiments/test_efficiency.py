"""The efficiency experiment: the same work for everyone, refused where it is not, resumed where it stopped."""

import csv
import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("trl")

from typer.testing import CliRunner

from adpo.cli import app
from adpo.experiments.efficiency import measures, run, summary
from adpo.experiments.efficiency.protocol import (
    ADPO,
    BASE,
    EVERYONE,
    GRPO,
    ON_AXES,
    PADDED_ADPO,
    PRESETS,
    TINY,
    TRL_PLAIN,
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


def test_references_come_first():
    for order in (EVERYONE, ON_AXES):
        names = [contender.name for contender in order]
        for place, contender in enumerate(order):
            assert contender.reference is None or contender.reference in names[:place]


@pytest.mark.parametrize("contender", [GRPO, ADPO], ids=lambda one: one.name)
def test_gradients_are_compared_before_anything_is_timed(contender):
    preset = PRESETS["smoke"]
    reference = next(one for one in EVERYONE if one.name == contender.reference)
    expected = measures.update(reference, TINY, preset, None)["gradient"]
    found = measures.update(contender, TINY, preset, expected)
    assert found["gradient_off"] < 1e-4
    assert found["form"].startswith("packed")
    assert len(found["all_seconds"]) == preset.updates
    wrong = [-value for value in expected]
    with pytest.raises(ValueError, match=r"its gradient differs by 200\.0% from that of"):
        measures.update(contender, TINY, preset, wrong)


def test_the_command_writes_everything_and_resumes(tmp_path, monkeypatch):
    small = replace(PRESETS["smoke"], axes=(replace(TINY, lengths="long"),), updates=1)
    monkeypatch.setitem(PRESETS, "smoke", small)
    monkeypatch.setattr(run, "EVERYONE", (TRL_PLAIN, PADDED_ADPO, GRPO, ADPO))
    monkeypatch.setattr(run, "ON_AXES", (PADDED_ADPO, ADPO))
    measured = []
    update = measures.update

    def watched(contender, *rest):
        measured.append(contender.name)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return update(contender, *rest)

    monkeypatch.setattr(measures, "update", watched)
    monkeypatch.setattr(summary, "TRL_DEFAULT", TRL_PLAIN)
    command = ["reproduce", "efficiency", "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(app, command).exit_code == 130
    done = CliRunner().invoke(app, [*command, "--resume"])
    assert done.exit_code == 0, done.output
    assert measured == [
        TRL_PLAIN.name,
        PADDED_ADPO.name,
        GRPO.name,
        GRPO.name,
        ADPO.name,
        PADDED_ADPO.name,
        ADPO.name,
    ]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(results["rows"]) == 6
    assert {goal["met"] for goal in results["goals"]} == {None}  # no verdict from a CPU
    rows = list(csv.DictReader((tmp_path / "out" / "updates.csv").open()))
    assert [row["contender"] for row in rows] == [row["contender"] for row in results["rows"]]
    assert "| ours: ADPO |" in (tmp_path / "out" / "tables.md").read_text()
    assert (tmp_path / "out" / "updates.svg").exists()
    assert "ours: ADPO" in done.output
    for row in results["rows"]:
        assert row["tokens_per_second"] == pytest.approx(_useful(row, results) / row["seconds"], rel=0.05)


def _useful(row, results):
    return results["updates"][f"update-{row['cell']}-{row['contender']}"]["useful_tokens"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without one")
def test_a_gpu_is_asked_for_in_one_line(tmp_path):
    done = CliRunner().invoke(app, ["reproduce", "efficiency", "--preset", "gpu", "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, ValueError)
    assert "needs a CUDA device" in str(done.exception)
    assert not (tmp_path / "out").exists()
