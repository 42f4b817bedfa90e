"""A run that was stopped and goes on ends where an undisturbed one does, to the last bit."""

import json

import pytest
import tiny_lm
import torch
from datasets import Dataset

from adpo.trainers.checkpoints import checkpoint_files as checkpoints
from adpo.trainers.trl import ADPOConfig, ADPOTrainer, TrainingStoppedError
from adpo.trainers.trl.grpo import FastGRPOConfig, FastGRPOTrainer

PROMPTS = [{"prompt": f"{i}+{i + 1}="} for i in range(5)]
TIMES = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")


def many_digits(completions, **_):
    return [sum(c.isdigit() for c in text) + 0.1 * len(text) for text in completions]


def trained(folder, steps, resume=False, trainer=ADPOTrainer, peft=False, **options):
    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "generation_batch_size": 8,
        "max_completion_length": 5,
        "max_steps": steps,
        "learning_rate": 0.01,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "steps",
        "save_steps": 1,
        "disable_tqdm": True,
        "logging_steps": 2,
        "lr_scheduler_type": "constant",
        **options,
    }
    if trainer is ADPOTrainer:  # few completions end by themselves: without their rewards nothing would be learnt
        config = ADPOConfig(**{"truncated": "keep", **arguments})
    else:
        config = FastGRPOConfig(**arguments)
    lora = None
    if peft:
        from peft import LoraConfig

        lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    made = trainer(
        model=tiny_lm.model(),
        reward_funcs=many_digits,
        args=config,
        train_dataset=Dataset.from_list(PROMPTS),
        processing_class=tiny_lm.tokenizer(),
        peft_config=lora,
    )
    made.train(resume_from_checkpoint=True if resume else None)
    return made


def history(trainer):
    return [{k: v for k, v in entry.items() if k not in TIMES} for entry in trainer.state.log_history]


TAKEN_BACK = {
    "per_device_train_batch_size": 8,
    "num_iterations": 3,
    "backtracking": True,
    "learning_rate": 100.0,
    "optim": "sgd",
    "max_grad_norm": 0.0,
}
RUNS = {
    # generation_batch_size 8, batches of 4: two steps to a rollout; five prompts, two to a rollout: two rollouts
    # (four steps) to an epoch. Seven steps end in the middle of the second epoch.
    "in the middle of a rollout": {},
    "several passes over a rollout": {"num_iterations": 2},
    "auto": {"num_iterations": 2, "tau": "auto"},
    "guarded": {"tau_schedule": "guarded", "tau_confidence": "tokens"},
    "ema": {"anchor": "ema", "anchor_decay": 0.8},
    "refresh": {"anchor": "refresh", "anchor_every": 3},
    "fixed, budget": {"anchor": "fixed", "kl_budget": 1e9},
    "lora": {"peft": True, "anchor": "ema"},
    "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_iterations": 2},
    "steps taken back": TAKEN_BACK,
    "steps taken back, in bfloat16": {**TAKEN_BACK, "bf16": True},
    "grpo": {"trainer": FastGRPOTrainer, "num_iterations": 2},
    "grpo with a reference": {"trainer": FastGRPOTrainer, "loss_type": "dr_grpo", "num_iterations": 3},
}


@pytest.mark.parametrize("name", RUNS)
def test_stopped_at_any_step_and_resumed_is_the_same_run(tmp_path, name):
    whole = trained(tmp_path / "whole", 7, **RUNS[name])
    expected = dict(whole.model.state_dict())
    assert any(log["grad_norm"] > 0 for log in whole.state.log_history if "grad_norm" in log)
    if "backtracking" in RUNS[name]:
        assert whole.backtracking.undone > 1
    for stop in (1, 4, 5, 7):  # in a rollout, at the end of an epoch, in the second epoch, when all is done
        folder = tmp_path / f"cut-{stop}"
        trained(folder, stop, **RUNS[name])
        resumed = trained(folder, 7, resume=True, **RUNS[name])
        assert history(resumed) == history(whole)
        for key, value in resumed.model.state_dict().items():
            assert torch.equal(value, expected[key]), (stop, key)


def test_epochs_are_shuffled_differently(tmp_path):
    seen = []

    def note(completions, prompts, **_):
        seen.append(list(dict.fromkeys(prompts)))
        return [1.0] * len(completions)

    trainer = trained(tmp_path, 1)
    trainer.reward_funcs = [note]
    trainer.args.max_steps = 24
    trainer.train()
    epochs = [seen[i] + seen[i + 1] for i in range(0, len(seen), 2)]
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert all(len(set(epoch)) == 4 for epoch in epochs)


@pytest.fixture
def run(tmp_path):
    trained(tmp_path, 2, save_steps=1)
    return tmp_path


def test_a_checkpoint_names_its_files_and_nothing_is_left_over(run):
    checkpoints.verify(run / "checkpoint-2")
    manifest = json.loads((run / "checkpoint-2" / "manifest.json").read_text())
    files = {p.relative_to(run / "checkpoint-2").as_posix() for p in (run / "checkpoint-2").rglob("*")}
    assert set(manifest["files"]) == files - {"manifest.json"}
    assert {"adpo.json", "rollout.json", "optimizer.pt", "model.safetensors"} <= files
    assert not list(run.glob(".*"))


def damage(folder, how):
    path = folder / "optimizer.pt"
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "flipped":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif how == "missing":
        path.unlink()
    elif how == "no manifest":
        (folder / "manifest.json").unlink()
    elif how == "half a manifest":
        text = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(text[: len(text) // 2])


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ("cut", r"damaged \(optimizer\.pt: \d+ bytes instead of \d+\)"),
        ("flipped", r"damaged \(optimizer\.pt: its content was changed\)"),
        ("missing", r"damaged \(optimizer\.pt: it is missing\)"),
        ("no manifest", r"no manifest\.json: it was not written by adpo, or not to its end"),
        ("half a manifest", r"damaged \(manifest\.json: it cannot be read\)"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line_and_left_alone(run, how, complaint):
    damage(run / "checkpoint-2", how)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match=complaint) as caught:
        trained(run, 4, resume=True)
    assert "\n" not in str(caught.value)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("others", ["fewer", "more"])
def test_a_rollout_of_other_processes_is_refused(tmp_path, others):
    trained(tmp_path, 1, save_steps=1, num_iterations=2)
    folder = tmp_path / "checkpoint-1"  # in the middle of a rollout
    rollout = folder / "rollout_0.safetensors"
    rollout.rename(folder / "rollout_1.safetensors")
    if others == "more":
        rollout.write_bytes((folder / "rollout_1.safetensors").read_bytes())
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").unlink()
    checkpoints.seal(folder, manifest["run"], 1)
    with pytest.raises(ValueError, match=f"written by a run of {others} processes: resume it with as many"):
        trained(tmp_path, 2, resume=True, num_iterations=2)


def test_a_checkpoint_of_another_run_is_refused(run):
    with pytest.raises(ValueError, match="is a checkpoint of another run"):
        checkpoints.verify(run / "checkpoint-2", "another")


def test_old_checkpoints_go_and_the_best_one_stays(tmp_path):
    for step in (5, 10, 15, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-x").mkdir()
    checkpoints.rotate(tmp_path, 2, str(tmp_path / "checkpoint-5"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-100", "checkpoint-5", "checkpoint-x"]
    assert checkpoints.newest(tmp_path) == tmp_path / "checkpoint-100"


@pytest.mark.parametrize("failing", ["safetensors", "torch", "json"])
def test_a_checkpoint_that_cannot_be_written_ends_the_run_in_one_line(tmp_path, monkeypatch, failing):
    """As a full disk does it: to each of the libraries that write."""
    from adpo.trainers.checkpoints import state_file as state

    full = OSError(28, "No space left on device")
    trained(tmp_path, 1)
    whole = {p: p.read_bytes() for p in (tmp_path / "checkpoint-1").rglob("*") if p.is_file()}

    def refuse(*_, **__):
        raise {"torch": RuntimeError("PytorchStreamWriter failed writing file data/1: file write failed")}.get(
            failing, full
        )

    target = {"torch": (torch, "save"), "safetensors": (state, "save_file"), "json": (state, "save")}[failing]
    options = {"anchor": "ema"} if failing == "safetensors" else {}
    monkeypatch.setattr(*target, refuse)
    with pytest.raises(TrainingStoppedError, match="step 1 could not be written") as caught:
        trained(tmp_path, 3, **options)
    assert "checkpoint-1 is whole" in str(caught.value)
    assert {p: p.read_bytes() for p in (tmp_path / "checkpoint-1").rglob("*") if p.is_file()} == whole
    assert not list(tmp_path.glob(".checkpoint*"))


def test_too_little_room_is_said_before_any_step(tmp_path, monkeypatch):
    usage = checkpoints.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    with pytest.raises(ValueError, match="0 MiB free and a checkpoint takes about"):
        trained(tmp_path, 3)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "run", checkpoints.Path("/proc/adpo")):
        with pytest.raises(ValueError, match="cannot be written to: "):
            checkpoints.check_writable(place)
    checkpoints.check_writable(tmp_path / "new" / "run")
    assert not (tmp_path / "new").exists()


def test_a_run_that_its_budget_ended_has_ended(tmp_path):
    options = {"num_iterations": 2, "kl_budget": 1e-9, "learning_rate": 0.05}
    first = trained(tmp_path, 20, **options)
    assert first.state.global_step < 20
    again = trained(tmp_path, 20, resume=True, **options)
    assert again.state.global_step == first.state.global_step
