"""Steps that are taken back: a rollout's own loss says that a step was too long.

All optimizer steps on a rollout have one loss, and each begins by computing it where the one before has led. If
that is above where the rollout began, the step before went too far: the weights go back to where they were, and
the learning rate is halved. So it fits itself to what the loss can bear, however large it was set; the line search
of TRPO, with no pass made for it.

In bfloat16, and on a GPU, the loss rises by rounding as soon as the weights are others, however little; where a
rollout begins, and policy and on-policy anchor are the same, there is none of it. So in the first three rollouts
and then in one of eight, the first step is given up: the weights are nudged instead, and what the loss rises by is
rounding. Steps are judged by what is above it.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback

from adpo.trainers.monitors.guards import gradients_are_finite
from adpo.trainers.sharding import SHARDED

log = logging.getLogger("adpo")
SLACK = 1e-3
"""What a loss may rise by: rounding, in float32 on a CPU."""
TWICE, SEEN = 2.0, 3
"""Times the median of the last so many rises by rounding: what it may rise by where that was measured."""
IN_BFLOAT16, ON_A_GPU, AT_LEAST = 2**-12, 2**-14, 2**-6
"""What a weight is nudged by, relative to it, and how large a smaller one counts (LoRA begins with some of zero):
enough for others to be rounded up or down, in bfloat16, and in what a GPU makes of float32."""
LITTLE = 2**-10
"""Of the learning rate: when so little is left of it, every further halving is a warning."""
RECOVERY = 8
"""Rollouts without a step taken back in which the rate is doubled again, up to what it was set to; and those from
one measurement of the rounding to the next."""
NOT_FP16 = "backtracking does not work with fp16, whose scaler owns the optimizer's steps: use bf16"
NUMBERS, WEIGHTS = "backtracking.json", "before_step.safetensors"
KEPT = ("factor", "undone", "held", "began", "rises", "unmeasured", "nudged")


@dataclass
class BacktrackingForm:
    """To be mixed into a trainer's own arguments."""

    backtracking: bool = field(
        default=False,
        metadata={
            "help": "Take back a step after which a rollout's loss is above where it began; halve the rate."
        },
    )

    def check_backtracking(self) -> None:
        if not self.backtracking:
            return
        args: Any = self
        if args.num_iterations < 2:
            raise ValueError(
                f"backtracking judges a step by the next one on its rollout: make num_iterations at least 2; got "
                f"{args.num_iterations}"
            )
        if args.steps_per_generation != args.gradient_accumulation_steps:
            raise ValueError(
                f"backtracking needs optimizer steps on whole rollouts: steps_per_generation = "
                f"{args.steps_per_generation} and gradient_accumulation_steps = "
                f"{args.gradient_accumulation_steps} must be equal"
            )
        if args.fp16:
            raise ValueError(NOT_FP16)


class Backtracking(TrainerCallback):  # type: ignore[misc]
    """Judges the step before, and takes it back or lets the next one be made; to be added before other guards.

    The last step on a rollout is judged by nobody. Where one before it was taken back, it is left out.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.loss = torch.zeros((), device=trainer.accelerator.device)  # of the step at hand, so far
        self.began = math.nan  # the loss where the rollout at hand began
        self.held = True  # no step on it was taken back
        self.factor = 1.0  # of the learning rate
        self.undone = 0
        self.before: dict[str, Tensor] = {}  # weights before the latest step
        self.nudge = _nudge(trainer)
        self.rises: list[float] = []  # of the loss by rounding, the latest ones
        self.unmeasured = 0  # rollouts since
        self.nudged = False  # in place of the step before
        self._rates: list[Any] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        loss = float(self.trainer.accelerator.reduce(self.loss, reduction="mean"))
        if not gradients_are_finite(self.trainer):
            loss = math.nan  # log-probabilities that are no numbers are left out of it
        self.loss = torch.zeros_like(self.loss)
        place = self._place()
        if place == 1:
            self._begin(loss)
            self._keep()
            if self.nudge and self._due(loss):
                self._move(self.nudge, state.global_step)
        elif self.nudged:
            self._measure(loss, last=place == args.num_iterations)
        elif math.isfinite(self.began) and not loss <= self.began + self.slack():
            self._take_back(state.global_step, loss)
        elif place < args.num_iterations:
            self._keep()
        elif not self.held:  # and nobody would judge this one
            self._leave_out()
        self._slow_down()
        self.trainer.add_metrics(
            rate_factor=self.factor, **({"rounding": median(self.rises)} if self.rises else {})
        )
        self.trainer._metrics["train"]["adpo/steps_undone"] = [float(self.undone)]  # a count: not to be averaged

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """The schedule of the rate knows nothing of the factor."""
        for group, rate in zip(self.trainer.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if self.nudged:
            self._go_back()
            self.nudged = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self.loss = torch.zeros_like(self.loss)

    def _place(self) -> int:
        """Of the latest pass over the rollout at hand, from 1 to ``num_iterations``."""
        args = self.trainer.args
        return int((self.trainer._step // args.steps_per_generation - 1) % args.num_iterations + 1)

    def _begin(self, loss: float) -> None:
        if self.held:
            self.factor = min(1.0, self.factor * 2 ** (1 / RECOVERY))
        self.began, self.held, self.unmeasured = loss, True, self.unmeasured + 1

    def slack(self) -> float:
        """What a loss may rise by."""
        return SLACK + TWICE * (median(self.rises) if self.rises else 0.0)

    def _due(self, loss: float) -> bool:
        """Whether the rounding is to be measured, and can be: where there is nothing to learn it does not show."""
        if not math.isfinite(loss) or (len(self.rises) == SEEN and self.unmeasured < RECOVERY):
            return False
        return any(value.grad is not None and bool(value.grad.any()) for _, value in self.trained())

    @torch.no_grad()
    def _move(self, nudge: float, seed: int) -> None:
        """Every weight a little up or down, in all processes alike, in place of a step."""
        self._leave_out()
        draws: dict[torch.device, torch.Generator] = {}
        for _, value in self.trained():
            draw = draws.setdefault(value.device, torch.Generator(value.device).manual_seed(seed))
            up = torch.empty(value.shape, dtype=torch.bool, device=value.device).bernoulli_(generator=draw)
            size = value.abs().clamp_min_(AT_LEAST).mul_(nudge)
            value.add_(torch.where(up, size, -size))
        self.nudged = True

    def _measure(self, loss: float, last: bool) -> None:
        """By the loss at nudged weights; the gradient at hand is as good as any where the rollout began."""
        self._go_back()
        self.nudged, self.unmeasured = False, 0
        if math.isfinite(loss):
            self.rises = [*self.rises, abs(loss - self.began)][-SEEN:]
        if last or not math.isfinite(loss):  # no pass would judge this step
            self._leave_out()
            self.held = False

    @torch.no_grad()
    def _go_back(self) -> None:
        for name, value in self.trained():
            value.copy_(self.before[name])

    def _take_back(self, step: int, loss: float) -> None:
        self._go_back()
        self._leave_out()
        self.held, self.factor, self.undone = False, self.factor / 2, self.undone + 1
        log.log(
            logging.WARNING if self.undone == 1 or self.factor < LITTLE else logging.INFO,
            "step %d taken back: the loss of its rollout rose from %.4g to %.4g; learning rate times %.3g now",
            *(step, self.began, loss, self.factor),
        )

    def _leave_out(self) -> None:
        """No step: without gradients the optimizer does nothing."""
        for _, value in self.trained():
            value.grad = None

    def _keep(self) -> None:
        self.before = {name: self._copied(name, value.detach()) for name, value in self.trained()}

    def _copied(self, name: str, value: Tensor) -> Tensor:
        return self.before[name].copy_(value) if name in self.before else value.clone()

    def _slow_down(self) -> None:
        groups = self.trainer.optimizer.param_groups
        self._rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * self.factor

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """The weights that the optimizer moves."""
        policy = self.trainer.accelerator.unwrap_model(self.trainer.model)
        return [(name, value) for name, value in policy.named_parameters() if value.requires_grad]

    # What a checkpoint keeps.

    def save(self, folder: Path, main: bool) -> None:
        if not main:
            return
        numbers = {name: getattr(self, name) for name in KEPT}
        (folder / NUMBERS).write_text(json.dumps(numbers) + "\n")
        if self.before and self._place() < self.trainer.args.num_iterations:
            save_file({name: value.contiguous() for name, value in self.before.items()}, folder / WEIGHTS)

    def load(self, folder: Path) -> None:
        if not (folder / NUMBERS).exists():
            raise ValueError(f"{folder} holds no {NUMBERS}: it was trained without backtracking")
        numbers = json.loads((folder / NUMBERS).read_text())
        for name in KEPT:
            setattr(self, name, numbers.get(name, getattr(self, name)))
        if (folder / WEIGHTS).exists():
            found = load_file(folder / WEIGHTS)
            self.before = {name: found[name].to(value.device) for name, value in self.trained()}

    def size(self) -> int:
        return sum(value.nbytes for _, value in self.trained())


def _nudge(trainer: Any) -> float:
    """How much weights have to differ for their rounding to; zero where that is nothing to speak of."""
    if trainer.args.bf16 or any(_narrow(value) for value in trainer.model.parameters()):
        return IN_BFLOAT16
    return 0.0 if trainer.accelerator.device.type == "cpu" else ON_A_GPU


def _narrow(value: Tensor) -> bool:
    return value.element_size() < 4


def backtracking_of(trainer: Any) -> Backtracking | None:
    """For a trainer whose arguments ask for it."""
    if not trainer.args.backtracking:
        return None
    if trainer.accelerator.distributed_type in SHARDED:
        raise ValueError("backtracking keeps a copy of the weights: not on sharded parameters (FSDP, DeepSpeed)")
    if trainer.accelerator.scaler is not None:
        raise ValueError(NOT_FP16)
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in trainer.model.modules()):
        raise ValueError("backtracking compares losses, which dropout makes random: set disable_dropout: true")
    backtracking = Backtracking(trainer)
    narrow = [value.dtype for _, value in backtracking.trained() if _narrow(value)]
    if narrow:
        raise ValueError(
            f"backtracking needs trained weights in float32, with which bf16 computes as fast; got {narrow[0]}"
        )
    return backtracking
