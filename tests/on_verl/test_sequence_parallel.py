"""Ulysses: four processes, two parts of the rows and two parts of every sequence, beside `adpo.exact` alone.

verl's own code sends heads and tokens between the ranks; the kernel under it, which needs a GPU, is replaced by
attention that is written out.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from processes import environment
from updates import batch_of, distance, expected, worker_of

PARTS, OF_SEQUENCES = 2, 2
CASES = {"plackett_luce": {"target": "plackett_luce", "tau": 0.8}, "fixed": {"anchor": "fixed"}}


def attention(query, key, value, mask, length, *, position_ids, is_causal=True, softmax_scale=None, **_):
    """Of rows that stand in one sequence and begin where positions do; ``[batch, tokens, heads, width]``."""
    assert mask is None
    assert is_causal
    assert len(query) == len(position_ids) == 1
    row = (position_ids[0] == 0).cumsum(0)
    order = torch.arange(len(row))
    allowed = (row[:, None] == row) & (order[:, None] >= order)
    repeats = query.shape[2] // key.shape[2]
    query, key, value = (
        part.transpose(1, 2) for part in (query, *(p.repeat_interleave(repeats, 2) for p in (key, value)))
    )
    scores = (query @ key.transpose(2, 3)) * (softmax_scale or query.shape[-1] ** -0.5)
    return (scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value).transpose(1, 2)


def worker(folder):
    import cpu_platform  # noqa: F401  gives gloo in place of what verl asks for
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.masking_utils import flash_attention_mask
    from verl.models.transformers import monkey_patch

    from adpo.integrations.verl.settings import ADPOPolicyLoss

    AttentionInterface.register("written_out", flash_attention_forward)
    AttentionMaskInterface.register("written_out", flash_attention_mask)
    monkey_patch._flash_attention_forward = attention
    wanted = {name: ADPOPolicyLoss(**options) for name, options in CASES.items()}
    other = tiny.model(seed=1)
    alone = {name: dict(expected(one, other=other).named_parameters()) for name, one in wanted.items()}
    before = dict(tiny.model().named_parameters())
    for name, settings in wanted.items():
        made = worker_of(
            folder,
            settings,
            {"use_remove_padding": True, "override_config": {"attn_implementation": "written_out"}},
            {"ulysses_sequence_parallel_size": OF_SEQUENCES},
        )
        assert made.engine.get_data_parallel_size() == PARTS
        made.train_mini_batch(batch_of(made.engine.get_data_parallel_rank(), PARTS))
        found = {key: value.full_tensor() for key, value in made.engine.module.named_parameters()}
        moved, off = distance(before, alone[name]), distance(found, alone[name])
        assert moved > 1e-3, f"{name}: nothing was learnt"
        assert off < 2e-6, f"{name}: off by {off}, moved by {moved}"
        print(f"alike: {name};", flush=True)  # noqa: T201
    os._exit(0)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequence_parallel")
    tiny.save(folder)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, f"--nproc_per_node={PARTS * OF_SEQUENCES}", str(Path(__file__)), str(folder)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment(),
    )


@pytest.mark.parametrize("name", CASES)
def test_parameters(done, name):
    assert done.stdout.count(f"alike: {name};") == PARTS * OF_SEQUENCES, done.stdout[-2000:] + done.stderr[-3000:]


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
