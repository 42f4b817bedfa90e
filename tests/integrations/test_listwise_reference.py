"""The reference is scored once: what is kept is found again by model and data, and only then."""

import json
from pathlib import Path

import pytest
import tiny_lm
import torch
from test_listwise_trainer import logged, ragged, trained, weights

import forked
from adpo.trainers.listwise import ListwiseTrainer, sources
from adpo.trainers.listwise.reference import Scores, fingerprint


@pytest.fixture
def scored(monkeypatch):
    """The number of lists every call of `_score_table` looks at."""
    found = []
    whole = ListwiseTrainer._score_table

    def counted(self, table, on_progress):
        found.append(len(table))
        return whole(self, table, on_progress)

    monkeypatch.setattr(ListwiseTrainer, "_score_table", counted)
    return found


@pytest.fixture
def other(tmp_path):
    tiny_lm.model(seed=5).save_pretrained(tmp_path / "other")
    return tmp_path / "other"


def test_the_second_run_scores_nothing(tmp_path, scored):
    one = trained(tmp_path, ragged())
    assert scored == [8]
    two = trained(tmp_path, ragged())
    assert scored == [8]
    for name, value in weights(one).items():
        assert torch.equal(weights(two)[name], value)


def test_another_model_or_other_data_is_scored_anew(tmp_path, scored):
    trained(tmp_path, ragged())
    trained(tmp_path, ragged(), model=tiny_lm.model(seed=1))
    assert scored == [8, 8]
    rows = ragged()
    rows[0]["rewards"] = rows[0]["rewards"][::-1]
    trained(tmp_path, rows)
    trained(tmp_path, ragged(), max_length=8)
    assert scored == [8, 8, 8, 8]


def test_a_reference_of_its_own_is_not_even_loaded_the_second_time(tmp_path, scored, other, monkeypatch):
    one = trained(tmp_path, ragged(), reference=str(other))
    loaded = trained(tmp_path / "b", ragged(), reference=tiny_lm.model(seed=5))
    monkeypatch.setattr(sources, "load_model", lambda name: pytest.fail(f"{name} was loaded"))
    two = trained(tmp_path, ragged(), reference=str(other))
    assert scored == [8, 8]
    assert isinstance(two.reference, str)
    own = trained(tmp_path, ragged())
    for name, value in weights(one).items():
        assert torch.equal(weights(two)[name], value)
        assert torch.equal(weights(loaded)[name], value)
    assert logged(one, "loss") != logged(own, "loss")


@pytest.mark.parametrize("how", ["cut", "flipped", "empty", "of another size"])
def test_a_damaged_file_is_noticed_and_made_again(tmp_path, scored, caplog, how):
    one = trained(tmp_path, ragged())
    (path,) = (tmp_path / "cache").glob("reference-*.safetensors")
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[:-20])
    elif how == "flipped":
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        from safetensors.torch import save_file

        save_file({"logp": torch.zeros(3, dtype=torch.float64)}, path)
    two = trained(tmp_path, ragged())
    assert scored == [8, 8]
    assert "scored again" in caplog.text
    assert path.read_bytes() == content
    for name, value in weights(one).items():
        assert torch.equal(weights(two)[name], value)


def lora(rank=2):
    from peft import LoraConfig

    return LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def test_a_fresh_adapter_changes_nothing(tmp_path, scored):
    """Whatever its random half is: the reference is the model without it, and a run can be resumed."""
    saving = {"save_strategy": "steps", "save_steps": 1}
    trained(tmp_path, ragged())
    models = [tiny_lm.model() for _ in range(3)]
    for seed, model in enumerate(models[:2]):
        torch.manual_seed(seed)
        trained(tmp_path, ragged(), steps=1 + seed, model=model, peft=lora(), resume=seed == 1, **saving)
    torch.manual_seed(9)
    trained(tmp_path, ragged(), model=models[2], peft=lora(4))
    assert scored == [8]


def test_other_data_is_not_resumed(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}
    trained(tmp_path, ragged(), steps=1, **saving)
    rows = ragged()
    rows[0], rows[1] = rows[1], rows[0]
    with pytest.raises(ValueError, match="trained on other data, or the data has changed"):
        trained(tmp_path, rows, steps=2, resume=True, **saving)


def test_a_cache_that_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match="cannot be written to"):
        Scores(Path("/proc/adpo"), "a").write(torch.zeros(2))


def test_what_tells_models_apart(tmp_path, other):
    config = tiny_lm.model().config
    config.rms_norm_eps = 0.1
    changed = type(tiny_lm.model())(config)
    changed.load_state_dict(tiny_lm.model().state_dict())
    assert fingerprint(tiny_lm.model()) != fingerprint(changed)

    assert fingerprint(tiny_lm.model()) == fingerprint(tiny_lm.model())
    assert fingerprint(tiny_lm.model()) != fingerprint(tiny_lm.model(seed=5))
    assert fingerprint(tiny_lm.model()) != fingerprint(tiny_lm.model().bfloat16())
    before = fingerprint(other)
    assert before == fingerprint(str(other))
    model = tiny_lm.model(seed=5)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-3
    model.save_pretrained(other)
    assert fingerprint(other) != before
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="holds no weights"):
        fingerprint(tmp_path / "nothing")


WARM = {"tau": "auto", "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 6}  # measured from step 4 on


@pytest.mark.parametrize(
    "options", [{}, {"anchor": "ema"}, {"anchor": "refresh", "anchor_every": 2}, {"tau": "auto"}, WARM]
)
def test_stopped_and_resumed_is_the_same_run(tmp_path, options):
    """In the first epoch, at its end, and in the second; eight lists, three to a step."""
    saving = {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch", "logging_steps": 2, "size": 3}
    whole = trained(tmp_path / "whole", ragged(), steps=7, **saving, **options)
    expected = weights(whole)
    for stop in (1, 3, 5):
        trained(tmp_path / str(stop), ragged(), steps=stop, **saving, **options)
        resumed = trained(tmp_path / str(stop), ragged(), steps=7, resume=True, **saving, **options)
        assert logged(resumed, "loss") == logged(whole, "loss")
        assert logged(resumed, "adpo/tau") == logged(whole, "adpo/tau")
        for name, value in weights(resumed).items():
            assert torch.equal(value, expected[name]), (stop, name)


def test_another_reference_is_not_resumed(tmp_path, other):
    trained(tmp_path, ragged(), steps=1, save_strategy="steps", save_steps=1)
    with pytest.raises(ValueError, match="trained against another reference"):
        trained(tmp_path, ragged(), steps=2, resume=True, reference=str(other))


PROGRAM = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch, torch.distributed as dist
from test_listwise_trainer import ragged, trained, logged, weights
trainer = trained(Path(sys.argv[2]), ragged(), steps=4, size=2, **json.loads(sys.argv[3]))
ranked = [values.tolist() for values in trainer.rank(trainer.train_dataset, by="mean_logp")]
if trainer.accelerator.is_main_process:
    found = {"weights": weights(trainer), "loss": logged(trainer, "loss"), "tau": logged(trainer, "adpo/tau")}
    torch.save({**found, "rank": ranked}, sys.argv[2] + ".pt")
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # threads of the process group may still be at work, and end a process that ends slowly
"""


@pytest.mark.parametrize("options", [{}, {"completions_per_pass": 2, "anchor": "ema", "tau_schedule": "hybrid"}])
def test_two_processes_are_one(tmp_path, options):
    """Two processes with two lists each, against one with four: same losses, parameters, temperature, ranking."""
    (tmp_path / "program.py").write_text(PROGRAM)
    given = (Path(__file__).parent, tmp_path / "two", json.dumps(options))
    done = forked.run_two(tmp_path / "program.py", *given)
    assert done.returncode == 0, done.stderr[-2000:]
    two = torch.load(tmp_path / "two.pt", weights_only=True)
    one = trained(tmp_path / "one", ragged(), steps=4, size=4, **options)
    torch.testing.assert_close(two["loss"], logged(one, "loss"), rtol=2e-6, atol=5e-6)
    torch.testing.assert_close(two["tau"], logged(one, "adpo/tau"), rtol=1e-5, atol=1e-5)
    assert two["rank"] == [v.tolist() for v in one.rank(one.train_dataset, by="mean_logp")]
    for name, value in weights(one).items():
        torch.testing.assert_close(two["weights"][name], value, rtol=0, atol=2e-6)
