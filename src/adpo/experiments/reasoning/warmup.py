"""A start that rewards can teach: supervised learning on worked solutions, kept as a small adapter.

A model that is right in few groups has nothing to compare. The adapter is made once; every result names its hash.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adpo.experiments.reasoning import trial
from adpo.experiments.reasoning.problems import INSTRUCTION, Sets, held_out
from adpo.experiments.reasoning.protocol import Files, Preset
from adpo.experiments.reasoning.starts import Start
from adpo.experiments.reasoning.worked import worked
from adpo.runs.splits import prompt_ids, row_of
from adpo.scoring.scorer import Forms, Scorer
from adpo.scoring.sequences import Sequences, sequences
from adpo.system.files import digest, write_json
from adpo.system.provenance import provenance
from adpo.tasks.problems import load, read_rows, without_likes_of

SOLUTIONS = "gsm8k/train.jsonl"
"""In the data folder, beside what the preset reads: solutions that the start is taught."""
_CALCULATIONS = re.compile(r"<<[^>]*>>")  # of GSM8K, for a calculator that is not there
MOST_BYTES = 16 * 2**20
GOAL, LIVE_GOAL = 0.3, 0.5
"""Share of the problems at hand that a start should have right, and of groups with a gradient."""


@dataclass(frozen=True)
class Recipe:
    """How the adapter is made."""

    epochs: int
    batch: int = 64
    learning_rate: float = 1e-3
    warm_up: float = 0.05
    rank: int = 8
    repeated: int = 4  # times in an epoch, solutions of the easier problems
    seed: int = 0


def warmed_up(
    start: Start,
    data: Path,
    preset: Preset,
    sets: Sets,
    out: Path,
    recipe: Recipe,
    on_progress: Callable[[float], None],
) -> dict[str, Any]:
    """Writes the adapter and ``card.json``; what it says."""
    from peft import LoraConfig, get_peft_model

    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: choose another --out")
    torch.manual_seed(recipe.seed)
    model, tokenizer = start.load()
    lora = LoraConfig(
        r=recipe.rank, lora_alpha=2 * recipe.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, lora)
    assert preset.files is not None
    rows = lessons(data, preset.files, sets, tokenizer, recipe)
    losses = _taught(model, tokenizer, rows, recipe, on_progress)
    part = out.with_name(out.name + ".part")
    model.peft_config["default"].base_model_name_or_path = Path(start.model).stem  # not where it was
    model.to(torch.bfloat16).save_pretrained(part)
    (part / "README.md").unlink(missing_ok=True)  # peft's, of blanks
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists():
        out.rmdir()
    part.rename(out)
    made = Start(start.model, str(out))
    after = trial.examined(made, preset, sets, on_progress)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    card = {
        "recipe": asdict(recipe),
        "rows": len(rows),
        "loss": [round(losses[0], 4), round(losses[-1], 4)],
        "bytes": size,
        "adapter_sha256": digest(out / "adapter_model.safetensors"),
        "start": made.digest(),
        "after": _figures(after),
        "goal_reached": after["watched"] >= GOAL and after["live"] >= LIVE_GOAL,
        "provenance": provenance(),
    }
    write_json(out / "card.json", card)
    if size > MOST_BYTES:
        raise ValueError(f"{out} has {size} bytes, more than {MOST_BYTES}: lower the rank")
    return card


def _figures(found: dict[str, Any]) -> dict[str, Any]:
    exams = {
        name: {key: value for key, value in each.items() if not key.startswith("right")}
        for name, each in found["exams"].items()
    }
    return {"exams": exams, "watched": found["watched"], "live": found["live"]}


def lessons(
    data: Path, files: Files, sets: Sets, tokenizer: Any, recipe: Recipe
) -> list[tuple[list[int], list[int]]]:
    """Tokens of prompts and of what is to be said: solutions of GSM8K, and calculations for easier problems."""
    source = data / SOLUTIONS
    try:
        solutions = {row["question"]: str(row["answer"]) for _, row in read_rows(source)}
    except KeyError as missing:
        raise ValueError(f"{source}: a row has no {missing}; expected the fields of GSM8K") from None
    pairs = [
        (row_of(problem, tokenizer, INSTRUCTION)["prompt"], _CALCULATIONS.sub("", solutions[problem.question]))
        for problem in without_likes_of(load(source), *held_out(data, files).values())
    ]
    solved = [(row["prompt"], worked(row["question"], row["answer"])) for row in sets.warm]
    easier = [(prompt, solution) for prompt, solution in solved if solution is not None]
    found = [
        (prompt_ids(prompt, tokenizer), _said(tokenizer, text))
        for prompt, text in pairs + recipe.repeated * easier
    ]
    random.Random(recipe.seed).shuffle(found)
    return found


def _said(tokenizer: Any, text: str) -> list[int]:
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


def _taught(
    model: Any,
    tokenizer: Any,
    rows: list[tuple[list[int], list[int]]],
    recipe: Recipe,
    told: Callable[[float], None],
) -> list[float]:
    """Mean loss a token of every epoch."""
    device = next(model.parameters()).device
    trainable = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trainable, recipe.learning_rate, weight_decay=0.0)
    per_epoch = -(-len(rows) // recipe.batch)
    total = recipe.epochs * per_epoch
    rate = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=total, pct_start=recipe.warm_up
    )
    narrow = torch.bfloat16 if device.type != "cpu" else None
    scorer = Scorer(model, Forms(compile_layers=False), precision=narrow)  # compiling takes longer than it saves
    model.train()
    found = []
    for epoch in range(recipe.epochs):
        order = random.Random(f"{recipe.seed} {epoch}").sample(rows, len(rows))
        sums = torch.zeros(2, dtype=torch.float64)
        for first in range(0, len(order), recipe.batch):
            part = order[first : first + recipe.batch]
            batch = sequences([p for p, _ in part], [c for _, c in part], tokenizer.pad_token_id)
            batch = Sequences(*(each.to(device) for each in batch))
            tokens = int(batch.completion_mask.sum())
            weights = torch.full((len(part),), -1 / tokens, dtype=torch.float64, device=device)
            with torch.autocast(device.type, narrow, enabled=narrow is not None):
                loss, logp = scorer.weighted(model, batch, weights)
            _step(loss, optimizer, trainable)
            rate.step()
            sums += torch.tensor([-float(logp.sum()), tokens], dtype=torch.float64)
            told((epoch * per_epoch + first // recipe.batch + 1) / total)
        found.append(float(sums[0] / sums[1]))
    return found


def _step(loss: Tensor, optimizer: torch.optim.Optimizer, trainable: list[Tensor]) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    norm = torch.nn.utils.clip_grad_norm_(trainable, 1.0)
    if not torch.isfinite(norm):
        raise ValueError("the gradient is not finite: nothing was written; lower the learning rate")
    optimizer.step()


def told(card: dict[str, Any]) -> str:
    """As a line for the terminal."""
    after = card["after"]
    exams = ", ".join(f"{name} {each['greedy']:.1%}" for name, each in after["exams"].items())
    return (
        f"start {card['start']}: {after['watched']:.1%} of the training problems right, {after['live']:.0%} of "
        f"groups live; exams: {exams}; {card['bytes']} bytes"
        + ("" if card["goal_reached"] else f"; rewards teach more from {GOAL:.0%} right and {LIVE_GOAL:.0%} live")
    )
