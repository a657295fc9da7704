"""Exact mean and covariance of any per-sequence configuration, every length in one pass.

Per coordinate of theta a configuration's gradient is a linear functional of *rows*: running sums over tokens
such as the constant 1, C (values), P (scores), their product, the reward-to-go sum. Each token updates the
vector z of rows linearly, z' = L(s, v) z with L lower-triangular, so ``M_t[s] = E[z z^T ; context = s]`` obeys

    M_{t+1}[s'] = sum over (s, v) -> s' of mu(v|s) L M_t[s] L^T.

Only the products of rows that the request needs are carried, and what they need in turn. A ratio is more rows
(prefix: Omega' = rho Omega and its products) or a factor on L (sequence). With an end, what arrives there at
length t is collected with the powers of 1/t that a length mean asks for. Cost is linear in the length, memory
does not depend on it.

Shapes: L lengths asked for, S contexts, V tokens, d parameters, m products of rows, n coordinates
(d, or d^2 pairs of them for a full covariance).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from klgrad.synth.configurations import Configuration
from klgrad.synth.exact import check_lengths
from klgrad.synth.policies import PolicyPair, reachable

if TYPE_CHECKING:
    from jaxtyping import Float

COVARIANCES = ("none", "trace", "diagonal", "full")
_DENSE_WORK = 3e7  # multiply-adds of one operator product up to which doubling beats stepping
_CHUNK = 64
_FULL_ENTRIES = 1 << 20  # S x V x d^2 up to which d x d blocks are carried

Row = tuple[str, ...]
ONE: Row = ("one",)


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


# ------------------------------------------------------------------------------------------------ edge tables


def edge_values(pair: PolicyPair, configuration: Configuration) -> Float[np.ndarray, "S V"]:
    """``[S, V]`` the estimator's value c at each token; 0 where the sampler never goes."""
    est = configuration.estimator
    can = possible(pair)
    with np.errstate(over="ignore", invalid="ignore"):
        if est.full:
            value = np.broadcast_to(est.value(pair.policy.log_probs, pair.reference)[:, None], can.shape)
        else:
            delta = pair.log_ratio
            if configuration.rollout_value:
                delta = np.where(can, pair.sampler, 0.0) - np.where(can, pair.reference, 0.0)
            value = est.value(delta)
    return np.where(can, value, 0.0)


def edge_pathwise(pair: PolicyPair, configuration: Configuration) -> Float[np.ndarray, "S V d"]:
    """``[S, V, d]`` w at each token: slope times score, summed over the vocabulary for full estimators.

    0 where the sampler never goes.
    """
    est, scores, can = configuration.estimator, pair.policy.scores, possible(pair)
    with np.errstate(over="ignore", invalid="ignore"):
        if not est.full:
            return np.where(can, est.slope(pair.log_ratio), 0.0)[..., None] * scores
        emits = np.asarray(can.any(axis=1))[:, None]
        slope = np.where(emits, est.slope(pair.policy.log_probs, pair.reference), 0.0)
    return np.broadcast_to(np.einsum("sv,svd->sd", slope, scores)[:, None, :], scores.shape)


def possible(pair: PolicyPair) -> np.ndarray:
    """``[S, V]`` True where the sampler can emit the token in a context that it can reach."""
    return (pair.sampler > -np.inf) & (pair.automaton.alive & reachable(pair.automaton, pair.sampler))[:, None]


# ---------------------------------------------------------------------------------------------------- the rows


class Rows:
    """The linear updates ``row' = sum of coefficient x source``, built for each configuration on demand."""

    def __init__(self, pair: PolicyPair) -> None:
        self.pair = pair
        self.rho = pair.importance_ratio
        self.unit = np.ones_like(self.rho)
        self.update: dict[Row, list[tuple[Row, np.ndarray]]] = {ONE: [(ONE, self.unit)]}
        self.initial: set[Row] = {ONE}  # rows that start at 1; all others start at 0
        self._tables: dict[Any, np.ndarray] = {}

    def table(self, kind: str, configuration: Configuration) -> np.ndarray:
        key = (kind, configuration.estimator.name, configuration.rollout_value and kind == "value")
        if key not in self._tables:
            make = edge_values if kind == "value" else edge_pathwise
            self._tables[key] = make(self.pair, configuration)
        return self._tables[key]

    def add(self, row: Row, *terms: tuple[Row, np.ndarray], keep: np.ndarray | None = None) -> Row:
        """Define ``row' = keep x row + terms`` unless it is there already."""
        if row not in self.update:
            self.update[row] = [(row, self.unit if keep is None else keep), *terms]
        return row

    def weight(self, ratio: str) -> tuple[Row, np.ndarray]:
        """The row that carries the ratio so far, and the factor one more token puts on it."""
        if ratio in ("none", "token"):
            return ONE, self.unit
        omega: Row = ("omega",)
        if omega not in self.update:
            self.update[omega] = [(omega, self.rho)]
            self.initial.add(omega)
        return omega, self.rho

    def values(self, configuration: Configuration) -> Row:
        """C, the unweighted sum of values: what baselines average."""
        c = self.table("value", configuration)
        return self.add(("C", *self._value_key(configuration)), (ONE, c))

    def estimate(self, configuration: Configuration) -> Row:
        """sum_t lambda_t c_t, the KL value estimate."""
        ratio, c = configuration.ratio, self.table("value", configuration)
        carrier, step = self.weight(ratio)
        key = self._value_key(configuration)
        if ratio == "none":
            return self.values(configuration)
        if ratio == "sequence":
            return self.add(("omega C", *key), (carrier, step * c), keep=step)
        factor = self.unit if configuration.estimator.full else self.rho
        return self.add((f"{ratio} C", *key), (carrier, factor * c))

    def scores(self, ratio: str) -> Row:
        """Y = sum_t omega(t) p_t, what a baseline multiplies."""
        carrier, step = self.weight(ratio)
        own = self.rho if ratio == "token" else step
        p = own[..., None] * self.pair.policy.scores
        if ratio == "sequence":
            return self.add(("omega P",), (carrier, p), keep=step)
        return self.add(("Y", ratio), (carrier, p))

    def loss(self, configuration: Configuration) -> Row:
        """sum_t lambda_t w_t."""
        ratio, est = configuration.ratio, configuration.estimator
        carrier, step = self.weight(ratio)
        own = self.rho if ratio in ("token", "prefix", "sequence") else self.unit
        if est.full and ratio in ("token", "prefix"):
            own = self.unit
        w = own[..., None] * self.table("pathwise", configuration)
        return self.add(("loss", ratio, est.name), (carrier, w), keep=step if ratio == "sequence" else None)

    def reward(self, configuration: Configuration) -> Row:
        """sum over (t, u) in credit of omega(t, u) c_u p_t, for b = 0."""
        ratio, credit, full = configuration.ratio, configuration.credit, configuration.estimator.full
        c, key = self.table("value", configuration), self._value_key(configuration)
        carrier, step = self.weight(ratio)
        own = self.rho if ratio == "token" else step
        p = own[..., None] * self.pair.policy.scores
        terms: list[tuple[Row, np.ndarray]] = []
        if credit != "future":  # t = u
            terms.append((carrier, c[..., None] * p))
        if credit in ("whole", "rtg", "future"):  # t < u
            if ratio == "prefix":
                before = self.add(("omega P",), (carrier, p), keep=step)
                terms.append((before, c if full else step * c))
            else:
                terms.append((self.scores(ratio), step * c))
        if credit == "whole":  # t > u
            if ratio in ("prefix", "sequence"):
                past = self.add(("omega C", *key), (carrier, step * c), keep=step)
            else:
                past = self.values(configuration)
            terms.append((past, p))
        return self.add(("reward", credit, ratio, *key), *terms, keep=step if ratio == "sequence" else None)

    @staticmethod
    def _value_key(configuration: Configuration) -> tuple[str, str]:
        return configuration.estimator.name, "rollout" if configuration.rollout_value else "now"


# -------------------------------------------------------------------------------------- products of rows, moved

Pair = tuple[Row, Row]
Product = tuple[Row, Row, int]  # two rows and the power of 1/|y| their product is weighted with


class _System:
    """The closed set of products of rows and the operator that moves them one token on."""

    def __init__(self, rows: Rows, wanted: list[Pair], left: np.ndarray, right: np.ndarray, *, ordered: bool) -> None:
        self.rows, self.left, self.right, self.ordered = rows, left, right, ordered
        self.index: dict[Pair, int] = {}
        self.terms: dict[tuple[int, int], np.ndarray] = {}
        self.automaton = rows.pair.automaton
        self.mu = np.exp(rows.pair.sampler) * possible(rows.pair)
        todo = [self.canonical(p) for p in wanted]
        for product in todo:
            self.index.setdefault(product, len(self.index))
        done = 0
        order = list(self.index)
        while done < len(order):
            for source, coefficient in self._sources(order[done]):
                if source not in self.index:
                    self.index[source] = len(order)
                    order.append(source)
                key = (done, self.index[source])
                self.terms[key] = self.terms[key] + coefficient if key in self.terms else coefficient
            done += 1
        self.order = order

    def canonical(self, product: Pair) -> Pair:
        a, b = product
        return product if self.ordered or a <= b else (b, a)

    def _sources(self, product: Pair) -> Iterator[tuple[Pair, np.ndarray]]:
        for row_a, a in self.rows.update[product[0]]:
            first = (self.mu if a.ndim == 2 else self.mu[..., None]) * (a if a.ndim == 2 else a[..., self.left])
            for row_b, b in self.rows.update[product[1]]:
                second = b if b.ndim == 2 else b[..., self.right]
                if first.ndim == second.ndim:
                    coefficient = first * second
                else:
                    coefficient = first[..., None] * second if first.ndim == 2 else first * second[..., None]
                yield self.canonical((row_a, row_b)), coefficient

    # Two ways to move the products, chosen by size: both apply the same terms. Each yields, chunk by chunk,
    # (t, running, arrived): [m, k, n] sums over the contexts that emit, and what reached the end, at t + 1 .. t + k.

    def trajectory(self, longest: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        size = len(self.order) * self.automaton.contexts
        dense = len(self.left) * float(size) ** 3 <= _DENSE_WORK
        return self._by_doubling(longest) if dense else self._by_steps(longest)

    def _started(self) -> list[int]:
        """Products that are 1 at the empty prefix; all others are 0."""
        return [i for i, (a, b) in enumerate(self.order) if a in self.rows.initial and b in self.rows.initial]

    def _by_doubling(self, longest: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Dense operator per coordinate; a chunk of lengths by repeated doubling."""
        m, (S, V), n = len(self.order), self.mu.shape, len(self.left)
        stacked = np.empty((len(self.terms), S * V, n))
        for k, coefficient in enumerate(self.terms.values()):
            stacked[k] = coefficient.reshape(S * V, -1)
        target, origin = np.array(list(self.terms)).T
        operator = np.zeros((n, m, S, m, S))
        source, to = np.repeat(np.arange(S), V), self.automaton.next_context.ravel()
        for edge in range(S * V):
            operator[:, target, to[edge], origin, source[edge]] += stacked[:, edge].T
        operator = operator.reshape(n, m * S, m * S)
        chunk = min(_CHUNK, 1 << max(longest - 1, 0).bit_length())
        powers = [operator]
        while 1 << len(powers) < chunk:
            powers.append(powers[-1] @ powers[-1])
        start = np.zeros((m, S))
        start[self._started(), self.automaton.start] = 1.0
        last = np.broadcast_to(start.reshape(1, m * S, 1), (n, m * S, 1))
        for t in range(0, longest, chunk):
            x = operator @ last
            for power in powers:
                if x.shape[2] >= min(chunk, longest - t):
                    break
                x = np.concatenate([x, power @ x], axis=2)
            last = x[:, :, -1:]
            by_context = x.reshape(n, m, S, -1).transpose(1, 2, 3, 0)
            alive = by_context[:, self.automaton.alive].sum(axis=1)
            yield t, alive, by_context[:, self.automaton.end]

    def _by_steps(self, longest: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """One token at a time, between the contexts in use: cost follows them, not the whole automaton."""
        m, n, end = len(self.order), len(self.left), self.automaton.end
        active = np.array([self.automaton.start])
        x = np.zeros((m, 1, n))
        x[self._started()] = 1.0
        built: tuple[np.ndarray, np.ndarray, _Step] | None = None
        for t in range(longest):
            after = np.unique(self.automaton.next_context[active][self.mu[active] > 0])
            if built is None or not (np.array_equal(built[0], active) and np.array_equal(built[1], after)):
                built = (active, after, _Step(self, active, after))
            x = built[2](x)
            arrived = x[:, after == end].sum(axis=1)
            active, x = after[after != end], x[:, after != end]
            yield t, x.sum(axis=1)[:, None], arrived[:, None]


class _Step:
    """One token's move between two sets of contexts.

    Coefficients that all coordinates share are one matrix per product over the products it needs; those of a
    coordinate's own (few: a tabular score touches one context) are one sparse matrix over everything.
    """

    def __init__(self, system: _System, active: np.ndarray, after: np.ndarray) -> None:
        from scipy import sparse

        n, V = len(system.left), system.mu.shape[1]
        successors = system.automaton.next_context[active]
        used = (system.mu[active] > 0).ravel()
        to = np.searchsorted(after, successors.ravel()[used])
        source = np.repeat(np.arange(len(active)), V)[used]
        shared: dict[int, list[tuple[int, np.ndarray]]] = {}
        own: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for (target, origin), coefficient in system.terms.items():
            if coefficient.ndim == 2:
                shared.setdefault(target, []).append((origin, coefficient[active].ravel()[used]))
                continue
            flat = coefficient[active].reshape(-1, n)[used]
            edge, at = np.nonzero(flat)
            row, column = (target * len(after) + to[edge]) * n + at, (origin * len(active) + source[edge]) * n + at
            own.append((flat[edge, at], row, column))
        self.shape = (len(system.order), len(after), n)
        self.blocks = []
        for target, parts in shared.items():
            data = np.concatenate([part for _, part in parts])
            column = np.concatenate([k * len(active) + source for k in range(len(parts))])
            block = sparse.coo_array(
                (data, (np.tile(to, len(parts)), column)), shape=(len(after), len(parts) * len(active))
            )
            dense = len(after) * len(active) <= 16 * len(used)
            self.blocks.append((target, [o for o, _ in parts], block.toarray() if dense else block.tocsr()))
        self.own = None
        if own:
            data, row, column = (np.concatenate(part) for part in zip(*own, strict=True))
            size = (len(system.order) * len(after) * n, len(system.order) * len(active) * n)
            self.own = sparse.coo_array((data, (row, column)), shape=size).tocsr()

    def __call__(self, x: np.ndarray) -> np.ndarray:
        n = self.shape[2]
        moved = np.zeros(self.shape) if self.own is None else (self.own @ x.ravel()).reshape(self.shape)
        for target, origins, block in self.blocks:
            moved[target] += block @ x[origins].reshape(-1, n)
        return moved


def propagate(
    rows: Rows, request: Sequence[Product], lengths: np.ndarray, left: np.ndarray, right: np.ndarray, *, ordered: bool
) -> dict[Product, np.ndarray]:
    """``[L, n]`` each requested product, weighted with its power of 1/|y|, at every length."""
    system = _System(rows, [(a, b) for a, b, _ in request], left, right, ordered=ordered)
    index = np.array([system.index[system.canonical((a, b))] for a, b, _ in request])
    power = np.array([-float(k) for *_, k in request])[:, None, None]
    weighted, has_end = bool(power.any()), rows.pair.automaton.end >= 0
    ended = np.zeros((len(request), 1, len(left)))
    out = np.zeros((len(lengths), len(request), len(left)))
    longest = int(lengths.max())
    for t, running, arrived in system.trajectory(longest):
        k = min(running.shape[1], longest - t)
        at = np.flatnonzero((lengths > t) & (lengths <= t + k))
        columns = lengths[at] - t - 1
        now = running[:, columns][index]
        if weighted:
            now = now * lengths[at].astype(float)[None, :, None] ** power
        if has_end:
            total = ended + np.cumsum(
                np.arange(t + 1, t + k + 1.0)[None, :, None] ** power * arrived[index, :k], axis=1
            )
            ended = total[:, -1:]
            now = now + total[:, columns]
        out[at] = now.transpose(1, 0, 2)
    return {key: out[:, i] for i, key in enumerate(request)}


# ------------------------------------------------------------------------------------------------------ moments


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
    x = []
    if configuration.in_reward:
        x.append(rows.reward(configuration))
    if configuration.in_loss:
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
        rows = Rows(pair)
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
    return all(_vector(rows, row) for row in key[:2])


def _vector(rows: Rows, row: Row) -> bool:
    """Whether a row has one entry per coordinate: it takes in a score, directly or through another row."""
    return any(c.ndim == 3 or (source != row and _vector(rows, source)) for source, c in rows.update[row])


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
    variance = np.full_like(value, np.nan)
    if covariance != "none":
        variance = of[(plan.estimate, plan.estimate, 2 * plan.power)][:, 0] - value**2
        variance = np.maximum(variance, 0.0) / divisor**2
    b = np.broadcast_to(b, mean.shape)
    return Moments(configuration, mean / divisor, spread, value / divisor, variance, b)


def _optimal(products: _Products, mean_x: np.ndarray, mean_y: Any, *, per_coordinate: bool) -> np.ndarray:
    """b that minimises the variance of X - bY: one scalar, or one per coordinate; 0 where Y never varies."""
    x, y = products.plan.x, (products.plan.y,)
    cross = products.second(x, y) - mean_x * mean_y  # type: ignore[arg-type]
    var = products.second(y, y) - mean_y**2  # type: ignore[arg-type]
    if not per_coordinate:
        cross, var = cross.sum(axis=1, keepdims=True), var.sum(axis=1, keepdims=True)
    return np.divide(cross, var, out=np.zeros_like(cross), where=var > 0)


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
    out = np.where(out < 0, 0.0, out)  # cancellation can leave a variance of zero a rounding below it
    return out.sum(axis=1) if kind == "trace" else out


def _expand(scalar_row: np.ndarray, full: bool) -> np.ndarray:
    return scalar_row[:, :1, None] if full else scalar_row
