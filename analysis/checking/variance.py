"""How noisy is it: against k1-in-reward and the best unbiased configuration, and how heavy is its tail?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from klgrad.analysis.checking.fields import FIRST
from klgrad.analysis.checking.measuring import Measured, Subject
from klgrad.analysis.checking.models import Model, each_row, models
from klgrad.analysis.checking.report import PLACE, Finding
from klgrad.analysis.checking.targets import Target
from klgrad.analysis.checking.value import one_token
from klgrad.analysis.ranking import grid, unbiased
from klgrad.synth.configurations import Configuration, parse
from klgrad.synth.moments import moments

BASELINE = "k1-in-reward"
RARE = 1e-4  # the policy's probability of the drifted pair's rare token; the reference's is one half
TOKENS = 1000
_FEW = ("k1", "k2", "k3", "full")
_STANDS = (("reward", "+token"), ("reward", "+future"), ("loss", ""), ("both", "+token"), ("reward", ""))


@cache
def every_unbiased() -> tuple[Configuration, ...]:
    """Of every estimator, placement and credit, without a baseline and with one optimal number: what has no bias.

    Seen from the exact bias on a probe pair with an end token. A clamp that is not reached there is left out.
    """
    (m,) = (m for m in models((4,), 1) if m.ends)
    candidates = [c for c in grid(m.pair) if c.estimator.unbiased and c.baseline in ("none", "optimal")]
    return tuple(unbiased(m.pair, candidates, [m.length]))


@cache
def every_right(target: str) -> tuple[Configuration, ...]:
    """What gives the target exactly; for the sequence's gradient every unbiased one, else those without a baseline."""
    if target == "sequence":
        return every_unbiased()
    if target not in FIRST:
        return ()
    (m,) = (m for m in models((4,), 1) if m.ends)
    tokens = [parse(f"{name}-in-{where}{credit}") for name in _FEW for where, credit in _STANDS]
    found = moments(m.pair, tokens, [m.length], covariance="none")
    size = float(np.linalg.norm(m.fields[target]))
    return tuple(f.configuration for f in found if np.linalg.norm(f.mean[0] - m.fields[target]) <= 1e-9 * size)


@cache
def _best(model: Model, target: str = "sequence") -> tuple[dict[str, float], str]:
    """The variance of every configuration that gives the target, and of the baseline; and the least one's name."""
    right = every_right(target)
    found = moments(model.pair, [*right, *([parse(BASELINE)] if parse(BASELINE) not in right else [])], [model.length])
    each = {str(m.at(0)): float(m.covariance[0]) for m in found if m.covariance is not None}
    fitting = [str(m.at(0)) for m in found if m.configuration in right]
    return each, min(fitting, key=lambda name: each[name], default="")


def examine(
    measured: dict[str, list[Measured]], target: Target, gradient: dict[str, dict[str, Any]], error: float
) -> tuple[dict[str, Any], list[Finding]]:
    """The variance's part of a report: against k1-in-reward, and against the best configuration for the target.

    Args:
        measured: placement -> its gradient on every model.
        target: what is wanted.
        gradient: placement -> what was found; a bias stays however many sequences there are, so only what gives the
            target, or a multiple of it, gets a count of them.
        error: the relative error of the gradient that the counts are for.
    """
    numbers: dict[str, Any] = {"error": error, "best_unbiased": {}}
    findings = []
    for placement, each in measured.items():
        if all(m.dead for m in each) or any(m.variance is None for m in each):
            continue
        found = gradient[placement]
        multiple = found["factor"] if found["name"] in target.fields and isinstance(found["factor"], float) else None
        known = target.known(placement, full=False)
        of = _Compared({}, {}, {})
        for length in sorted({m.model.length for m in each if not m.model.ends}):
            here = [m for m in each if m.model.length == length and not m.model.ends]
            best = [_best(m.model, target.name) for m in here]
            own = sum(float(m.variance or 0.0) for m in here)
            of.to_k1[length] = own / sum(variances[BASELINE] for variances, _ in best)
            least = sum(variances[name] for variances, name in best if name)
            of.to_best[length] = own / least if least > 1e-12 * own else None  # one token: the full KL has no noise
            wanted = [multiple * known.of(m.model, target.fields[0]) for m in here] if multiple else []
            size = sum(float(g @ g) for g in wanted)
            count = own / (error**2 * size) if size else math.inf
            of.needed[length] = math.ceil(count) if math.isfinite(count) else None
            numbers["best_unbiased"][length] = best[0][1]
        numbers[placement] = {
            "relative_to_k1_in_reward": of.to_k1, "relative_to_best_unbiased": of.to_best,
            "sequences_for_error": of.needed,
        }  # fmt: skip
        findings.append(of.finding(placement, numbers, error))
    numbers["sequences_for_error"] = {p: numbers[p]["sequences_for_error"] for p in measured if p in numbers}
    return numbers, findings


@dataclass(frozen=True)
class _Compared:
    """One placement's variance by length: over that of k1-in-reward, over the best's, and the sequences needed."""

    to_k1: dict[int, float]
    to_best: dict[int, float | None]
    needed: dict[int, int | None]

    def finding(self, placement: str, numbers: dict[str, Any], error: float) -> Finding:
        """It in words."""
        last, first = max(self.to_k1), min(self.to_k1)
        to_k1 = {n: 0.0 if ratio < 1e-12 else ratio for n, ratio in self.to_k1.items()}
        best = numbers["best_unbiased"][last]
        to_best = (
            "" if self.to_best[last] is None else f", {self.to_best[last]:.3g} times the best one's for it ({best})"
        )
        needed = (
            "it is another gradient, and no number of sequences makes it the wanted one"
            if self.needed[last] is None
            else f"{self.needed[last]:,} sequences for a gradient within {error:.0%}"
        )
        text = (
            f"in the {PLACE[placement]}, {to_k1[last]:.3g} times the variance of {BASELINE} at T = {last} "
            f"({to_k1[first]:.3g} at T = {first}){to_best}; {needed}"
        )
        return Finding("variance", "info", text, numbers[placement])


def _median(n: int, p: float) -> int:
    """The median of a binomial: the least count that half the mass does not exceed."""
    mass, total, k = (1 - p) ** n, 0.0, 0
    while (total := total + mass) < 0.5:
        mass *= (n - k) / (k + 1) * p / (1 - p)
        k += 1
    return k


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
    count = _median(TOKENS, RARE)
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
