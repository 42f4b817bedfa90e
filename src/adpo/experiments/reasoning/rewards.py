"""Rewards of the trials, watched: what a rollout was like, the same for every method."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from adpo.core.ties import all_tied
from adpo.tasks.completions import answer_of, text_of
from adpo.tasks.generated_tasks import Outcome
from adpo.tasks.problems import final_answer
from adpo.tasks.reward_functions import Correct

KINDS = ("correct", "random", "format", "hackable", "noisy")
NOISE = 0.2
"""Share of verdicts that the noisy reward turns round."""
BONUS = 0.15
"""Of the hackable reward, for each character of a wrong answer, up to four."""


class Watched:
    """A reward of one kind; what is true is noted beside it, rollout by rollout."""

    __name__ = "watched"

    def __init__(self, kind: str, correct: Correct, members: int, seed: int) -> None:
        self.kind, self.correct, self.members = kind, correct, members
        self.draw = random.Random(seed)
        self.rollouts: list[dict[str, float]] = []
        self.tokens = 0  # of all completions: rollouts may be of several batches

    def __call__(
        self, completions: Sequence[Any], task: Sequence[str], answer: Sequence[str], **given: Any
    ) -> list[float | None]:
        outcomes = self.correct.outcomes(task, answer, completions)
        right = [float(outcome is Outcome.correct) for outcome in outcomes]
        rewards = self._rewards(completions, outcomes, right)
        lengths = [len(ids) for ids in given.get("completion_ids") or []]
        self.tokens += sum(lengths)
        self.rollouts.append(
            {
                "reward": _mean(rewards),
                "right": _mean(right),
                "length": _mean(lengths),
                **agreement([answer_of(each) for each in completions], right, rewards, self.members),
            }
        )
        return list(rewards)

    def state_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"draw": self.draw.getstate(), "rollouts": self.rollouts, "tokens": self.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, words, gauss = state["draw"]
        self.draw.setstate((version, tuple(words), gauss))
        self.rollouts, self.tokens = list(state["rollouts"]), state["tokens"]

    def _rewards(self, completions: Sequence[Any], outcomes: list[Outcome], right: list[float]) -> list[float]:
        if self.kind == "random":
            return [float(self.draw.random() < 0.5) for _ in right]
        if self.kind == "noisy":
            return [1 - mine if self.draw.random() < NOISE else mine for mine in right]
        if self.kind == "format":  # an answer that can be read, whatever it says
            return [
                float(outcome in (Outcome.correct, Outcome.wrong) and _marked(completion))
                for outcome, completion in zip(outcomes, completions, strict=True)
            ]
        if self.kind == "hackable":  # wrong answers are paid for their length
            lengths = [min(4, len(answer_of(completion))) for completion in completions]
            return [max(mine, BONUS * length) for mine, length in zip(right, lengths, strict=True)]
        return right


def _marked(completion: Any) -> bool:
    text = text_of(completion)
    return final_answer(text) is not None or " " not in text


def agreement(answers: list[str], right: list[float], rewards: list[float], members: int) -> dict[str, float]:
    """Of the groups: different answers, the share that agrees on a wrong one, the share with a gradient.

    >>> found = agreement(["1", "1", "2", "3"], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0], 2)
    >>> found["distinct"], found["agreed_wrong"], found["live"]
    (1.5, 0.5, 0.5)
    """
    starts = range(0, len(answers) // members * members, members)
    groups = [slice(start, start + members) for start in starts]
    same = [len(set(answers[group])) == 1 for group in groups]
    return {
        "distinct": _mean([float(len(set(answers[group]))) for group in groups]),
        "agreed_wrong": _mean(
            [float(alike and not right[group][0]) for alike, group in zip(same, groups, strict=True)]
        ),
        "live": _mean([float(not all_tied(rewards[group])) for group in groups]),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
