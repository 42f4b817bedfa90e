"""Models and reward functions by name."""

from __future__ import annotations

import importlib.util
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError

from adpo.system.devices import best_device
from adpo.trainers.checks.quantised import keep_differentiable
from adpo.models import embedded
from adpo.scoring.context import longest_row
from adpo.runs.display import Display
from adpo.runs.evaluation import Reward
from adpo.runs.settings.prefer_settings import PreferSettings
from adpo.runs.settings.train_settings import RunSettings

T = TypeVar("T")


def quiet() -> None:
    """Libraries keep their bars and notices to themselves."""
    import datasets
    import transformers

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def processes(on_cpu: bool | None = None) -> PartialState:
    """This process among those that run together; settled at the first call."""
    cpu = not torch.accelerator.is_available() if on_cpu is None else on_cpu
    return PartialState(cpu=cpu)


def settled_by_main(compute: Callable[[], T]) -> T:
    """What the main process finds, in every process; what it complains about, too."""
    found: list[Any] = [None, None]
    if processes().is_main_process:
        try:
            found[0] = compute()
        except ValueError as error:
            found[1] = str(error)
    found = broadcast_object_list(found)
    if found[1] is not None:
        raise ValueError(found[1])
    result: T = found[0]
    return result


def load_model(folder: str | Path, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """Model and tokenizer, or an adapter on its base model, by name or folder."""
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(folder)
    options = {"dtype": "float32", **(options or {})}
    try:
        if (Path(folder) / "adapter_config.json").exists():
            from peft import AutoPeftModelForCausalLM

            model = AutoPeftModelForCausalLM.from_pretrained(folder, **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, **options)
    except (ImportError, OSError, SafetensorError, TypeError, ValueError) as error:  # TypeError: unknown option
        raise _unloadable(folder, error) from None
    keep_differentiable(model)
    return model.to(best_device()), tokenizer


def load_tokenizer(folder: str | Path) -> Any:
    """A model's tokenizer, with something to pad with."""
    from transformers import AutoTokenizer

    _look(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    except (OSError, TypeError, ValueError) as error:
        raise _unloadable(folder, error) from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def context_of(folder: str | Path) -> int | None:
    """The longest text a model takes, where its configuration says so."""
    from transformers import AutoConfig

    _look(folder)
    if (Path(folder) / "adapter_config.json").exists():
        return None
    try:
        return longest_row(AutoConfig.from_pretrained(folder))
    except (OSError, ValueError) as error:
        raise _unloadable(folder, error) from None


def _look(folder: str | Path) -> None:
    """What is meant as a folder is not to be looked up anywhere else."""
    if not Path(folder).is_dir() and meant_as_folder(str(folder)):
        raise ValueError(f"model {str(folder)!r} cannot be loaded: there is no such folder")


def meant_as_folder(name: str) -> bool:
    """Whether a name is a path here, not one of the hub: by its form, or as its parent folder is here."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or ("/" in name and Path(name).parent.is_dir())


def _unloadable(folder: str | Path, error: Exception) -> ValueError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if not Path(folder).exists():
        reason = f"there is no such folder here, and looked up as a name on the hub: {reason}"
    return ValueError(f"model {str(folder)!r} cannot be loaded: {reason}")


def model_folder(run: RunSettings | PreferSettings, display: Display) -> str:
    """Where the run's model is; the embedded one is made if need be."""
    if not run.embedded:
        return run.model
    recipe = embedded.WarmUp(task=run.task, level=run.level) if isinstance(run, RunSettings) else embedded.WarmUp()
    if (recipe.folder() / "config.json").exists():
        display.say(f"model: embedded, warmed up earlier ({recipe.folder()})")
        return str(recipe.folder())
    display.say(
        f"model: embedded; warming it up by supervised learning until it is right {recipe.goal:.0%} of the time"
    )
    with display.stage("warm-up", None):
        path = embedded.warmed_up(
            recipe, lambda step, right: display.at(step, {"right": f"{right:.0%}"}, line=step % 100 == 0)
        )
    return str(path)


def lora_config(run: RunSettings | PreferSettings) -> Any:
    """None for training of all weights."""
    if not run.use_peft:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=run.lora_r,
        lora_alpha=run.lora_alpha,
        lora_dropout=run.lora_dropout,
        target_modules=run.lora_target_modules or "all-linear",
        task_type="CAUSAL_LM",
    )


def own_reward(place: str) -> Reward:
    """``file.py:function``, the user's own code."""
    path, colon, name = place.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise ValueError(f"--reward must be file.py:function; got {place!r}")
    if not Path(path).is_file():
        raise ValueError(f"--reward {place}: {path} is not a file")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's code does
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"--reward {place}: {path} cannot be run{_line_of(error, path)}: {reason}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"--reward {place}: {path} has no function {name}")
    found: Reward = function
    return found


def _line_of(error: BaseException, path: str) -> str:
    """Where a file of the user's failed; a SyntaxError says it itself."""
    calls = traceback.extract_tb(error.__traceback__)
    mine = [call.lineno for call in calls if Path(call.filename) == Path(path).resolve()]
    return f", line {mine[-1]}" if mine else ""
