"""The direction that each of many runs ascends, from the sequences it drew.

Every gradient here is a sum of weights on scores, so it is kept as ``[C, S, V]``: the weight that each token in each
context gets. What differs between configurations is small tables wherever it can be; what is as large as the batch is
then done once for all runs. Shapes: C runs, N sequences of each, n = C N, T length, S contexts, V tokens,
d parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.analysis.dynamics.batches import Batch
from klgrad.analysis.dynamics.passes import Passes
from klgrad.analysis.dynamics.recipes import Algorithm, is_folded
from klgrad.synth.configurations import Configuration, credit_sums, loss_weights
from klgrad.synth.moments import moments
from klgrad.synth.objectives import Family

if TYPE_CHECKING:
    from jaxtyping import Float

EPSILON = 1e-4  # beside GRPO's standard deviation, as in TRL

Penalties = Sequence[tuple[Configuration | None, slice]]  # each with the runs, side by side, that it penalises


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


# ------------------------------------------------------------------------------------------- one update, all runs


def ascent(
    algorithm: Algorithm,
    penalties: Penalties,
    beta: Float[np.ndarray, " C"],
    batch: Batch,
    tables: Tables,
    passes: Passes,
) -> Float[np.ndarray, "C d"]:
    """``[C, d]`` the direction that each run ascends, mean over its N sequences."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        coefficient = _shared_coefficients(algorithm, penalties, beta, batch, tables)
        weights, shift = np.zeros(batch.shape), np.zeros((len(beta), passes.features.shape[1]))
        for configuration, rows in penalties:
            if configuration is None or (is_folded(configuration, algorithm) and not configuration.in_loss):
                continue
            part = _Part(configuration, batch, rows, tables.part(rows), beta[rows])
            if configuration.in_reward and not is_folded(configuration, algorithm):
                constants = _constants(configuration, passes.family, part.tables)
                beside = part.in_reward(constants)
                if algorithm.clip and batch.log_rho is not None:  # PPO clips a token by all that it is given
                    columns = slice(rows.start * batch.samples, rows.stop * batch.samples)
                    coefficient = np.broadcast_to(coefficient, batch.edges.shape[::-1]).copy(order="K")
                    coefficient[columns] -= beside
                else:
                    weights[rows] -= part.own.weigh(beside)
                if configuration.baseline == "optimal-per-coordinate":
                    scores = passes.to_parameters(part.baseline(), np.exp(part.tables.log_probs))
                    shift[rows] = beta[rows, None] * constants * scores
            if configuration.in_loss:
                weights[rows] -= part.in_loss()
        if algorithm.clip and batch.log_rho is not None:
            coefficient = _clipped(coefficient, batch.log_ratios, algorithm.clip)
        weights += batch.weigh(coefficient)
        direction = passes.to_parameters(weights * tables.alive, np.exp(tables.log_probs))
        return (direction + shift) / batch.samples


def _shared_coefficients(
    algorithm: Algorithm, penalties: Penalties, beta: np.ndarray, batch: Batch, tables: Tables
) -> np.ndarray:
    """``[n, 1]`` or ``[n, T]`` w_t A / D of each token, with the penalties that are part of the reward in A."""
    reward = batch.reward
    folded = [(c, rows) for c, rows in penalties if c is not None and is_folded(c, algorithm)]
    if folded:
        value = np.zeros(batch.shape)
        for configuration, rows in folded:
            each = beta[rows, None, None] / configuration.divisor
            value[rows] = each * tables.part(rows).values(configuration)
        reward = reward - value.ravel().take(batch.edges).sum(axis=0).reshape(reward.shape)
    coefficient = advantages(algorithm, reward).reshape(-1, 1)
    if algorithm.aggregation == "length-mean":
        coefficient = coefficient / batch.lengths
    if algorithm.base_ratio != "none" and batch.log_rho is not None:
        coefficient = coefficient * batch.ratios(algorithm.base_ratio)[0]
    return coefficient


def _clipped(coefficient: np.ndarray, log_ratios: np.ndarray, epsilon: float) -> np.ndarray:
    """PPO: no push further away for a token whose ratio has left 1 -+ epsilon in the coefficient's direction."""
    rho = np.exp(log_ratios)
    out = ((coefficient > 0) & (rho > 1 + epsilon)) | ((coefficient < 0) & (rho < 1 - epsilon))
    return np.where(out, 0.0, coefficient)


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


@dataclass(frozen=True, eq=False)
class _Part:
    """What the runs of one configuration add beside the shared coefficients, times beta."""

    configuration: Configuration
    batch: Batch
    rows: slice
    tables: Tables
    beta: np.ndarray

    @cached_property
    def own(self) -> Batch:
        """These runs' sequences."""
        return self.batch.part(self.rows)

    def each(self, of_run: np.ndarray) -> np.ndarray:
        """``[n, 1]`` a number of each run, for its sequences."""
        return np.repeat(of_run, self.batch.samples)[:, None]

    @property
    def divisor(self) -> Any:
        """D of each sequence."""
        return self.own.lengths if self.configuration.aggregation == "length-mean" else self.configuration.divisor

    def in_reward(self, constants: np.ndarray) -> np.ndarray:
        """``[n, T]`` or ``[n, 1]`` the in-reward coefficient of each token's score."""
        configuration = self.configuration
        values = self.tables.values(configuration).ravel().take(self.own.edges).T
        own, before = self.own.ratios(configuration.ratio)
        total = values.sum(axis=1, keepdims=True)
        if configuration.credit == "whole" and configuration.ratio != "prefix":
            coefficient = own * total
        else:
            inside = before if configuration.estimator.full and configuration.ratio == "prefix" else own
            own_wide, inside_wide = (np.broadcast_to(omega, values.shape) for omega in (own, inside))
            values = np.ascontiguousarray(values)  # running sums along rows that lie in memory are twice as quick
            coefficient = credit_sums(configuration, values, own_wide, inside_wide, np)
        if configuration.baseline == "loo":
            grouped = total.reshape(-1, configuration.group(self.own.samples))
            others = (grouped.sum(axis=1, keepdims=True) - grouped) / (grouped.shape[1] - 1)
            coefficient = coefficient - own * others.reshape(-1, 1)
        elif configuration.baseline not in ("none", "optimal-per-coordinate"):
            coefficient = coefficient - own * self.each(constants[:, 0])
        return self.each(self.beta) * coefficient / self.divisor

    def baseline(self) -> np.ndarray:
        """``[C, S, V]`` weights on scores of what a baseline multiplies, sum_t omega(t) p_t / D."""
        own = self.own.ratios(self.configuration.ratio)[0]
        return self.own.weigh(own / self.divisor) * self.tables.alive

    def in_loss(self) -> np.ndarray:
        """``[C, S, V]`` weights on scores of the in-loss part: lambda_t times slopes."""
        configuration = self.configuration
        plain = configuration.ratio == "none" or self.batch.log_rho is None
        if plain and configuration.aggregation != "length-mean":
            visits = self.batch.counts[self.rows] / configuration.divisor
        else:
            own, before = self.own.ratios(configuration.ratio)
            visits = self.own.weigh(loss_weights(configuration, own, before) / self.divisor)
        if configuration.estimator.full:
            visits = visits.sum(axis=2, keepdims=True)
        # where nothing was sampled there is no term, even if its slope is infinite
        found = np.where(visits != 0, visits * self.tables.slopes(configuration), 0.0)
        return self.beta[:, None, None] * found
