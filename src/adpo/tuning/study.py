"""The study: Optuna proposes, trials answer, and all of it is on disk as it happens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from adpo.system.files import read_json, write_json
from adpo.system.provenance import provenance
from adpo.tuning import trials
from adpo.tuning.spaces import Range
from adpo.tuning.trials import Outcome, Tried

JOURNAL, ORDER, RESULTS = "study.log", "study.json", "results.json"
LEAST_FOR_IMPORTANCE = 8
MOST_FAILURES = 3
"""In a row: then the job is at fault, not its settings."""


@dataclass(frozen=True)
class Order:
    """How much is tried, and where it is kept."""

    out: Path
    trials: int
    resume: bool = False
    say: Callable[[str], None] = lambda _: None


def tuned(job: Tried, space: dict[str, Range], order: Order) -> dict[str, Any]:
    """As many trials as are asked for, those of an earlier call included."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("optuna").setLevel(logging.WARNING)
    opened(job, space, order)
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(order.out / JOURNAL))),
        study_name="adpo",
        direction="maximize",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5),
    )
    _take_up(study)
    failures = 0
    while len(_answered(study)) < order.trials:
        # A sampler of its own for every trial: what it proposes depends on the seed and on what is known, not on
        # whether the study was interrupted; after a failure it is something else.
        number = len(_answered(study)) + sum("why" in trial.user_attrs for trial in study.trials if _failed(trial))
        study.sampler = optuna.samplers.TPESampler(seed=1000 * job.seed + number, multivariate=True)
        trial = study.ask()
        values = {name: bounds.suggested(trial, name) for name, bounds in space.items()}
        found = _tried(job, study, trial, values, order)
        failures = failures + 1 if found.score is None and not found.behind else 0
        if failures == MOST_FAILURES:
            raise ValueError(f"{MOST_FAILURES} trials in a row failed, the last with {found}")
        write_json(order.out / RESULTS, results(job, space, study))
    return results(job, space, study)


def opened(job: Tried, space: dict[str, Range], order: Order, more: Mapping[str, int] | None = None) -> None:
    """A folder of its own; one that is there is gone on with only by who asked for the same."""
    description = {**asked(job), **(more or {})}
    description["space"] = {name: list(bounds) for name, bounds in space.items()}
    known = order.out / ORDER
    if known.exists():
        if not order.resume:
            raise ValueError(f"there is a study in {order.out}: --resume goes on with it")
        if read_json(known) != description:
            raise ValueError(f"the study in {order.out} has other settings: choose another --out")
        return
    if order.out.exists() and (not order.out.is_dir() or any(order.out.iterdir())):
        raise ValueError(f"--out {order.out} is not an empty folder")
    middle = {name: (bounds.low * bounds.high) ** 0.5 for name, bounds in space.items()}
    job.checked(order.out / "checked", {name: value or space[name].low for name, value in middle.items()})
    order.out.mkdir(parents=True, exist_ok=True)
    write_json(known, description)


def _take_up(study: Any) -> None:
    """Trials that were interrupted come first, with the values and in the folder that they had."""
    for trial in study.trials:
        if trial.state == TrialState.RUNNING:
            study.tell(trial.number, state=TrialState.FAIL)
            study.enqueue_trial(trial.params, user_attrs={"folder": trial.user_attrs.get("folder", _named(trial))})


def _named(trial: Any) -> str:
    return f"trial-{trial.number:03d}"


def _folder(trial: Any, order: Order) -> Path:
    return order.out / str(trial.user_attrs.get("folder", _named(trial)))


def _answered(study: Any) -> list[Any]:
    return [trial for trial in study.trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]


def _failed(trial: Any) -> bool:
    return bool(trial.state == TrialState.FAIL)


def _tried(job: Tried, study: Any, trial: Any, values: dict[str, float], order: Order) -> Outcome:
    folder = _folder(trial, order)
    found = job.carried_out(folder, values, partial(_behind, study, trial))
    told = ", ".join(f"{name} {value:g}" for name, value in values.items())
    if found.score is None:
        trial.set_user_attr("why", found.why)
        study.tell(trial, state=TrialState.PRUNED if found.behind else TrialState.FAIL)
    else:
        study.tell(trial, found.score)
    best = [each for each in study.trials if each.state == TrialState.COMPLETE]
    leader = max(best, key=lambda each: each.value).number if best else -1
    trials.tidied(folder, kept=leader == trial.number)
    for other in best:
        if other.number != leader:
            trials.tidied(_folder(other, order), kept=False)
    order.say(f"{folder.name}: {told}: {found}")
    return found


def _behind(study: Any, trial: Any, step: int, score: float) -> bool:
    if step not in study.trials[trial.number].intermediate_values:
        trial.report(score, step)
    return bool(trial.should_prune())


def results(job: Tried, space: dict[str, Range], study: Any) -> dict[str, Any]:
    """Everything that was tried, and which settings follow from it."""
    lines = []
    for trial in study.trials:
        values = {name: float(f"{value:.3g}") for name, value in trial.params.items()}
        last = max(trial.intermediate_values.items(), default=(0, None))[1]
        score = trial.value if trial.state == TrialState.COMPLETE else last
        if trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
            lines.append({"values": values, "score": score, "state": trial.state.name.lower()})
    return {**described(job, space), "trials": lines, "importance": _importance(study)}


def described(job: Tried, space: dict[str, Range]) -> dict[str, Any]:
    """What results begin with."""
    bounds = {name: each._asdict() for name, each in space.items()}
    known = {"experiment": "tune", **asked(job), "measure": job.measure}
    return {**known, "space": bounds, "provenance": provenance()}


def asked(job: Tried) -> dict[str, Any]:
    """What is run, as it was typed."""
    return {"job": job.name, "words": list(job.words), "seed": job.seed}


def _importance(study: Any) -> dict[str, float]:
    """How much each setting matters for being among the best (PED-ANOVA); of few trials it would say nothing."""
    complete = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    if len(complete) < LEAST_FOR_IMPORTANCE or len({trial.value for trial in complete}) < 2:
        return {}
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    found: dict[str, float] = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {name: round(share, 3) for name, share in found.items()}
