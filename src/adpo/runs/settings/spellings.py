"""Names that other commands of the field have for settings, and what they are called here."""

from __future__ import annotations

_MODEL_OPTION = "it is an option of the model: --model_init_kwargs '{{{}: ...}}'"
_IN_PYTHON = "the command does not have it; in Python, give the trainer a model and a peft_config of your own"
_PROCESSES = "it is an option of the launcher: accelerate launch --{0} ... -m adpo ..."
_COMMON = {
    "model_name_or_path": "here it is --model",
    "model_name": "here it is --model",
    "dataset_name": "here it is --data",
    "dataset": "here it is --data",
    "dataset_path": "here it is --data",
    "train_file": "here it is --data",
    "dataset_config": "here it is --data_config",
    "dataset_config_name": "here it is --data_config",
    "dataset_train_split": "here it is --data_split",
    "dataset_test_split": "here it is --eval_split",
    "eval_dataset": "here it is --eval_data",
    "validation_file": "here it is --eval_data",
    "lr": "here it is --learning_rate",
    "batch_size": "here it is --per_device_train_batch_size",
    "epochs": "here it is --num_train_epochs",
    "num_epochs": "here it is --num_train_epochs",
    "evaluation_strategy": "here it is --eval_every, in steps",
    "group_by_length": "rows come in the order of seed and epoch: leave it out",
    "warmup_ratio": "here it is --warmup_steps, which takes a share of all steps below 1, too",
    "logging_dir": "TensorBoard's files are in the folder of the run: --out",
    "no_cuda": "here it is --use_cpu true",
    "save_safetensors": "weights are always saved so: leave it out",
    "lora_task_type": "it is always CAUSAL_LM: leave it out",
    "lora_modules_to_save": _IN_PYTHON,
    "lora_target_parameters": _IN_PYTHON,
    "use_rslora": _IN_PYTHON,
    "use_dora": _IN_PYTHON,
    "load_in_4bit": _IN_PYTHON,
    "load_in_8bit": _IN_PYTHON,
    "bnb_4bit_quant_type": _IN_PYTHON,
    "bnb_4bit_quant_storage": _IN_PYTHON,
    "dataset_streaming": "a named data set is read from disk as a whole: leave it out",
    "ignore_bias_buffers": "leave it out: buffers are not broadcast",
    "use_bnb_nested_quant": _IN_PYTHON,
    "mixed_precision": "here it is --bf16 true or --fp16 true",
    "num_processes": _PROCESSES.format("num_processes"),
    "num_machines": _PROCESSES.format("num_machines"),
    "multi_gpu": _PROCESSES.format("multi_gpu"),
    "nproc_per_node": "it is an option of the launcher: torchrun --nproc_per_node ... -m adpo ...",
}
OF_TRAIN = {
    **_COMMON,
    "beta": "TRL's beta is a KL penalty, whose place the anchor takes: --tau is its temperature (with --target "
    "boltzmann, --reward_beta is that of the rewards)",
    "reward_funcs": "here it is --reward file.py:function",
    "reward_function": "here it is --reward file.py:function",
    "reward_model_name_or_path": "a reward is a function here, which may call a model: --reward file.py:function",
    "reward_model_path": "a reward is a function here, which may call a model: --reward file.py:function",
    "dev_lists": "here it is --dev_problems",
    "eval_lists": "here it is --eval_problems",
    "max_prompt_length": "prompts are never cut; one that leaves no room for a completion is left out",
    "max_new_tokens": "here it is --max_completion_length",
    "max_length": "here it is --max_completion_length",
    "max_tokens": "here it is --max_completion_length",
    "rollout_n": "here it is --num_generations",
    "group_size": "here it is --num_generations",
    "vllm": "here it is --use_vllm true",
    **{
        name: _MODEL_OPTION.format(
            "dtype" if name == "torch_dtype" else "revision" if "revision" in name else name
        )
        for name in ("dtype", "torch_dtype", "attn_implementation", "model_revision", "revision", "device_map")
    },
    "attn_implementation": "how passes are computed is --attention; for the model itself, --model_init_kwargs "
    "'{attn_implementation: ...}'",
}
"""What `adpo train` says of a name that is none of its settings."""
OF_PREFER = {
    **_COMMON,
    "beta": "DPO's beta is 1 / tau here: for beta 0.1, --tau 10",
    "dev_problems": "here it is --dev_lists",
    "eval_problems": "here it is --eval_lists",
    "ref_model": "here it is --reference",
    "model_ref": "here it is --reference",
    "ref_model_name_or_path": "here it is --reference",
    "loss_type": "here it is --target (plackett_luce, top1, boltzmann, kde) and --divergence",
    "precompute_ref_log_probs": "the reference is always scored once, before training: leave it out",
    "reference_free": "here it is --anchor none",
    "f_divergence_type": "here it is --divergence",
    "model_init_kwargs": "weights are loaded in float32, without further options",
    "rpo_alpha": "here it is --nll_weight",
    "max_prompt_length": "prompts are never cut: --max_length is for prompt and completion, whose end is cut",
    "max_completion_length": "here it is --max_length, for prompt and completion",
    "reward": "rewards or ranks are in the data here; adpo train learns from a reward function",
    "reward_funcs": "rewards or ranks are in the data here; adpo train learns from a reward function",
    "reward_model_name_or_path": "rewards or ranks are in the data here; adpo train learns from a reward function",
    "reward_model_path": "rewards or ranks are in the data here; adpo train learns from a reward function",
    "dtype": "weights are loaded in float32; --bf16 true computes in bfloat16",
    "torch_dtype": "weights are loaded in float32; --bf16 true computes in bfloat16",
    "attn_implementation": "here it is --attention, by itself the fastest that fits",
    "model_revision": "download that revision, and give its folder as --model",
}
"""What `adpo prefer` says of a name that is none of its settings."""
