"""How well scores order lists, against definitions written out pair by pair."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adpo.experiments.listwise import measure
from adpo.preferences.rankings import ranking

number = st.floats(-5, 5).map(lambda x: round(x, 2))
listing = st.integers(2, 6).flatmap(
    lambda k: st.tuples(
        st.lists(number, min_size=k, max_size=k, unique=True),
        st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=k, max_size=k),
    )
)


def by_hand(scores, rewards):
    """Accuracy, NDCG and best-first of one list."""
    pairs = [(i, j) for i, j in itertools.permutations(range(len(scores)), 2) if rewards[i] > rewards[j]]
    accuracy = sum((scores[i] > scores[j]) + 0.5 * (scores[i] == scores[j]) for i, j in pairs) / len(pairs)
    gains = [reward - min(rewards) for reward in rewards]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    found = sum(gains[i] / math.log2(place + 2) for place, i in enumerate(order))
    best = sum(gain / math.log2(place + 2) for place, gain in enumerate(sorted(gains, reverse=True)))
    return accuracy, found / best, float(rewards[order[0]] == max(rewards))


@given(st.lists(listing, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_every_list_is_what_its_definition_says(listings, draw):
    """Whatever the order of the rows."""
    rows = [
        (n, s, r) for n, (scores, rewards) in enumerate(listings) for s, r in zip(scores, rewards, strict=True)
    ]
    draw.shuffle(rows)
    lists, scores, rewards = (torch.tensor(column) for column in zip(*rows, strict=True))
    found = ranking(scores, rewards, lists)
    useful = [(s, r) for s, r in listings if max(r) > min(r)]
    assert len(found.accuracy) == len(useful)
    for i, (s, r) in enumerate(useful):
        expected = by_hand(s, r)
        assert [float(values[i]) for values in found] == pytest.approx(expected)
        assert float(found.accuracy[i]) == pytest.approx(measure.pair_accuracy(torch.tensor(s), torch.tensor(r)))


@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=6).filter(lambda r: max(r) > min(r)), st.data()
)
def test_equal_scores_share_their_places(rewards, data):
    """Against the measures of the experiment, which are written list by list."""
    scores = torch.tensor(
        data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=len(rewards), max_size=len(rewards)))
    )
    r = torch.tensor(rewards, dtype=torch.float64)
    found = ranking(scores + 1e-7 * torch.rand(len(r)), r, torch.zeros(len(r), dtype=torch.long)).mean()
    assert found["accuracy"] == pytest.approx(measure.pair_accuracy(scores, r))
    assert found["ndcg"] == pytest.approx(measure.ndcg(scores.double(), r - r.min()))
    assert found["best_first"] == pytest.approx(measure.top1(scores, r))


def test_lists_without_preference_say_nothing():
    found = ranking(torch.rand(4), torch.ones(4), torch.tensor([0, 0, 1, 1]))
    assert len(found.accuracy) == 0
    assert found.mean() == {}
