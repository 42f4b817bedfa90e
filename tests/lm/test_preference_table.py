"""Tokenized lists on disk: the ids TRL makes, files that are used again or made anew, memory that stays small."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import forked

pytest.importorskip("datasets")
pytest.importorskip("transformers")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from adpo.preferences import table as preference_table
from adpo.preferences.reading import validate
from adpo.preferences.table import BadRowsError, PreferenceTable, build

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'villain' %}{{ raise_exception('no villains') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% if not (loop.last and m.role == 'mute') %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ start or '' }}{% endif %}"
)
TEXTS = [
    "the theory of the thing",
    "anything other than that",
    "athens and thebes",
    "then there is this: 2+2=4",
    "é€",
]


def bpe(vocabulary=300, template=TEMPLATE, **options):
    """Bytes and merges, so that tokens may reach across the border of prompt and completion."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(TEXTS * 10, trainer)
    options = {"eos_token": "<eos>", "pad_token": "<pad>", "chat_template": template, **options}
    return PreTrainedTokenizerFast(tokenizer_object=model, **options)


PAIRS = [
    {"prompt": "is it the", "chosen": "ory", "rejected": "re"},  # "theory", "there": tokens across the border
    {"prompt": "is it", "chosen": " this", "rejected": " the thing<eos>"},
    {"prompt": "a", "chosen": "thens", "rejected": "ny"},
    {"prompt": "é€ ", "chosen": "é", "rejected": "2+2=4" * 20},
    {"prompt": "the thing " * 50, "chosen": "é", "rejected": "this"},
]


def talk(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


CHATS = [
    {"prompt": talk("the thing?"), "chosen": talk("", "theory")[1:], "rejected": talk("", "there is this")[1:]},
    {"prompt": talk("a", "b", "c"), "chosen": talk("", "é€" * 30)[1:], "rejected": talk("", "")[1:]},
]
IMPLICIT = [{"chosen": talk("a", "b", "c", "the"), "rejected": talk("a", "b", "c", "thing")}]
LISTS = [
    {"prompt": f"is it the{i}", "completions": [TEXTS[(i + j) % 5] for j in range(2 + i % 3)], "rewards": rewards}
    for i, rewards in enumerate([[1, 0], [0, 0, 0], [3, 2, 1, 0], [0.5, 0.25], [1, 2, 3]])
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def from_trl(rows, tokenizer, **settings):
    """What TRL's own trainer prepares."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    trainer = object.__new__(DPOTrainer)
    trainer._tokenizer = tokenizer
    config = DPOConfig(output_dir="unused", bf16=False, use_cpu=True, report_to="none", **settings)
    prepared = trainer._prepare_dataset(Dataset.from_list(rows), tokenizer, config, "train")
    return [(row["prompt_ids"], [row["chosen_ids"], row["rejected_ids"]]) for row in prepared]


@pytest.mark.parametrize("rows", [PAIRS, CHATS, IMPLICIT], ids=["text", "messages", "implicit prompt"])
@pytest.mark.parametrize("max_length", [None, 60])
def test_pairs_get_the_ids_that_trl_gives_them(tmp_path, rows, max_length):
    tokenizer = bpe()
    table = build(write(tmp_path / "pairs.jsonl", rows), tokenizer, tmp_path, max_length=max_length)
    expected = from_trl(rows, tokenizer, max_length=max_length)
    cut = [(p, [c[: max_length and max_length - len(p)] for c in both]) for p, both in expected]
    assert [(row["prompt_ids"], row["completion_ids"]) for row in table] == cut
    assert table.too_long == len(rows) - len(expected)
    assert table.truncated == sum(
        max_length is not None and len(p + c) > max_length for p, b in expected for c in b
    )


def test_tokens_across_the_border_belong_to_every_completion(tmp_path):
    tokenizer = bpe()
    row = {"prompt": "is it the", "completions": ["ory", " thing", "re"], "ranks": [1, 2, 3]}
    (found,) = build([row], tokenizer, tmp_path)
    alone = tokenizer("is it the")["input_ids"]
    assert len(found["prompt_ids"]) < len(alone)
    whole = [found["prompt_ids"] + ids for ids in found["completion_ids"]]
    assert [tokenizer.decode(ids) for ids in whole] == [
        "is it theory<eos>",
        "is it the thing<eos>",
        "is it there<eos>",
    ]
    assert (found["rewards"], found["index"]) == ([-1.0, -2.0, -3.0], 0)


def test_arguments_of_the_chat_template(tmp_path):
    rows = [{**CHATS[0], "chosen": talk("", "so: the")[1:], "rejected": talk("", "so: a")[1:]}]
    plain, begun = build(rows, bpe(), tmp_path), build(rows, bpe(), tmp_path, chat={"start": "so: "})
    assert plain.fingerprint != begun.fingerprint
    assert len(begun[0]["prompt_ids"]) > len(plain[0]["prompt_ids"])


def test_rows_of_text_and_of_messages_keep_their_order(tmp_path):
    rows = [PAIRS[0], CHATS[0], PAIRS[1], CHATS[1]]
    apart = [build([row], bpe(), tmp_path)[0]["completion_ids"] for row in rows]
    assert [row["completion_ids"] for row in build(rows, bpe(), tmp_path)] == apart


def test_a_table_is_a_dataset_of_torch(tmp_path):
    table = build(write(tmp_path / "lists.jsonl", LISTS), bpe(), tmp_path)
    assert (len(table), table.sizes, table.completions, table.tied) == (5, [2, 3, 4, 2, 3], 14, 1)
    assert (table.skipped, table.truncated, table.too_long) == (0, 0, 0)
    assert [row["index"] for row in table] == [0, 1, 2, 3, 4]
    assert table[-1] == table[4]
    with pytest.raises(IndexError):
        table[5]
    loader = torch.utils.data.DataLoader(table, batch_size=2, collate_fn=list)
    assert [row for batch in loader for row in batch] == list(table)


def test_a_selection_is_a_table_with_a_fingerprint_of_its_own(tmp_path):
    table = build(LISTS, bpe(), tmp_path)
    part = table.select(torch.tensor([3, 1]))
    assert isinstance(part, PreferenceTable)
    assert (len(part), part.sizes, part.completions, part.tied) == (2, [2, 3], 5, 1)
    assert part[0] == {**table[3], "index": 0}
    assert part.select([1])[0] == {**table[1], "index": 0}
    prints = [t.fingerprint for t in (table, part, table.select([1, 3]), part.select([0, 1]))]
    assert len(set(prints)) == 4
    assert part.fingerprint == table.select([3, 1]).fingerprint
    with pytest.raises(IndexError):
        table.select([5])


BAD = [LISTS[0], {"prompt": "x"}, LISTS[1], {"prompt": "", "chosen": "a", "rejected": "b"}]


def test_all_bad_rows_are_reported_and_nothing_is_left(tmp_path):
    source, folder = write(tmp_path / "bad.jsonl", [*BAD, {"prompt": [{"role": "villain"}]}]), tmp_path / "cache"
    with pytest.raises(BadRowsError) as error:
        build(source, bpe(), folder)
    first, second, third, advice = str(error.value).splitlines()
    assert first.startswith(f"{source}, line 2, completions: ")
    assert second.startswith(f"{source}, line 4, prompt: ")
    assert third.startswith(f"{source}, line 5, prompt: ")
    assert advice == "3 rows are bad: correct them, or leave them out with --skip-bad"
    assert list(folder.iterdir()) == []


def test_of_many_bad_rows_the_first_are_shown(tmp_path):
    with pytest.raises(BadRowsError) as error:
        build([{}] * 3000, bpe(), tmp_path)
    lines = str(error.value).splitlines()
    assert (len(lines), lines[999][:10], lines[1000]) == (1002, "row 1000, ", "... and 2000 more")


def test_bad_rows_can_be_skipped(tmp_path):
    table = build(write(tmp_path / "bad.jsonl", BAD), bpe(), tmp_path, skip_bad=True)
    assert (len(table), table.skipped) == (2, 2)
    again = build(tmp_path / "bad.jsonl", bpe(), tmp_path, skip_bad=True)
    assert (again.skipped, again.fingerprint) == (2, table.fingerprint)
    with pytest.raises(ValueError, match=r"all rows of .*bad.jsonl are bad \(1\), such as: .*line 1, completions"):
        build(write(tmp_path / "bad.jsonl", BAD[1:2]), bpe(), tmp_path, skip_bad=True)


def test_rows_that_the_tokenizer_makes_nothing_of_are_bad(tmp_path):
    villain = {**CHATS[0], "rejected": [{"role": "villain", "content": "ha"}]}
    silent = {
        "prompt": talk("a"),
        "completions": [[{"role": "mute", "content": "x"}], talk("a")],
        "rewards": [0, 1],
    }
    silent_template = TEMPLATE.replace(
        "<{{ m.role }}>{{ m.content }}", "{% if m.role != 'mute' %}{{ m.content }}{% endif %}"
    )
    with pytest.raises(
        BadRowsError, match="row 2, completions: the chat template refuses completion 2: no villains"
    ):
        build([CHATS[0], villain, CHATS[1]], bpe(), tmp_path)
    with pytest.raises(BadRowsError, match="row 1, prompt: the chat template refuses it: no villains"):
        build([{**CHATS[0], "prompt": villain["rejected"]}], bpe(), tmp_path)
    with pytest.raises(BadRowsError, match="row 1, completions: expected tokens; got none from completion 1"):
        build([silent], bpe(template=silent_template), tmp_path)


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        (CHATS, {"template": None}, "no chat template"),
        (PAIRS, {"eos_token": None}, "no eos_token"),
    ],
)
def test_a_tokenizer_that_lacks_something(tmp_path, rows, options, words):
    with pytest.raises(ValueError, match=words):
        build(rows, bpe(**options), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_prompts_that_leave_no_room(tmp_path):
    long = {**PAIRS[0], "prompt": "the thing " * 50}
    table = build([long, PAIRS[1]], bpe(), tmp_path, max_length=20)
    assert (len(table), table.too_long) == (1, 1)
    with pytest.raises(ValueError, match="no prompt of the data leaves room"):
        build([long], bpe(), tmp_path, max_length=20)
    with pytest.raises(ValueError, match="max_length must be at least 2"):
        build([long], bpe(), tmp_path, max_length=1)


class Counted:
    """A tokenizer that counts what it is asked."""

    def __init__(self, tokenizer):
        self.tokenizer, self.calls = tokenizer, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.tokenizer(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


class OneAtATime(Counted):
    """A tokenizer that is not a fast one, and so is asked for the ids of one conversation at a time."""

    is_fast = False


def test_a_tokenizer_that_is_not_fast_gives_the_same_ids(tmp_path):
    for rows in (PAIRS, CHATS, LISTS):
        slow = build(rows, OneAtATime(bpe()), tmp_path)
        assert list(slow) == list(build(rows, bpe(), tmp_path))


def test_two_builds_at_once_do_not_disturb_each_other(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: list(build(LISTS * 50, bpe(), tmp_path)), range(2))
    assert one == other
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".arrow", ".json"]
    assert calls(LISTS * 50, tmp_path) == 0


def calls(source, folder, tokenizer=None, **options):
    counted = Counted(tokenizer or bpe())
    build(source, counted, folder, **options)
    return counted.calls


def test_a_table_is_made_once_for_the_same_data_tokenizer_and_settings(tmp_path):
    source = write(tmp_path / "lists.jsonl", LISTS)
    assert calls(source, tmp_path) == 1
    padded = bpe()
    padded(["a", "the thing"], padding=True, truncation=True, max_length=5)  # leaves its mark on a fast tokenizer
    assert calls(source, tmp_path) == calls(source, tmp_path, padded) == calls(source, tmp_path, bpe()) == 0
    assert calls(write(tmp_path / "copy.jsonl", LISTS), tmp_path) == 0
    assert calls(source, tmp_path, bpe(vocabulary=290)) == 1
    assert calls(source, tmp_path, bpe(template=TEMPLATE + " ")) == 1
    assert calls(source, tmp_path, bpe(eos_token="<pad>")) == 1
    assert calls(source, tmp_path, max_length=30) == 1
    assert calls(source, tmp_path, skip_bad=True) == 1
    assert calls(source, tmp_path, chat={"start": "x"}) == 1
    assert calls(write(tmp_path / "lists.jsonl", LISTS[:4]), tmp_path) == 1
    assert len(list(tmp_path.glob("*.arrow"))) == 8


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("suffix", ["arrow", "json"])
@pytest.mark.parametrize(
    "damage", [cut, flip, Path.unlink, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"[]")]
)
def test_a_damaged_table_is_made_anew(tmp_path, suffix, damage):
    source = write(tmp_path / "lists.jsonl", LISTS * 20)
    whole = build(source, bpe(), tmp_path / "cache")[7]
    (path,) = (tmp_path / "cache").glob(f"*.{suffix}")
    damage(path)
    assert calls(source, tmp_path / "cache") == 1
    assert calls(source, tmp_path / "cache") == 0
    assert build(source, bpe(), tmp_path / "cache")[7] == whole
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_an_interrupted_build_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("adpo.preferences.tokens.ROWS", 2)
    heard = []

    def interrupt(rows):
        heard.append(rows)
        if rows == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(LISTS, bpe(), tmp_path, on_progress=interrupt)
    assert heard == [2, 4]
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
sys.path[:0] = [{tests!r}]
from test_preference_table import LISTS, bpe, build
from pathlib import Path
build(LISTS, bpe(), Path({folder!r}), on_progress=lambda rows: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_what_a_killed_build_leaves_is_not_taken_for_a_table(tmp_path):
    program = KILLED.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    assert forked.run("-c", program).returncode == -signal.SIGKILL
    assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
    assert calls(LISTS, tmp_path) == 1
    assert len(build(LISTS, bpe(), tmp_path)) == 5


def test_progress_is_heard(tmp_path, monkeypatch):
    monkeypatch.setattr("adpo.preferences.tokens.CHARACTERS", 1)
    heard = []
    build(LISTS, bpe(), tmp_path, on_progress=heard.append)
    assert heard == [1, 2, 3, 4, 5]


def test_validation_needs_no_tokenizer():
    counts = preference_table.validate([*LISTS, {}])
    assert preference_table.validate is validate
    assert (counts.rows, counts.completions, counts.tied, counts.bad.count) == (5, 14, 1, 1)


PEAK = """
import resource, sys
sys.path[:0] = [{tests!r}]
from pathlib import Path
from test_preference_table import bpe, build, validate, write_many
def peak(rows):
    source = write_many(Path({folder!r}) / f"{{rows}}.jsonl", rows)
    assert validate(source).rows == len(build(source, bpe(), Path({folder!r}))) == rows
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
few, many = peak(2_000), peak({rows})
print(many - few)
"""


def write_many(path, rows):
    with path.open("w") as file:
        for i in range(rows):
            completions = [f"{i} {text}" for text in TEXTS[:3]]
            file.write(json.dumps({"prompt": f"{i} is", "completions": completions, "rewards": [i, 1, 0]}) + "\n")
    return str(path)


def growth(folder, rows):
    """Megabytes that many rows take beyond what a few take, at the peak of a process of its own."""
    program = PEAK.format(tests=str(Path(__file__).parent), folder=str(folder), rows=rows)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, env=env)
    return float(done.stdout)


def test_memory_does_not_grow_with_the_number_of_rows(tmp_path):
    assert growth(tmp_path, 20_000) < 25


@pytest.mark.slow
def test_memory_does_not_grow_with_a_hundred_thousand_rows(tmp_path):
    assert growth(tmp_path, 100_000) < 25
