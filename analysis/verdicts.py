"""Which known field is a configuration's expected gradient?

Decided on random probe models, not on the pair at hand: near the reference, or at one token, different fields
coincide. The expected gradients of all probes are stacked and written as one combination of the known fields;
coefficients that fit every probe to rounding are a verdict.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from klgrad.synth.automata import markov
from klgrad.synth.configurations import Configuration
from klgrad.synth.exact import token_forward_gradient, token_gradient, true_gradient
from klgrad.synth.moments import moments
from klgrad.synth.policies import PolicyPair, log_softmax, tabular

FIELDS = ("sequence", "token", "token-forward")
TOLERANCE = 1e-8
_LENGTH = 4


@dataclass(frozen=True)
class Verdict:
    """What an expected gradient is.

    Args:
        name: ``sequence``, ``scaled-sequence``, ``wrong-sign``, ``token``, ``scaled-token``, ``token-forward``,
            ``future``, ``zero``, ``dead`` or ``other``.
        phrase: the same for a table, such as ``sequence - token-forward``.
        coefficients: weights on the sequence, token and token-forward fields; ``None`` where no combination fits.
    """

    name: str
    phrase: str
    coefficients: tuple[float, float, float] | None


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
def _fields(*, off_policy: bool) -> np.ndarray:
    """``[D, 3]`` the known fields of all probes, stacked."""
    columns = []
    for field in (true_gradient, token_gradient, token_forward_gradient):
        columns.append(np.concatenate([field(pair, [_LENGTH])[0] for pair in probes(off_policy=off_policy)]))
    return np.stack(columns, axis=1)


def verdict(configuration: Configuration, *, off_policy: bool = False) -> Verdict:
    """The verdict on one configuration, on-policy or with a stale behaviour policy.

    Off-policy, ``token`` and ``token-forward`` stand on the behaviour policy's prefixes.
    """
    found = [moments(pair, [configuration], [_LENGTH], covariance="trace")[0] for pair in probes(off_policy=off_policy)]
    gradient = np.concatenate([m.mean[0] for m in found])
    second = sum(float(m.covariance[0]) for m in found if m.covariance is not None) + float(gradient @ gradient)
    fields = _fields(off_policy=off_policy)
    scale = float(np.linalg.norm(fields[:, 0]))
    if second < (TOLERANCE * scale) ** 2:
        return Verdict("dead", "zero for every sample", (0.0, 0.0, 0.0))
    if not np.isfinite(gradient).all():
        return Verdict("other", "not finite", None)
    weights = np.linalg.lstsq(fields, gradient, rcond=None)[0]
    if np.linalg.norm(fields @ weights - gradient) > TOLERANCE * max(scale, float(np.linalg.norm(gradient))):
        return Verdict("other", "other", None)
    weights = np.where(np.abs(weights) < TOLERANCE, 0.0, weights)
    a, b, c = (float(w) for w in weights)
    return Verdict(_name(a, b, c), _phrase(a, b, c), (a, b, c))


def _name(a: float, b: float, c: float) -> str:
    def near(*target: float) -> bool:
        return bool(np.allclose((a, b, c), target, atol=TOLERANCE))

    if near(0, 0, 0):
        return "zero"
    if near(1, -1, 0):
        return "future"
    if near(a, 0, 0):
        return "sequence" if near(1, 0, 0) else "scaled-sequence" if a > 0 else "wrong-sign"
    if near(0, b, 0):
        return "token" if near(0, 1, 0) else "scaled-token" if b > 0 else "other"
    return "token-forward" if near(0, 0, 1) else "other"


def _phrase(a: float, b: float, c: float) -> str:
    if abs(a - 1) < TOLERANCE and abs(b + 1) < TOLERANCE and c == 0:
        return "future"
    text = ""
    for weight, field in zip((a, b, c), FIELDS, strict=True):
        if weight == 0:
            continue
        size = "" if abs(abs(weight) - 1) < TOLERANCE else f"{abs(weight):.4g} "
        sign = ("-" if weight < 0 else "") if not text else (" - " if weight < 0 else " + ")
        text += f"{sign}{size}{field}"
    return text or "zero"
