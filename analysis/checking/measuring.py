"""The expected gradient of one placement on one model, exactly: row by row, at once, by groups, in large batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.analysis.checking.models import Model, each_row, exact_batches, models, vocabularies
from klgrad.analysis.checking.subject import BuiltIn, Function
from klgrad.synth.configurations import PLACEMENTS
from klgrad.synth.enumeration import rows_of
from klgrad.synth.moments import moments

if TYPE_CHECKING:
    from jaxtyping import Float

Subject = BuiltIn | Function
GROUPS = (2, 3, 4)
_MOST_GROUPS = 600
_FEW = 6  # rows that are tried alone


@dataclass(frozen=True, eq=False)
class Measured:
    """The gradient of one placement on one model.

    Args:
        model: the model.
        mean: ``[d]`` expected gradient.
        variance: trace of the covariance of one sequence's gradient; None for groups.
        dead: zero for every sample.
    """

    model: Model
    mean: Float[np.ndarray, " d"]
    variance: float | None
    dead: bool


def placements(subject: Subject) -> tuple[str, ...]:
    """Where it can stand: a loss only where it is, a configuration of klgrad where its name says."""
    if isinstance(subject, BuiltIn):
        return PLACEMENTS if subject.anywhere else (subject.configuration.placement,)
    return {"loss": ("loss",)}.get(subject.kind, ("reward",) if subject.returns == "return" else PLACEMENTS)


def measure(subject: Subject, placement: str, model: Model, *, beta: float = 1.0) -> Measured:
    """The expected gradient and its variance, exactly.

    Rows are independent here (``group_gradient`` serves those where they are not), so all are given at once.
    """
    if isinstance(subject, BuiltIn):
        (m,) = moments(model.pair, [replace(subject.configuration, placement=placement)], [model.length])
        assert m.covariance is not None
        variance = float(m.covariance[0])
        dead = variance + float(m.mean[0] @ m.mean[0]) < (subject.tolerance * np.linalg.norm(model.truth)) ** 2
        return Measured(model, m.mean[0], variance, bool(dead))
    each = sequence_gradients(subject, placement, model, beta=beta)
    mean = model.probability @ each
    variance = float(model.probability @ ((each - mean) ** 2).sum(axis=1))
    return Measured(model, mean, variance, not np.any(each))


def sequence_gradients(
    subject: Function, placement: str, model: Model, *, beta: float = 1.0
) -> Float[np.ndarray, "M d"]:
    """Every sequence's own gradient."""
    if subject.kind != "loss":
        return model.gradients(*_weights(subject, placement, model.batch, beta))
    return model.gradients(*(_at_once(subject, model.batch, beta) or _one_by_one(subject, model.batch, beta)))


def _one_by_one(subject: Function, batch: Any, beta: float) -> tuple[np.ndarray, np.ndarray | None]:
    terms = [subject.evaluate(row, beta=beta) for row in each_row(batch)]
    token = np.concatenate([t.token for t in terms if t.token is not None])
    vocab = [t.vocab for t in terms if t.vocab is not None]
    return token, np.concatenate(vocab) if vocab else None


def _at_once(subject: Function, batch: Any, beta: float) -> tuple[np.ndarray, np.ndarray | None] | None:
    """A loss of all rows holds every row's gradient, where it is their mean or sum; a few rows alone must confirm it.

    None where they do not, or where there is nothing to compare.
    """
    rows = len(batch.tokens)
    if rows <= _FEW or subject.backend == "numpy":  # differences cost a call for every entry either way
        return None
    some = np.linspace(0, rows - 1, _FEW).astype(int).tolist()
    whole, alone = subject.evaluate(batch, beta=beta), _one_by_one(subject, rows_of(batch, some), beta)
    assert whole.token is not None
    together, each = stacked(whole.token, whole.vocab), stacked(*alone)
    size = float(np.abs(each).max())
    for factor in (rows, 1):
        off = float(np.abs(factor * together[some] - each).max())
        if size > 0 and off <= 1e-2 * subject.tolerance * size:
            return factor * whole.token, None if whole.vocab is None else factor * whole.vocab
    return None


def stacked(token: np.ndarray, vocab: np.ndarray | None) -> np.ndarray:
    """``[B, T, 1 or 1 + V]`` derivatives in the sampled tokens' log-probs, and in the full ones."""
    return token[..., None] if vocab is None else np.concatenate([token[..., None], vocab], axis=-1)


def _weights(subject: Function, placement: str, batch: Any, beta: float) -> tuple[np.ndarray, np.ndarray | None]:
    """``[B, T]`` weights on the sampled tokens' scores and ``[B, T, V]`` on all tokens'."""
    terms = subject.evaluate(batch, differentiate=placement != "reward", beta=beta)
    token, vocab = np.zeros(batch.mask.shape), terms.vocab
    if placement != "reward":
        assert terms.token is not None
        token = terms.token
    if placement != "loss":
        detached = terms.value if subject.returns == "return" else terms.by_sequence[:, None]
        token = token + detached
    return token, vocab


# ------------------------------------------------------------------------------------------ rows that depend


def group_gradient(subject: Function, placement: str, model: Model, size: int) -> Float[np.ndarray, " d"]:
    """The expected gradient over all groups of ``size`` sequences, for code whose rows depend on each other.

    A token or sequence term stands for the mean over its rows; a loss is what it returns. Where the order within a
    group makes no difference, each set of sequences is tried once.
    """
    symmetric = not subject.rewarded and _symmetric(subject, placement, model, size)
    total = np.zeros(model.pair.policy.parameters)
    for rows, weight in _groups(model.probability, size, symmetric):
        total += weight * _of_rows(subject, placement, model, rows)
    return total


def _of_rows(subject: Function, placement: str, model: Model, rows: list[int]) -> np.ndarray:
    """The gradient of one batch of the model's sequences."""
    part = rows_of(model.batch, rows)
    token, vocab = _weights(subject, placement, part, 1.0)
    each = np.einsum("bt,btd->d", np.where(part.mask, token, 0.0), model.scores[rows])
    if vocab is not None:
        scores = model.pair.policy.scores[model.contexts[rows]]
        each = each + np.einsum("btv,btvd->d", np.where(part.mask[..., None], vocab, 0.0), scores)
    found: np.ndarray = each / (1 if subject.kind == "loss" else len(rows))
    return found


def _symmetric(subject: Function, placement: str, model: Model, size: int) -> bool:
    rows = (np.arange(size) * 5 % len(model.probability)).tolist()
    one, other = (_of_rows(subject, placement, model, order) for order in (rows, rows[::-1]))
    return bool(np.allclose(one, other, rtol=100 * subject.tolerance, atol=1e-12, equal_nan=True))


def _groups(probability: np.ndarray, size: int, symmetric: bool) -> Iterator[tuple[list[int], float]]:
    """Every group of so many rows and its probability; every set of rows where the order is all one."""
    every = range(len(probability))
    chosen = (
        itertools.combinations_with_replacement(every, size) if symmetric else itertools.product(every, repeat=size)
    )
    for index in chosen:
        orders = math.factorial(size) if symmetric else 1
        for row in set(index) if symmetric else ():
            orders //= math.factorial(index.count(row))
        rows = list(index)
        yield rows, orders * float(probability[rows].prod())


@cache
def group_models(size: int) -> tuple[Model, ...]:
    """The probe models with few enough groups."""
    chosen = (*models((1, 2, 3, 4), 1), *vocabularies())
    return tuple(m for m in chosen if len(m.probability) ** size <= _MOST_GROUPS)


@cache
def limit_models() -> tuple[Model, ...]:
    """Models whose sequences have whole numbers of 512ths as probabilities, so that one batch holds all of them."""
    return tuple(m for m, _ in exact_batches())


def limit_gradient(subject: Function, placement: str, model: Model) -> Float[np.ndarray, " d"]:
    """What the gradient tends to in large batches.

    One batch that holds every sequence as often as its probability says is a large batch without its noise; what is
    left falls as 1 / rows (a leave-one-out mean) and is taken out by a batch twice as large.
    """
    (rows,) = (rows for m, rows in exact_batches() if m is model)
    once, twice = (_of_rows(subject, placement, model, rows * times) for times in (1, 2))
    return 2 * twice - once
