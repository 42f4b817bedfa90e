"""GRPO and its relatives, as TRL has them, in the passes of `ADPOTrainer`: the same losses, without the dead work.

The loss is TRL's own code. What differs is how its log-probabilities come about, and that an optimizer step is cut
into passes by tokens; rows whose advantage is zero, and which therefore have no gradient, go through none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from trl import GRPOConfig

from adpo.trainers.checks.accepted import refuse_long_rows
from adpo.trainers.checks.arguments import REFUSED, check_arguments
from adpo.trainers.forms import ScoringForms
from adpo.trainers.group_step import Passes, one_thread
from adpo.trainers.trl.arguments import check_sampling_arguments
from adpo.trainers.trl.base import OnlineTrainer
from adpo.trainers.trl.rollout.sampling import SamplingForm
from adpo.trainers.trl.step.backtracking import BacktrackingForm
from adpo.trainers.trl.step.rows import Rows, trimmed

MEAN_OF_ROWS = ("grpo", "sapo", "dr_grpo", "luspo")
"""Losses that are a mean over the rows of a micro-batch."""
SUM_OF_TOKENS = ("dapo", "cispo", "vespo")
"""Losses whose normaliser is that of the whole step, whatever the micro-batch."""

DETACHED = ("cispo", "vespo")
"""Losses whose value is not what their gradient descends: its weights are held fixed."""

REFUSED_IN_A_ROW = 5
"""Steps whose gradient is not finite, after which training ends."""


@dataclass
class FastGRPOConfig(BacktrackingForm, ScoringForms, SamplingForm, GRPOConfig):  # type: ignore[misc]
    """TRL's arguments, and the forms of scoring."""

    def __post_init__(self) -> None:
        check_arguments(self, {name: why for name, why in REFUSED.items() if name != "neftune_noise_alpha"})
        check_sampling_arguments(self)
        super().__post_init__()
        self.check_forms()
        self.check_sampling()
        self.check_backtracking()

    def check_backtracking(self) -> None:
        """Only losses whose value is that of the same thing at every step on a rollout."""
        super().check_backtracking()
        for name, fine in (
            ("loss_type", self.loss_type not in DETACHED),
            ("use_adaptive_entropy", not self.use_adaptive_entropy),
            ("off_policy_mask_threshold", self.off_policy_mask_threshold is None),
            ("top_entropy_quantile", self.top_entropy_quantile >= 1),
        ):
            if self.backtracking and not fine:
                value = getattr(self, name)
                raise ValueError(
                    f"backtracking cannot judge by a loss with {name} = {value}: choose one of the two"
                )


class FastGRPOTrainer(OnlineTrainer):
    """TRL's `GRPOTrainer` on packed rows; on padded ones it is TRL's, step for step.

    With several processes, an entropy bonus, a router's loss or a quantile of entropies, rows are packed inside
    the micro-batches that TRL makes.
    """

    LONG_ROWS = "end the run"

    def __init__(self, model: Any, reward_funcs: Any, args: FastGRPOConfig, **rest: Any) -> None:
        super().__init__(model, reward_funcs, args, max_refused_steps=REFUSED_IN_A_ROW, **rest)
        self._refuse_router_loss_of_other_names()
        self._waiting: list[Rows] = []  # micro-batches of one rollout and one optimizer step
        # What TRL averages over a micro-batch, beside the loss of its rows, or gathers row by row, must be TRL's.
        terms = self._entropy_bonus_enabled or self.aux_loss_enabled or self.top_entropy_quantile < 1
        self._other_terms = bool(self.beta or self._entropy_bonus_enabled or self.aux_loss_enabled)
        self._own_passes = self.scorer.packs and self.accelerator.num_processes == 1 and not terms

    def _refuse_router_loss_of_other_names(self) -> None:
        policy = self.accelerator.unwrap_model(self.model)
        if self.aux_loss_enabled and not hasattr(policy.config.get_text_config(), "num_experts"):
            raise ValueError(
                f"TRL's router loss looks for num_experts, which the configuration of {type(policy).__name__} "
                "lacks: set router_aux_loss_coef to 0"
            )

    def _generate(self, prompts: list[Any]) -> Any:
        found = super()._generate(prompts)
        lengths = [len(prompt) + len(completion) for prompt, completion in zip(*found[:2], strict=True)]
        refuse_long_rows(self.accelerator.unwrap_model(self.model), lengths)
        return found

    def _generate_and_score_completions(self, inputs: Any) -> Rows:
        batch = self._masked(inputs) if self.args.mask_truncated_completions else self._whole(inputs)
        if self.model.training:
            rows, gather = len(batch["advantages"]), self.accelerator.gather
            first = self.accelerator.process_index * rows
            rewards = self.rewards[first : first + rows].to(self.endings.cut.device)
            masked = self.endings.cut & self.args.mask_truncated_completions
            self._log_rollout(rewards, torch.isfinite(rewards) & ~masked, masked)
            live = gather(batch["advantages"].reshape(rows, -1).any(1) & batch["completion_mask"].any(1))
            without = 1 - float(_of_groups(live, self.num_generations))
            self.gradient_monitor.step(0.0 if self._other_terms else without)
        return batch

    def _whole(self, inputs: Any) -> Rows:
        batch: Rows = super()._generate_and_score_completions(inputs)
        return batch

    def _masked(self, inputs: Any) -> Rows:
        """Without what a limit of length cut; TRL would take the last token for the verdict, a tool's too."""
        self.mask_truncated_completions = False
        try:
            batch = self._whole(inputs)
        finally:
            self.mask_truncated_completions = True
        for name in batch.keys() & {"completion_mask", "tool_mask"}:
            batch[name] = batch[name] * (~self.endings.cut.to(batch[name].device)).unsqueeze(1).to(batch[name])
        counted = (batch["completion_mask"] * batch.get("tool_mask", 1)).sum()
        return {**batch, "num_items_in_batch": self.accelerator.gather(counted).sum()}

    def _prepare_inputs(self, generation_batch: Any) -> Rows:
        """As TRL; the last micro-batch of a step is given the whole step."""
        inputs: Rows = super()._prepare_inputs(generation_batch)
        if not (self._own_passes and self.model.training):
            return inputs
        self._waiting.append(inputs)
        rollout_ends = (self._step + 1) % self.args.steps_per_generation == 0
        if not (rollout_ends or self.accelerator.sync_gradients):
            return {}
        parts, self._waiting = self._waiting, []
        whole = {
            name: torch.cat([part[name] for part in parts]) if values.dim() else values
            for name, values in parts[0].items()
            if values is not None
        }
        return {**whole, "micro_batches": torch.tensor(len(parts))}

    def _compute_loss(self, model: nn.Module, inputs: Rows) -> Tensor:
        """For the log; the gradient has been accumulated by then."""
        if not (self._own_passes and self.model.training):
            found: Tensor = super()._compute_loss(model, inputs)
            return found
        loss = torch.zeros((), device=self.accelerator.device)
        if inputs:
            with one_thread(self.scorer.device):
                loss += self._trained(model, inputs)
        return loss.requires_grad_()

    def _trained(self, model: nn.Module, rows: Rows) -> Tensor:
        """Forward and backward passes of a step's rows; the loss."""
        passes = Passes(self.scorer, self.accelerator, model, self.args.gradient_checkpointing)
        places = self._rows_with_gradient(rows)
        sizes = self.row_scorer.sizes({name: values for name, values in rows.items() if values.dim()})

        def step(parts: list[Tensor]) -> Tensor:
            total = torch.zeros((), device=places.device)
            for part in parts:
                self.scorer.budget.begin(sizes.tokens(part))
                loss = super(FastGRPOTrainer, self)._compute_loss(model, _taken(rows, part))
                loss = loss * self._share(rows, part)
                passes.back_propagate(1.0)(loss)
                total += loss.detach()
            return total

        def parts() -> list[Tensor]:
            of_places = sizes.of(places).passes(self.scorer.budget.tokens, places.device) if len(places) else []
            return [places[part] for part in of_places]

        return passes.made(step, parts, sizes.tokens)

    def _rows_with_gradient(self, rows: Rows) -> Tensor:
        advantages = rows["advantages"]
        live = (advantages if advantages.dim() == 1 else advantages.abs().sum(1)) != 0
        if self.beta != 0:
            live = torch.ones_like(live)
        self.add_metrics(rows_left_out=float(1 - live.float().mean()))
        return live.nonzero().squeeze(1)

    def _share(self, rows: Rows, part: Tensor) -> float:
        """What TRL's loss of some rows, as of a micro-batch, counts in that of the step."""
        if self.loss_type in SUM_OF_TOKENS:
            return 1.0
        weight = torch.ones_like(rows["completion_mask"][:, 0])
        if self.loss_type not in MEAN_OF_ROWS:  # bnpo: a mean over the tokens of a micro-batch, here of the step
            weight = (rows["completion_mask"] * rows.get("tool_mask", 1)).sum(1)
        return float(rows["micro_batches"] * weight[part].sum() / weight.sum())


def _of_groups(live: Tensor, size: int) -> Tensor:
    """The share of groups with a row that is live."""
    return live.view(-1, size).any(1).float().mean()


def _taken(rows: Rows, chosen: Tensor) -> Rows:
    return trimmed({name: values[chosen] if values.dim() else values for name, values in rows.items()})
