"""The README.md of a trained model: what it is, how it was made, how good it is, how to load it, its licence.

The head is metadata that the hub accepts: a base model is named there only where it is the name of a repository, a
licence only where the base model states one.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

README = "README.md"
PACKAGES = ("adpo", "torch", "transformers", "trl", "peft", "datasets")
OBJECTIVE = ("target", "reward_beta", "divergence", "tau", "tau_schedule", "anchor", "logp_reduction", "truncated")
OF_TRL = ("loss_type", "importance_sampling_level", "scale_rewards", "beta", "epsilon")
GENERAL = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "max_grad_norm", "weight_decay"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_iterations"),
    *("max_completion_length", "max_length", "temperature", "bf16", "fp16", "seed"),
)
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


@dataclass
class CardFacts:
    """What a trainer cannot know of its run; who starts it fills this in."""

    method: str | None = None
    data: str | None = None
    command: str | None = None
    commit: str | None = None
    base_model: str | None = None  # as it was named, if that is not in the model's configuration
    figures: Sequence[tuple[str, ...]] = field(default_factory=tuple)  # head, then rows


def write_card(trainer: Any, folder: Path, name: str | None = None, data: str | None = None) -> None:
    """The card of a trainer's model, into a folder that holds or will hold it."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = dataclasses.replace(trainer.card_facts, data=data or trainer.card_facts.data)
    title = name or (trainer.args.hub_model_id or Path(trainer.args.output_dir).name).split("/")[-1]
    (folder / README).write_text(card(trainer, facts, title), encoding="utf-8")


def card(trainer: Any, facts: CardFacts, title: str) -> str:
    """As text."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = facts.base_model or base_name(model)
    adapter = hasattr(model, "peft_config")
    licence = licence_of(base)
    head: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["adpo", *(["trl"] if hasattr(trainer, "num_generations") else [])],
    }
    if base and is_repository(base):
        head["base_model"] = base
    if licence:
        head["license"] = licence
    if facts.data and is_repository(facts.data):
        head["datasets"] = [facts.data]
    shown = f"`{_short(base)}`" if base else "a model made in this program"
    method = facts.method or trainer._name
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=True)}---",
        f"# {title}",
        f"{'A LoRA adapter for' if adapter else 'Fine-tuned from'} {shown} with {method}, by adpo "
        f"{_version('adpo')}.",
        "## Use\n\n" + _use(title, adapter, _short(base) if base else None, trainer.args.hub_model_id),
        "## Training\n\n" + _table([("setting", "value"), *_settings(trainer, facts, method).items()]),
    ]
    if facts.figures:
        parts.append("## Results\n\nWith 95 % intervals.\n\n" + _table(facts.figures))
    parts.append("## Licence\n\n" + _of_licence(licence, base))
    return "\n\n".join(parts) + "\n"


def base_name(model: Any) -> str | None:
    """What a model was loaded from; None where it was made in the program."""
    if hasattr(model, "peft_config"):
        named = next(iter(model.peft_config.values())).base_model_name_or_path
        if named:
            return str(named)
        model = model.get_base_model()
    return getattr(model.config, "_name_or_path", None) or None


def is_repository(name: str) -> bool:
    """Whether this is the name of a repository on the hub, and not a folder.

    >>> is_repository("Qwen/Qwen3-1.7B"), is_repository("./mine"), is_repository("runs/mine/best")
    (True, False, False)
    """
    return bool(REPOSITORY.fullmatch(name)) and not Path(name).exists()


def licence_of(base: str | None) -> str | None:
    """What the card of a base model states, where it lies on this machine."""
    if base is None:
        return None
    path: Any = Path(base) / README
    if is_repository(base):
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(base, README)
    if not isinstance(path, str | Path) or not Path(path).is_file():
        return None
    found = re.match(r"---\n(.*?)\n---", Path(path).read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    try:
        stated = yaml.safe_load(found[1]).get("license") if found else None
    except (yaml.YAMLError, AttributeError):
        return None
    return stated if isinstance(stated, str) and LICENCE.fullmatch(stated) else None


def _of_licence(licence: str | None, base: str | None) -> str:
    if licence:
        return f"That of the base model: {licence}."
    if base is None:
        return "Yours to choose: the base model was made in this program."
    return f"That of the base model, `{_short(base)}`; its card states none that could be read here."


def _use(title: str, adapter: bool, base: str | None, hub: str | None) -> str:
    where = json.dumps(hub or f"path/to/{title}")
    if adapter:
        lines = [
            "from peft import AutoPeftModelForCausalLM",
            "from transformers import AutoTokenizer",
            "",
            f"model = AutoPeftModelForCausalLM.from_pretrained({where})  # on {base or 'its base model'}",
        ]
    else:
        lines = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f"model = AutoModelForCausalLM.from_pretrained({where})",
        ]
    return "\n".join(["```python", *lines, f"tokenizer = AutoTokenizer.from_pretrained({where})", "```"])


def _settings(trainer: Any, facts: CardFacts, method: str) -> dict[str, str]:
    """What was set, of what matters."""
    args = trainer.args
    found = {"method": method}
    for name in (*(OBJECTIVE if hasattr(args, "target") else OF_TRL), *GENERAL):
        value = getattr(args, name, None)
        if value is not None:
            found[name] = str(getattr(value, "value", value))
    found["steps"] = str(trainer.state.global_step)
    found["processes"] = str(trainer.accelerator.num_processes)
    found["data"] = _short(facts.data) if facts.data else "not named"
    for name in ("command", "commit"):
        if getattr(facts, name):
            found[name] = f"`{getattr(facts, name)}`"
    found["versions"] = ", ".join(f"{name} {_version(name)}" for name in PACKAGES if _version(name))
    return found


def _table(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head."""
    cells = [[" ".join(cell.replace(r"\[", "[").split()).replace("|", r"\|") for cell in row] for row in rows]
    cells.insert(1, ["---"] * len(cells[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _short(name: str) -> str:
    """A folder by its last part: where it lies on a machine is nobody's business."""
    return name if is_repository(name) else Path(name).name or name


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
