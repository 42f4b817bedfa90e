"""Rows in passes by tokens, and the budget of a pass."""

import itertools
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from adpo.scoring import budget as budgets
from adpo.scoring.budget import TokenBudget
from adpo.scoring.packed.packing import Lengths, repacked
from adpo.scoring.passes import Sizes, token_passes
from adpo.scoring.sequences import sequences


def tokens(part, prompt, completion, groups, share):
    seen, total = set(), 0
    for row in part:
        total += completion[row]
        if not share or groups[row] not in seen:
            total += prompt[groups[row]]
        seen.add(groups[row])
    return total


@given(st.data())
def test_every_row_once_within_the_budget(data):
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    groups = [number for number, size in enumerate(sizes) for _ in range(size)]
    groups = data.draw(st.permutations(groups))
    prompt = data.draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    completion = data.draw(st.lists(st.integers(0, 20), min_size=len(groups), max_size=len(groups)))
    share, most = data.draw(st.booleans()), data.draw(st.integers(1, 60))
    of_rows = torch.tensor([prompt[group] for group in groups])
    lengths = Lengths(of_rows, torch.tensor(completion), torch.zeros(len(groups), dtype=torch.bool))
    parts = [part.tolist() for part in token_passes(lengths, torch.tensor(groups), most, share)]
    assert sorted(row for part in parts for row in part) == list(range(len(groups)))
    counts = [tokens(part, prompt, completion, groups, share) for part in parts]
    assert all(count <= most or len(part) == 1 for part, count in zip(parts, counts, strict=True))
    assert counts == sorted(counts, reverse=True)
    for part in parts:  # the rows of a group side by side
        order = [groups[row] for row in part]
        changes = sum(a != b for a, b in itertools.pairwise(order))
        assert changes == len(set(order)) - 1
    for group in range(len(sizes)):  # a group that fits is not split
        rows = [row for row in range(len(groups)) if groups[row] == group]
        if tokens(rows, prompt, completion, groups, share) <= most:
            assert sum(bool(set(part) & set(rows)) for part in parts) == 1


def test_passes_are_of_about_the_same_size():
    lengths = Lengths(torch.ones(10, dtype=torch.long), torch.full((10,), 9), torch.zeros(10, dtype=torch.bool))
    sizes = [len(part) for part in token_passes(lengths, torch.arange(10), 90)]
    assert sizes == [5, 5]


@pytest.fixture
def gpu(monkeypatch):
    """Memory as a GPU would tell of it."""
    held = {"now": 0, "peak": 0}
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: held["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: held["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: held.update(peak=held["now"]))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: held["now"] + 10 * 2**20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (90 * 2**20, 100 * 2**20))
    return held


def test_the_budget_is_what_free_memory_holds(gpu, caplog):
    budget = TokenBudget("auto", torch.device("cuda"))
    assert not budget.settle()  # nothing is known yet
    budget.begin(1000)
    gpu["peak"] = gpu["now"] + 20 * 2**20
    budget.end()
    budget.begin(10)  # a small pass tells less
    gpu["peak"] = gpu["now"] + 10 * 2**20
    budget.end()
    with caplog.at_level(logging.INFO, "adpo"):
        assert budget.settle()
    assert budget.tokens == int(budgets.USED * 100 * 1000 / 20)
    assert "tokens a pass: 4250" in caplog.text
    assert not budget.settle()  # once


def test_more_tokens_than_help_are_not_taken(gpu):
    budget = TokenBudget("auto", torch.device("cuda"))
    budget.begin(1000)
    gpu["peak"] = gpu["now"] + 1000
    budget.end()
    budget.settle()
    assert budget.tokens == budgets.MOST


def test_out_of_memory_halves_for_good(gpu):
    budget = TokenBudget("auto", torch.device("cuda"))
    budget.begin(600)
    budget.halve()
    assert budget.tokens == 300
    assert not budget.settle()
    budget.begin(200)  # a smaller pass failed: half of that
    budget.halve()
    assert budget.tokens == 100
    budget.start_again()
    assert (budget.tokens, budget.settled) == (budgets.FIRST, False)


def test_what_is_asked_for_is_kept(gpu):
    budget = TokenBudget(500, torch.device("cuda"))
    budget.begin(500)
    budget.end()
    assert not budget.settle()
    assert budget.tokens == 500


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_sizes_are_the_tokens_that_are_packed(share, seed):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (6,), generator=draw).tolist()
    prompts = [[10 + group] * lengths[group] for group in range(3) for _ in range(2)]
    completions = [[5] * length for length in lengths]
    rows, groups = sequences(prompts, completions, pad=0), torch.arange(6) // 2
    sizes = Sizes(Lengths.of(rows), groups, share)
    for chosen in (torch.tensor([0, 1]), torch.tensor([1, 2, 3, 5]), torch.tensor([4])):
        assert sizes.tokens(chosen) == len(repacked(rows.take(chosen), share).input_ids)
        assert sizes.of(chosen).tokens(torch.arange(len(chosen))) == sizes.tokens(chosen)
    assert sizes.tokens(torch.tensor([], dtype=torch.long)) == 0
