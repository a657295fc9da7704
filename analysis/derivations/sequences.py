"""Every sequence of an exact pair, with its log-ratios and scores, as plain arrays.

Shapes: M sequences, T length, S contexts, V tokens, d parameters.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from klgrad.analysis.derivations.divergences import k3
from klgrad.analysis.derivations.inputs import Bounded, tables
from klgrad.synth.enumeration import sequences
from klgrad.synth.policies import PolicyPair, reachable, with_behaviour

if TYPE_CHECKING:
    from jaxtyping import Float

MAX_SEQUENCES = 1 << 14
_MAX_ENTRIES = 1 << 24  # M x T x d


class Sequences:
    """A pair at one length, every sequence written out.

    Args:
        pair: the pair; its behaviour policy is used only with ``off_policy``.
        length: T.
        off_policy: keep the behaviour policy mu.

    Raises:
        ValueError: for too many sequences, a reference whose mass the policy cannot reach (then E[r] is not 1, and
            k3's value is not the KL), or a behaviour policy that misses tokens of the policy.
    """

    def __init__(self, pair: PolicyPair, length: int, *, off_policy: bool = False) -> None:
        self.pair = pair if off_policy else with_behaviour(pair, None)
        self.length = length
        _check_support(self.pair)
        every = sequences(pair.automaton, length, limit=MAX_SEQUENCES)
        self.tables = tables(self.pair)
        self.log_policy, self.log_reference = self.tables.log_policy, self.tables.log_reference
        self.log_mu = self.tables.log_mu
        self.tokens, self.contexts, self.mask = every.tokens, every.contexts, every.mask
        possible = np.exp(self.log_prob(self.log_mu)) > 0
        self.tokens, self.contexts, self.mask = (a[possible] for a in (every.tokens, every.contexts, every.mask))
        check_size(len(self.mask), length, pair.policy.parameters)

    def taken(self, table: np.ndarray) -> np.ndarray:
        """``[M, T]`` a table ``[S, V]`` at the tokens of every sequence; 0 after the end."""
        return np.where(self.mask, table[self.contexts, self.tokens], 0.0)

    def at_prefix(self, row: np.ndarray) -> np.ndarray:
        """``[M, T]`` a quantity ``[S]`` of the contexts that every sequence passes through; 0 after the end."""
        return np.where(self.mask, row[self.contexts], 0.0)

    def log_prob(self, log_probs: np.ndarray) -> np.ndarray:
        """``[M]`` log-probability of each sequence under ``[S, V]`` log-probs."""
        return np.asarray(self.taken(log_probs).sum(axis=1))

    def log_ratios(self, log_probs: np.ndarray) -> np.ndarray:
        """``[S, V]`` delta with other log-probs in the policy's place."""
        return self.tables.delta.value + (log_probs - self.log_policy)

    def log_ratio(self, log_probs: np.ndarray) -> np.ndarray:
        """``[M, T]`` delta of each token with other log-probs in the policy's place."""
        return self.taken(self.log_ratios(log_probs))

    @cached_property
    def p(self) -> Float[np.ndarray, " M"]:
        """``[M]`` pi(y)."""
        return np.exp(self.log_prob(self.log_policy))

    @cached_property
    def mu(self) -> Float[np.ndarray, " M"]:
        """``[M]`` mu(y)."""
        return np.exp(self.log_prob(self.log_mu))

    @cached_property
    def delta(self) -> Float[np.ndarray, "M T"]:
        """``[M, T]`` log pi_t - log q_t."""
        return self.taken(self.tables.delta.value)

    @cached_property
    def r(self) -> Float[np.ndarray, "M T"]:
        """``[M, T]`` q_t / pi_t; 0 after the end."""
        return np.where(self.mask, np.exp(-self.delta), 0.0)

    @cached_property
    def excess(self) -> Float[np.ndarray, "M T"]:
        """``[M, T]`` r_t - 1, which has its digits near 0 too; 0 after the end."""
        return np.where(self.mask, np.expm1(-self.delta), 0.0)

    @cached_property
    def k3(self) -> Float[np.ndarray, "M T"]:
        """``[M, T]`` r_t - 1 - log r_t."""
        return np.where(self.mask, k3(self.delta), 0.0)

    @cached_property
    def rho(self) -> Float[np.ndarray, "M T"]:
        """``[M, T]`` pi_t / mu_t; 1 after the end."""
        return np.exp(self.taken(self.tables.drift.value))

    @cached_property
    def count(self) -> Float[np.ndarray, " M"]:
        """``[M]`` number of tokens |y|."""
        return self.mask.sum(axis=1).astype(float)

    @cached_property
    def scores(self) -> Float[np.ndarray, "M T d"]:
        """``[M, T, d]`` gradient of log pi_t."""
        return self._taken_rows(self.tables.scores)

    @cached_property
    def score_terms(self) -> Bounded:
        """``[M, T, d]`` absolute scores, and how far the pair's own are off."""
        return Bounded(np.abs(self.scores), self._taken_rows(self.tables.lack_scores))

    @cached_property
    def score_size(self) -> Float[np.ndarray, "M d"]:
        """``[M, d]`` sum over tokens of the absolute scores."""
        return self.score_terms.size.sum(axis=1)

    def _taken_rows(self, table: np.ndarray) -> np.ndarray:
        return np.where(self.mask[..., None], table[self.contexts, self.tokens], 0.0)

    @cached_property
    def score(self) -> Float[np.ndarray, "M d"]:
        """``[M, d]`` gradient of log pi(y)."""
        return self.scores.sum(axis=1)

    def log_rho(self, log_probs: np.ndarray) -> np.ndarray:
        """``[M, T]`` log-ratio of each token to the sampler with other log-probs in the policy's place."""
        return self.taken(self.tables.drift.value + (log_probs - self.log_policy))


def check_size(count: int, length: int, parameters: int) -> None:
    """Raise ValueError when the scores of that many sequences do not fit."""
    if count * length * parameters > _MAX_ENTRIES:
        raise ValueError(
            f"{count} sequences of {length} tokens with {parameters} parameters each are past the limit for a "
            "derivation: take a shorter length"
        )


def _check_support(pair: PolicyPair) -> None:
    lost = (pair.reference > -np.inf) & (pair.policy.log_probs == -np.inf) & pair.automaton.alive[:, None]
    lost &= reachable(pair.automaton, pair.policy.log_probs)[:, None]
    if lost.any():
        s, v = np.argwhere(lost)[0]
        raise ValueError(
            f"in context {pair.automaton.describe(int(s))} the reference emits token {v} and the policy never does, so "
            "E[r] is not 1 and the derivations do not hold: give the policy mass there"
        )
    gaps = pair.sampling_gaps()
    if gaps:
        raise ValueError(f"{gaps[0]}, so no ratio makes up for it: give the behaviour policy mass there")
