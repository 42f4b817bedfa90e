"""Real trainers on a given rollout: an update is timed inside their own training loop."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from adpo.experiments.efficiency.policies import tokenizer
from adpo.experiments.efficiency.protocol import Contender, Rollout, Work
from adpo.trainers.trl import ADPOConfig, ADPOTrainer
from adpo.trainers.trl.grpo import FastGRPOConfig, FastGRPOTrainer

SAMPLED = 4096
"""Entries of the gradient that are compared."""


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Timed:
    """To be mixed into a trainer: a rollout that is given, and a watch on what follows it."""

    rollout: Rollout
    sampled: bool = False  # by the model itself, in place of the completions given
    accelerator: Any
    current_gradient_accumulation_steps: int
    _step: int
    _metrics: Any

    def start_watch(self) -> None:
        self.updates: list[float] = []  # seconds of forward and backward passes
        self.whole: list[float] = []  # of sampling and these
        self.gradient: list[float] = []  # of the first update, in some places
        # Shares of the latest step: rows in a pass without gradient, and rows in none.
        self.rows_scored = self.rows_left_out = 0.0
        self._began = self._aside = 0.0

    def _tokenize_prompts(self, prompts: list[str]) -> Any:
        return [self.rollout.prompts[int(prompt)] for prompt in prompts], None, {}

    def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **options: Any) -> Any:
        if self.sampled:
            return super()._generate_single_turn(prompt_ids, *rest, **options)  # type: ignore[misc]
        return [list(completion) for completion in self.rollout.completions], None

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        before = clock(self.accelerator.device)
        found = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        self._aside += clock(self.accelerator.device) - before
        return found

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        if self._step % self.current_gradient_accumulation_steps == 0:
            self._began, self._aside = clock(self.accelerator.device), 0.0
        found = super().training_step(*arguments, **options)  # type: ignore[misc]
        self.rows_scored = self._latest("adpo/rows_scored")
        self.rows_left_out = self._latest("adpo/rows_left_out")
        if self._step % self.current_gradient_accumulation_steps == 0:  # by now of the next one
            whole = clock(self.accelerator.device) - self._began
            self.whole.append(whole)
            self.updates.append(whole - self._aside)
        return found

    def _latest(self, name: str) -> float:
        values = self._metrics["train"].get(name, [])
        return float(values[-1]) if values else 0.0


class TimedTRL(Timed, GRPOTrainer):  # type: ignore[misc]
    """Stock."""


class TimedGRPO(Timed, FastGRPOTrainer):
    """TRL's losses in our passes."""


class TimedADPO(Timed, ADPOTrainer):
    """Ours."""


class KeepGradient(TrainerCallback):  # type: ignore[misc]
    """Of one step, before the optimizer takes it."""

    def __init__(self, trainer: Any, step: int, ask: Callable[[], None]) -> None:
        self.trainer, self.step, self.ask = trainer, step, ask

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        if state.global_step == self.step:
            self.trainer.gradient = sample_of_gradient(self.trainer.model)
            self.ask()


@cache
def scratch() -> tempfile.TemporaryDirectory[str]:
    """Trainers want a folder, and write nothing into it."""
    return tempfile.TemporaryDirectory(prefix="adpo-efficiency-")


def sample_of_gradient(model: torch.nn.Module) -> list[float]:
    """Entries at fixed places, spread over all parameters in proportion to their size."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = sum(parameter.numel() for parameter in parameters)
    parts: list[Tensor] = []
    for parameter in parameters:
        count = max(1, round(SAMPLED * parameter.numel() / total))
        places = torch.linspace(0, parameter.numel() - 1, count, device=parameter.device, dtype=torch.float64)
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parts.append(gradient.view(-1)[places.long()].float())
    return [float(value) for value in torch.cat(parts).tolist()]


METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "scale_rewards": "group"},
    "gspo": {"loss_type": "grpo", "scale_rewards": "group", "importance_sampling_level": "sequence"},
    "adpo": {"truncated": "keep"},  # what is sampled has no end here, and counts
}
KINDS: dict[tuple[str, str], tuple[type[Any], type[Any]]] = {
    ("trl", "grpo"): (TimedTRL, GRPOConfig),
    ("trl", "gspo"): (TimedTRL, GRPOConfig),
    ("ours", "grpo"): (TimedGRPO, FastGRPOConfig),
    ("ours", "gspo"): (TimedGRPO, FastGRPOConfig),
    ("ours", "adpo"): (TimedADPO, ADPOConfig),
}


def trainer_of(contender: Contender, work: Work, rollout: Rollout, model: Any, steps: int, **options: Any) -> Any:
    """Its real training loop, with a step that moves nothing: every update is of the same weights."""
    kind, config = KINDS[contender.trainer, contender.method]
    size = min(contender.micro_batch, work.rows)
    on_cpu = next(model.parameters()).device.type == "cpu"
    packed: dict[str, Any] = {"scoring": "packed"} if contender.trainer == "ours" and on_cpu else {}
    if contender.tokens_as_trl:
        packed["tokens_per_pass"] = size * rollout.useful // work.rows
    arguments = {
        "output_dir": scratch().name,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": work.rows // size,
        "num_generations": work.members,
        "num_iterations": 2 if contender.second_step else 1,
        "max_completion_length": work.longest,
        "max_steps": steps,
        "learning_rate": 0.0,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "shuffle_dataset": False,
        "use_cpu": on_cpu,
        "bf16": not on_cpu,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
        **METHODS[contender.method],
        **packed,
        **dict(contender.arguments),
        **options,
    }
    trainer = kind(
        model=model,
        reward_funcs=lambda completions, **_: rollout.rewards[: len(completions)],
        args=config(**arguments),
        train_dataset=Dataset.from_list([{"prompt": str(group)} for group in range(work.groups)] * steps),
        processing_class=tokenizer(),
    )
    if contender.trainer == "ours":
        trainer.remove_callback(trainer.weights_moved)  # which would warn that nothing moved
    trainer.rollout = rollout
    trainer.start_watch()
    return trainer
