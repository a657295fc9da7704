"""The fields known on a model: the expected gradients of what one could have meant, and the names to ask for them by.

Plain sums over all sequences; the tests compare them with the exact engine and with autograd. Each is computed when it
is first asked for, since most functions are named by one of the first few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from klgrad.synth.enumeration import Batch
from klgrad.synth.policies import PolicyPair

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Model(Protocol):
    """What a field is computed from: ``models.Model``, every sequence of a pair with its probability."""

    @property
    def pair(self) -> PolicyPair: ...
    @property
    def contexts(self) -> Int[np.ndarray, "M T"]: ...
    @property
    def batch(self) -> Batch: ...
    @property
    def probability(self) -> Float[np.ndarray, " M"]: ...
    @property
    def log_ratio(self) -> Float[np.ndarray, "M T"]: ...
    def gradients(self, token: np.ndarray, vocab: np.ndarray | None = None) -> Float[np.ndarray, "M d"]: ...


Make = Callable[[Model], np.ndarray]

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


WHOLE = "KL(pi_ref || pi) of whole sequences"
LONGER = "E[1/length], which makes replies longer"
FIRST = ("sequence", "token", "token-forward", "future")
_TOP = (1, 2, 3, 4, 5)


class Fields(Mapping[str, "Float[np.ndarray, ' d']"]):
    """Name -> expected gradient ``[d]`` on one model, made when asked for and kept."""

    def __init__(self, model: Model) -> None:
        self._model, self._known = model, dict[str, np.ndarray]()

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._known:
            self._known[name] = MAKERS[name](self._model)
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(MAKERS)

    def __len__(self) -> int:
        return len(MAKERS)


def of(model: Model) -> Fields:
    """The model's fields."""
    return Fields(model)


def local(model: Model, divergence: str) -> Float[np.ndarray, "M T"]:
    """The divergence of the next-token distributions at every place, 0 where padded."""
    generator, _ = DIVERGENCES[divergence]
    each = (np.exp(model.pair.policy.log_probs) * generator(model.pair.log_ratio)).sum(axis=1)
    return np.where(model.batch.mask, each[model.contexts], 0.0)


def _own(model: Model, coefficient: np.ndarray) -> np.ndarray:
    """The gradient with these weights on the sampled tokens' own scores."""
    found: np.ndarray = model.probability @ model.gradients(coefficient)
    return found


def _token_level(divergence: str, model: Model) -> np.ndarray:
    return _own(model, DIVERGENCES[divergence][1](np.where(model.batch.mask, model.log_ratio, 0.0)))


def _future(divergence: str, model: Model) -> np.ndarray:
    each = local(model, divergence)
    return _own(model, each.sum(axis=1, keepdims=True) - np.cumsum(each, axis=1))


def _sequence_level(divergence: str, model: Model) -> np.ndarray:
    return _token_level(divergence, model) + _future(divergence, model)


def _whole(value: Callable[[Model], np.ndarray], model: Model) -> np.ndarray:
    """The gradient of the expectation of a sum over tokens that is itself held constant."""
    total = np.where(model.batch.mask, value(model), 0.0).sum(axis=1, keepdims=True)
    return _own(model, np.broadcast_to(total, model.batch.mask.shape))


def _forward_of_sequences(model: Model) -> np.ndarray:
    ratio = np.exp(-np.where(model.batch.mask, model.log_ratio, 0.0).sum(axis=1, keepdims=True))
    return _own(model, np.broadcast_to(-ratio, model.batch.mask.shape))


def _longer(model: Model) -> np.ndarray:
    tokens = model.batch.mask.sum(axis=1, keepdims=True)
    return _own(model, np.broadcast_to(1 / tokens, model.batch.mask.shape))


def _full(slope: Callable[[np.ndarray, np.ndarray], np.ndarray], model: Model) -> np.ndarray:
    """The gradient in the loss of a term of the whole vocabulary, from its slope ``[S, V]`` in the log-probs."""
    table = slope(model.pair.policy.log_probs, model.pair.reference)
    found: np.ndarray = model.probability @ model.gradients(
        np.zeros(model.batch.mask.shape), np.where(model.batch.mask[..., None], table[model.contexts], 0.0)
    )
    return found


def _head(log_probs: np.ndarray, k: int) -> np.ndarray:
    """Where a context's k likeliest tokens are."""
    k = min(k, log_probs.shape[1])
    least = np.sort(log_probs, axis=1)[:, -k][:, None]
    return log_probs >= least


def _truncated(k: int, teacher: bool, pi: np.ndarray, ref: np.ndarray) -> np.ndarray:
    """sum over the head of pi log(pi / ref)."""
    return np.where(_head(ref if teacher else pi, k), np.exp(pi) * (pi - ref + 1), 0.0)


def _renormalised(k: int, teacher: bool, pi: np.ndarray, ref: np.ndarray) -> np.ndarray:
    """The KL of the two heads, each normalised."""
    head = _head(ref if teacher else pi, k)
    p, q = (np.where(head, np.exp(a), 0.0) for a in (pi, ref))
    p, q = (a / a.sum(axis=1, keepdims=True) for a in (p, q))
    u = np.where(head, np.log(np.where(head, p, 1.0) / np.where(head, q, 1.0)), 0.0)
    return p * (u - (p * u).sum(axis=1, keepdims=True))


def _bucket(k: int, teacher: bool, pi: np.ndarray, ref: np.ndarray) -> np.ndarray:
    """The KL of the heads with all other tokens as one."""
    head = _head(ref if teacher else pi, k)
    rest = [np.where(head, 0.0, np.exp(a)).sum(axis=1, keepdims=True) for a in (pi, ref)]
    tail = np.log(np.maximum(rest[0], 1e-300) / np.maximum(rest[1], 1e-300))
    return np.exp(pi) * np.where(head, pi - ref, tail)


def _bernoulli(model: Model) -> np.ndarray:
    """p log(p/q) + (1-p) log((1-p)/(1-q)) of the sampled token against all others."""
    mask = model.batch.mask
    p, q = (np.where(mask, np.exp(a), 0.5) for a in (model.batch.log_probs, model.batch.reference))
    return _own(model, p * (np.log(p / q) - np.log((1 - p) / (1 - q))))


_OTHERS = [name for name in DIVERGENCES if name not in ("reverse KL", "forward KL")]
TRUNCATED: dict[str, Make] = {
    f"token-level {words.format(k=k, whose=whose)}": partial(_full, partial(slope, k, teacher))
    for k in _TOP
    for teacher, whose in ((False, "policy"), (True, "reference"))
    for slope, words in (
        (_truncated, "KL cut to the {whose}'s top {k}, the tail left out"),
        (_bucket, "KL of the {whose}'s top {k} and one bucket for the tail"),
        (_renormalised, "KL of the {whose}'s top {k}, renormalised"),
    )
}
BERNOULLI = "token-level Bernoulli KL of the sampled token against all others"
MAKERS: dict[str, Make] = {
    "sequence": partial(_sequence_level, "reverse KL"),
    "token": partial(_token_level, "reverse KL"),
    "token-forward": partial(_token_level, "forward KL"),
    "future": partial(_future, "reverse KL"),
    **{f"token-level {name}": partial(_token_level, name) for name in _OTHERS},
    **{f"sequence-level {name}": partial(_sequence_level, name) for name in (*_OTHERS, "forward KL")},
    "negative entropy": partial(_whole, lambda m: m.batch.log_probs),
    "cross-entropy with the reference": partial(_whole, lambda m: -m.batch.reference),
    "token-level negative entropy": lambda m: _own(m, m.batch.log_probs),
    "token-level cross-entropy with the reference": lambda m: _own(m, -m.batch.reference),
    WHOLE: _forward_of_sequences,
    LONGER: _longer,
    BERNOULLI: _bernoulli,
    **TRUNCATED,
}
# what --target offers -> the fields that are meant; a name without a level means either
TARGETS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in FIRST},
    "forward-kl": (WHOLE,),
    "forward-kl-along-samples": ("sequence-level forward KL",),
    **{
        name: (f"token-level {field}", f"sequence-level {field}")
        for name, field in {
            "jensen-shannon": "Jensen-Shannon", "jeffreys": "Jeffreys", "total-variation": "total variation",
            "chi-squared": "chi-squared(pi_ref || pi)", "reverse-chi-squared": "chi-squared(pi || pi_ref)",
            "hellinger": "squared Hellinger", "k2": "E[k2], the mean squared log-ratio / 2",
        }.items()
    },
    "entropy": ("token-level negative entropy", "negative entropy"),
    "cross-entropy": ("token-level cross-entropy with the reference", "cross-entropy with the reference"),
}  # fmt: skip
