"""Settings as they are typed: YAML and ``--key value`` pairs, checked against names and types."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, Union

import yaml

REFUSED = {
    "trust_remote_code": "code from a model repository is never run",
    "output_dir": "the folder is chosen with --out",
    "out": "the folder is chosen with --out",
    "seed": "it is chosen with --seed",
    "resume_from_checkpoint": "use --resume",
    "hub_token": "a run keeps its settings on disk, and a token is not to be there: log in with `hf auth login`",
    "disable_tqdm": "the progress bar is adpo's own",
}

MAPPINGS = (
    "model_init_kwargs",
    "chat_template_kwargs",
    "generation_kwargs",
    "gradient_checkpointing_kwargs",
    "lr_scheduler_kwargs",
)
"""What may be text for other programs, which read JSON from it; here YAML has read it before."""
COMMAND_LINE = ("config", "out", "seed", "resume", "dry_run")
"""What the command knows besides, for those who mistype it."""


def sorted_out(
    given: Mapping[str, Any],
    own: Mapping[str, Any],
    theirs: Mapping[str, Any],
    unknown: Callable[[str], str | None] = lambda _: None,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the run and arguments of its trainer, by the types of their fields.

    ``unknown`` may have something better to say about a name than that nobody knows it; ``elsewhere`` are names of
    other commands, with what they are here.
    """
    run: dict[str, Any] = {}
    trainer: dict[str, Any] = {}
    for name, value in given.items():
        if name in REFUSED:
            raise ValueError(f"{name} cannot be set: {REFUSED[name]}")
        if name in own:
            run[name] = coerced(name, value, own[name])
        elif name in theirs:
            trainer[name] = coerced(name, value, theirs[name])
        elif name in elsewhere:
            raise ValueError(f"there is no setting {name!r}: {elsewhere[name]}")
        else:
            here = f": it is given on the command line, --{name.replace('_', '-')}" if name in COMMAND_LINE else ""
            default = f"there is no setting {name!r}{here or near(name, [*own, *theirs, *COMMAND_LINE])}"
            raise ValueError(unknown(name) or default)
    for name in MAPPINGS:
        if not isinstance(trainer.get(name) or {}, dict):
            raise ValueError(f"{name} must be a mapping; got {trainer[name]!r:.60}")
    if "trust_remote_code" in (trainer.get("model_init_kwargs") or {}):
        raise ValueError(f"model_init_kwargs: trust_remote_code cannot be set: {REFUSED['trust_remote_code']}")
    return run, trainer


def field_defaults(kind: type) -> dict[str, Any]:
    """The defaults of a dataclass, for what may be set."""
    return {
        each.name: each.default if each.default_factory is MISSING else each.default_factory()
        for each in fields(kind)
        if each.init and (each.default is not MISSING or each.default_factory is not MISSING)
    }


def read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"--config {path} is not a file")
    try:
        content = _loaded(path.read_text(encoding="utf-8"))
    except _TwiceError as error:
        raise ValueError(f"{path}: {error.problem}: leave one of them out") from None
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
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
            found[name] = _value(name, text)
        elif rest and not rest[0].startswith("--"):
            found[name] = _value(name, rest.pop(0))
        else:
            found[name] = True
    return found


def _value(name: str, text: str) -> Any:
    if not text.strip():  # a variable of the shell that is not set: the default would be taken without a word
        raise ValueError(f"--{name} is given nothing: give it a value, null, or leave it out")
    try:
        return _loaded(text)
    except (yaml.YAMLError, RecursionError) as error:
        if isinstance(error, _TwiceError):
            raise ValueError(f"{text[:60]}: {error.problem}") from None
        return text


class _TwiceError(yaml.constructor.ConstructorError):
    """A key that a mapping has twice; of the two values YAML would take the last without a word."""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key, line = key_node.value, key_node.start_mark.line + 1
            if isinstance(key_node, yaml.ScalarNode) and key != "<<":
                if key in lines:
                    raise _TwiceError(problem=f"{key} is given twice, in lines {lines[key]} and {line}")
                lines[key] = line
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


def _loaded(text: str) -> Any:
    return yaml.load(text, Loader=_Loader)


def near(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
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
    if value is False and name.endswith("_strategy"):  # YAML reads the word so
        return "no"
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
        return number if float(number) == float(value) else None  # 2.5 is no whole number
    except (OverflowError, ValueError):
        return None


def _name(option: Any) -> str:
    names = {float: "a number", int: "a whole number", bool: "true or false", str: "text", dict: "a mapping"}
    if typing.get_origin(option) is list or option is list:
        return "a list"
    return names.get(typing.get_origin(option) or option, "one of its choices")
