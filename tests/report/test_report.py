"""The page: what it shows of runs that are finished or going on, and that nothing in it can do harm."""

import html
import json
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("plotly")
pytest.importorskip("matplotlib")

from markupsafe import escape
from typer.testing import CliRunner

from adpo.cli import app
from adpo.experiments.geometry import run as geometry
from adpo.experiments.tables import ShownBy
from adpo.report import claims
from adpo.report.page import page, sections_of
from adpo.report.server import HERE, server

EVIL = "</pre></script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
REPOSITORY = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def going_on(tmp_path):
    """A run of `adpo train` as it is while it works, its model up to no good."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "settings.json").write_text(json.dumps({"method": "adpo", "model": "embedded", "seed": 3}))
    (folder / "origin.json").write_text(json.dumps({"command": "adpo train --seed 3", "commit": "abc"}))
    log(folder, 1, reward=0.25)
    log(folder, 2, reward=0.5)
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 3, "rewa')  # being written
    group = {"step": 2, "prompt": EVIL, "members": []}
    group["members"] = [{"text": EVIL, "reward": 1.0, "c": -0.5}, {"text": "5", "reward": 0.0, "c": 0.5}]
    (folder / "samples.jsonl").write_text(json.dumps(group) + "\n")
    return folder


def log(folder, step, **figures):
    row = {"step": step, "adpo/tau": 0.8, "adpo/live": 0.5, "validation/accuracy": 0.4, **figures}
    path = folder / "metrics.jsonl"
    known = path.read_text().splitlines()[: step - 1] if path.exists() else []
    path.write_text("\n".join([*known, json.dumps(row)]) + "\n")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results") / "geometry"
    geometry.reproduce(folder)
    return folder


def test_a_run_that_goes_on(going_on):
    (section,) = sections_of([going_on])
    assert section.state == "going on"
    assert section.facts["seed"] == "3"
    assert section.facts["command"] == "adpo train --seed 3"
    charts = {chart.title: chart for chart in section.charts}
    assert charts["reward"].series[0].y == [0.25, 0.5]
    assert charts["temperature tau"].series[0].x == [1, 2]
    assert section.figures["steps"] == "2"
    assert [member.c for member in section.groups[0].members] == [-0.5, 0.5]


def test_a_run_that_has_ended(going_on):
    share = {"value": 0.4, "low": 0.3, "high": 0.5}
    summary = {"command": "adpo train", "commit": "abc", "steps": 2, "method": "adpo"}
    summary |= {f"accuracy_{when}": share for when in ("before", "after", "gain")}
    summary["samples"] = [{"problem": "1+1", "before": EVIL, "after": "2", "answer": "2"}]
    (going_on / "summary.json").write_text(json.dumps(summary))
    (section,) = sections_of([going_on])
    assert section.state == "finished"
    assert section.facts["commit"] == "abc"
    assert section.figures["accuracy, most likely answers, gain"] == "+40.0% [+30.0%, +50.0%]"
    assert section.tables[0].rows == [["1+1", EVIL, "2", "2"]]
    for when in ("before", "after", "gain"):
        summary[f"reward_{when}"] = summary.pop(f"accuracy_{when}") | {"value": 12.5}
    (going_on / "summary.json").write_text(json.dumps(summary | {"measure": "mean reward"}))
    (section,) = sections_of([going_on])
    assert section.figures["mean reward, most likely answers, gain"] == "+12.5 [+0.3, +0.5]"
    assert not any("%" in figure for figure in section.figures.values())


def test_what_a_model_wrote_is_shown_and_not_run(going_on):
    made = page(sections_of([going_on]))
    has = {
        text: text in made for text in (str(escape(EVIL)), EVIL, "<script>document", 'class="up"', 'class="down"')
    }
    assert list(has.values()) == [True, False, False, True, True]
    # A browser runs the page's own scripts by their hashes, and no other.
    allowed = re.search(r"script-src ([^;]*);", html.unescape(made[:2000]))[1]
    assert allowed.count("sha256-") == 2
    assert "unsafe-inline" not in allowed
    outside = re.search(r"<(script|link|img)[^>]*(src|href)=[\"']?http", made)
    assert outside is None  # no network


def test_an_experiment(drawn):
    (section,) = sections_of([drawn])
    assert section.state == "finished"
    assert {"commit", "torch"} <= section.facts.keys()
    assert [table.title for table in section.tables][1:] == ["taxonomy", "geometry"]
    assert section.tables[1].rows[0][0] == "SFT"  # a link is its text
    cells = [cell for table in section.tables[1:] for row in table.rows for cell in row]
    assert len(cells) == 60
    assert all(isinstance(cell, ShownBy) for cell in cells)
    made = page([section])
    for cell in cells:  # each leads to the test that shows it, which is named on the page and is there
        place = section.tests[cell.test]
        assert f'<a href="#{place}" title="{cell.test}">{escape(str(cell))}</a>' in made
        assert f'<li id="{place}"><code>pytest {cell.test}</code></li>' in made
        file, name = cell.test.split("::")
        assert f"def {name}(" in (REPOSITORY / file).read_text()
    assert [frame.label for frame in section.surfaces[0].frames] == ["0.25", "0.5", "1", "2", "4"]
    assert section.pictures["figure1"].startswith("data:image/svg+xml;base64,")
    assert section.claims[1].here == "its bottom is at (2, 1), the anchor at (0, 0)"


def test_learning_curves_of_the_reasoning_experiment(tmp_path):
    def trial(method, seed, curve):
        rollouts = [{"right": 0.1 * i, "length": 9.0, "distinct": 2.0} for i in range(3)]
        return {"trial": {"study": "seeds", "method": method, "seed": seed}, "curve": curve, "rollouts": rollouts}

    runs = [trial("ADPO", 1, [[1, 0.4], [2, 0.6]]), trial("ADPO", 2, [[1, 0.2], [2, 0.4], [3, 0.9]])]
    rows = [{"study": "seeds", "method": "ADPO", "a: greedy": [0.5, 0.1], "collapsed": 1, "seeds": 2}]
    results = {
        "experiment": "reasoning",
        "runs": runs,
        "rows": rows,
        "exams": ["a"],
        "not_yet": ["x"],
    }
    (tmp_path / "results.json").write_text(json.dumps(results))
    (section,) = sections_of([tmp_path])
    assert section.state == "going on"
    *seeds, mean = section.charts[0].series
    assert [line.faint for line in seeds] == [True, True]
    assert mean.y == pytest.approx([0.3, 0.5])  # as far as all have come
    assert [claim.here for claim in section.claims] == [
        "ADPO 50.0% ± 10.0%",
        "ADPO: 1 of 2 runs",
        claims.NOT_HERE,
    ]


@pytest.fixture
def experiments(tmp_path):
    """Results that are kept, and some as a bandit experiment with two methods would leave them."""
    folders = {name: tmp_path / name for name in ("bandits", "distill", "efficiency")}
    for name, folder in folders.items():
        folder.mkdir()
        if name != "bandits":
            shutil.copy(REPOSITORY / "docs" / "results" / f"{name}.json", folder / "results.json")

    def runs(settings, *ends):
        made = []
        for method, end in zip(("trpo", "adpo-kde"), ends, strict=True):
            curve = [
                {"iteration": 0, "sampled": 0.1, "greedy": 0.2},
                {"iteration": 20, "sampled": end, "greedy": end},
            ]
            made += [{"method": method, "seed": seed, "settings": settings, "curve": curve} for seed in (1, 2)]
        return made

    wide = {f"capacity-{width}-cauchy-medium": runs({}, 0.3, width / 512) for width in (64, 128)}
    tried = [run for tau in (1.0, 4.0) for run in runs({"beta": 0.5, "tau": tau}, 0.0, tau / 8)]
    tried = [run for run in tried if run["method"] == "adpo-kde"]
    one = {"gaussian-easy": [0.5, 0.1], "all": [0.5, 0.1]}
    summary = {
        metric: {"trpo": one, "adpo-kde": {"gaussian-easy": [0.7, float("nan")]}}
        for metric in ("sampled", "greedy")
    }
    cells = {"main-gaussian-easy": runs({}, 0.3, 0.5), "sensitivity": tried, **wide}
    (folders["bandits"] / "results.json").write_text(json.dumps({"summary": summary, "cells": cells}))
    return folders


def test_charts_of_the_experiments(experiments):
    bandits, distill, efficiency = sections_of(list(experiments.values()))
    by_title = {chart.title: chart for chart in bandits.charts}
    robust = by_title["WinMass of the sampled policy"].series
    assert [(line.name, list(line.x), list(line.y)) for line in robust] == [
        ("trpo", ["gaussian-easy"], [0.5]),
        ("adpo-kde", ["gaussian-easy"], [0.7]),
    ]
    on_the_way = by_title["WinMass on the way, all scenarios"].series
    assert [(line.name, line.x, line.y) for line in on_the_way] == [
        ("trpo", [0, 20], [0.1, 0.3]),
        ("adpo-kde", [0, 20], [0.1, 0.5]),
    ]
    capacity = by_title["heavy noise: the width of the policy"]
    assert capacity.log_x
    assert capacity.series[1].y == pytest.approx([0.125, 0.25])
    (beta,) = by_title["kernel estimate: tau and beta, greedy"].series
    assert (beta.name, beta.x, beta.y, beta.half) == ("beta 0.5", [1.0, 4.0], [0.125, 0.5], [0.0, 0.0])
    kept = json.loads((experiments["distill"] / "results.json").read_text())["summary"]
    steps = next(
        chart for chart in distill.charts if chart.x == "gradient steps" and chart.title.startswith("Hopper")
    )
    for line in steps.series:
        rows = [
            row
            for row in kept
            if (row["study"], row["environment"], row["method"]) == ("steps", "Hopper-v5", line.name)
        ]
        assert dict(zip(line.x, line.y, strict=True)) == {row["value"]: row["stochastic_share"] for row in rows}
        assert list(line.x) == sorted(line.x)
    rows = json.loads((experiments["efficiency"] / "results.json").read_text())["rows"]
    first = [row for row in rows if row["cell"] == rows[0]["cell"]]
    (speeds,) = efficiency.charts[0].series
    assert efficiency.charts[0].bars
    assert speeds.y == pytest.approx([first[0]["seconds"] / row["seconds"] for row in first])


def test_what_is_not_a_number_is_not_drawn(experiments, going_on):
    """JSON has no NaN: a browser would read nothing of the page."""
    log(going_on, 3, reward=float("nan"))
    kept = json.loads((experiments["distill"] / "results.json").read_text())
    kept["summary"][-1]["value"] = float("inf")
    (experiments["distill"] / "results.json").write_text(json.dumps(kept))
    sections = sections_of([experiments["bandits"], going_on, experiments["distill"]])
    rewards = sections[1].drawn()["charts"][0]["series"][0]["y"]
    assert rewards == [0.25, 0.5, None]
    data = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page(sections), re.S)[1]

    def refused(constant):
        raise AssertionError(constant)

    json.loads(data, parse_constant=refused)


@pytest.mark.parametrize("seconds", [0.0, "fast"])
def test_results_that_are_not_as_they_should_be(experiments, seconds):
    kept = json.loads((experiments["efficiency"] / "results.json").read_text())
    kept["rows"][1]["seconds"] = seconds
    (experiments["efficiency"] / "results.json").write_text(json.dumps(kept))
    with pytest.raises(ValueError, match="its results are not as adpo writes them"):
        sections_of([experiments["efficiency"]])
    kept["rows"] = [row for row in kept["rows"] if not row["contender"].startswith("TRL GRPO, defaults")]
    kept["rows"] = [row for row in kept["rows"] if row["seconds"] != seconds]
    (experiments["efficiency"] / "results.json").write_text(json.dumps(kept))
    (section,) = sections_of([experiments["efficiency"]])
    assert section.charts == []  # without what they are held against


def test_a_job_without_results_yet(tmp_path):
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "one.json").write_text("{}")
    job = {"description": {"experiment": "bandits", "preset": "smoke"}, "command": "adpo reproduce bandits"}
    (tmp_path / "job.json").write_text(json.dumps(job))
    (section,) = sections_of([tmp_path])
    assert section.facts["command"] == "adpo reproduce bandits"
    assert section.state == "going on"
    assert section.figures == {"parts that have ended": "1"}
    assert section.facts["preset"] == "smoke"
    assert section.claims == []


def test_a_study_that_goes_on(tmp_path):
    study = {"job": "train", "words": ["--max_steps", "100"], "seed": 2, "space": {"tau": [0.1, 1.0, True]}}
    (tmp_path / "study.json").write_text(json.dumps(study))
    (section,) = sections_of([tmp_path])  # before its first trial has begun
    assert (section.state, section.charts) == ("going on", [])
    assert section.facts["command"] == "adpo tune train --max_steps 100 --seed 2"
    for number in (0, 1):
        (tmp_path / f"trial-00{number}").mkdir()
        log(tmp_path / f"trial-00{number}", 1, **{"validation/accuracy": 0.1 * number})
    (section,) = sections_of([tmp_path])
    assert [(line.name, line.y) for line in section.charts[0].series] == [
        ("trial-000", [0.0]),
        ("trial-001", [0.1]),
    ]


def test_what_the_paper_says_of_the_bandits():
    summary = {
        "sampled": {
            "trpo": {"a": [0.5, 0.1], "b": [0.1, 0.1], "all": [1, 0]},
            "adpo": {"a": [0.4, 0], "b": [0.2, 0]},
        }
    }
    first, *others = claims.claims_of("bandits", {"summary": summary})
    assert first.here == "sampled WinMass is highest, of 2 scenarios: trpo in 1; adpo in 1"
    assert [claim.here for claim in others] == [claims.NOT_HERE] * 3
    sampled = {"dpo-hard": {"shift-easy": [0.4, 0]}, "dpo-soft": {"shift-easy": [0.5, 0]}}
    sampled |= {method: {"shift-easy": [0.6, 0]} for method in ("trpo", "adpo-raw", "ppo-clip")}
    claim = claims.claims_of("bandits", {"summary": {"sampled": sampled}})[2]
    assert claim.here == "adpo-raw over the better DPO, sampled WinMass: shift +20.0%"


@pytest.mark.parametrize(
    ("experiment", "found"),
    [("distill", "ADPO anchored target: 0.0151"), ("listwise", "over dpo-all -0.1 [-0.6, +0.3]")],
)
def test_claims_of_results_that_are_kept(experiment, found):
    kept = json.loads((Path(__file__).parents[2] / "docs" / "results" / f"{experiment}.json").read_text())
    assert found in claims.claims_of(experiment, kept)[-1].here


def typed(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_command(tmp_path, going_on, drawn):
    done = typed(going_on, drawn, "--out", tmp_path / "new" / "page.html")
    assert done.exit_code == 0, done.exception
    assert "2 parts" in " ".join(done.output.split())  # lines are folded where a path is long
    assert "the anchored loss above its minimum" in (tmp_path / "new" / "page.html").read_text()


def test_mistakes(tmp_path, going_on):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "results.json").write_text("{")
    for name, content in (("other", "[1]"), ("less", '{"experiment": "geometry", "curvature": []}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(content)
    for arguments, said in (
        ([tmp_path / "nowhere"], "there is no such folder"),
        ([tmp_path / "empty"], "holds no results: expected a run of adpo train"),
        ([tmp_path / "broken"], "results.json cannot be read"),
        ([tmp_path / "other"], "its results are not as adpo writes them (AttributeError"),
        ([tmp_path / "less"], "its results are not as adpo writes them (ValueError"),
        ([going_on, "--out", tmp_path], "is a folder; expected a file"),
    ):
        done = typed(*arguments)
        assert isinstance(done.exception, ValueError)
        assert said in str(done.exception)


@pytest.fixture
def served(going_on):
    running = server([going_on], 0)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield running
    running.shutdown()
    running.server_close()
    thread.join()


def asked(running, path, **headers):
    address = f"http://{HERE}:{running.server_port}{path}"
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as answer:
        return answer.read().decode()


def test_the_server_follows_a_run(served, going_on):
    assert served.server_address[0] == "127.0.0.1"
    assert "data.json" in asked(served, "/")
    before = json.loads(asked(served, "/data.json"))
    log(going_on, 3, reward=0.75)
    after = json.loads(asked(served, "/data.json"))
    assert before["version"] != after["version"]
    assert after["parts"][0]["charts"][0]["series"][0]["y"][-1] == 0.75
    assert "&lt;script&gt;" in after["words"][0]
    assert "<script" not in after["words"][0]


@pytest.mark.parametrize("path", ["/settings.json", "/../settings.json", "/data.json/..", "/%2e%2e/metrics.jsonl"])
def test_the_server_serves_nothing_else(served, path):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        asked(served, path)


def test_the_server_answers_this_machine_alone(served):
    """Another site's name that points here is not ours."""
    with pytest.raises(urllib.error.HTTPError, match="404"):
        asked(served, "/data.json", Host="evil.example")
    with pytest.raises(ValueError, match="choose another port"):
        server([], served.server_port)


def opened(address, profile):
    """What a browser has made of a page after ten seconds of its time."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000", "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM, *options, f"--user-data-dir={profile}", address],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser")
def test_in_a_browser(tmp_path, going_on, drawn, experiments):
    folders = [going_on, drawn, *experiments.values()]
    (tmp_path / "page.html").write_text(page(sections_of(folders)))
    seen = opened((tmp_path / "page.html").as_uri(), tmp_path / "profile")
    assert "<title>adpo</title>" in seen  # what the model wrote has not run
    expected = sum(len(section.charts) + len(section.surfaces) for section in sections_of(folders))
    assert expected > 30
    assert seen.count('class="plot js-plotly-plot"') == expected
    assert "tau = 1" in seen


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser")
def test_a_page_that_is_open_follows_a_run_to_its_end(tmp_path, served, going_on, monkeypatch):
    answer = served.RequestHandlerClass.do_GET

    def answered(self):
        answer(self)
        if self.path == "/":  # the run ends while the page is looked at
            log(going_on, 3, reward=0.75)
            (going_on / "summary.json").write_text(json.dumps({"accuracy_after": {"value": 0.6}}))

    monkeypatch.setattr(served.RequestHandlerClass, "do_GET", answered)
    seen = opened(f"http://{HERE}:{served.server_port}/", tmp_path / "profile")
    assert '<small class="ended">finished</small>' in seen
    assert "going on" not in seen.split('<script type="application/json"')[0]
