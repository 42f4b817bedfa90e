"""The reward for right answers, in the form TRL wants: ``reward(completions, **columns) -> list``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal

from adpo.tasks.completions import answer_of, text_of
from adpo.tasks.generated_tasks import Outcome, check
from adpo.tasks.problems import final_answer
from adpo.tasks.verifier import VerifierPool


class Correct:
    """1 for a right answer, 0 for a wrong or unparsable one; a check that timed out is 0, or None to leave it out.

    Generated tasks are checked here, mathematics by a pool of processes that is started when it is first needed.
    ``counts`` says what became of all answers so far; during training the shares are logged as ``outcomes/...``.
    """

    __name__ = "correct"

    def __init__(
        self, timed_out: Literal["zero", "mask"] = "zero", workers: int = 2, seconds: float = 5.0
    ) -> None:
        self.timed_out = timed_out
        self.counts: Counter[Outcome] = Counter()
        self._workers, self._seconds = workers, seconds
        self._pool: VerifierPool | None = None

    def __call__(
        self,
        completions: Sequence[Any],
        task: Sequence[str],
        answer: Sequence[str],
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> list[float | None]:
        outcomes = self.outcomes(task, answer, completions)
        self.counts.update(outcomes)
        if log_metric is not None:
            for outcome in Outcome:
                log_metric(f"outcomes/{outcome.name}", outcomes.count(outcome) / len(outcomes))
        lost = None if self.timed_out == "mask" else 0.0
        return [lost if o is Outcome.timed_out else float(o is Outcome.correct) for o in outcomes]

    def outcomes(self, task: Sequence[str], answer: Sequence[str], completions: Sequence[Any]) -> list[Outcome]:
        """What became of each answer, in order."""
        rows = list(zip(task, answer, completions, strict=True))
        mathematics = [(gold, text_of(completion)) for name, gold, completion in rows if name == "math"]
        verdicts = iter(self._verified(mathematics))
        return [
            next(verdicts) if name == "math" else check(name, gold, answer_of(completion))
            for name, gold, completion in rows
        ]

    def _verified(self, pairs: Sequence[tuple[str, str]]) -> list[Outcome]:
        known = [of_whole_numbers(gold, text) for gold, text in pairs]
        unsure = [pair for pair, outcome in zip(pairs, known, strict=True) if outcome is None]
        if unsure and self._pool is None:
            self._pool = VerifierPool(self._workers, self._seconds)
        checked = iter(self._pool.check(unsure) if unsure and self._pool is not None else [])
        return [outcome if outcome is not None else next(checked) for outcome in known]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Correct:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_WHOLE = re.compile(r"-?[0-9]{1,15}")


def of_whole_numbers(gold: str, text: str) -> Outcome | None:
    """Where both are marked as plain whole numbers there is nothing to parse; None where a verifier has to look.

    >>> of_whole_numbers("42", "so #### 42"), of_whole_numbers("42", "so #### 42 apples")
    (<Outcome.correct: 'correct'>, None)
    """
    given = final_answer(text) if "####" in text else None
    if given is None or not (_WHOLE.fullmatch(gold) and _WHOLE.fullmatch(given)):
        return None
    return Outcome.correct if int(gold) == int(given) else Outcome.wrong
