"""Preference data from files: every form that is read, and the one clear line for every way to get it wrong."""

import gzip
import json
import re

import pytest

pytest.importorskip("datasets")

import datasets
import pyarrow as pa
from pyarrow import parquet

from adpo.preferences.reading import BadRow, Preferences, check, digest, opened, read, validate

GOOD = {"prompt": "2+2=", "completions": ["4", "5", "22"], "rewards": [1.0, 0.5, 0]}
ASK = [{"role": "user", "content": "2+2?"}]
CHAT = {"prompt": ASK, "completions": [[{"role": "assistant", "content": c}] for c in "45"], "ranks": [1, 2]}
PAIR = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}


def say(text):
    return [{"role": "assistant", "content": text}]


def without(row, *names):
    return {name: value for name, value in row.items() if name not in names}


def write(path, *rows):
    """JSON lines; bytes are written as they are."""
    lines = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return str(path)


def test_lists_with_rewards_and_with_ranks():
    assert check(GOOD, "row 1") == Preferences("2+2=", ["4", "5", "22"], [1.0, 0.5, 0.0])
    ranked = check({**without(GOOD, "rewards"), "ranks": [2, 1, 2.0]}, "row 1")
    assert ranked.rewards == [-2.0, -1.0, -2.0]
    assert check(CHAT, "row 1") == Preferences(ASK, [say("4"), say("5")], [-1.0, -2.0])


def test_equal_completions_may_have_rewards_that_differ_by_rounding():
    row = {"prompt": "2+2=", "completions": ["4", "4"], "rewards": [0.1 + 0.2, 0.3]}
    assert check(row, "row 1").rewards == [0.1 + 0.2, 0.3]


def test_pairs_are_lists_of_two():
    assert check(PAIR, "row 1") == Preferences("2+2=", ["4", "5"], [1.0, 0.0])
    chat = check({"prompt": ASK, "chosen": say("4"), "rejected": say("5")}, "row 1")
    assert chat == Preferences(ASK, [say("4"), say("5")], [1.0, 0.0])


@pytest.mark.parametrize(
    ("chosen", "rejected", "common"),
    [
        (ASK + say("4"), ASK + say("5"), 1),
        (ASK + say("4") + ASK + say("1"), ASK + say("4") + ASK + say("2"), 3),
        (ASK + say("4") + ASK + say("1"), ASK + say("5"), 1),
        (ASK + say("4"), ASK + say("4") + ASK, 1),
    ],
)
def test_messages_that_both_begin_with_are_the_prompt(chosen, rejected, common):
    from trl.data_utils import extract_prompt

    row = check({"chosen": chosen, "rejected": rejected}, "row 1")
    assert row == Preferences(chosen[:common], [chosen[common:], rejected[common:]], [1.0, 0.0])
    assert extract_prompt({"chosen": chosen, "rejected": rejected})["prompt"] == row.prompt


def test_other_fields_are_ignored_and_null_is_not_there():
    assert check({**GOOD, "ranks": None, "chosen": None, "id": 7}, "row 1") == check(GOOD, "row 1")
    named = {"role": "user", "content": "hi", "name": "Ann", "tool_calls": None}
    row = check({**CHAT, "prompt": [named]}, "row 1")
    assert row.prompt == [{"role": "user", "content": "hi", "name": "Ann"}]


BAD = {
    "no prompt": (without(GOOD, "prompt"), "prompt: expected text or messages; got none"),
    "other fields": ({"question": "2+2"}, "prompt: expected text or messages; got none; the row has question"),
    "no fields": ({}, "prompt: expected text or messages; got none; the row has no fields"),
    "prompt is a number": ({**GOOD, "prompt": 7}, "prompt: expected text or messages; got int 7 (the prompt)"),
    "prompt is empty": ({**GOOD, "prompt": ""}, "prompt: expected text; got an empty string"),
    "prompt of no messages": ({**CHAT, "prompt": []}, "prompt: expected text or messages; got an empty list"),
    "half a character": ({**GOOD, "prompt": "a\ud800"}, "prompt: expected Unicode text; got half of a surrogate"),
    "no completions": (without(GOOD, "completions"), "completions: expected a list of completions (or chosen"),
    "completions are text": ({**GOOD, "completions": "4"}, "completions: expected a list of completions; got str"),
    "one completion": ({**GOOD, "completions": ["4"]}, "completions: expected at least 2 completions; got 1"),
    "empty completion": (
        {**GOOD, "completions": ["4", "", "5"]},
        "completions: expected text; got an empty string (completion 2)",
    ),
    "completion is a number": (
        {**GOOD, "completions": ["4", "5", 6]},
        "completions: expected text or messages; got int 6 (completion 3)",
    ),
    "completion is null": (
        {**GOOD, "completions": ["4", "5", None]},
        "completions: expected text or messages; got null (completion 3)",
    ),
    "text and messages": (
        {**GOOD, "completions": ["4", say("5"), "6"]},
        "completions: expected text, as the prompt is; got messages (completion 2)",
    ),
    "messages and text": (
        {**CHAT, "completions": ["4", "5"]},
        "completions: expected messages, as the prompt is; got text (completion 1)",
    ),
    "message without role": (
        {**CHAT, "prompt": [{"content": "hi"}]},
        "prompt: expected messages with role and content; got no role (message 1 of the prompt)",
    ),
    "message is text": (
        {**CHAT, "prompt": ["hi"]},
        "prompt: expected messages with role and content; got str 'hi' (message 1 of the prompt)",
    ),
    "content is no text": (
        {**CHAT, "completions": [say("4"), say(5)]},
        "completions: expected content as text; got int 5 (message 1 of completion 2)",
    ),
    "no content": (
        {**CHAT, "completions": [say("4"), say(None)]},
        "completions: expected messages with role and content; got no content (message 1 of completion 2)",
    ),
    "no rewards": (without(GOOD, "rewards"), "rewards: expected rewards or ranks, 3 numbers; got neither"),
    "rewards and ranks": ({**GOOD, "ranks": [1, 2, 3]}, "rewards: expected either rewards or ranks; got both"),
    "too few rewards": ({**GOOD, "rewards": [1, 0]}, "rewards: expected 3 numbers, one per completion; got 2"),
    "rewards are no list": ({**GOOD, "rewards": 1.0}, "rewards: expected a list of 3 numbers, one per completion"),
    "reward NaN": (
        {**GOOD, "rewards": [1, float("nan"), 0]},
        "rewards: expected finite numbers; got nan (number 2)",
    ),
    "reward infinite": ({**GOOD, "rewards": [1, 0, -float("inf")]}, "rewards: expected finite numbers; got -inf"),
    "reward beyond float64": ({**GOOD, "rewards": [10**400, 0, 0]}, "rewards: expected finite numbers; got 1000"),
    "reward is text": ({**GOOD, "rewards": ["1", 0, 0]}, "rewards: expected numbers; got str '1' (number 1)"),
    "reward is true": ({**GOOD, "rewards": [True, 0, 0]}, "rewards: expected numbers; got bool True (number 1)"),
    "reward is null": ({**GOOD, "rewards": [1, None, 0]}, "rewards: expected numbers; got null (number 2)"),
    "fractional rank": (
        {**without(GOOD, "rewards"), "ranks": [1, 1.5, 2]},
        "ranks: expected whole numbers from 1, the best; got 1.5",
    ),
    "rank 0": ({**CHAT, "ranks": [0, 1]}, "ranks: expected whole numbers from 1, the best; got 0"),
    "too many ranks": ({**CHAT, "ranks": [1, 2, 3]}, "ranks: expected 2 numbers, one per completion; got 3"),
    "no rejected": (without(PAIR, "rejected"), "rejected: expected chosen and rejected; got only the other one"),
    "no chosen": (without(PAIR, "chosen"), "chosen: expected chosen and rejected; got only the other one"),
    "a list and a pair": ({**GOOD, **PAIR}, "completions: expected either completions or chosen and rejected"),
    "a pair of the same": (
        {**PAIR, "rejected": "4"},
        "rejected: expected another completion than chosen; got the same",
    ),
    "conversations that are the same": (
        {"chosen": [*ASK, *say("4")], "rejected": [*ASK, *say("4")]},
        "rejected: expected another completion than chosen; got the same",
    ),
    "a list of the same": (
        {"prompt": "2+2=", "completions": ["4", "4"], "rewards": [1.0, 0.0]},
        "rewards: expected equal ones, as all completions are the same; got different ones",
    ),
    "empty chosen": ({**PAIR, "chosen": ""}, "chosen: expected text; got an empty string (chosen)"),
    "text pair without prompt": (
        without(PAIR, "prompt"),
        "prompt: expected a prompt beside chosen and rejected that are text; got none (give it in a field of",
    ),
    "messages, prompt is text": (
        {**PAIR, "chosen": say("4"), "rejected": say("5")},
        "chosen: expected text, as the prompt is, or messages that begin with it; got other messages",
    ),
    "text, prompt is messages": ({**PAIR, "prompt": ASK}, "chosen: expected messages, as the prompt is; got text"),
    "pair of two kinds": ({**PAIR, "rejected": say("5")}, "rejected: expected text, as chosen is; got messages"),
    "nothing in common": (
        {"chosen": say("4"), "rejected": say("5")},
        "prompt: expected a prompt, or messages that chosen and rejected both begin with; got neither",
    ),
}
BAD_LINES = {
    "a list": (b"[1, 2]", "expected an object with fields; got list [1, 2]"),
    "null": (b"null", "expected an object with fields; got NoneType None"),
    "broken": (
        b'{"prompt": "2+2=", "comp',
        "expected a JSON object on one line; at character 20: Unterminated string",
    ),
    "not UTF-8": (b'{"prompt": "\xff"}', "expected UTF-8 text; got byte 0xff at 13"),
    "endless brackets": (b"[" * 200_000, "expected a JSON object on one line; maximum recursion depth"),
    "endless number": (
        b'{"rewards": ' + b"9" * 5000 + b"}",
        "expected a JSON object on one line; Exceeds the limit",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_named_and_the_next_is_read(tmp_path, kind):
    row, words = BAD[kind]
    before, bad, after = read(write(tmp_path / "lists.jsonl", GOOD, row, CHAT))
    assert isinstance(before, Preferences)
    assert isinstance(after, Preferences)
    assert isinstance(bad, BadRow)
    assert bad.field == words.split(":")[0]
    assert str(bad).startswith(f"{tmp_path}/lists.jsonl, line 2, {words}")
    assert "\n" not in str(bad)
    assert len(str(bad)) < 400


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_line_that_is_no_row_is_named_and_the_next_is_read(tmp_path, kind):
    line, words = BAD_LINES[kind]
    before, bad, after = read(write(tmp_path / "lists.jsonl", GOOD, line, b" \r", CHAT))
    assert isinstance(before, Preferences)
    assert isinstance(after, Preferences)
    assert str(bad).startswith(f"{tmp_path}/lists.jsonl, line 2: {words}")
    assert (bad.field, "\n" in str(bad)) == ("", False)


def cut_gzip(path):
    lines = b"".join(json.dumps({**GOOD, "prompt": f"{i} {i**9}"}).encode() + b"\n" for i in range(2000))
    path.write_bytes(gzip.compress(lines)[:-4000])


def damaged_gzip(path):
    cut_gzip(path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :] = b"\xff" * (len(content) - len(content) // 2)
    path.write_bytes(content)


def cut_parquet(path):
    parquet.write_table(pa.Table.from_pylist([GOOD] * 10), path)
    path.write_bytes(path.read_bytes()[:-20])


def damaged_parquet(path):
    rows = [{**GOOD, "prompt": f"{i} {i**9}"} for i in range(3000)]
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=1000, compression="zstd")
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 2000] = b"\x07" * 2000
    path.write_bytes(content)


BAD_FILES = {
    "missing.jsonl": (lambda path: None, "is not there; expected a file of preferences"),
    "missing.parquet": (lambda path: None, "is not there; expected a file of preferences"),
    "folder.jsonl": (lambda path: path.mkdir(), "is a folder; expected a file of preferences"),
    "empty.jsonl": (lambda path: path.write_bytes(b""), "holds no rows"),
    "blank.jsonl": (lambda path: path.write_bytes(b"\n \n"), "holds no rows"),
    "empty.jsonl.gz": (lambda path: path.write_bytes(gzip.compress(b"")), "holds no rows"),
    "lists.csv": (lambda path: path.write_bytes(b"a,b"), "is of no kind that can be read; expected one of .jsonl"),
    "cut.jsonl.gz": (cut_gzip, "is cut off or damaged: nothing can be read after line "),
    "damaged.jsonl.gz": (damaged_gzip, "is cut off or damaged: nothing can be read after line "),
    "plain.jsonl.gz": (lambda path: path.write_text(json.dumps(GOOD)), "is not a gzip file"),
    "text.parquet": (lambda path: path.write_text(json.dumps(GOOD)), "is not a Parquet file, or is cut off or"),
    "empty.parquet": (lambda path: path.write_bytes(b""), "is not a Parquet file, or is cut off or damaged"),
    "cut.parquet": (cut_parquet, "is not a Parquet file, or is cut off or damaged"),
    "damaged.parquet": (damaged_parquet, "is damaged after row "),
    "columns.parquet": (
        lambda path: parquet.write_table(pa.table({"prompt": ["a"], "answer": ["b"]}), path),
        "lacks columns: expected prompt, completions and rewards or ranks; or prompt, chosen and rejected; got",
    ),
    "rows.parquet": (
        lambda path: parquet.write_table(pa.Table.from_pylist([GOOD]).slice(0, 0), path),
        "holds no rows",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_cannot_be_read_is_named_in_one_line(tmp_path, name):
    make, words = BAD_FILES[name]
    make(tmp_path / name)
    with pytest.raises(ValueError, match=re.escape(name)) as error:
        list(read(str(tmp_path / name)))
    assert str(error.value).startswith(f"{tmp_path / name} {words}")
    assert "\n" not in str(error.value)


def test_a_cut_off_gzip_file_tells_its_last_whole_line(tmp_path):
    cut_gzip(tmp_path / "cut.jsonl.gz")
    seen = []
    with pytest.raises(ValueError, match="after line") as error:
        seen.extend(read(str(tmp_path / "cut.jsonl.gz")))
    assert 0 < len(seen) < 2000
    assert str(error.value).endswith(f"after line {len(seen)}")


def test_a_data_set_that_cannot_be_loaded(tmp_path, monkeypatch):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="nothing' cannot be loaded: ") as error:
        read(str(tmp_path / "nothing"))
    assert "\n" not in str(error.value)


@pytest.fixture
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("rows", [[GOOD, {**GOOD, "prompt": "é" * 9, "completions": ["a", "b", "c"]}], [CHAT] * 3])
def test_every_kind_of_source_gives_the_same_rows(tmp_path, rows):
    lines = write(tmp_path / "lists.jsonl", *rows)
    expected = list(read(lines))
    assert all(isinstance(row, Preferences) for row in expected)
    zipped, columns, folder = tmp_path / "lists.jsonl.gz", tmp_path / "lists.parquet", tmp_path / "folder"
    zipped.write_bytes(gzip.compress((tmp_path / "lists.jsonl").read_bytes()))
    parquet.write_table(pa.Table.from_pylist(rows), columns, row_group_size=2)
    folder.mkdir()
    write(folder / "train.jsonl", *rows)
    write(tmp_path / "marked.json", b"\xef\xbb\xbf" + json.dumps(rows[0]).encode(), *rows[1:])
    for source in (zipped, columns, folder, tmp_path / "marked.json"):
        assert list(read(str(source))) == expected
    for at_hand in (rows, iter(rows), datasets.Dataset.from_list(rows)):
        assert list(read(at_hand)) == expected


@pytest.mark.usefixtures("_own_cache")
def test_places_in_parquet_in_data_sets_and_at_hand(tmp_path):
    rows = [GOOD, {**GOOD, "rewards": [1.0]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "lists.parquet")
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "train.jsonl", *rows)
    reason = "row 2, rewards: expected 3 numbers, one per completion; got 1"
    assert str(list(read(str(tmp_path / "lists.parquet")))[1]) == f"{tmp_path}/lists.parquet, {reason}"
    assert str(list(read(str(tmp_path / "folder")))[1]) == f"{tmp_path}/folder, train, {reason}"
    assert str(list(read(rows))[1]) == reason
    assert str(next(read(["text"]))) == "row 1: expected an object with fields; got str 'text'"


def test_text_in_parquet_that_is_not_utf_8(tmp_path):
    raw = pa.array([b"fine", b"\xff", b"fine"]).view(pa.string())
    table = pa.Table.from_pylist([GOOD] * 3).set_column(0, "prompt", raw)
    parquet.write_table(table, tmp_path / "lists.parquet")
    first, bad, last = read(str(tmp_path / "lists.parquet"))
    assert str(bad) == f"{tmp_path}/lists.parquet, row 2: expected UTF-8 text; got other bytes"
    assert first == last


def test_validation_counts_and_keeps_the_first_bad_rows(tmp_path):
    tied = {**GOOD, "rewards": [2, 2, 2]}
    counts = validate(write(tmp_path / "lists.jsonl", GOOD, tied, PAIR, *[{}] * 1010))
    assert (counts.rows, counts.completions, counts.tied) == (3, 8, 1)
    assert (counts.bad.count, len(counts.bad.first)) == (1010, 1000)
    assert str(counts.bad).splitlines()[-1] == "... and 10 more"


def test_the_digest_changes_with_the_data(tmp_path):
    lines = write(tmp_path / "lists.jsonl", GOOD)
    before = digest(lines)
    assert before == opened(lines).digest() == digest(lines)
    assert digest(write(tmp_path / "lists.jsonl", GOOD, GOOD)) != before
    in_memory = datasets.Dataset.from_list([GOOD])
    for one, other in (([GOOD], [CHAT]), (in_memory, in_memory.select([]))):
        assert opened(one).digest() == opened(one).digest() != opened(other).digest()
    with pytest.raises(ValueError, match="more than once"):
        opened(iter([GOOD])).digest()


def test_a_text_prompt_beside_conversations_that_begin_with_it():
    """As some well-known data sets have it."""
    asked = {"role": "user", "content": "2+2="}
    sides = {
        n: [asked, {"role": "assistant", "content": text}] for n, text in (("chosen", "4"), ("rejected", "5"))
    }
    found = check({"prompt": "2+2=", **sides}, "row 1")
    assert found == check(sides, "row 1")
    assert found.prompt == [asked]
    assert found.rewards == [1.0, 0.0]
    other = check({"prompt": "3+3=", **sides}, "row 1")
    assert isinstance(other, BadRow)
    assert other.field == "chosen"
