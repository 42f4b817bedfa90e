"""What the log says of optimizer steps: figures, and some groups as people read them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from adpo.exact import GroupGradient
from adpo.trainers.trl.step.rows import Rows


class StepLog:
    """Figures of optimizer steps; keeps the rows of the latest for `StepSamples`."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self.samples: StepSamples | None = None
        self._extremes: dict[str, Tensor] = {}  # summed logp of the best and the worst members, and their number

    def step(self, rows: Rows, places: Tensor, gradient: GroupGradient) -> dict[str, float]:
        """After the passes of some rows; members are at ``places``."""
        self.samples = StepSamples(rows, places, gradient.coefficients)
        everyone = len(rows["member"])
        shares = torch.tensor([1 - gradient.rows_trained / everyone, gradient.rows_scored / everyone])
        left_out, scored = self.accelerator.reduce(shares.to(places.device), reduction="mean").tolist()
        for name in ("best", "worst"):
            weight = rows[name][places] * ~gradient.logp.isnan()
            total = torch.stack([(weight * gradient.logp.nan_to_num(0.0)).sum(), weight.sum()])
            self._extremes[name] = self._extremes.get(name, 0) + total.to(self.accelerator.device)
        diagnostics = {name: float(value) for name, value in gradient.diagnostics._asdict().items()}
        return {
            "rows_left_out": left_out,
            "rows_scored": scored,
            "loss_of_groups": float(gradient.loss),
            **diagnostics,
        }

    def after_step(self) -> dict[str, float]:
        """Mean log-probabilities of the best and the worst members of the step's groups."""
        nothing = torch.zeros(2, dtype=torch.float64, device=self.accelerator.device)
        sums = torch.stack([self._extremes.get(name, nothing) for name in ("best", "worst")])
        (best, best_count), (worst, worst_count) = self.accelerator.reduce(sums, reduction="sum").tolist()
        self._extremes = {}
        if not (best_count and worst_count):
            return {}
        best, worst = best / best_count, worst / worst_count
        return {"best_logp": best, "worst_logp": worst, "logp_margin": best - worst}


class StepSamples(NamedTuple):
    """The rows of a step on this process, and ``c = dloss/dlogp`` of its members."""

    rows: Rows
    members: Tensor  # numbers of rows
    coefficients: Tensor

    def groups(self, tokenizer: Any, most: int) -> list[dict[str, Any]]:
        """Some of them, those with a gradient first; every member is ``text``, ``reward`` and ``c``."""
        of_members = self.rows["groups"][self.members].to(self.coefficients.device)
        numbers, place = torch.unique(of_members, return_inverse=True)
        force = torch.zeros(len(numbers), dtype=torch.float64, device=place.device)
        force.index_add_(0, place, self.coefficients.abs().double())
        first = torch.sort(force == 0, stable=True).indices[:most]
        return [self._group(tokenizer, (place == number).nonzero().squeeze(1)) for number in first.tolist()]

    def _group(self, tokenizer: Any, chosen: Tensor) -> dict[str, Any]:
        where = self.members[chosen.to(self.members.device)]
        rows = {name: values[where] for name, values in self.rows.items()}
        pairs = zip(rows["completion_ids"], rows["completion_mask"], strict=True)
        asked = rows["prompt_ids"][0][rows["prompt_mask"][0].bool()]
        texts = [tokenizer.decode(ids[mask.bool()], skip_special_tokens=True) for ids, mask in pairs]
        rewards, coefficients = rows["rewards"].tolist(), self.coefficients[chosen].tolist()
        return {
            "prompt": tokenizer.decode(asked, skip_special_tokens=True),
            "members": [
                {"text": text, "reward": reward, "c": c}
                for text, reward, c in zip(texts, rewards, coefficients, strict=True)
            ],
        }
