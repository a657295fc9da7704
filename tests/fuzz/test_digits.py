"""No digit lost in silence: exact numbers near the reference and on saturated pairs, against 60-digit arithmetic.

Plain enumeration in double precision cancels where the engine might, so the oracle is the formula over every sequence
in mpmath (``analysis.precise``); own estimators bring their functions in mpmath along. What is asked for is 1e-10 of
the number, beside what no arithmetic in double precision can have: log-probs l are rounded to eps |l|, and the oracle
itself, its log-probs moved by as much, says what that makes of each number. A variance may also be off by what it is
the difference of, which ``Moments.rounding`` says; a mean by the rounding of the later values that its scores meet,
which can all but cancel between contexts (chi-squared has values of 1e17 there). Value plus slope of an own estimator
are added in double precision as they are handed over.
"""

import copy
from dataclasses import replace

import mpmath
import numpy as np
import pytest
from extremes import OWN, near_pairs, saturated_pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import BASELINES, configurations

from klgrad.analysis import precise
from klgrad.analysis.precise import DIGITS, PreciseMoments
from klgrad.synth import exact
from klgrad.synth.estimators import ESTIMATORS
from klgrad.synth.moments import moments

EPS = np.finfo(float).eps
ASKED = 1e-10
ROUNDINGS = 4  # of a log-prob: exp and log of the log-softmax, its sum, the difference
SHAKES, WORST = 4, 8  # drawn at random, and how much worse the worst may be: twice the root of some 18 log-probs
SAMPLES = 12
few = settings(max_examples=max(8, settings().max_examples // 3))  # an example takes the oracle four times
pairs = near_pairs() | saturated_pairs()
asked = configurations(baselines=(*BASELINES, "loo", "loo=2"), names=sorted(set(ESTIMATORS) - {"k3-clamped"}))


def norm(vector):
    return float(mpmath.sqrt(mpmath.fsum(x * x for x in np.atleast_1d(vector).ravel())))


def off(got, exactly):
    """The norm of the difference, taken in mpmath."""
    return norm([mpmath.mpf(float(a)) - b for a, b in zip(np.atleast_1d(got), np.atleast_1d(exactly), strict=True)])


def shaken(twin, rng):
    """The twin with every log-prob l moved by ``ROUNDINGS`` eps |l| times a normal number; its scores stay.

    A sampler that has the policy's log-probs keeps to them.
    """

    def moved(table):
        by = ROUNDINGS * EPS * rng.normal(size=table.shape)
        return np.array([x + float(z) * abs(x) for x, z in zip(table.flat, by.flat, strict=True)], object)

    other = copy.copy(twin)
    other.policy, other.reference, sampler = (
        moved(table).reshape(table.shape) for table in (twin.policy, twin.reference, twin.sampler)
    )
    other.sampler = other.policy if (twin.sampler == twin.policy).all() else sampler
    other.delta = other.policy - other.reference
    return other


def left_open(quantities, twin):
    """What rounding of the log-probs does to each of the exact quantities: ``quantities(twin) -> arrays``."""
    exactly, rng = quantities(twin), np.random.default_rng(0)
    shakes = [quantities(shaken(twin, rng)) for _ in range(SHAKES)]
    return exactly, [
        WORST * max(norm(np.asarray(s[k]) - np.asarray(each)) for s in shakes) + ASKED * norm(each)
        for k, each in enumerate(exactly)
    ]


def sums(twin, functions, length):
    """Root of the second moment of what adding an own estimator's value and slope loses in a sequence's gradient."""
    value, slope = functions
    total = mpmath.mpf(0)
    for path in twin.paths(length):
        edges = list(zip(*path, strict=True))
        lost = sum((abs(value(twin.delta[e])) + abs(slope(twin.delta[e]))) * norm(twin.scores[e]) for e in edges)
        total += twin.probability(path) * (4 * ROUNDINGS * EPS * len(edges) * lost) ** 2
    return float(mpmath.sqrt(total))


def ahead(twin, configuration, length):
    """The sizes of all terms of the mean that join a score to a later token's value, added up."""
    value, slope = precise.functions(configuration.estimator)
    sizes = copy.copy(twin)
    sizes.scores = np.abs(twin.scores)
    later = replace(configuration, placement="reward", credit="future", baseline="none", baseline_value=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precise, "functions", lambda est: (lambda *given: abs(value(*given)), slope))
        return norm(PreciseMoments(sizes, later, length).mean)


@few
@given(logits=pairs)
def test_divergences_and_the_true_gradient(logits):
    pair, n = logits.pair(), [logits.length]

    def quantities(twin):
        p, q = twin.policy, twin.reference
        return twin.divergence(n[0], p, q), twin.divergence(n[0], q, p), twin.true_gradient(n[0]), twin.entropy(n[0])

    got = exact.kl(pair, n), exact.forward_kl(pair, n), exact.true_gradient(pair, n)[0], exact.entropy(pair, n)
    with mpmath.workdps(DIGITS):
        exactly, open_ = left_open(quantities, logits.twin())
        for name, *each in zip(("KL", "forward KL", "true gradient", "entropy"), got, exactly, open_, strict=True):
            assert off(*each[:2]) <= each[2], name
    assert exact.kl(pair, n) >= 0
    assert exact.forward_kl(pair, n) >= 0


def compare(logits, configuration, lost=None):
    """One configuration's moments against all its sequences; ``lost`` is what an own estimator's sums lose."""
    pair, length = logits.pair(), logits.length
    (m,) = moments(pair, [configuration], [length], samples=SAMPLES)

    def quantities(twin):
        of = PreciseMoments(twin, configuration, length)
        return of.mean, of.variance(SAMPLES), of.estimate, of.estimate_variance

    exactly, open_ = left_open(quantities, logits.twin())
    added = 0.0 if lost is None else lost(logits.twin())
    told = float(mpmath.sqrt(exactly[1])) + norm(exactly[0])
    mean = added + ASKED * norm(logits.twin().true_gradient(length))  # of which a mean of none keeps a rounding
    if configuration.in_reward:
        mean += 4 * ROUNDINGS * EPS * ahead(logits.twin(), configuration, length)
    said = mean, m.rounding[0, 0] + added * (2 * told + added), 0.0, m.rounding[0, 1]
    got = m.mean[0], m.covariance, m.estimate, m.estimate_variance
    for name, *each in zip(("mean", "variance", "estimate", "its variance"), got, exactly, open_, said, strict=True):
        assert off(*each[:2]) <= each[2] + each[3], name


@few
@given(logits=pairs, configuration=asked)
def test_moments(logits, configuration):
    with mpmath.workdps(DIGITS):
        compare(logits, configuration)


@few
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


@few
@given(
    logits=pairs, configuration=configurations(names=["k3"], baselines=BASELINES), which=st.integers(0, len(OWN) - 1)
)
def test_own_estimators(logits, configuration, which):
    """Of any function, alone; k3 under another name has no closed form to fall back on."""
    own, functions = OWN[which]
    with mpmath.workdps(DIGITS), pytest.MonkeyPatch.context() as patch:
        patch.setattr(precise, "functions", lambda est: functions)
        compare(logits, replace(configuration, estimator=own), lambda twin: sums(twin, functions, logits.length))
