"""Students of a teacher: lessons, candidates, and what each method converges to."""

import json
import math
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("gymnasium")

from adpo.cli import app
from adpo.core.temperature import GuardedTau
from adpo.experiments.distill import film, learning, measures, outcomes, run, students, summary, worlds
from adpo.experiments.distill.actor import Actor, Gaussian, save_actor
from adpo.experiments.distill.learning import EDGE, Course, drawn_candidates, taught
from adpo.experiments.distill.lessons import Lessons, record
from adpo.experiments.distill.methods import methods
from adpo.experiments.distill.protocol import COMPARED, PRESETS, Lesson, Protocol
from adpo.experiments.distill.teachers import load_teacher

COURSE = Course(steps=600, hidden=16, batch=64)


def easy_teacher():
    """Means that are linear in the state, one width."""
    return lambda states: Gaussian(0.3 * states[..., :2], torch.full_like(states[..., :2], -1.0))


def lessons(count=400):
    states = torch.randn(count, 3, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(count, 2, generator=torch.Generator().manual_seed(1))
    said = easy_teacher()(states)
    return Lessons(states, said.mean, said.log_std, said.draw(noise), torch.arange(count) // 50)


def distance(weights, states):
    stacked = states.expand(len(weights[0]), -1, -1)
    return easy_teacher()(stacked).kl(students.policy(weights, stacked)).mean(1)


@pytest.mark.parametrize("name", methods())
def test_runs_do_not_mix(name):
    """Three students at once are three students one by one, were it not for the draws that they share."""
    together = students.initial(3, 2, 8, [4, 5, 6])
    alone = [students.initial(3, 2, 8, [seed]) for seed in (4, 5, 6)]
    states = torch.randn(3, 7, 3)
    found = students.policy(together, states)
    for number, weights in enumerate(alone):
        single = students.policy(weights, states[number : number + 1])
        torch.testing.assert_close(found.mean[number], single.mean[0])
    weights = taught(methods()[name], Course(steps=3, hidden=8, batch=8), lessons(), [4, 4])
    assert all(len(value) == 2 for value in weights)


CLOSE = ["KD, candidates", "KD, closed form", "BC, likelihood", "ADPO anchored target", "ADPO anchored target EMA"]


@pytest.mark.parametrize("name", [*CLOSE, "ADPO anchored target, guarded tau"])
def test_what_should_become_the_teacher_does(name):
    practice, held_out = lessons().split(100)
    courses = (replace(COURSE, steps=1), COURSE)
    before, after = (distance(taught(methods()[name], one, practice, [0, 1]), held_out.states) for one in courses)
    assert (before > 0.5).all()
    assert (after < 0.06).all()


@pytest.mark.parametrize("name", ["ADPO self-anchor", "ADPO self-anchor EMA"])
def test_a_plain_target_over_an_anchor_narrows_the_student(name):
    """As theory says: its optimum is the anchor times the teacher."""
    kept = taught(methods()[name], COURSE, lessons(), [0, 1])
    width = students.policy(kept, lessons().states.expand(2, -1, -1)).log_std.exp().mean((1, 2))
    assert (width < 0.25).all()  # the teacher's is 0.37


def test_candidates_come_from_whom_they_should():
    course = Course(candidates=8, of_teacher=0.25, uniform=0.5)
    assert course.counts() == (2, 2, 4)
    teacher = Gaussian(torch.full((1, 500, 1), 3.0), torch.full((1, 500, 1), -4.0))
    student = Gaussian(torch.full((1, 500, 1), -3.0), torch.full((1, 500, 1), -4.0))
    found = drawn_candidates(course, teacher, student, torch.Generator().manual_seed(0))
    assert found.shape == (1, 500, 8, 1)
    torch.testing.assert_close(found[..., :2, :].mean(), torch.tensor(3.0), rtol=0, atol=0.01)
    torch.testing.assert_close(found[..., 2:4, :].mean(), torch.tensor(-3.0), rtol=0, atol=0.01)
    uniform = torch.tanh(found[..., 4:, :])
    assert float(uniform.abs().max()) <= EDGE
    assert abs(float(uniform.square().mean()) - EDGE**2 / 3) < 0.02


def test_lessons_come_back_from_their_file(tmp_path):
    path = tmp_path / "lessons.safetensors"
    lessons().save(path)
    for kept, given in zip(Lessons.load(path), lessons(), strict=True):
        torch.testing.assert_close(kept, given, rtol=0, atol=0)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="choose another --out"):
        Lessons.load(path)
    with pytest.raises(ValueError, match="choose another --out"):
        Lessons.load(tmp_path / "missing.safetensors")


def test_episodes_are_recorded_whole_and_split_whole():
    teacher = Actor(3, 1, 8).requires_grad_(requires_grad=False)
    found = record(teacher, "Pendulum-v1", 1000, seed=3, side_by_side=4)
    assert torch.bincount(found.episode).tolist() == [200] * 8
    again = record(teacher, "Pendulum-v1", 1000, seed=3, side_by_side=4)
    assert all(torch.equal(mine, other) for mine, other in zip(found, again, strict=True))
    practice, held_out = found.split(300)
    assert (len(practice.states), len(held_out.states)) == (1200, 400)
    assert not set(practice.episode.tolist()) & set(held_out.episode.tolist())
    with pytest.raises(ValueError, match="record more"):
        found.split(1600)


def test_lessons_that_are_corrupted():
    given = lessons(4000)
    assert all(torch.equal(mine, other) for mine, other in zip(given.corrupted(0, 0, seed=1), given, strict=True))
    noisy = given.corrupted(0.5, 0, seed=1)
    off = (noisy.mean - given.mean) / given.log_std.exp()
    assert abs(float(off.std()) - 0.5) < 0.02
    torch.testing.assert_close(noisy.shown - given.shown, noisy.mean - given.mean)
    swapped = given.corrupted(0, 0.3, seed=1)
    share = float((swapped.mean != given.mean).any(1).float().mean())
    assert abs(share - 0.3) < 0.03
    assert torch.equal(swapped.states, given.states)
    assert len(given.first(10).states) == 10
    with pytest.raises(ValueError, match="5000 states were asked for; there are 4000"):
        given.first(5000)


def test_a_student_that_is_the_teacher_measures_as_such():
    weights = students.initial(3, 2, 8, [0, 0])
    said = students.policy([value[:1] for value in weights], lessons().states.unsqueeze(0))
    own = measures.closeness(weights, lessons()._replace(mean=said.mean[0], log_std=said.log_std[0]), COURSE)
    for value, expected in zip(own[:3], (0, 0, 1), strict=True):
        torch.testing.assert_close(value, torch.full((2,), float(expected)), rtol=0, atol=1e-6)
    assert torch.equal(own.std, own.teacher_std)


def test_orders_are_graded():
    gains = torch.tensor([0.6, 0.3, 0.1])
    scores = torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])
    found = measures.ndcg(scores, gains.expand(2, -1))
    discount = [1.0, 1 / math.log2(3), 0.5]
    best = sum(g * d for g, d in zip((0.6, 0.3, 0.1), discount, strict=True))
    worst = sum(g * d for g, d in zip((0.1, 0.3, 0.6), discount, strict=True))
    torch.testing.assert_close(found, torch.tensor([1.0, worst / best]))


def test_students_earn_what_they_earn_alone():
    both = students.initial(3, 1, 8, [0, 1])
    found = measures.earned("Pendulum-v1", both, 2, seed=5, noise=True)
    for number in range(2):
        alone = [value[number : number + 1] for value in both]
        torch.testing.assert_close(
            found[number : number + 1], measures.earned("Pendulum-v1", alone, 2, seed=5, noise=True)
        )
    assert found.shape == (2, 2)
    assert not torch.equal(found[0], found[1])


SMALL = replace(
    PRESETS["smoke"],
    environments=("Pendulum-v1",),
    main=Lesson(states=300, course=Course(steps=40, hidden=8)),
    beside=Lesson("beside", states=300, course=Course(steps=40, hidden=8)),
)


@pytest.mark.parametrize("lesson", list(SMALL.lessons()), ids=lambda lesson: lesson.name)
def test_outcomes_of_a_study(lesson):
    teacher = Actor(3, 1, 8).requires_grad_(requires_grad=False)
    practice, held_out = outcomes.recorded(teacher, "Pendulum-v1", SMALL).split(SMALL.held_out)
    given = ("Pendulum-v1", "ADPO anchored target", lesson, SMALL, teacher, practice, held_out)
    found = outcomes.outcome(*given)
    assert all(len(found[key]) == 2 for key in ("kl", "reverse_kl", "ndcg", "std", "deterministic", "stochastic"))
    assert found == outcomes.outcome(*given)


def test_the_teacher_is_examined_in_the_episodes_of_its_students():
    teacher = Actor(3, 1, 8).requires_grad_(requires_grad=False)
    own = outcomes.teachers_own("Pendulum-v1", teacher, SMALL)
    assert [len(values) for values in own.values()] == [2, 2]
    assert own == outcomes.teachers_own("Pendulum-v1", teacher, SMALL)


def test_a_job_of_all_methods_resumes(tmp_path, monkeypatch):
    torch.manual_seed(0)
    (tmp_path / "teachers").mkdir()
    save_actor(Actor(3, 1, 8), tmp_path / "teachers" / "Pendulum-v1.safetensors", {"steps": 0})
    tiny = replace(
        SMALL, few_states=(), noises=(), small=(), main=replace(SMALL.main, course=Course(steps=32, hidden=4))
    )
    monkeypatch.setitem(PRESETS, "smoke", tiny)
    order = run.Order(tmp_path / "out", teachers=tmp_path / "teachers")
    results = run.reproduce("smoke", None, None, order)
    rows = {(row["study"], row["method"]): row for row in results["summary"]}
    assert set(rows) == {("main", method) for method in methods()} | {("steps", method) for method in COMPARED}
    own = sum(results["own"]["Pendulum-v1"]["deterministic"]) / 2
    row = rows["main", "KD, candidates"]
    assert row["deterministic_share"] == pytest.approx(row["deterministic"] / own)
    (tmp_path / "out" / "results.json").unlink()
    again = run.reproduce("smoke", None, None, replace(order, resume=True))
    assert again == results
    with pytest.raises(ValueError, match=r"no teacher for 'Hopper-v5'"):
        run.reproduce("smoke", ("Hopper-v5",), None, replace(order, out=tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_students_that_act_are_corrected():
    """What DAgger adds: states of the students, each in its own world, and the teacher's word on them."""
    teacher = Actor(3, 1, 8).requires_grad_(requires_grad=False)
    weights = students.initial(3, 1, 8, [0, 1])
    found = outcomes.visited(teacher, "Pendulum-v1", weights, 300, seed=1)
    assert len(found.states) == 400
    said = teacher(found.states)
    torch.testing.assert_close(found.mean, said.mean)
    off = (found.shown - said.mean) * (-said.log_std).exp()
    assert abs(float(off.std()) - 1) < 0.15
    twice = found.joined(found)
    assert len(twice.states) == 800
    assert len(torch.unique(twice.episode)) == 2 * len(torch.unique(found.episode))
    protocol = replace(SMALL, dagger=1)
    practice, held_out = outcomes.recorded(teacher, "Pendulum-v1", protocol).split(protocol.held_out)
    given = ("Pendulum-v1", "KD, closed form", SMALL.main)
    one, two = (outcomes.outcome(*given, each, teacher, practice, held_out)["kl"] for each in (SMALL, protocol))
    assert one != two


def test_students_of_normalised_states_act_on_states_as_they_are():
    weights = students.initial(3, 1, 8, [0, 1, 2])
    states, shift, scale = torch.randn(3, 5, 3), torch.randn(3), torch.rand(3) + 0.5
    found = students.policy(students.on_raw_states(weights, shift, scale), states)
    torch.testing.assert_close(found.mean, students.policy(weights, (states - shift) / scale).mean)


def test_each_run_has_a_temperature_of_its_own():
    def seen(runs):
        shape = (runs, 3, 1)
        return [Gaussian(torch.full(shape, value), torch.full(shape, -1.0)) for value in (3.0, 1.0, 0.5)]

    teacher = Gaussian(torch.zeros(2, 3, 1), torch.zeros(2, 3, 1) - 1)
    both, alone = [GuardedTau(), GuardedTau()], [GuardedTau()]
    for two, one in zip(seen(2), seen(1), strict=True):
        other = Gaussian(two.mean.clone(), two.log_std)
        other.mean[1] = 9.0  # the second never gets closer
        found = learning._guarded(both, other, teacher)
        single = learning._guarded(alone, one, Gaussian(*(part[:1] for part in teacher)))
        torch.testing.assert_close(found[:1], single)
    assert found[0] < 2.0 == found[1]


def test_a_student_beyond_its_bounds_can_come_back():
    weights = [value.requires_grad_() for value in students.initial(3, 1, 8, [0])]
    with torch.no_grad():
        weights[-1][..., -1] = 9.0
    log_std = students.policy(weights, torch.randn(1, 5, 3)).log_std
    assert (log_std > 2).all()
    (slope,) = torch.autograd.grad(log_std.sum(), weights[-1])
    assert slope[..., -1].item() > 0


MAIN = Lesson(course=Course(steps=10))
STUDY = Protocol(("E",), 3, 2, main=MAIN, few_states=(), few_steps=(), noises=(), shares_wrong=(), small=(8,))


def outcome_of(kl, earned):
    values = {measure: [0.5, 0.5, 0.5] for measure in summary.MEASURES}
    ndcg = [0.999] * 3
    return values | {"kl": kl, "ndcg": ndcg, "stochastic": earned, "deterministic": earned}


def test_verdicts_are_those_of_the_intervals():
    outcomes_of = {}
    for lesson in STUDY.lessons():
        for method in STUDY.methods(lesson):
            found = outcome_of([0.01, 0.011, 0.012], [98, 100, 99])
            if method == "KD, candidates":
                found = outcome_of(
                    [0.02, 0.021, 0.023], [90, 92, 91] if lesson.study == "small" else [99, 98, 100]
                )
            if method == "ADPO anchored target EMA":
                found = outcome_of([0.03, 0.03, 0.03], [50, 150, 100])
            outcomes_of[summary.outcome_name("E", lesson, method)] = found
    results = {"outcomes": outcomes_of, "own": {"E": {"deterministic": [100, 100], "stochastic": [100, 100]}}}
    told = {(each["method"], each["claim"]): each["holds"] for each in summary.claims(results, STUDY)}
    assert told["ADPO anchored target", "KL to the teacher at most 0.02"]
    assert told["ADPO anchored target", "stochastic return within 5% of the teacher's"]
    assert not told["ADPO anchored target EMA", "KL to the teacher at most 0.02"]
    assert not told["ADPO anchored target EMA", "deterministic return within 5% of the teacher's"]  # too wide
    rows = {(row["study"], row["method"]): row for row in summary.against_kd(results, STUDY)}
    assert rows["small", "ADPO anchored target"]["return_verdict"] == "ahead"
    assert rows["main", "ADPO anchored target"]["return_verdict"] == "level"
    assert rows["main", "ADPO anchored target"]["kl_verdict"] == "ahead"
    assert rows["main", "ADPO anchored target EMA"]["kl_verdict"] == "behind"


@pytest.mark.parametrize("name", ["HalfCheetah-v5", "Hopper-v5"])
def test_teachers_that_come_with_the_package_earn_what_their_cards_say(name):
    pytest.importorskip("mujoco")
    teacher, card = load_teacher(name)
    assert card["deterministic"]["mean"] > {"HalfCheetah-v5": 8000, "Hopper-v5": 2500}[name]
    earned = worlds.returns(name, lambda states: torch.tanh(teacher(states).mean), 3, seed=8)
    assert all(abs(value - card["deterministic"]["mean"]) < 6 * card["deterministic"]["std"] for value in earned)


def test_the_command_distils_a_real_teacher(tmp_path, monkeypatch):
    """The smoke preset, as typed; in an empty folder, where nothing but results is left behind."""
    pytest.importorskip("mujoco")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["reproduce", "distill", "--out", "out"])
    assert done.exit_code == 0, done.output
    assert "ADPO anchored target" in done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["own"]["Hopper-v5"]["deterministic"][0] > 2500
    assert {row["study"] for row in results["summary"]} == {"main", "steps", "states", "small"}
    assert "| KD, candidates |" in (tmp_path / "out" / "tables.md").read_text()
    assert all((tmp_path / "out" / f"steps.{ending}").exists() for ending in ("svg", "png"))
    assert [value.shape[0] for value in students.load(tmp_path / "out" / "student-Hopper-v5.safetensors")] == [
        1
    ] * 6
    filmed = (tmp_path / "out" / "film-Hopper-v5.png").exists()
    assert filmed != ("no pictures of Hopper-v5: this machine does not render" in done.output)


def test_a_machine_that_cannot_render_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(worlds, "alone", lambda _: 1 / 0)
    weights = students.initial(3, 1, 8, [0])
    reason = film.strip("Pendulum-v1", Actor(3, 1, 8), weights, tmp_path / "film.png", seed=0)
    assert reason == "this machine does not render (ZeroDivisionError: division by zero)"
    assert not (tmp_path / "film.png").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--env", "Nope-v1"], "no environment 'Nope-v1'"),
        (["--env", "CartPole-v1"], "expected actions that are numbers in bounds"),
        (["--env", "Pendulum-v1"], "no teacher for 'Pendulum-v1'"),
        (["--train-teacher", "Nope-v1"], "no environment 'Nope-v1'"),
        (["--train-teacher", "Pendulum-v1", "--resume"], "to go on from: leave out --resume"),
        (["--minutes", "3"], "--minutes is for --train-teacher alone"),
    ],
)
def test_mistakes_are_one_line(tmp_path, arguments, said):
    done = CliRunner().invoke(app, ["reproduce", "distill", "--out", str(tmp_path / "out"), *arguments])
    assert isinstance(done.exception, ValueError)
    assert said in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_of_a_teacher_is_one_line(tmp_path):
    command = ["reproduce", "distill", "--train-teacher", "Pendulum-v1", "--out", str(tmp_path), "--resume"]
    checkpoint = tmp_path / "Pendulum-v1.checkpoint.safetensors"
    checkpoint.write_text("junk")
    for about in ("", "{}", '{"steps": 1}'):
        (tmp_path / "Pendulum-v1.progress.json").write_text(about)
        done = CliRunner().invoke(app, command)
        assert isinstance(done.exception, ValueError)
        assert "cannot be gone on from" in str(done.exception)
    assert checkpoint.read_text() == "junk"
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, [*command[:-3], "--out", str(tmp_path / "file")])
    assert "is a file; expected a folder" in str(done.exception)


@pytest.mark.parametrize("smooth", [False, True])
def test_a_teacher_is_trained_and_goes_on(tmp_path, monkeypatch, smooth):
    from adpo.experiments.distill import teachers
    from adpo.experiments.distill.sac import Recipe
    from adpo.experiments.distill.training import Plan

    recipe = Recipe(
        hidden=8, actor_hidden=4, smooth=smooth, actor_decay=0.1, batch=16, kept=2000, random_steps=100
    )
    monkeypatch.setitem(
        teachers.PLANS,
        "Pendulum-v1",
        Plan("Pendulum-v1", steps=400, exam_every=200, exam_episodes=1, recipe=recipe),
    )
    command = ["reproduce", "distill", "--train-teacher", "Pendulum-v1", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "400 of 400 steps" in done.output
    again = CliRunner().invoke(app, command)
    assert "add --resume" in str(again.exception)
    assert CliRunner().invoke(app, [*command, "--resume"]).exit_code == 0
    made, card = load_teacher("Pendulum-v1", tmp_path / "out")
    assert made.sizes == {"states": 3, "actions": 1, "hidden": 4, "smooth": smooth}
    assert card["recipe"]["smooth"] == smooth
    if smooth:  # by the random states, once
        assert not torch.equal(made.scale, torch.ones(3))
