"""The tables that a derivation stands on, to the last digit, and what the float64 tables of a pair lack of them.

Rows of log-probs are normalised to about 1e-16 only. That is nothing next to a log-ratio of 1 and everything next to
one of 1e-8, whose square is the KL. So a row of log-probs *stands for* its own softmax, taken here with fifty digits:
log-ratios, and with them k3 and all sums of second order, keep sixteen digits however near the reference is. The
engine works on the pair's own float64 tables; how far those lie from these is measured, not guessed.

Shapes: S contexts, V tokens, d parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from klgrad.synth.policies import PolicyPair

if TYPE_CHECKING:
    from jaxtyping import Float

EPS = float(np.finfo(float).eps)
DIGITS = 50
_NEVER = -1e4  # the log-prob of a token that is never emitted: its exponential is exactly 0


class Bounded(NamedTuple):
    """Absolute terms and their absolute errors, of one shape."""

    size: np.ndarray
    error: np.ndarray


class LogRatio(NamedTuple):
    """``[S, V]`` the log of a ratio of two policies, and how far the difference of their float64 tables is off."""

    value: np.ndarray
    lack: np.ndarray


@dataclass(frozen=True, eq=False)
class Tables:
    """Normalised log-probs of a pair's policies and what is made of them, each entry right to rounding.

    Args:
        log_policy: ``[S, V]`` log pi; also ``log_reference`` (q) and ``log_mu`` (the sampler).
        delta: log pi - log q; ``rollout``: log mu - log q; ``drift``: log pi - log mu.
        scores: ``[S, V, d]`` gradients of log pi, of mean zero in every context.
        lack_scores: ``[S, V, d]`` how far the pair's own scores are off.
        lack_mass: how far the mass of a float64 row is off one, at most.
    """

    log_policy: Float[np.ndarray, "S V"]
    log_reference: Float[np.ndarray, "S V"]
    log_mu: Float[np.ndarray, "S V"]
    delta: LogRatio
    rollout: LogRatio
    drift: LogRatio
    scores: Float[np.ndarray, "S V d"]
    lack_scores: Float[np.ndarray, "S V d"]
    lack_mass: float


def _precise(table: Float[np.ndarray, "S V"]) -> tuple[np.ndarray, np.ndarray]:
    """``[S, V]`` the log-softmax of each row in many digits, and ``[S]`` the log of the row's own mass."""
    from mpmath import mp, mpf

    exact = np.array([[mpf(float(x)) for x in row] for row in table], object)
    off = np.array([mp.log(mp.fsum(mp.exp(x) for x in row)) for row in exact], object)
    return exact - off[:, None], off


def _real(table: Any) -> np.ndarray:
    return np.asarray(table).astype(float)


@lru_cache(maxsize=8)
def tables(pair: PolicyPair) -> Tables:
    """The tables of a pair; a context that emits nothing has rows of zeros."""
    from mpmath import mp

    automaton = pair.automaton
    alive = automaton.alive[:, None]
    raw = [np.where(alive, np.maximum(x, _NEVER), 0.0) for x in (pair.policy.log_probs, pair.reference, pair.sampler)]
    with mp.workdps(DIGITS):
        made = [_precise(table) for table in raw]
        values = {(i, j): _real(made[i][0] - made[j][0]) for i, j in ((0, 1), (2, 1), (0, 2))}
    mass = np.abs(_real(np.stack([off for _, off in made])))[:, automaton.alive]
    p, q, mu = (np.where(alive, _real(table), 0.0) for table, _ in made)
    delta, rollout, drift = (
        LogRatio(x, np.abs(raw[i] - raw[j] - x) + 4 * EPS * np.abs(x)) for (i, j), x in values.items()
    )
    own = np.where(alive[..., None], pair.policy.scores, 0.0)
    scores = own - np.einsum("sv,svd->sd", np.exp(p), own)[:, None, :]
    return Tables(p, q, mu, delta, rollout, drift, scores, np.abs(own - scores), float(mass.max(initial=0.0)))
