"""Features that need a CUDA device (``pytest -m gpu``): Liger's layers, and flags of the commands."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

from entries import ENTRIES, trained, weights
from test_commands import words_of
from test_vllm_cuda import model as larger_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LEARN = ["--max_completion_length", "16", "--learning_rate", "1e-4"]
VLLM = [*LEARN, "--use_vllm", "true", "--vllm_mode", "colocate", "--vllm_gpu_memory_utilization", "0.1"]
VLLM += ["--vllm_max_model_length", "200", "--bf16", "true"]
FLAGS = {
    "vllm": ("train", VLLM),
    "vllm, sleeping, an adapter": ("train", [*VLLM, "--vllm_enable_sleep_mode", "true", "--use_peft"]),
    "fp16": ("train", [*LEARN, "--fp16", "true", "--bf16", "false"]),
    "fp16, lists": ("prefer", ["--fp16", "true", "--bf16", "false", "--learning_rate", "1e-4"]),
    "liger": ("train", [*LEARN, "--use_liger_kernel", "true"]),
    "liger, lists": ("prefer", ["--use_liger_kernel", "true", "--learning_rate", "1e-4"]),
    "own decoder": ("train", [*LEARN, "--record_sampling", "true", "--bf16", "true"]),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_liger_layers(tmp_path, entry):
    """The run without them, but for rounding."""
    pytest.importorskip("liger_kernel")
    options = {"use_cpu": False, "scoring": "padded"}
    plain, _ = trained(entry, tmp_path / "plain", **options)
    found, moved = trained(entry, tmp_path / "found", use_liger_kernel=True, **options)
    assert moved
    assert any("liger" in str(getattr(module.forward, "__module__", "")) for module in found.model.modules())
    expected = weights(plain)
    for name, value in weights(found).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", FLAGS)
def test_flags(given, tmp_path, name):
    """In a process of its own, as a user types them."""
    command, words = FLAGS[name]
    for package in ("vllm", "liger_kernel"):
        if name.startswith(package[:4]):
            pytest.importorskip(package)
    larger_model(tmp_path / "model")
    out = tmp_path / "out"
    typed = words_of(command, given, *words, "--model", tmp_path / "model", "--out", out)
    quiet = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    source = str(Path(__file__).parents[2] / "src")
    paths = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "adpo", *map(str, typed)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, **quiet, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["nothing_learnt"] is None
    if command == "train" and name in ("vllm", "own decoder"):
        assert ("vLLM" if name == "vllm" else "steps recorded") in summary["sampling"]
