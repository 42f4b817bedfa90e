"""`ADPOTrainer`: the same training whichever way a group is cut, equal to Algorithm 1's gradient."""

import sys
from itertools import islice
from pathlib import Path

import pytest
import tiny_lm
import torch
from datasets import Dataset

import forked
from adpo.algorithm import Algorithm1, Batch
from adpo.anchors import Zero
from adpo.core.temperature import ConstantTau
from adpo.trainers.trl import ADPOConfig, ADPOTrainer

GROUP = 4
PER_STEP = 4
PROMPTS = [f"{i}+{i + 1}=" for i in range(4)]
LENGTH = 5


def reward(completions, **_):
    """Something graded, with ties."""
    return [float(sum(c.isdigit() for c in text)) for text in completions]


class Fixed(ADPOTrainer):
    """Completions that depend on the optimizer step and the row alone, not on how the batch is cut."""

    def _generate_single_turn(self, prompt_ids, *_, **__):
        first = self.accelerator.process_index * len(prompt_ids)
        rows = range(first, first + len(prompt_ids))
        return [completion(self.state.global_step, row) for row in rows], None


def completion(step, row):
    generator = torch.Generator().manual_seed(1000 * step + row)
    length = int(torch.randint(1, LENGTH, (), generator=generator))
    body = torch.randint(2, 2 + len(tiny_lm.CHARACTERS), (length,), generator=generator).tolist()
    return [*body, 1]


def trained(folder, size, accumulation, steps=3, processes=1, resume=None, peft_config=None, **options):
    per_rollout = options.get("steps_per_generation", accumulation)
    groups = size * max(accumulation, per_rollout) * processes // GROUP
    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": accumulation,
        "num_generations": GROUP,
        "max_completion_length": LENGTH,
        "max_steps": steps,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "num_iterations": 2,
        "shuffle_dataset": False,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        **options,
    }
    trainer = Fixed(
        model=tiny_lm.model(),
        reward_funcs=reward,
        args=ADPOConfig(**arguments),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS[:groups]]),
        processing_class=tiny_lm.tokenizer(),
        peft_config=peft_config,
    )
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return trainer


def weights(trainer):
    return [value.detach().clone() for value in trainer.model.parameters()]


OBJECTIVES = {
    "softmax": {"target": "boltzmann", "reward_beta": 0.5},
    "plackett-luce": {"target": "plackett_luce"},
    "reverse kl": {"target": "boltzmann", "divergence": "reverse_kl", "tau": 0.7},
    "prior inside": {"target": "boltzmann", "prior_in_target": True},
}


class Scored(torch.nn.Module):
    """The language model as Algorithm 1 wants it: candidates are numbers, step and row, of fixed completions."""

    def __init__(self, groups):
        super().__init__()
        self.lm, self.tokenizer = tiny_lm.model(), tiny_lm.tokenizer()
        self.prompts = [self.tokenizer(prompt)["input_ids"] for prompt in PROMPTS[:groups]]

    def forward(self, contexts, candidates):
        return torch.stack(
            [
                torch.stack([self.logp(self.prompts[group], completion(*divmod(int(c), 1000))) for c in row])
                for group, row in zip(contexts.tolist(), candidates, strict=True)
            ]
        )

    def logp(self, prompt, answer):
        ids = torch.tensor([prompt + answer])
        scores = torch.log_softmax(self.lm(ids).logits[0, :-1], -1)
        return scores.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum()


class FixedWorld:
    """A rollout before every second optimizer step."""

    def __init__(self, groups):
        self.groups, self.step = groups, -2

    def contexts(self):
        self.step += 2
        return torch.arange(self.groups)

    def sample(self, policy, contexts):
        return 1000 * self.step + torch.arange(self.groups * GROUP).view(self.groups, GROUP)

    def rewards(self, contexts, candidates):
        ids = [completion(*divmod(int(c), 1000)) for c in candidates.reshape(-1)]
        texts = tiny_lm.tokenizer().batch_decode(ids, skip_special_tokens=True)
        return torch.tensor(reward(texts)).view(candidates.shape)


def algorithm_1(options, groups, steps=3):
    """The paper's Algorithm 1, the whole rollout in one batch."""
    config = ADPOConfig(output_dir="unused", use_cpu=True, bf16=False, **options)
    policy = Scored(groups)
    optimizer = torch.optim.SGD(policy.parameters(), 0.05)
    algorithm = Algorithm1(policy, config.objective(), ConstantTau(config.tau), optimizer)
    done = list(islice(algorithm.online(FixedWorld(groups), iterations=2, inner_steps=2), steps))
    assert len(done) == steps
    return [value.detach() for value in policy.parameters()]


def assert_trained_alike(found, options, groups):
    expected = algorithm_1(options, groups)
    moved = max((a - b).abs().max().item() for a, b in zip(expected, tiny_lm.model().parameters(), strict=True))
    assert moved > 1e-3
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(("size", "accumulation"), [(1, 16), (2, 8), (3, 4), (4, 4), (8, 2)])
def test_any_split_of_the_groups_gives_the_gradient_of_the_whole(tmp_path, name, size, accumulation):
    trainer = trained(tmp_path, size, accumulation, **OBJECTIVES[name])
    assert_trained_alike(weights(trainer), OBJECTIVES[name], size * accumulation // GROUP)


PROGRAM = """
import os, sys
sys.path[:0] = [{tests!r}]
from pathlib import Path
import torch
import test_trl_online as tests
tests.reward = getattr(tests, {reward!r})
trainer = tests.trained(Path({folder!r}), {size}, {accumulation}, processes=2, **tests.OBJECTIVES[{name!r}])
assert trainer.accelerator.num_processes == 2
torch.save(tests.weights(trainer), Path({folder!r}) / f"weights-{{trainer.accelerator.process_index}}.pt")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
os._exit(0)  # threads of the process group may still be at work, and end a process that ends slowly
"""


def mostly_tied(completions, **_):
    """Only the first group has anything to say: most micro-batches, and the second process, have nothing to do."""
    ids = [completion(step, row) for step in range(3) for row in range(GROUP)]
    heard = set(tiny_lm.tokenizer().batch_decode(ids, skip_special_tokens=True))
    return [value if text in heard else 0.0 for text, value in zip(completions, graded(completions), strict=True)]


graded = reward


@pytest.mark.parametrize(
    ("name", "size", "accumulation", "rewarded"),
    [
        pytest.param("softmax", 1, 8, reward, marks=pytest.mark.slow),
        ("plackett-luce", 2, 3, reward),
        pytest.param("reverse kl", 4, 2, reward, marks=pytest.mark.slow),
        ("plackett-luce", 1, 8, mostly_tied),
    ],
)
def test_two_processes_give_the_gradient_of_the_whole(tmp_path, monkeypatch, name, size, accumulation, rewarded):
    """Two rows by three steps by two processes: the middle one of three groups is on both."""
    monkeypatch.setattr(sys.modules[__name__], "reward", rewarded)
    script = tmp_path / "rank.py"
    here = str(Path(__file__).parent)
    script.write_text(
        PROGRAM.format(
            tests=here,
            folder=str(tmp_path),
            size=size,
            accumulation=accumulation,
            name=name,
            reward=rewarded.__name__,
        )
    )
    result = forked.run_two(script)
    assert result.returncode == 0, result.stderr[-2000:]
    for rank in range(2):
        found = torch.load(tmp_path / f"weights-{rank}.pt", weights_only=True)
        assert_trained_alike(found, OBJECTIVES[name], size * accumulation * 2 // GROUP)


def test_rows_of_tied_groups_are_left_out(tmp_path):
    trainer = trained(tmp_path, 4, 4, steps=1, target="plackett_luce")
    logged = trainer.state.log_history[0]
    texts = tiny_lm.tokenizer().batch_decode([completion(0, r) for r in range(16)], skip_special_tokens=True)
    rewards = torch.tensor(reward(texts)).view(4, GROUP)
    tied = (rewards == rewards[:, :1]).all(1).float().mean().item()
    assert logged["adpo/rows_left_out"] >= tied
    assert logged["adpo/live"] == pytest.approx(1 - tied)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "plackett_luse"}, "did you mean plackett_luce"),
        ({"divergence": "alpha"}, "lacks its number"),
        ({"beta": 0.1}, "takes the place of a KL penalty"),
        ({"epsilon": 0.1}, "epsilon = 0.1 is refused: it shapes a loss that ADPO does not use"),
        ({"loss_type": "dr_grpo"}, "loss_type = 'dr_grpo' is refused: it shapes a loss"),
        ({"target": "top1", "divergence": "reverse_kl"}, "label_smoothing"),
        ({"tau": 0.0}, "tau must be"),
        ({"target": "top1", "prior_in_target": True}, "prior_in_target means nothing to the top1 target"),
        ({"target": "kde", "label_smoothing": 0.1}, "label_smoothing = 0.1 means nothing to the kde target"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        ADPOConfig(output_dir="unused", use_cpu=True, bf16=False, **options)


@pytest.mark.parametrize(("accumulation", "per_rollout"), [(2, 3), (4, 3)])
def test_rollouts_that_would_begin_inside_an_optimizer_step_are_refused(accumulation, per_rollout):
    with pytest.raises(ValueError, match="one must be a multiple of the other"):
        ADPOConfig(
            output_dir="unused",
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=8,
            num_generations=8,
            gradient_accumulation_steps=accumulation,
            steps_per_generation=per_rollout,
        )


def test_groups_that_would_straddle_two_optimizer_steps_are_refused(tmp_path):
    with pytest.raises(ValueError, match="straddle optimizer steps"):
        trained(tmp_path, 2, 1, steps_per_generation=8)


@pytest.mark.parametrize(
    "options",
    [
        {"anchor": "fixed"},
        {"anchor": "ema", "anchor_decay": 0.9},
        {"anchor": "refresh", "anchor_every": 2},
        {"anchor": "none", "tau": 20.0},
        {"tau_schedule": "guarded", "tau_min": 0.5, "tau_max": 2.0},
        {"tau_schedule": "hybrid", "tau": 0.8},
        {"target": "kde", "logp_reduction": "mean", "tau": 0.1},
        {"target": "top1", "label_smoothing": 0.1, "divergence": "alpha:0.5"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_other_anchors_temperatures_and_targets_train_alike_under_any_split(tmp_path, options):
    whole, cut = (weights(trained(tmp_path, *layout, **options)) for layout in ((16, 1), (2, 8)))
    for one, other in zip(whole, cut, strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_a_fixed_anchor_is_the_policy_at_the_start(tmp_path):
    trainer = trained(tmp_path, 8, 2, anchor="fixed")
    first, second, third = (log for log in trainer.state.log_history if "adpo/anchor_kl" in log)
    assert first["adpo/anchor_kl"] == pytest.approx(0, abs=1e-12)
    assert second["adpo/anchor_kl"] > 1e-6
    assert third["adpo/anchor_kl"] > 1e-6  # a new rollout, the same anchor
    on_policy = trained(tmp_path, 8, 2)
    third = [log for log in on_policy.state.log_history if "adpo/anchor_kl" in log][2]
    assert third["adpo/anchor_kl"] == pytest.approx(0, abs=1e-12)


def test_without_an_anchor_u_is_the_log_probability_itself(tmp_path):
    options = {"anchor": "none", "tau": 20.0}
    world, policy = FixedWorld(PER_STEP), Scored(PER_STEP)
    contexts = world.contexts()
    candidates = world.sample(policy, contexts)
    batch = Batch(contexts, candidates, {"rewards": world.rewards(contexts, candidates)})
    objective = ADPOConfig(output_dir="unused", use_cpu=True, bf16=False, **options).objective()
    algorithm = Algorithm1(policy, objective, ConstantTau(20.0), torch.optim.SGD(policy.parameters(), 0.05))
    list(algorithm.offline([batch, batch], Zero()))
    found = weights(trained(tmp_path, 8, 2, steps=2, **options))
    for one, other in zip(found, policy.parameters(), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", ["zero", "mask", "keep"])
def test_truncated_completions(tmp_path, rule, monkeypatch):
    """All are cut at the limit: only where such members keep their rewards is there anything to learn."""
    digit, plus = 2, 2 + tiny_lm.CHARACTERS.index("+")
    monkeypatch.setattr(sys.modules[__name__], "completion", lambda _, row: [plus if row % 2 else digit] * LENGTH)
    trainer = trained(tmp_path, 4, 4, steps=1, target="top1", truncated=rule)
    before, after = tiny_lm.model().parameters(), weights(trainer)
    moved = any(not torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert moved == (rule == "keep")
    logged = trainer.state.log_history[0]
    assert logged["adpo/rows_left_out"] == (0.0 if moved else 1.0)
    assert logged.get("adpo/live", 0.0) == (1.0 if moved else 0.0)


@pytest.mark.parametrize(
    ("stops", "lengths"), [({}, 4), ({"stop_strings": ["</answer>"]}, 4), ({"stop_strings": ["."]}, LENGTH)]
)
def test_completions_that_a_word_ends_are_not_truncated(tmp_path, stops, lengths, monkeypatch):
    digit, plus = 2, 2 + tiny_lm.CHARACTERS.index("+")
    monkeypatch.setattr(sys.modules[__name__], "completion", lambda _, row: [plus if row % 2 else digit] * lengths)
    trainer = trained(tmp_path, 4, 4, steps=1, target="top1", generation_kwargs=stops)
    before = tiny_lm.model().parameters()
    moved = any(not torch.equal(a, b) for a, b in zip(weights(trainer), before, strict=True))
    assert moved == (bool(stops) and lengths < LENGTH)
