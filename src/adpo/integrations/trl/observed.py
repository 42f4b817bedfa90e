"""What a rollout was like: every reward, how completions ended, and why groups have no gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from adpo.integrations.gradient_monitor import GradientMonitor, causes_of
from adpo.integrations.trl import contract
from adpo.integrations.trl.backtracking import Stepping
from adpo.integrations.trl.endings import STOPS, Completion, Endings, RecordedEngine
from adpo.integrations.trl.rows import Rows
from adpo.integrations.trl.vllm import RecordedServer, check_tokenizer, refuse_packed, with_ends
from adpo.integrations.weights_moved import WeightsMoved


class Observed(Stepping):
    """A `GRPOTrainer` that keeps a rollout's rewards and endings, and says when nothing can be learnt from it."""

    eos_token_ids: list[int]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._rewards = torch.zeros(0)  # of the latest rollout, of all ranks; NaN where there is none
        self._cut = torch.zeros(0, dtype=torch.bool)  # of the latest rollout, on this rank
        self._engine = self._recorded_engine() if self.args.use_vllm else None
        self.gradient_monitor = GradientMonitor(self.args.max_completion_length)
        self.weights_moved = WeightsMoved(self, self.gradient_monitor)
        self.add_callback(self.weights_moved)

    def _recorded_engine(self) -> RecordedEngine | RecordedServer:
        vllm = self.vllm_generation
        refuse_packed(self.accelerator.unwrap_model(self.model))
        contract.check_vllm(vllm, self.args.vllm_mode, self.accelerator.is_main_process)
        vllm.generation_kwargs = with_ends(vllm.generation_kwargs, self.eos_token_ids)
        if self.args.vllm_mode == "colocate":
            recorded = vllm.llm = RecordedEngine(vllm.llm)
            return recorded
        check_tokenizer(self.args, self._tokenizer)
        return RecordedServer(getattr(vllm, "vllm_client", None))

    def _generate(self, prompts: list[Any]) -> Any:
        """As TRL; what is known of the end of each completion is kept beside it."""
        if self._engine is not None:
            self._engine.reasons.clear()
        found = super()._generate(prompts)
        contract.check_generated(found)
        if isinstance(self._engine, RecordedServer):
            self._engine.share()
        prompt_ids, completion_ids, tool_mask, completions, _, extra, *_ = found
        given = extra.pop("truncated", None) if self.rollout_func is not None else None
        if given is None:
            endings = self._endings()
            masks = tool_mask or [None] * len(prompt_ids)
            rows = zip(prompt_ids, completion_ids, masks, completions, strict=True)
            given = [endings.is_cut(Completion(*row)) for row in rows]
        self._cut = torch.tensor([bool(cut) for cut in given], dtype=torch.bool)
        return found

    def _endings(self) -> Endings:
        return Endings(
            ends=set(self.eos_token_ids),
            limit=self.max_completion_length or math.inf,
            stop_words=bool(STOPS & set(self.args.generation_kwargs or ())),
            own_rollout=self.rollout_func is not None,
            tool_calls=self.max_tool_calling_iterations if self.tools else math.inf,
            reasons=self._engine.reasons if self._engine is not None else {},
        )

    def _generate_and_score_completions(self, inputs: Any) -> Rows:
        batch: Rows = super()._generate_and_score_completions(inputs)
        contract.check_rollout(batch)
        return batch

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        per_function: Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        weights = self.reward_weights.to(per_function.device)
        rewards = (per_function * weights).nansum(1)
        self._rewards = torch.where(per_function.isnan().all(1), torch.nan, rewards)
        return per_function

    def _observe_rollout(self, rewards: Tensor, member: Tensor, cut: Tensor) -> None:
        """Why groups have no gradient where rewards are equal; ``cut`` where that changes rewards."""
        gather, size, device = self.accelerator.gather, self.num_generations, self.accelerator.device
        tables = [gather(values.to(device)).view(-1, size).cpu() for values in (rewards, member, cut)]
        self.gradient_monitor.rollout(causes_of(*tables))
        share = float(gather(self._cut.to(device)).float().mean())
        self._metrics["train"]["completions/truncated"].append(share)
