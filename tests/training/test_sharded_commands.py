"""`adpo train` and `adpo prefer` with sharded parameters (FSDP2) end as with parameters of their own."""

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

import test_sharded_processes as sharded
import torch
import two_processes
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from safetensors.torch import load_file

from adpo import cli
from adpo.models.embedded import WarmUp, make_model, make_tokenizer
from adpo.preferences.generated_lists import graded

REWARD = """
def reward(completions, **_):
    return [len(set(text)) / 40 for text in completions]
"""
COMMON = {
    "max_steps": 4,
    "eval_every": 2,
    "logging_steps": 1,
    "save_steps": 2,
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
    "per_device_train_batch_size": 6,
    "num_generations": 4,
    "max_completion_length": 40,
    "train_problems": 64,
    "eval_problems": 7,
    "dev_problems": 5,
    "eval_batch": 2,
    "level": 1,
}
SHARDS = {**sharded.SHARDS, "fsdp": "full_shard"}
COMMANDS = {
    "train": ("train", {**ONLINE, "tau": "auto"}),
    "no looks": ("train", {**ONLINE, "eval_every": 0}),
    "an adapter": ("train", {**ONLINE, "use_peft": True}),
    "grpo": ("train", {**ONLINE, "method": "grpo"}),
    "prefer": ("prefer", {"per_device_train_batch_size": 4, "tau": "auto", "completions_per_pass": 3}),
}


def typed(folder, name, out, more):
    command, options = COMMANDS[name]
    os.environ["ADPO_CACHE"] = str(folder / f"cache of {out}")  # the reference is scored anew
    config = folder / f"{out}.json"
    config.write_text(json.dumps({"model": str(folder / "model"), **COMMON, **options, **more}))
    given = (
        [str(folder / "lists.jsonl")] if command == "prefer" else ["--reward", f"{folder / 'reward.py'}:reward"]
    )
    sys.argv = ["adpo", command, *given, "--config", str(config), "--out", str(folder / out)]
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0, f"{out} ended with {end.value.code}"


def worker(folder):
    PartialState(cpu=True)
    names = json.loads((folder / "names.json").read_text())
    for name in names:
        typed(folder, name, f"{name}, plain", {})
    sharded.sharding_on_cpu()
    for name in names:
        typed(folder, name, f"{name}, sharded", SHARDS)
        assert AcceleratorState().distributed_type == DistributedType.FSDP
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in its own time


def saved(out):
    summary = json.loads((out / "summary.json").read_text())
    (file,) = Path(summary["checkpoint"]).glob("*.safetensors")
    return summary, load_file(file)


@pytest.mark.parametrize(
    "names",
    [["train", "prefer"], pytest.param(["no looks", "an adapter", "grpo"], marks=pytest.mark.slow)],
    ids=" and ".join,
)
def test_two_processes(tmp_path, monkeypatch, names):
    (tmp_path / "names.json").write_text(json.dumps(names))
    monkeypatch.setenv("ADPO_CACHE", str(tmp_path / "cache"))
    make_model(WarmUp(hidden=16, layers=1)).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "lists.jsonl").write_text("".join(json.dumps(row) + "\n" for row in graded(count=61)))
    done = two_processes.run(__file__, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in names:
        (expected, plain), (found, whole) = (saved(tmp_path / f"{name}, {kind}") for kind in ("plain", "sharded"))
        assert whole.keys() == plain.keys(), name
        for key, value in plain.items():
            torch.testing.assert_close(whole[key], value, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        figures = [key for key in expected if "accuracy" in key or key in ("steps", "log_ratio", "lists")]
        assert {key: found[key] for key in figures} == {key: expected[key] for key in figures}, name


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
