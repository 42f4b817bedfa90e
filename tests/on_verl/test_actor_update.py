"""verl's actor update against `adpo.exact` on the same rows: parameters after four steps, however split."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from processes import environment
from tensordict import TensorDict

from adpo import exact

GROUPS, MEMBERS, EPOCHS, MINI_BATCHES = 4, 3, 2, 2
RATE = 0.05
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


def made_up(seed=0):
    """Prompts, responses of other lengths and rewards; the last group has nothing to say."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(low, high):
        size = int(torch.randint(low, high + 1, (), generator=draw))
        return torch.randint(5, 100, (size,), generator=draw)

    prompts = [prompt for prompt in [tokens(2, 6) for _ in range(GROUPS)] for _ in range(MEMBERS)]
    responses = [tokens(1, 7) for _ in prompts]
    rewards = torch.randn(GROUPS, MEMBERS, generator=draw).round(decimals=1)
    rewards[-1] = 1.0
    return prompts, responses, rewards.flatten(), torch.arange(GROUPS).repeat_interleave(MEMBERS)


def logp_of(model, prompt, response, reduction="sum", tokens=False):
    logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    found = logits.log_softmax(-1).gather(1, response[:, None]).squeeze(1)
    return found if tokens else found.sum() if reduction == "sum" else found.mean()


def expected(settings, stale=False):
    """Plain transformers, and `adpo.exact.backward` on whole mini-batches.

    ``stale`` are the parameters if all steps took the coefficients that the rollout had.
    """
    model, other = tiny.model(), tiny.model(seed=1)
    prompts, responses, rewards, groups = made_up()
    reduction = settings.logp_reduction
    with torch.no_grad():
        judged = other if settings.anchor == "fixed" else model
        anchor = torch.stack([logp_of(judged, *pair, reduction) for pair in zip(prompts, responses, strict=True)])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    size = GROUPS // MINI_BATCHES
    for _ in range(EPOCHS):
        for first in range(0, GROUPS, size):
            rows = ((groups >= first) & (groups < first + size)).nonzero().squeeze(1)

            def score(chosen, rows=rows):
                return torch.stack(
                    [logp_of(model, prompts[i], responses[i], reduction) for i in rows[chosen].tolist()]
                )

            optimizer.zero_grad()
            exact.backward(
                settings.objective(),
                score,
                [torch.arange(len(rows))],
                groups[rows],
                anchor[rows].double(),
                at_anchor=stale,
                rewards=rewards[rows].double(),
            )
            optimizer.step()
    return model


def batch_of(rank, ranks):
    """What a rank is given after verl's balancing: groups cut between the ranks, and rows that fill up."""
    from verl.utils.seqlen_balancing import calculate_workload

    from adpo.integrations.verl.trainer import dealt, filled

    prompts, responses, rewards, groups = made_up()
    filling = len(groups)  # the row that verl fills up with
    prompts, responses = [*prompts, torch.tensor([5])], [*responses, torch.tensor([1])]
    rewards = torch.cat([rewards, torch.zeros(1)])
    model, other = tiny.model(), tiny.model(seed=1)
    lengths = torch.tensor(
        [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    )
    bins = filled([f"group {group}" for group in groups], len(groups) // MINI_BATCHES)
    bins = [[*rows, *[filling] * ranks] for rows in bins]
    mine = dealt(bins, calculate_workload(lengths), ranks)[rank]
    if ranks > 1:  # or this would show nothing
        members = [{int(groups[row]) for row in share if row != filling} for share in dealt(bins, lengths, ranks)]
        assert members[0] & members[1], "no group is cut between the ranks"

    def nested(values):
        return torch.nested.as_nested_tensor(list(values), layout=torch.jagged)

    with torch.no_grad():
        scores = {
            name: nested(logp_of(judge, prompts[i], responses[i], tokens=True) for i in mine)
            for name, judge in (("old_log_probs", model), ("ref_log_prob", other))
        }
    masks = [torch.full((len(responses[i]),), int(i != filling)) for i in mine]
    whole = [torch.cat([prompts[i], responses[i]]) for i in mine]
    data = TensorDict(
        {
            "input_ids": nested(whole),
            "position_ids": nested(torch.arange(len(row)) for row in whole),
            "prompts": nested(prompts[i] for i in mine),
            "responses": nested(responses[i] for i in mine),
            "response_mask": nested(masks),
            "loss_mask": nested(masks),
            "returns": nested(rewards[i].expand(len(responses[i])).clone() for i in mine),
            **scores,
        },
        batch_size=len(mine),
    )
    from verl.utils import tensordict_utils as tu

    data["uid"] = ["filling" if i == filling else f"group {groups[i]}" for i in mine]
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        calculate_entropy=False,
        global_batch_size=len(groups) // MINI_BATCHES + ranks,
        mini_batch_size=len(groups) // MINI_BATCHES + ranks,
        epochs=EPOCHS,
        adpo_current=True,
    )
    return data


def worker_of(folder, settings):
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.config.engine import TrainingWorkerConfig
    from verl.workers.utils.losses import ppo_loss

    from adpo.integrations.verl.worker import ADPOTrainingWorker

    model = HFModelConfig(
        path=str(folder),
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        dtype="float32",
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        use_torch_compile=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=1,
        infer_micro_batch_size_per_gpu=1,
    )
    optimizer = FSDPOptimizerConfig(
        optimizer="SGD", lr=RATE, weight_decay=0.0, clip_grad=1e9, total_training_steps=10, lr_warmup_steps=0
    )
    made = ADPOTrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model", model_config=model, engine_config=engine, optimizer_config=optimizer
        )
    )
    made.reset()
    made.set_loss_fn(partial(ppo_loss, config=SimpleNamespace(policy_loss=settings)))
    return made


def worker(folder):
    import cpu_platform  # noqa: F401  gives gloo in place of what verl asks for

    from adpo.integrations.verl.settings import ADPOPolicyLoss

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    wanted = {name: ADPOPolicyLoss(**options) for name, options in CASES.items()}
    # Before the ranks know of each other.
    alone = {name: expected(settings) for name, settings in wanted.items()}
    stale = {
        name: expected(settings, stale=True) for name, settings in wanted.items() if settings.anchor != "fixed"
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
    os._exit(0)


def distance(found, model):
    """The largest between parameters."""
    return max(float((found[name] - value).detach().abs().max()) for name, value in model.named_parameters())


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
    assert done.stdout.count("cut groups are refused;") == ranks, done.stderr[-3000:]


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
