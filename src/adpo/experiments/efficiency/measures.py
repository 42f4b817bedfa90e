"""What is measured: updates, whole steps, the largest pass that fits, limits of the machine, the loss alone."""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch

import adpo
from adpo.baselines import grpo_loss
from adpo.experiments.efficiency.contenders import KeepGradient, clock, trainer_of
from adpo.experiments.efficiency.policies import END, PAD, policy
from adpo.experiments.efficiency.protocol import Contender, Preset, Rollout, Work, rollout
from adpo.lm.compiled import CompiledLayers, why_not_compiled
from adpo.lm.head import weighted_token_logp
from adpo.lm.packed_scoring import hidden_states
from adpo.lm.packing import Packed, packed
from adpo.lm.scorer import Forms, Scorer
from adpo.lm.scoring import sequences


def device() -> torch.device:
    return torch.accelerator.current_accelerator() or torch.device("cpu")


P = ParamSpec("P")
T = TypeVar("T")


def cleaned(measure: Callable[P, T]) -> Callable[P, T]:
    """What a measurement held is gone before the next one."""

    @functools.wraps(measure)
    def measured(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return measure(*arguments, **options)
        finally:
            gc.collect()
            torch._dynamo.reset()
            if _on_gpu():
                torch.cuda.empty_cache()

    return measured


def work_of(work: Work, model: Any) -> Rollout:
    return rollout(work, model.config.vocab_size, END)


@cleaned
def exact_gradient(contender: Contender, work: Work) -> dict[str, Any]:
    """Some of the gradient of one update in float32 (its products with the ten bits of TF32 on a GPU)."""
    model = policy(work.policy, device(), exact=True)
    trainer = trainer_of(contender, work, work_of(work, model), model, 1, bf16=False, tf32=_on_gpu() or None)
    trainer.add_callback(KeepGradient(trainer, 0, lambda: None))
    trainer.train()
    return {"gradient": trainer.gradient}


@cleaned
def update(contender: Contender, work: Work, preset: Preset, expected: list[float]) -> dict[str, Any]:
    """Seconds of an update, and the height of memory; but first, whether its gradient is the expected one."""
    model = policy(work.policy, device())
    given = work_of(work, model)
    every = 2 if contender.second_step else 1
    before = every * contender.warm_up(preset)
    steps = before + every * preset.updates
    trainer = trainer_of(contender, work, given, model, steps)
    off: list[float] = []

    def compare() -> None:
        off.append(difference(trainer.gradient, expected))
        if off[0] > preset.tolerance:
            raise ValueError(
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
    model = policy(work.policy, device())
    given = work_of(work, model)
    before = contender.warm_up(preset)
    always = {"min_new_tokens": work.longest}
    trainer = trainer_of(contender, work, given, model, before + preset.updates, generation_kwargs=always)
    trainer.sampled = True
    trainer.train()
    whole, updates = trainer.whole[before:], trainer.updates[before:]
    return {
        "seconds": statistics.median(whole),
        "of_which_update": statistics.median(updates),
        "all_seconds": whole,
        "first_seconds": trainer.whole[0],
        "rows_left_out": trainer.rows_left_out,
        "sampling": getattr(trainer, "how_sampled", lambda: "TRL's own")(),
        "sampled_tokens": work.rows * work.longest,
    }


@cleaned
def repeatability(preset: Preset) -> dict[str, dict[str, float]]:
    """Log-probabilities of the same completions under the same weights, from passes put together otherwise.

    It is what a log-ratio of a second step consists of where the policy has not moved.
    """
    work = preset.base
    model = policy(work.policy, device())
    given = work_of(work, model)
    rows = sequences([given.prompts[i // work.members] for i in range(work.rows)], given.completions, pad=PAD)
    groups = torch.arange(work.rows) // work.members
    scorer = Scorer(model, Forms(scoring="packed"))
    sizes = scorer.sizes(rows, groups)
    together = sizes.tokens(torch.arange(work.rows))  # in one pass

    def scored(tokens: int, gradient: bool) -> torch.Tensor:
        found = torch.empty(work.rows, dtype=torch.float64)
        for part in sizes.passes(tokens, groups.device):
            with torch.set_grad_enabled(gradient):
                found[part] = scorer.logp(model, rows.take(part)).detach().cpu()
        return found

    whole = scored(together, False)
    others = {"smaller passes": scored(together // 8, False), "with gradient": scored(together, True)}
    return {
        name: {"mean": float((logp - whole).abs().mean()), "most": float((logp - whole).abs().max())}
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
    model = policy(work.policy, device())
    options = {} if tokens is None else {"tokens_per_pass": tokens}
    trainer = trainer_of(contender, work, work_of(work, model), model, 1, **options)
    try:
        trainer.train()
    except (torch.OutOfMemoryError, ValueError):
        return False
    return tokens is None or trainer.scorer.budget.tokens == tokens


def limits(preset: Preset) -> dict[str, Any]:
    """What matrices of this machine give, and plain next-token training of the same policy on packed rows."""
    where = device()
    size = 8192 if where.type == "cuda" else 512
    left, right = (torch.randn(size, size, device=where, dtype=_narrow(where)) for _ in range(2))
    seconds = _fastest(lambda: left @ right, where, 20)
    found: dict[str, Any] = {"matmul_tflops": 2 * size**3 / seconds / 1e12, "device": _device_name(where)}
    for work in (preset.base, preset.axes[0]):
        found[f"next_token_{work.lengths}"] = next_token_rate(work, where, preset.updates)
    return found


@cleaned
def next_token_rate(work: Work, where: torch.device, times: int) -> dict[str, float]:
    model = policy(work.policy, where)
    batches = [batch.to(where) for batch in next_token_batches(work_of(work, model))]
    if why_not_compiled(model) is None:
        CompiledLayers(model)
    seconds = _fastest(lambda: next_token(model, batches), where, times)
    return {"seconds": seconds, "tokens_per_second": sum(len(batch.targets) for batch in batches) / seconds}


def next_token_batches(given: Rollout, budget: int = 16384) -> list[Packed]:
    """Every token of prompts and completions is a target, save the first of a row."""
    members = len(given.completions) // len(given.prompts)
    rows = [given.prompts[i // members] + completion for i, completion in enumerate(given.completions)]
    batches: list[list[list[int]]] = [[]]
    for row in rows:
        if batches[-1] and sum(map(len, batches[-1])) + len(row) > budget:
            batches.append([])
        batches[-1].append(row)
    return [packed([row[:1] for row in part], [row[1:] for row in part], share=False) for part in batches]


def next_token(model: Any, batches: list[Packed]) -> None:
    model.zero_grad(set_to_none=True)
    for batch in batches:
        states, head = hidden_states(model, batch)
        weight = torch.full(batch.targets.shape, -1 / len(batch.targets), device=states.device)
        total, _ = weighted_token_logp(states, head.weight, batch.targets, weight)
        torch.autograd.backward(total)


def loss_alone(work: Work) -> dict[str, Any]:
    """The paper's argument: one number per completion early on, against one per token to the end."""
    where = device()
    draw = torch.Generator().manual_seed(0)
    shape = (work.groups, work.members, work.longest)
    table = -torch.rand(shape, generator=draw).to(where)
    mask = torch.ones(shape, device=where)
    rewards = torch.randn(shape[:2], generator=draw).to(where)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
    objective = adpo.presets.adpo()

    def by_token() -> None:
        logp = table.clone().requires_grad_()
        flat = logp.view(-1, work.longest)
        loss = grpo_loss(flat, flat.detach(), advantages.view(-1), mask.view(-1, work.longest))
        torch.autograd.backward(loss)

    def by_completion() -> None:
        logp = table.clone().requires_grad_()
        of_rows = logp.sum(2)
        torch.autograd.backward(objective.loss(of_rows, of_rows.detach(), rewards=rewards))

    return {
        "by_token_ms": 1000 * _fastest(by_token, where, 50),
        "by_completion_ms": 1000 * _fastest(by_completion, where, 50),
    }


def _fastest(call: Callable[[], Any], where: torch.device, times: int) -> float:
    """The median after three calls to warm up."""
    for _ in range(3):
        call()
    seconds = []
    for _ in range(times):
        before = clock(where)
        call()
        seconds.append(clock(where) - before)
    return statistics.median(seconds)


def _narrow(where: torch.device) -> torch.dtype:
    return torch.bfloat16 if where.type == "cuda" else torch.float32


def _device_name(where: torch.device) -> str:
    return torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"


def _on_gpu() -> bool:
    return torch.cuda.is_available()


def _reset_peak() -> None:
    if _on_gpu():
        torch.cuda.reset_peak_memory_stats()


def _peak() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if _on_gpu() else 0.0
