"""How much accelerator memory a run will need, from the shape of its model: no weights are loaded.

A rough sum, for choosing a batch before anything is downloaded: what optimizers keep is exact, what a forward pass
keeps is an estimate for decoder-only transformers. It is the least that a run needs: where checkpointing is left
to the trainer, it counts, and packed passes become as large as the memory that is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KNOWN: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-1.7B": {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
}
"""Published shapes of the models in `examples/`, so that a dry run needs no download."""


@dataclass(frozen=True)
class Memory:
    """In GiB, for one device that holds everything."""

    parameters: int
    trainable: int
    weights: float
    gradients: float
    optimizer: float
    copies: float  # of the weights: anchors, and what a step is taken back to
    activations: float
    generation: float

    @property
    def total(self) -> float:
        """Generation and the backward pass take turns."""
        return (
            self.weights + self.gradients + self.optimizer + self.copies + max(self.activations, self.generation)
        )


def model_config(name: str) -> Any:
    """The model's configuration: from its folder or the local cache, else a shape known here."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, local_files_only=name in KNOWN)
    except (OSError, ValueError) as error:
        if name in KNOWN:
            return AutoConfig.for_model(**KNOWN[name])
        raise ValueError(
            f"the configuration of model {name!r} cannot be found: {str(error).splitlines()[0]}"
        ) from None


def estimate(config: Any, arguments: Mapping[str, Any], lora: Any = None, prompt_tokens: int = 256) -> Memory:
    """``arguments`` are the trainer's; ``lora`` a `peft.LoraConfig` or None."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        if lora is not None:
            from peft import get_peft_model

            model = get_peft_model(model, lora)
    parameters = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    dtype = str((arguments.get("model_init_kwargs") or {}).get("dtype", "float32"))
    width = 2 if dtype in ("bfloat16", "float16") else 4
    rows = arguments.get("per_device_train_batch_size", 8)
    tokens = prompt_tokens + arguments.get("max_completion_length", 256)
    hidden, layers = config.hidden_size, config.num_hidden_layers
    # Per token and layer: the input of the block alone, or about seventeen vectors like it and the feed-forward.
    whole_layer = 17 * hidden + 4 * config.intermediate_size
    activation = 2 if arguments.get("bf16", False) else 4
    if arguments.get("gradient_checkpointing") is not False:
        kept = rows * tokens * (layers * hidden + whole_layer) * activation
    else:
        kept = rows * tokens * layers * whole_layer * activation
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    size = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    at_once = rows * (arguments.get("steps_per_generation") or arguments.get("gradient_accumulation_steps", 1))
    at_once = min(at_once, arguments.get("sampling_rows") or at_once)
    cache = 2 * layers * heads * size * tokens * at_once * activation
    anchors = {"ema": 4 * trainable, "fixed": width * trainable, "refresh": width * trainable}
    copies = anchors.get(arguments.get("anchor", "on_policy"), 0)
    copies += width * trainable if arguments.get("backtracking") else 0
    gib = 1024**3
    return Memory(
        parameters,
        trainable,
        weights=parameters * width / gib,
        gradients=trainable * width / gib,
        optimizer=2 * trainable * width / gib,
        copies=copies / gib,
        activations=kept / gib,
        generation=cache / gib,
    )
