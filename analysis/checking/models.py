"""The models a check runs on: random pairs small enough to hold every sequence, and the fields known on them.

Lengths 1, 2, 4 and 8, without and with an end token (then replies differ in length and are padded). A field is the
expected gradient of something one could have meant: the sequence-level KL, its token-level part, another
divergence. Fields here are plain sums over all sequences; the tests compare them with the exact engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np

from klgrad.synth.automata import markov
from klgrad.synth.enumeration import Batch, log_probability, rows_of, sequences
from klgrad.synth.policies import PolicyPair, log_softmax, tabular

if TYPE_CHECKING:
    from jaxtyping import Float, Int

LENGTHS = (1, 2, 4, 8)
SEED = 20251226

# Divergences by the detached coefficient f(r) - r f'(r) that gives the token-level gradient of E[f(r)] (theory of
# f-divergences in A Comedy of Estimators, section 2, and its appendix F), with delta = -log r = log pi / pi_ref;
# a constant added to a coefficient changes nothing in expectation.
DIVERGENCES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
    # name: (generator f as a function of delta, coefficient as a function of delta)
    "reverse KL": (lambda d: d, lambda d: d),
    "forward KL": (lambda d: -d * np.exp(-d), lambda d: -np.exp(-d)),
    "Jeffreys": (lambda d: d - d * np.exp(-d), lambda d: d - np.exp(-d)),
    "E[k2], the mean squared log-ratio / 2": (lambda d: d * d / 2, lambda d: d * d / 2 + d),
    "Jensen-Shannon": (
        lambda d: (np.exp(-d) * (-d - np.log1p(np.exp(-d)) + np.log(2)) + np.log(2) - np.log1p(np.exp(-d))) / 2,
        lambda d: (np.log(2) - np.log1p(np.exp(-d))) / 2,
    ),
    "total variation": (lambda d: np.abs(np.expm1(-d)) / 2, lambda d: np.sign(d) / 2),
    "chi-squared(pi_ref || pi)": (lambda d: np.expm1(-d) ** 2, lambda d: -np.expm1(-2 * d)),
    "chi-squared(pi || pi_ref)": (lambda d: np.exp(d) - 2 + np.exp(-d), lambda d: 2 * np.expm1(d)),
    "squared Hellinger": (lambda d: 2 * (1 - np.exp(-d / 2)), lambda d: 1 - np.exp(-d / 2)),
}


@dataclass(frozen=True, eq=False)
class Model:
    """A pair with every sequence of one length: M of them, d parameters.

    Args:
        pair: the pair; its sampler is what sequences are weighted with.
        length: T.
        contexts: ``[M, T]``.
        batch: the log-probs of every sequence, as numpy arrays (``synth.enumeration.Batch``); 0 where padded.
        probability: ``[M]`` of each sequence under the sampler.
    """

    pair: PolicyPair
    length: int
    contexts: Int[np.ndarray, "M T"]
    batch: Batch
    probability: Float[np.ndarray, " M"]

    @property
    def ends(self) -> bool:
        """Whether replies end and are padded."""
        return self.pair.automaton.end >= 0

    @cached_property
    def scores(self) -> Float[np.ndarray, "M T d"]:
        """Scores of the sampled tokens, 0 where padded."""
        return np.where(self.batch.mask[..., None], self.pair.policy.scores[self.contexts, self.batch.tokens], 0.0)

    def gradients(self, token: np.ndarray, vocab: np.ndarray | None = None) -> Float[np.ndarray, "M d"]:
        """Each sequence's gradient from weights on scores: ``token [M, T]`` and ``vocab [M, T, V]``."""
        each = np.einsum("mt,mtd->md", np.where(self.batch.mask, token, 0.0), self.scores)
        if vocab is not None:
            weight = np.where(self.batch.mask[..., None], vocab, 0.0)
            each = each + np.einsum("mtv,mtvd->md", weight, self.pair.policy.scores[self.contexts])
        return each

    @cached_property
    def kl(self) -> float:
        """The sequence-level reverse KL of policy and reference on the sampled distribution's own prefixes."""
        return float(self.probability @ self._local("reverse KL").sum(axis=1))

    @cached_property
    def truth(self) -> Float[np.ndarray, " d"]:
        """The gradient of the sequence-level reverse KL (for a model sampled from its policy)."""
        return self.fields["sequence"]

    @cached_property
    def fields(self) -> dict[str, Float[np.ndarray, " d"]]:
        """Name -> expected gradient; ``sequence``, ``token``, ``token-forward`` and ``future`` come first."""
        token = {name: self._token_level(name) for name in DIVERGENCES}
        future = {name: self._future(name) for name in DIVERGENCES}
        reverse = "reverse KL"
        first = {
            "sequence": token[reverse] + future[reverse],
            "token": token[reverse],
            "token-forward": token["forward KL"],
            "future": future[reverse],
        }
        others = [name for name in DIVERGENCES if name not in (reverse, "forward KL")]
        named = {f"token-level {name}": token[name] for name in others}
        named |= {f"sequence-level {name}": token[name] + future[name] for name in (*others, "forward KL")}
        log_pi, log_ref = self.batch.log_probs, self.batch.reference
        named["negative entropy"] = self._whole(log_pi)
        named["cross-entropy with the reference"] = self._whole(-log_ref)
        named["token-level negative entropy"] = self._own(log_pi)
        ratio = np.exp(-np.where(self.batch.mask, self.log_ratio, 0.0).sum(axis=1, keepdims=True))
        named["KL(pi_ref || pi) of whole sequences"] = self._own(np.broadcast_to(-ratio, log_pi.shape))
        tokens = self.batch.mask.sum(axis=1, keepdims=True)
        named["E[1/length], which makes replies longer"] = self._own(np.broadcast_to(1 / tokens, log_pi.shape))
        return first | named

    def _local(self, divergence: str) -> Float[np.ndarray, "M T"]:
        """The divergence of the next-token distributions at every place, 0 where padded."""
        generator, _ = DIVERGENCES[divergence]
        pi = self.pair.policy.log_probs
        each = (np.exp(pi) * generator(self.pair.log_ratio)).sum(axis=1)
        return np.where(self.batch.mask, each[self.contexts], 0.0)

    def _token_level(self, divergence: str) -> np.ndarray:
        return self._own(DIVERGENCES[divergence][1](np.where(self.batch.mask, self.log_ratio, 0.0)))

    def _future(self, divergence: str) -> np.ndarray:
        local = self._local(divergence)
        later = local.sum(axis=1, keepdims=True) - np.cumsum(local, axis=1)
        return self.probability @ self.gradients(later)

    def _own(self, coefficient: np.ndarray) -> np.ndarray:
        return self.probability @ self.gradients(coefficient)

    def _whole(self, value: np.ndarray) -> np.ndarray:
        total = np.where(self.batch.mask, value, 0.0).sum(axis=1, keepdims=True)
        return self.probability @ self.gradients(np.broadcast_to(total, value.shape))

    @property
    def log_ratio(self) -> Float[np.ndarray, "M T"]:
        """delta of the sampled tokens."""
        return self.batch.log_probs - self.batch.reference


def model(pair: PolicyPair, length: int) -> Model:
    """Every sequence of the pair up to the length that its sampler can emit."""
    every = sequences(pair.automaton, length)
    at = (every.contexts, every.tokens)

    def taken(log_probs: np.ndarray) -> np.ndarray:
        return np.where(every.mask, log_probs[at], 0.0)

    with np.errstate(divide="ignore"):
        sampled = log_probability(every, pair.sampler)
    keep = np.exp(sampled) > 0
    full = [
        np.where(every.mask[..., None], table[every.contexts], 0.0) for table in (pair.policy.log_probs, pair.reference)
    ]
    parts = (
        every.tokens, every.mask, taken(pair.policy.log_probs), taken(pair.reference), taken(pair.sampler), *full,
    )  # fmt: skip
    return Model(pair, length, every.contexts[keep], Batch(*(part[keep] for part in parts)), np.exp(sampled[keep]))


@cache
def pairs(count: int = 2) -> tuple[PolicyPair, ...]:
    """Random pairs without an end token (V = 2) and with one (V = 3, the last ends); ``count`` of each."""
    rng = np.random.default_rng(SEED)
    found = []
    for vocabulary, eos in ((2, False), (3, True)):
        for i in range(count):
            automaton = markov(vocabulary, 1, start=(0,), eos=eos)
            policy, reference = rng.normal(size=(2, *automaton.next_context.shape))
            policy[:, -1] -= eos  # replies long enough to be worth looking at
            kind = "end token" if eos else "fixed length"
            found.append(
                PolicyPair(automaton, tabular(automaton, policy), log_softmax(reference), None, f"{kind} {i + 1}")
            )
    return tuple(found)


@cache
def models(lengths: tuple[int, ...] = LENGTHS, count: int = 2) -> tuple[Model, ...]:
    """Every probe pair at every length."""
    return tuple(model(pair, length) for pair in pairs(count) for length in lengths)


@cache
def drifted() -> Model:
    """A pair that has come apart, two tokens long: log-ratios from -25 to 25, where clamps act."""
    automaton = markov(2, 1, start=(0,))
    policy, reference = np.array([[0.0, 12.5], [0.4, 0.0]]), np.array([[0.0, -12.5], [0.0, 0.7]])
    return model(PolicyPair(automaton, tabular(automaton, policy), log_softmax(reference), None, "drifted"), 2)


def each_row(batch: Batch) -> Iterator[Batch]:
    """The batch's rows, each a batch of its own."""
    return (rows_of(batch, [i]) for i in range(len(batch.tokens)))


def with_reference(m: Model, log_probs: Float[np.ndarray, "S V"]) -> Model:
    """The same model with another reference."""
    return model(replace(m.pair, reference=log_probs), m.length)
