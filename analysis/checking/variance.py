"""How noisy is it: against k1-in-reward and the best unbiased configuration, and how heavy is its tail?"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import cache
from typing import Any

import numpy as np
from scipy import stats

from klgrad.analysis.checking.gradient import Measured, Subject
from klgrad.analysis.checking.models import Model, each_row, models
from klgrad.analysis.checking.report import PLACE, Finding
from klgrad.analysis.checking.value import one_token
from klgrad.analysis.ranking import grid, unbiased
from klgrad.synth.configurations import Configuration
from klgrad.synth.moments import moments

BASELINE = "k1-in-reward"
RARE = 1e-4  # the policy's probability of the drifted pair's rare token; the reference's is one half
TOKENS = 1000


@cache
def every_unbiased() -> tuple[Configuration, ...]:
    """Of every estimator, placement and credit, without a baseline and with one optimal number: what has no bias.

    Seen from the exact bias on a probe pair with an end token. A clamp that is not reached there is left out.
    """
    (m,) = (m for m in models((4,), 1) if m.ends)
    candidates = [c for c in grid(m.pair) if c.estimator.unbiased and c.baseline in ("none", "optimal")]
    return tuple(unbiased(m.pair, candidates, [m.length]))


@cache
def _best(model: Model) -> tuple[dict[str, float], str]:
    """The variance of every unbiased configuration, and the least one's name."""
    found = moments(model.pair, every_unbiased(), [model.length])
    each = {str(m.at(0)): float(m.covariance[0]) for m in found if m.covariance is not None}
    return each, min(each, key=lambda name: each[name])


def examine(
    measured: dict[str, list[Measured]], reached: Collection[str], error: float
) -> tuple[dict[str, Any], list[Finding]]:
    """The variance's part of a report.

    Args:
        measured: placement -> its gradient on every model.
        reached: the placements that give the wanted gradient; a bias stays however many sequences there are, so only
            these get a count of them.
        error: the relative error of the gradient that the counts are for.
    """
    numbers: dict[str, Any] = {"error": error, "best_unbiased": {}}
    findings = []
    for placement, each in measured.items():
        if all(m.dead for m in each) or any(m.variance is None for m in each):
            continue
        fixed = [m for m in each if not m.model.ends]
        to_k1: dict[int, float] = {}
        to_best: dict[int, float | None] = {}
        needed: dict[int, int | None] = {}
        for length in sorted({m.model.length for m in fixed}):
            here = [m for m in fixed if m.model.length == length]
            known = [_best(m.model) for m in here]
            own = sum(float(m.variance or 0.0) for m in here)
            to_k1[length] = own / sum(variances[BASELINE] for variances, _ in known)
            least = sum(variances[name] for variances, name in known)
            to_best[length] = own / least if least > 1e-12 * own else None  # one token: the full KL has no noise
            size = sum(float(m.model.truth @ m.model.truth) for m in here)
            count = own / (error**2 * size)
            needed[length] = math.ceil(count) if placement in reached and math.isfinite(count) else None
            numbers["best_unbiased"][length] = known[0][1]
        numbers[placement] = {
            "relative_to_k1_in_reward": to_k1, "relative_to_best_unbiased": to_best, "sequences_for_error": needed,
        }  # fmt: skip
        last = max(to_k1)
        to_k1 = {n: 0.0 if ratio < 1e-12 else ratio for n, ratio in to_k1.items()}
        findings.append(Finding(
            "variance", "info",
            f"in the {PLACE[placement]}, {to_k1[last]:.3g} times the variance of {BASELINE} at T = {last} "
            f"({to_k1[min(to_k1)]:.3g} at T = {min(to_k1)})"
            + ("" if to_best[last] is None else f", {to_best[last]:.3g} times the best unbiased one's "
               f"({numbers['best_unbiased'][last]})")
            + "; "
            + (
                "it is another gradient, and no number of sequences makes it the wanted one"
                if needed[last] is None
                else f"{needed[last]:,} sequences for a gradient within {error:.0%}"
            ),
            numbers[placement],
        ))  # fmt: skip
    numbers["sequences_for_error"] = {p: numbers[p]["sequences_for_error"] for p in measured if p in numbers}
    return numbers, findings


def tail(subject: Subject, *, unbiased: bool) -> tuple[dict[str, Any], list[Finding]]:
    """What a batch of 1,000 tokens shows where the policy has all but dropped a token the reference likes.

    One token, pi = (1 - 1e-4, 1e-4) against pi_ref = (1/2, 1/2). The count of rare tokens in a batch is binomial,
    so the median batch is exact. ``unbiased``: the value's expectation is the KL on ordinary pairs.
    """
    pi, reference = np.array([1 - RARE, RARE]), np.array([0.5, 0.5])
    batch = one_token(np.log(pi), np.log(reference))
    parts = [subject.evaluate(row, differentiate=False).by_sequence for row in each_row(batch)]
    common, rare = (float(np.reshape(part, -1)[0]) for part in parts)
    mean = (1 - RARE) * common + RARE * rare
    spread = RARE * (1 - RARE) * (rare - common) ** 2
    count = float(stats.binom.median(TOKENS, RARE))
    median = common + count / TOKENS * (rare - common)
    carries = RARE * abs(rare) > 0.5 * ((1 - RARE) * abs(common) + RARE * abs(rare))
    unseen = (1 - RARE) ** TOKENS if carries else RARE**TOKENS
    numbers = {"rare_token_probability": unseen, "median_batch": median, "mean_batch": mean, "token_variance": spread}
    kl = float(pi @ (np.log(pi) - np.log(reference)))
    numbers["kl"] = kl
    if unbiased and abs(mean - kl) > max(1e-6, 10 * subject.tolerance) * kl:
        message = (
            f"a clamp hides drift: where the policy has all but dropped a token (probability {RARE:g}; the reference's "
            f"is 1/2) the expected value is {mean:.4g} and the KL {kl:.4g}"
        )
        return numbers, [Finding("variance", "warning", message, numbers)]
    if not carries:
        return numbers, []
    message = (
        f"a heavy tail: where the policy has all but dropped a token (probability {RARE:g}; the reference's is 1/2), "
        f"{unseen:.1%} of batches of {TOKENS:,} tokens never see the token that carries the mean: the median batch "
        f"shows {median:.3g} where the mean is {mean:.3g} (variance per token {spread:.4g}); watch k1 or the full KL"
    )
    return numbers, [Finding("variance", "warning", message, numbers)]
