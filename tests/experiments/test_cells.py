"""Jobs that can be stopped at any moment: cells on disk, resume, refusals."""

import json

import pytest

from adpo.experiments.cells import Cell, Job, read_json


def cells(log, stop_at=None):
    def work(name):
        def compute():
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
    assert json.loads((tmp_path / "cells" / "one.json").read_text()) == {"result": {"name": "one", "value": 1.0}}
