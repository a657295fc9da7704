"""What a parameter is given: arrays made from a batch, by role."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from klgrad.synth.enumeration import Batch

MASKS = {"bool": np.bool_, "float": np.float64, "int": np.int64}
REWARDS = frozenset({"rewards", "token_rewards", "advantages", "sequence_advantages"})
_OFFSETS = (3.0, -1.0)  # how much the first and the last token's probability add to all logits of a place


def raw(full: Any) -> Any:
    """Logits from log-probs ``[..., V]``: plus what depends on the prefix and on the parameters, as a logsumexp does.

    A softmax takes it out again; what forgets the softmax keeps it.
    """
    exp = np.exp if isinstance(full, np.ndarray) else type(full).exp
    first, last = _OFFSETS
    return full + (first * exp(full[..., :1]) + last * exp(full[..., -1:]))


def spread_over(rows: int) -> np.ndarray:
    """``[B]`` rewards that differ from row to row, and that no row's content decides."""
    return np.cos(1.0 + 2.3 * np.arange(rows))


def arguments(
    roles: Mapping[str, str],
    batch: Batch,
    given: Mapping[str, Any],
    array: Callable[[Any], Any],
    whole: Callable[[Any], Any],
    *,
    mask_as: str,
    beta: float,
    shift: float,
    spread: float,
) -> dict[str, Any]:
    """Parameter -> array.

    Args:
        roles: parameter -> role.
        given: ``log_probs`` and ``full_log_probs``, with their graph.
        array, whole: make an array of numbers, or of tokens and truth values, for the function's backend.
        mask_as: the type of the mask.
        beta: the coefficient.
        shift, spread: rewards are ``shift`` plus ``spread`` times what differs from row to row.
    """
    rows, length = batch.mask.shape
    mask = np.asarray(batch.mask)
    places = np.arange(length)
    last = places == np.where(mask, places, -1).max(axis=1, keepdims=True)  # where a reply's reward stands
    reward = shift + spread * spread_over(rows)
    made: dict[str, Callable[[], Any]] = {
        "log_probs": lambda: given["log_probs"],
        "full_log_probs": lambda: given["full_log_probs"],
        "logits": lambda: raw(given["full_log_probs"]),
        "reference": lambda: array(batch.reference),
        "behaviour": lambda: array(batch.behaviour),
        "full_reference": lambda: array(batch.full_reference),
        "reference_logits": lambda: array(raw(np.asarray(batch.full_reference, float))),
        "log_ratio": lambda: given["log_probs"] - array(batch.reference),
        "reverse_log_ratio": lambda: array(batch.reference) - given["log_probs"],
        "mask": lambda: array(mask) if mask_as == "float" else whole(mask.astype(MASKS[mask_as])),
        "tokens": lambda: whole(np.array(batch.tokens, np.int64)),
        "advantages": lambda: array(np.repeat(reward[:, None], length, axis=1)),
        "token_rewards": lambda: array(np.where(last, reward[:, None], 0.0)),
        "sequence_advantages": lambda: array(reward),
        "rewards": lambda: array(reward),
        "beta": lambda: beta,
    }
    return {name: made[role]() for name, role in roles.items()}
