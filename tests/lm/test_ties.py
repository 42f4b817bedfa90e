"""What trainers and measures say about a group agrees with the core on what is tied."""

import pytest
import torch

from adpo.preferences.rankings import ranking

SUM, THIRD = 0.1 + 0.2, 0.3  # one unit in the last place apart
REWARDS = torch.tensor([SUM, THIRD, 0.0, SUM, THIRD, THIRD], dtype=torch.float64)
LISTS = torch.tensor([0, 0, 0, 1, 1, 1])


def test_measures_of_an_order():
    found = ranking(torch.tensor([1.0, 2.0, 0.0, 2.0, 1.0, 0.0]), REWARDS, LISTS)
    assert found.accuracy.tolist() == [1.0]  # the second list prefers nothing
    assert found.ndcg.tolist() == pytest.approx([1.0])
    assert found.best_first.tolist() == [1.0]


def test_best_and_worst_of_a_list():
    pytest.importorskip("transformers")
    from adpo.trainers.listwise.collate import shares

    best, worst = shares(LISTS, REWARDS)
    assert best.tolist() == [0.5, 0.5, 0, 0, 0, 0]
    assert worst.tolist() == [0, 0, 1, 0, 0, 0]


def test_best_and_worst_of_a_rollout():
    pytest.importorskip("trl")
    from adpo.trainers.trl.rollout.members import extremes

    of_groups = {"first": 0, "size": 3, "gather": lambda values: values}
    best, worst = extremes(REWARDS, torch.ones(6, dtype=torch.bool), **of_groups)
    assert best.tolist() == [0.5, 0.5, 0, 0, 0, 0]
    assert worst.tolist() == [0, 0, 1, 0, 0, 0]
    member = torch.tensor([True, False, True, True, True, True])
    best, _ = extremes(REWARDS, member, **of_groups)
    assert best.tolist() == [1, 0, 0, 0, 0, 0]


def test_lists_without_a_preference():
    pytest.importorskip("pyarrow")
    from adpo.preferences.row import Preferences

    assert Preferences("p", ["a", "b"], [SUM, THIRD]).tied
    assert not Preferences("p", ["a", "b"], [SUM, 0.2]).tied
