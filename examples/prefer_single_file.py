"""Anchored ranking of lists of completions in one file: plain torch, transformers and `adpo.exact`, no trainer.

    python examples/prefer_single_file.py                           # generated lists, the embedded model
    python examples/prefer_single_file.py --model ./my-model --data lists.jsonl

A row of the data is ``{"prompt": ..., "completions": [...], "rewards": [...]}`` with two completions or more;
pairs are lists of two, and there the loss is DPO's with ``beta = 1 / tau``. Copy this file and change any line.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import adpo
from adpo import exact
from adpo.models import embedded
from adpo.preferences import generated_lists as lists
from adpo.tasks import generated_tasks as tasks


@dataclass
class Settings:
    model: str = ""  # a folder or a name; empty: the embedded model, made and taught first (a minute or two)
    data: str = ""  # JSON lines; empty: generated lists of answers to sums
    out: str = ""  # where the trained model is saved; empty: nowhere
    seed: int = 0
    epochs: int = 1
    lists_per_step: int = 16
    rows_per_pass: int = 64  # completions in one forward and backward pass; the gradient is the same
    tau: float = 1.0  # anchoring temperature, 1 / beta of DPO
    learning_rate: float = 3e-4
    max_gradient_norm: float = 1.0


@dataclass
class Batch:
    """Lists, one row per completion."""

    input_ids: Tensor  # [rows, length], padded on the right
    attention_mask: Tensor  # [rows, length]
    completion_mask: Tensor  # [rows, length], 1 for the tokens of the completion
    group_ids: Tensor  # [rows], the list of each row
    rewards: Tensor  # [rows]


Row = dict[str, Any]


def load_lists(settings: Settings) -> tuple[list[Row], list[Row]]:
    """Lists to train on and lists to test on; a prompt is in one of them alone."""
    if not settings.data:
        train, test = (lists.graded("sums", 2000, split=split) for split in ("train", "test"))
        return train, test[:200]
    rows = [json.loads(line) for line in Path(settings.data).read_text().splitlines() if line.strip()]
    test = [row for row in rows if tasks.held_out(row["prompt"])]
    train = [row for row in rows if not tasks.held_out(row["prompt"])]
    if not train or not test:
        raise SystemExit(f"{settings.data}: {len(train)} lists to train on and {len(test)} to test: too few")
    return train, test


def collate(rows: Sequence[Row], tokenizer: Any, device: torch.device) -> Batch:
    """Token ids of every prompt with every one of its completions, and an end token."""
    ids, prompts, groups, rewards = [], [], [], []
    for number, row in enumerate(rows):
        prompt = tokenizer.encode(row["prompt"], add_special_tokens=False)
        for completion, reward in zip(row["completions"], row["rewards"], strict=True):
            answer = tokenizer.encode(completion, add_special_tokens=False)
            ids.append([*prompt, *answer, tokenizer.eos_token_id])
            prompts.append(len(prompt))
            groups.append(number)
            rewards.append(float(reward))
    width = max(map(len, ids))
    padded = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in ids])
    place = torch.arange(width)
    real = place < torch.tensor([[len(row)] for row in ids])
    parts = (padded, real.long(), (real & (place >= torch.tensor(prompts)[:, None])).long(), torch.tensor(groups))
    return Batch(*(part.to(device) for part in parts), torch.tensor(rewards, dtype=torch.float64).to(device))


def seq_logp(model: Any, batch: Batch, rows: Tensor) -> Tensor:
    """Log-probability of whole completions given their prompts, ``[len(rows)]``."""
    ids, mask = batch.input_ids[rows], batch.attention_mask[rows]
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    token_logp = logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return torch.where(batch.completion_mask[rows, 1:].bool(), token_logp, 0.0).sum(1)


@torch.no_grad()
def scored(model: Any, batch: Batch, settings: Settings) -> Tensor:
    """Log-probabilities of a whole batch, ``[rows]``."""
    rows = torch.arange(len(batch.rewards), device=batch.rewards.device)
    return torch.cat([seq_logp(model, batch, part) for part in rows.split(settings.rows_per_pass)])


def in_order(moved: Tensor, batch: Batch) -> float:
    """Share of the pairs of a list, of different rewards, that the anchored policy puts in order."""
    same = batch.group_ids[:, None] == batch.group_ids
    better = same & (batch.rewards[:, None] > batch.rewards)
    return (moved[:, None] > moved)[better].double().mean().item()


def train(model: Any, tokenizer: Any, settings: Settings) -> Iterator[dict[str, float]]:
    """One pass over the lists per epoch; yields what is measured."""
    rows, test_rows = load_lists(settings)
    torch.manual_seed(settings.seed)
    draw = random.Random(settings.seed)
    model.eval()  # no dropout: a row must have the same log-probability each time it is scored
    ranking = adpo.Objective(adpo.plackett_luce(ties="efron"), tau=settings.tau)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, weight_decay=0.0)
    starts = range(0, len(rows), settings.lists_per_step)
    batches = [collate(rows[i : i + settings.lists_per_step], tokenizer, model.device) for i in starts]
    anchors = [scored(model, batch, settings) for batch in batches]  # fixed: scored before anything moves
    test = collate(test_rows, tokenizer, model.device)
    test_anchor = scored(model, test, settings)
    for epoch in range(settings.epochs):
        order = list(range(len(batches)))
        draw.shuffle(order)
        for step, number in enumerate(order):
            batch = batches[number]
            optimizer.zero_grad()
            result = exact.backward(
                ranking,
                lambda chosen, batch=batch: seq_logp(model, batch, chosen),
                torch.arange(len(batch.rewards), device=model.device).split(settings.rows_per_pass),
                batch.group_ids,
                anchors[number],
                rewards=batch.rewards,
            )
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_gradient_norm)
            if not torch.isfinite(norm):
                raise SystemExit("the gradient is not finite: lower the learning rate")
            optimizer.step()
            figures = {"epoch": epoch, "step": step, "loss": result.loss.item()}
            figures["log-ratio"] = result.diagnostics.log_ratio.item()  # falls where whole lists lose probability
            if step % 20 == 0 or step == len(order) - 1:
                figures["test pairs in order"] = in_order(scored(model, test, settings) - test_anchor, test)
                yield figures


def load_model(settings: Settings) -> tuple[Any, Any]:
    """In float32: updates of this size are lost in weights of 16 bits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = settings.model or str(embedded.warmed_up(embedded.WarmUp(task="sums")))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device), tokenizer


def parsed(arguments: Sequence[str] | None = None) -> Settings:
    """Every field of `Settings` is an option."""
    parser = argparse.ArgumentParser(description="Anchored ranking of lists, without a trainer.")
    for field in fields(Settings):
        kind = type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    return Settings(**vars(parser.parse_args(arguments)))


def main(arguments: Sequence[str] | None = None) -> None:
    settings = parsed(arguments)
    model, tokenizer = load_model(settings)
    for figures in train(model, tokenizer, settings):
        print("  ".join(f"{name} {value:.3g}" for name, value in figures.items()), flush=True)
    if settings.out:
        model.save_pretrained(settings.out)
        tokenizer.save_pretrained(settings.out)
        print(f"saved to {settings.out}")


if __name__ == "__main__":
    main()
