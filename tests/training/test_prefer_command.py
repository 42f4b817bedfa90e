"""`adpo prefer`, typed as a user types it, on a model of a few thousand parameters."""

import gzip
import json
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

import forked

pytest.importorskip("trl")

from documented import undocumented
from safetensors.torch import load_file

from adpo import cli
from adpo.models import embedded
from adpo.models.embedded import WarmUp, make_model, make_tokenizer
from adpo.preferences.generated_lists import graded
from adpo.runs import by_name as models
from adpo.runs import prefer as offline

FAST = {
    "--max_steps": 4,
    "--per_device_train_batch_size": 4,
    "--eval_every": 2,
    "--logging_steps": 1,
    "--save_steps": 2,
    "--learning_rate": 1e-3,
    "--tau": 1,
}


WHEN = ("before", "after")


def fast(*words):
    return [*words, *(str(part) for name, value in FAST.items() if name not in words for part in (name, value))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(WarmUp(hidden=16, layers=1)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("ADPO_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def lists(tmp_path):
    return written(tmp_path / "lists.jsonl", graded(count=60))


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def typed(monkeypatch, capsys):
    """Run the command in this process: exit code, output, errors."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["adpo", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        return end.value.code, said.out, said.err

    return run


def test_a_run_ends_with_figures_checkpoint_and_summary(typed, model, lists, tmp_path):
    out = tmp_path / "out"
    code, said, errors = typed("prefer", lists, "--model", model, "--out", out, *fast())
    assert code == 0, errors
    assert "60 lists" in said
    assert "lists a second" in said
    assert "pairs in order, by log-ratio" in said
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["lists"]["train"] + summary["lists"]["dev"] + summary["lists"]["test"] == 60
    for figures in summary["mean_logp"].values():
        assert figures["before"]["low"] <= figures["before"]["value"] <= figures["before"]["high"]
        assert figures["gain"]["value"] == pytest.approx(figures["after"]["value"] - figures["before"]["value"])
    ranked = [*summary["log_ratio"].values(), *(each[w] for each in summary["mean_logp"].values() for w in WHEN)]
    assert all(0 <= figure["low"] <= figure["value"] <= figure["high"] <= 1 for figure in ranked)
    assert "validation" in said
    assert undocumented(out) == set()
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in steps if "loss" in entry] == [1, 2, 3, 4]
    assert [entry["step"] for entry in steps if "validation/accuracy" in entry] == [2, 4]
    assert models.load_model(summary["checkpoint"])
    assert f"{out}/summary.json" in said.replace("\n", "")


def test_the_second_run_knows_the_reference(typed, model, lists, tmp_path, monkeypatch):
    code, said, _ = typed("prefer", lists, "--model", model, "--out", tmp_path / "a", *fast())
    assert (code, "60 lists scored" in said) == (0, True)
    code, said, _ = typed("prefer", lists, "--model", model, "--out", tmp_path / "b", *fast())
    assert (code, "scores known from earlier" in said) == (0, True)


RUNS = {
    "lora": ["--use_peft", "--lora_r", "2"],
    "boltzmann, ema": ["--target", "boltzmann", "--anchor", "ema", "--tau_schedule", "guarded"],
    "no anchor": ["--anchor", "none", "--logp_reduction", "mean"],
    "a pass of two": ["--completions_per_pass", "2", "--nll_weight", "0.1"],
    "no looks": ["--eval_every", "0"],
    "an epoch": ["--max_steps", "-1", "--num_train_epochs", "1", "--eval_every", "0"],
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_a_user_would_type(typed, model, lists, tmp_path, name):
    out = tmp_path / "out"
    code, said, errors = typed("prefer", lists, "--model", model, "--out", out, *fast(*RUNS[name]))
    assert code == 0, errors
    summary = json.loads((out / "summary.json").read_text())
    if name == "an epoch":
        assert summary["steps"] == -(-summary["lists"]["train"] // 4)
    if name == "no looks":
        assert summary["checkpoint"].endswith("model")
    if name == "lora":
        adapter = load_file(Path(summary["checkpoint"]) / "adapter_model.safetensors")
        assert any(value.abs().sum() > 0 for key, value in adapter.items() if "lora_B" in key)  # zeros at first
    assert "Summary" in said


def test_pairs_gzip_yaml_and_held_out_data_of_ones_own(typed, model, tmp_path):
    pairs = [{"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": str(2 * i + 1)} for i in range(40)]
    with gzip.open(tmp_path / "pairs.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in pairs))
    held_out = written(tmp_path / "held_out.jsonl", [*pairs[:3], *graded(count=10)])
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {model}\neval_data: {held_out}\ntarget: top1\n")
    out = tmp_path / "out"
    code, said, errors = typed("prefer", tmp_path / "pairs.jsonl.gz", "--config", config, "--out", out, *fast())
    assert code == 0, errors
    assert "3 training lists have prompts of held-out ones: left out" in said
    assert json.loads((out / "summary.json").read_text())["lists"] == {"train": 37, "dev": 0, "test": 13}
    assert "37 training, 0 validation, 13 test lists" in said
    assert "no validation: the last model is kept" in said


def test_all_bad_rows_are_named_before_any_model_is_loaded(typed, tmp_path, monkeypatch):
    rows = [*graded(count=30), {"prompt": "1+1="}, {**graded(count=1)[0], "rewards": [1]}]
    rows.insert(3, {"prompt": "", "completions": ["1", "2"], "ranks": [1, 2]})
    data = written(tmp_path / "lists.jsonl", rows)
    monkeypatch.setattr(offline, "load_tokenizer", lambda *_: pytest.fail("a model was looked at"))
    code, _, errors = typed("prefer", data, "--model", "no/such-model", "--out", tmp_path / "out", *fast())
    assert code == 2
    lines = errors.splitlines()
    assert [f"line {n}" in line for n, line in zip((4, 32, 33), lines, strict=False)] == [True] * 3
    assert "prompt" in lines[0]
    assert "completions" in lines[1]
    assert "rewards" in lines[2]
    assert "--skip-bad" in errors
    assert not (tmp_path / "out").exists()


def test_the_first_thousand_bad_rows_are_named_and_the_others_counted(typed, tmp_path):
    data = written(tmp_path / "lists.jsonl", [{"prompt": "1+1="}] * 1_500)
    held_out = written(tmp_path / "more.jsonl", [{"prompt": "1+2="}] * 10)
    code, _, errors = typed("prefer", data, "--eval_data", held_out, "--out", tmp_path / "out", *fast())
    assert code == 2
    *named, others, advice = errors.splitlines()
    assert len(named) == 1_000
    assert others == "... and 510 more"
    assert advice.startswith("1510 rows are bad")
    assert not (tmp_path / "out").exists()


def test_bad_rows_can_be_left_out(typed, model, tmp_path):
    data = written(tmp_path / "lists.jsonl", [*graded(count=60), {"prompt": "1+1="}])
    code, said, errors = typed("prefer", "--skip-bad", data, "--model", model, "--out", tmp_path / "o", *fast())
    assert code == 0, errors
    assert "1 bad rows left out" in " ".join(said.split())


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--targt", "top1"], "no setting 'targt'; did you mean target?"),
        (["--target", "plackett"], "did you mean plackett_luce?"),
        (["--tau", "warm"], "tau must be a number; got 'warm'"),
        (["--anchor", "on_policy"], "anchor must be one of fixed, ema, refresh, none"),
        (["--trust_remote_code", "true"], "code from a model repository is never run"),
        (["--eval_data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--model", "./nowhere"], "there is no such folder"),
        (["--eval_lists", "0"], "eval_lists must be at least 1; got 0"),
        (["--resume"], "--resume needs the --out"),
        (["--out", "/proc/adpo"], "/proc/adpo cannot be written to"),
        (["--reference", "./nowhere"], "nowhere"),
        (["--anchor", "none", "--reference", "x"], "a reference means nothing with anchor none"),
        (["--cache", "lists.jsonl"], "cache lists.jsonl is a file; expected a folder"),
        (["--deepspeed", "x.json"], ""),
        (["--load_best_model_at_end", "true"], "load_best_model_at_end"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(typed, model, lists, tmp_path, monkeypatch, words, complaint):
    monkeypatch.chdir(tmp_path)
    own = [] if "--model" in words else ["--model", model]
    code, _, errors = typed("prefer", lists, *own, *fast(*words))
    assert code == 2
    assert complaint in errors
    assert errors.startswith("adpo: ")
    assert errors.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["lists.jsonl"], errors


def test_a_model_that_is_cut_off(typed, model, lists, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, _, errors = typed("prefer", lists, "--model", broken, "--out", tmp_path / "out", *fast())
    assert (code, errors.count("\n")) == (2, 1)
    assert "cannot be loaded" in errors


def test_held_out_lists_that_order_nothing(typed, model, lists, tmp_path):
    tied = written(tmp_path / "tied.jsonl", [{"prompt": "1+1=", "completions": ["1", "2"], "ranks": [1, 1]}])
    words = ["--eval_data", tied, "--out", tmp_path / "out", *fast()]
    code, _, errors = typed("prefer", lists, "--model", model, *words)
    assert code == 2
    assert "none of the 1 lists to hold out has two different rewards" in errors
    assert not (tmp_path / "out").exists()


def test_a_moving_anchor_is_judged_against_the_reference(typed, model, lists, tmp_path):
    """At a look the anchor may have just been moved to the policy."""
    out = tmp_path / "out"
    words = fast("--anchor", "refresh", "--anchor_every", "2", "--max_steps", "8", "--learning_rate", "1e-2")
    code, said, errors = typed("prefer", lists, "--model", model, "--out", out, *words)
    assert code == 0, errors
    looks = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = [entry["validation/accuracy"] for entry in looks if "validation/accuracy" in entry]
    assert len(found) == 4
    assert len(set(found)) > 1
    assert "lists scored" in said


def test_what_a_killed_start_leaves_is_no_run(typed, model, lists, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for name in (".adpo-probe-123", "settings.json.part"):
        (out / name).write_text("")
    code, _, errors = typed("prefer", lists, "--model", model, "--out", out, "--resume", *fast())
    assert code == 0, errors


def test_a_setting_of_nothing_is_remembered(typed, model, lists, tmp_path):
    out = tmp_path / "out"
    code, _, errors = typed("prefer", lists, "--model", model, "--out", out, *fast("--max_length", "null"))
    assert code == 0, errors
    code, said, errors = typed("prefer", "--out", out, "--resume")
    assert code == 0, errors
    assert "going on from" in said


def test_a_folder_with_a_name_that_looks_like_markup(typed, model, lists, tmp_path):
    out = tmp_path / "o[/x]"
    code, said, errors = typed("prefer", lists, "--model", model, "--out", out, *fast())
    assert code == 0, errors
    assert f"results in {out}" in said


def test_no_prompt_is_in_two_of_the_three_sets(typed, model, tmp_path):
    from adpo.runs.display import Display, make_console
    from adpo.runs.settings import prefer_settings as data

    rows = [
        {**row, "completions": row["completions"][::-1], "rewards": row["rewards"][::-1]}
        for row in graded(count=50)
    ]
    path = written(tmp_path / "twice.jsonl", [*rows, *graded(count=50)])
    run = data.resolve({"data": str(path), "model": str(model)}).run
    config = offline.ListwiseConfig(str(tmp_path), use_cpu=True, report_to="none")
    found = data.prepare(run, make_tokenizer(), config, 128, Display(make_console(quiet=True)), 0)
    train, dev, test = (set(table.prompt_keys) for table in found)
    assert train
    assert dev
    assert test
    assert not train & dev
    assert not train & test
    assert not dev & test


def test_data_that_is_not_there(typed, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, errors = typed("prefer", "nowhere.jsonl", "--model", model, *fast())
    assert (code, errors.count("\n")) == (2, 1)
    assert "nowhere.jsonl" in errors


def test_the_embedded_model_says_what_it_cannot_read(typed, tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "warmed_up", lambda *_: pytest.fail("a model was made"))
    data = written(
        tmp_path / "lists.jsonl", [{"prompt": "Grüezi", "completions": ["a", "b"], "ranks": [1, 2]}] * 3
    )
    code, _, errors = typed("prefer", data, "--out", tmp_path / "out")
    assert code == 2
    assert "line 1 has the character 'G', and the embedded model knows plain text of" in errors


def test_a_dry_run_writes_nothing(typed, model, lists, tmp_path):
    out = tmp_path / "out"
    code, said, _ = typed("prefer", lists, "--model", model, "--out", out, "--dry-run", *fast())
    assert code == 0
    assert "settings and data are in order" in said
    assert not out.exists()


@pytest.fixture
def stopped(typed, model, lists, tmp_path):
    """A finished run, and the words that resume it."""
    out = tmp_path / "out"
    code, _, errors = typed("prefer", lists, "--model", model, "--out", out, *fast())
    assert code == 0, errors
    return out


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(typed, out, *words):
    """Nothing is overwritten by a refusal of one line."""
    before = content(out)
    code, _, errors = typed("prefer", "--out", out, "--resume", *words)
    assert code == 2
    assert errors.count("\n") == 1
    assert content(out) == before
    return errors


def test_resume_needs_the_folder_alone(typed, stopped):
    code, said, errors = typed("prefer", "--out", stopped, "--resume")
    assert code == 0, errors
    assert "going on from" in said
    assert "checkpoint-4" in said.replace("\n", "")
    assert json.loads((stopped / "summary.json").read_text())["steps"] == 4  # it had ended: not one step more


def test_data_that_changed_is_not_resumed(typed, stopped, lists):
    lists.write_text(lists.read_text().replace("1.0", "0.9", 1))
    assert "has changed since the run in" in refused(typed, stopped)


def test_other_settings_are_not_resumed(typed, stopped):
    errors = refused(typed, stopped, "--tau", "3")
    assert "a run with other settings (tau: 1.0, not 3.0)" in errors


def test_the_same_command_again_with_resume(typed, model, lists, stopped):
    words = ["prefer", lists, "--model", model, "--out", stopped, *fast(), "--seed", "0", "--resume"]
    for more in ([], ["--warmup_steps", "0", "--target", "plackett_luce"]):
        code, said, errors = typed(*words, *more)
        assert (code, errors) == (0, "")
        assert "going on from" in said
    assert "(warmup_steps: 0, not 5.0)" in refused(typed, stopped, "--warmup_steps", "5")
    assert "(seed: 0, not 7)" in refused(typed, stopped, "--seed", "7")


def test_a_start_that_fails_does_not_block_the_next_try(typed, model, lists, tmp_path, monkeypatch):
    out = tmp_path / "out"
    words = ["prefer", lists, "--model", model, "--out", out, *fast()]
    with monkeypatch.context() as patch:
        patch.setattr(offline, "_remembered", lambda *_: 1 / 0)
        patch.setattr(sys, "argv", ["adpo", *map(str, words)])
        with pytest.raises(ZeroDivisionError):
            cli.main()
    assert not out.exists()
    code, _, errors = typed(*words)
    assert code == 0, errors


def test_a_damaged_checkpoint_is_not_resumed(typed, stopped):
    path = stopped / "checkpoint-4" / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:-1])
    assert "is damaged (optimizer.pt: " in refused(typed, stopped)


def test_a_foreign_checkpoint_is_not_resumed(typed, stopped, model, lists, tmp_path):
    other = tmp_path / "other"
    code, _, errors = typed(
        "prefer", lists, "--model", model, "--out", other, *fast("--tau", "2", "--max_steps", "6")
    )
    assert code == 0, errors
    (other / "checkpoint-6").rename(stopped / "checkpoint-6")
    assert "is a checkpoint of another run" in refused(typed, stopped)


def test_a_folder_of_something_else_is_not_resumed(typed, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    assert "holds no run of adpo" in refused(typed, tmp_path)


@pytest.mark.parametrize(
    ("words", "sizes"),
    [([], (6, 60)), (["--dev_lists", "0"], (0, 60)), (["--dev_lists", "20"], (20, 60))],
)
def test_validation_takes_a_small_share_of_the_lists(typed, model, lists, tmp_path, words, sizes):
    out = tmp_path / "out"
    code, said, errors = typed("prefer", lists, "--model", model, "--out", out, *words, *fast())
    assert code == 0, errors
    found = json.loads((out / "summary.json").read_text())["lists"]
    assert sum(found.values()) == sizes[1]
    assert found["dev"] in ((found["train"] + found["dev"]) // 10, sizes[0])
    assert ("no validation" in said) == (sizes[0] == 0)


def test_a_validation_set_that_takes_everything(typed, model, lists, tmp_path):
    words = ["--dev_lists", "60", "--out", tmp_path / "out", *fast()]
    code, _, errors = typed("prefer", lists, "--model", model, *words)
    assert (code, errors.count("\n")) == (2, 1)
    assert "dev_lists = 60 leaves nothing of" in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_from_outside_saves_and_says_how_to_go_on(model, lists, tmp_path, number):
    out = tmp_path / "out"
    words = ["prefer", str(lists), "--model", str(model), "--out", str(out), *fast("--max_steps", "5000")]
    program = "import signal as s; s.signal(s.SIGINT, s.default_int_handler); from adpo.cli import main; main()"
    process = forked.Process("-c", program, *words, "--save_total_limit", "1")
    deadline = time.monotonic() + 180
    while not list(out.glob("checkpoint-*")):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.errors[-2000:]
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    assert process.errors.endswith("adpo: stopped\n")
    flat = process.output.replace("\n", "")
    assert f"go on with: adpo prefer --out {out} --resume" in flat
    (checkpoint,) = out.glob("checkpoint-*")
    assert f"stopped after step {checkpoint.name.split('-')[1]}" in flat
    assert not (out / "summary.json").exists()
