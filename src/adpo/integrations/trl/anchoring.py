"""The anchor of online training: which policy it is, what it gives completions, how far a step moves from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adpo.anchors import EMA, Refresh
from adpo.anchors import Snapshot as Self
from adpo.core.objective import Objective
from adpo.integrations.auto_tau import CALIBRATION_ROLLOUTS, NEAR_PEAK, AutoTau, rate_of
from adpo.integrations.sharding import SHARDED
from adpo.integrations.trl.config import ADPOConfig
from adpo.integrations.trl.rollouts import Rollouts
from adpo.integrations.trl.rows import Rows
from adpo.ranks import Ranks


class Anchored(Rollouts):
    """Rollouts with an anchor."""

    objective: Objective

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if sharded and (self.args.anchor not in ("on_policy", "none") or self.args.kl_budget):
            raise ValueError(
                "anchors that keep a copy of the weights, and kl_budget, do not work on sharded parameters (FSDP, "
                "DeepSpeed): use the on_policy anchor"
            )
        self.anchor = self._made_anchor(self.args)
        self.start = self._made_start(self.args)
        self._window = range(0)  # micro-batches of the rollout that the optimizer step at hand is made of
        # rows of a step, its members among them, their logp before it, and its rate
        self._calibrating: tuple[Rows, Tensor, Tensor, float] | None = None

    def _made_anchor(self, args: ADPOConfig) -> Self | None:
        """None also for the on-policy anchor: its log-probabilities are taken when completions are sampled."""
        policy: nn.Module = self.accelerator.unwrap_model(self.model)
        if args.anchor == "fixed":
            return Self(policy)
        if args.anchor == "ema":
            return EMA(policy, args.anchor_decay)
        if args.anchor == "refresh":
            return Refresh(policy, args.anchor_every)
        return None

    def _made_start(self, args: ADPOConfig) -> Self | None:
        """The policy at the start of training, where a KL budget needs it."""
        if args.kl_budget is None:
            return None
        return self.anchor if args.anchor == "fixed" else Self(self.accelerator.unwrap_model(self.model))

    def _anchor_logp(self, rows: Rows, places: Tensor) -> tuple[bool, Tensor | None]:
        """Whether the policy is at its anchor, and log-probabilities of members under it, where needed."""
        if self.args.anchor == "none":
            return False, None
        if self.state.global_step == self._sampled_at if self.anchor is None else self.anchor.coincides:
            self._calibrate_before(rows, places)
            return True, self._of_members(rows, places) if self.objective.target.reads_anchor else None
        if self.anchor is not None:
            return False, self.anchor.logp(lambda _: self._of_members(rows, places))
        return False, rows["anchor_logp"][places]

    def _of_members(self, rows: Rows, places: Tensor) -> Tensor:
        """Their log-probabilities; where a pass is a matter of all processes, every row is scored in each."""
        if self.accelerator.distributed_type in SHARDED:
            return self._scored(self.model, rows)[places]
        return self._scored(self.model, {name: values[places] for name, values in rows.items()})

    def _remember(self, logp: Tensor) -> None:
        """The on-policy anchor is the policy of this step: what later steps need and no pass saw is scored now.

        ``logp``, ``[rows]`` of the step, is NaN for what no pass saw.
        """
        buffered = self._buffered_inputs or []
        once = self.num_iterations == 1 and self.args.steps_per_generation <= self.args.gradient_accumulation_steps
        if self.args.anchor != "on_policy" or self.state.global_step != self._sampled_at or once:
            return
        seen = iter(torch.split(logp, [len(buffered[number]["member"]) for number in self._window]))
        for number, part in enumerate(buffered):
            known = next(seen) if number in self._window else torch.full_like(part["best"], torch.nan)
            if "anchor_logp" not in part:
                part["anchor_logp"] = self._completed(known.to(part["best"]), part)

    def _completed(self, known: Tensor, part: Rows) -> Tensor:
        """With the log-probabilities of members that are missing; zero for the others, which nothing looks at."""
        missing = (known.isnan() & part["member"]).nonzero().squeeze(1)
        if self.accelerator.distributed_type in SHARDED:  # a matter of all processes
            missing = torch.arange(len(known), device=known.device)
        known = known.nan_to_num(0.0)
        if len(missing):
            known[missing] = self._scored(self.model, {name: values[missing] for name, values in part.items()})
        return known

    # The automatic temperature.

    def _calibrate_before(self, rows: Rows, places: Tensor) -> None:
        """Where no later step on this rollout will score its rows, measure the first few rollouts by hand."""
        once = self.num_iterations == 1 and self.args.steps_per_generation <= self.args.gradient_accumulation_steps
        if isinstance(self.schedule, AutoTau) and once and self.schedule.measured < CALIBRATION_ROLLOUTS:
            rate = rate_of(self.optimizer)
            if rate >= NEAR_PEAK:
                self._calibrating = rows, places, self._of_members(rows, places), rate

    def _calibrate_after(self) -> None:
        if self._calibrating is not None:
            rows, places, before, rate = self._calibrating
            self._measure_tau(self._of_members(rows, places) - before, rows["groups"][places], before, rate)
            self._calibrating = None

    def _measure_tau(self, moved: Tensor, groups: Tensor, before: Tensor, rate: float = 1.0) -> None:
        """By members, of which processes may have different numbers."""
        if isinstance(self.schedule, AutoTau):
            moved, groups, before = (torch.cat(Ranks(None).gather(values)) for values in (moved, groups, before))
            if len(moved) and self.schedule.measure(moved, groups, before, rate):
                self._note(u_spread=self.schedule.spread)

    @property
    def _kept_policies(self) -> dict[str, Self]:
        found = {"anchor": self.anchor, "start": self.start if self.start is not self.anchor else None}
        return {name: policy for name, policy in found.items() if policy is not None}
