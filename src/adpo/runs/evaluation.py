"""Problems that a model answers: the test set before and after training, the validation set on the way."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from adpo.system.files import read_json, write_json
from adpo.trainers.sharding import is_sharded, then_sharded
from adpo.tasks.completions import text_of
from adpo.tasks.evaluate import Estimate, Sampling, Scored, answers, gain
from adpo.runs.splits import Row
from adpo.runs.display import ACCURACY

log = logging.getLogger("adpo")
Rewards = list[float | None]
Reward = Callable[..., Rewards]
"""As in TRL: ``reward(prompts=..., completions=..., **columns)``."""

SAMPLES = 4
"""Answers drawn per problem for the accuracy of sampled answers."""

Taken = tuple[Scored, Scored]
"""The most likely answers, and the sampled ones."""

REWARD = "mean reward"
"""What scores are called that are not shares of right answers."""


@dataclass(frozen=True)
class Exam:
    """Problems a model answers: the most likely answer, and some sampled ones."""

    rows: Sequence[Row]
    tokenizer: Any
    reward: Reward
    max_new_tokens: int
    chat: Mapping[str, Any] = field(default_factory=dict)  # arguments of the chat template
    samples: int = SAMPLES
    temperature: float = 1.0
    batch: int = 64
    seed: int = 0
    recorded: bool = False  # sampled by recorded steps

    def taken(self, model: Any) -> Taken:
        return self.greedy(model), self.sampled(model)

    def mean(self, model: Any) -> float:
        """Mean score of the most likely answers."""
        return self.greedy(model).mean_reward().value

    def greedy(self, model: Any) -> Scored:
        return self._scored(model, Sampling(self.max_new_tokens, batch=self.batch, recorded=self.recorded))

    def sampled(self, model: Any) -> Scored:
        given = (self.max_new_tokens, self.temperature, self.samples, self.batch, self.seed, self.recorded)
        return self._scored(model, Sampling(*given))

    def remembered(self, model: Any, path: Path) -> Taken:
        """As `taken`, kept on disk for a run that is resumed."""
        (known,) = broadcast_object_list([path.exists()])
        if known:
            greedy, sampled = read_json(path, "delete it, and it is measured again")
            return Scored(**greedy), Scored(**sampled)
        with _drawing_aside():
            found = self.taken(model)
        if PartialState().is_main_process:
            write_json(path, [{"texts": s.texts, "scores": s.scores} for s in found])
        return found

    def _scored(self, model: Any, sampling: Sampling) -> Scored:
        """Every process answers its share of the problems; what one complains about, all do."""
        state, cause = PartialState(), None
        places = range(state.process_index, len(self.rows), state.num_processes)
        asked, mine = list(places), []
        if is_sharded(model):  # as many answers in every process; what is answered twice is left out
            asked += [0] * (math.ceil(len(self.rows) / state.num_processes) - len(asked))
        try:
            with then_sharded(model):
                mine = self._share(model, [self.rows[place] for place in asked], sampling) if asked else []
        except ValueError as error:
            cause = error
        told = gather_object([(None if cause is None else str(cause), list(zip(places, mine, strict=False)))])
        for complaint, _ in told:
            if complaint is not None:
                raise ValueError(complaint) from cause
        ordered = sorted(((place, *found) for _, part in told for place, found in part), key=lambda each: each[0])
        return Scored([texts for _, texts, _ in ordered], _numbers([scores for _, _, scores in ordered]))

    def _share(self, model: Any, rows: Sequence[Row], sampling: Sampling) -> list[tuple[list[str], Rewards]]:
        texts = answers(model, self.tokenizer, [row["prompt"] for row in rows], sampling, self.chat)
        flat = [(row, text) for row, given in zip(rows, texts, strict=True) for text in given]
        columns = {name: [row.get(name) for row, _ in flat] for name in rows[0] if name != "prompt"}
        prompts = [row["prompt"] for row, _ in flat]
        completions = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, (_, text) in zip(prompts, flat, strict=True)
        ]
        scores = self._rewarded(prompts, completions, columns)
        n = sampling.samples
        return [(given, scores[i * n : (i + 1) * n]) for i, given in enumerate(texts)]

    def _rewarded(self, prompts: list[Any], completions: list[Any], columns: dict[str, list[Any]]) -> Rewards:
        """What the reward function says, called as TRL calls it; None of what has no finite reward."""
        name = getattr(self.reward, "__name__", type(self.reward).__name__)
        ids = [self.tokenizer(text_of(completion))["input_ids"] for completion in completions]
        extra = {"completion_ids": ids, "trainer_state": None, "log_extra": _unheard, "log_metric": _unheard}
        try:
            found = self.reward(prompts=prompts, completions=completions, **{**extra, **columns})
            rewards = list(asyncio.run(found) if inspect.isawaitable(found) else found)  # type: ignore[arg-type]
            numbers = [None if value is None else float(value) for value in rewards]
        except (Exception, SystemExit) as error:
            line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ValueError(
                f"reward function {name} failed on test or validation problems with {line}"
            ) from error
        if len(numbers) != len(completions):
            raise ValueError(
                f"reward function {name} gave {len(numbers)} rewards for {len(completions)} completions"
            )
        return [None if number is None or not math.isfinite(number) else number for number in numbers]


def _numbers(rewards: Sequence[Rewards]) -> list[list[float]]:
    """What has no finite reward is no better than any other answer: the least of 0 and what the others got."""
    known = [reward for some in rewards for reward in some if reward is not None]
    count, least = sum(map(len, rewards)), min([0.0, *known])
    if len(known) < count:
        log.warning("%d of %d answers have no finite reward: they count as %g", count - len(known), count, least)
    return [[least if reward is None else reward for reward in some] for some in rewards]


@contextmanager
def _drawing_aside() -> Iterator[None]:
    """Random numbers go on as if nothing had been drawn: a resumed run, which knows the answers, draws nothing."""
    drawn, of_numpy, device = random.getstate(), np.random.get_state(), PartialState().device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # not those of other processes
        yield
    random.setstate(drawn)
    np.random.set_state(of_numpy)


def _unheard(*_: Any, **__: Any) -> None:
    """Nobody logs during an exam."""


def measure_of(*scored: Scored) -> str:
    """What to call the scores: accuracy, where every one of them is 0 or 1."""
    return ACCURACY if all(each.right_or_wrong for each in scored) else REWARD


def estimate(scored: Scored, measure: str) -> Estimate:
    return scored.accuracy() if measure == ACCURACY else scored.mean_reward()


def figures(before: Taken, after: Taken, own_reward: bool) -> dict[str, Any]:
    """Before, after and gain, as ``accuracy_...``, of a reward of one's own as ``reward_...``; and of the samples.

    ``measure`` says how they read: a reward of one's own that gave nothing but 0 and 1 is an accuracy, too.
    """
    measure = measure_of(*before, *after)
    found: dict[str, Any] = {"measure": measure}
    for name, old, new in zip(("reward" if own_reward else "accuracy", "sampled"), before, after, strict=True):
        found[f"{name}_before"] = estimate(old, measure)._asdict()
        found[f"{name}_after"] = estimate(new, measure)._asdict()
        found[f"{name}_gain"] = gain(old, new)._asdict()
    return found


def samples(rows: Sequence[Row], before: Taken, after: Taken) -> list[Any]:
    return [
        {
            "problem": rows[i].get("question", rows[i]["prompt"]),
            "before": before[0].texts[i][0],
            "after": after[0].texts[i][0],
            "answer": rows[i].get("answer", ""),
        }
        for i in range(min(5, len(rows)))
    ]
