"""Every setting and every metric is in the documents."""

import ast
import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("trl")

from transformers import TrainingArguments
from trl import GRPOConfig

from adpo.preferences.rankings import Ranking
from adpo.runs.settings.prefer_settings import PreferSettings
from adpo.runs.settings.train_settings import RunSettings
from adpo.runs.validation import SHOWN
from adpo.tasks.generated_tasks import Outcome
from adpo.trainers.listwise import ListwiseConfig
from adpo.trainers.trl import ADPOConfig

DOCS = Path(__file__).parents[2] / "docs"


def test_settings_are_documented():
    text = (DOCS / "train.md").read_text()
    theirs = {field.name for field in dataclasses.fields(GRPOConfig)}
    own = [field.name for field in dataclasses.fields(ADPOConfig) if field.name not in theirs]
    for name in [*own, *(field.name for field in dataclasses.fields(RunSettings))]:
        assert f"`{name}`" in text, name


def test_settings_of_lists_are_documented():
    text = (DOCS / "prefer.md").read_text()
    theirs = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    fields = {field.name: field for field in dataclasses.fields(ListwiseConfig)}
    own = [name for name, field in fields.items() if name not in theirs or field.default != theirs[name]]
    assert {"completions_per_pass", "tau", "learning_rate"} <= set(own)
    for name in [*own, *(field.name for field in dataclasses.fields(PreferSettings))]:
        assert f"`{name}`" in text, name


def test_metrics_are_documented():
    text = (DOCS / "metrics.md").read_text()
    rooms = Path(__file__).parents[2] / "src/adpo/trainers"
    sources = [*(rooms / "trl").rglob("*.py"), *(rooms / "listwise").glob("*.py")]
    from adpo.core.objective import Diagnostics

    noted = (
        {name for source in sources for name in _noted(source.read_text())}
        | set(Diagnostics._fields)
        | set(Ranking._fields)
    )
    assert {"tau", "best_logp", "start_kl", "no_reward", "u_spread"} <= noted
    for name in noted:
        assert f"`adpo/{name}`" in text, name
    for name in [*SHOWN, "validation/accuracy", *(f"outcomes/{outcome.name}" for outcome in Outcome)]:
        assert f"`{name}`" in text, name


def _noted(source):
    """Keyword names of calls that add metrics, and the keys of what functions return for them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".add_metrics", "._note")):
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)
        returned = isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns)
        if returned in ("dict[str, float]", "dict[str, Tensor]") and node.name != "evaluate":
            tables = [each for each in ast.walk(node) if isinstance(each, ast.Dict)]
            yield from (key.value for table in tables for key in table.keys if isinstance(key, ast.Constant))
