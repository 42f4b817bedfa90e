"""The page of corrections points at tests that are there, and every entry has something to show."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "paper.md").read_text()
LINKED = re.findall(r"\]\(\.\./(tests/\S+\.py) '(test_\w+)'\)", PAGE)
ENTRIES = re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]


@pytest.mark.parametrize(("file", "name"), LINKED, ids=[name for _, name in LINKED])
def test_what_is_linked_is_there(file, name):
    assert f"def {name}(" in (ROOT / file).read_text()


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.splitlines()[0] for entry in ENTRIES])
def test_every_entry_says_what_is_done_and_what_shows_it(entry):
    assert "*The paper*" in entry
    if not entry.startswith("References"):
        assert "*Shown by*" in entry
        assert re.search(r"\*Why|\*Here", entry)
