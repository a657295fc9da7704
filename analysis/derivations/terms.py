"""What the derivations share: their notation in LaTeX, and sides that come up again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from klgrad.analysis.derivations.divergences import reverse_kl
from klgrad.analysis.derivations.model import Model

if TYPE_CHECKING:
    from jaxtyping import Float

PAPER = "A Comedy of Estimators, arXiv 2512.21852"
# what the reader of every derivation needs: LaTeX and words
NOTATION = (
    (r"\pi,\ q", "the policy and the reference"),
    (
        r"\pi_t = \pi(y_t|y_{<t})",
        r"probability of token $t$ after its prefix, so $\pi(y) = \prod_t \pi_t$; $q_t$ likewise",
    ),
    (r"\E{f}", r"mean of $f(y)$ over sequences $y$ drawn from the policy"),
    (
        r"\nabla",
        "gradient in the policy's parameters; inside a mean it acts on what is averaged, not on the probabilities",
    ),
    (r"\delta_t = \log\pi_t - \log q_t", "the log-ratio of a token (k1)"),
    (r"r_t = q_t/\pi_t", r"the ratio that estimators are written in: $\delta_t = -\log r_t$"),
    (r"\KL", "the target: KL of whole sequences"),
    (r"\KLt", r"KL of the next-token distributions after $y_{<t}$, a sum over tokens $v$; $\fKLt$ the other way round"),
)

TOKEN_FORWARD = r"\E{\sum_t \nabla\fKLt}"
TOKEN = r"\E{\sum_t \nabla\KLt}"
FUTURE = r"\E{\sum_t \scoret \sum_{u > t}\delta_u}"


def k2(delta: np.ndarray) -> np.ndarray:
    return delta**2 / 2


def true(m: Model) -> Float[np.ndarray, " d"]:
    return m.exact("true_gradient")


def zero(m: Model) -> Float[np.ndarray, " d"]:
    return np.zeros(m.pair.policy.parameters)


def in_reward(m: Model, values: Float[np.ndarray, "M T"]) -> Float[np.ndarray, " d"]:
    total = values.sum(axis=1)[:, None]
    return m.mean(total * m.score, np.abs(values).sum(axis=1)[:, None] * m.score_size)


def to_go(values: Float[np.ndarray, "M T"]) -> Float[np.ndarray, "M T"]:
    return np.cumsum(values[:, ::-1], axis=1)[:, ::-1]


def through_probability(m: Model, values: Float[np.ndarray, "M T"]) -> Float[np.ndarray, " d"]:
    """Sum over sequences of nabla pi(y) times the sum of the values."""
    moved = m.derivative(lambda log_probs: np.exp(m.log_prob(log_probs)))
    return m.total(m.along(values), moved, m.p[:, None] * m.score_size)


def past(m: Model, values: Float[np.ndarray, "M T"]) -> Float[np.ndarray, " d"]:
    return m.mean(m.weigh(np.where(m.mask, np.cumsum(values, axis=1) - values, 0.0)))


def by_prefix(m: Model, values: Float[np.ndarray, "M T"]) -> Float[np.ndarray, " d"]:
    """Mean of the sum over t of a value times the score of its prefix."""
    before, size = (np.cumsum(x, axis=1) - x for x in (m.scores, m.score_terms.size))
    return m.mean(np.einsum("mt,mtd->md", values, before), np.einsum("mt,mtd->md", np.abs(values), size))


def kl_t(m: Model) -> Float[np.ndarray, "M T"]:
    return m.at_prefix(reverse_kl(m.log_policy, m.tables.delta.value).sum(axis=1))


def through_prefixes(m: Model) -> Float[np.ndarray, " d"]:
    """Derivative of the prefix probabilities with the next-token KLs frozen."""
    frozen = kl_t(m)

    def weighted(log_probs: np.ndarray) -> np.ndarray:
        # a sequence's weight is pi(y), of which only the prefix part may move at position u: divide the rest out again
        own = m.taken(log_probs)
        before = np.cumsum(own, axis=1) - own
        rest = m.log_prob(m.log_policy)[:, None] - (np.cumsum(m.taken(m.log_policy), axis=1) - m.taken(m.log_policy))
        return (np.exp(before + rest) * frozen).sum(axis=1)

    size = m.p[:, None] * np.einsum("mt,mtd->md", frozen, np.cumsum(m.score_terms.size, axis=1))
    return m.total(np.ones(len(m.p)), m.derivative(weighted), size)
