"""The command line in this process, and what it is typed about."""

import json
import sys

import pytest

pytest.importorskip("trl")

from adpo import cli
from adpo.models.embedded import WarmUp, make_model, make_tokenizer
from adpo.preferences.generated_lists import graded

REWARDS = """
def digits(completions, **_):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(map(str.isdigit, text)) / 4 for text in texts]

def none(completions, **_):
    return [None if row % 4 == 0 else float(row % 3) for row in range(len(completions))]
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("ADPO_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def given(tmp_path_factory):
    """A folder with a model, a reward function and lists."""
    folder = tmp_path_factory.mktemp("given")
    make_model(WarmUp(hidden=64, layers=1)).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "lists.jsonl").write_text("".join(json.dumps(row) + "\n" for row in graded(count=30)))
    return folder


@pytest.fixture
def typed(monkeypatch, capsys):
    """Run the command: exit code, output, errors."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["adpo", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return end.value.code, said.out, said.err

    return run
