"""verl's synchronous trainer with mini-batches that hold their groups whole."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, log_seqlen_unbalance

from adpo.trainers.verl.models import check_model
from adpo.trainers.verl.resume import check_processes
from adpo.trainers.verl.settings import CURRENT, TRAINER, check


@register_trainer(TRAINER)
class ADPOTrainerSync(PPOTrainerSync):  # type: ignore[misc]
    """A config that cannot work is refused before anything is started."""

    def __init__(self, config: Any) -> None:
        check(config)
        check_processes(config)
        super().__init__(config)

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        rollout, model = (self.config.actor_rollout_ref[part] for part in ("rollout", "model"))
        check_model(omega_conf_to_dataclass(model), rollout.prompt_length + rollout.response_length)

    def _build_replay_buffer(self) -> Any:
        self.trainer_mode = "sync"  # of which this is one
        return super()._build_replay_buffer()

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch.extra_info[CURRENT] = True  # verl has just scored it, with these weights
        return super()._update_actor(batch, metrics)

    def _balance_batch(
        self, batch: Any, metrics: dict[str, Any], logging_prefix: str = "global_seqlen", **_: Any
    ) -> Any:
        """As verl: equal work for every rank, but within each mini-batch, which is made of whole groups."""
        workers = self.actor_rollout_wg
        if "actor" not in workers._dispatch_info:
            workers._dispatch_info["actor"] = workers._query_dispatch_info("actor")
        ranks = max(workers._dispatch_info["actor"]) + 1
        size = self.config.actor_rollout_ref.actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        names = [key.rsplit("_", 2) for key in batch.keys]
        if len({(name[0], name[1]) for name in names}) < len(names):
            raise ValueError(
                "a completion in several parts (an agent's turns) is not a member of a group: give one each"
            )
        bins = filled([name[0] for name in names], size)
        batch = upsample_batch_to_divisible_size(batch, len(bins) * size, self.tokenizer.eos_token_id)
        spare = iter(range(len(names), len(batch)))  # verl appends rows that say nothing
        bins = [[*rows, *itertools.islice(spare, size - len(rows))] for rows in bins]
        lengths = torch.tensor([tag["seq_len"] for tag in batch.tags], dtype=torch.int64)
        shares = dealt(bins, calculate_workload(lengths), ranks)
        batch.reorder([row for share in shares for row in share])
        metrics.update(
            log_seqlen_unbalance(seqlen_list=lengths.tolist(), partitions=shares, prefix=logging_prefix)
        )
        return batch


def filled(groups: list[str], size: int) -> list[list[int]]:
    """Mini-batches of at most ``size`` rows, each of whole groups, which need not be of one size."""
    members: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    bins: list[list[int]] = [[]]
    for rows in members.values():
        if len(rows) > size:
            raise ValueError(f"a group of {len(rows)} completions does not fit into a mini-batch of {size}")
        if len(bins[-1]) + len(rows) > size:
            bins.append([])
        bins[-1] += rows
    return bins


def dealt(bins: list[list[int]], work: Any, ranks: int) -> list[list[int]]:
    """Rows of each rank, mini-batch after mini-batch: as many each, and as much work as can be."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for rows in bins:
        weights = [int(work[row]) for row in rows]
        parts = get_seqlen_balanced_partitions(weights, k_partitions=ranks, equal_size=True)
        for share, places in zip(shares, parts, strict=True):
            share += [rows[place] for place in places]
    return shares
