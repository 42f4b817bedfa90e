"""Which room may import which, what `import adpo` costs, and that the examples in the documents run."""

import ast
import doctest
import importlib
import pkgutil
import subprocess
import sys
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
    "exact": {"core", "ranks", "rows"},
    "rows": {"core", "ranks"},
    "ranks": set(),
    "algorithm": {"core", "anchors"},
    "__init__": {"__init__", "core", "anchors", "exact", "algorithm", "baselines", "deprecated", "lm"},
    "experiments": {
        "core",
        "anchors",
        "exact",
        "algorithm",
        "baselines",
        "experiments",
        "integrations",
        "lm",
        "devices",
        "files",
        "provenance",
        "training",
        "__init__",
        "__version__",
    },
    "lm": {"lm", "core"},
    "integrations": {"core", "anchors", "exact", "lm", "integrations", "__init__", "ranks"},
    "training": {"lm", "integrations", "training", "devices", "errors", "files", "provenance"},
    "errors": set(),
    "files": set(),
    "devices": set(),
    "provenance": {"__init__", "__version__"},
    "bench": {"core", "experiments", "lm", "training", "bench", "__init__"},
    "extras": set(),
    "reproduce": {"experiments", "extras", "training", "tuning"},
    "report": {"report", "experiments", "files"},
    "tuning": {"tuning", "training", "experiments", "extras", "files", "provenance"},
    "tuning_commands": {"extras", "tuning"},
    "cli": {
        "core",
        "errors",
        "experiments",
        "extras",
        "files",
        "integrations",
        "lm",
        "report",
        "reproduce",
        "training",
        "tuning_commands",
        "verl_commands",
        "__init__",
    },
    "verl_commands": {"extras", "files", "integrations", "lm", "training"},
    "__main__": {"cli"},
}
MAY_USE = {  # besides torch: few, named files
    "cli.py": {"typer", "rich"},
    "reproduce.py": {"typer", "rich"},
    "tuning_commands.py": {"typer", "rich"},
    "verl_commands.py": {"typer", "rich"},
    "bench/core.py": {"rich"},
    "bench/head.py": {"rich", "trl"},
    "bench/preferences.py": {"rich", "tokenizers", "transformers"},
    "bench/reasoning.py": {"rich", "tokenizers", "transformers"},
    "experiments/statistics.py": {"scipy"},
    "experiments/bandits/figures.py": {"matplotlib"},
    "experiments/bandits/summary.py": {"rich"},
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
    "experiments/efficiency/summary.py": {"rich"},
    "experiments/geometry/figures.py": {"matplotlib"},
    "report/page.py": {"jinja2", "plotly"},
    "tuning/command.py": {"rich"},
    "tuning/figures.py": {"matplotlib"},
    "tuning/summary.py": {"yaml"},
    "tuning/study.py": {"optuna"},
    "experiments/listwise/__main__.py": {"rich"},
    "experiments/listwise/models.py": {"transformers"},
    "experiments/listwise/summary.py": {"rich"},
    "experiments/reasoning/figures.py": {"matplotlib"},
    "experiments/reasoning/run.py": {"rich"},
    "experiments/reasoning/starts.py": {"peft", "safetensors"},
    "experiments/pictures.py": {"matplotlib"},
    "experiments/tables.py": {"rich"},
    "experiments/reasoning/warmup.py": {"peft"},
    "experiments/reasoning/trial.py": {"transformers"},
    "lm/gguf.py": {"transformers"},
    "lm/head_kernels.py": {"triton"},
    "lm/verifier_process.py": {"math_verify"},
    "lm/embedded.py": {"tokenizers", "transformers"},
    "lm/attention.py": {"transformers"},
    "lm/preferences.py": {"datasets", "pyarrow"},
    "lm/preference_table.py": {"pyarrow"},
    "lm/preference_tokens.py": {"jinja2"},
    "integrations/trl/arguments.py": {"transformers"},
    "integrations/trl/baselines.py": {"trl"},
    "integrations/trl/config.py": {"trl"},
    "integrations/model_card.py": {"huggingface_hub", "yaml"},
    "integrations/weights_moved.py": {"transformers"},
    "integrations/trl/contract.py": {"trl"},
    "integrations/trl/sampling.py": {"transformers"},
    "integrations/listwise/config.py": {"transformers"},
    "integrations/listwise/sources.py": {"peft", "safetensors", "transformers"},
    "integrations/listwise/reference.py": {"safetensors", "transformers"},
    "integrations/listwise/scores.py": {"transformers"},
    "integrations/listwise/watching.py": {"accelerate"},
    "integrations/listwise/trainer.py": {"transformers"},
    "integrations/accepted.py": {"transformers"},
    "integrations/engine.py": {"accelerate"},
    "integrations/empty_steps.py": {"transformers"},
    "integrations/guards.py": {"transformers"},
    "integrations/checkpoints.py": {"safetensors"},
    "integrations/epochs.py": {"transformers"},
    "integrations/notes.py": {"transformers"},
    "integrations/trl/backtracking.py": {"safetensors", "transformers"},
    "integrations/trl/resume.py": {"safetensors", "trl"},
    "integrations/verl/data.py": {"pyarrow"},
    "integrations/verl/settings.py": {"verl"},
    "integrations/verl/rows.py": {"tensordict", "verl"},
    "integrations/verl/loss.py": {"numpy", "tensordict", "verl"},
    "integrations/verl/worker.py": {"tensordict", "verl"},
    "integrations/verl/trainer.py": {"verl"},
    "integrations/verl/models.py": {"tensordict", "verl"},
    "integrations/verl/resume.py": {"verl"},
    "integrations/verl/plugin.py": {"verl"},
    "integrations/trl/rollouts.py": {"accelerate"},
    "integrations/trl/vllm.py": {"accelerate"},
    "integrations/trl/online.py": {"transformers", "trl"},
    "integrations/state.py": {"safetensors"},
    "training/settings.py": {"trl"},
    "training/keys.py": {"yaml"},
    "training/interrupt.py": {"transformers"},
    "training/data.py": {"datasets"},
    "training/command.py": {"accelerate", "rich"},
    "training/exam.py": {"accelerate", "numpy"},
    "training/display.py": {"rich"},
    "training/memory.py": {"peft", "transformers"},
    "training/models.py": {"accelerate", "datasets", "peft", "safetensors", "transformers"},
    "training/packages.py": {"huggingface_hub", "transformers"},
    "training/run.py": {"datasets", "transformers", "trl"},
    "training/watch.py": {"transformers"},
    "training/prefer.py": {"rich", "transformers"},
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
    if name.startswith("adpo.integrations.trl"):
        pytest.importorskip("trl")
    if name.startswith("adpo.integrations.verl.") and not name.endswith(".recipe"):
        pytest.importorskip("verl")
    if name == "adpo.lm.head_kernels":
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
