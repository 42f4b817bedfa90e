"""What a result says about where it comes from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import adpo
from adpo.system.provenance import provenance, typed


def test_a_copy_without_history_is_told_its_commit(monkeypatch):
    monkeypatch.setenv("ADPO_COMMIT", "abc123")
    assert provenance()["commit"] == "abc123"


def test_a_checkout_knows_its_commit(monkeypatch):
    monkeypatch.delenv("ADPO_COMMIT", raising=False)
    here = Path(adpo.__file__).parent
    said = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    commit = provenance()["commit"].removesuffix(" with changes")
    assert commit == (said.stdout.strip() if said.returncode == 0 else "unknown")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("/somewhere/bin/adpo", "adpo train --data 'my file'"),
        ("/somewhere/site-packages/adpo/__main__.py", "adpo train --data 'my file'"),
        (
            "/adpo/src/adpo/experiments/listwise/__main__.py",
            "python -m adpo.experiments.listwise train --data 'my file'",
        ),
        ("/somewhere/site-packages/theirs/__main__.py", "python -m theirs train --data 'my file'"),
    ],
)
def test_the_command_as_it_was_typed(monkeypatch, script, said):
    monkeypatch.setattr("sys.argv", [script, "train", "--data", "my file"])
    assert typed() == said
