"""Exact fourth moments: how far the measured variance of a configuration strays from the true one.

The measured variance is N times the trace of the sample covariance of K trials, each the mean of N sequences. With m
the mean and Sigma the covariance of one sequence's gradient g, its own variance is (Fisher's k-statistics, summed over
pairs of coordinates)

    kappa / (K N) + 2 tr Sigma^2 / (K - 1),    kappa = E |g - m|^4 - (tr Sigma)^2 - 2 tr Sigma^2.

|g - m|^2 is linear in *squares* of rows: ``<a, b>`` of two vector rows, ``a_j s`` of a vector and a scalar row, ``s r``
of two scalar rows, in this order. As a token moves rows by z' = L z, it moves squares by a linear map, lifted from L,
so that the second moments of squares, which are fourth moments of rows, obey

    M_{t+1}[s'] = sum over (s, v) -> s' of mu(v|s) lift(L) M_t[s] lift(L)^T.

Shapes: L lengths, d parameters, a vector and p scalar rows, D = a^2 + a p d + p^2 squares, E edges (context, token).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from klgrad.synth.exact import check_lengths
from klgrad.synth.moments import Moments, Plan, is_vector, plan_of
from klgrad.synth.partitions import Block, fourth_of_group
from klgrad.synth.policies import PolicyPair
from klgrad.synth.rows import ONE, Rows

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

_MOST_WORK = 4e8  # multiply-adds of one pass: some 0.2 s
_MOST_ENTRIES = 1 << 22  # of the lifted maps of one token
_DIRECTIONS, _SKETCHES = 4, 8  # of a pass, and passes, where there are too many coordinates
_DIGITS = 1e-3  # relative error of a fourth moment, from what its sum cancels, past which it is not given


class Map(NamedTuple):
    """A linear map of rows: scalar rows ``[..., p', p]`` from scalar ones, vector rows from vector ones, alike in every
    coordinate, ``[..., a', a]``, and from scalar ones, ``[..., a', p, d]``."""

    scalar: np.ndarray
    vector: np.ndarray
    mixed: np.ndarray

    def lifted(self) -> np.ndarray:
        """``[..., D', D]`` the map of squares."""
        h, k, b = self
        (q, p), (c, a), d = h.shape[-2:], k.shape[-2:], b.shape[-1]
        ends = np.cumsum([c * c, c * q * d, q * q]), np.cumsum([a * a, a * p * d, p * p])
        out = np.zeros((*b.shape[:-3], ends[0][-1], ends[1][-1]))
        vv, vs, ss = (slice(*pair) for pair in zip((0, *ends[1]), ends[1], strict=False))

        def put(rows: slice, columns: slice, how: str, *factors: np.ndarray) -> None:
            view = out[..., rows, columns]
            view += np.einsum(how, *factors).reshape(view.shape)

        rows = slice(0, ends[0][0])
        put(rows, vv, "...ax,...by->...abxy", k, k)
        put(rows, vs, "...ax,...bsj->...abxsj", k, b)
        put(rows, vs, "...bx,...asj->...abxsj", k, b)
        put(rows, ss, "...asj,...brj->...absr", b, b)
        rows = slice(*ends[0][:2])
        put(rows, vs, "...ax,...qs,ij->...aqixsj", k, h, np.eye(d))
        put(rows, ss, "...asj,...qr->...aqjsr", b, h)
        put(slice(ends[0][1], None), ss, "...qs,...ur->...qusr", h, h)
        return out


class Squares(NamedTuple):
    """``moment [D, D]``, expected products of two squares of ``a`` vector and ``p`` scalar rows, one of which is 1."""

    moment: Float[np.ndarray, "D D"]
    a: int
    p: int
    d: int
    one: int

    def expect(self, left: Sequence[int], right: Sequence[int] = (), scalars: Sequence[int] = ()) -> np.ndarray:
        """``[d, d]`` expected products of vector rows at one coordinate, vector rows at another, and scalar rows.

        At most two, two, and four in all. Two rows at one coordinate are summed over it: its length is 1, as where
        there is none.
        """
        if len(left) < len(right):
            return self.expect(right, left, scalars).T
        rest = [*scalars, *[self.one] * 4]
        return self.moment[np.ix_(self._index(left, rest), self._index(right, rest))]

    def _index(self, vectors: Sequence[int], rest: list[int]) -> np.ndarray:
        """The squares of these vector rows, filled up with scalar rows from the front of ``rest``."""
        a, p, d, vv = self.a, self.p, self.d, self.a**2
        if len(vectors) == 2:
            return np.array([vectors[0] * a + vectors[1]])
        if len(vectors) == 1:
            return vv + (vectors[0] * p + rest.pop(0)) * d + np.arange(d)
        return np.array([vv + a * p * d + rest.pop(0) * p + rest.pop(0)])

    def moved(self, by: Map) -> Squares:
        """Of the rows that the map makes, whose first scalar row is 1."""
        to = by.lifted()
        return Squares(to @ self.moment @ to.T, len(by.vector), len(by.scalar), self.d, 0)


class _System:
    """The rows that one configuration's gradient is made of, and how each token moves them.

    ``own [d]`` is a baseline per coordinate: as squares are summed over coordinates, b Y is then one more vector row.
    """

    def __init__(self, rows: Rows, plan: Plan, own: np.ndarray | None) -> None:
        self.rows, self.plan, self.own, self.pair = rows, plan, own, rows.pair
        found = [ONE, *plan.x, *((plan.y,) if plan.y else ()), *((plan.c,) if plan.c else ())]
        for row in found:  # which grows meanwhile
            found += [source for source, _ in rows.update[row] if source not in found]
        self.scalars = [row for row in dict.fromkeys(found) if not is_vector(rows, row)]
        self.vectors = [row for row in dict.fromkeys(found) if is_vector(rows, row)]
        self.a, self.p = len(self.vectors) + (own is not None), len(self.scalars)
        self.d = rows.pair.policy.parameters
        counts = self.a**2, self.a * self.p * self.d, self.p**2
        self.power = -float(plan.power) * np.repeat([2, 1, 0], counts)  # of |y|, each square's

    @property
    def size(self) -> int:
        """D."""
        return len(self.power)

    def start(self) -> np.ndarray:
        """``[D]`` squares of the empty prefix."""
        one = np.array([row in self.rows.initial for row in self.scalars], float)
        return np.concatenate([np.zeros(self.size - self.p**2), np.outer(one, one).ravel()])

    def lifted(self, context: np.ndarray, token: np.ndarray) -> np.ndarray:
        """``[E, D, D]`` how those tokens move squares."""
        a, p, E = self.a, self.p, len(context)
        scalar, vector, mixed = np.zeros((E, p, p)), np.zeros((E, a, a)), np.zeros((E, a, p, self.d))
        for i, row in enumerate(self.scalars):
            for source, coefficient in self.rows.update[row]:
                scalar[:, i, self.scalars.index(source)] += coefficient[context, token]
        for i, row in enumerate(self.vectors):
            for source, coefficient in self.rows.update[row]:
                at = coefficient[context, token]
                if source in self.vectors:
                    vector[:, i, self.vectors.index(source)] += at
                else:
                    mixed[:, i, self.scalars.index(source)] += at if at.ndim == 2 else at[:, None]
        if self.own is not None:
            assert self.plan.y is not None
            y = self.vectors.index(self.plan.y)
            vector[:, -1, -1], mixed[:, -1] = vector[:, y, y], mixed[:, y] * self.own
        return Map(scalar, vector, mixed).lifted()

    def steps(self, longest: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """The contexts in use before each token, and its edges: index into those contexts, and token."""
        active = np.array([self.pair.automaton.start])
        for _ in range(longest):
            at, token = np.nonzero(self.pair.possible[active])
            yield active, at, token
            after = np.unique(self.pair.automaton.next_context[active[at], token])
            active = after[after != self.pair.automaton.end]

    def fits(self, longest: int) -> bool:
        """Whether a pass to that length is within reach."""
        edges = [len(at) for _, at, _ in self.steps(longest)]
        return max(edges) * self.size**2 <= _MOST_ENTRIES and 2.0 * sum(edges) * self.size**3 <= _MOST_WORK

    def moments(self, lengths: np.ndarray) -> dict[int, np.ndarray]:
        """``[D, D]`` second moments of squares at each length, weighted with their powers of 1/|y|."""
        automaton, longest = self.pair.automaton, int(lengths.max())
        mu, first = np.exp(self.pair.sampler), self.start()
        x, before = np.outer(first, first)[None], np.empty(0)
        ended, found = np.zeros((self.size, self.size)), {}
        for t, (active, at, token) in enumerate(self.steps(longest), 1):
            if not np.array_equal(active, before):
                context, before = active[at], active
                maps, weight = self.lifted(context, token), mu[context, token]
                after, to = np.unique(automaton.next_context[context, token], return_inverse=True)
                merge = np.zeros((len(after), len(to)))
                merge[to, np.arange(len(to))] = weight
            moved = (maps @ x[at] @ maps.transpose(0, 2, 1)).reshape(-1, self.size**2)
            x = (merge @ moved).reshape(-1, self.size, self.size)
            power = float(t) ** self.power
            ended += np.outer(power, power) * x[after == automaton.end].sum(axis=0)
            x = x[after != automaton.end]
            if t in lengths:
                found[t] = ended + np.outer(power, power) * x.sum(axis=0)
        return found

    def kappa(self, moment: np.ndarray, b: float, samples: int) -> float:
        """The summed fourth cumulants, at D = 1."""
        configuration, to = self.plan.configuration, self.centring(moment, b)
        raw = Squares(moment, self.a, self.p, self.d, self.scalars.index(ONE))
        found = raw.moved(to)
        sigma, fourth, unit = found.expect([0], [0]), found.expect([0, 0], [0, 0]).item(), 1
        size = np.abs(to.lifted()[0])
        if not np.finfo(float).eps * (size @ np.abs(moment) @ size) < _DIGITS * fourth:
            return np.nan
        if configuration.baseline == "loo":
            unit, y_c = configuration.group(samples), found.expect([1], (), [1])
            sigma = sigma + (found.expect((), (), [1, 1]) * found.expect([1], [1]) + y_c * y_c.T) / (unit - 1)
            fourth = fourth_of_group(partial(_block, found), unit)
        return float(fourth / unit - unit * (np.trace(sigma) ** 2 + 2 * (sigma**2).sum()))

    def centring(self, moment: np.ndarray, b: float) -> Map:
        """To A = X - b Y less its mean; for leave-one-out, to A = X - E[C] Y - E[Y] C, Y and C, each less its mean."""
        plan, one, more = self.plan, self.scalars.index(ONE), self.plan.configuration.baseline == "loo"
        raw = Squares(moment, self.a, self.p, self.d, one)
        means = np.array([raw.expect([i])[:, 0] for i in range(self.a)])
        scalar, vector = np.zeros((1 + more, self.p)), np.zeros((1 + more, self.a))
        mixed = np.zeros((1 + more, self.p, self.d))
        scalar[0, one] = 1.0
        vector[0, [self.vectors.index(row) for row in plan.x]] = 1.0
        if plan.y is not None:
            y = self.vectors.index(plan.y)
            vector[0, y if self.own is None else -1] -= b if self.own is None else 1.0
        if more:
            assert plan.c is not None
            c = self.scalars.index(plan.c)
            scalar[1, c], scalar[1, one], vector[1, y] = 1.0, -b, 1.0
            mixed[0, c], mixed[0, one] = -means[y], b * means[y]
        mixed[:, one] -= vector @ means
        return Map(scalar, vector, mixed)


class Cumulants(NamedTuple):
    """``kappa [C, L]``, N^3 times the summed fourth cumulants of each configuration's N-sequence estimate.

    ``sketched [C]`` says which are means over random directions: right on average, and off by some 54 % of kappa where
    one direction holds the tail (a quarter of the width that follows), by less where many do. NaN where a pass is past
    the limit on its work, and where what cancels leaves less than three digits.
    """

    kappa: Float[np.ndarray, "C L"]
    sketched: Bool[np.ndarray, " C"]


def fourth_cumulants(pair: PolicyPair, found: Sequence[Moments], lengths: Sequence[int], samples: int) -> Cumulants:
    """Exact fourth cumulants where the pair is small enough, sketched ones where it is not.

    Args:
        found: from ``moments``, for the same lengths.
        samples: N, which only leave-one-out over all sequences depends on.

    Raises:
        ValueError: for a length out of range.
    """
    wanted = check_lengths(pair, lengths)
    kappa, small = np.full((len(found), len(wanted)), np.nan), _small(pair, int(wanted.max()))
    with np.errstate(over="ignore", invalid="ignore"):
        if small:
            rows = Rows(pair, dense=True)
            kappa = np.array([_kappas(rows, m, wanted, samples) for m in found])
        sketched = np.isnan(kappa).all(axis=1) & (pair.policy.parameters > _DIRECTIONS)
        sketched &= [m.configuration.baseline != "optimal-per-coordinate" for m in found]
        if sketched.any():
            kappa[sketched] = _sketch(pair, [m for m, at in zip(found, sketched, strict=True) if at], wanted, samples)
    return Cumulants(kappa, sketched)


def _small(pair: PolicyPair, longest: int) -> bool:
    """Whether any configuration could fit: D is at least d, and a token has an edge at least."""
    return 2.0 * longest * pair.policy.parameters**3 <= _MOST_WORK


def _sketch(pair: PolicyPair, found: Sequence[Moments], lengths: np.ndarray, samples: int) -> np.ndarray:
    """``[C, L]`` kappa from those of the gradient along k normal directions, whose mean is k (k + 2) kappa."""
    k, total, rng = _DIRECTIONS, np.zeros((len(found), len(lengths))), np.random.default_rng(0)
    for _ in range(_SKETCHES):
        scores = pair.policy.scores @ rng.standard_normal((pair.policy.parameters, k))
        rows = Rows(replace(pair, policy=replace(pair.policy, scores=scores, theta=np.zeros(k))), dense=True)
        total += np.array([_kappas(rows, m, lengths, samples) for m in found])
    return np.asarray(total / _SKETCHES / (k * (k + 2)))


def _kappas(rows: Rows, m: Moments, lengths: np.ndarray, samples: int) -> np.ndarray:
    if m.found is not None:  # another configuration at each length
        alone = [replace(m, configuration=c, baseline=m.baseline[[i]], found=None) for i, c in enumerate(m.found)]
        return np.concatenate([_kappas(rows, one, lengths[[i]], samples) for i, one in enumerate(alone)])
    plan, out = plan_of(rows, m.configuration), np.full(len(lengths), np.nan)
    baseline, each = m.baseline - plan.taken, m.configuration.baseline == "optimal-per-coordinate"
    for part in [np.array([length]) for length in lengths] if each else [lengths]:
        at = np.flatnonzero(np.isin(lengths, part))
        system = _System(rows, plan, baseline[at[0]] if each else None)
        if system.fits(int(part.max())):
            moment = system.moments(part)
            out[at] = [system.kappa(moment[int(lengths[i])], float(baseline[i, 0]), samples) for i in at]
    return out / m.configuration.divisor**4


def _block(found: Squares, block: Block) -> np.ndarray:
    at = {c: [("A", "Y").index(name[0]) for name in block if name[1:] == c] for c in "jl"}
    return found.expect(at["j"], at["l"], [1] * block.count("c"))
