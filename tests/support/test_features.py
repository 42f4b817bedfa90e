"""What TRL, transformers, PEFT and torch let a user switch on: it trains, and does what it is for."""

import pytest
import test_tools
import tiny_lm
import tool_lm
import torch
from datasets import Dataset
from entries import ENTRIES, GROUP, ONLINE, made, model_of, trained, weights
from peft import LoraConfig
from traces import LEFT, recorded
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from adpo.scoring.sequences import Sequences
from adpo.trainers.checks.quantised import keep_differentiable
from adpo.trainers.listwise import ListwiseTrainer
from adpo.trainers.trl.grpo import FastGRPOConfig, FastGRPOTrainer

every_entry = pytest.mark.parametrize("entry", ENTRIES)
online = pytest.mark.parametrize("entry", ONLINE)

ADAPTERS = {
    "lora": lambda: LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    "dora": lambda: LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", use_dora=True),
}


@every_entry
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters(tmp_path, entry, adapter):
    trainer, moved = trained(entry, tmp_path, adapter=ADAPTERS[adapter]())
    assert moved
    assert all("lora_" in name for name in moved)
    assert any("magnitude" in name for name in moved) == (adapter == "dora")
    assert trainer.weights_moved.moved


@every_entry
def test_all_weights(tmp_path, entry):
    trainer, moved = trained(entry, tmp_path)
    assert moved == weights(trainer).keys()


def quantised(folder):
    tiny_lm.model(hidden_size=64, layers=2).save_pretrained(folder)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32, device_map="cpu"
    )


@every_entry
def test_an_adapter_on_a_quantised_model(tmp_path, entry):
    """Also after an evaluation, which bitsandbytes takes for a reason to repack weights on some CPUs."""
    pytest.importorskip("bitsandbytes")
    model = quantised(tmp_path / "model")
    trainer = made(entry, tmp_path, model=model, adapter=ADAPTERS["lora"]())
    before = weights(trainer)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        trainer.model.eval()(input_ids=ids)
    given = trainer.model.get_input_embeddings()(ids).detach().requires_grad_()
    values = trainer.model.train().base_model.model.model.layers[0].self_attn.v_proj(given)
    (gradient,) = torch.autograd.grad(values.sum(), given)
    assert gradient.abs().sum() > 0
    trainer.train()
    moved = {name for name, value in weights(trainer).items() if not torch.equal(value, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    assert trainer.weights_moved.moved


def test_what_an_evaluation_repacked_is_unpacked(tmp_path):
    pytest.importorskip("bitsandbytes")
    model, ids = quantised(tmp_path), torch.tensor([[5, 6, 7]])
    layer = model.model.layers[0].self_attn.v_proj
    with torch.no_grad():
        model.eval()(input_ids=ids)
    if not getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
        pytest.skip("this CPU has no instructions for it")
    keep_differentiable(model)
    given = torch.randn(1, 64, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer.train()(given).sum(), given)
    assert gradient.abs().sum() > 0


SAME = {
    "gradient checkpointing": {"gradient_checkpointing": True},
    "torch.compile": {"torch_compile": True, "torch_compile_backend": "eager"},
    "accumulation": {"gradient_accumulation_steps": 2},
}
"""They change how a gradient is computed, never what it is."""


@every_entry
@pytest.mark.parametrize("feature", SAME)
def test_the_same_run(tmp_path, monkeypatch, entry, feature):
    options = dict(SAME[feature])
    if "gradient_accumulation_steps" in options:
        options["per_device_train_batch_size"] = 2 if entry == "lists" else GROUP
    plain, _ = trained(entry, tmp_path / "plain")
    with recorded(monkeypatch) as traces:
        found, moved = trained(entry, tmp_path / "found", **options)
    assert moved
    assert LEFT[feature](traces), "it was not used"
    expected = weights(plain)
    for name, value in weights(found).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@every_entry
@pytest.mark.parametrize("precision", ["bf16", "bf16 weights"])
def test_half_precision(tmp_path, entry, precision):
    """Near the run in float32, and not it."""
    model = model_of("llama")
    options = {"bf16": True} if precision == "bf16" else {"model": model_of("llama").to(torch.bfloat16)}
    plain, _ = trained(entry, tmp_path / "plain", model=model)
    found, moved = trained(entry, tmp_path / "found", **{"model": model_of("llama"), **options})
    dtype = torch.bfloat16 if precision == "bf16 weights" else torch.float32
    assert {value.dtype for value in found.model.parameters()} == {dtype}
    assert moved
    start = torch.cat([value.detach().flatten() for value in model_of("llama").parameters()])
    one, other = (torch.cat([value.float().flatten() for value in weights(t).values()]) for t in (plain, found))
    assert 0 < (one - other).norm() < 0.3 * (one - start).norm()


MODELS = {
    "sliding window, mistral": ("mistral", {"sliding_window": 3}),
    "sliding window, gemma 3": (
        "gemma3_text",
        {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8},
    ),
    "experts": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8},
    ),
    "hybrid, lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "hybrid, falcon h1": (
        "falcon_h1",
        {
            **{"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
            **{"mamba_chunk_size": 8, "mamba_d_ssm": 32, "head_dim": 8},
        },
    ),
    "state-space, mamba 2": (
        "mamba2",
        {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8, "expand": 2},
    ),
    "stretched": (
        "qwen3",
        {
            "head_dim": 8,
            "rope_parameters": {
                **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
                "rope_theta": 1e4,
            },
            "max_position_embeddings": 16,
        },
    ),
    "stretched by length": (
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
            "max_position_embeddings": 32,
        },
    ),
}


def alone(model, ids, prompt):
    """Log-probability of what follows the prompt, of one row without padding."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
    return float(
        logits.detach().log_softmax(1).gather(1, torch.tensor(ids)[1:, None])[prompt - 1 :].double().sum()
    )


def scored(trainer, prompts, completions):
    """By the trainer, in one batch."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if isinstance(trainer, ListwiseTrainer):
        rows = [[*p, *c] for p, c in zip(prompts, completions, strict=True)]
        of_completion = [[0] * len(p) + [1] * len(c) for p, c in zip(prompts, completions, strict=True)]
        real = [[1] * len(row) for row in rows]
        return trainer._logp(policy, Sequences(*(padded(part) for part in (rows, real, of_completion))))
    batch = {
        "prompt_ids": padded(prompts, left=True),
        "prompt_mask": padded([[1] * len(p) for p in prompts], left=True),
        "completion_ids": padded(completions),
        "completion_mask": padded([[1] * len(c) for c in completions]),
    }
    return (trainer.row_scorer.per_token(policy, batch)[0].double() * batch["completion_mask"]).sum(1)


def padded(rows, left=False):
    longest = max(map(len, rows))
    return torch.tensor([[0] * (longest - len(r)) + r if left else r + [0] * (longest - len(r)) for r in rows])


@every_entry
@pytest.mark.parametrize("model", MODELS)
def test_models(tmp_path, entry, model):
    """Rows of a batch have the log-probabilities that they have alone, and training moves them."""
    name, options = MODELS[model]
    trainer = made(entry, tmp_path, model=model_of(name, **options), max_steps=1)
    prompts, completions = [[5, 6, 7, 8, 9], [10], [11, 12]], [[13, 14, 2, 3, 4, 1], [4, 5, 6, 1], [7]]
    policy = trainer.model.eval()
    expected = [alone(policy, p + c, len(p)) for p, c in zip(prompts, completions, strict=True)]
    found = scored(trainer, prompts, completions).detach()
    torch.testing.assert_close(found.double(), torch.tensor(expected).double(), rtol=0, atol=1e-5)
    before = weights(trainer)
    trainer.train()
    assert any(not torch.equal(value, before[key]) for key, value in weights(trainer).items())
    assert trainer.weights_moved.moved


def test_a_model_that_reads_padding_on_lists(tmp_path):
    """Rows of lists are padded behind their end, where it is not read."""
    trainer = made("lists", tmp_path, model=model_of("rwkv", attention_hidden_size=16), max_steps=1)
    prompts, completions = [[5, 6, 7, 8, 9], [10]], [[13, 14, 2, 1], [7]]
    expected = [alone(trainer.model.eval(), p + c, len(p)) for p, c in zip(prompts, completions, strict=True)]
    found = scored(trainer, prompts, completions).detach()
    torch.testing.assert_close(found.double(), torch.tensor(expected).double(), rtol=0, atol=1e-5)
    before = weights(trainer)
    trainer.train()
    assert any(not torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_the_window_of_these_models_is_one():
    """Else their rows would say nothing about windows."""
    name, options = MODELS["sliding window, mistral"]
    whole, short = model_of(name, **{**options, "sliding_window": None}), model_of(name, **options)
    ids = [5, 6, 7, 8, 9, 10, 11]
    assert alone(whole, ids, 1) != pytest.approx(alone(short, ids, 1), abs=1e-6)


SHAPES = {
    "temperature": {"temperature": 0.01},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.3},
    "min_p": {"min_p": 0.9},
}


def peaked():
    """A model whose next token depends on the last one alone, with one, two, three... likely ones."""
    model = model_of("qwen3", head_dim=8)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.mul_(60)
        model.model.embed_tokens.weight[0] = torch.randn(
            16
        )  # the row of padding is zero, and all that follows tied
    return model


def allowed(logits, shape):
    """Tokens that a shape of sampling leaves, as the papers define it."""
    logp = (logits / shape.get("temperature", 1.0)).log_softmax(-1)
    order = logp.argsort(descending=True)
    if "top_k" in shape:
        return set(order[: shape["top_k"]].tolist())
    if "top_p" in shape:
        before = logp.exp()[order].cumsum(0) - logp.exp()[order]
        return set(order[before < shape["top_p"]].tolist())
    if "min_p" in shape:
        return set((logp.exp() >= shape["min_p"] * logp.exp().max()).nonzero().view(-1).tolist())
    return set((logp > -12).nonzero().view(-1).tolist())


@online
@pytest.mark.parametrize("shape", SHAPES)
def test_samples_are_shaped(tmp_path, entry, shape):
    """Each token is one that its distribution leaves, and without the shape many are not."""
    shares = []
    for options in (SHAPES[shape], {}):
        model = peaked()
        trainer = made(entry, tmp_path, model=model, sampled=True, max_completion_length=20, **options)
        trainer.model.train()
        prompts = [[5 + row % 9, 6] for row in range(32)]
        torch.manual_seed(1)
        found = trainer._generate_single_turn(prompts, None, {}, GROUP)[0]
        inside = []
        for prompt, tokens in zip(prompts, found, strict=True):
            logits = model.eval()(torch.tensor([prompt + tokens])).logits[0].detach()
            for place, token in enumerate(tokens):
                inside.append(token in allowed(logits[len(prompt) - 1 + place], SHAPES[shape]))
        shares.append(sum(inside) / len(inside))
    assert shares[0] == 1.0
    assert shares[1] < 0.9


@online
def test_repetitions_are_penalised(tmp_path, entry):
    def repeated(penalty):
        torch.manual_seed(2)
        trainer = made(
            entry, tmp_path, sampled=True, max_completion_length=13, repetition_penalty=penalty, temperature=0.02
        )
        torch.manual_seed(1)
        found = trainer._generate_single_turn([[5, 6]] * 16, None, {}, GROUP)[0]
        return sum(len(tokens) - len(set(tokens)) for tokens in found)

    assert repeated(50.0) < 0.5 * repeated(1.0)


@pytest.mark.slow
@online
@pytest.mark.parametrize("shape", [*SHAPES, "repetition_penalty"])
def test_shaped_samples_are_trained_on(tmp_path, entry, shape):
    options = SHAPES.get(shape, {"repetition_penalty": 1.5})
    options = {"temperature": 0.5} if shape == "temperature" else options
    trainer, moved = trained(entry, tmp_path, sampled=True, max_steps=1, **options)
    assert moved == weights(trainer).keys()


CHATS = [[{"role": "user", "content": f"{i}+{i}="}] for i in range(4)]


@every_entry
def test_chat_templates(tmp_path, entry):
    """The model reads what the template makes of the messages."""
    tokenizer, seen = tool_lm.tokenizer(), []
    expected = {
        tuple(tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False)) for c in CHATS
    }
    rows = [{"prompt": chat} for chat in CHATS]
    if entry == "lists":
        answers = [[{"role": "assistant", "content": text}] for text in "12"]
        rows = [{**row, "completions": answers, "rewards": [0.0, 1.0]} for row in rows]
    trainer = made(
        entry,
        tmp_path,
        model=tool_lm.model(len(tokenizer)),
        tokenizer=tokenizer,
        data=Dataset.from_list(rows),
        reward=lambda completions, **_: [float(row % 3) for row in range(len(completions))],
        max_steps=1,
    )
    if entry == "lists":
        seen = [trainer.train_dataset[row]["prompt_ids"] for row in range(len(CHATS))]
    else:
        plain = trainer._generate_single_turn
        trainer._generate_single_turn = lambda ids, *rest, **more: (seen.extend(ids), plain(ids, *rest, **more))[1]
    before = weights(trainer)
    trainer.train()
    assert (
        {tuple(ids) for ids in seen} == expected if entry == "lists" else {tuple(ids) for ids in seen} <= expected
    )
    assert any(not torch.equal(value, before[name]) for name, value in weights(trainer).items())


@pytest.mark.parametrize("scoring", ["packed", "padded"])
def test_tools_and_environments_with_the_losses_of_trl(tmp_path, scoring):
    """The step is TRL's own, and another one if the tokens of the tool were the model's."""
    kinds = {"tools": {"tools": [test_tools.add], "reward": test_tools.sizes}}
    kinds["environment"] = {"environment_factory": Counted}
    for name, more in kinds.items():

        def stepped(folder, *kind, more=more, as_written=False, **options):
            trainer = test_tools.made(folder, test_tools.calls_and_answers, *kind, **more, **options)
            batches, plain = test_tools.rollouts(trainer), trainer._generate_and_score_completions

            def without_mask(inputs):
                return {key: value for key, value in plain(inputs).items() if key != "tool_mask"}

            if as_written:
                trainer._generate_and_score_completions = without_mask
            trainer.train()
            (batch,) = batches
            assert batch["advantages"].ne(0).any()
            assert (batch["completion_mask"].bool() & ~batch["tool_mask"].bool()).any()
            return torch.cat([value.detach().flatten() for value in trainer.model.parameters()])

        stock = (GRPOTrainer, GRPOConfig)
        expected = stepped(tmp_path / f"{name}, TRL", *stock)
        found = stepped(tmp_path / name, FastGRPOTrainer, FastGRPOConfig, scoring=scoring)
        of_all = stepped(tmp_path / f"{name}, all tokens", *stock, as_written=True)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        assert (expected - of_all).abs().max() > 1e-4


class Counted(test_tools.Counter):
    """Its reward is what its tool was asked for."""

    def reset(self, **_) -> None:
        self.total = 0

    def add(self, a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: One.
            b: The other.
        """
        self.total += a
        return a + b

    def get_reward(self) -> float:
        return float(self.total)


def test_the_reference_follows_the_policy(tmp_path):
    tiny_lm.model().save_pretrained(tmp_path / "model")  # TRL loads the reference by name
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    options = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.25}
    trainer, moved = trained("grpo", tmp_path, model=model, max_steps=1, **options)
    assert moved
    policy = weights(trainer)
    for name, value in trainer.ref_model.named_parameters():
        torch.testing.assert_close(value, 0.25 * policy[name] + 0.75 * start[name], rtol=0, atol=1e-6)


def test_cut_answers_are_masked(tmp_path):
    """Half of the rows reach the limit: as if TRL's loss had never seen them."""

    def run(scoring):
        trainer = made("grpo", tmp_path, scoring=scoring, mask_truncated_completions=True, max_steps=1)
        rows = [[5, 6, 7, 8, 9], [5, 1], [6, 7, 8, 9, 5], [9, 8, 1]] * 2
        trainer._generate_single_turn = lambda ids, *_, **__: (rows, None)
        batches = test_tools.rollouts(trainer)
        trainer.train()
        assert batches[0]["completion_mask"].any(1).tolist() == [False, True, False, True] * 2
        return weights(trainer)

    padded, packed = run("padded"), run("packed")
    start = dict(tiny_lm.model().named_parameters())
    assert any(not torch.equal(value, start[name]) for name, value in padded.items())
    for name, value in packed.items():
        torch.testing.assert_close(value, padded[name], rtol=0, atol=1e-6)


@online
@pytest.mark.parametrize("steps", [{"num_iterations": 2}, {"steps_per_generation": 2}])
def test_several_steps_on_a_rollout(tmp_path, entry, steps):
    """The second step is on the rows that were sampled before the first."""
    trainer = made(entry, tmp_path, **steps)
    batches, states = test_tools.rollouts(trainer), []

    class Kept(TrainerCallback):
        def on_step_end(self, *_, **__):
            states.append(weights(trainer))

    trainer.add_callback(Kept())
    trainer.train()
    assert trainer.state.global_step == 2
    assert len(batches) == 1
    assert len(batches[0]["completion_ids"]) == 2 * GROUP * steps.get("steps_per_generation", 1)
    assert any(not torch.equal(value, states[0][name]) for name, value in states[1].items())
