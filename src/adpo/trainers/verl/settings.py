"""What a user says in verl's config: ``actor_rollout_ref.actor.policy_loss``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from verl.workers.config.actor import PolicyLossConfig

from adpo.trainers.coordinates import Coordinates

NAME = "adpo"
"""Of the policy loss and of the advantage estimator."""
TRAINER = "adpo_sync"
CURRENT = "adpo_current"
"""A batch's word that its ``old_log_probs`` are of the weights as they are."""
UNUSED = ("anchor_decay", "anchor_every", "disable_dropout", "max_refused_steps", "nll_weight")
"""Coordinates that mean nothing here."""
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
        if "auto" in (self.tau_schedule, str(self.tau)):
            raise ValueError("on verl tau_schedule is constant, guarded or hybrid; got 'auto'")
        self.check_coordinates()
        for one in fields(self):
            if one.name in UNUSED and getattr(self, one.name) != one.default:
                raise ValueError(f"{one.name} means nothing on verl: leave it out")


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
    correction = config.algorithm.get("rollout_correction", None) or {}
    parallel = _sequence_parallel(actor)
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node // parallel
    rows = actor.ppo_mini_batch_size * rollout.n
    micro = 1 if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu or 1
    wrong = {
        f"algorithm.adv_estimator must be {NAME}": config.algorithm.adv_estimator != NAME,
        f"actor.strategy must be fsdp or fsdp2; got {actor.strategy}": actor.strategy not in ("fsdp", "fsdp2"),
        "rollout.n must be at least 2: a group of one has nothing to compare": rollout.n < 2,
        f"a mini-batch of {rows} rows cannot be divided by {ranks} ranks with micro-batches of {micro}": rows
        % (ranks * micro)
        != 0,
        "actor.shuffle must be false: it would cut groups": actor.shuffle,
        "actor.entropy_coeff must be 0": actor.entropy_coeff != 0,
        "algorithm.use_kl_in_reward must be false: the anchor takes its place": config.algorithm.use_kl_in_reward,
        "anchor fixed needs actor.use_kl_loss=true (verl then keeps a reference) and kl_loss_coef=0": fixed
        and not (actor.use_kl_loss and actor.kl_loss_coef == 0),
        "actor.use_kl_loss must be false with the on_policy anchor": not fixed and actor.use_kl_loss,
        "algorithm.rollout_correction must be off: the trained model scores its anchor": bool(
            correction.get("bypass_mode") or correction.get("rollout_is") or correction.get("rollout_rs")
        ),
        "critic.enable must not be true: there is no critic": config.critic.get("enable") is True,
        "distillation.enabled must be false": bool((config.get("distillation") or {}).get("enabled")),
    }
    for what, is_so in (wrong | _refused(config, fixed)).items():
        if is_so:
            raise ValueError(what)


def _sequence_parallel(actor: Any) -> int:
    """verl reads it in two places."""
    engine = actor.get("fsdp_config", {}).get("ulysses_sequence_parallel_size", 1)
    return max(actor.get("ulysses_sequence_parallel_size", 1) or 1, engine or 1)


def _refused(config: Any, fixed: bool) -> dict[str, bool]:
    """What verl has, and would leave out of an ADPO step without a word, or nobody has tried with one."""
    actor, rollout, model = (config.actor_rollout_ref[part] for part in ("actor", "rollout", "model"))
    engine, lora = actor.get("fsdp_config") or {}, model.get("lora") or {}
    fused = (model.get("fused_kernel_options") or {}).get("impl_backend")
    attention = (model.get("override_config") or {}).get("attn_implementation", "flash_attention_2")
    flash = model.get("use_remove_padding") and str(attention).startswith("flash_attention")
    replay = {(place.get("router_replay") or {}).get("mode", "disabled") for place in (actor, engine)}
    replayed = bool(rollout.get("enable_rollout_routing_replay")) or replay != {"disabled"}
    penalty = rollout.get("repetition_penalty", 1.0)
    quantised = any((place.get("qat") or {}).get("enable", False) for place in (actor, engine))
    whole = engine.get("fsdp_size", -1) == 1 and config.trainer.nnodes * config.trainer.n_gpus_per_node > 1
    return {
        "model.lora is read by Megatron alone, FSDP would train all weights: set model.lora_rank and "
        "model.lora_alpha (DoRA is not to be had)": lora.get("rank", 0) > 0 or lora.get("type", "lora") != "lora",
        "anchor fixed with model.lora_adapter_path would anchor to the model without that adapter: merge it into "
        "the model first": fixed and model.get("lora_adapter_path") is not None,
        "model.use_liger must be false: no test holds verl's Liger layers with ADPO": bool(model.get("use_liger")),
        "model.enable_activation_offload must be false: no test holds it with ADPO": bool(
            model.get("enable_activation_offload")
        ),
        "algorithm.filter_groups.enable must be false: no test holds it with ADPO, which leaves groups without a "
        "gradient out of an update by itself": bool((config.algorithm.get("filter_groups") or {}).get("enable")),
        f"model.fused_kernel_options.impl_backend must be torch; got {fused}": fused != "torch"
        and bool(model.get("use_fused_kernels")),
        f"rollout.repetition_penalty must be 1; got {penalty}: verl's agent loops sample without one": penalty
        != 1,
        "routing replay is not possible: verl's FSDP workers route anew whatever router_replay.mode and "
        "rollout.enable_rollout_routing_replay say; leave them out": replayed,
        "fsdp_config.fsdp_size=1 needs actor.strategy=fsdp2: replicas of FSDP1 would not average gradients": whole
        and actor.strategy == "fsdp",
        "actor.qat.enable must be false: ADPO trains weights as they are": quantised,
        "model.mtp.enable must be false: ADPO has no loss for tokens further ahead": bool(
            (model.get("mtp") or {}).get("enable")
        ),
        "ulysses_sequence_parallel_size > 1 needs model.use_remove_padding and flash attention; got "
        f"attn_implementation={attention}, which would attend within each rank's part": not flash
        and _sequence_parallel(actor) > 1,
    }
