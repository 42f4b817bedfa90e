"""What a trial of `adpo reproduce reasoning --preset paper` takes, before anyone has its weights.

A model of the shape of Qwen3-1.7B, its weights random. It hardly ever ends a completion, so that they are as long
as may be: this is the most that a rollout takes, in time and in memory.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from rich.console import Console

from adpo.experiments.reasoning.presets import PRESETS
from adpo.experiments.reasoning.problems import INSTRUCTION, Sets
from adpo.experiments.reasoning.protocol import Preset, Trial
from adpo.experiments.reasoning.starts import Start
from adpo.experiments.reasoning.trial import carried_out
from adpo.runs.by_name import quiet
from adpo.runs.settings.memory import KNOWN
from adpo.runs.splits import row_of
from adpo.tasks.generated_tasks import Problem

QWEN3 = {name: value for name, value in KNOWN[PRESETS["paper"].start].items() if name != "model_type"}
SMALL = QWEN3 | {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
METHOD = "ADPO Plackett-Luce"  # the paper's
ROLLOUTS = 2
"""The first compiles."""
CHAT = "{% for each in messages %}{{ each['role'] + ': ' + each['content'] + '\n' }}{% endfor %}assistant: "
WORDS = ("apples", "boxes", "coins", "days", "eggs", "friends", "games", "hours")


def run(quick: bool) -> None:
    """Some rollouts and a batch of each exam; and what all of a trial would take at their pace."""
    quiet()
    console = Console(width=110)
    whole, shape = PRESETS["paper"], SMALL if quick else QWEN3
    preset = _cut(replace(whole, groups=2, members=2, longest=8, exam_batch=4) if quick else whole)
    on_gpu = torch.cuda.is_available()
    console.print(
        f"{METHOD}, {_parameters(shape)} parameters, {preset.groups} x {preset.members} completions of "
        f"{preset.longest} tokens, {preset.inner} optimizer steps on them; torch {torch.__version__}, "
        f"{torch.cuda.get_device_name() if on_gpu else 'CPU'}"
    )
    ends: list[float] = []

    def ended(_: float) -> None:
        ends.append(time.perf_counter())
        what = "the first rollout, compilation included" if len(ends) == 2 else "a rollout"
        console.print(f"{what}: {ends[-1] - ends[-2]:.1f} s")

    with tempfile.TemporaryDirectory() as folder:
        start = _random_start(shape, folder)
        sets = _sets(preset, start.tokenizer())
        wanted = Trial("seeds", METHOD, preset.rates[0], 1, ROLLOUTS, preset.inner, reward="random")
        ends.append(time.perf_counter())
        found = carried_out(wanted, preset, start, sets, ended)
    rollout = ends[-1] - ends[-2]
    exam = (time.perf_counter() - ends[-1]) / 3  # watched problems, the most likely answers, sampled ones
    console.print(f"a batch of an exam, {preset.exam_batch} answers: {exam:.1f} s")
    console.print(f"scored {found['scoring']}, {found['tokens_per_step']:,.0f} tokens a step")
    if on_gpu:
        console.print(f"memory at most: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    if not quick:
        console.print(f"a reported trial of the preset: {_hours(whole, rollout, exam):.1f} h at most")


def _hours(preset: Preset, rollout: float, exam: float) -> float:
    """Of a reported trial: its rollouts, its looks at watched problems, and its exams."""
    batch = preset.exam_batch
    looks = -(-preset.rollouts // preset.watch_every) * -(-preset.watched // batch)
    exams = -(-preset.examined // batch) + -(-preset.sampled * preset.exam_samples // batch)
    return (preset.rollouts * rollout + (looks + exams) * exam) / 3600


def _cut(preset: Preset) -> Preset:
    """A batch of every exam."""
    batch = preset.exam_batch
    return replace(
        preset,
        watched=batch,
        examined=batch,
        sampled=-(-batch // preset.exam_samples),
        watch_every=ROLLOUTS,
    )


def _random_start(shape: dict[str, Any], folder: str) -> Start:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _tokenizer()
    end = tokenizer.eos_token_id
    config = Qwen3Config(**shape, eos_token_id=end, pad_token_id=end)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Start(folder)


def _tokenizer() -> Any:
    """Of bytes; what the model says beyond them is nothing."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytes_alone = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_alone, eos_token="<eos>", pad_token="<eos>", chat_template=CHAT
    )


def _sets(preset: Preset, tokenizer: Any) -> Sets:
    """Problems of about a hundred bytes, instruction apart."""
    numbers = range(2, 40)
    asked = [
        f"There are {a} {word} on the table and {b} more are brought in. How many {word} are there in all?"
        for a, word, b in product(numbers, WORDS, numbers)
    ]
    rows = [row_of(Problem("math", 3, question, question, "7"), tokenizer, INSTRUCTION) for question in asked]
    first, second = preset.watched, preset.watched + preset.examined
    return Sets(rows[second:], rows[:first], {preset.exams[0]: rows[first:second]})


def _parameters(shape: dict[str, Any]) -> str:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.device("meta"):
        count = sum(each.numel() for each in Qwen3ForCausalLM(Qwen3Config(**shape)).parameters())
    return f"{count / 1e9:.2f} billion" if count > 1e8 else f"{count:,}"
