"""`adpo reproduce bandits` as a user types it."""

import json
import os
import random
import shutil
import signal
import time

import pytest

import forked
from adpo.experiments.bandits.methods import GRID


def run(*arguments, timeout=600):
    return forked.run("-m", "adpo.cli", "reproduce", "bandits", *arguments, timeout=timeout)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    out = tmp_path_factory.mktemp("bandits") / "out"
    result = run("--preset", "smoke", "--out", out)
    assert result.returncode == 0, result.stderr
    return out, result


def test_smoke_writes_results_tables_and_figures(smoke):
    out, result = smoke
    results = json.loads((out / "results.json").read_text())
    assert results["description"]["preset"] == "smoke"
    assert results["provenance"][0].keys() >= {"adpo", "torch", "python", "commit"}
    assert len(results["provenance"]) == 1
    records = [record for cell in results["cells"].values() for record in cell]
    assert {record["method"] for record in records} == {"reference", *GRID}
    assert len(records) == 4 * 3 * (1 + len(GRID))
    for name in ("robustness.svg", "robustness.png"):
        assert (out / name).stat().st_size > 1000
    tables = (out / "tables.md").read_text()
    for title in ("WinMass, sampled", "adpo-natural less the closest baseline", "Over the better DPO"):
        assert f"### {title}" in tables
    timing = json.loads((out / "timing.json").read_text())
    assert timing.keys() == results["cells"].keys()
    assert all(seconds > 0 for seconds in timing.values())
    assert "WinMass, sampled" in result.stdout
    assert "not who wins" in result.stdout
    assert "this run took" in result.stdout
    assert str(out / "results.json") in result.stdout.replace("\n", "")


def test_listwise_beats_the_reference(smoke):
    """Seed by seed, in every scenario of the smoke preset."""
    results = json.loads((smoke[0] / "results.json").read_text())["summary"]["sampled"]
    for method in ("adpo-raw", "adpo-kde", "adpo-ranking", "adpo-natural"):
        for scenario, (mean, half) in results[method].items():
            assert mean - half > results["reference"][scenario][0], (method, scenario)


def test_resuming_computes_only_what_is_missing_and_ends_with_the_same_file(smoke):
    out, _ = smoke
    before = (out / "results.json").read_bytes()
    kept = {path: path.stat().st_mtime_ns for path in (out / "cells").iterdir()}
    lost = next(iter(kept))
    lost.unlink()
    (out / "results.json").unlink()
    result = run("--preset", "smoke", "--out", out, "--resume")
    assert result.returncode == 0, result.stderr
    assert (out / "results.json").read_bytes() == before
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items() if path != lost)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "huge"], "--preset"),
        (["--seeds", "1"], "--seeds"),
        (["--out", "{file}"], "is a file"),
        (["--out", "{foreign}"], "is not empty"),
    ],
)
def test_mistakes_are_one_line_before_any_work(tmp_path, arguments, words):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("mine")
    places = {"file": tmp_path / "file", "foreign": tmp_path / "folder"}
    result = run(*(argument.format(**places) for argument in arguments), timeout=60)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


def killed_and_resumed(out, draw, kills):
    """Kill the job, and its workers, so many times at random moments, then let it end; how often it was killed."""
    words = ["reproduce", "bandits", "--preset", "smoke", "--out", str(out), "--resume"]
    done = 0
    while True:
        process = forked.Process("-m", "adpo.cli", *words)
        try:
            finished = sum(1 for _ in out.glob("cells/*.json"))
            deadline = time.monotonic() + draw.uniform(0, 3)
            while done < kills and process.poll() is None:
                more = sum(1 for _ in out.glob("cells/*.json")) > finished
                if more and time.monotonic() > deadline:
                    break
                time.sleep(0.01)
            if done == kills or process.poll() is not None:
                assert process.wait(timeout=600) == 0
                return done
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        done += 1


def test_killed_it_ends_with_the_same_file(smoke, tmp_path):
    """The last two of its four cells: the others are there already."""
    out = shutil.copytree(smoke[0], tmp_path / "out")
    for path in [*sorted((out / "cells").iterdir())[-2:], out / "results.json"]:
        path.unlink()
    assert killed_and_resumed(out, random.Random(time.time_ns()), 1) == 1
    assert (out / "results.json").read_bytes() == (smoke[0] / "results.json").read_bytes()


@pytest.mark.slow
def test_killed_fifty_times_it_ends_with_the_same_file(smoke, tmp_path):
    kills = rounds = 0
    while kills < 50:
        out = tmp_path / str(rounds) / "out"
        kills += killed_and_resumed(out, random.Random(rounds), 50 - kills)
        rounds += 1
        assert (out / "results.json").read_bytes() == (smoke[0] / "results.json").read_bytes()
    print(f"{kills} kills over {rounds} jobs")  # noqa: T201
