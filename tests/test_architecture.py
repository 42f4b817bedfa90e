"""Which room may import which, what `import adpo` costs, and that the examples in the documents run."""

import ast
import doctest
import importlib
import pkgutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import adpo

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "adpo"
MODULES = sorted(SOURCE.rglob("*.py"))


def imports(path):
    """Every module imported anywhere in the file, as a dotted name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "adpo"}
    return found


def foreign(path):
    """Top-level names of third-party packages."""
    return {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names) - {"adpo", ""}


def room(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


MAY_IMPORT = {
    "core": {"core", "deprecated"},
    "baselines": {"baselines"},
    "anchors": {"core", "deprecated"},
    "deprecated": set(),
    "exact": {"core", "rows", "system"},
    "rows": {"core", "system"},
    "algorithm": {"core", "anchors"},
    "moved": set(),
    "__init__": {
        *("__init__", "algorithm", "anchors", "baselines", "core", "deprecated", "exact", "moved", "scoring")
    },
    "system": {"__init__", "__version__", "system"},
    # language models: what they compute, what they are asked, what they prefer
    "scoring": {"core", "scoring"},
    "sampling": {"sampling", "scoring"},
    "tasks": {"sampling", "scoring", "tasks"},
    "preferences": {"core", "preferences", "scoring", "tasks"},
    "models": {"models", "tasks"},
    "trainers": {
        *(
            "__init__",
            "anchors",
            "core",
            "deprecated",
            "exact",
            "models",
            "preferences",
            "sampling",
            "scoring",
            "system",
            "tasks",
            "trainers",
        ),
    },
    "runs": {"models", "preferences", "runs", "scoring", "system", "tasks", "trainers"},
    # on top
    "experiments": {
        *(
            "__init__",
            "__version__",
            "algorithm",
            "anchors",
            "baselines",
            "core",
            "exact",
            "experiments",
            "models",
        ),
        *("preferences", "runs", "scoring", "system", "tasks", "trainers"),
    },
    "bench": {"__init__", "bench", "core", "experiments", "models", "preferences", "runs", "scoring", "tasks"},
    "report": {"experiments", "report", "system"},
    "tuning": {"experiments", "runs", "system", "tuning"},
    "commands": {"experiments", "preferences", "runs", "system", "tasks", "trainers", "tuning"},
    "cli": {
        *("__init__", "commands", "core", "experiments", "models", "preferences", "report", "runs", "system"),
        *("scoring", "tasks", "trainers"),
    },
    "__main__": {"cli"},
}
MAY_USE = {  # besides torch: few, named files
    "cli.py": {"typer", "rich"},
    "commands/reproduce.py": {"typer", "rich"},
    "commands/tune.py": {"typer", "rich"},
    "commands/verl.py": {"typer", "rich"},
    "bench/core.py": {"rich"},
    "bench/head.py": {"rich", "trl"},
    "bench/preferences.py": {"rich", "tokenizers", "transformers"},
    "bench/reasoning.py": {"rich", "tokenizers", "transformers"},
    "experiments/statistics.py": {"scipy"},
    "experiments/bandits/figures.py": {"matplotlib"},
    "experiments/bandits/run.py": {"rich"},
    "experiments/distill/actor.py": {"safetensors"},
    "experiments/distill/figures.py": {"matplotlib"},
    "experiments/distill/film.py": {"matplotlib"},
    "experiments/distill/run.py": {"rich"},
    "experiments/distill/lessons.py": {"numpy", "safetensors"},
    "experiments/distill/measures.py": {"numpy"},
    "experiments/distill/teachers.py": {"numpy"},
    "experiments/distill/training.py": {"numpy", "safetensors"},
    "experiments/distill/worlds.py": {"gymnasium", "mujoco", "numpy"},
    "experiments/distill/students.py": {"safetensors"},
    "experiments/efficiency/contenders.py": {"datasets", "transformers", "trl"},
    "experiments/efficiency/figures.py": {"matplotlib"},
    "experiments/efficiency/policies.py": {"tokenizers", "transformers"},
    "experiments/efficiency/run.py": {"rich"},
    "experiments/geometry/figures.py": {"matplotlib"},
    "report/page.py": {"jinja2", "plotly"},
    "tuning/tuner.py": {"rich"},
    "tuning/figures.py": {"matplotlib"},
    "tuning/summary.py": {"yaml"},
    "tuning/study.py": {"optuna"},
    "experiments/listwise/__main__.py": {"rich"},
    "experiments/listwise/models.py": {"transformers"},
    "experiments/reasoning/figures.py": {"matplotlib"},
    "experiments/reasoning/run.py": {"rich"},
    "experiments/reasoning/starts.py": {"peft", "safetensors"},
    "experiments/pictures.py": {"matplotlib"},
    "experiments/tables.py": {"rich"},
    "experiments/reasoning/warmup.py": {"peft"},
    "experiments/reasoning/trial.py": {"transformers"},
    "models/gguf.py": {"transformers"},
    "scoring/fused_head_kernels.py": {"triton"},
    "tasks/verifier_process.py": {"math_verify"},
    "models/embedded.py": {"tokenizers", "transformers"},
    "scoring/packed/attention.py": {"transformers"},
    "preferences/reading.py": {"datasets", "pyarrow"},
    "preferences/table.py": {"pyarrow"},
    "preferences/tokens.py": {"jinja2"},
    "trainers/trl/arguments.py": {"transformers"},
    "trainers/trl/grpo.py": {"trl"},
    "trainers/trl/config.py": {"trl"},
    "trainers/checkpoints/model_card.py": {"huggingface_hub", "yaml"},
    "trainers/monitors/weights_moved.py": {"transformers"},
    "trainers/trl/contract.py": {"trl"},
    "trainers/trl/rollout/sampling.py": {"transformers"},
    "trainers/listwise/config.py": {"transformers"},
    "trainers/listwise/sources.py": {"peft", "safetensors", "transformers"},
    "trainers/listwise/reference.py": {"safetensors", "transformers"},
    "trainers/listwise/scores.py": {"transformers"},
    "trainers/listwise/watching.py": {"accelerate"},
    "trainers/listwise/trainer.py": {"transformers"},
    "trainers/checks/accepted.py": {"transformers"},
    "trainers/engine.py": {"accelerate"},
    "trainers/monitors/empty_steps.py": {"transformers"},
    "trainers/monitors/guards.py": {"transformers"},
    "trainers/checkpoints/safe_checkpoints.py": {"safetensors"},
    "trainers/epochs.py": {"transformers"},
    "trainers/checkpoints/notes.py": {"transformers"},
    "trainers/trl/step/backtracking.py": {"safetensors", "transformers"},
    "trainers/trl/rollout/resume.py": {"safetensors"},
    "trainers/verl/data.py": {"pyarrow"},
    "trainers/verl/settings.py": {"verl"},
    "trainers/verl/rows.py": {"tensordict", "verl"},
    "trainers/verl/loss.py": {"numpy", "tensordict", "verl"},
    "trainers/verl/worker.py": {"tensordict", "verl"},
    "trainers/verl/trainer.py": {"verl"},
    "trainers/verl/models.py": {"tensordict", "verl"},
    "trainers/verl/resume.py": {"verl"},
    "trainers/verl/plugin.py": {"verl"},
    "trainers/trl/base.py": {"trl"},
    "trainers/trl/rollout/vllm.py": {"accelerate"},
    "trainers/trl/online.py": {"accelerate", "transformers", "trl"},
    "trainers/checkpoints/state_file.py": {"safetensors"},
    "runs/settings/train_settings.py": {"trl"},
    "runs/settings/keys.py": {"yaml"},
    "runs/interrupt.py": {"transformers"},
    "runs/splits.py": {"datasets"},
    "runs/train_eval.py": {"accelerate", "rich"},
    "runs/evaluation.py": {"accelerate", "numpy"},
    "runs/display.py": {"rich"},
    "runs/settings/memory.py": {"peft", "transformers"},
    "runs/by_name.py": {"accelerate", "datasets", "peft", "safetensors", "transformers"},
    "runs/settings/packages.py": {"huggingface_hub", "transformers"},
    "runs/train.py": {"datasets", "transformers", "trl"},
    "runs/validation.py": {"transformers"},
    "runs/prefer.py": {"rich", "transformers"},
}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    inside = {
        name.split(".")[1] if "." in name else "__init__" for name in imports(path) if name.split(".")[0] == "adpo"
    }
    assert inside <= MAY_IMPORT[room(path)], f"{path.name} imports {inside}"
    assert foreign(path) <= {"torch"} | MAY_USE.get(str(path.relative_to(SOURCE)), set())


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_stay_readable(path):
    assert len(path.read_text().splitlines()) <= 300
    assert path.stem not in ("utils", "helpers", "common", "manager", "misc")


def test_no_two_modules_share_a_name():
    """Where an experiment or a trainer has a folder of its own, its files are named as in the others."""
    inside = [path.relative_to(SOURCE) for path in MODULES if not path.stem.startswith("__")]
    names = Counter(path.stem for path in inside if path.parts[0] not in ("experiments", "trainers"))
    assert [name for name, count in names.items() if count > 1] == []


LISTS = {"baselines": 15, "experiments/bandits": 13, "experiments/distill": 17, "experiments/listwise": 13}
LISTS |= {"experiments/reasoning": 19}


def test_folders_can_be_looked_over():
    counts = Counter(str(path.parent.relative_to(SOURCE)) for path in MODULES if path.stem != "__init__")
    assert {folder: count for folder, count in counts.items() if count > LISTS.get(folder, 12)} == {}


def test_import_adpo_imports_torch_alone():
    program = "import sys, torch; before = set(sys.modules); import adpo; print(*set(sys.modules) - before)"
    added = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    tops = {name.split(".")[0] for name in added} - set(sys.stdlib_module_names)
    assert tops <= {"adpo", "torch"}


def test_import_adpo_costs_less_than_a_third_of_a_second():
    """By the clock on the wall; a machine that is busy with other things gets a few more attempts."""
    program = "import time, torch; t = time.perf_counter(); import adpo; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", program]
    costs = (float(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(10))
    assert any(cost < 0.3 for cost in costs)


@pytest.mark.parametrize(
    "name", ["adpo", *(m.name for m in pkgutil.walk_packages(adpo.__path__, "adpo.") if "__main__" not in m.name)]
)
def test_docstring_examples_run(name):
    if name.startswith("adpo.trainers.trl"):
        pytest.importorskip("trl")
    if name.startswith("adpo.trainers.verl.") and not name.endswith(".recipe"):
        pytest.importorskip("verl")
    if name == "adpo.scoring.fused_head_kernels":
        pytest.importorskip("triton")
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0


@pytest.mark.parametrize(
    "page", ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
)
def test_examples_in_the_documents_run(page):
    results = doctest.testfile(str(ROOT / page), module_relative=False)
    assert results.failed == 0
    if page == "README.md":
        assert results.attempted >= 5


def test_everything_exported_exists():
    assert all(hasattr(adpo, name) for name in adpo.__all__)
    assert sorted(adpo.__all__) == adpo.__all__
