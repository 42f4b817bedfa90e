"""How good a model is: answers to held-out problems, accuracy, pass@k, and intervals for them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, NamedTuple

import torch

from adpo.lm.tasks import Outcome, Problem, check

Judge = Callable[[Sequence[Problem], Sequence[str]], list[Outcome]]
"""What each text, an answer to the problem at its place, comes to."""


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float = 0.0
    samples: int = 1
    batch: int = 256
    seed: int = 0


class Share(NamedTuple):
    """A mean over problems with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True)
class Answers:
    """What a model gave for each problem, and what became of it."""

    texts: list[list[str]]
    outcomes: list[list[Outcome]]
    counts: Counter[Outcome] = field(default_factory=Counter)

    @property
    def right(self) -> list[float]:
        """Share of right answers, problem by problem."""
        return [sum(o is Outcome.correct for o in row) / len(row) for row in self.outcomes]

    def accuracy(self) -> Share:
        """Mean over problems: Wilson's interval for one answer each, else by the spread over problems."""
        right = self.right
        if all(len(row) == 1 for row in self.outcomes):
            return wilson(sum(right), len(right))
        return mean_share(right)

    def pass_at(self, k: int) -> Share:
        """Probability that at least one of k answers is right, without bias from the n that were drawn."""
        values = []
        for row in self.outcomes:
            n, c = len(row), sum(o is Outcome.correct for o in row)
            if k > n:
                raise ValueError(f"pass@{k} needs at least {k} answers a problem; there are {n}")
            values.append(1 - math.comb(n - c, k) / math.comb(n, k))
        return mean_share(values)


_Z = NormalDist().inv_cdf(0.975)


def wilson(right: float, total: int) -> Share:
    """Wilson's interval for a share of independent trials.

    >>> print(wilson(8, 10))
    80.0 % [49.0, 94.3]
    """
    if total < 1:
        raise ValueError("an accuracy needs at least one problem")
    p, z2 = right / total, _Z**2
    middle = (p + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z / (1 + z2 / total) * math.sqrt(p * (1 - p) / total + z2 / (4 * total**2))
    return Share(p, max(0.0, middle - half), min(1.0, middle + half))


def mean_share(values: Sequence[float]) -> Share:
    """The mean of values in [0, 1] with a normal interval."""
    low, mean, high = _normal(values)
    return Share(mean, max(0.0, low), min(1.0, high))


def difference(before: Answers, after: Answers) -> Share:
    """How much better on the same problems: paired, so that hard problems cancel."""
    changes = [b - a for a, b in zip(before.right, after.right, strict=True)]
    low, mean, high = _normal(changes)
    return Share(mean, low, high)


def _normal(values: Sequence[float]) -> tuple[float, float, float]:
    if not values:
        raise ValueError("an accuracy needs at least one problem")
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1))
    half = _Z * spread / math.sqrt(len(values))
    return mean - half, mean, mean + half


def by_task(rows: Sequence[Problem], texts: Sequence[str]) -> list[Outcome]:
    """Judge bare answers to generated problems."""
    return [check(problem.task, problem.answer, text) for problem, text in zip(rows, texts, strict=True)]


def share_right(model: Any, tokenizer: Any, rows: Sequence[Problem], sampling: Sampling) -> float:
    """Mean accuracy alone."""
    return answer(model, tokenizer, rows, sampling).accuracy().value


def answer(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Problem],
    sampling: Sampling,
    judge: Judge = by_task,
    prompts: Sequence[Any] | None = None,
) -> Answers:
    """Let the model answer every problem ``samples`` times; the global random state is left as it was."""
    asked = list(prompts) if prompts is not None else [problem.prompt for problem in rows]
    with torch.random.fork_rng():
        torch.manual_seed(sampling.seed)
        flat = _generated(model, tokenizer, [p for p in asked for _ in range(sampling.samples)], sampling)
    outcomes = judge([row for row in rows for _ in range(sampling.samples)], flat)
    n = sampling.samples
    return Answers(
        [flat[i : i + n] for i in range(0, len(flat), n)],
        [outcomes[i : i + n] for i in range(0, len(outcomes), n)],
        Counter(outcomes),
    )


@torch.no_grad()
def _generated(model: Any, tokenizer: Any, prompts: Sequence[Any], sampling: Sampling) -> list[str]:
    training, texts = model.training, []
    model.eval()
    try:
        for start in range(0, len(prompts), sampling.batch):
            inputs = _tokens(tokenizer, prompts[start : start + sampling.batch]).to(model.device)
            options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
            if sampling.temperature > 0:
                options = {"do_sample": True, "temperature": sampling.temperature, "top_p": 1.0, "top_k": 0}
            out = model.generate(
                **inputs,
                **options,
                max_new_tokens=sampling.max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
            )
            answers = out[:, inputs["input_ids"].shape[1] :]
            texts += tokenizer.batch_decode(answers, skip_special_tokens=True)
    finally:
        model.train(training)
    return texts


def _tokens(tokenizer: Any, prompts: Sequence[Any]) -> Any:
    """A batch padded on the left; prompts are text, or messages of a chat."""
    options = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
    if isinstance(prompts[0], str):
        return tokenizer(list(prompts), return_token_type_ids=False, **options)
    return tokenizer.apply_chat_template(
        list(prompts), add_generation_prompt=True, return_dict=True, tokenize=True, **options
    )
