"""Which known field is a configuration's expected gradient?

Decided on random probe models, not on the pair at hand: near the reference, or at one token, different fields
coincide. The expected gradients of all probes are stacked and written as one combination of the known fields;
coefficients that fit every probe to rounding are a verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from klgrad.synth.automata import markov
from klgrad.synth.configurations import Configuration
from klgrad.synth.exact import token_forward_gradient, token_gradient, true_gradient
from klgrad.synth.moments import moments
from klgrad.synth.policies import PolicyPair, log_softmax, tabular, with_behaviour

FIELDS = ("sequence", "token", "token-forward")
STALE_FIELDS = (*FIELDS, "token on stale prefixes", "token-forward on stale prefixes")
TOLERANCE = 1e-8
LENGTH = 4


@dataclass(frozen=True)
class Verdict:
    """What an expected gradient is.

    Args:
        name: ``sequence``, ``scaled-sequence``, ``wrong-sign``, ``token``, ``scaled-token``, ``token-forward``,
            ``future``, ``zero``, ``dead`` or ``other``.
        phrase: the same for a table, such as ``sequence - token-forward``.
        coefficients: weights on ``FIELDS`` (off-policy ``STALE_FIELDS``); ``None`` where no combination fits.
    """

    name: str
    phrase: str
    coefficients: tuple[float, ...] | None


@cache
def probes(*, off_policy: bool = False) -> tuple[PolicyPair, ...]:
    """Fixed random pairs, without and with an end token."""
    rng = np.random.default_rng(20251226)
    pairs = []
    for eos in (False, True):
        automaton = markov(3, 1, eos=eos)
        shape = automaton.next_context.shape
        policy, reference, behaviour = rng.normal(size=(3, *shape))
        pairs.append(
            PolicyPair(
                automaton,
                tabular(automaton, policy),
                log_softmax(reference),
                log_softmax(behaviour) if off_policy else None,
                "probe",
            )
        )
    return tuple(pairs)


@cache
def _fields(off_policy: bool, length: int, count: int) -> np.ndarray:
    """``[D, F]`` the known fields of the first probes, stacked; off-policy those on the sampler's prefixes too."""
    stale = probes(off_policy=off_policy)[:count]
    own = tuple(with_behaviour(pair, None) for pair in stale)
    columns = [(true_gradient, own), (token_gradient, own), (token_forward_gradient, own)]
    if off_policy:
        columns += [(token_gradient, stale), (token_forward_gradient, stale)]
    return np.stack([np.concatenate([field(p, [length])[0] for p in on]) for field, on in columns], axis=1)


def verdict(configuration: Configuration, *, off_policy: bool = False) -> Verdict:
    """The verdict on one configuration, on-policy or with a stale behaviour policy.

    Off-policy the token fields may stand on the policy's prefixes or on the stale ones that were sampled; the name is
    the same, the phrase says which.
    """
    found = [moments(pair, [configuration], [LENGTH], covariance="trace")[0] for pair in probes(off_policy=off_policy)]
    spread = sum(float(m.covariance[0]) for m in found if m.covariance is not None)
    return classify([m.mean[0] for m in found], spread, off_policy=off_policy)


def classify(
    gradients: Sequence[np.ndarray], spread: float, *, off_policy: bool = False, length: int = LENGTH
) -> Verdict:
    """The verdict on expected gradients ``[d]``, one for each of the first probes, at one length.

    The first probe has no end token: given its gradient alone, the verdict holds for sequences of fixed length.

    Args:
        spread: total variance of the estimate, which tells what is zero for every sample from what is so on average.
    """
    gradient = np.concatenate(list(gradients))
    fields = _fields(off_policy, length, len(gradients))
    scale = float(np.linalg.norm(fields[:, 0]))
    if spread + float(gradient @ gradient) < (TOLERANCE * scale) ** 2:
        return Verdict("dead", "zero for every sample", (0.0,) * fields.shape[1])
    if not np.isfinite(gradient).all():
        return Verdict("other", "not finite", None)
    weights = np.linalg.lstsq(fields, gradient, rcond=None)[0]
    if np.linalg.norm(fields @ weights - gradient) > TOLERANCE * max(scale, float(np.linalg.norm(gradient))):
        return Verdict("other", "other", None)
    weights = np.where(np.abs(weights) < TOLERANCE, 0.0, weights)
    coefficients = tuple(float(w) for w in weights)
    return Verdict(_name(coefficients), phrase(coefficients), coefficients)


def _name(weights: tuple[float, ...]) -> str:
    """The vocabulary's name; stale prefixes count as their field."""
    present = [(w, STALE_FIELDS[i].removesuffix(" on stale prefixes")) for i, w in enumerate(weights) if w]
    if not present:
        return "zero"
    if _is_future(weights):
        return "future"
    if len(present) > 1:
        return "other"
    weight, field = present[0]
    if abs(weight - 1) < TOLERANCE:
        return field
    if field == "sequence":
        return "scaled-sequence" if weight > 0 else "wrong-sign"
    return "scaled-token" if field == "token" and weight > 0 else "other"


def _is_future(weights: tuple[float, ...]) -> bool:
    return bool(np.allclose(weights, (1, -1, *(0,) * (len(weights) - 2)), rtol=0, atol=TOLERANCE))


def phrase(weights: Sequence[float], fields: Sequence[str] = STALE_FIELDS) -> str:
    """The combination in words: ``sequence - token-forward``."""
    if fields is STALE_FIELDS and _is_future(tuple(weights)):
        return "future"
    text = ""
    for weight, field in zip(weights, fields, strict=False):
        if weight == 0:
            continue
        size = "" if abs(abs(weight) - 1) < TOLERANCE else f"{abs(weight):.4g} "
        sign = ("-" if weight < 0 else "") if not text else (" - " if weight < 0 else " + ")
        text += f"{sign}{size}{field}"
    return text or "zero"
