"""A process killed with SIGKILL at random moments, and resumed, ends as an undisturbed one does, to the bit."""

import json
import time
from pathlib import Path

import pytest

import forked

pytest.importorskip("trl")

import torch
from safetensors.torch import load_file

from adpo.models.embedded import WarmUp, make_model, make_tokenizer
from adpo.preferences.generated_lists import graded

ONLINE = {
    "--max_steps": 14,
    "--per_device_train_batch_size": 16,
    "--num_generations": 4,
    "--num_iterations": 2,
    "--steps_per_generation": 2,
    "--max_completion_length": 4,
    "--train_problems": 24,
    "--eval_problems": 10,
    "--dev_problems": 10,
    "--eval_every": 3,
    "--logging_steps": 2,
    "--save_steps": 1,
    "--learning_rate": 1e-3,
    "--anchor": "ema",
    "--anchor_decay": 0.9,
    "--tau_schedule": "guarded",
    "--truncated": "keep",
}
REWARD = "def even(completions, **_):\n    return [float(len(set(text)) % 2) for text in completions]\n"
"""An untrained model gets nothing right: with that as its reward nothing would move."""
OFFLINE = {
    "--max_steps": 25,
    "--per_device_train_batch_size": 4,
    "--eval_every": 3,
    "--logging_steps": 2,
    "--save_steps": 1,
    "--learning_rate": 1e-3,
    "--tau_schedule": "hybrid",
    "--tau": 1,
}
TIMES = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A small model, a reward and a file of lists."""
    folder = tmp_path_factory.mktemp("given")
    make_model(WarmUp(hidden=16, layers=1)).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    (folder / "rewards.py").write_text(REWARD)
    lines = (json.dumps(row) for row in graded(count=60))
    (folder / "lists.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def words(kind, given, out):
    common = ["--model", str(given / "model"), "--out", str(out), "--resume"]
    if kind == "offline":
        cache = ["--cache", str(out.parent / "cache")]
        return ["prefer", str(given / "lists.jsonl"), *common, *cache, *flat(OFFLINE)]
    return ["train", *common, "--reward", f"{given / 'rewards.py'}:even", *flat(ONLINE)]


def flat(options):
    return [str(part) for pair in options.items() for part in pair]


def carried_out(command, log, seed=0, kills=0, longest=0.0):
    driver = Path(__file__).parent / "killing.py"
    done = forked.run(driver, seed, kills, longest, log, "--", *command, timeout=3600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["code"] == 0, log.read_text()[-3000:]
    return found["kills"]


def outcome(out):
    """All that must not depend on how often a run was killed."""
    (last,) = sorted(out.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))[-1:]
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    kept = (
        "reward_before",
        "reward_after",
        "accuracy_after",
        "sampled_after",
        "samples",
        "log_ratio",
        "mean_logp",
        "steps",
    )
    optimizer = torch.load(last / "optimizer.pt", weights_only=True)
    shadow = last / "adpo_anchor.safetensors"
    return {
        "last": last.name,
        "weights": load_file(last / "model.safetensors"),
        "best": load_file(out / "best" / "model.safetensors"),
        "optimizer": {f"{i} {k}": torch.as_tensor(v) for i, s in optimizer["state"].items() for k, v in s.items()},
        "anchor": load_file(shadow) if shadow.exists() else {},
        "state": json.loads((last / "adpo.json").read_text()),
        "metrics": [{k: v for k, v in entry.items() if k not in TIMES} for entry in metrics],
        "summary": {name: summary[name] for name in kept if name in summary},
        "shown": (out / "samples.jsonl").read_text() if (out / "samples.jsonl").exists() else "",
    }


def assert_same(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, dict) and value and all(isinstance(v, torch.Tensor) for v in value.values()):
            assert mine[name].keys() == value.keys()
            assert all(torch.equal(mine[name][key], tensor) for key, tensor in value.items()), name
        elif name == "metrics":
            for one, other in zip(mine[name], value, strict=True):
                assert {k: v for k, v in one.items() if v != other.get(k)} == {}, (one["step"], other)
                assert one == other
        else:
            assert mine[name] == value, name


@pytest.fixture(scope="module")
def undisturbed(given, tmp_path_factory):
    """What a run comes to, and how long it takes once everything is imported."""
    found = {}

    def run(kind):
        if kind not in found:
            folder = tmp_path_factory.mktemp(kind)
            started = time.monotonic()
            assert carried_out(words(kind, given, folder / "out"), folder / "log") == 0
            found[kind] = outcome(folder / "out"), time.monotonic() - started
            assert any(line.get("grad_norm", 0) > 0 for line in found[kind][0]["metrics"])
        return found[kind]

    return run


@pytest.mark.parametrize("kind", ["online", "offline"])
def test_two_kills(kind, given, undisturbed, tmp_path):
    expected, _ = undisturbed(kind)
    assert expected["metrics"]
    kills = carried_out(words(kind, given, tmp_path / "out"), tmp_path / "log", seed=time.time_ns(), kills=2)
    assert kills == 2
    assert_same(outcome(tmp_path / "out"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["online", "offline"])
def test_fifty_kills(kind, given, undisturbed, tmp_path):
    """Over as many runs as it takes."""
    expected, _ = undisturbed(kind)
    total = run = 0
    while total < 50:
        out = tmp_path / str(run)
        total += carried_out(words(kind, given, out / "out"), tmp_path / f"log-{run}", run, 50 - total, 2.5)
        assert_same(outcome(out / "out"), expected)
        run += 1
    print(f"{kind}: {total} kills over {run} runs")  # noqa: T201
