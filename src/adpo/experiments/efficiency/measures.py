"""What is measured of trainers: updates, whole steps, the largest pass that fits, what rounding does."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import torch

from adpo.experiments.cleaned import cleaned
from adpo.experiments.efficiency.contenders import KeepGradient, trainer_of
from adpo.experiments.efficiency.policies import END, PAD, policy
from adpo.experiments.efficiency.protocol import Contender, Preset, Rollout, Work, rollout
from adpo.scoring.scorer import Forms, Scorer
from adpo.scoring.sequences import Sequences, sequences
from adpo.system.devices import best_device


class OtherWorkError(ValueError):
    """A contender that does not do the work it is timed for."""


def work_of(work: Work, model: Any) -> Rollout:
    return rollout(work, model.config.vocab_size, END)


@cleaned
def exact_gradient(contender: Contender, work: Work) -> dict[str, Any]:
    """Some of the gradient of one update in float32 (its products with the ten bits of TF32 on a GPU)."""
    model = policy(work.policy, best_device(), exact=True)
    trainer = trainer_of(contender, work, work_of(work, model), model, 1, bf16=False, tf32=_on_gpu() or None)
    trainer.add_callback(KeepGradient(trainer, 0, lambda: None))
    trainer.train()
    return {"gradient": trainer.gradient}


@cleaned
def update(contender: Contender, work: Work, preset: Preset, expected: list[float]) -> dict[str, Any]:
    """Seconds of an update, and the height of memory; but first, whether its gradient is the expected one."""
    model = policy(work.policy, best_device())
    given = work_of(work, model)
    every = 2 if contender.second_step else 1
    before = every * contender.warm_up(preset)
    steps = before + every * preset.updates
    trainer = trainer_of(contender, work, given, model, steps)
    off: list[float] = []

    def compare() -> None:
        off.append(difference(trainer.gradient, expected))
        if off[0] > preset.tolerance:
            raise OtherWorkError(
                f"{contender.name} on {work.name}: its gradient differs by {off[0]:.1%} from that in float32; "
                f"more than {preset.tolerance:.1%} is not the same work"
            )

    trainer.add_callback(KeepGradient(trainer, every - 1, compare))  # the weights never move: always the same one
    _reset_peak()
    trainer.train()
    seconds = trainer.updates[before:][every - 1 :: every]
    return {
        "seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "warm_up_seconds": trainer.updates[:before],
        "useful_tokens": given.useful,
        "peak_gib": _peak(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "gradient_off": off[0],
        **_of_passes(trainer),
    }


def _of_passes(trainer: Any) -> dict[str, Any]:
    scorer = getattr(trainer, "scorer", None)
    if scorer is None:
        return {"form": "padded: TRL's own"}
    return {
        "form": scorer.chosen(),
        "tokens_per_pass": scorer.budget.tokens,
        "largest_pass": scorer.budget.largest,
        "rows_scored": trainer.rows_scored,
    }


def difference(found: list[float], expected: list[float]) -> float:
    """Relative, in the Euclidean norm."""
    mine, theirs = torch.tensor(found), torch.tensor(expected)
    return float((mine - theirs).norm() / theirs.norm().clamp(min=1e-30))


@cleaned
def whole_step(contender: Contender, preset: Preset) -> dict[str, Any]:
    """Sampling and update together, every completion of the same length."""
    work = replace(preset.base, longest=preset.whole_step)
    model = policy(work.policy, best_device())
    given = work_of(work, model)
    before = contender.warm_up(preset)
    always = {"min_new_tokens": work.longest}
    trainer = trainer_of(contender, work, given, model, before + preset.updates, generation_kwargs=always)
    trainer.sampled = True
    trainer.train()
    whole, updates = trainer.whole[before:], trainer.updates[before:]
    sampler = getattr(trainer, "policy_sampler", None)
    return {
        "seconds": statistics.median(whole),
        "of_which_update": statistics.median(updates),
        "all_seconds": whole,
        "first_seconds": trainer.whole[0],
        "rows_left_out": trainer.rows_left_out,
        "sampling": sampler.description() if sampler is not None else "TRL's own",
        "sampled_tokens": work.rows * work.longest,
    }


@cleaned
def repeatability(preset: Preset) -> dict[str, dict[str, float]]:
    """By how much log-probabilities of the same completions under the same weights differ from those in training.

    It is what a log-ratio of two passes consists of where the policy has not moved.
    """
    work = preset.base
    exact = policy(work.policy, best_device(), exact=True)
    given = work_of(work, exact)
    rows = sequences([given.prompts[i // work.members] for i in range(work.rows)], given.completions, pad=PAD)
    groups = torch.arange(work.rows) // work.members

    def scored(scorer: Scorer, model: Any, parts: int, gradient: bool = False) -> torch.Tensor:
        found = torch.empty(work.rows, dtype=torch.float64)
        sizes = scorer.sizes(rows, groups)
        most = -(-sizes.tokens(torch.arange(work.rows)) // parts)
        cut = torch.split(torch.arange(work.rows), work.rows // parts)
        for part in sizes.passes(most, groups.device) if scorer.packs else cut:
            with torch.set_grad_enabled(gradient):
                there = Sequences(*(each.to(scorer.device) for each in rows.take(part)))
                found[part] = scorer.logp(model, there).detach().to("cpu", torch.float64)
        return found

    padded, packs = Forms(scoring="padded"), Forms(scoring="packed")
    others = {"in float32, padded": scored(Scorer(exact, padded), exact, 16)}
    del exact
    model = policy(work.policy, best_device())
    plain = Scorer(model, replace(packs, compile_layers=False))
    others["padded, all logits"] = scored(Scorer(model, padded), model, 16)
    others["packed, layers not compiled"] = scored(plain, model, 4)
    scorer = Scorer(model, packs)
    in_training = scored(scorer, model, 4, gradient=True)
    others["as in training, without gradient"] = scored(scorer, model, 4)
    others["as in training, in smaller passes"] = scored(scorer, model, 16)
    return {
        name: {"mean": float((logp - in_training).abs().mean()), "most": float((logp - in_training).abs().max())}
        for name, logp in others.items()
    }


def largest_that_fits(contender: Contender, preset: Preset) -> dict[str, Any]:
    """Tokens in one forward and backward pass, doubled until memory is out."""
    packs = contender.trainer == "ours" and ("scoring", "padded") not in contender.arguments
    work = replace(preset.base, lengths="long", groups=1)
    width = work.prompt + work.longest
    fits, tokens = 0, width * work.members
    while tokens <= preset.most_tokens:
        tried = replace(work, groups=tokens // (width * work.members))
        if not _fits(replace(contender, micro_batch=tried.rows), tried, tokens if packs else None):
            break
        fits, tokens = tokens, 2 * tokens
    return {"tokens": fits, "looked_up_to": preset.most_tokens}


@cleaned
def _fits(contender: Contender, work: Work, tokens: int | None) -> bool:
    """One update in one pass."""
    model = policy(work.policy, best_device())
    options = {} if tokens is None else {"tokens_per_pass": tokens}
    trainer = trainer_of(contender, work, work_of(work, model), model, 1, **options)
    try:
        trainer.train()
    except (torch.OutOfMemoryError, ValueError):
        return False
    return tokens is None or trainer.scorer.budget.tokens == tokens


def _on_gpu() -> bool:
    return torch.cuda.is_available()


def _reset_peak() -> None:
    if _on_gpu():
        torch.cuda.reset_peak_memory_stats()


def _peak() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if _on_gpu() else 0.0
