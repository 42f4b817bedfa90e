"""Arguments of transformers and TRL, each in one of three classes: honoured, refused, or without meaning here.

What is honoured does what its own documentation says. What is refused would be without effect, or would make the
gradient another, and nobody would be told; it is refused in one line when the arguments are made. What is without
meaning is about something that these trainers have not got.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

NO_PARALLELISM = "tensor, context and sequence parallelism are not supported; FSDP2 and DDP are"
REFUSED: dict[str, str] = {
    "auto_find_batch_size": "passes are fitted to the memory by tokens_per_pass",
    "ignore_data_skip": "a resumed run would be trained on other rows",
    "label_smoothing_factor": "it is for labels, of which there are none; label_smoothing smooths the target",
    "length_column_name": "rows come in the order of seed and epoch",
    "neftune_noise_alpha": "noise on the embeddings moves u away from zero where policy and anchor are equal",
    "parallelism_config": NO_PARALLELISM,
    "train_sampling_strategy": "rows come in the order of seed and epoch",
}
"""Arguments of transformers, with the reason."""
WITHOUT_MEANING = (
    *(
        "average_tokens_across_devices",
        "batch_eval_metrics",
        "bf16_full_eval",
        "do_eval",
        "do_predict",
        "do_train",
    ),
    *("eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object", "fp16_full_eval"),
    *("include_for_metrics", "label_names", "prediction_loss_only", "resume_from_checkpoint"),
)
"""Arguments of transformers for tasks with labels, or for its example scripts."""
HONOURED = (
    *("accelerator_config", "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "data_seed"),
    *("dataloader_drop_last", "dataloader_in_order", "dataloader_multiprocessing_context"),
    *("dataloader_num_workers", "dataloader_persistent_workers", "dataloader_pin_memory"),
    *("dataloader_prefetch_factor", "ddp_backend", "ddp_broadcast_buffers", "ddp_bucket_cap_mb"),
    *("ddp_find_unused_parameters", "ddp_static_graph", "ddp_timeout", "debug", "deepspeed", "disable_tqdm"),
    *("enable_jit_checkpoint", "eval_delay", "eval_on_start", "eval_steps", "eval_strategy", "fp16", "fsdp"),
    *("fsdp_config", "full_determinism", "gradient_accumulation_steps", "gradient_checkpointing"),
    *("gradient_checkpointing_kwargs", "greater_is_better", "hub_always_push", "hub_model_id"),
    *("hub_private_repo", "hub_revision", "hub_strategy", "hub_token", "include_num_input_tokens_seen"),
    *("learning_rate", "liger_kernel_config", "load_best_model_at_end", "local_rank", "log_level"),
    *("log_level_replica", "log_on_each_node", "logging_first_step", "logging_nan_inf_filter", "logging_steps"),
    *("logging_strategy", "lr_scheduler_kwargs", "lr_scheduler_type", "max_grad_norm", "max_steps"),
    *("metric_for_best_model", "num_train_epochs", "optim", "optim_args", "optim_target_modules", "output_dir"),
    *("per_device_eval_batch_size", "per_device_train_batch_size", "project", "push_to_hub"),
    *("remove_unused_columns", "report_to", "restore_callback_states_from_checkpoint", "run_name"),
    *("save_on_each_node", "save_only_model", "save_steps", "save_strategy", "save_total_limit", "seed"),
    *("skip_memory_metrics", "tf32", "torch_compile", "torch_compile_backend", "torch_compile_mode"),
    *("torch_empty_cache_steps", "trackio_bucket_id", "trackio_space_id", "trackio_static_space_id"),
    *("use_cache", "use_cpu", "use_liger_kernel", "warmup_steps", "weight_decay"),
)
"""Arguments of transformers that mean what they mean there."""
STEPS_IN_BACKWARD = ("lomo", "adalomo", "layerwise")
"""In names of optimizers that step while gradients are made: a step has several backward passes here."""


def check_arguments(args: Any, refused: Mapping[str, str] = REFUSED) -> None:
    """Of any trainer, before the arguments settle among themselves."""
    defaults = {field.name: field.default for field in fields(args)}
    for name, why in refused.items():
        default = defaults.get(name, MISSING)
        value = getattr(args, name, default)
        if default is not MISSING and value != default:
            raise ValueError(f"{name} = {value!r} is refused: {why}; leave it out")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if any(part in optimizer for part in STEPS_IN_BACKWARD):
        raise ValueError(
            f"optim = {optimizer} is refused: it steps in every backward pass, of which a step has several here; "
            "take another optimizer"
        )
    if "schedule_free" in optimizer:
        raise ValueError(
            f"optim = {optimizer} is refused: its weights for training and for evaluation differ, and samples "
            "would come from the wrong ones; take another optimizer"
        )
    if args.liger_kernel_config and not args.use_liger_kernel:
        raise ValueError("liger_kernel_config has no effect without use_liger_kernel: set that, or leave it out")


def check_sharding(args: Any) -> None:
    """Of arguments that have settled: what they, or accelerate's launcher, ask of several processes."""
    for name in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, name, None):
            raise ValueError(
                f"accelerator_config: {name} is refused: every process reads its own rows; leave it out"
            )
    by_arguments = bool(args.fsdp) and (args.fsdp_plugin_args or {}).get("fsdp_version") != 2
    by_launcher = _asked("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION") == "1" and not args.fsdp
    if by_arguments or by_launcher:
        raise ValueError("FSDP1 is not supported: set fsdp_version: 2 (in fsdp_config, or in accelerate's config)")
    if _asked("ACCELERATE_USE_PARALLELISM_CONFIG"):
        raise ValueError(f"accelerate's parallelism_config is refused: {NO_PARALLELISM}; leave it out")
    engine = getattr(getattr(args, "deepspeed_plugin", None), "deepspeed_config", None) or {}
    for name in ("tensor_parallel", "sequence_parallel_size"):
        if name in engine:
            raise ValueError(f"DeepSpeed's {name} is refused: {NO_PARALLELISM}; leave it out")


def check_model(model: Any) -> None:
    """Before anything is made of it; a model that is only named is looked at once it has been loaded."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    if (getattr(model, "_tp_size", None) or 1) > 1 or any(isinstance(one, DTensor) for one in parameters):
        raise ValueError(
            "the model's parameters are split among processes (tensor parallelism): load it without tp_plan and "
            "device_mesh; FSDP2 splits them during training"
        )


def _asked(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true", "yes")


def check_processes(trainer: Any) -> None:
    """Of a trainer that has been made: the kinds of sharding that its passes are right for."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and getattr(plugin, "fsdp_version", 2) != 2:
        raise ValueError("FSDP1 is not supported: set fsdp_version: 2 (in fsdp_config, or in accelerate's config)")
    check_model(trainer.accelerator.unwrap_model(trainer.model))
    accelerator = trainer.accelerator
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise ValueError("fp16 is for GPUs, and would have no effect on a CPU: use bf16, or leave it out")
