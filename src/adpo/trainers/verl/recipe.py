"""The paper's run as a command of verl's; this module needs no verl."""

from __future__ import annotations

POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
PAPER = {
    "algorithm.adv_estimator": "adpo",
    "trainer.v1.trainer_mode": "adpo_sync",
    f"{POLICY_LOSS}._target_": "adpo.trainers.verl.settings.ADPOPolicyLoss",
    f"{POLICY_LOSS}.loss_mode": "adpo",
    f"+{POLICY_LOSS}.target": "plackett_luce",
    f"+{POLICY_LOSS}.anchor": "on_policy",
    f"+{POLICY_LOSS}.tau": "0.8",
    f"+{POLICY_LOSS}.tau_schedule": "hybrid",
    f"+{POLICY_LOSS}.tau_entropy_weight": "0.2",
    f"+{POLICY_LOSS}.tau_reward_weight": "0.5",
    "data.max_prompt_length": "1024",
    "data.max_response_length": "1024",
    "data.train_batch_size": "64",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "16",
    "actor_rollout_ref.actor.use_dynamic_bsz": "true",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": "true",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "32768",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": "32768",
    "actor_rollout_ref.actor.optim.lr": "1.5e-5",
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.n": "8",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "1",
    "trainer.total_epochs": "2",
}
"""Four mini-batches a rollout: with one the policy would never leave its anchor."""


def overrides(model: str, train: str, validation: str, nodes: int = 1, gpus: int = 8) -> dict[str, str]:
    """By key, for ``verl.trainer.main_ppo``."""
    return {
        "data.train_files": train,
        "data.val_files": validation,
        "actor_rollout_ref.model.path": model,
        **PAPER,
        "trainer.nnodes": str(nodes),
        "trainer.n_gpus_per_node": str(gpus),
    }


def command(given: dict[str, str]) -> str:
    """To be pasted into a shell."""
    lines = [f"  {key}={value}" for key, value in given.items()]
    return " \\\n".join(["python3 -m verl.trainer.main_ppo", *lines])
