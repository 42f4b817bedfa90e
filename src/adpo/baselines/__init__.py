"""Textbook losses of other methods, one file each, torch only: baselines to compare with and oracles to test
against. None of them uses ``adpo.core``.

``logp`` is a log-probability of a whole candidate (or the policy's over all actions, where a docstring says so),
``token_logp`` one per token with a mask of the same shape. All losses are to be minimised and are means.
"""

from adpo.baselines.awr import awr_loss, mpo_loss
from adpo.baselines.cpo import cpo_loss
from adpo.baselines.dpo import dpo_loss, soft_dpo_loss
from adpo.baselines.grpo import dr_grpo_loss, group_advantages, grpo_loss
from adpo.baselines.gspo import gspo_loss, gspo_token_loss
from adpo.baselines.ipo import ipo_loss
from adpo.baselines.kd import kd_loss
from adpo.baselines.kl_penalty import kl_penalty_loss, kl_regularized_loss
from adpo.baselines.kto import kto_loss
from adpo.baselines.ppo import ppo_clip_loss
from adpo.baselines.raft import raft_loss
from adpo.baselines.sft import sft_loss
from adpo.baselines.simpo import simpo_loss
from adpo.baselines.slic import slic_loss
from adpo.baselines.trpo import trpo_step

__all__ = [
    "awr_loss",
    "cpo_loss",
    "dpo_loss",
    "dr_grpo_loss",
    "group_advantages",
    "grpo_loss",
    "gspo_loss",
    "gspo_token_loss",
    "ipo_loss",
    "kd_loss",
    "kl_penalty_loss",
    "kl_regularized_loss",
    "kto_loss",
    "mpo_loss",
    "ppo_clip_loss",
    "raft_loss",
    "sft_loss",
    "simpo_loss",
    "slic_loss",
    "soft_dpo_loss",
    "trpo_step",
]
