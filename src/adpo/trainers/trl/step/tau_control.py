"""The temperature of online training: moved rollout by rollout, or fitted to how far a step moves u."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from adpo.core.temperature import Temperature
from adpo.system.ranks import Ranks
from adpo.trainers.monitors.auto_tau import CALIBRATION_ROLLOUTS, NEAR_PEAK, AutoTau, rate_of
from adpo.trainers.trl.rollout import answers
from adpo.trainers.trl.step.rows import Rows, split
from adpo.trainers.trl.step.scoring import RowScorer


class TauControl:
    """Holds tau and its schedule; what it measures goes to the trainer's log.

    ``one_step`` says that a rollout is used for one optimizer step only: no later step scores its rows, so the
    automatic temperature measures the first few rollouts by passes of its own.
    """

    def __init__(self, schedule: Temperature, tau: float, *, one_step: bool) -> None:
        self.schedule, self.tau, self.one_step = schedule, tau, one_step
        # rows of a step, places of members, their logp before it, and its learning rate as a share of the highest
        self._before: tuple[Rows, Tensor, Tensor, float] | None = None

    def update(self, entropy: float, rewards: Tensor) -> None:
        """After a rollout: by the confidence of its answers, 0 to 1, and the mean of its rewards."""
        finite = rewards[torch.isfinite(rewards)]
        if len(finite):
            self.tau = float(self.schedule.update(entropy=entropy, reward=float(finite.mean())))

    # The automatic temperature.

    def measures_next_step(self, optimizer: Any) -> bool:
        """Whether a step from the anchor is to be measured by passes of its own."""
        schedule = self.schedule
        if not (isinstance(schedule, AutoTau) and self.one_step and schedule.measured < CALIBRATION_ROLLOUTS):
            return False
        return rate_of(optimizer) >= NEAR_PEAK

    def before_step(self, rows: Rows, places: Tensor, logp: Tensor, optimizer: Any) -> None:
        """``logp`` of the members at ``places`` before an optimizer step that is measured."""
        self._before = rows, places, logp, rate_of(optimizer)

    def after_step(self, logp_of: Any) -> dict[str, float]:
        """Measure the step, by ``logp_of(rows, places)`` after it."""
        if self._before is None:
            return {}
        rows, places, before, rate = self._before
        self._before = None
        return self.measure(logp_of(rows, places) - before, rows["groups"][places], before, rate)

    def measure(self, moved: Tensor, groups: Tensor, before: Tensor, rate: float = 1.0) -> dict[str, float]:
        """By ``moved``, how far a step has moved the log-probability of members; figures for the log.

        Processes may have different numbers of them.
        """
        if not isinstance(self.schedule, AutoTau):
            return {}
        moved, groups, before = (torch.cat(Ranks(None).gather(values)) for values in (moved, groups, before))
        if len(moved) and self.schedule.measure(moved, groups, before, rate):
            return {"u_spread": self.schedule.spread}
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"tau": self.tau, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tau = state["tau"]
        self.schedule.load_state_dict(state["schedule"])


def answer_metrics(texts: list[str], size: int) -> dict[str, float]:
    """How much the final answers in groups of ``size`` differ."""
    return {"answer_entropy": answers.entropy(texts, size), "distinct_answers": answers.distinct(texts, size)}


@torch.no_grad()
def token_entropy(scorer: RowScorer, model: Any, batch: Rows, rows_per_pass: int) -> float:
    """Mean entropy of the tokens sampled, over the logarithm of the vocabulary's size."""
    accelerator = scorer.accelerator
    total = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    columns = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    for part in split({name: batch[name] for name in columns}, rows_per_pass):
        entropies = scorer.per_token(model, part, entropy=True)[1]
        assert entropies is not None
        mask = part["completion_mask"].bool()
        total += torch.stack([entropies[mask].sum(), mask.sum()]).to(total)
    total = accelerator.reduce(total, reduction="sum")
    vocabulary = accelerator.unwrap_model(model).config.vocab_size
    return min(1.0, float(total[0] / total[1].clamp(min=1)) / math.log(vocabulary))
