"""Digests of what adpo computes, to show that a change of the code changed no number.

    python tools/digests.py compute --source OLD_CHECKOUT --work FOLDER --out old.json
    python tools/digests.py compute --source NEW_CHECKOUT --work FOLDER --out new.json
    python tools/digests.py compare old.json new.json

Both calls need the same machine, interpreter and number of threads; ``--work`` keeps the start that both train
from. Weights are compared to the bit. Results are compared by all the numbers in them, whatever their fields are
called, without times and provenance. Options and fields that went are named; new ones are no difference.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TRAIN = [
    *("train", "--model", "{start}", "--data", "{work}/sums.jsonl", "--reward", "{work}/reward.py:right"),
    *("--seed", "0", "--max_steps", "40", "--eval_problems", "40", "--dev_problems", "40"),
    *("--max_completion_length", "6", "--per_device_train_batch_size", "64", "--num_generations", "16"),
    *("--learning_rate", "3e-4"),
]
LISTS = ["--seed", "0", "--max_steps", "20"]
JOBS: dict[str, list[str]] = {  # {start} is the model that runs begin with, {out} the folder of the run
    "train": TRAIN,
    "train with two updates": [*TRAIN, "--num_iterations", "2"],
    "train packed": [*TRAIN, "--scoring", "packed"],
    "train anchor ema": [*TRAIN, "--anchor", "ema"],
    "train lora": [*TRAIN, "--use_peft"],
    "train grpo": [*TRAIN, "--method", "grpo"],
    "train with backtracking": [*TRAIN, "--num_iterations", "2", "--backtracking", "true"],
    "prefer": ["prefer", "--model", "{start}", *LISTS],
    "prefer packed": ["prefer", "--model", "{start}", "--scoring", "packed", "--target", "boltzmann", *LISTS],
    "geometry": ["reproduce", "geometry"],
    "bandits": ["reproduce", "bandits", "--preset", "smoke", "--workers", "1"],
    "distill": ["reproduce", "distill", "--preset", "smoke", "--workers", "1"],
    "reasoning": ["reproduce", "reasoning", "--preset", "smoke", "--workers", "1"],
}
REWARD = """
def right(completions, sum, **_):
    \"\"\"The share of the digits that are right, for a reward that most groups differ in.\"\"\"
    pairs = zip(completions, sum)
    return [len([1 for a, b in zip(text, value) if a == b]) / max(len(text), len(value)) for text, value in pairs]
"""
NOT_COMPARED = (
    "second",
    "minute",
    "time",
    "clock",
    "memory",
    "commit",
    "version",
    "provenance",
    "machine",
    "device",
)
"""Parts of the names of fields that differ from run to run."""
LIST_OPTIONS = """
import dataclasses, json, typer
from adpo.cli import app
found = {}
def walk(command, path):
    for each in getattr(command, "commands", {}).values():
        walk(each, f"{path} {each.name}".strip())
    if not hasattr(command, "commands"):
        found[path] = sorted(name for option in command.params for name in option.opts)
walk(typer.main.get_command(app), "")
from adpo.trainers.listwise import ListwiseConfig
from adpo.trainers.trl import ADPOConfig
from adpo.runs.settings.prefer_settings import PreferSettings
from adpo.runs.settings.train_settings import RunSettings
for kind in (ADPOConfig, ListwiseConfig, PreferSettings, RunSettings):
    found[kind.__name__] = sorted(field.name for field in dataclasses.fields(kind))
import adpo
found["adpo"] = sorted(adpo.__all__)
print(json.dumps(found))
"""


def compute(source: Path, work: Path, only: list[str]) -> dict[str, Any]:
    """The digest of every job, run from a checkout."""
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(10, 60) for b in range(11, 31)]
    rows = ({"prompt": f"{a}+{b}=", "sum": str(a + b)} for a, b in pairs)
    (work / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / "reward.py").write_text(REWARD)
    environment = {
        **os.environ,
        "PYTHONPATH": str(source.resolve() / "src"),
        "ADPO_CACHE": str((work / "cache").resolve()),
        "OMP_NUM_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
    }
    start = _start(work, environment)
    found: dict[str, Any] = {}
    for name, words in JOBS.items():
        if only and name not in only:
            continue
        out = work / "out"
        shutil.rmtree(out, ignore_errors=True)
        _run([word.format(start=start, work=work) for word in words] + ["--out", str(out)], environment)
        found[name] = weights(out) if words[0] in ("train", "prefer") else numbers(out / "results.json")
        print(f"{name}: {found[name]}", flush=True)
    if not only or "options" in only:
        listed = subprocess.run(
            [sys.executable, "-c", LIST_OPTIONS], env=environment, check=True, capture_output=True, text=True
        )
        found["options"] = json.loads(listed.stdout.splitlines()[-1])
    return found


def _start(work: Path, environment: dict[str, str]) -> Path:
    """The embedded model as the first checkout makes it; the others begin with the same files."""
    start = work.resolve() / "start"
    if not start.exists():
        out = work / "out"
        shutil.rmtree(out, ignore_errors=True)
        words = ["train", "--max_steps", "1", "--eval_problems", "20", "--dev_problems", "0", "--out", str(out)]
        command = [sys.executable, "-m", "adpo", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        try:  # one step may teach nothing, which is an error of the command: the start is what is wanted
            (made,) = (work / "cache").glob("embedded-*")
        except ValueError:
            sys.exit(f"the embedded model was not made\n{done.stderr[-2000:]}")
        shutil.copytree(made, start)
    return start


def _run(words: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-m", "adpo", *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"adpo {' '.join(words)}\nended with {done.returncode}\n{done.stderr[-2000:]}")


def weights(out: Path) -> str:
    """Of every model and adapter that a run leaves, those of checkpoints too."""
    files = sorted(p for p in out.rglob("*.safetensors") if p.stem in ("model", "adapter_model"))
    if not files:
        sys.exit(f"{out} holds no weights")
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def numbers(path: Path) -> str:
    """Of all numbers of a result, in any order."""
    leaves = Counter(repr(value) for value in _leaves(json.loads(path.read_text())))
    return hashlib.sha256(json.dumps(sorted(leaves.items())).encode()).hexdigest()[:16]


def _leaves(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for name, part in value.items():
            if not any(word in name.lower() for word in NOT_COMPARED):
                yield from _leaves(part)
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def compare(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs, a line each."""
    lines = []
    for name, value in old.items():
        if name == "options":
            for place, names in value.items():
                gone = sorted(set(names) - set(new.get(name, {}).get(place, [])))
                lines += [f"options: {place}: {', '.join(gone)} went"] if gone else []
        elif name not in new:
            lines.append(f"{name}: not computed")
        elif new[name] != value:
            lines.append(f"{name}: {value} before, {new[name]} now")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Digests of what adpo computes.")
    commands = parser.add_subparsers(dest="command", required=True)
    computing = commands.add_parser("compute")
    computing.add_argument("--source", type=Path, default=Path(__file__).parent.parent, help="a checkout of adpo")
    computing.add_argument("--work", type=Path, required=True, help="a folder for runs, and for the start")
    computing.add_argument("--out", type=Path, required=True, help="where the digests are written")
    computing.add_argument("--only", nargs="*", default=[], choices=[*JOBS, "options"])
    comparing = commands.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    given = parser.parse_args()
    if given.command == "compute":
        before = json.loads(given.out.read_text()) if given.out.exists() else {}
        digests = compute(given.source, given.work, given.only)
        given.out.write_text(json.dumps({**before, **digests}, indent=1) + "\n")
        return
    lines = compare(json.loads(given.old.read_text()), json.loads(given.new.read_text()))
    print("\n".join(lines) or "no difference")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
