"""What a result says about where it comes from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import adpo
from adpo.provenance import provenance


def test_a_copy_without_history_is_told_its_commit(monkeypatch):
    monkeypatch.setenv("ADPO_COMMIT", "abc123")
    assert provenance()["commit"] == "abc123"


def test_a_checkout_knows_its_commit(monkeypatch):
    monkeypatch.delenv("ADPO_COMMIT", raising=False)
    here = Path(adpo.__file__).parent
    said = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    commit = provenance()["commit"].removesuffix(" with changes")
    assert commit == (said.stdout.strip() if said.returncode == 0 else "unknown")
