"""Blocks of tokens, each with its exact distribution from every context, ready to draw from.

A block's outcomes are whole paths, or paths merged where they agree in how often each edge (context, token) was
emitted and in the last context: fifty tokens at a time are then one draw.

A draw looks 16 random bits up in a guide table; a bucket that straddles outcomes is resolved exactly with a
further uniform. Shapes: S contexts, V tokens, E edges in use, O outcomes of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from klgrad.synth.automata import Automaton
from klgrad.synth.policies import PolicyPair

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_GUIDE_ENTRIES = 1 << 20
_COUNT_OUTCOMES = 2048
_PATH_OUTCOMES = 1024


@dataclass(frozen=True, eq=False)
class Block:
    """The exact distribution of a block of tokens from every context, ready to draw from.

    Outcomes of all contexts stand in one list, by context. ``counts [O, E]`` counts the edges of an outcome,
    ``order [O, E * E]`` counts pairs of edges in order, ``edges [O, k]`` is the path (the padding edge E where
    ended); each only where the sampler needs it.
    """

    successor: Int[np.ndarray, " O"]
    cumulative: Float[np.ndarray, " O"]
    guide: Int[np.ndarray, " G"]
    bits: int
    counts: Float[np.ndarray, "O E"] | None = None
    order: Float[np.ndarray, "O EE"] | None = None
    edges: Int[np.ndarray, "O k"] | None = None

    @cached_property
    def base(self) -> np.ndarray:
        """``[O]`` where the successor's part of the guide starts."""
        return self.successor << self.bits

    def draw(self, context: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """``[n]`` outcomes, given each sequence's offset into the guide (``base``)."""
        n = len(context)
        bucket = rng.bit_generator.random_raw((n + 3) // 4).view(np.uint16)[:n]
        if self.bits < 16:
            bucket = bucket >> np.uint16(16 - self.bits)
        outcome = self.guide.take(context + bucket).astype(np.intp)
        unsure = np.flatnonzero(outcome < 0)
        if unsure.size:
            fine = (bucket[unsure] + rng.random(unsure.size)) / (1 << self.bits)
            outcome[unsure] = np.searchsorted(self.cumulative, (context[unsure] >> self.bits) + fine, side="right")
        return outcome


def _block(
    contexts: int, origin: np.ndarray, probability: np.ndarray, successor: np.ndarray, **parts: np.ndarray
) -> Block:
    """Make the guide: bucket -> outcome where one outcome covers the bucket, else -1. ``origin`` is sorted."""
    bits = int(np.clip(math.log2(_GUIDE_ENTRIES / contexts), 4, 16))
    last = np.append(np.flatnonzero(np.diff(origin)), len(origin) - 1)
    total = np.cumsum(probability)
    before = np.zeros(contexts)
    before[origin[last[1:]]] = total[last[:-1]]
    mass = np.ones(contexts)
    mass[origin[last]] = total[last] - before[origin[last]]
    cumulative = origin + np.minimum((total - before[origin]) / mass[origin], 1.0)
    cumulative[last] = origin[last] + 1.0
    upper = cumulative * (1 << bits)  # exact: a power of two
    first, beyond = np.ceil(np.append(0.0, upper[:-1])).astype(int), np.floor(upper).astype(int)
    sure = np.flatnonzero(first < beyond)  # outcomes that cover whole buckets, first to beyond - 1
    bounds = np.column_stack([first[sure], beyond[sure]]).ravel()
    value = np.full(len(bounds) + 1, -1, np.int16 if len(origin) < 1 << 15 else np.int32)
    value[1::2] = sure
    guide = np.repeat(value, np.diff(bounds, prepend=0, append=contexts << bits))
    return Block(successor, cumulative, guide, bits, **parts)


@dataclass(frozen=True, eq=False)
class Edges:
    """The (context, token) pairs in use under the sampler, numbered; ``number [S, V]`` is E where unused."""

    context: Int[np.ndarray, " E"]
    token: Int[np.ndarray, " E"]
    number: Int[np.ndarray, "S V"]

    def __len__(self) -> int:
        return len(self.context)


def edges_in_use(pair: PolicyPair) -> Edges:
    """The edges that the sampler can emit from a context it can reach."""
    used = pair.possible
    context, token = np.nonzero(used)
    number = np.full(used.shape, len(context))
    number[context, token] = np.arange(len(context))
    return Edges(context, token, number)


def count_blocks(pair: PolicyPair, edges: Edges, sizes: Sequence[int]) -> dict[int, Block]:
    """Blocks of the given sizes whose outcomes are edge counts with the last context, merged exactly."""
    automaton, wanted, E = pair.automaton, set(sizes), len(edges)
    contexts, longest = automaton.contexts, max(sizes)
    probs = np.exp(pair.sampler)
    radix = (longest + 1) ** np.arange(E + 1, dtype=np.int64)
    # state = (origin x S + context now) x (longest + 1)^E + packed counts: sorted by origin, then context
    state, probability = np.arange(contexts) * (contexts + 1) * radix[E], np.ones(contexts)
    moved = automaton.next_context - np.arange(contexts)[:, None]
    step = moved * radix[E] + np.append(radix[:E], 0)[edges.number]  # what a token adds to the state
    if automaton.end >= 0:
        probs[automaton.end] = 1.0  # of its padding
    moves = _moves(automaton, edges)
    blocks: dict[int, Block] = {}
    for k in range(1, longest + 1):
        now = state // radix[E] % contexts
        ways = np.flatnonzero(moves.take(now, axis=0))
        emitted = (probability[:, None] * probs.take(now, axis=0)).take(ways)
        state = (state[:, None] + step.take(now, axis=0)).take(ways)
        order = state.argsort(kind="stable")
        state = state.take(order)
        fresh = np.append(0, np.flatnonzero(state[1:] != state[:-1]) + 1)
        state, probability = state.take(fresh), np.add.reduceat(emitted.take(order), fresh)
        if k in wanted:
            place, key = np.divmod(state, radix[E])
            counts = (key[:, None] // radix[:E]) % (longest + 1)
            blocks[k] = _block(contexts, place // contexts, probability, place % contexts, counts=counts.astype(float))
    return blocks


def _moves(automaton: Automaton, edges: Edges) -> np.ndarray:
    """``[S, V]`` every way on from each context; after the end, token 0 stands for padding."""
    moves = edges.number < len(edges)
    if automaton.end >= 0:
        moves[automaton.end, 0] = True
    return moves


def path_blocks(pair: PolicyPair, edges: Edges, sizes: Sequence[int], *, ordered: bool) -> dict[int, Block]:
    """Blocks of the given sizes whose outcomes are whole paths."""
    automaton, wanted, E = pair.automaton, set(sizes), len(edges)
    probs = np.exp(pair.sampler)
    now = origin = np.arange(automaton.contexts)
    path, probability = np.zeros((automaton.contexts, 0), np.int32), np.ones(automaton.contexts)
    moves = _moves(automaton, edges)
    blocks: dict[int, Block] = {}
    for k in range(1, max(sizes) + 1):
        source, token = np.nonzero(moves[now])
        edge = edges.number[now[source], token].astype(np.int32)
        path = np.column_stack([path[source], edge])
        probability = probability[source] * np.where(edge == E, 1.0, probs[now[source], token])
        now, origin = automaton.next_context[now[source], token], origin[source]
        if k in wanted:
            parts: dict[str, np.ndarray] = {"edges": path}
            if ordered:
                hot = np.eye(E + 1)[path][..., :E]
                before = np.cumsum(hot, axis=1) - hot
                parts = {"counts": hot.sum(axis=1), "order": np.einsum("oka,okb->oab", before, hot).reshape(-1, E * E)}
            blocks[k] = _block(automaton.contexts, origin, probability, now, **parts)
    return blocks


def split(length: int, most: int) -> list[int]:
    """Block sizes that add up to the length: as few and as even as ``most`` allows."""
    blocks = -(-length // most)
    return [length // blocks + (i < length % blocks) for i in range(blocks)]


def largest_count_block(edges: Edges, contexts: int, longest: int) -> int:
    """The block up to which counts stay few and pack into 63 bits.

    A path through E edges has at most E minus contexts plus one free counts; outcomes grow with their power.
    """
    free = max(len(edges) - int(np.count_nonzero(np.bincount(edges.context))), 1)
    few = int((_COUNT_OUTCOMES * math.factorial(free)) ** (1 / free))
    packed = int(2.0 ** ((62 - 2 * math.log2(contexts)) / max(len(edges), 1))) - 1
    return max(1, min(longest, few, packed))


def largest_path_block(edges: Edges, contexts: int, longest: int) -> int:
    """The block up to which whole paths, of all contexts, stay few."""
    branching = max(2, int(np.bincount(edges.context).max()))
    room = max(2, min(_PATH_OUTCOMES, (1 << 17) // contexts))
    return max(1, min(longest, int(math.log(room) / math.log(branching) + 1e-9)))
