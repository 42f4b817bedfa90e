"""The model that `adpo train` uses when it is given none: a small causal language model of characters.

It is made on the spot, a Qwen3 of some six hundred thousand parameters, taught a task by plain supervised learning
until it is right about a third of the time, and kept in a cache. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adpo.tasks.evaluate import Sampling, answers
from adpo.tasks.generated_tasks import Outcome, Problem, check, up_to

CHARACTERS = "0123456789+-*/()=%:>, abcdefghijklmnopqrstuvwxyz"
PAD, EOS = 0, 1


@dataclass(frozen=True)
class WarmUp:
    """How the model is made and taught.

    The same values give the same model, on the same kind of CPU with as many threads.
    """

    task: str = "arithmetic"
    level: int = 2
    seed: int = 0
    goal: float = 1 / 3  # share of development problems whose most likely answer is right
    hidden: int = 128
    layers: int = 3
    batch: int = 128
    learning_rate: float = 1e-3
    max_steps: int = 3000
    check_every: int = 10
    problems: int = 8000
    development: int = 256  # of them set aside, to decide when to stop

    def folder(self) -> Path:
        text = json.dumps(asdict(self), sort_keys=True)
        return cache() / f"embedded-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


Progress = Callable[[int, float], None]
"""Hears the step and the share of development problems that are right."""


def cache() -> Path:
    """``$ADPO_CACHE``, or ``adpo`` in the user's cache folder."""
    own = os.environ.get("ADPO_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "adpo"


def warmed_up(recipe: WarmUp, on_progress: Progress = lambda *_: None) -> Path:
    """The folder of the warmed-up model and its tokenizer, made now if the cache does not hold it."""
    folder = recipe.folder()
    if not (folder / "config.json").exists():
        model, tokenizer = taught(recipe, on_progress)
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".embedded-"))
        try:
            model.save_pretrained(made)
            tokenizer.save_pretrained(made)
            settle(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def settle(made: Path, folder: Path) -> None:
    """Give a model's folder its name, unless another process was first: then that one stays, it may be in use."""
    for again in (True, False):
        try:
            made.rename(folder)
            return
        except OSError:
            if (folder / "config.json").exists():
                return
            if not again:
                raise
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted copy may have left


def make_tokenizer() -> Any:
    """One token per character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": PAD, "<eos>": EOS, **{c: i + 2 for i, c in enumerate(CHARACTERS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def make_model(recipe: WarmUp) -> Any:
    """An untrained model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(recipe.seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=2 + len(CHARACTERS),
            hidden_size=recipe.hidden,
            intermediate_size=3 * recipe.hidden,
            num_hidden_layers=recipe.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=recipe.hidden // 4,
            max_position_embeddings=128,
            eos_token_id=EOS,
            pad_token_id=PAD,
            bos_token_id=None,
            tie_word_embeddings=True,
        )
    )


def taught(recipe: WarmUp, on_progress: Progress = lambda *_: None) -> tuple[Any, Any]:
    """Model and tokenizer after supervised learning up to the goal."""
    if recipe.task == "countdown":
        raise ValueError("countdown has no worked answers to warm a model up with; give a --model of your own")
    everything = up_to(recipe.task, recipe.problems, level=recipe.level, seed=recipe.seed)
    aside = min(recipe.development, len(everything) // 5)
    development, train = everything[:aside], everything[aside:]
    model, tokenizer = make_model(recipe), make_tokenizer()
    rows, scored = _encoded(train, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), recipe.learning_rate, weight_decay=0.01)
    draw = torch.Generator().manual_seed(recipe.seed)
    sampling = Sampling(max_new_tokens=_longest(everything))
    for step in range(1, recipe.max_steps + 1):
        chosen = torch.randint(len(rows), (recipe.batch,), generator=draw)
        ids, mask = rows[chosen], scored[chosen]
        logits = model(input_ids=ids[:, :-1], attention_mask=ids[:, :-1] != PAD).logits
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        loss = (losses * mask[:, 1:]).sum() / mask[:, 1:].sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % recipe.check_every == 0:
            right = _share_right(model, tokenizer, development, sampling)
            on_progress(step, right)
            if right >= recipe.goal:
                return model, tokenizer
    raise ValueError(
        f"{recipe.max_steps} steps of supervised learning did not bring the model to {recipe.goal:.0%} on "
        f"{recipe.task}, level {recipe.level}: choose an easier --level, or give a --model of your own"
    )


def _share_right(model: Any, tokenizer: Any, asked: Sequence[Problem], sampling: Sampling) -> float:
    given = answers(model, tokenizer, [problem.prompt for problem in asked], sampling)
    right = (check(p.task, p.answer, text) is Outcome.correct for p, (text,) in zip(asked, given, strict=True))
    return sum(right) / len(asked)


def _encoded(rows: Sequence[Problem], tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Prompt, answer and end of every problem, padded on the right; and which tokens are the answer's."""
    texts = [[tokenizer.encode(p.prompt), [*tokenizer.encode(p.answer), EOS]] for p in rows]
    width = max(len(prompt) + len(answer) for prompt, answer in texts)
    ids = torch.tensor([prompt + answer + [PAD] * (width - len(prompt) - len(answer)) for prompt, answer in texts])
    lengths = torch.tensor([[len(prompt), len(prompt) + len(answer)] for prompt, answer in texts])
    place = torch.arange(width)
    return ids, (place >= lengths[:, :1]) & (place < lengths[:, 1:])


def _longest(rows: Sequence[Problem]) -> int:
    return max(len(problem.answer) for problem in rows) + 1
