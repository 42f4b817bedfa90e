"""Problems as the parquet files that verl reads; this module needs no verl."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from adpo.tasks.generated_tasks import Problem

SCORED_AS = "DigitalLearningGmbH/MATH-lighteval"
"""The name by which verl finds its own scorer: the last boxed answer, compared as text."""
INSTRUCTION = r"Reason step by step, and put your final answer within \boxed{}."


def write(
    problems: Sequence[Problem], path: Path, instruction: str = INSTRUCTION, scored_as: str = SCORED_AS
) -> None:
    """A row for each problem, in a file that is there whole or not at all."""
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    rows = [
        {
            "data_source": scored_as,
            "prompt": [{"role": "user", "content": f"{problem.question}\n{instruction}".strip()}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"index": number, "level": problem.level},
        }
        for number, problem in enumerate(problems)
    ]
    part = path.with_name(path.name + ".part")
    try:
        parquet.write_table(pyarrow.Table.from_pylist(rows), part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
