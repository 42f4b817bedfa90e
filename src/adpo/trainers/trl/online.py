"""`ADPOTrainer`: TRL's `GRPOTrainer` with the objective of the core, exact under any split of a group.

TRL samples the completions, scores them with the reward functions and cuts them into micro-batches; a group may
be spread over all of them, and over ranks. This trainer takes the rows of an optimizer step together and hands
them to `adpo.exact`: the gradient is that of the whole-group loss, in passes that memory holds, and rows without
gradient go through no pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import TrainerCallback
from trl.trainer.utils import split_tensor_dict

from adpo.anchors import Snapshot
from adpo.core.temperature import Temperature
from adpo.scoring.context import longest_row
from adpo.tasks.completions import answer_of
from adpo.trainers.checkpoints.state_file import StateFile
from adpo.trainers.checks.accepted import refuse_router_loss
from adpo.trainers.group_step import GroupStep, one_thread
from adpo.trainers.monitors.guards import GuardedRewards
from adpo.trainers.sharding import SHARDED
from adpo.trainers.trl.base import OnlineTrainer
from adpo.trainers.trl.config import ADPOConfig
from adpo.trainers.trl.rollout.members import left_out, log_left_out, member_columns
from adpo.trainers.trl.step.anchoring import AnchorKeeper, kl_budget_of, one_step_per_rollout, refuse_shards
from adpo.trainers.trl.step.rows import Rows, kept
from adpo.trainers.trl.step.step_log import StepLog
from adpo.trainers.trl.step.step_rows import step_rows, zero_through
from adpo.trainers.trl.step.tau_control import TauControl, answer_metrics, token_entropy

log = logging.getLogger("adpo")
SAMPLES = "samples"
"""The note of a checkpoint on groups of the latest step."""


class ADPOTrainer(OnlineTrainer):
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
        self.answer_of, self.objective = answer_of, args.objective()
        self.reward_guard = GuardedRewards(args.max_refused_steps)
        functions = self.reward_guard.wrap(reward_funcs)
        super().__init__(model, functions, args, max_refused_steps=args.max_refused_steps, **rest)
        policy = self.accelerator.unwrap_model(self.model)
        refuse_router_loss("ADPOTrainer", policy, args.router_aux_loss_coef)
        if self.aux_loss_enabled:  # by the model's own coefficient, which TRL's losses would add
            text = "ADPO adds no router loss: router_aux_loss_coef = %g has no effect"
            log.warning(text, self.router_aux_loss_coef)
        sharded = self.accelerator.distributed_type in SHARDED
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            refuse_shards(args)
        self.anchors = AnchorKeeper(args, policy, self._current_logp, sharded=sharded)
        self.tau_control = TauControl(args.temperature_schedule(), args.tau, one_step=one_step_per_rollout(args))
        self.kl_budget = kl_budget_of(args, policy, self.anchor, self._current_logp, self.accelerator.reduce)
        self.group_step = GroupStep(
            self.objective,
            self.scorer,
            self.accelerator,
            self.empty_steps,
            nll_weight=args.nll_weight,
            checkpoint=args.gradient_checkpointing,
        )
        self.step_log = StepLog(self.accelerator)
        parts = [part for part in (self.tau_control, self.anchors, self.kl_budget) if part is not None]
        self.checkpoint_parts.append(StateFile(self.kept_policies, *parts, guard=self.step_guard))
        self.add_callback(_AfterStep(self))
        self._window = range(0)  # micro-batches of the rollout that the optimizer step at hand is made of
        self._micro_batches_left = 0
        self._answers: list[str] = []  # of the latest rollout, of all ranks
        self._sampled_empty = torch.zeros(0, dtype=torch.bool)  # of the latest rollout, on this rank

    def _current_logp(self, rows: Rows) -> Tensor:
        return self.row_scorer.detached(self.model, rows)

    @property
    def anchor(self) -> Snapshot | None:
        """The policy that keeps weights of its own, if the anchor is such a one."""
        return self.anchors.policy

    @property
    def tau(self) -> float:
        return self.tau_control.tau

    @property
    def schedule(self) -> Temperature:
        return self.tau_control.schedule

    def sample_groups(self, most: int = 2) -> list[dict[str, Any]]:
        """Some groups of the latest step: ``prompt``, and ``members`` with ``text``, ``reward`` and ``c``."""
        if self.step_log.samples is None:  # resumed, and no step made since
            saved: list[dict[str, Any]] = self.notes.get(SAMPLES, [])
            return saved[:most]
        return self.step_log.samples.groups(self._tokenizer, most)

    # A rollout.

    def _generate_single_turn(self, *arguments: Any, **options: Any) -> Any:
        """A completion without a single token gets an end, which TRL needs, and is remembered as empty."""
        ids, *rest = super()._generate_single_turn(*arguments, **options)
        self._sampled_empty = torch.tensor([len(row) == 0 for row in ids])
        return [row or [self.eos_token_ids[0]] for row in ids], *rest

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        self.reward_guard.lost.clear()
        per_function = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        lost = torch.tensor([row in self.reward_guard.lost for row in range(len(completions))])
        lost = self.accelerator.gather(lost.to(self.accelerator.device)).to(self.rewards.device)
        self.rewards = torch.where(lost, torch.nan, self.rewards)
        if self.model.training:
            self._answers = gather_object([self.answer_of(completion) for completion in completions])
        return per_function

    def _generate_and_score_completions(self, inputs: Any) -> Rows:
        """TRL's batch with rewards, members and groups."""
        self.row_scorer.skip = True  # the anchor's log-probabilities are the trainer's own
        try:
            batch: Rows = super()._generate_and_score_completions(inputs)
        finally:
            self.row_scorer.skip = False
        if not self.model.training:
            return batch
        if "pixel_values" in batch:
            raise ValueError("ADPOTrainer trains on text; this data set has images")
        self.anchors.sampled_at = self.state.global_step
        self._add_members(batch)
        self._move_tau(batch)
        if self.kl_budget is not None:
            self.add_metrics(start_kl=self.kl_budget.measure(kept(batch)))
        return batch

    def _add_members(self, batch: Rows) -> None:
        rows, device = len(batch["completion_ids"]), self.accelerator.device
        first = self.accelerator.process_index * rows
        rewards, cut = self.rewards[first : first + rows].to(device), self.endings.cut.to(device)
        empty = torch.zeros(rows, dtype=torch.bool)
        if len(self._sampled_empty) == rows:  # not where a rollout function or tools write completions
            empty = self._sampled_empty
        context = longest_row(self.accelerator.unwrap_model(self.model).config)
        out = left_out(batch, rewards, empty.to(device), context)
        self.add_metrics(**log_left_out(out, self.state.global_step, self.accelerator.reduce))
        of_groups: dict[str, Any] = {"size": self.num_generations, "gather": self.accelerator.gather}
        batch |= member_columns(rewards, cut, out, truncated=self.args.truncated, first=first, **of_groups)
        self._log_rollout(batch["rewards"], batch["member"], cut & (self.args.truncated != "keep"))

    def _move_tau(self, batch: Rows) -> None:
        metrics = answer_metrics(self._answers, self.num_generations)
        entropy = metrics["answer_entropy"]
        if self.args.tau_confidence == "tokens":
            size = self.args.per_device_train_batch_size
            entropy = metrics["token_entropy"] = token_entropy(self.row_scorer, self.model, batch, size)
        self.tau_control.update(entropy, self.rewards)
        self.add_metrics(**metrics, tau=self.tau)

    # An optimizer step.

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
                loss += self._accumulate_gradient(model, inputs)
        return loss.requires_grad_()

    def _accumulate_gradient(self, model: nn.Module, rows: Rows) -> float:
        """Forward and backward passes of a step's rows; the loss."""
        self.step_log.samples = None
        member, gather = rows["member"], self.accelerator.gather
        present = gather(torch.where(member, rows["groups"], -1))
        groups = len(torch.unique(present[present >= 0]))
        all_groups = len(torch.unique(gather(rows["groups"])))
        passes = self.group_step.passes(model)
        logp = torch.full(member.shape, torch.nan, dtype=torch.float64, device=member.device)
        if not groups:
            self.gradient_monitor.step(1.0)
            self.empty_steps.observe(torch.zeros(1))
            self.add_metrics(rows_left_out=1.0, rows_scored=0.0, loss_of_groups=0.0)
            # what earlier rollouts of the step accumulated is averaged here
            passes.close(zero_through(self.row_scorer, model, rows))
            self._remember(logp)
            return 0.0
        places = member.nonzero().squeeze(1)
        at_anchor, anchor_logp = self._anchor_logp(rows, places)
        if self.scorer.packs and not passes.several:  # small: done on the CPU, while the device is at work
            rows, places, logp = {name: values.cpu() for name, values in rows.items()}, places.cpu(), logp.cpu()
            anchor_logp = None if anchor_logp is None else anchor_logp.cpu()
        if anchor_logp is not None:
            anchor_logp = passes.finite(anchor_logp)
        size = self.args.per_device_train_batch_size
        share = len(self._window) / self.current_gradient_accumulation_steps
        gradient = self.group_step.accumulate(
            passes,
            step_rows(self.row_scorer, model, rows, places, groups=groups, rows_per_pass=size),
            anchor_logp,
            tau=self.tau,
            at_anchor=at_anchor,
            share=share,
            as_before=self.state.global_step != self.anchors.sampled_at,
        )
        self.gradient_monitor.step(1 - float(gradient.diagnostics.live) * groups / all_groups)
        self.add_metrics(**self.step_log.step(rows, places, gradient))
        logp[places] = gradient.logp
        self._remember(logp)
        second = self.state.global_step - self.anchors.sampled_at == 1  # the step after the one at the anchor
        if second and self.anchor is None and anchor_logp is not None:
            moved, of_group = gradient.logp - anchor_logp, rows["groups"][places]
            self.add_metrics(**self.tau_control.measure(moved, of_group, anchor_logp))
        loss: float = gradient.loss.item() * share
        return loss

    def _anchor_logp(self, rows: Rows, places: Tensor) -> tuple[bool, Tensor | None]:
        """Whether the policy is at its anchor, and log-probabilities of members under it, where needed."""
        if not self.anchors.coincides(self.state.global_step):
            return False, self.anchors.logp(rows, places)
        if self.tau_control.measures_next_step(self.optimizer):
            logp = self.anchors.current_logp(rows, places)
            self.tau_control.before_step(rows, places, logp, self.optimizer)
        return True, self.anchors.current_logp(rows, places) if self.objective.target.reads_anchor else None

    def _remember(self, logp: Tensor) -> None:
        self.anchors.remember(self._buffered_inputs or [], self._window, logp, self.state.global_step)

    def after_step(self, control: Any) -> None:
        """What follows an optimizer step."""
        for policy in self.kept_policies.values():
            policy.on_step()
        self.add_metrics(**self.tau_control.after_step(self.anchors.current_logp), **self.step_log.after_step())
        if self.kl_budget is not None and self.kl_budget.exceeded:
            limit = self.kl_budget.limit
            log.warning("step %d: KL to the start is over kl_budget = %g; stop", self.state.global_step, limit)
            control.should_save = control.should_training_stop = True

    # Checkpoints.

    @property
    def kept_policies(self) -> dict[str, Snapshot]:
        """The anchors whose weights a checkpoint keeps, by name."""
        start = None if self.kl_budget is None else self.kl_budget.start
        policies = {"anchor": self.anchor, "start": None if start is self.anchor else start}
        return {name: policy for name, policy in policies.items() if policy is not None}

    @property
    def _is_finished(self) -> bool:
        return super()._is_finished or (self.kl_budget is not None and self.kl_budget.exceeded)

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        self.notes[SAMPLES] = self.sample_groups()
        super()._save_checkpoint(*arguments, **options)


class _AfterStep(TrainerCallback):  # type: ignore[misc]
    def __init__(self, trainer: ADPOTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self.trainer.after_step(control)
