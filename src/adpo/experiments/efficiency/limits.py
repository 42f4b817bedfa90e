"""What a machine gives at best: matrices, plain next-token training; and what the loss alone takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

import adpo
from adpo.baselines import grpo_loss
from adpo.experiments.cleaned import cleaned
from adpo.experiments.efficiency.contenders import clock
from adpo.experiments.efficiency.measures import work_of
from adpo.experiments.efficiency.policies import policy
from adpo.experiments.efficiency.protocol import Preset, Rollout, Work
from adpo.scoring.compiled import CompiledLayers, why_not_compiled
from adpo.scoring.fused_head import weighted_token_logp
from adpo.scoring.packed.packed_scoring import hidden_states
from adpo.scoring.packed.packing import Packed, packed
from adpo.system.devices import best_device


def limits(preset: Preset) -> dict[str, Any]:
    """What matrices of this machine give, and plain next-token training of the same policy on packed rows."""
    where = best_device()
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
    where = best_device()
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
