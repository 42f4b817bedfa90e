"""Two processes take an exam together, also where one of them fails."""

import os
import sys

import pytest

pytest.importorskip("trl")

import two_processes
from accelerate import PartialState

from adpo.models.embedded import WarmUp, make_model, make_tokenizer
from adpo.runs.evaluation import Exam

PROBLEMS = [{"prompt": f"{number}+{number}=", "answer": str(2 * number)} for number in range(5)]


class Strict:
    """A reward that does not take one of the answers."""

    __name__ = "strict"

    def __init__(self, refused):
        self.refused = refused

    def __call__(self, completions, answer, **_):
        if self.refused in answer:
            raise KeyError(self.refused)
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def worker():
    PartialState(cpu=True)
    model, tokenizer = make_model(WarmUp(hidden=16, layers=1)), make_tokenizer()
    for refused, complaint in (("none", None), ("0", "KeyError: '0'"), ("2", "KeyError: '2'")):
        exam = Exam(PROBLEMS, tokenizer, Strict(refused), 2)
        if complaint is None:
            assert len(exam.greedy(model).scores) == len(PROBLEMS)
        else:
            with pytest.raises(ValueError, match=f"reward function strict failed on .*{complaint}"):
                exam.greedy(model)
        print(f"as expected: {refused};", flush=True)  # noqa: T201
    PartialState().wait_for_everyone()
    os._exit(0)  # gloo's threads may abort a process that ends in its own time


def test_two_processes(tmp_path):
    done = two_processes.run(__file__, tmp_path)
    for refused in ("none", "0", "2"):
        assert done.stdout.count(f"as expected: {refused};") == 2, done.stderr[-3000:]


if __name__ == "__main__":
    sys.exit(worker())
