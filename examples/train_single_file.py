"""ADPO on verifiable rewards in one file: plain torch, transformers and `adpo.exact`, no trainer.

    python examples/train_single_file.py                                # sums, a small model made on the spot
    python examples/train_single_file.py --model ./my-model --data problems.jsonl --max-new-tokens 256

A row of the data is ``{"prompt": ..., "answer": ...}``; a completion is right when what follows its last ``####``
(or all of it, where there is none) equals the answer. Copy this file and change any line: the loop in `train` is
Algorithm 1 of the paper, and every function above it fits on a screen.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import adpo
from adpo import exact
from adpo.models import embedded
from adpo.tasks import generated_tasks as tasks


@dataclass
class Settings:
    model: str = ""  # a folder or a name; empty: the embedded model, made and taught first (a minute or two)
    data: str = ""  # JSON lines with prompt and answer; empty: generated sums of two digits
    out: str = ""  # where the trained model is saved; empty: nowhere
    seed: int = 0
    rollouts: int = 100
    prompts_per_rollout: int = 16
    completions_per_prompt: int = 16  # K, the size of a group
    updates_per_rollout: int = 2  # the anchor acts from the second one on: at the first, u = 0
    rows_per_pass: int = 64  # rows in one forward and backward pass; it changes memory, never the gradient
    max_new_tokens: int = 16
    sampling_temperature: float = 1.0
    tau: float = 0.3  # anchoring temperature
    beta: float = 0.5  # of the Boltzmann target softmax(reward / beta)
    learning_rate: float = 1e-4
    max_gradient_norm: float = 1.0
    evaluate_every: int = 20
    test_problems: int = 300


@dataclass
class Problem:
    prompt: str
    answer: str


@dataclass
class Rollout:
    """Completions of a few prompts, K of each side by side: one row per completion."""

    input_ids: Tensor  # [rows, length], prompt and completion, padded on both sides
    attention_mask: Tensor  # [rows, length], 1 for real tokens
    completion_mask: Tensor  # [rows, length], 1 for the tokens that the policy chose
    group_ids: Tensor  # [rows], the prompt of each row
    rewards: Tensor  # [rows]


# Problems and rewards.


def load_problems(settings: Settings) -> tuple[list[Problem], list[Problem]]:
    """Training problems and test problems; no test problem is among the former."""
    if settings.data:
        rows = [json.loads(line) for line in Path(settings.data).read_text().splitlines() if line.strip()]
        problems = [Problem(str(row["prompt"]), str(row["answer"])) for row in rows]
        held_out = [problem for problem in problems if tasks.held_out(problem.prompt)]
        rest = [problem for problem in problems if not tasks.held_out(problem.prompt)]
    else:
        sums = {split: tasks.up_to("sums", 4000, level=2, seed=0, split=split) for split in ("train", "test")}
        rest, held_out = ([Problem(p.prompt, p.answer) for p in sums[split]] for split in ("train", "test"))
    if not rest or not held_out:
        raise SystemExit(f"{settings.data}: {len(rest)} problems to train on and {len(held_out)} to test: too few")
    return rest, held_out[: settings.test_problems]


def reward(problem: Problem, completion: str) -> float:
    """1 for the right final answer, compared as text: nothing that a model wrote is executed."""
    return float(completion.rsplit("####", 1)[-1].strip() == problem.answer.strip())


# The policy: sampling and log-probabilities.


@torch.no_grad()
def generate(model: Any, tokenizer: Any, prompts: Sequence[str], settings: Settings, greedy: bool) -> Rollout:
    """One completion for each prompt; everything up to the end token counts, the end token included."""
    encoded = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left").to(model.device)
    how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": settings.sampling_temperature}
    ids = model.generate(
        input_ids=encoded.input_ids,
        attention_mask=encoded.attention_mask,
        max_new_tokens=settings.max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **({**how, "top_k": 0, "top_p": 1.0} if not greedy else how),
    )
    width = encoded.input_ids.shape[1]
    ended_before = (ids[:, width:] == tokenizer.eos_token_id).long().cumsum(1).roll(1, dims=1)
    ended_before[:, :1] = 0
    chosen = (ended_before == 0).long()
    prompt_mask = encoded.attention_mask
    rows = len(ids)
    return Rollout(
        ids,
        torch.cat([prompt_mask, chosen], 1),
        torch.cat([torch.zeros_like(prompt_mask), chosen], 1),
        torch.arange(rows, device=ids.device),
        torch.zeros(rows, device=ids.device),
    )


def texts(rollout: Rollout, tokenizer: Any) -> list[str]:
    """What the policy wrote, row by row."""
    rows = zip(rollout.input_ids, rollout.completion_mask, strict=True)
    return [tokenizer.decode(ids[mask.bool()], skip_special_tokens=True) for ids, mask in rows]


def sample(model: Any, tokenizer: Any, problems: Sequence[Problem], settings: Settings) -> Rollout:
    """K completions of each problem, and their rewards."""
    asked = [problem for problem in problems for _ in range(settings.completions_per_prompt)]
    rollout = generate(model, tokenizer, [problem.prompt for problem in asked], settings, greedy=False)
    written = texts(rollout, tokenizer)
    given = [reward(problem, text) for problem, text in zip(asked, written, strict=True)]
    rollout.rewards = torch.tensor(given, dtype=torch.float64, device=rollout.rewards.device)
    rollout.group_ids = rollout.group_ids // settings.completions_per_prompt
    return rollout


def seq_logp(model: Any, rollout: Rollout, rows: Tensor, temperature: float) -> Tensor:
    """Log-probability of whole completions, ``[len(rows)]``, under the distribution they were sampled from."""
    ids, mask = rollout.input_ids[rows], rollout.attention_mask[rows]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    token_logp = (logits[:, :-1].float() / temperature).log_softmax(-1)
    token_logp = token_logp.gather(2, ids[:, 1:, None]).squeeze(2)
    return torch.where(rollout.completion_mask[rows, 1:].bool(), token_logp, 0.0).sum(1)


# Training.-------------


def evaluate(model: Any, tokenizer: Any, problems: Sequence[Problem], settings: Settings) -> tuple[float, float]:
    """Accuracy of the most likely answers, and of answers that are sampled."""
    model.eval()
    shares = []
    for greedy in (True, False):
        right = 0.0
        for start in range(0, len(problems), 100):
            part = problems[start : start + 100]
            answers = texts(generate(model, tokenizer, [p.prompt for p in part], settings, greedy), tokenizer)
            right += sum(reward(problem, answer) for problem, answer in zip(part, answers, strict=True))
        shares.append(right / len(problems))
    return shares[0], shares[1]


def update(
    model: Any, optimizer: torch.optim.Optimizer, objective: adpo.Objective, rollout: Rollout, settings: Settings
) -> exact.GroupGradient:
    """The optimizer steps on one rollout; what the last one did."""
    rows = torch.arange(len(rollout.rewards), device=rollout.rewards.device)
    passes = rows.split(settings.rows_per_pass)

    def score(chosen: Tensor) -> Tensor:
        return seq_logp(model, rollout, chosen, settings.sampling_temperature)

    anchor_logp = None
    if settings.updates_per_rollout > 1:  # the anchor is the policy that sampled: scored before it moves
        with torch.no_grad():
            anchor_logp = torch.cat([score(part) for part in passes])
    for number in range(settings.updates_per_rollout):
        optimizer.zero_grad()
        result = exact.backward(
            objective,
            score,
            passes,
            rollout.group_ids,
            anchor_logp,
            at_anchor=number == 0,  # u = 0: the coefficients are known before any pass
            rewards=rollout.rewards,
        )
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_gradient_norm)
        if not torch.isfinite(norm):
            raise SystemExit("the gradient is not finite: lower the learning rate")
        optimizer.step()
    return result


def train(model: Any, tokenizer: Any, settings: Settings) -> Iterator[dict[str, float]]:
    """Algorithm 1: sample groups, score them, move the policy relative to its anchor; yields what is measured."""
    problems, test = load_problems(settings)
    draw = random.Random(settings.seed)
    torch.manual_seed(settings.seed)
    objective = adpo.Objective(adpo.boltzmann(beta=settings.beta), adpo.cross_entropy, tau=settings.tau)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, weight_decay=0.0)
    began = time.perf_counter()
    for number in range(settings.rollouts + 1):
        figures: dict[str, float] = {"rollout": number}
        if number % settings.evaluate_every == 0 or number == settings.rollouts:
            figures["greedy"], figures["sampled"] = evaluate(model, tokenizer, test, settings)
        if number < settings.rollouts:
            model.eval()  # no dropout: a row must have the same log-probability each time it is scored
            rollout = sample(model, tokenizer, draw.sample(problems, settings.prompts_per_rollout), settings)
            result = update(model, optimizer, objective, rollout, settings)
            figures["reward"] = rollout.rewards.mean().item()
            figures["groups with gradient"] = result.diagnostics.live.item()
            figures["KL to anchor"] = result.diagnostics.anchor_kl.item()
        figures["seconds"] = time.perf_counter() - began
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
    parser = argparse.ArgumentParser(description="ADPO on verifiable rewards, without a trainer.")
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
