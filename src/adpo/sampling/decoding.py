"""Sampling over a cache of fixed size, a token at a time, by a step that is recorded once and replayed.

A token takes hundreds of small kernels, and starting them takes longer than they run. On a GPU the step is
recorded as a graph: in a second, without a compiler. Elsewhere it is taken as it is. When few rows are left that
have not ended, they go on among themselves. What is sampled has the distribution that `generate` of transformers
samples from: softmax of the logits over the temperature.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import adpo.scoring.packed.attention  # noqa: F401  (it teaches sdpa the word one_query)

log = logging.getLogger("adpo")
PADDED_TO = 64
"""Prompts have a multiple of so many tokens, that the cache may have few sizes."""
LOOKS = 16
"""Steps between looks which rows have ended: a look waits for the device."""
FEWER, FEWEST = 4, 16
"""When one row of so many is left, the rest is dropped; but not where so few rows would be left."""


def ends_of(model: Any, tokenizer: Any) -> list[int]:
    """The tokens after which nothing more is said."""
    known = model.generation_config.eos_token_id
    known = tokenizer.eos_token_id if known is None else known
    return [known] if isinstance(known, int) else list(known)


def padded(prompts: Sequence[Sequence[int]], pad: int, multiple: int = PADDED_TO) -> tuple[Tensor, Tensor]:
    """Tokens and mask, padded on the left to a multiple, that there may be few sizes."""
    width = -(-max(map(len, prompts)) // multiple) * multiple
    ids = torch.tensor([[pad] * (width - len(each)) + list(each) for each in prompts])
    lengths = torch.tensor([len(each) for each in prompts])
    return ids, (torch.arange(width) >= width - lengths[:, None]).long()


def up_to_end(tokens: Sequence[int], ends: Collection[int]) -> list[int]:
    """The end included.

    >>> up_to_end([5, 6, 1, 0, 0], [1]), up_to_end([5, 6], [1])
    ([5, 6, 1], [5, 6])
    """
    at = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[: at + 1])


class FixedCache:
    """Keys and values of every layer, at addresses that stay; what a pass adds goes to ``slots``."""

    def __init__(self, length: int, device: torch.device) -> None:
        self.length = length
        self.slots = torch.zeros(1, dtype=torch.long, device=device)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """As transformers calls it."""
        if layer_idx not in self.layers:
            self.layers[layer_idx] = self._empty(keys), self._empty(values)
        for kept, new in zip(self.layers[layer_idx], (keys, values), strict=True):
            kept.index_copy_(2, self.slots, new.to(kept.dtype))
        return self.layers[layer_idx]

    def take(self, other: FixedCache, rows: Tensor) -> None:
        """Some rows of another cache of the same length."""
        for number, theirs in other.layers.items():
            if number not in self.layers:
                self.layers[number] = self._empty(theirs[0][rows]), self._empty(theirs[1][rows])
            for mine, their in zip(self.layers[number], theirs, strict=True):
                torch.index_select(their, 0, rows, out=mine)

    def get_seq_length(self, *_: Any) -> int:
        """Positions and masks are given: nobody has to count."""
        return 0

    def _empty(self, like: Tensor) -> Tensor:
        rows, heads, _, width = like.shape
        return torch.zeros(rows, heads, self.length, width, dtype=like.dtype, device=like.device)


class Decoder:
    """At most ``completion`` tokens for each of ``rows`` prompts of ``prompt`` tokens, padded on the left."""

    def __init__(
        self,
        model: Any,
        rows: int,
        prompt: int,
        completion: int,
        temperature: float,
        ends: Sequence[int],
        pad: int,
    ) -> None:
        """With a temperature of 0 the most likely token is taken. The model's weights may change in place."""
        self.model, self.rows, self.prompt, self.completion = model, rows, prompt, completion
        self.temperature, self.pad = temperature, pad
        device = next(model.parameters()).device
        self.ends = torch.tensor(list(ends), dtype=torch.long, device=device)
        self.cache = FixedCache(prompt + completion, device)
        self.seen = torch.zeros(rows, 1, 1, prompt + completion, dtype=torch.bool, device=device)
        self.token = torch.full((rows, 1), pad, dtype=torch.long, device=device)
        self.position = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.slot = torch.zeros(1, dtype=torch.long, device=device)
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self.said = torch.full((rows, completion), pad, dtype=torch.long, device=device)
        self.recorded = device.type == "cuda"
        self.graph: Any = None
        self.fewer: Decoder | None = None  # for the rows that are left when most have ended

    @torch.no_grad()
    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """``[rows, tokens]``: what was said, up to the longest; padding behind an end."""
        if ids.shape != (self.rows, self.prompt):
            raise ValueError(f"a decoder for {self.rows} prompts of {self.prompt} tokens; got {tuple(ids.shape)}")
        training = self.model.training
        self.model.eval()
        try:
            if self.graph is None and self.recorded:
                self._try_to_record(partial(self._read, ids, mask))
            self._read(ids, mask)
            return self.said[:, : self._go_on(1)].clone()
        finally:
            self.model.train(training)

    def _go_on(self, taken: int) -> int:
        """Until every row has ended; how many tokens the longest has."""
        while taken < self.completion:
            if taken % LOOKS == 0:
                going_on = self.rows - int(self.ended.sum())
                if going_on == 0:
                    return taken
                if going_on <= self.rows // FEWER and self.rows // FEWER >= FEWEST:
                    return self._among_fewer(taken)
            self._replay()
            taken += 1
        return taken

    def _among_fewer(self, taken: int) -> int:
        """The rows that go on, in a decoder of their own; some that have ended make up the number."""
        if self.fewer is None:
            self.fewer = Decoder(
                self.model,
                self.rows // FEWER,
                self.prompt,
                self.completion,
                self.temperature,
                self.ends.tolist(),
                self.pad,
            )
            self.fewer.recorded = self.recorded
        kept = self.ended.to(torch.uint8).argsort(stable=True)[: self.fewer.rows]
        take = partial(self.fewer._take, self, kept)
        if self.fewer.graph is None and self.fewer.recorded:
            self.fewer._try_to_record(take)
        take()
        taken = self.fewer._go_on(taken)
        self.said[kept] = self.fewer.said
        return taken

    def _take(self, other: Decoder, kept: Tensor) -> None:
        """These rows of another decoder, as far as they have come."""
        for name in ("seen", "token", "position", "ended", "said"):
            getattr(self, name).copy_(getattr(other, name)[kept])
        self.slot.copy_(other.slot)
        self.cache.take(other.cache, kept)

    def _read(self, ids: Tensor, mask: Tensor) -> None:
        """The prompts, and the first token of each completion."""
        device = self.token.device
        mask = mask.to(device).bool()
        self.seen.zero_()
        self.seen[:, 0, 0, : self.prompt] = mask
        self.ended.zero_()
        self.said.fill_(self.pad)
        self.slot.fill_(self.prompt)
        steps = torch.arange(self.prompt, device=device)
        self.cache.slots = steps
        # What pads attends to itself: nothing at all would be no number, and spread.
        before = (steps[:, None] >= steps) & mask[:, None, None, :] | torch.eye(
            self.prompt, dtype=torch.bool, device=device
        )
        before = torch.nn.functional.pad(before, (0, self.completion))
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        logits = self._logits(ids.to(device), positions, before)
        self.position.copy_(positions[:, -1:] + 1)
        self._say(logits, self.slot - self.prompt)

    def _step(self) -> None:
        """One token of every row, all of it on the device."""
        self.seen.index_fill_(3, self.slot, True)
        self.cache.slots = self.slot
        logits = self._logits(self.token, self.position, self.seen)
        self.slot.add_(1)
        self.position.add_(1)
        self._say(logits, self.slot - self.prompt)

    def _logits(self, ids: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        eager = self.model.config.get_text_config()._attn_implementation == "eager"
        more = {"one_query": True} if ids.shape[1] == 1 and not eager else {}
        if eager or more:  # added to scores, and made once for all layers
            dtype = next(self.model.parameters()).dtype
            seen = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
        found: Tensor = self.model(
            input_ids=ids,
            attention_mask=seen,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
            **more,
        ).logits
        return found[:, -1].float()

    def _say(self, logits: Tensor, place: Tensor) -> None:
        if self.temperature > 0:  # the largest of logits with Gumbel noise is a sample of their softmax
            noise = torch.empty_like(logits).exponential_().log()
            logits = logits / self.temperature - noise
        token = logits.argmax(1).masked_fill(self.ended, self.pad)
        self.said.index_copy_(1, place, token[:, None])
        self.ended |= (token[:, None] == self.ends).any(1)
        self.token.copy_(token[:, None])

    def _replay(self) -> None:
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()

    def _try_to_record(self, begin: Callable[[], None]) -> None:
        try:
            self._record(begin)
        except RuntimeError as error:  # a model that asks the device for numbers while it computes
            self.recorded = False
            log.warning("steps are not recorded: %s", " ".join(str(error).split())[:200])

    def _record(self, begin: Callable[[], None]) -> None:
        """Steps before, on a stream of their own, settle what kernels prepare when they are first used."""
        begin()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(min(2, self.completion - 1)):
                self._step()
        torch.cuda.current_stream().wait_stream(aside)
        if self.completion > 1:
            begin()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step()
            self.graph = graph
