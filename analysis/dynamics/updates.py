"""The direction that each of many runs ascends, from the sequences it drew.

Every gradient here is a sum of weights on scores, so it is kept as ``[C, S, V]``: the weight that each token in each
context gets. What differs between configurations is small tables wherever it can be; what is as large as the batch is
then done once for all runs. Shapes: C runs, N sequences of each, n = C N, T length, S contexts, V tokens,
d parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
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

ALL = slice(None)
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
    _kept: dict[tuple[str, str, bool], np.ndarray] = field(default_factory=dict)

    @cached_property
    def delta(self) -> Float[np.ndarray, "C S V"]:
        """Log-ratios to the reference; 0 in the end context."""
        return np.where(self.alive, self.log_probs - self.reference, 0.0)

    def values(self, configuration: Configuration, rows: slice = ALL) -> np.ndarray:
        """``[C, S, V]`` the estimator's value on each edge, 0 in the end context; full ones are the context's.

        Worked out once for all runs, as configurations that share an estimator share it.
        """
        est, frozen = configuration.estimator, configuration.rollout_value
        key = ("value", est.name, frozen)
        if key not in self._kept:
            if est.full:
                whole = est.value(self.log_probs, self.reference)[..., None]
                value = np.where(self.alive, np.broadcast_to(whole, self.log_probs.shape), 0.0)
            else:  # every estimator is 0 at 0
                value = est.value(np.where(self.alive, self.sampler - self.reference, 0.0) if frozen else self.delta)
            self._kept[key] = value
        return self._kept[key][rows]

    def slopes(self, configuration: Configuration, rows: slice = ALL) -> np.ndarray:
        """``[C, S, V]`` the estimator's slope on each edge; anything in the end context."""
        est = configuration.estimator
        key = ("slope", est.name, False)
        if key not in self._kept:
            full = est.full
            self._kept[key] = est.slope(self.log_probs, self.reference) if full else est.slope(self.delta)
        return self._kept[key][rows]


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
        # where every token weighs the same, configurations differ in tables alone: of slopes, and of values by credit
        slope = np.zeros(batch.shape)
        values: dict[str, dict[tuple[int, int], np.ndarray]] = {}
        for configuration, rows in penalties:
            if configuration is None or (is_folded(configuration, algorithm) and not configuration.in_loss):
                continue
            part = _Part(configuration, batch, rows, tables, beta[rows])
            if configuration.in_reward and not is_folded(configuration, algorithm):
                constants = _constants(configuration, passes.family, tables, rows)
                if algorithm.clip and batch.log_rho is not None:  # PPO clips a token by all that it is given
                    beside = part.in_reward(constants)
                    columns = slice(rows.start * batch.samples, rows.stop * batch.samples)
                    coefficient = np.broadcast_to(coefficient, batch.edges.shape[::-1]).copy(order="K")
                    coefficient[columns] -= beside
                elif part.even and configuration.credit != "whole":
                    table = values.setdefault(configuration.credit, {})
                    table[rows.start, rows.stop] = part.scale * part.values
                    if configuration.baseline != "none":
                        b = part.subtracted(part.total, constants)
                        weights[rows] += part.own.weigh(part.each(part.scale.ravel()) * b)
                else:
                    weights[rows] -= part.own.weigh(part.in_reward(constants))
                if configuration.baseline == "optimal-per-coordinate":
                    scores = passes.to_parameters(part.baseline(), np.exp(tables.log_probs[rows]))
                    shift[rows] = beta[rows, None] * constants * scores
            if configuration.in_loss and part.even and not configuration.estimator.full:
                slope[rows] = part.scale * tables.slopes(configuration, rows)
            elif configuration.in_loss:
                weights[rows] -= part.in_loss()
        if algorithm.clip and batch.log_rho is not None:
            coefficient = _clipped(coefficient, batch.log_ratios, algorithm.clip)
        for credit, table in values.items():
            for rows, value in _side_by_side(table):
                weights[rows] -= batch.part(rows).credited(value, credit)
        if slope.any():  # where nothing was sampled there is no term, even if its slope is infinite
            weights -= np.where(batch.counts > 0, batch.counts * slope, 0.0)
        weights += batch.weigh(coefficient)
        direction = passes.to_parameters(np.where(tables.alive, weights, 0.0), np.exp(tables.log_probs))
        return (direction + shift) / batch.samples


def _side_by_side(tables: dict[tuple[int, int], np.ndarray]) -> Iterator[tuple[slice, np.ndarray]]:
    """Tables of runs that stand side by side as one."""
    spans: list[list[tuple[int, int]]] = []
    for span in sorted(tables):
        if spans and spans[-1][-1][1] == span[0]:
            spans[-1].append(span)
        else:
            spans.append([span])
    for group in spans:
        yield slice(group[0][0], group[-1][1]), np.concatenate([tables[span] for span in group])


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
            value[rows] = each * tables.values(configuration, rows)
        reward = reward - batch.total(value)
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


def _constants(configuration: Configuration | None, family: Family, tables: Tables, rows: slice) -> np.ndarray:
    """``[C, 1]`` the constant baseline b of each run (``[C, d]`` per coordinate), exact; 0 where there is none."""
    runs = rows.stop - rows.start
    if configuration is None or configuration.baseline in ("none", "loo"):
        return np.zeros((runs, 1))
    if configuration.baseline == "constant":
        return np.full((runs, 1), configuration.baseline_value)
    found = []
    theirs = (tables.log_probs[rows], tables.reference[rows], tables.sampler[rows])
    for log_probs, reference, sampler in zip(*theirs, strict=True):
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

    @property
    def values(self) -> np.ndarray:
        """``[C, S, V]`` these runs' values on each edge."""
        return self.tables.values(self.configuration, self.rows)

    @property
    def total(self) -> np.ndarray:
        """``[n, 1]`` C, the sum of each sequence's values."""
        return self.own.total(self.values).reshape(-1, 1)

    def each(self, of_run: np.ndarray) -> np.ndarray:
        """``[n, 1]`` a number of each run, for its sequences."""
        return np.repeat(of_run, self.batch.samples)[:, None]

    @property
    def plain(self) -> bool:
        """Whether all importance ratios are 1."""
        return self.configuration.ratio == "none" or self.batch.log_rho is None

    @property
    def even(self) -> bool:
        """Whether every token of a loss weighs the same."""
        return self.plain and self.configuration.aggregation != "length-mean"

    @property
    def scale(self) -> np.ndarray:
        """``[C, 1, 1]`` beta over a constant divisor."""
        return self.beta[:, None, None] / self.configuration.divisor

    @property
    def divisor(self) -> Any:
        """D of each sequence."""
        return self.own.lengths if self.configuration.aggregation == "length-mean" else self.configuration.divisor

    def in_reward(self, constants: np.ndarray) -> np.ndarray:
        """``[n, T]`` or ``[n, 1]`` the in-reward coefficient of each token's score."""
        configuration = self.configuration
        values = self.values.ravel().take(self.own.edges).T
        own, before = self.own.ratios(configuration.ratio)
        total = values.sum(axis=1, keepdims=True)
        if configuration.credit == "whole" and configuration.ratio != "prefix":
            coefficient = own * total
        else:
            inside = before if configuration.estimator.full and configuration.ratio == "prefix" else own
            own_wide, inside_wide = (np.broadcast_to(omega, values.shape) for omega in (own, inside))
            values = np.ascontiguousarray(values)  # running sums along rows that lie in memory are twice as quick
            coefficient = credit_sums(configuration, values, own_wide, inside_wide, np)
        coefficient = coefficient - own * self.subtracted(total, constants)
        return self.each(self.beta) * coefficient / self.divisor

    def subtracted(self, total: np.ndarray, constants: np.ndarray) -> Any:
        """``[n, 1]`` b of each sequence, from the sums of its values; a baseline per coordinate is not one number."""
        if self.configuration.baseline == "loo":
            grouped = total.reshape(-1, self.configuration.group(self.own.samples))
            others = (grouped.sum(axis=1, keepdims=True) - grouped) / (grouped.shape[1] - 1)
            return others.reshape(-1, 1)
        fixed = self.configuration.baseline not in ("none", "optimal-per-coordinate")
        return self.each(constants[:, 0]) if fixed else 0.0

    def baseline(self) -> np.ndarray:
        """``[C, S, V]`` weights on scores of what a baseline multiplies, sum_t omega(t) p_t / D."""
        own = self.own.ratios(self.configuration.ratio)[0]
        return np.where(self.tables.alive, self.own.weigh(own / self.divisor), 0.0)

    def in_loss(self) -> np.ndarray:
        """``[C, S, V]`` weights on scores of the in-loss part: lambda_t times slopes."""
        configuration = self.configuration
        if self.even:
            visits = self.batch.counts[self.rows] * self.scale
        else:
            own, before = self.own.ratios(configuration.ratio)
            weight = loss_weights(configuration, own, before) / self.divisor
            visits = self.own.weigh(self.each(self.beta) * weight)
        if configuration.estimator.full:
            visits = visits.sum(axis=2, keepdims=True)
        return np.where(visits != 0, visits * self.tables.slopes(configuration, self.rows), 0.0)
