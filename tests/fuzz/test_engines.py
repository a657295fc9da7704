"""Every engine on extreme models: ValueError or an answer; not finite only where double precision must overflow."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
from extremes import LENGTHS, automata_of_any_kind, extreme_pairs, log_size, logits
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import configurations

from klgrad.analysis import intervals, results
from klgrad.analysis.montecarlo import simulate
from klgrad.synth import enumeration, exact
from klgrad.synth.configurations import parse
from klgrad.synth.estimators import ESTIMATORS, estimator
from klgrad.synth.moments import full_fits, moments
from klgrad.synth.policies import log_softmax

deltas = st.lists(st.floats(-700, 700), min_size=1, max_size=8).map(np.array)
kinds = st.sampled_from(("none", "trace", "diagonal", "full"))
BASELINES = ("", "b=0.7", "mean-baseline", "optimal-baseline", "optimal-baseline-per-coordinate", "loo", "loo=2")


def lengths_within(longest):
    return st.lists(st.sampled_from([n for n in LENGTHS if n <= longest]), min_size=1, max_size=3)


@pytest.mark.parametrize("name", [name for name, entry in ESTIMATORS.items() if not entry.full])
@given(delta=deltas)
def test_sampled_estimators_are_never_nan(name, delta):
    """Infinite where r^2 overflows, finite everywhere else."""
    est = estimator(name)
    with np.errstate(over="ignore"):
        value, slope = est.value(delta), est.slope(delta)
    for found in (value, slope):
        assert not np.isnan(found).any()
        assert np.isfinite(found[delta > -350]).all()


@given(automaton=automata_of_any_kind(), data=st.data())
def test_full_estimators_are_finite(automaton, data):
    shape = automaton[0].next_context.shape
    p, q = (log_softmax(logits(data.draw, shape)) for _ in range(2))
    assume(not ((p > -np.inf) & (q == -np.inf)).any())
    est = estimator("full")
    assert np.isfinite(est.value(p, q)).all()
    assert np.isfinite(est.slope(p, q)).all()


@given(world=extreme_pairs(), data=st.data())
def test_exact_quantities_are_never_nan(world, data):
    pair, longest = world
    lengths = data.draw(lengths_within(longest))
    assert (exact.kl(pair, lengths) >= -1e-9).all()
    assert (exact.forward_kl(pair, lengths) >= -1e-9).all()
    assert (exact.entropy(pair, lengths) >= -1e-9).all()
    for function in (exact.true_gradient, exact.token_gradient, exact.token_forward_gradient, exact.future_gradient):
        assert np.isfinite(function(pair, lengths)).all(), function.__name__
    visited = exact.visitation(pair, lengths)
    assert (visited >= 0).all()
    assert (visited.sum(axis=1) <= np.array(lengths) * (1 + 1e-9)).all()
    reward = np.array(data.draw(st.lists(st.floats(-1e6, 1e6), min_size=visited.shape[1], max_size=visited.shape[1])))
    best = exact.optimum(pair, np.broadcast_to(reward[:, None], pair.reference.shape), 1e-3, lengths[0])
    assert np.isfinite(best.objective)
    assert not np.isnan(best.log_probs[:, pair.automaton.alive]).any()


@given(world=extreme_pairs(), configuration=configurations(baselines=BASELINES), kind=kinds, data=st.data())
def test_moments_are_finite_unless_they_overflow(world, configuration, kind, data):
    pair, longest = world
    lengths = data.draw(lengths_within(longest))
    kind = "diagonal" if kind == "full" and not full_fits(pair) else kind
    (m,) = moments(pair, [configuration], lengths, covariance=kind, samples=4)
    spread = np.zeros(1) if m.covariance is None else m.covariance
    if log_size(pair, max(lengths)) < 700:
        assert np.isfinite(m.mean).all()
        assert np.isfinite(spread).all()
        assert np.isfinite(m.estimate).all()
    if kind in ("trace", "diagonal"):
        assert not (spread < 0).any()


@given(world=extreme_pairs(), configuration=configurations(), data=st.data())
def test_moments_agree_with_enumeration_on_extreme_models(world, configuration, data):
    """To a part in 1e7 of the largest gradient that any sequence has: what cancels leaves no more digits.

    Enumeration adds what comes from the reward to what comes from the loss, which can cancel before the sum is taken.
    """
    pair, longest = world
    length = data.draw(st.integers(1, min(longest, 3)))
    assume(configuration.baseline in ("none", "constant") and log_size(pair, length) < 700)
    alone = replace(configuration, placement="reward") if configuration.placement == "both" else configuration
    with np.errstate(over="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, part = (enumeration.enumerate_configuration(c, pair, length) for c in (configuration, alone))
    (m,) = moments(pair, [configuration], [length], covariance="none")
    size = np.maximum(np.abs(plain.gradient), np.abs(part.gradient))
    scale = (plain.probability[:, None] * size).sum(axis=0).max()
    assert np.abs(m.mean[0] - plain.mean).max() <= 1e-7 * max(1.0, scale)


@given(
    world=extreme_pairs(),
    asked=st.lists(configurations(baselines=BASELINES), min_size=1, max_size=3),
    samples=st.sampled_from((4, 4, 64, 4096)),
    data=st.data(),
)
def test_sampling_gives_numbers_or_says_overflow(world, asked, samples, data):
    """Several configurations share a sampler; few sequences are drawn one by one, many of few outcomes tallied."""
    pair, longest = world
    further = (40, 600) if longest == max(LENGTHS) else ()  # tokens of a block, and more than a block holds
    some = st.sampled_from([*(n for n in LENGTHS if n <= longest), *further])
    lengths = sorted(data.draw(st.sets(some, min_size=1, max_size=3)))
    drawn = simulate(pair, asked, lengths, trials=2, samples=samples, seed=data.draw(st.integers(0, 3)))
    for length, gradients, estimates in zip(lengths, drawn.gradients, drawn.estimates, strict=True):
        assert gradients.shape == (2, len(asked), pair.policy.parameters)
        if log_size(pair, length) < 700:
            assert np.isfinite(gradients).all()
            assert np.isfinite(estimates).all()


MEANS_NOTHING = {"relative_bias", "scale", "cosine"}  # documented: NaN where a gradient is zero


@given(world=extreme_pairs(), configuration=configurations(baselines=BASELINES), data=st.data())
def test_tables_say_what_is_beyond_float64(world, configuration, data):
    """A number that is missing is one that means nothing, or its configuration is named as beyond double precision."""
    pair, longest = world
    length = data.draw(st.sampled_from([n for n in LENGTHS if n <= longest]))
    frame = results.compare(pair, [configuration], [length], trials=2, samples=4)
    numbers = frame.drop(columns=["variance_high"]).select_dtypes("number").drop(columns=list(MEANS_NOTHING))
    if str(configuration) not in results.beyond_float64(frame):
        assert not list(numbers.columns[numbers.isna().any()])
    assert (frame.bias_low <= frame.bias_high).all() or frame.bias_low.isna().any()
    results.csv_bytes(frame)
    results.records(frame)


sizes = st.floats(0, 1e100) | st.floats(-300, 100).map(lambda e: 10.0**e)


@given(norm=sizes, spread=sizes, parameters=st.integers(1, 64), share=st.floats(0, 1), relative=st.floats(0, np.inf))
def test_intervals_are_ordered(norm, spread, parameters, share, relative):
    """A covariance with one eigenvalue ``spread`` or ``parameters`` equal ones; the bias along a share of it."""
    trace, square, along, norm = (np.array([x]) for x in (spread, spread**2 / parameters, spread * share, norm))
    low, high = intervals.bias_interval(norm, trace, square, along)
    assert 0 <= low[0] <= high[0] * (1 + 1e-9)
    low, high = intervals.variance_interval(trace, np.array([relative]))
    assert 0 <= low[0] <= high[0]


@pytest.mark.parametrize("length", [1, 2_000, pytest.param(100_000, marks=pytest.mark.slow)])
@settings(max_examples=8)
@given(world=extreme_pairs(), name=st.sampled_from(["k1-in-reward", "k3-in-both+rtg", "full-in-both+length-mean"]))
def test_very_long_sequences(world, name, length):
    pair, longest = world
    assume(longest == 7 and pair.automaton.contexts <= 4)  # no horizon
    (m,) = moments(pair, [parse(name)], [length], covariance="trace")
    if log_size(pair, 1) < 600:
        assert np.isfinite(m.mean).all()
        assert np.isfinite(m.covariance).all()
    assert np.isfinite(exact.kl(pair, [length])).all()
