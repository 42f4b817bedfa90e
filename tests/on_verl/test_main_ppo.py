"""verl's own command, unmodified, from end to end: Ray, two workers, rollouts, two steps."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from statistics import mean

import pytest
import tiny
import tools
from omegaconf import OmegaConf
from processes import environment
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from adpo.tasks.generated_tasks import Problem
from adpo.trainers.verl.data import write
from adpo.trainers.verl.recipe import POLICY_LOSS
from adpo.trainers.verl.resume import check_processes

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(letter.isdigit() for letter in solution_str) / max(len(solution_str), 1)
"""
ARGUMENTS = """
algorithm.adv_estimator=adpo
trainer.v1.trainer_mode=adpo_sync
data.train_files={folder}/train.parquet data.val_files={folder}/train.parquet
data.train_batch_size=4 data.max_prompt_length=48 data.max_response_length=12 data.dataloader_num_workers=0
actor_rollout_ref.model.path={folder}/model actor_rollout_ref.model.use_remove_padding=False
actor_rollout_ref.model.enable_gradient_checkpointing=False
+actor_rollout_ref.model.override_config.attn_implementation=sdpa
actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.actor.ppo_epochs=2
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 actor_rollout_ref.actor.optim.lr=1e-3
actor_rollout_ref.actor.use_torch_compile=False actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.fsdp_config.model_dtype=fp32 actor_rollout_ref.actor.fsdp_config.dtype=float32
actor_rollout_ref.rollout.name=hf actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.load_format=auto
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.agent.num_workers=1
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
reward.custom_reward_function.path={folder}/reward.py reward.custom_reward_function.name=compute_score
reward.num_workers=1
trainer.device=cpu trainer.n_gpus_per_node=2 trainer.nnodes=1 trainer.logger=["console"]
trainer.val_before_train=False trainer.test_freq=-1 trainer.save_freq=-1
trainer.total_training_steps=2 trainer.total_epochs=1 trainer.resume_mode=disable
ray_kwargs.ray_init.num_cpus=24 +ray_kwargs.ray_init.resources={{NPU:4}}
+ray_kwargs.ray_init.include_dashboard=False
transfer_queue.enable=True transfer_queue.backend.SimpleStorage.num_data_storage_units=1
"""


def verl(folder, *more, reward=REWARD, **variables):
    tiny.save(folder / "model")
    (folder / "reward.py").write_text(reward)
    sums = [(f"{number}+{number + 1}=", str(2 * number + 1)) for number in range(8)]
    write([Problem("math", 1, asked, asked, answer) for asked, answer in sums], folder / "train.parquet", "")
    loss = [
        f"{POLICY_LOSS}._target_=adpo.trainers.verl.settings.ADPOPolicyLoss",
        f"{POLICY_LOSS}.loss_mode=adpo",
    ]
    return subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *ARGUMENTS.format(folder=folder).split(), *loss, *more],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env=environment(RAY_DEDUP_LOGS="0", **variables),
    )


FORMS = {
    "ranks": [f"+{POLICY_LOSS}.target=plackett_luce", f"+{POLICY_LOSS}.tau_schedule=hybrid"],
    "fixed": [
        f"+{POLICY_LOSS}.anchor=fixed",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_two_steps_on_two_workers(tmp_path, form):
    done = verl(tmp_path, *FORMS[form])
    assert done.returncode == 0, done.stderr[-3000:]
    for step in (1, 2):
        line = next(line for line in done.stdout.splitlines() if f"step:{step} " in line)
        told = {key: float(value) for key, value in re.findall(r"actor/adpo/(\w+):([-\d.e]+)", line)}
        assert told["scored"] == 0.75  # of four optimizer steps the first is at the anchor
        assert told["anchor_kl"] > 0
        assert 0.1 <= told["tau"] <= 10


ASYNC_REWARD = """
import asyncio
async def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    await asyncio.sleep(0)
    digits = sum(letter.isdigit() for letter in solution_str)
    return {"score": digits / max(len(solution_str), 1), "digits": digits}
"""
AROUND = """
data.train_batch_size=2 data.val_max_samples=4 data.max_response_length=40
data.train_max_samples=8 actor_rollout_ref.actor.ppo_mini_batch_size=2
actor_rollout_ref.rollout.multi_turn.enable=True actor_rollout_ref.rollout.multi_turn.format=always
actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2
actor_rollout_ref.rollout.multi_turn.tool_config_path={folder}/tools.yaml
actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent
actor_rollout_ref.rollout.val_kwargs.temperature=0
trainer.test_freq=1 trainer.save_freq=1
trainer.default_local_dir={folder}/checkpoints trainer.rollout_data_dir={folder}/rollouts
trainer.resume_mode=auto trainer.total_epochs=2
"""


TRACKERS = [
    "console",
    "file",
    *(name for name in ("tensorboard", "wandb", "mlflow", "trackio") if find_spec(name)),
]


def around(folder, name, *more):
    """A run with tools, an awaited reward in parts, evaluation, checkpoints and trackers."""
    (folder / "tools.yaml").write_text(tools.CONFIG)
    variables = {
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform,tools",
        "TOKENS_OF_A_TURN": "8",
        "VERL_FILE_LOGGER_PATH": str(folder / f"{name}.jsonl"),
        "TENSORBOARD_DIR": str(folder / "tensorboard" / name),
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "MLFLOW_ENABLE_ASYNC_LOGGING": "0",
        "TRACKIO_DIR": str(folder / "trackio"),
    }
    words = [*AROUND.format(folder=folder).split(), f"trainer.logger={json.dumps(TRACKERS)}"]
    words += [f"+{POLICY_LOSS}.tau_schedule=guarded", *more]
    return verl(folder, *words, reward=ASYNC_REWARD, **variables)


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """Two steps, and another process that resumes to a third."""
    folder = tmp_path_factory.mktemp("around")
    shapes = {"first": "top_k=3", "second": "top_p=0.05"}
    for (name, shape), steps in zip(shapes.items(), (2, 3), strict=True):
        done = around(folder, name, f"actor_rollout_ref.rollout.{shape}", f"trainer.total_training_steps={steps}")
        (folder / f"{name}.log").write_text(done.stdout + done.stderr)
    return folder


def logged(folder, name):
    """By step, what verl's own tracker wrote to a file."""
    path = folder / f"{name}.jsonl"
    assert path.exists(), (folder / f"{name}.log").read_text()[-4000:]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["step"]: row["data"] for row in rows}


def rollouts(folder, step):
    return [json.loads(line) for line in (folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()]


def test_tools_and_environments(two_runs):
    found = logged(two_runs, "first")
    for step in (1, 2):
        assert found[step]["num_turns/min"] == 4  # prompt, call, answer of the tool, the last word
        assert found[step]["actor/adpo/scored"] == 0.5
        assert all(re.search(r"tool\nat \d\nassistant\n", row["output"]) for row in rollouts(two_runs, step))


def test_chat_templates(two_runs):
    """Prompts are messages in the data; the policy reads them as its template puts them."""
    for row in rollouts(two_runs, 1):
        assert re.fullmatch(r"user\n\d\+\d=\nassistant\n", row["input"])


def test_an_awaited_reward_in_parts(two_runs):
    for row in rollouts(two_runs, 1):
        digits = sum(letter.isdigit() for letter in row["output"])
        assert row["score"] == pytest.approx(digits / len(row["output"]))
    found = logged(two_runs, "first")[1]
    assert found["val-aux/DigitalLearningGmbH/MATH-lighteval/digits/mean@1"] > 0
    assert found["critic/score/mean"] == pytest.approx(mean(row["score"] for row in rollouts(two_runs, 1)))


def test_evaluation_during_training(two_runs):
    for found in logged(two_runs, "first").values():
        assert any(name.startswith("val-core/") for name in found)
        assert found["val-aux/num_turns/mean"] == 4


@pytest.mark.parametrize(("run", "step"), [("first", 1), ("second", 3)], ids=["top_k", "top_p"])
def test_samples_are_shaped(two_runs, run, step):
    """The sampler's probabilities are of fewer tokens than the policy's, which is trained on them as it is."""
    found = logged(two_runs, run)[step]
    assert found["training/rollout_probs_diff_mean"] > 0.1
    assert found["actor/adpo/anchor_kl"] > 0


def test_a_run_is_resumed(two_runs):
    """The third step has the prompts that the first two left, and the schedule's third value."""
    assert list(logged(two_runs, "first")) == [1, 2]
    assert list(logged(two_runs, "second")) == [3]
    prompts = [{row["input"] for row in rollouts(two_runs, step)} for step in (1, 2, 3)]
    assert [len(each) for each in prompts] == [2, 2, 2]
    assert len(set.union(*prompts)) == 6
    for step in (1, 2, 3):
        for rank in (0, 1):
            kept = two_runs / "checkpoints" / f"global_step_{step}" / "actor" / f"adpo_schedule_rank_{rank}.json"
            assert json.loads(kept.read_text())["updates"] == step


def test_a_run_is_not_resumed_on_other_processes(two_runs):
    config = OmegaConf.create(
        {
            "trainer": {
                "resume_mode": "auto",
                "default_local_dir": str(two_runs / "checkpoints"),
                "nnodes": 1,
                "n_gpus_per_node": 2,
            }
        }
    )
    check_processes(config)
    config.trainer.n_gpus_per_node = 1
    with pytest.raises(ValueError, match="was written by 2 processes, not 1: resume it with as many"):
        check_processes(config)


def test_tensorboard(two_runs):
    found = EventAccumulator(str(two_runs / "tensorboard" / "first")).Reload().Scalars("actor/adpo/anchor_kl")
    expected = logged(two_runs, "first")
    assert [(one.step, one.value) for one in found] == [
        (step, pytest.approx(expected[step]["actor/adpo/anchor_kl"])) for step in (1, 2)
    ]


def test_weights_and_biases(two_runs):
    files = sorted(two_runs.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    assert all(b"actor/adpo/anchor_kl" in path.read_bytes() for path in files)


def test_mlflow(two_runs):
    client = pytest.importorskip("mlflow").MlflowClient(f"sqlite:///{two_runs}/mlflow.db")
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    histories = [client.get_metric_history(run.info.run_id, "actor/adpo/anchor_kl") for run in runs]
    found = {one.step: one.value for history in histories for one in history}
    expected = {**logged(two_runs, "first"), **logged(two_runs, "second")}
    assert found == {step: pytest.approx(expected[step]["actor/adpo/anchor_kl"]) for step in (1, 2, 3)}


def test_trackio(two_runs):
    pytest.importorskip("trackio")
    files = [path for path in (two_runs / "trackio").rglob("*.db*") if path.is_file()]
    assert any(b"actor/adpo/anchor_kl" in path.read_bytes() for path in files)


def test_a_mistake_ends_it_before_the_first_rollout(tmp_path):
    done = verl(tmp_path, f"+{POLICY_LOSS}.target=bolzmann")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "did you mean boltzmann?" in said
    assert "step:1 " not in said
