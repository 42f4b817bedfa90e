"""A disk that is full, or read-only: a real one, mounted for the test."""

import json
from pathlib import Path

import pytest

pytest.importorskip("trl")

import forked
from adpo.models.embedded import WarmUp, make_model, make_tokenizer
from adpo.preferences.generated_lists import graded


def inside(*steps):
    """Shell commands and commands of adpo in a mount namespace of their own."""
    return forked.run(Path(__file__).with_name("mounted.py"), json.dumps(steps))


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    (folder / "disk").mkdir()
    if inside(f"mount -t tmpfs -o size=1m tmpfs {folder / 'disk'}").returncode:
        pytest.skip("file systems cannot be mounted here")
    make_model(WarmUp(hidden=16, layers=1)).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    (folder / "lists.jsonl").write_text("".join(json.dumps(row) + "\n" for row in graded(count=60)))
    return folder


def words(given, *more):
    files = ["prefer", given / "lists.jsonl", "--model", given / "model", "--out", given / "disk" / "out"]
    return [*map(str, files), "--cache", str(given / "cache"), "--max_steps", "40", *more]


def test_a_disk_that_fills_up_ends_the_run_in_one_line_and_earlier_checkpoints_go_on(given):
    """Forty checkpoints do not fit; the whole ones stay, and where there is room again the run goes on."""
    disk = given / "disk"
    train = words(given, "--save_steps", "1", "--save_total_limit", "100", "--eval_every", "0")
    done = inside(
        f"mount -t tmpfs -o size=3m tmpfs {disk}",
        train,
        f"ls -a {disk}/out; rm -rf {disk}/out/checkpoint-1 {disk}/out/runs; mount -o remount,size=100m {disk}",
        [*train, "--resume"],
        f"ls {disk}/out",
    )
    first, second = done.stdout.split("code 2\n")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("adpo: ")]
    assert "could not be written to" in line
    assert "of the earlier ones, checkpoint-" in line
    assert "is whole" in line
    last = int(line.rsplit("checkpoint-", 1)[1].split()[0])
    assert 1 <= last < 40
    assert ".checkpoint.part" not in second
    assert f"checkpoint-{last}\n" in second
    assert f"checkpoint-{last + 1}\n" not in second.split("going on from")[0]
    assert f"checkpoint-{last}" in second.split("going on from")[1].split("\n\n")[0].replace("\n", "")
    assert "code 0" in second
    assert "checkpoint-40" in second
    assert "Traceback" not in done.stderr
    assert first


def test_too_small_a_disk_is_said_before_any_step(given):
    disk = given / "disk"
    done = inside(f"mount -t tmpfs -o size=64k tmpfs {disk}", words(given), f"find {disk} -type f")
    assert "code 2" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("adpo: ")
    assert "free and a checkpoint takes about" in done.stderr
    assert "checkpoint-" not in done.stdout


def test_a_disk_that_is_read_only(given):
    done = inside(f"mount -t tmpfs -o ro tmpfs {given / 'disk'}", words(given))
    assert "code 2" in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.endswith("cannot be written to: Read-only file system")
