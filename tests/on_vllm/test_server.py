"""Training with a vLLM server: the real one, on a CPU; weights go through a folder in the place of NCCL."""

import json
import sys

import file_transport
import pytest
import serving
import tiny_lm
import torch
import transformers
import two_processes
from rollouts import check, command_line, made, report
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from adpo import cli


def of(server, **more):
    return {"vllm_mode": "server", "vllm_server_base_url": server.url, "vllm_server_timeout": 5.0, **more}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        pytest.param("adpo", {}, id="adpo"),
        pytest.param("grpo", {}, id="grpo"),
        pytest.param("adpo", {"temperature": 0.7, "truncated": "zero"}, id="adpo, a temperature"),
        pytest.param("adpo", {"adapter": True}, id="adpo, an adapter"),
        pytest.param("grpo", {"adapter": True}, id="grpo, an adapter"),
    ],
)
def test_runs_that_learn(server, model, tmp_path, kind, more):
    """Weights have arrived before every rollout, and a server says why each completion ended."""
    asked = server.sampled()
    trainer = made(kind, tmp_path, model, **of(server, **more))
    trainer.train()
    check(report(trainer))
    assert server.sampled() == asked + 3


def test_several_steps_on_a_rollout(server, model, tmp_path):
    trainer = made("adpo", tmp_path, model, **of(server, num_iterations=2, max_steps=4))
    trainer.train()
    check(report(trainer), rollouts=2)


def test_the_sampler_of_grpo_is_the_policy(server, model, tmp_path):
    """The ratio of TRL's correction, whose log-probabilities are the server's, at a temperature."""
    trainer = made("grpo", tmp_path, model, **of(server, temperature=0.7))
    trainer.train()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    for log in logs:
        assert log["sampling/sampling_logp_difference/max"] < 1e-4
        assert log["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)


def test_stop_words_and_ends_that_the_server_does_not_know(server, model, tmp_path):
    """Whole at the limit, where a stop word ended them; end tokens are those of the trainer's model."""
    trained = tmp_path / "model"
    policy = AutoModelForCausalLM.from_pretrained(model)
    policy.generation_config.eos_token_id = [1, 9]
    policy.save_pretrained(trained)
    AutoTokenizer.from_pretrained(model).save_pretrained(trained)
    trainer = made("adpo", tmp_path, trained, **of(server, generation_kwargs={"stop_token_ids": [2, 3]}))
    trainer.train()
    found = report(trainer)
    check(found)
    assert sorted(found["ends"]) == [1, 9]
    last = {tokens[-1] for rows in found["rollouts"] for tokens, cut, *_ in rows if not cut}
    assert 9 in last
    assert last & {2, 3}
    assert last <= {1, 2, 3, 9}


def test_a_run_whose_completions_are_all_cut(server, model, tmp_path):
    trainer = made("adpo", tmp_path, model, **of(server, max_completion_length=1, truncated="zero"))
    trainer.train()
    found = report(trainer)
    assert min(found["truncated"]) > 0.5
    assert found["moved"] is False
    assert "all completions were cut at the length limit of 1" in found["verdict"]


@pytest.mark.parametrize("method", ["adpo", "grpo"])
def test_the_command(server, model, tmp_path, monkeypatch, caplog, method):
    """Prompts for which the server has no room are left out, as those for which the model has none."""
    more = of(server, vllm_server_base_url=server.url + "/", method=method)
    prompts = [{"prompt": f"{row}+1=" if row % 2 else f"{row}+{'1' * 190}="} for row in range(80)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    more["data"] = tmp_path / "prompts.jsonl"
    asked = server.sampled()
    typed = command_line(tmp_path, model, **more, **({"truncated": "keep"} if method == "adpo" else {}))
    monkeypatch.setattr(sys, "argv", ["adpo", *typed])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    assert "leave no room for 16 tokens in a context of 200: left out" in caplog.text
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["steps"], summary["nothing_learnt"]) == (2, None)
    assert "vLLM" in summary["sampling"]
    assert server.sampled() == asked + 2


def test_two_processes(server, model, tmp_path, monkeypatch):
    """One of them speaks to the server; both know how their completions ended."""
    for name, value in serving.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(file_transport.FOLDER, str(server.log.parent))
    done = two_processes.run(__file__, tmp_path, str(model), server.url)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    for rank in range(2):
        check(json.loads((tmp_path / f"{rank}.json").read_text()))


def worker(folder, model, url):
    import os
    from pathlib import Path

    import adpo.trainers.trl.rollout.vllm as needs

    needs.refuse_without_gpu = lambda _: None
    with pytest.MonkeyPatch.context() as changes:
        file_transport.instead_of_nccl(changes)
        more = {"vllm_mode": "server", "vllm_server_base_url": url, "ddp_backend": "gloo"}
        trainer = made("adpo", Path(folder), model, **more)
        trainer.train()
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(report(trainer)))


# What is refused.


def test_a_server_whose_context_is_full(server, model, tmp_path):
    with pytest.raises(ValueError, match=r"has room for 200 tokens of prompt and completion, max_completion"):
        made("adpo", tmp_path, model, **of(server, max_completion_length=200))
    trainer = made("adpo", tmp_path, model, **of(server, max_completion_length=198))
    with pytest.raises(ValueError, match=r"failed \(.*maximum context length is 200 .* a larger --max-model-len$"):
        trainer.train()


def test_another_tokenizer(server, model, tmp_path):
    trained = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(trained)
    vocabulary = {"<pad>": 0, "<eos>": 1, **{c: i + 2 for i, c in enumerate(reversed(tiny_lm.CHARACTERS))}}
    other = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    other.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=other, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(trained)
    with pytest.raises(ValueError, match=r"has another tokenizer than the model that is trained"):
        made("adpo", tmp_path, trained, **of(server))


def test_weights_that_do_not_fit(server, model, tmp_path):
    """The last test on this server: vLLM does not recover from it."""
    torch.manual_seed(0)
    config = Qwen3Config.from_pretrained(model, hidden_size=128)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "model")
    trainer = made("adpo", tmp_path, tmp_path / "model", **of(server))
    with pytest.raises(ValueError, match=r"the vLLM server at \S+ failed .*start it again with the model that is"):
        trainer.train()


if __name__ == "__main__":
    worker(*sys.argv[1:])
