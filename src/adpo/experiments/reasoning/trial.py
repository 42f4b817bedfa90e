"""One training run, and what became of it."""

from __future__ import annotations

import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, set_seed

from adpo.experiments.cleaned import cleaned
from adpo.experiments.reasoning import measures
from adpo.experiments.reasoning.methods import METHODS
from adpo.experiments.reasoning.problems import Sets
from adpo.experiments.reasoning.protocol import Preset, Trial
from adpo.experiments.reasoning.rewards import Watched
from adpo.experiments.reasoning.starts import Start
from adpo.experiments.workers import Report
from adpo.runs.evaluation import Exam, Taken
from adpo.runs.settings.train_settings import METHODS as TRAINERS
from adpo.runs.splits import Row, prompt_ids
from adpo.runs.train import made_trainer, trainer_config
from adpo.tasks.evaluate import Scored
from adpo.tasks.reward_functions import Correct
from adpo.trainers.checkpoints import checkpoint_files as checkpoints
from adpo.trainers.checkpoints.notes import Noted

LOGGED = (
    "grad_norm",
    "entropy",
    "clip_ratio/region_mean",
    "refused_steps",
    "adpo/tau",
    "adpo/anchor_kl",
    "adpo/log_ratio",
    "adpo/policy_entropy",
    "adpo/rate_factor",
    "adpo/rounding",
    "adpo/steps_undone",
)
DISTANCE_PROBLEMS = 64
TOKENS_PER_PASS = 8_192


@cleaned
def carried_out(
    trial: Trial, preset: Preset, start: Start, sets: Sets, report: Report, unfinished: Path | None = None
) -> dict[str, Any]:
    """Train, watch, examine.

    In ``unfinished`` a trial that takes hours is kept, if its preset says so, and gone on with from there.
    """
    kept = unfinished if preset.kept_every else None
    set_seed(trial.seed)
    model, tokenizer = start.load()
    sharpen(model, trial.sharpened)
    with Correct() as correct, nullcontext(kept) if kept else tempfile.TemporaryDirectory() as folder:
        reward = Watched(trial.reward, correct, preset.members, trial.seed)
        method = METHODS[trial.method].trainer
        config = trainer_config(method, arguments(trial, preset, str(folder), keep=kept is not None))
        trainer = made_trainer(method, model, reward, config, sets.train, tokenizer)
        trainer.run_identity = trial.name
        watch = _Watch(trial, preset, _exam(sets.watched, tokenizer, correct, preset), report)
        trainer.add_callback(watch)
        trainer.add_callback(Noted(trainer, reward=reward, watch=watch, guard=trainer.step_guard))
        trainer.add_callback(_StoppedBefore(trainer.step_guard))
        stopped = _trained(trainer, checkpoints.newest(kept) if kept else None)
        seconds = watch.seconds()
        trained = _copied(trainer.accelerator.unwrap_model(trainer.model), torch.float32)
        taken = _taken(trained, sets, tokenizer, correct, preset) if trial.study != "rates" else {}
    steps = max(1, trainer.state.global_step)
    return {
        "trial": trial.told(),
        "stopped": stopped,
        "seconds_per_step": seconds / steps,
        "tokens_per_step": reward.tokens / steps,
        "scoring": trainer.scorer.chosen(),
        "curve": watch.curve,
        "watched": watch.right,
        "rollouts": [_rounded(each) for each in reward.rollouts],
        "logged": [_rounded({key: log[key] for key in LOGGED if key in log}) for log in _logs(trainer)],
        "exams": {name: _told(each) for name, each in taken.items()},
        **(_from_start(trained, trial, start, tokenizer, preset, sets, taken) if taken else {}),
    }


@torch.no_grad()
def sharpen(model: Any, factor: float) -> None:
    """All logits times a factor, by the norm before the output layer."""
    if factor != 1:
        model.base_model.norm.weight.mul_(factor)


@cleaned
def examined(start: Start, preset: Preset, sets: Sets, _: Report) -> dict[str, Any]:
    """The start itself; ``live`` is the share of groups that would have a gradient."""
    model, tokenizer = start.load()
    with Correct() as correct:
        taken = _taken(model, sets, tokenizer, correct, preset)
        rollout = replace(_exam(sets.watched, tokenizer, correct, preset), samples=preset.members)
        greedy, sampled = rollout.taken(_narrow(model))
    live = sum(len(set(scores)) > 1 for scores in sampled.scores) / len(sampled.scores)
    found: dict[str, Any] = {"exams": {name: _told(each) for name, each in taken.items()}}
    found |= {"watched": greedy.accuracy().value, "live": live}
    if preset.start != "embedded":
        found["forgetting"] = measures.forgetting(model, tokenizer)
    return found


def arguments(trial: Trial, preset: Preset, folder: str, keep: bool = False) -> dict[str, Any]:
    """Of the trainer: the same for all methods, but for what makes the method."""
    mini_batches = min(trial.inner, preset.mini_batches)
    if preset.groups % mini_batches or trial.inner % mini_batches:
        raise ValueError(f"{preset.groups} groups cannot be cut into {mini_batches} mini-batches of whole groups")
    on_device = torch.accelerator.is_available()
    return {
        "output_dir": folder,
        "seed": 1000 * trial.seed,  # the order of an epoch has the seed of its number added
        "per_device_train_batch_size": preset.groups * preset.members // mini_batches,
        "steps_per_generation": mini_batches,
        "num_iterations": trial.inner // mini_batches,
        "gradient_accumulation_steps": 1,
        "num_generations": preset.members,
        "max_completion_length": preset.longest,
        "temperature": preset.temperature,
        "max_steps": trial.rollouts * trial.inner,
        "learning_rate": trial.rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": trial.inner,
        "max_grad_norm": 1e9,  # their losses are of other sizes: clipping would act on some alone
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "steps" if keep else "no",
        "save_steps": trial.inner * (preset.kept_every or 1),
        "save_total_limit": 1,
        "disable_tqdm": True,
        "bf16": on_device,
        "use_cpu": not on_device,
        "compile_layers": preset.compiled and on_device,
        "record_sampling": recorded(preset),
        "chat_template_kwargs": dict(preset.chat) or None,
        "tokens_per_pass": TOKENS_PER_PASS,  # not by the memory that neighbours leave
        **TRAINERS[METHODS[trial.method].trainer],
        **dict(METHODS[trial.method].arguments),
        **dict(trial.more),
    }


def recorded(preset: Preset) -> bool:
    """Whether rollouts are sampled by recorded steps: on a device, where compiling would take longer."""
    return torch.accelerator.is_available() and not preset.compiled


def _trained(trainer: Any, checkpoint: Path | None) -> str | None:
    """What ended the training before its time, if anything did: a policy that has diverged is a result."""
    from adpo.trainers.monitors.guards import TrainingStoppedError

    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except TrainingStoppedError as error:
        if trainer.step_guard.stopped is None:  # not the policy's doing
            raise ValueError(str(error)) from error
    stopped: str | None = trainer.step_guard.stopped
    return None if stopped is None else stopped.split(";")[0]  # without a folder that is gone


def _exam(rows: list[Row], tokenizer: Any, correct: Correct, preset: Preset) -> Exam:
    return Exam(
        rows,
        tokenizer,
        correct,
        preset.longest_in_exams,
        dict(preset.chat),
        samples=preset.exam_samples,
        batch=preset.exam_batch,
        recorded=torch.accelerator.is_available(),  # nobody compiles for an exam
    )


def _taken(model: Any, sets: Sets, tokenizer: Any, correct: Correct, preset: Preset) -> dict[str, Taken]:
    """All problems once, some of them several times."""
    examinee, found = _narrow(model), {}
    for name, rows in sets.exams.items():
        exam = _exam(rows, tokenizer, correct, preset)
        found[name] = exam.greedy(examinee), replace(exam, rows=rows[: preset.sampled]).sampled(examinee)
    return found


def _narrow(model: Any) -> Any:
    """In the precision that the policy is sampled in, where that is another than that of its weights."""
    return model if model.device.type == "cpu" else _copied(model, torch.bfloat16)


def _copied(model: Any, dtype: torch.dtype) -> Any:
    """The same weights in a model to which no trainer has done anything."""
    from adpo.trainers.trl.rollout.sampling import copy_weights, made_like

    made = made_like(model, dtype)
    copy_weights(model, made)
    return made.eval()


def _told(taken: Taken) -> dict[str, Any]:
    """Accuracies, and what became of every problem: 0 or 1, and right ones of the sampled, as digits."""
    greedy, sampled = taken
    k = len(sampled.scores[0])
    return {
        "greedy": greedy.accuracy().value,
        "sampled": sampled.accuracy().value,
        f"pass_at_{k}": sampled.pass_at(k).value,
        "right": _digits(greedy),
        "right_of_sampled": "".join(str(int(sum(row))) for row in sampled.scores),
    }


def _digits(greedy: Scored) -> str:
    return "".join(str(int(row[0])) for row in greedy.scores)


def _from_start(
    model: Any, trial: Trial, start: Start, tokenizer: Any, preset: Preset, sets: Sets, taken: dict[str, Taken]
) -> dict[str, float]:
    name = next(iter(sets.exams))
    sampled = taken[name][1].texts[:DISTANCE_PROBLEMS]
    rows = sets.exams[name][: len(sampled)]
    before, _ = start.load()
    sharpen(before, trial.sharpened)
    asked, said = [row["prompt"] for row in rows], [texts[0] for texts in sampled]
    prompts = [prompt_ids(prompt, tokenizer, dict(preset.chat)) for prompt in asked]
    found = measures.distance(model.eval(), before.eval(), tokenizer, prompts, said, preset.longest_in_exams)
    if preset.start != "embedded":
        found["forgetting"] = measures.forgetting(model, tokenizer)
    return found


def _logs(trainer: Any) -> list[dict[str, Any]]:
    return [log for log in trainer.state.log_history if "grad_norm" in log]


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.5g}") for name, value in values.items()}


class _Watch(TrainerCallback):  # type: ignore[misc]
    """Looks at some held-out problems every few rollouts: by steps, however many were sampled at once."""

    def __init__(self, trial: Trial, preset: Preset, exam: Exam, report: Report) -> None:
        self.trial, self.preset, self.exam, self.report = trial, preset, exam, report
        self.curve: list[tuple[int, float]] = []
        self.right = ""  # what became of every problem at the last look: 0 or 1
        self.began, self.before = time.perf_counter(), 0.0
        self.step_ended = self.began

    def seconds(self) -> float:
        """Of training, without looks and checkpoints."""
        return self.before + time.perf_counter() - self.began

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if args.save_strategy == "no":
            control.should_save = False  # nothing is kept, not even of a trial that is stopped
        self.step_ended = time.perf_counter()
        rollouts, left = divmod(state.global_step, self.trial.inner)
        if left:
            return
        self.report(rollouts / self.trial.rollouts)
        if rollouts % self.preset.watch_every == 0 or rollouts == self.trial.rollouts:
            began = time.perf_counter()
            found = self.exam.greedy(_narrow(model))
            self.curve.append((rollouts, round(found.accuracy().value, 5)))
            self.right = _digits(found)
            self.step_ended = time.perf_counter()
            self.before -= self.step_ended - began

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self.before -= time.perf_counter() - self.step_ended

    def state_dict(self) -> dict[str, Any]:
        return {"curve": self.curve, "right": self.right, "seconds": self.seconds()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.curve, self.right = [(rollouts, share) for rollouts, share in state["curve"]], state["right"]
        self.began, self.before = time.perf_counter(), state["seconds"]


class _StoppedBefore(TrainerCallback):  # type: ignore[misc]
    """A trial that had been stopped, and was cut off in its exam, is not trained further."""

    def __init__(self, guard: Any) -> None:
        self.guard = guard

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.guard.stop_if_over(args, state, control)
