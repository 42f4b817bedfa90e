"""What goes on around a run: evaluation, resuming, the hub, and those who write down its figures."""

import json
import os
import shutil
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_lm
import torch
from datasets import Dataset, IterableDataset
from entries import ENTRIES, lists, made, trained, weights
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from adpo.trainers.checkpoints import checkpoint_files as checkpoints

every_entry = pytest.mark.parametrize("entry", ENTRIES)


def test_lists_that_are_evaluated_during_training(tmp_path):
    plain, _ = trained("lists", tmp_path / "plain")
    options = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": Dataset.from_list(lists()[:2])}
    found, moved = trained("lists", tmp_path / "found", **options)
    assert moved
    assert len([log for log in found.state.log_history if "eval_accuracy" in log]) == 2
    for name, value in weights(found).items():
        assert torch.equal(value, weights(plain)[name])


def test_lists_as_a_stream(tmp_path):
    """They are read to their end, and give the run that a table gives."""
    plain, _ = trained("lists", tmp_path / "plain")
    found, moved = trained("lists", tmp_path / "found", data=IterableDataset.from_generator(lambda: iter(lists())))
    assert moved
    for name, value in weights(found).items():
        assert torch.equal(value, weights(plain)[name])


@every_entry
def test_a_checkpoint_of_other_processes_is_not_resumed(tmp_path, entry, monkeypatch):
    with monkeypatch.context() as two:
        two.setattr(checkpoints, "processes", lambda: 2)
        trained(entry, tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    trainer = made(entry, tmp_path, max_steps=2)
    with pytest.raises(ValueError, match="was written by 2 processes, not 1: resume it with as many"):
        trainer.train(resume_from_checkpoint=True)


class Hub:
    """In the place of the hub's client: keeps what would be uploaded."""

    def __init__(self, folder):
        self.folder, self.uploads = Path(folder), []

    def create_repo(self, name, **_):
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, folder_path, ignore_patterns=(), **_):
        place = self.folder / str(len(self.uploads))
        shutil.copytree(folder_path, place, ignore=shutil.ignore_patterns(*ignore_patterns))
        self.uploads.append(place)
        return SimpleNamespace(done=lambda: True, is_done=lambda: True, result=lambda: None)


@every_entry
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_what_is_pushed_is_whole(tmp_path, entry, monkeypatch):
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr("transformers.trainer.hf_api", lambda *_, **__: hub)
    options = {"push_to_hub": True, "hub_model_id": "mine", "save_strategy": "steps", "save_steps": 1}
    trainer = made(entry, tmp_path, **options)
    states = []

    class Kept(TrainerCallback):
        def on_step_end(self, *_, **__):
            states.append(weights(trainer))

    trainer.add_callback(Kept())
    trainer.train()
    trainer.push_to_hub()
    assert len(hub.uploads) == 3  # two checkpoints, and the end
    for place, state in zip(hub.uploads, [*states, states[-1]], strict=True):
        model = AutoModelForCausalLM.from_pretrained(place)
        for name, value in model.named_parameters():
            assert torch.equal(value, state[name])
        assert (
            AutoTokenizer.from_pretrained(place)("1+1=")["input_ids"] == tiny_lm.tokenizer()("1+1=")["input_ids"]
        )
        assert not [path for path in place.rglob("*") if path.name.startswith(("checkpoint-", ".checkpoint"))]
        assert "anchor" in (place / "README.md").read_text() or entry == "grpo"
        assert "DeepSeekMath" not in (place / "README.md").read_text()
    assert load_file(hub.uploads[0] / "model.safetensors").keys()


class Logged(TrainerCallback):
    """As the callbacks of trackers see it."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **_):
        self.logs.append(dict(logs))


@every_entry
def test_every_value_that_is_logged_is_a_plain_number(tmp_path, entry):
    seen = Logged()
    trained(entry, tmp_path, callbacks=[seen])
    assert len(seen.logs) == 3
    for logs in seen.logs:
        assert {type(value) for value in logs.values()} <= {int, float}
        assert json.loads(json.dumps(logs)) == logs


@every_entry
def test_tensorboard(tmp_path, entry, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer, _ = trained(entry, tmp_path, report_to=["tensorboard"])
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2]
    if entry != "grpo":
        noted = [log["adpo/tau"] for log in trainer.state.log_history if "adpo/tau" in log]
        assert [event.value for event in events.Scalars("train/adpo/tau")] == pytest.approx(noted)


TRACKERS = {
    "wandb": {"WANDB_MODE": "offline", "WANDB_SILENT": "true"},
    "mlflow": {"MLFLOW_ENABLE_ASYNC_LOGGING": "0"},
    "trackio": {},
}


@pytest.mark.slow
@every_entry
@pytest.mark.parametrize("tracker", TRACKERS)
def test_trackers(tmp_path, entry, tracker, monkeypatch):
    """Where the package is installed: what a run logs is written by it, on this machine alone."""
    package = pytest.importorskip(tracker)
    monkeypatch.chdir(tmp_path)
    for name, value in {
        **TRACKERS[tracker],
        "WANDB_DIR": str(tmp_path),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    project = f"adpo-test-{uuid.uuid4().hex}"  # Trackio's folder is that of the user once it has been imported
    trainer, moved = trained(entry, tmp_path, report_to=[tracker], run_name=f"{entry} run", project=project)
    assert moved
    expected = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    if tracker == "mlflow":
        client = package.MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
        (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
        found = [metric.value for metric in client.get_metric_history(run.info.run_id, "loss")]
        assert found == pytest.approx(expected)
    elif tracker == "wandb":
        assert package.run.summary["train/loss"] == pytest.approx(expected[-1])
        package.finish()
    else:
        storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
        logs = storage.get_logs(project, f"{entry} run")
        assert [log["train/loss"] for log in logs if "train/loss" in log] == pytest.approx(expected)
        package.delete_project(project, force=True)
