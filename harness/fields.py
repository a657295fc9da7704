"""Each configuration's expected gradient as weights on a few fields: the sampled token summed out over the vocabulary.

**Truth.** The gradient of the sequence-level reverse KL is taken as exact per-position KL in the loss, plus the score
function of each token times the *later* per-position KL, with the mean of the other samples of the prompt as baseline:
no sampled log-ratio is left in it.

**Bias** is estimated in Rao-Blackwellised form: each configuration with its own token summed out over the vocabulary,

    E[c_t p_t | prefix] = sum_v pi(v) phi(delta_v) p_v,    E[slope_t p_t | prefix] = sum_v pi(v) slope(delta_v) p_v,

later values c_u by their mean given the prefix, and earlier ones dropped, whose terms have mean zero. The expectation
is the same (a test enumerates it). The tails are not: sampled k3 is so heavy-tailed that a finite sample hides its
bias. In this form k1-in-reward *is* the truth above, so its bias is 0 by identity and not by measurement.

Shapes: B sequences in groups of consecutive rows, T response tokens; m tokens, V vocabulary; K trials, k coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from klgrad.harness.objective import MONITORS, Summary, estimator_summaries, weighted_score
from klgrad.synth.configurations import Configuration
from klgrad.synth.estimators import Estimator, estimator

TRUTH = {"own-value:k1": 1.0, "future:full": 1.0}
_FULL = estimator("full")


def _expected(function: Callable[[Tensor], Tensor], full: Tensor, base: Tensor) -> Tensor:
    """``[m, V]`` pi(v) f(delta_v), 0 for a token never emitted."""
    possible = full > -math.inf
    delta = torch.where(possible, full - base, 0.0)
    return torch.where(possible, full.exp() * function(delta), 0.0)


def _summary(kind: str, est: Estimator) -> Summary:
    """The summary behind a field, by the kind in its name."""
    if kind == "mean":
        value = est.value
        if est.full:
            return lambda full, base: value(full.detach(), base)
        return lambda full, base: _expected(value, full.detach(), base).sum(-1)
    if est.full:  # the whole distribution is in its slope already
        return weighted_score(est.slope)
    return weighted_score(partial(_expected, est.value if kind == "own-value" else est.slope))


def _mean_of(est: Estimator) -> Estimator:
    """Whose conditional mean a value has: every unbiased estimator shares that of ``full``."""
    return _FULL if est.unbiased else est


def fields(configuration: Configuration) -> dict[str, float]:
    """The Rao-Blackwellised expectation of a configuration on-policy, as weights on fields ``KIND:ESTIMATOR``.

    Raises:
        ValueError: for a length mean, whose divisor depends on tokens still to come.
    """
    if configuration.aggregation == "length-mean":
        raise ValueError(
            f"{configuration}: the length is not known when a token is summed out, so the probe has no such form: "
            "use sum or divide=K"
        )
    est, scale, found = configuration.estimator, 1 / configuration.divisor, dict[str, float]()
    if configuration.in_reward and configuration.credit != "future" and not est.full:
        found[f"own-value:{est}"] = scale
    if configuration.in_reward and configuration.credit != "token":
        found[f"future:{_mean_of(est)}"] = scale
    if configuration.in_loss and est.name != "k1":  # k1's slope is 1, and sum_v pi(v) p_v = 0
        name = "own-value:k1" if est.full else f"own-slope:{est}"  # pi(v) delta(v) is the slope of the full KL
        found[name] = found.get(name, 0.0) + scale
    return found


def wanted(configurations: Sequence[Configuration]) -> list[str]:
    """The fields that these and the truth are made of."""
    names = dict.fromkeys(TRUTH)
    for configuration in configurations:
        names.update(dict.fromkeys(fields(configuration)))
    return list(names)


def summaries_of(names: Sequence[str], configurations: Sequence[Configuration]) -> dict[str, Summary]:
    """What is summed over the vocabulary for fields, for configurations in sampled form, and to monitor."""
    found: dict[str, Summary] = dict(MONITORS)
    for name in names:
        kind, _, which = name.partition(":")
        kind = "mean" if kind == "future" else kind
        found[f"{kind}:{which}"] = _summary(kind, estimator(which))
    for configuration in configurations:
        found.update(estimator_summaries(configuration.estimator))
    return found


def later(values: Tensor, mask: Tensor, group: int) -> Tensor:
    """``[B, T]`` sum of the values after each token, minus the mean of the same over the rest of the group.

    The other samples' sums do not depend on this one's tokens, so the baseline is free; ended ones count as 0.
    """
    ahead = values.sum(1, keepdim=True) - values.cumsum(1)
    if group > 1:
        grouped = ahead.reshape(-1, group, ahead.shape[1])
        ahead = ((grouped - grouped.mean(1, keepdim=True)) * group / (group - 1)).reshape(ahead.shape)
    return torch.where(mask, ahead, 0.0)


def field_loss(name: str, terms: dict[str, Tensor], mask: Tensor, group: int) -> Tensor:
    """``[B]`` losses whose gradient is the field, each sequence its own."""
    kind, _, which = name.partition(":")
    if kind == "future":
        values = torch.where(mask, terms[f"mean:{which}"].detach(), 0.0)
        return (later(values, mask, group) * terms["log_probs"]).sum(1)
    return torch.where(mask, terms[name], 0.0).sum(1)


def combine(weights: dict[str, float], found: dict[str, np.ndarray]) -> np.ndarray:
    """``[K, k]`` the weighted sum of fields."""
    first = next(iter(found.values()))
    return sum((w * found[name] for name, w in weights.items()), np.zeros_like(first))
