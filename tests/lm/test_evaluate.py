"""Accuracy, pass@k and their intervals; answers of a model; the reward for right ones."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from adpo.models.embedded import WarmUp, make_model, make_tokenizer
from adpo.tasks.evaluate import Sampling, Scored, answers, difference, gain, normal, share, wilson
from adpo.tasks.generated_tasks import Outcome
from adpo.tasks.reward_functions import Correct


def scored(rows):
    return Scored([["x"] * len(row) for row in rows], rows)


@pytest.mark.parametrize("n", [3, 5])
def test_pass_at_k_is_the_mean_over_all_choices_of_k_answers(n):
    draw = random.Random(n)
    rows = [[float(draw.random() < 0.3) for _ in range(n)] for _ in range(7)]
    for k in range(1, n + 1):
        choices = [[max(c) for c in itertools.combinations(row, k)] for row in rows]
        expected = sum(sum(c) / len(c) for c in choices) / len(choices)
        assert scored(rows).pass_at(k).value == pytest.approx(expected)
    assert scored(rows).pass_at(1).value == pytest.approx(scored(rows).accuracy().value)
    with pytest.raises(ValueError, match=f"pass@{n + 1} needs at least"):
        scored(rows).pass_at(n + 1)


def test_intervals_cover_the_truth_about_95_times_in_100():
    draw = random.Random(0)
    covered = {"wilson": 0, "normal": 0}
    for _ in range(1000):
        right = [float(draw.random() < 0.3) for _ in range(60)]
        for name, found in {"wilson": wilson(sum(right), 60), "normal": normal(right)}.items():
            covered[name] += found.low <= 0.3 <= found.high
    assert 920 <= covered["wilson"] <= 980
    assert 910 <= covered["normal"] <= 980


def test_an_interval_of_a_share_stays_inside_and_covers_the_truth():
    """Also where nearly all is right: there a normal interval leaves [0, 1], or has no width, and covers less."""
    draw = random.Random(1)
    kinds = {
        "sampled answers": lambda: sum(draw.random() < 0.9 for _ in range(4)) / 4,
        "orders of a list": lambda: draw.choice([0.0, 0.5, 1.0, 1.0]),
        "nearly all right": lambda: 1.0 if draw.random() < 0.9 else draw.random(),
    }
    for name, one in kinds.items():
        truth = sum(one() for _ in range(100_000)) / 100_000
        covered = {"share": 0, "normal": 0}
        for _ in range(500):
            values = [one() for _ in range(40)]
            found, other = share(values), normal(values)
            assert 0 <= found.low <= found.value <= found.high <= 1
            covered["share"] += found.low <= truth <= found.high
            covered["normal"] += other.low <= truth <= other.high
        assert covered["share"] >= max(440, covered["normal"]), name
    assert share([1.0] * 20) == wilson(20, 20)
    assert share([0.0, 1.0, 1.0, 0.0, 1.0]) == pytest.approx(wilson(3, 5))
    assert normal([1.0, 1.0, 1.0, 0.5]).high > 1  # what a share must not have
    assert share([1.0, 1.0, 1.0, 0.5]).high <= 1
    assert difference([1.0, 1.0, 1.0, 0.5]).high == 1
    with pytest.raises(ValueError, match=r"a share lies between 0 and 1; got values from -0\.5 to 1"):
        share([1.0, -0.5])


def test_a_graded_reward_is_no_accuracy():
    graded = scored([[0.3, 1.0], [2.0, -1.0]])
    assert not graded.right_or_wrong
    assert graded.mean_reward() == normal(graded.means)
    for figure in (graded.accuracy, lambda: graded.pass_at(1)):
        with pytest.raises(ValueError, match="scores of 0 and 1"):
            figure()
    assert gain(scored([[0.0], [0.0]]), scored([[3.0], [9.0]])).high > 9  # a reward has no bounds


def test_certain_answers_have_an_interval_all_the_same():
    assert wilson(0, 20).high == pytest.approx(0.161, abs=1e-3)
    assert wilson(20, 20).low == pytest.approx(0.839, abs=1e-3)
    with pytest.raises(ValueError, match="at least one problem"):
        wilson(0, 0)
    with pytest.raises(ValueError, match="at least one problem"):
        share([])


def test_a_gain_is_paired():
    """Ten problems are hard for both: what is left is nine out of twenty, all in one direction."""
    before = scored([[0.0]] * 19 + [[1.0]])
    after = scored([[0.0]] * 10 + [[1.0]] * 10)
    found = gain(before, after)
    assert found.value == pytest.approx(0.45)
    assert found.low > 0
    assert gain(after, before).value == pytest.approx(-0.45)
    with pytest.raises(ValueError, match="zip"):
        gain(before, scored([[1.0]]))


def test_answers_come_in_order_and_leave_the_random_state_alone():
    model, tokenizer = make_model(WarmUp(hidden=16, layers=1)), make_tokenizer()
    prompts = [f"{n}+{n}=" for n in range(7)]
    state = torch.get_rng_state()
    drawn = answers(model, tokenizer, prompts, Sampling(4, temperature=1.0, samples=3, batch=5))
    assert torch.equal(torch.get_rng_state(), state)
    assert [len(row) for row in drawn] == [3] * 7
    assert drawn == answers(model, tokenizer, prompts, Sampling(4, temperature=1.0, samples=3, batch=5))
    greedy = answers(model, tokenizer, prompts, Sampling(4))
    assert greedy == answers(model, tokenizer, prompts, Sampling(4, batch=2))
    for prompt, (text,) in zip(prompts, greedy, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        for _ in range(4):
            following = model(ids).logits[0, -1].argmax()
            if following == tokenizer.eos_token_id:
                break
            ids = torch.cat([ids, following.view(1, 1)], 1)
        assert tokenizer.decode(ids[0], skip_special_tokens=True) == prompt + text
    assert model.training is True  # as it was


def test_right_answers_are_rewarded_and_outcomes_told():
    told = {}
    with Correct() as reward:
        rewards = reward(
            completions=["12", "so it is #### 12", "13", "a dozen", [{"role": "assistant", "content": "12"}]],
            task=["arithmetic"] * 5,
            answer=["12"] * 5,
            log_metric=told.__setitem__,
        )
    assert rewards == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert told == {
        "outcomes/correct": 0.6,
        "outcomes/wrong": 0.2,
        "outcomes/unparsable": 0.2,
        "outcomes/timed_out": 0.0,
    }
    assert reward.counts == {Outcome.correct: 3, Outcome.wrong: 1, Outcome.unparsable: 1}


@pytest.mark.parametrize(("rule", "expected"), [("zero", 0.0), ("mask", None)])
def test_a_check_that_times_out_scores_zero_or_is_left_out(monkeypatch, rule, expected):
    with Correct(rule) as reward:
        monkeypatch.setattr(reward, "_verified", lambda pairs: [Outcome.timed_out] * len(pairs))
        assert reward(completions=["9^9^9", "4"], task=["math", "arithmetic"], answer=["1", "4"]) == [
            expected,
            1.0,
        ]


def test_mathematics_goes_to_the_verifier_and_back_to_its_place():
    with Correct(workers=1) as reward:
        found = reward(
            completions=[r"\boxed{\frac{1}{2}}", "7", "nothing"],
            task=["math", "arithmetic", "math"],
            answer=["0.5", "7", "3"],
        )
    assert found == [1.0, 1.0, 0.0]
    assert math.isclose(sum(reward.counts.values()), 3)


def test_answers_by_recorded_steps_are_those_of_generate(monkeypatch):
    """Without a GPU the steps are taken one by one."""
    model = make_model(WarmUp(hidden=32, layers=2))
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    prompts = [f"{n}+{n * n}=" for n in range(7)]
    for sampling in (Sampling(4, batch=3), Sampling(4, temperature=1e-6, samples=2, batch=4)):
        expected = answers(model, make_tokenizer(), prompts, sampling)
        with monkeypatch.context() as patched:
            patched.setattr(type(model), "generate", lambda *_, **__: 1 / 0)
            recorded = replace(sampling, recorded=True)
            assert answers(model.train(), make_tokenizer(), prompts, recorded) == expected
            assert model.training
        model.config.sliding_window = 16  # a model that cannot be sampled so is sampled as before
        assert answers(model, make_tokenizer(), prompts, recorded) == expected
        model.config.sliding_window = None


def test_models_that_read_padding_answer_as_they_do_alone():
    """A state runs through padding on the left: such a model is asked one prompt at a time."""
    from transformers import RwkvConfig, RwkvForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = RwkvConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        attention_hidden_size=32,
        num_hidden_layers=2,
        context_length=64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = RwkvForCausalLM(config).eval()
    for value in model.parameters():  # far from its zeros: what it reads shows
        torch.nn.init.normal_(value, std=0.3)
    prompts = ["1+1=", "12+345=", "9=", "123456+7="]
    alone = [answers(model, tokenizer, [prompt], Sampling(8))[0] for prompt in prompts]
    assert answers(model, tokenizer, prompts, Sampling(8, batch=4)) == alone
