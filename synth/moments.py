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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from klgrad.synth.configurations import Configuration
from klgrad.synth.exact import check_lengths
from klgrad.synth.policies import PolicyPair

if TYPE_CHECKING:
    from jaxtyping import Float

COVARIANCES = ("none", "trace", "diagonal", "full")
_DENSE_WORK = 3e7  # multiply-adds of one operator product up to which doubling beats stepping
_CHUNK = 128
_CANCELS = 6.0  # log pi_ref / pi from which value and slope of k3 are better added before they are squared
_SPARSE_ENTRIES = 1 << 12  # S x V x d from which scores that are mostly zero are kept without the zeros
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
    can = pair.possible
    with np.errstate(over="ignore", invalid="ignore"):
        if est.full:
            value = np.broadcast_to(est.value(pair.policy.log_probs, pair.reference)[:, None], can.shape)
        else:
            delta = pair.log_ratio
            if configuration.rollout_value:
                delta = np.where(can, pair.sampler, 0.0) - np.where(can, pair.reference, 0.0)
            value = est.value(delta)
    return np.where(can, value, 0.0)


def edge_pathwise(
    pair: PolicyPair, configuration: Configuration, scores: Float[np.ndarray, "S V a"] | None = None
) -> Float[np.ndarray, "S V a"]:
    """``[S, V, d]`` w at each token: slope times score, summed over the vocabulary for full estimators.

    0 where the sampler never goes. ``scores`` stands for the policy's, such as some coordinates of them.
    """
    est, can = configuration.estimator, pair.possible
    scores = pair.policy.scores if scores is None else scores
    with np.errstate(over="ignore", invalid="ignore"):
        if not est.full:
            return np.where(can, est.slope(pair.log_ratio), 0.0)[..., None] * scores
        emits = np.asarray(can.any(axis=1))[:, None]
        slope = np.where(emits, est.slope(pair.policy.log_probs, pair.reference), 0.0)
    return np.broadcast_to(np.einsum("sv,svd->sd", slope, scores)[:, None, :], scores.shape)


def edge_together(pair: PolicyPair, configuration: Configuration) -> Float[np.ndarray, "S V"]:
    """``[S, V]`` value plus slope at each token, in the estimator's closed form; 0 where the sampler never goes."""
    assert configuration.estimator.together is not None
    return np.where(pair.possible, configuration.estimator.together(pair.log_ratio), 0.0)


# ---------------------------------------------------------------------------------------------------- the rows


def _active(pair: PolicyPair) -> np.ndarray | None:
    """``[S, a]`` coordinates that hold all scores of each context, where that is worth it: a at most d / 2."""
    scores = pair.policy.scores
    d = scores.shape[2]
    if scores.size < _SPARSE_ENTRIES:
        return None
    present = (scores != 0).any(axis=1)
    most = max(int(present.sum(axis=1).max()), 1)
    return None if 2 * most > d else np.argsort(~present, axis=1, kind="stable")[:, :most]


def _same(one: Sequence[tuple[Row, np.ndarray]], two: Sequence[tuple[Row, np.ndarray]]) -> bool:
    """Whether two lists of terms have the same sources and coefficients."""
    return [source for source, _ in one] == [source for source, _ in two] and all(
        np.array_equal(a, b) for (_, a), (_, b) in zip(one, two, strict=True)
    )


class Rows:
    """The linear updates ``row' = sum of coefficient x source``, built for each configuration on demand.

    Where each context has scores in few coordinates, as tabular policies do, coefficients keep those alone:
    ``active [S, a]`` names them, and a coefficient is ``[S, V, a]`` and not ``[S, V, d]``; else ``active`` is None.
    """

    def __init__(self, pair: PolicyPair, *, dense: bool = False) -> None:
        self.pair = pair
        self.active = None if dense else _active(pair)
        self.score = pair.policy.scores
        if self.active is not None:
            self.score = np.take_along_axis(self.score, self.active[:, None, :], axis=2)
        if not pair.possible.all():  # as the other tables, so that rows that are the same are seen to be
            self.score = np.where(pair.possible[..., None], self.score, 0.0)
        self.rho = pair.importance_ratio
        self.unit = np.ones_like(self.rho)
        self.update: dict[Row, list[tuple[Row, np.ndarray]]] = {ONE: [(ONE, self.unit)]}
        self.initial: set[Row] = {ONE}  # rows that start at 1; all others start at 0
        self._tables: dict[Any, np.ndarray] = {}

    def table(self, kind: str, configuration: Configuration) -> np.ndarray:
        key = (kind, configuration.estimator.name, configuration.rollout_value and kind == "value")
        if key not in self._tables:
            make: dict[str, Callable[[], np.ndarray]] = {
                "value": lambda: edge_values(self.pair, configuration),
                "pathwise": lambda: edge_pathwise(self.pair, configuration, self.score),
                "together": lambda: edge_together(self.pair, configuration),
            }
            self._tables[key] = make[kind]()
        return self._tables[key]

    def coordinates(self, contexts: np.ndarray, n: int) -> np.ndarray:
        """``[contexts, a]`` the coordinates that their coefficients stand for."""
        return np.broadcast_to(np.arange(n), (len(contexts), n)) if self.active is None else self.active[contexts]

    def spread(self, coefficient: np.ndarray) -> np.ndarray:
        """``[S, V, d]`` from ``[S, V, a]``."""
        if self.active is None:
            return coefficient
        out = np.zeros(self.pair.policy.scores.shape)
        np.put_along_axis(out, np.broadcast_to(self.active[:, None, :], coefficient.shape), coefficient, axis=2)
        return out

    def add(self, row: Row, *terms: tuple[Row, np.ndarray], keep: np.ndarray | None = None) -> Row:
        """Define ``row' = keep x row + terms`` unless it, or another that is the same, is there already."""
        if row in self.update:
            return row
        keep = self.unit if keep is None else keep
        for other, ((itself, kept), *rest) in self.update.items():
            # k1's slope is 1: its loss is the sum of scores, under another name
            if itself == other and other not in self.initial and _same(terms, rest) and np.array_equal(kept, keep):
                return other
        self.update[row] = [(row, keep), *terms]
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
        p = own[..., None] * self.score
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

    def merges(self, configuration: Configuration) -> bool:
        """Whether reward and loss are better one row: k3's own-token terms cancel to delta where r is large."""
        if configuration.placement != "both" or configuration.credit == "future" or configuration.rollout_value:
            return False
        pair = self.pair
        far = -pair.log_ratio[pair.possible].min(initial=0.0) > _CANCELS
        return far and configuration.estimator.together is not None

    def reward(self, configuration: Configuration, *, merged: bool = False) -> Row:
        """sum over (t, u) in credit of omega(t, u) c_u p_t, for b = 0; ``merged`` with the loss."""
        ratio, credit, full = configuration.ratio, configuration.credit, configuration.estimator.full
        c, key = self.table("value", configuration), self._value_key(configuration)
        carrier, step = self.weight(ratio)
        own = self.rho if ratio == "token" else step
        p = own[..., None] * self.score
        terms: list[tuple[Row, np.ndarray]] = []
        if credit != "future":  # t = u
            own_value = self.table("together", configuration) if merged else c
            terms.append((carrier, own_value[..., None] * p))
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
        return self.add(
            ("both" if merged else "reward", credit, ratio, *key), *terms, keep=step if ratio == "sequence" else None
        )

    @staticmethod
    def _value_key(configuration: Configuration) -> tuple[str, str]:
        return configuration.estimator.name, "rollout" if configuration.rollout_value else "now"


# -------------------------------------------------------------------------------------- products of rows, moved

Pair = tuple[Row, Row]
Product = tuple[Row, Row, int]  # two rows and the power of 1/|y| their product is weighted with


class _System:
    """The closed set of products of rows, and the terms that move them one token on.

    A term says: product ``target`` takes in product ``origin`` with coefficient mu x (update i) x (update j), the
    updates of its two rows. Terms are names and numbers first; arrays are made by whichever way moves them.
    """

    def __init__(self, rows: Rows, wanted: list[Pair], left: np.ndarray, right: np.ndarray, *, ordered: bool) -> None:
        self.rows, self.left, self.right, self.ordered = rows, left, right, ordered
        self.automaton = rows.pair.automaton
        self.mu = np.exp(rows.pair.sampler) * rows.pair.possible
        self.updates: list[np.ndarray] = []
        numbered: dict[Row, list[tuple[Row, int]]] = {}
        for row, update in rows.update.items():
            numbered[row] = [(source, len(self.updates) + i) for i, (source, _) in enumerate(update)]
            self.updates += [coefficient for _, coefficient in update]
        self.index: dict[Pair, int] = {}
        for product in wanted:
            self.index.setdefault(self.canonical(product), len(self.index))
        self.order = list(self.index)
        self.terms: list[tuple[int, int, int, int]] = []  # target, origin, i, j
        for target, (one, two) in enumerate(self.order):  # which grows meanwhile
            for a, i in numbered[one]:
                for b, j in numbered[two]:
                    product = self.canonical((a, b))
                    origin = self.index.setdefault(product, len(self.order))
                    if origin == len(self.order):
                        self.order.append(product)
                    self.terms.append((target, origin, i, j))

    def canonical(self, product: Pair) -> Pair:
        a, b = product
        return product if self.ordered or a <= b else (b, a)

    # Two ways to move the products, chosen by size: both apply the same terms. Each yields, chunk by chunk,
    # (t, running, arrived): [r, k, n] of the products asked for, summed over the contexts that emit, and what of them
    # reached the end, at t + 1 .. t + k.

    def trajectory(self, longest: int, asked: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        size = len(self.order) * self.automaton.contexts
        dense = len(self.left) * float(size) ** 3 <= _DENSE_WORK
        return self._by_doubling(longest, asked) if dense else self._by_steps(longest, asked)

    def _started(self) -> list[int]:
        """Products that are 1 at the empty prefix; all others are 0."""
        return [i for i, (a, b) in enumerate(self.order) if a in self.rows.initial and b in self.rows.initial]

    def _operator(self) -> np.ndarray:
        """``[n, m, S, m, S]`` the dense operator of every coordinate."""
        m, (S, V), n = len(self.order), self.mu.shape, len(self.left)
        first = self._tables(self.left)
        second = first if self.right is self.left else self._tables(self.right)
        target, origin, i, j = np.array(self.terms).T
        stacked = self.mu.reshape(-1, 1) * first[i] * second[j]
        key = target * m + origin
        order = key.argsort(kind="stable")
        fresh = np.append(0, np.flatnonzero(np.diff(key[order])) + 1)
        stacked = np.add.reduceat(stacked[order], fresh)
        target, origin = np.divmod(key[order][fresh], m)
        operator = np.zeros((n, m, S, m, S))
        source, to = np.repeat(np.arange(S), V), self.automaton.next_context.ravel()
        for edge in np.flatnonzero(self.rows.pair.possible):  # also where mu underflows: 0 x inf must not go unseen
            operator[:, target, to[edge], origin, source[edge]] += stacked[:, edge].T
        return operator

    def _tables(self, coordinates: np.ndarray) -> np.ndarray:
        """``[updates, S V, n]`` every update at the given coordinates."""
        out = np.empty((len(self.updates), *self.mu.shape, len(coordinates)))
        for table, update in zip(out, self.updates, strict=True):
            table[:] = update[..., None] if update.ndim == 2 else self.rows.spread(update)[..., coordinates]
        return out.reshape(len(out), -1, len(coordinates))

    def _by_doubling(self, longest: int, asked: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Dense operator per coordinate; a chunk of lengths by repeated doubling."""
        m, S, n = len(self.order), self.automaton.contexts, len(self.left)
        operator = self._operator().reshape(n, m * S, m * S)
        chunk = min(_CHUNK, 1 << max(longest - 1, 0).bit_length())
        powers = [operator]
        while 1 << len(powers) < chunk:
            powers.append(powers[-1] @ powers[-1])
        start = np.zeros((m, S))
        start[self._started(), self.automaton.start] = 1.0
        last = np.broadcast_to(start.reshape(1, m * S, 1), (n, m * S, 1))
        x = np.empty((n, m * S, chunk))
        alive = self.automaton.alive.astype(float)
        for t in range(0, longest, chunk):
            x[:, :, :1] = operator @ last
            width, most = 1, min(chunk, longest - t)
            for power in powers:
                if width < most:
                    more = min(width, most - width)
                    x[:, :, width : width + more] = power @ x[:, :, :more]
                    width += more
            last = x[:, :, width - 1 : width].copy()
            by_context = x.reshape(n, m, S, chunk)[:, asked, :, :width]
            running = alive @ by_context if self.automaton.end >= 0 else by_context.sum(axis=2)
            yield t, running.transpose(1, 2, 0), by_context[:, :, self.automaton.end].transpose(1, 2, 0)

    def _by_steps(self, longest: int, asked: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """One token at a time, between the contexts in use: cost follows them, not the whole automaton."""
        m, n, end = len(self.order), len(self.left), self.automaton.end
        active = np.array([self.automaton.start])
        x = np.zeros((m, 1, n))
        x[self._started()] = 1.0
        built: tuple[np.ndarray, np.ndarray, _Step] | None = None
        for t in range(longest):
            after = np.unique(self.automaton.next_context[active][self.rows.pair.possible[active]])
            if built is None or not (np.array_equal(built[0], active) and np.array_equal(built[1], after)):
                built = (active, after, _Step(self, active, after))
            x = built[2](x)
            arrived = x[asked][:, after == end].sum(axis=1)
            active, x = after[after != end], x[:, after != end]
            yield t, x.sum(axis=1)[asked, None], arrived[:, None]


class _Step:
    """One token's move between two sets of contexts.

    Coefficients that all coordinates share are one matrix per product over the products it needs. Those of a
    coordinate's own touch the few coordinates of the context they leave (a tabular score has V), which are gathered,
    weighted and put where the token leads.
    """

    def __init__(self, system: _System, active: np.ndarray, after: np.ndarray) -> None:
        n = len(system.left)
        mu, used = system.mu[active], system.rows.pair.possible[active]
        to = np.where(used, np.searchsorted(after, np.where(used, system.automaton.next_context[active], after[0])), 0)
        edges: dict[int, dict[int, np.ndarray]] = {}
        own: dict[int, dict[int, np.ndarray]] = {}
        for target, origin, i, j in system.terms:
            first = self._at(system.updates[i], active, system.left, system.rows)
            second = self._at(system.updates[j], active, system.right, system.rows)
            if first.ndim == second.ndim == 2:
                found, coefficient = edges, np.where(used, mu * first * second, 0.0)
            else:
                first, second = (a if a.ndim == 3 else a[..., None] for a in (first, second))
                found, coefficient = own, np.where(used[..., None], mu[..., None] * first * second, 0.0)
            into = found.setdefault(target, {})
            into[origin] = into[origin] + coefficient if origin in into else coefficient
        self.shape = (len(system.order), len(after), n)
        self.blocks = [
            (target, list(parts), self._block(to, used, parts, len(after))) for target, parts in edges.items()
        ]
        coordinates = system.rows.coordinates(active, n)  # [A, a]
        self.rows, self.coordinates = np.arange(len(active))[:, None], coordinates
        self.place = (to[..., None] * n + coordinates[:, None, :]).ravel()
        self.own = [(target, list(parts), list(parts.values())) for target, parts in own.items()]

    @staticmethod
    def _at(update: np.ndarray, active: np.ndarray, pick: np.ndarray, rows: Rows) -> np.ndarray:
        at = update[active]
        return at if at.ndim == 2 or rows.active is not None else at[..., pick]

    @staticmethod
    def _block(to: np.ndarray, used: np.ndarray, parts: dict[int, np.ndarray], after: int) -> Any:
        from scipy import sparse

        active, edges = len(to), int(used.sum())
        source = np.repeat(np.arange(active), to.shape[1]).reshape(to.shape)[used]
        data = np.concatenate([part[used] for part in parts.values()])
        column = np.concatenate([k * active + source for k in range(len(parts))])
        block = sparse.coo_array((data, (np.tile(to[used], len(parts)), column)), shape=(after, len(parts) * active))
        return block.toarray() if after * active <= 16 * edges else block.tocsr()

    def __call__(self, x: np.ndarray) -> np.ndarray:
        _, after, n = self.shape
        moved = np.zeros(self.shape)
        for target, origins, block in self.blocks:
            moved[target] += block @ x[origins].reshape(-1, n)
        gathered: dict[int, np.ndarray] = {}
        for target, origins, coefficients in self.own:
            total: Any = 0.0
            for origin, coefficient in zip(origins, coefficients, strict=True):
                if origin not in gathered:
                    gathered[origin] = x[origin][self.rows, self.coordinates][:, None, :]
                total = total + coefficient * gathered[origin]
            moved[target] += np.bincount(self.place, total.ravel(), after * n).reshape(after, n)
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
    for t, running, arrived in system.trajectory(longest, index):
        k = min(running.shape[1], longest - t)
        at = np.flatnonzero((lengths > t) & (lengths <= t + k))
        columns = lengths[at] - t - 1
        now = running[:, columns]
        if weighted:
            now = now * lengths[at].astype(float)[None, :, None] ** power
        if has_end:
            total = ended + np.cumsum(np.arange(t + 1, t + k + 1.0)[None, :, None] ** power * arrived[:, :k], axis=1)
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
