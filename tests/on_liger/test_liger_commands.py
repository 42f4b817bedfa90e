"""`adpo train` and `adpo prefer` with Liger's layers end as without them, but for rounding."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import adpo
from adpo.models.embedded import WarmUp, make_model, make_tokenizer
from adpo.preferences.generated_lists import graded

REWARD = "def reward(completions, **_):\n    return [len(set(text)) / 4 for text in completions]\n"
COMMON = {
    "max_steps": 2,
    "eval_every": 0,
    "logging_steps": 1,
    "learning_rate": 0.05,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "report_to": "none",
    "scoring": "padded",
    "bf16": False,
}
ONLINE = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 3,
    "eval_problems": 2,
    "dev_problems": 0,
    "temperature": 1.0,
}
RUNS = {
    "train": ("train", {**ONLINE, "truncated": "keep"}),
    "train, TRL's loss": ("train", {**ONLINE, "method": "grpo"}),
    "prefer": ("prefer", {"per_device_train_batch_size": 2, "eval_lists": 2, "dev_lists": 0, "tau": 1.0}),
}
FORWARD = {"_rms_norm_forward_kernel", "_triton_rope", "_swiglu_forward_kernel"}
BACKWARD = {"_rms_norm_backward_kernel", "_triton_rope", "_swiglu_backward_kernel"}
EXACT = 2e-6
"""Of weights that move by a thousandth and more."""


@pytest.mark.parametrize("name", RUNS)
def test_as_without_them(tmp_path, name):
    make_model(WarmUp(hidden=16, layers=1)).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{n}+1="}}\n' for n in range(12)))
    (tmp_path / "lists.jsonl").write_text("".join(json.dumps(row) + "\n" for row in graded(count=12)))
    expected, without = saved(tmp_path, name, "plain", {})
    found, counts = saved(tmp_path, name, "liger", {"use_liger_kernel": True})
    assert without == {}
    assert counts.keys() >= FORWARD | BACKWARD
    start = load_file(tmp_path / "model" / "model.safetensors")
    assert max(float((value - start[key]).abs().max()) for key, value in expected.items()) > 1e-3
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=EXACT, msg=lambda m, n=key: f"{n}: {m}")


def saved(folder, name, out, more):
    """What the run of a command saved, and how often it started which kernel."""
    command, options = RUNS[name]
    config = folder / f"{out}.json"
    config.write_text(json.dumps({"model": str(folder / "model"), **COMMON, **options, **more}))
    rewarded = ["--data", str(folder / "prompts.jsonl"), "--reward", f"{folder / 'reward.py'}:reward"]
    data = [str(folder / "lists.jsonl")] if command == "prefer" else rewarded
    words = [command, *data, "--config", str(config), "--out", str(folder / out)]
    paths = [str(Path(adpo.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "interpreted.py"), str(folder / f"{out}.counts"), *words],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "ADPO_CACHE": str(folder / f"cache of {out}"),  # the reference of lists is scored anew
        },
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (weights,) = (folder / out / "model").glob("*.safetensors")
    return load_file(weights), json.loads((folder / f"{out}.counts").read_text())
