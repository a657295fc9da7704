"""Confidence intervals for a bias norm and for a variance, both from sums of squares.

The squared norm of a noisy mean is close to a gamma variable; so is the trace of a sample covariance. Matching
mean and variance and inverting the gamma gives intervals that hold near the noise floor, where a normal interval
on the debiased square does not. Shapes: R rows, each its own problem.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy import special

if TYPE_CHECKING:
    from jaxtyping import Float

LEVEL = 0.95
_BISECTIONS = 80


def bias_interval(
    norm: Float[np.ndarray, " R"],
    trace: Float[np.ndarray, " R"],
    trace_of_square: Float[np.ndarray, " R"],
    along: Float[np.ndarray, " R"],
    level: float = LEVEL,
) -> tuple[Float[np.ndarray, " R"], Float[np.ndarray, " R"]]:
    """``low, high [R]`` for the norm B of a bias that was measured as ``norm`` with noise of covariance Sigma.

    The measured square is taken as gamma with mean ``B^2 + tr Sigma`` and variance
    ``2 tr Sigma^2 + 4 B^2 m' Sigma m``, m the unit direction of the bias. ``low`` is 0 where zero is not excluded.

    Args:
        norm: the measured norm.
        trace, trace_of_square: tr Sigma and tr Sigma^2 of the measured mean.
        along: m' Sigma m.
        level: coverage.
    """
    norm, trace, trace_of_square, along = (np.asarray(x, float) for x in (norm, trace, trace_of_square, along))
    square = norm**2

    def below(b: np.ndarray) -> np.ndarray:  # P(measured square <= square | B = b), falling in b
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            mean, variance = b**2 + trace, 2 * trace_of_square + 4 * b**2 * along
            found = np.asarray(special.gammainc(mean**2 / variance, square * mean / variance))
        return np.where(np.isnan(found), mean <= square, found)  # a spread that underflows leaves a point

    def invert(probability: float) -> np.ndarray:
        low = np.zeros_like(norm)
        high = norm + 1.0 * np.sqrt(trace)
        for _ in range(60):
            high = np.where(below(high) > probability, 2 * high, high)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            above = below(middle) > probability
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        return np.where(below(np.zeros_like(norm)) <= probability, 0.0, (low + high) / 2)

    noisy = np.isfinite(norm) & (trace > 0)
    tail = (1 - level) / 2
    return np.where(noisy, invert(1 - tail), norm), np.where(noisy, invert(tail), norm)


def variance_interval(
    variance: Float[np.ndarray, " R"], relative: Float[np.ndarray, " R"], level: float = LEVEL
) -> tuple[Float[np.ndarray, " R"], Float[np.ndarray, " R"]]:
    """``low, high [R]`` for a variance measured with the given relative variance of its own (gamma-matched).

    An infinite relative variance, or one past what a gamma holds, says nothing: 0 and inf.
    """
    variance, relative = np.asarray(variance, float), np.asarray(relative, float)
    tail = (1 - level) / 2
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        shape = 1 / relative
        low = variance * shape / special.gammaincinv(shape, 1 - tail)
        high = variance * shape / special.gammaincinv(shape, tail)
    exact = ~(relative > 1e-30) | ~np.isfinite(variance) | (variance == 0)
    unknown = np.isnan(low) | np.isnan(high)  # the gamma's lower quantile underflows
    low, high = np.where(unknown, 0.0, low), np.where(unknown, np.inf, high)
    return np.where(exact, variance, low), np.where(exact, variance, high)


def low_end(
    variance: Float[np.ndarray, " R"], relative: Float[np.ndarray, " R"], level: float = LEVEL
) -> Float[np.ndarray, " R"]:
    """``low [R]`` of the interval with no upper end, for the same arguments, whatever the distribution.

    A mean mu of what is never negative is exceeded mu / tail with a probability of at most the tail (Markov), and by
    sqrt(relative (1 - tail) / tail) mu as well (Cantelli): the variance is at least the measured one over the less.
    """
    tail = (1 - level) / 2
    with np.errstate(over="ignore"):
        most = 1 + np.sqrt(np.asarray(relative, float) * (1 - tail) / tail)
    return np.asarray(variance, float) / np.fmin(most, 1 / tail)
