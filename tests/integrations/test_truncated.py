"""Completions that a limit of length cut: never the best of their group, known from the sampler if it says so."""

import itertools
import math
from types import SimpleNamespace

import pytest
import test_trl_online as online
import tiny_lm
import torch
from hypothesis import given
from hypothesis import strategies as st

from adpo.trainers.trl.rollout.endings import Completion, Endings, RecordedEngine

DIGIT, END = 2, 1
WHOLE, CUT = [DIGIT, END], [DIGIT] * online.LENGTH


class Fixed(online.Fixed):
    """Rewards by row, and rows that are cut."""

    rewards, cut = (), ()

    def _generate_single_turn(self, prompt_ids, *_, **__):
        return [CUT if cut else WHOLE for cut in self.cut], None


def rollout(folder, rewards, cut, monkeypatch, rule="zero"):
    """The batch of one rollout of one group of four."""
    monkeypatch.setattr(online, "Fixed", type("Rows", (Fixed,), {"cut": cut}))
    monkeypatch.setattr(online, "reward", lambda completions, **_: list(rewards))
    trainer = online.trained(folder, 4, 1, steps=1, truncated=rule)
    return trainer._generate_and_score_completions([{"prompt": online.PROMPTS[0]}] * 4), trainer


@pytest.mark.parametrize(
    ("rewards", "cut", "expected"),
    [
        ([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1], [1.0, 0.0, 0.0, 0.0]),  # right or wrong: a cut one is wrong
        ([-1.0, -2.0, -3.0, 5.0], [0, 0, 1, 1], [-1.0, -2.0, -3.0, -2.0]),  # negative: no better than the worst
        ([-1.0, -2.0, -0.5, 0.0], [0, 0, 1, 1], [-1.0, -2.0, -2.0, -2.0]),
        ([3.0, 2.0, 1.0, 4.0], [0, 0, 1, 1], [3.0, 2.0, 0.0, 0.0]),
        ([1.0, 0.5, 0.0, 1.0], [1, 1, 1, 1], [0.0, 0.0, 0.0, 0.0]),  # all are cut: nothing above 0
        ([-1.0, 0.5, -2.0, 1.0], [1, 1, 1, 1], [-1.0, 0.0, -2.0, 0.0]),
    ],
)
def test_a_cut_completion_is_no_better_than_the_worst_uncut_one(tmp_path, rewards, cut, expected, monkeypatch):
    batch, trainer = rollout(tmp_path, rewards, cut, monkeypatch)
    assert batch["rewards"].tolist() == expected
    assert trainer.state.log_history[0]["completions/truncated"] == sum(cut) / 4


def test_masked_ones_leave_their_group(tmp_path, monkeypatch):
    batch, _ = rollout(tmp_path, [1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1], monkeypatch, rule="mask")
    assert batch["member"].tolist() == [True, True, False, False]
    assert batch["rewards"].tolist() == [1.0, 0.0, 1.0, 1.0]


finite = st.floats(-5, 5, width=32)


@given(st.lists(st.tuples(finite, st.booleans()), min_size=2, max_size=6))
def test_for_any_rewards_and_any_cuts(rows):
    """The rule by itself: nobody who was cut is above 0, above what it had, or above anybody who was not."""
    from adpo.trainers.trl.rollout.members import no_better_than_uncut

    rewards, cut = (torch.tensor(column) for column in zip(*rows, strict=True))
    member = torch.ones_like(cut)
    found = no_better_than_uncut(rewards, member, cut, first=0, size=len(rows), gather=lambda values: values)
    assert torch.equal(found[~cut], rewards[~cut])
    assert bool((found[cut] <= rewards[cut]).all())
    assert bool((found[cut] <= 0).all())
    if (~cut).any() and cut.any():
        assert found[cut].max() <= found[~cut].min()


# How a completion ended.


class Engine:
    """As vLLM answers."""

    name = "engine"

    def __init__(self, *answers):
        self.answers = answers

    def generate(self, prompts, sampling_params=None, use_tqdm=True):
        return [
            SimpleNamespace(
                prompt_token_ids=prompt["prompt_token_ids"],
                outputs=[SimpleNamespace(token_ids=tokens, finish_reason=reason)],
            )
            for prompt, (tokens, reason) in zip(prompts, self.answers, strict=True)
        ]


def test_what_vllm_says_is_believed():
    """Cut below the limit (the context was full), whole at the limit (a stop word), whole with no end."""
    engine = RecordedEngine(Engine(([7, 8], "length"), ([7, 8, 9], "stop"), ([7], "stop"), ([7, END], "stop")))
    engine.generate([{"prompt_token_ids": [5, number]} for number in range(4)], use_tqdm=False)
    endings = Endings(ends={END}, limit=3, reasons=engine.reasons)
    rows = [([5, 0], [7, 8]), ([5, 1], [7, 8, 9]), ([5, 2], [7]), ([5, 3], [7, END])]
    assert [endings.is_cut(Completion(*row)) for row in rows] == [True, False, False, False]
    assert engine.name == "engine"


def test_the_reason_of_the_last_turn_counts():
    engine = RecordedEngine(Engine(([7, END], "stop"), ([8, 9], "length")))
    engine.generate([{"prompt_token_ids": [5]}, {"prompt_token_ids": [5, 7, END, 3, 4]}])
    endings = Endings(ends={END}, limit=99, reasons=engine.reasons)
    assert endings.is_cut(Completion([5], [7, END, 3, 4, 8, 9], [1, 1, 0, 0, 1, 1]))


@pytest.mark.parametrize("stop_words", [False, True])
@pytest.mark.parametrize("length", range(1, 6))
def test_without_a_reason_end_token_and_length_say_it(length, stop_words):
    endings = Endings(ends={END}, limit=4, stop_words=stop_words)
    assert not endings.is_cut(Completion([5], [7] * (length - 1) + [END]))
    assert endings.is_cut(Completion([5], [7] * length)) == (not stop_words or length >= 4)


@pytest.mark.parametrize("written", [[1, 1, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
def test_the_last_turn_is_what_the_model_wrote_last(written):
    row = Completion([5], [7, 8, 9, 6], written)
    expected = len(list(itertools.takewhile(bool, reversed(written))))
    assert row.last_turn == expected
    assert row.tool_turns == (0 if all(written) else 1)
    cut = Endings(ends={END}, limit=math.inf, own_rollout=True).is_cut(row)
    assert not cut


def test_the_tokenizer_of_these_tests():
    assert tiny_lm.tokenizer().eos_token_id == END
