"""Modules by their former names, kept for one version: importing one warns, and gives the module as it is now."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

NAMES = {
    "devices": "system.devices",
    "errors": "system.errors",
    "extras": "system.extras",
    "files": "system.files",
    "integrations.accepted": "trainers.checks.accepted",
    "integrations.arguments": "trainers.checks.arguments",
    "integrations.auto_tau": "trainers.monitors.auto_tau",
    "integrations.checkpoints": "trainers.checkpoints.checkpoint_files",
    "integrations.coordinates": "trainers.coordinates",
    "integrations.empty_steps": "trainers.monitors.empty_steps",
    "integrations.engine": "trainers.engine",
    "integrations.epochs": "trainers.epochs",
    "integrations.forms": "trainers.forms",
    "integrations.gradient_monitor": "trainers.monitors.gradient_monitor",
    "integrations.group_step": "trainers.group_step",
    "integrations.guards": "trainers.monitors.guards",
    "integrations.listwise": "trainers.listwise",
    "integrations.listwise.collate": "trainers.listwise.collate",
    "integrations.listwise.config": "trainers.listwise.config",
    "integrations.listwise.reference": "trainers.listwise.reference",
    "integrations.listwise.scores": "trainers.listwise.scores",
    "integrations.listwise.sources": "trainers.listwise.sources",
    "integrations.listwise.trainer": "trainers.listwise.trainer",
    "integrations.listwise.watching": "trainers.listwise.watching",
    "integrations.model_card": "trainers.checkpoints.model_card",
    "integrations.notes": "trainers.checkpoints.notes",
    "integrations.policies": "trainers.checks.policies",
    "integrations.passes": "trainers.group_step",
    "integrations.quantised": "trainers.checks.quantised",
    "integrations.safe_checkpoints": "trainers.checkpoints.safe_checkpoints",
    "integrations.sharding": "trainers.sharding",
    "integrations.state": "trainers.checkpoints.state_file",
    "integrations.trl": "trainers.trl",
    "integrations.trl.anchoring": "trainers.trl.step.anchoring",
    "integrations.trl.answers": "trainers.trl.rollout.answers",
    "integrations.trl.arguments": "trainers.trl.arguments",
    "integrations.trl.backtracking": "trainers.trl.step.backtracking",
    "integrations.trl.base": "trainers.trl.base",
    "integrations.trl.baselines": "trainers.trl.grpo",
    "integrations.trl.config": "trainers.trl.config",
    "integrations.trl.contract": "trainers.trl.contract",
    "integrations.trl.ending_recorder": "trainers.trl.rollout.ending_recorder",
    "integrations.trl.endings": "trainers.trl.rollout.endings",
    "integrations.trl.members": "trainers.trl.rollout.members",
    "integrations.trl.online": "trainers.trl.online",
    "integrations.trl.resume": "trainers.trl.rollout.resume",
    "integrations.trl.rows": "trainers.trl.step.rows",
    "integrations.trl.sampling": "trainers.trl.rollout.sampling",
    "integrations.trl.scoring": "trainers.trl.step.scoring",
    "integrations.trl.step_log": "trainers.trl.step.step_log",
    "integrations.trl.step_rows": "trainers.trl.step.step_rows",
    "integrations.trl.tau_control": "trainers.trl.step.tau_control",
    "integrations.trl.vllm": "trainers.trl.rollout.vllm",
    "integrations.verl": "trainers.verl",
    "integrations.verl.data": "trainers.verl.data",
    "integrations.verl.loss": "trainers.verl.loss",
    "integrations.verl.models": "trainers.verl.models",
    "integrations.verl.plugin": "trainers.verl.plugin",
    "integrations.verl.recipe": "trainers.verl.recipe",
    "integrations.verl.resume": "trainers.verl.resume",
    "integrations.verl.rows": "trainers.verl.rows",
    "integrations.verl.settings": "trainers.verl.settings",
    "integrations.verl.trainer": "trainers.verl.trainer",
    "integrations.verl.worker": "trainers.verl.worker",
    "integrations.weights_moved": "trainers.monitors.weights_moved",
    "lm.attention": "scoring.packed.attention",
    "lm.attention_kernels": "scoring.packed.attention_kernels",
    "lm.budget": "scoring.budget",
    "lm.compiled": "scoring.compiled",
    "lm.completions": "tasks.completions",
    "lm.context": "scoring.context",
    "lm.data": "tasks.problems",
    "lm.decoding": "sampling.decoding",
    "lm.decoding_checks": "sampling.decoding_checks",
    "lm.dropout": "scoring.dropout",
    "lm.embedded": "models.embedded",
    "lm.evaluate": "tasks.evaluate",
    "lm.expressions": "tasks.expressions",
    "lm.gguf": "models.gguf",
    "lm.head": "scoring.fused_head",
    "lm.head_kernels": "scoring.fused_head_kernels",
    "lm.lists": "preferences.generated_lists",
    "lm.packed_scoring": "scoring.packed.packed_scoring",
    "lm.packing": "scoring.packed.packing",
    "lm.packing_checks": "scoring.packed.packing_checks",
    "lm.padding": "scoring.padding",
    "lm.passes": "scoring.passes",
    "lm.preference_row": "preferences.row",
    "lm.preference_table": "preferences.table",
    "lm.preference_tokens": "preferences.tokens",
    "lm.preferences": "preferences.reading",
    "lm.rankings": "preferences.rankings",
    "lm.rewards": "tasks.reward_functions",
    "lm.scorer": "scoring.scorer",
    "lm.scoring": "scoring.sequences",
    "lm.tasks": "tasks.generated_tasks",
    "lm.verifier": "tasks.verifier",
    "lm.verifier_process": "tasks.verifier_process",
    "provenance": "system.provenance",
    "ranks": "system.ranks",
    "report.command": "report.make_report",
    "reproduce": "commands.reproduce",
    "training.command": "runs.train_eval",
    "training.data": "runs.splits",
    "training.display": "runs.display",
    "training.exam": "runs.evaluation",
    "training.folder": "runs.folder",
    "training.interrupt": "runs.interrupt",
    "training.keys": "runs.settings.keys",
    "training.lists": "runs.settings.prefer_settings",
    "training.memory": "runs.settings.memory",
    "training.models": "runs.by_name",
    "training.packages": "runs.settings.packages",
    "training.prefer": "runs.prefer",
    "training.run": "runs.train",
    "training.settings": "runs.settings.train_settings",
    "training.spellings": "runs.settings.spellings",
    "training.watch": "runs.validation",
    "report.experiments": "report.experiment_page",
    "tuning.command": "tuning.tuner",
    "tuning.experiments": "tuning.experiment_jobs",
    "tuning_commands": "commands.tune",
    "verl_commands": "commands.verl",
}
"""Former names below ``adpo``, and those of today."""
FOLDERS = ("lm", "integrations", "training")
"""Former packages that have become several."""
FIRST = {name.partition(".")[0] for name in (*NAMES, *FOLDERS)}


class FormerNames(MetaPathFinder, Loader):
    """Asked before all others, which would find former modules below packages that have moved as a whole."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        top, _, name = fullname.partition(".")
        if top != "adpo" or name.partition(".")[0] not in FIRST:
            return None
        if name not in NAMES and name not in FOLDERS:
            if name.partition(".")[0] in FOLDERS:  # its path would find the file, and run it a second time
                raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
            return None
        return ModuleSpec(fullname, self, is_package=name in FOLDERS)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The usual empty one."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of today in the place of this one."""
        former = module.__name__
        name = former.removeprefix("adpo.")
        if name in FOLDERS:
            return
        warnings.warn(f"{former} is now adpo.{NAMES[name]}", DeprecationWarning, stacklevel=2)
        sys.modules[former] = importlib.import_module(f"adpo.{NAMES[name]}")


def install() -> None:
    """For all imports to come."""
    if not any(isinstance(finder, FormerNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, FormerNames())
