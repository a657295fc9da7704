"""Products of rows, carried from length to length: what second moments are read from.

With z' = L(s, v) z for each token, ``M_t[s] = E[z z^T ; context = s]`` obeys

    M_{t+1}[s'] = sum over (s, v) -> s' of mu(v|s) L M_t[s] L^T.

Only the products of rows that are asked for are carried, and what they need in turn. With an end, what arrives there at
length t is collected with the powers of 1/t that a length mean asks for. Cost is linear in the length, memory does
not depend on it.

Shapes: L lengths asked for, S contexts, V tokens, d parameters, m products of rows, r of them asked for, n coordinates
(d, or d^2 pairs of them for a full covariance).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from klgrad.synth.memory import keep_freed_memory
from klgrad.synth.rows import Row, Rows

_DENSE_WORK = 3e7  # multiply-adds of one operator product up to which doubling beats stepping
_CHUNK, _HIGHEST_POWER = 256, 64

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
        # Rows and products are known by numbers, whose hashes are cheap: product (a, b) of R rows is a R + b
        self.number = {row: i for i, row in enumerate(sorted(rows.update))}
        numbered: list[list[tuple[int, int]]] = [[] for _ in self.number]
        for row, update in rows.update.items():
            numbered[self.number[row]] = [
                (self.number[source], len(self.updates) + i) for i, (source, _) in enumerate(update)
            ]
            self.updates += [coefficient for _, coefficient in update]
        R = len(numbered)
        self.index: dict[int, int] = {}
        for product in wanted:
            self.index.setdefault(self.code(product), len(self.index))
        self.order = list(self.index)
        self.terms: list[tuple[int, int, int, int]] = []  # target, origin, i, j
        for target, known in enumerate(self.order):  # which grows meanwhile
            for a, i in numbered[known // R]:
                for b, j in numbered[known % R]:
                    code = a * R + b if ordered or a <= b else b * R + a
                    origin = self.index.setdefault(code, len(self.order))
                    if origin == len(self.order):
                        self.order.append(code)
                    self.terms.append((target, origin, i, j))

    def code(self, product: Pair) -> int:
        """The product's number; the same for (b, a) where order does not matter."""
        a, b = (self.number[row] for row in product)
        return (a if self.ordered or a <= b else b) * len(self.number) + (b if self.ordered or a <= b else a)

    # Two ways to move the products, chosen by size: both apply the same terms. Each yields, chunk by chunk,
    # (t, running, arrived): [r, k, n] of the products asked for, summed over the contexts that emit, and what of them
    # reached the end, at t + 1 .. t + k.

    def trajectory(self, longest: int, asked: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        size = len(self.order) * self.automaton.contexts
        dense = len(self.left) * float(size) ** 3 <= _DENSE_WORK
        return self._by_doubling(longest, asked) if dense else self._by_steps(longest, asked)

    def _started(self) -> list[int]:
        """Products that are 1 at the empty prefix; all others are 0."""
        initial, R = {self.number[row] for row in self.rows.initial}, len(self.number)
        return [i for i, code in enumerate(self.order) if code // R in initial and code % R in initial]

    def _operator(self) -> np.ndarray:
        """``[n, m, S, m, S]`` the dense operator of every coordinate."""
        m, (S, V), n = len(self.order), self.mu.shape, len(self.left)
        first = self._tables(self.left)
        second = first if self.right is self.left else self._tables(self.right)
        target, origin, i, j = np.array(self.terms).T[..., None]
        used = np.flatnonzero(self.rows.pair.possible)  # also where mu underflows: 0 x inf must not go unseen
        place = ((target * S + self.automaton.next_context.ravel()[used]) * m + origin) * S + used // V
        stacked = first[i, used] * second[j, used] * self.mu.ravel()[used, None]  # [terms, edges, n]
        each = np.arange(n)[:, None, None] * (m * S) ** 2 + place
        flat = np.bincount(each.ravel(), stacked.transpose(2, 0, 1).ravel(), n * (m * S) ** 2)
        return flat.reshape(n, m, S, m, S)

    def _tables(self, coordinates: np.ndarray) -> np.ndarray:
        """``[updates, S V, n]`` every update at the given coordinates."""
        out = np.empty((len(self.updates), *self.mu.shape, len(coordinates)))
        for table, update in zip(out, self.updates, strict=True):
            table[:] = update[..., None] if update.ndim == 2 else self.rows.spread(update)[..., coordinates]
        return out.reshape(len(out), -1, len(coordinates))

    def _by_doubling(self, longest: int, asked: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Dense operator per coordinate; a chunk of lengths by doubling, then by steps of its highest power."""
        keep_freed_memory()
        m, S, n = len(self.order), self.automaton.contexts, len(self.left)
        operator = self._operator().reshape(n, m * S, m * S)
        chunk = min(_CHUNK, longest)
        powers = [operator]
        while 1 << len(powers) <= min(_HIGHEST_POWER, longest - 1):
            powers.append(powers[-1] @ powers[-1])
        start = np.zeros((m, S))
        start[self._started(), self.automaton.start] = 1.0
        last = np.broadcast_to(start.reshape(1, m * S, 1), (n, m * S, 1))
        x = np.empty((n, m * S, chunk))
        alive = self.automaton.alive.astype(float)
        for t in range(0, longest, chunk):
            x[:, :, :1] = operator @ last
            width, most = 1, min(chunk, longest - t)
            while width < most:  # the highest power that reaches back no further than the chunk's first
                power = min(width.bit_length(), len(powers)) - 1
                back = 1 << power
                more = min(back, most - width)
                x[:, :, width : width + more] = powers[power] @ x[:, :, width - back : width - back + more]
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
        to = np.where(used, np.searchsorted(after, system.automaton.next_context[active]), 0)
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
    index = np.array([system.index[system.code((a, b))] for a, b, _ in request])
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
