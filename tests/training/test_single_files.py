"""The examples that need no trainer: they learn, and their gradients do not depend on the size of a pass."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file

from adpo.models.embedded import WarmUp, make_model, make_tokenizer
from adpo.preferences import generated_lists as lists

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def model(tmp_path):
    """Of a few thousand weights, saved as any model is."""
    folder = tmp_path / "model"
    make_model(WarmUp(hidden=16, layers=1)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def weights(folder):
    return load_file(folder / "model.safetensors")


def loaded(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_rollouts(model, tmp_path, monkeypatch, capsys):
    """Any answer that begins with a 7 is right: a model of nothing learns it in a few rollouts."""
    module = loaded("train_single_file", monkeypatch)
    monkeypatch.setattr(module, "reward", lambda problem, completion: float(completion[:1] == "7"))
    words = ["--model", model, "--rollouts", 12, "--evaluate-every", 12, "--max-new-tokens", 3]
    words += ["--learning-rate", 0.02, "--test-problems", 100]
    module.main([str(word) for word in words])
    lines = capsys.readouterr().out.splitlines()
    first, last = (dict(part.rsplit(" ", 1) for part in lines[place].split("  ")) for place in (0, -1))
    assert float(last["sampled"]) > 0.5 > 0.2 > float(first["sampled"])


def test_rollouts_in_passes_of_any_size(model, tmp_path, monkeypatch):
    """No micro-batch holds a group: 5 rows of groups of 4."""
    module = loaded("train_single_file", monkeypatch)
    data = tmp_path / "problems.jsonl"
    rows = [{"prompt": f"{i}+{i}=", "answer": str(i % 10)} for i in range(100)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(module, "reward", lambda problem, completion: float(len(completion)))
    words = ["--model", model, "--data", data, "--rollouts", 2, "--updates-per-rollout", 3, "--max-new-tokens", 4]
    words += [
        "--prompts-per-rollout",
        3,
        "--completions-per-prompt",
        4,
        "--test-problems",
        4,
        "--learning-rate",
        0.01,
    ]
    found = []
    for size in (5, 64):
        out = tmp_path / f"out{size}"
        module.main([str(word) for word in [*words, "--rows-per-pass", size, "--out", out]])
        found.append(weights(out))
    start = weights(model)
    assert any(not torch.equal(value, start[name]) for name, value in found[0].items())
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], atol=1e-4, rtol=0)


def test_lists(model, tmp_path, monkeypatch, capsys):
    module = loaded("prefer_single_file", monkeypatch)
    data = tmp_path / "lists.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in lists.graded(count=150)))
    found = []
    for size in (7, 64):
        out = tmp_path / f"out{size}"
        words = ["--model", model, "--data", data, "--epochs", 2, "--rows-per-pass", size, "--out", out]
        module.main([str(word) for word in [*words, "--learning-rate", 0.003]])
        found.append(weights(out))
        lines = [line for line in capsys.readouterr().out.splitlines() if "pairs in order" in line]
        shares = [float(line.rsplit(" ", 1)[1]) for line in lines]
        assert shares[-1] > 0.55
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], atol=1e-4, rtol=0)


def test_data_without_test_problems_end_in_one_line(model, tmp_path, monkeypatch):
    data = tmp_path / "few.jsonl"
    data.write_text(json.dumps({"prompt": "1+1=", "answer": "2", "completions": ["2", "3"], "rewards": [1, 0]}))
    for name in ("train_single_file", "prefer_single_file"):
        with pytest.raises(SystemExit, match="too few"):
            loaded(name, monkeypatch).main(["--model", str(model), "--data", str(data)])
