"""How far rounding may carry a side of a step: from the terms that are added up, not from what is left of them.

A sum of n terms in floating point is off by at most n eps times the sum of their absolute values (Higham, Accuracy
and Stability of Numerical Algorithms, 2nd ed., section 4.2), whatever its own size. The plain sums of ``Model`` note
their terms; for the exact engine, whose terms are inside its recurrences, the same sums are written out here, with
absolute values for the terms and the measured errors of its float64 inputs (``inputs``).

Shapes: M sequences, T length, S contexts, V tokens, d parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from klgrad.analysis.derivations.inputs import EPS, Bounded, LogRatio
from klgrad.analysis.derivations.sequences import Sequences
from klgrad.synth.configurations import Configuration

if TYPE_CHECKING:
    from jaxtyping import Float


def roundings(contexts: int, vocabulary: int, length: int, sequences: int) -> int:
    """How many roundings one term can meet: in T steps of a recurrence, in a sum over contexts, over sequences.

    numpy adds along a contiguous axis in pairs of blocks: 8 lanes of 16, then log2 of the number of blocks.
    """
    pairwise = min(sequences, 20 + int(np.ceil(np.log2(max(sequences, 1)))))
    return length * (vocabulary + 3) + contexts * vocabulary + pairwise


def _shifted(function: Callable[..., np.ndarray], at: np.ndarray, by: np.ndarray) -> Bounded:
    """A function's absolute values and how far they move when its argument is off."""
    with np.errstate(all="ignore"):
        here = function(at)
        off = np.maximum(np.abs(function(at + by) - here), np.abs(function(at - by) - here))
    size = np.abs(here)
    return Bounded(size, off + 4 * EPS * size)


def _values(m: Sequences, wanted: Configuration) -> Bounded:
    """``[M, T]`` the estimator's value at every token."""
    t = m.tables
    if wanted.estimator.full:
        return Bounded(*(m.at_prefix((np.exp(t.log_policy) * np.abs(x)).sum(axis=1)) for x in t.delta))
    at = t.rollout if wanted.rollout_value else t.delta
    return Bounded(*map(m.taken, _shifted(wanted.estimator.value, *at)))


def _gradients(m: Sequences, wanted: Configuration) -> Bounded:
    """``[M, T, d]`` what the loss gives at every token."""
    t = m.tables
    if wanted.estimator.full:
        weight = Bounded(*(np.abs(x)[..., None] for x in t.delta))
        each = _product(weight, Bounded(np.abs(t.scores), t.lack_scores))
        rows = (np.einsum("sv,svd->sd", np.exp(t.log_policy), x) for x in each)
        return Bounded(*(np.where(m.mask[..., None], x[m.contexts], 0.0) for x in rows))
    slope = Bounded(*map(m.taken, _shifted(wanted.estimator.slope, *t.delta)))
    return _product(Bounded(*(x[..., None] for x in slope)), m.score_terms)


def _product(a: Bounded, b: Bounded) -> Bounded:
    return Bounded(a.size * b.size, a.error * b.size + a.size * b.error)


def _ratio(m: Sequences, name: str) -> Float[np.ndarray, "M T"]:
    """``[M, T]`` the importance ratio at every token."""
    if name == "none":
        return np.ones_like(m.rho)
    if name == "token":
        return m.rho
    whole = np.cumprod(m.rho, axis=1)
    return whole if name == "prefix" else np.broadcast_to(whole[:, -1:], whole.shape)


def _pairs(values: np.ndarray, scores: np.ndarray, ratio: np.ndarray, *, later: bool) -> Float[np.ndarray, "M d"]:
    """Sum over all (t, u) of ratio x value of u x score of t; the ratio is that of t or of the later of the two."""
    if not later:
        return values.sum(axis=1)[:, None] * np.einsum("mt,mtd->md", ratio, scores)
    through = np.einsum("mt,mtd->md", ratio * values, np.cumsum(scores, axis=1))
    return through + np.einsum("mt,mtd->md", ratio * (np.cumsum(values, axis=1) - values), scores)


def gradient_terms(m: Sequences, wanted: Configuration) -> Bounded:
    """``[M, d]`` what one sequence contributes to a configuration, before any two terms cancel; baselines aside."""
    ratio, parts = _ratio(m, wanted.ratio), []
    if wanted.in_loss:
        parts.append(Bounded(*(np.einsum("mt,mtd->md", ratio, x) for x in _gradients(m, wanted))))
    if wanted.in_reward:
        (v, off_v), (s, off_s) = _values(m, wanted), m.score_terms
        later = wanted.ratio == "prefix"
        off = _pairs(off_v, s, ratio, later=later) + _pairs(v, off_s, ratio, later=later)
        parts.append(Bounded(_pairs(v, s, ratio, later=later), off))
    divisor = m.count[:, None] if wanted.aggregation == "length-mean" else wanted.divisor
    return Bounded(*(np.sum([part[i] for part in parts], axis=0) / divisor for i in range(2)))


def target_terms(m: Sequences, ratio: LogRatio) -> Bounded:
    """``[M, d]`` what one sequence contributes to the gradient of the KL with these log-ratios."""
    v, off_v = (m.taken(np.abs(x)).sum(axis=1)[:, None] for x in ratio)
    s, off_s = (x.sum(axis=1) for x in m.score_terms)
    return Bounded(v * s, off_v * s + v * off_s)
