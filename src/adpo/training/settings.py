"""What `adpo train` is asked for: a YAML file and ``--key value`` pairs become checked settings.

Keys are the fields of `RunSettings` and of the trainer's own arguments: `ADPOConfig`, or TRL's `GRPOConfig` for
the methods that are TRL's. A key nobody knows is answered with the nearest one that exists.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Union

import yaml

from adpo.lm.tasks import LEVELS, TASKS

METHODS: dict[str, dict[str, Any]] = {
    "adpo": {},
    "grpo": {"loss_type": "grpo", "scale_rewards": "group", "importance_sampling_level": "token"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "importance_sampling_level": "token"},
    "gspo": {"loss_type": "grpo", "scale_rewards": "group", "importance_sampling_level": "sequence"},
}
"""What tells the methods of TRL apart."""

REFUSED = {
    "trust_remote_code": "code from a model repository is never run",
    "output_dir": "the folder is chosen with --out",
    "out": "the folder is chosen with --out",
    "seed": "it is chosen with --seed",
    "resume_from_checkpoint": "use --resume",
    "disable_tqdm": "the progress bar is adpo's own",
}

COMMAND_LINE = ("config", "out", "seed", "resume", "dry_run")
"""What the command knows besides, for those who mistype it."""


@dataclass(frozen=True)
class RunSettings:
    """What the trainer's arguments do not say."""

    method: str = "adpo"
    model: str = field(default="embedded", metadata={"help": "A name or folder transformers can load."})
    task: str = field(default="arithmetic", metadata={"help": "A generated task, where no data is given."})
    level: int = field(default=2, metadata={"help": "Its difficulty, 1 to 5."})
    data: str | None = field(default=None, metadata={"help": "JSON lines of problems, or a name for `datasets`."})
    data_config: str | None = field(default=None, metadata={"help": "Configuration of a named data set."})
    data_split: str = field(default="train", metadata={"help": "Split of a named data set."})
    eval_data: str | None = field(default=None, metadata={"help": "Held-out problems; as data."})
    eval_split: str = field(default="test", metadata={"help": "Split of a named data set to hold out."})
    levels: list[int] | None = field(default=None, metadata={"help": "Only problems of these levels."})
    train_problems: int | None = field(default=None, metadata={"help": "At most so many problems."})
    eval_problems: int = field(default=500, metadata={"help": "Held-out problems for before and after."})
    dev_problems: int = field(default=200, metadata={"help": "Training problems set aside to watch progress by."})
    eval_every: int = field(default=50, metadata={"help": "Steps between looks at them; 0: never."})
    eval_batch: int = field(default=64, metadata={"help": "Held-out problems answered at once."})
    reward: str | None = field(default=None, metadata={"help": "Your own reward: file.py:function, as in TRL."})
    instruction: str = field(
        default="Reason step by step, then give the final answer after ####.",
        metadata={"help": "Follows every question that is put in words."},
    )
    verifier_seconds: float = field(default=5.0, metadata={"help": "Time limit for checking one answer."})
    use_peft: bool = field(default=False, metadata={"help": "Train a LoRA adapter instead of all weights."})
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    lora_target_modules: list[str] | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(
                f"method must be one of {', '.join(METHODS)}; got {self.method!r}{_near(self.method, METHODS)}"
            )
        if self.task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}; got {self.task!r}{_near(self.task, TASKS)}")
        if not 1 <= self.level <= LEVELS:
            raise ValueError(f"level must be between 1 and {LEVELS}; got {self.level}")
        if self.reward is not None and self.data is not None and self.levels is not None:
            raise ValueError("levels means nothing to rows for a reward function of your own: leave it out")
        if self.embedded and self.data is not None:
            raise ValueError("the embedded model knows generated tasks only: give a --model for --data")
        least = {"eval_problems": 1, "dev_problems": 0, "eval_every": 0, "eval_batch": 1, "lora_r": 1}
        for name, low in {**least, "train_problems": 1}.items():
            if getattr(self, name) is not None and getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}; got {getattr(self, name)}")
        if self.verifier_seconds <= 0:
            raise ValueError(f"verifier_seconds must be positive; got {self.verifier_seconds}")

    @property
    def embedded(self) -> bool:
        return self.model == "embedded"


@dataclass(frozen=True)
class Asked:
    """A run as it was asked for: its settings and the arguments of its trainer."""

    run: RunSettings
    trainer: dict[str, Any]

    def described(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self.run), **self.trainer}


def resolve(config: Path | None, overrides: Mapping[str, Any], method: str | None = None) -> Asked:
    """Join the file and the pairs of the command line (which win), check names and types."""
    given = {**(read_yaml(config) if config else {}), **overrides}
    if method is not None:
        given["method"] = method
    chosen = RunSettings(method=str(given.get("method", "adpo"))).method
    from adpo.integrations.trl.config import MEANINGLESS

    own = typing.get_type_hints(RunSettings)
    theirs = trainer_fields(chosen)
    run: dict[str, Any] = {}
    trainer: dict[str, Any] = {}
    for name, value in given.items():
        if name in REFUSED:
            raise ValueError(f"{name} cannot be set: {REFUSED[name]}")
        if name in own:
            run[name] = coerced(name, value, own[name])
        elif name in theirs and not (chosen == "adpo" and name in MEANINGLESS):
            trainer[name] = coerced(name, value, theirs[name])
        else:
            raise ValueError(_unknown(name, chosen, [*own, *theirs, *COMMAND_LINE]))
    if "trust_remote_code" in (trainer.get("model_init_kwargs") or {}):
        raise ValueError(f"model_init_kwargs: trust_remote_code cannot be set: {REFUSED['trust_remote_code']}")
    return Asked(RunSettings(**run), {**METHODS[chosen], **trainer})


def read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"--config {path} is not a file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(f"{path}: expected lines of `key: value`")
    return content


def parse_pairs(words: Sequence[str]) -> dict[str, Any]:
    """``--key value`` and ``--key=value``; a key alone is true.

    >>> parse_pairs(["--learning-rate", "1e-5", "--use_peft", "--levels=[3, 4]"])
    {'learning_rate': '1e-5', 'use_peft': True, 'levels': [3, 4]}
    """
    found: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) < 3:
            raise ValueError(f"expected --key value; got {word!r}")
        name, equals, text = word[2:].partition("=")
        name = name.replace("-", "_")
        if name in found:
            raise ValueError(f"--{name} is given twice")
        if equals:
            found[name] = _value(text)
        elif rest and not rest[0].startswith("--"):
            found[name] = _value(rest.pop(0))
        else:
            found[name] = True
    return found


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def trainer_fields(method: str) -> dict[str, Any]:
    """The arguments of the method's trainer with their types."""
    from trl import GRPOConfig

    from adpo.integrations.trl import ADPOConfig

    config = ADPOConfig if method == "adpo" else GRPOConfig
    hints = typing.get_type_hints(config)
    return {f.name: hints.get(f.name, Any) for f in dataclasses.fields(config) if f.init}


def _unknown(name: str, method: str, known: Sequence[str]) -> str:
    if method == "adpo" and name in trainer_fields("grpo"):
        return f"{name} shapes a loss that method adpo does not use: leave it out"
    if method != "adpo" and name in trainer_fields("adpo"):
        return f"{name} is an argument of method adpo; method {method} does not know it"
    return f"there is no setting {name!r}{_near(name, known)}"


def _near(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def coerced(name: str, value: Any, hint: Any) -> Any:
    """The value as the type asks for it: YAML reads 1e-5 as text, and a whole number where a fraction is meant.

    >>> coerced("learning_rate", "1e-5", float), coerced("levels", [3], list[int] | None)
    (1e-05, [3])
    """
    options = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    if name == "tau" and value == "auto":
        return value
    if value is None and (type(None) in options or hint is Any):
        return None
    for option in options:
        fitted = _fitted(value, option)
        if fitted is not None:
            return fitted
    wanted = " or ".join(dict.fromkeys(_name(option) for option in options if option is not type(None)))
    raise ValueError(f"{name} must be {wanted}; got {value!r}")


def _fitted(value: Any, option: Any) -> Any:
    """The value as an ``option``, None if it is none."""
    kind = typing.get_origin(option) or option
    if kind is bool:
        return value if isinstance(value, bool) else None
    if kind in (int, float):
        return _number(value, kind)
    if kind is str:
        return value if isinstance(value, str) else None
    if kind is list:
        (inner,) = typing.get_args(option) or (Any,)
        items = [_fitted(item, inner) for item in value] if isinstance(value, list) else [None]
        return None if any(item is None for item in items) else items
    if kind is dict:
        return value if isinstance(value, dict) else None
    if option is Any:
        return value
    return None


def _number(value: Any, kind: type) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = kind(value)
    except ValueError:
        return None
    return number if float(number) == float(value) else None  # 2.5 is no whole number


def _name(option: Any) -> str:
    names = {float: "a number", int: "a whole number", bool: "true or false", str: "text", dict: "a mapping"}
    if typing.get_origin(option) is list or option is list:
        return "a list"
    return names.get(typing.get_origin(option) or option, "one of its choices")
