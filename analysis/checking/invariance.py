"""What must not change the answer: padding, the split and order of a batch, repetition; and what beta must do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from klgrad.analysis.checking.calling import Fault
from klgrad.analysis.checking.gradient import measure
from klgrad.analysis.checking.models import Model, each_row, models
from klgrad.analysis.checking.report import Finding
from klgrad.analysis.checking.subject import Function, Terms
from klgrad.synth.enumeration import Batch, rows_of

POISONS = (np.nan, np.inf, -np.inf, 1e30, -1e30)
_LOGS = ("log_probs", "reference", "behaviour")
_ROUNDING = 1e-14  # times 100: what threads that add in another order may change
_FULL = ("full_log_probs", "full_reference")
_REWARDS = {"rewards", "token_rewards", "advantages", "sequence_advantages"}
_ROWS = 7


def probe() -> Batch:
    """A few replies of different length, padded."""
    (m,) = (m for m in models((4,), 1) if m.ends)
    rng = np.random.default_rng(0)
    chosen = np.sort(rng.choice(len(m.probability), _ROWS, replace=False))
    lengths = m.batch.mask[chosen].sum(axis=1)
    assert lengths.min() < lengths.max()
    return rows_of(m.batch, chosen)


def is_coupled(subject: Function) -> tuple[bool, float]:
    """Whether rows of a batch depend on each other, and by how much (relative)."""
    batch = probe()
    loss = subject.kind == "loss"  # whose gradient counts too
    together = subject.evaluate(batch, differentiate=loss)
    alone = [subject.evaluate(row, differentiate=loss) for row in each_row(batch)]
    whole, parts = together.value, [terms.value for terms in alone]
    if loss:
        each = np.array(parts)
        size = max(float(np.abs(each).max()), abs(float(whole)), 1e-300)
        off = min(abs(float(whole) - each.mean()), abs(float(whole) - each.sum())) / size
        off = max(off, _gradient_off(_gradient(together), np.concatenate([_gradient(terms) for terms in alone])))
    else:
        joined = np.concatenate(parts)
        off = float(np.abs(joined - whole).max(initial=0.0)) / max(float(np.abs(joined).max()), 1e-300)
    return (bool(off > 100 * subject.tolerance) or not np.isfinite(off)), float(off)


def _gradient_off(whole: np.ndarray, rows: np.ndarray) -> float:
    """How far a batch's gradient is from the mean, and from the sum, of its rows'."""
    size = max(float(np.abs(whole).max()) * _ROWS, float(np.abs(rows).max()))
    if size == 0:
        return 0.0
    return float(min(np.abs(whole * _ROWS - rows).max(), np.abs(whole - rows).max()) / size)


def _gradient(terms: Terms) -> np.ndarray:
    """``[B, T, 1 or 1 + V]`` derivative in the sampled tokens' log-probs, and in the full ones."""
    assert terms.token is not None
    token = terms.token[..., None]
    return token if terms.vocab is None else np.concatenate([token, terms.vocab], axis=-1)


def examine(subject: Function, *, coupled: bool, off: float) -> list[Finding]:
    """The invariances' part of a report."""
    findings: list[Finding] = []
    batch = probe()
    for look in (_poison, _appended, _permuted):
        findings += look(subject, batch)
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
    if subject.plan.takes("beta"):
        findings += _beta(subject, batch)
    if _REWARDS & set(subject.plan.roles.values()) and not coupled:
        findings += _arrives(subject, batch) or _shifted(subject)
    if sound:
        findings.insert(0, _finding("info", "padding, order and repetition change nothing"))
    return findings


def _finding(level: str, message: str, **numbers: Any) -> Finding:
    return Finding("invariance", level, message, numbers)


def _real(batch: Batch, terms: Terms) -> np.ndarray:
    """Value and gradient on the real tokens, as one list."""
    mask = np.asarray(batch.mask)
    value = terms.value[mask] if terms.value.ndim == 2 else terms.value.ravel()
    return np.concatenate([value, _gradient(terms)[mask].ravel()])


def _far(a: np.ndarray, b: np.ndarray, tolerance: float) -> float:
    """0 where they agree to the tolerance, else the relative difference; NaN against a number counts as 1."""
    if a.shape != b.shape:
        return 1.0
    with np.errstate(invalid="ignore"):
        difference = np.where(np.isnan(a) != np.isnan(b), np.inf, np.nan_to_num(np.abs(a - b), nan=0.0, posinf=np.inf))
    size = max(float(np.abs(a[np.isfinite(a)]).max(initial=0.0)), 1e-300)
    worst = float(difference.max(initial=0.0)) / size
    return 0.0 if worst <= 100 * tolerance else min(worst, 1e30)


def repeated(subject: Function, before: np.ndarray | None = None) -> tuple[np.ndarray, list[Finding]]:
    """The result on the probe, and what is wrong where it is not what it was: a moment ago, or ``before``."""
    batch = probe()
    here = _real(batch, subject.evaluate(batch))
    earlier = _real(batch, subject.evaluate(batch)) if before is None else before
    far = _far(earlier, here, _ROUNDING)
    if not far:
        return here, []
    if before is None:
        message = (
            f"the same input gives another result the second time (by {far:.3g} relative): dropout or sampling "
            "inside; switch it off (eval mode) or pass the draw in, since nothing exact can be said of it"
        )
    else:
        message = f"the same input gives another result later (by {far:.3g} relative): it keeps state between calls"
    return here, [_finding("error", message, repeated=far)]


def _summed(subject: Function, batch: Batch) -> list[Finding]:
    """A loss that grows with the number of rows."""
    whole = _gradient(subject.evaluate(batch))
    first = _gradient(subject.evaluate(rows_of(batch, [0])))
    if not first.any() or _far(first, whole[:1], subject.tolerance):
        return []
    return [_finding("warning", f"it sums over the rows of a batch: {_ROWS} rows weigh {_ROWS} times as much as one, "
            "so the strength grows with the batch; take the mean over rows", batch_sum=float(_ROWS))]  # fmt: skip


def poisoned(batch: Batch, poison: float) -> Batch:
    """The batch with every log-prob at a padded place replaced."""
    mask = np.asarray(batch.mask)
    logs = {name: np.where(mask, getattr(batch, name), poison) for name in _LOGS}
    full = {name: np.where(mask[..., None], getattr(batch, name), poison) for name in _FULL}
    return replace(batch, **logs, **full)


def _poison(subject: Function, batch: Batch) -> list[Finding]:
    if subject.kind != "token" and not subject.plan.takes("mask"):
        return [_finding("warning", "it takes no mask and sums over tokens: padding counts as real; take a mask, and "
            "use where() with it")]  # fmt: skip
    clean = _real(batch, subject.evaluate(batch))
    for poison in POISONS:
        try:
            terms = subject.evaluate(poisoned(batch, poison))
        except Fault as fault:
            return [_finding("error", f"with {poison:g} at padded places {fault}", poison=str(poison))]
        far = _far(clean, _real(batch, terms), subject.tolerance)
        if far:
            shown = "NaN" if np.isnan(_real(batch, terms)).any() else f"a change of {far:.3g} relative"
            if not subject.plan.takes("mask"):
                message = (
                    f"tokens of a reply depend on each other and it takes no mask: {poison:g} at padded places means "
                )
                return [_finding("warning", f"{message}{shown} on real tokens; take a mask", poison=str(poison))]
            return [_finding("error", f"{poison:g} at padded places leaks through the mask: {shown} on real tokens; "
                "multiplying by it keeps 0 x inf, use where() on the log-probs first", poison=str(poison))]  # fmt: skip
        leaks = subject.plan.takes("mask") and terms.raw is not None and terms.raw.ndim == 2
        if leaks and not np.isfinite(terms.raw).all():  # type: ignore[arg-type]
            return [_finding("error", f"it takes the mask, and with {poison:g} at padded places returns what is not "
                "finite there, which spoils any sum: use where() on log-probs first", poison=str(poison))]  # fmt: skip
    return _spoiled(subject, batch) if subject.plan.takes("mask") else []


def _spoiled(subject: Function, batch: Batch) -> list[Finding]:
    """Far log-probs at padded places: a network's weights see the gradient there too, and 0 x inf is NaN."""
    mask = np.asarray(batch.mask)
    for near, far in ((0.0, -1000.0), (-1000.0, 0.0)):
        filled = {"log_probs": near, "reference": far, "behaviour": (near + far) / 2}
        rows = replace(batch, **{name: np.where(mask, getattr(batch, name), fill) for name, fill in filled.items()})
        if not np.isfinite(_gradient(subject.evaluate(rows))[~mask]).all():
            return [_finding("error", f"log-probs of {near:g} and {far:g} at padded places give a gradient there that "
                "is not finite (0 x inf in the backward pass), which spoils every weight; use where() on the "
                "log-probs first, not on the result")]  # fmt: skip
    return []


def _appended(subject: Function, batch: Batch) -> list[Finding]:
    if subject.kind != "token" and not subject.plan.takes("mask"):
        return []
    more = 2

    def longer(array: Any, fill: float) -> np.ndarray:
        return np.concatenate([array, np.full((len(array), more, *array.shape[2:]), fill, array.dtype)], axis=1)

    fills = {"log_probs": -1.3, "reference": -0.4, "behaviour": -0.9, "full_log_probs": -1.1, "full_reference": -1.7}
    padded = Batch(
        longer(batch.tokens, 0), longer(batch.mask, False),
        **{name: longer(getattr(batch, name), fill) for name, fill in fills.items()},
    )  # fmt: skip
    a, b = (_real(x, subject.evaluate(x)) for x in (batch, padded))
    far = _far(a, b, subject.tolerance)
    if not far:
        return []
    level = "error" if subject.plan.takes("mask") else "warning"
    return [_finding(level, f"two more padded places change the result by {far:.3g} relative: padding is "
        "counted as tokens, or moved among them; divide by the mask's sum, shift within the real tokens",
        appended=far)]  # fmt: skip


def _permuted(subject: Function, batch: Batch) -> list[Finding]:
    order = np.random.default_rng(1).permutation(_ROWS)
    moved = rows_of(batch, order)
    before, after = subject.evaluate(batch), subject.evaluate(moved)
    assert before.token is not None
    expected = Terms(
        before.value if before.value.ndim == 0 else before.value[order], before.token[order],
        None if before.vocab is None else before.vocab[order],
    )  # fmt: skip
    far = _far(_real(moved, expected), _real(moved, after), subject.tolerance)
    if not far:
        return []
    return [_finding("error", f"another order of the batch changes the result by {far:.3g} relative", permuted=far)]


def _beta(subject: Function, batch: Batch) -> list[Finding]:
    half, one, two = (_real(batch, subject.evaluate(batch, beta=b)) for b in (0.5, 1.0, 2.0))
    try:
        zero = _real(batch, subject.evaluate(batch, beta=0.0))
    except Fault as fault:
        return [_finding("error", f"with beta = 0 {fault}; return the loss without a KL term")]
    if np.isnan(zero).any():
        return [_finding("error", "with beta = 0 it is NaN; return the loss without a KL term")]
    if np.array_equal(one, two) and np.array_equal(zero, one):
        return [_finding("error", "the coefficient is accepted and never applied: beta = 0, 1 and 2 give the same")]
    if _far(zero, one, subject.tolerance) and not _far(one, two, max(subject.tolerance, 1e-4)):
        return [_finding("error", "beta = 1 and beta = 2 give the same: where rewards are equal, a normaliser (the "
            "group's standard deviation) contains the penalty and divides the coefficient out; take the penalty "
            "after it, or no deviation")]  # fmt: skip
    findings = []
    far = max(
        _far(one - zero, 2 * (half - zero), subject.tolerance), _far(one - zero, (two - zero) / 2, subject.tolerance)
    )
    if far:
        findings.append(_finding("error", f"it is not linear in beta (off by {far:.3g} relative): the strength "
            "is not the coefficient you set", linear_in_beta=far))  # fmt: skip
    same = replace(batch, reference=batch.log_probs, full_reference=batch.full_log_probs)
    without = _real(batch, subject.evaluate(same, beta=0.0))
    if not np.array_equal(zero, without):
        findings.append(
            _finding(
                "error",
                "with beta = 0 the reference still changes the result: it should equal no KL at all, bit for bit",
            )
        )
    return findings


def _arrives(subject: Function, batch: Batch) -> list[Finding]:
    """A reward must reach the gradient of every reply, however long."""

    def effect(rows: Batch) -> float:
        given, without = (replace(subject, shift=shift).evaluate(rows) for shift in (1.0, 0.0))
        change = _gradient(given) - _gradient(without) if subject.kind == "loss" else given.value - without.value
        real = rows.mask[..., None] if change.ndim == 3 else rows.mask if change.ndim == 2 else True
        return float(np.abs(np.where(real, change, 0.0)).max())

    each = np.array([effect(row) for row in each_row(batch)])
    lost, tokens = each <= 1e-9, batch.mask.sum(axis=1)
    if not lost.any():
        return []
    if lost.all():
        return [_finding("warning", "rewards or advantages are accepted and change nothing: only the KL term is there")]
    which = f"a reply of {tokens[lost].min()} of {batch.mask.shape[1]} tokens"
    return [_finding("error", f"the reward never reaches {which}: it lands on a padded place and is masked away; put "
        "it on the last real token", lost=float(lost.mean()))]  # fmt: skip


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
