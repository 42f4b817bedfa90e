"""Tables of the efficiency experiment: who took how long, what the goals say, the paper's figures beside ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from adpo.experiments.efficiency.protocol import (
    ADPO,
    ADPO_SECOND,
    EVERYONE,
    GRPO,
    GSPO,
    SMALL_PASSES,
    SPLIT_FIRST,
    SPLIT_SECOND,
    TRL_DEFAULT,
    TRL_GSPO,
    TRL_PLAIN,
    Contender,
    Preset,
    Work,
)
from adpo.experiments.rows import Row, grouped
from adpo.experiments.tables import Columns, Lines, table

NOMINAL_TFLOPS = 790
"""What utilisation is measured against, besides matrices of the same run."""
PAPER = {"ADPO": (19.7, 8), "GSPO": (71.0, 6), "GRPO": (68.5, 6)}
"""Seconds and micro-batch of the paper's actor update, 4 x RTX 4090."""


class Goal(NamedTuple):
    what: str
    found: float | None
    wanted: float
    at_least: bool = True

    @property
    def met(self) -> bool | None:
        if self.found is None:
            return None
        return self.found >= self.wanted if self.at_least else self.found <= self.wanted


def update_name(work: Work, contender: Contender) -> str:
    return f"update-{work.name}-{contender.name}"


def whole_name(contender: Contender) -> str:
    return f"whole-{contender.name}"


def rows_of(results: dict[str, Any], preset: Preset) -> list[dict[str, Any]]:
    """One line for each contender in each cell."""
    ceiling = results["limits"]["matmul_tflops"]
    rows = []
    for work in (preset.base, *preset.axes):
        for contender in EVERYONE:
            measured = _measured(results, work, contender)
            if measured is None:
                continue
            rate = measured["useful_tokens"] / measured["seconds"]
            tflops = 6 * measured["parameters"] * rate / 1e12
            rows.append(
                {
                    "cell": work.name,
                    "contender": contender.name,
                    "seconds": round(measured["seconds"], 4),
                    "tokens_per_second": round(rate),
                    "mfu": round(tflops / NOMINAL_TFLOPS, 4),
                    "of_matmul_ceiling": round(tflops / ceiling, 4),
                    "peak_gib": round(measured["peak_gib"], 2),
                    "gradient_off": measured["gradient_off"],
                    "form": measured["form"],
                }
            )
    return rows


def _measured(results: dict[str, Any], work: Work, contender: Contender) -> dict[str, Any] | None:
    found: dict[str, Any] | None = results["updates"].get(update_name(work, contender))
    return found


def goals(results: dict[str, Any], preset: Preset) -> list[dict[str, Any]]:
    """Each a ratio of one run; nothing where a cell is missing from the preset."""
    base, long, dead = preset.base, replace(preset.base, lengths="long"), replace(preset.base, dead=0.5)
    twice = replace(preset.base, members=2 * preset.base.members)

    def ratio(work: Work, slow: Contender, fast: Contender, what: str = "seconds") -> float | None:
        above, below = _measured(results, work, slow), _measured(results, work, fast)
        return above[what] / below[what] if above and below and below[what] else None

    def utilisation(work: Work) -> float | None:
        measured = _measured(results, work, ADPO)
        if measured is None:
            return None
        return float(
            6 * measured["parameters"] * measured["useful_tokens"] / measured["seconds"] / NOMINAL_TFLOPS / 1e12
        )

    def of_next_token(work: Work) -> float | None:
        measured = _measured(results, work, ADPO)
        plain = results["limits"][f"next_token_{work.lengths}"]["tokens_per_second"]
        return measured["useful_tokens"] / measured["seconds"] / plain if measured else None

    def memory(work: Work) -> float | None:
        return ratio(work, SMALL_PASSES, TRL_PLAIN, "peak_gib")

    def growth() -> float | None:
        one, two = _measured(results, base, ADPO), _measured(results, twice, ADPO)
        if not (one and two):
            return None
        return float(two["seconds"] / one["seconds"] / (two["useful_tokens"] / one["useful_tokens"]))

    def sampled() -> float | None:
        stock, ours = (results["whole_steps"].get(whole_name(one)) for one in (TRL_DEFAULT, ADPO))
        return float(stock["seconds"] / ours["seconds"]) if stock and ours else None

    found = [
        Goal("mixed lengths: update, times stock TRL GRPO (defaults)", ratio(base, TRL_DEFAULT, ADPO), 5.0),
        Goal("mixed lengths: the same, TRL without checkpointing", ratio(base, TRL_PLAIN, ADPO), 3.5),
        Goal("long: update, times stock TRL GRPO (defaults)", ratio(long, TRL_DEFAULT, ADPO), 2.2),
        Goal("long: the same, TRL without checkpointing", ratio(long, TRL_PLAIN, ADPO), 1.7),
        Goal("half the groups dead: update, times stock TRL GRPO (defaults)", ratio(dead, TRL_DEFAULT, ADPO), 8.0),
        Goal("our GRPO, times stock TRL GRPO without checkpointing", ratio(base, TRL_PLAIN, GRPO), 3.5),
        Goal("our GSPO, times stock TRL GSPO without checkpointing", ratio(base, TRL_GSPO, GSPO), 3.5),
        Goal("mixed lengths: utilisation of the GPU", utilisation(base), 0.6),
        Goal("long: utilisation of the GPU", utilisation(long), 0.6),
        Goal("mixed lengths: share of the token rate of next-token training", of_next_token(base), 0.9),
        Goal("long: share of the token rate of next-token training", of_next_token(long), 0.9),
        Goal("mixed lengths: memory, as many tokens a pass as TRL, times TRL's", memory(base), 0.5, False),
        Goal("long: memory, as many tokens a pass as TRL, times TRL's", memory(long), 0.75, False),
        Goal("ADPO at its anchor, times our GRPO", ratio(base, ADPO, GRPO), 1.02, False),
        Goal("ADPO away from it, groups whole, times our GRPO", ratio(base, ADPO_SECOND, GRPO), 1.02, False),
        Goal(
            "the same, groups split: with scoring passes, times without",
            ratio(base, SPLIT_SECOND, SPLIT_FIRST),
            1.4,
            False,
        ),
        Goal("sampling and update together, times stock TRL (defaults)", sampled(), 2.0),
        Goal("twice the completions: time by tokens, at most", growth(), 1.05, False),
        Goal("twice the completions: time by tokens, at least", growth(), 0.95),
    ]
    told = results["preset"] == "gpu"  # elsewhere they are figures, not verdicts
    return [{**goal._asdict(), "met": goal.met if told else None} for goal in found]


COLUMNS: Columns = (
    ("contender", "{contender}"),
    ("update s", "{seconds:.3f}"),
    ("tokens/s", "{tokens_per_second:,}"),
    ("MFU", "{mfu:.1%}"),
    ("of matmul", "{of_matmul_ceiling:.1%}"),
    ("peak GiB", "{peak_gib:.1f}"),
    ("gradient off", "{gradient_off:.2%}"),
)


def tables(results: dict[str, Any]) -> list[Lines]:
    cells = [table(cell, COLUMNS, rows) for cell, rows in grouped(results["rows"], "cell").items()]
    return [*cells, _goals(results), _paper(results)]


def _goals(results: dict[str, Any]) -> Lines:
    columns: Columns = [
        ("goal", "{what}"),
        ("found", lambda goal: "-" if goal["found"] is None else f"{goal['found']:.2f}"),
        ("wanted", lambda goal: f"{'≥' if goal['at_least'] else '≤'} {goal['wanted']:g}"),
        ("", _verdict),
    ]
    return table("goals", columns, results["goals"])


def _verdict(goal: Row) -> str:
    unknown = "not measured yet" if goal["found"] is None else "for one H200"
    return {True: "met", False: "missed", None: unknown}[goal["met"]]


def _paper(results: dict[str, Any]) -> Lines:
    """The paper's actor update, and ours in the base cell: seconds of its GRPO over each."""
    base = next(iter(grouped(results["rows"], "cell").values()))
    ours = {row["contender"]: row["seconds"] for row in base}
    stock = ours.get(TRL_DEFAULT.name)
    lines = []
    for method, name in {"GRPO": TRL_DEFAULT.name, "GSPO": GSPO.name, "ADPO": ADPO.name}.items():
        seconds, micro_batch = PAPER[method]
        here = ours.get(name)
        lines.append(
            (
                method,
                f"{seconds:.1f} (micro-batch {micro_batch})",
                f"{PAPER['GRPO'][0] / seconds:.2f}",
                "-" if here is None else f"{here:.3f} ({name})",
                "-" if here is None or stock is None else f"{stock / here:.2f}",
            )
        )
    columns = ("method", "paper: seconds", "times its GRPO", "here: seconds", "times stock GRPO")
    return Lines("the paper's table", columns, lines)


def remarks(results: dict[str, Any]) -> list[str]:
    """What stands beside the tables."""
    limits, loss = results["limits"], results["loss_alone"]
    lines = [
        f"Device: {limits['device']}; matrices give {limits['matmul_tflops']:.1f} TFLOP/s.",
        f"The loss alone: {loss['by_token_ms']:.2f} ms by token, {loss['by_completion_ms']:.2f} ms by completion.",
    ]
    for name, entry in results["repeatability"].items():
        lines.append(
            f"Log-probabilities of completions, {name}: {entry['mean']:.2g} nats off those of a training pass on "
            f"average, {entry['most']:.2g} at most."
        )
    for name, entry in results["largest_passes"].items():
        lines.append(f"Largest pass, {name.removeprefix('fits-')}: {entry['tokens']:,} tokens.")
    for name, entry in results["whole_steps"].items():
        lines.append(
            f"Whole step, {name.removeprefix('whole-')}: {entry['seconds']:.2f} s, of which the update "
            f"{entry['of_which_update']:.2f} s (the first one {entry['first_seconds']:.1f} s)."
        )
    lines += [f"Left out: {line}." for line in results["left_out"]]
    lines += [f"Refused: {line}." for line in results["refused"].values()]
    return lines + [f"Not measured yet: {name}." for name in results["not_yet"]]
