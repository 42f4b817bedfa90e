"""Every number of the experiment, by the size of what is trained."""

from __future__ import annotations

from dataclasses import replace

from adpo.experiments.reasoning.methods import METHODS
from adpo.experiments.reasoning.protocol import Files, Preset
from adpo.experiments.reasoning.variants import OF_SUMS, OF_WORDS, VARIANTS

MATH = Files(
    "math/train.jsonl",
    (("math", "math/test.jsonl", 1000),),
    levels=(3, 4),
    named="DigitalLearningGmbH/MATH-lighteval",
)
WORDS = Files("mawps/test.jsonl", (("svamp", "svamp/test.jsonl", 1000), ("gsm8k", "gsm8k/test.jsonl", 320)))
"""MAWPS is for training alone, whatever its file is called."""
EMBEDDED = Preset(
    start="embedded",
    methods=tuple(METHODS),
    rates=(1e-5, 3e-5, 1e-4, 3e-4),
    seeds=5,
    groups=32,
    members=8,
    longest=5,
    rollouts=60,
    short=30,
    watched=200,
    examined=500,
    sampled=250,
    tuned=True,
    inners=(1, 4, 8),
    wider=(3.0, 10.0, 30.0, 100.0),
    controls=("random", "format"),
    variants=VARIANTS,
    variant_seeds=5,
    repeats=5,
)
PRESETS = {
    "smoke": Preset(
        start="embedded",
        methods=("ADPO", "GRPO"),
        rates=(3e-4,),
        seeds=2,
        groups=8,
        members=4,
        longest=5,
        rollouts=2,
        short=1,
        watched=16,
        examined=32,
        sampled=16,
        exam_samples=4,
        watch_every=1,
    ),
    "embedded": EMBEDDED,
    "sums": replace(  # the headline once more, where no mirror image of a held-out sum is trained on
        EMBEDDED,
        task="sums",
        seeds=10,
        examined=1000,
        inners=(),
        wider=(),
        controls=(),
        variants=OF_SUMS,
    ),
    "gpu": Preset(
        start="smollm2",
        methods=("ADPO", "GRPO", "GSPO", "ADPO Plackett-Luce"),
        rates=(1e-6, 3e-6, 1e-5, 3e-5),
        seeds=5,
        groups=32,
        members=8,
        longest=64,
        rollouts=80,
        short=20,
        watched=256,
        examined=1000,
        sampled=128,
        exam_batch=256,
        exam_longest=128,
        files=WORDS,
        warmed=0.25,
        inners=(8, 1),
        wider=(3.0, 10.0),
        controls=("random",),
        variants=OF_WORDS,
        mean_tau=0.015,  # the best of the sums, over some twenty tokens of a completion
        alone=("Boltzmann, no anchor", "Plackett-Luce, no anchor", "Dr. GRPO"),
        repeats=3,
    ),
    "paper": Preset(
        start="Qwen/Qwen3-1.7B",
        methods=("ADPO Plackett-Luce", "ADPO", "GRPO", "GSPO"),
        rates=(1.5e-6, 5e-6, 1.5e-5, 5e-5),
        seeds=5,
        groups=16,
        members=8,
        longest=1024,
        rollouts=200,
        short=40,
        watched=256,
        examined=1000,
        sampled=250,
        exam_batch=128,
        compiled=True,
        kept_every=20,
        files=MATH,
        chat=(("enable_thinking", False),),
        warmed=0.0,
    ),
}
