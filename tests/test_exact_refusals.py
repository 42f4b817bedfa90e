"""Bad input of `exact.backward` costs no pass, on one process or several; ranks that differ are refused."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import adpo
from adpo.exact import backward, coefficients

IDS = torch.tensor([3, 3, 5, 5])
PIECES = [torch.tensor([0, 2]), torch.tensor([1, 3])]
NAN, INF = float("nan"), float("inf")
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0])


def never(rows):
    raise AssertionError("scored")


def call(target, score=never, **changes):
    arguments = {"anchor_logp": torch.zeros(4), "micro_batches": PIECES, "group_ids": IDS, **changes}
    objective = changes.pop("objective", None) or adpo.Objective(target)
    arguments.pop("objective", None)
    return backward(objective, score, **arguments)


RANKING, BOLTZMANN = adpo.plackett_luce(), adpo.boltzmann(1.0)
REFUSED = {
    "rewards at group 1, candidate 0 is nan": lambda: call(RANKING, rewards=torch.tensor([1, 0, NAN, 0])),
    "rewards at group 0, candidate 1 is inf": lambda: call(BOLTZMANN, rewards=torch.tensor([1, INF, 0, 0])),
    "anchor_logp at group 1, candidate 1 is nan": lambda: call(
        BOLTZMANN, rewards=REWARDS, anchor_logp=torch.tensor([0, 0, 0, NAN])
    ),
    "labels at group 1 is -100.0": lambda: call(adpo.one_hot(), labels=torch.tensor([0, -100])),
    "tau must be a positive finite number; got -1": lambda: call(BOLTZMANN, rewards=REWARDS, tau=-1.0),
    "tau at group 1 is 0.0": lambda: call(BOLTZMANN, rewards=REWARDS, tau=torch.tensor([1.0, 0.0])),
    "tau must be [groups] = [2]; got [3]": lambda: call(BOLTZMANN, rewards=REWARDS, tau=torch.ones(3)),
    "needs the signal `rewards`": lambda: call(BOLTZMANN),
    "unknown signal `reward`": lambda: call(BOLTZMANN, reward=REWARDS),
    "the sum of q at group 0 is 2.0": lambda: call(adpo.targets.soft(), q=torch.tensor([1.0, 1.0, 0.5, 0.5])),
    "expected mass everywhere for reverse_kl": lambda: call(
        None, objective=adpo.Objective(adpo.targets.soft(), adpo.reverse_kl), q=torch.tensor([1.0, 0.0, 0.5, 0.5])
    ),
    "compares pairs, K = 2; got K = 4": lambda: call(adpo.bradley_terry(), rewards=REWARDS, group_ids=IDS * 0),
    "preference at group 1 is 2.0": lambda: call(adpo.bradley_terry(), preference=torch.tensor([0.0, 2.0])),
    "extra must be finite and [rows] = [4]; got [3]": lambda: call(
        BOLTZMANN, rewards=REWARDS, extra=torch.zeros(3)
    ),
    "extra must be finite and [rows] = [4]; got [4]": lambda: call(BOLTZMANN, rewards=REWARDS, extra=REWARDS / 0),
    "group_ids must be [rows]; got [4, 1]": lambda: call(BOLTZMANN, rewards=REWARDS, group_ids=IDS[:, None]),
    "group_ids must be integers": lambda: call(BOLTZMANN, rewards=REWARDS, group_ids=IDS.float()),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_refused_before_any_pass(message):
    with pytest.raises((ValueError, TypeError)) as error:
        REFUSED[message]()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_half_precision_scores_are_refused():
    """Torch rounds the gradient of a bfloat16 tensor to bfloat16: thirds would not sum to zero."""
    weight = torch.zeros(6, requires_grad=True)
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(ValueError, match=r"logits\.float\(\)"):
            backward(
                adpo.presets.adpo(),
                lambda rows, dtype=dtype: weight[rows].to(dtype),
                [torch.arange(6)],
                torch.zeros(6, dtype=torch.long),
                None,
                rewards=torch.tensor([1.0, 0, 0, 0, 0, 0]),
            )
    assert weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_coefficients_of_half_precision_tables_sum_to_zero(dtype):
    logp = torch.randn(20, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    rewards = torch.randint(3, (20, 7), generator=torch.Generator().manual_seed(1))
    for preset in (adpo.presets.adpo(), adpo.presets.anchored_ranking()):
        c = preset.coefficients(logp, None, rewards=rewards, reduction="sum")
        assert c.dtype == torch.float32
        assert c.sum(1).abs().max() < 1e-6
        rows = coefficients(
            preset, logp.flatten(), torch.arange(20).repeat_interleave(7), None, rewards=rewards.flatten()
        )
        assert rows.coefficients.view(20, 7).sum(1).abs().max() < 1e-15


def test_without_a_row_the_loss_is_zero():
    nothing = torch.zeros(0)
    found = backward(adpo.presets.adpo(), never, [], nothing.long(), None, rewards=nothing)
    assert found.loss.item() == 0
    assert (found.rows_scored, found.rows_trained, len(found.coefficients)) == (0, 0, 0)
    rows = coefficients(adpo.presets.adpo(), nothing, nothing.long(), None, rewards=nothing)
    assert rows.loss.item() == 0
    assert len(rows.coefficients) == 0


def inference(values):
    with torch.inference_mode():
        return values.clone()


def test_what_was_made_in_inference_mode_may_be_given():
    torch.manual_seed(0)
    model, x = nn.Linear(2, 1), torch.randn(4, 2)

    def gradient(wrap):
        model.zero_grad()
        backward(
            adpo.presets.adpo(),
            lambda rows: model(x[rows]).squeeze(1),
            [wrap(piece) for piece in PIECES],
            wrap(IDS),
            wrap(torch.zeros(4)),
            tau=wrap(torch.ones(2)),
            rewards=wrap(REWARDS),
        )
        return model.weight.grad.clone()

    assert torch.equal(gradient(inference), gradient(lambda values: values))


ON_TWO = {
    "nan": "rewards at group 1, candidate 0 is nan",  # of the table that both hold
    "shape": "rank 0: rewards must be [rows] = [2]; got [3]",
    "tau": "rank 0: tau at group 0 is -1.0",
    "labels": "rank 0: labels must be [groups] = [2]; got [1]",
    "partition": "rank 0: micro_batches must name each of the 2 rows once",
    "names": "ranks must be called alike",
    "anchor": "ranks must be called alike",
    "score": "rank 0: the log-probability of row 0 (group 3) is nan",
}


def worker(case):
    """Rank 0 is given something bad; what each rank raises is printed."""
    dist.init_process_group("gloo")
    bad = dist.get_rank() == 0
    rewards = torch.tensor([1.0, NAN]) if bad and case == "nan" else torch.tensor([1.0, 0.0])
    given = {"rewards": torch.ones(3) if bad and case == "shape" else rewards}
    target = adpo.one_hot() if case == "labels" else RANKING
    if case == "labels":
        given |= {"labels": torch.zeros(1 if bad else 2)}
    if case == "names" and bad:
        given = {"ranks": rewards}
    scored = []

    def score(rows):
        scored.append(rows)
        return torch.full((len(rows),), NAN if bad else 0.0)

    try:
        backward(
            adpo.Objective(target),
            score,
            [torch.tensor([0])] * 2 if bad and case == "partition" else [torch.tensor([0]), torch.tensor([1])],
            torch.tensor([3, 5]),
            torch.zeros(2),
            tau=torch.tensor([-1.0 if bad else 1.0, 1.0]) if case == "tau" else None,
            at_anchor=case == "anchor" and bad,
            **given,
        )
    except ValueError as error:
        passes = len(scored) if case != "score" else 0
        print(f"<{dist.get_rank()} {passes} {error}>", flush=True)  # noqa: T201
    dist.destroy_process_group()


@pytest.mark.parametrize("case", ON_TWO)
def test_what_one_rank_was_given_all_ranks_refuse(case, tmp_path):
    two_processes = pytest.importorskip("two_processes")
    done = two_processes.run(__file__, tmp_path, case)
    message = ON_TWO[case]
    assert f"<0 0 {message.removeprefix('rank 0: ')}" in done.stdout, done.stderr[-2000:]
    assert f"<1 0 {message}" in done.stdout


if __name__ == "__main__":
    torch.set_num_threads(1)
    worker(sys.argv[2])
