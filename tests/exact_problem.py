"""A small language-like problem for the exactness tests, and the worker that a second process runs."""

import sys

import torch
import torch.distributed as dist
from torch import nn

import adpo
from adpo.exact import Parallel, backward

OBJECTIVES = {
    "boltzmann": adpo.Objective(adpo.boltzmann(0.5), tau=0.7),
    "ranking": adpo.Objective(adpo.plackett_luce(), tau=0.7),
    "reverse": adpo.Objective(adpo.boltzmann(0.5), adpo.reverse_kl, tau=0.7),
}


class Problem:
    """Rows with features and ragged groups; a network scores a row, an older network is the anchor."""

    def __init__(self, seed=0, groups=5, dtype=torch.float64):
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(1, 5, (groups,), generator=generator)
        ids = torch.arange(groups).repeat_interleave(sizes) * 3 + 2
        shuffle = torch.randperm(len(ids), generator=generator)
        self.ids = ids[shuffle]
        self.features = torch.randn(len(ids), 4, generator=generator, dtype=dtype)
        self.rewards = torch.randint(0, 3, (len(ids),), generator=generator).to(dtype)
        torch.manual_seed(seed)
        self.model, older = (
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype) for _ in range(2)
        )
        self.anchor_logp = older(self.features).squeeze(1).detach()
        self.tau = 0.5 + torch.rand(groups, generator=generator, dtype=dtype)
        self.weights = torch.arange(groups).to(dtype)  # the first group counts for nothing

    def score(self, rows, model=None):
        return (model or self.model)(self.features[rows]).squeeze(1)

    def partition(self, size, seed=0):
        """The rows in random order, cut into micro-batches."""
        order = torch.randperm(len(self.ids), generator=torch.Generator().manual_seed(seed))
        return list(order.split(size))

    def one_pass(self, objective, anchor_logp, **extra):
        """Loss and gradient of the whole-group objective from one differentiable pass."""
        logp, mask, index = adpo.from_flat(self.score(torch.arange(len(self.ids))), self.ids)
        shape = tuple(mask.shape)
        anchor = None if anchor_logp is None else adpo.to_table(anchor_logp, index, shape)
        rewards = adpo.to_table(self.rewards, index, shape)
        loss = objective.loss(logp, anchor, mask=mask, rewards=rewards, **extra)
        return loss.detach(), torch.autograd.grad(loss, list(self.model.parameters()))


def shared_out(problem, share):
    """Which rows rank 0 holds; rank 1 holds the rest."""
    rows = torch.arange(len(problem.ids))
    if share == "straddling":
        return rows % 3 == 0
    if share == "none":
        return rows < 0
    groups = [int(i) for i in problem.ids.unique()]
    tied = [i for i in groups if problem.rewards[problem.ids == i].unique().numel() == 1]
    chosen = tied if share == "dead" else [max(groups, key=lambda i: int((problem.ids == i).sum()))]
    assert chosen
    return torch.isin(problem.ids, torch.tensor(chosen))


def worker(name, at_anchor, wrapped, per_group, share, out):
    """One rank: take a share of the rows, accumulate, write the gradient."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    problem = Problem(groups=6)
    rows = torch.arange(len(problem.ids))
    first = shared_out(problem, share)
    mine = rows[first if rank == 0 else ~first]
    problem.model.register_buffer("frequencies", torch.ones(3))  # as rotary embeddings have them
    model = problem.model
    if wrapped:
        model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    anchor = problem.score(rows).detach() if at_anchor else problem.anchor_logp
    order = torch.randperm(len(mine), generator=torch.Generator().manual_seed(rank))
    if share != "straddling" and rank == 0:  # whole groups in one micro-batch
        pieces = [torch.arange(len(mine))] if len(mine) else []
    else:
        pieces = list(order.split(2))
    result = backward(
        OBJECTIVES[name],
        lambda batch: problem.score(mine[batch], model),
        pieces,
        problem.ids[mine],
        anchor[mine],
        tau=problem.tau if per_group else None,
        at_anchor=at_anchor,
        parallel=Parallel(averaging=True, no_sync=model.no_sync) if wrapped else Parallel(),
        rewards=problem.rewards[mine],
        weights=problem.weights if per_group else None,
    )
    gradients = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for parameter in problem.model.parameters()
    ]
    if not wrapped:
        for gradient in gradients:
            dist.all_reduce(gradient)
    torch.save({"gradients": gradients, "loss": result.loss, "scored": result.rows_scored}, f"{out}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    worker(sys.argv[1], *(flag == "1" for flag in sys.argv[2:5]), *sys.argv[5:7])
