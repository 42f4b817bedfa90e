"""Sampling with the model itself, where no engine such as vLLM does it: compiled, over a cache of fixed size.

A token is sampled by hundreds of small kernels, and starting them takes longer than they run. Compiled, they are
one graph that is replayed. It is made for one size of the batch and of the cache: prompts are padded to a few
sizes, and batches that are no rollouts (evaluation) are sampled as before. Where a run is too short for a
compiler, the kernels can be recorded as they are (`adpo.sampling.decoding`).

Weights in float32 whose passes are in half of that are sampled from a copy in the precision of the passes, made
anew before every rollout: rounding them again for every token would take longer than the token.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from adpo.sampling.decoding import PADDED_TO, Decoder, padded, up_to_end
from adpo.sampling.decoding_checks import why_not_decoded
from adpo.scoring.padding import off_by_padding
from adpo.trainers.forms import NARROW
from adpo.trainers.sharding import SHARDED
from adpo.trainers.trl.arguments import check_generation_kwargs
from adpo.trainers.trl.rollout.vllm import failures_in_one_line

log = logging.getLogger("adpo")
T = TypeVar("T")
NARROW_RANGE = "weights in float32 and passes in float16, whose range may not hold a residual stream"
SIZES = 3
"""Graphs that are kept: a rollout's prompts have one of a few lengths."""


@dataclass
class SamplingForm:
    """To be mixed into a trainer's own arguments."""

    compile_sampling: bool = field(
        default=True, metadata={"help": "Sample by compiled decoding, on a GPU with triton and without vLLM."}
    )
    record_sampling: bool = field(
        default=False,
        metadata={"help": "Sample by steps recorded as a graph instead: slower a token, but nothing is compiled."},
    )
    sampling_rows: int | None = field(
        default=None,
        metadata={"help": "Completions that the model samples at a time, where memory is short of a rollout's."},
    )

    def check_sampling(self) -> None:
        check_generation_kwargs(self)
        if self.sampling_rows is None:
            return
        if self.sampling_rows < 1:
            raise ValueError(f"sampling_rows must be at least 1; got {self.sampling_rows}")
        if self.use_vllm or self.use_transformers_continuous_batching:  # type: ignore[attr-defined]
            raise ValueError(
                "sampling_rows is for a model that samples by itself: an engine has limits of its own"
            )


class PolicySampler:
    """Completions of prompts, by the model itself or by what TRL has (``of_trl``, its `_generate_single_turn`)."""

    def __init__(self, trainer: Any, of_trl: Callable[..., Any]) -> None:
        self.trainer, self._of_trl = trainer, of_trl
        self.args, self.accelerator = trainer.args, trainer.accelerator
        self._copy: nn.Module | None = None  # of the policy, to sample from
        self._decoders: dict[tuple[int, int], Decoder] = {}
        self._refuse_padding()
        self.why_not_recorded = self._why_not_recorded()
        self.why_not_compiled = self._why_not_compiled()
        if self.why_not_compiled is None:
            trainer.pad_to_multiple_of = trainer.pad_to_multiple_of or PADDED_TO
        if self.args.record_sampling and self.why_not_recorded is not None:
            log.warning("record_sampling has no effect: %s", self.why_not_recorded)
        elif self.why_not_compiled == NARROW_RANGE:
            log.warning("sampling is not compiled: %s", NARROW_RANGE)
        log.info("sampling: %s", self.description())

    @property
    def policy(self) -> Any:
        return self.accelerator.unwrap_model(self.trainer.model)

    def _refuse_padding(self) -> None:
        """A batch of prompts is padded on the left: not for a model that reads it."""
        if self.args.use_vllm or self.args.use_transformers_continuous_batching:
            return
        if self.accelerator.distributed_type in SHARDED:
            return
        policy = self.policy
        off = off_by_padding(policy, NARROW.get(self.accelerator.mixed_precision), positions=True)
        if off:
            raise ValueError(
                f"{type(policy).__name__} reads the padding on the left of prompts (log-probabilities differ by "
                f"{off:.2g} nats a token): a batch would sample from other distributions than its rows; use_vllm, "
                "or take another model"
            )

    def description(self) -> str:
        """As one line."""
        rounded = "" if self._rounded is None else f", from a copy of the policy in {self._rounded}"
        if self.why_not_recorded is None:
            return f"steps recorded as a graph, over a cache of fixed size{rounded}"
        if self.why_not_compiled is None:
            return f"compiled decoding over a cache of fixed size{rounded}; compiled during the first rollout"
        return f"by the means of TRL ({self.why_not_compiled})"

    def _why_not_recorded(self) -> str | None:
        if not self.args.record_sampling:
            return "not asked for"
        asked = self.args
        plain = asked.top_p == 1 and not asked.top_k and asked.min_p is None and asked.repetition_penalty == 1
        if not plain or asked.generation_kwargs:
            return "sampling is shaped by more than a temperature"
        return self._why_no_fixed_cache() or why_not_decoded(self.policy)

    def _why_not_compiled(self) -> str | None:
        if not self.args.compile_sampling:
            return "asked for"
        return self._why_no_fixed_cache() or (None if importlib.util.find_spec("triton") else "triton is missing")

    def _why_no_fixed_cache(self) -> str | None:
        args = self.args
        if args.use_vllm or args.use_transformers_continuous_batching:
            return "vLLM" if args.use_vllm else "continuous batching"
        if args.cache_implementation is not None or "cache_implementation" in (args.generation_kwargs or {}):
            return "a cache was asked for"
        if self.accelerator.distributed_type in SHARDED:
            return "its parameters are sharded"
        if self.accelerator.device.type != "cuda":
            return "no GPU"
        if self._rounded is not None:  # a copy would be sampled from: it must be the policy but for rounding
            if hasattr(self.policy, "peft_config"):
                return "an adapter on weights in another precision than the passes"
            if args.cast_lm_head_to_fp32:
                return "an output layer in float32"
            if self._rounded == torch.float16:
                return NARROW_RANGE
        return None

    @property
    def _rounded(self) -> torch.dtype | None:
        """The precision of passes, if weights are in another."""
        passes = NARROW.get(self.accelerator.mixed_precision)
        return passes if passes != next(self.trainer.model.parameters()).dtype else None

    def generate(self, prompt_ids: Any, *arguments: Any, **options: Any) -> Any:
        """As TRL's `_generate_single_turn`: completions as ids, and what else TRL returns."""
        pictures = any(arguments[:2])
        if self.args.sampling_rows is None or pictures:
            return self._sampled(prompt_ids, *arguments, **options)
        parts = even_parts(prompt_ids, self.args.sampling_rows)
        found = [self._sampled(part, *arguments, **options)[0] for part in parts]
        return [tokens for part in found for tokens in part], None

    def _sampled(self, prompt_ids: Any, *arguments: Any, **options: Any) -> Any:
        try:
            if self.why_not_recorded is None and self.trainer.model.training and not any(arguments[:2]):
                return self._recorded(prompt_ids), None
            with failures_in_one_line(self.args):
                return self._generated(prompt_ids, *arguments, **options)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"no memory for {len(prompt_ids)} completions at a time: set sampling_rows to fewer"
            ) from error

    def _recorded(self, prompts: list[list[int]]) -> list[list[int]]:
        """Completions up to their end token."""
        policy, pad = self.accelerator.unwrap_model(self._sampled_from()), self.trainer._tokenizer.pad_token_id
        ids, mask = padded(prompts, pad)
        size = rows, width = len(ids), ids.shape[1]
        if size not in self._decoders:
            while len(self._decoders) >= SIZES:
                self._decoders.pop(next(iter(self._decoders)))
            longest, ends = self.args.max_completion_length, self.trainer.eos_token_ids
            self._decoders[size] = Decoder(policy, rows, width, longest, self.args.temperature, ends, pad)
        said = self._decoders[size](ids, mask).tolist()
        return [up_to_end(tokens, self.trainer.eos_token_ids) for tokens in said]

    def _generated(self, *arguments: Any, **options: Any) -> Any:
        if self.why_not_compiled is not None or not self.trainer.model.training:
            return self._of_trl(*arguments, **options)
        wrapped, policy = self.trainer.model_wrapped, self.policy
        checkpointing = policy.is_gradient_checkpointing
        try:
            self._choose("static", compiled=True)
            self.trainer.model_wrapped = self._sampled_from()
            return self._of_trl(*arguments, **options)
        except RuntimeError as error:  # of the compiler, of memory, of a model that has no such cache
            self.why_not_compiled = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            log.warning("compiled decoding failed, going on without: %s", self.why_not_compiled)
            if checkpointing and not policy.is_gradient_checkpointing:  # TRL turns it off while sampling
                policy.gradient_checkpointing_enable(
                    gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs
                )
        finally:
            self._choose(None, compiled=False)
            self.trainer.model_wrapped = wrapped
        self._copy = None
        return self._of_trl(*arguments, **options)

    @torch.no_grad()
    def _sampled_from(self) -> nn.Module:
        """The policy, or its copy in the precision of passes."""
        dtype = self._rounded
        if dtype is None:
            wrapped: nn.Module = self.trainer.model_wrapped
            return wrapped
        policy = self.policy
        if self._copy is None:
            self._copy = made_like(policy, dtype)
        copy_weights(policy, self._copy)
        return self._copy.train(policy.training)

    def _choose(self, cache: str | None, *, compiled: bool) -> None:
        config = self.trainer.generation_config
        config.cache_implementation = self.trainer.generation_kwargs["cache_implementation"] = cache
        config.disable_compile = not compiled


def even_parts(rows: Sequence[T], most: int) -> list[Sequence[T]]:
    """As few as hold at most so many each, and as even: every size has a graph of its own.

    >>> even_parts([1, 2, 3, 4, 5, 6], 4)
    [[1, 2, 3], [4, 5, 6]]
    """
    parts = -(-len(rows) // most)
    size = -(-len(rows) // parts)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def made_like(policy: Any, dtype: torch.dtype) -> nn.Module:
    """A model of the same kind, without what has been done to this one; its weights are still to be copied."""
    device = policy.device
    # Weights are drawn, and thrown away: the next numbers that are drawn must not know.
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
        made = AutoModelForCausalLM.from_config(copy.deepcopy(policy.config), dtype=dtype)
    if type(made) is not type(policy):
        raise RuntimeError(
            f"the policy is a {type(policy).__name__}, its configuration makes {type(made).__name__}"
        )
    made.generation_config = policy.generation_config
    found: nn.Module = made.requires_grad_(False)
    return found


@torch.no_grad()
def copy_weights(policy: nn.Module, to: nn.Module) -> None:
    mine = to.state_dict()
    for name, values in policy.state_dict().items():
        mine[name].copy_(values)
