"""What a result says about where it comes from."""

from __future__ import annotations

from adpo.provenance import provenance


def test_a_copy_without_history_is_told_its_commit(monkeypatch):
    monkeypatch.setenv("ADPO_COMMIT", "abc123")
    assert provenance()["commit"] == "abc123"


def test_a_checkout_knows_its_commit(monkeypatch):
    monkeypatch.delenv("ADPO_COMMIT", raising=False)
    commit = provenance()["commit"].removesuffix(" with changes")
    assert commit == "unknown" or (len(commit) == 40 and int(commit, 16))
