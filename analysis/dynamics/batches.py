"""One update's sequences, and the gradient that each run makes of them; many runs at once.

Every gradient here is a sum of weights on scores, so it is kept as ``[C, S, V]``: the weight that each token in each
context gets. Tokens of a batch are flat edge numbers, ``(run x S + context) x V + token``. Shapes: C runs, N sequences
of each, n = C N, T length, S contexts, V tokens, d parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.analysis.dynamics.measures import Measures
from klgrad.analysis.dynamics.recipes import Algorithm, is_folded
from klgrad.synth.configurations import Configuration, credit_sums, importance_ratios, loss_weights
from klgrad.synth.moments import moments
from klgrad.synth.objectives import Family

if TYPE_CHECKING:
    from jaxtyping import Float, Int

EPSILON = 1e-4  # beside GRPO's standard deviation, as in TRL
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

    @cached_property
    def counts(self) -> np.ndarray:
        """``[C, S, V]`` how often each edge occurs."""
        return self.weigh(None)

    def weigh(self, weight: np.ndarray | None) -> np.ndarray:
        """Sum of ``weight [n, T]`` (or ``[n, 1]``; ``None`` counts) over the tokens on each edge, as ``[C, S, V]``."""
        shape = self.shape
        if weight is not None:
            weight = np.broadcast_to(weight.T, self.edges.shape).ravel()
        return np.bincount(self.edges.ravel(), weight, int(np.prod(shape))).reshape(shape)

    def part(self, rows: slice) -> Batch:
        """The sequences of some of the runs."""
        C, S, V = self.shape
        first, last, _ = rows.indices(C)
        if (first, last) == (0, C):
            return self
        N = self.reward.shape[1]
        return Batch(
            self.edges[:, first * N : last * N] - first * S * V,
            self.reward[rows],
            None if self.log_rho is None else self.log_rho[rows],
            self.lengths[first * N : last * N],
            (last - first, S, V),
        )


class Sequences:
    """Draws the sequences of C runs of one task, every run from its own policy."""

    def __init__(self, family: Family, runs: int, samples: int) -> None:
        task = family.task
        self.task, self.runs, self.samples = task, runs, samples
        self.S, self.V = task.pair.automaton.next_context.shape
        self.offset = np.arange(runs) * self.S
        each = task.pair.automaton.next_context.ravel()
        self.next = (self.offset[:, None] + each).ravel()  # [C S V] the flat context after each flat edge
        self.end = task.pair.automaton.end
        self.edge_reward = np.tile(task.reward.edge.ravel(), runs) if task.reward.edge.any() else None
        self.terminal = np.tile(task.reward.terminal, runs)

    def draw(
        self,
        sampler: Float[np.ndarray, "C S V"],
        log_rho: Float[np.ndarray, "C S V"] | None,
        rng: np.random.Generator,
        *,
        common: bool = True,
    ) -> Batch:
        """A batch of N sequences of each run under ``sampler``, log-probs; from the same uniforms if ``common``."""
        C, N, T, S, V = self.runs, self.samples, self.task.length, self.S, self.V
        uniform = rng.random((T, N) if common else (T, C, N))
        below = np.cumsum(np.exp(sampler), axis=2).reshape(C * S, V)
        below /= below[:, -1:]  # the last token takes what rounding leaves
        if self.end >= 0:
            below[self.end :: S] = 1.0  # padding is token 0
        search = below + np.arange(C * S)[:, None] if V > _FEW else None
        steps = [np.ascontiguousarray(below[:, v]) for v in range(V - 1)]
        edges = np.empty((T, C, N), np.intp)
        here = np.broadcast_to((self.offset + self.task.pair.automaton.start)[:, None], (C, N))
        for t in range(T):
            if search is not None:
                found = np.searchsorted(search.ravel(), (here + uniform[t]).ravel(), side="right").reshape(C, N)
                np.minimum(found, here * V + V - 1, out=edges[t])
            else:
                np.multiply(here, V, out=edges[t])
                for step in steps:
                    edges[t] += uniform[t] >= step.take(here)
            here = self.next.take(edges[t])
        flat = edges.reshape(T, C * N)
        reward = self.terminal.take(here)
        if self.edge_reward is not None:
            reward = reward + self.edge_reward.take(flat).sum(axis=0).reshape(C, N)
        lengths = np.full((C * N, 1), float(T))
        if self.end >= 0:
            lengths = ((flat // V) % S != self.end).sum(axis=0, dtype=float)[:, None]
        return Batch(flat, reward, log_rho, lengths, (C, S, V))


def advantages(algorithm: Algorithm, reward: Float[np.ndarray, "C N"]) -> Float[np.ndarray, "C N"]:
    """Each sequence's advantage in its group."""
    if algorithm.advantage == "reinforce":
        return reward
    G = algorithm.size
    grouped = reward.reshape(len(reward), -1, G)
    centred = grouped - grouped.mean(axis=2, keepdims=True)
    if algorithm.advantage == "rloo":
        centred = centred * (G / (G - 1))
    elif algorithm.advantage == "grpo":
        centred = centred / (grouped.std(axis=2, ddof=1, keepdims=True) + EPSILON)
    return centred.reshape(reward.shape)


# ------------------------------------------------------------------------------------------------- one update


@dataclass(frozen=True, eq=False)
class Tables:
    """The policies of some runs: ``log_probs``, ``reference``, ``sampler``, each ``[C, S, V]``."""

    log_probs: Float[np.ndarray, "C S V"]
    reference: Float[np.ndarray, "C S V"]
    sampler: Float[np.ndarray, "C S V"]
    alive: np.ndarray

    def part(self, rows: slice) -> Tables:
        """Those of some of the runs."""
        return Tables(self.log_probs[rows], self.reference[rows], self.sampler[rows], self.alive)

    def values(self, configuration: Configuration) -> np.ndarray:
        """``[C, S, V]`` the estimator's value on each edge; full-vocabulary values are the context's."""
        est = configuration.estimator
        if est.full:
            value = est.value(self.log_probs, self.reference)[..., None]
        else:
            value = est.value((self.sampler if configuration.rollout_value else self.log_probs) - self.reference)
        return np.where(self.alive, np.broadcast_to(value, self.log_probs.shape), 0.0)

    def slopes(self, configuration: Configuration) -> np.ndarray:
        """``[C, S, V]`` the estimator's slope on each edge."""
        est = configuration.estimator
        slope = est.slope(self.log_probs, self.reference) if est.full else est.slope(self.log_probs - self.reference)
        return np.where(self.alive, slope, 0.0)


def ascent(
    algorithm: Algorithm,
    penalties: Sequence[tuple[Configuration | None, slice]],
    beta: Float[np.ndarray, " C"],
    batch: Batch,
    tables: Tables,
    measures: Measures,
) -> Float[np.ndarray, "C d"]:
    """``[C, d]`` the direction that each run ascends, mean over its N sequences.

    Args:
        penalties: each configuration with the runs, side by side, that it penalises.
    """
    weights = np.zeros(batch.shape)
    apart = np.zeros((len(beta), measures.features.shape[1]))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for configuration, rows in penalties:
            mine, here = tables.part(rows), batch.part(rows)
            constants = _constants(configuration, measures.family, mine)
            update = _Update(algorithm, configuration, beta[rows], here, mine, constants)
            weights[rows] = update.weights()
            if configuration is not None and configuration.baseline == "optimal-per-coordinate":
                scores = measures.to_parameters(update.baseline_part(), np.exp(mine.log_probs))
                apart[rows] = beta[rows, None] * constants * scores
        return (measures.to_parameters(weights, np.exp(tables.log_probs)) + apart) / batch.reward.shape[1]


def _constants(configuration: Configuration | None, family: Family, tables: Tables) -> np.ndarray:
    """``[C, 1]`` the constant baseline b of each run (``[C, d]`` per coordinate), exact; 0 where there is none."""
    runs = len(tables.log_probs)
    if configuration is None or configuration.baseline in ("none", "loo"):
        return np.zeros((runs, 1))
    if configuration.baseline == "constant":
        return np.full((runs, 1), configuration.baseline_value)
    found = []
    for log_probs, reference, sampler in zip(tables.log_probs, tables.reference, tables.sampler, strict=True):
        policy = family.policy_of(log_probs)
        behaviour = None if np.array_equal(sampler, log_probs) else sampler
        pair = replace(family.task.pair, policy=policy, reference=reference, behaviour=behaviour)
        found.append(moments(pair, [configuration], [family.task.length], covariance="none")[0].baseline[0])
    b = np.array(found)
    return b if configuration.baseline == "optimal-per-coordinate" else b[:, :1]


class _Update:
    """The weights on scores of runs that share one configuration."""

    def __init__(
        self,
        algorithm: Algorithm,
        configuration: Configuration | None,
        beta: np.ndarray,
        batch: Batch,
        tables: Tables,
        constants: np.ndarray,
    ) -> None:
        self.algorithm, self.configuration, self.batch, self.tables = algorithm, configuration, batch, tables
        self.beta, self.constants = beta, constants

    def each(self, of_run: np.ndarray) -> np.ndarray:
        """``[n, 1]`` a number of each run, for its sequences."""
        return np.repeat(of_run, self.batch.reward.shape[1])[:, None]

    def weights(self) -> np.ndarray:
        """``[C, S, V]`` weights on the scores, summed over sequences."""
        configuration, batch, algorithm = self.configuration, self.batch, self.algorithm
        reward = batch.reward
        folded = configuration is not None and is_folded(configuration, algorithm)
        if folded:
            assert configuration is not None
            total = self.token_values().sum(axis=1).reshape(reward.shape)
            reward = reward - self.beta[:, None] * total / configuration.divisor
        coefficient = advantages(algorithm, reward).reshape(-1, 1) / self.divisor(algorithm.aggregation)
        ratio = algorithm.base_ratio
        if ratio != "none" and batch.log_rho is not None:
            coefficient = coefficient * self.ratios(ratio)[0]
        if configuration is not None and configuration.in_reward and not folded:
            coefficient = coefficient - self.each(self.beta) * self.reward_part()
        if algorithm.clip and batch.log_rho is not None:
            coefficient = self.clipped(coefficient)
        weights = batch.weigh(coefficient)
        if configuration is not None and configuration.in_loss:
            weights = weights - self.beta[:, None, None] * self.loss_part()
        return weights * self.tables.alive

    def token_values(self) -> np.ndarray:
        """``[n, T]`` c of each token."""
        assert self.configuration is not None
        return self.tables.values(self.configuration).ravel().take(self.batch.edges).T

    def divisor(self, aggregation: str, constant: float = 1.0) -> Any:
        """D of each sequence."""
        return self.batch.lengths if aggregation == "length-mean" else constant

    def ratios(self, ratio: str) -> tuple[np.ndarray, np.ndarray]:
        """``[n, T]`` omega(t, t) and the ratio ahead of token t; ``[n, 1]`` where they do not depend on t."""
        if ratio == "none" or self.batch.log_rho is None:
            one = np.ones((len(self.batch.lengths), 1))
            return one, one
        if ratio == "sequence":
            whole = np.exp(self.batch.log_ratios.sum(axis=1, keepdims=True))
            return whole, whole
        return importance_ratios(ratio, self.batch.log_ratios, np)

    def reward_part(self) -> np.ndarray:
        """``[n, T]`` the in-reward coefficient of each token's score, from the configuration's formula."""
        configuration = self.configuration
        assert configuration is not None
        values = self.token_values()
        own, before = self.ratios(configuration.ratio)
        total = values.sum(axis=1, keepdims=True)
        if configuration.credit == "whole" and configuration.ratio != "prefix":
            coefficient = own * total
        else:
            inside = before if configuration.estimator.full and configuration.ratio == "prefix" else own
            own_wide, inside_wide = np.broadcast_to(own, values.shape), np.broadcast_to(inside, values.shape)
            coefficient = credit_sums(configuration, values, own_wide, inside_wide, np)
        coefficient = coefficient - own * self.baseline(total)
        return coefficient / self.divisor(configuration.aggregation, configuration.divisor)

    def baseline(self, total: np.ndarray) -> Any:
        """``[n, 1]`` b of each sequence; one per coordinate is subtracted later."""
        configuration, N = self.configuration, self.batch.reward.shape[1]
        assert configuration is not None
        if configuration.baseline == "loo":
            grouped = total.reshape(-1, configuration.group(N))
            return ((grouped.sum(axis=1, keepdims=True) - grouped) / (grouped.shape[1] - 1)).reshape(-1, 1)
        return 0.0 if configuration.baseline == "optimal-per-coordinate" else self.each(self.constants[:, 0])

    def baseline_part(self) -> np.ndarray:
        """``[C, S, V]`` weights on scores of what a baseline multiplies, sum_t omega(t) p_t / D."""
        configuration = self.configuration
        assert configuration is not None
        divisor = self.divisor(configuration.aggregation, configuration.divisor)
        return self.batch.weigh(self.ratios(configuration.ratio)[0] / divisor) * self.tables.alive

    def loss_part(self) -> np.ndarray:
        """``[C, S, V]`` weights on scores of the in-loss part: lambda_t times slopes."""
        configuration, batch = self.configuration, self.batch
        assert configuration is not None
        divisor = self.divisor(configuration.aggregation, configuration.divisor)
        if (configuration.ratio == "none" or batch.log_rho is None) and configuration.aggregation != "length-mean":
            visits = batch.counts / divisor
        else:
            visits = batch.weigh(loss_weights(configuration, *self.ratios(configuration.ratio)) / divisor)
        if configuration.estimator.full:
            visits = visits.sum(axis=2, keepdims=True)
        # where nothing was sampled there is no term, even if its slope is infinite
        return np.where(visits != 0, visits * self.tables.slopes(configuration), 0.0)

    def clipped(self, coefficient: np.ndarray) -> np.ndarray:
        """PPO: no push further away for a token whose ratio has left 1 -+ epsilon in the coefficient's direction."""
        rho, epsilon = np.exp(self.batch.log_ratios), self.algorithm.clip
        out = ((coefficient > 0) & (rho > 1 + epsilon)) | ((coefficient < 0) & (rho < 1 - epsilon))
        return np.where(out, 0.0, coefficient)
