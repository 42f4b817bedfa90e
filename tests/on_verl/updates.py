"""Made-up rollouts, what `adpo.exact` makes of a model with them, and verl's worker that is given the same."""

from functools import partial
from types import SimpleNamespace

import tiny
import torch
from tensordict import TensorDict

from adpo import exact

GROUPS, MEMBERS, EPOCHS, MINI_BATCHES = 4, 3, 2, 2
RATE = 0.05


def made_up(seed=0, holes=False):
    """Prompts, responses of other lengths, which of their tokens count, and rewards.

    The last group has nothing to say. ``holes`` are tokens inside a response that the model did not write.
    """
    draw = torch.Generator().manual_seed(seed)

    def tokens(low, high):
        size = int(torch.randint(low, high + 1, (), generator=draw))
        return torch.randint(5, 100, (size,), generator=draw)

    prompts = [prompt for prompt in [tokens(2, 6) for _ in range(GROUPS)] for _ in range(MEMBERS)]
    responses = [tokens(1, 7) for _ in prompts]
    rewards = torch.randn(GROUPS, MEMBERS, generator=draw).round(decimals=1)
    rewards[-1] = 1.0
    masks = [torch.ones_like(response) for response in responses]
    for mask in masks if holes else []:
        mask[1 : len(mask) // 2 + 1] = 0
    return prompts, responses, masks, rewards.flatten(), torch.arange(GROUPS).repeat_interleave(MEMBERS)


def logits_of(model, prompt, response, temperature=1.0):
    logits = model(torch.cat([prompt, response])[None], use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1] / temperature


def logp_of(model, prompt, response, mask=None, reduction="sum", tokens=False, temperature=1.0):
    logits = logits_of(model, prompt, response, temperature)
    found = logits.log_softmax(-1).gather(1, response[:, None]).squeeze(1)
    if tokens:
        return found
    mask = torch.ones_like(response) if mask is None else mask
    return (found * mask).sum() / (1 if reduction == "sum" else mask.sum())


def expected(settings, model=None, other=None, stale=False, rollouts=1, holes=False, temperature=1.0, rate=RATE):
    """Plain transformers, and `adpo.exact.backward` on whole mini-batches.

    ``stale`` are the parameters if all steps took the coefficients that the rollout had; ``other`` is a fixed
    anchor.
    """
    model = tiny.model() if model is None else model
    prompts, responses, masks, rewards, groups = made_up(holes=holes)
    score_row = partial(logp_of, reduction=settings.logp_reduction, temperature=temperature)
    rows_of = list(zip(prompts, responses, masks, strict=True))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)
    size = GROUPS // MINI_BATCHES
    for _ in range(rollouts):
        with torch.no_grad():
            judged = other if settings.anchor == "fixed" else model
            anchor = torch.stack([score_row(judged, *row) for row in rows_of])
        for _ in range(EPOCHS):
            for first in range(0, GROUPS, size):
                rows = ((groups >= first) & (groups < first + size)).nonzero().squeeze(1)

                def score(chosen, rows=rows):
                    return torch.stack([score_row(model, *rows_of[i]) for i in rows[chosen].tolist()])

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


def nested(values):
    return torch.nested.as_nested_tensor(list(values), layout=torch.jagged)


def mini_batch(ranks):
    """Rows of one, with some that fill up on every rank."""
    rows = GROUPS * MEMBERS // MINI_BATCHES
    return rows + ranks + -rows % ranks


def dealt_rows(rank, ranks):
    """Rows of a rank after verl's balancing: groups cut between the ranks, and -1 for those that fill up."""
    from verl.utils.seqlen_balancing import calculate_workload

    from adpo.trainers.verl.trainer import dealt, filled

    prompts, responses, _, _, groups = made_up()
    filling = len(groups)  # the row that verl fills up with
    lengths = torch.tensor([len(p) + len(r) for p, r in zip(prompts, responses, strict=True)] + [2])
    bins = filled([f"group {group}" for group in groups], len(groups) // MINI_BATCHES)
    bins = [[*rows, *[filling] * (mini_batch(ranks) - len(rows))] for rows in bins]
    shares = dealt(bins, calculate_workload(lengths), ranks)
    if ranks > 1:  # or this would show nothing
        members = [{int(groups[row]) for row in share if row != filling} for share in dealt(bins, lengths, ranks)]
        assert members[0] & members[1], "no group is cut between the ranks"
    return shares[rank]


def rows_of(mine, holes=False, temperature=1.0):
    """These rows as verl hands them on, without scores."""
    from verl.utils import tensordict_utils as tu

    prompts, responses, masks, rewards, groups = made_up(holes=holes)
    filling = len(groups)
    prompts, responses = [*prompts, torch.tensor([5])], [*responses, torch.tensor([1])]
    masks, rewards = [*masks, torch.zeros(1, dtype=torch.int64)], torch.cat([rewards, torch.zeros(1)])
    whole = [torch.cat([prompts[i], responses[i]]) for i in mine]
    data = TensorDict(
        {
            "input_ids": nested(whole),
            "position_ids": nested(torch.arange(len(row)) for row in whole),
            "prompts": nested(prompts[i] for i in mine),
            "responses": nested(responses[i] for i in mine),
            "response_mask": nested(masks[i] for i in mine),
            "loss_mask": nested(masks[i] for i in mine),
            "returns": nested(rewards[i].expand(len(responses[i])).clone() for i in mine),
        },
        batch_size=len(mine),
    )
    data["uid"] = ["filling" if i == filling else f"group {groups[i]}" for i in mine]
    tu.assign_non_tensor(data, temperature=temperature)
    return data


def to_train(data, ranks):
    from verl.utils import tensordict_utils as tu

    size = mini_batch(ranks)
    tu.assign_non_tensor(
        data,
        calculate_entropy=False,
        global_batch_size=size,
        mini_batch_size=size,
        epochs=EPOCHS,
        adpo_current=True,
    )
    return data


def batch_of(rank, ranks):
    """With the scores of plain transformers."""
    prompts, responses, _, _, groups = made_up()
    mine = dealt_rows(rank, ranks)
    pairs = [
        (torch.tensor([5]), torch.tensor([1])) if i == len(groups) else (prompts[i], responses[i]) for i in mine
    ]
    data = rows_of(mine)
    with torch.no_grad():
        for name, judge in (("old_log_probs", tiny.model()), ("ref_log_prob", tiny.model(seed=1))):
            data[name] = nested(logp_of(judge, *pair, tokens=True) for pair in pairs)
    return to_train(data, ranks)


FULL = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def worker_of(folder, settings, model=(), engine=(), rate=RATE):
    """verl's worker on a model; ``model`` and ``engine`` are what differs from the simplest one."""
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.config.engine import TrainingWorkerConfig
    from verl.workers.utils.losses import ppo_loss

    from adpo.trainers.verl.worker import ADPOTrainingWorker

    plain = {
        "use_remove_padding": False,
        "enable_gradient_checkpointing": False,
        "override_config": {"attn_implementation": "sdpa"},
    }
    simple = {
        "strategy": "fsdp2",
        "dtype": "float32",
        "mixed_precision": FULL,
        "use_torch_compile": False,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 1,
        "infer_micro_batch_size_per_gpu": 1,
    }
    made = ADPOTrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path=str(folder), **{**plain, **dict(model)}),
            engine_config=FSDPEngineConfig(**{**simple, **dict(engine)}),
            optimizer_config=FSDPOptimizerConfig(
                optimizer="SGD",
                lr=rate,
                weight_decay=0.0,
                clip_grad=1e9,
                total_training_steps=10,
                lr_warmup_steps=0,
            ),
        )
    )
    made.reset()
    made.set_loss_fn(partial(ppo_loss, config=SimpleNamespace(policy_loss=settings)))
    return made


def whole(actor):
    """The parameters, as a model has them that nothing is wrapped around."""
    module = actor.engine.module
    if actor.engine.engine_config.strategy == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(module):
            named = module._fsdp_wrapped_module.named_parameters()
            return {name.replace("_fsdp_wrapped_module.", ""): v.detach().float().clone() for name, v in named}
    return {name: value.full_tensor().detach().float().clone() for name, value in module.named_parameters()}


def distance(found, model):
    """The largest between parameters."""
    return max(float((found[name] - value).detach().abs().max()) for name, value in dict(model).items())
