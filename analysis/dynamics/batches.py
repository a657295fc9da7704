"""The sequences of one update, drawn for many runs at once.

Tokens of a batch are flat edge numbers, ``(run x S + context) x V + token``. Shapes: C runs, N sequences of each,
n = C N, T length, S contexts, V tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from klgrad.synth.configurations import importance_ratios
from klgrad.synth.objectives import Family

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_FEW = 4  # tokens up to which comparisons beat a search


@dataclass(frozen=True, eq=False)
class Batch:
    """The sequences of some runs.

    Args:
        edges: ``[T, n]`` flat edges; those of the end context are padding.
        reward: ``[C, N]`` what each sequence earned.
        log_rho: ``[C, S, V]`` log pi / mu, capped where the algorithm truncates; ``None`` on-policy.
        lengths: ``[n, 1]`` tokens of each sequence.
        shape: (C, S, V).
    """

    edges: Int[np.ndarray, "T n"]
    reward: Float[np.ndarray, "C N"]
    log_rho: Float[np.ndarray, "C S V"] | None
    lengths: Float[np.ndarray, "n 1"]
    shape: tuple[int, int, int]

    @cached_property
    def log_ratios(self) -> np.ndarray:
        """``[n, T]`` of each token; 0 where padded."""
        if self.log_rho is None:
            return np.zeros(self.edges.shape[::-1])
        return self.log_rho.ravel().take(self.edges).T

    @property
    def samples(self) -> int:
        """N."""
        return self.reward.shape[1]

    def ratios(self, ratio: str) -> tuple[np.ndarray, np.ndarray]:
        """``[n, T]`` omega(t, t) and the ratio ahead of token t; ``[n, 1]`` where they do not depend on t."""
        if ratio == "none" or self.log_rho is None:
            one = np.ones((len(self.lengths), 1))
            return one, one
        if ratio == "sequence":
            whole = np.exp(self.log_ratios.sum(axis=1, keepdims=True))
            return whole, whole
        return importance_ratios(ratio, self.log_ratios, np)

    @cached_property
    def counts(self) -> np.ndarray:
        """``[C, S, V]`` how often each edge occurs."""
        return np.bincount(self.edges.ravel(), minlength=int(np.prod(self.shape))).reshape(self.shape)

    def total(self, value: Float[np.ndarray, "C S V"]) -> Float[np.ndarray, "C N"]:
        """Sum over each sequence of the value of each edge; one token at a time stays in cache."""
        table, found = value.ravel(), np.zeros(self.edges.shape[1])
        for edges in self.edges:
            found += table.take(edges)
        return found.reshape(self.shape[0], -1)

    def weigh(self, weight: np.ndarray) -> np.ndarray:
        """Sum of ``weight [n, T]``, or ``[n, 1]``, over the tokens on each edge, as ``[C, S, V]``."""
        size = int(np.prod(self.shape))
        found, by_token = np.zeros(size), np.broadcast_to(np.ascontiguousarray(weight.T), self.edges.shape)
        for edges, each in zip(self.edges, by_token, strict=True):  # one token at a time stays in cache
            found += np.bincount(edges, each, size)
        return found.reshape(self.shape)

    def credited(self, value: Float[np.ndarray, "C S V"], credit: str) -> Float[np.ndarray, "C S V"]:
        """Sum over tokens t of the values of the tokens u in credit, on each edge; ratios are 1.

        ``rtg`` is u >= t, ``future`` u > t, ``token`` u = t. Running sums token by token: a cumulative sum over the
        whole batch takes seven times as long.
        """
        table, size = value.ravel(), value.size
        values, found = [table.take(edges) for edges in self.edges], np.zeros(value.size)
        to_go = np.sum(values, axis=0) if credit != "token" else 0.0
        for edges, now in zip(self.edges, values, strict=True):
            ahead = to_go - now
            found += np.bincount(edges, {"rtg": to_go, "future": ahead, "token": now}[credit], size)
            to_go = ahead
        return found.reshape(self.shape)

    def part(self, rows: slice) -> Batch:
        """The sequences of some of the runs."""
        C, S, V = self.shape
        if (rows.start, rows.stop) == (0, C):
            return self
        columns = slice(rows.start * self.samples, rows.stop * self.samples)
        log_rho = None if self.log_rho is None else self.log_rho[rows]
        return Batch(
            self.edges[:, columns] - rows.start * S * V, self.reward[rows], log_rho, self.lengths[columns],
            (rows.stop - rows.start, S, V),
        )  # fmt: skip


class Sequences:
    """Draws the sequences of C runs of one task, every run from its own policy."""

    def __init__(self, family: Family, runs: int, samples: int) -> None:
        task = family.task
        self.task, self.runs, self.samples = task, runs, samples
        self.S, self.V = task.pair.automaton.next_context.shape
        self.offset = np.arange(runs) * self.S
        each = task.pair.automaton.next_context.ravel()
        self.next = (self.offset[:, None] + each).ravel() * self.V  # [C S V] the first edge of the context after it
        self.end = task.pair.automaton.end
        self.edge_reward = np.tile(task.reward.edge.ravel(), runs) if task.reward.edge.any() else None
        self.terminal = np.repeat(np.tile(task.reward.terminal, runs), self.V)

    def draw(
        self,
        sampler: Float[np.ndarray, "C S V"],
        log_rho: Float[np.ndarray, "C S V"] | None,
        uniform: Float[np.ndarray, "T K N"],
    ) -> Batch:
        """A batch of N sequences of each run under ``sampler``, log-probs, from uniforms of each token.

        Runs take the K streams of uniforms in turn: with K = C each has its own, with K = 1 all draw alike.
        """
        C, N, T, S, V = self.runs, self.samples, self.task.length, self.S, self.V
        below = np.cumsum(np.exp(sampler), axis=2).reshape(C * S, V)
        below /= below[:, -1:]  # the last token takes what rounding leaves
        if self.end >= 0:
            below[self.end :: S] = 1.0  # padding is token 0
        # a context stands for its first edge, so that a token is added to it and not to a product
        search = below + np.arange(C * S)[:, None] if V > _FEW else None
        steps = [np.repeat(below[:, v], V) for v in range(V - 1)] if search is None else []
        turns = (C // uniform.shape[1], uniform.shape[1], N)
        edges = np.empty((T, *turns), np.intp)
        here = np.repeat((self.offset + self.task.pair.automaton.start) * V, N).reshape(turns)
        for t in range(T):
            if search is not None:
                found = np.searchsorted(search.ravel(), (here // V + uniform[t]).ravel(), side="right").reshape(turns)
                np.minimum(found, here + V - 1, out=edges[t])
            else:
                np.add(here, uniform[t] >= steps[0].take(here) if steps else 0, out=edges[t])
                for step in steps[1:]:
                    edges[t] += uniform[t] >= step.take(here)
            here = self.next.take(edges[t])
        flat = edges.reshape(T, C * N)
        lengths = np.full((C * N, 1), float(T))
        if self.end >= 0:
            lengths = ((flat // V) % S != self.end).sum(axis=0, dtype=float)[:, None]
        batch = Batch(flat, self.terminal.take(here).reshape(C, N), log_rho, lengths, (C, S, V))
        return (
            batch if self.edge_reward is None else replace(batch, reward=batch.reward + batch.total(self.edge_reward))
        )
