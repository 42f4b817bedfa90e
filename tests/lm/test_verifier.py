"""The verifier pool: right about mathematics, and not to be hung or crashed by anything a model may write."""

import io
import json
import random
import sys
import time

import pytest

from adpo.tasks import verifier_process
from adpo.tasks.generated_tasks import Outcome
from adpo.tasks.reward_functions import of_whole_numbers
from adpo.tasks.verifier import VerifierPool


@pytest.fixture(scope="module")
def pool():
    with VerifierPool(workers=2, seconds=1.0, memory_mb=1024) as made:
        yield made


@pytest.mark.parametrize(
    ("gold", "given", "outcome"),
    [
        ("42", "The answer is 42.", Outcome.correct),
        ("42", r"\boxed{42}", Outcome.correct),
        (r"\frac{1}{2}", r"so we get $\boxed{0.5}$", Outcome.correct),
        (r"\sqrt{8}", r"$2\sqrt{2}$", Outcome.correct),
        ("42", r"\boxed{41}", Outcome.wrong),
        ("x+1", r"$\boxed{1+x}$", Outcome.correct),
        ("42", "I do not know.", Outcome.unparsable),
        ("42", "", Outcome.unparsable),
    ],
)
def test_answers_are_compared_as_mathematics(pool, gold, given, outcome):
    assert pool.check([(gold, given)]) == [outcome]


def hostile(count):
    """Towers of powers, deep nesting, floods of text, nulls and noise."""
    draw = random.Random(0)
    kinds = [
        lambda n: r"\boxed{" + "9^{" * (3 + n % 6) + "9" + "}" * (3 + n % 6) + "}",
        lambda n: r"\boxed{" + "**".join(["9"] * (3 + n % 5)) + "}",
        lambda n: "$" + r"\frac{1}{" * (50 + 20 * n) + "2" + "}" * (50 + 20 * n) + "$",
        lambda n: "$" + "(" * (100 + 50 * n) + "1" + ")" * (100 + 50 * n) + "$",
        lambda n: "9" * (1000 * (n + 1)),
        lambda n: "x" * (1_000_000 + n),
        lambda n: "\0" * (n + 1) + "42",
        lambda n: r"\boxed{" + "".join(draw.choices("\\{}^_$()0123456789abxyz+-*/!", k=200)) + "}",
        lambda n: rf"$({'9' * (n + 2)})!!$",
        lambda n: rf"$\boxed{{10^{{10^{{{n + 5}}}}}}}$",
        lambda n: "__import__('os').system('echo no')" * (n + 1),
        lambda n: "\ud800" * (n + 1) + "\u202e42",
    ]
    return [kinds[i % len(kinds)](i // len(kinds)) for i in range(count)]


@pytest.mark.parametrize("count", [36, pytest.param(360, marks=pytest.mark.slow)])
def test_hostile_answers_neither_hang_nor_crash(pool, count):
    answers = hostile(count)
    started = time.monotonic()
    outcomes = pool.check([("42", answer) for answer in answers])
    assert len(outcomes) == count
    assert Outcome.correct not in {o for o, a in zip(outcomes, answers, strict=True) if "42" not in a}
    assert time.monotonic() - started < 20 + count * pool.seconds
    # And the pool is as good as new.
    assert pool.check([("7", r"\boxed{7}")]) == [Outcome.correct]
    assert sum(pool.counts.values()) > count


def test_a_worker_that_takes_too_long_is_replaced():
    with VerifierPool(workers=1, seconds=0.001) as impatient:
        assert impatient.check([("42", r"\boxed{\int_0^1 x^{1000} dx}")]) == [Outcome.timed_out]
        impatient.seconds = 5.0
        assert impatient.check([("42", "42")]) == [Outcome.correct]
        assert impatient.counts == {Outcome.timed_out: 1, Outcome.correct: 1}


def test_limits_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="must be positive"):
        VerifierPool(workers=0)


def test_what_is_decided_without_the_verifier_is_what_it_would_say(pool):
    golds = ("0", "7", "-7", "42", "1000", "0.5", r"\frac{1}{2}")
    texts = (
        "#### 42",
        "x #### -7",
        "#### 007",
        "#### 1,000",
        "#### -0",
        "42",
        "#### 42.0",
        "#### 42 apples",
        "#### ",
        "",
    )
    pairs = [(gold, text) for gold in golds for text in texts]
    known = [of_whole_numbers(gold, text) for gold, text in pairs]
    said = pool.check(pairs)
    decided = [(mine, theirs) for mine, theirs in zip(known, said, strict=True) if mine is not None]
    assert len(decided) == 5 * 5
    assert all(mine == theirs for mine, theirs in decided)


def test_what_a_parser_prints_is_no_verdict(monkeypatch):
    """An answer more than asked would be taken for the next one."""

    def talkative(gold, given):
        print("a warning")  # noqa: T201
        return "correct"

    verdicts = io.StringIO()
    monkeypatch.setattr(verifier_process, "outcome", talkative)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(["1", "1"]) + "\n"))
    monkeypatch.setattr(sys, "stdout", verdicts)
    monkeypatch.setitem(sys.modules, "resource", None)  # this process keeps its memory
    verifier_process.serve(2**30)
    assert verdicts.getvalue() == '"correct"\n'
