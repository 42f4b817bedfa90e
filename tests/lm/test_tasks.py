"""Generated tasks: solvable, seeded, split once and for all; and scoring that survives what a model may write."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adpo.tasks.expressions import NotArithmeticError, evaluate
from adpo.tasks.generated_tasks import LEVELS, TASKS, Outcome, check, problems, split_of, up_to


@pytest.mark.parametrize("level", range(1, LEVELS + 1))
@pytest.mark.parametrize("task", TASKS)
def test_problems_are_distinct_and_the_same_for_a_seed(task, level):
    count = 20 if (task, level) != ("arithmetic", 1) else 8
    first = problems(task, count, level=level, seed=3)
    assert first == problems(task, count, level=level, seed=3)
    assert len({problem.prompt for problem in first}) == count
    assert {problem.level for problem in first} == {level}
    if task != "countdown":
        assert all(check(task, problem.answer, problem.answer) == Outcome.correct for problem in first)


@pytest.mark.parametrize("task", TASKS)
def test_training_and_test_problems_never_mix(task):
    train = {p.prompt for seed in range(3) for p in problems(task, 60, level=3, seed=seed)}
    test = {p.prompt for seed in range(3) for p in problems(task, 20, level=3, seed=seed, split="test")}
    assert not train & test
    assert {split_of(p) for p in problems(task, 20, level=3, seed=9, split="test")} == {"test"}


def test_a_sum_is_held_out_in_both_orders():
    sides = {}
    for split in ("train", "test"):
        for problem in up_to("sums", 10_000, level=2, seed=0, split=split):
            sides.setdefault(frozenset(problem.prompt.removesuffix("=").split("+")), set()).add(split)
    assert len(sides) > 5000  # of 5,050 pairs
    assert all(len(splits) == 1 for splits in sides.values())
    assert 0.08 < sum(splits == {"test"} for splits in sides.values()) / len(sides) < 0.12


@pytest.mark.parametrize("level", range(1, LEVELS + 1))
def test_sums_say_what_they_mean(level):
    for problem in problems("sums", 20, level=level, seed=0):
        assert evaluate(problem.prompt.rstrip("=")).value == int(problem.answer) < 2 * 10**level


def test_arithmetic_says_what_it_means():
    for level in range(1, LEVELS + 1):
        for problem in problems("arithmetic", 8, level=level, seed=0):
            assert evaluate(problem.prompt.rstrip("=")).value == int(problem.answer)


@pytest.mark.parametrize(
    ("given_answer", "outcome"),
    [
        ("46", Outcome.correct),
        (" 46. ", Outcome.correct),
        ("47", Outcome.wrong),
        ("-46", Outcome.wrong),
        ("forty-six", Outcome.unparsable),
        ("", Outcome.unparsable),
        ("46 46", Outcome.unparsable),
        ("9" * 9000, Outcome.unparsable),
        ("4\x006", Outcome.unparsable),
        ("٤٦", Outcome.unparsable),  # digits, but not ours
    ],
)
def test_numbers(given_answer, outcome):
    assert check("arithmetic", "46", given_answer) == outcome


@pytest.mark.parametrize(
    ("given_answer", "outcome"),
    [
        ("3*5+2", Outcome.correct),
        ("3 × 5 + 2 = 17", Outcome.correct),
        ("(5*3)+2", Outcome.correct),
        ("17", Outcome.wrong),  # not one of the numbers
        ("3*3+8", Outcome.wrong),
        ("3*5", Outcome.wrong),
        ("3**5", Outcome.unparsable),
        ("3*5+2; import os", Outcome.unparsable),
        ("__import__('os')", Outcome.unparsable),
        ("5/(3-3)", Outcome.unparsable),
        ("((((((((((" * 50, Outcome.unparsable),
        ("9" * 100 + "*" + "9" * 90, Outcome.unparsable),
    ],
)
def test_countdown(given_answer, outcome):
    assert check("countdown", "3 5 2=17", given_answer) == outcome


def test_sorting_accepts_commas_and_refuses_words():
    assert check("sorting", "1 2 3", "1, 2, 3") == Outcome.correct
    assert check("sorting", "1 2 3", "1 3 2") == Outcome.wrong
    assert check("sorting", "1 2 3", "one two") == Outcome.unparsable


@given(st.text(max_size=300))
def test_no_text_breaks_an_evaluation(text):
    try:
        value, numbers = evaluate(text)
    except NotArithmeticError:
        return
    assert len(numbers) <= 200
    assert value.denominator > 0


@given(st.lists(st.integers(0, 99), min_size=1, max_size=8), st.data())
def test_sums_and_products_are_exact(numbers, data):
    operators = [data.draw(st.sampled_from("+-*")) for _ in numbers[1:]]
    text = "".join(f"{n}{o}" for n, o in zip(numbers, [*operators, ""], strict=True))
    terms, sign = [numbers[0]], ["+"]
    for operator, number in zip(operators, numbers[1:], strict=True):
        if operator == "*":
            terms[-1] *= number
        else:
            terms.append(number)
            sign.append(operator)
    expected = sum(term if s == "+" else -term for s, term in zip(sign, terms, strict=True))
    assert evaluate(text) == (expected, numbers)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("arithmetics", 3, 1), "task must be one of"),
        (("arithmetic", 3, 9), "level must be between"),
        (("arithmetic", 500, 1), "has only about"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(arguments, words):
    task, count, level = arguments
    with pytest.raises(ValueError, match=words):
        problems(task, count, level=level, seed=0)


@pytest.mark.parametrize(
    ("given", "outcome"),
    [
        ("B", Outcome.correct),
        ("(b) fire", Outcome.correct),
        ("B. fire", Outcome.correct),
        ("C", Outcome.wrong),
        ("Because", Outcome.unparsable),
        ("", Outcome.unparsable),
        ("42", Outcome.unparsable),
    ],
)
def test_letters(given, outcome):
    assert check("letter", "B", given) is outcome
