"""The protocol: every number of the experiment, and the presets.

A prompt comes with a list of responses and a graded label of each. Every method starts from the same model, sees
the same training prompts, and takes the same number of optimizer steps over the same number of tokens (prompt and
response, forward and backward): a method that trains on two responses of a list passes over the prompts more often
than one that trains on all of them. Strength and learning rate of each method are chosen on validation prompts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Protocol:
    """Sizes, steps and rates; shared by all methods."""

    test: int = 160  # prompts
    validation: int = 80  # prompts; all others are trained on
    response_tokens: int = 384  # longer responses are cut there, and then have no end token
    tokens: int = 61 * 32_768  # of a reported run, prompt and response, without padding
    sweep_share: float = 0.4  # of these tokens in a run of the sweep
    tokens_per_step: int = 32_768  # of an optimizer step, on average
    strengths: int = 3  # of each method's grid that are tried, from its middle
    learning_rates: tuple[float, ...] = (2e-5, 1e-4)  # AdamW; tried with every strength
    warm_up: float = 0.1  # share of the steps with a rising learning rate; then it falls linearly to zero
    weight_decay: float = 0.0
    clip: float = 1.0  # norm of the gradient
    micro_batch: int = 49_152  # padded tokens in a pass with gradient
    exam_batch: int = 65_536  # padded tokens in a pass without


@dataclass(frozen=True)
class Preset:
    """How much of the experiment is run."""

    protocol: Protocol
    seeds: int
    methods: tuple[str, ...]


ALL_METHODS = (
    "adpo-ranking",
    "adpo-boltzmann",
    "adpo-top1",
    "dpo-pair",
    "dpo-all",
    "ipo-pair",
    "ipo-all",
    "simpo-pair",
    "simpo-all",
    "kto",
)
REPORTED = tuple(name for name in ALL_METHODS if name not in ("ipo-pair", "simpo-pair"))

PRESETS = {
    "smoke": Preset(
        Protocol(
            test=12,
            validation=8,
            response_tokens=24,
            tokens=8_000,
            tokens_per_step=400,
            strengths=2,
            learning_rates=(1e-2,),
            micro_batch=1_000,
            exam_batch=4_000,
        ),
        seeds=2,
        methods=ALL_METHODS,
    ),
    "gpu": Preset(Protocol(), seeds=3, methods=REPORTED),
}

SWEEP_SEED = 0
FIRST_SEED = 100
"""Reported seeds begin here. A seed decides the order of the prompts, and which of tied responses form a pair."""
