"""The command as a user types it."""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys

import pytest
import torch

import adpo
import forked


def run(*arguments):
    return forked.run("-m", "adpo.cli", *arguments)


def test_help_lists_every_command():
    """In processes that import what they need themselves."""
    for arguments in ([], ["--help"]):
        command = [sys.executable, "-m", "adpo.cli", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert result.returncode == 0
        assert all(command in result.stdout for command in ("demo", "taxonomy", "env"))


def test_demo_learns_online_and_offline():
    result = run("demo", "--iterations", "80", "--seed", "3")
    assert result.returncode == 0, result.stderr
    gains = re.findall(r"([+-]\d+\.\d+) → ([+-]\d+\.\d+)", result.stdout)
    assert len(gains) == 2
    for before, after in gains:
        assert float(after) > float(before) + 0.3


def test_demo_is_reproducible():
    scores = [
        re.findall(r"[+-]?\d\.\d\d", run("demo", "--iterations", "5", "--seed", "1").stdout) for _ in range(2)
    ]
    assert scores[0] == scores[1]
    assert len(scores[0]) >= 8


def test_taxonomy_prints_every_preset_with_its_target_and_behaviour():
    result = run("taxonomy")
    assert result.returncode == 0
    for row in adpo.presets.TAXONOMY:
        line = next(line for line in result.stdout.splitlines() if f" {row.preset.__name__} " in line)
        assert str(row.objective.target) in line
        assert row.behaviour in line


def test_env_names_versions_and_missing_extras():
    result = run("env")
    assert result.returncode == 0
    assert adpo.__version__ in result.stdout
    assert torch.__version__ in result.stdout
    for extra, package in {"lm": "trl", "control": "gymnasium", "report": "matplotlib", "verl": "verl"}.items():
        line = next(line for line in result.stdout.splitlines() if f"{package} (extra {extra})" in line)
        installed = importlib.util.find_spec(package) is not None
        expected = importlib.metadata.version(package) if installed else f"missing: pip install 'adpo[{extra}]'"
        assert expected in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demoo"], "No such command 'demoo'"),
        (["demo", "--seed", "x"], "--seed"),
        (["demo", "--iterations", "0"], "--iterations"),
        (["demo", "--bogus"], "--bogus"),
        (["taxonomy", "extra"], "extra"),
        (["verl-config", "--nodes", "0"], "--nodes"),
        (["verl-data", "missing.jsonl", "--out", "problems.parquet"], "missing.jsonl"),
        (["tune"], "Missing argument 'job'. Choose from: train, prefer"),
        (
            ["reproduce", "geometry", "--out", "README.md/here"],
            "README.md/here cannot be written: Not a directory",
        ),
        (["verl-data", "missing.jsonl", "--out", "."], "--out . is a folder; expected a file"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(arguments, words):
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("adpo: ")
    assert words in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("train --report_to wandb", "report_to wandb needs a package that is not installed: pip install wandb"),
        ("train --push_to_hub true", "push_to_hub: the hub cannot be reached, or does not know you"),
        ("train --beta 0.1", "TRL's beta is a KL penalty, whose place the anchor takes: --tau"),
        ("train --config twice.yaml", "twice.yaml: tau is given twice, in lines 1 and 3"),
        ("train --model m --data prompts.jsonl", "a file of prompts needs a reward function of your own"),
        (
            "prefer same.jsonl",
            "same.jsonl, line 1, rejected: expected another completion than chosen; got the same",
        ),
        ("eval runs/none", "there is no folder runs/none"),
        ("reproduce bandits --first-seed 999", "--first-seed 999 with 3 seeds goes beyond 999"),
    ],
)
def test_mistakes_of_a_user_are_one_line_and_leave_nothing(words, complaint, tmp_path, monkeypatch):
    pytest.importorskip("trl")
    if "wandb" in words and importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADPO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "runs").mkdir()
    (tmp_path / "twice.yaml").write_text("tau: 0.5\nmax_steps: 3\ntau: 0.8\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "say hello"}\n')
    (tmp_path / "same.jsonl").write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "2"}\n')
    if "--model m" in words:
        from adpo.models.embedded import WarmUp, make_model, make_tokenizer

        make_model(WarmUp(hidden=16, layers=1)).save_pretrained(tmp_path / "m")
        make_tokenizer().save_pretrained(tmp_path / "m")
    before = sorted(tmp_path.rglob("*"))
    result = run(*words.split())
    assert result.returncode == 2, result.stderr
    ours = result.stderr[result.stderr.index("adpo: ") :].splitlines()  # libraries may have had something to say
    assert len(ours) == (2 if words.startswith("prefer") else 1), ours  # a bad row, and how to go on
    assert complaint in ours[0]
    assert "Traceback" not in result.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_verl_config_is_the_paper_s_run_as_a_command():
    result = run("verl-config", "--nodes", "2", "--train", "mine.parquet")
    assert result.returncode == 0, result.stderr
    command = result.stdout.replace("\\\n", "").split()
    assert command[:3] == ["python3", "-m", "verl.trainer.main_ppo"]
    given = dict(part.split("=", 1) for part in command[3:])
    assert given["data.train_files"] == "mine.parquet"
    assert given["trainer.nnodes"] == "2"
    assert given["actor_rollout_ref.model.path"] == "Qwen/Qwen3-1.7B"
    assert given["actor_rollout_ref.rollout.n"] == "8"
    assert given["data.max_response_length"] == "1024"
    loss = "+actor_rollout_ref.actor.policy_loss"
    assert [given[f"{loss}.{key}"] for key in ("target", "anchor", "tau", "tau_schedule")] == [
        "plackett_luce",
        "on_policy",
        "0.8",
        "hybrid",
    ]
    assert [given[f"{loss}.tau_{part}_weight"] for part in ("entropy", "reward")] == ["0.2", "0.5"]


def test_verl_data_writes_problems_of_the_levels_asked_for(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"problem": f"What is {n}+{n}?", "solution": rf"It is \boxed{{{2 * n}}}.", "level": f"Level {n}"}
        for n in range(1, 6)
    ]
    (tmp_path / "math.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "train.parquet"
    given = ("verl-data", str(tmp_path / "math.jsonl"), "--levels", "3", "--levels", "4")
    result = run(*given, "--out", str(out))
    assert result.returncode == 0, result.stderr
    assert "2 problems" in result.stdout
    found = parquet.read_table(out).to_pylist()
    assert [row["reward_model"]["ground_truth"] for row in found] == ["6", "8"]
    assert [row["extra_info"]["level"] for row in found] == [3, 4]
    assert found[0]["prompt"][0]["content"].startswith("What is 3+3?\n")
    assert {path.name for path in tmp_path.iterdir()} == {"math.jsonl", "train.parquet"}
    refused = run(*given, "--out", str(tmp_path / "nowhere" / "train.parquet"))
    assert refused.returncode == 2
    assert "there is no folder" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_bench_compares_output_layers():
    done = forked.run("-m", "adpo.bench", "head", "--quick")
    assert done.returncode == 0, done.stderr
    for name in ("ours, any gradient", "ours, known coefficients", "all logits", "TRL, chunked"):
        assert name in done.stdout
    assert "1.00" in done.stdout
    assert "not measured: Liger" in done.stdout


def test_bench_takes_the_paper_preset_through_a_trial():
    done = forked.run("-m", "adpo.bench", "reasoning", "--quick")
    assert done.returncode == 0, done.stderr
    assert "2 x 2 completions of 8 tokens, 4 optimizer steps" in done.stdout
    for what in ("the first rollout, compilation included", "a rollout", "a batch of an exam, 4 answers"):
        assert re.search(rf"^{what}: \d+\.\d s$", done.stdout, re.MULTILINE)
    assert re.search(r"^scored .*, 8 tokens a step$", done.stdout, re.MULTILINE)  # a quarter of 4 completions of 8


def test_bench_prints_a_ratio_for_every_target():
    result = forked.run("-m", "adpo.bench", "core", "--quick")
    assert result.returncode == 0, result.stderr
    for name in ("one_hot", "teacher", "boltzmann", "kde", "top1", "plackett_luce"):
        assert re.search(rf"{name}.*64 x 64.*\d+\.\dx", result.stdout)
