"""The forms a trainer scores completions in, as its arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from adpo.scoring.packed.attention_kernels import NAMES
from adpo.scoring.scorer import Forms, Scorer
from adpo.scoring.sequences import Reduction
from adpo.trainers.checks.arguments import check_sharding
from adpo.trainers.checks.policies import refuse_noise
from adpo.trainers.coordinates import choose
from adpo.trainers.engine import refuse_stage
from adpo.trainers.sharding import SHARDED

NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class ScoringForms:
    """To be mixed into a trainer's own arguments: how log-probabilities are computed, never what they are."""

    scoring: str = field(
        default="auto",
        metadata={"help": "padded rows, packed (no padding, no logits kept), or auto: packed on an accelerator."},
    )
    attention: str = field(
        default="auto",
        metadata={"help": "Packed: varlen (torch's), flash (the package), flex, stretches, or auto: by device."},
    )
    share_prompts: bool = field(
        default=True, metadata={"help": "Packed: completions of a prompt attend to one copy of it."}
    )
    compile_layers: bool | None = field(
        default=None, metadata={"help": "Packed: compile the model's layers (by itself: on a GPU with triton)."}
    )
    tokens_per_pass: str | int = field(
        default="auto",
        metadata={"help": "Packed: tokens in one forward and backward pass; auto: what the free memory holds."},
    )
    gradient_checkpointing: bool | None = field(
        default=None,
        metadata={"help": "Make activations again in the backward pass; by itself: where memory is short."},
    )

    ddp_broadcast_buffers: bool | None = field(
        default=False, metadata={"help": "Processes make different numbers of forward passes: keep it off."}
    )

    def check_forms(self) -> None:
        refuse_stage(self)
        check_sharding(self)
        choose("scoring", self.scoring, ("auto", "padded", "packed"))
        choose("attention", self.attention, ("auto", *NAMES))
        if self.ddp_broadcast_buffers:
            raise ValueError("ddp_broadcast_buffers: processes make different numbers of passes; leave it off")
        asked = self.tokens_per_pass
        if asked != "auto":
            try:
                self.tokens_per_pass = int(asked)
            except ValueError:
                self.tokens_per_pass = 0
            if self.tokens_per_pass < 1:
                raise ValueError(f"tokens_per_pass must be auto or a number of tokens; got {asked!r}")

    def settle_checkpointing(self, scorer: Scorer) -> None:
        """Padded rows on an accelerator keep what TRL has for them; packed ones wait until memory is short."""
        if self.gradient_checkpointing is None and not scorer.packs and scorer.device.type != "cpu":
            self.gradient_checkpointing = True

    def forms(self, sharded: bool) -> Forms:
        """Packed rows have not been tried on sharded parameters; Liger brings a forward pass of its own."""
        if self.use_liger_kernel and self.scoring == "packed":  # type: ignore[attr-defined]
            raise ValueError(
                "scoring packed does not work with use_liger_kernel, which puts a forward pass of its own in the "
                "place of the one that packs: leave one of them out"
            )
        if sharded and self.scoring == "packed":
            raise ValueError(
                "scoring packed does not work on sharded parameters (FSDP, DeepSpeed) yet: use padded"
            )
        asked = self.tokens_per_pass
        budget = "auto" if asked == "auto" else int(asked)
        scoring = "padded" if sharded or self.use_liger_kernel else self.scoring  # type: ignore[attr-defined]
        return Forms(scoring, self.attention, self.share_prompts, self.compile_layers, budget)  # type: ignore[arg-type]


def scorer_of(trainer: Any, reduction: Reduction, temperature: float = 1.0) -> Scorer:
    """For the model of a trainer, in the forms its arguments ask for."""
    accelerator = trainer.accelerator
    policy = accelerator.unwrap_model(trainer.model)
    forms = trainer.args.forms(accelerator.distributed_type in SHARDED)
    passes = NARROW.get(accelerator.mixed_precision)
    head = torch.float32 if getattr(trainer.args, "cast_lm_head_to_fp32", False) else None
    scorer = Scorer(policy, forms, reduction, temperature, passes, head)
    if (
        trainer.args.disable_dropout and accelerator.distributed_type not in SHARDED
    ):  # no trial on a part of the weights
        refuse_noise(policy)
    trainer.args.settle_checkpointing(scorer)
    return scorer
