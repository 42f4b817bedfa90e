"""The weights that all trials of an experiment begin with, known by a hash."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from adpo.models import embedded
from adpo.models.gguf import load_gguf
from adpo.runs.by_name import load_model, load_tokenizer
from adpo.system.devices import best_device


@dataclass(frozen=True)
class Start:
    """A folder or name for transformers, or a ``.gguf`` file; and an adapter on it, if there is one."""

    model: str
    adapter: str | None = None
    known_as: str | None = None  # the hash of what this one was unpacked from

    def load(self) -> tuple[Any, Any]:
        """Model, in float32 on the device, and tokenizer, which pads on the left."""
        model, tokenizer = load_model(self._readable())
        if self.adapter is not None:
            model = _with_adapter(model, self.adapter)
        return model.to(best_device()), tokenizer

    def tokenizer(self) -> Any:
        return load_tokenizer(self._readable())

    def unpacked(self) -> Start:
        """The same weights as a folder in the cache: they are read often, in many processes."""
        if not self.model.endswith(".gguf") and self.adapter is None:
            return self
        return Start(str(_kept(self.digest(), self.load)), known_as=self.digest())

    def _readable(self) -> str:
        """What transformers reads fast: a quantised file takes half a minute, so it is unpacked once."""
        if not self.model.endswith(".gguf"):
            return self.model
        return str(_kept(Start(self.model).digest(), partial(load_gguf, self.model)))

    def digest(self) -> str:
        """Results from different starts are never merged: this stands in every one of them."""
        if self.known_as is not None:
            return self.known_as
        total = hashlib.sha256()
        for part in (self.model, self.adapter):
            if part is None:
                continue
            files = _weights(Path(part))
            if not files:  # by its name, on a hub
                total.update(part.encode())
            for file in files:
                with file.open("rb") as content:
                    total.update(hashlib.file_digest(content, "sha256").digest())
        return total.hexdigest()[:16]


def _weights(part: Path) -> list[Path]:
    """The files that a hash is of; none of a name."""
    if not part.is_dir():
        return [part] if part.is_file() else []
    weights = sorted(part.glob("*.safetensors"))
    if not weights:  # other files would not be hashed, and pickles are not read
        raise ValueError(f"{part}: expected a folder with weights in .safetensors files; there are none")
    return sorted([*weights, *part.glob("adapter_config.json")])


def _with_adapter(model: Any, adapter: str) -> Any:
    """Merged into the model."""
    from peft import PeftModel

    if not (Path(adapter) / "adapter_config.json").is_file():
        raise ValueError(f"--adapter {adapter}: expected a folder with adapter_config.json")
    try:
        return PeftModel.from_pretrained(model, adapter).merge_and_unload()
    except (KeyError, OSError, RuntimeError, TypeError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"--adapter {adapter} cannot be put on this model: {reason}") from error


def _kept(name: str, load: Callable[[], tuple[Any, Any]]) -> Path:
    """Model and tokenizer as a folder of the cache, which is written if it is not there."""
    folder = embedded.cache() / f"start-{name}"
    if not (folder / "config.json").exists():
        model, tokenizer = load()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as part:
            model.save_pretrained(Path(part) / "start")
            tokenizer.save_pretrained(Path(part) / "start")
            embedded.settle(Path(part) / "start", folder)
    return folder


def embedded_start(task: str, level: int) -> Start:
    """The model of `adpo train`, warmed up now if it is not in the cache."""
    return Start(str(embedded.warmed_up(embedded.WarmUp(task=task, level=level))))
