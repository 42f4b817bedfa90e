"""adpo's command with Liger's kernels, run by triton's interpreter: ``interpreted.py COUNTS WORD…``.

The kernels are Liger's own, and so are the layers and what puts them into a model. Two things the interpreter does
not do: a number with a fraction stays Python's, where a compiled kernel gets a float32; and CUDA's library of
functions is not there, so that ``rsqrt`` is triton's own. And adpo's refusal on CPUs is lifted.
"""

import importlib
import json
import os
import sys
from collections import Counter
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

LIFTED = ("adpo.runs.settings.packages", "adpo.trainers.listwise.trainer", "adpo.trainers.trl.base")


def give_kernels_float32():
    converted = interpreter._implicit_cvt

    def with_fractions(value):
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
        return converted(value)

    interpreter._implicit_cvt = with_fractions


def count_kernels():
    """How often each was started, by name."""
    counts = Counter()
    started = interpreter.GridExecutor.__call__

    def counted(self, *arguments, **options):
        counts[self.fn.__name__] += 1
        return started(self, *arguments, **options)

    interpreter.GridExecutor.__call__ = counted
    return counts


def main(path, words):
    from adpo import cli

    for name in LIFTED:
        module = importlib.import_module(name)
        assert callable(module.refuse_liger)
        module.refuse_liger = lambda _: None
    give_kernels_float32()
    importlib.import_module("liger_kernel.ops.rms_norm").rsqrt = lambda value: tl.rsqrt(value)
    counts = count_kernels()
    sys.argv = ["adpo", *words]
    try:
        cli.main()
    finally:
        path.write_text(json.dumps(counts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
