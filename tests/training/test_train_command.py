"""`adpo train` and `adpo eval`, typed as a user types them, on a model of a few thousand parameters."""

import itertools
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import forked

pytest.importorskip("trl")

import torch
from documented import undocumented
from safetensors.torch import load_file

from adpo import cli
from adpo.models.embedded import WarmUp, make_model, make_tokenizer, warmed_up

SMALL = WarmUp(hidden=16, layers=1)
SPEED = {
    "--max_steps": 4,
    "--per_device_train_batch_size": 16,
    "--num_generations": 4,
    "--max_completion_length": 4,
    "--train_problems": 200,
    "--eval_problems": 20,
    "--dev_problems": 10,
    "--eval_every": 2,
    "--logging_steps": 1,
    "--save_steps": 2,
    "--save_total_limit": 4,
    "--learning_rate": 1e-3,
}


def fast(*words):
    """The words, and what keeps a run short where they do not speak of it."""
    return [*words, *(str(part) for name, value in SPEED.items() if name not in words for part in (name, value))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    made = make_model(SMALL)
    made.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def typed(monkeypatch, capsys):
    """Run the command in this process: exit code, output, errors."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["adpo", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return end.value.code, said.out, said.err

    return run


@pytest.fixture
def train(typed, model, tmp_path):
    def run(*words, out=tmp_path / "out"):
        code, said, errors = typed("train", "--model", model, "--out", out, *fast(*words))
        # An untrained model is hardly ever right: a run that could teach it nothing is an end of its own.
        assert code in (0, 1), errors
        verdict = json.loads((out / "summary.json").read_text())["nothing_learnt"]
        assert (code == 1) == (verdict is not None)
        assert errors.strip().endswith(f"adpo: {verdict}") or code == 0
        return out, said

    return run


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A reward that an untrained model gets something of. Nothing it says is right: nothing would move."""
    file = tmp_path_factory.mktemp("rewards") / "rewards.py"
    file.write_text(
        "def digits(completions, **_):\n    return [sum(map(str.isdigit, text)) / 4 for text in completions]\n"
    )
    return ["--reward", f"{file}:digits"]


KEEP = ["--truncated", "keep"]
"""Hardly a completion of an untrained model ends before the limit."""


def learnt(out):
    return any(line.get("grad_norm", 0) > 0 for line in metrics(out))


def moved(weights, model):
    untrained = load_file(model / "model.safetensors")
    return any(not torch.equal(weights[name], untrained[name]) for name in untrained)


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_ends_with_figures_answers_checkpoint_and_summary(train, model):
    out, said = train("--seed", "3")
    for words in ("accuracy, most likely answer", "before", "after", "right answer", "4 steps", "Checkpoint"):
        assert words in said
    summary = json.loads((out / "summary.json").read_text())
    for name in ("accuracy_before", "accuracy_after", "accuracy_gain", "sampled_before", "sampled_after"):
        assert summary[name]["low"] <= summary[name]["value"] <= summary[name]["high"]
    assert summary["seed"] == 3
    assert summary["seconds"] > 0
    assert summary["steps"] == 4
    assert summary["command"].startswith("adpo train --model")
    assert summary["commit"]
    origin = json.loads((out / "origin.json").read_text())  # known from the beginning
    assert {name: summary[name] for name in origin} == origin
    assert (out / "best" / "model.safetensors").exists()
    assert summary["checkpoint"] == str(out / "best")
    assert undocumented(out) == set()
    found = metrics(out)
    assert [m["step"] for m in found if "adpo/tau" in m] == [1, 2, 3, 4]
    assert [m["step"] for m in found if "validation/accuracy" in m] == [2, 4]
    assert all(math.isfinite(m["outcomes/wrong"]) for m in found if "reward" in m)
    assert list((out / "runs").rglob("events.*"))  # TensorBoard
    shown = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [group["step"] for group in shown] == [2, 2, 4, 4]


def test_groups_that_are_shown_raise_what_is_rewarded_most(train, digits):
    out, _ = train("--seed", "3", *KEEP, *digits)
    shown = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert any(len({member["reward"] for member in group["members"]}) > 1 for group in shown)
    for group in shown:
        assert any(sign in group["prompt"] for sign in "+-*")
        of_best = max(group["members"], key=lambda member: member["reward"])["c"]
        assert abs(sum(member["c"] for member in group["members"])) < 1e-6  # a shift of all changes nothing
        assert of_best == min(member["c"] for member in group["members"])  # what is rewarded most is raised most


@pytest.mark.parametrize("method", ["adpo", "grpo"])
def test_a_learning_rate_that_is_far_too_large_is_found_out(train, method, tmp_path):
    """Every step is judged by the next one on its rollout; the checkpoint knows, and so does the log."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def even(completions, **_):\n    return [float(len(set(text)) % 2) for text in completions]\n"
    )
    out, _ = train(
        *(
            "--reward",
            f"{rewards}:even",
            "--method",
            method,
            "--backtracking",
            "true",
            "--num_iterations",
            "2",
            "--max_steps",
            "8",
        ),
        *("--learning_rate", "10", "--lr_scheduler_type", "constant", "--warmup_steps", "0"),
    )
    found = [m for m in metrics(out) if "adpo/steps_undone" in m]
    assert [m["step"] for m in found] == list(range(1, 9))
    undone = [m["adpo/steps_undone"] for m in found]
    assert undone[1] == 1.0
    assert all(later - sooner in (0.0, 1.0) for sooner, later in itertools.pairwise(undone))
    assert found[-1]["adpo/rate_factor"] < 0.5
    assert undocumented(out) == set()
    kept = json.loads((out / "checkpoint-8" / "backtracking.json").read_text())
    assert (kept["undone"], kept["factor"]) == (undone[-1], found[-1]["adpo/rate_factor"])
    if method == "grpo":  # ADPO keeps its guard's beside its temperature
        notes = json.loads((out / "checkpoint-8" / "notes.json").read_text())["notes"]
        assert notes["parts"] == {"guard": {"refused": 0, "in_a_row": 0}}


def test_a_run_that_ends_while_its_folder_is_opened_can_be_resumed(train, tmp_path, monkeypatch):
    """Settings are written first: what is there then is a run."""

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("adpo.runs.folder.write_json", killed)
        with pytest.raises(AssertionError):
            train()
    assert (tmp_path / "out" / "settings.json").exists()
    out, _ = train("--resume")
    assert (out / "origin.json").exists()


def test_a_run_begins_with_the_weights_of_another(train, digits, model, tmp_path):
    first, _ = train("--learning_rate", "1e-2", *KEEP, *digits, out=tmp_path / "first")
    before = json.loads((first / "summary.json").read_text())["reward_after"]
    words = ["--start", str(first / "best"), "--learning_rate", "0", *digits]
    second, _ = train(*words, out=tmp_path / "second")
    assert json.loads((second / "summary.json").read_text())["reward_before"] == before
    kept, begun = (load_file(folder / "best" / "model.safetensors") for folder in (second, first))
    assert all(torch.equal(kept[name], begun[name]) for name in begun)
    assert moved(begun, model)


def test_the_bar_knows_how_many_steps_there_will_be(train, monkeypatch):
    from adpo.runs import train as run

    totals = []
    steps = run._steps
    monkeypatch.setattr(run, "_steps", lambda *given: totals.append(steps(*given)) or totals[-1])
    words = ["--train_problems", "10", "--num_train_epochs", "2", "--num_iterations", "2", "--max_steps", "-1"]
    out, _ = train(*words, "--gradient_accumulation_steps", "1")
    assert totals == [json.loads((out / "summary.json").read_text())["steps"]]


RUNS = {
    "lora": ["--use_peft", "--lora_r", "2"],
    "ema anchor": ["--anchor", "ema", "--anchor_decay", "0.9"],
    "guarded temperature": ["--tau_schedule", "guarded", "--tau_min", "0.5", "--tau_max", "2"],
    "gspo": ["--method", "gspo", "--epsilon", "3e-4"],
    "grpo": ["--method", "grpo"],
    "dr grpo": ["--method", "dr_grpo"],
    "ranking, two inner steps": ["--target", "plackett_luce", "--num_iterations", "2", "--tau", "auto"],
    "sorting": ["--task", "sorting", "--level", "1"],
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_a_user_would_type(train, name, digits):
    ours = "grpo" not in name and name != "gspo"
    out, _ = train(*RUNS[name], *digits, *(KEEP if ours else ()))
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 4
    assert undocumented(out) == set()
    logs = metrics(out)
    assert all(math.isfinite(m["loss"]) for m in logs if "loss" in m)
    assert learnt(out)
    assert ours == any(key.startswith("adpo/") for m in logs for key in m)
    adapter = (out / "best" / "adapter_model.safetensors").exists()
    assert adapter == (name == "lora")
    if name == "ema anchor":
        assert (out / "checkpoint-4" / "adpo_anchor.safetensors").exists()
    if name == "guarded temperature":
        assert all(0.5 <= m["adpo/tau"] <= 2 for m in logs if "adpo/tau" in m)


def test_gsm8k_style_data_and_the_verifier(train, tmp_path):
    train_file, test_file = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    for file, numbers in ((train_file, range(20)), (test_file, range(20, 30))):
        rows = [{"question": f"what is {n} plus 1", "answer": f"one more: {n + 1}\n#### {n + 1}"} for n in numbers]
        file.write_text("\n".join(map(json.dumps, rows)))
    out, said = train("--data", train_file, "--eval_data", test_file, "--dev_problems", "4")
    assert "16 training, 4 validation, 10 test problems" in " ".join(said.split())
    logs = [m for m in metrics(out) if "outcomes/correct" in m]
    kinds = ("correct", "wrong", "unparsable", "timed_out")
    assert all(sum(m[f"outcomes/{kind}"] for kind in kinds) == pytest.approx(1) for m in logs)


def test_a_reward_function_of_ones_own(train, tmp_path):
    rewards, rows = tmp_path / "rewards.py", tmp_path / "prompts.jsonl"
    rewards.write_text(
        "def digits(completions, wanted, **_):\n"
        "    return [float(sum(c.isdigit() for c in text) == w) for text, w in zip(completions, wanted)]\n"
    )
    rows.write_text("\n".join(json.dumps({"prompt": f"say {n}:", "wanted": n % 3}) for n in range(60)))
    out, _ = train("--reward", f"{rewards}:digits", "--data", rows)
    assert all(0 <= m["rewards/digits/mean"] <= 1 for m in metrics(out) if "reward" in m)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["samples"][0]["problem"].startswith("say ")


GRADED = """
def graded(completions, **_):
    return [10.0 + len(text) / 7 for text in completions]

def even(completions, **_):
    return [float(len(set(text)) % 2) for text in completions]
"""


def test_a_graded_reward_is_a_reward_everywhere(train, typed, model, tmp_path):
    """Not a percentage, and no pass@k: on the way, at the end, on disk, and in adpo eval."""
    file = tmp_path / "rewards.py"
    file.write_text(GRADED)
    out, said = train("--reward", f"{file}:graded")
    assert "mean reward, most likely answer" in said
    assert "mean reward, sampled answers" in said
    assert re.search(r"step 2: .*validation 10\n|step 2: .*validation 11\n", said)
    assert not re.search("accuracy|points|%", said)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["measure"] == "mean reward"
    assert not [name for name in summary if "accuracy" in name]
    assert summary["reward_before"]["value"] > 10
    found = metrics(out)
    assert [m["step"] for m in found if m.get("validation/reward", 0) > 10] == [2, 4]
    assert not any("validation/accuracy" in m for m in found)
    figures = tmp_path / "figures.json"
    words = ["--reward", f"{file}:graded", "--samples", "4", "--max-new-tokens", "4", "--out", figures]
    code, said, errors = typed("eval", out, "--before", model, *words)
    assert code == 0, errors
    assert "mean reward, most likely answer" in said
    assert not re.search("accuracy|points|%|pass@", said)
    assert json.loads(figures.read_text())["measure"] == "mean reward"


def test_a_reward_of_nothing_but_0_and_1_is_an_accuracy(train, tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text(GRADED)
    out, said = train("--reward", f"{file}:even")
    assert "accuracy, most likely answer" in said
    assert json.loads((out / "summary.json").read_text())["measure"] == "accuracy"
    assert any("validation/reward" in m for m in metrics(out))


def test_the_best_model_is_kept_where_all_rewards_are_negative(train, tmp_path):
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def distance(completions, **_):\n    return [-5.0 - abs(3 - len(t)) for t in completions]\n"
    )
    out, _ = train("--reward", f"{rewards}:distance")
    assert json.loads((out / "best" / "validation.json").read_text())["value"] <= -5
    assert not (out / "model").exists()


REWARDS = """
async def patient(completions, completion_ids, trainer_state, log_metric, answer, **_):
    log_metric("patience", 1.0)
    assert len(completion_ids) == len(completions)
    return [float(text.strip() == a) for text, a in zip(completions, answer)]

def broken(completions, **_):
    raise KeyError("colour")

def short(completions, **_):
    return [1.0]

def ends(completions, **_):
    raise SystemExit(0)

def some(completions, **_):
    return [-3.0 if row % 4 < 2 else (None, float("nan"))[row % 2] for row in range(len(completions))]
"""


def test_rewards_are_called_as_trl_calls_them(train, typed, model, tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    out, _ = train("--reward", f"{file}:patient")
    assert all(m["patience"] == 1 for m in metrics(out) if "reward" in m)
    for name, complaint in (
        (
            "broken",
            "reward function broken failed on test or validation problems with KeyError: 'colour'",
        ),
        ("short", "reward function short gave 1 rewards for 20 completions"),
        ("ends", "reward function ends failed on test or validation problems with SystemExit: 0"),
    ):
        words = ["train", "--model", model, "--out", tmp_path / name, *fast("--reward", f"{file}:{name}")]
        code, _, errors = typed(*words)
        assert (code, errors) == (2, f"adpo: {complaint}\n")


def test_answers_without_a_reward_are_no_better_than_others(train, tmp_path, caplog):
    """As 0 they would be the best ones, where rewards are negative."""
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    out, _ = train("--reward", f"{file}:some", *KEEP)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["reward_before"]["value"] == summary["sampled_after"]["value"] == -3
    assert "10 of 20 answers have no finite reward: they count as -3" in caplog.text


def test_eval_of_any_model_on_any_data(typed, model, tmp_path):
    file = tmp_path / "problems.jsonl"
    rows = [{"question": f"what is {n} plus 1", "answer": f"#### {n + 1}"} for n in range(200)]
    file.write_text("\n".join(map(json.dumps, rows)))
    found = {}
    for seed in (1, 2):
        out = tmp_path / f"{seed}.json"
        words = ["eval", model, "--data", file, "--samples", "2", "--max-new-tokens", "3", "--seed", seed]
        code, said, errors = typed(*words, "--eval_problems", "5", "--out", out)
        assert code == 0, errors
        assert "5 test problems" in said
        found[seed] = json.loads(out.read_text())["answers"]["after"]
    assert found[1]["greedy"] == found[2]["greedy"]
    assert found[1]["sampled"] != found[2]["sampled"]
    for out, complaint in (
        (tmp_path / "no" / "where.json", "there is no folder"),
        (tmp_path, "is a folder; expected"),
    ):
        code, _, errors = typed("eval", model, "--out", out)
        assert (code, complaint in errors, errors.count("\n")) == (2, True, 1)


def test_an_interrupted_run_goes_on_where_it_stopped(train, digits, typed, model, tmp_path, monkeypatch):
    given = [*digits, *KEEP]
    whole, _ = train(*given, out=tmp_path / "whole")
    out = tmp_path / "cut"
    words = ["train", "--model", model, "--out", out, *fast(*given)]
    from adpo.runs.validation import Watch

    def interrupt(self, state):
        if state.global_step == 4:
            raise KeyboardInterrupt
        look(self, state)

    look = Watch.look
    monkeypatch.setattr(Watch, "look", interrupt)
    code, said, errors = typed(*words)
    assert (code, "stopped" in errors) == (130, True)
    assert "--resume" in said
    assert not (out / "summary.json").exists()
    monkeypatch.setattr(Watch, "look", look)
    code, _, errors = typed(*words, "--resume")
    assert code == 0, errors
    first, second = (json.loads((folder / "summary.json").read_text()) for folder in (whole, out))
    for name in ("reward_before", "reward_after", "steps"):
        assert second[name] == first[name]
    ended, expected = (load_file(folder / "checkpoint-4" / "model.safetensors") for folder in (out, whole))
    assert all(torch.equal(ended[name], expected[name]) for name in expected)
    assert moved(expected, model)
    code, _, errors = typed(*words, "--resume", "--tau", "0.5")
    assert code == 2
    assert "a run with other settings (tau: 1.0, not 0.5)" in errors


def test_the_same_command_again_with_resume(typed, model, digits, tmp_path):
    """What equals the run's settings is accepted, also what is so by default; a difference has both values."""
    out = tmp_path / "out"
    words = ["train", "--model", model, "--out", out, *fast("--seed", "3", *digits, *KEEP)]
    code, _, errors = typed(*words)
    assert code == 0, errors
    for more in ([], ["--num_iterations", "1"], ["--tau", "1", "--adam_beta1", "0.9", "--lora_r", "16"]):
        code, said, errors = typed(*words, "--resume", *more)
        assert (code, errors) == (0, "")
        assert "going on from" in said
    kept = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for more, difference in (
        (["--num_iterations", "2"], "num_iterations: 1, not 2"),
        (["--adam_beta1", "0.8"], "adam_beta1: 0.9, not 0.8"),
        (["--lora_r", "4"], "lora_r: 16, not 4"),
        (["--method", "grpo"], "method: 'adpo', not 'grpo'"),
        (["--anchor_every", "7"], "anchor_every: 50, not 7"),
    ):
        code, _, errors = typed(*words, "--resume", *more)
        assert (code, errors.count("\n")) == (2, 1)
        assert f"{out} holds a run with other settings ({difference}): resume it as it was" in errors
    seeds = ["4" if word == "3" else word for word in words]
    code, _, errors = typed(*seeds, "--resume")
    assert (code, "(seed: 3, not 4)" in errors) == (2, True)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == kept


def test_eval_of_a_run_with_another_seed(train, typed):
    out, _ = train("--seed", "3")
    code, said, errors = typed("eval", out, "--seed", "5", "--samples", "2", "--max-new-tokens", "3")
    assert code == 0, errors
    assert "20 test problems" in said


FAILED_STARTS = {
    "reward": ["--reward", "rewards.py:broken"],
    "trainer": ["--use_peft", "--lora_target_modules", "[nothing]"],
    "settings only the trainer can judge": ["--use_peft", "--anchor", "ema", "--lora_dropout", "7"],
}


@pytest.mark.parametrize("name", FAILED_STARTS)
def test_a_start_that_fails_does_not_block_the_next_try(typed, model, digits, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    out = tmp_path / "new" / "out"
    words = ["train", "--model", model, "--out", out]
    code, _, errors = typed(*words, *fast(*FAILED_STARTS[name]))
    assert (code, errors.count("\n")) == (2, 1), errors
    assert not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    code, _, errors = typed(*words, *fast(*FAILED_STARTS[name]))  # a folder that was there stays, empty
    assert code == 2
    assert list(out.iterdir()) == []
    code, _, errors = typed(*words, *fast(*digits, *KEEP))
    assert code == 0, errors


def test_a_first_step_that_fails_does_not_block_the_next_try(typed, model, digits, tmp_path, monkeypatch):
    """Such as one that is out of memory."""
    from adpo.trainers.trl import ADPOTrainer

    out = tmp_path / "out"
    words = ["train", "--model", model, "--out", out, *fast(*digits, *KEEP)]

    def too_large(*_, **__):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(ADPOTrainer, "training_step", too_large)
        patch.setattr(sys, "argv", ["adpo", *map(str, words)])
        with pytest.raises(torch.OutOfMemoryError):
            cli.main()
    assert not out.exists()
    code, _, errors = typed(*words)
    assert code == 0, errors


def test_a_start_that_was_killed_begins_again_with_other_settings(typed, model, digits, tmp_path):
    """Killed before its first step, say by a system without memory."""
    out = tmp_path / "out"
    words = ["train", "--model", model, "--out", out, *fast(*digits, *KEEP)]
    code, _, errors = typed(*words, "--seed", "1")
    assert code == 0, errors
    for path in out.iterdir():
        if path.name not in ("settings.json", "origin.json", "before.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = (out / "before.json").read_bytes()
    code, _, errors = typed(*words, "--seed", "2")
    assert (code, errors.count("\n")) == (2, 1)
    assert "holds a run that made no step: add --resume" in errors
    smaller = [*fast("--per_device_train_batch_size", "8", *digits, *KEEP), "--seed", "2", "--resume"]
    code, _, errors = typed("train", "--model", model, "--out", out, *smaller)
    assert code == 0, errors
    assert json.loads((out / "settings.json").read_text())["per_device_train_batch_size"] == 8
    assert (out / "before.json").read_bytes() != before  # other samples: it was measured again


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--learning_rte", "1"], "no setting 'learning_rte'; did you mean learning_rate?"),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml is not a file"),
        (["--method", "ppo"], "Invalid value"),
        (["--tau", "-1"], "tau must be"),
        (["--model", "/nowhere/model"], "model '/nowhere/model' cannot be loaded: there is no such folder"),
        (["--model", "./nowhere"], "model './nowhere' cannot be loaded: there is no such folder"),
        (["--data", "/nowhere.jsonl"], "/nowhere.jsonl is not a file"),
        (["--task", "poetry"], "task must be one of"),
        (["--level", "9"], "level must be between"),
        (["--reward", "mine.py"], "--reward must be file.py:function"),
        (["--reward", "mine.py:f"], "mine.py is not a file"),
        (["--resume"], "--resume needs the --out"),
        (["--train_problems", "3"], "3 problems to train on are fewer than the 4 of one rollout"),
        (["--num_generations", "0"], "num_generations must be at least 2; got 0"),
        (["--gradient_accumulation_steps", "0"], "gradient_accumulation_steps must be at least 1; got 0"),
        (["--max_steps", ".inf"], "max_steps must be a whole number; got inf"),
        (["--num_train_epochs", ".inf"], "num_train_epochs must be finite; got inf"),
        (["--max_steps", "-1", "--num_train_epochs", "0"], "num_train_epochs must be above 0; got 0"),
        (["--max_steps", "0"], "max_steps must be at least 1, or -1 for num_train_epochs to count; got 0"),
        (["--max_completion_length", "0"], "max_completion_length must be at least 1; got 0"),
        (["--learning_rate", "-1"], "learning_rate must be at least 0; got -1.0"),
        (["--deepspeed", "x.json"], "deepspeed"),
        (
            ["--accelerator_config", "nofile"],
            "accelerator_config nofile cannot be read: No such file or directory",
        ),
        (["--model_init_kwargs", "foo"], "model_init_kwargs must be a mapping; got 'foo'"),
        (["--backtracking", "true"], "make num_iterations at least 2; got 1"),
        (["--backtracking", "true", "--method", "grpo"], "make num_iterations at least 2; got 1"),
        (["--backtracking", "true", "--num_iterations", "2", "--anchor", "ema"], "does not go with anchor = ema"),
        (["--dry-run", "--reward", "mine.py:f"], "mine.py is not a file"),
        (["--dry-run", "--data", "no.jsonl"], "no.jsonl is not a file"),
        (["--max_completion_length", "500"], "no prompt leaves room for 500 tokens in the model's context of 128"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(typed, model, tmp_path, monkeypatch, words, complaint):
    monkeypatch.chdir(tmp_path)
    own = [] if "--model" in words else ["--model", model]
    code, _, errors = typed("train", *own, *fast(*words))
    assert code == 2
    assert complaint in errors
    assert errors.startswith("adpo: ")
    assert errors.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("def f(:", "own.py cannot be run: SyntaxError: invalid syntax (own.py, line 1)"),
        (
            "import torch\nimport nowhere_at_all",
            "own.py cannot be run, line 2: ModuleNotFoundError: No module named",
        ),
        ("import sys\nsys.exit(0)", "own.py cannot be run, line 2: SystemExit: 0"),
        ("x = 1\n\nprint(1 / 0)", "own.py cannot be run, line 3: ZeroDivisionError: division by zero"),
        ("\0", "own.py cannot be run: SyntaxError: source code string cannot contain null bytes"),
    ],
)
@pytest.mark.parametrize("more", [["--dry-run"], []])
def test_a_reward_file_that_cannot_be_run(typed, model, tmp_path, monkeypatch, code, complaint, more):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(code)
    end, _, errors = typed("train", "--model", model, "--reward", "own.py:f", "--out", "o", *more, *fast())
    assert end == 2
    assert errors.startswith(f"adpo: --reward own.py:f: {complaint}")
    assert errors.count("\n") == 1
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("words", [["--reward", "no.py:f"], ["--model", "m", "--data", "no.jsonl"]])
def test_what_is_not_there_is_found_out_before_a_model_is_loaded(typed, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("adpo.runs.train.model_folder", lambda *_: pytest.fail("a model was looked for"))
    code, _, errors = typed("train", *fast(*words))
    assert (code, "is not a file" in errors) == (2, True)


def test_a_folder_that_holds_something_is_left_alone(typed, model, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    code, _, errors = typed("train", "--model", model, "--out", tmp_path, *fast())
    assert code == 2
    assert "is not empty" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "example", ["qwen3_math_adpo", "qwen3_math_grpo", "qwen3_math_gspo", "qwen2.5_7b_math_adpo"]
)
def test_examples_are_valid_without_the_weights(typed, example, tmp_path, monkeypatch):
    config = Path(__file__).parents[2] / "examples" / f"{example}.yaml"
    monkeypatch.chdir(tmp_path)
    code, said, errors = typed("train", "--config", config, "--dry-run")
    assert code == 0, errors
    assert "billion parameters" in said
    assert "GiB" in said
    assert not list(tmp_path.iterdir())


def test_eval_compares_two_models_on_the_problems_of_the_run(train, typed, model, tmp_path, monkeypatch):
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def digits(completions, **_):\n"
        "    return [float(sum(map(str.isdigit, text)) > 1) for text in completions]\n"
    )
    digits = ["--reward", f"{rewards}:digits"]  # 0 or 1: an accuracy, with pass@k
    out, _ = train(*digits, *KEEP, "--learning_rate", "3e-2")
    file = tmp_path / "figures.json"
    code, said, errors = typed(
        *("eval", out, "--before", model, *digits, "--samples", "4", "--max-new-tokens", "4", "--out", file)
    )
    assert code == 0, errors
    assert "20 test problems" in said
    for words in ("most likely answer", "sampled answers", "pass@2", "pass@4", "gain"):
        assert words in said
    figures = json.loads(file.read_text())["figures"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["reward_before"]["value"] != summary["reward_after"]["value"]
    assert figures["accuracy, most likely answer"]["before"] == pytest.approx(summary["reward_before"])
    assert figures["accuracy, most likely answer"]["after"] == pytest.approx(summary["reward_after"])
    code, _, errors = typed("eval", tmp_path)
    assert (code, f"{tmp_path} holds no model: expected config.json" in errors) == (2, True)
    monkeypatch.chdir(out.parent)
    (out.parent / "runs").mkdir()
    for place in (tmp_path / "nowhere", "nowhere", "./nowhere", "runs/nowhere", "out/best/nowhere"):
        code, _, errors = typed("eval", place)
        assert (code, errors.count("\n")) == (2, 1)
        assert "there is no folder" in errors
        assert not re.search("hub|connect|offline", errors)
    for command in (["eval", "owner/nowhere"], ["train", "--model", "owner/nowhere", "--out", tmp_path / "x"]):
        code, _, errors = typed(*command)
        assert (code, errors.count("\n")) == (2, 1)
        assert "there is no such folder here, and looked up as a name on the hub: " in errors
    code, _, errors = typed("train", "--model", "runs/nowhere", "--out", tmp_path / "x")
    assert errors == "adpo: model 'runs/nowhere' cannot be loaded: there is no such folder\n"


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_settings_that_cannot_be_read_are_named(typed, model, tmp_path, text):
    folder = shutil.copytree(model, tmp_path / "run")
    (folder / "settings.json").write_text(text)
    for words in (
        ["eval", folder],
        ["train", "--out", folder, "--resume"],
        ["prefer", "--out", folder, "--resume"],
    ):
        code, _, errors = typed(*words)
        assert (code, errors.count("\n")) == (2, 1)
        assert f"{folder / 'settings.json'} cannot be read" in errors


def test_runs_of_lists_are_told_apart(typed, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "run")
    (folder / "settings.json").write_text('{"dev_lists": null, "data": "lists.jsonl", "model": "m", "seed": 0}')
    code, _, errors = typed("train", "--out", folder, "--resume")
    assert (code, f"{folder} holds a run of adpo prefer: resume it with that" in errors) == (2, True)
    (folder / "settings.json").write_text('{"dev_problems": null, "model": "m", "seed": 0}')
    code, _, errors = typed("prefer", "--out", folder, "--resume")
    assert (code, f"{folder} holds a run of adpo train: resume it with that" in errors) == (2, True)
    (folder / "settings.json").write_text('{"dev_lists": null, "data": "lists.jsonl", "model": "m", "seed": 0}')
    code, _, errors = typed("eval", folder)
    assert (code, "was trained on lists: say with --data or --task what to measure it on" in errors) == (2, True)
    short = ["--samples", "1", "--max-new-tokens", "2", "--eval_problems", "2"]
    assert typed("eval", folder, "--task", "sorting", "--instruction", "go", *short)[0] == 0


def test_what_is_damaged_in_a_run_is_named(train, digits, typed, tmp_path):
    out, _ = train(*digits, *KEEP)
    for name, what_to_do in (("before.json", "delete it"), ("best/validation.json", f"delete {out / 'best'}")):
        kept = (out / name).read_text()
        (out / name).write_text("x")
        code, _, errors = typed("train", "--out", out, "--resume")
        assert (code, f"adpo: {out / name} cannot be read" in errors, what_to_do in errors) == (2, True, True)
        (out / name).write_text(kept)


def test_eval_does_not_run_code_that_a_folder_names(typed, model, tmp_path):
    folder = tmp_path / "theirs"
    shutil.copytree(model, folder)
    trap = tmp_path / "trap.py"
    trap.write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    (folder / "settings.json").write_text(json.dumps({"model": str(folder), "reward": f"{trap}:f"}))
    code, _, errors = typed("eval", folder)
    assert code == 2
    assert "give it again with --reward" in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "ran").exists()


def test_the_warm_model_is_made_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("ADPO_CACHE", str(tmp_path))
    recipe = WarmUp(task="arithmetic", level=1, hidden=32, layers=1, goal=0.0, check_every=5)
    steps = []
    folder = warmed_up(recipe, lambda step, right: steps.append((step, right)))
    assert [step for step, _ in steps] == [5]
    assert folder.parent == tmp_path
    assert {path.name for path in tmp_path.iterdir()} == {folder.name}
    again = warmed_up(recipe, lambda *_: steps.append("again"))
    assert (again, steps.count("again")) == (folder, 0)
    with pytest.raises(ValueError, match="did not bring the model to"):
        warmed_up(WarmUp(level=1, hidden=32, layers=1, goal=1.0, max_steps=4, check_every=2))
    with pytest.raises(ValueError, match="no worked answers"):
        warmed_up(WarmUp(task="countdown"))


def test_of_two_first_runs_at_once_the_first_to_end_makes_the_model(tmp_path, monkeypatch):
    """The other one leaves it alone: it may be being read."""
    monkeypatch.setenv("ADPO_CACHE", str(tmp_path))
    recipe = WarmUp(task="arithmetic", level=1, hidden=32, layers=1, goal=0.0, check_every=5)
    nested = []

    def meanwhile(*_):
        if not nested:
            nested.append(None)
            nested[0] = (warmed_up(recipe) / "config.json").stat().st_ino

    folder = warmed_up(recipe, meanwhile)
    assert (folder / "config.json").stat().st_ino == nested[0]
    assert {path.name for path in tmp_path.iterdir()} == {folder.name}
    (folder / "config.json").unlink()  # what is not whole is made again
    assert (warmed_up(recipe) / "config.json").exists()


def test_ctrl_c_from_a_shell_leaves_a_run_that_can_be_resumed(model, tmp_path):
    out = tmp_path / "out"
    words = ["train", "--model", str(model), "--out", str(out), *fast("--max_steps", "500")]
    program = "import signal as s; s.signal(s.SIGINT, s.default_int_handler); from adpo.cli import main; main()"
    process = forked.Process("-c", program, *words)
    deadline = time.monotonic() + 180
    while not (out / "checkpoint-4" / "adpo.json").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.errors[-2000:]
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert process.errors.endswith("adpo: stopped\n")
    assert "--resume" in process.output


def test_two_processes_train_and_examine_together(model, digits, tmp_path):
    out = tmp_path / "out"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "adpo"]
    given = fast("--per_device_train_batch_size", "6", *digits, *KEEP)
    words = ["train", "--model", str(model), "--out", str(out), *given]
    result = subprocess.run([*launcher, *words], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.count("test problems; results in") == 1
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 4
    assert len(json.loads((out / "before.json").read_text())[0]["texts"]) == 20
    assert [m["step"] for m in metrics(out) if "validation/reward" in m] == [2, 4]
    assert learnt(out)


@pytest.mark.slow
def test_the_embedded_default(typed, tmp_path, monkeypatch):
    """What `make run` does, from an empty cache: minutes."""
    monkeypatch.setenv("ADPO_CACHE", str(tmp_path / "cache"))
    code, _, errors = typed("train", "--out", tmp_path / "out")
    assert code == 0, errors
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert 0.2 < summary["accuracy_before"]["value"] < 0.5
    assert summary["accuracy_gain"]["low"] >= 0.25
