"""The terms of divergences between next-token distributions, none of which cancels near the reference.

A divergence is a sum over tokens of pi f(q / pi), and f may be changed by c (r - 1): both rows sum to one. Here f is
flat at r = 1, so no terms are negative and none of first order stand in the sum. Shapes: S contexts, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from klgrad.synth.estimators import estimator

Terms = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of a divergence, from log pi and delta
_K3 = estimator("k3")


def k3(delta: np.ndarray) -> np.ndarray:
    """r - 1 - log r, with all its digits near 0; complex arguments allowed."""
    return np.asarray(_K3.value(delta))


def reverse_kl(p: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """``[S, V]`` terms of KL(pi || q) of each context's next token; complex arguments allowed.

    They are pi (delta + r - 1), none negative: r - 1 adds nothing to a sum over tokens and takes the terms of first
    order away, which would cancel down to the KL near the reference.
    """
    far = np.real(delta) < -1  # where r alone overflows
    near = np.exp(p) * k3(np.where(far, 0.0, delta))
    return np.where(far, np.exp(p - delta) - np.exp(p) * (1 - delta), near)


def forward_kl(p: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """``[S, V]`` terms of KL(q || pi), the same with the two exchanged."""
    return reverse_kl(p - delta, -delta)


def chi_squared(p: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """``[S, V]`` terms of chi^2(q || pi), pi (r - 1)^2; complex arguments allowed."""
    return np.exp(p) * np.expm1(-delta) ** 2
