"""`ADPOTrainer` when things go wrong, and what it watches: every case has one defined outcome."""

import json
import logging
import math

import pytest
import test_trl_online as online
import tiny_lm
import torch
from datasets import Dataset
from test_trl_online import GROUP, PROMPTS, trained, weights
from trl import GRPOTrainer

from adpo.anchors import EMA
from adpo.trainers.monitors.auto_tau import AutoTau
from adpo.trainers.monitors.guards import GuardedRewards
from adpo.trainers.trl import ADPOConfig, ADPOTrainer, TrainingStoppedError
from adpo.trainers.trl.step import anchoring
from adpo.trainers.trl.step.anchoring import KLBudget


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture
def rewards(monkeypatch):
    """Lets a test give the rewards."""

    def use(function):
        monkeypatch.setattr(online, "reward", function)

    return use


class Broken(online.Fixed):
    """Log-probabilities that are not numbers before these optimizer steps."""

    bad_steps = ()
    kind = math.nan

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        plain = self.row_scorer.logp

        def logp(model, rows):
            bad = torch.is_grad_enabled() and self.state.global_step in self.bad_steps
            return plain(model, rows) * (self.kind if bad else 1.0)

        self.row_scorer.logp = logp


@pytest.mark.parametrize("kind", [math.nan, math.inf])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw_torch"])
def test_a_step_with_a_gradient_that_is_not_finite_is_refused(tmp_path, monkeypatch, caplog, kind, optimizer):
    monkeypatch.setattr(online, "Fixed", Broken)
    monkeypatch.setattr(Broken, "bad_steps", (1, 2))
    monkeypatch.setattr(Broken, "kind", kind)
    options = {"num_iterations": 1, "optim": optimizer, "learning_rate": 0.01}
    with caplog.at_level(logging.WARNING, "adpo"):
        after_three = trained(tmp_path, 4, 4, steps=3, **options)
    after_one = trained(tmp_path, 4, 4, steps=1, **options)
    assert same(weights(after_three), weights(after_one))
    assert logged(after_three, "refused_steps") == [0.0, 1.0, 2.0]
    assert sum("refused" in record.message for record in caplog.records) == 2
    after_four = trained(tmp_path, 4, 4, steps=4, **options)
    assert not same(weights(after_four), weights(after_one))
    assert all(torch.isfinite(value).all() for value in weights(after_four))


@pytest.mark.parametrize("options", [{"num_iterations": 2}, {"num_iterations": 1, "anchor": "ema"}])
def test_a_score_that_is_not_a_number_refuses_the_step_too(tmp_path, monkeypatch, options):
    """Where log-probabilities are looked at before the gradient: later inner steps, other anchors."""

    class Spoilt(online.Fixed):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            plain = self.row_scorer.logp
            self.row_scorer.logp = lambda model, rows: (
                plain(model, rows) * (math.nan if self.state.global_step == 1 else 1.0)
            )

    monkeypatch.setattr(online, "Fixed", Spoilt)
    trainer = trained(tmp_path, 4, 4, steps=3, **options)
    assert logged(trainer, "refused_steps") == [0.0, 1.0, 1.0]
    assert all(torch.isfinite(value).all() for value in weights(trainer))
    assert trainer.state.global_step == 3


def test_refused_steps_are_a_count_whatever_the_logging(tmp_path, monkeypatch):
    monkeypatch.setattr(online, "Fixed", Broken)
    monkeypatch.setattr(Broken, "bad_steps", (2,))
    trainer = trained(tmp_path, 4, 4, steps=4, num_iterations=1, logging_steps=4)
    assert logged(trainer, "refused_steps") == [1.0]


def test_a_run_of_refused_steps_ends_training_and_names_the_last_good_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(online, "Fixed", Broken)
    monkeypatch.setattr(Broken, "bad_steps", range(1, 100))
    with pytest.raises(TrainingStoppedError, match=r"3 optimizer steps in a row .*checkpoint-4") as error:
        trained(tmp_path, 4, 4, steps=20, num_iterations=1, max_refused_steps=3)
    folder = str(error.value).rsplit(" ", 1)[1]
    saved = tiny_lm.model().from_pretrained(folder)
    monkeypatch.setattr(Broken, "bad_steps", ())
    good = trained(tmp_path / "good", 4, 4, steps=1, num_iterations=1)
    assert same(list(saved.parameters()), weights(good))


def test_a_reward_function_that_fails_once_leaves_its_completions_out(tmp_path, rewards, caplog):
    calls = []

    def fragile(completions, **_):
        calls.append(len(completions))
        if len(calls) == 1:
            raise ConnectionError("the judge is asleep")
        return [float(i % 3) for i in range(len(completions))]

    rewards(fragile)
    with caplog.at_level(logging.WARNING, "adpo"):
        trainer = trained(tmp_path, 4, 4, steps=2, num_iterations=1)
    assert "fragile failed with ConnectionError: the judge is asleep: 16 completions are left out" in caplog.text
    assert trainer.reward_guard.failures == 1
    assert logged(trainer, "adpo/no_reward") == [1.0, 0.0]
    assert logged(trainer, "adpo/rows_left_out")[0] == 1.0
    assert not same(weights(trainer), list(tiny_lm.model().parameters()))


def test_what_one_of_two_reward_functions_loses_is_left_out(tmp_path, monkeypatch, caplog):
    """None is an answer, and the other function's reward counts; a failure is none, and nobody's counts."""
    calls = []

    def length(completions, **_):
        return [float(len(text)) for text in completions]

    def correctness(completions, **_):
        calls.append(len(completions))
        if len(calls) == 1:
            raise ConnectionError("the judge is asleep")
        return [None, math.inf, math.nan, *(1.0 for _ in completions[3:])]

    monkeypatch.setattr(online, "reward", [length, correctness])
    seen = []

    class Watching(online.Fixed):
        def _log_rollout(self, rewards, member, cut):
            seen.append(member.tolist())
            super()._log_rollout(rewards, member, cut)

    monkeypatch.setattr(online, "Fixed", Watching)
    with caplog.at_level(logging.WARNING, "adpo"):
        trainer = trained(tmp_path, 4, 4, steps=2, num_iterations=1)
    assert "16 completions are left out" in caplog.text
    assert seen == [[False] * 16, [True, False, False, *[True] * 13]]
    assert logged(trainer, "adpo/no_reward") == [1.0, 2 / 16]


def test_a_reward_function_that_would_end_the_program_has_failed(caplog):
    def leaves(completions, **_):
        raise SystemExit(0)

    assert GuardedRewards(limit=2).wrap(leaves)(completions=["a", "b"]) == [None, None]
    assert "reward function leaves failed with SystemExit: 0: 2 completions are left out" in caplog.text


def test_a_reward_function_that_keeps_failing_ends_training(tmp_path, rewards):
    def broken(completions, **_):
        raise KeyError("answer")

    rewards(broken)
    with pytest.raises(TrainingStoppedError, match=r"reward function broken failed 3 times in a row.*KeyError"):
        trained(tmp_path, 4, 4, steps=9, num_iterations=1, max_refused_steps=3)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (lambda n: [1.0] * (n - 1), "'judge' returned 15 rewards, but 16"),
        (lambda n: ["good"] * n, "judge must return one number or None per completion; got"),
        (lambda n: None, "judge must return one number or None per completion; got None"),
    ],
)
def test_a_reward_function_that_returns_nonsense_ends_training_at_once(tmp_path, rewards, values, words):
    def judge(completions, **_):
        return values(len(completions))

    rewards(judge)
    with pytest.raises(ValueError, match=words):
        trained(tmp_path, 4, 4, steps=1)


def by_hand_of(rows_left_out, prompts=PROMPTS, completions=None, target_rewards=None):
    """One step on the groups without these rows."""
    model, tokenizer = tiny_lm.model(), tiny_lm.tokenizer()
    objective = ADPOConfig(output_dir="unused", use_cpu=True, bf16=False).objective()
    kept = [row for row in range(GROUP * len(prompts)) if row not in rows_left_out]
    total, groups = 0.0, sorted({row // GROUP for row in kept})
    for group in groups:
        members = [row for row in kept if row // GROUP == group]
        logp = []
        for row in members:
            prompt, answer = tokenizer(prompts[group])["input_ids"], completions(row)
            ids = torch.tensor([prompt + answer])
            scores = torch.log_softmax(model(ids).logits[0, :-1], -1)
            logp.append(scores.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum())
        table = torch.stack(logp).unsqueeze(0)
        rewards = torch.tensor([[target_rewards(row) for row in members]])
        total = total + objective.loss(table, table.detach(), rewards=rewards)
    (total / len(groups)).backward()
    return [(value - 0.05 * value.grad).detach() for value in model.parameters()]


def graded(row):
    return float((7 * row) % 5)


@pytest.mark.parametrize("size", [4, 1])
@pytest.mark.parametrize(
    "case", ["none", "infinite", "nan", "empty completion", "every member of a group", "one member left"]
)
def test_completions_that_cannot_count_are_no_members_of_their_groups(tmp_path, rewards, monkeypatch, case, size):
    out = {"every member of a group": {4, 5, 6, 7}, "one member left": {4, 5, 7}}.get(case, {2, 5, 6})
    nothing = {"infinite": math.inf, "nan": math.nan}.get(case)
    rewards(
        lambda completions, **_: [
            nothing if row in out and case != "empty completion" else graded(row)
            for row in range(len(completions))
        ]
    )
    full = online.completion

    def completion(step, row):
        return [] if row in out and case == "empty completion" else full(step, row)

    monkeypatch.setattr(online, "completion", completion)
    if case == "empty completion":  # below the trainer, where a rollout would have made it
        monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", online.Fixed._generate_single_turn)
        monkeypatch.setattr(online, "Fixed", ADPOTrainer)
    trainer = trained(tmp_path, size, 16 // size, steps=1)
    expected = by_hand_of(out, completions=lambda row: completion(0, row), target_rewards=graded)
    for mine, theirs in zip(weights(trainer), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    name = "adpo/empty" if case == "empty completion" else "adpo/no_reward"
    assert logged(trainer, name) == [pytest.approx(len(out) / 16)]


def test_prompts_beyond_the_context_are_left_out(tmp_path, monkeypatch, rewards, caplog):
    long = "1+" * 40 + "1="  # the model has 64 positions
    prompts = [PROMPTS[0], long, *PROMPTS[2:]]
    monkeypatch.setattr(online, "PROMPTS", prompts)
    rewards(lambda completions, **_: [graded(row) for row in range(len(completions))])
    with caplog.at_level(logging.WARNING, "adpo"):
        trainer = trained(tmp_path, 4, 4, steps=1)
    assert "25.0 % of completions left out: too_long" in caplog.text
    expected = by_hand_of(
        {4, 5, 6, 7}, prompts, completions=lambda row: online.completion(0, row), target_rewards=graded
    )
    for mine, theirs in zip(weights(trainer), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw_torch"])
def test_automatic_tau_makes_the_deviation_of_u_about_one(tmp_path, iterations, optimizer):
    rate = {"sgd": 0.03, "adamw_torch": 0.003}[optimizer]
    options = {"num_iterations": iterations, "optim": optimizer, "learning_rate": rate, "tau": "auto"}
    trainer = trained(tmp_path, 4, 4, steps=8 * iterations, **options)
    spreads, taus = logged(trainer, "adpo/u_spread"), logged(trainer, "adpo/tau")
    assert isinstance(trainer.schedule, AutoTau)
    assert not 0.5 < spreads[0] < 2  # there was something to do
    assert all(0.5 < spread < 2 for spread in spreads[-3:]), spreads
    assert taus[-1] == pytest.approx(trainer.tau)
    whole = trained(tmp_path, 16, 1, steps=8 * iterations, **options)
    assert whole.tau == pytest.approx(trainer.tau, rel=1e-3)


def test_automatic_tau_waits_for_the_learning_rate(tmp_path):
    options = {"num_iterations": 1, "optim": "adamw_torch", "learning_rate": 0.003, "tau": "auto"}
    plain = trained(tmp_path, 16, 1, steps=9, **options)
    warm = trained(tmp_path, 16, 1, steps=19, lr_scheduler_type="constant_with_warmup", warmup_steps=20, **options)
    measured = [entry["step"] for entry in warm.state.log_history if "adpo/u_spread" in entry]
    assert measured == list(range(11, 19))
    assert warm.tau == pytest.approx(plain.tau, rel=0.5)


def test_confidence_by_tokens(tmp_path):
    trainer = trained(tmp_path, 4, 4, tau_schedule="hybrid", tau=0.8, tau_confidence="tokens")
    entropies = logged(trainer, "adpo/token_entropy")
    assert len(entropies) == 2  # one a rollout
    assert all(0.8 < value <= 1 for value in entropies)  # nothing is learnt yet: nearly uniform
    answers = trained(tmp_path, 4, 4, tau_schedule="hybrid", tau=0.8)
    assert not logged(answers, "adpo/token_entropy")
    assert answers.tau != trainer.tau


def test_training_stops_at_the_kl_budget_and_keeps_the_model(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(online, "Fixed", ADPOTrainer)  # completions that the policy samples
    with caplog.at_level(logging.WARNING, "adpo"):
        trainer = trained(tmp_path, 4, 4, steps=50, num_iterations=1, learning_rate=0.02, kl_budget=0.05)
    distances = logged(trainer, "adpo/start_kl")
    assert 2 < len(distances) < 50
    assert distances[0] == 0
    assert distances[-1] > 0.05 >= max(distances[:-1])
    assert "over kl_budget = 0.05" in caplog.text
    assert (tmp_path / f"checkpoint-{len(distances)}" / "model.safetensors").exists()


@pytest.mark.parametrize("tools", [False, True])
def test_the_kl_budget_is_in_nats_a_completion(tmp_path, monkeypatch, tools):
    """Also where the loss looks at the mean over tokens, and where tools have written some of them."""
    seen = []

    class Watched(KLBudget):
        def measure(self, rows):
            if tools:
                rows["tool_mask"] = rows["completion_mask"].clone()
                rows["tool_mask"][:, ::2] = 0
            distance = super().measure(rows)
            scorer = self._logp_of.__self__.row_scorer
            reduction, scorer.reduction = scorer.reduction, "sum"
            moved = self._logp_of(rows) - self.start.logp(lambda _: self._logp_of(rows))
            scorer.reduction = reduction
            seen.append(float(moved.mean()))
            return distance

    monkeypatch.setattr(anchoring, "KLBudget", Watched)
    options = {"num_iterations": 1, "kl_budget": 1000.0, "logp_reduction": "mean", "learning_rate": 0.5}
    trainer = trained(tmp_path, 4, 4, steps=3, **options)
    assert abs(seen[-1]) > 1e-3
    assert logged(trainer, "adpo/start_kl") == pytest.approx(seen, abs=1e-9)


def test_likelihood_displacement_is_seen_and_the_nll_term_holds_it(tmp_path, monkeypatch, rewards):
    """The worse members are made of the best one's tokens: pushing them down pulls it along."""

    def completion(_, row):
        d, e = 2 + row // GROUP, 7 + row // GROUP
        return [[d, e, 1], [d, e, d, e, 1], [e, d, e, d, 1], [d, d, e, e, 1]][row % GROUP]

    monkeypatch.setattr(online, "completion", completion)
    rewards(lambda completions, **_: [float(row % GROUP == 0) for row in range(len(completions))])
    options = {"steps": 20, "num_iterations": 1, "learning_rate": 0.02, "anchor": "fixed", "tau": 0.5}
    drift = {}
    for weight in (0.0, 0.1):
        trainer = trained(tmp_path, 4, 4, nll_weight=weight, **options)
        best, worst, margin = (logged(trainer, f"adpo/{n}") for n in ("best_logp", "worst_logp", "logp_margin"))
        assert margin[-1] == pytest.approx(best[-1] - worst[-1])
        assert margin[-1] > margin[0] + 0.1  # the loss has what it asks for
        drift[weight] = best[-1] - best[0]
    assert drift[0.0] < -0.1
    assert drift[0.1] > 0


def test_different_answers_are_counted(tmp_path, monkeypatch):
    digits = {str(d): 2 + tiny_lm.CHARACTERS.index(str(d)) for d in range(10)}
    answers = ["7", "7", "3", "7"] + ["1", "2", "3", "4"] + ["5"] * 8
    monkeypatch.setattr(online, "completion", lambda _, row: [digits[answers[row]], 1])
    trainer = trained(tmp_path, 4, 4, steps=1)
    assert logged(trainer, "adpo/distinct_answers") == [pytest.approx((2 + 4 + 1 + 1) / 4)]


@pytest.mark.parametrize(
    "options",
    [
        {"anchor": "ema", "anchor_decay": 0.8, "tau_schedule": "guarded", "tau_min": 0.5, "tau_max": 2.0},
        {"anchor": "refresh", "anchor_every": 4, "tau_schedule": "hybrid"},
        {"anchor": "fixed", "kl_budget": 1000.0},
        {"tau": "auto", "kl_budget": 1000.0},
    ],
    ids=lambda options: options.get("anchor", "on_policy"),
)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path, options):
    settings = {"num_iterations": 1, "optim": "adamw_torch", "learning_rate": 0.01, **options}
    whole = trained(tmp_path / "whole", 4, 4, steps=6, **settings)
    saving = {"save_strategy": "steps", "save_steps": 3}
    trained(tmp_path / "cut", 4, 4, steps=3, **saving, **settings)
    checkpoint = tmp_path / "cut" / "checkpoint-3"
    state = json.loads((checkpoint / "adpo.json").read_text())
    assert state["tau"] > 0
    resumed = trained(tmp_path / "cut", 4, 4, steps=6, resume=checkpoint, **settings)
    assert logged(resumed, "adpo/tau")[-1] == logged(whole, "adpo/tau")[-1]
    for mine, theirs in zip(weights(resumed), weights(whole), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    for name, policy in whole.kept_policies.items():
        for key, value in policy.shadow.items():
            torch.testing.assert_close(resumed.kept_policies[name].shadow[key], value)


def test_a_checkpoint_of_other_options_is_refused(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}
    trained(tmp_path, 4, 4, steps=1, **saving)
    with pytest.raises(ValueError, match="holds no state of the anchor"):
        trained(tmp_path, 4, 4, steps=2, resume=tmp_path / "checkpoint-1", anchor="ema")
    (tmp_path / "checkpoint-1" / "adpo.json").write_text('{"tau"')
    with pytest.raises(ValueError, match=r"is damaged \(adpo\.json: "):
        trained(tmp_path, 4, 4, steps=2, resume=tmp_path / "checkpoint-1")


@pytest.mark.parametrize("anchor", ["on_policy", "fixed", "ema", "refresh"])
def test_lora_trains_the_adapter_alone_and_anchors_it(tmp_path, anchor):
    from peft import LoraConfig

    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = trained(tmp_path, 4, 4, steps=4, anchor=anchor, anchor_every=2, peft_config=lora)
    plain = dict(tiny_lm.model().named_parameters())
    moved = 0
    for name, value in trainer.model.named_parameters():
        if "lora" in name:
            moved += bool(value.requires_grad and name.endswith("lora_B.default.weight") and value.abs().sum() > 0)
        else:
            bare = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(value, plain[bare])
    assert moved == 2
    if trainer.anchor is not None:
        assert trainer.anchor.shadow
        assert all("lora" in key or "rotary" in key for key in trainer.anchor.shadow)
        assert isinstance(trainer.anchor, EMA) == (anchor == "ema")


def test_data_with_more_prompts_than_a_step_needs(tmp_path):
    """The plain way of use: a data set that is larger than a batch, real sampling from the model."""
    data = Dataset.from_list([{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(20)])

    def exact(completions, answer, **_):
        return [float(c.strip() == a) for c, a in zip(completions, answer, strict=True)]

    arguments = ADPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=3,
        max_steps=3,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = ADPOTrainer(
        tiny_lm.model(), exact, arguments, train_dataset=data, processing_class=tiny_lm.tokenizer()
    )
    trainer.train()
    assert trainer.state.global_step == 3


class Counting(online.Fixed):
    """Notes how many rows each pass through the model has, and whether it is for a gradient."""

    def __init__(self, *arguments, **options):
        self.passes = []
        super().__init__(*arguments, **options)

    def _get_per_token_logps_and_entropies(self, model, input_ids, *rest, **options):
        if not self.row_scorer.skip:
            self.passes.append((self.state.global_step, len(input_ids), torch.is_grad_enabled()))
        return super()._get_per_token_logps_and_entropies(model, input_ids, *rest, **options)

    def rows(self, step, grad):
        return sum(rows for at, rows, wanted in self.passes if (at, wanted) == (step, grad))


def two_of_four_groups_tied(completions, **_):
    return [graded(row) if row // GROUP % 2 else 1.0 for row in range(len(completions))]


def test_the_first_step_on_policy_is_one_pass_over_rows_with_a_gradient(tmp_path, monkeypatch, rewards):
    """No pass for the old policy, none for a reference, none for tied groups."""
    monkeypatch.setattr(online, "Fixed", Counting)
    rewards(two_of_four_groups_tied)
    trainer = trained(tmp_path, 2, 8, steps=2, num_iterations=1)
    for step in (0, 1):
        assert trainer.rows(step, grad=True) == 8
        assert trainer.rows(step, grad=False) == 0
    assert trainer.ref_model is None


@pytest.mark.parametrize("size", [2, 4, 16])
def test_a_second_inner_step_scores_groups_that_a_pass_does_not_hold(tmp_path, monkeypatch, rewards, size):
    """The anchor's log-probabilities are those of the first step's passes, and of one over what they left out."""
    monkeypatch.setattr(online, "Fixed", Counting)
    rewards(two_of_four_groups_tied)
    trainer = trained(tmp_path, size, 16 // size, steps=2, num_iterations=2)
    assert trainer.rows(0, grad=True) == 8
    assert trainer.rows(0, grad=False) == 8  # the anchor, of the rest
    assert trainer.rows(1, grad=False) == (16 if size < GROUP else 0)
    assert trainer.rows(1, grad=True) <= 16


def test_later_steps_on_a_rollout_know_the_policy_that_sampled_it(tmp_path, monkeypatch, rewards):
    """Also for rows that the first step did not train on."""
    monkeypatch.setattr(online, "Fixed", Counting)
    rewards(lambda completions, **_: [graded(row) for row in range(len(completions))])
    trainer = trained(tmp_path, 4, 2, steps=2, num_iterations=1, steps_per_generation=4)
    assert trainer.rows(0, grad=True) == 8
    assert trainer.rows(0, grad=False) == 8  # the other two groups, before the policy moves
    assert trainer.rows(1, grad=False) == 0
    assert trainer.rows(1, grad=True) == 8
