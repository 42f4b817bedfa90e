"""Scripts in the documents run as they stand there, on a small model and little data."""

import json
import re
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("trl")

import torch
from datasets import Dataset

from adpo.lm.embedded import WarmUp, make_model, make_tokenizer

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
