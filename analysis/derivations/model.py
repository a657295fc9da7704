"""Every sequence of an exact pair, with all that the derivations speak of, as plain arrays.

Shapes: M sequences, T length, S contexts, V tokens, d parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.synth import exact
from klgrad.synth.configurations import Configuration, parse
from klgrad.synth.enumeration import sequences
from klgrad.synth.moments import moments
from klgrad.synth.policies import PolicyPair, reachable, with_behaviour

if TYPE_CHECKING:
    from jaxtyping import Complex, Float

MAX_SEQUENCES = 1 << 14
_MAX_ENTRIES = 1 << 24  # M x T x d
_NEVER = -1e4  # the log-prob of a token that is never emitted: its exponential is exactly 0
COMPLEX_STEP = 1e-30  # it has no cancellation and so no best size


class Model:
    """A pair at one length, every sequence written out.

    Expectations are plain sums over sequences; they note the largest sum of absolute terms in
    ``largest_term``, so that a difference of two sides is judged on the scale of what was added up.

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
        self.largest_term = 0.0
        _check_support(self.pair)
        every = sequences(pair.automaton, length, limit=MAX_SEQUENCES)
        self.log_policy, self.log_reference, self.log_mu = (
            np.where(pair.automaton.alive[:, None], np.maximum(table, _NEVER), 0.0)
            for table in (pair.policy.log_probs, pair.reference, self.pair.sampler)
        )
        self.tokens, self.contexts, self.mask = every.tokens, every.contexts, every.mask
        possible = np.exp(self.log_prob(self.log_mu)) > 0
        self.tokens, self.contexts, self.mask = (a[possible] for a in (every.tokens, every.contexts, every.mask))
        check_size(len(self.mask), length, pair.policy.parameters)

    # ------------------------------------------------------------------------------------------ per sequence

    def taken(self, table: np.ndarray) -> np.ndarray:
        """``[M, T]`` a table ``[S, V]`` at the tokens of every sequence; 0 after the end."""
        return np.where(self.mask, table[self.contexts, self.tokens], 0.0)

    def at_prefix(self, row: np.ndarray) -> np.ndarray:
        """``[M, T]`` a quantity ``[S]`` of the contexts that every sequence passes through; 0 after the end."""
        return np.where(self.mask, row[self.contexts], 0.0)

    def log_prob(self, log_probs: np.ndarray) -> np.ndarray:
        """``[M]`` log-probability of each sequence under ``[S, V]`` log-probs."""
        return np.asarray(self.taken(log_probs).sum(axis=1))

    def log_ratio(self, log_probs: np.ndarray) -> np.ndarray:
        """``[M, T]`` delta of each token with other log-probs in the policy's place."""
        return self.taken(log_probs) - self.taken(self.log_reference)

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
        return self.log_ratio(self.log_policy)

    @cached_property
    def r(self) -> Float[np.ndarray, "M T"]:
        """``[M, T]`` q_t / pi_t; 0 after the end."""
        return np.where(self.mask, np.exp(-self.delta), 0.0)

    @cached_property
    def k3(self) -> Float[np.ndarray, "M T"]:
        """``[M, T]`` r_t - 1 - log r_t."""
        return np.where(self.mask, self.r - 1 + self.delta, 0.0)

    @cached_property
    def rho(self) -> Float[np.ndarray, "M T"]:
        """``[M, T]`` pi_t / mu_t; 1 after the end."""
        return np.exp(self.taken(self.log_policy) - self.taken(self.log_mu))

    @cached_property
    def count(self) -> Float[np.ndarray, " M"]:
        """``[M]`` number of tokens |y|."""
        return self.mask.sum(axis=1).astype(float)

    @cached_property
    def scores(self) -> Float[np.ndarray, "M T d"]:
        """``[M, T, d]`` gradient of log pi_t."""
        return np.where(self.mask[..., None], self.pair.policy.scores[self.contexts, self.tokens], 0.0)

    @cached_property
    def score(self) -> Float[np.ndarray, "M d"]:
        """``[M, d]`` gradient of log pi(y)."""
        return self.scores.sum(axis=1)

    def weigh(self, weights: Float[np.ndarray, "M T"]) -> Float[np.ndarray, "M d"]:
        """``[M, d]`` sum over t of a weight times the token's score."""
        return np.einsum("mt,mtd->md", weights, self.scores)

    # ------------------------------------------------------------------------------------------ expectations

    def note(self, terms: np.ndarray | float) -> None:
        """Remember the size of terms that are about to be added up or subtracted."""
        self.largest_term = max(self.largest_term, float(np.abs(terms).max(initial=0.0)))

    def total(self, weights: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Sum over sequences of ``weights [M]`` times ``[M, ...]``, noting the size of its terms."""
        self.note(weights @ np.abs(x))
        return weights @ x

    def mean(self, x: np.ndarray) -> np.ndarray:
        """Expectation under pi of ``[M, ...]``, by summing over every sequence."""
        return self.total(self.p, x)

    def mean_mu(self, x: np.ndarray) -> np.ndarray:
        """Expectation under mu of ``[M, ...]``."""
        return self.total(self.mu, x)

    def visits(self, weights: Float[np.ndarray, " M"]) -> Float[np.ndarray, " S"]:
        """``[S]`` expected number of tokens emitted in each context, with ``[M]`` probabilities of sequences."""
        each = np.broadcast_to(weights[:, None], self.mask.shape)
        return np.bincount(self.contexts[self.mask], each[self.mask], minlength=self.pair.automaton.contexts)

    # ------------------------------------------------------------------------------------------- derivatives

    def tilted(self, direction: int) -> Complex[np.ndarray, "S V"]:
        """``[S, V]`` log-probs a small imaginary step along one parameter.

        The family pi(v|s) exp(eps . score(s, v)) / Z(s) passes through the policy with the policy's own scores, so
        first derivatives along it are derivatives in theta, whatever the parametrisation.
        """
        raised = 1j * COMPLEX_STEP * self.pair.policy.scores[..., direction]
        log_z = np.log((np.exp(self.log_policy) * np.exp(raised)).sum(axis=1, keepdims=True))
        return self.log_policy + raised - log_z

    def derivative(self, function: Callable[[np.ndarray], Any]) -> Float[np.ndarray, "... d"]:
        """``[..., d]`` gradient in theta of a function of the policy's log-probs ``[S, V]``, by the complex step.

        An actual derivative, exact to rounding; it uses neither the score identity nor any step of a derivation.
        """
        parts = [np.imag(function(self.tilted(j))) / COMPLEX_STEP for j in range(self.pair.policy.parameters)]
        return np.stack(parts, axis=-1)

    def pathwise(self, k: Callable[[np.ndarray], np.ndarray]) -> Float[np.ndarray, " d"]:
        """``[d]`` gradient of the mean of sum_t k(delta_t) with the samples held fixed: what a loss gives autograd."""

        def value(log_probs: np.ndarray) -> np.ndarray:
            return np.where(self.mask, k(self.log_ratio(log_probs)), 0.0).sum(axis=1)

        return np.asarray(self.mean(self.derivative(value)))

    def expected(self, k: Callable[[np.ndarray], np.ndarray]) -> Float[np.ndarray, " d"]:
        """``[d]`` gradient of E[sum_t k(delta_t)], the samples moving with theta."""

        def weighted(log_probs: np.ndarray) -> np.ndarray:
            inside = np.where(self.mask, k(self.log_ratio(log_probs)), 0.0).sum(axis=1)
            return np.exp(self.log_prob(log_probs)) * inside

        return np.asarray(self.total(np.ones(len(self.p)), self.derivative(weighted)))

    def local(
        self, divergence: Callable[[np.ndarray, np.ndarray], np.ndarray], weights: np.ndarray | None = None
    ) -> Float[np.ndarray, " d"]:
        """``[d]`` expected sum over t of the gradient of a next-token divergence, the prefix held fixed.

        Args:
            divergence: ``(log pi, log q) [S, V] -> [S, V]``, its terms.
            weights: ``[M]`` probabilities of the sequences whose prefixes are taken; the policy's if left out.
        """
        visits = self.visits(self.p if weights is None else weights)
        terms = self.derivative(lambda log_probs: divergence(log_probs, self.log_reference))
        self.note(np.tensordot(visits, np.abs(terms).sum(axis=1), axes=1))
        return np.asarray(visits @ terms.sum(axis=1))

    # -------------------------------------------------------------------------------------- the exact engine

    def exact(self, name: str) -> Any:
        """A quantity of ``klgrad.synth.exact`` at this length, by its recurrence over contexts."""
        found = getattr(exact, name)(self.pair, [self.length])[0]
        self.note(found)
        return found

    def engine(self, configuration: str | Configuration) -> Float[np.ndarray, " d"]:
        """``[d]`` expected gradient of a configuration, by the recurrence of moments.

        Its terms are one sequence's gradients: their root mean square is noted.
        """
        found = self._moments(configuration, "trace")
        self.note(np.sqrt(found.covariance[0] + (found.mean[0] ** 2).sum()))
        return found.mean[0]

    def variance(self, configuration: str) -> float:
        """Trace of the covariance of one sequence's gradient (leave-one-out: N times that of the estimate)."""
        covariance = self._moments(configuration, "trace").covariance
        assert covariance is not None
        return float(covariance[0])

    def _moments(self, configuration: str | Configuration, covariance: str) -> Any:
        wanted = parse(configuration) if isinstance(configuration, str) else configuration
        return moments(self.pair, [wanted], [self.length], covariance=covariance)[0]


def check_size(count: int, length: int, parameters: int) -> None:
    """Raise ValueError when the scores of that many sequences do not fit."""
    if count * length * parameters > _MAX_ENTRIES:
        raise ValueError(
            f"{count} sequences of {length} tokens with {parameters} parameters each are past the limit for a "
            "derivation: take a shorter length"
        )


def reverse_kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """``[S, V]`` terms of KL(pi || q) of each context's next token, from log-probs; complex arguments allowed."""
    return np.exp(p) * (p - q)


def forward_kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """``[S, V]`` terms of KL(q || pi)."""
    return np.exp(q) * (q - p)


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
