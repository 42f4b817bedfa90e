"""`ADPOTrainer`: TRL's `GRPOTrainer` with the objective of the core, exact under any split of a group.

TRL samples the completions, scores them with the reward functions and cuts them into micro-batches; a group may
be spread over all of them, and over ranks. This trainer takes the rows of an optimizer step together and hands
them to `adpo.exact`: the gradient is that of the whole-group loss, in passes that memory holds, and rows without
gradient go through no pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback
from trl.trainer.utils import split_tensor_dict

from adpo import exact
from adpo.integrations import state
from adpo.integrations.accepted import refuse_router_loss
from adpo.integrations.group_step import ByIndex, GroupStep, StepRows, one_thread
from adpo.integrations.guards import GuardedRewards, RefuseBadSteps
from adpo.integrations.policies import refuse_frozen
from adpo.integrations.trl.anchoring import Anchored
from adpo.integrations.trl.config import ADPOConfig
from adpo.integrations.trl.rows import Rows, kept, trimmed
from adpo.integrations.trl.samples import Seen
from adpo.lm.completions import answer_of
from adpo.lm.passes import whole_groups

log = logging.getLogger("adpo")
SAMPLES = "samples"
"""The note of a checkpoint on groups of the latest step."""


class ADPOTrainer(Anchored):
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
        refuse_router_loss("ADPOTrainer", self.accelerator.unwrap_model(self.model), args.router_aux_loss_coef)
        if self.aux_loss_enabled:  # by the model's own coefficient, which TRL's losses would add
            log.warning(
                "ADPO adds no router loss: router_aux_loss_coef = %g has no effect", self.router_aux_loss_coef
            )
        self.objective = args.objective()
        self.schedule = args.temperature_schedule()
        self.tau: float = args.tau
        self.answer_of = answer_of
        self.group_step = GroupStep(
            self.objective,
            self.scorer,
            self.accelerator,
            self.empty_steps,
            nll_weight=args.nll_weight,
            checkpoint=args.gradient_checkpointing,
        )
        self.step_guard = RefuseBadSteps(self, args.max_refused_steps)
        self.add_callback(self.step_guard)
        self.add_callback(_AfterStep(self))
        self._micro_batches_left = 0
        self._tallies: dict[str, Tensor] = {}  # sum and count of what micro-batches report
        self._seen: Seen | None = None

    def train(self, *arguments: Any, **options: Any) -> Any:
        """As in TRL; a run of refused steps ends in `TrainingStoppedError`."""
        refuse_frozen(self.model)
        result = super().train(*arguments, **options)
        self.step_guard.complain()
        return result

    def sample_groups(self, most: int = 2) -> list[dict[str, Any]]:
        """Some groups of the latest step: ``prompt``, and ``members`` with ``text``, ``reward`` and ``c``."""
        if self._seen is None:  # resumed, and no step made since
            known: list[dict[str, Any]] = self.notes.get(SAMPLES, [])
            return known[:most]
        return self._seen.groups(self._tokenizer, most)

    def _prepare_inputs(self, generation_batch: Any) -> Rows:
        """As TRL: sample when due, and cut into micro-batches. The last one of a step is given the whole step."""
        if not self.model.training:
            return self._generate_and_score_completions(generation_batch)
        per_rollout = self.args.steps_per_generation
        if self._step % (per_rollout * self.num_iterations) == 0 or self._buffered_inputs is None:
            batch = kept(self._generate_and_score_completions(generation_batch))
            self._buffered_inputs = split_tensor_dict(batch, per_rollout)
        if not self._micro_batches_left:
            start = self._step % per_rollout
            self._window = range(start, min(start + self.current_gradient_accumulation_steps, per_rollout))
            self._micro_batches_left = len(self._window)
        self._micro_batches_left -= 1
        if self._micro_batches_left:
            return {}
        parts = [self._buffered_inputs[number] for number in self._window]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _compute_loss(self, model: nn.Module, inputs: Rows) -> Tensor:
        """For the log; the gradient of the whole-group loss has been accumulated by then."""
        loss = torch.zeros((), device=self.accelerator.device)
        if "member" in inputs and self.model.training:  # else evaluation, or not the last micro-batch of a step
            with one_thread(self.scorer.device):
                loss += self._trained(model, inputs)
        return loss.requires_grad_()

    # The optimizer step as one batch.

    def _trained(self, model: nn.Module, rows: Rows) -> float:
        """Forward and backward passes of a step's rows; the loss."""
        self._seen = None
        share = len(self._window) / self.current_gradient_accumulation_steps
        member, gather = rows["member"], self.accelerator.gather
        present = gather(torch.where(member, rows["groups"], -1))
        groups = len(torch.unique(present[present >= 0]))
        all_groups = len(torch.unique(gather(rows["groups"])))
        passes = self.group_step.passes(model)
        first_row = {name: part[:1] for name, part in rows.items()}

        def nothing() -> Tensor:
            return 0 * self._logp(model, first_row).sum()

        if not groups:
            self.gradient_monitor.step(1.0)
            self.empty_steps.observe(torch.zeros(1))
            self._note(rows_left_out=1.0, rows_scored=0.0, loss_of_groups=0.0)
            passes.close(nothing)  # what earlier rollouts of the step accumulated is averaged here
            self._remember(torch.full(member.shape, torch.nan, dtype=torch.float64, device=member.device))
            return 0.0
        places = member.nonzero().squeeze(1)
        of_members = {name: values[places] for name, values in rows.items()}
        at_anchor, anchor_logp = self._anchor_logp(rows, places)
        if (
            self.scorer.packs and not passes.several
        ):  # what is small is done on the CPU, while the device is at work
            rows, of_members = _on_cpu(rows), _on_cpu(of_members)
            member, places = member.cpu(), places.cpu()
            anchor_logp = None if anchor_logp is None else anchor_logp.cpu()
        if anchor_logp is not None:
            anchor_logp = passes.finite(anchor_logp)
        parts, tokens = self._parts(of_members)
        found = self.group_step.accumulate(
            passes,
            StepRows(
                of_members["groups"],
                of_members["rewards"],
                of_members["best"],
                groups,
                self._by_index(model, rows, places, tokens),
                parts,
                nothing,
            ),
            anchor_logp,
            tau=self.tau,
            at_anchor=at_anchor,
            share=share,
            as_before=self.state.global_step != self._sampled_at,
        )
        self.gradient_monitor.step(1 - float(found.diagnostics.live) * groups / all_groups)
        self._tell(rows, places, found)
        logp = torch.full(member.shape, torch.nan, dtype=torch.float64, device=member.device)
        logp[places] = found.logp
        self._remember(logp)
        first = self.state.global_step - self._sampled_at == 1  # step after the one at the anchor
        if first and self.anchor is None and anchor_logp is not None:
            self._measure_tau(found.logp - anchor_logp, of_members["groups"], anchor_logp)
        loss: float = found.loss.item() * share
        return loss

    def _by_index(self, model: nn.Module, rows: Rows, places: Tensor, tokens: Callable[[Tensor], int]) -> ByIndex:
        """A process without a member has to go through the model too, once: with its first row."""

        def take(chosen: Tensor) -> Rows:
            where = places[chosen] if len(chosen) else places.new_zeros(1)
            return trimmed({name: values[where] for name, values in rows.items()})

        return ByIndex(
            lambda chosen: self._logp(model, take(chosen)),
            (lambda chosen, c: self._weighted_logp(model, take(chosen), c)) if self.scorer.packs else None,
            tokens,
        )

    def _parts(self, rows: Rows) -> tuple[Callable[[], list[Tensor]], Callable[[Tensor], int]]:
        """Rows of a pass: so many tokens, or as many completions as a micro-batch has; and what they take."""
        device = rows["groups"].device
        if self.scorer.packs:
            sizes = self._sizes(rows)
            return lambda: sizes.passes(self.scorer.budget.tokens, device), sizes.tokens
        order = torch.sort(rows["groups"], stable=True)
        numbers = torch.unique_consecutive(order.values, return_inverse=True)[1]
        parts = [order.indices[part] for part in whole_groups(numbers, self.args.per_device_train_batch_size)]
        width = rows["prompt_ids"].shape[1] + rows["completion_ids"].shape[1]
        return lambda: parts, lambda chosen: len(chosen) * width

    # What is told, and what a checkpoint keeps.

    def _tell(self, rows: Rows, places: Tensor, found: exact.GroupGradient) -> None:
        self._seen = Seen(rows, places, found.coefficients)
        everyone = len(rows["member"])
        shares = torch.tensor([1 - found.rows_trained / everyone, found.rows_scored / everyone])
        left_out, scored = self.accelerator.reduce(shares.to(places.device), reduction="mean").tolist()
        self._note(
            rows_left_out=left_out,
            rows_scored=scored,
            loss_of_groups=float(found.loss),
            **{name: float(value) for name, value in found.diagnostics._asdict().items()},
        )
        for name in ("best", "worst"):
            weight = rows[name][places] * ~found.logp.isnan()
            total = torch.stack([(weight * found.logp.nan_to_num(0.0)).sum(), weight.sum()])
            self._tallies[name] = self._tallies.get(name, 0) + total.to(self.accelerator.device)

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
    def _had_ended(self) -> bool:
        return super()._had_ended or self._over_budget

    def _save_own(self, folder: Path) -> None:
        self.notes[SAMPLES] = self.sample_groups()
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


def _on_cpu(rows: Rows) -> Rows:
    return {name: values.cpu() for name, values in rows.items()}


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
