"""Bias and variance from the gradients of K independent trials: U-statistics, jackknife, intervals.

Shapes: K trials, k coordinates of a gradient or of its sketch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_ROUNDING = 1e-6  # of the true gradient: fields that cancel do so to the precision of a float32 backward pass


def inner(a: np.ndarray, b: np.ndarray) -> tuple[float, np.ndarray]:
    """Unbiased E[a] . E[b] from ``[K, k]`` rows of trials (a U-statistic), and its K leave-one-out values."""
    n = len(a)
    each, sa, sb = (a * b).sum(1), a.sum(0), b.sum(0)
    whole, own = float(sa @ sb), float(each.sum())
    without = whole - a @ sb - b @ sa + each - (own - each)
    return (whole - own) / (n * (n - 1)), without / ((n - 1) * (n - 2))


def jackknife(without: np.ndarray) -> float:
    """Standard error from leave-one-out values."""
    n = len(without)
    return float(np.sqrt((n - 1) / n * ((without - without.mean()) ** 2).sum()))


def _relative_bias(difference: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """|bias| / |true gradient| from U-statistics, and its standard error: of the square, by the delta method."""
    (square, squares), (size, sizes) = inner(difference, difference), inner(truth, truth)
    if size <= 0 or (sizes <= 0).any():
        return math.nan, math.nan
    ratio, error = square / size, jackknife(squares / sizes)
    relative = math.sqrt(max(ratio, 0.0))
    return relative, error / (2 * relative) if relative**2 > error else math.sqrt(error)


def row(truth: np.ndarray, expected: np.ndarray, sampled: np.ndarray, values: np.ndarray, n: int) -> dict[str, Any]:
    """Bias, variance and what goes with them, of one configuration at one length.

    Args:
        truth: ``[K, k]`` estimates of the true gradient.
        expected: ``[K, k]`` the configuration's gradient, Rao-Blackwellised.
        sampled: ``[K, k]`` the configuration's gradient as trained.
        values: ``[K]`` its mean KL estimate.
        n: sequences in each.
    """
    trials = len(values)
    difference = expected - truth
    if np.linalg.norm(difference.mean(0)) < _ROUNDING * np.linalg.norm(truth.mean(0)):
        difference = np.zeros_like(difference)
    off = difference.mean(0)
    square, _ = inner(difference, difference)
    size = inner(truth, truth)[0]
    along, own = inner(expected, truth)[0], inner(expected, expected)[0]
    relative, error = _relative_bias(difference, truth)
    centred = sampled - sampled.mean(0)
    each = (centred**2).sum(1)
    variance = n * float(each.sum()) / (trials - 1)
    return {
        "gradient_norm": math.sqrt(max(size, 0.0)),
        "bias": float(np.linalg.norm(off)), "bias_debiased": math.sqrt(max(square, 0.0)),
        "relative_bias": relative, "relative_bias_error": error,
        "scale": along / size if size > 0 else math.nan,
        "cosine": float(np.clip(along / math.sqrt(own * size), -1, 1)) if own > 1e-6 * size > 0 else math.nan,
        "variance": variance, "estimate": float(values.mean()), "estimate_variance": n * float(values.var(ddof=1)),
        "samples": n, "trials": trials,
        **_noise(difference, off), "_relative": _relative_variance(centred, each),
    }  # fmt: skip


def _noise(difference: np.ndarray, off: np.ndarray) -> dict[str, float]:
    """tr Sigma, tr Sigma^2 and m' Sigma m of the mean over trials; trials x trials, since k may be large."""
    trials = len(difference)
    centred = difference - off
    gram = centred @ centred.T / (trials - 1)
    trace = float(np.trace(gram))
    square = max(float((gram**2).sum()) - trace**2 / (trials - 1), 0.0)
    direction = off / (np.linalg.norm(off) or 1.0)
    along = float(((centred @ direction) ** 2).sum()) / (trials - 1)
    return {
        "_trace": trace / trials, "_square": square / trials**2, "_along": along / trials,
        "bias_floor": math.sqrt(trace / trials),
    }  # fmt: skip


def _relative_variance(centred: np.ndarray, each: np.ndarray) -> float:
    """Relative variance of the variance: the trials' own spread, or a normal one's where that is larger."""
    trials = len(each)
    if not each.mean() > 0:
        return 0.0
    gram = centred @ centred.T / (trials - 1)
    trace = float(np.trace(gram))
    normal = 2 * max(float((gram**2).sum()) - trace**2 / (trials - 1), 0.0) / trace**2 / (trials - 1)
    return max(float(each.var(ddof=1) / each.mean() ** 2 / trials), normal)


def with_intervals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with 95 % intervals of bias and variance."""
    from klgrad.analysis.intervals import bias_interval, variance_interval

    def column(key: str) -> np.ndarray:
        return np.array([row[key] for row in rows])

    low, high = bias_interval(column("bias"), column("_trace"), column("_square"), column("_along"))
    v_low, v_high = variance_interval(column("variance"), column("_relative"))
    for k, row in enumerate(rows):
        row.update(bias_low=low[k], bias_high=high[k], variance_low=v_low[k], variance_high=v_high[k])
        row["variance_interval"] = "sampled"
    return rows
