"""`ListwiseTrainer`: held to TRL's DPO on pairs, to `adpo.exact` on lists, under any split."""

import logging
import random

import pytest
import tiny_lm
import torch
from datasets import Dataset
from small_memory import Small
from trl import DPOConfig, DPOTrainer

import adpo
from adpo import exact
from adpo.scoring.sequences import seq_logp
from adpo.trainers.listwise import ListwiseConfig, ListwiseTrainer
from adpo.trainers.listwise.collate import tokens

COMMON = {
    "learning_rate": 0.05,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
}


def text(draw, length):
    return "".join(draw.choice("0123456789+- ") for _ in range(draw.randint(1, length)))


def pairs(count=12):
    draw = random.Random(0)
    return [{"prompt": text(draw, 8), "chosen": text(draw, 9), "rejected": text(draw, 9)} for _ in range(count)]


def ragged(count=8, most=5):
    """Lists of two to five completions with ties among their rewards."""
    draw = random.Random(1)
    sizes = [most, 2, 3, most, 4, 2, 5, 3][:count]
    return [
        {
            "prompt": text(draw, 8),
            "completions": [text(draw, 9) for _ in range(size)],
            "rewards": [float(draw.randint(0, 2)) for _ in range(size)],
        }
        for size in sizes
    ]


def trained(folder, rows, steps=3, size=4, resume=False, peft=None, reference=None, model=None, **options):
    arguments = {**COMMON, "per_device_train_batch_size": size, "max_steps": steps, **options}
    trainer = ListwiseTrainer(
        tiny_lm.model() if model is None else model,
        ListwiseConfig(str(folder), cache=str(folder / "cache"), **arguments),
        Dataset.from_list(rows) if isinstance(rows, list) else rows,
        processing_class=tiny_lm.tokenizer(),
        reference=reference,
        peft_config=peft,
    )
    trainer.train(resume_from_checkpoint=True if resume else None)
    return trainer


def weights(trainer):
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


class Ordered(ListwiseTrainer):
    def _get_train_sampler(self, dataset=None):
        return None


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_pairs_are_trls_dpo(tmp_path, beta):
    """Losses of three steps, and the parameters after them."""
    rows = pairs()
    tiny_lm.model().save_pretrained(tmp_path / "model")  # TRL loads its reference from a folder
    options = {**COMMON, "per_device_train_batch_size": 4, "max_steps": 3}
    theirs = DPOTrainer(
        str(tmp_path / "model"),
        args=DPOConfig(str(tmp_path / "trl"), beta=beta, loss_type="sigmoid", **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny_lm.tokenizer(),
    )
    theirs._get_train_sampler = lambda *_: None  # in the order of the file
    theirs.train()
    ours = Ordered(
        tiny_lm.model(),
        ListwiseConfig(str(tmp_path / "ours"), cache=str(tmp_path / "cache"), tau=1 / beta, **options),
        Dataset.from_list(rows),
        processing_class=tiny_lm.tokenizer(),
    )
    ours.train()
    torch.testing.assert_close(logged(ours, "loss"), logged(theirs, "loss"), rtol=0, atol=2e-6)
    assert logged(ours, "loss")[0] == pytest.approx(0.6931, abs=1e-4)
    assert logged(ours, "loss")[2] != pytest.approx(0.6931, abs=1e-4)
    for name, value in weights(theirs).items():
        torch.testing.assert_close(weights(ours)[name], value, rtol=0, atol=2e-6)
        assert not torch.equal(value, dict(tiny_lm.model().named_parameters())[name]) or "bias" in name


OPTIONS = {
    "plackett-luce": {},
    "boltzmann": {"target": "boltzmann", "tau": 0.7, "standardize": True},
    "top1, reverse": {"target": "top1", "divergence": "reverse_kl", "label_smoothing": 0.1, "tau": 0.5},
    "mean": {"logp_reduction": "mean", "tau": 0.1},
    "no anchor": {"anchor": "none", "tau": 2.0},
    "ema": {"anchor": "ema", "anchor_decay": 0.5, "tau": 0.5},
    "refresh": {"anchor": "refresh", "anchor_every": 2, "tau": 0.5},
    "likelihood": {"nll_weight": 0.3, "tau": 0.5},
}


def by_hand(trainer, steps, size, options):
    """The same run in twenty lines: whole lists, one pass, plain autograd."""
    model, table = tiny_lm.model(), trainer.train_dataset
    objective, anchor = trainer.objective, options.get("anchor", "fixed")
    shadow = [p.detach().clone() for p in model.parameters()]
    losses = []
    generator = torch.Generator().manual_seed(42)
    for epoch in range(steps):
        order = torch.randperm(len(table), generator=generator.manual_seed(42 + epoch)).tolist()
        for start in range(0, len(order), size):
            if len(losses) == steps:
                return model, losses
            batch = trainer.data_collator([table[i] for i in order[start : start + size]])
            reduction = options.get("logp_reduction", "sum")
            logp = seq_logp(model, tokens(batch), reduction)
            other = tiny_lm.model()
            for p, value in zip(other.parameters(), shadow, strict=True):
                p.data = value
            anchor_logp = None if anchor == "none" else seq_logp(other, tokens(batch), reduction).detach()
            found = exact.coefficients(objective, logp, batch["lists"], anchor_logp, rewards=batch["rewards"])
            c = found.coefficients.clone()
            weight = options.get("nll_weight", 0.0)
            for i in range(int(batch["lists"].max()) + 1):
                mine = (batch["lists"] == i).nonzero().squeeze(1)
                r = batch["rewards"][mine]
                if weight and r.max() > r.min():
                    best = mine[r == r.max()]
                    c[best] -= weight / len(best) / (int(batch["lists"].max()) + 1)
            model.zero_grad()
            (c * logp).sum().backward()
            losses.append(float(found.loss))
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.05 * p.grad if p.grad is not None else 0
                if anchor == "ema":
                    shadow = [s.lerp(p, 0.5) for s, p in zip(shadow, model.parameters(), strict=True)]
                if anchor == "refresh" and len(losses) % 2 == 0:
                    shadow = [p.detach().clone() for p in model.parameters()]
    return model, losses


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("per_pass", [None, 1, 2, 7])
def test_lists_are_exact_whatever_goes_through_the_model_together(tmp_path, name, per_pass):
    """Ragged lists of up to five with ties, over more than an epoch, against a loop written by hand."""
    trainer = trained(tmp_path, ragged(), steps=5, size=4, completions_per_pass=per_pass, **OPTIONS[name])
    model, losses = by_hand(trainer, 5, 4, OPTIONS[name])
    torch.testing.assert_close(logged(trainer, "loss"), losses, rtol=2e-6, atol=5e-6)
    for key, value in model.named_parameters():
        torch.testing.assert_close(weights(trainer)[key], value.detach(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["plackett-luce", "mean", "ema", "likelihood"])
@pytest.mark.parametrize("per_pass", [None, 2])
def test_packed_rows_train_as_padded_ones(tmp_path, name, per_pass):
    options = {"steps": 5, "size": 4, "completions_per_pass": per_pass, **OPTIONS[name]}
    plain = trained(tmp_path / "a", ragged(), **options)
    packs = trained(tmp_path / "b", ragged(), scoring="packed", **options)
    assert packs.scorer.packs
    assert not plain.scorer.packs
    torch.testing.assert_close(logged(packs, "loss"), logged(plain, "loss"), rtol=2e-6, atol=5e-6)
    for key, value in weights(plain).items():
        torch.testing.assert_close(weights(packs)[key], value, rtol=0, atol=2e-6)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_pass_that_memory_does_not_hold_is_made_again_as_two(tmp_path, monkeypatch, caplog, accumulation):
    """What earlier micro-batches of the step have accumulated is not lost."""
    options = {"steps": 3, "size": 4, "gradient_accumulation_steps": accumulation}
    plain = trained(tmp_path / "a", ragged(), **options)
    memory = Small(monkeypatch, 60)
    with caplog.at_level(logging.WARNING, "adpo"):
        found = trained(tmp_path / "b", ragged(), scoring="packed", **options)
    assert memory.failures == sum("out of memory with" in record.message for record in caplog.records) > 0
    assert found.scorer.budget.tokens <= 60
    for key, value in weights(plain).items():
        torch.testing.assert_close(weights(found)[key], value, rtol=0, atol=2e-6)


def test_packed_rows_with_an_adapter_checkpoints_and_half_precision(tmp_path):
    from peft import LoraConfig

    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    options = {"steps": 3, "peft": lora, "gradient_checkpointing": True, "tau": 1.0}
    found = []
    for scoring in ("padded", "packed"):
        model = tiny_lm.model()
        found.append(trained(tmp_path / scoring, ragged(), model=model, scoring=scoring, **options))
    torch.testing.assert_close(logged(found[1], "loss"), logged(found[0], "loss"), rtol=2e-6, atol=5e-6)
    half = trained(tmp_path / "half", ragged(), steps=1, size=8, bf16=True, scoring="packed")
    assert abs(half.state.log_history[0]["adpo/log_ratio"]) < 1e-4


def test_a_model_that_cannot_be_packed_is_refused_or_padded(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=16, n_layer=1, n_head=2, n_positions=64))
    gpt2.transformer.h[0].attn.forward = None  # stands for any model of another make
    with pytest.raises(ValueError, match="scoring packed does not work with this model: TypeError"):
        trained(tmp_path, ragged(), model=gpt2, scoring="packed")


def test_accumulated_batches_are_one_batch(tmp_path):
    """Also where the last one of an epoch is smaller."""
    rows = ragged(7)
    whole = trained(tmp_path / "a", rows, steps=4, size=4, tau=0.5)
    parts = trained(tmp_path / "b", rows, steps=4, size=1, gradient_accumulation_steps=4, tau=0.5)
    torch.testing.assert_close(logged(parts, "loss"), logged(whole, "loss"), rtol=2e-6, atol=2e-6)
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], value, rtol=0, atol=2e-6)


def test_ranks_are_rewards_upside_down(tmp_path):
    rows = [{k: v for k, v in row.items() if k != "rewards"} for row in ragged()]
    ranks = [
        {**row, "ranks": [3 - int(r) for r in full["rewards"]]} for row, full in zip(rows, ragged(), strict=True)
    ]
    one, other = trained(tmp_path / "a", ragged()), trained(tmp_path / "b", ranks)
    for name, value in weights(one).items():
        assert torch.equal(weights(other)[name], value)


@pytest.mark.parametrize("schedule", ["auto", "guarded", "hybrid"])
def test_temperatures_move(tmp_path, schedule):
    trainer = trained(tmp_path, ragged(), steps=6, tau_schedule=schedule, tau=1.0, tau_min=0.2, tau_max=5.0)
    taus = logged(trainer, "adpo/tau")
    assert len(set(taus)) > 1
    if schedule == "auto":
        assert logged(trainer, "adpo/u_spread")
    else:
        assert all(0.2 <= tau <= 5.0 for tau in taus)


@pytest.mark.parametrize("schedule", ["constant_with_warmup", "linear", "cosine"])
def test_automatic_tau_is_that_of_the_highest_learning_rate(tmp_path, schedule):
    """Warm-up takes longer than measuring: it waits."""
    options = {"tau": "auto", "size": 8, "learning_rate": 0.01, "optim": "adamw_torch"}
    plain = trained(tmp_path / "plain", ragged(), steps=9, **options)
    warm = trained(tmp_path / "warm", ragged(), steps=50, lr_scheduler_type=schedule, warmup_steps=20, **options)
    assert plain.tau != 1.0
    assert warm.tau == pytest.approx(plain.tau, rel=0.5)
    measured = [entry["step"] for entry in warm.state.log_history if "adpo/u_spread" in entry]
    assert measured == list(range(11, 19))  # the first step of a warm-up has rate 0


def test_a_step_that_moves_nothing_is_not_measured(tmp_path):
    tied = [{"prompt": "1+1=", "completions": ["2", "3", "4"], "rewards": [1.0, 1.0, 1.0]} for _ in range(4)]
    for rows, rate in ((tied, 0.05), (ragged(), 1e-9)):
        trainer = trained(tmp_path / str(rate), rows, target="top1", tau="auto", learning_rate=rate)
        assert (trainer.tau, trainer.schedule.measured) == (1.0, 0)
        assert not logged(trainer, "adpo/u_spread")


def test_what_is_logged(tmp_path):
    trainer = trained(tmp_path, ragged(), steps=2, size=8)
    entry = trainer.state.log_history[0]
    names = {"accuracy", "ndcg", "best_first", "best_logp", "worst_logp", "logp_margin", "tau", "rows_left_out"}
    assert {f"adpo/{name}" for name in (*names, *adpo.core.objective.Diagnostics._fields)} <= set(entry)
    assert entry["refused_steps"] == 0
    assert entry["adpo/accuracy"] == 0.5  # at the reference all log-ratios are zero
    assert entry["adpo/logp_margin"] == pytest.approx(entry["adpo/best_logp"] - entry["adpo/worst_logp"])


def test_training_orders_the_lists(tmp_path):
    trainer = trained(tmp_path, ragged(), steps=60, size=8, tau=1.0, optim="adamw_torch", learning_rate=0.01)
    assert logged(trainer, "adpo/accuracy")[-1] > 0.95
    found = trainer.evaluate(trainer.train_dataset)
    assert found["eval_accuracy"] > 0.95
    assert found["eval_ndcg"] > 0.95
    assert found["eval_best_first"] > 0.8


def test_lists_without_preference_move_nothing_at_the_reference(tmp_path):
    tied = [{"prompt": "1+1=", "completions": ["2", "3", "4"], "rewards": [1.0, 1.0, 1.0]} for _ in range(4)]
    trainer = trained(tmp_path, tied, target="top1")
    for name, value in tiny_lm.model().named_parameters():
        assert torch.equal(weights(trainer)[name], value.detach())


def test_a_step_that_is_not_finite_is_refused(tmp_path, monkeypatch):
    class Broken(ListwiseTrainer):
        def _logp(self, model, rows, *how):
            logp = super()._logp(model, rows, *how)
            return logp * (float("nan") if self.state.global_step == 1 else 1.0)

    monkeypatch.setitem(globals(), "ListwiseTrainer", Broken)
    broken = trained(tmp_path / "a", ragged(), steps=2)
    monkeypatch.undo()
    one = trained(tmp_path / "b", ragged(), steps=1)
    assert logged(broken, "refused_steps") == [0.0, 1.0]
    for name, value in weights(one).items():
        assert torch.equal(weights(broken)[name], value)


@pytest.mark.parametrize("anchor", ["fixed", "ema", "refresh"])
def test_lora_trains_the_adapter_alone(tmp_path, anchor):
    from peft import LoraConfig

    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = trained(tmp_path, ragged(), steps=3, anchor=anchor, anchor_every=2, peft=lora)
    plain = dict(tiny_lm.model().named_parameters())
    for name, value in trainer.model.named_parameters():
        if "lora" not in name:
            bare = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(value, plain[bare])
    moved = [v for n, v in weights(trainer).items() if "lora_B" in n]
    assert moved
    assert all(v.abs().sum() > 0 for v in moved)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"anchor": "on_policy"}, "anchor must be one of fixed, ema, refresh, none; got 'on_policy'"),
        ({"target": "plackett"}, "target must be one of .* did you mean plackett_luce"),
        ({"max_length": 0}, "max_length must be at least 1; got 0"),
        ({"completions_per_pass": 0}, "completions_per_pass must be at least 1"),
        ({"completions_per_pass": 2, "disable_dropout": False}, "with dropout not alike"),
        ({"anchor": "none", "tau": "auto"}, "auto measures steps from an anchor"),
    ],
)
def test_arguments_that_mean_nothing(tmp_path, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        trained(tmp_path, ragged(), **options)


@pytest.mark.parametrize("anchor", ["fixed", "ema", "refresh"])
def test_a_model_at_its_anchor_orders_nothing(tmp_path, anchor):
    """Neither the order of the file nor the rounding of sums nor log-probabilities are taken for an order."""
    entry = trained(tmp_path, pairs(8), steps=1, size=8, anchor=anchor).state.log_history[0]
    for name in ("accuracy", "best_first"):
        assert entry[f"adpo/{name}"] == 0.5


def test_half_precision_scores_policy_and_reference_alike(tmp_path):
    trainer = trained(tmp_path, ragged(), steps=1, size=8, bf16=True)
    assert abs(trainer.state.log_history[0]["adpo/log_ratio"]) < 1e-4
    exact_one = trained(tmp_path / "b", ragged(), steps=1, size=8)
    assert trainer._scores.keys() == exact_one._scores.keys()
    (mine,), (other,) = trainer._scores.values(), exact_one._scores.values()
    assert not torch.equal(mine, other)


def test_a_model_by_name_is_trained_in_float32(tmp_path):
    tiny_lm.model().bfloat16().save_pretrained(tmp_path / "model")
    trainer = trained(tmp_path, ragged(), steps=1, model=str(tmp_path / "model"))
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("schedule", ["hybrid", "auto"])
def test_temperatures_do_not_depend_on_accumulation(tmp_path, schedule):
    options = {"steps": 4, "tau": 1.0, "tau_schedule": schedule, "tau_min": 0.1}
    whole = trained(tmp_path / "a", ragged(), size=4, **options)
    parts = trained(tmp_path / "b", ragged(), size=1, gradient_accumulation_steps=4, **options)
    torch.testing.assert_close(logged(parts, "adpo/tau"), logged(whole, "adpo/tau"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.1, 0.3])
def test_label_smoothing_is_twice_trls(smoothing):
    """Theirs goes to the other one of two, ours is spread evenly over both."""
    logp = torch.tensor([[1.0, 0.0]])
    ours = adpo.Objective(adpo.plackett_luce(label_smoothing=2 * smoothing), adpo.cross_entropy, 1.0)
    theirs = -(1 - smoothing) * torch.tensor(1.0).sigmoid().log() - smoothing * torch.tensor(-1.0).sigmoid().log()
    found = ours.loss(logp, torch.zeros(1, 2), rewards=torch.tensor([[1.0, 0.0]]))
    torch.testing.assert_close(found, theirs, check_dtype=False)


def test_longer_lists_than_the_model_takes_are_cut(tmp_path):
    rows = [{"prompt": "1+1=", "completions": ["2" * 100, "3" * 50], "ranks": [1, 2]}] * 4
    trainer = trained(tmp_path, rows, steps=1)
    assert trainer.train_dataset.truncated == 4
    assert len(trainer.train_dataset[0]["completion_ids"][0]) == 64 - 4


def test_the_seed_of_the_data_may_be_zero(tmp_path):
    zero, none = trained(tmp_path / "a", ragged(), data_seed=0), trained(tmp_path / "b", ragged())
    assert (zero.train_sampler.seed, none.train_sampler.seed) == (0, 42)
