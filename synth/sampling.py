"""Sequences drawn into sufficient statistics.

Three samplers, one per request, chosen by what the configurations need:

- ``counts``: gradients that depend on how often each token was emitted where, not on the order (whole-sequence or
  own-token credit). Paths that agree in their counts and their last context are one outcome, so hundreds of tokens
  are one draw from their exact distribution.
- ``ordered``: reward-to-go as well, which needs how often one token came before another; blocks of whole paths.
- ``paths``: everything; tokens are kept for one batch and reduced.

Sequences are drawn in the blocks of ``blocks.py`` and ``counts.py``; many of few outcomes are not drawn at all, but how
often each came. Sums are kept per *unit* of consecutive sequences, the smallest leave-one-out group.
Shapes: E edges (context, token) in use, U units, d parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from klgrad.synth.batches import Batch
from klgrad.synth.blocks import Block, edges_in_use
from klgrad.synth.configurations import Configuration
from klgrad.synth.counts import plan
from klgrad.synth.memory import keep_freed_memory
from klgrad.synth.policies import PolicyPair
from klgrad.synth.sums import Sums, Tables, joined, tables, total

if TYPE_CHECKING:
    from jaxtyping import Int

MAX_EDGES = 16  # for count and order statistics
_BATCH_TOKENS = 1 << 19
_BATCH_SEQUENCES = 1 << 18
_FEW = 4  # outcomes for each sequence of a unit, up to which they are counted
_EXACT = 1 << 24  # whole numbers up to which float32, twice as quick as float64, is exact
_MANY = 28  # sequences of a unit for each common outcome, from which a binomial for each of these is quicker
_KEPT = {"counts": "counts", "ordered": "order", "paths": "edges"}  # of a path


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


def _linear(table: Tables, *, ordered: bool) -> np.ndarray:
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
        self.tables = [tables(pair, self.edges, configuration) for configuration in configurations]
        if self.name != "paths":
            self.values, self.linear = self._reduction()
        self.plan = plan(pair, self.edges, lengths, keep=_KEPT[self.name])

    def sums(self, length: int, units: int, size: int, rng: np.random.Generator) -> list[Sums]:
        """Draw ``units`` x ``size`` sequences of the length and reduce them, one ``Sums`` per configuration."""
        if self.name == "paths":
            return self._paths(length, units, size, rng)
        step = max(1, _BATCH_SEQUENCES // size)  # units at once, so memory does not grow with their number
        return joined([self._drawn(length, min(step, units - first), size, rng) for first in range(0, units, step)])

    def _drawn(self, length: int, units: int, size: int, rng: np.random.Generator) -> list[Sums]:
        """As ``sums``, for as many units as are drawn at once."""
        block, *more = self.plan[length]
        few = not more and len(block.successor) <= _FEW * size  # whole sequences are one outcome each
        if few and len(common := block.common(size)) * _MANY <= size:
            return self._from_tally(length, block.tally(units, size, common, rng))
        draw = self._tallied if few else self._counts if self.name == "counts" else self._ordered
        most = max(1, _BATCH_SEQUENCES // units)  # large units come in parts, so memory does not grow with N
        return total(draw(length, units, min(most, size - first), rng) for first in range(0, size, most))

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
            batch = Batch(self.paths(length, len(unit), rng), unit - unit[0], E, self.log_rho)
            for sums, table in zip(totals, self.tables, strict=True):
                for whole, part in zip(sums, batch.sums(table), strict=True):
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
