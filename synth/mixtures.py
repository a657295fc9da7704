"""Exact moments of a weighted sum of configurations, per sequence or per token of the batch.

A library's penalty may be the sum of a reward term and a loss term with coefficients of their own, and most divide a
batch's sum by its number of tokens. With g the weighted sum and |y| the length of a sequence, the token mean over a
batch of N is ``sum_i g_i / sum_i |y_i|``: as N grows its mean tends to ``m = E g / E|y|`` and N times its variance,
by the delta method, to ``Var(g - m |y|) / E|y|^2``. Everything is a linear functional of the rows of ``moments``,
each with a power of 1/|y|, so means and variances are sums over pairs of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from klgrad.synth.configurations import Configuration
from klgrad.synth.exact import check_lengths
from klgrad.synth.moments import ONE, Row, _plan, _propagate, _Request, _Rows
from klgrad.synth.policies import PolicyPair

if TYPE_CHECKING:
    from jaxtyping import Float

Powered = tuple[Row, int]  # a row weighted with 1/|y| to that power
_LENGTH: Powered = (ONE, -1)


@dataclass(frozen=True)
class Term:
    """One summand: ``weight x g / |y|^power``, where g is the configuration's gradient, its own divisor included."""

    weight: float
    configuration: Configuration
    power: int = 0


@dataclass(frozen=True, eq=False)
class Mixture:
    """Exact moments of the sum: ``mean [L, d]``, and ``variance [L]``, N times the trace of the covariance."""

    mean: Float[np.ndarray, "L d"]
    variance: Float[np.ndarray, " L"]


def mixture_moments(
    pair: PolicyPair,
    terms: Sequence[Term],
    lengths: Sequence[int],
    *,
    per_token: bool = False,
    samples: int = 1000,
) -> Mixture:
    """Exact mean and variance of the sum of the terms, on common samples.

    Args:
        terms: at most one of them with a leave-one-out baseline, none with an optimal one.
        lengths: ``[L]`` horizons.
        per_token: divide the batch's sum by its number of tokens (many sequences; variance by the delta method).
        samples: N, which only leave-one-out over all sequences depends on.

    Raises:
        ValueError: for no terms, a second leave-one-out baseline, an optimal one, or a length out of range.
    """
    if not terms:
        raise ValueError("no terms: give at least one weight and configuration")
    if any(term.configuration.baseline.startswith("optimal") for term in terms):
        raise ValueError("an optimal baseline is fitted to one configuration, not to a sum: use moments for it")
    if sum(term.configuration.baseline == "loo" for term in terms) > 1:
        raise ValueError("at most one term of a sum may have a leave-one-out baseline")
    wanted, d = check_lengths(pair, lengths), pair.policy.parameters
    rows = _Rows(pair)
    plans = []
    used: dict[Powered, None] = {}
    for term in terms:
        plan = _plan(rows, term.configuration)
        plan = replace(plan, power=plan.power + term.power)
        plans.append((term.weight / term.configuration.divisor, plan))
        used |= dict.fromkeys([*((row, plan.power) for row in plan.x), *([(plan.y, plan.power)] if plan.y else [])])
        used |= dict.fromkeys([(plan.c, 0)] if plan.c else [])
    used |= dict.fromkeys([_LENGTH] if per_token else [])
    request, order = _Request({}), list(used)
    for i, (row, power) in enumerate(order):
        request.add(row, ONE, power)
        for other, more in order[i:]:
            request.add(row, other, power + more)
    with np.errstate(over="ignore", invalid="ignore"):
        of = _propagate(rows, request, wanted, np.arange(d), np.arange(d), ordered=False)

    def first(a: Powered) -> np.ndarray:
        return of[a[0], ONE, a[1]]

    def covariance(a: Powered, b: Powered) -> np.ndarray:
        a, b = (a, b) if order.index(a) <= order.index(b) else (b, a)
        return of[a[0], b[0], a[1] + b[1]] - first(a) * first(b)

    weights = {row: np.zeros((len(wanted), d)) for row in order}
    mean, degenerate = np.zeros((len(wanted), d)), np.zeros((len(wanted), d))
    for scale, plan in plans:
        for row in plan.x:
            weights[row, plan.power] += scale
            mean += scale * first((row, plan.power))
        if plan.y is None:
            continue
        y, baseline = (plan.y, plan.power), plan.configuration.baseline
        b = first((plan.c, 0)) if plan.c else np.full_like(mean, plan.configuration.baseline_value)
        weights[y] -= scale * b
        mean -= scale * b * first(y)
        if baseline == "loo" and plan.c is not None:  # its first-order part; the rest is of order 1/(G - 1), by itself
            c, group = (plan.c, 0), plan.configuration.group(samples)
            weights[c] -= scale * first(y)
            spread = covariance(c, c) * covariance(y, y) + covariance(y, c) ** 2
            degenerate += scale**2 * spread / (group - 1)
    divisor = np.ones_like(mean)
    if per_token:
        divisor = first(_LENGTH)
        mean = mean / divisor
        weights[_LENGTH] -= mean
    variance = degenerate
    for i, a in enumerate(order):
        for b_row in order[i:]:
            twice = 1 if b_row == a else 2
            variance = variance + twice * weights[a] * weights[b_row] * covariance(a, b_row)
    each = np.maximum(variance / divisor**2, 0.0)  # cancellation can leave a variance of zero a rounding below it
    return Mixture(mean, each.sum(axis=1))
