"""Anchors: the policy that u is measured from, as it moves (or does not) during training.

    anchor = EMA(policy, decay=0.99)
    anchor.on_rollout()                                    # fresh candidates have been sampled
    anchor_logp = anchor.logp(lambda module: score(module, batch))
    ...
    anchor.on_step()                                       # the optimizer has stepped

A moving anchor keeps a copy of the policy's trainable parameters (and buffers) and puts it into the policy's own
module while it scores: no second model, and for a LoRA policy a copy of the adapter alone. Parameters that are
sharded (FSDP, ZeRO-3, tensor parallel) cannot be borrowed that way, and are refused.

An anchor scores without dropout, also where its module is in training mode. Train the policy without dropout, too:
else u is noise where the two are equal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from adpo.deprecated import renamed, warn

Score = Callable[[nn.Module], Tensor]
"""Runs a module on the candidates at hand and returns their log-probabilities."""


class Anchor(ABC):
    """What every anchor can do."""

    @abstractmethod
    def logp(self, score: Score) -> Tensor | None:
        """Log-probabilities of the candidates under the anchor, detached; None for the zero anchor."""

    @property
    def coincides(self) -> bool:
        """Whether anchor and policy are known to be equal: then u = 0 and nothing need be scored."""
        return False

    def on_rollout(self) -> None:  # noqa: B027
        """To be called when new candidates have been sampled from the policy."""

    def on_step(self) -> None:  # noqa: B027
        """To be called after every optimizer step."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"{type(self).__name__} has no state; got {sorted(state)}")


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Rates of dropout, attributes with "drop" in their names, are 0 inside, and their modules in evaluation mode.

    So is a module with a ``p``, which is a rate in a class of dropout and may be an exponent elsewhere. A rate may
    be read off another module, as GPT-2's attention does. No other module's mode changes: batch statistics,
    checkpointing and compiled graphs stay those of training.
    """

    def rate(name: str, value: object) -> bool:
        return isinstance(value, float) and value > 0 and (name == "p" or "drop" in name)

    rates = [(each, *item) for each in module.modules() for item in vars(each).items() if rate(*item)]
    modes = [(each, each.training) for each, _, _ in rates]
    try:
        for each, name, _ in rates:
            if "drop" in name or "drop" in type(each).__name__.lower():
                setattr(each, name, 0.0)
            each.training = False
        yield
    finally:
        for each, name, value in rates:
            setattr(each, name, value)
        for each, training in modes:
            each.training = training


def sharded(module: nn.Module) -> str | None:
    """What shards parameters of this module, if anything does: their values are then not in `.data`."""
    if any(getattr(each, "_is_fsdp_managed_module", False) for each in module.modules()):
        return "FSDP"
    for tensor in (*module.parameters(), *module.buffers()):
        if hasattr(tensor, "ds_id"):
            return "DeepSpeed ZeRO-3"
        if hasattr(tensor, "device_mesh"):
            return "DTensor"
    return None


class Zero(Anchor):
    """No anchor: u = logp / tau, the coordinates of SFT and KD."""

    def logp(self, score: Score) -> None:  # noqa: ARG002
        return None


class Fixed(Anchor):
    """Another module that never moves, such as the model before alignment."""

    def __init__(self, reference: nn.Module) -> None:
        self.reference = reference

    @torch.no_grad()
    def logp(self, score: Score) -> Tensor:
        with without_dropout(self.reference):
            return score(self.reference).detach()


class Snapshot(Anchor):
    """The policy as it was when the anchor was created, and a copy of its weights in place of a second model.

    >>> policy = nn.Linear(1, 1, bias=False)
    >>> anchor, x = Snapshot(policy), torch.ones(1, 1)
    >>> _ = policy.weight.data.add_(2.0)
    >>> (policy(x) - anchor.logp(lambda module: module(x))).round().tolist()
    [[2.0]]
    """

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy
        self.steps = 0
        self._equal = True
        # What the anchor keeps a copy of, settled here: freezing a layer later must not change what it covers.
        self._names = [name for name, value in policy.named_parameters() if value.requires_grad]
        self._names += [name for name, _ in policy.named_buffers()]
        self.shadow = {name: self._copy(value) for name, value in self._live()}

    def _live(self) -> list[tuple[str, Tensor]]:
        """The policy's own tensors, of those the anchor has a copy of."""
        if by := sharded(self.policy):
            raise ValueError(
                f"{type(self).__name__} puts a copy of the weights in the place of the policy's own, which does "
                f"not work on parameters sharded by {by}: use Fixed with a reference sharded alike"
            )
        everything = {**dict(self.policy.named_parameters()), **dict(self.policy.named_buffers())}
        return [(name, everything[name]) for name in self._names]

    def _copy(self, value: Tensor) -> Tensor:
        return value.detach().clone()

    @property
    def coincides(self) -> bool:
        return self._equal

    @torch.no_grad()
    def refresh(self) -> None:
        """Move the anchor to where the policy is."""
        for name, value in self._live():
            self.shadow[name].copy_(value)
        self._equal = True

    def on_step(self) -> None:
        self.steps += 1
        self._equal = False

    @contextmanager
    def use_weights(self) -> Iterator[nn.Module]:
        """The policy's module, holding the anchor's values inside the block."""
        own = [(name, value, value.data) for name, value in self._live()]
        try:
            for name, value, _ in own:
                # `.data` is exchanged, not overwritten: graphs built before the block stay valid. Buffers are
                # copied, for a module in training mode writes to them.
                borrowed = self.shadow[name].to(value)
                value.data = borrowed if isinstance(value, nn.Parameter) else borrowed.clone()
            torch.clear_autocast_cache()  # it knows parameters by themselves, not by their values
            yield self.policy
        finally:
            for _, value, data in own:
                value.data = data
            torch.clear_autocast_cache()

    def lent(self) -> AbstractContextManager[nn.Module]:
        """`use_weights` under its former name."""
        warn("lent()", "use_weights()")
        return self.use_weights()

    @torch.no_grad()
    def logp(self, score: Score) -> Tensor:
        with self.use_weights() as module, without_dropout(module):
            return score(module).detach()

    def state_dict(self) -> dict[str, Any]:
        shadow = {name: value.clone() for name, value in self.shadow.items()}
        return {"steps": self.steps, "equal": self._equal, "shadow": shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        theirs, ours = state.get("shadow", {}), self.shadow
        shapes = {name: tuple(value.shape) for name, value in theirs.items()}
        if shapes != {name: tuple(value.shape) for name, value in ours.items()}:
            odd = sorted(set(theirs) ^ set(ours)) or [n for n in ours if shapes[n] != tuple(ours[n].shape)]
            raise ValueError(f"anchor state does not fit this policy; first difference: {odd[0]}")
        for name, value in theirs.items():
            ours[name].copy_(value)
        self.steps = int(state["steps"])
        # Load the policy first: that the two coincide is looked up, not believed. That they were not is kept: a
        # resumed run takes the steps it would have taken.
        same = (torch.equal(ours[name].to(value), value) for name, value in self._live())
        self._equal = bool(state.get("equal", True)) and all(same)


class EMA(Snapshot):
    """An exponential moving average of the policy, updated after every optimizer step.

    The average is kept in float32 whatever the policy's precision: in bfloat16 a rate of 0.05 or less loses
    nearly all of the movement to rounding. Buffers follow the policy.
    """

    def __init__(self, policy: nn.Module, decay: float = 0.99) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be in [0, 1); got {decay}")
        self.decay = decay
        super().__init__(policy)

    def _copy(self, value: Tensor) -> Tensor:
        wide = torch.promote_types(value.dtype, torch.float32) if value.is_floating_point() else value.dtype
        return value.detach().to(wide, copy=True)

    @torch.no_grad()
    def on_step(self) -> None:
        super().on_step()
        for name, value in self._live():
            shadow = self.shadow[name]
            if isinstance(value, nn.Parameter):
                shadow.lerp_(value.to(shadow.dtype), 1 - self.decay)
            else:
                shadow.copy_(value)


class OnPolicy(Snapshot):
    """The policy that sampled the current candidates: refreshed at every rollout."""

    def on_rollout(self) -> None:
        self.refresh()


class Refresh(Snapshot):
    """The policy as it was at the latest multiple of ``every`` optimizer steps."""

    def __init__(self, policy: nn.Module, every: int) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1; got {every}")
        self.every = every
        super().__init__(policy)

    def on_step(self) -> None:
        super().on_step()
        if self.steps % self.every == 0:
            self.refresh()


if not TYPE_CHECKING:
    __getattr__ = renamed(__name__)
