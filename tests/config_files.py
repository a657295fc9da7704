"""Small texts in the shapes in which people keep settings, with what the library does with them.

A row is a trainer, its settings, and the field that they give: ``none`` for no penalty, ``open`` where no verdict may
be given. Fields are written by hand from the libraries' code. Each row is rendered in shapes that its trainer has,
among settings of the library that are nothing to the KL.
"""

import json

VERL, SLIME, OPENRLHF = "python3 -m verl.trainer.main_ppo", "python3 train.py", "python3 -m openrlhf.cli.train_ppo_ray"
A = "actor_rollout_ref.actor."

VERL_BESIDE = {
    "data.train_files": "data/train.parquet", "actor_rollout_ref.model.path": "org/model",
    "actor_rollout_ref.rollout.dtype": "bfloat16", "actor_rollout_ref.rollout.val_kwargs.n": 4,
    "critic.loss_agg_mode": "token-mean", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 4,
    "trainer.project_name": "kl_study", "trainer.val_before_train": False,
}  # fmt: skip
OLD_VERL_BESIDE = {
    "data.train_files": "data/train.parquet", "actor_rollout_ref.model.path": "org/model",
    "actor_rollout_ref.actor.ppo_micro_batch_size": 16, "critic.ppo_micro_batch_size": 8,
}  # fmt: skip
TRL_BESIDE = {
    "model_name_or_path": "org/model", "dataset_name": "org/questions", "bf16": True, "report_to": "wandb",
    "gradient_checkpointing": True, "use_vllm": True, "num_generations": 8, "temperature": 0.9,
    "repetition_penalty": 1.0, "ref_model_sync_steps": 64,
}  # fmt: skip
SWIFT_BESIDE = {"model": "org/model", "dataset": "org/questions", "tuner_type": "lora", "max_completion_length": 512}
SLIME_BESIDE = {
    "hf-checkpoint": "models/m", "prompt-data": "data.jsonl", "rollout-batch-size": 32, "eps-clip": 0.2,
    "n-samples-per-prompt": 8, "ci-disable-kl-checker": True,
}  # fmt: skip
OPENRLHF_BESIDE = {"actor.model_name_or_path": "org/model", "rollout.n_samples_per_prompt": 8, "actor.adam.lr": 5e-7}
OLD_OPENRLHF_BESIDE = {"pretrain": "org/model", "n_samples_per_prompt": 8, "micro_train_batch_size": 4}
NEMO_BESIDE = {
    "grpo.num_prompts_per_step": 32, "policy.model_name": "org/model", "policy.tokenizer.name": "org/model",
    "loss_fn.ratio_clip_max": 0.28, "logger.wandb.name": "run",
}  # fmt: skip
SKYRL_BESIDE = {"trainer.epochs": 4, "trainer.policy.optimizer_config.lr": 1e-6, "generator.n_samples_per_prompt": 5}
EASYR1_BESIDE = {"data.max_response_length": 1024, "worker.actor.global_batch_size": 128, "worker.rollout.n": 8}
OPEN_INSTRUCT_BESIDE = {"model_name_or_path": "org/model", "num_samples_per_prompt_rollout": 8, "exp_name": "run"}

R1 = {f"{A}use_kl_loss": False, "algorithm.use_kl_in_reward": True, "actor_rollout_ref.rollout.n": 8}
LOSS = {f"{A}use_kl_loss": True, "algorithm.adv_estimator": "grpo"}
SEARCH = {"max_turns": 2, "retriever.topk": 3}
K = "trainer.algorithm."
N = "loss_fn."

# library, how it is run (None: by a file alone), settings beside, [(settings, field, coefficient), ...]
ROWS = [
    ("verl", VERL, VERL_BESIDE, [
        ({}, "none", None),
        ({"algorithm.adv_estimator": "grpo", f"{A}use_kl_loss": False}, "none", None),
        ({**LOSS, f"{A}kl_loss_type": "low_var_kl"}, "token-forward", 0.001),
        ({**LOSS, f"{A}kl_loss_type": "k3", f"{A}kl_loss_coef": 0.01}, "token-forward", 0.01),
        ({**LOSS, f"{A}kl_loss_type": "kl"}, "zero", 0.001),
        ({**LOSS, f"{A}kl_loss_type": "k1"}, "zero", 0.001),
        ({**LOSS, f"{A}kl_loss_type": "mse"}, "token", 0.001),
        ({**LOSS, f"{A}kl_loss_type": "k2"}, "token", 0.001),
        ({**LOSS, f"{A}kl_loss_type": "k3+"}, "token", 0.001),
        ({**LOSS, f"{A}kl_loss_type": "abs"}, "other", 0.001),
        ({**R1, "algorithm.adv_estimator": "rloo"}, "sequence", 0.001),
        ({**R1, "algorithm.adv_estimator": "rloo_vectorized"}, "sequence", 0.001),
        ({**R1, "algorithm.adv_estimator": "gae", "algorithm.kl_ctrl.kl_coef": 0.02}, "sequence", 0.02),
        ({**R1, "algorithm.adv_estimator": "remax"}, "sequence", 0.001),
        ({**R1, "algorithm.adv_estimator": "opo"}, "scaled-sequence", 0.001),
        ({**R1, "algorithm.adv_estimator": "reinforce_plus_plus"}, "sequence", 0.001),
        ({**R1, "algorithm.adv_estimator": "optimal_token_baseline"}, "sequence", 0.001),
        ({**R1, "algorithm.adv_estimator": "grpo_vectorized"}, "scaled-sequence", 0.001),
        ({**R1, "algorithm.adv_estimator": "rloo", "algorithm.kl_penalty": "low_var_kl"}, "other", 0.001),
        ({**R1, "algorithm.adv_estimator": "rloo", "algorithm.kl_penalty": "mse"}, "other", 0.001),
        ({**LOSS, f"{A}kl_loss_type": "k5"}, "open", None),
        ({**LOSS, f"{A}kl_schedule": "cosine"}, "open", None),
        ({**R1, "algorithm.adv_estimator": "my_estimator"}, "open", None),
        ({"distillation.enabled": True}, "token-forward", 1.0),
        ({"distillation.enabled": True, "distillation.distillation_loss.use_policy_gradient": True,
          "distillation.distillation_loss.loss_mode": "k1"}, "token", 1.0),
        ({"distillation.enabled": True, "distillation.distillation_loss.use_policy_gradient": True}, "other", 1.0),
        ({"distillation.enabled": True, "distillation.distillation_loss.loss_mode": "k1"}, "none", None),
        ({"distillation.enabled": True, **LOSS}, "open", None),
    ]),
    ("search-r1", VERL, OLD_VERL_BESIDE, [
        ({**SEARCH, "algorithm.kl_ctrl.kl_coef": 0.002}, "sequence", 0.002),
        ({**SEARCH, "do_search": True}, "sequence", 0.001),
        ({**SEARCH, "algorithm.kl_penalty": "low_var_kl"}, "other", 0.001),
        ({**SEARCH, f"{A}use_kl_loss": True, f"{A}kl_loss_type": "low_var_kl"}, "token-forward", 0.001),
        ({**SEARCH, f"{A}use_kl_loss": True, f"{A}kl_loss_type": "kl"}, "zero", 0.001),
        ({**SEARCH, "algorithm.kl_ctrl.kl_coef": 0}, "none", None),
    ]),
    ("easyr1", None, EASYR1_BESIDE, [
        ({"algorithm.disable_kl": False, "algorithm.use_kl_loss": True, "algorithm.kl_penalty": "low_var_kl"},
         "token-forward", 0.001),
        ({"algorithm.use_kl_loss": True, "algorithm.kl_penalty": "kl"}, "zero", 0.001),
        ({"algorithm.use_kl_loss": True, "algorithm.kl_penalty": "mse", "algorithm.kl_coef": 0.01}, "token", 0.01),
        ({"algorithm.use_kl_loss": False, "algorithm.adv_estimator": "rloo"}, "sequence", 0.001),
        ({"algorithm.use_kl_loss": False, "algorithm.kl_penalty": "low_var_kl"}, "other", 0.001),
        ({"algorithm.disable_kl": True, "algorithm.kl_coef": 0.01}, "none", None),
    ]),
    ("openrlhf", OPENRLHF, OPENRLHF_BESIDE, [
        ({"algo.advantage.estimator": "rloo"}, "sequence", 0.01),
        ({"algo.kl.use_loss": True, "algo.kl.estimator": "k3", "algo.kl.init_coef": 1e-3}, "token-forward", 1e-3),
        ({"algo.kl.use_loss": True, "algo.kl.estimator": "k2"}, "token", 0.01),
        ({"algo.kl.use_loss": True}, "zero", 0.01),
        ({"algo.kl.use_loss": True, "algo.kl.unbiased_gradient": True}, "token", 0.01),
        ({"algo.kl.estimator": "k3"}, "other", 0.01),
        ({"algo.kl.init_coef": 0}, "none", None),
        ({"algo.kl.decay": 0.5}, "open", None),
    ]),
    ("openrlhf@0.8.0", OPENRLHF, OLD_OPENRLHF_BESIDE, [
        ({"init_kl_coef": 5e-4}, "sequence", 5e-4),
        ({"init_kl_coef": 1e-3, "use_kl_loss": True, "kl_estimator": "k3"}, "token-forward", 1e-3),
        ({"init_kl_coef": 1e-3, "use_kl_loss": True, "kl_estimator": "k2"}, "token", 1e-3),
        ({"init_kl_coef": 1e-3, "use_kl_loss": True}, "zero", 1e-3),
        ({"kl_estimator": "k3", "advantage_estimator": "reinforce"}, "other", 0.01),
        ({"init_kl_coef": 0, "advantage_estimator": "rloo"}, "none", None),
    ]),
    ("trl-grpo", None, TRL_BESIDE, [
        ({"beta": 0.02}, "token", 0.02),
        ({"beta": 0.0}, "none", None),
        ({}, "none", None),
        ({"beta": 0.04, "use_bias_correction_kl": False}, "token-forward", 0.04),
        ({"beta": 0.04, "loss_type": "grpo"}, "token", 0.04),
        ({"beta": 0.04, "importance_sampling_level": "sequence"}, "other", 0.04),
        ({"beta": 0.04, "kl_target": 0.1}, "open", None),
    ]),
    ("trl-grpo", "trl grpo", TRL_BESIDE, [({"beta": 0.02}, "token", 0.02), ({"beta": 0.0}, "none", None)]),
    ("trl-rloo", "trl rloo", TRL_BESIDE, [
        ({"beta": 0.05}, "sequence", 0.05), ({}, "sequence", 0.05), ({"beta": 0}, "none", None),
    ]),
    ("trl-dpo", "trl dpo", {"model_name_or_path": "org/model"}, [({"beta": 0.1}, "open", None)]),
    ("trl-kto", "trl kto", {"model_name_or_path": "org/model"}, [({"beta": 0.1}, "open", None)]),
    ("trl-sft", "trl sft", {"model_name_or_path": "org/model"}, [({"packing": True}, "open", None)]),
    ("trl-reward", "trl reward", {"model_name_or_path": "org/model"}, [({"max_length": 512}, "open", None)]),
    ("trl-ppo@0.11.4", None, {"model_name": "org/model", "mini_batch_size": 8, "ppo_epochs": 4}, [
        ({"init_kl_coef": 0.1, "adap_kl_ctrl": True, "target": 6}, "sequence", 0.1),
        ({"init_kl_coef": 0.1, "kl_penalty": "mse", "adap_kl_ctrl": False}, "other", 0.1),
        ({"adap_kl_ctrl": False, "init_kl_coef": 0.0}, "none", None),
    ]),
    ("ms-swift", "swift rlhf", SWIFT_BESIDE, [
        ({"rlhf_type": "grpo", "beta": 0.02}, "token-forward", 0.02),
        ({"rlhf_type": "grpo", "advantage_estimator": "rloo", "loss_type": "dapo"}, "sequence", 0.04),
        ({"rlhf_type": "grpo", "beta": 0}, "none", None),
        ({"rlhf_type": "grpo", "kl_horizon": 100}, "open", None),
    ]),
    ("ms-swift-ppo", "swift rlhf", SWIFT_BESIDE, [
        ({"rlhf_type": "ppo", "kl_coef": 0.02}, "sequence", 0.02), ({"rlhf_type": "ppo"}, "sequence", 0.05),
    ]),
    ("ms-swift-other", "swift rlhf", SWIFT_BESIDE, [
        ({"rlhf_type": "dpo", "beta": 0.1}, "open", None), ({"rlhf_type": "gkd", "beta": 0.5}, "open", None),
        ({"rlhf_type": "kto", "beta": 0.1}, "open", None), ({"beta": 0.1}, "open", None),
    ]),
    ("slime", SLIME, SLIME_BESIDE, [
        ({"use-kl-loss": True, "kl-loss-coef": 0.01, "kl-loss-type": "low_var_kl"}, "token-forward", 0.01),
        ({"use-kl-loss": True, "kl-loss-coef": 0.01}, "zero", 0.01),
        ({"use-kl-loss": True, "kl-loss-coef": 0.01, "kl-loss-type": "k3", "use-unbiased-kl": True}, "token", 0.01),
        ({"use-kl-loss": True, "kl-loss-coef": 0.01, "kl-loss-type": "k2", "use-unbiased-kl": True}, "other", 0.01),
        ({"advantage-estimator": "grpo", "kl-coef": 0.01}, "none", None),
        ({"advantage-estimator": "reinforce_plus_plus", "kl-coef": 0.01}, "sequence", 0.01),
        ({"advantage-estimator": "reinforce_plus_plus_baseline", "kl-coef": 0.01}, "token", 0.01),
        ({"use-opd": True, "opd-type": "sglang"}, "token", 1.0),
        ({"use-opd": True, "use-kl-loss": True, "kl-loss-coef": 0.1}, "open", None),
    ]),
    ("nemo-rl", "uv run examples/run_grpo.py", NEMO_BESIDE, [
        ({f"{N}reference_policy_kl_penalty": 0.01}, "token", 0.01),
        ({f"{N}reference_policy_kl_penalty": 0.01, f"{N}reference_policy_kl_type": "k2"}, "other", 0.01),
        ({f"{N}reference_policy_kl_penalty": 0.02, f"{N}reference_policy_kl_type": "k1"}, "token", 0.02),
        ({f"{N}reference_policy_kl_penalty": 0}, "none", None),
        ({f"{N}use_kl_in_reward": True}, "none", None),
        ({f"{N}kl_annealing": True}, "open", None),
    ]),
    ("skyrl", "uv run -m skyrl.train.entrypoints.main_base", SKYRL_BESIDE, [
        ({f"{K}advantage_estimator": "grpo"}, "token-forward", 0.001),
        ({f"{K}kl_estimator_type": "k2"}, "token", 0.001),
        ({f"{K}kl_estimator_type": "k1"}, "zero", 0.001),
        ({f"{K}use_kl_loss": False}, "none", None),
        ({f"{K}use_kl_loss": False, f"{K}use_kl_in_reward": True}, "other", 0.001),
        ({f"{K}use_kl_loss": False, f"{K}use_kl_in_reward": True, f"{K}kl_estimator_type": "k1",
          f"{K}advantage_estimator": "rloo", f"{K}loss_reduction": "token_mean_legacy"}, "sequence", 0.001),
    ]),
    ("open-instruct", "python open_instruct/grpo_fast.py", OPEN_INSTRUCT_BESIDE, [
        ({"beta": 0.01, "kl_estimator": 2}, "token-forward", 0.01),
        ({"beta": 0.01, "kl_estimator": 0}, "zero", 0.01),
        ({"beta": 0.01, "kl_estimator": 1}, "token", 0.01),
        ({"beta": 0.01, "kl_estimator": 3}, "token", 0.01),
        ({"beta": 0.0}, "none", None),
    ]),
    ("open-instruct@2025-11", "python open_instruct/grpo_fast.py", OPEN_INSTRUCT_BESIDE, [
        ({"beta": 0.01, "kl_estimator": "kl1"}, "zero", 0.01),
        ({"beta": 0.01, "kl_estimator": "kl2"}, "token", 0.01),
        ({"beta": 0.01, "kl_estimator": "kl3"}, "token-forward", 0.01),
        ({"beta": 0.01, "kl_estimator": "kl4"}, "token", 0.01),
    ]),
    ("prime-rl", None, {"max_steps": 100, "model.name": "org/model", "orchestrator.batch_size": 64}, [
        ({"trainer.loss.type": "ipo", "trainer.loss.eps": 0.3}, "none", None),
        ({"trainer.loss.eps": 0.2}, "none", None),
    ]),
    ("prime-rl@0.8.0", None, {"max_steps": 100, "model.name": "org/model", "orchestrator.batch_size": 64}, [
        ({"trainer.loss.type": "ipo", "trainer.loss.ipo_threshold": 0.1}, "none", None),
        ({"trainer.loss.type": "default", "trainer.loss.dppo_mask_low": 0.2}, "none", None),
    ]),
    ("roll", None, {"rollout_batch_size": 64, "prompt_length": 2048, "num_return_sequences_in_group": 8}, [
        ({"use_kl_loss": True, "kl_loss_coef": 0.001, "add_token_level_kl": False}, "token-forward", 0.001),
        ({"add_token_level_kl": True, "adv_estimator": "reinforce", "loss_agg_mode": "token-mean"}, "sequence", 0.2),
        ({"add_token_level_kl": True, "kl_penalty": "mse"}, "other", 0.2),
    ]),
    ("tunix-grpo", None, {"model_config.model_name": "m", "rl_training_config.max_steps": 100}, [
        ({"grpo_config.beta": 0.04}, "zero", 0.04),
        ({"grpo_config.beta": 0.08, "grpo_config.kl_loss_mode": "low_var_kl"}, "token-forward", 0.08),
        ({"agentic_grpo_config.beta": 0.04, "agentic_grpo_config.kl_loss_mode": "mse_kl"}, "token", 0.04),
    ]),
    ("tunix-ppo", None, {"model_config.model_name": "m"}, [
        ({"ppo_config.beta": 0.04}, "other", 0.04),
        ({"ppo_config.beta": 0.04, "ppo_config.kl_method": "kl", "ppo_config.gae_lambda": 1.0}, "sequence", 0.04),
    ]),
    ("areal", None, {"experiment_name": "run", "actor.path": "org/model", "actor.group_size": 8}, [
        ({"actor.kl_ctl": 0.05, "ref.path": "org/model"}, "sequence", 0.05),
        ({"actor.kl_ctl": 0.05, "actor.kl_estimator": "k3", "ref.path": "org/model"}, "other", 0.05),
        ({"actor.kl_ctl": 0.0}, "none", None),
    ]),
    ("torchtune-dpo", None, {"optimizer._component_": "torch.optim.AdamW", "dataset._component_": "d.pairs"}, [
        ({"loss._component_": "torchtune.rlhf.loss.DPOLoss", "loss.beta": 0.05}, "open", None),
    ]),
    ("torchtune-grpo", None, {"optimizer._component_": "torch.optim.AdamW", "tokenizer._component_": "m.tokenizer"}, [
        ({"loss._component_": "torchtune.dev.rl.loss.GRPOLoss", "loss.kl_coeff": 0.05}, "token-forward", 0.05),
        ({"loss._component_": "torchtune.dev.rl.loss.GRPOCompletionLoss", "loss.kl_coeff": 0.05}, "none", None),
    ]),
    ("axolotl", None, {"base_model": "org/model", "adapter": "lora"}, [
        ({"rl": "grpo", "trl.beta": 0.01, "trl.num_generations": 4}, "token-forward", 0.01),
        ({"rl": "grpo", "trl.beta": 0.01, "trl.use_bias_correction_kl": True}, "token", 0.01),
        ({"rl": "grpo", "trl.num_generations": 4}, "none", None),
    ]),
    ("axolotl-other", None, {"base_model": "org/model"}, [({"rl": "dpo", "rl_beta": 0.1}, "open", None)]),
    ("cosmos-rl", None, {"train.epoch": 1, "policy.model_name_or_path": "m", "train.train_policy.type": "grpo"}, [
        ({"train.train_policy.kl_beta": 0.01}, "token-forward", 0.01),
        ({"train.train_policy.kl_beta": 0.01, "train.train_policy.unbiased_kl_estimate": True}, "token", 0.01),
        ({"train.train_policy.temperature": 0.9}, "none", None),
    ]),
    ("trinity-rft", None, {"project": "p", "algorithm.repeat_times": 8, "buffer.batch_size": 96}, [
        ({"algorithm.algorithm_type": "grpo"}, "token", 0.001),
        ({"algorithm.algorithm_type": "grpo", "algorithm.kl_loss_fn": "k3"}, "token-forward", 0.001),
        ({"algorithm.algorithm_type": "grpo", "algorithm.kl_loss_fn": "k1"}, "zero", 0.001),
        ({"algorithm.algorithm_type": "grpo", "algorithm.kl_loss_fn": "corrected_k3"}, "token", 0.001),
        ({"algorithm.algorithm_type": "dapo"}, "none", None),
        ({"algorithm.algorithm_type": "ppo", "algorithm.kl_penalty_fn": "k1"}, "open", None),
    ]),
    ("trinity-rft-other", None, {"project": "p", "algorithm.repeat_times": 8}, [
        ({"algorithm.algorithm_type": "dpo"}, "open", None),
    ]),
    ("tinker-cookbook", "python -m tinker_cookbook.rl.train", {"learning_rate": 1e-5, "log_path": "logs"}, [
        ({"kl_penalty_coef": 0.01}, "token", 0.01),
        ({"kl_penalty_coef": 0.01, "kl_discount_factor": 1.0}, "sequence", 0.01),
        ({"kl_penalty_coef": 0.0}, "none", None),
    ]),
]  # fmt: skip

_FLAGGED = ("trl", "swift", "openrlhf", "slime", "open-instruct", "train.py", "open_instruct")


def _nested(settings):
    tree = {}
    for key, value in settings.items():
        *above, last = key.split(".")
        at = tree
        for part in above:
            at = at.setdefault(part, {})
        at[last] = value
    return tree


def _as_yaml(settings, program):
    return "config.yaml", json.dumps(_nested(settings), indent=2)  # JSON is YAML


def _as_toml(settings, program):
    return "config.toml", "\n".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())


def _words(settings, program):
    flagged = any(word in program for word in _FLAGGED)
    for key, value in settings.items():
        if flagged:
            yield f"--{key}" if value is True else f"--{key} {value}"
        else:
            yield f"{key}={value}"


def _as_command(settings, program):
    return "run.sh", " \\\n    ".join([program, *_words(settings, program)]) + "\n"


def _as_array(settings, program):
    body = "\n".join(f"    {word}" for word in _words(settings, program))
    return "run.sh", f'set -e\nARGS=(\n{body}\n)\nexport CUDA_VISIBLE_DEVICES=0\n{program} "${{ARGS[@]}}" "$@"\n'


def _as_variable(settings, program):
    words = list(_words(settings, program))
    half = len(words) // 2
    return (
        "run.sh",
        f'REST="{" ".join(words[half:])}"\nif [ -n "$REST" ]; then\n  {program} {" ".join(words[:half])} $REST\nfi\n',
    )


def _as_function(settings, program):
    return "run.sh", f'run() {{\n  {program} "$@" {" ".join(_words(settings, program))}\n}}\nrun\n'


SCRIPTS = (_as_command, _as_array, _as_variable, _as_function)


def corpus():
    """``(id, file name, text, library, field, coefficient)`` of every file."""
    for library, program, beside, rows in ROWS:
        for i, (settings, field, coefficient) in enumerate(rows):
            every = {**beside, **settings}
            shapes = [SCRIPTS[i % 4], SCRIPTS[(i + 1) % 4]] if program else [_as_yaml, _as_toml]
            for shape in shapes:
                name, text = shape(every, program)
                yield f"{library}-{i}-{shape.__name__.removeprefix('_as_')}", name, text, library, field, coefficient
