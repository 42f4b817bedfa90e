"""What the trainers rely on inside TRL: names, signatures and returned keys, looked at when a trainer is made.

TRL changes its insides from week to week. Where something that is relied on is no longer there, training would be
wrong or end in the middle of a rollout; so a trainer is not made at all, and one line says why.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import trl

OLDEST, NEWEST = "1.16.0", "1.16.0"
"""Versions of TRL that the tests run on."""
SIGNATURES: dict[str, tuple[str, ...]] = {
    "_prepare_inputs": ("generation_batch",),
    "_compute_loss": ("model", "inputs"),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_generate": ("prompts",),
    "_generate_and_score_completions": ("inputs",),
    "_generate_single_turn": ("prompt_ids", "images", "multimodal_fields", "num_generations"),
    "_get_per_token_logps_and_entropies": (
        *("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"),
        *("compute_entropy", "compute_aux_loss"),
    ),
    "_get_train_sampler": ("dataset",),
    "training_step": ("model", "inputs"),
    "create_model_card": ("model_name", "dataset_name"),
    "_save_checkpoint": ("model", "trial"),
    "_maybe_log_save_evaluate": (),
    "_run_epoch": (),
    "_push_from_checkpoint": ("checkpoint_folder",),
    "_get_output_dir": ("trial",),
    "_load_optimizer_and_scheduler": ("checkpoint",),
}
"""Methods that are overridden or called, with the parameters that are passed or read."""
ATTRIBUTES = (
    *("_buffered_inputs", "_metrics", "_name", "_step", "_tokenizer", "beta", "eos_token_ids"),
    *("mask_truncated_completions", "max_completion_length", "max_tool_calling_iterations"),
    *("model_wrapped", "num_generations", "num_iterations", "pad_to_multiple_of", "ref_model", "reward_weights"),
    *("rollout_func", "temperature", "tools", "use_vllm", "_entropy_bonus_enabled", "aux_loss_enabled"),
    *("top_entropy_quantile", "loss_type"),
)
"""What a trainer is read for once it has been made."""
WHERE_USED = ("generation_config", "generation_kwargs", "router_aux_loss_coef", "vllm_generation")
"""What a trainer is read for where its arguments ask for vLLM, for its own sampling, or for a router's loss."""
PUBLIC = ("model", "args", "train_dataset")
"""Attributes of any trainer, which transformers documents."""
ROLLOUT = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
"""What a rollout must hold."""
GENERATED = 6
"""`_generate` returns prompts, completions and masks as ids, completions, log-probabilities, other fields."""


def changed(trainer_class: Any) -> list[str]:
    """What differs from what is relied on, of TRL's class; nothing where all is as it should be."""
    found = []
    for name, wanted in SIGNATURES.items():
        method = getattr(trainer_class, name, None)
        if method is None:
            found.append(f"{name} is gone")
            continue
        parameters = inspect.signature(method).parameters.values()
        anything = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL} & {p.kind for p in parameters}
        missing = [parameter for parameter in wanted if parameter not in {p.name for p in parameters}]
        if missing and not anything:
            found.append(f"{name} has no parameter {', '.join(missing)}")
    return found


def check_class(trainer_class: Any) -> None:
    """Before a trainer is made."""
    _refuse(changed(trainer_class))


def check_trainer(trainer: Any) -> None:
    """Once TRL has made it."""
    _refuse([f"a trainer has no {name}" for name in ATTRIBUTES if not hasattr(trainer, name)])


def check_vllm(generation: Any, mode: str, main: bool) -> None:
    """What samples by vLLM, once TRL has made it."""
    client = getattr(generation, "vllm_client", None)
    wanted = {
        "a VLLMGeneration has no generation_kwargs": hasattr(generation, "generation_kwargs"),
        "a VLLMGeneration has no llm": mode != "colocate" or hasattr(generation, "llm"),
        "its client has no session": mode != "server" or not main or hasattr(client, "session"),
    }
    _refuse([what for what, fine in wanted.items() if not fine])


def check_generated(found: Sequence[Any]) -> None:
    """What `_generate` returned."""
    if len(found) < GENERATED or not isinstance(found[5], dict):
        _refuse([f"_generate returns {len(found)} values, the sixth no mapping"])


def check_rollout(batch: Collection[str]) -> None:
    """The columns of the first rollout."""
    _refuse([f"a rollout has no {name}" for name in ROLLOUT if name not in batch])


def _refuse(differences: list[str]) -> None:
    if differences:
        raise ValueError(
            f"TRL {trl.__version__} is not as adpo needs it ({'; '.join(differences)}); versions known to work: "
            f"{OLDEST} to {NEWEST}"
        )
