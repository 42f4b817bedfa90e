"""DeepSpeed's engine with several backward passes to an optimizer step.

Accelerate has the engine step after every backward pass outside of gradient accumulation: a step cut into passes
would become as many steps. Here passes are accumulated, the last one of a step reduces the gradients, and the
engine steps once, where the trainer back-propagates the loss it only logs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import DistributedType
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
from torch import Tensor

STAGES = (1, 2)


def refuse_stage(args: Any) -> None:
    """``args`` are training arguments that have been set up."""
    plugin = getattr(args, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage not in STAGES:
        instead = "FSDP2 or ZeRO 2" if plugin.zero_stage == 3 else "plain data parallelism or ZeRO 1"
        raise ValueError(
            f"DeepSpeed is supported with ZeRO stage 1 or 2; got stage {plugin.zero_stage}: use {instead}"
        )


class OneStep(DeepSpeedEngineWrapper):  # type: ignore[misc]
    """In the place of accelerate's wrapper."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.engine.optimizer.check_grad_overflow = True  # refuse what is not finite in bfloat16, too
        self.accumulated = self.reduced = self.spoilt = self.refused = False
        self.zeros = False  # what is accumulated has no gradient in it

    def accumulate(self, loss: Tensor, *, last: bool) -> None:
        """One backward pass; ``last`` is the last of an optimizer step."""
        self.engine.set_gradient_accumulation_boundary(is_boundary=last)
        self.engine.backward(loss, scale_wrt_gas=False)
        self.accumulated, self.reduced = True, last

    def backward(self, loss: Tensor, sync_gradients: bool = True, **options: Any) -> None:
        """As accelerate calls it: with a loss that has a gradient, or with one that is only logged."""
        if loss.grad_fn is not None:
            super().backward(loss, sync_gradients, **options)
            self.refused = sync_gradients and self._overflow
        elif sync_gradients:
            self.step()

    def step(self) -> None:
        """Nothing where no pass was made: a step without gradient moves nothing."""
        accumulated, spoilt, zeros = self.accumulated, self.spoilt, self.zeros
        self.accumulated = self.spoilt = self.refused = self.zeros = False
        if not accumulated:
            return
        assert self.reduced, "the last pass of a step was not made"
        if spoilt:
            self._spoil()
        with self._at_rest() if zeros else contextlib.nullcontext():
            self.engine.step()
        self.refused = self._overflow

    @contextlib.contextmanager
    def _at_rest(self) -> Iterator[None]:
        """DeepSpeed clears what it has accumulated; its optimizer, which momentum would move, makes no step."""
        inner = self.engine.optimizer.optimizer
        plain, inner.step = inner.step, lambda *_, **__: None
        try:
            yield
        finally:
            inner.step = plain

    @property
    def _overflow(self) -> bool:
        return bool(self.engine.optimizer.overflow)

    def _spoil(self) -> None:
        """Make DeepSpeed refuse the step, which clears what it has accumulated."""
        optimizer = self.engine.optimizer
        if optimizer.cpu_offload:  # gradients are elsewhere by now, and were looked at on the way
            optimizer.local_overflow = True
        for parts in optimizer.averaged_gradients.values():
            for part in parts or ():
                part.fill_(torch.nan)


def engine_of(accelerator: Any) -> OneStep | None:
    """The engine that trains, under DeepSpeed; installed when it is first asked for."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return None
    wrapped = accelerator.deepspeed_engine_wrapped
    if wrapped is not None and not isinstance(wrapped, OneStep):
        wrapped = accelerator.deepspeed_engine_wrapped = OneStep(wrapped.engine)
    return wrapped  # type: ignore[no-any-return]
