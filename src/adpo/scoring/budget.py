"""How many tokens go through the model at once: asked for, or found from the memory that is free.

budget = TokenBudget("auto", device)
budget.begin(tokens)             # forward and backward pass of so many tokens ...
budget.end()                     # ... went well: what it took is remembered
budget.settle()                  # before the next step: what fits, by what the passes took
budget.halve()                   # memory ran out in the pass that was begun
"""

from __future__ import annotations

import logging
from typing import Literal

import torch

log = logging.getLogger("adpo")

FIRST = 8192
"""Tokens of a pass before anything is known of the model."""
MOST = 32768
"""Free memory or not, a pass is not made larger."""
USED = 0.85
"""Share of the free memory that is planned with."""


class TokenBudget:
    """``tokens`` of a pass; "auto" begins with `FIRST` and is settled once, after the first step."""

    def __init__(self, asked: int | Literal["auto"], device: torch.device) -> None:
        self.device = device
        self.tokens = FIRST if asked == "auto" else asked
        self.settled = asked != "auto" or device.type != "cuda"
        self.bytes_per_token = 0.0
        self.largest = 0  # pass that went well
        self.running = 0  # tokens of the pass at hand
        self._before = 0

    def begin(self, tokens: int) -> None:
        self.running = tokens
        if not self.settled:
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)

    def end(self) -> None:
        if not self.settled:
            self.learn(self.running, torch.cuda.max_memory_allocated(self.device) - self._before)
        self.largest, self.running = max(self.largest, self.running), 0

    def learn(self, tokens: int, took: int) -> None:
        """A pass of so many tokens took so many bytes at its height."""
        if tokens and tokens >= self.largest:
            self.bytes_per_token = took / tokens

    def settle(self, free: int | None = None) -> bool:
        """What fits from now on, once a pass has been measured; whether it was settled just now."""
        if self.settled or not self.bytes_per_token:
            return False
        available = _free(self.device) if free is None else free
        self.tokens = min(MOST, max(1, int(USED * available / self.bytes_per_token)))
        self.settled = True
        log.info(
            "tokens a pass: %d (%.2f MiB a token, %.1f GiB free)",
            self.tokens,
            self.bytes_per_token / 2**20,
            available / 2**30,
        )
        return True

    def halve(self) -> None:
        """The pass at hand did not fit."""
        tokens = self.running or self.tokens
        self.tokens, self.running, self.settled = max(1, min(self.tokens, tokens) // 2), 0, True
        log.warning("out of memory with %d tokens in a pass: going on with %d", tokens, self.tokens)

    def start_again(self) -> None:
        """Passes take less than they did: measure anew."""
        self.tokens, self.settled = FIRST, self.device.type != "cuda"
        self.bytes_per_token, self.largest, self.running = 0.0, 0, 0


def _free(device: torch.device) -> int:
    """What the allocator could still hand out."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
