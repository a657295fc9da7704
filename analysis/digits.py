"""How many digits the engine's numbers have: every estimator and every exact quantity against 60-digit arithmetic.

Estimators are compared on a grid of log-ratios, in numpy and torch and in both precisions; KLs, gradients, means and
variances on small pairs near the reference, at it, far from it and nearly deterministic, over every sequence
(``analysis.precise``). An error is relative: to the number itself, a mean's to the larger of the mean and the true
gradient. What a number cannot have is said beside it: a log-ratio made from log-probs is off by their rounding, and a
variance by what it is the difference of (``exact.gradient_rounding``, ``moments.Moments.rounding``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import mpmath
import numpy as np

from klgrad.analysis.precise import DIGITS, PreciseMoments, PrecisePair, functions
from klgrad.synth import exact
from klgrad.synth.automata import Automaton, markov
from klgrad.synth.configurations import AGGREGATIONS, BASELINES, CREDITS, PLACEMENTS, RATIOS, Configuration
from klgrad.synth.estimators import ESTIMATORS, estimator
from klgrad.synth.moments import Moments, moments
from klgrad.synth.policies import PolicyPair, log_softmax, tabular

PROMISED = {"float64": 1e-13, "float32": 1e-5}
LENGTH, SAMPLES = 2, 100
RANGES = {"near": (1e-12, 1e-2), "ordinary": (1e-2, 10.0), "far": (10.0, 700.0)}  # of |delta|
_OVERFLOW = {"float64": 700.0, "float32": 85.0}  # of a slope's e^|delta|, and its square's at half of it


class Line(NamedTuple):
    """The worst error of one quantity in one range: relative, and where; ``open`` is what its inputs leave open."""

    quantity: str
    where: str
    arithmetic: str
    error: float
    open: float
    at: str

    @property
    def kept(self) -> bool:
        """Whether it is within what is promised, or within what is said to be open."""
        return self.error <= PROMISED[self.arithmetic.split()[-1]] + self.open


# -------------------------------------------------------------------------------------------------- estimators


def grid(low: float, high: float) -> np.ndarray:
    """Log-ratios of both signs, eight a decade, none of them round."""
    sizes = low * 1.013 * 10 ** np.arange(0, np.log10(high / low), 0.125)
    return np.concatenate([sizes, -sizes])


def estimator_lines() -> Iterator[Line]:
    """Value, slope and their closed sum of every estimator, in numpy and torch, float64 and float32."""
    for name, entry in ESTIMATORS.items():
        if entry.full:
            yield from _full_lines(name)
            continue
        est = estimator(name)
        value, slope = functions(est)
        exactly: dict[str, Callable[[Any], Any]] = {
            "value": value,
            "slope": slope,
            "together": partial(_sum, value, slope),
        }
        for kind, precise in exactly.items():
            function = getattr(est, kind)
            for where, (low, high) in RANGES.items():
                if function is not None:
                    yield from _compared(f"{name} {kind}", where, function, precise, grid(low, high))


def _sum(value: Callable[[Any], Any], slope: Callable[[Any], Any], delta: Any) -> Any:
    return value(delta) + slope(delta)


def _arithmetics() -> Iterator[tuple[str, str, Callable[[np.ndarray], Any]]]:
    import torch

    for kind in PROMISED:
        yield "numpy", kind, partial(np.asarray, dtype=kind)
        yield "torch", kind, partial(torch.tensor, dtype=getattr(torch, kind))


def _back(x: Any) -> np.ndarray:
    return np.asarray(x).astype(float)


def _compared(
    quantity: str, where: str, function: Callable[[Any], Any], precise: Callable[[Any], Any], deltas: np.ndarray
) -> Iterator[Line]:
    for library, kind, made in _arithmetics():
        x = made(deltas[np.abs(deltas) <= _OVERFLOW[kind]])
        if not len(x):
            continue
        with np.errstate(over="ignore"):
            given, result = _back(x), _back(function(x))
        errors = [_relative(r, _at(precise, d)) if np.isfinite(r) else 0.0 for d, r in zip(given, result, strict=True)]
        worst = int(np.argmax(errors))
        yield Line(quantity, where, f"{library} {kind}", errors[worst], 0.0, f"delta = {given[worst]:.3g}")


def _at(precise: Callable[[Any], Any], delta: float) -> Any:
    """The exact number at a log-ratio, in enough digits to survive e^|delta| or delta^2 beside 1."""
    with mpmath.workdps(DIGITS + int(abs(delta))):
        return precise(mpmath.mpf(delta))


def _relative(value: Any, exactly: Any) -> float:
    """Relative error; absolute where the exact number is zero."""
    with mpmath.workdps(DIGITS):
        off = abs(mpmath.mpf(float(value)) - exactly)
        return float(off / abs(exactly)) if exactly else float(off)


def _full_lines(name: str) -> Iterator[Line]:
    """A full-vocabulary estimator on rows of 5 log-probs whose log-ratios reach each size."""
    est, rng = estimator(name), np.random.default_rng(5)
    value, slope = functions(est)
    for where, (low, high) in RANGES.items():
        logits = rng.normal(size=(40, 5))
        moved = logits + np.geomspace(low, high / 4, 40)[:, None] * rng.uniform(-1, 1, size=(40, 5))
        for library, kind, made in _arithmetics():
            p, q = (_back(made(log_softmax(each))) for each in (logits, moved))
            with np.errstate(over="ignore"):
                got = {k: _back(getattr(est, k)(made(p), made(q))) for k in ("value", "slope")}
            for what, of in (("value", value), ("slope", slope)):
                errors, opened = _full_errors(got[what], of, p, q, whole=what == "value", kind=kind)
                worst = int(np.argmax(np.where(np.isfinite(opened), errors - opened, -np.inf)))
                at = f"distance {np.abs(p - q)[worst].max():.3g}"
                yield Line(f"{name} {what}", where, f"{library} {kind}", errors[worst], opened[worst], at)


def _full_errors(
    got: np.ndarray, of: Callable[..., Any], p: np.ndarray, q: np.ndarray, *, whole: bool, kind: str
) -> tuple[np.ndarray, np.ndarray]:
    """``[rows]`` relative errors for the log-probs as they are, normalised, and what their rounding leaves open."""
    errors, opened = [], []
    with mpmath.workdps(DIGITS), np.errstate(divide="ignore"):
        for result, row, base in zip(got, p, q, strict=True):
            a, b = ([mpmath.mpf(float(x)) for x in each] for each in (row, base))
            a, b = ([x - mpmath.log(mpmath.fsum(map(mpmath.exp, each))) for x in each] for each in (a, b))
            terms = [of(x - y, mpmath.exp(x)) for x, y in zip(a, b, strict=True)]
            exactly = [mpmath.fsum(terms)] if whole else terms
            errors.append(_distance(result, exactly))
            rounding = 4 * float(np.finfo(kind).eps) * max(1.0, np.abs(row).max(), np.abs(base).max())
            opened.append(float(np.divide(rounding, np.abs(row - base).max())))
    return np.array(errors), np.array(opened)


# -------------------------------------------------------------------------------------------------------- pairs


@dataclass(frozen=True, eq=False)
class Case:
    """Logits of a pair, and what is special about it."""

    where: str
    automaton: Automaton
    policy: np.ndarray
    reference: np.ndarray
    behaviour: np.ndarray | None = None

    def pair(self) -> PolicyPair:
        """In float64."""
        behaviour = None if self.behaviour is None else log_softmax(self.behaviour)
        return PolicyPair(
            self.automaton, tabular(self.automaton, self.policy), log_softmax(self.reference), behaviour, self.where
        )


def cases() -> Iterator[Case]:
    """Pairs at every distance, with and without an end token, on- and off-policy, and nearly deterministic ones."""
    rng = np.random.default_rng(1)
    for eos in (False, True):
        automaton = markov(2, 1, eos=eos)
        shape = automaton.next_context.shape
        for distance in (1e-12, 1e-8, 1e-6, 1e-4, 1e-2, 1.0):
            policy, noise, other = rng.normal(size=(3, *shape))
            reference = policy + distance * noise
            yield Case(f"{distance:g} from the reference", automaton, policy, reference)
            yield Case(f"{distance:g} from the reference", automaton, policy, reference, policy + 0.5 * other)
        for saturated in (20.0, 30.0, 36.0, 40.0):
            policy = saturated * np.sign(rng.normal(size=shape))
            policy[:, 1] = 0.0
            yield Case(f"logits +-{saturated:g}", automaton, policy, rng.normal(size=shape))


def kinds(off_policy: bool) -> list[Configuration]:
    """Every estimator in every placement, and every option of the grammar on a few of them."""
    found = [Configuration(estimator(name), placement) for name in ESTIMATORS for placement in PLACEMENTS]
    for name in ("k1", "k3", "alpha(0.5)", "jensen-shannon", "full"):
        est = estimator(name)
        found += [Configuration(est, "both", credit=credit) for credit in CREDITS]
        found += [Configuration(est, "both", baseline=baseline) for baseline in BASELINES if baseline != "constant"]
        found += [Configuration(est, "both", aggregation=kind) for kind in AGGREGATIONS if kind != "divide"]
        found += [Configuration(est, "both", rollout_value=True)] if not est.full else []
        if off_policy:
            ratios = RATIOS[1:]
            found += [Configuration(est, "both", ratio=ratio) for ratio in ratios]
            found += [Configuration(est, "both", credit="rtg", ratio=ratio, baseline="loo") for ratio in ratios]
    return list(dict.fromkeys(found))


def pair_lines(chosen: Sequence[Case] | None = None) -> Iterator[Line]:
    """KL, forward KL, entropy, true gradient, and mean, variance and estimate of every kind of configuration."""
    for case in cases() if chosen is None else chosen:
        pair = case.pair()
        with mpmath.workdps(DIGITS):
            yield from _pair_lines(case, pair, PrecisePair(case.automaton, case.policy, case.reference, case.behaviour))


def _pair_lines(case: Case, pair: PolicyPair, twin: PrecisePair) -> Iterator[Line]:
    open_ = _log_ratios_open(pair)

    def line(quantity: str, got: Any, exactly: Any, left: float, at: str = "", least: float = 0.0) -> Line:
        return Line(quantity, case.where, "numpy float64", _distance(got, exactly, least), left, at)

    yield line("KL", exact.kl(pair, [LENGTH])[0], twin.divergence(LENGTH, twin.policy, twin.reference), open_)
    backward = twin.divergence(LENGTH, twin.reference, twin.policy)
    yield line("forward KL", exact.forward_kl(pair, [LENGTH])[0], backward, open_)
    yield line("entropy", exact.entropy(pair, [LENGTH])[0], twin.entropy(LENGTH), 0.0)
    truth = twin.true_gradient(LENGTH)
    size = _norm(truth)
    left = float(exact.gradient_rounding(pair, [LENGTH])[0])
    yield line("true gradient", exact.true_gradient(pair, [LENGTH])[0], truth, left / size if size else 0.0)
    configurations = kinds(not pair.on_policy)
    for m in moments(pair, configurations, [LENGTH], samples=SAMPLES):
        yield from _moment_lines(line, m, PreciseMoments(twin, m.configuration, LENGTH), open_, left, size)


def _moment_lines(
    line: Callable[..., Line], m: Moments, twin: PreciseMoments, open_: float, left: float, size: float
) -> Iterator[Line]:
    """Beside its own error a variance has that of its log-ratios, twice."""
    name, drifted = str(m.configuration), m.configuration.ratio == "none" and twin.pair.sampler is not twin.pair.policy
    assert m.covariance is not None
    yield line("mean", m.mean[0], twin.mean, open_ + left / size if size else 0.0, name, size)
    variance, spread = twin.variance(SAMPLES), twin.estimate_variance
    for quantity, got, exactly, k in (
        ("variance", m.covariance[0], variance, 0),
        ("estimate's variance", m.estimate_variance[0], spread, 1),
    ):
        if not np.isnan(got):
            rounding = float(m.rounding[0, k] / exactly) if exactly > mpmath.mpf(10) ** -DIGITS else np.inf
            yield line(quantity, got, exactly, 2 * open_ + rounding, name)
    least = float(mpmath.sqrt(spread)) if drifted else 0.0  # off-policy it is no KL, and of either sign
    yield line("estimate", m.estimate[0], twin.estimate, open_, name, least)


def _log_ratios_open(pair: PolicyPair) -> float:
    """Relative rounding of the pair's log-ratios: that of the log-probs over the smallest difference that counts."""
    log_probs = np.abs(np.stack([pair.policy.log_probs, pair.reference])).max(axis=0)
    share = 4 * np.finfo(float).eps * np.maximum(log_probs, 1.0) / np.abs(pair.log_ratio)
    return float(share[pair.possible].max())


def _norm(vector: Any) -> float:
    return float(mpmath.sqrt(mpmath.fsum(x * x for x in np.atleast_1d(vector).ravel())))


def _distance(got: Any, exactly: Any, least: float = 0.0) -> float:
    """Relative error of a number or a vector, of at least so much."""
    off = [mpmath.mpf(float(a)) - b for a, b in zip(np.atleast_1d(got), np.atleast_1d(exactly), strict=True)]
    size = max(_norm(exactly), least)
    return _norm(np.array(off, object)) / size if size > 1e-50 else _norm(np.array(off, object))


# -------------------------------------------------------------------------------------------------------- table


def worst(lines: Iterator[Line] | Sequence[Line]) -> list[Line]:
    """Of each quantity, range and arithmetic the line that is farthest beyond what is open."""
    found: dict[tuple[str, str, str], Line] = {}
    for line in lines:
        key = line[:3]
        if key not in found or line.error - line.open > found[key].error - found[key].open:
            found[key] = line
    return list(found.values())
