"""What TRL samples and scores, with what the objective needs beside it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from adpo.anchors import Snapshot as Self
from adpo.core.temperature import Temperature
from adpo.core.ties import merge_ties
from adpo.integrations.guards import GuardedRewards
from adpo.integrations.trl import answers
from adpo.integrations.trl.observed import Observed
from adpo.integrations.trl.rows import Rows, kept, split
from adpo.lm.context import longest_row

log = logging.getLogger("adpo")


class Rollouts(Observed):
    """Rewards, members, temperature and the distance from the start, rollout by rollout."""

    answer_of: Callable[[Any], str]
    reward_guard: GuardedRewards
    schedule: Temperature
    tau: float
    start: Self | None  # the policy at the start of training, where a KL budget needs it

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._answers: list[str] = []
        self._empty = torch.zeros(0, dtype=torch.bool)
        self._sampled_at = -1  # the optimizer step before which the latest rollout was made
        self._over_budget = False

    def _generate_single_turn(self, *arguments: Any, **options: Any) -> Any:
        """A completion without a single token gets an end, which TRL needs, and is remembered as empty."""
        ids, *rest = super()._generate_single_turn(*arguments, **options)
        self._empty = torch.tensor([len(row) == 0 for row in ids])
        return [row or [self.eos_token_ids[0]] for row in ids], *rest

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        self.reward_guard.lost.clear()
        per_function = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        lost = torch.tensor([row in self.reward_guard.lost for row in range(len(completions))])
        lost = self.accelerator.gather(lost.to(self.accelerator.device)).to(self._rewards.device)
        self._rewards = torch.where(lost, torch.nan, self._rewards)
        if self.model.training:
            self._answers = gather_object([self.answer_of(completion) for completion in completions])
        return per_function

    def _generate_and_score_completions(self, inputs: Any) -> Rows:
        self._sampling = True  # the anchor's log-probabilities are the trainer's own
        try:
            batch: Rows = super()._generate_and_score_completions(inputs)
        finally:
            self._sampling = False
        if not self.model.training:
            return batch
        if "pixel_values" in batch:
            raise ValueError("ADPOTrainer trains on text; this data set has images")
        self._sampled_at = self.state.global_step
        rows = len(batch["completion_ids"])
        first = self.accelerator.process_index * rows
        rewards = self._rewards[first : first + rows].to(self.accelerator.device)
        member, cut = self._members(batch, rewards)
        if self.args.truncated == "zero":
            rewards = self._no_better_than_uncut(rewards, member, cut, first)
        elif self.args.truncated == "mask":
            member &= ~cut
        self._observe_rollout(rewards, member, cut & (self.args.truncated != "keep"))
        batch["rewards"], batch["member"] = rewards, member
        batch["groups"] = torch.arange(first, first + rows, device=rewards.device) // self.num_generations
        batch["best"], batch["worst"] = self._extremes(rewards, member, first)
        self._move_tau(batch)
        if self.start is not None:
            self._watch_budget(batch, self.start)
        return batch

    def _members(self, batch: Rows, rewards: Tensor) -> tuple[Tensor, Tensor]:
        """Which completions take part, and which of them the length limit cut."""
        prompts, lengths = batch["prompt_mask"].sum(1), batch["completion_mask"].sum(1)
        context = longest_row(self.accelerator.unwrap_model(self.model).config)
        out = {
            "no_reward": ~torch.isfinite(rewards),
            "empty": (lengths == 0) | self._without_tokens(len(rewards)),
            "too_long": prompts + lengths > (context or math.inf),
        }
        for name, which in out.items():
            share = float(self.accelerator.reduce(which.float().mean(), reduction="mean"))
            self._note(**{name: share})
            if share > 0:
                log.warning(
                    "step %d: %.1f %% of completions left out: %s", self.state.global_step, 100 * share, name
                )
        member = ~(out["no_reward"] | out["empty"] | out["too_long"])
        return member, self._cut.to(member.device)

    def _no_better_than_uncut(self, rewards: Tensor, member: Tensor, cut: Tensor, first: int) -> Tensor:
        """A cut completion gets the least of 0, its own reward and those of the uncut members of its group."""
        uncut = torch.where(member & ~cut, rewards, torch.inf)
        table = self.accelerator.gather(uncut).view(-1, self.num_generations)
        worst = table.amin(1, keepdim=True).expand_as(table).reshape(-1)[first : first + len(rewards)]
        return torch.where(cut, torch.minimum(rewards, worst).clamp(max=0.0), rewards)

    def _without_tokens(self, rows: int) -> Tensor:
        known = len(self._empty) == rows  # not so where a rollout function or tools write the completions
        return (self._empty if known else torch.zeros(rows, dtype=torch.bool)).to(self.accelerator.device)

    def _extremes(self, rewards: Tensor, member: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Weights, summing to one over a group, of its best and of its worst members; zero where all are tied."""
        table = self.accelerator.gather(torch.where(member, rewards, torch.nan)).view(-1, self.num_generations)
        table = merge_ties(table.double(), torch.isfinite(table))
        high, low = table.nan_to_num(-math.inf).amax(1, True), table.nan_to_num(math.inf).amin(1, True)
        found = []
        for extreme in (high, low):
            weight = ((table == extreme) & (high > low)).to(torch.float64)
            share = weight / weight.sum(1, keepdim=True).clamp(min=1)
            found.append(share.view(-1)[first : first + len(rewards)])
        return found[0], found[1]

    def _move_tau(self, batch: Rows) -> None:
        size = self.num_generations
        entropy = answers.entropy(self._answers, size)
        self._note(answer_entropy=entropy, distinct_answers=answers.distinct(self._answers, size))
        if self.args.tau_confidence == "tokens":
            entropy = self._token_entropy(batch)
            self._note(token_entropy=entropy)
        known = self._rewards[torch.isfinite(self._rewards)]
        if len(known):
            self.tau = float(self.schedule.update(entropy=entropy, reward=float(known.mean())))
        self._note(tau=self.tau)

    @torch.no_grad()
    def _token_entropy(self, batch: Rows) -> float:
        """Mean entropy of the tokens sampled, over the logarithm of the vocabulary's size."""
        total = torch.zeros(2, dtype=torch.float64, device=self.accelerator.device)
        columns = {
            name: batch[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        }
        for part in split(columns, self.args.per_device_train_batch_size):
            entropies = self._per_token(self.model, part, compute_entropy=True)[1]
            mask = part["completion_mask"].bool()
            total += torch.stack([entropies[mask].sum(), mask.sum()]).to(total)
        total = self.accelerator.reduce(total, reduction="sum")
        vocabulary = self.accelerator.unwrap_model(self.model).config.vocab_size
        return min(1.0, float(total[0] / total[1].clamp(min=1)) / math.log(vocabulary))

    def _watch_budget(self, batch: Rows, start: Self) -> None:
        if start.coincides:
            distance = 0.0
        else:
            rows = kept(batch)
            moved = self._scored(self.model, rows) - start.logp(lambda _: self._scored(self.model, rows))
            if self.args.logp_reduction == "mean":
                scored = rows["completion_mask"] * rows.get("tool_mask", 1)
                moved = moved * scored.sum(1)  # nats a completion, whatever the loss looks at
            member = batch["member"]
            sums = torch.stack([moved[member].sum(), member.sum().to(moved)])
            total, count = self.accelerator.reduce(sums, reduction="sum").tolist()
            distance = total / max(1.0, count)
        self._note(start_kl=distance)
        self._over_budget = distance > self.args.kl_budget
