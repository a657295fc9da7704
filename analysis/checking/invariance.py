"""What must not change the answer: a batch's split and order, repetition, padding; and what rewards and beta do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from klgrad.analysis.checking import coefficients, masks, padding
from klgrad.analysis.checking.inputs import spread_over
from klgrad.analysis.checking.models import each_row
from klgrad.analysis.checking.probing import ROWS, apart, probe, real, slopes
from klgrad.analysis.checking.report import Finding
from klgrad.analysis.checking.subject import Function, Terms
from klgrad.synth.enumeration import Batch, rows_of

_ROUNDING = 1e-14  # times 100: what threads that add in another order may change


def is_coupled(subject: Function) -> tuple[bool, float]:
    """Whether rows of a batch depend on each other, and by how much (relative); rewards differ from row to row."""
    batch = probe()
    together_with = replace(subject, spread=1.0)
    rewards = spread_over(ROWS).tolist()
    loss = subject.kind == "loss"  # whose gradient counts too
    together = together_with.evaluate(batch, differentiate=loss)
    alone = [
        replace(subject, shift=reward).evaluate(row, differentiate=loss)
        for row, reward in zip(each_row(batch), rewards, strict=True)
    ]
    whole, parts = together.value, [terms.value for terms in alone]
    if loss:
        each = np.array(parts)
        size = max(float(np.abs(each).max()), abs(float(whole)), 1e-300)
        off = min(abs(float(whole) - each.mean()), abs(float(whole) - each.sum())) / size
        off = max(off, _gradient_off(slopes(together), np.concatenate([slopes(terms) for terms in alone])))
    else:
        joined = np.concatenate(parts)
        off = float(np.abs(joined - whole).max(initial=0.0)) / max(float(np.abs(joined).max()), 1e-300)
    return (bool(off > 100 * subject.tolerance) or not np.isfinite(off)), float(off)


def _gradient_off(whole: np.ndarray, rows: np.ndarray) -> float:
    """How far a batch's gradient is from the mean, and from the sum, of its rows'."""
    size = max(float(np.abs(whole).max()) * ROWS, float(np.abs(rows).max()))
    if size == 0:
        return 0.0
    return float(min(np.abs(whole * ROWS - rows).max(), np.abs(whole - rows).max()) / size)


def examine(subject: Function, *, coupled: bool, off: float) -> list[Finding]:
    """The invariances' part of a report."""
    batch = probe()
    findings = padding.examine(subject, batch) + _permuted(subject, batch)
    findings += masks.examine(subject, coupled=coupled)
    sound = not findings
    if coupled:
        how = f"by {off:.3g} relative" if np.isfinite(off) else "one row alone gives NaN"
        message = (
            f"rows of a batch depend on each other ({how}), so micro-batches and ranks disagree with the whole "
            "batch: a baseline of the group does that by design, a normaliser should use global counts"
        )
        findings.append(_finding("warning", message, split=off))
    elif subject.kind == "loss":
        findings += _summed(subject, batch)
    findings += coefficients.examine(subject, batch, coupled=coupled)
    if sound:
        taken = "holes, " if subject.plan.takes("mask") else ""
        findings.insert(0, _finding("info", f"padding, {taken}order and repetition change nothing"))
    return findings


def _finding(level: str, message: str, **numbers: Any) -> Finding:
    return Finding("invariance", level, message, numbers)


def repeated(subject: Function, before: np.ndarray | None = None) -> tuple[np.ndarray, list[Finding]]:
    """The result on the probe, and what is wrong where it is not what it was: a moment ago, or ``before``."""
    batch = probe()
    subject = replace(subject, spread=1.0)
    here = real(batch, subject.evaluate(batch))
    earlier = real(batch, subject.evaluate(batch)) if before is None else before
    off = apart(earlier, here, _ROUNDING)
    if not off:
        return here, []
    if before is None:
        message = (
            f"the same input gives another result the second time (by {off:.3g} relative): dropout or sampling "
            "inside; switch it off (eval mode) or pass the draw in, since nothing exact can be said of it"
        )
    else:
        message = f"the same input gives another result later (by {off:.3g} relative): it keeps state between calls"
    return here, [_finding("error", message, repeated=off)]


def _summed(subject: Function, batch: Batch) -> list[Finding]:
    """A loss that grows with the number of rows."""
    whole = slopes(subject.evaluate(batch))
    first = slopes(subject.evaluate(rows_of(batch, [0])))
    if not first.any() or apart(first, whole[:1], subject.tolerance):
        return []
    return [_finding("warning", f"it sums over the rows of a batch: {ROWS} rows weigh {ROWS} times as much as one, "
            "so the strength grows with the batch; take the mean over rows", batch_sum=float(ROWS))]  # fmt: skip


def _permuted(subject: Function, batch: Batch) -> list[Finding]:
    order = np.random.default_rng(1).permutation(ROWS)
    moved, subject = rows_of(batch, order), replace(subject, spread=0.0)  # rewards stand with their rows
    before, after = subject.evaluate(batch), subject.evaluate(moved)
    assert before.token is not None
    expected = Terms(
        before.value if before.value.ndim == 0 else before.value[order], before.token[order],
        None if before.vocab is None else before.vocab[order],
    )  # fmt: skip
    off = apart(real(moved, expected), real(moved, after), subject.tolerance)
    if not off:
        return []
    return [_finding("error", f"another order of the batch changes the result by {off:.3g} relative", permuted=off)]
