"""Jobs that can be stopped at any moment: cells on disk, resume, refusals."""

import contextlib
import json
import os
import signal
import time
from concurrent.futures import wait
from functools import partial
from pathlib import Path

import pytest

import forked
from adpo.experiments.cells import Cell, Job, read_json


def cells(log, stop_at=None):
    def work(name):
        def compute(_):
            if name == stop_at:
                raise KeyboardInterrupt
            log.append(name)
            return {"name": name, "value": len(name) / 3}

        return compute

    return [Cell(name, work(name)) for name in ("one", "two", "three")]


def run(folder, log, resume=False, stop_at=None, description=None):
    job = Job(folder, description or {"a": 1}, resume)
    return job.run(cells(log, stop_at), lambda *_: None)


def test_a_stopped_job_goes_on_where_it_stopped(tmp_path):
    log = []
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "job", log, stop_at="two")
    assert log == ["one"]
    resumed = run(tmp_path / "job", log, resume=True)
    assert log == ["one", "two", "three"]
    assert resumed == run(tmp_path / "whole", [])
    assert read_json(tmp_path / "job" / "timing.json").keys() == {"one", "two", "three"}


def test_a_half_written_cell_is_computed_again(tmp_path):
    log = []
    run(tmp_path, log)
    (tmp_path / "cells" / "two.json").rename(tmp_path / "cells" / "two.json.part")
    run(tmp_path, log, resume=True)
    assert log == ["one", "two", "three", "two"]


@pytest.mark.parametrize("case", ["file", "foreign", "unasked", "other settings", "damaged"])
def test_what_cannot_be_continued_is_refused_and_left_alone(tmp_path, case):
    folder = tmp_path / "out"
    resume, description = False, {"a": 1}
    if case == "file":
        folder.write_text("mine")
        words = "is a file"
    elif case == "foreign":
        folder.mkdir()
        (folder / "thesis.tex").write_text("mine")
        words = "is not empty"
    else:
        run(folder, [])
        words = "already holds results: add --resume"
        if case == "other settings":
            resume, description, words = True, {"a": 2}, "a job with other settings"
        if case == "damaged":
            (folder / "cells" / "two.json").write_text('{"resu')
            resume, words = True, "two.json cannot be read"
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match=words) as error:
        run(folder, [], resume, description=description)
    assert "\n" not in str(error.value)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_results_are_plain_json(tmp_path):
    run(tmp_path, [])
    found = json.loads((tmp_path / "cells" / "one.json").read_text())
    assert found == {"provenance": {}, "result": {"name": "one", "value": 1.0}}


def square(number, pause, report):
    report(0.5)
    time.sleep(pause)
    if number == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    return number**2


def fail_after(path, _):
    until(path.exists)
    raise ValueError("not today")


def numbered(numbers, pause=0.0):
    return [Cell(f"cell-{n}", partial(square, n, pause), weight=n) for n in numbers]


def stuck(numbers):
    """The two heaviest are done at once, the others take longer than any test."""
    quick = sorted(numbers)[-2:]
    return [Cell(f"cell-{n}", partial(square, n, 0.0 if n in quick else 300.0), weight=n) for n in numbers]


def test_workers_give_the_same_results_as_one_process(tmp_path):
    heard = {}
    job = Job(tmp_path / "many", {}, resume=False)

    def hear(cell, share):
        heard.setdefault(cell.name, []).append(share)

    many = job.run(numbered(range(5)), hear, workers=2)
    alone = Job(tmp_path / "one", {}, resume=False).run(numbered(range(5)), lambda *_: None)
    assert many == alone == {f"cell-{n}": n * n for n in range(5)}
    assert list(many) == list(alone)
    assert heard == {f"cell-{n}": [0.5, 1.0] for n in range(5)}


def test_a_failure_in_a_worker_is_the_callers_and_finished_cells_stay(tmp_path):
    kept = tmp_path / "cells" / "cell-3.json"
    with pytest.raises(ValueError, match="not today"):
        Job(tmp_path, {}, resume=False).run(
            [*numbered([3, 2]), Cell("bad", partial(fail_after, kept))], lambda *_: None, workers=2
        )
    assert read_json(kept)["result"] == 9
    assert not (tmp_path / "cells" / "bad.json").exists()


def already(_):
    return "done"


def fail(_):
    raise ValueError("not today")


def test_a_cell_that_ends_together_with_a_failing_one_is_kept(tmp_path, monkeypatch):
    """Whatever the order in which the two are looked at."""
    monkeypatch.setattr("adpo.experiments.workers.wait", lambda running, **_: (list(wait(running)[0]), set()))
    cells = [Cell("bad", fail, weight=2.0), *(Cell(f"good-{n}", already) for n in range(4))]
    with pytest.raises(ValueError, match="not today"):
        Job(tmp_path, {}, resume=False).run(cells, lambda *_: None, workers=2)
    assert [path.stem for path in (tmp_path / "cells").glob("*.json")] == ["good-0"]  # nothing was begun after


def slowly_after(path, _):
    until(path.exists)
    time.sleep(1.0)
    return "done"


def mark_and_fail(path, _):
    path.touch()
    raise ValueError("not today")


def test_what_is_under_way_when_a_cell_fails_ends_and_is_kept(tmp_path):
    marker = tmp_path / "marker"
    cells = [Cell("slow", partial(slowly_after, marker)), Cell("bad", partial(mark_and_fail, marker))]
    with pytest.raises(ValueError, match="not today"):
        Job(tmp_path / "job", {}, resume=False).run(cells, lambda *_: None, workers=2)
    assert [path.stem for path in (tmp_path / "job" / "cells").glob("*.json")] == ["slow"]


def test_a_worker_that_is_killed_is_one_clear_line(tmp_path):
    with pytest.raises(ValueError, match="a worker process was killed") as error:
        Job(tmp_path, {}, resume=False).run(numbered([13, 2, 1]), lambda *_: None, workers=2)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "cells" / "cell-13.json").exists()


def test_results_name_the_code_that_computed_them(tmp_path):
    cells = numbered([1, 2])
    Job(tmp_path, {}, resume=False, provenance={"commit": "a"}).run(cells[:1], lambda *_: None)
    job = Job(tmp_path, {}, resume=True, provenance={"commit": "b"})
    job.run(cells, lambda *_: None)
    assert job.provenances(cells[:1]) == [{"commit": "a"}]
    assert job.provenances(cells) == [{"commit": "a"}, {"commit": "b"}]


PARENT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background has it ignored
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_cells import Job, stuck
if __name__ == "__main__":
    Job(Path({folder!r}), {{}}, resume=False).run(stuck([1, 2, 3, 4]), lambda *_: None, workers=2)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_job_leaves_no_worker_behind_and_can_be_resumed(tmp_path, how):
    folder, script = tmp_path / "job", tmp_path / "parent.py"
    script.write_text(PARENT.format(tests=str(Path(__file__).parent), folder=str(folder)))
    process = forked.Process(script)
    until(lambda: len(list((folder / "cells").glob("*.json"))) == 2)
    assert len(family(process.pid)) >= 3  # itself and two workers
    process.send_signal(how)
    process.wait(timeout=60)
    until(lambda: not family(process.pid))
    done = {path.stem for path in (folder / "cells").glob("*.json")}
    assert done == {"cell-3", "cell-4"}
    kept = {path: path.stat().st_mtime_ns for path in (folder / "cells").glob("*.json")}
    resumed = Job(folder, {}, resume=True).run(numbered([1, 2, 3, 4]), lambda *_: None)
    assert resumed == {f"cell-{n}": n * n for n in (1, 2, 3, 4)}
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def family(session):
    """Processes of a session that still run."""
    alive = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it may end while we look
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                alive.append(stat.parent.name)
    return alive


@pytest.mark.parametrize("workers", [1, 2])
def test_nothing_is_begun_after_the_time_is_up(tmp_path, workers):
    many = [Cell(f"square {number}", partial(square, number, 0.0)) for number in range(8)]
    job = Job(tmp_path, {}, resume=False)
    assert job.run(many, lambda *_: None, workers, out_of_time=lambda: True) == {}
    assert len(job.run(many, lambda *_: None, workers, out_of_time=lambda: False)) == 8
