"""Exact mean and covariance of any per-sequence configuration, every length in one pass.

A configuration's gradient is a linear functional of running sums (``rows``) that each token updates linearly; the
second moments of those sums obey a linear recurrence over contexts (``products``). Here a configuration becomes
the functionals it needs, and their moments become its mean and covariance.

Shapes: L lengths asked for, d parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from klgrad.synth.configurations import Configuration
from klgrad.synth.exact import check_lengths
from klgrad.synth.policies import PolicyPair
from klgrad.synth.products import Product, propagate
from klgrad.synth.rows import ONE, Row, Rows, slope_at_reference

if TYPE_CHECKING:
    from jaxtyping import Float

COVARIANCES = ("none", "trace", "diagonal", "full")
_FULL_ENTRIES = 1 << 20  # S x V x d^2 up to which d x d blocks are carried
_EPSILON = 16 * np.finfo(float).eps  # of a second moment: a few roundings a token, which add up as their root
_ROUNDING = 1e-12  # a variance below this share of the second moment is none


@dataclass(frozen=True, eq=False)
class Moments:
    """Exact moments of one configuration.

    Args:
        configuration: the recipe.
        mean: ``[L, d]`` expected gradient under the sampler.
        covariance: N times the covariance of the N-sequence estimate: ``[L]`` its trace, ``[L, d]`` its
            diagonal, ``[L, d, d]`` whole, or ``None`` where not asked for.
        estimate: ``[L]`` expected KL value estimate, sum_t lambda_t c_t / D.
        estimate_variance: ``[L]`` its variance for one sequence; NaN where no covariance was asked for.
        rounding: ``[L, 2]`` what double precision leaves open of the covariance's trace and of the estimate's variance:
            both are differences, and keep no digit where they are as small.
        baseline: ``[L, d]`` the constant b (for leave-one-out, the value it estimates: E[C]).
        found: at each length the configuration that ``NAME(best)`` stands for; ``None`` where nothing was open.
    """

    configuration: Configuration
    mean: Float[np.ndarray, "L d"]
    covariance: Float[np.ndarray, "L ..."] | None
    estimate: Float[np.ndarray, " L"]
    estimate_variance: Float[np.ndarray, " L"]
    rounding: Float[np.ndarray, "L 2"]
    baseline: Float[np.ndarray, "L d"]
    found: tuple[Configuration, ...] | None = None

    def at(self, i: int) -> Configuration:
        """The configuration at the i-th length, with every argument a number."""
        return self.configuration if self.found is None else self.found[i]


class Plan(NamedTuple):
    """One configuration's functionals: rows of X (g at b = 0), of Y, of C, of the estimate and of its mean.

    ``centred`` is X - ``shift`` Y, with the slope at the reference taken off every token's: near the reference it is
    what is left of X beside noise of no mean. ``vanishing`` says that Y has none. ``power`` is that of 1/|y|.
    """

    configuration: Configuration
    x: tuple[Row, ...]
    centred: tuple[Row, ...]
    shift: float
    vanishing: bool
    y: Row | None
    c: Row | None
    estimate: Row
    expected: Row
    power: int

    @property
    def taken(self) -> float:
        """What of an optimal baseline ``x`` is without already."""
        return self.shift if self.configuration.baseline.startswith("optimal") else 0.0


def plan_of(rows: Rows, configuration: Configuration) -> Plan:
    """The rows that a configuration's gradient, baseline and estimate are made of."""
    vanishing = rows.scores_vanish(configuration)
    optimal, needs_c = configuration.baseline.startswith("optimal"), configuration.baseline in ("mean", "loo")
    shift = slope_at_reference(configuration) if configuration.in_loss and (vanishing or optimal) else 0.0
    x = rows.parts(configuration, shift if optimal else 0.0)
    return Plan(
        configuration,
        x,
        rows.parts(_without_past(configuration) if vanishing else configuration, shift),
        shift,
        vanishing,
        rows.scores(configuration.ratio) if configuration.baseline != "none" else None,
        rows.values(configuration) if needs_c else None,
        rows.estimate(configuration),
        rows.expected_estimate(configuration),
        int(configuration.aggregation == "length-mean"),
    )


def _without_past(configuration: Configuration) -> Configuration:
    """The same mean where scores vanish: values before a token, however large, are taken by it with none."""
    return (
        replace(configuration, credit="rtg")
        if configuration.credit == "whole" and configuration.in_reward
        else configuration
    )


def _asked(plan: Plan, *, second: bool) -> Iterator[Product]:
    """The products that the plan needs reported."""
    k = plan.power
    vectors = (*plan.x, *((plan.y,) if plan.y else ()))
    yield plan.expected, ONE, k
    if second:
        yield plan.estimate, plan.estimate, 2 * k
    for row in (*plan.centred, *((plan.y,) if plan.y and not plan.vanishing else ())):
        yield row, ONE, k
    if plan.c:
        yield plan.c, ONE, 0
    if second or plan.configuration.baseline.startswith("optimal"):
        for a in vectors:
            yield from ((a, b, 2 * k) for b in vectors)
            if plan.c:
                yield a, plan.c, k
    if plan.c and second:
        yield plan.c, plan.c, 0


class _Products:
    """Means and covariances of a plan's functionals, read from the propagated products."""

    def __init__(self, plan: Plan, of: dict[Product, np.ndarray], size: int) -> None:
        self.plan, self.of, self.size, self.k = plan, of, size, plan.power

    def mean(self, vector: Sequence[Row]) -> np.ndarray:
        nothing = np.zeros((len(self.of[(self.plan.expected, ONE, self.k)]), self.size))
        return sum((self.of[(row, ONE, self.k)] for row in vector), nothing)

    def value(self) -> np.ndarray:
        assert self.plan.c is not None
        return self.of[(self.plan.c, ONE, 0)]

    def second(self, a: Sequence[Row], b: Sequence[Row]) -> np.ndarray:
        return np.asarray(sum(self.of[(i, j, 2 * self.k)] for i in a for j in b))


def moments(
    pair: PolicyPair,
    configurations: Sequence[Configuration],
    lengths: Sequence[int],
    *,
    covariance: str = "trace",
    samples: int = 1000,
) -> list[Moments]:
    """Exact mean and covariance of each configuration's gradient estimate under the pair's sampler.

    Args:
        configurations: any per-sequence configurations, leave-one-out included; ``NAME(best)`` is found at each length.
        lengths: ``[L]`` horizons; all come from one pass to the longest.
        covariance: ``none`` (means only: nothing else is propagated), ``trace``, ``diagonal``, or ``full``
            (d x d blocks). Always N times the covariance of the mean over N sequences.
        samples: N, which only leave-one-out over all sequences depends on.

    Returns:
        One ``Moments`` per configuration, in order.

    Raises:
        ValueError: for a length out of range, an unknown covariance, a full one that does not fit, or samples
            below 2 with leave-one-out.
    """
    if not configurations:
        return []
    if covariance not in COVARIANCES:
        raise ValueError(f"covariance {covariance!r} is none of {', '.join(COVARIANCES)}")
    wanted = check_lengths(pair, lengths)
    d = pair.policy.parameters
    if covariance == "full" and not full_fits(pair):
        raise ValueError(f"a full covariance over d = {d} parameters does not fit: ask for the diagonal or the trace")
    for configuration in configurations:
        if configuration.baseline == "loo":
            configuration.group(samples)
    if any(c.estimator.family for c in configurations):
        return _with_best(pair, configurations, lengths, covariance, samples)
    full, second = covariance == "full", covariance != "none"
    each = np.arange(d)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is infinite or NaN, and tables say so
        rows = Rows(pair, dense=full)
        plans = [plan_of(rows, configuration) for configuration in configurations]
        request = list(dict.fromkeys(product for plan in plans for product in _asked(plan, second=second)))
        of = propagate(rows, request, wanted, each, each, ordered=False)
        crossed: dict[Product, np.ndarray] = {}
        if full:
            i, j = (index.ravel() for index in np.meshgrid(each, each, indexing="ij"))
            both_vectors = [product for product in request if _is_cross(rows, product)]
            if both_vectors:
                crossed = propagate(rows, both_vectors, wanted, i, j, ordered=True)
        found = [_finish(plan, of, crossed, covariance, samples, d) for plan in plans]
    if len(found) > 1 and not all(_finite(m) for m in found):
        # products share one operator, where an overflow of one (0 x inf) would spoil the others: each alone, then
        return [
            moments(pair, [configuration], lengths, covariance=covariance, samples=samples)[0]
            for configuration in configurations
        ]
    return found


def best(
    pair: PolicyPair, configurations: Sequence[Configuration], lengths: Sequence[int], *, samples: int = 1000
) -> list[list[Configuration]]:
    """At each length the configurations with every open argument at its least variance.

    Value and slope are linear in it, so the gradient is and its variance is a quadratic: three exact variances give
    the minimum. A baseline that is itself optimal leaves a quadratic. 0 where the variance does not depend on it, or
    is beyond double precision somewhere.
    """
    of = {c: c.estimator.family for c in configurations if c.estimator.family}
    members = [replace(c, estimator=family(a)) for c, family in of.items() for a in (0.0, 0.5, 1.0)]
    variances = [m.covariance for m in moments(pair, members, lengths, samples=samples)]
    at_0, at_half, at_1 = np.array(variances).reshape(len(of), 3, len(lengths)).transpose(1, 0, 2)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        bend = at_0 + at_1 - 2 * at_half  # half the coefficient of a^2
        least = np.where(bend > _ROUNDING * at_half, 0.5 - (at_1 - at_0) / (4 * bend), 0.0)
    least = np.where(np.isfinite(least), least, 0.0)
    found = {
        c: [replace(c, estimator=family(float(a))) for a in row]
        for (c, family), row in zip(of.items(), least, strict=True)
    }
    return [[found[c][i] if c in found else c for c in configurations] for i in range(len(lengths))]


def _with_best(
    pair: PolicyPair, configurations: Sequence[Configuration], lengths: Sequence[int], covariance: str, samples: int
) -> list[Moments]:
    """Moments of configurations of which some have an open argument: those length by length."""
    closed = [c for c in configurations if not c.estimator.family]
    known = dict(zip(closed, moments(pair, closed, lengths, covariance=covariance, samples=samples), strict=True))
    unknown = list(dict.fromkeys(c for c in configurations if c.estimator.family))
    parts = [
        moments(pair, row, [length], covariance=covariance, samples=samples)
        for row, length in zip(best(pair, unknown, lengths, samples=samples), lengths, strict=True)
    ]
    for c, each in zip(unknown, zip(*parts, strict=True), strict=True):
        spreads = [m.covariance for m in each if m.covariance is not None]
        known[c] = Moments(
            c,
            np.concatenate([m.mean for m in each]),
            np.concatenate(spreads) if spreads else None,
            np.concatenate([m.estimate for m in each]),
            np.concatenate([m.estimate_variance for m in each]),
            np.concatenate([m.rounding for m in each]),
            np.concatenate([m.baseline for m in each]),
            tuple(m.configuration for m in each),
        )
    return [known[c] for c in configurations]


def _finite(m: Moments) -> bool:
    return bool(np.isfinite(m.mean).all() and (m.covariance is None or np.isfinite(m.covariance).all()))


def full_fits(pair: PolicyPair) -> bool:
    """Whether ``covariance="full"`` is within reach for this pair."""
    return pair.automaton.contexts * pair.automaton.vocabulary * pair.policy.parameters**2 <= _FULL_ENTRIES


def _is_cross(rows: Rows, key: Product) -> bool:
    return all(is_vector(rows, row) for row in key[:2])


def is_vector(rows: Rows, row: Row) -> bool:
    """Whether a row has one entry per coordinate: it takes in a score, directly or through another row."""
    return any(c.ndim == 3 or (source != row and is_vector(rows, source)) for source, c in rows.update[row])


def _finish(
    plan: Plan,
    of: dict[Product, np.ndarray],
    crossed: dict[Product, np.ndarray],
    covariance: str,
    samples: int,
    d: int,
) -> Moments:
    configuration, divisor = plan.configuration, plan.configuration.divisor
    products = _Products(plan, of, d)
    mean_x = products.mean(plan.centred)
    mean_y = None if plan.y is None else np.zeros_like(mean_x) if plan.vanishing else products.mean((plan.y,))
    baseline = configuration.baseline
    b: Any = 0.0
    if baseline == "constant":
        b = configuration.baseline_value
    elif baseline in ("mean", "loo"):
        b = products.value()
    elif baseline.startswith("optimal"):
        b = _optimal(products, mean_x, mean_y, per_coordinate=baseline.endswith("coordinate"))
    mean = mean_x if mean_y is None else mean_x - b * mean_y
    spread = None
    if covariance != "none":
        spread = _covariance(plan, products, crossed, mean_x, mean_y, b, covariance, samples)
        spread = spread / divisor**2
    value = of[(plan.expected, ONE, plan.power)][:, 0]
    if covariance == "none":
        variance = np.full_like(value, np.nan)
    else:
        variance = of[(plan.estimate, plan.estimate, 2 * plan.power)][:, 0] - value**2
        variance = np.maximum(variance, 0.0) / divisor**2
    open_ = _rounding_of(plan, products, b, samples) if covariance != "none" else np.full((len(mean), 2), np.nan)
    b = np.zeros_like(mean) + b + plan.taken
    return Moments(configuration, mean / divisor, spread, value / divisor, variance, open_ / divisor**2, b)


def _rounding_of(plan: Plan, products: _Products, b: Any, samples: int) -> np.ndarray:
    """``[L, 2]`` rounding of the sums of squares that the two variances are differences of, at D = 1."""
    of, k = products.of, plan.power
    size: Any = sum(np.abs(of[(i, j, 2 * k)]) for i in plan.x for j in plan.x)
    if plan.y is not None:
        cross: Any = sum(np.abs(of[(row, plan.y, 2 * k)]) for row in plan.x)
        square = of[(plan.y, plan.y, 2 * k)]
        size = size + 2 * np.abs(b) * cross + b**2 * square
        if plan.c is not None and plan.configuration.baseline == "loo":
            size = size + of[(plan.c, plan.c, 0)] * square / (plan.configuration.group(samples) - 1)
    return _EPSILON * np.stack([size.sum(axis=1), of[(plan.estimate, plan.estimate, 2 * k)][:, 0]], axis=1)


def _optimal(products: _Products, mean_x: np.ndarray, mean_y: Any, *, per_coordinate: bool) -> np.ndarray:
    """b that minimises the variance of X - bY: one scalar, or one per coordinate; 0 where Y never varies.

    There any b does, and one made of rounding would shift the mean: off-policy E[Y] need not be 0.
    """
    x, y = products.plan.x, (products.plan.y,)
    cross = products.second(x, y) - mean_x * mean_y  # type: ignore[arg-type]
    size = products.second(y, y)  # type: ignore[arg-type]
    var = size - mean_y**2
    if not per_coordinate:
        cross, var, size = (each.sum(axis=1, keepdims=True) for each in (cross, var, size))
    return np.divide(cross, var, out=np.zeros_like(cross), where=var > _ROUNDING * size)


def _covariance(
    plan: Plan,
    products: _Products,
    crossed: dict[Product, np.ndarray],
    mean_x: np.ndarray,
    mean_y: Any,
    b: Any,
    kind: str,
    samples: int,
) -> np.ndarray:
    """Covariance of A = X - bY (leave-one-out: A = X - E[C] Y - E[Y] C plus its degenerate part), at D = 1."""
    full, d = kind == "full", products.size
    L = mean_x.shape[0]

    def cov(a: Sequence[Row], c: Sequence[Row], mean_a: np.ndarray, mean_c: np.ndarray) -> np.ndarray:
        if not full:
            return products.second(a, c) - mean_a * mean_c
        second = sum(crossed[(i, j, 2 * plan.power)] for i in a for j in c)
        return np.asarray(second).reshape(L, d, d) - mean_a[:, :, None] * mean_c[:, None, :]

    def outer(u: np.ndarray, v: np.ndarray) -> np.ndarray:
        return u[:, :, None] * v[:, None, :] if full else u * v

    def swap(m: np.ndarray) -> np.ndarray:
        return np.swapaxes(m, 1, 2) if full else m

    out = cov(plan.x, plan.x, mean_x, mean_x)
    if plan.y is not None:
        b = np.broadcast_to(b, mean_x.shape)
        xy = cov(plan.x, (plan.y,), mean_x, mean_y) * (b[:, None, :] if full else b)
        yy = cov((plan.y,), (plan.y,), mean_y, mean_y)
        out = out - xy - swap(xy) + yy * outer(b, b)
    if plan.configuration.baseline == "loo":
        assert plan.c is not None
        of, k = products.of, plan.power
        mean_c = products.value()
        var_c = of[(plan.c, plan.c, 0)] - mean_c**2
        x_c = sum(of[(row, plan.c, k)] for row in plan.x) - mean_x * mean_c
        y_c = of[(plan.y, plan.c, k)] - mean_y * mean_c  # type: ignore[index]
        a_c = x_c - mean_c * y_c
        out = out - outer(a_c, mean_y) - swap(outer(a_c, mean_y)) + outer(mean_y, mean_y) * _expand(var_c, full)
        group = plan.configuration.group(samples)
        out = out + (_expand(var_c, full) * yy + outer(y_c, y_c)) / (group - 1)
    if kind == "full":
        return out
    out = np.maximum(out, 0.0)  # cancellation can leave a variance of zero a rounding below it
    return out.sum(axis=1) if kind == "trace" else out


def _expand(scalar_row: np.ndarray, full: bool) -> np.ndarray:
    return scalar_row[:, :1, None] if full else scalar_row
