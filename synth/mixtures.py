"""Exact moments of a weighted sum of configurations, per sequence or per token of the batch.

A library's penalty may be the sum of a reward term and a loss term with coefficients of their own, and most divide a
batch's sum by its number of tokens. With g the weighted sum and |y| the length of a sequence, the token mean over a
batch of N is ``sum_i g_i / sum_i |y_i|``: as N grows its mean tends to ``m = E g / E|y|`` and N times its variance,
by the delta method, to ``Var(g - m |y|) / E|y|^2``. Everything is a linear functional of the rows of ``moments``,
each with a power of 1/|y|, so means and variances are sums over pairs of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.synth.configurations import Configuration
from klgrad.synth.exact import check_lengths
from klgrad.synth.moments import Plan, plan_of
from klgrad.synth.policies import PolicyPair
from klgrad.synth.products import Product, propagate
from klgrad.synth.rows import ONE, Row, Rows

if TYPE_CHECKING:
    from jaxtyping import Float

Powered = tuple[Row, int]  # a row weighted with 1/|y| to that power
_LENGTH: Powered = (ONE, -1)


@dataclass(frozen=True)
class Term:
    """One summand: ``weight x g / |y|^power``, where g is the configuration's gradient, its own divisor included.

    With ``per_token`` the batch's sum of it is divided by the batch's number of tokens instead of sequences.
    """

    weight: float
    configuration: Configuration
    power: int = 0
    per_token: bool = False


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
    samples: int = 1000,
) -> Mixture:
    """Exact mean and variance of the sum of the terms, on common samples; of many of them, where one is per token.

    Args:
        terms: at most one of them with a leave-one-out baseline, none with an optimal one.
        lengths: ``[L]`` horizons.
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
    wanted, each = check_lengths(pair, lengths), np.arange(pair.policy.parameters)
    rows = Rows(pair)
    plans = [(term, _powered(plan_of(rows, term.configuration), term.power)) for term in terms]
    order = list(dict.fromkeys(row for term, plan in plans for row in _used(term, plan)))
    request: dict[Product, None] = {}  # a set in order
    for i, (row, power) in enumerate(order):
        request[row, ONE, power] = None
        request |= {(row, other, power + more): None for other, more in order[i:]}
    with np.errstate(over="ignore", invalid="ignore"):
        table = _Table(propagate(rows, list(request), wanted, each, each, ordered=False), order)
    mean, spread = np.zeros((len(wanted), len(each))), np.zeros((len(wanted), len(each)))
    weights = {row: np.zeros_like(mean) for row in order}
    for term, plan in plans:
        own, rest = _influence(term, plan, table, weights, samples)
        mean, spread = mean + own, spread + rest
    for i, one in enumerate(order):
        for two in order[i:]:
            twice = 1 if one == two else 2
            spread = spread + twice * weights[one] * weights[two] * table.covariance(one, two)
    spread = np.maximum(spread, 0.0)  # cancellation can leave a variance of zero a rounding below it
    return Mixture(mean, spread.sum(axis=1))


def _powered(plan: Plan, power: int) -> Plan:
    return plan._replace(power=plan.power + power)


def _used(term: Term, plan: Plan) -> Iterator[Powered]:
    yield from ((row, plan.power) for row in (*plan.x, *((plan.y,) if plan.y else ())))
    if plan.c:
        yield plan.c, 0
    if term.per_token:
        yield _LENGTH


@dataclass(frozen=True, eq=False)
class _Table:
    """Expected rows and products of rows: ``of`` as propagated for rows in ``order``."""

    of: dict[tuple[Row, Row, int], np.ndarray]
    order: list[Powered]

    def mean(self, row: Powered) -> np.ndarray:
        return self.of[row[0], ONE, row[1]]

    def covariance(self, one: Powered, two: Powered) -> np.ndarray:
        if self.order.index(one) > self.order.index(two):
            one, two = two, one
        return self.of[one[0], two[0], one[1] + two[1]] - self.mean(one) * self.mean(two)


def _influence(
    term: Term, plan: Plan, table: _Table, weights: dict[Powered, np.ndarray], samples: int
) -> tuple[np.ndarray, np.ndarray]:
    """Add a term's first-order part to the weights on rows; its mean ``[L, d]``, and the variance of what is left.

    Only leave-one-out leaves something, a part of order 1/(G - 1) that is uncorrelated with every single sequence.
    """
    tokens: Any = table.mean(_LENGTH) if term.per_token else 1.0
    scale = term.weight / plan.configuration.divisor / tokens
    mean = np.zeros_like(next(iter(weights.values())))
    rest = np.zeros_like(mean)
    for row in plan.x:
        weights[row, plan.power] += scale
        mean += scale * table.mean((row, plan.power))
    if plan.y is not None:
        y, c = (plan.y, plan.power), (plan.c, 0) if plan.c else None
        b: Any = table.mean(c) if c else plan.configuration.baseline_value
        weights[y] -= scale * b
        mean -= scale * b * table.mean(y)
        if plan.configuration.baseline == "loo" and c:
            weights[c] -= scale * table.mean(y)
            both = table.covariance(c, c) * table.covariance(y, y) + table.covariance(y, c) ** 2
            rest = scale**2 * both / (plan.configuration.group(samples) - 1)
    if term.per_token:
        weights[_LENGTH] -= mean / tokens
    return mean, rest
