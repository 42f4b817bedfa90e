"""Learners of the experiments as jobs of `adpo tune`, what holds with other seeds, and the table of defaults."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("optuna")
pytest.importorskip("matplotlib")

import yaml
from typer.testing import CliRunner

from adpo.cli import app
from adpo.experiments.bandits.jobs import TUNING_SCENARIOS, runs, tuned
from adpo.experiments.bandits.protocol import Protocol
from adpo.tuning import confirmation, defaults, summary
from adpo.tuning.experiment_jobs import EXPERIMENTS, Bandits, Distill, Reasoning
from adpo.tuning.spaces import Range
from adpo.tuning.study import Order
from adpo.tuning.study import tuned as study_of
from adpo.tuning.trials import Outcome

SMALL = ("--iterations", "4", "--worlds", "2", "--scenario", "gaussian-mild")


def typed(*words):
    return CliRunner().invoke(app, list(map(str, words)))


def test_what_there_is_to_choose():
    assert set(Bandits((), 0).space()) == {"beta", "tau", "learning_rate"}
    assert set(Bandits(("--tau", "4"), 0).space()) == {"beta", "learning_rate"}
    assert set(Bandits(("--method", "adpo-natural"), 0).space()) == {"tau"}  # it has no learning rate
    assert set(Bandits(("--method", "grpo"), 0).space()) == {"clip", "learning_rate"}
    assert set(Distill((), 0).space()) == {"tau", "learning_rate"}
    assert set(Distill(("--method", "ADPO anchored target EMA"), 0).space()) == {"tau", "decay", "learning_rate"}
    assert set(Distill(("--method", "BC, likelihood"), 0).space()) == {"learning_rate"}
    assert set(Reasoning((), 0).space()) == {"tau", "learning_rate"}
    assert set(Reasoning(("--method", "gspo"), 0).space()) == {"epsilon", "epsilon_high", "learning_rate"}
    of_bandits = [Bandits(("--method", name), 0) for name in tuned()]
    for job in (*of_bandits, *(kind((), 0) for kind in EXPERIMENTS.values())):
        assert all(bounds.low < job.usual()[name] * 1.001 for name, bounds in job.space().items())
        assert all(job.usual()[name] < bounds.high * 1.001 for name, bounds in job.space().items())


def test_a_trial_of_the_bandits_is_a_run_of_the_experiment(tmp_path):
    job = Bandits((*SMALL, "--beta", "0.5"), 3)
    found = job.carried_out(tmp_path / "trial", {"tau": 8.0, "learning_rate": 2e-3}, lambda *_: False)
    protocol = replace(Protocol(), iterations=4, learning_rate=2e-3)
    records = runs(protocol, TUNING_SCENARIOS[:1], [("adpo-kde", {"beta": 0.5, "tau": 8.0})], [1006, 1007])
    ends = [run["curve"][-1]["sampled"] for run in records if run["method"] == "adpo-kde"]
    assert found == Outcome(pytest.approx(sum(ends) / 2))
    kept = json.loads((tmp_path / "trial" / "score.json").read_text())
    assert kept["settings"] == {"beta": 0.5, "tau": 8.0, "learning_rate": 2e-3}
    assert kept["scores"] == pytest.approx(ends)
    other = job.with_seed(4).carried_out(tmp_path / "other", {"tau": 8.0, "learning_rate": 2e-3}, lambda *_: False)
    assert other.score != found.score  # in other worlds
    usual = Bandits(SMALL, 3).carried_out(tmp_path / "usual", {}, lambda *_: False)
    assert json.loads((tmp_path / "usual" / "score.json").read_text())["settings"] == {
        **tuned()["adpo-kde"],
        "learning_rate": Protocol().learning_rate,
    }
    assert usual.score is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_students_are_tried_out(tmp_path):
    pytest.importorskip("mujoco")
    words = ("--states", "1200", "--steps", "3", "--students", "2", "--episodes", "1")
    found = Distill(words, 0).carried_out(tmp_path / "trial", {"tau": 1.0}, lambda *_: False)
    assert -0.5 < found.score < 0.5  # of three steps nobody learns to hop
    assert len(json.loads((tmp_path / "trial" / "score.json").read_text())["scores"]) == 2
    assert (tmp_path / "lessons-Hopper-v5.safetensors").exists()  # recorded once for all trials


@pytest.mark.slow
def test_reasoning_is_tried_out(tmp_path):
    pytest.importorskip("trl")
    job = Reasoning(("--preset", "smoke"), 0)
    found = job.carried_out(tmp_path / "trial", {"learning_rate": 3e-4, "tau": 0.3}, lambda *_: False)
    assert 0 < found.score < 1


def test_mistakes(tmp_path):
    for words, said in (
        (
            ["bandits", "--taau", "1"],
            "bandits: there is no setting taau: expected some of beta, tau, learning",
        ),
        (["bandits", "--range", "taau=1:2"], "there is no setting taau"),
        (["bandits", "--method", "adpo"], "--method adpo: expected one of sft-best"),
        (["bandits", "--scenario", "rain"], "--scenario rain: expected one of gaussian-mild"),
        (["bandits", "--worlds", "two"], "--worlds two: expected a whole number"),
        (["bandits", "--worlds", "2.5"], "--worlds 2.5: expected a whole number"),
        (["bandits", "--worlds", "0"], "--worlds 0: expected at least 1"),
        (["bandits", "--beta", "much"], "--beta much: expected a number"),
        (["bandits", "--tau", "-3"], "tau -3: expected more than 0"),
        (["bandits", "--range", "tau=-1:4"], "tau -1: expected more than 0"),
        (["bandits", "--method", "grpo", "--samples", "rain"], "--samples rain: expected one of policy, lists"),
        (["bandits", "--method", "adpo-natural", "--range", "target=1:2"], "it is not a number, but"),
        (["reasoning", "--model", "mine"], "--model is for --preset gpu and paper"),
        (["reasoning", "--confirm", "2"], "no settings of its own"),
        (["bandits", "--beta", "1", "--range", "beta=1:2"], "give one of them"),
        (["bandits", "--population", "4"], "--population is for adpo tune train"),
        (["distill", "--env", "Chess-v1"], "no teacher for 'Chess-v1'"),
        (["reasoning", "--preset", "gpu"], "this preset needs --data"),
        (["train", "--population", "4", "--confirm", "2"], "without --confirm"),
    ):
        done = typed("tune", *words, "--out", tmp_path / "out")
        assert isinstance(done.exception, ValueError), (words, done.output)
        assert said in str(done.exception), words
        assert not (tmp_path / "out").exists()


class Known:
    """A job whose scores are known: the luck of a seed, and what tau is worth."""

    name, words, measure = "train", (), "accuracy"

    def __init__(self, seed, tried, worth=1.0, fatal=3.0):
        self.seed, self.tried, self.worth, self.fatal = seed, tried, worth, fatal

    def with_seed(self, seed):
        return Known(seed, self.tried, self.worth, self.fatal)

    def checked(self, *_):
        pass

    def carried_out(self, folder, values, _):
        self.tried.append((folder.name, values.get("tau")))
        if values.get("tau", 0.0) >= self.fatal:
            return Outcome(None, "it diverged")
        luck = {1: 0.0, 2: 0.02, 3: -0.03, 4: 0.01}.get(self.seed, 0.0)
        return Outcome(0.5 + luck + self.worth * values.get("tau", 0.0) * (0.1 + luck / 10))


def study(*taus):
    places = enumerate(taus)
    trials = [{"values": {"tau": tau}, "score": 0.9 - place / 10, "state": "complete"} for place, tau in places]
    trials.append({"values": {"tau": 9.0}, "score": 1.0, "state": "pruned"})  # was not carried to its end
    space = {"tau": Range(0.1, 9.0)._asdict()}
    return {"job": "train", "measure": "accuracy", "trials": trials, "space": space, "importance": {}}


def test_what_holds_with_other_seeds(tmp_path):
    tried = []
    results, order = study(0.5, 1.0, 3.0, 2.0), Order(tmp_path, 0)
    found = confirmation.confirmed(Known(0, tried), results, order, 4)
    assert [each["values"] for each in found] == [{}, {"tau": 0.5}, {"tau": 1.0}, {"tau": 3.0}]
    assert len(tried) == len(set(tried)) == 16
    assert confirmation.seeds_of(tmp_path) == 4
    assert confirmation.confirmed(Known(0, tried), results, order, 4) == found
    assert [tau for _, tau in tried[16:]] == [3.0] * 4  # kept; what failed is tried again
    assert confirmation.winner(found) is found[2]
    assert confirmation.beyond_doubt(found, found[2])
    assert confirmation.verdict(found) == "tau 1, better beyond doubt"
    results["confirmed"] = found
    rows = confirmation.table(results).rows
    assert rows[0] == ["as it is", "50.0 ± 3.4", ""]
    assert rows[2] == ["tau 1", "60.0 ± 3.8", "+10.0 [+9.7, +10.3]"]
    assert rows[3] == ["tau 3", "4 failed", ""]
    assert yaml.safe_load(summary.config(results, {"task": "sums"})) == {"tau": 1.0, "task": "sums"}
    tried.clear()
    later = confirmation.confirmed(
        Known(0, tried), study(2.0, 0.5, 1.0), order, 4
    )  # another trial is the best now
    assert [tau for _, tau in tried] == [2.0] * 4  # in folders of its own; the others have moved, and are known
    assert later[2:] == found[1:3]


def test_what_does_not_hold(tmp_path):
    """What other seeds do not confirm is not called better."""
    worse = confirmation.confirmed(Known(0, [], worth=-1.0), study(0.5, 1.0), Order(tmp_path, 0), 4)
    assert confirmation.winner(worse) is worse[0]
    assert confirmation.verdict(worse) == "as it is"
    usual, one = {"values": {}, "scores": [0.5, 0.6, 0.4]}, {"values": {"tau": 1.0}, "scores": [0.6, 0.5, 0.5]}
    assert confirmation.verdict([usual, one]) == "tau 1, not better beyond doubt"
    # Of three that are no better, one may look so: each has to be better by more than if it were alone.
    lucky, failed = {"values": {"tau": 2.0}, "scores": [0.59, 0.64, 0.46]}, {"values": {}, "scores": [None] * 3}
    assert confirmation.beyond_doubt([usual, lucky], lucky)
    for other in (one, failed):
        assert not confirmation.beyond_doubt([usual, lucky, other, other], lucky)
    same = {"values": {"tau": 2.0}, "scores": [0.51, 0.61, 0.41]}  # by chance: there are few problems
    assert not confirmation.beyond_doubt([{"values": {}, "scores": [0.5, 0.6, 0.4]}, same], same)
    two = [{"values": {}, "scores": [0.1, 0.2]}, {"values": {"tau": 2.0}, "scores": [0.8, 0.9001]}]
    assert not confirmation.beyond_doubt(two, two[1])
    assert confirmation.verdict([failed, one]) == "tau 1, not better beyond doubt"
    assert confirmation.winner([failed, failed]) is None
    nobody = {**study(0.5), "confirmed": [failed, failed]}
    assert "every setting failed" in confirmation.table(nobody).title
    assert yaml.safe_load(summary.config(nobody, {})) == {"tau": 0.5}  # what the study itself found


def test_a_study_goes_round_what_fails(tmp_path):
    tried = []
    found = study_of(Known(0, tried, fatal=0.8), {"tau": Range(0.1, 1.0)}, Order(tmp_path / "out", 6))
    taus = [tau for _, tau in tried]
    assert len(found["trials"]) == 6
    assert max(taus) >= 0.8  # one has failed
    assert len(set(taus)) == len(taus)  # and nothing was proposed twice


def test_the_command_as_typed(tmp_path):
    out = tmp_path / "out"
    done = typed("tune", "bandits", *SMALL, "--trials", 2, "--confirm", 2, "--out", out)
    assert done.exit_code == 0, done.exception
    assert "2 other seeds; highest:" in " ".join(done.output.split())
    found = json.loads((out / "results.json").read_text())
    assert found["measure"] == "WinMass of the sampled policy"
    assert [len(each["scores"]) for each in found["confirmed"]] == [2, 2, 2]
    again = typed("tune", "bandits", *SMALL, "--trials", 3, "--out", out, "--resume")
    assert again.exit_code == 0, again.exception
    assert again.output.count("trial-00") == 1
    later = json.loads((out / "results.json").read_text())["confirmed"]
    assert len(later) == 4  # what was confirmed stays, and a third finalist has joined
    assert all(each in later for each in found["confirmed"])


def test_the_table_of_defaults(tmp_path, monkeypatch):
    few = " ".join(SMALL)
    studies = (
        defaults.Study("one", "bandits", few, 2, 2),
        defaults.Study("two", "bandits", f"{few} --method adpo-ranking", 1, 2),
    )
    monkeypatch.setitem(defaults.PRESETS, "smoke", studies)
    done = typed("reproduce", "defaults", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.exception
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["not_yet"] == 0
    rows = defaults.to_begin_with(found).rows
    for row, name, word in zip(rows, ("one", "two"), ("--trials 2", "adpo-ranking --trials 1"), strict=True):
        assert word in row[0]
        best = confirmation.winner(found["studies"][name]["confirmed"])
        assert row[3] == confirmation.told(best["values"])
        assert row[4] == ("" if best["values"] == {} else confirmation.mean(best["scores"]))
    assert "settings to begin with" in (tmp_path / "out" / "tables.md").read_text()
    refused = typed("reproduce", "defaults", "--out", tmp_path / "out")
    assert "--resume goes on with them" in str(refused.exception)
    again = typed("reproduce", "defaults", "--out", tmp_path / "out", "--resume")
    assert again.exit_code == 0, again.exception
    assert "trial-" not in again.output  # all of it was there


def test_the_table_in_the_documents_follows_from_the_studies():
    docs = Path(__file__).parents[2] / "docs"
    found = json.loads((docs / "results" / "defaults.json").read_text())
    assert found["preset"] == "cpu"
    assert {name: study["typed"] for name, study in found["studies"].items()} == {
        study.name: defaults.typed(study) for study in defaults.PRESETS["cpu"]
    }
    text = (docs / "tune.md").read_text()
    for lines in defaults.tables(found):
        shown = [f"| {' | '.join(row)} |" for row in lines.rows]
        if lines.title == "settings to begin with" or lines.title.startswith("train"):
            assert all(row in text for row in shown), lines.title
