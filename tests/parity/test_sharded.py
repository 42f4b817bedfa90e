"""Packed passes over sharded parameters (FSDP2, two processes) give the gradient of one process."""

import itertools
import os
import sys

import pytest
import torch

import forked

pytest.importorskip("transformers")

import test_packed

import adpo
from adpo import exact
from adpo.scoring.scorer import Forms, Scorer
from adpo.scoring.sequences import sequences

PROMPTS, COMPLETIONS = test_packed.lists(5, groups=4)
GROUPS = torch.tensor([0, *itertools.accumulate(a != b for a, b in itertools.pairwise(PROMPTS))])
REWARDS = torch.arange(len(GROUPS), dtype=torch.float64) * 7 % 5
ANCHOR = -torch.arange(len(GROUPS), dtype=torch.float64) / 3


def accumulated(model, rows, at_anchor, **options):
    """The gradient of these rows' groups is in the model afterwards."""
    scorer = Scorer(model, Forms(scoring="packed", tokens_per_pass=options.pop("tokens", 24)))
    model = options.pop("wrap", lambda inner: inner)(model)
    batch = sequences([PROMPTS[row] for row in rows], [COMPLETIONS[row] for row in rows], pad=0)
    exact.backward(
        adpo.presets.adpo(),
        lambda chosen: scorer.logp(model, batch.take(chosen)),
        scorer.passes(batch, GROUPS[rows]),
        GROUPS[rows],
        None if at_anchor else ANCHOR[rows],
        weigh=lambda chosen, c: scorer.weighted(model, batch.take(chosen), c),
        at_anchor=at_anchor,
        rewards=REWARDS[rows],
        **options,
    )
    return model


def worker(at_anchor):
    """Rank 0 has one row, rank 1 the rest: groups straddle, and so do the numbers of passes."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))

    def sharded(model):
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    together = exact.Parallel(averaging=True, lockstep=True)
    rows = torch.arange(1) if dist.get_rank() == 0 else torch.arange(1, len(GROUPS))
    model = accumulated(test_packed.model("qwen3"), rows, at_anchor, wrap=sharded, parallel=together)
    expected = accumulated_alone(at_anchor)
    off = [
        float((mine.grad.full_tensor() - other.grad).abs().max())
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True)
    ]
    size = max(float(other.grad.abs().max()) for other in expected.parameters())
    assert max(off) < 1e-5, off
    assert size > 1e-2, size
    print("the same gradient", flush=True)  # noqa: T201
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in its own time


def accumulated_alone(at_anchor):
    """By a process that knows of no other."""
    model = test_packed.model("qwen3")
    rows = torch.arange(len(GROUPS))
    batch = sequences(PROMPTS, COMPLETIONS, pad=0)
    from adpo.scoring.sequences import seq_logp

    logp = seq_logp(model, batch)
    table, mask, index = adpo.from_flat(logp, GROUPS)
    shape = tuple(mask.shape)
    anchor = logp.detach() if at_anchor else ANCHOR[rows]
    loss = adpo.presets.adpo().loss(
        table, adpo.to_table(anchor, index, shape), mask=mask, rewards=adpo.to_table(REWARDS, index, shape)
    )
    loss.backward()
    return model


@pytest.mark.parametrize("at_anchor", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_with_half_of_the_parameters_each(at_anchor):
    done = forked.run_two(__file__, int(at_anchor))
    assert done.stdout.count("the same gradient") == 2, done.stderr[-2000:]


@pytest.mark.parametrize("at_anchor", [False, True])
@pytest.mark.parametrize("tokens", [10, 24, 1000])
def test_one_process_in_any_number_of_passes(at_anchor, tokens):
    expected = accumulated_alone(at_anchor)
    model = accumulated(test_packed.model("qwen3"), torch.arange(len(GROUPS)), at_anchor, tokens=tokens)
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-5)


if __name__ == "__main__":
    worker(bool(int(sys.argv[1])))
