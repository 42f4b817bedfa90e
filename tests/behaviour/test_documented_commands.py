"""Commands in the documents are commands of the package: no option is misspelt, no setting has gone."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("optuna")

import typer.main

from adpo.cli import app
from adpo.runs.settings.keys import parse_pairs
from adpo.runs.settings.prefer_settings import PreferSettings
from adpo.runs.settings.train_settings import RunSettings
from adpo.trainers.listwise import ListwiseConfig
from adpo.trainers.trl import ADPOConfig
from adpo.tuning.experiment_jobs import EXPERIMENTS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = sorted(
    {
        (page.relative_to(ROOT).as_posix(), found.group(1).split(" #")[0].strip())
        for page in PAGES
        for found in re.finditer(r"^(?:    )?(adpo [a-z-]+\b(?: .*)?)$", page.read_text(), re.MULTILINE)
        if " is " not in found.group(1).split("#")[0]  # a sentence
    }
)
PEFT = {"use_peft", "lora_r", "lora_alpha", "config"}
TRAIN = {field.name for kind in (RunSettings, ADPOConfig) for field in dataclasses.fields(kind)} | PEFT
PREFER = {field.name for kind in (PreferSettings, ListwiseConfig) for field in dataclasses.fields(kind)} | PEFT


def test_commands_were_found():
    assert len(WRITTEN) > 30
    assert {words.split()[1] for _, words in WRITTEN} >= {"train", "prefer", "eval", "tune", "report", "reproduce"}


@pytest.mark.parametrize(("page", "words"), WRITTEN, ids=[words for _, words in WRITTEN])
def test_a_command_in_the_documents_can_be_typed(page, words):
    command, given = typer.main.get_command(app), shlex.split(words)[1:]
    context = command.make_context("adpo", list(given))
    while hasattr(command, "commands"):
        name, command, given = command.resolve_command(context, given)
        context = command.make_context(name, list(given), parent=context)  # refuses what it does not know
    if name in ("train", "prefer"):
        job, settings = name, list(context.args)
    elif name == "tune":
        job, *settings = [context.params["job"], *context.args]
    else:
        return
    if job in EXPERIMENTS:
        EXPERIMENTS[job](tuple(settings), 0).checked(Path(), {})
        return
    if job == "prefer" and settings and not settings[0].startswith("--"):
        settings = settings[1:]
    assert set(parse_pairs(settings)) <= (TRAIN if job == "train" else PREFER), page
