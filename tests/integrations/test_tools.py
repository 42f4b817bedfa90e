"""Tools, environments and rollout functions: the tokens of the model count, and how a completion ended."""

import pytest
import tool_lm
import torch
from datasets import Dataset

from adpo.trainers.trl import ADPOConfig, ADPOTrainer
from adpo.trainers.trl.grpo import FastGRPOConfig, FastGRPOTrainer

GROUP, LONG = 4, 256
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": 2}}\n</tool_call>'
PROMPT = [{"role": "user", "content": "How much is it?"}]


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


class Counter:
    """An environment with the same tool."""

    def reset(self, **_) -> None:
        self.calls = 0

    def add(self, a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: One.
            b: The other.
        """
        self.calls += 1
        return a + b

    def get_reward(self) -> float:
        return float(self.calls)


def scripted(trainer_class, turns):
    """A trainer whose model says this: in the first turn of each row, in the second, and so on."""

    class Scripted(trainer_class):
        asked = ()

        def _generate(self, prompts):
            self.turn = 0
            return super()._generate(prompts)

        def _generate_single_turn(self, prompt_ids, *_, **__):
            self.turn += 1
            texts = turns(self.turn, len(prompt_ids))
            return [self._tokenizer(text)["input_ids"] for text in texts], None

    return Scripted


def made(folder, turns=None, kind=ADPOTrainer, config=ADPOConfig, reward=None, rows=1, trainer=None, **options):
    tokenizer = tool_lm.tokenizer()
    names = ("tools", "environment_factory", "rollout_func")
    more = {name: options.pop(name) for name in names if name in options}
    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": GROUP * rows,
        "num_generations": GROUP,
        "max_completion_length": LONG,
        "max_steps": 1,
        "learning_rate": 0.1,
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
        **options,
    }
    return (scripted(kind, turns) if turns else kind)(
        model=tool_lm.model(len(tokenizer)),
        reward_funcs=reward,
        args=config(**arguments),
        train_dataset=Dataset.from_list([{"prompt": PROMPT}] * rows),
        processing_class=tokenizer,
        **more,
    )


def sizes(completions, **_):
    """A reward that tells the members of a group apart: the sum that the tool gave."""
    return [float(next((m["content"] for m in c if m["role"] == "tool"), 0)) for c in completions]


def calls_and_answers(turn, rows):
    return [f"{CALL % row}<|im_end|>" if turn == 1 else f"It is {row + 2}.<|im_end|>" for row in range(rows)]


def rollouts(trainer):
    """Keeps the batches that the trainer makes."""
    batches = []
    plain = trainer._generate_and_score_completions

    def kept(inputs):
        batches.append(plain(inputs))
        return batches[-1]

    trainer._generate_and_score_completions = kept
    return batches


@pytest.mark.parametrize("scoring", ["padded", "packed"])
def test_the_step_is_that_of_the_tokens_the_model_wrote(tmp_path, scoring):
    trainer = made(tmp_path, calls_and_answers, reward=sizes, tools=[add], scoring=scoring, tau=2.0)
    batches, model = rollouts(trainer), tool_lm.model(len(trainer.processing_class))
    trainer.train()
    (batch,) = batches
    assert batch["rewards"].tolist() == [2.0, 3.0, 4.0, 5.0]
    of_tools = batch["completion_mask"].bool() & ~batch["tool_mask"].bool()
    shown = trainer.processing_class.decode(batch["completion_ids"][1][of_tools[1]])
    assert "<tool_response>" in shown
    assert "It is" not in shown
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    logp = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    written = (batch["completion_mask"] * batch["tool_mask"]).bool()
    logp = (logp[:, -written.shape[1] :] * written).sum(1).view(1, GROUP)
    trainer.args.objective().loss(logp, logp.detach(), rewards=batch["rewards"].view(1, GROUP)).backward()
    for moved, value in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(moved, value.detach() - 0.1 * value.grad, rtol=0, atol=1e-6)


def test_whole_conversations_with_tools_are_not_cut(tmp_path):
    trainer = made(tmp_path, calls_and_answers, reward=sizes, tools=[add])
    trainer.train()
    assert trainer.state.log_history[0]["completions/truncated"] == 0


def after_the_first(text):
    return lambda turn, rows: [f"{CALL % row}<|im_end|>" if turn == 1 else text for row in range(rows)]


@pytest.mark.parametrize(
    ("length", "second", "share"),
    [
        (LONG, "no end", 1.0),  # the sampler stopped it: there is no end token
        (80, "It is 5.<|im_end|>", 1.0),  # the tool's answer did not fit
        (LONG, f"{CALL % 7}<|im_end|>", 0.0),  # as many calls as are allowed
    ],
)
def test_what_a_limit_cut_is_known_with_tools(tmp_path, length, second, share):
    options = {"max_completion_length": length, "max_tool_calling_iterations": 1, "truncated": "mask"}
    trainer = made(tmp_path, after_the_first(second), reward=sizes, tools=[add], **options)
    batches = rollouts(trainer)
    trainer.train()
    assert trainer.state.log_history[0]["completions/truncated"] == share
    assert batches[0]["member"].float().mean() == 1 - share


def test_an_environment_gives_tools_and_rewards(tmp_path):
    def turns(turn, rows):
        return [f"{CALL % row}<|im_end|>" if turn == 1 and row % 2 else "Done.<|im_end|>" for row in range(rows)]

    trainer = made(tmp_path, turns, environment_factory=Counter, target="top1")
    batches = rollouts(trainer)
    trainer.train()
    assert batches[0]["rewards"].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert trainer.state.log_history[0]["adpo/live"] == 1
    assert trainer.weights_moved.moved


def ends_on_the_environment(prompts, trainer):
    """Two turns: the model asks, the environment has the last word."""
    tokens = [[20 + row, 21, 22, 23] for row in range(len(prompts))]
    return {
        "prompt_ids": [[10, 11]] * len(prompts),
        "completion_ids": tokens,
        "logprobs": [[0.0] * 4] * len(prompts),
        "env_mask": [[1, 1, 0, 0]] * len(prompts),
        "score": [float(row) for row in range(len(prompts))],
    }


def scored(completions, score, **_):
    return score


@pytest.mark.parametrize("kind", [(ADPOTrainer, ADPOConfig), (FastGRPOTrainer, FastGRPOConfig)])
def test_a_rollout_function_that_ends_on_other_tokens_is_not_cut(tmp_path, kind):
    trainer = made(
        tmp_path,
        None,
        *kind,
        reward=scored,
        rollout_func=ends_on_the_environment,
        max_completion_length=4,
    )
    trainer.train()
    assert trainer.state.log_history[0]["completions/truncated"] == 0
    assert trainer.weights_moved.moved


@pytest.mark.parametrize(("ends", "limit", "share"), [(False, 4, 1.0), (False, 9, 0.0), (True, 4, 0.0)])
def test_a_rollout_function_is_cut_at_the_limit_alone(tmp_path, ends, limit, share):
    def rollout(prompts, trainer):
        tokens = [[20 + row, 21, 22, 1 if ends else 23] for row in range(len(prompts))]
        return {**ends_on_the_environment(prompts, trainer), "completion_ids": tokens, "env_mask": None}

    trainer = made(tmp_path, reward=scored, rollout_func=rollout, max_completion_length=limit)
    trainer.train()
    assert trainer.state.log_history[0]["completions/truncated"] == share


def test_a_rollout_function_may_know_better(tmp_path):
    def rollout(prompts, trainer):
        return {**ends_on_the_environment(prompts, trainer), "truncated": [True, False, False, False]}

    trainer = made(tmp_path, reward=scored, rollout_func=rollout)
    trainer.train()
    assert trainer.state.log_history[0]["completions/truncated"] == 0.25


@pytest.mark.parametrize("scoring", ["padded", "packed"])
@pytest.mark.parametrize("known", [None, [True, False, False, False]])
def test_masks_go_by_how_completions_ended(tmp_path, scoring, known):
    """TRL would mask every row here: none ends on an end token, for the environment has the last word."""

    def rollout(prompts, trainer):
        found = ends_on_the_environment(prompts, trainer)
        return found if known is None else {**found, "truncated": known}

    options = {"mask_truncated_completions": True, "max_completion_length": 4, "scoring": scoring}
    trainer = made(tmp_path, None, FastGRPOTrainer, FastGRPOConfig, scored, rollout_func=rollout, **options)
    batches = rollouts(trainer)
    trainer.train()
    cut = torch.tensor(known or [False] * 4)
    assert torch.equal(batches[0]["completion_mask"].any(1), ~cut)
    assert torch.equal(batches[0]["tool_mask"].any(1), ~cut)
    assert batches[0]["num_items_in_batch"] == 2 * (~cut).sum()
    assert trainer.weights_moved.moved
    assert trainer.mask_truncated_completions
