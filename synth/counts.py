"""Blocks whose outcomes are counts: how often each edge was emitted, and the last context.

Paths that agree in both are one outcome, so a block may be hundreds of tokens long. Counts obey flow equations (a
sequence leaves every context as often as it enters it, but for its first and last), so a few of them say all the
others; only those span the array on which probabilities move, one token at a time. It ends where more of an edge has a
probability below 2^-64: a cumulative sum in double precision cannot tell such outcomes apart from none.

Shapes: E edges in use, S contexts, F counts that are free, O outcomes of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from klgrad.synth.blocks import NEVER, Block, Edges, largest_path_block, path_blocks, split
from klgrad.synth.policies import PolicyPair

_CELLS = 1 << 15  # of the array that moves: it stays in cache
_LONGEST = 512


class Counts:
    """The free counts of a pair's edges, and blocks made from them."""

    def __init__(self, pair: PolicyPair, edges: Edges) -> None:
        self.automaton, self.edges = pair.automaton, edges
        self.probability = np.exp(pair.sampler)[edges.context, edges.token]
        self.successor = self.automaton.next_context[edges.context, edges.token]
        S, E, each = self.automaton.contexts, len(edges), np.arange(len(edges))
        flow = np.zeros((S + 1, E))  # out less in, for each context; the last row is the length, unless some end sooner
        np.add.at(flow, (edges.context, each), 1.0)
        np.add.at(flow, (self.successor, each), -1.0)
        flow[S] = self.automaton.end < 0
        # Gauss-Jordan: the likeliest edges that the equations determine, so that the counts of the others stay small
        each_row = np.arange(S + 1)
        system = np.column_stack([flow, np.eye(S + 1)])
        rows: dict[int, int] = {}  # bound edge -> the equation that gives it
        for edge in np.argsort(-self.probability, kind="stable").tolist():
            size = np.abs(system[:, edge])
            size[list(rows.values())] = 0.0
            row = int(size.argmax())
            if size[row] > 1e-9:
                system[row] /= system[row, edge]
                system -= np.where(each_row != row, system[:, edge], 0.0)[:, None] * system[row]
                rows[edge] = row
        self.bound = np.array(list(rows), np.intp)
        self.free = np.delete(each, self.bound)
        solved = system[np.array(list(rows.values()), np.intp)]
        self.from_flow, self.from_free = solved[:, E:].T, -solved[:, self.free].T

    def most(self, k: int) -> np.ndarray:
        """``[F]`` the largest count of each free edge in k tokens that has to be thought of.

        An edge is emitted at most as often as in k independent tries: Chernoff's bound for a binomial tail.
        """
        p, share = self.probability[self.free, None], np.arange(1, k + 1) / k
        with np.errstate(divide="ignore", invalid="ignore"):
            rest = np.where(share < 1, (1 - share) * np.log((1 - share) / (1 - p)), 0.0)
            bound = -k * (share * np.log(share / p) + rest)
        return ((bound > math.log(NEVER)) | (share <= p)).sum(axis=1)

    def largest(self, longest: int, origins: int) -> int:
        """The longest block that stays small, when made from so many contexts; 0 if even one token does not."""

        def fits(k: int) -> bool:
            cells = origins * self.automaton.contexts * float(np.prod(self.most(k) + 1.0))
            return cells <= _CELLS

        low, high = 0, min(longest, _LONGEST)
        if fits(high):
            return high
        while low < high:  # low fits, what is above high does not
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low

    def blocks(self, sizes: Sequence[int], origins: np.ndarray) -> dict[int, Block]:
        """Blocks of the given sizes from the given contexts."""
        wanted, S = set(sizes), self.automaton.contexts
        shape = (len(origins), S, *(self.most(max(sizes)) + 1).tolist())
        now, after = np.zeros(shape), np.zeros(shape)
        now.reshape(len(origins), S, -1)[np.arange(len(origins)), origins, 0] = 1.0
        moves = self._moves(now, after), self._moves(after, now)
        blocks: dict[int, Block] = {}
        for k in range(1, max(sizes) + 1):
            first, more = moves[1 - k % 2]
            for probability, source, target in first:
                np.multiply(source, probability, out=target)
            for probability, source, target, part in more:
                np.multiply(source, probability, out=part)
                np.add(target, part, out=target)
            now, after = after, now
            if k in wanted:
                few = tuple(slice(int(most) + 1) for most in self.most(k))  # as if no longer block were made
                blocks[k] = self._block(k, now[:, :, *few], origins)
        return blocks

    def _moves(self, now: np.ndarray, after: np.ndarray) -> tuple[list[Any], list[Any]]:
        """Views between which each edge moves probability: for each context one that fills it, then those that add.

        An edge's own count, if free, goes up by one.
        """
        S, end, free = self.automaton.contexts, self.automaton.end, self.free.tolist()
        edges = [
            (float(p), s, to, free.index(e) if e in free else -1)
            for e, (p, s, to) in enumerate(
                zip(self.probability, self.edges.context.tolist(), self.successor.tolist(), strict=True)
            )
        ]
        if end >= 0:
            edges.append((1.0, end, end, -1))  # padding
        first: dict[int, Any] = {s: (0.0, now[:, s], after[:, s]) for s in range(S)}
        more: list[Any] = []
        for p, s, to, axis in sorted(edges, key=lambda edge: edge[3]):
            if axis < 0 and first[to][0] == 0.0:
                first[to] = (p, now[:, s], after[:, to])
                continue
            up, down = [slice(None)] * (now.ndim - 1), [slice(None)] * (now.ndim - 1)
            if axis >= 0:
                up[1 + axis], down[1 + axis] = slice(1, None), slice(None, -1)
            source = now[:, s][tuple(down)]
            more.append((p, source, after[:, to][tuple(up)], np.empty(source.shape)))
        return list(first.values()), more

    def _block(self, k: int, probability: np.ndarray, origins: np.ndarray) -> Block:
        """The outcomes that have a probability, with all their counts."""
        at = np.nonzero(probability > NEVER / probability.size)
        origin, last, free = at[0], at[1], np.stack(at[2:], axis=1) if len(self.free) else np.zeros((len(at[0]), 0))
        flow = np.zeros((len(origin), self.automaton.contexts + 1))
        each = np.arange(len(origin))
        np.add.at(flow, (each, origins[origin]), 1.0)
        np.add.at(flow, (each, last), -1.0)
        flow[:, -1] = k * (self.automaton.end < 0)
        counts = np.empty((len(origin), len(self.edges)))
        counts[:, self.free], counts[:, self.bound] = free, np.rint(flow @ self.from_flow + free @ self.from_free)
        return Block(len(origins), origin, probability[at], last, counts=counts)


def plan(pair: PolicyPair, edges: Edges, lengths: Iterable[int], keep: str) -> dict[int, list[Block]]:
    """The blocks of each length: of counts where those are the longer ones, else of whole paths.

    They do not depend on the other lengths, so neither do the numbers drawn. One block for the whole sequence starts
    at the start alone; several start anywhere.

    Args:
        keep: as in ``path_blocks``; only ``counts`` alone can be moved as counts.
    """
    contexts = pair.automaton.contexts
    counts = Counts(pair, edges) if keep == "counts" else None
    chosen: dict[int, tuple[tuple[bool, bool], list[int]]] = {}
    wanted: dict[tuple[bool, bool], set[int]] = {}
    for length in map(int, lengths):
        most, largest = largest_path_block(edges, contexts, length), 0
        if counts is not None:
            whole = counts.largest(length, 1)
            largest = whole if whole == length else counts.largest(length, contexts)
        sizes = split(length, max(most, largest))
        kind = counts is not None and largest >= most, len(sizes) == 1
        chosen[length] = kind, sizes
        wanted.setdefault(kind, set()).update(sizes)
    made: dict[tuple[bool, bool], dict[int, Block]] = {}
    for (counted, alone), needed in wanted.items():
        origins = np.array([pair.automaton.start]) if alone else np.arange(contexts)
        made[counted, alone] = (
            counts.blocks(sorted(needed), origins)
            if counts is not None and counted
            else path_blocks(pair, edges, sorted(needed), origins, keep)
        )
    return {length: [made[kind][size] for size in sizes] for length, (kind, sizes) in chosen.items()}
