"""`ADPOConfig`: TRL's `GRPOConfig` with the three coordinates of the equation.

Everything about rollouts, batches, optimizers, logging and checkpoints is TRL's. What is added: the target, the
divergence, the temperature and the anchor.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Literal, get_args

from trl import GRPOConfig

import adpo
from adpo.core.divergences import Divergence
from adpo.core.objective import Objective
from adpo.core.targets import Target
from adpo.core.temperature import ConstantTau, GuardedTau, HybridTau, Temperature
from adpo.integrations.trl.auto_tau import AutoTau

TargetName = Literal["boltzmann", "kde", "plackett_luce", "top1"]
AnchorName = Literal["on_policy", "fixed", "ema", "refresh"]
Schedule = Literal["constant", "auto", "guarded", "hybrid"]
Confidence = Literal["answers", "tokens"]
Reduction = Literal["sum", "mean"]
Truncated = Literal["zero", "mask", "keep"]
DIVERGENCES = ("cross_entropy", "forward_kl", "reverse_kl", "alpha", "wasserstein")

MEANINGLESS = (
    *("beta", "delta", "epsilon", "epsilon_high", "importance_sampling_level", "loss_type", "scale_rewards"),
    *("entropy_coef", "off_policy_mask_threshold", "top_entropy_quantile", "use_bias_correction_kl"),
    *("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "use_adaptive_entropy"),
    *("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target", "router_aux_loss_coef"),
    *("sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg"),
    *("vespo_lambda_pos", "multi_objective_aggregation", "vllm_importance_sampling_correction"),
    *("vllm_importance_sampling_mode", "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"),
    "vllm_importance_sampling_clip_min",
)
"""Arguments of `GRPOConfig` that shape a loss ADPO does not use."""


@dataclass
class ADPOConfig(GRPOConfig):  # type: ignore[misc]
    """Arguments of `ADPOTrainer`; fields that are not listed here mean what they mean in TRL."""

    target: str = field(
        default="boltzmann", metadata={"help": "Target Q: boltzmann, kde, plackett_luce (ties included) or top1."}
    )
    reward_beta: float = field(
        default=1.0, metadata={"help": "Temperature of the rewards in the boltzmann and kde targets."}
    )
    standardize: bool = field(
        default=True, metadata={"help": "Boltzmann: z-score the rewards of a group, as Algorithm 1 does."}
    )
    prior_in_target: bool = field(
        default=False,
        metadata={"help": "Boltzmann: put the anchor's probabilities inside the target, where they count twice."},
    )
    ties: str = field(default="efron", metadata={"help": "Plackett-Luce: efron or breslow."})
    label_smoothing: float = field(
        default=0.0, metadata={"help": "Plackett-Luce and top1: share of the target spread evenly."}
    )
    divergence: str = field(
        default="cross_entropy",
        metadata={"help": "D: cross_entropy, forward_kl, reverse_kl, alpha:0.5 or the like, wasserstein:1."},
    )
    tau: float = field(
        default=1.0,
        metadata={"help": 'Anchoring temperature (the base of a schedule); "auto" is tau_schedule = auto.'},
    )
    tau_schedule: str = field(
        default="constant",
        metadata={"help": "constant, auto (u after a rollout's first step has deviation 1), guarded or hybrid."},
    )
    tau_confidence: str = field(
        default="answers",
        metadata={"help": "Confidence by the entropy of the final answers in a group, or of tokens (one pass)."},
    )
    tau_min: float = field(default=0.1, metadata={"help": "Lower bound of a schedule."})
    tau_max: float = field(default=10.0, metadata={"help": "Upper bound of a schedule."})
    tau_entropy_weight: float = field(default=0.2, metadata={"help": "Hybrid schedule: weight of confidence."})
    tau_reward_weight: float = field(default=0.5, metadata={"help": "Hybrid schedule: weight of a low reward."})
    anchor: str = field(default="on_policy", metadata={"help": "on_policy, fixed, ema or refresh."})
    anchor_decay: float = field(default=0.99, metadata={"help": "EMA anchor: decay per optimizer step."})
    anchor_every: int = field(default=50, metadata={"help": "Refresh anchor: optimizer steps between refreshes."})
    logp_reduction: str = field(
        default="sum", metadata={"help": "Log-probability of a completion: sum of its tokens', or their mean."}
    )
    truncated: str = field(
        default="zero",
        metadata={"help": "A completion cut at the length limit: reward zero, masked out of its group, or kept."},
    )
    nll_weight: float = field(
        default=0.0,
        metadata={
            "help": "Weight of the negative log-likelihood of each group's best members: the loss of a group "
            "leaves their common mass free, this holds it."
        },
    )
    kl_budget: float | None = field(
        default=None,
        metadata={"help": "Stop when KL(policy || policy at the start), in nats a completion, exceeds this."},
    )
    max_refused_steps: int = field(
        default=5,
        metadata={"help": "Steps with a gradient that is not finite, or failures of a reward function, in a row."},
    )
    vllm_importance_sampling_correction: bool = field(
        default=False,
        metadata={
            "help": "Not used: log-probabilities are the trained model's, no ratio to the sampler's is taken."
        },
    )
    disable_dropout: bool = field(
        default=True, metadata={"help": "Dropout would move u away from zero where policy and anchor are equal."}
    )

    def __post_init__(self) -> None:
        self._refuse_what_means_nothing()
        super().__post_init__()
        if str(self.tau) == "auto":
            self.tau, self.tau_schedule = 1.0, "auto"
        for name, allowed in {
            "target": get_args(TargetName),
            "anchor": get_args(AnchorName),
            "tau_schedule": get_args(Schedule),
            "tau_confidence": get_args(Confidence),
            "logp_reduction": get_args(Reduction),
            "truncated": get_args(Truncated),
            "ties": ("efron", "breslow"),
        }.items():
            _choose(name, getattr(self, name), allowed)
        if self.label_smoothing and self.target in ("boltzmann", "kde"):
            raise ValueError(
                f"label_smoothing = {self.label_smoothing} means nothing to the {self.target} target; "
                "leave it at 0, or raise reward_beta for a flatter target"
            )
        if self.prior_in_target and self.target != "boltzmann":
            raise ValueError(f"prior_in_target means nothing to the {self.target} target; leave it out")
        if self.tau_schedule == "auto" and self.anchor != "on_policy":
            raise ValueError(
                f"tau_schedule auto needs the on_policy anchor (u is zero at its first step); got {self.anchor}"
            )
        for name, wrong in {
            "nll_weight": self.nll_weight < 0,
            "max_refused_steps": self.max_refused_steps < 1,
            "kl_budget": self.kl_budget is not None and self.kl_budget <= 0,
        }.items():
            if wrong:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        self._check_layout()
        self.objective()
        self.temperature_schedule()

    def _refuse_what_means_nothing(self) -> None:
        if self.beta != 0:
            raise ValueError(
                f"beta = {self.beta}: the anchor takes the place of a KL penalty; leave beta at 0 and choose tau"
            )
        defaults = {field.name: field.default for field in fields(ADPOConfig)}
        for name in MEANINGLESS:
            if getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r} shapes a loss that ADPO does not use: leave it out"
                )

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

    def objective(self) -> Objective:
        """The objective these arguments describe."""
        targets: dict[str, Target] = {
            "boltzmann": adpo.boltzmann(self.reward_beta, self.standardize, self.prior_in_target),
            "kde": adpo.kde(self.reward_beta),
            "plackett_luce": adpo.plackett_luce(
                ties="breslow" if self.ties == "breslow" else "efron", label_smoothing=self.label_smoothing
            ),
            "top1": adpo.top1(label_smoothing=self.label_smoothing),
        }
        return Objective(targets[self.target], parse_divergence(self.divergence), self.tau)

    def temperature_schedule(self) -> Temperature:
        """How tau moves."""
        if self.tau_schedule == "auto":
            return AutoTau(self.tau)
        if self.tau_schedule == "guarded":
            return GuardedTau(self.tau_min, self.tau_max)
        if self.tau_schedule == "hybrid":
            return HybridTau(
                self.tau,
                entropy_weight=self.tau_entropy_weight,
                reward_weight=self.tau_reward_weight,
                tau_min=self.tau_min,
                tau_max=self.tau_max,
            )
        return ConstantTau(self.tau)


def parse_divergence(text: str) -> Divergence:
    """``alpha:0.5`` and the like.

    >>> str(parse_divergence("alpha:0.5"))
    'alpha(0.5)'
    """
    name, _, number = text.partition(":")
    _choose("divergence", name, DIVERGENCES)
    if name in ("alpha", "wasserstein"):
        try:
            value = float(number)
        except ValueError:
            raise ValueError(f"divergence {text!r} lacks its number: write {name}:0.5 or the like") from None
        return adpo.alpha(value) if name == "alpha" else adpo.wasserstein(value)
    if number:
        raise ValueError(f"divergence {name} takes no number; got {text!r}")
    found: Divergence = {
        "cross_entropy": adpo.cross_entropy,
        "forward_kl": adpo.forward_kl,
        "reverse_kl": adpo.reverse_kl,
    }[name]
    return found


def _choose(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        close = get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}{hint}")
