"""`ADPOConfig`: TRL's `GRPOConfig` with the three coordinates of the equation.

Everything about rollouts, batches, optimizers, logging and checkpoints is TRL's. What is added: the target, the
divergence, the temperature and the anchor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from trl import GRPOConfig

from adpo.trainers.checks.arguments import REFUSED, check_arguments
from adpo.trainers.coordinates import Coordinates, choose
from adpo.trainers.forms import ScoringForms
from adpo.trainers.trl.arguments import MEANINGLESS, check_sampling_arguments
from adpo.trainers.trl.rollout.sampling import SamplingForm
from adpo.trainers.trl.step.backtracking import BacktrackingForm


@dataclass
class ADPOConfig(Coordinates, BacktrackingForm, ScoringForms, SamplingForm, GRPOConfig):  # type: ignore[misc]
    """Arguments of `ADPOTrainer`; fields that are not listed here mean what they mean in TRL."""

    ANCHORS: ClassVar[Sequence[str]] = ("on_policy", "fixed", "ema", "refresh", "none")

    anchor: str = field(
        default="on_policy",
        metadata={"help": "on_policy, fixed, ema, refresh, or none: u is the log-probability itself."},
    )
    tau_confidence: str = field(
        default="answers",
        metadata={"help": "Confidence by the entropy of the final answers in a group, or of tokens (one pass)."},
    )
    truncated: str = field(
        default="zero",
        metadata={"help": "A completion cut at the length limit: reward zero, masked out of its group, or kept."},
    )
    kl_budget: float | None = field(
        default=None,
        metadata={"help": "Stop when KL(policy || policy at the start), in nats a completion, exceeds this."},
    )
    vllm_importance_sampling_correction: bool = field(
        default=False,
        metadata={
            "help": "Not used: log-probabilities are the trained model's, no ratio to the sampler's is taken."
        },
    )

    def __post_init__(self) -> None:
        if getattr(self, "beta", 0) != 0:
            raise ValueError(
                f"beta = {self.beta}: the anchor takes the place of a KL penalty; leave beta at 0 and choose tau"
            )
        refused = {**REFUSED, **MEANINGLESS}
        if not getattr(self, "router_aux_loss_coef", 0):
            refused.pop("router_aux_loss_coef")
        check_arguments(self, refused)
        check_sampling_arguments(self)
        super().__post_init__()
        self.check_coordinates()
        self.check_forms()
        self.check_sampling()
        self.check_backtracking()
        choose("tau_confidence", self.tau_confidence, ("answers", "tokens"))
        choose("truncated", self.truncated, ("zero", "mask", "keep"))
        if self.tau_schedule == "auto" and self.anchor != "on_policy":
            raise ValueError(
                f"tau_schedule auto needs the on_policy anchor (u is zero at its first step); got {self.anchor}"
            )
        if self.anchor == "none" and self.prior_in_target:
            raise ValueError("prior_in_target needs an anchor; got anchor none")
        if self.kl_budget is not None and self.kl_budget <= 0:
            raise ValueError(f"kl_budget must be positive; got {self.kl_budget}")
        self._check_layout()

    def check_backtracking(self) -> None:
        super().check_backtracking()
        for name, value, fine in (
            ("anchor", self.anchor, self.anchor in ("on_policy", "fixed", "none")),
            ("tau_schedule", self.tau_schedule, self.tau_schedule != "auto"),
            ("nll_weight", self.nll_weight, not self.nll_weight),
        ):
            if self.backtracking and not fine:
                raise ValueError(f"backtracking does not go with {name} = {value}: choose one of the two")

    def _check_layout(self) -> None:
        """A group must not straddle two optimizer steps."""
        per_rollout, accumulated = self.steps_per_generation, self.gradient_accumulation_steps
        if per_rollout % accumulated and accumulated % per_rollout:
            raise ValueError(
                f"steps_per_generation = {per_rollout} and gradient_accumulation_steps = {accumulated}: one must "
                "be a multiple of the other, or a rollout would begin inside an optimizer step"
            )
        per_step = self.per_device_train_batch_size * self.gradient_accumulation_steps
        if self.steps_per_generation > self.gradient_accumulation_steps and per_step % self.num_generations:
            raise ValueError(
                f"groups of num_generations = {self.num_generations} would straddle optimizer steps of "
                f"{per_step} rows a process: make per_device_train_batch_size * gradient_accumulation_steps "
                "a multiple of num_generations, or sample once per step"
            )
