"""Loss and gradient of every target against the straightforward K x K torch form of the same formula.

The K x K form writes each log-probability as ``-logsumexp_j(u_j - u_i)``, and a ranking as a K x K table of risk
sets, as a first implementation would; float64 like the core, differentiated by autograd, groups in blocks where
the whole table would not fit. The gradients of the two are compared in the same run. Memory is the peak above what
the process held before the call.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import adpo
from adpo.core.targets import Target

SIZES = ((64, 8), (64, 64), (256, 256), (1024, 1024))
BLOCK = 1 << 26  # cells of a K x K table held at once by the plain form: 0.5 GiB in float64


class Case(NamedTuple):
    """A target, the signals it reads, and its K x K form: loss of each group from u and those signals."""

    target: Target
    signals: Callable[[int, int], dict[str, Tensor]]
    plain: Callable[[Tensor, dict[str, Tensor]], Tensor]


def _log_p(u: Tensor) -> Tensor:
    return -torch.logsumexp(u.unsqueeze(-2) - u.unsqueeze(-1), -1)


def _soft_plain(q: Callable[[dict[str, Tensor]], Tensor]) -> Callable[[Tensor, dict[str, Tensor]], Tensor]:
    return lambda u, signals: -(q(signals) * _log_p(u)).sum(-1)


def _softmax(values: Tensor) -> Tensor:
    return (-torch.logsumexp(values.unsqueeze(-2) - values.unsqueeze(-1), -1)).exp()


def _z_scores(rewards: Tensor) -> Tensor:
    return (rewards - rewards.mean(-1, keepdim=True)) / rewards.std(-1, keepdim=True, correction=0)


def _kde_target(rewards: Tensor) -> Tensor:
    std = rewards.std(-1, keepdim=True, correction=0)
    quartiles = torch.quantile(rewards, torch.tensor([0.25, 0.75], dtype=rewards.dtype), dim=-1)
    h = 1.06 * torch.minimum(std, (quartiles[1] - quartiles[0]).unsqueeze(-1) / 1.34) * rewards.shape[-1] ** -0.2
    cdf = torch.special.ndtr((rewards.unsqueeze(-1) - rewards.unsqueeze(-2)) / h.unsqueeze(-1)).mean(-1)
    return _softmax(torch.logit(cdf.clamp(1e-4, 1 - 1e-4)))


def _ranking_plain(u: Tensor, signals: dict[str, Tensor]) -> Tensor:
    rewards = signals["rewards"]
    # not_better[i, j]: j is still in the race when i is placed; the lowest is placed last and beats nobody.
    not_better = rewards.unsqueeze(-2) <= rewards.unsqueeze(-1)
    log_z = torch.logsumexp(torch.where(not_better, u.unsqueeze(-2), -torch.inf), -1)
    return torch.where(rewards > rewards.amin(-1, keepdim=True), log_z - u, 0.0).sum(-1)


def _efron_plain(u: Tensor, signals: dict[str, Tensor]) -> Tensor:
    rewards = signals["rewards"]
    not_better = rewards.unsqueeze(-2) <= rewards.unsqueeze(-1)
    tied = rewards.unsqueeze(-2) == rewards.unsqueeze(-1)
    shrink = tied.tril(-1).sum(-1) / tied.sum(-1).to(u.dtype)  # l/d: how many of the stratum stand before
    weights = torch.where(tied, 1 - shrink.unsqueeze(-1), 1.0) * not_better
    log_z = torch.logsumexp(u.unsqueeze(-2) + weights.log(), -1)
    return torch.where(rewards > rewards.amin(-1, keepdim=True), log_z - u, 0.0).sum(-1)


def _pair_plain(u: Tensor, signals: dict[str, Tensor]) -> Tensor:
    margin = (u.unsqueeze(-1) - u.unsqueeze(-2))[:, 0, 1]
    return torch.nn.functional.softplus(margin) - signals["preference"] * margin


def _random(name: str) -> Callable[[int, int], dict[str, Tensor]]:
    return lambda groups, k: {name: torch.randn(groups, k, dtype=torch.float64)}


def _tied(groups: int, k: int) -> dict[str, Tensor]:
    return {"rewards": torch.randint(0, max(2, k // 4), (groups, k)).to(torch.float64)}


def _labels(groups: int, k: int) -> dict[str, Tensor]:
    return {"labels": torch.randint(0, k, (groups,))}


def _best(rewards: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(rewards.argmax(-1), rewards.shape[-1]).to(rewards.dtype)


def _one_hot_plain(u: Tensor, signals: dict[str, Tensor]) -> Tensor:
    return -_log_p(u).gather(-1, signals["labels"].unsqueeze(-1)).squeeze(-1)


def _distribution(groups: int, k: int) -> dict[str, Tensor]:
    return {"q": torch.softmax(torch.randn(groups, k, dtype=torch.float64), -1)}


def _preference(groups: int, _: int) -> dict[str, Tensor]:
    return {"preference": torch.rand(groups, dtype=torch.float64)}


CASES = {
    "bradley_terry": Case(adpo.bradley_terry(), _preference, _pair_plain),
    "soft": Case(adpo.targets.soft(), _distribution, _soft_plain(lambda s: s["q"])),
    "one_hot": Case(adpo.one_hot(), _labels, _one_hot_plain),
    "teacher": Case(
        adpo.targets.teacher(), _random("teacher_logp"), _soft_plain(lambda s: _softmax(s["teacher_logp"]))
    ),
    "boltzmann": Case(adpo.boltzmann(1.0), _random("rewards"), _soft_plain(lambda s: _softmax(s["rewards"]))),
    "boltzmann, z-scores": Case(
        adpo.boltzmann(1.0, standardize=True),
        _random("rewards"),
        _soft_plain(lambda s: _softmax(_z_scores(s["rewards"]))),
    ),
    "kde": Case(adpo.kde(), _random("rewards"), _soft_plain(lambda s: _kde_target(s["rewards"]))),
    "top1": Case(adpo.top1(), _random("rewards"), _soft_plain(lambda s: _best(s["rewards"]))),
    "plackett_luce": Case(adpo.plackett_luce(), _random("rewards"), _ranking_plain),
    "plackett_luce, Efron": Case(adpo.plackett_luce(), _tied, _efron_plain),
    "plackett_luce, Breslow": Case(adpo.plackett_luce(ties="breslow"), _tied, _ranking_plain),
}


class Measurement(NamedTuple):
    seconds: float
    peak_bytes: int | None
    gradient: Tensor


def run(sizes: tuple[tuple[int, int], ...] = SIZES) -> None:
    """Measure every case at every size and print the table row by row."""
    console = Console(width=110)
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float64; ours against K x K")
    table = Table("target", "groups x K", "ours", "K x K", "speed-up", "memory", "K x K", "ratio")
    cells = dict.fromkeys(
        (name, groups, 2 if name == "bradley_terry" else k) for name in CASES for groups, k in sizes
    )
    with console.status("") as status:
        for name, groups, k in cells:
            case = CASES[name]
            status.update(f"{name}, {groups} x {k}")
            torch.manual_seed(0)
            signals = case.signals(groups, k)
            logp = torch.randn(groups, k, dtype=torch.float64)
            objective = adpo.Objective(case.target, tau=0.7)
            ours = partial(_ours, objective, logp, signals)
            plain = partial(_in_blocks, case.plain, logp, signals, objective.tau)
            ours()  # the first call of a process pays for the loading of kernels
            fast, slow = _measure(ours), _measure(plain)
            torch.testing.assert_close(fast.gradient, slow.gradient, rtol=1e-8, atol=1e-8)
            table.add_row(name, f"{groups} x {k}", *_cells(fast, slow))
    console.print(table)


def _ours(objective: adpo.Objective, logp: Tensor, signals: dict[str, Tensor]) -> Tensor:
    leaf = logp.clone().requires_grad_()
    return torch.autograd.grad(objective.loss(leaf, None, reduction="sum", **signals), leaf)[0]


def _in_blocks(
    plain: Callable[[Tensor, dict[str, Tensor]], Tensor], logp: Tensor, signals: dict[str, Tensor], tau: float
) -> Tensor:
    groups, k = logp.shape
    per_block = max(1, min(groups, BLOCK // (k * k)))
    parts = []
    for start in range(0, groups, per_block):
        block = slice(start, start + per_block)
        leaf = logp[block].clone().requires_grad_()
        here = {name: values[block] for name, values in signals.items()}
        parts.append(torch.autograd.grad(plain(leaf / tau, here).sum(), leaf)[0])
    return torch.cat(parts)


def _measure(work: Callable[[], Tensor], budget: float = 0.5) -> Measurement:
    """The median of repeated calls within a time budget, and the peak memory of the first."""
    _reset_peak()
    before = _resident("VmRSS")
    started = time.perf_counter()
    gradient = work()
    times = [time.perf_counter() - started]
    peak = _resident("VmHWM")
    while sum(times) < budget and len(times) < 50:
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    above = None if before is None or peak is None else max(peak - before, 4096)
    return Measurement(sorted(times)[len(times) // 2], above, gradient)


def _reset_peak() -> None:
    """Hand free memory back and have the kernel forget the peak (Linux; elsewhere memory is not reported)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def _resident(field: str) -> int | None:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return None


def _cells(fast: Measurement, slow: Measurement) -> list[str]:
    def memory(measured: Measurement) -> str:
        return "-" if measured.peak_bytes is None else f"{measured.peak_bytes / 2**20:,.1f} MiB"

    ratio = "-"
    if fast.peak_bytes is not None and slow.peak_bytes is not None:
        ratio = f"{slow.peak_bytes / fast.peak_bytes:.1f}x"
    return [
        f"{fast.seconds * 1e3:.2f} ms",
        f"{slow.seconds * 1e3:.2f} ms",
        f"{slow.seconds / fast.seconds:.1f}x",
        memory(fast),
        memory(slow),
        ratio,
    ]
