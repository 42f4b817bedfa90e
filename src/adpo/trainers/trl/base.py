"""TRL's `GRPOTrainer` with its hooks handed to objects: what `ADPOTrainer` and the GRPO trainer have in common.

    _generate_single_turn                   PolicySampler    completions of prompts
    _generate                               EndingRecorder   which of them the length limit cut
    _calculate_rewards                      (here)           one reward per completion
    _get_per_token_logps_and_entropies      RowScorer        log-probabilities, packed or padded
    training_step                           EmptySteps, Backtracking

What is called or overridden of TRL's inside is listed in `adpo.trainers.trl.contract`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from trl import GRPOTrainer

from adpo.scoring.dropout import without_dropout
from adpo.trainers.checkpoints.safe_checkpoints import SafeCheckpoints
from adpo.trainers.checks.accepted import limit_rows, refuse_liger, refuse_pictures, refuse_vision
from adpo.trainers.checks.policies import refuse_frozen, refuse_kind, refuse_tokenizer
from adpo.trainers.engine import engine_of
from adpo.trainers.epochs import StartEpoch
from adpo.trainers.monitors.empty_steps import EmptySteps
from adpo.trainers.monitors.gradient_monitor import GradientMonitor, causes_of
from adpo.trainers.monitors.guards import RefuseBadSteps
from adpo.trainers.monitors.weights_moved import WeightsMoved
from adpo.trainers.trl import contract
from adpo.trainers.trl.rollout.ending_recorder import EndingRecorder
from adpo.trainers.trl.rollout.resume import BufferedRollout
from adpo.trainers.trl.rollout.sampling import PolicySampler
from adpo.trainers.trl.rollout.vllm import check_vllm
from adpo.trainers.trl.step.backtracking import backtracking_of
from adpo.trainers.trl.step.rows import Rows
from adpo.trainers.trl.step.scoring import RowScorer


class OnlineTrainer(SafeCheckpoints, GRPOTrainer):  # type: ignore[misc]
    """Samples, scores, guards its steps and resumes exactly; the loss is that of a subclass, or TRL's."""

    LONG_ROWS: ClassVar[str] = (
        "are left out"  # those beyond the length that a pass can take without changing others
    )

    train_sampler: Any = None
    _buffered_inputs: list[dict[str, Any]] | None  # the rollout at hand, in micro-batches

    def __init__(self, model: Any, reward_funcs: Any, args: Any, *, max_refused_steps: int, **rest: Any) -> None:
        contract.check_class(GRPOTrainer)
        name = type(self).__name__
        refuse_pictures(name, (rest.get("train_dataset"), rest.get("eval_dataset")), rest.get("processing_class"))
        refuse_liger(args)
        check_vllm(args, model)
        if isinstance(model, nn.Module):
            refuse_kind(name, model)
        super().__init__(model, reward_funcs, args, **rest)
        contract.check_trainer(self)
        policy = self.accelerator.unwrap_model(self.model)
        refuse_kind(name, policy)  # also of a model that was only named, and of its adapter
        refuse_vision(name, policy)
        refuse_tokenizer(name, policy, self._tokenizer)
        limit_rows(policy, self.args.max_completion_length, instead=self.LONG_ROWS)
        self.policy_sampler = PolicySampler(self, super()._generate_single_turn)
        if self.args.disable_dropout:
            without_dropout(self.model)  # TRL knows modules of dropout, not the rates of attention
        self.row_scorer = RowScorer(self, super()._get_per_token_logps_and_entropies)
        self.scorer = self.row_scorer.scorer
        if self.ref_model is not None:
            self.scorer.accept(self.accelerator.unwrap_model(self.ref_model))
        self.empty_steps = EmptySteps(self)
        self.backtracking = backtracking_of(self)
        self.endings = EndingRecorder(self)
        self.rewards = torch.zeros(0)  # of the latest rollout, of all ranks; NaN where there is none
        self.gradient_monitor = GradientMonitor(self.args.max_completion_length)
        self.weights_moved = WeightsMoved(self, self.gradient_monitor)
        self.step_guard = RefuseBadSteps(self, max_refused_steps)
        self.checkpoint_parts.append(BufferedRollout(self))
        if self.backtracking is not None:
            self.checkpoint_parts.append(self.backtracking)
        steps = (StartEpoch(self), self.empty_steps, self.backtracking, self.weights_moved, self.step_guard)
        for callback in steps:  # in the order in which they look at a step
            if callback is not None:
                self.add_callback(callback)

    def train(self, *arguments: Any, **options: Any) -> Any:
        """As in TRL; a run of refused steps ends in `TrainingStoppedError`."""
        refuse_frozen(self.model)
        result = super().train(*arguments, **options)
        self.step_guard.complain()
        return result

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        engine_of(self.accelerator)
        loss: Tensor = super().training_step(*arguments, **options)
        self.empty_steps.after_passes()
        if self.backtracking is not None:
            self.backtracking.loss += loss.detach()
        return loss

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self.train_sampler = super()._get_train_sampler(dataset)
        return self.train_sampler

    # A rollout.

    def _generate_single_turn(self, prompt_ids: Any, *arguments: Any, **options: Any) -> Any:
        return self.policy_sampler.generate(prompt_ids, *arguments, **options)

    def _generate(self, prompts: list[Any]) -> Any:
        """As TRL; what is known of the end of each completion is kept beside it."""
        self.endings.begin()
        generated = super()._generate(prompts)
        self.endings.record(generated)
        return generated

    def _generate_and_score_completions(self, inputs: Any) -> Rows:
        batch: Rows = super()._generate_and_score_completions(inputs)
        contract.check_rollout(batch)
        return batch

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        """As TRL; what a completion got from all functions together is kept in ``rewards``."""
        per_function: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        weights = self.reward_weights.to(per_function.device)
        total = (per_function * weights).nansum(1)
        self.rewards = torch.where(per_function.isnan().all(1), torch.nan, total)
        return per_function

    def _log_rollout(self, rewards: Tensor, member: Tensor, cut: Tensor) -> None:
        """Why groups have no gradient where rewards are equal; ``cut`` where that changes rewards."""
        gather, size, device = self.accelerator.gather, self.num_generations, self.accelerator.device
        tables = [gather(values.to(device)).view(-1, size).cpu() for values in (rewards, member, cut)]
        self.gradient_monitor.rollout(causes_of(*tables))
        share = float(gather(self.endings.cut.to(device)).float().mean())
        self._metrics["train"]["completions/truncated"].append(share)

    # Log-probabilities.

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> Any:
        return self.row_scorer.as_trl(*arguments, **options)

    def add_metrics(self, **values: float) -> None:
        """Figures of a step, averaged over the steps between two logs; named ``adpo/…`` in it."""
        for name, value in values.items():
            self._metrics["train"][f"adpo/{name}"].append(value)
