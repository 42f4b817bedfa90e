"""What is relied on inside TRL: looked at before a trainer is made, and one line where it has changed."""

import ast
import inspect
import re
import tomllib
from pathlib import Path

import pytest
import test_trl_online as online
import tiny_lm
import trl
from datasets import Dataset
from packaging.version import Version
from trl import GRPOTrainer

from adpo.trainers.trl import ADPOConfig, ADPOTrainer, base, contract
from adpo.trainers.trl.grpo import FastGRPOTrainer


def test_the_installed_trl_is_as_it_should_be():
    assert contract.changed(GRPOTrainer) == []
    assert Version(contract.OLDEST) <= Version(trl.__version__)


def test_the_versions_claimed_are_those_that_are_tested():
    """The oldest is the bound of the package, the newest is the one that is installed for the tests."""
    project = Path(__file__).parent.parent.parent
    extras = tomllib.loads((project / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    bound = next(line for line in extras["lm"] if line.startswith("trl"))
    assert Version(bound.removeprefix("trl>=")) == Version(contract.OLDEST)
    assert f"trl=={contract.NEWEST}" in (project / "constraints.txt").read_text().splitlines()


SOURCE = Path(base.__file__).parent
FILES = [*SOURCE.glob("*.py"), *SOURCE.parent.glob("*.py")]


def test_what_is_overridden_stands_in_the_contract():
    """But for what transformers and TRL document."""
    for trainer in (ADPOTrainer, FastGRPOTrainer):
        own = trainer.__mro__[: trainer.__mro__.index(GRPOTrainer)]
        assert len([kind for kind in own if issubclass(kind, GRPOTrainer)]) == 2  # itself, and what both share
        names = {name for kind in own for name in vars(kind) if not name.startswith("__")}
        overridden = {name for name in names if callable(getattr(GRPOTrainer, name, None))}
        assert overridden - set(contract.SIGNATURES) <= {"train"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_is_read_of_trl_stands_in_the_contract(path):
    """Private methods, and attributes that TRL's trainer sets when it is made."""
    attributes = set(re.findall(r"self\.(\w+)(?:: [^=]+)? = ", inspect.getsource(GRPOTrainer.__init__)))
    of_trl = attributes | {name for name in dir(GRPOTrainer) if name.startswith("_") and not name.startswith("__")}
    own = {name for kind in (ADPOTrainer, FastGRPOTrainer) for part in kind.__mro__ for name in part.__dict__}
    own = {name for name in own if not hasattr(GRPOTrainer, name)}
    listed = {*contract.SIGNATURES, *contract.ATTRIBUTES, *contract.WHERE_USED, *contract.PUBLIC}
    tree = ast.parse(path.read_text())
    forms = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.endswith("Trainer")]
    of_others = {id(node) for form in forms for node in ast.walk(form) if ast.unparse(node).startswith("self.")}
    of_others -= {id(node) for form in forms for node in ast.walk(form) if "self.trainer" in ast.unparse(node)}
    unlisted = {
        f"{path.name}:{node.lineno} {node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in of_trl - own - listed
        and ast.unparse(node.value) in ("trainer", "self.trainer", "super()", "self")
        and id(node) not in of_others
    }
    assert not unlisted


@pytest.mark.parametrize("name", contract.SIGNATURES)
def test_methods_that_are_gone_are_found(name):
    assert hasattr(GRPOTrainer, name)
    without = type(
        "Without", (), {known: getattr(GRPOTrainer, known) for known in contract.SIGNATURES if known != name}
    )
    assert contract.changed(without) == [f"{name} is gone"]


@pytest.mark.parametrize("name", [name for name, wanted in contract.SIGNATURES.items() if wanted])
def test_parameters_that_are_gone_are_found(name):
    other = type("Other", (GRPOTrainer,), {name: lambda self: None})
    (line,) = contract.changed(other)
    assert line == f"{name} has no parameter {', '.join(contract.SIGNATURES[name])}"
    assert contract.changed(type("Any", (GRPOTrainer,), {name: lambda self, *_, **__: None})) == []


def made(folder):
    rows = Dataset.from_list([{"prompt": prompt} for prompt in online.PROMPTS])
    args = ADPOConfig(str(folder), per_device_train_batch_size=8, use_cpu=True, bf16=False, report_to="none")
    return ADPOTrainer(
        tiny_lm.model(), online.reward, args, train_dataset=rows, processing_class=tiny_lm.tokenizer()
    )


def test_no_trainer_is_made_on_a_trl_that_has_changed(tmp_path, monkeypatch):
    monkeypatch.delattr(GRPOTrainer, "_calculate_rewards")
    expected = (
        rf"^TRL {trl.__version__} is not as adpo needs it \(_calculate_rewards is gone\); versions known to work"
    )
    with pytest.raises(ValueError, match=expected):
        made(tmp_path)


def test_an_attribute_that_is_gone_is_found_once_it_is_made(tmp_path, monkeypatch):
    plain = GRPOTrainer.__init__

    def forgetful(self, *arguments, **options):
        plain(self, *arguments, **options)
        del self.eos_token_ids

    monkeypatch.setattr(base.GRPOTrainer, "__init__", forgetful)
    with pytest.raises(ValueError, match="a trainer has no eos_token_ids"):
        made(tmp_path)


def test_a_rollout_without_a_column_is_found_before_anything_is_trained(tmp_path, monkeypatch):
    plain = GRPOTrainer._generate_and_score_completions

    def without(self, inputs):
        batch = plain(self, inputs)
        del batch["completion_mask"]
        return batch

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", without)
    with pytest.raises(ValueError, match="a rollout has no completion_mask"):
        made(tmp_path).train()


def test_fewer_returned_values_are_found(tmp_path, monkeypatch):
    plain = GRPOTrainer._generate
    monkeypatch.setattr(GRPOTrainer, "_generate", lambda self, prompts: plain(self, prompts)[:5])
    with pytest.raises(ValueError, match="_generate returns 5 values"):
        made(tmp_path).train()
