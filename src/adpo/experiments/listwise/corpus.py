"""Lists as tokens: one flat row of sequences, and a table that says which sequences belong to which prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adpo.experiments.listwise.data import Listing


class Tokens(NamedTuple):
    """Prompt and response, one after the other; the first ``prompt`` ids are the prompt's."""

    ids: list[int]
    prompt: int


@dataclass(frozen=True)
class Corpus:
    """All responses of all prompts."""

    sequences: list[Tokens]
    rows: Tensor  # [prompts, K]: which sequences; -1 where a list is shorter
    labels: Tensor  # [sequences], float64

    def lengths(self) -> Tensor:
        """Tokens of each sequence, prompt and response."""
        return torch.tensor([len(sequence.ids) for sequence in self.sequences])

    def response_lengths(self) -> Tensor:
        return torch.tensor([len(sequence.ids) - sequence.prompt for sequence in self.sequences])


def encode(listings: Sequence[Listing], tokenizer: Any, response_tokens: int) -> Corpus:
    """Prompts in the tokenizer's chat template, if it has one; responses cut at so many tokens, or ended."""
    width = max(len(listing.responses) for listing in listings)
    rows = torch.full((len(listings), width), -1)
    sequences: list[Tokens] = []
    for i, listing in enumerate(listings):
        prompt = tokenizer.encode(_prompt(tokenizer, listing.instruction), add_special_tokens=False)
        for k, text in enumerate(listing.responses):
            ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
            rows[i, k] = len(sequences)
            sequences.append(Tokens(prompt + ids[:response_tokens], len(prompt)))
    labels = torch.tensor([label for listing in listings for label in listing.labels], dtype=torch.float64)
    return Corpus(sequences, rows, labels)


def _prompt(tokenizer: Any, instruction: str) -> str:
    if not tokenizer.chat_template:
        return f"{instruction}\n"
    message = {"role": "user", "content": instruction}
    text: str = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    return text


def plan(
    corpus: Corpus, prompts: Sequence[int], pair: bool, tokens: int, per_step: int, seed: int
) -> list[Tensor]:
    """The steps of a run: for each the sequences it trains on, ``[groups, K]``, -1 = none.

    Prompts come in a new random order in every pass over them, whole lists or a best and a worst response of each,
    until ``tokens`` are reached. A list belongs to the step into which its first token falls, so that the number
    of steps does not depend on the method.
    """
    lengths = corpus.lengths()
    steps: list[list[Tensor]] = []
    reached, step = 0, -1
    for row in _endless(corpus, prompts, pair, seed):
        if reached >= tokens:
            return [torch.stack(groups) for groups in steps]
        if reached // per_step > step:
            step = reached // per_step
            steps.append([])
        steps[-1].append(row)
        reached += int(lengths[row[row >= 0]].sum())
    raise AssertionError("the prompts come without end")


def _endless(corpus: Corpus, prompts: Sequence[int], pair: bool, seed: int) -> Iterator[Tensor]:
    order, choice = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    while True:
        for i in torch.randperm(len(prompts), generator=order).tolist():
            row = corpus.rows[prompts[i]]
            yield best_and_worst(corpus.labels, row, choice) if pair else row


def best_and_worst(labels: Tensor, row: Tensor, generator: torch.Generator) -> Tensor:
    """``[2]``: a response with the highest label of the list and one with the lowest; tied ones are drawn from."""
    row = row[row >= 0]
    of_row = labels[row]

    def drawn(label: Tensor) -> Tensor:
        tied = row[of_row == label]
        return tied[torch.randint(len(tied), (), generator=generator)]

    return torch.stack([drawn(of_row.max()), drawn(of_row.min())])
