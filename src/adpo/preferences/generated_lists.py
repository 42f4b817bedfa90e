"""Lists of answers with graded rewards, generated: what `adpo prefer` trains on when it is given no data."""

from __future__ import annotations

import random
from typing import Any

from adpo.tasks.generated_tasks import Problem, Split, up_to

TASKS = ("arithmetic", "modulo", "sequence", "sums")  # those whose answer is a number


def graded(
    task: str = "arithmetic", count: int = 1000, *, level: int = 2, seed: int = 0, split: Split = "train"
) -> list[dict[str, Any]]:
    """Problems with three to six answers each: the right one, and others that are worth less the further off.

    >>> row = graded(count=1)[0]
    >>> sorted(row), max(row["rewards"]), len(row["completions"]) == len(row["rewards"])
    (['completions', 'prompt', 'rewards'], 1.0, True)
    """
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}; got {task!r}")
    draw = random.Random(f"{seed} {split}")
    return [_list(problem, draw) for problem in up_to(task, count, level=level, seed=seed, split=split)]


def _list(problem: Problem, draw: random.Random) -> dict[str, Any]:
    right = int(problem.answer)
    size = draw.randint(3, 6)
    answers = {right}
    while len(answers) < size:
        answers.add(right + draw.choice((-1, 1)) * draw.choice((1, 2, 3, 9, 10, 11, 20, 30)))
    shuffled = sorted(answers)
    draw.shuffle(shuffled)
    rewards = [1 / (1 + abs(answer - right)) for answer in shuffled]
    return {"prompt": problem.prompt, "completions": [str(answer) for answer in shuffled], "rewards": rewards}
