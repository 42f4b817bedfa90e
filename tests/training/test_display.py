"""What a person sees: the bar fits a terminal of 80 columns, and says how long it will take."""

import io
import re
import time

from rich.console import Console

from adpo.runs.display import Display, percent, points, summary_tables

FIGURES = {"reward": 0.2891, "tau": 1.0, "KL": 0.00417, "validation": "51 %", "refused": None}


def shown(console):
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())


def test_the_bar_has_every_figure_and_the_time_to_go():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    display = Display(console)
    with display.stage("training", 300):
        for step in (0, 100, 200):
            display.at(step, FIGURES)
            time.sleep(0.3)
    line = next(line for line in reversed(re.split(r"[\r\n]", shown(console))) if "200/300" in line)
    assert re.search(r"reward 0\.29 tau 1 KL 0\.0042 validation 51 % +\d\d:\d\d", line), line
    assert "refused" not in line


def test_without_a_terminal_there_are_lines():
    console = Console(file=io.StringIO(), width=120)
    display = Display(console)
    with display.stage("training", 300):
        display.at(100, FIGURES)
        display.at(150, FIGURES, line=True)
    assert shown(console) == "step 150: reward 0.29 tau 1 KL 0.0042 validation 51 %\n"


def test_figures_are_percent_and_differences_points():
    estimate = {"value": 0.444, "low": 0.392, "high": 0.496}
    summary = {
        f"{name}_{part}": estimate for name in ("accuracy", "sampled") for part in ("before", "after", "gain")
    }
    summary["samples"] = [{"problem": "1+1 [x]", "before": "3", "after": "2", "answer": "2"}]
    console = Console(file=io.StringIO(), width=120)
    for table in summary_tables(summary):
        console.print(table)
    assert "44.4 % [39.2, 49.6]" in shown(console)
    assert "+44.4 points [+39.2, +49.6]" in shown(console)
    assert "1+1 [x]" in shown(console)
    assert percent(estimate).startswith("44.4 %")
    assert "accuracy, most likely answer" in shown(console)
    assert points({"value": -0.1, "low": -0.2, "high": 0.05}) == r"-10.0 points \[-20.0, +5.0]"


def test_a_reward_has_its_own_unit():
    estimate = {"value": 12.5, "low": -3.25, "high": 28.25}
    summary = {
        f"{name}_{part}": estimate for name in ("reward", "sampled") for part in ("before", "after", "gain")
    }
    console = Console(file=io.StringIO(), width=120)
    console.print(summary_tables({**summary, "measure": "mean reward", "samples": []})[0])
    assert "mean reward, most likely answer" in shown(console)
    assert "12.5 [-3.25, 28.25]" in shown(console)
    assert "+12.5 [-3.25, +28.25]" in shown(console)
    assert not re.search("%|points|accuracy|1250", shown(console))
