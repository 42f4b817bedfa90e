"""verl's synchronous trainer with mini-batches that hold their groups whole."""

from __future__ import annotations

from typing import Any

import torch
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, log_seqlen_unbalance

from adpo.integrations.verl.settings import TRAINER, check


@register_trainer(TRAINER)
class ADPOTrainerSync(PPOTrainerSync):  # type: ignore[misc]
    """A config that cannot work is refused before anything is started."""

    def __init__(self, config: Any) -> None:
        check(config)
        super().__init__(config)

    def _build_replay_buffer(self) -> Any:
        self.trainer_mode = "sync"  # of which this is one
        return super()._build_replay_buffer()

    def _balance_batch(
        self, batch: Any, metrics: dict[str, Any], logging_prefix: str = "global_seqlen", **_: Any
    ) -> Any:
        """As verl: equal work for every rank, but within each mini-batch, which is made of whole groups."""
        workers = self.actor_rollout_wg
        if "actor" not in workers._dispatch_info:
            workers._dispatch_info["actor"] = workers._query_dispatch_info("actor")
        ranks = max(workers._dispatch_info["actor"]) + 1
        batch = upsample_batch_to_divisible_size(
            batch, self._get_required_batch_multiple(ranks), self.tokenizer.eos_token_id
        )
        lengths = torch.tensor([tag["seq_len"] for tag in batch.tags], dtype=torch.int64)
        size = self.config.actor_rollout_ref.actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        shares = dealt([key.rsplit("_", 2)[0] for key in batch.keys], calculate_workload(lengths), size, ranks)
        batch.reorder([row for share in shares for row in share])
        metrics.update(
            log_seqlen_unbalance(seqlen_list=lengths.tolist(), partitions=shares, prefix=logging_prefix)
        )
        return batch


def dealt(groups: list[str], work: Any, size: int, ranks: int) -> list[list[int]]:
    """Rows of each rank: mini-batch after mini-batch of ``size`` rows, each of whole groups, divided evenly."""
    members: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    order = [row for rows in members.values() for row in rows]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for start in range(0, len(order), size):
        part = order[start : start + size]
        weights = [int(work[row]) for row in part]
        parts = get_seqlen_balanced_partitions(weights, k_partitions=ranks, equal_size=True)
        for share, places in zip(shares, parts, strict=True):
            share += [part[place] for place in places]
    return shares
