"""Integrals from 0 to many ends, by Gauss-Legendre on panels fine enough for the kinks of a formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from klgrad.analysis.derivations.inputs import EPS
from klgrad.analysis.derivations.steps import StepFailed

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)
_HALVINGS = 50  # of a panel around a kink: to the last digits of its place
_MOST_PANELS = 256  # that are halved at once
_PANEL = 1e-13  # of the integral of |f| over a panel: closer than that its two rules need not be
_ACCURACY = 1e-11  # of the integral of |f|, over all panels


class Integral(NamedTuple):
    """Integrals, and how far each may be off."""

    value: np.ndarray
    error: np.ndarray


def integral(f: Callable[[np.ndarray], np.ndarray], end: np.ndarray, of: str) -> Integral:
    """The integral of f from 0 to each end.

    An end may lie off the real axis by a complex step, which differentiates the last piece as a quadrature.

    Raises:
        StepFailed: when the panels do not converge, on the scale of the integral of |f|.
    """
    reached = np.real(end)[np.isfinite(end)]
    low, error_low = _panels(f, min(reached.min(initial=0.0), 0.0), of)
    high, error_high = _panels(f, max(reached.max(initial=0.0), 0.0), of)
    edges = np.unique(np.concatenate([low, [0.0], high]))
    sums = np.concatenate([[0.0], np.cumsum(_gauss(f, edges[:-1], edges[1:]))])
    zero = np.searchsorted(edges, 0.0)
    upto = sums - sums[zero]
    below = np.clip(np.searchsorted(edges, np.real(end), side="right") - 1, 0, len(edges) - 1)
    # the panel's edge on the side of 0, so that an end in a fine panel takes no difference of large sums
    start = np.where(np.real(end) < 0, np.minimum(below + 1, len(edges) - 1), below)
    size = np.abs(_gauss(lambda x: np.abs(f(x)), np.zeros_like(np.real(end)), np.real(end)))
    rules = np.where(np.real(end) < 0, error_low, error_high)
    return Integral(upto[start] + _gauss(f, edges[start], end), rules + (_PANEL + len(edges) * EPS) * size)


def _gauss(f: Callable[[np.ndarray], np.ndarray], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The integral of f over each [a, b], by one Gauss-Legendre rule."""
    width = b - a
    points = a + width * ((_NODES + 1) / 2).reshape(-1, *[1] * np.ndim(width))
    return np.asarray(width * np.tensordot(_WEIGHTS / 2, f(points), axes=1))


def _panels(f: Callable[[np.ndarray], np.ndarray], end: float, of: str) -> tuple[np.ndarray, float]:
    """Edges of panels from 0 to ``end``, halved wherever one rule and two disagree, and what they disagree by."""
    edges, error, size = [np.array([0.0, end])], 0.0, 0.0
    a, b = np.array([0.0]), np.array([end])
    for depth in range(_HALVINGS + 1):
        middle = (a + b) / 2
        with np.errstate(invalid="ignore"):  # where f overflows there is no convergence, and that is told below
            gap = np.abs(_gauss(f, a, b) - _gauss(f, a, middle) - _gauss(f, middle, b))
            whole = np.abs(_gauss(lambda x: np.abs(f(x)), a, b))
        coarse = ~(gap <= _PANEL * whole)
        if depth == _HALVINGS or coarse.sum() > _MOST_PANELS:
            coarse[:] = False
        error, size = error + gap[~coarse].sum(), size + whole[~coarse].sum()
        edges.append(middle)  # the finer of the two rules is kept, so that its derivative in an end has converged too
        if not coarse.any():
            break
        a, b = np.concatenate([a[coarse], middle[coarse]]), np.concatenate([middle[coarse], b[coarse]])
    if not error <= _ACCURACY * size:
        raise StepFailed(
            f"the integral in {of} did not converge between r = 1 and r = {np.exp(end):.4g} (estimated error "
            f"{error:.2g} of {size:.2g}), so the steps that use it cannot be checked on this pair: that is a limit of "
            "the quadrature and says nothing about the formula"
        )
    return np.concatenate(edges), float(error)
