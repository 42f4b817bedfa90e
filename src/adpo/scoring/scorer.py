"""Log-probabilities of completions in the fastest form that model and device allow.

    scorer = Scorer(model)                          # looks at the model once, says what it chose
    logp = scorer.logp(model, rows)                 # [rows], differentiable
    total, logp = scorer.weighted(model, rows, c)   # sum c * logp, for coefficients known in advance
    passes = scorer.passes(rows, groups)            # row indices, as many tokens at a time as fit

The forms give the same numbers: padded rows with all their logits; or packed rows, without padding, with shared
prompts, with logits a chunk at a time, through compiled layers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from adpo.scoring.budget import TokenBudget
from adpo.scoring.compiled import CompiledLayers, why_not_compiled
from adpo.scoring.fused_head import TokenScores
from adpo.scoring.packed.attention_kernels import flash_package, kernel_for, prepared, takes_varlen, why_not
from adpo.scoring.packed.packed_scoring import (
    accept_scoring,
    dtype_of_layers,
    head_width,
    packed_seq_logp,
    packed_token_scores,
    packed_weighted_logp,
)
from adpo.scoring.packed.packing import Lengths, Packed, repacked
from adpo.scoring.packed.packing_checks import why_not_packed
from adpo.scoring.passes import Sizes
from adpo.scoring.sequences import Reduction, Sequences, seq_logp

log = logging.getLogger("adpo")
SAID = {
    "varlen": "variable-length attention",
    "flash": "FlashAttention",
    "flex": "FlexAttention",
    "stretches": "attention stretch by stretch",
}


@dataclass(frozen=True)
class Forms:
    """What is asked for; "auto" and None are by device and model."""

    scoring: str = "auto"  # padded, packed
    attention: str = "auto"  # of packed rows: varlen, flash, flex, stretches
    share_prompts: bool = True
    compile_layers: bool | None = None
    tokens_per_pass: int | Literal["auto"] = "auto"


class Scorer:
    """One for a model: which forms are used is settled when it is made."""

    def __init__(
        self,
        model: Any,
        forms: Forms | None = None,
        reduction: Reduction = "sum",
        temperature: float = 1.0,
        precision: torch.dtype | None = None,
        head_precision: torch.dtype | None = None,
    ) -> None:
        """``precision`` is that of the passes, where autocast makes it another than that of the weights.

        ``head_precision`` is that of the output layer's product, where it is asked to be another.
        """
        self.forms = forms or Forms()
        self.reduction, self.temperature, self.head_precision = reduction, temperature, head_precision
        self.device = next(model.parameters()).device
        self.budget = TokenBudget(self.forms.tokens_per_pass, self.device)
        self._states = (self.device, precision or dtype_of_layers(model), head_width(model))
        self.kernel = self._kernel()
        self.why_padded = self._why_padded(model, precision)
        self.packs = self.why_padded is None
        self._why_plain = self._layers_plain(model)
        if self.packs:
            self.accept(model)
        self._compiled = CompiledLayers(model) if self._why_plain is None else None
        log.info("scoring: %s", self.chosen())

    def _kernel(self) -> str:
        asked = self.forms.attention
        if asked == "auto":
            return kernel_for(*self._states)
        if self.forms.scoring != "padded" and (reason := why_not(asked, *self._states)) is not None:
            raise ValueError(f"attention {asked} does not work here: {reason}")
        return asked

    def _why_padded(self, model: Any, precision: torch.dtype | None) -> str | None:
        if self.forms.scoring == "padded":
            return "asked for"
        if self.forms.scoring == "auto" and self.device.type == "cpu":
            return "on a CPU packing does not pay"
        if self.forms.scoring == "auto" and self.forms.attention == "auto" and not takes_varlen(*self._states):
            return "no variable-length attention for this precision or width of heads"
        reason = why_not_packed(model, precision, self.kernel, self.head_precision)
        if reason is not None and self.forms.scoring == "packed":
            raise ValueError(f"scoring packed does not work with this model: {reason}")
        return reason

    def _layers_plain(self, model: Any) -> str | None:
        if not self.packs:
            return "rows are padded"
        if self.forms.compile_layers is False:
            return "asked for"
        return None if self.forms.compile_layers else why_not_compiled(model)

    @property
    def why_plain(self) -> str | None:
        """What keeps the layers from being compiled."""
        return self._why_plain if self._compiled is None else self._compiled.why_not

    def chosen(self) -> str:
        """The forms in use, as one line."""
        if not self.packs:
            return f"padded ({self.why_padded})"
        attention = SAID[self.kernel]
        prompts = "prompts shared" if self.forms.share_prompts else "a prompt for each completion"
        layers = "layers compiled" if self.why_plain is None else f"layers not compiled ({self.why_plain})"
        tokens = f"{self.budget.tokens} tokens a pass" + ("" if self.budget.settled else " to begin with")
        return f"packed: {attention}, {prompts}, logits in chunks, {layers}, {tokens}"

    def accept(self, model: Any) -> None:
        """Prepare another model of the same kind, such as a reference, for the same forms."""
        if self.packs:
            accept_scoring(model)

    def _packed(self, rows: Sequences, scored: Tensor | None = None) -> Packed:
        batch = repacked(rows, self.forms.share_prompts, scored).to(self.device)
        return batch._replace(plan=prepared(batch.plan, self.kernel))

    def logp(
        self, model: Any, rows: Sequences, reduction: Reduction | None = None, scored: Tensor | None = None
    ) -> Tensor:
        """``[rows]``, differentiable; ``scored`` marks the tokens that count, where not all do."""
        how = reduction or self.reduction
        if not self.packs:
            return seq_logp(model, rows, how)
        batch = self._packed(rows, scored)
        head = self.head_precision
        found: Tensor = self._as_in_training(
            model, lambda inner: packed_seq_logp(inner, batch, how, self.temperature, head_precision=head)
        )
        return found if torch.is_grad_enabled() else found.detach()

    def weighted(
        self, model: Any, rows: Sequences, coefficients: Tensor, scored: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``sum coefficients * logp``, to be differentiated, and the log-probabilities ``[rows]``."""
        if not self.packs:
            logp = seq_logp(model, rows, self.reduction)
            return (coefficients * logp).sum(), logp.detach()
        batch = self._packed(rows, scored)
        coefficients = coefficients.to(self.device, non_blocking=True)
        given = (batch, coefficients, self.reduction, self.temperature)
        total, logp = model(
            score=lambda inner: packed_weighted_logp(inner, *given, head_precision=self.head_precision)
        )
        return total, logp

    def tokens(self, model: Any, rows: Sequences, *, entropy: bool = False) -> TokenScores:
        """Of every token of every completion that follows one, ``[rows, length]``, zero elsewhere; packed."""
        batch = self._packed(rows)
        head = self.head_precision
        found = self._as_in_training(
            model,
            lambda inner: packed_token_scores(
                inner, batch, self.temperature, entropy=entropy, head_precision=head
            ),
        )
        mask = rows.following().completion_mask.bool()
        spread = [
            None if part is None else part.new_zeros(mask.shape).masked_scatter(mask, part) for part in found
        ]
        return TokenScores(*spread)  # type: ignore[arg-type]

    def _as_in_training(self, model: Any, score: Callable[[Any], Any]) -> Any:
        """With gradient or without, layers that are compiled go through one graph.

        That for passes without gradient would be another, with other roundings: in bfloat16 some tenths of a nat
        for a completion of some hundred tokens, which a log-ratio would take for a move of the policy.
        """
        if self._compiled is None or torch.is_grad_enabled():
            return model(score=score)
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        with torch.enable_grad():
            return inner(score=score)

    def sizes(self, rows: Sequences, groups: Tensor) -> Sizes:
        """What rows take, packed; rows of a group have one prompt."""
        here = Sequences(*(part.cpu() for part in rows))
        return Sizes(Lengths.of(here), groups.cpu(), self.forms.share_prompts)

    def passes(self, rows: Sequences, groups: Tensor) -> list[Tensor]:
        """Row indices of every pass, within the budget of tokens; of packed rows."""
        return self.sizes(rows, groups).passes(self.budget.tokens, groups.device)


def available_forms() -> dict[str, str]:
    """Which fast paths a model would get on this machine, for `adpo env`."""
    import importlib.util

    cuda = torch.cuda.is_available()
    triton = importlib.util.find_spec("triton") is not None
    on_cpu = "no: on a CPU rows stay padded; --scoring packed forces it"
    return {
        "packed sequences": "yes" if cuda else on_cpu,
        "attention": "torch variable-length (bf16, fp16)" if cuda else "stretch by stretch (no GPU)",
        "FlashAttention package": flash_package() or "not installed",
        "logits": "in chunks, by triton kernels" if cuda and triton else "in chunks",
        "compiled layers": "yes" if cuda and triton else "no: no GPU" if not cuda else "no: triton is missing",
        "sampling without vLLM": "compiled" if cuda and triton else "as transformers does it, not compiled",
        "tokens a pass": "from free memory" if cuda else f"{TokenBudget('auto', torch.device('cpu')).tokens}",
    }
