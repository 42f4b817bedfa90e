"""Settings of `adpo train`: names, types, files, examples."""

from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("trl")

from adpo.runs import train as run
from adpo.runs.settings import memory
from adpo.runs.settings.keys import parse_pairs, read_yaml
from adpo.runs.settings.train_settings import METHODS, resolve

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_command_line_wins_over_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("method: adpo\nlearning_rate: 1e-5\ntau: 0.5\nlevels: [3, 4]\n")
    asked = resolve({**read_yaml(file), **parse_pairs(["--tau", "0.8", "--max-steps=7", "--use_peft"])})
    assert asked.trainer == {"learning_rate": 1e-5, "tau": 0.8, "max_steps": 7}
    assert asked.run.levels == [3, 4]
    assert asked.run.use_peft is True


def test_beta_of_grpo_is_its_own():
    assert resolve({"method": "grpo", "beta": 0.1, "temperature": 0.7}).trainer["beta"] == 0.1


def test_every_name_of_trls_commands_is_a_setting_or_is_said_how_it_is_spelt_here():
    from trl import ModelConfig, ScriptArguments
    from trl.scripts.grpo import GRPOScriptArguments

    from adpo.runs.settings import prefer_settings as lists

    theirs = {each.name for kind in (ModelConfig, ScriptArguments, GRPOScriptArguments) for each in fields(kind)}
    assert {"model_name_or_path", "dataset_name", "load_in_4bit"} <= theirs
    for name in sorted(theirs):
        for settled in (resolve, lists.resolve):
            with pytest.raises(ValueError, match=name) as error:
                settled({name: object()})
            assert not str(error.value).endswith(f"there is no setting '{name}'")
            assert "did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ({"beta": 0.1}, "DPO's beta is 1 / tau here: for beta 0.1, --tau 10"),
        ({"ref_model": "x"}, "here it is --reference"),
        ({"loss_type": "sigmoid"}, "here it is --target"),
        ({"max_completion_length": 9}, "here it is --max_length"),
        ({"eval_data": "d.jsonl"}, "eval_data means nothing without data"),
        ({"lora_dropout": 1}, "lora_dropout must be at least 0 and below 1"),
    ],
)
def test_names_of_dpo(pairs, words):
    from adpo.runs.settings import prefer_settings as lists

    with pytest.raises(ValueError, match=words):
        lists.resolve(pairs)


def test_a_key_that_is_given_twice(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("tau: 0.5\nmodel_init_kwargs:\n  dtype: float32\nmax_steps: 3\ntau: 0.8\n")
    with pytest.raises(ValueError, match="tau is given twice, in lines 1 and 5: leave one of them out"):
        read_yaml(file)
    file.write_text("model_init_kwargs:\n  dtype: float32\n  dtype: bfloat16\n")
    with pytest.raises(ValueError, match="dtype is given twice, in lines 2 and 3"):
        read_yaml(file)
    file.write_text("base: &base\n  a: 1\nother:\n  <<: *base\n  b: 2\n")
    assert read_yaml(file) == {"base": {"a": 1}, "other": {"a": 1, "b": 2}}
    with pytest.raises(ValueError, match="a is given twice"):
        parse_pairs(["--model_init_kwargs", "{a: 1, a: 2}"])


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ({"learning_rte": 1e-5}, "no setting 'learning_rte'; did you mean learning_rate"),
        ({"num_generation": 8}, "did you mean num_generations"),
        ({"modle": "x"}, "did you mean model"),
        ({"qwertyuiop": 1}, "no setting 'qwertyuiop'$"),
        ({"learning_rate": "fast"}, "learning_rate must be a number; got 'fast'"),
        ({"max_steps": 2.5}, "max_steps must be a whole number; got 2.5"),
        ({"max_steps": float("inf")}, "max_steps must be a whole number; got inf"),
        ({"max_steps": 10**400}, "max_steps must be a whole number; got 1000"),
        ({"model_init_kwargs": "foo"}, "model_init_kwargs must be a mapping; got 'foo'"),
        ({"chat_template_kwargs": "foo"}, "chat_template_kwargs must be a mapping; got 'foo'"),
        ({"generation_kwargs": "foo"}, "generation_kwargs must be a mapping; got 'foo'"),
        ({"use_peft": "maybe"}, "use_peft must be true or false; got 'maybe'"),
        ({"levels": "3"}, "levels must be a list; got '3'"),
        ({"method": "grpoo"}, "did you mean grpo"),
        ({"trust_remote_code": True}, "code from a model repository is never run"),
        ({"model_init_kwargs": {"trust_remote_code": True}}, "code from a model repository is never run"),
        ({"task": "arithmatic"}, "did you mean arithmetic"),
        ({"level": 9}, "level must be between 1 and 5"),
        ({"train_problems": 0}, "train_problems must be at least 1"),
        ({"multi_objective_aggregation": "x"}, "shapes a loss that ADPO does not use"),
        ({"model": "m", "data": "d.jsonl", "reward": "r.py:f", "levels": [1]}, "levels means nothing to rows"),
        ({"output_dir": "x"}, "chosen with --out"),
        ({"data": "problems.jsonl"}, "the embedded model knows generated tasks only"),
        ({"seed": 3}, "chosen with --seed"),
        ({"conifg": "run.yaml"}, "did you mean config"),
        ({"beta": 0.1}, "TRL's beta is a KL penalty, whose place the anchor takes: --tau"),
        ({"model_name_or_path": "x"}, "no setting 'model_name_or_path': here it is --model"),
        ({"dataset_name": "x"}, "here it is --data$"),
        ({"dataset_config": "x"}, "here it is --data_config"),
        ({"reward_funcs": "x"}, "here it is --reward file.py:function"),
        ({"reward_model_path": "x"}, "a reward is a function here"),
        ({"max_prompt_length": 1}, "prompts are never cut"),
        ({"lora_task_type": "CAUSAL_LM"}, "it is always CAUSAL_LM"),
        ({"load_in_4bit": True}, "in Python, give the trainer a model"),
        ({"dtype": "bfloat16"}, "--model_init_kwargs '{dtype: ...}'"),
        ({"torch_dtype": "bfloat16"}, "--model_init_kwargs '{dtype: ...}'"),
        ({"attn_implementation": "sdpa"}, "--attention"),
        ({"num_processes": 2}, "accelerate launch --num_processes"),
        ({"epsilon": 0.2}, "epsilon is refused with method adpo: it shapes a loss that ADPO does not use"),
        ({"method": "grpo", "tau": 0.5}, "tau is an argument of method adpo; method grpo does not know it"),
        ({"eval_problems": 0}, "eval_problems must be at least 1"),
        ({"verifier_seconds": 0}, "verifier_seconds must be positive"),
        ({"lora_dropout": -0.1}, "lora_dropout must be at least 0 and below 1; got -0.1"),
        ({"eval_data": "d.jsonl"}, "eval_data means nothing without data"),
        ({"dry_run": True}, "there is no setting 'dry_run': it is given on the command line, --dry-run"),
        ({"config": "run.yaml"}, "it is given on the command line, --config"),
        ({"warmup_ratio": 0.1}, "here it is --warmup_steps, which takes a share"),
        ({"group_by_length": True}, "leave it out"),
    ],
)
def test_a_mistake_is_one_clear_line(pairs, words):
    with pytest.raises(ValueError, match=words) as error:
        resolve(pairs)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "is not YAML"),
        ("- 1\n- 2", "expected lines of `key: value`"),
        ("1: 2", "expected"),
        ("a: " + "[" * 5000 + "]" * 5000, "is not YAML"),
    ],
)
def test_a_file_that_is_no_settings(tmp_path, text, words):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_yaml(tmp_path / "bad.yaml")
    with pytest.raises(ValueError, match="is not a file"):
        read_yaml(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["tau", "1"], "expected --key"),
        (["--a", "1", "--a=2"], "twice"),
        (["--data", ""], "--data is given nothing: give it a value, null, or leave it out"),
        (["--data="], "--data is given nothing"),
    ],
)
def test_pairs_that_are_none(words, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse_pairs(words)


def test_the_word_no_of_a_strategy(tmp_path):
    """YAML reads it as false."""
    (tmp_path / "run.yaml").write_text("save_strategy: no\n")
    for given in (read_yaml(tmp_path / "run.yaml"), parse_pairs(["--save_strategy", "no"])):
        assert resolve(given).trainer["save_strategy"] == "no"


def test_tau_may_be_auto():
    asked = resolve(parse_pairs(["--tau", "auto"]))
    config = run.trainer_config(asked.run.method, run.arguments(asked, Path("unused"), 0))
    assert config.tau_schedule == "auto"


def test_examples_differ_only_where_the_methods_do():
    files = {name: read_yaml(EXAMPLES / f"qwen3_math_{name}.yaml") for name in ("adpo", "grpo", "gspo")}
    own = {"method", "target", "anchor", "tau", "tau_schedule", "tau_entropy_weight", "tau_reward_weight"}
    theirs = {"method", "epsilon", "beta"}
    common = [{k: v for k, v in file.items() if k not in own | theirs} for file in files.values()]
    assert common[0] == common[1] == common[2]
    assert set(files["adpo"]) - set(common[0]) == own
    assert set(files["grpo"]) - set(common[1]) == set(files["gspo"]) - set(common[2]) == theirs
    assert [file["method"] for file in files.values()] == ["adpo", "grpo", "gspo"]


def test_examples_are_the_papers_configuration():
    asked = resolve(read_yaml(EXAMPLES / "qwen3_math_adpo.yaml"))
    assert asked.run.model == "Qwen/Qwen3-1.7B"
    assert asked.run.levels == [3, 4]
    expected = {
        "num_generations": 8,
        "learning_rate": 1.5e-5,
        "lr_scheduler_type": "cosine",
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 16,
        "num_train_epochs": 2,
        "max_completion_length": 1024,
        "target": "plackett_luce",
        "tau_schedule": "hybrid",
        "tau": 0.8,
        "tau_entropy_weight": 0.2,
        "tau_reward_weight": 0.5,
        "anchor": "on_policy",
    }
    assert expected.items() <= asked.trainer.items()
    for name in ("grpo", "gspo"):
        trainer = resolve(read_yaml(EXAMPLES / f"qwen3_math_{name}.yaml")).trainer
        assert (trainer["epsilon"], trainer["beta"]) == (0.2, 0.0)
        assert trainer["importance_sampling_level"] == METHODS[name]["importance_sampling_level"]


def test_memory_counts_parameters_exactly_and_without_weights():
    config = memory.model_config("Qwen/Qwen3-1.7B")
    found = memory.estimate(config, {"per_device_train_batch_size": 8, "max_completion_length": 1024})
    assert found.parameters == found.trainable == 1_720_574_976
    assert found.weights == pytest.approx(4 * found.parameters / 2**30)
    assert found.optimizer == pytest.approx(2 * found.weights)
    parts = memory.estimate(
        config, {"per_device_train_batch_size": 8, "max_completion_length": 1024, "sampling_rows": 2}
    )
    assert parts.generation == pytest.approx(found.generation / 4)
    half = memory.estimate(config, {"model_init_kwargs": {"dtype": "bfloat16"}, "anchor": "ema"})
    assert half.weights == pytest.approx(found.weights / 2)
    assert half.copies == pytest.approx(found.weights)  # a float32 shadow
    judged = memory.estimate(config, {"anchor": "fixed", "backtracking": True})
    assert judged.copies == pytest.approx(2 * judged.weights)  # the anchor, and what a step is taken back to
    asked = resolve(read_yaml(EXAMPLES / "qwen2.5_7b_math_adpo.yaml"))
    from adpo.runs.by_name import lora_config

    adapter = memory.estimate(memory.model_config(asked.run.model), asked.trainer, lora_config(asked.run))
    assert adapter.parameters - adapter.trainable == 7_615_616_512
    assert adapter.total < 40
    with pytest.raises(ValueError, match="configuration of model '/nowhere' cannot be found"):
        memory.model_config("/nowhere")
