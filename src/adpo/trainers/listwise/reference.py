"""Log-probabilities under the reference: computed once, kept on disk, found again by model and data.

The reference is the policy at the start, a model of its own, or a model by name; the last need not even be loaded
where its scores are known.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

log = logging.getLogger("adpo")
WEIGHTS = ("*.safetensors", "*.bin", "config.json", "adapter_config.json")


class Scores:
    """A table of log-probabilities in a folder, under a key that says what they are of."""

    def __init__(self, folder: Path, *parts: str) -> None:
        self.key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
        self.path = folder / f"reference-{self.key}.safetensors"

    def read(self, count: int) -> Tensor | None:
        """None where there are none, or where the file is not what was written."""
        if not self.path.exists():
            return None
        logp: Tensor
        try:
            with safe_open(self.path, "pt") as file:
                logp, digest = file.get_tensor("logp"), (file.metadata() or {}).get("sha256")
        except (SafetensorError, OSError) as error:
            log.warning("%s is damaged (%s): the reference is scored again", self.path, error)
            return None
        if logp.shape != (count,) or digest != _digest(logp):
            log.warning("%s is damaged: the reference is scored again", self.path)
            return None
        return logp

    def write(self, logp: Tensor) -> None:
        part = self.path.with_name(f"{self.path.name}-{uuid4().hex}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_file({"logp": logp}, part, {"sha256": _digest(logp)})
            part.replace(self.path)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.path.parent} cannot be written to: {error}; choose another --cache") from None
        finally:
            part.unlink(missing_ok=True)


def _digest(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


def fingerprint(model: nn.Module | str | Path) -> str:
    """What tells models apart: the content of a folder's files, or of a module's parameters."""
    if isinstance(model, nn.Module):
        return of_module(model)
    folder = Path(model)
    if not folder.is_dir():
        folder = _looked_up(str(model))
    files = sorted({path for pattern in WEIGHTS for path in folder.glob(pattern)})
    if not any(path.suffix in (".safetensors", ".bin") for path in files):
        raise ValueError(f"{model} holds no weights: expected *.safetensors in it")
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as content:
            digest.update(path.name.encode() + hashlib.file_digest(content, "sha256").digest())
    return f"files {digest.hexdigest()}"


def of_module(model: nn.Module) -> str:
    """Configuration, parameters and buffers; an adapter that does nothing yet does not count."""
    digest = hashlib.sha256(_configuration(model).encode())
    idle = _idle_adapter(model)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if idle and ".lora_" in name:
            continue
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"values {digest.hexdigest()}"


def _configuration(model: nn.Module) -> str:
    config = getattr(model, "config", None)
    if config is None:
        return type(model).__name__
    known = {**config.to_dict(), "attention": getattr(config, "_attn_implementation", None)}
    for name in ("_name_or_path", "transformers_version", "dtype", "use_cache"):
        known.pop(name, None)
    return json.dumps(known, sort_keys=True, default=str)


def _idle_adapter(model: nn.Module) -> bool:
    """Whether all there is of an adapter is one whose second factor is zero."""
    second = [value for name, value in model.named_parameters() if ".lora_B" in name]
    return bool(second) and not any(value.any() for value in second)


def _looked_up(name: str) -> Path:
    """The folder in the hub's cache that holds a model."""
    from transformers.utils import cached_file

    try:
        found: Any = cached_file(name, "config.json")
    except OSError as error:
        raise ValueError(f"model {name!r} cannot be loaded: {str(error).splitlines()[0]}") from None
    return Path(found).parent
