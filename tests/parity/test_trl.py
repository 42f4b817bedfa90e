"""Parity with TRL's own trainers on the same numbers: DPO (sigmoid), GRPO, Dr. GRPO and GSPO."""

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from adpo import baselines, presets

LOCAL = {"use_cpu": True, "bf16": False, "report_to": "none", "gradient_checkpointing": False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny causal language model over characters, saved to disk."""
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *"0123456789+*= "])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=len(vocabulary), eos_token_id=1, pad_token_id=0, **size, **heads)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return str(folder), fast


def nudge(model, amount=0.05):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(amount * torch.randn_like(parameter))


def token_logp(model, ids, attention):
    """Log-probability of each token given those before it, [rows, length - 1], from plain logits."""
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1].double()
    return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def gradient(loss, model):
    return torch.autograd.grad(loss, [model.lm_head.weight, model.model.layers[0].mlp.up_proj.weight])


def test_dpo_sigmoid(checkpoint, tmp_path):
    folder, tokenizer = checkpoint
    rows = [
        {"prompt": f"{i}+{j}=", "chosen": str(i + j), "rejected": str(i * j + 100)}
        for i in range(2)
        for j in range(2)
    ]
    arguments = DPOConfig(output_dir=str(tmp_path), per_device_train_batch_size=4, beta=0.3, **LOCAL)
    trainer = DPOTrainer(folder, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    reference = Qwen3ForCausalLM.from_pretrained(folder)
    nudge(trainer.model)
    trainer.model.eval()
    theirs = trainer.compute_loss(trainer.model, dict(batch))

    def pairs(model):
        logp = token_logp(model, batch["input_ids"], batch["attention_mask"]) * batch["completion_mask"][:, 1:]
        chosen, rejected = logp.sum(1).chunk(2)
        return torch.stack([chosen, rejected], 1)

    logp, anchor = pairs(trainer.model), pairs(reference).detach()
    ours = presets.dpo(0.3).loss(logp, anchor, rewards=torch.tensor([[1.0, 0.0]]).expand_as(logp))
    assert (logp - anchor).abs().max() > 0.1  # the policy has left its reference
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-4, atol=1e-5)
    textbook = baselines.dpo_loss(logp[:, 0], logp[:, 1], anchor[:, 0], anchor[:, 1], 0.3)
    torch.testing.assert_close(textbook, ours)
    for a, b in zip(gradient(ours, trainer.model), gradient(theirs, trainer.model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def grpo_batch():
    generator = torch.Generator().manual_seed(2)
    prompt = torch.randint(2, 14, (4, 3), generator=generator)
    completion = torch.randint(2, 14, (4, 5), generator=generator)
    lengths = torch.tensor([[5], [2], [4], [1]])
    completion_mask = (torch.arange(5)[None] < lengths).long()
    prompt_mask = torch.ones_like(prompt)
    prompt_mask[1, 0] = 0  # left padding
    return {
        "prompt_ids": prompt,
        "prompt_mask": prompt_mask,
        "completion_ids": completion,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([1.2, -0.4, 0.3, -1.1]),
        "num_items_in_batch": completion_mask.sum(),
    }


@pytest.mark.parametrize("kind", ["grpo", "grpo with kl", "dr_grpo", "gspo"])
def test_grpo_family(checkpoint, tmp_path, kind):
    folder, tokenizer = checkpoint
    options = {
        "grpo": {"loss_type": "grpo"},
        "grpo with kl": {"loss_type": "grpo", "beta": 0.2, "use_bias_correction_kl": False},
        "dr_grpo": {"loss_type": "dr_grpo"},
        "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.03},
    }[kind]
    size = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 8}
    trainer = GRPOTrainer(
        folder,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(output_dir=str(tmp_path), **size, **LOCAL, **options),
        train_dataset=Dataset.from_list([{"prompt": "1+1="}] * 4),
        processing_class=tokenizer,
    )
    batch = grpo_batch()
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    mask = batch["completion_mask"].bool()
    with torch.no_grad():
        old = token_logp(trainer.model, ids, attention)[:, -5:]
    batch["old_per_token_logps"], batch["ref_per_token_logps"] = old.float(), old.float() - 0.3
    nudge(trainer.model)
    trainer.model.eval()  # no accumulation window outside training
    theirs = trainer._compute_loss(trainer.model, batch)
    logp = token_logp(trainer.model, ids, attention)[:, -5:]
    advantages = batch["advantages"].double()
    if kind == "gspo":
        ours = baselines.gspo_loss(logp, old, advantages, mask, clip=0.03)
        straight = baselines.gspo_token_loss(logp, old, advantages, mask, clip=0.03)
        torch.testing.assert_close(straight, ours)
    elif kind == "dr_grpo":
        ours = baselines.dr_grpo_loss(logp, old, advantages, mask, max_length=8)
    else:
        beta = options.get("beta", 0.0)
        ours = baselines.grpo_loss(logp, old, advantages, mask, beta=beta, ref_token_logp=old - 0.3)
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-4, atol=1e-5)
    for a, b in zip(gradient(ours, trainer.model), gradient(theirs, trainer.model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
