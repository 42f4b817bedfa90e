"""Mathematical answers checked by `math-verify`, in processes that may hang or die without harm.

    with VerifierPool() as pool:
        outcomes = pool.check([("1/2", r"so the answer is \\boxed{0.5}")])

Every answer has a limit of time and of memory. A worker that exceeds one is killed and replaced, and the answer
counts as timed out.
"""

from __future__ import annotations

import contextlib
import json
import queue
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from adpo.tasks.generated_tasks import Outcome

PROGRAM = Path(__file__).with_name("verifier_process.py")
START_SECONDS = 60.0  # a worker imports a computer algebra system first


class VerifierPool:
    """Workers that compare answers; ``counts`` says what became of all answers so far."""

    def __init__(
        self, workers: int = 2, seconds: float = 5.0, memory_mb: int = 2048, max_characters: int = 20_000
    ) -> None:
        if workers < 1 or seconds <= 0 or memory_mb < 256 or max_characters < 1:
            raise ValueError(
                f"workers = {workers}, seconds = {seconds}, memory_mb = {memory_mb} and max_characters = "
                f"{max_characters} must be positive, with at least 256 MB"
            )
        self.seconds, self.max_characters = seconds, max_characters
        self.counts: Counter[Outcome] = Counter()
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = [_Worker(memory_mb * 2**20) for _ in range(workers)]
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers)

    def check(self, pairs: Sequence[tuple[str, str]]) -> list[Outcome]:
        """What each ``(gold, given)`` comes to, in order."""
        found = list(self._threads.map(self._one, pairs))
        self.counts.update(found)
        return found

    def _one(self, pair: tuple[str, str]) -> Outcome:
        gold, given = pair
        if len(given) > self.max_characters or "\0" in given or not given.strip():
            return Outcome.unparsable
        worker = self._idle.get()
        try:
            return worker.ask(gold, given, self.seconds)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        self._threads.shutdown()
        for worker in self._workers:
            worker.stop()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Worker:
    """A process, started when it is first needed and again whenever it was lost."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, gold: str, given: str, seconds: float) -> Outcome:
        if self._process is None:
            self._start()
        answer = self._exchange([gold, given], seconds)
        if answer is None:
            self.stop()
            return Outcome.timed_out
        return Outcome(answer)

    def _start(self) -> None:
        command = [sys.executable, str(PROGRAM), str(self._memory)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
        if self._exchange(["1", "1"], START_SECONDS) is None:
            self.stop()
            raise ValueError("the verifier does not start: is math-verify installed? pip install 'adpo[lm]'")

    def _exchange(self, request: list[str], seconds: float) -> str | None:
        """The worker's answer, or None when it died or took too long."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        deadline, received = time.monotonic() + seconds, b""
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            return None
        while not received.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                return None
            piece = process.stdout.read1(4096)  # type: ignore[attr-defined]
            if not piece:
                return None
            received += piece
        answer: str = json.loads(received)
        return answer

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what was still to be written has nobody to read it
                        pipe.close()
            self._process = None
