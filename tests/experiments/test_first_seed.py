"""`--first-seed`: which seeds the reported runs of an experiment have, and that they are told apart."""

import json
from dataclasses import replace

import pytest

import forked

pytest.importorskip("typer")
pytest.importorskip("scipy")
pytest.importorskip("trl")

from typer.testing import CliRunner

from adpo.cli import app
from adpo.experiments.bandits import run as bandits
from adpo.experiments.distill import outcomes
from adpo.experiments.distill.methods import methods
from adpo.experiments.distill.protocol import PRESETS as DISTILL
from adpo.experiments.reasoning import run as reasoning
from adpo.experiments.reasoning.presets import PRESETS as REASONING
from adpo.experiments.reasoning.protocol import Choice


class Reached(Exception):  # noqa: N818
    """Nothing is computed here."""


def typed(*words):
    return CliRunner().invoke(app, ["reproduce", *map(str, words)])


def test_bandits(tmp_path, monkeypatch):
    found = []

    def reached(*_):
        raise Reached

    monkeypatch.setattr(bandits, "cells_of", lambda _, seeds: found.append(seeds) or [])
    monkeypatch.setattr(bandits.Session, "run", reached)
    words = ["bandits", "--preset", "smoke", "--seeds", 3, "--workers", 1, "--out", tmp_path / "out"]
    assert isinstance(typed(*words, "--first-seed", 200).exception, Reached)
    assert found == [[200, 201, 202]]
    assert json.loads((tmp_path / "out" / "job.json").read_text())["description"]["seeds"] == [200, 201, 202]
    assert isinstance(typed(*words, "--first-seed", 200, "--resume").exception, Reached)
    other = typed(*words, "--resume").exception
    assert "holds a job with other settings" in str(other)
    assert found == 2 * [[200, 201, 202]]  # with the preset's own seeds it is refused before it has cells


def test_distillation(monkeypatch):
    protocol = DISTILL["smoke"]
    assert "first_seed" not in protocol.described()  # jobs that were begun without it can be resumed
    other = replace(protocol, first_seed=300)
    assert other.described()["first_seed"] == 300
    found = []

    class Given:
        def first(self, _):
            return self

        def corrupted(self, *_):
            return self

    def taught(_, __, ___, seeds):
        found.append(list(seeds))
        raise Reached

    monkeypatch.setattr(outcomes, "taught", taught)
    for each in (protocol, other):
        with pytest.raises(Reached):
            outcomes.outcome("Hopper-v5", next(iter(methods())), each.main, each, None, Given(), None)
    assert found == [[100, 101], [300, 301]]


def test_reasoning():
    usual = reasoning._chosen("embedded", None, 3)
    shifted = reasoning._chosen("embedded", None, 3, 11)
    best = dict.fromkeys(usual.methods, Choice(usual.rates[0]))
    for trials in ("reported", "beside"):
        first, second = ([trial.seed for trial in getattr(each, trials)(best)] for each in (usual, shifted))
        assert [seed + 10 for seed in first] == second
    assert {trial.seed for trial in shifted.choosing()} == {0}
    assert shifted.described() == REASONING["embedded"].described()  # results of other seeds may join


@pytest.mark.parametrize("experiment", ["bandits", "distill", "reasoning"])
def test_seeds_that_chose_the_settings_are_refused(experiment, tmp_path):
    out = tmp_path / "out"
    words = ["reproduce", experiment, "--seeds", "10", "--first-seed", "995", "--out", str(out)]
    done = forked.run("-m", "adpo", *words)
    if experiment == "distill" and "adpo[control]" in done.stderr:
        pytest.skip("no MuJoCo here")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "--first-seed 995 with 10 seeds goes beyond 999" in done.stderr
    assert not out.exists()
