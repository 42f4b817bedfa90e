"""Log-probabilities of whole completions under a model, through TRL's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adpo.integrations.trl.resume import ExactResume
from adpo.integrations.trl.rows import Rows, split


class Scoring(ExactResume):
    """A `GRPOTrainer` that scores rows."""

    @torch.no_grad()
    def _scored(self, model: nn.Module, rows: Rows) -> Tensor:
        size = self.args.per_device_train_batch_size
        return torch.cat([self._logp(model, part) for part in split(rows, size)])

    def _logp(self, model: nn.Module, rows: Rows) -> Tensor:
        """Log-probability of each completion, differentiable."""
        return self._summed(self._per_token(model, rows)[0], rows)

    def _per_token(self, model: nn.Module, rows: Rows, **options: Any) -> tuple[Tensor, Tensor]:
        ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
        mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1)
        found = self._get_per_token_logps_and_entropies(
            model, ids, mask, rows["completion_ids"].size(1), **options
        )
        return found[0], found[1]

    def _summed(self, per_token: Tensor, rows: Rows) -> Tensor:
        mask = rows["completion_mask"]
        if "tool_mask" in rows:
            mask = mask * rows["tool_mask"]
        total = torch.where(mask.bool(), per_token.to(torch.float64), 0.0).sum(1)
        return total / mask.sum(1).clamp(min=1) if self.args.logp_reduction == "mean" else total

    def _note(self, **values: float) -> None:
        for name, value in values.items():
            self._metrics["train"][f"adpo/{name}"].append(value)
