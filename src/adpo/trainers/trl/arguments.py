"""Arguments of TRL's `GRPOConfig` in three classes, as `trainers.checks.arguments` has those of transformers."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from transformers import GenerationConfig

OF_A_LOSS = "it shapes a loss that ADPO does not use"
MEANINGLESS: dict[str, str] = {
    **dict.fromkeys(
        (
            *(
                "beta",
                "delta",
                "epsilon",
                "epsilon_high",
                "importance_sampling_level",
                "loss_type",
                "scale_rewards",
            ),
            *("entropy_coef", "off_policy_mask_threshold", "top_entropy_quantile", "use_bias_correction_kl"),
            *("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "use_adaptive_entropy"),
            *("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
            *(
                "router_aux_loss_coef",
                "sapo_temperature_neg",
                "sapo_temperature_pos",
                "vespo_k_neg",
                "vespo_k_pos",
            ),
            *("vespo_lambda_neg", "vespo_lambda_pos", "multi_objective_aggregation"),
            *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
            *("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"),
            "vllm_importance_sampling_clip_min",
        ),
        OF_A_LOSS,
    ),
    "mask_truncated_completions": "say truncated: mask",
}
"""Refused by `ADPOConfig`, with the reason; arguments of TRL's own losses."""
HONOURED = (
    *("cache_implementation", "cast_lm_head_to_fp32", "chat_template_kwargs", "disable_dropout"),
    *("ds3_gather_for_generation", "generation_batch_size", "generation_kwargs", "log_completions"),
    *("log_completions_hub_repo", "log_multimodal", "log_unique_prompts", "max_completion_length"),
    *("max_tool_calling_iterations", "min_p", "model_init_kwargs", "num_completions_to_print"),
    *("num_generations", "num_generations_eval", "num_iterations", "pad_to_multiple_of", "repetition_penalty"),
    *("reward_weights", "shuffle_dataset", "steps_per_generation", "temperature", "top_k", "top_p"),
    *("transformers_continuous_batching_config", "trust_remote_code", "use_transformers_continuous_batching"),
    *("use_transformers_paged", "use_vllm", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization"),
    *("vllm_group_port", "vllm_max_model_length", "vllm_mode", "vllm_model_impl", "vllm_server_base_url"),
    *("vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_structured_outputs_regex"),
    "vllm_tensor_parallel_size",
)
"""What means here what it means in TRL."""
NEEDS = {"vllm_": "use_vllm", "transformers_continuous_batching_": "use_transformers_continuous_batching"}
"""Beginnings of names, and what has to be true for them to have an effect."""
OF_MODE = {
    "server": (
        *("vllm_group_port", "vllm_server_base_url", "vllm_server_host", "vllm_server_port"),
        "vllm_server_timeout",
    ),
    "colocate": (
        *("vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_model_impl"),
        "vllm_tensor_parallel_size",
    ),
}
"""What has an effect in one ``vllm_mode`` alone."""
FORMER_NAMES = {"use_transformers_continuous_batching": "use_transformers_paged"}
OWN_ARGUMENTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    "n": "num_generations",
    "num_return_sequences": "num_generations",
}
"""Keys of ``generation_kwargs`` that have an argument of their own, which the scorer knows, too."""


EXPECTED = {
    "temperature": "a number above 0",
    "top_p": "a share above 0, at most 1 (1 is off)",
    "top_k": "a whole number, 0 or more (0 is off)",
    "min_p": "a share from 0 to 1",
    "repetition_penalty": "a number above 0 (1 is off)",
}


def check_generation_kwargs(args: Any) -> None:
    """Of arguments that have settled: TRL takes them as JSON, too."""
    known = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    for key in args.generation_kwargs or ():
        if not args.use_vllm and key not in known and key not in OWN_ARGUMENTS:  # vLLM refuses unknown ones itself
            close = get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "see GenerationConfig of transformers"
            raise ValueError(f"generation_kwargs: {key} has no effect where transformers sample; {hint}")
        if key in OWN_ARGUMENTS:
            raise ValueError(
                f"generation_kwargs: {key} is refused: only the sampler would know of it; set {OWN_ARGUMENTS[key]}"
            )


def check_sampling_arguments(args: Any) -> None:
    """Of `ADPOConfig` and of the methods of TRL: samples are drawn as the log-probabilities are computed."""
    for name, fine in {
        "temperature": args.temperature > 0,
        "top_p": 0 < args.top_p <= 1,
        "top_k": args.top_k is None or args.top_k >= 0,
        "min_p": args.min_p is None or 0 <= args.min_p <= 1,
        "repetition_penalty": args.repetition_penalty > 0,
    }.items():
        if not fine:
            raise ValueError(f"{name} = {getattr(args, name)} is refused: expected {EXPECTED[name]}")
    modes = ", ".join(OF_MODE)
    if args.vllm_mode not in OF_MODE:
        raise ValueError(f"vllm_mode must be one of {modes}; got {args.vllm_mode!r}")
    for field in fields(args):
        needed = next((mode for mode, names in OF_MODE.items() if field.name in names), args.vllm_mode)
        value = getattr(args, field.name)
        if args.use_vllm and needed != args.vllm_mode and value != field.default:
            where = "where vLLM is started with it" if needed == "colocate" else "which has no server"
            raise ValueError(
                f"{field.name} = {value!r} has no effect with vllm_mode {args.vllm_mode}, {where}: leave it out"
            )
        for beginning, needed in NEEDS.items():
            value = getattr(args, field.name)
            given = getattr(args, needed) or getattr(args, FORMER_NAMES.get(needed, needed), False)
            if field.name.startswith(beginning) and not given and value != field.default:
                raise ValueError(
                    f"{field.name} = {value!r} has no effect without {needed}: set that, or leave it out"
                )
