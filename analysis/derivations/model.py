"""A pair at one length as the sides of a step see it: means, true derivatives and the exact engine.

Shapes: M sequences, T length, S contexts, V tokens, d parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.analysis.derivations.divergences import Terms
from klgrad.analysis.derivations.inputs import EPS, Bounded, LogRatio
from klgrad.analysis.derivations.rounding import gradient_terms, roundings, target_terms
from klgrad.analysis.derivations.sequences import Sequences
from klgrad.synth import exact
from klgrad.synth.configurations import Configuration, parse
from klgrad.synth.moments import moments
from klgrad.synth.policies import PolicyPair

if TYPE_CHECKING:
    from jaxtyping import Complex, Float

COMPLEX_STEP = 1e-30  # it has no cancellation and so no best size


class Model(Sequences):
    """Every sequence of a pair, with the sums over them; arguments and errors are those of ``Sequences``.

    All sums over sequences go through ``total`` and add to ``rounding`` how far rounding may have carried them:
    a difference of two sides is judged by the terms that were added up. ``largest_term`` is the largest sum of
    their absolute values.
    """

    def __init__(self, pair: PolicyPair, length: int, *, off_policy: bool = False) -> None:
        super().__init__(pair, length, off_policy=off_policy)
        alive = int(pair.automaton.alive.sum())
        most = 1 + length * float(np.abs(self.tables.scores).max())
        self.floor = COMPLEX_STEP**2 * most**3  # what the complex step leaves out: a third derivative times its square
        self.start()
        self.unit = EPS * roundings(alive, pair.automaton.vocabulary, length, len(self.mask))

    def start(self) -> None:
        """Forget the terms of earlier sums."""
        self.largest_term, self.rounding = 0.0, self.floor

    # ------------------------------------------------------------------------------------------ expectations

    def weigh(self, weights: Float[np.ndarray, "M T"]) -> Float[np.ndarray, "M d"]:
        """``[M, d]`` sum over t of a weight times the token's score, noting the size of its terms."""
        self.note(self.mu @ np.einsum("mt,mtd->md", np.abs(weights), self.score_terms.size))
        return np.einsum("mt,mtd->md", weights, self.scores)

    def along(self, values: Float[np.ndarray, "M T"]) -> Float[np.ndarray, " M"]:
        """``[M]`` sum over t of a value, noting the size of its terms."""
        self.note(self.mu @ np.abs(values).sum(axis=1))
        return np.asarray(values.sum(axis=1))

    def note(self, size: np.ndarray | float, error: np.ndarray | float = 0.0) -> None:
        """Add to the rounding that of a sum whose absolute terms add up to ``size``, with errors of their own."""
        largest = float(np.max(size, initial=0.0))
        self.largest_term = max(self.largest_term, largest)
        self.rounding += self.unit * largest + float(np.max(error, initial=0.0))

    def on(self, other: Model, side: Callable[[Model], Any]) -> Any:
        """A side evaluated on another model, its terms noted here."""
        other.start()
        found = side(other)
        self.note(other.largest_term, other.rounding)
        return found

    def total(self, weights: np.ndarray, x: np.ndarray, size: np.ndarray | None = None) -> np.ndarray:
        """Sum over sequences of ``weights [M]`` times ``[M, ...]``, noting the size of its terms.

        Args:
            size: ``[M, ...]`` the absolute terms that each ``x`` was made of, if it was a difference.
        """
        size = np.abs(x) if size is None else size
        self.note(np.abs(weights) @ size, EPS * (np.abs(weights * self._exponent(weights)) @ size))
        return _pairwise(weights, x)

    def _exponent(self, weights: np.ndarray) -> np.ndarray:
        """``[M]`` the log of each probability, whose absolute error its exponential has as a relative one."""
        with np.errstate(divide="ignore"):
            found = np.log(np.abs(weights))
        return np.where(np.isfinite(found), found, 0.0)

    def mean(self, x: np.ndarray, size: np.ndarray | None = None) -> np.ndarray:
        """Expectation under pi of ``[M, ...]``, by summing over every sequence."""
        return self.total(self.p, x, size)

    def mean_mu(self, x: np.ndarray, size: np.ndarray | None = None) -> np.ndarray:
        """Expectation under mu of ``[M, ...]``."""
        return self.total(self.mu, x, size)

    def visits(self, weights: Float[np.ndarray, " M"]) -> Float[np.ndarray, " S"]:
        """``[S]`` expected number of tokens emitted in each context, with ``[M]`` probabilities of sequences."""
        each = np.broadcast_to(weights[:, None], self.mask.shape)
        return np.bincount(self.contexts[self.mask], each[self.mask], minlength=self.pair.automaton.contexts)

    # ------------------------------------------------------------------------------------------- derivatives

    def tilted(self, direction: int) -> Complex[np.ndarray, "S V"]:
        """``[S, V]`` log-probs a small imaginary step along one parameter.

        The family pi(v|s) exp(eps . score(s, v)) / Z(s) passes through the policy with the policy's own scores, so
        first derivatives along it are derivatives in theta, whatever the parametrisation. Of log Z only the
        imaginary part is kept: the real one is 1e-60 and the rounding of the sum.
        """
        raised = 1j * COMPLEX_STEP * self.tables.scores[..., direction]
        log_z = np.log((np.exp(self.log_policy) * np.exp(raised)).sum(axis=1, keepdims=True))
        return self.log_policy + raised - 1j * log_z.imag

    def derivative(self, function: Callable[[np.ndarray], Any]) -> Float[np.ndarray, "... d"]:
        """``[..., d]`` gradient in theta of a function of the policy's log-probs ``[S, V]``, by the complex step.

        An actual derivative, exact to rounding; it uses neither the score identity nor any step of a derivation.
        """
        parts = [np.imag(function(self.tilted(j))) / COMPLEX_STEP for j in range(self.pair.policy.parameters)]
        return np.stack(parts, axis=-1)

    def slopes(self, k: Callable[[np.ndarray], np.ndarray]) -> Float[np.ndarray, "M T"]:
        """``[M, T]`` absolute derivative of k in delta: for the size of terms only."""
        return self.taken(np.abs(np.imag(k(self.tables.delta.value + 1j * COMPLEX_STEP)) / COMPLEX_STEP))

    def pathwise(self, k: Callable[[np.ndarray], np.ndarray]) -> Float[np.ndarray, " d"]:
        """``[d]`` gradient of the mean of sum_t k(delta_t) with the samples held fixed: what a loss gives autograd."""
        size = np.einsum("mt,mtd->md", self.slopes(k), self.score_terms.size)
        found = self.derivative(lambda log_probs: self.taken(k(self.log_ratios(log_probs))).sum(axis=1))
        return np.asarray(self.mean(found, size))

    def expected(self, k: Callable[[np.ndarray], np.ndarray]) -> Float[np.ndarray, " d"]:
        """``[d]`` gradient of E[sum_t k(delta_t)], the samples moving with theta."""

        def weighted(log_probs: np.ndarray) -> np.ndarray:
            return np.exp(self.log_prob(log_probs)) * self.taken(k(self.log_ratios(log_probs))).sum(axis=1)

        values = self.taken(np.abs(k(self.tables.delta.value))).sum(axis=1)
        size = values[:, None] * self.score_size + np.einsum("mt,mtd->md", self.slopes(k), self.score_terms.size)
        self.mean(size)  # only to note it
        return _pairwise(np.ones(len(self.p)), self.derivative(weighted))

    def local(self, divergence: Terms, weights: np.ndarray | None = None) -> Float[np.ndarray, " d"]:
        """``[d]`` expected sum over t of the gradient of a next-token divergence, the prefix held fixed.

        Args:
            divergence: ``(log pi, delta) [S, V] -> [S, V]``, its terms.
            weights: ``[M]`` probabilities of the sequences whose prefixes are taken; the policy's if left out.
        """
        visits = self.visits(self.p if weights is None else weights)
        seen = (visits > 0)[:, None]  # where nobody comes a ratio may be past the largest double
        with np.errstate(all="ignore"):
            terms = self.derivative(lambda log_probs: divergence(log_probs, self.log_ratios(log_probs)))
            own = np.abs(divergence(self.log_policy, self.tables.delta.value))[..., None] * np.abs(self.tables.scores)
        terms, own = np.where(seen[..., None], terms, 0.0), np.where(seen[..., None], own, 0.0)
        self.note(np.tensordot(visits, (np.abs(terms) + own).sum(axis=1), axes=1))
        return np.asarray(visits @ terms.sum(axis=1))

    # -------------------------------------------------------------------------------------- the exact engine

    def exact(self, name: str, toward: str = "delta") -> Any:
        """A quantity of ``klgrad.synth.exact`` at this length, by its recurrence over contexts.

        Args:
            toward: ``drift`` for the gradient of the KL to the sampler in the place of that to the reference.
        """
        pair = replace(self.pair, reference=self.pair.sampler) if toward == "drift" else self.pair
        self._note_engine(*self._terms_of(name, getattr(self.tables, toward)))
        return getattr(exact, name)(pair, [self.length])[0]

    def _terms_of(self, name: str, ratio: LogRatio) -> tuple[np.ndarray, Bounded]:
        """``[M]`` the probabilities and ``[M, ...]`` the terms that a quantity of the engine is the sum of."""
        t, sampled = self.tables, name in ("token_gradient", "token_forward_gradient")
        if name in ("mean_length", "entropy", "kl", "forward_kl"):
            row = {
                "mean_length": (np.ones_like(t.delta.value), 0.0 * t.delta.value),
                "entropy": (t.log_policy, t.lack_mass + 4 * EPS * np.abs(t.log_policy)),
            }
            terms = Bounded(*(self.taken(np.abs(x)).sum(axis=1) for x in row.get(name, ratio)))
            return (np.exp(self.log_prob(t.log_reference)) if name == "forward_kl" else self.p), terms
        if name == "token_forward_gradient":
            terms = Bounded(*(np.einsum("mt,mtd->md", self.r, x) for x in self.score_terms))
        else:
            terms = target_terms(self, ratio)
        return (self.mu if sampled else self.p), terms

    def _note_engine(self, weights: np.ndarray, terms: Bounded) -> None:
        """Note sums that the engine takes inside its recurrences, on its own float64 tables."""
        relative = 3 * self.length * self.tables.lack_mass + EPS * np.abs(self._exponent(weights))
        self.note(weights @ terms.size, weights @ terms.error + (weights * relative) @ terms.size)

    def engine(self, configuration: str | Configuration) -> Float[np.ndarray, " d"]:
        """``[d]`` expected gradient of a configuration, by the recurrence of moments."""
        wanted = parse(configuration) if isinstance(configuration, str) else configuration
        self._note_engine(self.mu, gradient_terms(self, wanted))
        return self._moments(wanted).mean[0]

    def variance(self, configuration: str) -> float:
        """Trace of the covariance of one sequence's gradient (leave-one-out: N times that of the estimate).

        The engine sets a variance below 1e-12 of its second moment to zero.
        """
        wanted = parse(configuration)
        size, error = gradient_terms(self, wanted)
        self._note_engine(self.mu, Bounded((size**2).sum(axis=1), (2 * size * error + 1e-12 * size**2).sum(axis=1)))
        covariance = self._moments(wanted).covariance
        assert covariance is not None
        return float(covariance[0])

    def _moments(self, wanted: Configuration) -> Any:
        return moments(self.pair, [wanted], [self.length], covariance="trace")[0]


def _pairwise(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Sum over the first axis, in pairs along contiguous memory: the same on every CPU, and few roundings deep."""
    return np.ascontiguousarray(weights * np.moveaxis(x, 0, -1)).sum(axis=-1)
