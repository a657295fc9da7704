"""Sums over sequences, and the estimates that follow from them.

Sums are kept per *unit* of consecutive sequences, the smallest leave-one-out group.
Shapes: E edges (context, token) in use, U units, d parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from klgrad.synth.blocks import Edges
from klgrad.synth.configurations import Configuration
from klgrad.synth.policies import PolicyPair
from klgrad.synth.rows import edge_pathwise, edge_values

if TYPE_CHECKING:
    from jaxtyping import Float


class Sums(NamedTuple):
    """Sums over each unit's sequences, for one configuration at one length.

    The N-sequence estimate is ``(x - b y) / N``, or leave-one-out from ``y``, ``cy`` and ``c``.

    Args:
        x: ``[U, d]`` gradients at b = 0.
        y: ``[U, d]`` sum_t omega(t) p_t / D.
        cy: ``[U, d]`` the same weighted with each sequence's C.
        c: ``[U]`` C, the sum of values.
        estimate: ``[U]`` the KL value estimates, sum_t lambda_t c_t / D.
    """

    x: Float[np.ndarray, "U d"]
    y: Float[np.ndarray, "U d"]
    cy: Float[np.ndarray, "U d"]
    c: Float[np.ndarray, " U"]
    estimate: Float[np.ndarray, " U"]


class Tables(NamedTuple):
    """A configuration's terms on the edges, ``[E]`` or ``[E, d]``.

    ``score`` and ``pathwise`` carry a token ratio, ``plain_`` ones do not: paths weigh their own tokens.
    """

    configuration: Configuration
    value: np.ndarray
    score: np.ndarray
    pathwise: np.ndarray
    loss_weight: np.ndarray
    plain_score: np.ndarray
    plain_pathwise: np.ndarray


def tables(pair: PolicyPair, edges: Edges, configuration: Configuration) -> Tables:
    """The configuration's terms on those edges."""
    at = (edges.context, edges.token)
    rho = pair.importance_ratio[at]
    own = rho if configuration.ratio == "token" else np.ones_like(rho)
    weight = np.ones_like(rho) if configuration.estimator.full else own
    score = pair.policy.scores[at]
    pathwise = edge_pathwise(pair, configuration)[at] if configuration.in_loss else np.zeros_like(score)
    value = edge_values(pair, configuration)[at]
    return Tables(configuration, value, own[:, None] * score, weight[:, None] * pathwise, weight, score, pathwise)


def scaled(sums: Sums, configuration: Configuration) -> Sums:
    """Divided by the configuration's constant."""
    if configuration.divisor == 1.0:
        return sums
    D = configuration.divisor
    return sums._replace(x=sums.x / D, y=sums.y / D, cy=sums.cy / D, estimate=sums.estimate / D)


def total(parts: Iterable[list[Sums]]) -> list[Sums]:
    """Sums over batches, configuration by configuration; one batch is held at a time."""
    return reduce(lambda a, b: [_plus(x, y) for x, y in zip(a, b, strict=True)], parts)


def joined(parts: list[list[Sums]]) -> list[Sums]:
    """Units after units, configuration by configuration."""
    if len(parts) == 1:
        return parts[0]
    return [Sums(*map(np.concatenate, zip(*each, strict=True))) for each in zip(*parts, strict=True)]


def _plus(a: Sums, b: Sums) -> Sums:
    return Sums(a.x + b.x, a.y + b.y, a.cy + b.cy, a.c + b.c, a.estimate + b.estimate)


def estimates(
    configuration: Configuration, sums: Sums, trials: int, samples: int, baseline: Float[np.ndarray, " d"]
) -> tuple[Float[np.ndarray, "trials d"], Float[np.ndarray, " trials"]]:
    """``[trials, d]`` gradient and ``[trials]`` KL value estimates of ``samples`` sequences each.

    Args:
        sums: one row per unit; units of a trial, and of a leave-one-out group, follow each other.
        baseline: ``[d]`` the constant b of other baselines.
    """
    value = sums.estimate.reshape(trials, -1).sum(axis=1) / samples
    x = sums.x.reshape(trials, -1, sums.x.shape[1]).sum(axis=1)
    if configuration.baseline == "none":
        return x / samples, value
    if configuration.baseline != "loo":
        y = sums.y.reshape(trials, -1, x.shape[1]).sum(axis=1)
        return (x - baseline * y) / samples, value
    group = configuration.group(samples)
    groups = trials * (samples // group)
    y, cy = (a.reshape(groups, -1, x.shape[1]).sum(axis=1) for a in (sums.y, sums.cy))
    c = sums.c.reshape(groups, -1).sum(axis=1)[:, None]
    others = ((c * y - cy) / (group - 1)).reshape(trials, -1, x.shape[1]).sum(axis=1)
    return (x - others) / samples, value
