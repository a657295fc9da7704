"""No digit lost in silence: exact numbers near the reference and on saturated pairs, against 60-digit arithmetic.

Plain enumeration in double precision cancels where the engine might, so the oracle is the formula over every sequence
in mpmath (``analysis.precise``); own estimators bring their functions in mpmath along. What is asked for is 1e-10 of
the number, beside what no arithmetic in double precision can have: log-probs l are rounded to eps |l|, so log-ratios
are off by that, and what is proportional to log-ratios of size D (their root mean square, under policy, reference and
sampler) by eps |l| / D of itself. A variance is off by twice that, and by what it is the difference of, which
``Moments.rounding`` says. Value plus slope of an own estimator are added in double precision as they are handed over.
"""

from dataclasses import replace

import mpmath
import numpy as np
import pytest
from extremes import OWN, near_pairs, saturated_pairs
from hypothesis import event, given
from hypothesis import strategies as st
from strategies import BASELINES, configurations

from klgrad.analysis import precise
from klgrad.analysis.precise import DIGITS, PreciseMoments
from klgrad.synth import exact
from klgrad.synth.estimators import ESTIMATORS
from klgrad.synth.moments import moments

EPS = np.finfo(float).eps
ASKED = 1e-10
ROUNDINGS = 16  # of a log-ratio: exp and log of 4 units each in two log-softmaxes, their sums and the difference
SAMPLES = 12
pairs = near_pairs() | saturated_pairs()
asked = configurations(baselines=(*BASELINES, "loo", "loo=2"), names=sorted(set(ESTIMATORS) - {"k3-clamped"}))


def norm(vector):
    return float(mpmath.sqrt(mpmath.fsum(x * x for x in np.atleast_1d(vector).ravel())))


def off(got, exactly):
    """The norm of the difference, taken in mpmath."""
    return norm([mpmath.mpf(float(a)) - b for a, b in zip(np.atleast_1d(got), np.atleast_1d(exactly), strict=True)])


def condition(twin, length):
    """eps |l| / D, relative: what rounding of the log-probs leaves open of anything proportional to log-ratios."""
    sizes = []
    for table in (twin.policy, twin.reference, twin.sampler):
        moved = spread = mpmath.mpf(0)
        for path in twin.paths(length):
            edges, weight = list(zip(*path, strict=True)), twin.probability(path, table)
            moved += weight * sum((EPS * max(1, abs(twin.policy[e]), abs(twin.reference[e]))) ** 2 for e in edges)
            spread += weight * sum(twin.delta[e] ** 2 for e in edges)
        sizes.append(float(mpmath.sqrt(moved / spread)))
    return ROUNDINGS * max(sizes)


def sums(twin, functions, length):
    """Root of the second moment of what adding an own estimator's value and slope loses in a sequence's gradient."""
    value, slope = functions
    total = mpmath.mpf(0)
    for path in twin.paths(length):
        edges = list(zip(*path, strict=True))
        lost = sum((abs(value(twin.delta[e])) + abs(slope(twin.delta[e]))) * norm(twin.scores[e]) for e in edges)
        total += twin.probability(path) * (ROUNDINGS * EPS * len(edges) * lost) ** 2
    return float(mpmath.sqrt(total))


@given(logits=pairs)
def test_divergences_and_the_true_gradient(logits):
    pair, n = logits.pair(), [logits.length]
    with mpmath.workdps(DIGITS):
        twin = logits.twin()
        open_ = ASKED + 2 * condition(twin, logits.length)
        p, q = twin.policy, twin.reference
        for got, exactly in (
            (exact.kl(pair, n), twin.divergence(n[0], p, q)),
            (exact.forward_kl(pair, n), twin.divergence(n[0], q, p)),
            (exact.true_gradient(pair, n)[0], twin.true_gradient(n[0])),
        ):
            assert off(got, exactly) <= open_ * norm(exactly)
        assert off(exact.entropy(pair, n), twin.entropy(n[0])) <= ASKED * norm(twin.entropy(n[0]))
    assert exact.kl(pair, n) >= 0
    assert exact.forward_kl(pair, n) >= 0


def compare(logits, configuration, lost=None):
    """One configuration's moments against all its sequences; ``lost`` is what an own estimator's sums lose."""
    pair, twin, length = logits.pair(), logits.twin(), logits.length
    (m,) = moments(pair, [configuration], [length], samples=SAMPLES)
    oracle = PreciseMoments(twin, configuration, length)
    open_, lost = ASKED + condition(twin, length), 0.0 if lost is None else lost(twin)
    truth = norm(twin.true_gradient(length))
    size, variance, spread = norm(oracle.mean), oracle.variance(SAMPLES), oracle.estimate_variance
    event(f"condition {np.log10(open_):.0f}")
    assert off(m.mean[0], oracle.mean) <= open_ * max(size, truth) + lost, "mean"
    told = norm(oracle.estimate)
    assert off(m.estimate, oracle.estimate) <= open_ * max(told, float(mpmath.sqrt(spread))), "estimate"
    adding = lost * (2 * float(mpmath.sqrt(variance + size**2)) + lost)
    assert off(m.covariance, variance) <= 2 * open_ * float(variance) + m.rounding[0, 0] + adding, "variance"
    assert off(m.estimate_variance, spread) <= 2 * open_ * float(spread) + m.rounding[0, 1], "estimate's variance"


@given(logits=pairs, configuration=asked)
def test_moments(logits, configuration):
    with mpmath.workdps(DIGITS):
        compare(logits, configuration)


@given(logits=saturated_pairs(), configuration=asked)
def test_values_frozen_at_rollout(logits, configuration):
    """On-policy they are the values themselves; off-policy value and slope are of two log-ratios."""
    if not configuration.estimator.full and configuration.in_reward:
        configuration = replace(configuration, rollout_value=True)
    with mpmath.workdps(DIGITS):
        compare(logits, configuration)
        if logits.behaviour is None and configuration.rollout_value:
            both = [configuration, replace(configuration, rollout_value=False)]
            frozen, live = moments(logits.pair(), both, [logits.length], samples=SAMPLES)
            assert np.array_equal(frozen.mean, live.mean)
            assert np.array_equal(frozen.covariance, live.covariance)


@given(
    logits=pairs, configuration=configurations(names=["k3"], baselines=BASELINES), which=st.integers(0, len(OWN) - 1)
)
def test_own_estimators(logits, configuration, which):
    """Of any function, alone; k3 under another name has no closed form to fall back on."""
    own, functions = OWN[which]
    with mpmath.workdps(DIGITS), pytest.MonkeyPatch.context() as patch:
        patch.setattr(precise, "functions", lambda est: functions)
        compare(logits, replace(configuration, estimator=own), lambda twin: sums(twin, functions, logits.length))
