"""Four processes: sequences in parts (Ulysses), and replicas of shards, beside `adpo.exact` alone.

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
from updates import batch_of, distance, expected, whole, worker_of

RANKS = 4
PLACKETT_LUCE = {"target": "plackett_luce", "tau": 0.8}
IN_PARTS = (
    {"use_remove_padding": True, "override_config": {"attn_implementation": "written_out"}},
    {"ulysses_sequence_parallel_size": 2},
)
CASES = {  # of policy_loss, the model and the engine; and how many parts the rows are in
    "sequence parallel": (PLACKETT_LUCE, *IN_PARTS, 2),
    "sequence parallel, fixed anchor": ({"anchor": "fixed"}, *IN_PARTS, 2),
    "replicas of shards": (PLACKETT_LUCE, {}, {"fsdp_size": 2}, 4),
    "replicas of shards, FSDP1": (PLACKETT_LUCE, {}, {"fsdp_size": 2, "strategy": "fsdp"}, 4),
}


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

    from adpo.trainers.verl.settings import ADPOPolicyLoss

    AttentionInterface.register("written_out", flash_attention_forward)
    AttentionMaskInterface.register("written_out", flash_attention_mask)
    monkey_patch._flash_attention_forward = attention
    wanted = {name: ADPOPolicyLoss(**options) for name, (options, *_) in CASES.items()}
    other = tiny.model(seed=1)
    alone = {name: dict(expected(one, other=other).named_parameters()) for name, one in wanted.items()}
    before = dict(tiny.model().named_parameters())
    for name, settings in wanted.items():
        _, model, engine, parts = CASES[name]
        made = worker_of(folder, settings, model, engine)
        assert made.engine.get_data_parallel_size() == parts
        made.train_mini_batch(batch_of(made.engine.get_data_parallel_rank(), parts))
        found = whole(made)
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
        [*command, f"--nproc_per_node={RANKS}", str(Path(__file__)), str(folder)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment(),
    )


@pytest.mark.parametrize("name", CASES)
def test_parameters(done, name):
    assert done.stdout.count(f"alike: {name};") == RANKS, done.stdout[-2000:] + done.stderr[-3000:]


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
