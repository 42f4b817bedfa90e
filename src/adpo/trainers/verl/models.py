"""Which models verl's actor may train by ADPO: looked at when it is built, before the first rollout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from verl.utils import tensordict_utils as tu

from adpo.scoring.context import depends_on_neighbours
from adpo.scoring.dropout import without_dropout
from adpo.scoring.packed.packing_checks import CHANGE_LOGITS, ROWS, TOLERANCE, TOLERANCE_NARROW, carries_state
from adpo.trainers.checks.accepted import refuse_router_loss, refuse_vision
from adpo.trainers.sharding import then_sharded

ENTRY = "ADPO on verl"
LEAVE_IT = "set actor_rollout_ref.model.use_remove_padding=False"


def check_model(settings: Any, longest: int = 0) -> None:
    """What verl knows of a model before it is loaded: ``settings`` is its HFModelConfig.

    ``longest`` is what a prompt and a response may take together.
    """
    config, text = settings.hf_config, settings.hf_config.get_text_config()
    described = SimpleNamespace(config=config)
    refuse_vision(ENTRY, described, (settings.architectures or [config.model_type])[0])
    refuse_router_loss(ENTRY, described)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{ENTRY} trains weights as they are; this model is quantised: take it unquantised")
    by_length = depends_on_neighbours(config)
    if by_length is not None and longest > by_length[1]:
        raise ValueError(
            f"beyond {by_length[1]} tokens this model's positions depend on the longest row of a micro-batch "
            f"(rope_type = {by_length[0]}): lower data.max_prompt_length and data.max_response_length, now "
            f"{longest} together"
        )
    for name, harmless in CHANGE_LOGITS.items() if settings.use_fused_kernels else ():
        if getattr(text, name, None) not in harmless:
            raise ValueError(
                f"use_fused_kernels would leave out what this model does to its logits ({name} = "
                f"{getattr(text, name)}): set actor_rollout_ref.model.use_fused_kernels=False"
            )


def prepare(engine: Any) -> None:
    """Look at a model that is loaded; and without dropout the gradient is that of what was scored."""
    module = getattr(engine.module, "_fsdp_wrapped_module", engine.module)
    without_dropout(module)
    inner = module.get_base_model() if hasattr(module, "peft_config") else module
    if engine.engine_config.use_fused_kernels:
        _check_head(inner.get_output_embeddings())
    if engine.use_remove_padding:
        _check_packing(engine, module)


def _check_head(head: Any) -> None:
    if hasattr(head, "base_layer"):
        raise ValueError(
            "use_fused_kernels would leave out the adapter of the output layer: set "
            "actor_rollout_ref.model.exclude_modules=lm_head"
        )
    if isinstance(head, FSDPModule):
        raise ValueError(
            "use_fused_kernels cannot read an output layer that fsdp2 holds apart: set "
            "actor_rollout_ref.actor.strategy=fsdp, or leave use_fused_kernels out"
        )


def _check_packing(engine: Any, module: Any) -> None:
    """With use_remove_padding all rows of a micro-batch are one: that none of them reaches the next."""
    if (state := carries_state(module)) is not None:
        raise ValueError(
            f"this model carries a state from token to token ({state}), which use_remove_padding would carry from "
            f"row to row: {LEAVE_IT}"
        )
    off = float((_scored(engine, len(ROWS[0])) - _scored(engine, 1)).abs().max())
    narrow = engine._autocast_dtype != torch.float32 or next(module.parameters()).dtype != torch.float32
    if not off < (TOLERANCE_NARROW if narrow else TOLERANCE):
        raise ValueError(
            f"use_remove_padding changes what this model computes, by {off:.2g} nats a completion: rows reach "
            f"their neighbours: {LEAVE_IT}"
        )


def _scored(engine: Any, together: int) -> Tensor:
    """Log-probabilities of a few rows, so many in a pass; the same ones in every process."""
    whole = [torch.tensor(prompt + completion) for prompt, completion in zip(*ROWS, strict=True)]
    data = TensorDict(
        {
            "input_ids": _nested(whole),
            "position_ids": _nested([torch.arange(len(row)) for row in whole]),
            "loss_mask": _nested([torch.ones_like(row) for row in whole]),
        },
        batch_size=len(whole),
    )
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=together,
        use_remove_padding=True,
        use_fused_kernels=engine.engine_config.use_fused_kernels,
    )
    with engine.eval_mode(disable_auto_offload=False), then_sharded(engine.module):
        found = engine.infer_batch(data, loss_function=None)["model_output"]["log_probs"]
    return torch.stack([row[:-1].sum() for row in found.unbind()]).float().cpu()


def _nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
