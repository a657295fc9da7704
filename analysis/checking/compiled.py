"""``torch.compile``: the function under it is checked, and one compiled call confirms it, however long it takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from klgrad.analysis.checking.calling import Fault
from klgrad.analysis.checking.report import Finding
from klgrad.analysis.checking.subject import Function
from klgrad.synth.enumeration import Batch

_FUSED = 1e-6  # relative: compiled code adds in another order and may fuse


def confirm(subject: Function, batch: Batch) -> list[Finding]:
    """One compiled call against the plain one, in value and gradient; nothing where nothing was compiled."""
    if subject.compiled is None:
        return []
    plain = subject.evaluate(batch)
    try:
        fused = replace(subject, function=subject.compiled, timeout=float("inf"), notes=[]).evaluate(batch)
    except Fault as fault:
        return [Finding("function", "warning", f"compiled, {fault}; what is checked is the function as it is written")]
    pairs = [(plain.value, fused.value), (plain.token, fused.token), (plain.vocab, fused.vocab)]
    off = max(_off(a, b) for a, b in pairs if a is not None and b is not None)
    if off > max(_FUSED, 10 * subject.tolerance):
        message = f"compiled, it gives another result (by {off:.3g} relative) than as it is written"
        return [Finding("function", "error", message, {"compiled": off})]
    return [Finding("function", "info", "compiled by torch: checked as it is written, and one compiled call, for which "
                    "the time limit was lifted, gives the same")]  # fmt: skip


def _off(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max(initial=0.0) / max(float(np.abs(a).max(initial=0.0)), 1e-300))
