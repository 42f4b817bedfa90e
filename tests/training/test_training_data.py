"""What a run trains on: three sets without a problem in common, from files, folders and generators."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("datasets")

from adpo.models.embedded import make_tokenizer
from adpo.runs.settings.train_settings import RunSettings
from adpo.runs.splits import prepare, that_fit

CHAT = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def questions(found):
    return [
        {row.get("question", str(row["prompt"])) for row in part} for part in (found.train, found.dev, found.test)
    ]


def assert_apart(found):
    train, dev, test = questions(found)
    assert train
    assert test
    assert not train & dev
    assert not train & test
    assert not dev & test


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("task", ["arithmetic", "sorting"])
def test_generated_problems(task, level):
    found = prepare(RunSettings(task=task, level=level), make_tokenizer(), seed=0)
    assert_apart(found)
    assert found.test == prepare(RunSettings(task=task, level=level), make_tokenizer(), seed=0).test
    assert len(found.dev) <= 200


def math_rows(numbers, level=3):
    return [
        {"problem": f"what is {n}+1?", "solution": rf"\boxed{{{n + 1}}}", "level": f"Level {level}"}
        for n in numbers
    ]


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_a_file_is_split_by_the_text_of_its_problems(tmp_path):
    file = write(tmp_path / "all.jsonl", math_rows(range(300)) + math_rows(range(300, 400), level=5))
    found = prepare(RunSettings(model="x", data=file, levels=[3], dev_problems=20), make_tokenizer(), 0)
    assert_apart(found)
    assert len(found.train) + len(found.dev) + len(found.test) == 300
    assert 15 <= len(found.test) <= 50
    assert found.train[0]["prompt"].endswith("after ####.\n")
    other = prepare(RunSettings(model="x", data=file, levels=[3], dev_problems=20), make_tokenizer(), 1)
    assert questions(other)[2] == questions(found)[2]  # whatever the seed


def test_a_question_in_both_files_is_refused(tmp_path):
    train, test = write(tmp_path / "a.jsonl", math_rows(range(9))), write(tmp_path / "b.jsonl", math_rows([8, 20]))
    with pytest.raises(ValueError, match="1 questions are in both training and test data"):
        prepare(RunSettings(model="x", data=train, eval_data=test), make_tokenizer(), 0)


def test_a_folder_by_its_name_for_datasets(tmp_path):
    write(tmp_path / "train.jsonl", math_rows(range(50)))
    write(tmp_path / "test.jsonl", math_rows(range(50, 60)))
    found = prepare(RunSettings(model="x", data=str(tmp_path), levels=[3], dev_problems=5), make_tokenizer(), 0)
    assert_apart(found)
    assert len(found.test) == 10
    with pytest.raises(ValueError, match="data set '/no/where' cannot be loaded"):
        prepare(RunSettings(model="x", data="/no/where"), make_tokenizer(), 0)


def test_a_model_that_chats_gets_messages(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    found = prepare(RunSettings(model="x"), tokenizer, 0)
    (message,) = found.train[0]["prompt"]
    assert message["role"] == "user"
    assert message["content"].startswith("What is ")
    assert message["content"].endswith("after ####.")


def test_rows_of_ones_own(tmp_path):
    file = write(tmp_path / "own.jsonl", [{"prompt": f"say {n}", "wanted": n} for n in range(100)])
    found = prepare(RunSettings(model="x", data=file, reward="r.py:f", dev_problems=9), make_tokenizer(), 0)
    assert_apart(found)
    assert found.train[0].keys() == {"prompt", "wanted"}
    bad = write(tmp_path / "bad.jsonl", [{"prompt": "fine"}, {"promt": "typo"}])
    with pytest.raises(ValueError, match="line 2: expected a prompt, text or messages; got None"):
        prepare(RunSettings(model="x", data=bad, reward="r.py:f"), make_tokenizer(), 0)
    for row, words in (
        ({"prompt": [{"role": "user", "content": "b"}], "n": 2}, "line 2: expected prompt to be text, as before"),
        ({"prompt": "b", "n": "two"}, "line 2: expected n to be a number, as before; got 'two'"),
    ):
        mixed = write(tmp_path / "mixed.jsonl", [{"prompt": "a", "n": 1.5}, row])
        with pytest.raises(ValueError, match=words):
            prepare(RunSettings(model="x", data=mixed, reward="r.py:f"), make_tokenizer(), 0)
    rows = [{"prompt": f"say {n}", ("more" if n % 2 else "other"): n} for n in range(100)]
    some = prepare(
        RunSettings(model="x", data=write(tmp_path / "some.jsonl", rows), reward="r.py:f"), make_tokenizer(), 0
    )
    assert all({row["more"], row["other"]} == {None, int(row["prompt"][4:])} for row in (*some.train, *some.test))
    with pytest.raises(
        ValueError, match="line 1: a file of prompts needs a reward function of your own: --reward"
    ):
        prepare(RunSettings(model="x", data=file), make_tokenizer(), 0)
    none = write(tmp_path / "none.jsonl", [])
    for given in ({"data": none}, {"data": file, "eval_data": none}):
        with pytest.raises(ValueError, match=r"none\.jsonl holds no rows"):
            prepare(RunSettings(model="x", reward="r.py:f", **given), make_tokenizer(), 0)
    few = write(tmp_path / "few.jsonl", [{"prompt": "one"}])
    with pytest.raises(ValueError, match="too small to hold rows out of it"):
        prepare(RunSettings(model="x", data=few, reward="r.py:f"), make_tokenizer(), 0)


def test_prompts_without_room_are_left_out_with_a_line(caplog):
    tokenizer = make_tokenizer()
    rows = [{"prompt": "1" * n} for n in (5, 50, 90)]
    assert that_fit(rows, tokenizer, 100, 20, {}) == rows[:2]
    assert "1 of 3 prompts leave no room for 20 tokens in a context of 100" in caplog.text
    assert that_fit(rows, tokenizer, None, 20, {}) == rows
    with pytest.raises(ValueError, match="no prompt leaves room"):
        that_fit(rows, tokenizer, 10, 20, {})
    tokenizer.chat_template = CHAT
    chat = [{"prompt": [{"role": "user", "content": "1" * n}]} for n in (5, 90)]
    assert that_fit(chat, tokenizer, 50, 10, {}) == chat[:1]


@pytest.mark.parametrize("kind", ["problems", "prompts"])
@pytest.mark.parametrize(
    ("rows", "given", "expected"),
    [
        (300, {}, 0.1),  # a tenth of what is trained on
        (300, {"dev_problems": 0}, 0),
        (300, {"dev_problems": 40}, 40),
        (300, {"eval_every": 0}, 0),
        (4000, {}, 200),
        (300, {"train_problems": 100}, "what is left over"),
    ],
)
def test_validation_takes_a_small_share(tmp_path, kind, rows, given, expected):
    made = math_rows(range(rows)) if kind == "problems" else [{"prompt": f"say {n}"} for n in range(rows)]
    reward = {} if kind == "problems" else {"reward": "r.py:f"}
    file = write(tmp_path / "all.jsonl", made)
    found = prepare(RunSettings(model="x", data=file, **given, **reward), make_tokenizer(), 0)
    assert_apart(found)
    of_training = rows - len(found.test)
    assert abs(len(found.test) - rows // 10) < rows // 20 or rows > 1000  # 500 at most are used
    if expected == "what is left over":
        assert (len(found.train), len(found.dev)) == (100, min(200, of_training - 100))
    elif isinstance(expected, float):
        assert len(found.dev) == of_training // 10
        assert len(found.train) == of_training - len(found.dev)
    else:
        assert len(found.dev) == expected


@pytest.mark.parametrize("kind", ["problems", "prompts"])
def test_with_test_data_of_its_own_nothing_is_taken_away(tmp_path, kind):
    made = (
        (lambda numbers: math_rows(numbers))
        if kind == "problems"
        else (lambda numbers: [{"prompt": f"say {n}"} for n in numbers])
    )
    reward = {} if kind == "problems" else {"reward": "r.py:f"}
    train, test = write(tmp_path / "a.jsonl", made(range(50))), write(tmp_path / "b.jsonl", made(range(50, 60)))
    run = RunSettings(model="x", data=train, eval_data=test, **reward)
    found = prepare(run, make_tokenizer(), 0)
    assert [len(part) for part in (found.train, found.dev, found.test)] == [50, 0, 10]
    found = prepare(replace(run, dev_problems=5), make_tokenizer(), 0)
    assert [len(part) for part in (found.train, found.dev, found.test)] == [45, 5, 10]
    with pytest.raises(ValueError, match="dev_problems = 50 leaves nothing of 50 problems to train on"):
        prepare(replace(run, dev_problems=50), make_tokenizer(), 0)
