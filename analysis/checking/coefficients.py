"""What a coefficient and rewards must do: beta scales the KL alone, rewards arrive and leave the KL alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from klgrad.analysis.checking.calling import Fault
from klgrad.analysis.checking.inputs import spread_over
from klgrad.analysis.checking.measuring import measure
from klgrad.analysis.checking.models import Model, each_row, models
from klgrad.analysis.checking.probing import apart, real, slopes
from klgrad.analysis.checking.report import Finding
from klgrad.analysis.checking.subject import Function
from klgrad.synth.enumeration import Batch

MULTIPLIED = "the reward multiplies the KL"
_ADD = "add the KL outside that product: loss = policy_loss + beta * kl"
_GUARD = "guard it with if beta == 0: return the loss without a KL term"


def examine(subject: Function, batch: Batch, *, coupled: bool) -> list[Finding]:
    """The coefficients' part of a report."""
    times = multiplied(subject, batch) if subject.rewarded and not coupled else []
    beta = _beta(_calm(subject, batch), batch) if subject.plan.takes("beta") else []
    if not subject.rewarded or coupled:
        return beta
    return [*times, *beta, *([] if times else _arrives(subject, batch) or _shifted(subject))]


def _finding(level: str, message: str, *, robust: bool = False, mend: str = "", **numbers: Any) -> Finding:
    text = f"{message}; {mend}" if mend else message
    return Finding("invariance", level, text, numbers, mend=mend if level == "error" else "", robust=robust)


def _calm(subject: Function, batch: Batch) -> Function:
    """With rewards of zero, where it can be called so: then only the KL is left for a normaliser to divide."""
    calm = replace(subject, spread=0.0)
    return calm if np.isfinite(real(batch, calm.evaluate(batch))).all() else subject


def _beta(subject: Function, batch: Batch) -> list[Finding]:
    half, one, two = (real(batch, subject.evaluate(batch, beta=b)) for b in (0.5, 1.0, 2.0))
    try:
        zero = real(batch, subject.evaluate(batch, beta=0.0))
    except Fault as fault:
        return [_finding("error", f"with beta = 0 {fault}", mend=_GUARD)]
    if np.isnan(zero).any():
        return [_finding("error", "with beta = 0 it is NaN", mend=_GUARD)]
    if np.array_equal(one, two) and np.array_equal(zero, one):
        return [_finding("error", "the coefficient is accepted and never applied: beta = 0, 1 and 2 give the same")]
    if apart(zero, one, subject.tolerance) and not apart(one, two, max(subject.tolerance, 1e-4)):
        return [_finding("error", "beta = 1 and beta = 2 give the same: where rewards are equal, a normaliser (the "
            "group's standard deviation) contains the penalty and divides the coefficient out",
            mend="take the penalty after it, or no deviation")]  # fmt: skip
    findings = []
    off = max(
        apart(one - zero, 2 * (half - zero), subject.tolerance),
        apart(one - zero, (two - zero) / 2, subject.tolerance),
    )
    if off:
        findings.append(_finding("error", f"it is not linear in beta (off by {off:.3g} relative): the strength "
            "is not the coefficient you set", linear_in_beta=off))  # fmt: skip
    same = replace(batch, reference=batch.log_probs, full_reference=batch.full_log_probs)
    without = real(batch, subject.evaluate(same, beta=0.0))
    if not np.array_equal(zero, without):
        message = "with beta = 0 the reference still changes the result: it should equal no KL at all, bit for bit"
        findings.append(_finding("error", message))
    return findings + _off_with_infinite_kl(subject, batch)


def _off_with_infinite_kl(subject: Function, batch: Batch) -> list[Finding]:
    """beta = 0 where the reference cannot emit a token: 0 x inf. It spoils a loss."""
    reference, full = np.array(batch.reference, float), np.array(batch.full_reference, float)
    reference[0, 0] = -np.inf
    full[0, 0, batch.tokens[0, 0]] = -np.inf
    try:
        found = real(batch, subject.evaluate(replace(batch, reference=reference, full_reference=full), beta=0.0))
    except Fault as fault:
        return [_finding("info", f"with beta = 0 and an infinite KL {fault}", robust=True)]
    if np.isfinite(found).all():
        return []
    spoils = subject.kind == "loss"  # of a term it can be left out
    message = (
        "with beta = 0 and an infinite KL (a token the reference cannot emit) it is NaN, where it must equal no KL"
    )
    return [_finding("error" if spoils else "info", message, robust=True, mend=_GUARD)]


def multiplied(subject: Function, batch: Batch) -> list[Finding]:
    """Rewards and the KL add up: what the reference changes is the same whatever the rewards are."""
    other = replace(batch, reference=batch.reference[::-1] - 0.3, full_reference=batch.full_reference[::-1])
    other = replace(other, reference=np.where(batch.mask, other.reference, 0.0))
    paid = replace(subject, spread=1.0)
    a, b, c, d = (
        _everywhere(x, s.evaluate(x)) for s, x in ((paid, batch), (paid, other), (subject, batch), (subject, other))
    )
    size = max(float(np.abs(a - b).max()), float(np.abs(c - d).max()))
    mixed = float(np.abs((a - b) - (c - d)).max())
    if not mixed > max(1e-9, 100 * subject.tolerance * size):
        return []
    alone = ": with rewards or advantages of 0 there is no KL at all" if not np.any(c - d) else ""
    return [_finding("error", f"{MULTIPLIED}{alone}: its strength follows the rewards", mend=_ADD, mixed=mixed / size)]


def _everywhere(batch: Batch, terms: Any) -> np.ndarray:
    return np.nan_to_num(real(batch, terms))


def _arrives(subject: Function, batch: Batch) -> list[Finding]:
    """A reward must reach the gradient of every reply, however long."""

    def effect(row: Batch, reward: float) -> float:
        given, without = (replace(subject, shift=shift).evaluate(row) for shift in (reward, 0.0))
        change = slopes(given) - slopes(without) if subject.kind == "loss" else given.value - without.value
        places = row.mask[..., None] if change.ndim == 3 else row.mask if change.ndim == 2 else True
        return float(np.abs(np.where(places, change, 0.0)).max())

    rewards = spread_over(len(batch.tokens)).tolist()
    each = np.array([effect(row, reward) for row, reward in zip(each_row(batch), rewards, strict=True)])
    lost, tokens = each <= 1e-9, batch.mask.sum(axis=1)
    if not lost.any():
        return []
    if lost.all():
        return [_finding("warning", "rewards or advantages are accepted and change nothing: only the KL term is there")]
    which = f"a reply of {tokens[lost].min()} of {batch.mask.shape[1]} tokens"
    return [_finding("error", f"the reward never reaches {which}: it lands on a padded place and is masked away",
        mend="put it on the last real token", lost=float(lost.mean()))]  # fmt: skip


def _shifted(subject: Function) -> list[Finding]:
    """A constant added to every reward leaves the expected gradient where it was: E[score] = 0."""

    def expected(model: Model, shift: float) -> np.ndarray:
        return measure(replace(subject, shift=shift), "loss" if subject.kind == "loss" else "both", model).mean

    worst = 0.0
    for m in models((2,), 1):
        change = np.linalg.norm(expected(m, 1.0) - expected(m, 0.0)) / np.linalg.norm(m.truth)
        worst = max(worst, float(change))
    if worst <= 100 * subject.tolerance:
        return []
    return [_finding("warning", f"a constant added to every reward moves the expected gradient by {worst:.3g} of "
        "the KL's: a score is missing or weighted unevenly", shift=worst)]  # fmt: skip
