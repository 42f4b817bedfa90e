"""A training run as a section: finished, or going on (or stopped, which no file says)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adpo.experiments.tables import Lines
from adpo.report.parts import Chart, Group, Member, Section, Series
from adpo.system.files import read_json, read_lines

METRICS, SETTINGS, SUMMARY, SAMPLES = "metrics.jsonl", "settings.json", "summary.json", "samples.jsonl"
ORIGIN = "origin.json"
CHARTS = {
    "reward": ("reward", "rewards/correct/mean"),
    "accuracy on the validation set": ("validation/accuracy",),
    "mean reward on the validation set": ("validation/reward",),
    "share of pairs in order": ("adpo/accuracy", "eval_adpo/accuracy"),
    "temperature tau": ("adpo/tau",),
    "KL to the anchor, nats": ("adpo/anchor_kl", "adpo/start_kl"),
    "tokens a completion": ("completions/mean_length", "completions/max_length"),
    "groups with a gradient": ("adpo/live",),
    "entropy, nats": ("entropy", "adpo/policy_entropy", "adpo/target_entropy"),
    "loss": ("loss", "adpo/loss_of_groups"),
    "gradient norm": ("grad_norm",),
}
"""Charts of a run, and the metrics that they may show."""
FACTS = (
    "command",
    "commit",
    "adpo",
    "torch",
    "python",
    "machine",
    "seed",
    "method",
    "model",
    "scoring",
    "sampling",
)
MOST_GROUPS = 12


def recognised(folder: Path) -> bool:
    return (folder / SETTINGS).is_file()


def section(folder: Path) -> Section:
    """From what the run has written so far."""
    settings: dict[str, Any] = read_json(folder / SETTINGS)
    summary: dict[str, Any] = read_json(folder / SUMMARY) if (folder / SUMMARY).is_file() else {}
    logs = read_lines(folder / METRICS)
    origin: dict[str, Any] = read_json(folder / ORIGIN) if (folder / ORIGIN).is_file() else {}
    known = {**settings, **origin, **summary}
    made = Section(f"{folder.name}: {known.get('method', 'training')}", "finished" if summary else "going on")
    made.facts = {name: str(known[name]) for name in FACTS if known.get(name) is not None}
    made.figures = _figures(summary, logs)
    for title, names in CHARTS.items():
        lines = [_series(name, logs) for name in names]
        if any(line.x for line in lines):
            made.charts.append(Chart(title, "step", title, [line for line in lines if line.x]))
    made.groups = _groups(read_lines(folder / SAMPLES))
    if summary.get("samples"):
        columns = ("problem", "before", "after", "answer")
        rows = [[str(each.get(name, "")) for name in columns] for each in summary["samples"]]
        made.tables.append(Lines("test problems, most likely answers", columns, rows))
    if not logs:
        made.notes.append("nothing has been logged yet")
    return made


def _series(name: str, logs: list[dict[str, Any]]) -> Series:
    points = [(row["step"], row[name]) for row in logs if "step" in row and isinstance(row.get(name), int | float)]
    return Series(name, [step for step, _ in points], [float(value) for _, value in points])


def _figures(summary: dict[str, Any], logs: list[dict[str, Any]]) -> dict[str, str]:
    found = {}
    measure = summary.get("measure", "accuracy")
    form = ".1%" if measure == "accuracy" else ".4g"
    first = "reward" if "reward_before" in summary else "accuracy"
    for name, title in ((first, "most likely answers"), ("sampled", "sampled answers")):
        before, after, gain = (summary.get(f"{name}_{when}") for when in ("before", "after", "gain"))
        if before and after and gain:
            found[f"{measure}, {title}, before"] = format(before["value"], form)
            found[f"{measure}, {title}, after"] = format(after["value"], form)
            value, low, high = (format(gain[part], f"+{form}") for part in ("value", "low", "high"))
            found[f"{measure}, {title}, gain"] = f"{value} [{low}, {high}]"
    steps = summary.get("steps") or max((row.get("step", 0) for row in logs), default=0)
    return {**found, "steps": str(steps)}


def _groups(lines: list[dict[str, Any]]) -> list[Group]:
    """The latest."""
    return [
        Group(
            int(line["step"]),
            str(line["prompt"]),
            [Member(str(each["text"]), float(each["reward"]), float(each["c"])) for each in line["members"]],
        )
        for line in lines[-MOST_GROUPS:]
    ]
