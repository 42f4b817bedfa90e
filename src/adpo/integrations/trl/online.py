"""`ADPOTrainer`: TRL's `GRPOTrainer` with the objective of the core, exact under any split of a group.

TRL samples the completions, scores them with the reward functions, shuffles the rows and cuts them into
micro-batches; a group may be spread over all of them, and over ranks. Before the first micro-batch of an optimizer
step this trainer looks at the step's rows together, computes ``c = dloss/dlogp`` of every row, and lets each
micro-batch back-propagate ``sum c * logp``. Rows whose c is zero are left out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from adpo import exact
from adpo.anchors import EMA, Refresh, Self
from adpo.integrations import state
from adpo.integrations.auto_tau import CALIBRATION_ROLLOUTS, AutoTau
from adpo.integrations.guards import GuardedRewards, RefuseBadSteps
from adpo.integrations.trl.config import ADPOConfig
from adpo.integrations.trl.rollouts import Rollouts
from adpo.integrations.trl.rows import Rows, kept, trimmed
from adpo.lm.completions import answer_of

log = logging.getLogger("adpo")


class ADPOTrainer(Rollouts):
    """Train a causal language model on rewards with any objective of the core; see `ADPOConfig`.

    ``answer_of`` finds the final answer in a completion, for the entropy and the number of different answers in a
    group; by default what follows ``####`` or stands in the last box, else the whole text.
    """

    _tag_names = ("trl", "adpo")
    _name = "ADPO"

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: ADPOConfig | None = None,
        *,
        answer_of: Callable[[Any], str] = answer_of,
        **rest: Any,
    ) -> None:
        if args is None:
            args = ADPOConfig("adpo-output")
        if not isinstance(args, ADPOConfig):
            raise TypeError(f"args must be an ADPOConfig; got {type(args).__name__}")
        self.reward_guard = GuardedRewards(args.max_refused_steps)
        super().__init__(model, self.reward_guard.wrap(reward_funcs), args, **rest)
        if (self.is_fsdp_enabled or self.is_deepspeed_enabled) and (args.anchor != "on_policy" or args.kl_budget):
            raise ValueError(
                "anchors that keep a copy of the weights, and kl_budget, do not work on sharded parameters (FSDP, "
                "DeepSpeed): use the on_policy anchor"
            )
        self.objective = args.objective()
        self.schedule = args.temperature_schedule()
        self.tau: float = args.tau
        self.answer_of = answer_of
        self.anchor = self._made_anchor(args)
        self.start = self._made_start(args)
        self.step_guard = RefuseBadSteps(self, args.max_refused_steps)
        self.add_callback(self.step_guard)
        self.add_callback(_AfterStep(self))
        self._planned: list[Rows] = []  # micro-batches of the optimizer step at hand
        self._calibrating: tuple[Rows, Tensor] | None = None  # rows of a step, and their logp before it
        self._tallies: dict[str, Tensor] = {}  # sum and count of what micro-batches report

    def _made_anchor(self, args: ADPOConfig) -> Self | None:
        """None is the on-policy anchor: its log-probabilities are taken when the completions are sampled."""
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

    def train(self, *arguments: Any, **options: Any) -> Any:
        """As in TRL; a run of refused steps ends in `TrainingStoppedError`."""
        result = super().train(*arguments, **options)
        self.step_guard.complain()
        return result

    def _prepare_inputs(self, generation_batch: Any) -> Rows:
        """As TRL: sample when due, cut into micro-batches; and plan each optimizer step before its first one."""
        if not self.model.training:
            return self._generate_and_score_completions(generation_batch)
        per_rollout = self.args.steps_per_generation
        if self._step % (per_rollout * self.num_iterations) == 0 or self._buffered_inputs is None:
            batch = kept(self._generate_and_score_completions(generation_batch))
            if per_rollout <= self.current_gradient_accumulation_steps:
                batch = shuffle_sequence_dict(batch)  # a step sees the whole rollout: rows may go anywhere
            self._buffered_inputs = split_tensor_dict(batch, per_rollout)
        if not self._planned:
            start = self._step % per_rollout
            window = self._buffered_inputs[start : start + self.current_gradient_accumulation_steps]
            self._planned = self._plan(window, len(window) / self.current_gradient_accumulation_steps)
        return self._planned.pop(0)

    # The optimizer step as one batch.

    def _plan(self, window: Sequence[Rows], share: float) -> list[Rows]:
        """The window's micro-batches with their coefficients, dead rows left out; ``share`` of a whole step."""
        rows = {name: torch.cat([part[name] for part in window]) for name in window[0]}
        member = rows["member"]
        present = self.accelerator.gather(torch.where(member, rows["groups"], -1))
        groups = len(torch.unique(present[present >= 0]))
        c = torch.zeros(len(member), dtype=torch.float64, device=member.device)
        loss = 0.0
        if groups:
            logp, anchor_logp = self._both_logp(rows)
            odd = member & ~(torch.isfinite(logp) & torch.isfinite(anchor_logp))
            spoilt = int(self.accelerator.reduce(odd.sum(), reduction="sum")) > 0
            if spoilt:  # the whole step is to be refused, on every rank
                logp, anchor_logp = torch.zeros_like(logp), torch.zeros_like(anchor_logp)
            found = exact.coefficients(
                self.objective,
                logp[member],
                rows["groups"][member],
                anchor_logp[member],
                tau=self.tau,
                rewards=rows["rewards"][member],
            )
            c[member] = torch.full_like(found.coefficients, torch.nan) if spoilt else found.coefficients
            c -= self.args.nll_weight * rows["best"] / groups
            c *= share
            loss = float(found.loss) * share
            if not math.isfinite(loss):
                c.fill_(torch.nan)  # whatever the gradient would have been: the step is to be refused
            self._note(**{name: float(value) for name, value in found.diagnostics._asdict().items()})
        live = c.nonzero().squeeze(1)
        left_out = self.accelerator.reduce(1 - len(live) / len(c) + torch.zeros_like(c[:1]), reduction="mean")
        self._note(rows_left_out=float(left_out), loss_of_groups=loss / share)
        rows["c"] = c
        planned = []
        for part in torch.tensor_split(live, len(window)):
            # Several processes average their gradients in every backward pass: none may sit out. Who has nothing
            # to do goes through the first row, with nothing to its name.
            idle = not len(part) and self.accelerator.num_processes > 1
            chosen = live.new_zeros(1) if idle else part
            micro = trimmed({name: values[chosen] for name, values in rows.items()})
            if idle:
                micro["c"] = torch.zeros_like(micro["c"])
            micro["loss"] = torch.full((), loss / len(window), device=c.device)
            planned.append(micro)
        return planned

    def _both_logp(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Log-probabilities under policy and anchor, ``[rows]``; both zero where it is enough that they agree."""
        steps_since = self.state.global_step - self._sampled_at
        if steps_since == 0 if self.anchor is None else self.anchor.coincides:
            self._calibrate_before(rows)
            if self.objective.target.reads_anchor:
                logp = self._scored(self.model, rows)
                return logp, logp
            zero = torch.zeros(len(rows["member"]), device=rows["member"].device)
            return zero, zero
        logp = self._scored(self.model, rows)
        if self.anchor is not None:
            return logp, self.anchor.logp(lambda _: self._scored(self.model, rows))
        anchor_logp = self._summed(rows["old_per_token_logps"], rows)
        if steps_since == 1:
            self._measure_tau(rows, logp - anchor_logp)
        return logp, anchor_logp

    # The automatic temperature.

    def _calibrate_before(self, rows: Rows) -> None:
        """Where no later step on this rollout will score its rows, measure the first few rollouts by hand."""
        once = self.num_iterations == 1 and self.args.steps_per_generation <= self.args.gradient_accumulation_steps
        if isinstance(self.schedule, AutoTau) and once and self.schedule.measured < CALIBRATION_ROLLOUTS:
            self._calibrating = rows, self._scored(self.model, rows)

    def _calibrate_after(self) -> None:
        if self._calibrating is not None:
            rows, before = self._calibrating
            self._measure_tau(rows, self._scored(self.model, rows) - before)
            self._calibrating = None

    def _measure_tau(self, rows: Rows, moved: Tensor) -> None:
        if isinstance(self.schedule, AutoTau):
            everyone = [self.accelerator.gather(values) for values in (moved, rows["groups"], rows["member"])]
            member = everyone[2].bool()
            if member.any():
                self.schedule.measure(everyone[0][member], everyone[1][member])
                self._note(u_spread=self.schedule.spread)

    # The loss.

    def _compute_loss(self, model: nn.Module, inputs: Rows) -> Tensor:
        """The gradient of the whole-group loss, and for the log its value."""
        if "c" not in inputs:  # evaluation: rewards are what counts
            return torch.zeros((), device=self.accelerator.device)
        if not len(inputs["c"]):
            return inputs["loss"].clone().requires_grad_()
        logp = self._logp(model, inputs)
        for name in ("best", "worst"):
            weight = inputs[name] * (inputs["c"] != 0)
            self._tally(name, (weight * logp.detach()).sum(), weight.sum())
        weighted: Tensor = (inputs["c"] * logp).sum() * self.accelerator.num_processes
        return weighted - weighted.detach() + inputs["loss"]

    # What is told, and what a checkpoint keeps.

    def _tally(self, name: str, total: Tensor, count: Tensor) -> None:
        self._tallies[name] = self._tallies.get(name, 0) + torch.stack([total, count])

    def _note_tallies(self) -> None:
        """Log-probabilities of the best and the worst members, which the micro-batches have seen."""
        nothing = torch.zeros(2, dtype=torch.float64, device=self.accelerator.device)
        sums = torch.stack([self._tallies.get(name, nothing) for name in ("best", "worst")])
        (best, best_count), (worst, worst_count) = self.accelerator.reduce(sums, reduction="sum").tolist()
        self._tallies = {}
        if best_count and worst_count:
            best, worst = best / best_count, worst / worst_count
            self._note(best_logp=best, worst_logp=worst, logp_margin=best - worst)

    @property
    def _kept_policies(self) -> dict[str, Self]:
        found = {"anchor": self.anchor, "start": self.start if self.start is not self.anchor else None}
        return {name: policy for name, policy in found.items() if policy is not None}

    @property
    def _had_ended(self) -> bool:
        return super()._had_ended or self._over_budget

    def _save_own(self, folder: Path) -> None:
        super()._save_own(folder)
        if self.args.should_save:
            numbers = {
                "tau": self.tau,
                "schedule": self.schedule.state_dict(),
                "sampled_at": self._sampled_at,
                "guard": self.step_guard.state_dict(),
                "over_budget": self._over_budget,
            }
            state.save(folder, numbers, self._kept_policies)

    def _load_own(self, folder: Path) -> None:
        super()._load_own(folder)
        numbers = state.load(folder, self._kept_policies)
        self.tau, self._sampled_at = numbers["tau"], numbers["sampled_at"]
        self._over_budget = numbers["over_budget"]
        self.schedule.load_state_dict(numbers["schedule"])
        self.step_guard.refused, self.step_guard.in_a_row = (
            numbers["guard"]["refused"],
            numbers["guard"]["in_a_row"],
        )


class _AfterStep(TrainerCallback):  # type: ignore[misc]
    """What follows an optimizer step."""

    def __init__(self, trainer: ADPOTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        for policy in trainer._kept_policies.values():
            policy.on_step()
        trainer._calibrate_after()
        trainer._note_tallies()
        if trainer._over_budget:
            log.warning("step %d: KL to the start is over kl_budget = %g; stop", state.global_step, args.kl_budget)
            control.should_save = control.should_training_stop = True
