"""`adpo tune`: what it tries, what it keeps, and what it makes of interruptions, failures and mistakes."""

import json
import shutil
import sys
import textwrap
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("optuna")
pytest.importorskip("trl")

import yaml
from typer.testing import CliRunner

from adpo.cli import app
from adpo.models.embedded import WarmUp, make_model, make_tokenizer
from adpo.runs.settings.keys import read_yaml
from adpo.tuning import population, summary, trials
from adpo.tuning import tuner as command
from adpo.tuning.population import Plan, raised
from adpo.tuning.spaces import Range, parsed, space
from adpo.tuning.study import Order, tuned
from adpo.tuning.trials import Job, Outcome, accuracies

SPACE = {"tau": Range(0.1, 10.0)}
STAND_IN = """
import json, math, sys, time
from pathlib import Path
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out, tau = Path(given["--out"]), float(given["--tau"])
if given["--kind"] == "broken":
    sys.exit("something is wrong")
if "--start" in given and not (Path(given["--start"]) / "model.safetensors").exists():
    sys.exit("there is nothing to start from")
if given["--kind"] == "fragile" and tau > 5:
    sys.exit("it diverged")
accuracy = math.exp(-math.log(tau) ** 2)
(out / "best").mkdir(parents=True, exist_ok=True)
(out / "checkpoint-1").mkdir(exist_ok=True)
(out / "settings.json").write_text("{}")
(out / "best" / "model.safetensors").write_text("weights")
for step in (1, 2):
    with (out / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": step, "validation/accuracy": accuracy * step / 2}) + "\\n" + "half a li")
    time.sleep(30 if given["--kind"] == "slow" and step == 1 else 0)
(out / "best" / "validation.json").write_text(json.dumps({"value": accuracy, "step": 2}))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A job that takes no time, best at tau 1, in place of a training."""
    script = tmp_path / "stand_in.py"
    script.write_text(textwrap.dedent(STAND_IN))
    typed = []

    def command(self, folder, values, more=()):
        typed.append((folder.name, dict(values), list(more)))
        given = [part for name, value in values.items() for part in (f"--{name}", f"{value:g}")]
        kind, *rest = self.words or ("good",)
        return [sys.executable, str(script), "--out", str(folder), "--kind", kind, *rest, *given]

    monkeypatch.setattr(Job, "command", command)
    monkeypatch.setattr(Job, "checked", lambda *_: None)
    return typed


def test_what_is_tried():
    assert set(space("train", {}, [])) == {"learning_rate", "tau", "reward_beta"}
    assert set(space("train", {"target": "plackett_luce"}, [])) == {"learning_rate", "tau"}
    assert set(space("prefer", {}, [])) == {"learning_rate", "tau"}
    hybrid = space("train", {"tau_schedule": "hybrid"}, [])
    assert {"tau_entropy_weight", "tau_reward_weight"} <= set(hybrid)
    assert set(space("train", {"tau_schedule": "guarded"}, [])) >= {"tau_min", "tau_max"}
    assert "tau" not in space("train", {"tau": "auto"}, [])
    assert space("train", {}, ["tau=0.5:2"])["tau"] == Range(0.5, 2.0)
    assert set(space("train", {"method": "gspo"}, [])) == {"learning_rate", "epsilon"}
    paper = read_yaml(Path(__file__).parents[2] / "examples" / "qwen3_math_adpo.yaml")  # hybrid, all is given
    with pytest.raises(ValueError, match="nothing left to choose"):
        space("train", {}, [], paper)
    assert space("train", {}, ["tau=0.5:2"], paper) == {"tau": Range(0.5, 2.0)}
    assert set(space("train", {}, [], {"tau_schedule": "hybrid", "target": "plackett_luce", "tau": 0.8})) == {
        "learning_rate",
        "tau_entropy_weight",
        "tau_reward_weight",
    }
    assert parsed("nll-weight=0:1") == ("nll_weight", Range(0.0, 1.0, log=False))
    for words, said in (("tau=2:1", "low below high"), ("tau=a:b", "expected name=low:high"), ("tau", "expected")):
        with pytest.raises(ValueError, match=said):
            parsed(words)
    with pytest.raises(ValueError, match="give one of them"):
        space("train", {"tau": "1"}, ["tau=0.1:1"])
    with pytest.raises(ValueError, match="nothing left to choose"):
        space("prefer", {"tau": "1", "learning_rate": "1"}, [])


def test_a_study_finds_what_is_best(tmp_path, stand_in):
    found = tuned(Job("train", (), 0), SPACE, Order(tmp_path / "out", 25))
    assert len(found["trials"]) == 25
    best = summary.best_of(found)
    assert 0.7 < best["values"]["tau"] < 1.4
    (row,) = summary.recommended(found).rows
    assert row[0] == "tau"
    assert row[1] == f"{best['values']['tau']:g}"
    written = yaml.safe_load(summary.config(found, {"target": "top1", "tau": 9.0, "levels": [3, 4]}))
    assert written == {"tau": pytest.approx(best["values"]["tau"], 1e-5), "target": "top1", "levels": [3, 4]}
    assert found["importance"] == {"tau": 1.0}
    assert "pruned" in {trial["state"] for trial in found["trials"]}  # what is far behind is given up
    kept = list((tmp_path / "out").glob("*/best/model.safetensors"))
    assert len(kept) == 1  # of the best alone
    assert json.loads((kept[0].parent / "validation.json").read_text())["value"] == best["score"]
    assert not list((tmp_path / "out").glob("*/checkpoint-*"))


def test_a_reward_is_shown_in_its_own_unit_and_may_be_negative():
    trials_of = [
        {"values": {"tau": tau}, "score": score, "state": "complete" if score is not None else "failed"}
        for tau, score in ((1.0, -12.5), (2.0, None), (3.0, -40.0))
    ]
    found = {"job": "train", "measure": trials.REWARD, "trials": trials_of, "importance": {}}
    found["space"] = {"tau": {"low": 0.1, "high": 10.0, "log": True}}
    found["confirmed"] = [
        {"values": {}, "scores": [-20.0, -22.0]},
        {"values": {"tau": 1.0}, "scores": [-12.0, -13.0]},
    ]
    text = "\n".join(str(part) for part in command._tables(found)) + summary.config(found, {})
    assert "%" not in text
    assert "the best -12.5" in text
    assert "mean reward on the validation set" in text
    assert [row[1] for row in summary.every(found).rows] == ["-12.5", "-40", ""]  # what failed comes last
    assert str(Outcome(-12.5, measure=trials.REWARD)) == "-12.5"
    assert str(Outcome(0.125)) == "12.5%"
    order = sorted([{"score": None}, {"score": -40.0}, {"score": 0.0}], key=population._score)
    assert [run["score"] for run in order] == [None, -40.0, 0.0]


@pytest.mark.parametrize("words", [["--eval_data", "b.jsonl"], ["--dev_problems", "0"], ["--eval_every", "0"]])
def test_without_a_validation_set_there_is_nothing_to_choose_by(tmp_path, stand_in, words):
    done = CliRunner().invoke(app, ["tune", "train", "--out", str(tmp_path / "out"), *words])
    assert isinstance(done.exception, ValueError)
    assert "trials are compared by the validation set, and there is none: set dev_problems" in str(done.exception)
    assert not stand_in
    assert not (tmp_path / "out").exists()


def test_a_study_goes_on_as_if_it_had_not_been_interrupted(tmp_path, stand_in, monkeypatch):
    whole = tuned(Job("train", (), 3), SPACE, Order(tmp_path / "whole", 12))
    tried = Job.carried_out

    def killed(job, folder, *rest):
        if folder.name == "trial-005" and not folder.exists():
            folder.mkdir(parents=True)
            (folder / "settings.json").write_text("{}")
            raise KeyboardInterrupt
        return tried(job, folder, *rest)

    monkeypatch.setattr(Job, "carried_out", killed)
    with pytest.raises(KeyboardInterrupt):
        tuned(Job("train", (), 3), SPACE, Order(tmp_path / "out", 12))
    stand_in.clear()
    found = tuned(Job("train", (), 3), SPACE, Order(tmp_path / "out", 12, resume=True))
    assert stand_in[0][0] == "trial-005"  # first what was interrupted, in its folder
    assert stand_in[0][2] == ["--resume"]
    assert [trial["values"] for trial in found["trials"]] == [trial["values"] for trial in whole["trials"]]
    assert [trial["score"] for trial in found["trials"]] == [trial["score"] for trial in whole["trials"]]
    with pytest.raises(ValueError, match="--resume goes on with it"):
        tuned(Job("train", (), 3), SPACE, Order(tmp_path / "out", 12))
    with pytest.raises(ValueError, match="has other settings"):
        tuned(Job("train", (), 4), SPACE, Order(tmp_path / "out", 12, resume=True))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("")
    with pytest.raises(ValueError, match="is not an empty folder"):
        tuned(Job("train", (), 3), SPACE, Order(tmp_path / "mine", 12))


def test_a_job_that_fails_is_told(tmp_path, stand_in):
    with pytest.raises(
        ValueError, match="3 trials in a row failed, the last with exit code 1: something is wrong"
    ):
        tuned(Job("train", ("broken",), 0), SPACE, Order(tmp_path / "out", 5))


def test_a_trial_that_is_behind_is_ended(tmp_path, stand_in):
    looks = []

    def look(step, accuracy):
        looks.append((step, accuracy))
        return True

    found = Job("train", ("slow",), 0).carried_out(tmp_path / "trial", {"tau": 1.0}, look, every=0.05)
    assert found == Outcome(None, "behind the others", behind=True)
    assert looks == [(1, 0.5)]
    assert accuracies(tmp_path / "trial") == [(1, 0.5)]  # not the line that is half written


def test_a_population_follows_its_best(tmp_path, stand_in):
    both = {"tau": Range(0.1, 10.0), "other": Range(0.0, 1.0, log=False)}
    job, order, plan = Job("train", ("fragile",), 0), Order(tmp_path / "out", 0), Plan(8, 4)
    found = raised(job, both, order, plan)
    runs = json.loads((tmp_path / "out" / "population.json").read_text())["runs"]
    rounds = [[run for run in runs if run["round"] == number] for number in range(4)]
    assert [len(each) for each in rounds] == [8] * 4
    first = sorted(run["values"]["tau"] for run in rounds[0])
    edges = [0.1 * 10 ** (place / 4) for place in range(9)]
    assert all(
        low <= tau <= high for tau, low, high in zip(first, edges[:-1], edges[1:], strict=True)
    )  # spread evenly
    assert any(run["score"] is None for run in rounds[0])  # one has diverged: its place is taken
    for before, after in pairwise(rounds):
        reached = {run["folder"]: -1.0 if run["score"] is None else run["score"] for run in before}
        best = sorted(reached, key=reached.get)[-2:]
        taken = [run for run in after if run["start"] != before[run["member"]]["folder"]]
        assert len(taken) >= 1
        assert all(run["start"] in best for run in taken)
        for run in taken:
            source = next(each for each in before if each["folder"] == run["start"])["values"]
            factor = run["values"]["tau"] / source["tau"]
            assert min(abs(factor - 1.25), abs(factor - 0.8)) < 0.01
            assert 0.0 <= run["values"]["other"] <= 1.0
    mean = [sum(run["score"] or 0.0 for run in each) / 8 for each in rounds]
    assert mean[-1] > mean[0] + 0.1
    assert found["lineage"][-1]["score"] == max(run["score"] for run in rounds[-1])
    assert [run["round"] for run in found["lineage"]] == [0, 1, 2, 3]
    assert (tmp_path / "out" / found["model"] / "model.safetensors").exists()
    assert not list((tmp_path / "out" / "round-1").glob("*/best/model.safetensors"))
    assert summary.best_of(found) == found["lineage"][-1]
    (tmp_path / "out" / "population.json").write_text(json.dumps({"runs": runs[:13]}))
    for folder in [tmp_path / "out" / run["folder"] for run in runs[13:]]:
        shutil.rmtree(folder)
    for run in (run for run in runs[:13] if run["score"] is not None):  # as it was then
        (tmp_path / "out" / run["folder"] / "best" / "model.safetensors").write_text("weights")
    again = raised(job, both, replace(order, resume=True), plan)
    assert again["lineage"] == found["lineage"]


def test_a_population_of_which_nobody_is_left(tmp_path, stand_in):
    with pytest.raises(ValueError, match="every member of the population failed"):
        raised(Job("train", ("broken",), 0), SPACE, Order(tmp_path / "out", 0), Plan(2, 1))
    with pytest.raises(ValueError, match="at least 2 members"):
        Plan(1, 4)


def typed(*words):
    return CliRunner().invoke(app, ["tune", *map(str, words)])


def test_mistakes(tmp_path):
    for words, said in (
        (["--taau", "1"], "taau"),
        (["--range", "taau=1:2"], "taau"),
        (["--range", "tau=2:1"], "low below high"),
    ):
        done = typed("train", *words, "--out", tmp_path / "out")
        assert isinstance(done.exception, ValueError), done.output
        assert said in str(done.exception)
        assert not (tmp_path / "out").exists()
    assert "for adpo tune train" in str(typed("prefer", "--population", 2, "--out", tmp_path / "out").exception)
    assert typed("bake").exit_code == 2


@pytest.fixture
def words(tmp_path):
    """A training of a small model that takes no longer than starting it."""
    folder = tmp_path / "model"
    make_model(WarmUp(hidden=32, layers=1)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    rewards = tmp_path / "rewards.py"  # of which an untrained model gets something
    rewards.write_text(
        "def digits(completions, **_):\n    return [sum(map(str.isdigit, text)) for text in completions]\n"
    )
    short = ["--reward", f"{rewards}:digits", "--truncated", "keep", "--range", "learning_rate=1e-2:1e-1"]
    short += ["--max_steps", 2, "--eval_every", 1, "--per_device_train_batch_size", 8, "--num_generations", 4]
    short += ["--eval_problems", 4, "--dev_problems", 8, "--train_problems", 40, "--max_completion_length", 4]
    return ["train", "--out", tmp_path / "out", "--model", folder, *short, "--tau_schedule", "hybrid"]


def test_the_command_as_typed(tmp_path, words):
    """A real training, and another one later."""
    out = tmp_path / "out"
    done = typed(*words, "--trials", 1)
    assert done.exit_code == 0, done.exception
    assert "best of them" in done.output
    assert {"best.yaml", "tables.md", "interactions.svg", "interactions.png", "results.json"} <= {
        path.name for path in out.iterdir()
    }
    again = typed(*words, "--trials", 2, "--resume")
    assert again.exit_code == 0, again.exception
    assert again.output.count("trial-") == 1
    found = json.loads((out / "results.json").read_text())
    assert len(found["trials"]) == 2
    logs = [path.read_text().splitlines() for path in out.rglob("metrics.jsonl")]
    assert logs
    assert all(any(json.loads(line).get("grad_norm", 0) > 0 for line in lines) for lines in logs)
    assert set(found["trials"][0]["values"]) == {
        "learning_rate",
        "tau",
        "tau_entropy_weight",
        "tau_reward_weight",
        "reward_beta",
    }


@pytest.mark.slow
def test_a_population_as_typed(tmp_path, words):
    done = typed(*words, "--population", 2, "--rounds", 2)
    assert done.exit_code == 0, done.exception
    assert "how the winner was raised" in done.output
    assert len(list(tmp_path.glob("out/round-1/*/best/model.safetensors"))) == 2
    assert not list(tmp_path.glob("out/round-0/*/best/model.safetensors"))
