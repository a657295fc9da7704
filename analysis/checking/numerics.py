"""Does it survive large and small log-ratios in every precision: overflow, 0 x inf, cancellation, dead clamps?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from klgrad.analysis.checking.calling import Fault
from klgrad.analysis.checking.measuring import Subject
from klgrad.analysis.checking.report import Finding
from klgrad.analysis.checking.subject import BuiltIn
from klgrad.analysis.checking.value import one_token
from klgrad.synth.enumeration import Batch, rows_of

# the largest finite number of each precision
DTYPES = {"float64": 1.797e308, "float32": 3.4028e38, "bfloat16": 3.3895e38, "float16": 65504.0}
LARGEST = 200.0
_SMALL = np.array([1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1])
_EDGES = np.array(
    [0.5, 1, 2, 5, 9, 10, 10.5, 11, 11.1, 12, 15, 20, 30, 50, 80, 88, 88.7, 88.8, 89, 90, 100, 150, LARGEST]
)
_ROOM = 1 / 32  # of the largest number: what is nearer to it may overflow on the way, by a factor
_COARSE = 1e-3  # tolerance of what computes in half precision
_NEAR = -0.5  # the log-prob of whichever of the two is the likelier


@dataclass(frozen=True, eq=False)
class Sweep:
    """Value and derivative over log-ratios ``delta [n]`` in one precision, and in float64 at the same inputs.

    ``underflows``: it is not finite already where both probabilities are tiny and their ratio is not: what fails is a
    probability, 0 log 0 or 0 / 0, and no exp of a log-ratio.
    """

    dtype: str
    delta: np.ndarray
    value: np.ndarray
    slope: np.ndarray
    exact_value: np.ndarray
    exact_slope: np.ndarray
    underflows: bool = False


def batch_of(delta: np.ndarray) -> Batch:
    """Single tokens with these log-ratios."""
    log_probs = np.where(delta > 0, _NEAR, _NEAR + delta)
    return one_token(log_probs, np.where(delta > 0, _NEAR - delta, _NEAR))


@dataclass(frozen=True)
class Manner:
    """How the function is called: all tokens as rows of one batch, one by one, or one among harmless companions."""

    together: bool
    companions: bool
    differentiate: bool


def manner(subject: Subject, *, coupled: bool) -> Manner:
    """The way that suits it; numpy functions have no gradient of their own."""
    differentiate = isinstance(subject, BuiltIn) or subject.backend == "torch"
    return Manner(subject.kind != "loss" and not coupled, coupled, differentiate)


def run(subject: Subject, batch: Batch, dtype: str, how: Manner) -> tuple[np.ndarray, np.ndarray]:
    """``[n]`` value, and derivative along the sampled token's log-prob (full vocabulary: its size)."""
    calm = np.argsort(np.abs((batch.log_probs - batch.reference)[:, 0] - 0.5))[:2].tolist()
    rows = [[i, *(calm if how.companions else [])] for i in range(len(batch.tokens))]
    values, slopes = [], []
    for part in [batch] if how.together else [rows_of(batch, row) for row in rows]:
        terms = subject.evaluate(part, dtype=dtype, differentiate=how.differentiate)
        slope = np.zeros(len(part.tokens)) if terms.token is None else terms.token[:, 0]
        if terms.vocab is not None:
            slope = slope + np.abs(terms.vocab[:, 0]).sum(axis=-1)  # through a softmax the plain sum is always 0
        own = slice(None) if how.together else slice(1)
        values.append(np.reshape(terms.by_sequence, -1)[own])
        slopes.append(slope[own])
    return np.concatenate(values), np.concatenate(slopes)


def rounded(batch: Batch, dtype: str) -> Batch:
    """The batch with its log-probs rounded to the precision."""

    def cast(a: Any) -> np.ndarray:
        if dtype == "bfloat16":  # float32 with its last 16 bits rounded to even
            bits = np.array(a, np.float32).view(np.uint32)
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(float)
        return np.array(a, dtype).astype(float)

    kept = {name: getattr(batch, name) for name in Batch.__dataclass_fields__}
    logs = ("log_probs", "reference", "behaviour", "full_log_probs", "full_reference")
    return Batch(**{**kept, **{name: cast(kept[name]) for name in logs}})


def sweeps(subject: Subject, *, coupled: bool) -> tuple[list[Sweep], list[str]]:
    """One sweep for each precision the function can be given, and why others cannot."""
    how = manner(subject, coupled=coupled)
    size = np.concatenate([_SMALL, _EDGES])
    delta = np.concatenate([-size[::-1], size])
    found, refused = [], []
    for dtype in DTYPES:
        if dtype == "bfloat16" and not isinstance(subject, BuiltIn) and subject.backend == "numpy":
            continue  # numpy has no such type
        batch = rounded(batch_of(delta), dtype)
        try:
            value, slope = run(subject, batch, dtype, how)
        except Fault as fault:
            refused.append(f"{dtype}: {fault}")
            continue
        exact = run(subject, batch, "float64", how)
        gaps = batch.log_probs[:, 0] - batch.reference[:, 0]
        low = _underflows(subject, dtype, how, np.abs(gaps[~(np.isfinite(value) & np.isfinite(slope))]))
        found.append(Sweep(dtype, gaps, value, slope, *exact, low))
    return found, refused


def _underflows(subject: Subject, dtype: str, how: Manner, failing: np.ndarray) -> bool:
    """Whether it is a probability that fails, and no exp of a log-ratio.

    It fails on two improbable tokens that are nearly alike, or on one that is all but certain; or not where exp begins
    to overflow, and only further out, where a probability has become 0.
    """
    if not len(failing):
        return False
    if failing.min() > np.log(DTYPES[dtype]) + 1:
        return True
    tiny = one_token(np.array([-LARGEST]), np.array([0.5 - LARGEST]))
    sure = one_token(np.array([-1e-9]), np.array([-2e-9]))
    results = [run(subject, rounded(batch, dtype), dtype, how) for batch in (tiny, sure)]
    return not np.isfinite(np.array(results)).all()


_WORK_IN_LOGS = "work with log-probs (log_softmax), not with the log of a probability"


def _why(sweep: Sweep, usual: str) -> str:
    return ": a probability is rounded to 0 or 1 there, 0 log 0" if sweep.underflows else usual


def examine(subject: Subject, *, coupled: bool, dead: bool) -> list[Finding]:
    """The numerics' part of a report; ``dead``: it has no gradient at all, which is said elsewhere."""
    found, refused = sweeps(subject, coupled=coupled)
    findings = [Finding("numerics", "info", f"not tried in {reason}") for reason in refused]
    for sweep in found:
        findings += _of(sweep)
    if not dead:
        findings += _flat(subject, coupled=coupled)
    if not any(f.level == "error" or f.robust for f in findings):
        tried = ", ".join(s.dtype for s in found)
        good = f"no NaN and no avoidable overflow up to |log-ratio| = {LARGEST:g} in {tried}"
        findings.insert(0, Finding("numerics", "info", good))
    return findings


def _of(sweep: Sweep) -> list[Finding]:
    largest = DTYPES[sweep.dtype]
    value, slope, exact = sweep.value, sweep.slope, sweep.exact_value
    with np.errstate(invalid="ignore"):
        fits = np.abs(exact) < _ROOM * largest
        slope_fits = np.abs(sweep.exact_slope) < _ROOM * largest
    findings = []

    def at(where: np.ndarray) -> str:
        d = sweep.delta[where]
        return f"log pi/pi_ref = {d[np.argmin(np.abs(d))]:.4g}" + (" and beyond" if where.sum() > 1 else "")

    def add(level: str, where: np.ndarray, message: str, mend: str = "") -> None:
        if where.any():
            numbers = {"dtype": sweep.dtype, "log_ratios": sweep.delta[where].tolist()}
            robust = level == "error" and (sweep.dtype == "float16" or sweep.underflows)
            text = f"{sweep.dtype}: {message.format(at=at(where))}" + (f"; {mend}" if mend else "")
            findings.append(Finding(
                "numerics", "warning" if robust else level, text, numbers, robust=robust,
                mend=mend if level == "error" else "",
            ))  # fmt: skip

    nan = np.isnan(value)
    avoidable = np.isinf(value) & fits & (sweep.dtype != "float64")
    cause = (_WORK_IN_LOGS,) if sweep.underflows else ("clamp the argument of exp",)
    past = nan & ~fits & (sweep.dtype != "float64")  # the exact value does not fit either
    nan = nan & ~past
    add("error", nan, "the value is NaN at {at}" + _why(sweep, ": one such token spoils the batch"), *cause)
    inside = _why(sweep, ": an intermediate result is too large")
    add("error", avoidable, "the value overflows at {at}, where the exact value fits" + inside,
        *(cause if sweep.underflows else ()))  # fmt: skip
    broken = np.isfinite(value) & np.isnan(slope)
    add("error", broken, "a finite value with a NaN gradient at {at}" + _why(sweep, " (0 x inf in the backward pass)"),
        cause[0] + ("" if sweep.underflows else ", not its result"))  # fmt: skip
    lost = np.isfinite(value) & np.isinf(slope) & slope_fits & (sweep.dtype != "float64")
    add("error", lost, "the gradient overflows at {at}, where the exact gradient fits")
    too_large = past | (np.isinf(value) & ~avoidable) | (np.isfinite(value) & np.isinf(slope) & ~lost)
    add(
        "warning",
        too_large,
        "it overflows at {at}, past what this precision holds: one such token makes the loss infinite",
    )
    small = np.isin(np.round(np.abs(sweep.delta), 12), np.round(_SMALL, 12)) | (np.abs(sweep.delta) < 0.2)
    if sweep.dtype != "float64":
        with np.errstate(all="ignore"):
            relative = np.abs(value - exact) / np.abs(exact)
        poor = small & (relative > 0.01) & np.isfinite(relative)
        if poor.any():
            worst = sweep.delta[poor][np.argmax(np.abs(sweep.delta[poor]))]
            add(
                "info",
                poor,
                f"near zero it loses its digits: over 1 % off for |log-ratio| up to {abs(worst):.3g}",
            )
    return findings


def _flat(subject: Subject, *, coupled: bool) -> list[Finding]:
    """Where the gradient is gone: a clamp holds the value, or two large terms cancel to nothing."""
    found = clamps(subject, coupled=coupled)
    findings = []
    if found.held:
        zero = ", wherever the log-ratio is negative: clamping it at 0 undoes the estimate" if found.at_zero else ""
        findings.append(Finding(
            "numerics", "warning",
            f"a clamp leaves no gradient for log pi/pi_ref {found.held} ({found.share:.0%} of the range to "
            f"{LARGEST:g}){zero}: the worst drift is not penalised further",
            {"dead_share": found.share, "thresholds": found.thresholds},
        ))  # fmt: skip
    if found.cancelled:
        findings.append(Finding(
            "numerics", "warning",
            f"the gradient is exactly 0 for log pi/pi_ref {found.cancelled} though the value still changes: two large "
            "terms cancel in rounding, or that part is detached",
            {"cancelled_share": found.cancelled_share},
        ))  # fmt: skip
    return findings


@dataclass(frozen=True)
class Clamps:
    """Where no gradient is left.

    Args:
        held: ``above 0.5 and below -0.5``, where the value stays too; empty where nowhere.
        share: of the range tried.
        thresholds: the log-ratios at which it begins, bisected.
        cancelled, cancelled_share: the same where the value goes on.
        at_zero: everything below 0 is held.
    """

    held: str = ""
    share: float = 0.0
    thresholds: tuple[float, ...] = ()
    cancelled: str = ""
    cancelled_share: float = 0.0
    at_zero: bool = False


def clamps(subject: Subject, *, coupled: bool) -> Clamps:
    """The clamps on the log-ratio, and where rounding leaves no gradient."""
    if subject.tolerance > _COARSE:  # values come in steps there, and slopes round to zero
        return Clamps()
    how = manner(subject, coupled=coupled)
    delta = np.arange(-LARGEST, LARGEST + 1) + 0.25
    value, slope = run(subject, batch_of(delta), "float64", how)
    by_slope = how.differentiate and bool(slope.any())
    if by_slope:
        dead = (slope == 0) & np.isfinite(value)
        settled = _settles(delta, value, dead)
        cancelled = dead & (~_still(value) | settled)
        held = dead & ~cancelled
    else:
        held, cancelled = _held(value), np.zeros(len(delta), bool)
    if (held | cancelled).all():
        return Clamps()

    def gone(at: float) -> bool:
        """No gradient there; by the value alone, none that a small step would show."""
        some = np.array([at]) if by_slope else np.array([at - 1e-4, at + 1e-4])
        values, slopes = run(subject, batch_of(some), "float64", how)
        return bool(slopes[0] == 0) if by_slope else bool(values[0] == values[1])

    text, edges = _ranges(delta, held, gone)
    said, _ = _ranges(delta, cancelled, gone)
    zero = bool(held[delta < 0].all()) and any(abs(edge) < 1e-3 for edge in edges)
    return Clamps(text, float(held.mean()), edges, said, float(cancelled.mean()), zero)


def _settles(delta: np.ndarray, value: np.ndarray, dead: np.ndarray) -> np.ndarray:
    """Where a term tends to a limit by degrees, or to a straight line that another cancels, rounding ends its gradient.

    There the value comes ever nearer to what it stays at; a clamp's changes as fast as ever up to its edge.
    """
    out = np.zeros(len(delta), bool)
    with np.errstate(invalid="ignore"):
        step = np.abs(np.diff(value))
    for side in (delta > 0, delta < 0):
        places = np.flatnonzero(dead & side)
        if not len(places):
            continue
        edge = places[0] - 1 if delta[places[0]] > 0 else places[-1] + 1
        if not 0 < edge < len(step) - 1:
            continue
        inner = step[max(edge - 1, 0) : edge + 2]
        smooth = float(np.nanmax(inner)) <= 1e-9 * max(1.0, abs(float(value[edge])))
        out |= dead & side & smooth
    return out


def _still(value: np.ndarray) -> np.ndarray:
    """Where neighbours on the grid have the same value."""
    with np.errstate(invalid="ignore"):
        same = np.diff(value) == 0
    return np.append(same, False) | np.append(False, same)


def _held(value: np.ndarray) -> np.ndarray:
    """Where a clamp holds the value: flat over a stretch, and from one place to the next."""
    with np.errstate(invalid="ignore"):
        step = np.abs(np.diff(value))
    flat = step == 0
    long = flat & np.append(flat[1:], False) & np.append(False, flat[:-1])  # rounding alone leaves shorter stretches
    if not long.any():
        return np.zeros(len(value), bool)
    same = _still(value)
    # a smooth tail flattens by degrees; a clamp from one place to the next
    edge = np.flatnonzero(np.diff(same.astype(int)))
    abrupt = any(step[max(i - 1, 0) : i + 2].max() > 1e-6 * max(1.0, abs(float(value[i]))) for i in edge)
    return same & abrupt


def _ranges(delta: np.ndarray, where: np.ndarray, gone: Callable[[float], bool]) -> tuple[str, tuple[float, ...]]:
    """``above 20 and below -20``, from where on, bisected; and the thresholds."""
    parts, edges = [], []
    for word, places in (("above", delta[where & (delta > 0)]), ("below", delta[where & (delta < 0)][::-1])):
        if not len(places):
            continue
        dead = float(places[0])
        alive = dead - 1 if dead > 0 else dead + 1
        if gone(alive):
            alive = -alive
        for _ in range(24):
            middle = (alive + dead) / 2
            alive, dead = (alive, middle) if gone(middle) else (middle, dead)
        edges.append(round(dead, 4) + 0.0)
        parts.append(f"{word} {round(dead, 4) + 0.0:.4g}")
    return " and ".join(parts), tuple(edges)
