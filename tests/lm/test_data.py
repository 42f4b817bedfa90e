"""Loaders of GSM8K and MATH-style files: what they read, and what they say of a bad line."""

import json

import pytest

from adpo.tasks.generated_tasks import Problem
from adpo.tasks.problems import final_answer, load, refuse_overlap, without_likes_of

GSM = {"question": "How many?", "answer": "It is 9 * 2 = <<9*2=18>>18.\n#### 1,018"}
MATH = {"problem": "Half of one?", "solution": r"So $\boxed{\frac{1}{2}}$.", "level": "Level 3", "type": "Algebra"}


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_both_styles_are_read(tmp_path):
    (gsm,) = load(write(tmp_path / "gsm.jsonl", GSM))
    assert (gsm.answer, gsm.level, gsm.question) == ("1018", 0, "How many?")
    (math,) = load(write(tmp_path / "math.jsonl", MATH, {**MATH, "level": "Level 5"}), levels=[3, 4])
    assert (math.answer, math.level) == (r"\frac{1}{2}", 3)
    assert len(load(write(tmp_path / "many.jsonl", *[GSM] * 5), limit=2)) == 2


SVAMP = {"Body": "Ann had 5 apples", "Question": "How many?", "Answer": 5.0, "Type": "Addition", "ID": "chal-1"}
MAWPS = {"input": " Tom has 0.5 of a cup. How much ? ", "target": 0.5, "type": "singleop"}
ARC = {
    "question": "What is hot?",
    "choices": {"text": ["ice", "fire", "air"], "label": ["1", "2", "3"]},
    "answerKey": "2",
}
MMLU = {"question": "What is cold?", "choices": ["ice", "fire", "air", "sea"], "answer": 0, "subject": "physics"}


@pytest.mark.parametrize(
    ("row", "task", "question", "answer"),
    [
        (SVAMP, "math", "Ann had 5 apples. How many?", "5"),
        (MAWPS, "math", "Tom has 0.5 of a cup. How much ?", "0.5"),
        (ARC, "letter", "What is hot?\nA. ice\nB. fire\nC. air", "B"),
        (MMLU, "letter", "What is cold?\nA. ice\nB. fire\nC. air\nD. sea", "A"),
    ],
)
def test_rows_are_known_by_their_fields(tmp_path, row, task, question, answer):
    (found,) = load(write(tmp_path / "rows.jsonl", row))
    assert (found.task, found.question, found.answer) == (task, question, answer)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({**SVAMP, "Answer": "five"}, "the answer must be a number"),
        ({**MAWPS, "input": ""}, "input must be text"),
        ({**ARC, "answerKey": "Z"}, "is none of the labels"),
        ({**ARC, "choices": ["a", "b"]}, "choices must hold text and label"),
        ({**MMLU, "answer": 4}, "must be the number of a choice"),
        ({**MMLU, "choices": ["one"]}, "expected 2 to 10 choices"),
        ({"text": "?"}, "expected question and answer, or problem and solution, or input and target, or"),
    ],
)
def test_bad_rows_are_one_line(tmp_path, row, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        load(write(tmp_path / "rows.jsonl", row))
    assert "line 1" in str(caught.value)


def test_training_problems_like_held_out_ones_are_left_out(tmp_path):
    variants = ("Ann had 7 apples. How many?", "Then Ann had 9 apples. How many?")
    train = load(write(tmp_path / "train.jsonl", MAWPS, *({**MAWPS, "input": text} for text in variants)))
    test = load(write(tmp_path / "test.jsonl", SVAMP))
    assert [problem.answer for problem in without_likes_of(train, test)] == ["0.5"]
    assert [problem.question[:3] for problem in without_likes_of(train, test)] == ["Tom"]


def test_formulas_are_alike_if_they_are_the_same():
    """Where there are no three words, numbers tell problems apart."""
    asked = [
        Problem("number", 0, "", question, "0")
        for question in ("Compute $2+3$.", "Compute  $2+3$.", "3*4=", "三加四")
    ]
    test = [Problem("number", 0, "", question, "0") for question in ("compute $2+3$.", "1+1=")]
    assert [problem.question for problem in without_likes_of(asked, test)] == ["3*4=", "三加四"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{1", None),
        (r"\boxed{}", None),
        ("####", None),
        ("", None),
    ],
)
def test_final_answers(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([GSM, "{"], "line 2: not JSON"),
        ([GSM, "[1]"], "line 2: expected an object"),
        ([{"question": "q"}], "line 1: expected question and answer"),
        ([{"question": "q", "answer": "no end"}], "no final answer"),
        ([{"question": 3, "answer": "#### 1"}], "must be text"),
        ([{**MATH, "level": "hard"}], "level must be"),
        ([], "holds no problems"),
        (['{"question": ' + "[" * 50000], "line 1: not JSON that can be read"),
        (['{"question": "q", "answer": ' + "9" * 5000 + "}"], "line 1: not JSON that can be read"),
    ],
)
def test_a_bad_line_is_named(tmp_path, rows, words):
    with pytest.raises(ValueError, match=words) as error:
        load(write(tmp_path / "bad.jsonl", *rows))
    assert "\n" not in str(error.value)
    assert "bad.jsonl" in str(error.value)


def test_a_file_that_begins_with_the_mark_of_windows(tmp_path):
    file = write(tmp_path / "bom.jsonl", GSM)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert len(load(file)) == 1


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    file = write(tmp_path / "mine.jsonl", GSM)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(type(file), "open", refuse)
    with pytest.raises(ValueError, match=r"mine\.jsonl cannot be read: Permission denied"):
        load(file)


def test_a_missing_file_and_a_level_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="is not a file"):
        load(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"no problems of levels \[1\]"):
        load(write(tmp_path / "math.jsonl", MATH), levels=[1])


def test_questions_on_both_sides_are_refused(tmp_path):
    rows = load(write(tmp_path / "gsm.jsonl", GSM))
    refuse_overlap(rows, [])
    with pytest.raises(ValueError, match="1 questions are in both"):
        refuse_overlap(rows, rows)


def test_answers_as_they_are_written_in_the_wild():
    assert final_answer("#### 1,2,3") == "1,2,3"
    assert final_answer("#### 1,234,567.5") == "1234567.5"
    assert final_answer(r"so $\boxed 5$.") == "5"
    assert final_answer(r"\boxed{a} and \boxed{b}") == "b"


def test_problems_of_unknown_level_are_of_none(tmp_path):
    file = tmp_path / "math.jsonl"
    rows = [
        {"problem": f"p{i}", "solution": r"\boxed{1}", "level": level}
        for i, level in enumerate(("Level ?", "Level 3"))
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert [problem.level for problem in load(file)] == [0, 3]
    assert [problem.question for problem in load(file, levels=[3])] == ["p1"]
