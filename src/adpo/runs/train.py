"""`adpo train`: from settings to a trained model, its metrics and a summary."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from transformers import set_seed
from transformers.training_args import trainer_log_levels

from adpo.system.files import write_json
from adpo.trainers.checkpoints.model_card import CardFacts, write_card
from adpo.trainers.trl.rollout.vllm import check_tokenizer, server_room
from adpo.scoring.context import longest_row
from adpo.tasks.reward_functions import Correct
from adpo.tasks.generated_tasks import up_to
from adpo.system.provenance import provenance, typed
from adpo.runs import splits as data
from adpo.runs.display import Display, figure_rows
from adpo.runs.evaluation import Exam, Reward, figures, samples
from adpo.runs.folder import BEFORE, Ordered, check_folder, identity, open_folder
from adpo.runs.interrupt import Stop
from adpo.runs.by_name import (
    load_model,
    lora_config,
    model_folder,
    own_reward,
    processes,
    quiet,
    settled_by_main,
)
from adpo.runs.settings.packages import check_packages, outside_in_one_line
from adpo.runs.settings.train_settings import Asked, RunSettings, default_arguments
from adpo.runs.validation import BEST, Watch, save

T = TypeVar("T")
NO_VALIDATION = "no validation: the last model is kept, not the best one (--{setting} N takes N for it)"
GENERAL: dict[str, Any] = {"report_to": ["tensorboard"], "logging_steps": 5, "save_total_limit": 2}
LEAST = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "num_generations": 2,
    "num_iterations": 1,
    "max_completion_length": 1,
}
EMBEDDED: dict[str, Any] = {
    "per_device_train_batch_size": 256,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "num_iterations": 2,
    "max_steps": 300,
    "learning_rate": 3e-4,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 20,
    "save_steps": 50,
}


def begin(out: Path, seed: int) -> dict[str, Any]:
    """What the arguments of any trainer begin with, on this machine."""
    accelerator = torch.accelerator.is_available()
    return {
        **GENERAL,
        "output_dir": str(out),
        "seed": seed,
        "bf16": accelerator,
        "use_cpu": not accelerator,
        "disable_tqdm": True,
    }


def arguments(asked: Asked, out: Path, seed: int, longest_answer: int = 5) -> dict[str, Any]:
    """All arguments of the trainer: what was asked for over what a run like this begins with."""
    own = {**EMBEDDED, "max_completion_length": longest_answer} if asked.run.embedded else {}
    return {**begin(out, seed), **own, **asked.trainer}


def defaults(asked: Asked, out: Path) -> dict[str, Any]:
    """The arguments of the trainer that a run like this has where nothing is said of them."""
    usual = default_arguments(asked.run.method)
    return {**usual, **arguments(Asked(asked.run, {}), out, 0, _longest_answer(asked.run, 0))}


def trainer_config(method: str, given: dict[str, Any]) -> Any:
    """The arguments as the trainer's own class, which checks them."""
    from adpo.trainers.trl import ADPOConfig
    from adpo.trainers.trl.grpo import FastGRPOConfig

    kept = {name: value for name, value in given.items() if name != "model_init_kwargs"}
    return checked(ADPOConfig if method == "adpo" else FastGRPOConfig, kept)


def checked(kind: Callable[..., T], given: dict[str, Any]) -> T:
    """Arguments of a trainer as its own class; what that does not take is one line."""
    for name, least in LEAST.items():
        if given.get(name) is not None and given[name] < least:
            raise ValueError(f"{name} must be at least {least}; got {given[name]}")
    if given.get("log_level", "passive") not in trainer_log_levels:
        raise ValueError(f"log_level must be one of {', '.join(trainer_log_levels)}; got {given['log_level']!r}")
    steps, epochs = given.get("max_steps", -1), given.get("num_train_epochs", 1)
    if steps < 1 and steps != -1:
        raise ValueError(f"max_steps must be at least 1, or -1 for num_train_epochs to count; got {steps}")
    if not 0 < epochs < math.inf:
        raise ValueError(f"num_train_epochs must be {'finite' if epochs > 0 else 'above 0'}; got {epochs}")
    if not given.get("learning_rate", 1e-6) >= 0:
        raise ValueError(f"learning_rate must be at least 0; got {given['learning_rate']}")
    try:
        return kind(**given)
    except (ImportError, OSError, TypeError, ValueError) as error:
        said: Any = error.args[0] if isinstance(error, ImportError) and error.args else error
        if isinstance(error, OSError) and error.filename is not None:
            name = next((name for name, value in given.items() if value == error.filename), "file")
            said = f"{name} {error.filename} cannot be read: {error.strerror}"
        raise ValueError(" ".join(str(said).split())[:400]) from None


def train(order: Ordered[Asked], display: Display) -> dict[str, Any]:
    """Carry the run out; returns the summary that is written to ``summary.json``."""
    origin = {"command": typed(), **provenance()}
    run, folder, everyone = order.asked.run, order.out, processes()
    quiet()
    checkpoint = settled_by_main(lambda: check_folder(order))
    if order.resume:
        display.say(f"going on from {checkpoint}" if checkpoint else "no checkpoint yet: from the start")
    given = arguments(order.asked, folder, order.seed, _longest_answer(run, order.seed))
    config = trainer_config(run.method, given)
    settled_by_main(lambda: check_packages(config, given.get("model_init_kwargs")))
    data.check_files(run)
    mine = own_reward(run.reward) if run.reward else None
    with everyone.main_process_first():
        path = run.start or model_folder(run, display)
    model, tokenizer = load_model(path, given.get("model_init_kwargs"))
    settled_by_main(lambda: check_tokenizer(config, tokenizer))
    rows = data.prepare(run, tokenizer, order.seed)
    context = longest_row(model.config)
    longest, chat = config.max_completion_length, config.chat_template_kwargs or {}
    parts = (rows.train, rows.test, rows.dev)
    to_train, to_test, to_watch = (data.that_fit(part, tokenizer, context, longest, chat) for part in parts)
    room = settled_by_main(lambda: server_room(config))
    to_train = data.that_fit(to_train, tokenizer, room, longest, chat, "vLLM server")
    _enough(to_train, config)
    timed_out: Literal["mask", "zero"] = "mask" if getattr(config, "truncated", "zero") == "mask" else "zero"
    with Correct(timed_out, seconds=run.verifier_seconds) as correct:
        reward = mine or correct
        exam = Exam(to_test, tokenizer, reward, longest, chat, batch=run.eval_batch, seed=order.seed)
        about = run.data or f"{run.task}, level {run.level}"
        display.say(
            f"{run.method} on {about}: {len(to_train):,} training, {len(to_watch):,} validation, "
            f"{len(to_test):,} test problems; results in {folder}"
        )
        if not to_watch:
            display.say(NO_VALIDATION.format(setting="dev_problems"))
        set_seed(order.seed)
        with outside_in_one_line():  # before the exam: what a trainer refuses should cost nothing
            trainer = made_trainer(run.method, model, reward, config, to_train, tokenizer, lora_config(run))
        if everyone.is_main_process:
            open_folder(order, origin)
        everyone.wait_for_everyone()
        before = exam.remembered(trainer.model, folder / BEFORE)
        display.say(f"scoring: {trainer.scorer.chosen()}")
        display.say(f"sampling: {trainer.policy_sampler.description()}")
        trainer.run_identity = identity(order)
        trainer.card_facts = CardFacts(
            run.method, about, origin["command"], origin["commit"], None if run.embedded else run.model
        )
        watcher = Exam(to_watch, tokenizer, reward, longest, chat, batch=run.eval_batch) if to_watch else None
        stop = Stop(trainer, display.say)
        watch = Watch(
            trainer,
            folder,
            display,
            watcher.mean if watcher else None,
            run.eval_every,
            lambda: stop.signal > 0,
            "reward" if run.reward else "accuracy",
        )
        trainer.add_callback(stop)
        trainer.add_callback(watch)
        with outside_in_one_line(), stop.listening(), display.stage("training", _steps(trainer, config)):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        trainer.step_guard.complain()
        final = folder / BEST
        if watch.best_step < 0:
            final = folder / "model"
            save(trainer, final)
        kept = (
            trainer.model
            if watch.best_step in (-1, trainer.state.global_step)
            else load_model(final, given.get("model_init_kwargs"))[0]
        )
        after = exam.taken(kept)
    summary = {
        "method": run.method,
        "model": run.model,
        "seed": order.seed,
        "scoring": trainer.scorer.chosen(),
        "sampling": trainer.policy_sampler.description(),
        "steps": trainer.state.global_step,
        "nothing_learnt": trainer.weights_moved.verdict(),
        "checkpoint": str(final),
        "metrics": str(folder / "metrics.jsonl"),
        "seconds": round(time.monotonic() - order.started, 1),
        **origin,
        **figures(before, after, own_reward=run.reward is not None),
        "samples": samples(to_test, before, after),
    }
    if everyone.is_main_process:
        head = (f"{len(to_test)} test problems", "before", "after", "gain")
        trainer.card_facts.figures = [head, *figure_rows(summary)]
        for place in (final, folder):
            write_card(trainer, place, folder.name)
        write_json(folder / "summary.json", summary)
    return summary


def _longest_answer(run: RunSettings, seed: int) -> int:
    if not run.embedded or run.data is not None:
        return 256
    return max(len(problem.answer) for problem in up_to(run.task, 50, level=run.level, seed=seed)) + 2


def made_trainer(
    method: str,
    model: Any,
    reward: Reward,
    config: Any,
    rows: list[data.Row],
    tokenizer: Any,
    adapter: Any = None,
) -> Any:
    """Of that method; rewards that fail and steps that are not finite are refused in all of them."""
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback

    from adpo.trainers.monitors.guards import GuardedRewards
    from adpo.trainers.checkpoints.notes import Noted
    from adpo.trainers.trl import ADPOTrainer
    from adpo.trainers.trl.grpo import FastGRPOTrainer

    common = {
        "args": config,
        "train_dataset": Dataset.from_list(rows),
        "processing_class": tokenizer,
        "peft_config": adapter,
    }
    if method == "adpo":
        trainer = ADPOTrainer(model, reward, **common)
    else:
        trainer = FastGRPOTrainer(model, GuardedRewards(5).wrap(reward), **common)
        trainer.add_callback(Noted(trainer, guard=trainer.step_guard))
    trainer.remove_callback(PrinterCallback)
    return trainer


def _enough(rows: list[data.Row], config: Any) -> None:
    """A rollout must be full: TRL drops what does not fill one, and would train for no step at all."""
    needed = config.generation_batch_size // config.num_generations
    if len(rows) < needed:
        raise ValueError(
            f"{len(rows)} problems to train on are fewer than the {needed} of one rollout: lower "
            "per_device_train_batch_size, gradient_accumulation_steps or steps_per_generation"
        )


def _steps(trainer: Any, config: Any) -> int | None:
    """Optimizer steps of the whole run."""
    if config.max_steps > 0:
        return int(config.max_steps)
    rollouts = len(trainer.train_dataset) * config.num_generations // config.generation_batch_size
    steps = rollouts * config.steps_per_generation * config.num_iterations / config.gradient_accumulation_steps
    return math.ceil(config.num_train_epochs * steps) or None
