"""The work that is timed, and who does it: one base cell, one axis at a time around it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Work:
    """Groups of completions that one update is made of."""

    policy: str = "1.7B"
    groups: int = 8
    members: int = 8
    prompt: int = 128
    lengths: str = "mixed"  # log-normal, or long: nearly all at the limit
    longest: int = 1024
    dead: float = 0.0  # share of groups whose rewards are all equal

    @property
    def name(self) -> str:
        shape = f"{self.groups}x{self.members}-prompt{self.prompt}-{self.lengths}{self.longest}"
        return f"{self.policy}-{shape}-dead{round(100 * self.dead)}"

    @property
    def rows(self) -> int:
        return self.groups * self.members


@dataclass(frozen=True)
class Rollout:
    """Token ids and rewards, the same for every contender."""

    prompts: list[list[int]]  # one per group
    completions: list[list[int]]  # group by group
    rewards: list[float]

    @property
    def useful(self) -> int:
        """Tokens of all prompts and completions, without padding; a prompt counts for each completion."""
        members = len(self.completions) // len(self.prompts)
        return members * sum(map(len, self.prompts)) + sum(map(len, self.completions))


def rollout(work: Work, vocabulary: int, end: int, seed: int = 0) -> Rollout:
    """Random tokens; every completion closes with ``end``."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(2, vocabulary, (count,), generator=draw).tolist()

    lengths = completion_lengths(work, draw).tolist()
    rewards = torch.randn(work.groups, work.members, generator=draw)
    rewards[: round(work.dead * work.groups)] = 1.0
    return Rollout(
        [tokens(work.prompt) for _ in range(work.groups)],
        [[*tokens(length - 1), end] for length in lengths],
        rewards.view(-1).tolist(),
    )


def completion_lengths(work: Work, draw: torch.Generator) -> Tensor:
    """``long``: the last eighth up to the limit; ``mixed``: log-normal around 0.3 of it, as reasoning gives."""
    if work.lengths == "long":
        return torch.randint(round(0.88 * work.longest), work.longest + 1, (work.rows,), generator=draw)
    spread = torch.exp(0.6 * torch.randn(work.rows, generator=draw)) * 0.293 * work.longest
    return spread.clamp(max(2, work.longest // 32), work.longest).long()


@dataclass(frozen=True)
class Contender:
    """A trainer and its arguments."""

    name: str
    trainer: str  # trl, or ours
    method: str  # grpo, gspo, adpo
    micro_batch: int = 8
    arguments: tuple[tuple[str, Any], ...] = ()
    second_step: bool = False  # on the same rollout, where the policy has left its anchor
    needs: str | None = None  # a package, and a GPU
    tokens_as_trl: bool = False  # in a pass: as many as in TRL's micro-batch, without their padding

    def warm_up(self, preset: Preset) -> int:
        return preset.warm_up if self.trainer == "ours" else 1


PLAIN = (("gradient_checkpointing", False),)
TRL_DEFAULT = Contender("TRL GRPO, defaults", "trl", "grpo")
TRL_PLAIN = Contender("TRL GRPO, no checkpointing", "trl", "grpo", arguments=PLAIN)
TRL_LIGER = replace(
    TRL_PLAIN,
    name="TRL GRPO, no checkpointing, Liger layers",
    arguments=(*PLAIN, ("use_liger_kernel", True)),
    needs="liger_kernel",
)
TRL_GSPO = Contender("TRL GSPO, no checkpointing", "trl", "gspo", arguments=PLAIN)
PADDED_ADPO = Contender("adpo, padded rows", "ours", "adpo", arguments=(*PLAIN, ("scoring", "padded")))
GRPO = Contender("ours: GRPO", "ours", "grpo")
GSPO = Contender("ours: GSPO", "ours", "gspo")
ADPO = Contender("ours: ADPO", "ours", "adpo")
ADPO_SECOND = Contender("ours: ADPO, second step on a rollout", "ours", "adpo", second_step=True)
NOT_COMPILED = replace(ADPO, name="ours: ADPO, layers not compiled", arguments=(("compile_layers", False),))
NOT_SHARED = replace(ADPO, name="ours: ADPO, prompts not shared", arguments=(("share_prompts", False),))
FLEX = replace(ADPO, name="ours: ADPO, FlexAttention", arguments=(("attention", "flex"),), needs="triton")
FLASH = replace(
    ADPO, name="ours: ADPO, FlashAttention package", arguments=(("attention", "flash"),), needs="flash_attn"
)
SMALL_PASSES = replace(ADPO, name="ours: ADPO, as many tokens a pass as TRL", tokens_as_trl=True)
SPLIT = (("tokens_per_pass", 2048),)  # groups of the base cell do not fit
SPLIT_FIRST = replace(ADPO, name="ours: ADPO, groups split", arguments=SPLIT)
SPLIT_SECOND = replace(ADPO_SECOND, name="ours: ADPO, second step, groups split", arguments=SPLIT)

EVERYONE = (
    *(TRL_DEFAULT, TRL_PLAIN, TRL_LIGER, TRL_GSPO, PADDED_ADPO, GRPO, GSPO, ADPO, ADPO_SECOND),
    *(SMALL_PASSES, NOT_COMPILED, NOT_SHARED, FLEX, FLASH, SPLIT_FIRST, SPLIT_SECOND),
)
ON_AXES = (TRL_DEFAULT, GRPO, ADPO)
EXACT = {
    "grpo": Contender("TRL GRPO, float32", "trl", "grpo"),
    "gspo": Contender("TRL GSPO, float32", "trl", "gspo"),
    "adpo": Contender("adpo, padded rows, float32", "ours", "adpo", arguments=(("scoring", "padded"),)),
}
"""Whose gradients the others are held against: the same weights in float32, all padding, all logits."""


def contenders(work: Work, preset: Preset) -> tuple[Contender, ...]:
    """Everyone in the base cell; around it those who matter."""
    if work == preset.base:
        return EVERYONE
    return (*ON_AXES, TRL_PLAIN, SMALL_PASSES) if work.lengths == "long" else ON_AXES


@dataclass(frozen=True)
class Preset:
    """The base cell with everyone, and cells around it with those who matter there."""

    base: Work
    axes: tuple[Work, ...]
    updates: int  # that are timed
    warm_up: int  # of ours, which compile; others have one
    tolerance: float  # relative, between a gradient and that in float32
    whole_step: int  # completion tokens in the timing of sampling and update together
    most_tokens: int  # where the search for the largest pass ends


def around(base: Work, other_policy: str, long_prompt: int, many: tuple[int, int]) -> tuple[Work, ...]:
    return (
        replace(base, lengths="long"),
        replace(base, dead=0.5),
        replace(base, members=many[0]),
        replace(base, members=many[1], groups=1),
        replace(base, prompt=long_prompt),
        replace(base, policy=other_policy),
    )


TINY = Work(policy="tiny", groups=4, members=4, prompt=8, longest=32)
BASE = Work()
PRESETS = {
    "smoke": Preset(
        TINY,
        (replace(TINY, lengths="long"), replace(TINY, dead=0.5), replace(TINY, members=8)),
        updates=2,
        warm_up=1,
        tolerance=2e-3,
        whole_step=8,
        most_tokens=1024,
    ),
    "gpu": Preset(
        BASE,
        around(BASE, "0.13B", 1024, (16, 64)),
        updates=3,
        warm_up=2,
        tolerance=0.08,
        whole_step=256,
        most_tokens=73728,
    ),
}


def described(preset: Preset) -> dict[str, Any]:
    return {"base": asdict(preset.base), "axes": [asdict(work) for work in preset.axes], "updates": preset.updates}
