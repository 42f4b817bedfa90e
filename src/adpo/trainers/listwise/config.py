"""`ListwiseConfig`: the training arguments of transformers with the three coordinates of the equation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import TrainingArguments

from adpo.trainers.checks.arguments import check_arguments
from adpo.trainers.coordinates import Coordinates
from adpo.trainers.forms import ScoringForms


@dataclass
class ListwiseConfig(Coordinates, ScoringForms, TrainingArguments):  # type: ignore[misc]
    """Arguments of `ListwiseTrainer`; fields that are not listed here mean what they mean in transformers.

    A batch is counted in lists. ``tau = 10`` and ``learning_rate = 1e-6`` are the ``beta = 0.1`` and the learning
    rate that DPO begins with in TRL.
    """

    ANCHORS: ClassVar[Sequence[str]] = ("fixed", "ema", "refresh", "none")

    target: str = field(
        default="plackett_luce",
        metadata={"help": "Target Q: plackett_luce (pairs: DPO's), boltzmann, kde or top1."},
    )
    tau: float = field(default=10.0, metadata={"help": 'Anchoring temperature, 1 / beta of DPO; "auto" fits it.'})
    tau_min: float = field(default=1.0, metadata={"help": "Lower bound of a schedule."})
    tau_max: float = field(default=100.0, metadata={"help": "Upper bound of a schedule."})
    anchor: str = field(
        default="fixed",
        metadata={"help": "fixed (the reference, scored once), ema, refresh, or none (no reference at all)."},
    )
    max_length: int | None = field(
        default=1024, metadata={"help": "Tokens of prompt and completion; the end of a longer completion is cut."}
    )
    completions_per_pass: int | None = field(
        default=None,
        metadata={"help": "Completions in one forward pass (all, or tokens_per_pass); the gradient is the same."},
    )
    cache: str | None = field(
        default=None, metadata={"help": "Folder of tokenised data and reference scores (that of adpo)."}
    )
    skip_bad: bool = field(default=False, metadata={"help": "Leave bad rows of the data out, and count them."})
    chat_template_kwargs: dict[str, Any] | None = field(
        default=None, metadata={"help": "Arguments of the chat template."}
    )
    learning_rate: float = field(default=1e-6, metadata={"help": "Of the optimizer; as in DPO."})
    logging_steps: float = field(default=10, metadata={"help": "Optimizer steps between two log lines."})
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Every pass uses every parameter that is trained: not looked for."}
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "Not used: the columns are known."})

    def __post_init__(self) -> None:
        check_arguments(self)
        super().__post_init__()
        self.check_coordinates()
        self.check_forms()
        for name in ("max_length", "completions_per_pass"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        if self.completions_per_pass is not None and not self.disable_dropout:
            raise ValueError(
                "completions_per_pass scores a list twice, and with dropout not alike: leave one of them out"
            )
        if self.tau_schedule == "auto" and self.anchor == "none":
            raise ValueError("tau_schedule auto measures steps from an anchor; with anchor none, choose a tau")
