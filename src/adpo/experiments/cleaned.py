"""Work that leaves nothing behind in its process."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def cleaned(work: Callable[P, T]) -> Callable[P, T]:
    """What it held, and what was compiled for it, is gone before the next one."""

    @functools.wraps(work)
    def done(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return work(*arguments, **options)
        finally:
            gc.collect()
            torch._dynamo.reset()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    return done
