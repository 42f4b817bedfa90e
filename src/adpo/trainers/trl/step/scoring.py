"""Log-probabilities of completions under a model: packed, or padded as TRL has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from adpo.scoring.padding import counts_padding, moved_right, off_by_padding
from adpo.scoring.passes import Sizes
from adpo.scoring.sequences import Reduction, Sequences
from adpo.trainers.forms import NARROW, scorer_of
from adpo.trainers.sharding import SHARDED, then_sharded
from adpo.trainers.trl.step.rows import Rows, split

Scored = tuple[Tensor, Tensor | None, Tensor | None]
"""Log-probabilities, entropies and the router's loss, as TRL returns them."""


class RowScorer:
    """The log-probabilities of a batch's rows, in the form that a trainer's arguments ask for.

    ``of_trl`` is TRL's own method for padded rows.
    """

    def __init__(self, trainer: Any, of_trl: Callable[..., Scored]) -> None:
        self.accelerator, self.args, self._of_trl = trainer.accelerator, trainer.args, of_trl
        self._per_token = trainer._get_per_token_logps_and_entropies  # `as_trl`, or what a subclass makes of it
        self.reduction: Reduction = getattr(trainer.args, "logp_reduction", "sum")
        self.scorer = scorer_of(trainer, self.reduction, trainer.temperature)
        self.skip = False  # TRL is at work on a rollout, and what it would score for its own loss is not needed
        policy = self.accelerator.unwrap_model(trainer.model)
        self._moves_right = not self.scorer.packs and self._sees_padding(policy)

    def _sees_padding(self, policy: nn.Module) -> bool:
        """Whether TRL's padding on the left would change log-probabilities."""
        if self.accelerator.distributed_type in SHARDED:  # no trial on a part of the weights
            return counts_padding(policy)
        return off_by_padding(policy, NARROW.get(self.accelerator.mixed_precision)) > 0

    def logp(self, model: nn.Module, rows: Rows) -> Tensor:
        """Log-probability of each completion, ``[rows]``, differentiable."""
        if self.scorer.packs:
            with self.accelerator.autocast():
                return self.scorer.logp(model, _sequences(rows), scored=_scored_tokens(rows))
        return self._reduced(self.per_token(model, rows)[0], rows)

    def weighted(self, model: nn.Module, rows: Rows, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """``sum coefficients * logp`` to be differentiated, and the log-probabilities; of packed rows."""
        with self.accelerator.autocast():
            return self.scorer.weighted(model, _sequences(rows), coefficients, _scored_tokens(rows))

    @torch.no_grad()
    def detached(self, model: nn.Module, rows: Rows) -> Tensor:
        """`logp` without gradient, in passes of the size that training uses."""
        count = len(rows["completion_ids"])
        if not count:
            return torch.zeros(0, dtype=torch.float64, device=self.accelerator.device)
        if not self.scorer.packs:
            size = self.args.per_device_train_batch_size
            with then_sharded(model):
                return torch.cat([self.logp(model, part) for part in split(rows, size)])
        logp = torch.empty(count, dtype=torch.float64, device=rows["completion_ids"].device)
        for part in self.sizes(rows).passes(self.scorer.budget.tokens, logp.device):
            logp[part] = self.logp(model, {name: values[part] for name, values in rows.items()})
        return logp

    def sizes(self, rows: Rows) -> Sizes:
        """How many tokens rows take when packed."""
        groups = rows.get("groups")
        if groups is None:
            groups = torch.unique(rows["prompt_ids"], dim=0, return_inverse=True)[1]
        return self.scorer.sizes(_sequences(rows), groups)

    def per_token(self, model: nn.Module, rows: Rows, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of the tokens of completions, ``[rows, length]``, and their entropies if asked for."""
        ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
        mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1)
        length = rows["completion_ids"].size(1)
        logp, entropies, *_ = self._per_token(model, ids, mask, length, compute_entropy=entropy)
        return logp, entropies

    def as_trl(
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
        """What TRL's `_get_per_token_logps_and_entropies` returns; packed, where that is the form."""
        if self.skip:
            return input_ids.new_zeros((len(input_ids), logits_to_keep), dtype=torch.float32), None, None
        if not self.scorer.packs or compute_aux_loss or any(value is not None for value in images.values()):
            options = {"compute_entropy": compute_entropy, "compute_aux_loss": compute_aux_loss, **images}
            return self._padded(model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **options)
        of_completion = attention_mask.clone()
        of_completion[:, :-logits_to_keep] = 0
        rows = Sequences(input_ids, attention_mask, of_completion)
        parts = [torch.arange(len(input_ids), device=input_ids.device)]
        if not torch.is_grad_enabled():
            prompts = torch.unique(input_ids[:, :-logits_to_keep], dim=0, return_inverse=True)[1]
            parts = self.scorer.passes(rows, prompts)
        logp = input_ids.new_zeros((len(input_ids), logits_to_keep), dtype=torch.float32)
        entropy = torch.zeros_like(logp) if compute_entropy else None
        for part in parts:
            with self.accelerator.autocast():
                scores = self.scorer.tokens(model, rows.take(part), entropy=compute_entropy)
            logp = logp.index_copy(0, part, scores.logp[:, -logits_to_keep:])
            if entropy is not None and scores.entropy is not None:
                entropy = entropy.index_copy(0, part, scores.entropy[:, -logits_to_keep:])
        return logp, entropy, None

    def _padded(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **options: Any
    ) -> Scored:
        """By TRL; padding goes to the right where the model would see it on the left."""
        if not self._moves_right:
            return self._of_trl(model, input_ids, attention_mask, logits_to_keep, **options)
        moved = moved_right(input_ids, attention_mask)
        logp, entropy, aux_loss = self._of_trl(
            model, moved.input_ids, moved.attention_mask, moved.input_ids.shape[1], **options
        )
        logp = moved.back(logp)[:, -logits_to_keep:]
        entropy = None if entropy is None else moved.back(entropy)[:, -logits_to_keep:]
        return logp, entropy, aux_loss

    def _reduced(self, per_token: Tensor, rows: Rows) -> Tensor:
        mask = rows["completion_mask"]
        if "tool_mask" in rows:
            mask = mask * rows["tool_mask"]
        total = torch.where(mask.bool(), per_token.to(torch.float64), 0.0).sum(1)
        return total / mask.sum(1).clamp(min=1) if self.reduction == "mean" else total


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
