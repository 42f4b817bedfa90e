"""What `adpo train` and `adpo eval` do with their arguments."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from rich.table import Table

from adpo.system.errors import NothingLearnedError
from adpo.system.files import check_place, write_text
from adpo.trainers.trl import TrainingStoppedError
from adpo.scoring.context import longest_row
from adpo.tasks.evaluate import Estimate, Scored, gain
from adpo.tasks.reward_functions import Correct
from adpo.runs import splits as data
from adpo.runs.settings import memory
from adpo.runs import train as run
from adpo.runs.display import ACCURACY, Display, make_console, shown, shown_gain, summary_tables
from adpo.runs.evaluation import Exam, estimate, measure_of
from adpo.runs.folder import (
    Ordered,
    as_it_was,
    command_of,
    has_begun,
    how_to_go_on,
    known_settings,
    noted_settings,
    other_settings,
    without_failed_starts,
)
from adpo.runs.interrupt import StoppedError
from adpo.runs.settings.keys import parse_pairs, read_yaml
from adpo.runs.by_name import load_model, lora_config, meant_as_folder, own_reward, processes, quiet
from adpo.runs.settings.train_settings import Asked, RunSettings, resolve


def train(
    config: Path | None,
    words: Sequence[str],
    method: str | None,
    out: Path | None,
    seed: int | None,
    resume: bool,
    dry_run: bool,
    started: float,
) -> None:
    """Settings, then a dry run or a real one."""
    if resume and out is None:
        raise ValueError("--resume needs the --out of the run to go on with")
    known = known_settings(out, "train") if resume and out else {}
    of_run = known.pop("seed", 0)
    seed = of_run if seed is None else seed
    given = {**(read_yaml(config) if config else {}), **parse_pairs(words)}
    asked = resolve(given, method) if not (out and known) else _resumed(out, known, given, method)
    main = processes(asked.trainer.get("use_cpu")).is_main_process
    display = Display(make_console(quiet=not main))
    (folder,) = broadcast_object_list([out or Path("runs") / time.strftime("train-%Y%m%d-%H%M%S")])
    if dry_run:
        _dry_run(Ordered(asked, folder, seed), display)
        return
    try:
        with without_failed_starts(folder, main):
            summary = run.train(Ordered(asked, folder, seed, resume, started), display)
    except TrainingStoppedError as error:
        raise ValueError(f"training stopped: {error}") from error
    except (KeyboardInterrupt, StoppedError) as stop:
        display.say(how_to_go_on("train", folder, str(stop)))
        raise
    if not main:
        return
    for table in summary_tables(summary):
        display.console.print(table)
    display.say(
        f"{summary['steps']} steps, {summary['seconds']:.0f} s. Checkpoint: {summary['checkpoint']}. "
        f"Metrics: {summary['metrics']}. Summary: {folder / 'summary.json'}"
    )
    if summary["nothing_learnt"]:
        raise NothingLearnedError(summary["nothing_learnt"])


def _resumed(out: Path, known: dict[str, Any], given: dict[str, Any], method: str | None) -> Asked:
    """The settings of the run in a folder: what is given besides must be what they are."""
    theirs, wanted = resolve(known), method or given.get("method")
    if wanted not in (None, theirs.run.method):  # its arguments would be another trainer's
        if has_begun(out):
            raise other_settings(out, "method", theirs.run.method, wanted)
        return resolve(given, method)
    return as_it_was(out, resolve({**known, **given}, method), theirs, run.defaults(theirs, out))


def _dry_run(order: Ordered[Asked], display: Display) -> None:
    quiet()
    asked = order.asked
    given = run.arguments(asked, order.out, order.seed)
    # On a machine without the accelerator the run is meant for, its number formats are taken on trust.
    checked = (
        given if torch.accelerator.is_available() else {**given, "bf16": False, "tf32": None, "use_cpu": True}
    )
    run.trainer_config(asked.run.method, checked)
    if asked.run.reward is not None:
        own_reward(asked.run.reward)
    data.check_files(asked.run)
    table = Table("setting", "value", title=f"{asked.run.method}: a dry run")
    described = {**asked.described(), **given}
    for name in sorted(described):
        if described[name] is not None:
            table.add_row(name, str(described[name]))
    display.console.print(table)
    if asked.run.embedded:
        display.say("model: embedded, some 600,000 parameters; runs in a few hundred MB of memory")
        return
    found = memory.estimate(memory.model_config(asked.run.model), given, lora_config(asked.run))
    parts = ("weights", "gradients", "optimizer", "copies", "activations", "generation")
    shares = ", ".join(f"{part} {getattr(found, part):.1f}" for part in parts)
    display.say(
        f"{found.parameters / 1e9:.2f} billion parameters, {found.trainable / 1e9:.3f} of them trained. On one "
        f"device about {found.total:.1f} GiB: {shares} (the last two take turns)."
    )


def evaluate(
    checkpoint: Path,
    before: str | None,
    words: Sequence[str],
    samples: int,
    temperature: float,
    max_new_tokens: int | None,
    out: Path | None,
    seed: int | None,
) -> None:
    """Accuracy and pass@k, or the mean of a graded reward; with another model, the paired difference."""
    quiet()
    if out is not None:
        check_place(out)
    pairs = parse_pairs(words)
    known = _of_run(checkpoint, pairs)
    of_run = known.pop("seed", 0)
    seed = of_run if seed is None else seed
    if "data" in pairs or "model" not in known:  # problems in words, for a model that is not the embedded one
        known["model"] = str(checkpoint)
    asked = resolve({**known, **pairs, "eval_every": 0})
    display, chat = Display(make_console()), asked.trainer.get("chat_template_kwargs") or {}
    longest = max_new_tokens or asked.trainer.get("max_completion_length", 256)
    with Correct(seconds=asked.run.verifier_seconds) as correct:
        reward = own_reward(asked.run.reward) if asked.run.reward else correct
        found: dict[str, tuple[Scored, Scored]] = {}
        for name, folder in (("before", before), ("after", str(checkpoint))):
            if folder is not None:
                model, tokenizer = load_model(_folder(folder))
                context = longest_row(model.config)
                test = data.prepare(asked.run, tokenizer, seed).test
                rows = data.that_fit(test, tokenizer, context, min(longest, (context or longest) // 2), chat)
                exam = Exam(
                    rows, tokenizer, reward, longest, chat, samples, temperature, asked.run.eval_batch, seed
                )
                found[name] = exam.taken(model)
    measure = measure_of(*(scored for taken in found.values() for scored in taken))
    figures = _figures(found, samples, measure)
    table = Table(f"{len(rows)} test problems", *found, *(["gain"] if before else []))
    for name, parts in figures.items():
        cells = ((shown_gain if part == "gain" else shown)(e._asdict(), measure) for part, e in parts.items())
        table.add_row(name, *cells)
    display.console.print(table)
    if out is not None:
        content = {
            "checkpoint": str(checkpoint),
            "seed": seed,
            "measure": measure,
            "figures": {name: {k: e._asdict() for k, e in parts.items()} for name, parts in figures.items()},
            "answers": {name: {"greedy": g.texts, "sampled": s.texts} for name, (g, s) in found.items()},
        }
        write_text(out, json.dumps(content, indent=1) + "\n")
        display.say(f"Figures and answers: {out}")


def _figures(
    found: dict[str, tuple[Scored, Scored]], samples: int, measure: str
) -> dict[str, dict[str, Estimate]]:
    rows: dict[str, dict[str, Estimate]] = {
        f"{measure}, most likely answer": {name: estimate(greedy, measure) for name, (greedy, _) in found.items()},
        f"{measure}, sampled answers": {name: estimate(sampled, measure) for name, (_, sampled) in found.items()},
    }
    for k in (k for k in (2, 4, 8, 16, 32, 64) if k <= samples and measure == ACCURACY):
        rows[f"pass@{k}"] = {name: sampled.pass_at(k) for name, (_, sampled) in found.items()}
    if "before" in found:
        for place, name in enumerate(list(rows)[:2]):
            rows[name]["gain"] = gain(found["before"][place], found["after"][place])
    return rows


def _folder(name: str) -> str:
    """A checkpoint, the folder of a run that holds one, or a name like owner/model to look up."""
    path = Path(name)
    for place in (path, path / "best", path / "model"):
        if any((place / file).exists() for file in ("config.json", "adapter_config.json")):
            return str(place)
    if path.exists():
        raise ValueError(f"{path} holds no model: expected config.json or adapter_config.json in it")
    if name.count("/") != 1 or meant_as_folder(name):
        raise ValueError(f"there is no folder {path}, and it is no name like owner/model")
    return name


def _of_run(checkpoint: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The data of the run that made the checkpoint, where it is known."""
    known = noted_settings(checkpoint) or noted_settings(checkpoint.parent)
    names = {*RunSettings.__dataclass_fields__, "chat_template_kwargs", "max_completion_length", "seed"}
    if known.get("reward") and "reward" not in given:  # a folder may come from anyone: its code is not run
        raise ValueError(
            f"{checkpoint} was trained on a reward function of its own, {known['reward']}: to run it, give it "
            "again with --reward"
        )
    if command_of(known) == "prefer":
        if not {"data", "task"} & set(given):
            raise ValueError(f"{checkpoint} was trained on lists: say with --data or --task what to measure it on")
        names -= {"data", "eval_data", "data_config", "data_split", "eval_split", "eval_every"}
    return {name: value for name, value in known.items() if name in names and value is not None}
