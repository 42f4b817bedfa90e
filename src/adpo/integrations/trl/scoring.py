"""Log-probabilities of whole completions under a model: packed, or through TRL's own kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adpo.integrations.forms import NARROW, scorer_of
from adpo.integrations.sharding import SHARDED, then_sharded
from adpo.integrations.trl.rows import Rows, split
from adpo.integrations.trl.sampling import Sampling
from adpo.lm.dropout import without_dropout
from adpo.lm.padding import counts_padding, moved_right, off_by_padding
from adpo.lm.passes import Sizes
from adpo.lm.scoring import Sequences

Scored = tuple[Tensor, Tensor | None, Tensor | None]
"""Log-probabilities, entropies and the router's loss, as TRL returns them."""


class Scoring(Sampling):
    """A `GRPOTrainer` that scores rows, in the form its arguments ask for."""

    _sampling = False  # TRL is at work on a rollout, and what it would score for its own loss is not needed

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.args.disable_dropout:
            without_dropout(self.model)  # TRL knows modules of dropout, not the rates of attention
        self.scorer = scorer_of(self, getattr(self.args, "logp_reduction", "sum"), self.temperature)
        if self.ref_model is not None:
            self.scorer.accept(self.accelerator.unwrap_model(self.ref_model))
        self._moves_right = not self.scorer.packs and self._sees_padding()

    def _sees_padding(self) -> bool:
        """Whether TRL's padding on the left would change log-probabilities."""
        policy = self.accelerator.unwrap_model(self.model)
        if self.accelerator.distributed_type in SHARDED:  # no trial on a part of the weights
            return counts_padding(policy)
        return off_by_padding(policy, NARROW.get(self.accelerator.mixed_precision)) > 0

    @torch.no_grad()
    def _scored(self, model: nn.Module, rows: Rows) -> Tensor:
        """In passes of the size that training uses."""
        if not len(rows["completion_ids"]):
            return torch.zeros(0, dtype=torch.float64, device=self.accelerator.device)
        if not self.scorer.packs:
            size = self.args.per_device_train_batch_size
            with then_sharded(model):
                return torch.cat([self._logp(model, part) for part in split(rows, size)])
        count = len(rows["completion_ids"])
        found = torch.empty(count, dtype=torch.float64, device=rows["completion_ids"].device)
        for part in self._passes(rows):
            found[part] = self._logp(model, {name: values[part] for name, values in rows.items()})
        return found

    def _sizes(self, rows: Rows) -> Sizes:
        groups = rows.get("groups")
        if groups is None:
            groups = torch.unique(rows["prompt_ids"], dim=0, return_inverse=True)[1]
        return self.scorer.sizes(_sequences(rows), groups)

    def _passes(self, rows: Rows) -> list[Tensor]:
        """Row indices, as many tokens at a time as fit."""
        return self._sizes(rows).passes(self.scorer.budget.tokens, rows["completion_ids"].device)

    def _logp(self, model: nn.Module, rows: Rows) -> Tensor:
        """Log-probability of each completion, differentiable."""
        if self.scorer.packs:
            with self.accelerator.autocast():
                return self.scorer.logp(model, _sequences(rows), scored=_scored_tokens(rows))
        return self._summed(self._per_token(model, rows)[0], rows)

    def _weighted_logp(self, model: nn.Module, rows: Rows, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """``sum coefficients * logp`` to be differentiated, and the log-probabilities; of packed rows."""
        with self.accelerator.autocast():
            return self.scorer.weighted(model, _sequences(rows), coefficients, _scored_tokens(rows))

    def _per_token(self, model: nn.Module, rows: Rows, **options: Any) -> tuple[Tensor, Any]:
        ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
        mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1)
        found = self._get_per_token_logps_and_entropies(
            model, ids, mask, rows["completion_ids"].size(1), **options
        )
        return found[0], found[1]

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> Scored:
        """As TRL, which calls it wherever it needs log-probabilities; packed, where that is the form."""
        if self._sampling:
            return input_ids.new_zeros((len(input_ids), logits_to_keep), dtype=torch.float32), None, None
        if not self.scorer.packs or compute_aux_loss or any(value is not None for value in images.values()):
            options = {"compute_entropy": compute_entropy, "compute_aux_loss": compute_aux_loss, **images}
            scored = super()._get_per_token_logps_and_entropies
            if not self._moves_right:
                given = (model, input_ids, attention_mask, logits_to_keep)
                found: Scored = scored(*given, batch_size=batch_size, **options)
                return found
            moved = moved_right(input_ids, attention_mask)
            given = (model, moved.input_ids, moved.attention_mask, moved.input_ids.shape[1])
            logp, entropy, aux_loss = scored(*given, batch_size=batch_size, **options)
            logp = moved.back(logp)[:, -logits_to_keep:]
            entropy = None if entropy is None else moved.back(entropy)[:, -logits_to_keep:]
            return logp, entropy, aux_loss
        of_completion = attention_mask.clone()
        of_completion[:, :-logits_to_keep] = 0
        rows = Sequences(input_ids, attention_mask, of_completion)
        alone = torch.arange(len(input_ids), device=input_ids.device)
        parts = [alone]
        if not torch.is_grad_enabled():
            parts = self.scorer.passes(
                rows, torch.unique(input_ids[:, :-logits_to_keep], dim=0, return_inverse=True)[1]
            )
        logp = input_ids.new_zeros((len(input_ids), logits_to_keep), dtype=torch.float32)
        entropy = torch.zeros_like(logp) if compute_entropy else None
        for part in parts:
            with self.accelerator.autocast():
                scores = self.scorer.tokens(model, rows.take(part), entropy=compute_entropy)
            logp = logp.index_copy(0, part, scores.logp[:, -logits_to_keep:])
            if entropy is not None and scores.entropy is not None:
                entropy = entropy.index_copy(0, part, scores.entropy[:, -logits_to_keep:])
        return logp, entropy, None

    def _summed(self, per_token: Tensor, rows: Rows) -> Tensor:
        mask = rows["completion_mask"]
        if "tool_mask" in rows:
            mask = mask * rows["tool_mask"]
        total = torch.where(mask.bool(), per_token.to(torch.float64), 0.0).sum(1)
        return total / mask.sum(1).clamp(min=1) if self.args.logp_reduction == "mean" else total

    def _note(self, **values: float) -> None:
        for name, value in values.items():
            self._metrics["train"][f"adpo/{name}"].append(value)


def _sequences(rows: Rows) -> Sequences:
    prompt, completion = rows["prompt_mask"], rows["completion_mask"]
    return Sequences(
        torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1),
        torch.cat([prompt, completion], 1).long(),
        torch.cat([torch.zeros_like(prompt), completion], 1).long(),
    )


def _scored_tokens(rows: Rows) -> Tensor | None:
    """Tokens of completions that the model wrote, where tools wrote others."""
    if "tool_mask" not in rows:
        return None
    return torch.cat([torch.zeros_like(rows["prompt_mask"]), rows["tool_mask"].to(rows["prompt_mask"])], 1)
