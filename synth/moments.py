"""Exact mean and covariance of any per-sequence configuration, every length in one pass.

A configuration's gradient is a linear functional of running sums (``rows``) that each token updates linearly; the
second moments of those sums obey a linear recurrence over contexts (``products``). Here a configuration becomes
the functionals it needs, and their moments become its mean and covariance.

Shapes: L lengths asked for, d parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from klgrad.synth.configurations import Configuration
from klgrad.synth.exact import check_lengths
from klgrad.synth.policies import PolicyPair
from klgrad.synth.products import Product, propagate
from klgrad.synth.rows import ONE, Row, Rows

if TYPE_CHECKING:
    from jaxtyping import Float

COVARIANCES = ("none", "trace", "diagonal", "full")
_FULL_ENTRIES = 1 << 20  # S x V x d^2 up to which d x d blocks are carried
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
        baseline: ``[L, d]`` the constant b (for leave-one-out, the value it estimates: E[C]).
    """

    configuration: Configuration
    mean: Float[np.ndarray, "L d"]
    covariance: Float[np.ndarray, "L ..."] | None
    estimate: Float[np.ndarray, " L"]
    estimate_variance: Float[np.ndarray, " L"]
    baseline: Float[np.ndarray, "L d"]


class Plan(NamedTuple):
    """One configuration's functionals: rows of X (g at b = 0), of Y, of C and of the estimate, and powers of 1/|y|."""

    configuration: Configuration
    x: tuple[Row, ...]
    y: Row | None
    c: Row | None
    estimate: Row
    power: int


def plan_of(rows: Rows, configuration: Configuration) -> Plan:
    """The rows that a configuration's gradient, baseline and estimate are made of."""
    x, merged = [], rows.merges(configuration)
    if configuration.in_reward:
        x.append(rows.reward(configuration, merged=merged))
    if configuration.in_loss and not merged:
        x.append(rows.loss(configuration))
    needs_c = configuration.baseline in ("mean", "loo")
    return Plan(
        configuration,
        tuple(x),
        rows.scores(configuration.ratio) if configuration.baseline != "none" else None,
        rows.values(configuration) if needs_c else None,
        rows.estimate(configuration),
        int(configuration.aggregation == "length-mean"),
    )


def _asked(plan: Plan, *, second: bool) -> Iterator[Product]:
    """The products that the plan needs reported."""
    k = plan.power
    vectors = (*plan.x, *((plan.y,) if plan.y else ()))
    yield plan.estimate, ONE, k
    if second:
        yield plan.estimate, plan.estimate, 2 * k
    for row in vectors:
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
        return np.asarray(sum(self.of[(row, ONE, self.k)] for row in vector))

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
        configurations: any per-sequence configurations, leave-one-out included.
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
    mean_x, mean_y = products.mean(plan.x), products.mean((plan.y,)) if plan.y else None
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
    value = of[(plan.estimate, ONE, plan.power)][:, 0]
    if covariance == "none":
        variance = np.full_like(value, np.nan)
    else:
        variance = of[(plan.estimate, plan.estimate, 2 * plan.power)][:, 0] - value**2
        variance = np.maximum(variance, 0.0) / divisor**2
    b = np.zeros_like(mean) + b
    return Moments(configuration, mean / divisor, spread, value / divisor, variance, b)


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
