"""Lists against pairs: the losses, the split, the measures, and the program as a user runs it."""

import itertools
import json
import math
import os
from pathlib import Path

import pytest
import torch

import forked
from adpo import baselines
from adpo.experiments.listwise import corpus as tokens
from adpo.experiments.listwise import data, measure
from adpo.experiments.listwise.methods import METHODS, Table, preferences
from adpo.experiments.listwise.models import ByteTokenizer, tiny
from adpo.experiments.listwise.protocol import ALL_METHODS, PRESETS
from adpo.experiments.listwise.scoring import micro_batches, seq_logp
from adpo.experiments.listwise.summary import bootstrap
from adpo.experiments.listwise.train import Setting, rate, table_of, train

GGUF = os.environ.get("ADPO_TEST_GGUF")


def a_table(groups=5, size=6, seed=0, masked=True):
    draw = torch.Generator().manual_seed(seed)
    logp = (-30 * torch.rand(groups, size, generator=draw, dtype=torch.float64)).requires_grad_()
    ref = -30 * torch.rand(groups, size, generator=draw, dtype=torch.float64)
    lengths = torch.randint(5, 40, (groups, size), generator=draw)
    labels = torch.randint(0, 5, (groups, size), generator=draw).double() / 4
    labels[:, 0], labels[:, 1] = 0.9, 0.1  # something to prefer in every list
    mask = torch.rand(groups, size, generator=draw) < 0.8 if masked else torch.ones(groups, size, dtype=torch.bool)
    mask[:, :2] = True
    return Table(logp, logp / lengths, ref, labels, mask)


def small_corpus(**options):
    listings = data.synthetic(**options)
    return listings, tokens.encode(listings, ByteTokenizer(), response_tokens=12)


# --- losses


@pytest.mark.parametrize("beta", [0.05, 0.3])
@pytest.mark.parametrize("listwise", ["adpo-ranking", "adpo-top1"])
def test_on_pairs_the_list_methods_are_dpo(listwise, beta):
    table = a_table(size=2, masked=False)
    ours, theirs = METHODS[listwise].loss(table, beta), METHODS["dpo-pair"].loss(table, beta)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    slopes = [torch.autograd.grad(loss, table.seq_logp, retain_graph=True)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("name", ["dpo-all", "ipo-all", "simpo-all"])
def test_all_pairs_are_every_ordered_pair_with_different_labels(name):
    table, beta = a_table(), 0.2
    losses = []
    for g in range(len(table.mask)):
        real = table.mask[g].nonzero().flatten().tolist()
        for w, loser in itertools.permutations(real, 2):
            if table.labels[g, w] > table.labels[g, loser]:
                cells = [t[g, [i]] for t in (table.seq_logp, table.ref_logp) for i in (w, loser)]
                means = [table.mean_logp[g, [i]] for i in (w, loser)]
                losses.append(
                    {
                        "dpo-all": lambda cells=cells: baselines.dpo_loss(*cells, beta),
                        "ipo-all": lambda cells=cells: baselines.ipo_loss(*cells, beta),
                        "simpo-all": lambda means=means: baselines.simpo_loss(*means, beta, beta / 2),
                    }[name]()
                )
    expected = torch.stack(losses).mean().item()
    assert METHODS[name].loss(table, beta).item() == pytest.approx(expected, rel=1e-9)


def test_all_pairs_of_a_pair_are_the_pair():
    table = a_table(size=2, masked=False)
    winner, loser = preferences(table)
    assert winner.tolist() == [0, 2, 4, 6, 8]
    assert loser.tolist() == [1, 3, 5, 7, 9]
    assert METHODS["dpo-all"].loss(table, 0.1) == METHODS["dpo-pair"].loss(table, 0.1)


def test_kto_calls_good_what_is_above_the_median_of_its_list():
    table = a_table(groups=1, size=4, masked=False)._replace(labels=torch.tensor([[0.9, 0.2, 0.0, 0.0]]))
    logp, ref = table.seq_logp[0], table.ref_logp[0]
    good = torch.tensor([True, True, False, False])
    expected = baselines.kto_loss(logp, ref, good, (logp - ref).mean(), 0.1)
    assert METHODS["kto"].loss(table, 0.1).item() == pytest.approx(expected.item())


@pytest.mark.parametrize("name", ALL_METHODS)
def test_what_is_masked_has_no_part_in_the_loss(name):
    table = a_table()
    assert not table.mask.all()
    wild = table._replace(
        labels=torch.where(table.mask, table.labels, 7.0),
        ref_logp=torch.where(table.mask, table.ref_logp, -1e6),
    )
    loss = METHODS[name].loss(wild, METHODS[name].strengths[0])
    assert loss.item() == METHODS[name].loss(table, METHODS[name].strengths[0]).item()
    (slope,) = torch.autograd.grad(loss, table.seq_logp)
    assert (slope[~table.mask] == 0).all()
    assert (slope[table.mask] != 0).any()
    assert slope.isfinite().all()


# --- data


def test_no_prompt_is_in_two_parts_and_the_order_of_the_file_does_not_matter():
    listings = data.synthetic(count=60)
    parts = data.split(listings, validation=8, test=12)
    assert [len(part) for part in parts] == [40, 8, 12]
    assert sorted(i for part in parts for i in part) == list(range(60))
    reverse = data.split(listings[::-1], validation=8, test=12)
    for part, other in zip(parts, reverse, strict=True):
        assert {listings[i].instruction for i in part} == {listings[59 - i].instruction for i in other}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[]", "instruction"),
        ('{"instruction": "a", "responses": []}', "two or more"),
        ('{"instruction": "a", "responses": [{"text": "b"}, {"text": "c"}]}', "p_beats_baseline"),
        ("{", "JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, words):
    path = tmp_path / "lists.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=words):
        data.load(path)


def test_lists_that_prefer_nothing_are_left_out_and_prompts_come_once(tmp_path):
    path = tmp_path / "lists.jsonl"

    def row(instruction, *labels):
        return {"instruction": instruction, "responses": [{"text": "t", "p_beats_baseline": p} for p in labels]}

    path.write_text("\n".join(json.dumps(one) for one in (row("a", 0.5, 0.5), row("b", 1.0, 0.0))))
    assert [listing.instruction for listing in data.load(path)] == ["b"]
    path.write_text(
        "\n".join(json.dumps(one) for one in (row("a", 0.3, 0.1 + 0.2), row("b", 0.3, 0.1 + 0.2, 1.0)))
    )
    (found,) = data.load(path)
    assert found.instruction == "b"
    assert found.labels[0] == found.labels[1] == pytest.approx(0.3)
    path.write_text("\n".join(json.dumps(one) for one in (row("b", 0.5, 0.4), row("b", 1.0, 0.0))))
    with pytest.raises(ValueError, match="more than once"):
        data.load(path)


def test_responses_are_cut_or_ended():
    listings = [data.Listing("hi", ("abc", "a" * 20), (1.0, 0.0))]
    found = tokens.encode(listings, ByteTokenizer(), response_tokens=6)
    assert found.sequences[0] == ([*b"hi\nabc", 256], 3)
    assert found.sequences[1] == (list(b"hi\naaaaaa"), 3)


@pytest.mark.parametrize("per_step", [300, 1000])
def test_every_method_takes_as_many_steps_over_as_many_tokens(per_step):
    _, corpus = small_corpus()
    lengths, budget = corpus.lengths(), 6000
    lists, pairs = (tokens.plan(corpus, range(40), pair, budget, per_step, seed=3) for pair in (False, True))
    assert len(lists) == len(pairs) == budget / per_step
    for steps in (lists, pairs):
        total = sum(int(lengths[rows[rows >= 0]].sum()) for rows in steps)
        assert budget <= total < budget + 200  # at most the last list is too much
    groups = [sum(len(rows) for rows in steps) for steps in (lists, pairs)]
    assert groups[1] > 2 * groups[0]
    first_pass = torch.cat(lists)[:40, 0]
    assert sorted(first_pass.tolist()) == sorted(corpus.rows[:40, 0].tolist())


def test_a_pair_is_a_best_and_a_worst_response_and_ties_are_drawn_from():
    labels, row = torch.tensor([0.1, 0.9, 0.0, 0.9, 0.0]), torch.tensor([0, 1, 2, 3, 4, -1])
    draw = torch.Generator().manual_seed(0)
    pairs = {tuple(tokens.best_and_worst(labels, row, draw).tolist()) for _ in range(60)}
    assert pairs == {(1, 2), (1, 4), (3, 2), (3, 4)}


# --- scoring and training


def test_log_probabilities_are_those_of_each_sequence_alone_however_batched():
    model = tiny()
    _, corpus = small_corpus(count=4)
    sequences = corpus.sequences
    expected = []
    for ids, prompt in sequences:
        logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        expected.append(sum(logits[i - 1, ids[i]] for i in range(prompt, len(ids))))
    expected = torch.stack(expected)
    (wanted,) = torch.autograd.grad(expected.square().sum(), model.model.embed_tokens.weight)
    for micro_batch in (1, 100, 100_000):
        found = seq_logp(model, sequences, micro_batch)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
        (slope,) = torch.autograd.grad(found.square().sum(), model.model.embed_tokens.weight)
        torch.testing.assert_close(slope, wanted, rtol=1e-3, atol=1e-2)


def test_micro_batches_hold_every_row_once_and_no_more_tokens_than_allowed():
    lengths = [5, 30, 7, 7, 12, 2, 90]
    batches = micro_batches(lengths, 40)
    assert sorted(i for batch in batches for i in batch) == list(range(7))
    assert all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= 40 for b in batches)
    assert batches[0] == [6]


def test_the_table_puts_every_value_in_its_cell():
    _, corpus = small_corpus(count=3)
    rows = corpus.rows[[2, 1]]
    values = torch.arange(len(corpus.sequences)).float()
    table = table_of(corpus, rows, values[rows[rows >= 0]], ref_logp=2 * values)
    assert table.mask.sum() == 6 + 5
    for cell, row in zip(table.mask.nonzero(), rows[table.mask], strict=True):
        g, k = cell.tolist()
        assert table.seq_logp[g, k] == row
        assert table.ref_logp[g, k] == 2 * row
        assert table.labels[g, k] == corpus.labels[row]
        assert table.mean_logp[g, k] == pytest.approx(int(row) / int(corpus.response_lengths()[row]))


def test_a_step_with_a_gradient_that_is_not_finite_is_refused_and_counted():
    model = tiny()
    before = [weight.clone() for weight in model.parameters()]
    _, corpus = small_corpus()
    broken = METHODS["dpo-all"].__class__(lambda table, _: (table.seq_logp * math.nan).sum(), (1.0,))
    protocol = PRESETS["smoke"].protocol
    reference = torch.zeros(len(corpus.sequences))
    done = train(model, corpus, range(10), reference, broken, Setting(1.0, 0.1), protocol, 1000, seed=0)
    assert done.refused == done.steps == 3
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_learning_rate_rises_and_falls_and_is_never_zero():
    rates = [rate(step, 50, 0.1) for step in range(50)]
    assert max(rates) == rates[4] == 1.0
    assert rates[:5] == sorted(rates[:5])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] > 0


# --- measures


def test_measures_of_a_list_by_hand():
    labels, scores = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64), torch.tensor([2.0, 1.0, 3.0])
    assert measure.pair_accuracy(scores, labels) == pytest.approx(1 / 3)
    assert measure.top1(scores, labels) == 0
    ideal = 1 + 0.5 / math.log2(3)
    assert measure.ndcg(scores, labels) == pytest.approx((1 / math.log2(3) + 0.5 / 2) / ideal)
    assert measure.ndcg(scores, labels, depth=1) == 0
    assert measure.despite_length(scores, labels, torch.tensor([1, 2, 3])) == pytest.approx(1 / 3)
    assert measure.despite_length(scores, labels, torch.tensor([3, 1, 2])) == 0
    assert measure.despite_length(scores, labels, torch.tensor([3, 2, 1])) is None


@pytest.mark.parametrize("seed", range(5))
def test_tied_scores_are_worth_the_mean_over_all_their_orders(seed):
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (5,), generator=draw).double() + torch.tensor([1.0, 0, 0, 0, 0])
    scores = torch.randint(0, 3, (5,), generator=draw).double()
    broken = [scores + 1e-3 * torch.tensor(order) for order in itertools.permutations(range(5))]
    for name in ("pair_accuracy", "ndcg", "top1"):
        each = [getattr(measure, name)(one, labels) for one in broken]
        assert getattr(measure, name)(scores, labels) == pytest.approx(sum(each) / len(each)), name


def test_the_perfect_score_is_perfect_and_one_that_is_no_number_comes_last():
    _, corpus = small_corpus()
    perfect = measure.measured(corpus, range(5), corpus.labels)
    assert all(value in (1.0, None) for values in perfect.values() for value in values)
    scores, row = corpus.labels.clone(), corpus.rows[0]
    scores[row[corpus.labels[row] == corpus.labels[row].max()]] = math.nan
    assert measure.measured(corpus, [0], scores)["top1"] == [0.0]


def test_intervals_hold_the_mean_and_narrow_with_more_prompts():
    draw = torch.Generator().manual_seed(0)
    widths = []
    for prompts in (20, 2000):
        mean, low, high = bootstrap(torch.rand(3, prompts, generator=draw))
        assert low < mean < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2


# --- the program


def run(*arguments, timeout=300):
    return forked.run("-m", "adpo.experiments.listwise", *arguments, timeout=timeout)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    out = tmp_path_factory.mktemp("listwise") / "out"
    result = run("--preset", "smoke", "--out", out)
    assert result.returncode == 0, result.stderr
    return out, result


def test_smoke_writes_results_of_every_method(smoke):
    out, result = smoke
    results = json.loads((out / "results.json").read_text())
    assert results["description"]["methods"] == list(ALL_METHODS)
    assert {one["method"] for one in results["runs"]} == set(ALL_METHODS)
    assert len(results["runs"]) == 2 * len(ALL_METHODS)
    assert len({(one["trained"]["steps"], one["trained"]["refused"]) for one in results["runs"]}) == 1
    assert results["summary"].keys() == {"reference", "length", *ALL_METHODS}
    assert results["against"].keys() == {"dpo-pair", "dpo-all"}
    assert results["corpus"]["split"] == {"train": 40, "validation": 8, "test": 12}
    for name, tried in results["sweep"].items():
        assert results["settings"][name]["validation"] == max(one["validation"] for one in tried)
    timing = json.loads((out / "timing.json").read_text())
    assert len(timing) == 1 + len(ALL_METHODS) * (2 + 2)
    tables = (out / "tables.md").read_text()
    assert "### Each method less dpo-pair, paired" in tables
    assert str(out / "results.json") in result.stdout


def test_every_method_learns_the_made_up_preference(smoke):
    summary = json.loads((smoke[0] / "results.json").read_text())["summary"]
    before = summary["reference"]["own"]["pair_accuracy"]
    for method in ALL_METHODS:
        mean, low, _ = summary[method]["own"]["pair_accuracy"]
        assert mean > before[0], method
        assert low > 0.7, method


def test_a_stopped_job_goes_on_and_ends_with_the_same_results(smoke, tmp_path):
    out = tmp_path / "out"
    few = ["--preset", "smoke", "--methods", "adpo-ranking,dpo-pair", "--seeds", "1", "--out", out]
    first = run(*few, "--budget-seconds", "0")
    assert first.returncode == 0, first.stderr
    assert "7 of 7 cells left" in first.stdout
    assert not (out / "results.json").exists()
    assert run(*few, "--resume").returncode == 0
    whole = (out / "results.json").read_bytes()
    tables = (out / "tables.md").read_bytes()
    kept = {path: path.stat().st_mtime_ns for path in (out / "cells").iterdir()}
    lost = [path for path in kept if path.name.startswith(("sweep-dpo-pair", "run-adpo-ranking"))]
    for path in [*lost, out / "results.json", out / "tables.md"]:
        path.unlink()
    assert run(*few, "--resume").returncode == 0
    assert (out / "results.json").read_bytes() == whole
    assert (out / "tables.md").read_bytes() == tables
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items() if path not in lost)
    whole_run = json.loads((smoke[0] / "cells" / lost[0].name).read_text())["result"]
    assert json.loads(lost[0].read_text())["result"] == whole_run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "gpu"], "--data and --model"),
        (["--preset", "smoke", "--methods", "dpo,kto"], "unknown dpo"),
        (["--preset", "smoke", "--data", "{missing}"], "is not a file"),
        (["--preset", "smoke", "--model", "{missing}"], "neither a file nor a folder"),
        (["--preset", "smoke", "--seeds", "0"], "--seeds"),
    ],
)
def test_mistakes_are_said_before_any_work(tmp_path, arguments, words):
    missing = tmp_path / "missing.jsonl"
    result = run(*(one.format(missing=missing) for one in arguments), "--out", tmp_path / "out", timeout=60)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(GGUF is None, reason="ADPO_TEST_GGUF names no .gguf file")
def test_a_gguf_file_becomes_a_model_that_can_be_trained_and_saved(tmp_path):
    pytest.importorskip("gguf")
    from adpo.models.gguf import load_gguf

    model, tokenizer = load_gguf(GGUF)
    assert next(model.parameters()).dtype == torch.float32
    assert tokenizer.padding_side == "right"
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    if tokenizer.chat_template:  # an answer in the template ends with that token
        answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcd"}]
        text = tokenizer.apply_chat_template(answered, tokenize=False)
        assert text.split("bcd")[1].startswith(tokenizer.eos_token)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()


def test_a_gguf_file_that_is_not_there_is_one_line():
    from adpo.models.gguf import load_gguf

    with pytest.raises(ValueError, match="no such file"):
        load_gguf(Path("nowhere.gguf"))
