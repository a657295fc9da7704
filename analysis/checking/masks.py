"""Masks as agents and packing make them: holes between real tokens, padding on the left, a reply with no tokens.

What a mask leaves out is not there: whatever stands at such a place, the result is that of the real tokens alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from klgrad.analysis.checking.calling import Fault
from klgrad.analysis.checking.models import SEED
from klgrad.analysis.checking.probing import apart, probe, real
from klgrad.analysis.checking.report import Finding
from klgrad.analysis.checking.subject import Function, Terms
from klgrad.synth.enumeration import Batch

_V = 3
HOLES = ("1011001", "1100110", "1010110", "1001111")
LEFT = ("0001111", "0111111", "0000111", "0000001")
_USE = "use where(mask, x, 0.) on log-probs before anything is summed over tokens, and the mask, not its sum, to count"


def laid_out(rows: tuple[str, ...], *, garbage: int = 0, compact: bool = False) -> Batch:
    """Real tokens that are always the same at the places of the masks, and other garbage elsewhere.

    Args:
        rows: one mask a row, ``1`` for real.
        garbage: the seed of what stands at places that are not real.
        compact: the real tokens moved to the left, so that only right padding is left.
    """
    mask = np.array([[c == "1" for c in row] for row in rows])
    made = [np.random.default_rng(seed) for seed in (SEED + 3, garbage)]
    parts = [[2 * rng.normal(size=(*mask.shape, _V)) for _ in range(3)] for rng in made]
    drawn = [np.random.default_rng(SEED + seed).integers(_V, size=mask.shape) for seed in (4, 5)]
    order = np.argsort(~mask, axis=1, kind="stable")
    own, other = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in map(np.stack, parts))
    tokens = np.where(mask, _placed(mask, drawn[0]), drawn[1])
    full = np.where(mask[..., None], np.stack([_placed(mask, table) for table in own]), other)
    if compact:
        mask, tokens = np.take_along_axis(mask, order, 1), np.take_along_axis(tokens, order, 1)
        full = np.take_along_axis(full, order[None, ..., None], 2)
    picked = np.take_along_axis(full, tokens[None, ..., None], -1)[..., 0]
    return Batch(tokens, mask, picked[0], picked[1], picked[2], full[0], full[1])


def _placed(mask: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The first values of each row at its real places, in order."""
    index = np.clip(np.cumsum(mask, axis=1) - 1, 0, None)
    return np.take_along_axis(values, index.reshape(*index.shape, *[1] * (values.ndim - 2)), 1)


def examine(subject: Function, *, coupled: bool) -> list[Finding]:
    """The masks' part of a report: nothing where it takes none."""
    if not subject.plan.takes("mask"):
        return []
    findings = _layout(subject, HOLES, "a masked place between real tokens")
    findings = findings or _layout(subject, LEFT, "padding on the left")
    return findings + _empty(subject, coupled=coupled)


def _finding(message: str, **numbers: Any) -> Finding:
    return Finding("invariance", "error", f"{message}; {_USE}", numbers, mend=_USE)


def _layout(subject: Function, rows: tuple[str, ...], what: str) -> list[Finding]:
    plain = replace(subject, spread=0.0)  # rewards belong to rows: nothing to place
    batches = (laid_out(rows), laid_out(rows, garbage=1), laid_out(rows, compact=True))
    try:
        a, b, alone = (plain.evaluate(batch) for batch in batches)
    except Fault as fault:
        return [_finding(f"with {what} {fault}")]
    if not np.isfinite(real(batches[2], alone)).all():
        return []  # told elsewhere
    leak = apart(real(batches[0], a), real(batches[1], b), subject.tolerance)
    if leak:
        return [_finding(f"{what} changes the result (by {leak:.3g} relative): what stands there counts", leak=leak)]
    off = apart(real(batches[2], alone), real(batches[0], a), subject.tolerance)
    if off and (subject.plan.full or not subject.plan.takes("tokens")):  # tokens may tell of places, as a critic's do
        return [_finding(f"{what} changes the result (by {off:.3g} relative) though its content does not: places are "
                         "counted, not masked", moved=off)]  # fmt: skip
    if subject.kind != "token" and _outside(batches[0], a):
        return [_finding(f"{what} gets a gradient of its own: the model learns from tokens it did not sample")]
    return []


def _outside(batch: Batch, terms: Terms) -> bool:
    """Whether anything flows to places that are not real."""
    assert terms.token is not None
    off = ~np.asarray(batch.mask)
    return bool(np.any(terms.token[off]) or (terms.vocab is not None and np.any(np.abs(terms.vocab[off]) > 1e-12)))


def _empty(subject: Function, *, coupled: bool) -> list[Finding]:
    """One reply of the batch has no tokens: it must add nothing, and spoil nothing."""
    batch = probe()
    mask = np.array(batch.mask)
    mask[1] = False
    logs = {name: getattr(batch, name) for name in ("log_probs", "reference", "behaviour")}
    fills = [{name: np.where(mask, a, fill) for name, a in logs.items()} for fill in (-0.3, -2.1)]
    for k, filled in enumerate(fills):
        filled["reference"] = filled["reference"] - np.where(mask, 0.0, 0.1 + k)
    batches = [replace(batch, mask=mask, **filled) for filled in fills]
    word = "a reply with no tokens (all masked)"
    try:
        one, other = (subject.evaluate(b) for b in batches)
    except Fault as fault:
        return [_finding(f"with {word} in the batch {fault}")]
    own = one.raw[1] if one.raw is not None and one.raw.ndim else np.zeros(())
    if not np.isfinite(one.value).all() or not np.isfinite(own).all() or not np.isfinite(real(batches[0], one)).all():
        return [_finding(f"{word} gives NaN or infinity, where it must add nothing: 0 / 0, or a wrong place is read")]
    if apart(real(batches[0], one), real(batches[1], other), subject.tolerance):
        return [_finding(f"what stands in {word} changes the result: a wrong place is read")]
    if subject.kind == "sequence" and not (subject.rewarded or coupled) and abs(float(one.value[1])) > 1e-12:
        return [_finding(f"{word} is given {float(one.value[1]):.3g}, where it must add nothing")]
    return []
