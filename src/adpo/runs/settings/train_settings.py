"""What `adpo train` is asked for: a YAML file and ``--key value`` pairs become checked settings.

Keys are the fields of `RunSettings` and of the trainer's own arguments: `ADPOConfig`, or TRL's `GRPOConfig` for
the methods that are TRL's. A key nobody knows is answered with the nearest one that exists.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from adpo.tasks.generated_tasks import LEVELS, TASKS
from adpo.runs.settings.keys import field_defaults, near, sorted_out
from adpo.runs.settings.spellings import OF_TRAIN

METHODS: dict[str, dict[str, Any]] = {
    "adpo": {},
    "grpo": {"loss_type": "grpo", "scale_rewards": "group", "importance_sampling_level": "token"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "importance_sampling_level": "token"},
    "gspo": {"loss_type": "grpo", "scale_rewards": "group", "importance_sampling_level": "sequence"},
}
"""What tells the methods of TRL apart."""


@dataclass(frozen=True)
class RunSettings:
    """What the trainer's arguments do not say."""

    method: str = "adpo"
    model: str = field(default="embedded", metadata={"help": "A name or folder transformers can load."})
    start: str | None = field(default=None, metadata={"help": "Weights of an earlier run of it to begin with."})
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
    dev_problems: int | None = field(
        default=None,
        metadata={"help": "Training problems taken for validation (a tenth, 200 at most; with eval_data none)."},
    )
    eval_every: int = field(default=50, metadata={"help": "Steps between evaluations on them; 0: never."})
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
                f"method must be one of {', '.join(METHODS)}; got {self.method!r}{near(self.method, METHODS)}"
            )
        if self.task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}; got {self.task!r}{near(self.task, TASKS)}")
        if not 1 <= self.level <= LEVELS:
            raise ValueError(f"level must be between 1 and {LEVELS}; got {self.level}")
        if self.reward is not None and self.data is not None and self.levels is not None:
            raise ValueError("levels means nothing to rows for a reward function of your own: leave it out")
        if self.start is not None and self.use_peft:
            raise ValueError("start and use_peft: an adapter begins anew; give the weights as model instead")
        if self.data is None and self.eval_data is not None:
            raise ValueError("eval_data means nothing without data (problems are generated): give data as well")
        if self.embedded and self.data is not None:
            raise ValueError("the embedded model knows generated tasks only: give a --model for --data")
        least = {"eval_problems": 1, "dev_problems": 0, "eval_every": 0, "eval_batch": 1, "lora_r": 1}
        for name, low in {**least, "train_problems": 1}.items():
            if getattr(self, name) is not None and getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}; got {getattr(self, name)}")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout must be at least 0 and below 1; got {self.lora_dropout}")
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


def resolve(settings: Mapping[str, Any], method: str | None = None) -> Asked:
    """Check names and types of what was given, in a file or on the command line."""
    from adpo.trainers.trl.arguments import MEANINGLESS

    given = dict(settings)
    if method is not None:
        given["method"] = method
    chosen = RunSettings(method=str(given.get("method", "adpo"))).method
    theirs = trainer_fields(chosen)
    if chosen == "adpo":
        theirs = {name: hint for name, hint in theirs.items() if name not in MEANINGLESS}
    run, trainer = sorted_out(
        given, typing.get_type_hints(RunSettings), theirs, lambda n: _misplaced(n, chosen), OF_TRAIN
    )
    return Asked(RunSettings(**run), {**METHODS[chosen], **trainer})


def trainer_fields(method: str) -> dict[str, Any]:
    """The arguments of the method's trainer with their types."""
    from adpo.trainers.trl import ADPOConfig
    from adpo.trainers.trl.grpo import FastGRPOConfig

    config = ADPOConfig if method == "adpo" else FastGRPOConfig
    hints = typing.get_type_hints(config)
    return {f.name: hints.get(f.name, Any) for f in dataclasses.fields(config) if f.init}


def default_arguments(method: str) -> dict[str, Any]:
    """What the arguments of the method's trainer are where nothing is said of them."""
    from adpo.trainers.trl import ADPOConfig
    from adpo.trainers.trl.grpo import FastGRPOConfig

    return field_defaults(ADPOConfig if method == "adpo" else FastGRPOConfig)


def _misplaced(name: str, method: str) -> str | None:
    """What to say of an argument of another method."""
    from adpo.trainers.trl.arguments import MEANINGLESS

    if method == "adpo" and name in MEANINGLESS:
        return f"{name} is refused with method adpo: {MEANINGLESS[name]}; leave it out"
    if method != "adpo" and name in trainer_fields("adpo"):
        return f"{name} is an argument of method adpo; method {method} does not know it"
    return None
