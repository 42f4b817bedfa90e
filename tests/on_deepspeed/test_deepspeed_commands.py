"""`adpo train` and `adpo prefer` with DeepSpeed's engine end as without it."""

import json
import subprocess
import sys

import pytest
from safetensors.torch import load_file
from test_deepspeed import engine

from adpo.models.embedded import WarmUp, make_model, make_tokenizer
from adpo.preferences.generated_lists import graded

REWARD = "def reward(completions, **_):\n    return [len(set(text)) / 40 for text in completions]\n"
COMMON = {
    "max_steps": 3,
    "eval_every": 0,
    "logging_steps": 1,
    "learning_rate": 0.05,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "report_to": "none",
    "ddp_backend": "gloo",
    "scoring": "padded",
    "bf16": False,
}
ONLINE = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 8,
    "eval_problems": 4,
    "dev_problems": 0,
    "truncated": "keep",
    "temperature": 1.0,
}
RUNS = {"train": ONLINE, "prefer": {"per_device_train_batch_size": 4, "dev_lists": 0, "tau": 1.0}}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("command", RUNS)
def test_as_without_it(tmp_path, monkeypatch, command, stage):
    monkeypatch.setenv("ADPO_CACHE", str(tmp_path / "cache"))
    make_model(WarmUp(hidden=16, layers=1)).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "lists.jsonl").write_text("".join(json.dumps(row) + "\n" for row in graded(count=40)))
    data = (
        ["--reward", f"{tmp_path / 'reward.py'}:reward"] if command == "train" else [f"{tmp_path / 'lists.jsonl'}"]
    )
    found = []
    for name, more in (("plain", {}), ("engine", {"deepspeed": engine(stage)})):
        config = tmp_path / f"{name}.json"
        config.write_text(json.dumps({"model": str(tmp_path / "model"), **COMMON, **RUNS[command], **more}))
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=1",
            "-m",
            "adpo",
        ]
        words = [command, *data, "--config", str(config), "--out", str(tmp_path / name)]
        done = subprocess.run([*launcher, *words], capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        (saved,) = (tmp_path / name / "model").glob("*.safetensors")
        found.append(load_file(saved))
    start = load_file(tmp_path / "model" / "model.safetensors")
    assert any((value != start[key]).any() for key, value in found[0].items())
    for key, value in found[0].items():
        assert (found[1][key] - value).abs().max() < 2e-6, key
