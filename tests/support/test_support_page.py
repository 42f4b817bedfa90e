"""`docs/support.md`: what works has a test that is there, what is refused says what the page says."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import refusals

import forked

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "support.md").read_text()
ENTRIES = ["train", "prefer", "adpo", "grpo", "lists", "verl"]
LINK = re.compile(r"\[(works|works on a GPU)\]\(\.\./(tests/\S+\.py) '([^']+)'\)")
REFUSED = re.compile(r"\[refused\]\(#([\w-]+)\)")
NO_MEANING, NOT_TRIED = "—", "[not tried](#not-tried)"
ROWS = {
    cells[0]: cells[1:]
    for cells in ([c.strip() for c in line.strip("| ").split(" | ")] for line in re.findall(r"^\| .+", PAGE, re.M))
    if cells[0] != "`adpo train`"
}
CELLS = [(feature, entry, text) for feature, row in ROWS.items() for entry, text in zip(ENTRIES, row, strict=True)]
MESSAGES = dict(re.findall(r"^### ([\w-]+)\n\n`(.+)`$", PAGE, re.M))
LINKED = sorted({match.groups()[1:] for _, _, text in CELLS if (match := LINK.fullmatch(text))})
REFUSALS = [(feature, entry, match[1]) for feature, entry, text in CELLS if (match := REFUSED.fullmatch(text))]
OUTSIDE = ("tests/on_verl/", "tests/on_deepspeed/", "tests/on_vllm/", "tests/on_liger/")
"""Tests that have packages of their own, and are not collected here."""
REQUIRED = """
all weights, LoRA, DoRA, QLoRA, DDP, FSDP2, FSDP1, DeepSpeed ZeRO 1, DeepSpeed ZeRO 2, DeepSpeed ZeRO 3, tensor
parallel, context parallel, sequence parallel, gradient checkpointing, torch.compile, bf16, fp16, bf16 weights,
Liger layers, Liger layers on a CPU, dense, sliding window, mixture of experts, routing replay, hybrid, state
space, rope scaling, vision, chat templates, tools, environments, rollout_func, async rewards, several rewards,
rewards of None, iterable data, top-p, top-k, min-p, repetition penalty, vLLM in the same process, vLLM that
sleeps, vLLM as a server, vLLM on a CPU, continuous batching, our own decoder, num_iterations,
steps_per_generation, reference synchronisation, masks of cut answers, evaluation during training, resume, resume
on other processes, push to the hub, TensorBoard, Weights & Biases, MLflow, Trackio
"""


@pytest.mark.parametrize("name", [name.strip() for name in REQUIRED.replace("\n", " ").split(",")])
def test_the_page_has_a_row_for(name):
    assert any(feature.replace("`", "").startswith(name) for feature in ROWS)


@pytest.mark.parametrize("feature", ROWS)
def test_every_cell_says_one_of_four_things(feature):
    assert len(ROWS[feature]) == len(ENTRIES)
    for text in ROWS[feature]:
        assert LINK.fullmatch(text) or REFUSED.fullmatch(text) or text in (NO_MEANING, NOT_TRIED), text


def test_what_was_not_tried_is_listed():
    listed = PAGE.split("## Not tried")[1]
    untried = {entry for _, entry, text in CELLS if text == NOT_TRIED}
    names = {"train": "adpo train", "prefer": "adpo prefer", "adpo": "ADPOTrainer", "grpo": "GRPO trainer"}
    names["lists"] = "ListwiseTrainer"
    for entry in untried:
        assert names.get(entry, entry) in listed


@pytest.fixture(scope="module")
def collected():
    """Every linked test, as pytest names it."""
    files = sorted({file for file, _ in LINKED if not file.startswith(OUTSIDE)})
    options = ["--collect-only", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml"]
    done = forked.run("-m", "pytest", *options, *(ROOT / file for file in files))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return set(done.stdout.splitlines())


def test_what_works_has_a_test(collected):
    """The file, the function, and the parameters where they are given."""
    for file, name in LINKED:
        function, _, parameters = name.removesuffix("]").partition("[")
        assert f"def {function}(" in (ROOT / file).read_text(), (file, name)
        if parameters and not file.startswith(OUTSIDE):
            assert f"{file}::{name}" in collected, (file, name)
        if parameters and file.startswith(OUTSIDE):
            known = strings((ROOT / file).parent)
            assert parameters in known or known.issuperset(parameters.split("-")), (file, name)


def strings(folder):
    """Texts and numbers in the files of a folder: what parameters of its tests are made of."""
    trees = [ast.parse(path.read_text()) for path in folder.glob("*.py")]
    return {str(node.value) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def test_what_a_gpu_shows_says_so():
    for _, _, text in CELLS:
        match = LINK.fullmatch(text)
        if match:
            needs = (
                "pytest.mark.gpu" in (ROOT / match[2]).read_text().split(f"def {match[3].partition('[')[0]}(")[0]
            )
            on_one = match[2].endswith("_cuda.py") or ("test_on_a_gpu" in match[3] and needs)
            assert on_one == (match[1] == "works on a GPU"), text


def test_no_message_is_left_over():
    assert {label for _, _, label in REFUSALS} == set(MESSAGES)
    of_registry = {(label, entry) for label, entries in refusals.REFUSALS.items() for entry in entries}
    assert of_registry <= {(label, entry) for _, entry, label in REFUSALS}


def pattern(label):
    """The message, where … stands for what differs."""
    return ".+".join(re.escape(part) for part in MESSAGES[label].removesuffix("…").split("…")) + (
        ".*" if MESSAGES[label].endswith("…") else ""
    )


BY_FEATURE = ("no-such-setting", "parallelism", "parallelism-typed")
"""Messages of several rows, each with a setting of its own."""
ONCE = sorted({(label, entry, feature * (label in BY_FEATURE)) for feature, entry, label in REFUSALS})


@pytest.mark.parametrize(("label", "entry", "feature"), ONCE, ids=[" ".join(case).strip() for case in ONCE])
def test_what_is_refused_says_what_the_page_says(label, entry, feature, typed, given, tmp_path, monkeypatch):
    if entry == "verl":
        assert f'"{label}": ' in (ROOT / refusals.ON_VERL).read_text()
        return
    provoke = refusals.provoked(label, entry, feature)
    assert provoke is not None, "nothing provokes it"
    with pytest.raises(ValueError, match=r".") as refusal:
        provoke(SimpleNamespace(folder=tmp_path, given=given, typed=typed, monkeypatch=monkeypatch))
    assert re.fullmatch(pattern(label), str(refusal.value)), str(refusal.value)
