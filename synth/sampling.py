"""Sequences drawn into sufficient statistics.

Three samplers, one per request, chosen by what the configurations need:

- ``counts``: gradients that depend on how often each token was emitted where, not on the order (whole-sequence or
  own-token credit). Paths that agree in their counts and their last context are one outcome, so hundreds of tokens
  are one draw from their exact distribution.
- ``ordered``: reward-to-go as well, which needs how often one token came before another; blocks of whole paths.
- ``paths``: everything; tokens are kept for one batch and reduced.

Sequences are drawn in the blocks of ``blocks.py``. Sums are kept per *unit* of consecutive sequences, the smallest
leave-one-out group.
Shapes: E edges (context, token) in use, U units, d parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from klgrad.synth.blocks import Block, Edges, edges_in_use
from klgrad.synth.configurations import Configuration, credit_sums, importance_ratios, loss_weights
from klgrad.synth.counts import plan
from klgrad.synth.memory import keep_freed_memory
from klgrad.synth.policies import PolicyPair
from klgrad.synth.rows import edge_pathwise, edge_values

if TYPE_CHECKING:
    from jaxtyping import Float, Int

MAX_EDGES = 16  # for count and order statistics
_BATCH_TOKENS = 1 << 19
_BATCH_SEQUENCES = 1 << 18
_FEW = 4  # outcomes for each sequence of a unit, up to which they are counted
_EXACT = 1 << 24  # whole numbers up to which float32, twice as quick as float64, is exact
_MANY = 28  # sequences of a unit for each common outcome, from which a binomial for each of these is quicker
_KEPT = {"counts": "counts", "ordered": "order", "paths": "edges"}  # of a path


class Sums(NamedTuple):
    """Sums over each unit's sequences, for one configuration at one length.

    The N-sequence estimate is ``(x - b y) / N``, or leave-one-out from ``y``, ``cy`` and ``c``.

    Args:
        x: ``[U, d]`` gradients at b = 0.
        y: ``[U, d]`` sum_t omega(t) p_t / D.
        cy: ``[U, d]`` the same weighted with each sequence's C.
        c: ``[U]`` C, the sum of values.
        estimate: ``[U]`` the KL value estimates, sum_t lambda_t c_t / D.
    """

    x: Float[np.ndarray, "U d"]
    y: Float[np.ndarray, "U d"]
    cy: Float[np.ndarray, "U d"]
    c: Float[np.ndarray, " U"]
    estimate: Float[np.ndarray, " U"]


def order_free(configuration: Configuration) -> bool:
    """Whether the gradient depends on edge counts alone."""
    return configuration.ratio != "prefix" and (
        configuration.credit in ("whole", "token") or not configuration.in_reward
    )


def _order_linear(configuration: Configuration) -> bool:
    return configuration.ratio in ("none", "token") and configuration.aggregation != "length-mean"


def sampler_name(pair: PolicyPair, configurations: Sequence[Configuration]) -> str:
    """``counts``, ``ordered`` or ``paths``: the one sampler that serves all the configurations."""
    if len(edges_in_use(pair)) > MAX_EDGES:
        return "paths"
    if all(order_free(c) for c in configurations):
        return "counts"
    return "ordered" if all(order_free(c) or _order_linear(c) for c in configurations) else "paths"


class _Tables(NamedTuple):
    """A configuration's terms on the edges, ``[E]`` or ``[E, d]``.

    ``score`` and ``pathwise`` carry a token ratio, ``plain_`` ones do not: paths weigh their own tokens.
    """

    configuration: Configuration
    value: np.ndarray
    score: np.ndarray
    pathwise: np.ndarray
    loss_weight: np.ndarray
    plain_score: np.ndarray
    plain_pathwise: np.ndarray


def _tables(pair: PolicyPair, edges: Edges, configuration: Configuration) -> _Tables:
    at = (edges.context, edges.token)
    rho = pair.importance_ratio[at]
    own = rho if configuration.ratio == "token" else np.ones_like(rho)
    weight = np.ones_like(rho) if configuration.estimator.full else own
    score = pair.policy.scores[at]
    pathwise = edge_pathwise(pair, configuration)[at] if configuration.in_loss else np.zeros_like(score)
    value = edge_values(pair, configuration)[at]
    return _Tables(configuration, value, own[:, None] * score, weight[:, None] * pathwise, weight, score, pathwise)


def _linear(table: _Tables, *, ordered: bool) -> np.ndarray:
    """``[E + E^2 (+ E^2), 3d + 1]`` x, y, cy and the estimate as they follow from sums of n, n n^T and the order."""
    value, score, credit = table.value, table.score, table.configuration.credit
    E, d = score.shape
    in_reward, nothing = table.configuration.in_reward, np.zeros((E * E, d))
    own = value[:, None] * score if in_reward and credit in ("token", "rtg") else 0.0
    crossed = (value[:, None, None] * score).reshape(E * E, d)  # value of the first edge, score of the second
    before = (score[:, None] * value[:, None]).reshape(E * E, d)
    rows = [
        np.column_stack([table.pathwise + own, score, nothing[:E], table.loss_weight * value]),
        np.column_stack([crossed if in_reward and credit == "whole" else nothing, nothing, crossed, nothing[:, :1]]),
    ]
    if ordered:
        future = in_reward and credit in ("rtg", "future")
        rows.append(np.column_stack([before if future else nothing, nothing, nothing, nothing[:, :1]]))
    return np.concatenate(rows) / table.configuration.divisor


class Sampler:
    """Draws sequences of a pair and reduces them to each configuration's ``Sums``.

    Args:
        pair: the pair; its sampler draws.
        configurations: what is to be estimated; all on the same sequences.
        lengths: the lengths that will be asked for.
    """

    def __init__(self, pair: PolicyPair, configurations: Sequence[Configuration], lengths: Sequence[int]) -> None:
        keep_freed_memory()
        self.pair, self.configurations = pair, list(configurations)
        self.name = sampler_name(pair, configurations)
        self.of_outcomes: dict[int, dict[tuple[bool, bool], np.ndarray]] = {}  # by length, made at its first draw
        self.edges = edges_in_use(pair)
        at = (self.edges.context, self.edges.token)
        self.log_rho = (
            pair.policy.log_probs[at] - pair.sampler[at]
        )  # finite where the ratio itself is not: 0 x inf is NaN
        self.tables = [_tables(pair, self.edges, configuration) for configuration in configurations]
        if self.name != "paths":
            self.values, self.linear = self._reduction()
        self.plan = plan(pair, self.edges, lengths, keep=_KEPT[self.name])

    def sums(self, length: int, units: int, size: int, rng: np.random.Generator) -> list[Sums]:
        """Draw ``units`` x ``size`` sequences of the length and reduce them, one ``Sums`` per configuration."""
        if self.name == "paths":
            return self._paths(length, units, size, rng)
        block, *more = self.plan[length]
        few = not more and len(block.successor) <= _FEW * size  # whole sequences are one outcome each
        if few and len(common := block.common(size)) * _MANY <= size:
            return self._from_tally(length, block.tally(units, size, common, rng))
        draw = self._tallied if few else self._counts if self.name == "counts" else self._ordered
        most = max(1, _BATCH_SEQUENCES // units)  # large units come in parts, so memory does not grow with N
        return _total(draw(length, units, min(most, size - first), rng) for first in range(0, size, most))

    def outcomes(self, length: int, n: int, rng: np.random.Generator) -> Iterator[tuple[Block, np.ndarray]]:
        """Yield ``(block, outcome [n])`` for each block of n sequences of the length."""
        drawn: tuple[Block, np.ndarray] | None = None
        start = 0 if len(self.plan[length]) == 1 else int(self.pair.automaton.start)
        for block in self.plan[length]:
            context = start << block.bits if drawn is None else drawn[0].base.take(drawn[1])
            drawn = block, block.draw(n, context, rng)
            yield drawn

    def paths(self, length: int, n: int, rng: np.random.Generator) -> Int[np.ndarray, "n T"]:
        """``[n, T]`` edges of n sequences; E where a sequence has ended. For the ``paths`` sampler."""
        drawn = list(self.outcomes(length, n, rng))
        parts, i = [], 0
        while i < len(drawn):  # blocks of one size together: one gather, written in order
            block = drawn[i][0]
            same = [outcome for other, outcome in drawn[i:] if other is block]
            assert block.edges is not None
            parts.append(block.edges.take(np.stack(same, axis=1), axis=0).reshape(n, -1))
            i += len(same)
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    # -- counts: per unit, sums of edge counts n and of their products n n^T, under each weight a configuration needs

    def _reduction(self) -> tuple[np.ndarray, dict[tuple[bool, bool], tuple[list[int], np.ndarray]]]:
        """``[E, C]`` values, and for each weight (sequence ratio, 1 / |y|) its configurations and their maps."""
        groups: dict[tuple[bool, bool], list[int]] = {}
        for i, configuration in enumerate(self.configurations):
            key = (configuration.ratio == "sequence", configuration.aggregation == "length-mean")
            groups.setdefault(key, []).append(i)
        maps = [_linear(table, ordered=self.name == "ordered") for table in self.tables]
        linear = {key: (members, np.concatenate([maps[i] for i in members], axis=1)) for key, members in groups.items()}
        return np.stack([table.value for table in self.tables], axis=1), linear

    def _tallied(self, length: int, units: int, size: int, rng: np.random.Generator) -> list[Sums]:
        ((block, outcome),) = self.outcomes(length, units * size, rng)
        return self._from_tally(length, _seen(outcome, units, size, len(block.successor)).astype(float))

    def _counts(self, length: int, units: int, size: int, rng: np.random.Generator) -> list[Sums]:
        (block, outcome), *more = self.outcomes(length, units * size, rng)
        assert block.counts is not None
        n = block.counts.take(outcome, axis=0, mode="clip")
        drawn = np.empty_like(n) if more else n
        for block, outcome in more:
            assert block.counts is not None
            n += block.counts.take(outcome, axis=0, out=drawn, mode="clip")
        return self._from_counts(n.reshape(units, size, -1), None)

    def _weights(self, n: np.ndarray) -> dict[tuple[bool, bool], np.ndarray | None]:
        """The weight of sequences with these counts ``[..., E]``, for every kind that is needed; None for 1."""
        out: dict[tuple[bool, bool], np.ndarray | None] = {}
        for by_ratio, by_length in self.linear:
            weight = np.exp(n @ self.log_rho) if by_ratio else None
            if by_length:
                weight = (1.0 if weight is None else weight) / n.sum(axis=-1)
            out[by_ratio, by_length] = weight
        return out

    def _from_tally(self, length: int, seen: np.ndarray) -> list[Sums]:
        """As ``_from_counts``, from how often each outcome came."""
        whole = self.plan[length][0]
        n = whole.counts
        assert n is not None
        if length not in self.of_outcomes:
            order = () if whole.order is None else (whole.order,)
            self.of_outcomes[length] = {
                key: np.column_stack([w, (n[:, :, None] * w[:, None]).reshape(len(n), -1), *order])
                for key, weight in self._weights(n).items()
                for w in [n if weight is None else n * weight[:, None]]
            }
        return self._sums(seen @ n, {key: seen @ table for key, table in self.of_outcomes[length].items()})

    def _from_counts(self, n: np.ndarray, order: np.ndarray | None) -> list[Sums]:
        swapped, ones = n.transpose(0, 2, 1), np.ones(n.shape[1])
        plain = ones @ n  # as a product: numpy's sum over a middle axis is ten times slower
        statistics = {}
        for key, weight in self._weights(n).items():
            single, weighted = plain, n
            if weight is not None:
                weighted = n * weight[..., None]
                single = ones @ weighted
            parts = [single, (swapped @ weighted).reshape(len(n), -1), *(() if order is None else (order,))]
            statistics[key] = np.concatenate(parts, axis=1)
        return self._sums(plain, statistics)

    def _sums(self, plain: np.ndarray, statistics: dict[tuple[bool, bool], np.ndarray]) -> list[Sums]:
        """From ``[U, E]`` sums of n and, under each weight, of n, n n^T and the order."""
        c, d, out = plain @ self.values, self.pair.policy.parameters, {}
        for key, (members, matrix) in self.linear.items():
            found = (statistics[key] @ matrix).reshape(len(plain), len(members), -1)
            for k, i in enumerate(members):
                x, y, cy = (found[:, k, a : a + d] for a in (0, d, 2 * d))
                out[i] = Sums(x, y, cy, c[:, i], found[:, k, -1])
        return [out[i] for i in range(len(self.tables))]

    # -- ordered: as counts, and per unit the sum of how often edge a came before edge b

    def _ordered(self, length: int, units: int, size: int, rng: np.random.Generator) -> list[Sums]:
        E = len(self.edges)
        largest = size * length * -(-length // len(self.plan[length]))  # of what is summed below, over a block's tokens
        number = np.float32 if largest <= _EXACT else np.float64
        n = np.zeros((units * size, E), number)
        drawn = np.empty_like(n)
        order = np.zeros((units, E * E))
        for block, outcome in self.outcomes(length, units * size, rng):
            assert block.counts is not None
            assert block.order is not None
            order += _orders(block.order.astype(number, copy=False), outcome, units, size)
            block.counts.astype(number, copy=False).take(outcome, axis=0, out=drawn, mode="clip")
            before = n.reshape(units, size, E).transpose(0, 2, 1)
            order += (before @ drawn.reshape(units, size, E)).reshape(units, E * E)
            n += drawn
        return self._from_counts(n.reshape(units, size, E).astype(float, copy=False), order)

    # -- paths: tokens of one batch, weighted by the formula, collected by unit and edge

    def _paths(self, length: int, units: int, size: int, rng: np.random.Generator) -> list[Sums]:
        E, d = len(self.edges), self.pair.policy.parameters
        rows = max(1, _BATCH_TOKENS // length)
        totals = [
            Sums(*(np.zeros((units, d)) for _ in range(3)), *(np.zeros(units) for _ in range(2))) for _ in self.tables
        ]
        for first in range(0, units * size, rows):
            unit = np.arange(first, min(first + rows, units * size)) // size
            here = slice(int(unit[0]), int(unit[-1]) + 1)
            batch = _Batch(self.paths(length, len(unit), rng), unit - unit[0], E, self.log_rho)
            for total, table in zip(totals, self.tables, strict=True):
                for whole, part in zip(total, batch.sums(table), strict=True):
                    whole[here] += part
        return totals


def _seen(outcome: np.ndarray, units: int, size: int, outcomes: int) -> np.ndarray:
    """``[U, O]`` how often each outcome came in each unit."""
    place = outcome.reshape(units, size) + np.arange(0, units * outcomes, outcomes)[:, None]
    return np.bincount(place.ravel(), minlength=units * outcomes).reshape(units, outcomes)


def _orders(order: np.ndarray, outcome: np.ndarray, units: int, size: int) -> np.ndarray:
    """``[U, E * E]`` sums over a unit's outcomes of the rows of ``order [O, E * E]``."""
    outcomes, pairs = order.shape
    if outcomes <= _FEW * size:
        return _seen(outcome, units, size, outcomes).astype(order.dtype) @ order
    step, found = max(1, _BATCH_TOKENS // (size * pairs)), np.empty((units, pairs), order.dtype)
    for first in range(0, units, step):
        each = order.take(outcome[first * size : (first + step) * size], axis=0)
        each.reshape(-1, size, pairs).sum(axis=1, out=found[first : first + step])
    return found


class _Batch:
    """One batch of paths, reduced for one configuration after another; what they share is computed once.

    Weights are ``[n, T]``, or ``[n, 1]`` where a sequence's tokens have the same.
    """

    def __init__(self, path: np.ndarray, unit: np.ndarray, edges: int, log_rho: np.ndarray) -> None:
        self.path, self.unit, self.units, self.edges = path.astype(np.intp), unit, int(unit[-1]) + 1, edges
        self.log_rho = np.append(log_rho, 0.0)
        self.place = (self.path + (unit * (edges + 1))[:, None]).ravel()
        self.one = np.ones((len(path), 1))
        self.shared: dict[tuple[str, ...], Any] = {}

    def once(self, key: tuple[str, ...], make: Callable[[], Any]) -> Any:
        """The value under the key, made at its first use."""
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]

    def by_edge(self, weight: np.ndarray) -> np.ndarray:
        """``[U, E]`` sum of each token's weight, by unit and edge."""
        each = None if weight is self.one else np.broadcast_to(weight, self.path.shape).ravel()
        found = np.bincount(self.place, each, self.units * (self.edges + 1))
        return found.reshape(self.units, -1)[:, : self.edges].astype(float, copy=False)

    def ratios(self, ratio: str) -> tuple[np.ndarray, np.ndarray]:
        """As ``importance_ratios``."""
        if ratio == "none":
            return self.one, self.one
        log_rho = self.log_rho.take(self.path)
        if ratio == "sequence":
            whole = np.exp(log_rho.sum(axis=1, keepdims=True))
            return whole, whole
        own, before = importance_ratios(ratio, log_rho, np)
        return own, self.one if ratio == "token" else before

    def sums(self, table: _Tables) -> Sums:
        """The configuration's sums over this batch."""
        configuration, ratio, once = table.configuration, table.configuration.ratio, self.once
        key = (str(configuration.estimator), str(configuration.rollout_value))
        shared = (ratio, configuration.aggregation)
        value = once(("value", *key), lambda: np.append(table.value, 0.0).take(self.path))
        c = once(("c", *key), lambda: value.sum(axis=1, keepdims=True))
        own, before = once(("ratio", ratio), lambda: self.ratios(ratio))
        per_token = configuration.aggregation == "length-mean"
        length = once(("length",), lambda: (self.path < self.edges).sum(axis=1, keepdims=True)) if per_token else None

        def collect(weight: np.ndarray, terms: np.ndarray) -> np.ndarray:
            return self.by_edge(weight if length is None else weight / length) @ terms

        def credit() -> np.ndarray:
            if configuration.credit == "whole" and ratio != "prefix":
                return own * c
            inside = before if configuration.estimator.full and ratio == "prefix" else own
            return credit_sums(configuration, value, own, inside, np)

        weight = loss_weights(configuration, own, before)
        kind = "own" if weight is own else "before"
        y = once(("y", *shared), lambda: collect(own, table.plain_score))
        loo = configuration.baseline == "loo"
        cy = once(("cy", *shared, *key), lambda: collect(c * own, table.plain_score)) if loo else np.zeros_like(y)
        parts = []
        if configuration.in_reward:
            reward = ("reward", configuration.credit, *shared, *key)
            parts.append(once(reward, lambda: collect(credit(), table.plain_score)))
        if configuration.in_loss:
            parts.append(once(("loss", kind, *shared, *key), lambda: collect(weight, table.plain_pathwise)))
        estimate = once(("estimate", kind, *shared, *key), lambda: self._estimate(weight, value, c, length))
        return _scaled(Sums(sum(parts), y, cy, self._by_unit(c[:, 0]), self._by_unit(estimate)), configuration)

    @staticmethod
    def _estimate(weight: np.ndarray, value: np.ndarray, c: np.ndarray, length: np.ndarray | None) -> np.ndarray:
        """``[n]`` sum of weighted values."""
        total = weight * c if weight.shape[1] == 1 else (weight * value).sum(axis=1, keepdims=True)
        return (total if length is None else total / length)[:, 0]

    def _by_unit(self, each: np.ndarray) -> np.ndarray:
        return np.bincount(self.unit, each, self.units)


def _total(parts: Iterable[list[Sums]]) -> list[Sums]:
    """Sums over batches, configuration by configuration; one batch is held at a time."""
    return reduce(lambda a, b: [_plus(x, y) for x, y in zip(a, b, strict=True)], parts)


def _scaled(sums: Sums, configuration: Configuration) -> Sums:
    if configuration.divisor == 1.0:
        return sums
    D = configuration.divisor
    return sums._replace(x=sums.x / D, y=sums.y / D, cy=sums.cy / D, estimate=sums.estimate / D)


def _plus(a: Sums, b: Sums) -> Sums:
    return Sums(a.x + b.x, a.y + b.y, a.cy + b.cy, a.c + b.c, a.estimate + b.estimate)


def estimates(
    configuration: Configuration, sums: Sums, trials: int, samples: int, baseline: Float[np.ndarray, " d"]
) -> tuple[Float[np.ndarray, "trials d"], Float[np.ndarray, " trials"]]:
    """``[trials, d]`` gradient and ``[trials]`` KL value estimates of ``samples`` sequences each.

    Args:
        sums: one row per unit; units of a trial, and of a leave-one-out group, follow each other.
        baseline: ``[d]`` the constant b of other baselines.
    """
    value = sums.estimate.reshape(trials, -1).sum(axis=1) / samples
    x = sums.x.reshape(trials, -1, sums.x.shape[1]).sum(axis=1)
    if configuration.baseline == "none":
        return x / samples, value
    if configuration.baseline != "loo":
        y = sums.y.reshape(trials, -1, x.shape[1]).sum(axis=1)
        return (x - baseline * y) / samples, value
    group = configuration.group(samples)
    groups = trials * (samples // group)
    y, cy = (a.reshape(groups, -1, x.shape[1]).sum(axis=1) for a in (sums.y, sums.cy))
    c = sums.c.reshape(groups, -1).sum(axis=1)[:, None]
    others = ((c * y - cy) / (group - 1)).reshape(trials, -1, x.shape[1]).sum(axis=1)
    return (x - others) / samples, value
