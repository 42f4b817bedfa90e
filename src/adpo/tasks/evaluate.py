"""How good a model is: its answers to problems, accuracy, mean reward, pass@k, and intervals for them.

Shares (accuracy, pass@k, pairs in order) have an interval inside [0, 1]; a reward has no bounds, and neither has
its interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import torch

from adpo.sampling.decoding import Decoder, ends_of, padded
from adpo.sampling.decoding_checks import why_not_decoded
from adpo.scoring.padding import off_by_padding


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float = 0.0
    samples: int = 1
    batch: int = 256
    seed: int = 0
    recorded: bool = False  # by the steps of `adpo.sampling.decoding`, where the model can be sampled so


class Estimate(NamedTuple):
    """A mean over problems with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.value:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True)
class Scored:
    """Answers and what each is worth (1 for a right one), a list for every problem."""

    texts: list[list[str]]
    scores: list[list[float]]

    @property
    def means(self) -> list[float]:
        return [sum(row) / len(row) for row in self.scores]

    @property
    def right_or_wrong(self) -> bool:
        """Whether every score is 0 or 1, so that their mean is a share of right answers."""
        return all(score in (0.0, 1.0) for row in self.scores for score in row)

    def accuracy(self) -> Estimate:
        """Share of right answers, mean over problems; scores must be 0 or 1."""
        if not self.right_or_wrong:
            raise ValueError("accuracy needs scores of 0 and 1; a graded reward has a mean")
        return share(self.means)

    def mean_reward(self) -> Estimate:
        """Mean over problems, in the reward's own unit."""
        return normal(self.means)

    def pass_at(self, k: int) -> Estimate:
        """Probability that at least one of k answers is right, without bias from the n that were drawn."""
        if not self.right_or_wrong:
            raise ValueError("pass@k needs scores of 0 and 1; a graded reward has a mean")
        values = []
        for row in self.scores:
            n, c = len(row), sum(score >= 1 for score in row)
            if not 1 <= k <= n:
                raise ValueError(f"pass@{k} needs at least {k} answers a problem; there are {n}")
            values.append(1 - math.comb(n - c, k) / math.comb(n, k))
        return share(values)


_Z = NormalDist().inv_cdf(0.975)


def wilson(right: float, total: float) -> Estimate:
    """Wilson's interval for a share of independent trials.

    >>> print(wilson(8, 10))
    80.0 % [49.0, 94.3]
    """
    if total < 1:
        raise ValueError("an accuracy needs at least one problem")
    p, z2 = right / total, _Z**2
    middle = (p + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z / (1 + z2 / total) * math.sqrt(p * (1 - p) / total + z2 / (4 * total**2))
    return Estimate(p, min(p, max(0.0, middle - half)), max(p, min(1.0, middle + half)))


def share(values: Sequence[float]) -> Estimate:
    """The mean of values in [0, 1], with an interval inside [0, 1].

    Wilson's interval for as many right-or-wrong trials as would know the mean as well: n p (1 - p) / variance of
    them. Of values that are 0 or 1 that is n. Where all values are equal nothing is known of their spread, and n
    is taken.

    >>> print(share([1.0, 1.0, 0.75, 1.0]))
    93.8 % [74.7, 98.7]
    """
    if not values:
        raise ValueError("an accuracy needs at least one problem")
    if not all(-1e-9 <= value <= 1 + 1e-9 for value in values):
        raise ValueError(f"a share lies between 0 and 1; got values from {min(values):g} to {max(values):g}")
    n = len(values)
    p = min(1.0, max(0.0, sum(values) / n))
    variance = sum((value - p) ** 2 for value in values) / n
    trials = n * max(1.0, p * (1 - p) / variance) if variance > 1e-12 else n
    return wilson(p * trials, trials)._replace(value=p)


def normal(values: Sequence[float]) -> Estimate:
    """The mean of values without bounds, such as rewards, with a normal interval.

    >>> normal([0.5, -1.0, 2.0, 0.5]).high.__round__(3)
    1.7
    """
    if not values:
        raise ValueError("a mean needs at least one problem")
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1))
    half = _Z * spread / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def difference(values: Sequence[float]) -> Estimate:
    """The mean of differences of shares, each in [-1, 1]: a normal interval, cut where no difference can be.

    Cutting leaves out no value that the difference could have, so the interval covers it as often as before.
    """
    found = normal(values)
    return found._replace(low=max(-1.0, found.low), high=min(1.0, found.high))


def gain(before: Scored, after: Scored) -> Estimate:
    """How much better on the same problems: paired, so that what is hard for both cancels."""
    differences = [b - a for a, b in zip(before.means, after.means, strict=True)]
    return (difference if before.right_or_wrong and after.right_or_wrong else normal)(differences)


def answers(
    model: Any, tokenizer: Any, prompts: Sequence[Any], sampling: Sampling, chat: Mapping[str, Any] | None = None
) -> list[list[str]]:
    """Let the model answer every prompt ``samples`` times; the global random state is left as it was.

    Prompts are text, or messages, to which the chat template is applied with the arguments ``chat``.
    """
    n = sampling.samples
    with torch.random.fork_rng():
        torch.manual_seed(sampling.seed)
        flat = _generated(model, tokenizer, [prompt for prompt in prompts for _ in range(n)], sampling, chat or {})
    return [flat[i : i + n] for i in range(0, len(flat), n)]


@torch.no_grad()
def _generated(
    model: Any, tokenizer: Any, prompts: Sequence[Any], sampling: Sampling, chat: Mapping[str, Any]
) -> list[str]:
    if sampling.recorded and why_not_decoded(model) is None:
        return _by_steps(model, tokenizer, prompts, sampling, chat)
    training, texts = model.training, []
    model.eval()
    options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if sampling.temperature > 0:
        options = {"do_sample": True, "temperature": sampling.temperature, "top_p": 1.0, "top_k": 0}
    try:
        # A state that runs through padding on the left would change the answers: one prompt at a time has none.
        size = 1 if off_by_padding(model, positions=True) else sampling.batch
        for start in range(0, len(prompts), size):
            inputs = _tokens(tokenizer, prompts[start : start + size], chat).to(model.device)
            out = model.generate(
                **inputs,
                **options,
                max_new_tokens=sampling.max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
            )
            texts += tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    finally:
        model.train(training)
    return texts


def _by_steps(
    model: Any, tokenizer: Any, prompts: Sequence[Any], sampling: Sampling, chat: Mapping[str, Any]
) -> list[str]:
    """The last batch is filled with prompts that were there before."""
    rows, texts = min(sampling.batch, len(prompts)), []
    inputs = _tokens(tokenizer, prompts, chat)
    known = [
        ids[mask.bool()].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    ids, mask = padded(known, tokenizer.pad_token_id)
    ends = ends_of(model, tokenizer)
    decoder = Decoder(
        model, rows, ids.shape[1], sampling.max_new_tokens, sampling.temperature, ends, tokenizer.pad_token_id
    )
    for start in range(0, len(prompts), rows):
        chosen = torch.arange(start, start + rows) % len(prompts)
        said = decoder(ids[chosen], mask[chosen])[: len(prompts) - start]
        texts += tokenizer.batch_decode(said, skip_special_tokens=True)
    del decoder  # its cache is large, and a process may share the device with others
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return texts


def _tokens(tokenizer: Any, prompts: Sequence[Any], chat: Mapping[str, Any]) -> Any:
    """A batch padded on the left; prompts are text, or messages of a chat."""
    options = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
    if isinstance(prompts[0], str):
        return tokenizer(list(prompts), return_token_type_ids=False, **options)
    return tokenizer.apply_chat_template(
        list(prompts), add_generation_prompt=True, return_dict=True, tokenize=True, **options, **chat
    )
