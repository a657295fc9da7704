"""What a run needs before it is started: memory, tokens, and time from a short measurement."""

from __future__ import annotations

import time
from typing import Any

import torch

from klgrad.harness.objective import MONITORS
from klgrad.harness.recipe import Recipe

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
_LOGITS = 1 << 24  # entries held at once by objective.token_terms
_GIB = float(1 << 30)


def needs(recipe: Recipe, parameters: float, vocabulary: int = 0) -> dict[str, Any]:
    """Memory in GiB and tokens by arithmetic.

    Weights, gradients and the two moments of AdamW are float32; the reference is in the recipe's precision; logits
    exist a chunk at a time (policy and reference, log-probs and their gradient). Activations and the key-value cache
    depend on the model and are not in it.
    """
    from klgrad.harness.train import objective_of

    penalised = objective_of(recipe).penalised
    reference = penalised or recipe.monitor
    held = (recipe.micro or recipe.minibatch or recipe.batch) * recipe.group
    sequences = recipe.batch * recipe.group
    return {
        "parameters": int(parameters),
        "weights_gib": 4 * parameters / _GIB,
        "gradients_gib": 4 * parameters / _GIB,
        "optimizer_gib": 8 * parameters / _GIB,
        "reference_gib": _BYTES[recipe.dtype] * parameters / _GIB if reference else 0.0,
        "logits_gib": 4 * (4 if reference else 2) * min(_LOGITS, held * recipe.length * (vocabulary or 1)) / _GIB
        if vocabulary
        else 4 * 4 * _LOGITS / _GIB,
        "sequences_per_round": sequences,
        "sequences_in_memory": held,
        "tokens_per_round": sequences * recipe.length,
        "tokens": sequences * recipe.length * recipe.steps,
        "optimizer_steps": recipe.steps * recipe.minibatches,
        "reference_in_memory": reference,
        "full_vocabulary_terms": len(MONITORS) if recipe.monitor else 0,
    }


def total_gib(found: dict[str, Any]) -> float:
    """Memory that is sure to be needed."""
    return float(sum(value for key, value in found.items() if key.endswith("_gib")))


def measured(recipe: Recipe, rounds: int = 3) -> dict[str, float]:
    """Time a few rounds of the recipe here; nothing is kept.

    Returns:
        ``seconds_per_round`` (mean after a first one to warm up) and ``hours`` for all rounds, evaluation not counted.

    Raises:
        ValueError: when the model or a task is not at hand.
    """
    import tempfile
    from pathlib import Path

    from klgrad.harness.train import start, train_round

    run = start(recipe)
    with tempfile.TemporaryDirectory() as folder:
        train_round(run, Path(folder))  # allocations, the queue of an asynchronous run
        began = time.perf_counter()
        for _ in range(rounds):
            train_round(run, Path(folder))
        if recipe.device != "cpu":
            torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / rounds
    return {"seconds_per_round": seconds, "hours": seconds * recipe.steps / 3600}


def parameters_of(recipe: Recipe) -> tuple[float, int]:
    """Parameters and vocabulary: of the model where it is at hand, else the recipe's own number (and 0).

    Raises:
        ValueError: when neither is known.
    """
    from klgrad.harness.models import load, parameter_count

    if recipe.parameters:
        return recipe.parameters, 0
    model, _ = load(recipe.model)
    return float(parameter_count(model)), model.vocabulary
