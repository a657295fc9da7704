"""Coverage of the intervals, counted; and what they must do at the edges."""

import numpy as np
import pytest
from scipy import stats

from klgrad.analysis.intervals import bias_interval, low_end, variance_interval

PROBLEMS = 4000


@pytest.mark.parametrize("d", [1, 4, 64])
@pytest.mark.parametrize("signal", [0.0, 0.5, 1.0, 3.0, 30.0])
def test_bias_interval_covers(d, signal):
    """Nominal 95 %; the gamma match is allowed 0.90 to 1.00. False alarm of the binomial at 4 sigma: 6e-5."""
    rng = np.random.default_rng(d)
    scales = rng.uniform(0.3, 1.0, d)
    bias = np.zeros(d)
    bias[0] = signal
    measured = bias + scales * rng.standard_normal((PROBLEMS, d))
    norm = np.linalg.norm(measured, axis=1)
    along = (measured / norm[:, None]) ** 2 @ scales**2
    ones = np.ones(PROBLEMS)
    low, high = bias_interval(norm, ones * (scales**2).sum(), ones * (scales**4).sum(), along)
    covered = np.mean((low <= signal + 1e-12) & (signal <= high + 1e-12))
    assert 0.90 - 4 * np.sqrt(0.9 * 0.1 / PROBLEMS) <= covered
    assert (low <= high).all()


def test_a_normal_interval_would_fail_the_same_count():
    """Negative control: the interval that people draw around the raw norm misses a bias of zero always."""
    rng = np.random.default_rng(0)
    norm = np.linalg.norm(rng.standard_normal((PROBLEMS, 4)), axis=1)
    covered = np.mean(norm - 1.96 * 0.7 <= 0)
    assert covered < 0.85


def test_noise_free_bias_is_its_own_interval():
    low, high = bias_interval(np.array([0.0, 2.0]), np.zeros(2), np.zeros(2), np.zeros(2))
    assert low.tolist() == high.tolist() == [0.0, 2.0]


def test_bias_interval_narrows_to_the_norm_far_above_the_noise():
    low, high = bias_interval(np.array([100.0]), np.array([4.0]), np.array([4.0]), np.array([1.0]))
    assert 97.5 < low[0] < 98.5 < 101.5 < high[0] < 102.5


def test_variance_interval_is_the_chi_squared_one_for_a_scalar_gaussian():
    trials = 50
    low, high = variance_interval(np.array([3.0]), np.array([2 / (trials - 1)]))
    chi = stats.chi2(trials - 1)
    assert low[0] == pytest.approx(3.0 * (trials - 1) / chi.ppf(0.975))
    assert high[0] == pytest.approx(3.0 * (trials - 1) / chi.ppf(0.025))


@pytest.mark.parametrize("relative", [0.01, 0.5, 3.0, 1000.0, np.inf])
def test_the_low_end_holds_on_the_worst_law_and_not_by_a_margin(relative):
    """Two values with mean 1: Cantelli's worst law for that relative variance, and Markov's, which needs a larger one.

    The higher comes with a probability of just the tail, 0.025; a bound 1 % nearer would be passed by both.
    """
    tail = 0.025
    cantelli, markov = 1 + np.sqrt(relative * (1 - tail) / tail), 1 / tail
    if cantelli <= markov:
        low = 1 - tail / (1 - tail) * (cantelli - 1)
        assert tail * cantelli + (1 - tail) * low == pytest.approx(1)
        assert tail * cantelli**2 + (1 - tail) * low**2 - 1 == pytest.approx(relative)
    value = min(cantelli, markov)
    assert low_end(np.array([value]), np.array([relative]))[0] == pytest.approx(1)  # the true variance
    assert low_end(np.array([0.0]), np.array([relative]))[0] == 0


@pytest.mark.parametrize("relative", [0.02, 0.1, 0.2, 1 / 3, 1.0])
def test_what_matching_two_moments_costs_at_worst(relative):
    """One outcome alone carries the variance, its number Poisson: the least coverage over that number's mean.

    0.84 up to where tables still give an upper end, a relative variance of a third; past it that falls, to 0.6 at 1.
    """
    worst = 1.0
    for expected in np.geomspace(1e-3, 1 / relative, 400):  # more than 1 / relative would leave less than nothing
        size, number = np.sqrt(relative / expected), np.arange(400)
        measured = np.maximum(1 - expected * size, 1e-12) + size * number
        low, high = variance_interval(measured, np.full(400, relative))
        worst = min(worst, stats.poisson(expected).pmf(number)[(low <= 1) & (high >= 1)].sum())
    assert worst > 0.83 if relative <= 1 / 3 else worst < 0.7
