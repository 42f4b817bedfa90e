"""The weights that all trials of an experiment begin with, known by a hash."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adpo.lm import embedded
from adpo.lm.gguf import load_gguf
from adpo.training.models import load_model, load_tokenizer


@dataclass(frozen=True)
class Start:
    """A folder or name for transformers, or a ``.gguf`` file; and an adapter on it, if there is one."""

    model: str
    adapter: str | None = None
    known_as: str | None = None  # the hash of what this one was unpacked from

    def load(self) -> tuple[Any, Any]:
        """Model, in float32 on the device, and tokenizer, which pads on the left."""
        if not self.model.endswith(".gguf"):
            model, tokenizer = load_model(self.model)
        else:
            model, tokenizer = load_gguf(self.model)
            tokenizer.padding_side = "left"
        if self.adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, self.adapter).merge_and_unload()
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        return model.to(device), tokenizer

    def tokenizer(self) -> Any:
        return self.load()[1] if self.model.endswith(".gguf") else load_tokenizer(self.model)

    def unpacked(self) -> Start:
        """The same weights as a folder in the cache: a quantised file takes long to read, and is read often."""
        if not self.model.endswith(".gguf") and self.adapter is None:
            return self
        folder = embedded.cache() / f"start-{self.digest()}"
        if not (folder / "config.json").exists():
            model, tokenizer = self.load()
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as part:
                model.save_pretrained(Path(part) / "start")
                tokenizer.save_pretrained(Path(part) / "start")
                shutil.rmtree(folder, ignore_errors=True)  # what an interrupted copy may have left
                (Path(part) / "start").rename(folder)
        return Start(str(folder), known_as=self.digest())

    def digest(self) -> str:
        """Results from different starts are never merged: this stands in every one of them."""
        if self.known_as is not None:
            return self.known_as
        total = hashlib.sha256()
        for part in (self.model, self.adapter):
            if part is None:
                continue
            files = (
                [Path(part)]
                if Path(part).is_file()
                else sorted([*Path(part).glob("*.safetensors"), *Path(part).glob("adapter_config.json")])
            )
            if not files:  # by its name, on a hub
                total.update(part.encode())
            for file in files:
                with file.open("rb") as content:
                    total.update(hashlib.file_digest(content, "sha256").digest())
        return total.hexdigest()[:16]


def embedded_start(level: int) -> Start:
    """The model of `adpo train`, warmed up now if it is not in the cache."""
    return Start(str(embedded.warmed_up(embedded.WarmUp(level=level))))
