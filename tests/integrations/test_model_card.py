"""The README.md beside a trained model: what it is, how it was made, how to load it; metadata the hub accepts."""

import re

import pytest
import test_listwise_trainer as listwise
import test_trl_online as online
import tiny_lm
import torch
import yaml
from huggingface_hub import ModelCard
from peft import LoraConfig

from adpo.trainers.checkpoints.model_card import CardFacts, licence_of
from adpo.trainers.trl.grpo import FastGRPOConfig, FastGRPOTrainer

SAVED = {"save_strategy": "steps", "save_steps": 1}
LORA = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


def cards(folder):
    """In the run's folder, and in its newest checkpoint; both without what others write into theirs."""
    found = [folder / "README.md", *folder.glob("checkpoint-1/README.md")]
    texts = [path.read_text() for path in found]
    assert len(texts) == 2
    for text in texts:
        for word in ("DeepSeekMath", "None", "More Information Needed", str(folder.parent)):
            assert word not in text
    return texts


def metadata(text):
    """The head, as the hub's own library reads it, with the fields that the hub checks."""
    card = ModelCard(text)
    head = yaml.safe_load(re.match(r"---\n(.*?)\n---", text, re.DOTALL)[1])
    assert card.data.to_dict() == head
    assert head["library_name"] in ("peft", "transformers")
    assert head["pipeline_tag"] == "text-generation"
    for name in ("base_model", "datasets"):
        for value in [head[name]] if isinstance(head.get(name), str) else head.get(name, []):
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", value)
    return head


def test_a_trainer_says_what_it_was_given(tmp_path):
    online.trained(tmp_path / "mine", 8, 2, steps=1, target="plackett_luce", tau=0.7, **SAVED)
    for text in cards(tmp_path / "mine"):
        assert metadata(text)["library_name"] == "transformers"
        assert "base_model" not in metadata(text)  # it was made here
        assert "# mine" in text
        for row in ("method | ADPO", "target | plackett_luce", "tau | 0.7", "anchor | on_policy", "steps | 1"):
            assert f"| {row} |" in text
        assert 'AutoModelForCausalLM.from_pretrained("path/to/mine")' in text


def test_an_adapter_names_its_base_model(tmp_path, monkeypatch):
    made = tiny_lm.model

    def named(*given):
        model = made(*given)
        model.config._name_or_path = model.name_or_path = "someone/tiny"
        return model

    monkeypatch.setattr(tiny_lm, "model", named)
    online.trained(tmp_path / "mine", 8, 2, steps=1, peft_config=LoraConfig(**LORA), **SAVED)
    for text in cards(tmp_path / "mine"):
        head = metadata(text)
        assert (head["library_name"], head["base_model"]) == ("peft", "someone/tiny")
        assert "A LoRA adapter for `someone/tiny`" in text
        assert "AutoPeftModelForCausalLM" in text
        assert "its card states none" in text


@pytest.mark.parametrize("adapter", [False, True])
def test_lists(tmp_path, adapter):
    peft = LoraConfig(**LORA) if adapter else None
    listwise.trained(tmp_path / "mine", listwise.ragged(), steps=1, peft=peft, **SAVED)
    text = (tmp_path / "mine" / "checkpoint-1" / "README.md").read_text()
    assert metadata(text)["library_name"] == ("peft" if adapter else "transformers")
    assert "method | ADPO on lists" in text


def test_the_methods_of_trl(tmp_path, monkeypatch):
    monkeypatch.setattr(online, "ADPOConfig", FastGRPOConfig)
    monkeypatch.setattr(online, "Fixed", type("Fixed", (FastGRPOTrainer,), dict(vars(online.Fixed))))
    online.trained(tmp_path / "mine", 8, 2, steps=1, **SAVED)
    for text in cards(tmp_path / "mine"):
        metadata(text)
        assert "| loss_type | dapo |" in text


def test_the_card_loads_the_model(tmp_path, monkeypatch):
    """What stands under Use, as a program."""
    trainer = online.trained(tmp_path / "mine", 8, 2, steps=1, **SAVED)
    text = (tmp_path / "mine" / "checkpoint-1" / "README.md").read_text()
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    scope = {}
    exec(program.replace("path/to/mine", str(tmp_path / "mine" / "checkpoint-1")), scope)
    for loaded, value in zip(scope["model"].parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(loaded, value)


@pytest.mark.parametrize(
    ("head", "licence"),
    [
        ("license: apache-2.0", "apache-2.0"),
        ("license: [a, b]", None),
        ("license: 'a b'", None),
        ("tags: []", None),
        ("a: [", None),
    ],
)
def test_the_licence_is_what_the_base_model_states(tmp_path, head, licence):
    (tmp_path / "README.md").write_text(f"---\n{head}\n---\n# model\n")
    assert licence_of(str(tmp_path)) == licence


def test_no_licence_where_there_is_no_card(tmp_path):
    assert licence_of(str(tmp_path)) is None
    assert licence_of(None) is None
    assert licence_of("nobody/has-this") is None


def test_figures_commands_and_data(tmp_path):
    trainer = online.trained(tmp_path / "mine", 8, 2, steps=1)
    trainer.card_facts = CardFacts(
        "gspo",
        "openai/gsm8k",
        "adpo train --data 'a|b'",
        "abc",
        str(tmp_path),
        [("test", "after"), ("accuracy", "50.0 % [40.0, 60.0]")],
    )
    trainer.create_model_card()
    text = (tmp_path / "mine" / "README.md").read_text()
    assert metadata(text)["datasets"] == ["openai/gsm8k"]
    assert "| accuracy | 50.0 % [40.0, 60.0] |" in text
    assert r"| command | `adpo train --data 'a\|b'` |" in text
    assert str(tmp_path.parent) not in text
