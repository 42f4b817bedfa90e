"""`adpo prefer`: from lists of completions to a trained model, its metrics and a summary."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import set_seed
from transformers.trainer_callback import PrinterCallback

from adpo.system.errors import NothingLearnedError
from adpo.system.files import read_json, write_json
from adpo.trainers.monitors.guards import TrainingStoppedError
from adpo.trainers.listwise import ListwiseConfig, ListwiseTrainer
from adpo.trainers.listwise import sources
from adpo.trainers.checkpoints.model_card import CardFacts, write_card
from adpo.tasks.evaluate import Estimate, difference, share
from adpo.preferences.rankings import Ranking
from adpo.system.provenance import provenance, typed
from adpo.runs.settings import prefer_settings as lists
from adpo.runs.display import Display, make_console, percent, points
from adpo.runs.folder import (
    BEFORE,
    Ordered,
    as_it_was,
    check_folder,
    how_to_go_on,
    identity,
    known_settings,
    open_folder,
    without_failed_starts,
)
from adpo.runs.interrupt import Stop, StoppedError
from adpo.runs.settings.keys import field_defaults, parse_pairs, read_yaml
from adpo.runs.settings.prefer_settings import AskedToPrefer, Lists
from adpo.runs.by_name import (
    context_of,
    load_model,
    load_tokenizer,
    lora_config,
    model_folder,
    processes,
    quiet,
    settled_by_main,
)
from adpo.runs.settings.packages import check_packages, outside_in_one_line
from adpo.runs.train import NO_VALIDATION, begin, checked
from adpo.runs.validation import BEST, Watch, save

EMBEDDED: dict[str, Any] = {
    "per_device_train_batch_size": 32,
    "max_steps": 300,
    "learning_rate": 3e-4,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 20,
    "save_steps": 50,
    "tau": 1.0,
}
CAPTION = "log-ratio: to the reference, of a completion; log-probability: of a token, on average"
NAMES = {"accuracy": "pairs in order", "ndcg": "NDCG", "best_first": "best one first"}


def command(
    words: list[str], config: Path | None, out: Path | None, seed: int | None, resume: bool, dry_run: bool
) -> None:
    """Settings, a look at the data, then training."""
    started = time.monotonic()
    if resume and out is None:
        raise ValueError("--resume needs the --out of the run to go on with")
    known = known_settings(out, "prefer") if resume and out else {}
    of_run = known.pop("seed", 0)
    seed = of_run if seed is None else seed
    if words and not words[0].startswith("--"):
        words = ["--data", *words]
    asked = lists.resolve({**known, **(read_yaml(config) if config else {}), **parse_pairs(words)})
    if out is not None and known:
        theirs = lists.resolve(known)
        asked = as_it_was(out, asked, theirs, {**field_defaults(ListwiseConfig), **_begun(theirs.run, out)})
    main = processes(asked.trainer.get("use_cpu")).is_main_process
    display = Display(make_console(quiet=not main))
    folder = settled_by_main(lambda: out or Path("runs") / time.strftime("prefer-%Y%m%d-%H%M%S"))
    order = Ordered(asked, folder, seed, resume, started)
    try:
        with without_failed_starts(folder, main):
            summary = train(order, display, dry_run)
    except TrainingStoppedError as error:
        raise ValueError(f"training stopped: {error}") from error
    except (KeyboardInterrupt, StoppedError) as stop:
        display.say(how_to_go_on("prefer", folder, str(stop)))
        raise
    if summary is not None and main:
        _show(summary, folder, display)


def train(order: Ordered[AskedToPrefer], display: Display, dry_run: bool = False) -> dict[str, Any] | None:
    """Carry the run out; returns the summary that is written to ``summary.json``, None of a dry run."""
    origin = {"command": typed(), **provenance()}
    run, folder, everyone = order.asked.run, order.out, processes()
    quiet()
    checkpoint = settled_by_main(lambda: check_folder(order))
    config = _config(order)
    if not dry_run:
        settled_by_main(lambda: check_packages(config))
    settled_by_main(lambda: lists.check(run, config.skip_bad, display))
    if dry_run:
        display.say("a dry run: settings and data are in order, nothing was written")
        return None
    if order.resume:
        display.say(f"going on from {checkpoint}" if checkpoint else "no checkpoint yet: from the start")
    with everyone.main_process_first():
        place = model_folder(run, display)
        if run.reference is not None:
            context_of(run.reference)  # it can be found, at least
        room = sources.room(config, context_of(place))
        rows = lists.prepare(run, load_tokenizer(place), config, room, display, order.seed)
    with outside_in_one_line():
        trainer = _trainer(order, config, place, rows)
    display.say(f"scoring: {trainer.scorer.chosen()}")
    _score_reference(trainer, rows, display)
    if everyone.is_main_process:
        open_folder(order, origin)
    everyone.wait_for_everyone()
    before = _remembered(trainer, rows.test, folder / BEFORE)
    watch = _trained(trainer, order, rows, checkpoint, display)
    final = folder / BEST
    if watch.best_step < 0:
        final = folder / "model"
        save(trainer, final)
    last = watch.best_step in (-1, trainer.state.global_step)
    kept = trainer.model if last else load_model(final)[0]
    summary = {
        "model": run.model,
        "data": run.data,
        "seed": order.seed,
        "scoring": trainer.scorer.chosen(),
        "steps": trainer.state.global_step,
        "nothing_learnt": trainer.weights_moved.verdict(),
        "checkpoint": str(final),
        "metrics": str(folder / "metrics.jsonl"),
        "seconds": round(time.monotonic() - order.started, 1),
        "lists": rows.sizes(),
        **origin,
        "log_ratio": {n: _estimate(values) for n, values in trainer.rank(rows.test, kept)._asdict().items()},
        "mean_logp": _figures(before, trainer.rank(rows.test, kept, "mean_logp")),
    }
    if everyone.is_main_process:
        trainer.card_facts.figures = [("test lists", "before", "after"), *_of_card(summary["mean_logp"])]
        for where in (final, folder):
            write_card(trainer, where, folder.name)
        write_json(folder / "summary.json", summary)
    return summary


def _of_card(figures: dict[str, Any]) -> list[tuple[str, ...]]:
    parts = ("before", "after")
    return [(NAMES[name], *(str(Estimate(**found[part])) for part in parts)) for name, found in figures.items()]


def _config(order: Ordered[AskedToPrefer]) -> ListwiseConfig:
    """All arguments of the trainer: what was asked for over what a run like this begins with."""
    run = order.asked.run
    config = checked(ListwiseConfig, {**_begun(run, order.out, order.seed), **order.asked.trainer})
    if run.reference is not None and config.anchor == "none":
        raise ValueError("a reference means nothing with anchor none: leave one of them out")
    if config.cache is not None and Path(config.cache).exists() and not Path(config.cache).is_dir():
        raise ValueError(f"cache {config.cache} is a file; expected a folder")
    return config


def _begun(run: lists.PreferSettings, out: Path, seed: int = 0) -> dict[str, Any]:
    return {**begin(out, seed), **(EMBEDDED if run.embedded else {})}


def _trainer(order: Ordered[AskedToPrefer], config: ListwiseConfig, place: str, rows: Lists) -> ListwiseTrainer:
    model, tokenizer = load_model(place)
    set_seed(order.seed)
    run = order.asked.run
    trainer = ListwiseTrainer(
        model, config, rows.train, None, tokenizer, reference=run.reference, peft_config=lora_config(run)
    )
    trainer.remove_callback(PrinterCallback)
    trainer.run_identity = identity(order)
    base, origin = None if run.embedded else run.model, provenance()
    trainer.card_facts = CardFacts("ADPO on lists", run.data, typed(), origin["commit"], base)
    return trainer


def _score_reference(trainer: ListwiseTrainer, rows: Lists, display: Display) -> None:
    sizes = rows.sizes()
    display.say(
        f"{sizes['train']:,} training, {sizes['dev']:,} validation, {sizes['test']:,} test lists; results in "
        f"{trainer.args.output_dir}"
    )
    if not sizes["dev"]:
        display.say(NO_VALIDATION.format(setting="dev_lists"))
    done = count(1)
    with display.stage("reference", sum(sizes.values())):
        tables = list(rows) if trainer.args.anchor == "fixed" else list(rows)[1:]  # the training lists come first
        scored = trainer.score_reference(tables, lambda: display.at(next(done), {}))
    if trainer.args.anchor != "none":
        display.say(f"reference: {scored:,} lists scored" if scored else "reference: scores known from earlier")


def _trained(
    trainer: ListwiseTrainer,
    order: Ordered[AskedToPrefer],
    rows: Lists,
    checkpoint: Path | None,
    display: Display,
) -> Watch:
    stop, dev = Stop(trainer, display.say), rows.dev

    def look(model: Any) -> float:
        assert dev is not None
        return float(trainer.rank(dev, model).accuracy.mean())

    every = order.asked.run.eval_every
    watch = Watch(trainer, order.out, display, look if dev else None, every, lambda: stop.signal > 0)
    trainer.add_callback(stop)
    trainer.add_callback(watch)
    with outside_in_one_line(), stop.listening(), display.stage("training", _steps(trainer)):
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return watch


def _remembered(trainer: ListwiseTrainer, table: Any, path: Path) -> Ranking:
    """How the model orders the held-out lists before training, kept for a run that is resumed."""
    if path.exists():
        known = read_json(path, "delete it, and it is measured again")
        if known["data"] == table.fingerprint:
            return Ranking(*(torch.tensor(values) for values in known["ranking"]))
    found = trainer.rank(table, by="mean_logp")
    if trainer.accelerator.is_main_process:
        write_json(path, {"data": table.fingerprint, "ranking": [values.tolist() for values in found]})
    return found


def _figures(before: Ranking, after: Ranking) -> dict[str, Any]:
    """Of the same lists, so that the gain is paired."""
    return {
        name: {"before": _estimate(old), "after": _estimate(new), "gain": _estimate(new - old, difference)}
        for name, old, new in zip(Ranking._fields, before, after, strict=True)
    }


def _estimate(values: Any, interval: Callable[[list[float]], Estimate] = share) -> dict[str, float]:
    return interval(values.tolist())._asdict()


def _steps(trainer: ListwiseTrainer) -> int:
    args = trainer.args
    if args.max_steps > 0:
        return int(args.max_steps)
    batches = -(-len(trainer.train_dataset) // (args.per_device_train_batch_size * args.world_size))
    return int(args.num_train_epochs * -(-batches // args.gradient_accumulation_steps))


def _show(summary: dict[str, Any], folder: Path, display: Display) -> None:
    table = Table("held-out lists", "before", "after", "gain", caption=CAPTION)
    for name, title in NAMES.items():
        table.add_row(f"{title}, by log-ratio", "", percent(summary["log_ratio"][name]), "")
    for name, title in NAMES.items():
        found = summary["mean_logp"][name]
        cells = percent(found["before"]), percent(found["after"]), points(found["gain"])
        table.add_row(f"{title}, by log-probability", *cells)
    display.console.print(table)
    display.say(
        f"{summary['steps']} steps, {summary['seconds']:.0f} s. Checkpoint: {summary['checkpoint']}. "
        f"Metrics: {summary['metrics']}. Summary: {folder / 'summary.json'}"
    )
    if summary["nothing_learnt"]:
        raise NothingLearnedError(summary["nothing_learnt"])
