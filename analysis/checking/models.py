"""The models a check runs on: random pairs small enough to hold every sequence, and the fields known on them.

Lengths 1, 2, 4 and 8, without and with an end token (then replies differ in length and are padded), and short ones of
vocabularies of 2, 3 and 4 tokens in both kinds, so that what depends on the vocabulary's size is told from what depends
on the length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np

from klgrad.analysis.checking import fields
from klgrad.synth.automata import markov
from klgrad.synth.enumeration import Batch, log_probability, rows_of, sequences
from klgrad.synth.policies import PolicyPair, log_softmax, tabular

if TYPE_CHECKING:
    from jaxtyping import Float, Int

LENGTHS = (1, 2, 4, 8)
SHORT = (1, 2, 3)
SEED = 20251226
_CELLS = ((3, False), (4, False), (2, True), (4, True))  # vocabulary, end token: besides (2, False) and (3, True)
_WIDE = 8
_NEAR = 0.6  # of the usual logits: many words reach far, and clamps that the usual pairs leave alone would act


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
    def vocabulary(self) -> int:
        """V."""
        return self.pair.automaton.vocabulary

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
        return float(self.probability @ fields.local(self, "reverse KL").sum(axis=1))

    @cached_property
    def truth(self) -> Float[np.ndarray, " d"]:
        """The gradient of the sequence-level reverse KL (for a model sampled from its policy)."""
        return self.fields["sequence"]

    @cached_property
    def fields(self) -> Mapping[str, Float[np.ndarray, " d"]]:
        """Name -> expected gradient, computed when asked for; ``sequence``, ``token``, ``token-forward`` come first."""
        return fields.of(self)

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


def _random(rng: np.random.Generator, vocabulary: int, ends: bool, name: str, size: float = 1.0) -> PolicyPair:
    automaton = markov(vocabulary, 1, start=(0,), eos=ends)
    policy, reference = size * rng.normal(size=(2, *automaton.next_context.shape))
    policy[:, -1] -= ends  # replies long enough to be worth looking at
    return PolicyPair(automaton, tabular(automaton, policy), log_softmax(reference), None, name)


@cache
def pairs(count: int = 2) -> tuple[PolicyPair, ...]:
    """Random pairs without an end token (V = 2) and with one (V = 3, the last ends); ``count`` of each."""
    rng = np.random.default_rng(SEED)
    kinds = ((2, False, "fixed length"), (3, True, "end token"))
    return tuple(_random(rng, V, ends, f"{kind} {i + 1}") for V, ends, kind in kinds for i in range(count))


@cache
def models(lengths: tuple[int, ...] = LENGTHS, count: int = 2) -> tuple[Model, ...]:
    """Every probe pair at every length."""
    return tuple(model(pair, length) for pair in pairs(count) for length in lengths)


@cache
def vocabularies(wide: bool = False) -> tuple[Model, ...]:
    """Short models of other vocabularies, in both kinds; ``wide``: one of 8 tokens too, where a top-k shows."""
    rng = np.random.default_rng(SEED + 1)
    found: list[tuple[PolicyPair, tuple[int, ...]]]
    found = [(_random(rng, V, ends, f"V = {V}", _NEAR), SHORT) for V, ends in _CELLS]
    found += [(_random(rng, _WIDE, False, f"V = {_WIDE}", _NEAR), SHORT[:2])] if wide else []
    return tuple(model(pair, length) for pair, lengths in found for length in lengths)


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


@cache
def exact_batches() -> tuple[tuple[Model, list[int]], ...]:
    """Models with policies in eighths, and for each the rows of a batch that holds every sequence in its proportion."""
    rng, found = np.random.default_rng(SEED + 2), []
    for vocabulary, ends in ((2, False), (3, True)):
        automaton = markov(vocabulary, 1, start=(0,), eos=ends)
        shape = automaton.next_context.shape
        eighths = np.stack([rng.permutation([3, 5] if vocabulary == 2 else [2, 5, 1]) for _ in range(shape[0])])
        pair = PolicyPair(
            automaton, tabular(automaton, np.log(eighths / 8)), log_softmax(rng.normal(size=shape)), None, "eighths"
        )
        for length in (2, 3):
            m = model(pair, length)
            counts = np.rint(m.probability * 8**length).astype(int)
            found.append((m, np.repeat(np.arange(len(counts)), counts).tolist()))
    return tuple(found)
