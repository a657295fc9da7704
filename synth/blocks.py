"""Blocks of tokens, each with its exact distribution, ready to draw from.

Here a block's outcomes are whole paths; ``counts.py`` merges those that agree in how often each edge (context, token)
was emitted and in the last context, so that hundreds of tokens are one draw.

A draw looks 16 random bits up in a guide table; a bucket that straddles outcomes is resolved exactly with a
further uniform. Where only the number of times matters that each outcome comes, those are one multinomial draw.
Shapes: S contexts, V tokens, E edges in use, O outcomes of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from klgrad.synth.automata import Automaton
from klgrad.synth.policies import PolicyPair

if TYPE_CHECKING:
    from jaxtyping import Float, Int

NEVER = 2.0**-64  # a probability that a cumulative sum in double precision cannot tell from 0
_GUIDE_ENTRIES = 1 << 20
_PATH_OUTCOMES = 1024


class Block:
    """The exact distribution of a block of tokens from each of some contexts, ready to draw from.

    Args:
        origins: how many contexts it may start from.
        origin: ``[O]`` which of them an outcome starts from; outcomes stand in this order.
        probability: ``[O]``, from there; they need not add up to 1.
        successor: ``[O]`` the last context.
        counts: ``[O, E]`` how often an outcome has each edge.
        order: ``[O, E * E]`` how often it has one edge before another.
        edges: ``[O, k]`` its path, the padding edge E where it has ended. Each is there only where a sampler needs it.
    """

    def __init__(
        self,
        origins: int,
        origin: Int[np.ndarray, " O"],
        probability: Float[np.ndarray, " O"],
        successor: Int[np.ndarray, " O"],
        *,
        counts: Float[np.ndarray, "O E"] | None = None,
        order: Float[np.ndarray, "O EE"] | None = None,
        edges: Int[np.ndarray, "O k"] | None = None,
    ) -> None:
        self.origins, self.origin = origins, origin
        self.probability, self.successor = probability, successor
        self.counts, self.order, self.edges = counts, order, edges
        self.bits = int(np.clip(math.log2(_GUIDE_ENTRIES / origins), 4, 16))
        self.base = successor << self.bits  # where the successor's part of the guide starts

    @cached_property
    def cumulative(self) -> np.ndarray:
        """``[O]`` the origin's number plus the probability of its outcomes up to this one, as shares of theirs all."""
        origin, total = self.origin, np.cumsum(self.probability)
        last = np.append(np.flatnonzero(np.diff(origin)), len(origin) - 1)
        before = np.zeros(self.origins)
        before[origin[last[1:]]] = total[last[:-1]]
        mass = np.ones(self.origins)
        mass[origin[last]] = total[last] - before[origin[last]]
        upper = origin + np.minimum((total - before[origin]) / mass[origin], 1.0)
        upper[last] = origin[last] + 1.0
        return upper

    @cached_property
    def guide(self) -> np.ndarray:
        """Bucket -> outcome where one outcome covers the bucket, else -1."""
        upper = self.cumulative * (1 << self.bits)  # exact: a power of two
        first, beyond = np.ceil(np.append(0.0, upper[:-1])).astype(int), np.floor(upper).astype(int)
        sure = np.flatnonzero(first < beyond)  # outcomes that cover whole buckets, first to beyond - 1
        bounds = np.column_stack([first[sure], beyond[sure]]).ravel()
        value = np.full(len(bounds) + 1, -1, np.int16 if len(upper) < 1 << 15 else np.int32)
        value[1::2] = sure
        return np.repeat(value, np.diff(bounds, prepend=0, append=self.origins << self.bits))

    def draw(self, n: int, context: np.ndarray | int, rng: np.random.Generator) -> Int[np.ndarray, " n"]:
        """``[n]`` outcomes, given each sequence's offset into the guide (``base``), or the one they share."""
        bucket = rng.bit_generator.random_raw((n + 3) // 4).view(np.uint16)[:n]
        if self.bits < 16:
            bucket = bucket >> np.uint16(16 - self.bits)
        outcome = self.guide[context:].take(bucket) if isinstance(context, int) else self.guide.take(context + bucket)
        unsure = np.flatnonzero(outcome < 0)
        if unsure.size:
            origin = (context if isinstance(context, int) else context.take(unsure)) >> self.bits
            fine = (bucket.take(unsure) + rng.random(unsure.size)) / (1 << self.bits)
            below = np.nextafter(origin + 1.0, 0.0)  # where the sum is rounded up, still this origin's last outcome
            outcome[unsure] = np.searchsorted(self.cumulative, np.minimum(origin + fine, below), side="right")
        return outcome

    def common(self, size: int) -> Int[np.ndarray, " c"]:
        """Outcomes that are expected at least once among ``size`` draws, the likeliest first."""
        likeliest = np.argsort(-self.probability, kind="stable")
        return likeliest[: np.count_nonzero(self.probability * size >= 1.0)]

    def tally(self, units: int, size: int, common: Int[np.ndarray, " c"], rng: np.random.Generator) -> np.ndarray:
        """``[units, O]`` how often each outcome comes in ``size`` draws; of a block with one origin.

        The common ones are binomials, each given those before it, and the others are drawn one by one: the probability
        that is left never comes near 0, where rounding would decide.
        """
        rare = np.delete(np.arange(len(self.probability)), common)
        below = np.cumsum(self.probability[rare])
        total = below[-1] if rare.size else 0.0
        shares = np.append(total, self.probability[common])
        drawn = rng.multinomial(size, shares / shares.sum(), units)
        seen = np.zeros((units, len(self.probability)))
        seen[:, common] = drawn[:, 1:]
        unit = np.arange(units).repeat(drawn[:, 0])
        which = np.searchsorted(below, rng.random(unit.size) * total, "right")  # the product is less than total
        np.add.at(seen, (unit, rare[which]), 1.0)
        return seen


class Edges:
    """The (context, token) pairs in use under the sampler, numbered; ``number [S, V]`` is E where unused."""

    def __init__(
        self, context: Int[np.ndarray, " E"], token: Int[np.ndarray, " E"], number: Int[np.ndarray, "S V"]
    ) -> None:
        self.context, self.token, self.number = context, token, number

    def __len__(self) -> int:
        return len(self.context)


def edges_in_use(pair: PolicyPair) -> Edges:
    """The edges that the sampler can emit from a context it can reach."""
    used = pair.possible
    context, token = np.nonzero(used)
    number = np.full(used.shape, len(context))
    number[context, token] = np.arange(len(context))
    return Edges(context, token, number)


def _moves(automaton: Automaton, edges: Edges) -> np.ndarray:
    """``[S, V]`` every way on from each context; after the end, token 0 stands for padding."""
    moves = edges.number < len(edges)
    if automaton.end >= 0:
        moves[automaton.end, 0] = True
    return moves


def path_blocks(
    pair: PolicyPair, edges: Edges, sizes: Sequence[int], origins: Int[np.ndarray, " S"], keep: str
) -> dict[int, Block]:
    """Blocks of the given sizes from the given contexts, whose outcomes are whole paths that can be drawn.

    Args:
        keep: what is kept of a path: its ``edges``, its ``counts``, or its counts and ``order``.
    """
    automaton, wanted, E = pair.automaton, set(sizes), len(edges)
    probs = np.exp(pair.sampler)
    now, origin = origins, np.arange(len(origins))
    path, probability = np.zeros((len(origins), 0), np.int32), np.ones(len(origins))
    moves = _moves(automaton, edges)
    blocks: dict[int, Block] = {}
    for k in range(1, max(sizes) + 1):
        source, token = np.nonzero(moves[now])
        edge = edges.number[now[source], token].astype(np.int32)
        probability = probability[source] * np.where(edge == E, 1.0, probs[now[source], token])
        drawn = probability > NEVER / len(probability)  # the others' importance ratios can be infinite
        source, token, edge, probability = source[drawn], token[drawn], edge[drawn], probability[drawn]
        path = np.column_stack([path[source], edge])
        now, origin = automaton.next_context[now[source], token], origin[source]
        if k in wanted:
            parts: dict[str, np.ndarray] = {"edges": path}
            if keep != "edges":
                hot = np.eye(E + 1)[path][..., :E]
                parts = {"counts": hot.sum(axis=1)}
            if keep == "order":
                before = np.cumsum(hot, axis=1) - hot
                parts["order"] = np.einsum("oka,okb->oab", before, hot).reshape(-1, E * E)
            blocks[k] = Block(len(origins), origin, probability, now, **parts)
    return blocks


def split(length: int, most: int) -> list[int]:
    """Block sizes that add up to the length: as few and as even as ``most`` allows."""
    blocks = -(-length // most)
    return [length // blocks + (i < length % blocks) for i in range(blocks)]


def largest_path_block(edges: Edges, contexts: int, longest: int) -> int:
    """The block up to which whole paths, of all contexts, stay few."""
    branching = max(2, int(np.bincount(edges.context).max()))
    room = max(2, min(_PATH_OUTCOMES, (1 << 17) // contexts))
    return max(1, min(longest, int(math.log(room) / math.log(branching) + 1e-9)))
