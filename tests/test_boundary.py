"""What comes in and what goes out: dtypes, flat rows, refusals, torch.func and torch.compile."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import adpo
from adpo.core.groups import prepare
from adpo.core.objective import LIVE, SATURATED
from draws import OBJECTIVES, groups

TARGET_SIGNALS = {"rewards": torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 1.0]])}
LOGP = torch.tensor([[-1.0, -2.0, -3.0], [-2.0, -1.5, -0.5]])


@pytest.mark.parametrize(
    ("given_dtype", "result"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_results_are_float32_or_float64(given_dtype, result):
    objective = adpo.Objective(adpo.plackett_luce())
    logp = LOGP.to(given_dtype, copy=True).requires_grad_()
    loss = objective.loss(logp, None, **TARGET_SIGNALS)
    loss.backward()
    assert loss.dtype == result
    assert logp.grad.dtype == given_dtype
    assert objective.coefficients(logp, None, **TARGET_SIGNALS).dtype == result
    assert all(value.dtype == result for value in objective.diagnostics(logp, None, **TARGET_SIGNALS))
    assert adpo.anchored_logits(logp, None, 0.5).dtype == result


def test_small_differences_of_large_log_probabilities_survive():
    """-30000 and -30000.5 in float32, subtracted from their anchors before anything else."""
    logp = torch.tensor([[-30000.0, -30000.5]])
    u = adpo.anchored_logits(logp, torch.tensor([[-30000.25, -30000.0]]), 0.25)
    assert u.tolist() == [[1.0, -2.0]]
    anchor = logp.double() + torch.tensor([[1e-6, 0.0]], dtype=torch.float64)
    assert adpo.anchored_logits(logp, anchor, 1.0)[0, 0].item() == pytest.approx(-1e-6, rel=1e-3)


@given(st.integers(0, 1000), st.integers(0, 30))
def test_flat_rows_in_any_order_make_the_same_groups(seed, rows):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-3, 5, (rows,), generator=generator)
    values = torch.arange(rows, dtype=torch.float64).requires_grad_()
    table, mask, index = adpo.from_flat(values, ids)
    assert torch.equal(adpo.to_flat(table, index), values)
    assert table.shape[0] == len(set(ids.tolist()))
    for row, group in zip(range(len(table)), sorted(set(ids.tolist())), strict=True):
        assert table[row, mask[row]].tolist() == values[ids == group].tolist()
    assert torch.all(table[~mask] == 0)
    if rows:
        table.sum().backward()
        assert torch.all(values.grad == 1)


def test_candidates_keep_the_order_of_their_rows_in_large_groups():
    ids = torch.arange(1000) % 3
    table, mask, _ = adpo.from_flat(torch.arange(1000), ids)
    assert table.shape == (3, 334)
    for group in range(3):
        assert table[group, mask[group]].tolist() == list(range(group, 1000, 3))


def test_no_rows_make_no_groups():
    table, mask, index = adpo.from_flat(torch.zeros(0), torch.zeros(0, dtype=torch.long))
    assert table.shape == mask.shape == (0, 1)
    assert adpo.Objective(adpo.top1()).loss(table, None, rewards=table, mask=mask).item() == 0
    assert index.shape == (0,)


def test_a_temperature_per_group_reaches_the_anchored_logits():
    u = adpo.anchored_logits(torch.ones(2, 2), None, torch.tensor([0.5, 2.0]))
    assert u.tolist() == [[2.0, 2.0], [0.5, 0.5]]
    with pytest.raises(ValueError, match=r"\[groups\] = \[2\]; got \[3\]"):
        adpo.anchored_logits(torch.ones(2, 2), None, torch.ones(3))


@given(g=groups())
def test_flat_coefficients_do_not_depend_on_the_order_of_rows(g):
    ids = torch.arange(len(g.logp)).unsqueeze(1).expand_as(g.mask)[g.mask]
    logp, rewards = g.logp[g.mask], g.rewards[g.mask]
    shuffle = torch.randperm(len(ids), generator=g.generator)
    objective = adpo.Objective(adpo.plackett_luce())

    def flat(order):
        if not len(order):
            return torch.zeros(0, dtype=torch.float64)
        table, mask, index = adpo.from_flat(logp[order], ids[order])
        signal, _, _ = adpo.from_flat(rewards[order], ids[order])
        return adpo.to_flat(objective.coefficients(table, None, mask=mask, rewards=signal), index)

    torch.testing.assert_close(flat(shuffle), flat(torch.arange(len(ids)))[shuffle])


def call(**changes):
    arguments = {"logp": LOGP, "anchor_logp": None, "mask": None, "rewards": TARGET_SIGNALS["rewards"], **changes}
    return adpo.Objective(adpo.boltzmann(1.0)).loss(
        arguments.pop("logp"), arguments.pop("anchor_logp"), **arguments
    )


def test_a_tensor_of_one_temperature_serves_all_groups():
    assert torch.equal(call(tau=torch.tensor(0.25)), call(tau=0.25))
    assert torch.equal(call(tau=torch.tensor([0.5])), call(tau=0.5))


NAN = LOGP.clone()
NAN[1, 2] = torch.nan
REFUSED = {
    "logp at group 1, candidate 2 is nan": lambda: call(logp=NAN),
    "anchor_logp at group 1, candidate 2 is nan": lambda: call(anchor_logp=NAN),
    "rewards at group 0, candidate 1 is inf": lambda: call(rewards=torch.tensor([[0, torch.inf, 0], [0, 0, 0]])),
    "logp must be a floating-point [groups, K] table, K >= 1; got float32 [3]": lambda: call(logp=LOGP[0]),
    "got int64 [2, 3]": lambda: call(logp=LOGP.long()),
    "got float32 [2, 0]": lambda: call(logp=LOGP[:, :0]),
    "mask must be bool or int [2, 3], like logp; got float32 [2, 3]": lambda: call(mask=torch.ones(2, 3)),
    "mask must be bool or int [2, 3], like logp; got bool [2, 2]": lambda: call(
        mask=torch.ones(2, 2, dtype=torch.bool)
    ),
    "rewards must be [2, 3], like logp; got float32 [3, 2]": lambda: call(rewards=torch.zeros(3, 2)),
    "anchor_logp must be [2, 3], like logp; got float32 [2, 1]": lambda: call(anchor_logp=torch.zeros(2, 1)),
    "labels must be [2], one per group; got int64 [2, 1]": lambda: adpo.Objective(adpo.one_hot()).loss(
        LOGP, None, labels=torch.zeros(2, 1, dtype=torch.long)
    ),
    "logp must be [groups, K]; got [3]": lambda: adpo.anchored_logits(LOGP[0], None, 1.0),
    "beta must be positive and finite; got 0": lambda: adpo.presets.dpo(0),
    "beta must be positive and finite; got -1": lambda: adpo.presets.soft_dpo(-1),
    "tau must be a positive finite number; got 0": lambda: call(tau=0),
    "tau must be a positive finite number; got inf": lambda: call(tau=float("inf")),
    "tau must be a number or [groups] = [2]; got [3]": lambda: call(tau=torch.ones(3)),
    "tau must be a number or [groups] = [2]; got [2, 3]": lambda: call(tau=torch.ones(2, 3)),
    "tau must be a number or [groups] = [2]; got [2, 1]": lambda: call(tau=torch.ones(2, 1)),
    "tau at group 1 is -1.0; expected positive": lambda: call(tau=torch.tensor([1.0, -1.0])),
    "tau at group 0 is 0.0; expected positive": lambda: call(tau=torch.tensor([0.0, 1.0])),
    "tau must be a positive finite number; got -1": lambda: adpo.Objective(adpo.boltzmann(1.0), tau=-1),
    'reduction must be "mean", "sum" or "none"; got \'median\'': lambda: call(reduction="median"),
    "values and group_ids must both be [rows]; got [2, 3] and [2]": lambda: adpo.from_flat(
        LOGP, torch.tensor([0, 1])
    ),
    "must both be [rows]; got [3] and [2]": lambda: adpo.from_flat(LOGP[0], torch.tensor([0, 1])),
    "must both be [rows]; got [2, 3] and [2, 3]": lambda: adpo.from_flat(LOGP, LOGP.long()),
    "group_ids must be integers; got torch.bool": lambda: adpo.from_flat(LOGP[0], LOGP[0] > 0),
    "group_ids must be integers; got torch.complex64": lambda: adpo.from_flat(LOGP[0], LOGP[0] * 1j),
    "group_ids must be integers; got torch.float32": lambda: adpo.from_flat(LOGP[0], LOGP[0]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_tables_are_refused_in_one_line(message):
    with pytest.raises(ValueError, match=r".") as error:
        REFUSED[message]()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_coefficients_work_without_gradients_and_in_inference_mode():
    objective = adpo.Objective(adpo.boltzmann(1.0))
    expected = objective.coefficients(LOGP, LOGP.flip(0), **TARGET_SIGNALS)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            tables = {"rewards": TARGET_SIGNALS["rewards"].clone(), "tau": torch.ones(2, dtype=torch.float64)}
            c = objective.coefficients(LOGP.double().clone(), LOGP.flip(0).double().clone(), **tables)
            objective.diagnostics(LOGP.double().clone(), None, **tables)
        assert not c.requires_grad
        torch.testing.assert_close(c.float(), expected)


def test_an_empty_batch_has_no_loss():
    loss = adpo.Objective(adpo.kde()).loss(torch.zeros(0, 3), None, rewards=torch.zeros(0, 3))
    assert loss.item() == 0


COMPILED = ["boltzmann/cross_entropy", "efron/cross_entropy", "kde/reverse_kl", "top1/wasserstein(1)"]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_work_under_torch_func(name):
    """Gradients of each group on its own through vmap equal the coefficients."""
    objective = adpo.Objective(*OBJECTIVES[name])
    generator = torch.Generator().manual_seed(0)
    logp, anchor, teacher = torch.randn(3, 3, 4, generator=generator, dtype=torch.float64)
    rewards = torch.tensor([[1.0, 0, 2, 0], [0, 0, 0, 1], [3, 2, 1, 0]], dtype=torch.float64)
    signals = {
        "rewards": rewards,
        "teacher_logp": teacher,
        "labels": torch.tensor([0, 1, 2]),
        "q": torch.softmax(teacher, 1),
    }

    def loss(x, anchor, one):
        return objective.loss(x[None], anchor[None], **{n: v[None] for n, v in one.items()})

    per_group = torch.func.vmap(torch.func.grad(loss))(logp, anchor, signals)
    torch.testing.assert_close(per_group, objective.coefficients(logp, anchor, reduction="sum", **signals))


@pytest.mark.parametrize(
    "target", [adpo.boltzmann(1.0), adpo.plackett_luce(), adpo.plackett_luce("breslow")], ids=str
)
def test_hessians_through_torch_func_equal_differences_of_coefficients(target):
    objective = adpo.Objective(target, tau=0.6)
    logp = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    signals = {
        "rewards": torch.tensor([[1.0, 0, 2, 0, 1]]),
        "mask": torch.tensor([[True, True, True, True, False]]),
    }
    hessian = torch.func.hessian(lambda x: objective.loss(x[None], None, **signals))(logp)
    step = 1e-5
    for i in range(5):
        nudge = torch.zeros(5, dtype=torch.float64)
        nudge[i] = step
        ahead, behind = (objective.coefficients((logp + s * nudge)[None], None, **signals)[0] for s in (1, -1))
        torch.testing.assert_close(hessian[:, i], (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", COMPILED)
def test_objectives_are_one_graph_under_torch_compile(name):
    objective = adpo.Objective(*OBJECTIVES[name])
    compiled = torch.compile(
        lambda logp, rewards: objective.loss(logp, None, rewards=rewards), fullgraph=True, backend="aot_eager"
    )
    logp, rewards = LOGP.clone().requires_grad_(), TARGET_SIGNALS["rewards"]
    loss = compiled(logp, rewards)
    torch.testing.assert_close(loss, objective.loss(logp, None, rewards=rewards))
    loss.backward()
    torch.testing.assert_close(logp.grad, objective.coefficients(logp, None, rewards=rewards))


def test_diagnostics_by_hand():
    anchor = torch.log_softmax(torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], dtype=torch.float64), 1)
    logp = anchor.clone()
    logp[1, 0] += 6.0  # saturated: sigmoid(6) > .99
    mask = torch.tensor([[True, True], [True, True], [False, False]])
    rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0], [5.0, 5.0]])
    found = adpo.Objective(adpo.plackett_luce()).diagnostics(logp, anchor, rewards=rewards, mask=mask)
    p = torch.sigmoid(torch.tensor(6.0, dtype=torch.float64))
    entropy = -(p * p.log() + (1 - p) * (1 - p).log())
    two = torch.tensor(2.0, dtype=torch.float64).log()
    assert found.live.item() == 0.5  # the tied group is dead, the padding group is not counted
    assert found.saturated.item() == 0.5
    assert found.target_entropy.item() == 0  # one stage, one winner
    torch.testing.assert_close(found.log_ratio, torch.tensor(6.0 / 2 / 2, dtype=torch.float64))
    torch.testing.assert_close(found.policy_entropy, (two + entropy) / 2)
    torch.testing.assert_close(found.anchor_kl, (two - entropy) / 2)


@pytest.mark.parametrize(
    "target", [adpo.boltzmann(0.5), adpo.plackett_luce(), adpo.top1(label_smoothing=0.1)], ids=str
)
@given(g=groups(max_groups=6))
def test_diagnostics_group_by_group(target, g):
    """Against a plain loop over groups and their real candidates."""
    objective = adpo.Objective(target)
    taus = torch.rand(len(g.logp), generator=g.generator, dtype=torch.float64) + 0.3
    found = objective.diagnostics(g.logp, g.anchor_logp, mask=g.mask, tau=taus, rewards=g.rewards)
    rows, entropies = [], []
    for i in g.real.nonzero().flatten().tolist():
        kept = g.mask[i]
        logp, anchor, rewards = g.logp[i, kept], g.anchor_logp[i, kept], g.rewards[i, kept]
        p = torch.softmax((logp - anchor) / taus[i], 0)
        pi, reference = torch.softmax(logp, 0), torch.softmax(anchor, 0)
        c = objective.coefficients(logp[None], anchor[None], rewards=rewards[None], tau=taus[i].item())
        row = [(pi * (pi / reference).log()).sum(), (logp - anchor).mean(), -torch.xlogy(p, p).sum()]
        rows.append(
            [
                *(value.item() for value in row),
                float(p.max() > 0.99 and len(p) > 1),
                float(c.abs().max() * taus[i] > 1e-12),
            ]
        )
        _, checked = prepare(logp[None], anchor[None], taus[i].item(), {"rewards": rewards[None]})
        stages = [s for s in target.stages(checked) if s.support().any()]
        if stages:
            q = [torch.where(s.support(), s.log_q.exp(), 0.0) for s in stages]
            entropies.append(sum(-torch.xlogy(x, x).sum().item() for x in q) / len(q))
    means = torch.tensor(rows).mean(0).tolist() if rows else [0.0] * 5
    assert [x.item() for x in (found.anchor_kl, found.log_ratio, found.policy_entropy)] == pytest.approx(
        means[:3], rel=1e-5, abs=1e-6
    )
    assert found.saturated.item() == pytest.approx(means[3], abs=1e-6)
    assert found.live.item() == pytest.approx(means[4], abs=1e-6)
    assert found.target_entropy.item() == pytest.approx(sum(entropies) / max(1, len(entropies)), abs=1e-9)


def test_exactly_live_and_saturated_at_the_thresholds():
    objective = adpo.Objective(adpo.top1())
    c = torch.tensor([[LIVE, -LIVE], [4 * LIVE, 0.0], [torch.nan, 0.0]])
    assert objective.live(c, 0.5).tolist() == [False, True, True]
    assert objective.live(c, torch.tensor([0.5, 0.1, 1.0])).tolist() == [False, False, True]
    # Transport costs have the scale of the positions: there only zero is nothing.
    assert adpo.Objective(adpo.top1(), adpo.wasserstein(3)).live(c / 100, 0.5).tolist() == [True, True, True]
    nothing = torch.zeros(1, 2)
    assert adpo.Objective(adpo.top1(), adpo.wasserstein(3)).live(nothing, 0.5).tolist() == [False]
    assert SATURATED == 0.99


def test_the_target_entropy_is_a_mean_over_stages():
    """Two tied winners share two stages of one bit each; the next place is certain; the last has no stage."""
    rewards = torch.tensor([[2.0, 2.0, 1.0, 0.0]])
    found = adpo.Objective(adpo.plackett_luce()).diagnostics(torch.zeros(1, 4), None, rewards=rewards)
    assert found.target_entropy.item() == pytest.approx(2 * torch.tensor(2.0).log().item() / 3)


@given(g=groups())
def test_diagnostics_stay_in_their_ranges(g):
    for target in (adpo.boltzmann(0.5), adpo.plackett_luce(), adpo.top1(label_smoothing=0.1)):
        found = adpo.Objective(target).diagnostics(
            g.logp, g.anchor_logp, mask=g.mask, tau=g.tau, rewards=g.rewards
        )
        log_k = torch.log(torch.tensor(float(g.logp.shape[1]))).item() + 1e-9
        assert found.anchor_kl >= -1e-9
        assert -1e-9 <= found.target_entropy <= log_k
        assert -1e-9 <= found.policy_entropy <= log_k
        assert 0 <= found.saturated <= 1
        assert 0 <= found.live <= 1


def test_temperature_reaches_the_anchored_teacher():
    teacher, anchor = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.2]])
    objective = adpo.Objective(adpo.targets.teacher(anchored=True), adpo.forward_kl, tau=1.0)
    for tau in (0.3, torch.tensor([3.0])):
        assert objective.loss(teacher, anchor, teacher_logp=teacher, tau=tau).item() == pytest.approx(0, abs=1e-7)


def test_masks_may_be_integers_and_the_anchor_may_be_left_out():
    objective = adpo.Objective(adpo.boltzmann(beta=0.5))
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    expected = objective.coefficients(LOGP, None, mask=mask.bool(), **TARGET_SIGNALS)
    assert torch.equal(objective.coefficients(LOGP, mask=mask, **TARGET_SIGNALS), expected)
    assert not expected[0, 2]
