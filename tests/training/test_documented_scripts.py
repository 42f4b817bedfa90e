"""Scripts in the documents run as they stand there, on a small model and little data."""

import json
import re
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("trl")

import torch
from datasets import Dataset

from adpo.models.embedded import WarmUp, make_model, make_tokenizer
from adpo.preferences import reading as preferences

ROOT = Path(__file__).parents[2]
PAIRS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(8)]
LISTS = [{"prompt": f"{n}+1=", "completions": [str(n + 1), str(n)], "rewards": [1.0, 0.0]} for n in range(8)]
PROMPTS = [{"prompt": f"{n}+1=", "max_words": 3, "keyword": "1"} for n in range(8)]
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


def scripts(page):
    """Blocks of Python that are no sessions, which have a test of their own."""
    found = [textwrap.dedent(block) for _, block in BLOCK.findall(page.read_text())]
    return [block for block in found if ">>>" not in block]


PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if scripts(page)]


def test_there_are_scripts():
    assert {page.name for page in PAGES} >= {"train.md", "prefer.md", "from_dpo.md", "reward.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADPO_CACHE", str(tmp_path / "cache"))
    make_model(WarmUp(hidden=32, layers=1)).save_pretrained("my-model")
    make_tokenizer().save_pretrained("my-model")
    Path("lists.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LISTS))
    given = {"pairs": Dataset.from_list(PAIRS), "dataset": Dataset.from_list(PROMPTS)}
    for script in scripts(page):
        if not torch.cuda.is_available():  # TRL's configurations want to be told
            script = script.replace("DPOConfig(", "DPOConfig(bf16=False, ")
        exec(compile(script, page.name, "exec"), given)
    trainer = given.get("trainer")
    assert trainer is None or trainer.state.global_step > 0
    if page.name == "reward.md":
        assert given["concise"](["water is wet", "dry"], ["water", "water"]) == [0.25, 0.0]


ROWS = re.compile(r"^( *)```json\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", ["prefer.md", "howto/preferences.md"])
def test_rows_in_the_documents_are_preferences(name, tmp_path):
    blocks = [textwrap.dedent(block) for _, block in ROWS.findall((ROOT / "docs" / name).read_text())]
    assert blocks
    for number, block in enumerate(blocks):
        (tmp_path / f"{number}.jsonl").write_text(block)
        found = list(preferences.read(tmp_path / f"{number}.jsonl"))
        assert len(found) == len(block.splitlines())
        assert not [row for row in found if isinstance(row, preferences.BadRow)]


def test_what_becomes_of_a_script_of_grpo_trains(tmp_path):
    """The lines that the page keeps and adds, on a small model."""
    (changes,) = re.findall(
        r"^```diff\n(.*?)^```$", (ROOT / "docs/from_grpo.md").read_text(), re.DOTALL | re.MULTILINE
    )
    after = "\n".join(line[1:] for line in changes.splitlines() if not line.startswith("-"))
    here = f"output_dir={str(tmp_path)!r}, use_cpu=True, bf16=False, report_to=[],"
    short = f"{here} max_steps=2, max_completion_length=4,"
    assert 'output_dir="out",' in after
    folder = tmp_path / "model"
    make_model(WarmUp(hidden=32, layers=1)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    given = {
        "model": str(folder),
        "data": Dataset.from_list(PROMPTS),
        "reward": lambda completions, **_: [float(len(text) % 2) for text in completions],
    }
    exec(compile(after.replace('output_dir="out",', short), "from_grpo.md", "exec"), given)
    assert given["trainer"].state.global_step == 2
