"""Rollouts of several batches: the policy is trained on what an older one has sampled."""

from dataclasses import replace

import pytest

pytest.importorskip("trl")

import torch
from test_reasoning import seeded, small_start

from adpo.experiments.reasoning import comparisons, figures, problems, summary, trial
from adpo.experiments.reasoning.presets import PRESETS
from adpo.experiments.reasoning.protocol import Choice, Trial
from adpo.experiments.reasoning.rewards import Watched
from adpo.experiments.reasoning.tables import tables
from adpo.experiments.reasoning.variants import OF_WORDS

SMALL = replace(PRESETS["smoke"], groups=8, members=4, rollouts=8, watched=4, examined=4, sampled=2)


def test_the_plan_lists_them():
    preset = PRESETS["embedded"]
    best = dict.fromkeys(preset.methods, Choice(1e-3, (("tau", 0.1),)))
    stale = [each for each in preset.beside(best) if each.study == "stale"]
    methods = ("ADPO", "GRPO", "GSPO", "ADPO Plackett-Luce", "Boltzmann, no anchor")
    assert [(each.method, dict(each.more)["steps_per_generation"], each.seed) for each in stale] == [
        (method, batches, seed) for batches in (4, 12) for method in methods for seed in range(1, 6)
    ]
    assert stale[0].name == "stale-ADPO-0.001-seed1-inner4, tau 0.1, steps_per_generation 4"
    plain = trial.arguments(next(preset.reported(best)), preset, "folder")
    problems_there = len(problems.generated(preset).train)
    for each in stale:
        given = trial.arguments(each, preset, "folder")
        for same in ("max_steps", "per_device_train_batch_size", "num_iterations", "gradient_accumulation_steps"):
            assert given[same] == plain[same]
        steps = given["steps_per_generation"] * given["num_iterations"]
        assert given["max_steps"] % steps == 0  # no rollout is left half used
        assert given["steps_per_generation"] * preset.groups <= problems_there
    others = [each for each in preset.beside(best) if each.study == "stale settings"]
    assert {(each.method, *dict(each.more).values()) for each in others} == {
        *(("ADPO", tau, batches) for batches in (4, 12) for tau in (0.3, 1.0)),
        *(("GRPO", 0.1, batches, epsilon) for batches in (4, 12) for epsilon in (0.2, 0.4)),  # tau is given above
    }
    assert len(others) == 40
    assert not any(variant.study.startswith("stale") for variant in OF_WORDS)


@pytest.fixture
def watched(monkeypatch):
    """What rewards and trainers are given: completions, their tokens, and how far off the anchor is."""
    seen = {"asked": [], "completions": [], "tokens": 0, "steps_behind": [], "off": [], "moved": []}
    rewarded, made = Watched.__call__, trial.made_trainer

    def reward(self, completions, task, answer, **given):
        seen["asked"] += given["prompts"][:: self.members]
        seen["completions"].append(len(completions))
        seen["tokens"] += sum(map(len, given["completion_ids"]))
        return rewarded(self, completions, task, answer, **given)

    def spied(*arguments):
        trainer = made(*arguments)
        generate, loss, sampler = trainer._generate_and_score_completions, trainer._compute_loss, {}

        def generated(inputs):
            sampler.update(step=trainer.state.global_step, model=trial._copied(trainer.model, torch.float32))
            return generate(inputs)

        def computed(model, rows):
            found = loss(model, rows)
            old, new = (per_token(each, rows) for each in (sampler["model"], trial._copied(model, torch.float32)))
            seen["steps_behind"].append(trainer.state.global_step - sampler["step"])
            seen["moved"].append(float((new - old).abs().max()))
            if "anchor_logp" in rows:
                seen["off"].append(float((rows["anchor_logp"] - old.sum(1)).abs().max()))
            elif "old_per_token_logps" in rows:
                apart = (rows["old_per_token_logps"] - old) * rows["completion_mask"]
                seen["off"].append(float(apart.abs().max()))
            return found

        trainer._generate_and_score_completions, trainer._compute_loss = generated, computed
        return trainer

    monkeypatch.setattr(Watched, "__call__", reward)
    monkeypatch.setattr(trial, "made_trainer", spied)
    return seen


@torch.no_grad()
def per_token(model, rows):
    """Log-probabilities of completions, as anyone would compute them."""
    ids, mask = (torch.cat([rows[f"prompt_{name}"], rows[f"completion_{name}"]], 1) for name in ("ids", "mask"))
    places = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=places).logits
    length = rows["completion_ids"].shape[1]
    found = logits[:, -length - 1 : -1].log_softmax(-1).gather(2, rows["completion_ids"].unsqueeze(2)).squeeze(2)
    return found * rows["completion_mask"]


@pytest.mark.parametrize("method", ["ADPO", "GRPO"])
def test_an_older_policy_has_sampled_and_is_the_anchor(tmp_path, watched, method):
    """As many steps and completions, on the same problems; every batch is anchored where it was sampled."""
    start, sets = small_start(tmp_path / "model"), problems.generated(SMALL)
    plain = Trial("seeds", method, 1e-2, 1, SMALL.rollouts, reward="random")
    trial.carried_out(plain, SMALL, start, sets, lambda _: None)
    assert watched["completions"] == [32] * 8
    asked = watched["asked"]
    watched.update(asked=[], completions=[], tokens=0, steps_behind=[], off=[], moved=[])
    found = trial.carried_out(
        replace(plain, study="stale", more=(("steps_per_generation", 4),)), SMALL, start, sets, lambda _: None
    )
    assert watched["asked"] == asked
    assert watched["completions"] == [128, 128]  # a call for each sampling
    assert watched["steps_behind"] == [*range(16), *range(16)]
    assert len(found["logged"]) == 32
    assert len(found["rollouts"]) == 2
    assert found["tokens_per_step"] == watched["tokens"] / 32
    assert [at for at, _ in found["curve"]] == list(range(1, 9))
    assert len(watched["off"]) == (30 if method == "ADPO" else 32)  # ADPO needs none where it has just sampled
    assert max(watched["off"]) < 1e-4
    assert max(watched["moved"]) > 0.1


def late(method, seed, batches, right, last):
    """As `carried_out` tells it."""
    found = seeded(method, seed, right)
    found["trial"] |= {"study": "stale", "more": {"steps_per_generation": batches}}
    found["trial"]["changes"] = f", steps_per_generation {batches}"
    shares = [0.1] * (60 // batches - 1) + [last]
    return found | {"logged": [], "rollouts": [{"right": share, "length": 3.0} for share in shares]}


def test_they_are_told_in_words(tmp_path):
    runs = [
        late(method, seed, batches, right, last=0.6)
        for batches in (4, 12)
        for seed in (1, 2)
        for method, right in (("ADPO", "1111"), ("GRPO", "0001"))
    ]
    against = comparisons.against_beside(runs, "arithmetic")
    assert [(line["what"], line["ours"], line["other"], line["mean"]) for line in against] == [
        ("rollouts of 4 batches", "ADPO", "GRPO", 0.75),
        ("rollouts of 12 batches", "ADPO", "GRPO", 0.75),
    ]
    start = {"watched": 0.3, "exams": {"arithmetic": {"greedy": 0.3, "pass_at_4": 0.5}}}
    rows = summary.rows_of(summary.lines_of(runs, start, "arithmetic"), ["arithmetic"])
    assert all(row["last rollouts: right"][0] == 0.6 for row in rows)  # of 15 or 5 the last alone
    results = {"exams": ["arithmetic"], "start": start, "rows": rows, "against": against, "runs": runs}
    told, compared = tables(results)
    assert "reward to live are those of the last sampling" in told.title
    assert told.columns[:3] == ("method", "rate", "steps a batch")
    assert [row[0] for row in told.rows][::2] == ["ADPO, steps_per_generation 4", "ADPO, steps_per_generation 12"]
    assert {row[1] for row in compared.rows} == {"rollouts of 4 batches", "rollouts of 12 batches"}
    figures.draw(results, tmp_path)  # of the reported runs alone
    assert not list(tmp_path.iterdir())


def test_settings_are_chosen_by_watched_problems_and_compared_in_the_exam():
    """Not by the exam itself; a method of which one setting alone was tried is not among them."""

    def tried(method, study, setting, right, watched):
        found = [late(method, seed, 4, right, last=0.6) for seed in (1, 2)]
        for run in found:
            run["trial"] |= {"study": study, "changes": setting}
            run["watched"] = watched
        return found

    runs = [
        *tried("ADPO", "stale", ", tau 0.1", "1111", "0001"),
        *tried("ADPO", "stale settings", ", tau 0.3", "0111", "0011"),
        *tried("GRPO", "stale", ", epsilon 0.1", "0001", "0111"),
        *tried("GRPO", "stale settings", ", epsilon 0.2", "1111", "0001"),
        *tried("GSPO", "stale", ", epsilon 0.1", "0000", "1111"),
    ]
    found = {
        line["what"]: line for line in comparisons.against_beside(runs, "arithmetic") if line["other"] == "GRPO"
    }
    assert found["rollouts of 4 batches"]["mean"] == 0.75  # those that are best with fresh rollouts
    assert found["rollouts of 4 batches, settings chosen for them"]["mean"] == 0.5
    others = {line["other"] for line in comparisons.against_beside(runs, "arithmetic") if "chosen" in line["what"]}
    assert others == {"GRPO"}
