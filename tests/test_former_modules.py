"""Modules under their former names: the module of today, with a warning; nothing of the package imports one."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import adpo
from adpo import moved

ROOT = Path(__file__).parent.parent
NEEDS = {"fused_head_kernels": "triton", "trainers.verl": "verl"}


@pytest.mark.parametrize("former", moved.NAMES)
def test_a_former_module_is_the_one_of_today(former):
    today = f"adpo.{moved.NAMES[former]}"
    for part, package in NEEDS.items():
        if part in today:
            pytest.importorskip(package)
    module = importlib.import_module(today)
    sys.modules.pop(f"adpo.{former}", None)
    with pytest.warns(DeprecationWarning, match=re.escape(f"adpo.{former} is now {today}")):
        assert importlib.import_module(f"adpo.{former}") is module
    assert module.__name__ == today
    assert module.__spec__.name == today


def test_former_packages_hold_former_modules():
    """As users have them in their scripts."""
    program = "from adpo.integrations.trl import ADPOConfig, ADPOTrainer; from adpo.lm import tasks, embedded; "
    program += "from adpo.integrations.listwise import ListwiseTrainer; import adpo.training.settings; "
    program += "print(ADPOTrainer.__module__, tasks.__name__, adpo.training.settings.RunSettings.__module__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        "adpo.trainers.trl.online",
        "adpo.tasks.generated_tasks",
        "adpo.runs.settings.train_settings",
    ]


@pytest.mark.parametrize(
    "name", ["adpo.lm.zebra", "adpo.integrations.zebra", "adpo.integrations.trl.grpo", "adpo.zebra"]
)
def test_a_module_that_never_was_is_not_found(name):
    with pytest.raises(ModuleNotFoundError, match=name):
        importlib.import_module(name)


def test_nothing_in_the_package_uses_a_former_module():
    former = {f"adpo.{name}" for name in (*moved.NAMES, *moved.FOLDERS)}
    for path in Path(adpo.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not former & set(names), path


def test_the_map_in_the_readme_is_that_of_the_tree():
    text = (ROOT / "README.md").read_text().split("## Map of the repository")[1].split("tests/ ")[0]
    source = Path(adpo.__file__).parent
    there = {path.name + "/" for path in source.iterdir() if path.is_dir() and path.name != "__pycache__"}
    there |= {path.name for path in source.glob("*.py") if not path.name.startswith("__")}
    assert set(re.findall(r"(?:^  |; )(\w+(?:/|\.py))(?=\s|:)", text, re.M)) == there
