"""The experiment with a language model: what it counts, what it keeps apart, and the command as typed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("trl")

import torch
from typer.testing import CliRunner

from adpo.cli import app
from adpo.experiments.reasoning import comparisons, measures, problems, run, starts, summary, trial, warmup
from adpo.experiments.reasoning.methods import METHODS, SHORT
from adpo.experiments.reasoning.presets import PRESETS
from adpo.experiments.reasoning.protocol import Choice, Trial
from adpo.experiments.reasoning.rewards import BONUS, KINDS, Watched, agreement
from adpo.experiments.reasoning.starts import Start
from adpo.experiments.reasoning.tables import STUDIES
from adpo.models import embedded
from adpo.system.files import digest
from adpo.tasks.generated_tasks import Outcome
from adpo.tasks.reward_functions import Correct

SMOKE = PRESETS["smoke"]
SMALL_WORDS = replace(SMOKE, start="smollm2", watched=8, groups=4, examined=2, files=PRESETS["gpu"].files)


def ended(
    method="ADPO", rate=1e-3, curve=(0.4,), study="rates", right="1010", stopped=None, rollouts=(0.4,), exam=True
):
    return {
        "trial": {
            "study": study,
            "method": method,
            "rate": rate,
            "seed": 0,
            "inner": 4,
            "reward": "correct",
            "changes": "",
            "more": {},
        },
        "curve": [(number + 1, value) for number, value in enumerate(curve)],
        "stopped": stopped,
        "rollouts": [{"right": share} for share in rollouts],
        "exams": {"arithmetic": {"greedy": right.count("1") / len(right), "right": right}} if exam else {},
    }


def test_each_method_has_its_own_best_rate():
    runs = [
        ended("ADPO", 1e-3, (0.2, 0.5)),
        ended("ADPO", 1e-2, (0.9, 0.1)),  # by where a run ends, not by its peak
        ended("ADPO", 1e-1, (0.9,), stopped="it diverged"),
        ended("GRPO", 1e-3, (0.5,), rollouts=(0.9, 0.1, 0.1, 0.1)),
        ended("GRPO", 1e-2, (0.5,), rollouts=(0.1, 0.1, 0.1, 0.4)),
    ]
    assert summary.chosen(runs) == {"ADPO": Choice(1e-3), "GRPO": Choice(1e-2)}
    stiffer = ended("ADPO", 1e-4, (0.6, 0.7))
    runs.append({**stiffer, "trial": {**stiffer["trial"], "more": {"tau": 0.1}}})
    best = summary.chosen(runs)
    assert best["ADPO"] == Choice(1e-4, (("tau", 0.1),))
    further = list(PRESETS["embedded"].further(best, summary.tried(runs)))  # both are at an end of what was tried
    assert [(each.method, each.rate, each.more) for each in further] == [
        ("ADPO", 3.3e-5, (("tau", 0.1),)),
        ("GRPO", 3e-2, ()),
    ]
    inside = {method: {rate / 3, rate, 3 * rate} for method, (rate, _) in best.items()}
    assert not list(PRESETS["embedded"].further(best, inside))


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (ended(curve=(0.4, 0.5)), False),
        (ended(right="1000"), True),  # below the start
        (ended(curve=(0.4, 0.25), exam=False), True),  # below the start, on what is watched
        (ended(curve=(0.9, 0.4)), True),  # below half of its peak
        (ended(curve=(0.9, 0.8), stopped="the gradient is not finite"), True),
        (ended(curve=(), exam=False), True),
    ],
)
def test_a_collapse_is_counted(found, verdict):
    other = {"a harder one": {"greedy": 1.0}}  # which comes first in a file
    start = {"watched": 0.3, "exams": {**other, "arithmetic": {"greedy": 0.4}}}
    assert summary.collapsed(found, start, "arithmetic") is verdict
    if found["exams"]:
        found = {**found, "exams": {"a harder one": {"greedy": 0.0}, **found["exams"]}}
    assert summary.collapsed(found, start, "arithmetic") is verdict


def test_methods_are_compared_problem_by_problem():
    """The same problems are hard for both: what differs is seen through that."""
    draw = torch.Generator().manual_seed(0)
    hard = torch.rand(400, generator=draw) < 0.5
    better = hard | (torch.rand(400, generator=draw) < 0.1)
    said = ["".join(str(int(right)) for right in each) for each in (better, hard)]
    found = comparisons.difference([said[0]] * 3, [said[1]] * 3)
    assert found.verdict == "ahead"
    assert found.mean == pytest.approx(float((better ^ hard).float().mean()), abs=1e-6)
    assert found.high - found.low < 0.06
    assert comparisons.difference([said[1]] * 3, [said[1]] * 3).verdict == "level"
    runs = [seeded("ADPO", seed, "1111") for seed in (1, 2, 3)] + [seeded("GRPO", seed, "0001") for seed in (1, 2)]
    (only,) = comparisons.against(runs, "arithmetic")
    assert (only["ours"], only["other"], only["mean"], only["verdict"]) == ("ADPO", "GRPO", 0.75, "ahead")
    assert only["seeds"] == 2  # those that both have
    runs = [seeded("ADPO", 1, "1111"), seeded("ADPO", 2, "0000"), *(seeded("GRPO", n, "0001") for n in (1, 2))]
    assert comparisons.against(runs, "arithmetic")[0]["verdict"] == "level"  # two seeds that say the opposite


def test_few_seeds_have_wide_intervals():
    """Three seeds, one of which says the opposite of the others: problems are many, seeds are not."""
    theirs, ours = ["0" * 300 + "1" * 100] * 3, ["0" * (300 - n) + "1" * (100 + n) for n in (90, 80, 10)]
    runs = [seeded("ADPO", n, right) for n, right in enumerate(ours)]
    runs += [seeded("GRPO", n, right) for n, right in enumerate(theirs)]
    (found,) = comparisons.against(runs, "arithmetic")
    drawn = comparisons.difference(ours, theirs)
    assert drawn.verdict == "ahead"
    assert found["low"] < 0 < drawn.low
    assert found["mean"] == pytest.approx(drawn.mean)
    assert found["p"] > 0.05
    assert found["verdict"] == "level"


@pytest.mark.parametrize(("others", "verdict"), [((), "ahead"), (("GSPO", "Dr. GRPO", "a", "b"), "level")])
def test_many_comparisons_are_told_from_few(others, verdict):
    """What is beyond doubt as the only comparison may not be among several."""
    ours = ["1" * (200 + n) + "0" * (200 - n) for n in (10, 30, 20, 5, 25)]
    said = {"ADPO": ours, "GRPO": ["1" * 200 + "0" * 200] * 5, **dict.fromkeys(others, ours)}
    runs = [seeded(method, n, right) for method, rights in said.items() for n, right in enumerate(rights)]
    found = next(line for line in comparisons.against(runs, "arithmetic") if line["other"] == "GRPO")
    assert found["low"] > 0
    assert found["p"] < 0.05
    assert found["p_holm"] == pytest.approx((1 + len(others)) * found["p"])
    assert found["verdict"] == verdict


def test_a_run_that_ended_before_it_began():
    """Stopped at once, or with gradients that are no numbers: counted, and nothing breaks."""
    lost = ended(stopped="5 optimizer steps", curve=(), rollouts=(), exam=False) | {"logged": []}
    fine = ended(rate=1e-2) | {"logged": [{"grad_norm": norm} for norm in (3.0, float("nan"), 1.0, 2.0)]}
    assert summary.chosen([lost, fine]) == {"ADPO": Choice(1e-2)}
    start = {"watched": 0.3, "exams": {"arithmetic": {"greedy": 0.3}}}
    lines = summary.lines_of([lost, fine], start, "arithmetic")
    assert lines[0]["collapsed"]
    assert lines[1]["measured"]["gradient"] == 2.0
    assert [line["chosen_by"] for line in lines] == [-1.0, 0.8]
    rows = summary.rows_of([{**lines[0], "seed": 2}, lines[0], lines[1]], ["arithmetic"])
    assert [row["seeds"] for row in rows] == [2, 1]


def test_methods_are_compared_in_what_else_was_asked_of_them():
    def asked(method, seed, right, **trial):
        found = seeded(method, seed, right)
        return {**found, "trial": {**found["trial"], **trial}}

    runs = [seeded(method, seed, "1111") for method in ("ADPO", "GRPO") for seed in (1, 2)]
    for seed in (1, 2):
        runs += [
            asked("ADPO", seed, "1111", study="inner", inner=8),
            asked("GRPO", seed, "0000", study="inner", inner=8),
        ]
        hackable = {"study": "hackable", "reward": "hackable"}
        runs += [
            asked("ADPO", seed, "0001", **hackable, more={"target": "boltzmann"}),
            asked("ADPO", seed, "0000", **hackable, more={"target": "plackett_luce"}),
            asked("GRPO", seed, "1111", **hackable),
        ]
    runs += [asked(method, 1, "1111", study="control", reward="random") for method in ("ADPO", "GRPO")]
    found = comparisons.against_beside(runs, "arithmetic")  # of one seed nothing is said
    assert [(line["what"], line["mean"], line["verdict"]) for line in found] == [
        ("8 steps a rollout", 1.0, "ahead"),
        ("hackable reward", -0.75, "behind"),
    ]


def test_what_is_changed_is_compared_with_what_is_reported():
    """The same method, the same seeds; at another start the start alone is the same."""

    def changed(study, seed, right, changes, method="ADPO", **more):
        found = seeded(method, seed, right)
        changed = {"study": study, "changes": changes, "more": {**found["trial"]["more"], **more}}
        return {**found, "trial": {**found["trial"], **changed}}

    runs, guarded = [seeded("ADPO Plackett-Luce", 1, "1111")], {"tau_schedule": "guarded"}
    for seed in (1, 2):
        runs += [seeded("ADPO", seed, "1110"), seeded("GRPO", seed, "1111")]
        runs += [changed("targets", seed, "1110", ", target boltzmann", target="boltzmann")]
        runs += [changed("targets", seed, "1000", ", target top1", target="top1")]
        runs += [changed("mean", seed, "0000", ", mean", logp_reduction="mean")]
        runs += [changed("mean", seed, "0000", ", mean", "Boltzmann, no anchor", logp_reduction="mean")]
        runs += [changed("collapsed start", seed, "0100", ", logits times 4")]
        runs += [changed("collapsed start", seed, "0110", ", logits times 4, guarded", **guarded)]
        runs += [changed("collapsed start", seed, "0111", ", logits times 4", "GRPO")]
    found = comparisons.against_beside(runs, "arithmetic")
    assert [(line["what"], line["ours"], line["other"], line["mean"]) for line in found] == [
        ("another target", "ADPO", "ADPO, target top1", 0.5),
        ("a start that is sure of everything", "ADPO", "ADPO, logits times 4, guarded", -0.25),
        ("a start that is sure of everything", "ADPO", "GRPO", -0.5),
        ("means of log-probabilities", "ADPO", "ADPO, mean", 0.75),
    ]


def test_a_setting_further_is_chosen_by_what_was_watched():
    """Of each method the better of the two, over the seeds that both have."""

    def further(method, seed, right, watched):
        found = seeded(method, seed, right)
        beyond = {"study": "beyond", "changes": ", tau 0.03", "more": {"tau": 0.03}}
        return {**found, "watched": watched, "trial": {**found["trial"], **beyond}}

    runs = [{**seeded(method, seed, "1100"), "watched": "10"} for method in ("ADPO", "GRPO") for seed in (1, 2, 3)]
    for seed in (1, 2):
        runs += [further("ADPO", seed, "1110", "11"), further("GRPO", seed, "1111", "00")]
    (line,) = comparisons.against_beside(runs, "arithmetic")
    assert (line["what"], line["seeds"], line["mean"]) == ("a setting further", 2, 0.25)


def seeded(method, seed, right):
    found = ended(method, study="seeds", right=right)
    return {**found, "trial": {**found["trial"], "seed": seed}}


def test_every_method_is_given_the_same_work():
    shared = ("max_steps", "learning_rate", "num_generations", "per_device_train_batch_size", "num_iterations")
    preset = replace(PRESETS["embedded"], mini_batches=4)
    for inner, mini_batches, passes in ((1, 1, 1), (4, 4, 1), (8, 4, 2)):
        found = []
        for method in METHODS:
            given = trial.arguments(Trial("seeds", method, 1e-3, 1, 10, inner), preset, "folder")
            assert (given["steps_per_generation"], given["num_iterations"]) == (mini_batches, passes)
            assert given["per_device_train_batch_size"] * mini_batches == 32 * 8
            assert given["max_steps"] == 10 * inner
            found.append([given[name] for name in shared])
        assert all(each == found[0] for each in found)
    assert set(SHORT.values()) == set(METHODS)
    assert len({len(method.settings) for method in METHODS.values()}) == 1  # as many to choose from
    with pytest.raises(ValueError, match="cannot be cut into 3 mini-batches"):
        trial.arguments(Trial("seeds", "ADPO", 1e-3, 1, 10, 3), preset, "folder")


def test_seeds_that_are_reported_did_not_choose_the_rate():
    preset = PRESETS["embedded"]
    best = dict.fromkeys(preset.methods, Choice(1e-3))
    chosen, reported = list(preset.choosing()), list(preset.reported(best))
    assert {each.seed for each in chosen}.isdisjoint({each.seed for each in reported})
    assert not list(preset.settings(best))  # all were tried with every rate
    assert len(list(PRESETS["gpu"].settings({"GRPO": Choice(1e-3, METHODS["GRPO"].settings[0])}))) == 2
    everything = [*chosen, *reported, *preset.beside(best)]
    assert len({each.name for each in everything}) == len(everything)
    assert {each.study for each in everything} == set(STUDIES)


def test_steps_are_taken_back_at_the_best_rate_and_at_larger_ones():
    preset = PRESETS["embedded"]
    best = {method: Choice(1e-4 if method == "GSPO" else 3e-5, (("tau", 0.1),)) for method in preset.methods}
    there = [each for each in preset.beside(best) if each.study == "backtracking"]
    assert {(each.method, each.rate) for each in there} == {
        *((method, rate) for method in ("ADPO", "GRPO") for rate in (3e-5, 3e-4, 9e-4, 3e-3)),
        *(("GSPO", rate) for rate in (1e-4, 1e-3, 3e-3, 1e-2)),
    }
    assert len(there) == 3 * 4 * preset.variant_seeds
    assert all(each.more == (("tau", 0.1), ("backtracking", True)) for each in there)
    given = trial.arguments(there[0], preset, "folder")
    assert (given["backtracking"], given["num_iterations"]) == (True, 4)


def test_what_was_taken_back_is_told_of_a_run():
    run = {**ended(study="backtracking"), "logged": [{"grad_norm": 1.0, "adpo/steps_undone": 3.0}]}
    run["trial"]["more"] = {"backtracking": True}
    run["rollouts"] = [{**run["rollouts"][0], "live": 1.0}]
    start = {"watched": 0.3, "exams": {"arithmetic": {"greedy": 0.4}}}
    (line,) = summary.lines_of([run], start, "arithmetic")
    assert line["measured"]["steps_undone"] == 3.0
    assert "rate_factor" not in line["measured"]  # not logged


def test_rewards_that_say_nothing_are_told_from_what_is_true():
    columns = {"task": ["arithmetic"] * 4, "answer": ["5"] * 4, "completion_ids": [[1]] * 4}
    said = ["5", "6", "what?", "5"]
    with Correct() as correct:
        rewards = {kind: Watched(kind, correct, 2, seed=0) for kind in KINDS}
        found = {kind: reward(said, **columns) for kind, reward in rewards.items()}
    assert found["correct"] == [1.0, 0.0, 0.0, 1.0]
    assert found["format"] == [1.0, 1.0, 0.0, 1.0]
    assert set(found["random"]) | set(found["noisy"]) <= {0.0, 1.0}
    assert found["hackable"] == [1.0, BONUS, 4 * BONUS, 1.0]
    for reward in rewards.values():
        assert reward.rollouts[0]["right"] == 0.5
    assert rewards["format"].rollouts[0]["live"] == 0.5
    many = {"task": ["arithmetic"] * 1000, "answer": ["5"] * 1000}
    with Correct() as correct:
        noisy, coin = (Watched(kind, correct, 2, seed=0)(["5"] * 1000, **many) for kind in ("noisy", "random"))
    assert sum(noisy) == pytest.approx(800, abs=50)
    assert sum(coin) == pytest.approx(500, abs=60)
    assert rewards["correct"].rollouts[0] | {"length": 1.0} == rewards["correct"].rollouts[0]


def test_rewards_that_differ_by_rounding_give_a_group_no_gradient():
    assert agreement(["5", "6"] * 2, [0.0] * 4, [0.1 + 0.2, 0.3, 0.3, 0.0], 2)["live"] == 0.5


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def data(tmp_path):
    """A folder as the presets want it, made up."""
    names = [f"{first}{second}" for first in "abcdefghij" for second in "klmnopqr"]
    easy = [{"input": f"{name} has {n} and {n}. all ?", "target": 2.0 * n} for n, name in enumerate(names)]
    asked = {"Body": "zz has 3 and 3", "Question": "all?", "Answer": 6.0}
    lines(tmp_path / "data/mawps/test.jsonl", [*easy, easy[0], {"input": "zz has 9 and 9. all ?", "target": 18.0}])
    lines(tmp_path / "data/svamp/test.jsonl", [asked, {**asked, "Body": "yy has 4 and 4"}])
    solved = [
        {"question": f"{name} more of {n}?", "answer": f"<<1+1=2>>2\n#### {n}"} for n, name in enumerate(names)
    ]
    lines(tmp_path / "data/gsm8k/train.jsonl", solved)
    lines(tmp_path / "data/gsm8k/test.jsonl", [{"question": "xx more of 2?", "answer": "#### 2"}])
    return tmp_path / "data"


def test_what_is_examined_is_never_trained_on(data):
    preset = replace(SMOKE, start="somewhere", watched=10, groups=4, files=PRESETS["gpu"].files)
    sets = problems.from_files(data, preset, tokenizer=None)
    parts = [sets.train, sets.watched, sets.warm, *sets.exams.values()]
    asked = [{row["question"] for row in part} for part in parts]
    assert sum(map(len, asked)) == len(set.union(*asked)) == 80 + 3
    assert len(sets.train) + len(sets.watched) + len(sets.warm) == 80  # one was there twice, one is like an exam's
    with pytest.raises(ValueError, match="70 problems unlike those of the exams; 200 are needed"):
        problems.from_files(data, replace(preset, groups=100), tokenizer=None)


def small_start(folder, hidden=32):
    """An untrained model of characters."""
    made = embedded.make_model(embedded.WarmUp(hidden=hidden, layers=1))
    made.save_pretrained(folder)
    embedded.make_tokenizer().save_pretrained(folder)
    return Start(str(folder))


def test_a_start_is_known_by_its_weights(tmp_path):
    start = small_start(tmp_path / "one")
    known = start.digest()
    small_start(tmp_path / "two")
    assert Start(str(tmp_path / "two")).digest() == known
    model, _ = start.load()
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    model.save_pretrained(tmp_path / "two")
    assert Start(str(tmp_path / "two")).digest() != known


@pytest.mark.parametrize("part", ["model", "adapter"])
def test_weights_that_cannot_be_told_apart_are_refused(tmp_path, part):
    """Pickles are neither hashed nor read: two starts would be taken for one."""
    start = replace(small_start(tmp_path / "model"), adapter=str(tmp_path / "adapter"))
    shutil.copytree(Path(__file__).parents[2] / "docs" / "results" / "reasoning-start", tmp_path / "adapter")
    start.digest()
    (weights,) = (tmp_path / part).glob("*.safetensors")
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(ValueError, match=rf"{part}: expected a folder with weights in \.safetensors files"):
        start.digest()


def test_the_start_that_is_kept_is_that_of_the_results():
    results = Path(__file__).parents[2] / "docs" / "results"
    card = json.loads((results / "reasoning-start" / "card.json").read_text())
    adapter = results / "reasoning-start" / "adapter_model.safetensors"
    assert digest(adapter) == card["adapter_sha256"]
    assert adapter.stat().st_size == card["bytes"] <= warmup.MOST_BYTES
    assert card["goal_reached"]
    (words,) = (each for each in json.loads((results / "reasoning.json").read_text()) if each["preset"] == "gpu")
    assert words["start_digest"] == card["start"]
    assert words["start"]["svamp"]["greedy"] == card["after"]["exams"]["svamp"]["greedy"]


def test_an_adapter_that_does_not_fit(tmp_path):
    small_start(tmp_path / "model")
    kept = Path(__file__).parents[2] / "docs" / "results" / "reasoning-start"
    with pytest.raises(ValueError, match="cannot be put on this model"):
        Start(str(tmp_path / "model"), str(kept)).load()
    with pytest.raises(ValueError, match=r"expected a folder with adapter_config\.json"):
        Start(str(tmp_path / "model"), str(tmp_path)).load()


def test_a_verifier_that_fails_is_no_collapse_of_the_policy(tmp_path, monkeypatch):
    """The trial ends with what the verifier said, and is not counted."""
    start = small_start(tmp_path / "model")
    monkeypatch.setattr(Watched, "__call__", lambda *_, **__: 1 / 0)
    sets = problems.generated(SMOKE)
    with pytest.raises(
        ValueError, match=r"reward function watched failed .* times in a row, last with ZeroDivision"
    ):
        trial.carried_out(Trial("seeds", "ADPO", 1e-4, 1, 20, 1), SMOKE, start, sets, lambda _: None)


@pytest.mark.parametrize("method", ["ADPO", "GRPO"])
def test_a_policy_that_diverges_is_a_result(tmp_path, method):
    """Stopped, examined, counted; without a checkpoint, or the name of a folder that is gone."""
    start = small_start(tmp_path / "model")
    wild = Trial("seeds", method, 1e9, 1, 12, 1, reward="random")
    found = trial.carried_out(wild, SMOKE, start, problems.generated(SMOKE), lambda _: None)
    assert found["stopped"] == "5 optimizer steps in a row had a gradient that is not finite"
    assert 0 < len(found["rollouts"]) < 12
    (line,) = summary.lines_of(
        [found], trial.examined(start, SMOKE, problems.generated(SMOKE), print), "arithmetic"
    )
    assert line["collapsed"]
    json.dumps(line, allow_nan=False)


def test_a_sharpened_start_says_the_same_with_more_certainty(tmp_path):
    start = small_start(tmp_path)
    model, tokenizer = start.load()
    ids = torch.tensor([tokenizer.encode("1+1=")])
    before = model(ids).logits
    trial.sharpen(model, 4.0)
    torch.testing.assert_close(model(ids).logits, 4 * before)


def test_distance_from_the_start(tmp_path):
    start = small_start(tmp_path)
    model, tokenizer = start.load()
    other, _ = start.load()
    given = (tokenizer, [tokenizer.encode(asked) for asked in ("1+1=", "2+2=")], ["2", "4"], 3)
    assert measures.distance(model.eval(), other.eval(), *given)["kl_to_start"] == 0.0
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(1.5)
    moved = measures.distance(model, other, *given)
    assert moved["kl_to_start"] != 0.0
    assert moved["entropy"] > 0
    assert measures.forgetting(model, tokenizer) > 0


def typed(*arguments):
    return CliRunner().invoke(app, ["reproduce", "reasoning", *arguments])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--methods", "adpo,ppo"], "'ppo': expected some of adpo"),
        (["--methods", "adpo,grpo,adpo"], "expected each once"),
        (["--model", "mine"], "--model is for --preset gpu and paper; got mine"),
        (["--adapter", "mine"], "--adapter is for --preset gpu and paper; got mine"),
        (["--data", "mine"], "--data is for --preset gpu and paper; got mine"),
        (["--preset", "gpu"], "this preset needs --data"),
        (["--preset", "gpu", "--data", "."], "there is no mawps/test.jsonl in it"),
        (["--warm-up"], "the embedded one is warmed up by itself"),
        (["--preset", "paper", "--warm-up"], "all problems of the paper preset are for rewards"),
    ],
)
def test_mistakes(tmp_path, arguments, said):
    done = typed(*arguments, "--out", str(tmp_path / "out"))
    assert isinstance(done.exception, ValueError)  # one line and exit code 2, as every mistake of a command
    assert said in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_the_start_is_a_command(tmp_path, data, monkeypatch):
    small_start(tmp_path / "model")
    monkeypatch.setitem(run.PRESETS, "gpu", SMALL_WORDS)
    given = ["--preset", "gpu", "--model", str(tmp_path / "model"), "--data", str(data)]
    done = typed(*given, "--warm-up", "--epochs", "2", "--out", str(tmp_path / "start"))
    assert done.exit_code == 0, done.exception
    card = json.loads((tmp_path / "start" / "card.json").read_text())
    assert card["recipe"]["epochs"] == 2
    assert card["loss"][1] < card["loss"][0]
    assert card["bytes"] < 2**20
    assert card["start"] == Start(str(tmp_path / "model"), str(tmp_path / "start")).digest()
    assert card["start"] in done.output
    assert {file.name for file in (tmp_path / "start").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "card.json",
    }
    assert str(tmp_path) not in (tmp_path / "start" / "adapter_config.json").read_text()
    again = typed(*given, "--warm-up", "--out", str(tmp_path / "start"))
    assert "is not empty" in str(again.exception)
    (data / "gsm8k/train.jsonl").unlink()
    unread = typed(*given, "--warm-up", "--out", str(tmp_path / "unread"))
    assert "there is no gsm8k/train.jsonl in it" in str(unread.exception)
    assert not (tmp_path / "unread").exists()
    monkeypatch.setenv("ADPO_CACHE", str(tmp_path / "cache"))
    unpacked = Start(str(tmp_path / "model"), str(tmp_path / "start")).unpacked()
    assert unpacked.digest() == card["start"]
    assert unpacked.model.startswith(str(tmp_path / "cache"))
    started = unpacked.load()[0]
    plain = Start(str(tmp_path / "model")).load()[0]
    assert any(not torch.equal(a, b) for a, b in zip(started.parameters(), plain.parameters(), strict=True))


def other_truth(_, tasks, answers, completions):
    """In place of what is true: an untrained model gets nothing right, and would learn nothing."""
    pairs = zip(completions, answers, strict=True)
    return [Outcome.correct if (len(set(text)) + ord(answer[-1])) % 2 else Outcome.wrong for text, answer in pairs]


def test_the_command_compares_methods(tmp_path, monkeypatch):
    """The smoke preset as typed, from a start that need not be warmed up; then shown again."""
    start = small_start(tmp_path / "model")
    monkeypatch.setattr(run, "embedded_start", lambda *_: start)
    monkeypatch.setattr(Correct, "outcomes", other_truth)
    out = tmp_path / "out"
    done = typed("--out", str(out))
    assert done.exit_code == 0, done.exception
    results = json.loads((out / "results.json").read_text())
    assert results["start_digest"] == start.digest()
    tried = {
        method: [{"rate": 3e-4, **dict(each)} for each in METHODS[method].settings] for method in SMOKE.methods
    }
    assert all(best in tried[method] for method, best in results["best"].items())
    chose = [found["trial"] for found in results["runs"] if found["trial"]["study"] == "rates"]
    assert len(chose) == sum(map(len, tried.values()))  # every setting, at the best rate
    assert all({"rate": each["rate"], **each["more"]} in tried[each["method"]] for each in chose)
    assert len(results["runs"]) == len(chose) + 2 * SMOKE.seeds
    for found in results["runs"]:
        examined = found["exams"].get("arithmetic", {"right": ""})["right"]
        assert len(examined) == (0 if found["trial"]["study"] == "rates" else SMOKE.examined)
        assert len(found["rollouts"]) == (SMOKE.short if found["trial"]["study"] == "rates" else SMOKE.rollouts)
        assert found["tokens_per_step"] > 0
        assert any(log["grad_norm"] > 0 for log in found["logged"])
        assert found["watched"].count("1") / len(found["watched"]) == pytest.approx(
            found["curve"][-1][1], abs=1e-5
        )
    assert {row["study"] for row in results["rows"]} == {"rates", "seeds"}
    assert {line["exam"] for line in results["against"]} == {"arithmetic", "arithmetic, unmirrored", "watched"}
    listed = json.loads((out / "runs.json").read_text())
    assert [line["arithmetic"]["greedy"] for line in listed["runs"] if line["study"] == "seeds"] == [
        found["exams"]["arithmetic"]["greedy"] for found in results["runs"] if found["exams"]
    ]
    assert "right" not in listed["start"]["arithmetic"]
    for measure in ("distinct", "agreed_wrong", "live", "length", "reward"):
        assert all(line["measured"][f"last rollouts: {measure}"] is not None for line in listed["runs"])
    reported = [line["measured"] for line in listed["runs"] if line["study"] == "seeds"]
    assert all({"kl_to_start", "entropy", "gradient"} <= set(measured) for measured in reported)
    assert (out / "curves.svg").exists()
    assert "each method at its own best learning rate" in done.output
    monkeypatch.setattr(trial, "carried_out", lambda *_: 1 / 0)
    again = typed("--out", str(out), "--resume")
    assert again.exit_code == 0, again.exception
    monkeypatch.setattr(run, "embedded_start", lambda *_: small_start(tmp_path / "other", hidden=64))
    other = typed("--out", str(out), "--resume")
    assert "other settings" in str(other.exception)  # results of two starts are never merged


@pytest.mark.slow
def test_the_smoke_preset_as_it_is(tmp_path, monkeypatch):
    """A start that is warmed up, the real verifier, every method's choice and report: minutes."""
    monkeypatch.setenv("ADPO_CACHE", str(tmp_path / "cache"))
    done = typed("--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.exception
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert 0.2 < results["start"]["exams"]["arithmetic"]["greedy"] < 0.5  # a third, of 32 problems
    reported = [found for found in results["runs"] if found["trial"]["study"] == "seeds"]
    assert [(found["trial"]["method"], found["stopped"]) for found in reported] == [
        ("ADPO", None),
        ("GRPO", None),
    ] * 2
    assert all(0 < rollout["right"] < 1 for found in reported for rollout in found["rollouts"])
    assert all(found["kl_to_start"] > 0 for found in reported)
    assert results["not_yet"] == []


def of_math(number, level):
    """A problem as MATH has it, unlike its neighbours in its words."""
    name = "abcdefghij"[number // 10] + "klmnopqrst"[number % 10]
    solution = f"So it is \\boxed{{{number}}}."
    return {"problem": f"what is {name} worth?", "solution": solution, "level": f"Level {level}"}


def test_the_settings_of_the_paper(tmp_path, monkeypatch):
    """Its preset as typed, with fewer of everything: MATH's files, a model that is a folder."""
    small_start(tmp_path / "model")
    rows = [of_math(number, 1 + number % 5) for number in range(100)]
    lines(tmp_path / "data/math/train.jsonl", [*rows[:80], {**of_math(0, 3), "level": "Level ?"}])
    lines(tmp_path / "data/math/test.jsonl", rows[80:])
    fewer = {"rates": (1e-4,), "seeds": 2, "groups": 4, "members": 2, "longest": 6, "rollouts": 1, "short": 1}
    fewer |= {"watched": 4, "examined": 3, "sampled": 2, "exam_samples": 2, "watch_every": 1}
    small = replace(PRESETS["paper"], **fewer)
    monkeypatch.setitem(run.PRESETS, "paper", small)
    sets = problems.from_files(tmp_path / "data", small, tokenizer=None)
    hard = {row["problem"] for row in rows[:80] if row["level"] in ("Level 3", "Level 4")}
    assert {row["question"] for row in (*sets.train, *sets.watched)} == hard
    assert not sets.warm  # all are for rewards
    given = ["--preset", "paper", "--model", str(tmp_path / "model"), "--data", str(tmp_path / "data")]
    done = typed(*given, "--methods", "adpo_pl,grpo", "--out", str(tmp_path / "out"))
    assert done.exit_code == 0, done.exception
    kept = json.loads((tmp_path / "out" / "runs.json").read_text())
    reported = [run for run in kept["runs"] if run["study"] == "seeds"]
    assert [run["method"] for run in reported] == ["ADPO Plackett-Luce", "GRPO"] * 2
    assert all(0 <= run["math"]["greedy"] <= 1 and run["inner"] == 4 for run in reported)
    splits = {"train": rows[:80], "test": rows[80:]}
    monkeypatch.setattr(problems, "named", lambda name, _, split: splits[split] if "MATH" in name else 1 / 0)
    assert problems.from_files(None, small, tokenizer=None) == sets  # without --data, by its name
    again = typed(*given[:4], "--methods", "adpo_pl,grpo", "--out", str(tmp_path / "out"), "--resume")
    assert "other settings" in str(again.exception)  # what was read from files is not merged with it
    nobody = typed(*given[:2], "--model", "nobody/nothing", *given[4:], "--out", str(tmp_path / "none"))
    assert "nobody/nothing" in str(nobody.exception)
    assert not (tmp_path / "none").exists()


def test_of_two_that_unpack_a_start_at_once_the_first_to_end_keeps_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ADPO_CACHE", str(tmp_path))
    recipe = embedded.WarmUp(hidden=16, layers=1)
    made = embedded.make_model(recipe), embedded.make_tokenizer()
    first = []

    def meanwhile():
        first.append((starts._kept("x", lambda: made) / "config.json").stat().st_ino)
        return made

    folder = starts._kept("x", meanwhile)
    assert [(folder / "config.json").stat().st_ino] == first
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


@pytest.mark.parametrize("holds", ["file", "results"])
def test_a_folder_that_will_not_do_is_refused_before_the_start_is_made(tmp_path, monkeypatch, holds):
    monkeypatch.setattr(run, "placed", lambda *_: pytest.fail("a start was made"))
    out = tmp_path / "out"
    if holds == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "job.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is a file; expected a folder|already holds results: add --resume"):
        run.reproduce("smoke", None, None, run.Order(out))
