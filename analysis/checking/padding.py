"""Padding on the right: it adds nothing, whatever stands there, and no more of it changes anything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from klgrad.analysis.checking.calling import Fault
from klgrad.analysis.checking.probing import apart, real, slopes
from klgrad.analysis.checking.report import Finding
from klgrad.analysis.checking.subject import Function
from klgrad.synth.enumeration import Batch

GARBAGE = -2.7
POISONS = (np.nan, np.inf, -np.inf, 1e30, -1e30)
_LOGS = ("log_probs", "reference", "behaviour")
_FULL = ("full_log_probs", "full_reference")
_WHERE = "use where(mask, x, 0.) on the log-probs first, not on the result"


def examine(subject: Function, batch: Batch) -> list[Finding]:
    """Padding's part of a report."""
    if subject.kind != "token" and not subject.plan.takes("mask"):
        return [_finding("warning", "it takes no mask and sums over tokens: padding counts as real; take a mask, and "
            "use where() with it")]  # fmt: skip
    return _garbage(subject, batch) or _poison(subject, batch) + _appended(subject, batch)


def _finding(level: str, message: str, *, robust: bool = False, mend: str = "", **numbers: Any) -> Finding:
    text = f"{message}; {mend}" if mend else message
    return Finding("invariance", level, text, numbers, mend=mend if level == "error" else "", robust=robust)


def poisoned(batch: Batch, poison: float) -> Batch:
    """The batch with every log-prob at a padded place replaced."""
    mask = np.asarray(batch.mask)
    logs = {name: np.where(mask, getattr(batch, name), poison) for name in _LOGS}
    full = {name: np.where(mask[..., None], getattr(batch, name), poison) for name in _FULL}
    return replace(batch, **logs, **full)


def garbage(batch: Batch) -> Batch:
    """The batch with ordinary log-probs at padded places, as a model leaves them there."""
    filled = poisoned(batch, GARBAGE)
    reference = np.where(batch.mask, batch.reference, GARBAGE / 3)
    return replace(filled, reference=reference, full_reference=np.where(
        np.asarray(batch.mask)[..., None], batch.full_reference, GARBAGE / 3))  # fmt: skip


def _garbage(subject: Function, batch: Batch) -> list[Finding]:
    here, there = (real(x, subject.evaluate(x)) for x in (batch, garbage(batch)))
    off = apart(here, there, subject.tolerance)
    if not off:
        return []
    if not subject.plan.takes("mask"):
        return [_finding("warning", "tokens of a reply depend on each other and it takes no mask: what stands at "
            f"padded places means a change of {off:.3g} relative on real tokens; take a mask",
            poison=str(GARBAGE),
        )]  # fmt: skip
    return [_finding("error", f"what stands at padded places leaks through the mask: a change of {off:.3g} relative on "
        "real tokens; padding is counted as tokens, or moved among them", mend=_WHERE,
        poison=str(GARBAGE),
        )]  # fmt: skip


def _poison(subject: Function, batch: Batch) -> list[Finding]:
    """What no ordinary log-prob is, at padded places: only odd input shows it."""
    masked = subject.plan.takes("mask")
    clean = real(batch, subject.evaluate(batch))
    for poison in POISONS:
        at = f"{poison:g} at padded places"
        try:
            terms = subject.evaluate(poisoned(batch, poison))
        except Fault as fault:
            level = "warning" if masked else "info"  # what takes no mask may refuse what is no log-prob
            return [_finding(level, f"with {at} {fault}", robust=masked, poison=str(poison))]
        found = real(batch, terms)
        off = apart(clean, found, subject.tolerance)
        if off:
            shown = "NaN" if np.isnan(found).any() else f"a change of {off:.3g} relative"
            if not masked:
                return [_finding("warning", f"tokens of a reply depend on each other and it takes no mask: {at} means "
                    f"{shown} on real tokens; take a mask", poison=str(poison))]  # fmt: skip
            return [_finding("warning", f"{at} leaks through the mask: {shown} on real tokens; multiplying by it keeps "
                "0 x inf", mend=_WHERE, robust=True, poison=str(poison))]  # fmt: skip
        if masked and terms.raw is not None and terms.raw.ndim == 2 and not np.isfinite(terms.raw).all():
            return [_finding("warning", f"it takes the mask, and with {at} returns what is not finite there, which "
                "spoils any sum", mend=_WHERE, robust=True, poison=str(poison))]  # fmt: skip
    return _spoiled(subject, batch) if masked else []


def _spoiled(subject: Function, batch: Batch) -> list[Finding]:
    """Far log-probs at padded places: a network's weights see the gradient there too, and 0 x inf is NaN."""
    mask = np.asarray(batch.mask)
    for near, far in ((0.0, -1000.0), (-1000.0, 0.0)):
        filled = {"log_probs": near, "reference": far, "behaviour": (near + far) / 2}
        rows = replace(batch, **{name: np.where(mask, getattr(batch, name), fill) for name, fill in filled.items()})
        if not np.isfinite(slopes(subject.evaluate(rows))[~mask]).all():
            return [_finding("warning", f"log-probs of {near:g} and {far:g} at padded places give a gradient there "
                "that is not finite (0 x inf in the backward pass), which spoils every weight", mend=_WHERE,
                robust=True)]  # fmt: skip
    return []


def _appended(subject: Function, batch: Batch) -> list[Finding]:
    more = 2

    def longer(array: Any, fill: float) -> np.ndarray:
        return np.concatenate([array, np.full((len(array), more, *array.shape[2:]), fill, array.dtype)], axis=1)

    fills = {"log_probs": -1.3, "reference": -0.4, "behaviour": -0.9, "full_log_probs": -1.1, "full_reference": -1.7}
    padded = Batch(
        longer(batch.tokens, 0), longer(batch.mask, False),
        **{name: longer(getattr(batch, name), fill) for name, fill in fills.items()},
    )  # fmt: skip
    here, there = (real(x, subject.evaluate(x)) for x in (batch, padded))
    off = apart(here, there, subject.tolerance)
    if not off:
        return []
    level = "error" if subject.plan.takes("mask") else "warning"
    return [_finding(level, f"two more padded places change the result by {off:.3g} relative: padding is counted as "
        "tokens, or moved among them", mend="divide by the mask's sum, shift within the real tokens",
        appended=off)]  # fmt: skip
