"""The group step: rows of an optimizer step in, the gradient of the whole-group loss out.

It knows groups, anchors and memory; of trainers and where rows come from it knows nothing, so rollouts and lists
from a file go through the same one. `adpo.exact` says what is computed, `Passes` in how many pieces.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from adpo import exact
from adpo.core.objective import Objective
from adpo.deprecated import renamed
from adpo.exact import ScoreRows, WeighRows
from adpo.scoring.scorer import Scorer
from adpo.trainers.engine import engine_of
from adpo.trainers.monitors.empty_steps import EmptySteps
from adpo.trainers.sharding import SHARDED

T = TypeVar("T")
FEW = 4096
"""Tokens a pass below which activations are rather made twice than kept."""
log = logging.getLogger("adpo")


@contextlib.contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """What the CPU does beside a GPU is small: threads would wait for each other longer than they work."""
    threads = torch.get_num_threads()
    if device.type == "cuda":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


class ByIndex(NamedTuple):
    """What a trainer knows of its rows, by their indices."""

    logp: ScoreRows
    weigh: WeighRows | None
    tokens: Callable[[Tensor], int]  # that go through the model


@dataclass(frozen=True)
class StepRows:
    """Rows of one optimizer step, or of a part of it that is averaged with others: one row per candidate."""

    group_ids: Tensor  # [rows], one id per group over all processes
    rewards: Tensor  # [rows]
    best: Tensor  # [rows], weights that sum to one over the best of each group: of the likelihood term
    groups: float  # in all processes
    by_index: ByIndex
    parts: Callable[[], list[Tensor]]  # rows of every pass, by the memory there is now
    nothing: Callable[[], Tensor]  # zero, through the model


class GroupStep:
    """What online and offline training have in common: `Objective`, scorer and processes are given once."""

    def __init__(
        self,
        objective: Objective,
        scorer: Scorer,
        accelerator: Any,
        empty_steps: EmptySteps,
        *,
        nll_weight: float = 0.0,
        checkpoint: bool | None = None,
    ) -> None:
        self.objective, self.scorer, self.accelerator = objective, scorer, accelerator
        self.empty_steps, self.nll_weight, self.checkpoint = empty_steps, nll_weight, checkpoint

    def passes(self, model: nn.Module) -> Passes:
        return Passes(self.scorer, self.accelerator, model, self.checkpoint)

    def accumulate(
        self,
        passes: Passes,
        rows: StepRows,
        anchor_logp: Tensor | None,
        *,
        tau: float,
        at_anchor: bool,
        share: float = 1.0,
        as_before: bool = False,
    ) -> exact.GroupGradient:
        """Forward and backward passes; ``share`` is that of these rows in the optimizer step's loss.

        ``as_before`` keeps the size of a pass, for log-probabilities that are compared with an earlier step's.
        """
        parallel = exact.Parallel(
            averaging=passes.several,
            lockstep=passes.sharded,
            no_sync=lambda: passes.no_sync(),
            back_propagate=passes.back_propagate(share),
        )
        result = passes.made(
            lambda parts: exact.backward(
                self.objective,
                passes.score(rows.by_index),
                parts,
                rows.group_ids,
                anchor_logp,
                at_anchor=at_anchor,
                tau=tau,
                extra=-self.nll_weight * rows.best / rows.groups if self.nll_weight else None,
                weigh=passes.weigh(rows.by_index),
                parallel=parallel,
                rewards=rows.rewards,
            ),
            rows.parts,
            rows.by_index.tokens,
            as_before=as_before,
        )
        if passes.engine is not None:
            passes.close(rows.nothing)
        passes.refuse_if_spoilt(result.loss.float())
        self.empty_steps.observe(result.coefficients)
        return result


class Passes:
    """Forward and backward passes over the rows of one step.

    Log-probabilities that are not finite spoil the step, not the run; a pass that memory does not hold is made
    again as two.
    """

    def __init__(self, scorer: Scorer, accelerator: Any, model: nn.Module, checkpoint: bool | None) -> None:
        self.scorer, self.accelerator, self.model = scorer, accelerator, model
        self.may_checkpoint = checkpoint is None
        self.by_tokens = scorer.packs  # else passes are of so many rows
        self.several = accelerator.num_processes > 1
        self.sharded = accelerator.distributed_type in SHARDED
        self.scaled = accelerator.mixed_precision == "fp16"
        self.engine = engine_of(accelerator)
        self._more_follow = False  # whether the pass at hand is not the last of these
        self._odd: list[Tensor] = []  # whether a log-probability was not finite; looked at once, at the end

    def made(
        self,
        step: Callable[[list[Tensor]], T],
        parts: Callable[[], list[Tensor]],
        tokens: Callable[[Tensor], int],
        *,
        as_before: bool = False,
    ) -> T:
        """What ``step`` makes of these parts; if memory runs out on the way, of smaller ones.

        ``as_before`` keeps the size of a pass: where log-probabilities of an earlier step are looked at, passes of
        another size would round otherwise.
        """
        if not as_before:
            self._settle()
        chosen = parts()
        before = self._gradients(max((tokens(part) for part in chosen), default=0))
        while True:
            try:
                return step(chosen)
            except torch.OutOfMemoryError as error:
                self._shrink(error, before is not None)
            # Outside the handler: what the failed pass held is free by now.
            assert before is not None
            for parameter, gradient in zip(self.model.parameters(), before, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            chosen = parts()

    def _settle(self) -> None:
        budget = self.scorer.budget
        if budget.settle() and budget.tokens < FEW and self._checkpoint():
            budget.start_again()

    def _gradients(self, largest: int) -> list[Tensor | None] | None:
        """As they are, to go back to; nothing where that will not be needed, or is not possible."""
        found = [parameter.grad for parameter in self.model.parameters()]
        if (
            self.several
            or not self.by_tokens
            or (largest <= self.scorer.budget.largest and any(g is not None for g in found))
        ):
            return None
        return [None if gradient is None else gradient.clone() for gradient in found]

    def _shrink(self, error: torch.OutOfMemoryError, can_go_back: bool) -> None:
        budget = self.scorer.budget
        if not (can_go_back and self.by_tokens):
            hint = "tokens_per_pass" if self.by_tokens else "completions_per_pass, or the size of a batch"
            raise ValueError(f"out of memory in a pass of {budget.running} tokens: lower {hint}") from error
        if budget.running == 1 or budget.tokens <= 1:
            raise ValueError("out of memory with the smallest pass there is") from error
        budget.halve()
        if budget.tokens < FEW:
            self._checkpoint()

    def _checkpoint(self) -> bool:
        """Make activations again in the backward pass from now on, if nobody forbade it."""
        policy: Any = self.accelerator.unwrap_model(self.model)
        if not self.may_checkpoint or policy.is_gradient_checkpointing:
            return False
        log.warning("memory is short: activations are made again in the backward pass (gradient_checkpointing)")
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return True

    # What `adpo.exact.backward` is given.

    def score(self, rows: ByIndex) -> ScoreRows:
        def score(chosen: Tensor) -> Tensor:
            self._begin(rows, chosen)
            return self.finite(rows.logp(chosen))

        return score

    def weigh(self, rows: ByIndex) -> WeighRows | None:
        """Not where gradients are scaled on their way: what is computed ahead of it would vanish in half."""
        of_rows = rows.weigh
        if of_rows is None or self.scaled:
            return None

        def weigh(chosen: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            self._begin(rows, chosen)
            total, logp = of_rows(chosen, weight)
            return total, self.finite(logp)

        return weigh

    def back_propagate(self, share: float) -> Callable[[Tensor], None]:
        def back_propagate(loss: Tensor) -> None:
            if self.engine is not None:
                self.engine.accumulate(
                    loss * share, last=self.accelerator.sync_gradients and not self._more_follow
                )
            else:
                self.accelerator.backward(loss * share)
            self.scorer.budget.end()

        return back_propagate

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """For all passes but the last."""
        self._more_follow = True
        try:
            several = self.several and self.engine is None
            with self.accelerator.no_sync(self.model) if several else contextlib.nullcontext():
                yield
        finally:
            self._more_follow = False

    def close(self, nothing: Callable[[], Tensor]) -> None:
        """A pass without gradient where one is still due: ``nothing`` is zero, through the model.

        For processes that wait for it with what they have accumulated, and for an engine that reduces the
        gradients of a step in its last pass.
        """
        if self.engine is None:
            if self.several:
                self.accelerator.backward(nothing())
        elif self.accelerator.sync_gradients and self.engine.accumulated and not self.engine.reduced:
            self.engine.accumulate(nothing(), last=True)

    def _begin(self, rows: ByIndex, chosen: Tensor) -> None:
        if torch.is_grad_enabled():
            self.scorer.budget.begin(rows.tokens(chosen))

    def finite(self, logp: Tensor) -> Tensor:
        odd = ~torch.isfinite(logp)
        self._odd.append(odd.any())
        return torch.where(odd, 0.0 * logp.nan_to_num(0.0, 0.0, 0.0), logp)

    def refuse_if_spoilt(self, loss: Tensor) -> None:
        """A gradient that `RefuseBadSteps`, or a gradient scaler, will refuse; in every process."""
        spoilt = (~torch.isfinite(loss)).float() + float(any(bool(odd) for odd in self._odd))
        if not float(self.accelerator.reduce(spoilt, reduction="sum") if self.several else spoilt):
            return
        if self.engine is not None:
            self.engine.spoilt = True
            return
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, torch.nan)
                return


if not TYPE_CHECKING:
    __getattr__ = renamed(__name__)
