"""The two functions that verl knows by name."""

from __future__ import annotations

from typing import Any

import numpy as np
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss
from verl.utils.metric import AggregationType, Metric

from adpo.trainers.verl import rows
from adpo.trainers.verl.settings import NAME

WEIGHT = "adpo_coefficient"
"""The field of a batch that holds ``dloss/dlogp`` of its rows."""


@register_adv_est(NAME)  # type: ignore[untyped-decorator]
def reward_of_each_row(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray[Any, Any] | None = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Advantages for verl's logs, and returns: the reward of a response on all its tokens, for the workers."""
    reward = token_level_rewards.sum(-1, keepdim=True).expand_as(token_level_rewards)
    centred = reward - _mean_of_groups(reward[:, 0], index).unsqueeze(-1)
    return centred * response_mask, reward.contiguous()


def _mean_of_groups(values: Tensor, index: np.ndarray[Any, Any] | None) -> Tensor:
    if index is None:
        raise ValueError("groups are told apart by their uid, and this batch has none")
    means = values.clone()
    for group in set(index.tolist()):
        members = [number for number, uid in enumerate(index.tolist()) if uid == group]
        means[members] = values[members].mean()
    return means


@register_policy_loss(NAME)  # type: ignore[untyped-decorator]
def needs_the_worker(*_: Any, **__: Any) -> tuple[Tensor, dict[str, Any]]:
    raise RuntimeError(
        "the actor's workers do not know ADPO: set VERL_USE_EXTERNAL_MODULES=adpo.trainers.verl.plugin, "
        "or install adpo where they run"
    )


def weighted_logp(model_output: Any, data: TensorDict, *, reduction: str, **_: Any) -> tuple[Tensor, Any]:
    """``sum c * logp`` of a micro-batch; gradients are averaged over the ranks, which is undone here."""
    logp = rows.scored(model_output, data, reduction)
    loss = (data[WEIGHT].to(logp) * logp).sum() * data["dp_size"]
    return loss, {"weighted_logp": Metric(value=loss.detach(), aggregation=AggregationType.SUM)}
