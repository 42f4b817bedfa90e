"""What a user says in verl's config: ``actor_rollout_ref.actor.policy_loss``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from verl.workers.config.actor import PolicyLossConfig

from adpo.integrations.coordinates import Coordinates

NAME = "adpo"
"""Of the policy loss and of the advantage estimator."""
TRAINER = "adpo_sync"
OWN = ("_target_", "rollout_correction")  # of what stands beside the coordinates


@dataclass
class ADPOPolicyLoss(Coordinates, PolicyLossConfig):  # type: ignore[misc]
    """verl's policy loss with the coordinates of the equation."""

    ANCHORS: ClassVar[Sequence[str]] = ("on_policy", "fixed")

    loss_mode: str = NAME
    anchor: str = "on_policy"

    def __post_init__(self) -> None:
        if self.loss_mode != NAME:
            raise ValueError(f"policy_loss.loss_mode must be {NAME}; got {self.loss_mode!r}")
        if self.anchor == "ema":
            raise ValueError(
                "anchor ema is not possible on verl: its workers keep no second copy of the weights; "
                "use on_policy or fixed"
            )
        self.check_coordinates()
        if self.tau_schedule == "auto":
            raise ValueError("on verl tau_schedule is constant, guarded or hybrid; got 'auto'")
        if self.nll_weight:
            raise ValueError(f"nll_weight is not possible on verl; got {self.nll_weight}")


def check(config: Any) -> None:
    """A whole config of verl, before anything is started."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    target = actor.policy_loss.get("_target_", "")
    given = {key: value for key, value in actor.policy_loss.items() if key not in OWN}
    if not str(target).endswith("." + ADPOPolicyLoss.__name__):
        raise ValueError(
            f"actor_rollout_ref.actor.policy_loss._target_ must be {ADPOPolicyLoss.__module__}."
            f"{ADPOPolicyLoss.__name__}; got {target or 'nothing'}"
        )
    policy_loss = ADPOPolicyLoss(**given)
    fixed = policy_loss.anchor == "fixed"
    correction = config.algorithm.get("rollout_correction", None)
    wrong = {
        f"algorithm.adv_estimator must be {NAME}": config.algorithm.adv_estimator != NAME,
        "rollout.n must be at least 2: a group of one has nothing to compare": rollout.n < 2,
        "actor.shuffle must be false: it would cut groups": actor.shuffle,
        "actor.entropy_coeff must be 0": actor.entropy_coeff != 0,
        "algorithm.use_kl_in_reward must be false: the anchor takes its place": config.algorithm.use_kl_in_reward,
        "anchor fixed needs actor.use_kl_loss=true (verl then keeps a reference) and kl_loss_coef=0": fixed
        and not (actor.use_kl_loss and actor.kl_loss_coef == 0),
        "actor.use_kl_loss must be false with the on_policy anchor": not fixed and actor.use_kl_loss,
        "algorithm.rollout_correction.bypass_mode must be false: the trained model scores its anchor": bool(
            correction and correction.get("bypass_mode", False)
        ),
    }
    for what, is_so in wrong.items():
        if is_so:
            raise ValueError(what)
