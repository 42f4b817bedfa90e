"""`adpo tune`: what it tries, what it keeps, and what it makes of interruptions, failures and mistakes."""

import json
import sys
import textwrap

import pytest

pytest.importorskip("optuna")
pytest.importorskip("trl")

from typer.testing import CliRunner

from adpo.cli import app
from adpo.lm.embedded import WarmUp, make_model, make_tokenizer
from adpo.tuning import study, summary, trials
from adpo.tuning.spaces import Range, parsed, space
from adpo.tuning.study import Order, tuned
from adpo.tuning.trials import Job, Outcome, accuracies, carried_out

SPACE = {"tau": Range(0.1, 10.0)}
STAND_IN = """
import json, math, sys, time
from pathlib import Path
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out, tau = Path(given["--out"]), float(given["--tau"])
if given["--kind"] == "broken":
    sys.exit("something is wrong")
accuracy = math.exp(-math.log(tau) ** 2)
(out / "best").mkdir(parents=True, exist_ok=True)
(out / "checkpoint-1").mkdir(exist_ok=True)
(out / "settings.json").write_text("{}")
(out / "best" / "model.safetensors").write_text("weights")
for step in (1, 2):
    with (out / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": step, "dev/accuracy": accuracy * step / 2}) + "\\n" + "half a li")
    time.sleep(30 if given["--kind"] == "slow" and step == 1 else 0)
(out / "best" / "accuracy.json").write_text(json.dumps({"accuracy": accuracy, "step": 2}))
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
        kind = self.words[0] if self.words else "good"
        return [sys.executable, str(script), "--out", str(folder), "--kind", kind, *given]

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
    assert summary.config(found).splitlines()[1] == f"tau: {best['values']['tau']:g}"
    assert found["importance"] == {"tau": 1.0}
    assert "pruned" in {trial["state"] for trial in found["trials"]}  # what is far behind is given up
    kept = list((tmp_path / "out").glob("*/best/model.safetensors"))
    assert len(kept) == 1  # of the best alone
    assert json.loads((kept[0].parent / "accuracy.json").read_text())["accuracy"] == best["accuracy"]
    assert not list((tmp_path / "out").glob("*/checkpoint-*"))


def test_a_study_goes_on_as_if_it_had_not_been_interrupted(tmp_path, stand_in, monkeypatch):
    whole = tuned(Job("train", (), 3), SPACE, Order(tmp_path / "whole", 12))
    tried = trials.carried_out

    def killed(job, folder, *rest):
        if folder.name == "trial-005" and not folder.exists():
            folder.mkdir(parents=True)
            (folder / "settings.json").write_text("{}")
            raise KeyboardInterrupt
        return tried(job, folder, *rest)

    monkeypatch.setattr(study.trials, "carried_out", killed)
    with pytest.raises(KeyboardInterrupt):
        tuned(Job("train", (), 3), SPACE, Order(tmp_path / "out", 12))
    stand_in.clear()
    found = tuned(Job("train", (), 3), SPACE, Order(tmp_path / "out", 12, resume=True))
    assert stand_in[0][0] == "trial-005"  # first what was interrupted, in its folder
    assert stand_in[0][2] == ["--resume"]
    assert [trial["values"] for trial in found["trials"]] == [trial["values"] for trial in whole["trials"]]
    assert [trial["accuracy"] for trial in found["trials"]] == [trial["accuracy"] for trial in whole["trials"]]
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

    found = carried_out(Job("train", ("slow",), 0), tmp_path / "trial", {"tau": 1.0}, look, every=0.05)
    assert found == Outcome("behind the others")
    assert looks == [(1, 0.5)]
    assert accuracies(tmp_path / "trial") == [(1, 0.5)]  # not the line that is half written


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
    assert typed("bake").exit_code == 2


def test_the_command_as_typed(tmp_path):
    """Two real trainings of a small model, and a third one later."""
    folder, out = tmp_path / "model", tmp_path / "out"
    make_model(WarmUp(hidden=32, layers=1)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    short = ["--max_steps", 2, "--eval_every", 1, "--per_device_train_batch_size", 8, "--num_generations", 4]
    short += ["--eval_problems", 4, "--dev_problems", 8, "--train_problems", 40, "--max_completion_length", 4]
    words = ["train", "--out", out, "--model", folder, *short, "--tau_schedule", "hybrid"]
    done = typed(*words, "--trials", 2)
    assert done.exit_code == 0, done.exception
    assert "best of them" in done.output
    assert {"best.yaml", "tables.md", "interactions.svg", "interactions.png", "results.json"} <= {
        path.name for path in out.iterdir()
    }
    again = typed(*words, "--trials", 3, "--resume")
    assert again.exit_code == 0, again.exception
    assert again.output.count("trial-") == 1
    found = json.loads((out / "results.json").read_text())
    assert len(found["trials"]) == 3
    assert set(found["trials"][0]["values"]) == {
        "learning_rate",
        "tau",
        "tau_entropy_weight",
        "tau_reward_weight",
        "reward_beta",
    }
