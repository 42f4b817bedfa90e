"""Anchors that lend weights to the policy refuse parameters that are sharded, whenever they were."""

import copy
import sys

import pytest
import torch
from torch import nn

from adpo import anchors

MAKERS = {
    "Snapshot": anchors.Snapshot,
    "OnPolicy": anchors.OnPolicy,
    "EMA": anchors.EMA,
    "Refresh": lambda policy: anchors.Refresh(policy, 2),
}
X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


def make_policy():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def score(module):
    return torch.log_softmax(module(X), 1)


def uses(anchor):
    """Everything that looks at the policy's weights."""
    return {
        "logp": lambda: anchor.logp(score),
        "refresh": anchor.refresh,
        "state": lambda: anchor.load_state_dict(anchor.state_dict()),
    }


def refuses(action):
    with pytest.raises(ValueError, match="sharded by") as refused:
        action()
    assert "\n" not in str(refused.value)


def worker(kind):
    """Each anchor made of a policy that is sharded, and of one that is sharded afterwards."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))

    def shard(policy):
        if kind == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            fully_shard(policy[0], mesh=mesh)
            return fully_shard(policy, mesh=mesh)
        if kind.startswith("fsdp1"):
            from torch.distributed.fsdp import FullyShardedDataParallel

            return FullyShardedDataParallel(
                policy, device_mesh=mesh, use_orig_params=kind == "fsdp1 original", device_id=torch.device("cpu")
            )
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        return parallelize_module(policy, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    for make in MAKERS.values():
        policy = make_policy()
        anchor = make(policy)
        wrapped = shard(policy)
        for action in uses(anchor).values():
            refuses(action)
        refuses(lambda make=make, wrapped=wrapped: make(wrapped))
        refuses(lambda make=make, policy=policy: make(policy))
        score(wrapped)  # parameters that were gathered for a pass are still sharded ones
        refuses(lambda make=make, policy=policy: make(policy))
    reference = make_policy()
    expected = score(reference).detach()
    torch.testing.assert_close(anchors.Fixed(shard(reference)).logp(score), expected)
    print("refused", flush=True)  # noqa: T201
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "fsdp1 original", "tensor parallel"])
def test_sharded_parameters_are_refused_before_and_after(kind, tmp_path):
    two_processes = pytest.importorskip("two_processes")
    done = two_processes.run(__file__, tmp_path, kind)
    assert done.stdout.count("refused") == 2, done.stderr[-3000:]


@pytest.mark.parametrize("name", MAKERS)
def test_partitioned_parameters_of_zero_3_are_refused(name):
    """DeepSpeed marks them with an id and leaves them empty between passes."""
    policy = make_policy()
    anchor = MAKERS[name](copy.deepcopy(policy))
    policy[0].weight.ds_id = 0
    with pytest.raises(ValueError, match=f"{name} puts a copy.* sharded by DeepSpeed ZeRO-3"):
        MAKERS[name](policy)
    anchor.policy[0].weight.ds_id = 0
    for action in uses(anchor).values():
        with pytest.raises(ValueError, match="sharded by DeepSpeed ZeRO-3"):
            action()


if __name__ == "__main__":
    torch.set_num_threads(1)
    worker(sys.argv[2])
