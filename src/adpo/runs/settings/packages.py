"""What settings need beside adpo: packages, the hub, a tracker. Looked for before data and model are loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from adpo.trainers.checks.accepted import refuse_liger

TRACKERS = {
    "azure_ml": ("azureml", "azureml-sdk"),
    "comet_ml": ("comet_ml", "comet-ml"),
    "flyte": ("flytekit", "flytekit"),
    **{
        name: (name, name)
        for name in (
            "clearml",
            "codecarbon",
            "dagshub",
            "dvclive",
            "mlflow",
            "neptune",
            "swanlab",
            "trackio",
            "wandb",
        )
    },
}
"""Names of ``report_to``: the module that must be there, and what pip calls it."""
ATTENTION = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
}
DTYPES = ("float32", "bfloat16", "float16", "auto")
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16", "float": "float32"}


def check_packages(config: Any, model_options: Mapping[str, Any] | None = None) -> None:
    """Complain in one line about what is missing; ``config`` are the trainer's arguments."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    for name in config.report_to or ():
        if name not in INTEGRATION_TO_CALLBACK:
            raise ValueError(
                f"report_to must be of {', '.join(INTEGRATION_TO_CALLBACK)}, none or all; got {name!r}"
            )
        if name in TRACKERS:
            module, package = TRACKERS[name]
            _need(f"report_to {name}", module, package, "report to tensorboard or none")
    if getattr(config, "use_vllm", False):
        _check_vllm(config, model_options or {})
    if config.use_liger_kernel:
        refuse_liger(config)
        _need("use_liger_kernel", "liger_kernel", "liger-kernel", "leave it out")
    _check_model_options(model_options or {})
    _check_optimizer(config)
    if config.push_to_hub:
        _check_hub(config)


def _check_vllm(config: Any, model_options: Mapping[str, Any]) -> None:
    from adpo.trainers.trl.rollout.vllm import PACKED, check_vllm, refuse_without_gpu

    if model_options.get("quantization_config"):
        raise ValueError(PACKED.format("quantization_config"))
    refuse_without_gpu(config)
    _need("use_vllm", "vllm", "'trl[vllm]'", "leave use_vllm out: transformers then sample")
    check_vllm(config)


def _need(setting: str, module: str, package: str, otherwise: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"{setting} needs a package that is not installed: pip install {package}, or {otherwise}")


def _check_model_options(options: Mapping[str, Any]) -> None:
    attention = options.get("attn_implementation")
    if attention in ATTENTION:
        _need(f"attn_implementation {attention}", *ATTENTION[attention], "take sdpa")
    elif isinstance(attention, str) and "/" in attention:
        _need(f"attn_implementation {attention}", "kernels", "kernels", "take sdpa")
    quantized = options.get("quantization_config")
    if isinstance(quantized, Mapping) and {"load_in_4bit", "load_in_8bit"} & set(quantized):
        _need("quantization_config", "bitsandbytes", "bitsandbytes", "leave it out")
    dtype = options.get("dtype", options.get("torch_dtype", "auto"))
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        meant = f"; did you mean {SHORT[dtype]}?" if dtype in SHORT else ""
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}{meant}")


def _check_optimizer(config: Any) -> None:
    """As the trainer makes it; what needs the model is made later."""
    from transformers import Trainer

    try:
        Trainer.get_optimizer_cls_and_kwargs(config)
    except (ImportError, ValueError) as error:
        line = " ".join(str(error).split())
        if "pass a" not in line:  # a model, which is not there yet
            name = getattr(config.optim, "value", config.optim)
            raise ValueError(f"optim {name}: {line[:300]}") from None


def _check_hub(config: Any) -> None:
    from huggingface_hub import HfApi

    try:
        HfApi().whoami(token=config.hub_token)
    except Exception as error:  # no network, no token, a token that is none
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"push_to_hub: the hub cannot be reached, or does not know you ({reason}): log in with "
            "`hf auth login`, or leave push_to_hub out"
        ) from None


@contextmanager
def outside_in_one_line() -> Iterator[None]:
    """What fails outside while a trainer is made or begins is one line: a tracker, a server, a package."""
    try:
        yield
    except (ImportError, ConnectionError) as error:
        raise ValueError(" ".join(f"{type(error).__name__}: {error}".split())[:400]) from error
    except Exception as error:
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename.endswith("integration_utils.py"):
                line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                raise ValueError(
                    f"a tracker of report_to failed with {line}: set it up, or report to tensorboard or none"
                ) from error
            trace = trace.tb_next
        raise
