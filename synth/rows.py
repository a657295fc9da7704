"""Rows: the running sums that a configuration's gradient is made of, and how one token moves them.

Per coordinate of theta a gradient is a linear functional of rows such as the constant 1, C (values), P (scores),
their product, the reward-to-go sum. Each token updates the vector z of rows linearly, z' = L(s, v) z with L
lower-triangular. A ratio is more rows (prefix: Omega' = rho Omega and its products) or a factor on L (sequence).

Shapes: S contexts, V tokens, d parameters, a coordinates in which a context has scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.synth.configurations import Configuration
from klgrad.synth.estimators import Estimator
from klgrad.synth.exact import kl_rows
from klgrad.synth.policies import PolicyPair

if TYPE_CHECKING:
    from jaxtyping import Float

_CANCELS = 8.0  # times its sum with the slope that a value may be, or two digits are lost in the square
_SPARSE_ENTRIES = 1 << 12  # S x V x d from which scores that are mostly zero are kept without the zeros

Row = tuple[str, ...]
ONE: Row = ("one",)


# ------------------------------------------------------------------------------------------------ edge tables


def edge_values(pair: PolicyPair, configuration: Configuration) -> Float[np.ndarray, "S V"]:
    """``[S, V]`` the estimator's value c at each token; 0 where the sampler never goes."""
    est = configuration.estimator
    can = pair.possible
    with np.errstate(over="ignore", invalid="ignore"):
        if est.full:
            value = np.broadcast_to(est.value(pair.policy.log_probs, pair.reference)[:, None], can.shape)
        else:
            delta = pair.log_ratio
            if configuration.rollout_value:
                delta = np.where(can, pair.sampler, 0.0) - np.where(can, pair.reference, 0.0)
            value = est.value(delta)
    return np.where(can, value, 0.0)


def edge_pathwise(
    pair: PolicyPair,
    configuration: Configuration,
    scores: Float[np.ndarray, "S V a"] | None = None,
    *,
    less: float = 0.0,
) -> Float[np.ndarray, "S V a"]:
    """``[S, V, d]`` w at each token: slope times score, summed over the vocabulary for full estimators.

    0 where the sampler never goes. ``scores`` stands for the policy's, such as some coordinates of them; ``less`` is
    taken off a sampled estimator's slope.
    """
    est, can = configuration.estimator, pair.possible
    scores = pair.policy.scores if scores is None else scores
    with np.errstate(over="ignore", invalid="ignore"):
        if not est.full:
            return np.where(can, est.slope(pair.log_ratio) - less, 0.0)[..., None] * scores
        emits = np.asarray(can.any(axis=1))[:, None]
        slope = np.where(emits, est.slope(pair.policy.log_probs, pair.reference), 0.0)
    return np.broadcast_to(np.einsum("sv,svd->sd", slope, scores)[:, None, :], scores.shape)


def edge_together(pair: PolicyPair, configuration: Configuration, *, less: float = 0.0) -> Float[np.ndarray, "S V"]:
    """``[S, V]`` value plus slope at each token, in closed form where there is one; 0 where the sampler never goes.

    ``less`` is taken off the slope.
    """
    est = configuration.estimator
    live = pair.sampler == pair.policy.log_probs if configuration.rollout_value else True  # of one delta
    with np.errstate(over="ignore", invalid="ignore"):
        together = edge_values(pair, configuration) + (est.slope(pair.log_ratio) - less)
        if est.together is not None:  # near the reference the sum is as good, and better where less is
            far = np.abs(pair.log_ratio) > 1
            together = np.where(far & live, est.together(pair.log_ratio) - less, together)
    return np.where(pair.possible, together, 0.0)


def slope_at_reference(configuration: Configuration) -> float:
    """The slope of a sampled estimator at delta = 0: 1 for k1, 0 for those whose least value is there."""
    return 0.0 if configuration.estimator.full else float(configuration.estimator.slope(np.zeros(1))[0])


# ---------------------------------------------------------------------------------------------------- the rows


def _active(pair: PolicyPair) -> np.ndarray | None:
    """``[S, a]`` coordinates that hold all scores of each context, where that is worth it: a at most d / 2."""
    scores = pair.policy.scores
    d = scores.shape[2]
    if scores.size < _SPARSE_ENTRIES:
        return None
    present = (scores != 0).any(axis=1)
    most = max(int(present.sum(axis=1).max()), 1)
    return None if 2 * most > d else np.argsort(~present, axis=1, kind="stable")[:, :most]


def _same(one: Sequence[tuple[Row, np.ndarray]], two: Sequence[tuple[Row, np.ndarray]]) -> bool:
    """Whether two lists of terms have the same sources and coefficients."""
    return [source for source, _ in one] == [source for source, _ in two] and all(
        _equal(a, b) for (_, a), (_, b) in zip(one, two, strict=True)
    )


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a is b or (a.shape == b.shape and bool((a == b).all()))


class Rows:
    """The linear updates ``row' = sum of coefficient x source``, built for each configuration on demand.

    Where each context has scores in few coordinates, as tabular policies do, coefficients keep those alone:
    ``active [S, a]`` names them, and a coefficient is ``[S, V, a]`` and not ``[S, V, d]``; else ``active`` is None.
    """

    def __init__(self, pair: PolicyPair, *, dense: bool = False) -> None:
        self.pair = pair
        self.active = None if dense else _active(pair)
        self.all_scores = pair.policy.scores  # full-vocabulary losses sum those of tokens that are never sampled too
        if self.active is not None:
            self.all_scores = np.take_along_axis(self.all_scores, self.active[:, None, :], axis=2)
        self.score = self.all_scores
        if not pair.possible.all():  # as the other tables, so that rows that are the same are seen to be
            self.score = np.where(pair.possible[..., None], self.score, 0.0)
        self.rho = pair.importance_ratio
        self.unit = np.ones_like(self.rho)
        self.update: dict[Row, list[tuple[Row, np.ndarray]]] = {ONE: [(ONE, self.unit)]}
        self.initial: set[Row] = {ONE}  # rows that start at 1; all others start at 0
        self._tables: dict[Any, np.ndarray] = {}
        self._namesakes: dict[str, dict[Estimator, str]] = {}

    def table(self, kind: str, configuration: Configuration, less: float = 0.0) -> np.ndarray:
        key = (kind, configuration.estimator, configuration.rollout_value and kind != "pathwise", less)
        if key not in self._tables:
            make: dict[str, Callable[[], np.ndarray]] = {
                "value": lambda: edge_values(self.pair, configuration),
                "pathwise": lambda: edge_pathwise(self.pair, configuration, self.all_scores, less=less),
                "together": lambda: edge_together(self.pair, configuration, less=less),
            }
            self._tables[key] = make[kind]()
        return self._tables[key]

    def coordinates(self, contexts: np.ndarray, n: int) -> np.ndarray:
        """``[contexts, a]`` the coordinates that their coefficients stand for."""
        return np.broadcast_to(np.arange(n), (len(contexts), n)) if self.active is None else self.active[contexts]

    def spread(self, coefficient: np.ndarray) -> np.ndarray:
        """``[S, V, d]`` from ``[S, V, a]``."""
        if self.active is None:
            return coefficient
        out = np.zeros(self.pair.policy.scores.shape)
        np.put_along_axis(out, np.broadcast_to(self.active[:, None, :], coefficient.shape), coefficient, axis=2)
        return out

    def add(self, row: Row, *terms: tuple[Row, np.ndarray], keep: np.ndarray | None = None) -> Row:
        """Define ``row' = keep x row + terms`` unless it, or another that is the same, is there already."""
        if row in self.update:
            return row
        keep = self.unit if keep is None else keep
        for other, ((itself, kept), *rest) in self.update.items():
            # k1's slope is 1: its loss is the sum of scores, under another name
            if itself == other and other not in self.initial and _same(terms, rest) and _equal(kept, keep):
                return other
        self.update[row] = [(row, keep), *terms]
        return row

    def weight(self, ratio: str) -> tuple[Row, np.ndarray]:
        """The row that carries the ratio so far, and the factor one more token puts on it."""
        if ratio in ("none", "token"):
            return ONE, self.unit
        omega: Row = ("omega",)
        if omega not in self.update:
            self.update[omega] = [(omega, self.rho)]
            self.initial.add(omega)
        return omega, self.rho

    def values(self, configuration: Configuration) -> Row:
        """C, the unweighted sum of values: what baselines average."""
        c = self.table("value", configuration)
        return self.add(("C", *self._value_key(configuration)), (ONE, c))

    def estimate(self, configuration: Configuration) -> Row:
        """sum_t lambda_t c_t, the KL value estimate."""
        ratio, c = configuration.ratio, self.table("value", configuration)
        carrier, step = self.weight(ratio)
        key = self._value_key(configuration)
        if ratio == "none":
            return self.values(configuration)
        if ratio == "sequence":
            return self.add(("omega C", *key), (carrier, step * c), keep=step)
        factor = self.unit if configuration.estimator.full else self.rho
        return self.add((f"{ratio} C", *key), (carrier, factor * c))

    def expected_estimate(self, configuration: Configuration) -> Row:
        """A row whose mean is that of ``estimate`` and keeps its digits near the reference.

        There a token's log-ratio is of the distance's size and its mean of the square: where the estimate is one of the
        policy's own KL, a token counts with its context's exact KL instead. A length mean weighs tokens by where they
        lead, and a reference that emits what the policy never does adds what its estimator says: both keep the values.
        """
        ratio, est = configuration.ratio, configuration.estimator
        of_policy = self.pair.on_policy or not configuration.rollout_value
        if est.full or not (est.unbiased and of_policy and self.scores_vanish(configuration)) or self.own_kl is None:
            return self.estimate(configuration)
        ahead = "none" if ratio in ("none", "token") else "prefix"  # a token's own and later ratios average to 1
        return self.add(("expected estimate", ahead), (self.weight(ahead)[0], self.own_kl))

    @cached_property
    def own_kl(self) -> np.ndarray | None:
        """``[S, V]`` each context's exact KL, where the reference emits nothing that the policy never does."""
        policy, reference = self.pair.policy.log_probs, self.pair.reference
        visited = self.pair.possible.any(axis=1)
        if ((policy == -np.inf) & (reference > -np.inf))[visited].any():
            return None
        return np.where(visited, kl_rows(policy, reference), 0.0)[:, None] * self.unit

    def scores_vanish(self, configuration: Configuration) -> bool:
        """Whether Y, the sum of weighted scores over D, is zero on average, as scores are under their own policy."""
        by_length = configuration.aggregation == "length-mean" and self.pair.automaton.end >= 0
        ratio = self.pair.on_policy or (configuration.ratio != "none" and not self.pair.sampling_gaps())
        return ratio and not by_length

    def parts(self, configuration: Configuration, less: float = 0.0) -> tuple[Row, ...]:
        """X, g at b = 0: its reward and its loss, or both in one row; without a loss that is nothing less ``less``."""
        reward = (self.reward(configuration, less),) if configuration.in_reward else ()
        apart = configuration.in_loss and not self.merges(configuration)
        if apart and less and not self.table("pathwise", configuration, less).any():
            apart = False
        return (*reward, self.loss(configuration, less)) if apart else reward

    def scores(self, ratio: str) -> Row:
        """Y = sum_t omega(t) p_t, what a baseline multiplies."""
        carrier, step = self.weight(ratio)
        own = self.rho if ratio == "token" else step
        p = own[..., None] * self.score
        if ratio == "sequence":
            return self.add(("omega P",), (carrier, p), keep=step)
        return self.add(("Y", ratio), (carrier, p))

    def loss(self, configuration: Configuration, less: float = 0.0) -> Row:
        """sum_t lambda_t w_t, with ``less`` off a sampled estimator's slope."""
        ratio, est = configuration.ratio, configuration.estimator
        carrier, step = self.weight(ratio)
        own = self.rho if ratio in ("token", "prefix", "sequence") else self.unit
        if est.full and ratio in ("token", "prefix"):
            own = self.unit
        w = own[..., None] * self.table("pathwise", configuration, less)
        name = ("loss", ratio, self.label(est), str(less))
        return self.add(name, (carrier, w), keep=step if ratio == "sequence" else None)

    def merges(self, configuration: Configuration) -> bool:
        """Whether value and slope of a token cancel: they multiply the same score, and are added before the square."""
        if configuration.placement != "both" or configuration.credit == "future" or configuration.estimator.full:
            return False
        value, together = self.table("value", configuration), self.table("together", configuration)
        return bool((np.abs(value) > _CANCELS * np.maximum(np.abs(together), 1.0)).any())

    def reward(self, configuration: Configuration, less: float = 0.0) -> Row:
        """sum over (t, u) in credit of omega(t, u) c_u p_t, for b = 0; with the loss where that ``merges``."""
        ratio, credit, full = configuration.ratio, configuration.credit, configuration.estimator.full
        c, key = self.table("value", configuration), self._value_key(configuration)
        carrier, step = self.weight(ratio)
        merged, own = self.merges(configuration), self.rho if ratio == "token" else step
        p = own[..., None] * self.score
        terms: list[tuple[Row, np.ndarray]] = []
        if credit != "future":  # t = u
            own_value = self.table("together", configuration, less) if merged else c
            terms.append((carrier, own_value[..., None] * p))
        if credit in ("whole", "rtg", "future"):  # t < u
            if ratio == "prefix":
                before = self.add(("omega P",), (carrier, p), keep=step)
                terms.append((before, c if full else step * c))
            else:
                terms.append((self.scores(ratio), step * c))
        if credit == "whole":  # t > u
            if ratio in ("prefix", "sequence"):
                past = self.add(("omega C", *key), (carrier, step * c), keep=step)
            else:
                past = self.values(configuration)
            terms.append((past, p))
        name = ("both", str(less)) if merged else ("reward",)
        return self.add((*name, credit, ratio, *key), *terms, keep=step if ratio == "sequence" else None)

    def label(self, est: Estimator) -> str:
        """The estimator's name, numbered where another with other functions has the same."""
        namesakes = self._namesakes.setdefault(est.name, {est: est.name})
        return namesakes.setdefault(est, f"{est.name} #{len(namesakes) + 1}")

    def _value_key(self, configuration: Configuration) -> tuple[str, str]:
        return self.label(configuration.estimator), "rollout" if configuration.rollout_value else "now"
