"""What a setting needs and is not there is one line at the start, before data and model are loaded."""

import importlib.util
import json
import re
import sys

import pytest

pytest.importorskip("trl")

import huggingface_hub

from adpo import cli
from adpo.preferences.generated_lists import graded
from adpo.runs.settings import packages
from adpo.runs.settings.packages import outside_in_one_line

MISSING = {
    "--report_to wandb": ("wandb", "report_to wandb needs a package that is not installed: pip install wandb, or"),
    "--report_to [tensorboard, mlflow]": ("mlflow", "report_to mlflow needs a package"),
    "--report_to trackio": ("trackio", "report_to trackio needs a package"),
    "--report_to comet_ml": ("comet_ml", "pip install comet-ml"),
    "--use_vllm true --vllm_mode server": (None, "this run is on cpu: leave use_vllm out"),
    "--use_liger_kernel true": (None, "use_liger_kernel needs a GPU"),
    "--optim adamw_bnb_8bit": ("bitsandbytes", "optim adamw_bnb_8bit: You need to install `bitsandbytes`"),
    "--optim galore_adamw": ("galore_torch", "optim galore_adamw: You need to install `galore_torch`"),
    "--optim adamw_torch_8bit": ("torchao", "optim adamw_torch_8bit: You need to have `torchao"),
    "--push_to_hub true": (None, "push_to_hub: the hub cannot be reached, or does not know you"),
    "--hub_token abc": (None, "hub_token cannot be set: a run keeps its settings on disk"),
    "--log_level nonsense": (None, "log_level must be one of"),
    "--report_to nonsense": (None, "report_to must be of azure_ml"),
    "--remove_unused_columns true": (None, "remove_unused_columns must be false"),
    "--model_init_kwargs {attn_implementation: flash_attention_2}": ("flash_attn", "pip install flash-attn"),
    "--model_init_kwargs {attn_implementation: flash_attention_3}": ("flash_attn_interface", "pip install flash"),
    "--model_init_kwargs {attn_implementation: kernels-community/flash-attn}": ("kernels", "pip install kernels"),
    "--model_init_kwargs {quantization_config: {load_in_4bit: true}}": (
        "bitsandbytes",
        "pip install bitsandbytes",
    ),
    "--model_init_kwargs {dtype: bf16}": (None, "got 'bf16'; did you mean bfloat16?"),
}
OF_TRAIN = ("use_vllm", "model_init_kwargs")
OF_PREFER = ("remove_unused",)


@pytest.mark.parametrize("command", ["train", "prefer"])
@pytest.mark.parametrize("words", MISSING)
def test_what_is_missing_is_one_line_at_the_start(words, command, tmp_path, monkeypatch, capsys):
    package, complaint = MISSING[words]
    if any(f"--{name}" in words for name in (OF_TRAIN if command == "prefer" else OF_PREFER)):
        pytest.skip("a setting of the other command")
    if package is not None and importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    data = tmp_path / "lists.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in graded(count=30)))
    out = tmp_path / "out"
    flag, _, value = words.partition(" ")
    given = [flag, *([value] if " --" not in value else value.split())]
    # A model that is not there: it would be the complaint of a run that looks for it first.
    where = ["--model", str(tmp_path / "no-model"), "--out", str(out)]
    monkeypatch.setattr(
        sys, "argv", ["adpo", command, *([str(data)] if command == "prefer" else []), *where, *given]
    )
    with pytest.raises(SystemExit) as end:
        cli.main()
    errors = capsys.readouterr().err
    assert (end.value.code, errors.count("\n")) == (2, 1), errors
    assert complaint in errors
    assert not out.exists()


def test_what_a_gpu_needs_beside_it(tmp_path, monkeypatch):
    """On a machine that has one."""
    from adpo.trainers.trl import ADPOConfig
    from adpo.trainers.trl.rollout import vllm

    monkeypatch.setattr(vllm, "refuse_without_gpu", lambda _: None)
    monkeypatch.setattr(packages, "refuse_liger", lambda _: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    for setting, package in {"use_vllm": "'trl[vllm]', or", "use_liger_kernel": "liger-kernel, or"}.items():
        config = ADPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **{setting: True})
        expected = f"^{setting} needs a package that is not installed: pip install {re.escape(package)}"
        with pytest.raises(ValueError, match=expected):
            packages.check_packages(config)


def test_a_hub_that_knows_you(tmp_path, monkeypatch):
    from adpo.trainers.listwise import ListwiseConfig

    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", lambda *_, **__: {"name": "me"})
    packages.check_packages(ListwiseConfig(str(tmp_path), push_to_hub=True, use_cpu=True, report_to="none"))


def test_what_fails_outside_is_one_line_and_what_fails_here_is_not():
    scope = {}
    program = "def setup():\n    raise RuntimeError('no api key\\nlog in')\n"
    exec(compile(program, "transformers/integrations/integration_utils.py", "exec"), scope)
    with pytest.raises(ValueError, match="a tracker of report_to failed with RuntimeError: no api key log in"):  # noqa: SIM117
        with outside_in_one_line():
            scope["setup"]()
    with pytest.raises(ValueError, match="ConnectionError: the vLLM server cannot be reached"):  # noqa: SIM117
        with outside_in_one_line():
            raise ConnectionError("the vLLM server\ncannot be reached")
    with pytest.raises(ZeroDivisionError):  # noqa: SIM117
        with outside_in_one_line():
            1 / 0  # noqa: B018
