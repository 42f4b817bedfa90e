"""The output layer of a language model, by everyone's kernel: ``python -m adpo.bench head``.

Log-probabilities of given tokens from hidden states, and the gradient of ``sum c * logp`` with coefficients that
differ from token to token. Ratios of one run; memory above what is held before.
"""

from __future__ import annotations

import gc
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from adpo.scoring.fused_head import fused_token_logp, fused_token_scores, token_scores, weighted_token_logp

Head = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of states, weight, targets and coefficients: ``sum c * logp``, differentiable."""
LARGE = {"tokens": 24576, "width": 2048, "vocabulary": 151936}
TRLS_CHUNK = 32768
"""Of the vocabulary, as TRL's trainers call it."""
SMALL = {"tokens": 256, "width": 64, "vocabulary": 2048}


def run(sizes: dict[str, int]) -> None:
    """Print the table."""
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    torch.manual_seed(0)
    hidden = torch.randn(sizes["tokens"], sizes["width"], device=device, dtype=dtype)
    weight = torch.randn(sizes["vocabulary"], sizes["width"], device=device, dtype=dtype) / sizes["width"] ** 0.5
    targets = torch.randint(sizes["vocabulary"], (sizes["tokens"],), device=device)
    c = torch.randn(sizes["tokens"], device=device)
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    table = Table("head", "ms", "times ours", "memory MiB", "gradient off", title=f"{name}, {sizes}, {dtype}")
    exact = None
    measured: list[tuple[str, float, float, float]] = []
    missing: list[str] = []
    for label, head in heads(missing).items():
        leaf, matrix = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        gc.collect()
        try:
            milliseconds, memory = _measured(lambda: _step(head, leaf, matrix, targets, c), on_gpu)  # noqa: B023
        except torch.OutOfMemoryError:
            missing.append(f"{label}: out of memory")
            continue
        assert leaf.grad is not None
        if exact is None:
            exact = leaf.grad.float()
        off = float((leaf.grad.float() - exact).norm() / exact.norm())
        measured.append((label, milliseconds, memory, off))
    ours = next(milliseconds for label, milliseconds, _, _ in measured if label.startswith("ours, known"))
    for label, milliseconds, memory, off in measured:
        table.add_row(label, f"{milliseconds:.1f}", f"{milliseconds / ours:.2f}", f"{memory:.0f}", f"{off:.2%}")
    console = Console()
    console.print(table)
    for line in missing:
        console.print(f"not measured: {line}")


def heads(missing: list[str]) -> dict[str, Head]:
    """Those that are installed; the others are named."""
    found: dict[str, Head] = {
        "ours, any gradient": lambda h, w, t, c: (c * fused_token_logp(h, w, t)).sum(),
        "ours, any gradient, with entropy": lambda h, w, t, c: (c * fused_token_scores(h, w, t).logp).sum(),
        "ours, known coefficients": lambda h, w, t, c: weighted_token_logp(h, w, t, c)[0],
        "all logits": lambda h, w, t, c: (c * token_scores(h, w, t).logp).sum(),
    }
    if importlib.util.find_spec("trl"):
        from trl.kernels import ChunkedLogProbFunction

        def of_trl(h: Tensor, w: Tensor, t: Tensor, c: Tensor) -> Tensor:
            logp: Tensor = ChunkedLogProbFunction.apply(h, w, None, t, 1.0, TRLS_CHUNK, None, 1.0, ())[0]
            return (c * logp).sum()

        found["TRL, chunked"] = of_trl
    else:
        missing.append("TRL, chunked: trl is not installed")
    if torch.cuda.is_available() and importlib.util.find_spec("cut_cross_entropy"):
        cce: Any = importlib.import_module("cut_cross_entropy")

        def of_cce(h: Tensor, w: Tensor, t: Tensor, c: Tensor) -> Tensor:
            loss: Tensor = cce.linear_cross_entropy(h, w, t, reduction="none")
            return -(c * loss).sum()

        found["cut-cross-entropy"] = of_cce
    else:
        missing.append("cut-cross-entropy: needs the package and a GPU")
    missing.append("Liger's fused cross-entropy, torch's linear_cross_entropy: gradients of a sum or mean alone")
    return found


def _step(head: Head, hidden: Tensor, weight: Tensor, targets: Tensor, c: Tensor) -> None:
    hidden.grad = weight.grad = None
    torch.autograd.backward(head(hidden, weight, targets, c))


def _measured(call: Callable[[], None], on_gpu: bool, times: int = 7) -> tuple[float, float]:
    """Milliseconds, the median after two calls to warm up, and MiB at the height."""
    for _ in range(2):
        call()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if on_gpu else 0.0
    return 1000 * statistics.median(seconds), peak
