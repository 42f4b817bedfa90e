"""verl's actor update against `adpo.exact` on the same rows: parameters after four steps, however split."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from processes import environment
from updates import EPOCHS, GROUPS, MEMBERS, MINI_BATCHES, batch_of, distance, expected, worker_of

BYTES = 96
"""That a completion may cost between ranks at a step."""
STALE = 0.05
"""Share of the way by which coefficients that stay those of the rollout would miss, at least."""
CASES = {
    "plackett_luce": {"target": "plackett_luce", "tau": 0.8},
    "boltzmann, mean": {"target": "boltzmann", "logp_reduction": "mean", "tau": 0.1},
    "reverse, fixed": {"divergence": "reverse_kl", "anchor": "fixed"},
    "kde, forward": {"target": "kde", "divergence": "forward_kl", "tau": 0.5},
    "top1, alpha": {"target": "top1", "label_smoothing": 0.1, "divergence": "alpha:0.5", "tau": 0.5},
    "wasserstein": {"divergence": "wasserstein:1", "tau": 0.5},
    "breslow": {"target": "plackett_luce", "ties": "breslow", "label_smoothing": 0.1},
}


def worker(folder):
    import cpu_platform  # noqa: F401  gives gloo in place of what verl asks for

    from adpo.trainers.verl.settings import ADPOPolicyLoss

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    wanted = {name: ADPOPolicyLoss(**options) for name, options in CASES.items()}
    # Before the ranks know of each other.
    other = tiny.model(seed=1)
    alone = {name: dict(expected(one, other=other).named_parameters()) for name, one in wanted.items()}
    stale = {
        name: dict(expected(one, stale=True).named_parameters())
        for name, one in wanted.items()
        if one.anchor != "fixed"
    }
    traffic = Traffic()
    for name, settings in wanted.items():
        made = worker_of(folder, settings)
        with traffic:
            output = made.train_mini_batch(batch_of(rank, ranks))
        metrics = output["metrics"]
        found = {key: value.full_tensor() for key, value in made.engine.module.named_parameters()}
        moved = distance(dict(tiny.model().named_parameters()), alone[name])
        off = distance(found, alone[name])
        assert moved > 1e-3, f"{name}: nothing was learnt"
        assert off < 2e-6, f"{name}: off by {off}, moved by {moved}"
        assert metrics["adpo/scored"] == [0.0, 1.0, 1.0, 1.0]
        if settings.target == "plackett_luce":  # to others a group of ties still says: back to the anchor
            assert metrics["adpo/rows_left_out"][1] > 0.3
        if name in stale:
            missed = distance(found, stale[name]) / moved
            assert missed > STALE, f"{name}: without scoring passes it would be off by {missed} of the way"
        print(f"alike: {name};", flush=True)  # noqa: T201
    steps = len(wanted) * EPOCHS * MINI_BATCHES
    each = traffic.bytes / steps / (GROUPS * MEMBERS / MINI_BATCHES)
    assert each <= BYTES * (ranks > 1), f"{each} bytes a completion"
    cut = batch_of(rank, ranks)
    cut["uid"] = ["one group"] * len(cut)  # over both mini-batches
    made = worker_of(folder, ADPOPolicyLoss())
    with pytest.raises(ValueError, match="a mini-batch cuts"):
        made.train_mini_batch(cut)
    print("cut groups are refused;", flush=True)  # noqa: T201
    unmarked = batch_of(rank, ranks)
    unmarked.pop("adpo_current")
    with pytest.raises(ValueError, match="other trainers of verl"):
        made.train_mini_batch(unmarked)
    print("other trainers are refused;", flush=True)  # noqa: T201
    os._exit(0)


class Traffic:
    """Counts what ranks send each other in tables."""

    bytes = 0

    def __enter__(self):
        self.plain = torch.distributed.all_gather
        torch.distributed.all_gather = self.counted

    def __exit__(self, *_):
        torch.distributed.all_gather = self.plain

    def counted(self, parts, mine, **options):
        self.bytes += sum(part.nbytes for part in parts if len(part) > 1)  # not the lengths
        return self.plain(parts, mine, **options)


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters(tmp_path, ranks):
    tiny.save(tmp_path)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"),
            *(str(Path(__file__)), str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment(),
    )
    for name in CASES:
        assert done.stdout.count(f"alike: {name};") == ranks, done.stderr[-3000:]
    for what in ("cut groups", "other trainers"):
        assert done.stdout.count(f"{what} are refused;") == ranks, done.stderr[-3000:]


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
