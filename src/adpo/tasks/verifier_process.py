"""One worker of the verifier pool: a program of its own that imports nothing of adpo.

It reads a line of JSON, ``[gold, given]``, and writes one: "correct", "wrong" or "unparsable". What is parsed was
written by a model, so the process is expendable: its memory is limited here, its time by the pool, which kills it.
"""

from __future__ import annotations

import json
import sys


def outcome(gold: str, given: str) -> str:
    """Compare two answers as mathematics; both may hold LaTeX, a boxed expression or plain numbers."""
    from math_verify import parse, verify  # type: ignore[import-not-found, import-untyped, unused-ignore]

    found = parse(given, parsing_timeout=None)
    if not found:
        return "unparsable"
    expected = parse(f"\\boxed{{{gold}}}", parsing_timeout=None)
    return "correct" if verify(expected, found, timeout_seconds=None) else "wrong"


def serve(memory: int) -> None:
    import math_verify  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: F401

    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):  # not every system knows these limits
        pass
    verdicts, sys.stdout = sys.stdout, sys.stderr  # what a parser prints is no verdict
    for line in sys.stdin:
        try:
            result = outcome(*json.loads(line))
        except Exception:  # whatever a parser makes of hostile text, it is no answer
            result = "unparsable"
        verdicts.write(json.dumps(result) + "\n")
        verdicts.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
