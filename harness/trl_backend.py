"""Training by TRL's trainer instead of the own loop, for several processes, sharded models, vLLM and adapters.

What decides the numbers (rewards, advantages, the KL's place and weight, ratios, clipping) is the recipe's and goes
through ``objective`` unchanged; ``trl_trainer`` has the subclass. What a recipe leaves open is given as TRL names it.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from klgrad.harness import checkpoints
from klgrad.harness.models import load, placed
from klgrad.harness.recipe import Recipe, change, of_kind
from klgrad.harness.train import (
    Progress,
    check_prompts,
    check_settings,
    fresh,
    objective_of,
    problems_of,
    recording,
)
from klgrad.synth.estimators import unknown

# Settings of TRL's that say how a run is computed and not what; all others are the recipe's.
OPTIONS = (
    "use_vllm", "vllm_*", "use_transformers_continuous_batching", "transformers_continuous_batching_config",
    "cache_implementation", "gradient_checkpointing*", "ds3_gather_for_generation", "deepspeed", "fsdp*", "ddp_*",
    "torch_*", "optim*", "adam_*",
)  # fmt: skip

STATE = "trainer_state.json"  # what a checkpoint of transformers' trainer holds and one of the own loop does not
INSTALL = "pip install 'klgrad[trl]'"


def train(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    tensorboard: bool = False,
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
    options: Sequence[str] = (),
    lora: int = 0,
) -> list[dict[str, Any]]:
    """Train as ``train.train`` does, with the same files, in as many processes as ``accelerate launch`` started.

    Args:
        options: ``KEY=VALUE`` of TRL's RLOOConfig, such as ``use_vllm=true``.
        lora: rank of a LoRA adapter on all linear layers, the only thing then trained; 0: none.

    Returns:
        The lines of metrics; none but in the main process.

    Raises:
        ValueError: for what cannot be trained, or not by TRL, before anything is written.
        Stopped: for a loss or gradient that is not finite; the weights before it are saved.
        OSError: when the disk refuses; earlier checkpoints are untouched.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    refuse(recipe, processes, lora=lora, resume=resume)
    from trl import RLOOConfig

    from klgrad.harness.trl_trainer import ObjectiveTrainer, changed_hooks

    if changed := changed_hooks():
        raise ValueError(f"this version of TRL is not the one that was tested ({changed[0]}): {INSTALL}")
    given = arguments(recipe, out, processes) | own_options(options)
    # accelerate's own configuration would otherwise decide where the recipe says float32
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16" if recipe.dtype == "bfloat16" else "no"
    policy, tokenizer = load(placed(recipe.model))  # from the root: an adapter's configuration names its base so
    check_prompts(recipe, policy, tokenizer)
    if policy.adapted:
        raise ValueError(
            f"model = {recipe.model!r} is an adapter: TRL's trainer makes a new one with --lora R; "
            "this one goes on with --backend own"
        )
    tokenizer.padding_side = "left"
    main = os.environ.get("RANK", "0") == "0"
    folder = checkpoints.latest(out, STATE) if resume else None
    lines = _lines(recipe, out, folder, resume) if main else []
    if folder is not None and int(folder.name[5:]) >= recipe.steps:
        return lines

    def after(line: dict[str, Any]) -> None:
        lines.append(line)
        record(line)
        if progress:
            progress(line["step"], recipe.steps)

    try:
        trainer = ObjectiveTrainer(
            recipe, policy, tokenizer, problems_of(recipe), RLOOConfig(**given), out,
            peft_config=_lora(lora) if lora else None, after=after, stop=stop,
        )  # fmt: skip
    except ImportError as error:  # vLLM, DeepSpeed: what --trl asks for and klgrad does not bring
        raise ValueError(f"--trl {' '.join(options)}: {str(error).strip().splitlines()[0]}") from None
    with recording(out, tensorboard and main) as record:
        trainer.train(resume_from_checkpoint=None if folder is None else str(folder))
    return lines


def _lines(recipe: Recipe, out: Path, folder: Path | None, resume: bool) -> list[dict[str, Any]]:
    """The lines of metrics up to the checkpoint that is gone on from."""
    if not resume:
        return fresh(out)
    out.mkdir(parents=True, exist_ok=True)
    if folder is not None:
        checkpoints.check_recipe(folder, recipe)
    step = 0 if folder is None else int(folder.name[5:])
    checkpoints.truncate(out / "evaluations.jsonl", step)
    return checkpoints.truncate(out / "metrics.jsonl", step)


def refuse(recipe: Recipe, processes: int = 1, *, lora: int = 0, resume: bool = False) -> None:
    """Say what is missing, or what TRL's trainer cannot do as the recipe means it.

    Raises:
        ValueError: naming the key and what helps.
    """
    check_settings(recipe)
    for package in ("trl", "accelerate", "datasets", *(["peft"] if lora else [])):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"--backend trl needs the package {package}: {INSTALL}")
    if recipe.staleness:
        raise ValueError(
            f"staleness = {recipe.staleness}: TRL's trainer keeps no queue of older rollouts: use --backend own"
        )
    if recipe.reference:
        raise ValueError(
            f"reference = {recipe.reference!r}: TRL's trainer takes the policy at step 0 as the reference: "
            "use --backend own"
        )
    if recipe.reset_every and (lora or resume):
        what = "an adapter's base is its reference" if lora else "TRL's checkpoints lack the reference"
        raise ValueError(f"reset_every = {recipe.reset_every}: {what}: use --backend own")
    _divide(recipe, processes)
    if processes == 1:
        return
    kl = recipe.configuration
    if recipe.aggregation == "token-mean":
        raise ValueError(f"token-mean divides by the tokens of the whole batch and {processes} processes split it")
    if kl is not None and kl.baseline == "loo" and kl.baseline_value == 0:
        raise ValueError(f"{kl} couples the whole batch and {processes} processes split it: write +loo={recipe.group}")


def _divide(recipe: Recipe, processes: int) -> tuple[int, int]:
    """Prompts in one process's memory at once, and how many times that makes an optimiser step."""
    prompts = recipe.minibatch or recipe.batch
    key = "minibatch" if recipe.minibatch else "batch"
    if prompts % processes:
        raise ValueError(f"{key} = {prompts} prompts are not shared evenly by {processes} processes: take a multiple")
    share = prompts // processes
    micro = min(recipe.micro or share, share)
    if share % micro:
        raise ValueError(f"micro = {micro} prompts do not divide the {share} of one process: take a divisor")
    return micro, share // micro


def arguments(recipe: Recipe, out: Path, processes: int = 1) -> dict[str, Any]:
    """The recipe as TRL's RLOOConfig takes it. Its ``beta`` only says whether a reference is kept."""
    micro, accumulation = _divide(recipe, processes)
    rounds = recipe.minibatches
    resets = {"sync_ref_model": True, "ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": recipe.reset_every * rounds}
    return {
        "output_dir": str(out), "max_steps": recipe.steps * rounds, "per_device_train_batch_size": micro * recipe.group,
        "gradient_accumulation_steps": accumulation, "steps_per_generation": accumulation * rounds,
        "num_generations": recipe.group, "max_completion_length": recipe.length, "temperature": recipe.temperature,
        "beta": float(objective_of(recipe).penalised or recipe.monitor), "learning_rate": recipe.learning_rate,
        "weight_decay": recipe.weight_decay, "max_grad_norm": recipe.max_norm, "optim": "adamw_torch_fused",
        "seed": recipe.seed, "shuffle_dataset": False, "disable_dropout": True, "gradient_checkpointing": False,
        "bf16": recipe.dtype == "bfloat16", "use_cpu": recipe.device == "cpu",
        "logging_strategy": "no", "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
        **(resets if recipe.reset_every and (objective_of(recipe).penalised or recipe.monitor) else {}),
    }  # fmt: skip


def own_options(options: Sequence[str]) -> dict[str, Any]:
    """``KEY=VALUE`` of TRL's RLOOConfig, of those that the recipe leaves open.

    Raises:
        ValueError: for a key that does not exist or that a recipe decides, or a value of the wrong kind.
    """
    from trl import RLOOConfig

    known = {field.name: field.default for field in fields(RLOOConfig)}
    free = [name for name in known if any(fnmatch.fnmatch(name, pattern) for pattern in OPTIONS)]
    found = dict(change(text, "--trl", "use_vllm=true") for text in options)
    for key in found:
        if key in known and key not in free:
            raise ValueError(f"--trl {key}: the recipe decides that; --trl takes {', '.join(OPTIONS)}")
        if key not in free:
            raise unknown("option of TRL", key, free)
        if known[key] is not None:  # what those without a default take is TRL's to say
            found[key] = of_kind(type(known[key]), f"--trl {key}", found[key])
    return found


def _lora(rank: int) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
