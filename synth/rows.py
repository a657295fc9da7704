"""Rows: the running sums that a configuration's gradient is made of, and how one token moves them.

Per coordinate of theta a gradient is a linear functional of rows such as the constant 1, C (values), P (scores),
their product, the reward-to-go sum. Each token updates the vector z of rows linearly, z' = L(s, v) z with L
lower-triangular. A ratio is more rows (prefix: Omega' = rho Omega and its products) or a factor on L (sequence).

Shapes: S contexts, V tokens, d parameters, a coordinates in which a context has scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.synth.configurations import Configuration
from klgrad.synth.estimators import Estimator
from klgrad.synth.policies import PolicyPair

if TYPE_CHECKING:
    from jaxtyping import Float

_CANCELS = 6.0  # log pi_ref / pi from which value and slope of k3 are better added before they are squared
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
    pair: PolicyPair, configuration: Configuration, scores: Float[np.ndarray, "S V a"] | None = None
) -> Float[np.ndarray, "S V a"]:
    """``[S, V, d]`` w at each token: slope times score, summed over the vocabulary for full estimators.

    0 where the sampler never goes. ``scores`` stands for the policy's, such as some coordinates of them.
    """
    est, can = configuration.estimator, pair.possible
    scores = pair.policy.scores if scores is None else scores
    with np.errstate(over="ignore", invalid="ignore"):
        if not est.full:
            return np.where(can, est.slope(pair.log_ratio), 0.0)[..., None] * scores
        emits = np.asarray(can.any(axis=1))[:, None]
        slope = np.where(emits, est.slope(pair.policy.log_probs, pair.reference), 0.0)
    return np.broadcast_to(np.einsum("sv,svd->sd", slope, scores)[:, None, :], scores.shape)


def edge_together(pair: PolicyPair, configuration: Configuration) -> Float[np.ndarray, "S V"]:
    """``[S, V]`` value plus slope at each token, in the estimator's closed form; 0 where the sampler never goes."""
    assert configuration.estimator.together is not None
    return np.where(pair.possible, configuration.estimator.together(pair.log_ratio), 0.0)


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

    def table(self, kind: str, configuration: Configuration) -> np.ndarray:
        key = (kind, configuration.estimator, configuration.rollout_value and kind == "value")
        if key not in self._tables:
            make: dict[str, Callable[[], np.ndarray]] = {
                "value": lambda: edge_values(self.pair, configuration),
                "pathwise": lambda: edge_pathwise(self.pair, configuration, self.all_scores),
                "together": lambda: edge_together(self.pair, configuration),
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

    def scores(self, ratio: str) -> Row:
        """Y = sum_t omega(t) p_t, what a baseline multiplies."""
        carrier, step = self.weight(ratio)
        own = self.rho if ratio == "token" else step
        p = own[..., None] * self.score
        if ratio == "sequence":
            return self.add(("omega P",), (carrier, p), keep=step)
        return self.add(("Y", ratio), (carrier, p))

    def loss(self, configuration: Configuration) -> Row:
        """sum_t lambda_t w_t."""
        ratio, est = configuration.ratio, configuration.estimator
        carrier, step = self.weight(ratio)
        own = self.rho if ratio in ("token", "prefix", "sequence") else self.unit
        if est.full and ratio in ("token", "prefix"):
            own = self.unit
        w = own[..., None] * self.table("pathwise", configuration)
        return self.add(("loss", ratio, self.label(est)), (carrier, w), keep=step if ratio == "sequence" else None)

    def merges(self, configuration: Configuration) -> bool:
        """Whether reward and loss are better one row: k3's own-token terms cancel to delta where r is large."""
        if configuration.placement != "both" or configuration.credit == "future" or configuration.rollout_value:
            return False
        pair = self.pair
        far = -pair.log_ratio[pair.possible].min(initial=0.0) > _CANCELS
        return far and configuration.estimator.together is not None

    def reward(self, configuration: Configuration, *, merged: bool = False) -> Row:
        """sum over (t, u) in credit of omega(t, u) c_u p_t, for b = 0; ``merged`` with the loss."""
        ratio, credit, full = configuration.ratio, configuration.credit, configuration.estimator.full
        c, key = self.table("value", configuration), self._value_key(configuration)
        carrier, step = self.weight(ratio)
        own = self.rho if ratio == "token" else step
        p = own[..., None] * self.score
        terms: list[tuple[Row, np.ndarray]] = []
        if credit != "future":  # t = u
            own_value = self.table("together", configuration) if merged else c
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
        return self.add(
            ("both" if merged else "reward", credit, ratio, *key), *terms, keep=step if ratio == "sequence" else None
        )

    def label(self, est: Estimator) -> str:
        """The estimator's name, numbered where another with other functions has the same."""
        namesakes = self._namesakes.setdefault(est.name, {est: est.name})
        return namesakes.setdefault(est, f"{est.name} #{len(namesakes) + 1}")

    def _value_key(self, configuration: Configuration) -> tuple[str, str]:
        return self.label(configuration.estimator), "rollout" if configuration.rollout_value else "now"
