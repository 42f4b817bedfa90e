"""verl's own command, unmodified, from end to end: Ray, two workers, rollouts, two steps."""

import re
import subprocess
import sys

import pytest
import tiny
from processes import environment

from adpo.integrations.verl.data import write
from adpo.integrations.verl.recipe import POLICY_LOSS
from adpo.lm.tasks import Problem

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(letter.isdigit() for letter in solution_str) / max(len(solution_str), 1)
"""
ARGUMENTS = """
algorithm.adv_estimator=adpo
trainer.v1.trainer_mode=adpo_sync
data.train_files={folder}/train.parquet data.val_files={folder}/train.parquet
data.train_batch_size=4 data.max_prompt_length=48 data.max_response_length=12 data.dataloader_num_workers=0
actor_rollout_ref.model.path={folder}/model actor_rollout_ref.model.use_remove_padding=False
actor_rollout_ref.model.enable_gradient_checkpointing=False
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.actor.ppo_epochs=2
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 actor_rollout_ref.actor.optim.lr=1e-3
actor_rollout_ref.actor.use_torch_compile=False actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.fsdp_config.model_dtype=fp32 actor_rollout_ref.actor.fsdp_config.dtype=float32
actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.load_format=auto
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.agent.num_workers=1
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
reward.custom_reward_function.path={folder}/reward.py reward.custom_reward_function.name=compute_score
reward.num_workers=1
trainer.device=cpu trainer.n_gpus_per_node=2 trainer.nnodes=1 trainer.logger=["console"]
trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1
trainer.total_training_steps=2 trainer.total_epochs=1 trainer.resume_mode=disable
ray_kwargs.ray_init.num_cpus=24 +ray_kwargs.ray_init.resources={{NPU:4}}
+ray_kwargs.ray_init.include_dashboard=False
transfer_queue.enable=True transfer_queue.backend.SimpleStorage.num_data_storage_units=1
"""


def verl(folder, *more):
    tiny.save(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    sums = [(f"{number}+{number + 1}=", str(2 * number + 1)) for number in range(8)]
    write([Problem("math", 1, asked, asked, answer) for asked, answer in sums], folder / "train.parquet", "")
    loss = [
        f"{POLICY_LOSS}._target_=adpo.integrations.verl.settings.ADPOPolicyLoss",
        f"{POLICY_LOSS}.loss_mode=adpo",
    ]
    return subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *ARGUMENTS.format(folder=folder).split(), *loss, *more],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env=environment(RAY_DEDUP_LOGS="0"),
    )


FORMS = {
    "ranks": [f"+{POLICY_LOSS}.target=plackett_luce", f"+{POLICY_LOSS}.tau_schedule=hybrid"],
    "fixed": [
        f"+{POLICY_LOSS}.anchor=fixed",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_two_steps_on_two_workers(tmp_path, form):
    done = verl(tmp_path, *FORMS[form])
    assert done.returncode == 0, done.stderr[-3000:]
    for step in (1, 2):
        line = next(line for line in done.stdout.splitlines() if f"step:{step} " in line)
        told = {key: float(value) for key, value in re.findall(r"actor/adpo/(\w+):([-\d.e]+)", line)}
        assert told["scored"] == 0.75  # of four optimizer steps the first is at the anchor
        assert told["anchor_kl"] > 0
        assert 0.1 <= told["tau"] <= 10


def test_a_mistake_ends_it_before_the_first_rollout(tmp_path):
    done = verl(tmp_path, f"+{POLICY_LOSS}.target=bolzmann")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "did you mean boltzmann?" in said
    assert "step:1 " not in said
