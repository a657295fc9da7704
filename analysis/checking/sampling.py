"""What becomes of value and gradient when the samples are not the policy's: staleness, temperature, truncation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np

from klgrad.analysis.checking.measuring import Subject, measure
from klgrad.analysis.checking.models import SEED, Model, model
from klgrad.analysis.checking.report import PLACE, Finding
from klgrad.analysis.checking.subject import BuiltIn
from klgrad.analysis.checking.value import by_sequence
from klgrad.synth.automata import markov
from klgrad.synth.policies import PolicyPair, log_softmax, tabular

TEMPERATURE, TOP_P, TOP_K = 0.6, 0.8, 2
_LENGTH = 3


def _stale(log_pi: np.ndarray) -> np.ndarray:
    return log_pi + 0.5 * np.random.default_rng(SEED).normal(size=log_pi.shape)


def _top_k(log_pi: np.ndarray) -> np.ndarray:
    least = np.sort(log_pi, axis=1)[:, -TOP_K][:, None]
    return np.where(log_pi >= least, log_pi, -np.inf)


def _top_p(log_pi: np.ndarray) -> np.ndarray:
    order = np.argsort(-log_pi, axis=1)
    mass = np.cumsum(np.exp(np.take_along_axis(log_pi, order, 1)), axis=1)
    kept = np.take_along_axis(mass - np.exp(np.take_along_axis(log_pi, order, 1)) < TOP_P, np.argsort(order, axis=1), 1)
    return np.where(kept, log_pi, -np.inf)


def _blocked(log_pi: np.ndarray) -> np.ndarray:
    return np.where(np.arange(log_pi.shape[1]) == log_pi.shape[1] - 1, -np.inf, log_pi)


_MASS = "no weight brings back what is never drawn"
# name -> the sampler's log-probs (not normalised) from the policy's, and what to do about it
SAMPLERS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "a stale policy": (_stale, "weigh by pi / mu of the whole prefix"),
    f"temperature {TEMPERATURE:g}": (lambda log_pi: log_pi / TEMPERATURE, "score both at the sampler's temperature"),
    f"top-p {TOP_P:g}": (_top_p, _MASS),
    f"top-k {TOP_K} of 4": (_top_k, _MASS),
    "a blocked end token": (_blocked, _MASS),
}


@cache
def sampled(name: str) -> tuple[Model, Model]:
    """``(as sampled, as the policy itself)``: a pair of three words and an end token that is not rare."""
    automaton = markov(4, 1, start=(0,), eos=True)
    policy, reference = np.random.default_rng(SEED).normal(size=(2, *automaton.next_context.shape))
    pair = PolicyPair(automaton, tabular(automaton, policy), log_softmax(reference), None, "end token")
    with np.errstate(divide="ignore"):
        log_mu = log_softmax(SAMPLERS[name][0](pair.policy.log_probs))
    return model(replace(pair, behaviour=log_mu), _LENGTH), model(pair, _LENGTH)


def examine(subject: Subject, placement: str, *, dead: bool) -> list[Finding]:
    """The sampling's part of a report, for the one placement that is to be used."""
    corrects = not isinstance(subject, BuiltIn) and subject.plan.takes("behaviour")
    if isinstance(subject, BuiltIn):
        corrects = subject.configuration.ratio != "none"
    findings = []
    base = measure(subject, placement, sampled("a stale policy")[1]).mean  # the same policy under every name
    for name in SAMPLERS:
        stale, own = sampled(name)
        gradient = measure(subject, placement, stale).mean
        size = float(np.linalg.norm(base))
        if size < 1e-6 * float(np.linalg.norm(own.truth)):
            size = float(np.linalg.norm(own.truth))
        off = float(np.linalg.norm(gradient - base)) / size
        valued = subject.kind != "loss" and subject.returns != "return"  # the value of a surrogate says nothing
        expected, usual = (float(m.probability @ by_sequence(subject, m)) if valued else 0.0 for m in (stale, own))
        numbers = {"sampler": name, "value": expected, "value_on_policy": usual, "gradient_change": off}
        harmless = off <= 1e-6 and abs(expected - usual) <= 1e-6 * max(abs(usual), 1e-12)
        if dead or harmless:
            findings.append(Finding("sampling", "info", f"{name} changes nothing", numbers))
            continue
        text = f"{name}: the gradient in the {PLACE[placement]} is off by {off:.1%}"
        if valued:
            text += f", the value goes from {usual:.4g} to {expected:.4g}"
            text += "; a negative mean KL in a log is this fault, not noise" if expected < 0 < usual else ""
        wrong = corrects and off > 1e-6 and SAMPLERS[name][1] != _MASS
        mend = "it takes the sampler's log-probs and does not make up for it" if wrong else SAMPLERS[name][1]
        text += f"; {mend}" + (_constant(stale) if corrects and SAMPLERS[name][1] == _MASS else "")
        findings.append(Finding("sampling", "warning" if wrong else "info", text, numbers))
    return findings


def _constant(stale: Model) -> str:
    """What the importance ratio is on a truncated sampler: the same for every token of a prefix, and never 1."""
    kept = stale.batch.mask
    ratio = (stale.batch.log_probs - stale.batch.behaviour)[kept]
    return (
        f"; the log-ratio log pi / mu is the constant log of the mass kept, one for all tokens of a prefix (here from "
        f"{ratio.min():.3g} to {ratio.max():.3g}), and no sign of staleness"
    )
