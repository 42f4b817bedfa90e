"""Which completions of the latest rollout the length limit cut, whatever sampled them."""

from __future__ import annotations

import math
from typing import Any

import torch

from adpo.trainers.trl import contract
from adpo.trainers.trl.rollout.endings import STOPS, Completion, Endings, RecordedEngine
from adpo.trainers.trl.rollout.vllm import RecordedServer, check_tokenizer, refuse_packed, with_ends


class EndingRecorder:
    """Stands beside a trainer's `_generate`; puts itself in front of vLLM, which says why a completion ended."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.cut = torch.zeros(0, dtype=torch.bool)  # of the latest rollout, on this rank
        self.engine = self._recorded_engine() if trainer.args.use_vllm else None

    def _recorded_engine(self) -> RecordedEngine | RecordedServer:
        trainer, args = self.trainer, self.trainer.args
        vllm = trainer.vllm_generation
        refuse_packed(trainer.accelerator.unwrap_model(trainer.model))
        contract.check_vllm(vllm, args.vllm_mode, trainer.accelerator.is_main_process)
        vllm.generation_kwargs = with_ends(vllm.generation_kwargs, trainer.eos_token_ids)
        if args.vllm_mode == "colocate":
            recorded = vllm.llm = RecordedEngine(vllm.llm)
            return recorded
        check_tokenizer(args, trainer._tokenizer)
        return RecordedServer(getattr(vllm, "vllm_client", None))

    def begin(self) -> None:
        """Before completions are sampled."""
        if self.engine is not None:
            self.engine.reasons.clear()

    def record(self, generated: Any) -> None:
        """What `_generate` returned; a rollout function of the user's may say itself what was truncated."""
        contract.check_generated(generated)
        if isinstance(self.engine, RecordedServer):
            self.engine.share()
        prompt_ids, completion_ids, tool_mask, completions, _, extra, *_ = generated
        cut = extra.pop("truncated", None) if self.trainer.rollout_func is not None else None
        if cut is None:
            endings = self._endings()
            masks = tool_mask or [None] * len(prompt_ids)
            rows = zip(prompt_ids, completion_ids, masks, completions, strict=True)
            cut = [endings.is_cut(Completion(*row)) for row in rows]
        self.cut = torch.tensor([bool(value) for value in cut], dtype=torch.bool)

    def _endings(self) -> Endings:
        trainer = self.trainer
        return Endings(
            ends=set(trainer.eos_token_ids),
            limit=trainer.max_completion_length or math.inf,
            stop_words=bool(STOPS & set(trainer.args.generation_kwargs or ())),
            own_rollout=trainer.rollout_func is not None,
            tool_calls=trainer.max_tool_calling_iterations if trainer.tools else math.inf,
            reasons=self.engine.reasons if self.engine is not None else {},
        )
