"""Which field is an expected gradient? One verdict in the vocabulary of the design, from gradients on many models."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from klgrad.analysis.checking.models import Model
from klgrad.analysis.verdicts import phrase

Found = Sequence[tuple[Model, np.ndarray]]


@dataclass(frozen=True)
class Named:
    """A verdict on expected gradients.

    Args:
        verdict: the vocabulary's word.
        name: the field, spelled out.
        scale: the factor on it: one number, or one per length where it depends on the length.
        only_fixed: the field fits at fixed length and not with an end token.
    """

    verdict: str
    name: str
    scale: float | dict[int, float] = 1.0
    only_fixed: bool = False


def classify(found: Found, tolerance: float, *, dead: bool = False) -> Named:
    """Name the field that these expected gradients are.

    Args:
        found: models and the gradient on each.
        tolerance: relative.
        dead: every single sample's gradient is zero.
    """
    if dead:
        return Named("dead", "zero for every sample", 0.0)
    if not all(np.isfinite(g).all() for _, g in found):
        return Named("other", "not finite")
    if _vanishes(found, tolerance):
        return Named("zero", "zero in expectation", 0.0)
    names = list(found[0][0].fields)
    for name in names:
        scales = _scales(found, name, tolerance)
        if scales is not None and _constant(scales, tolerance):
            return _named(name, float(np.median(list(scales.values()))), tolerance)
    fixed = [(m, g) for m, g in found if not m.ends]
    return (
        _by_length(found, names[:3], tolerance)
        or _at_fixed_length(fixed, names[:3], tolerance)
        or _combination(found, names, tolerance)
        or _mixture(fixed, names[:3], tolerance)
        or Named("other", "no combination of known fields")
    )


def _vanishes(found: Found, tolerance: float) -> bool:
    size = max(float(np.linalg.norm(m.truth)) for m, _ in found)
    return max(float(np.linalg.norm(g)) for _, g in found) <= tolerance * size


def _named(name: str, scale: float, tolerance: float) -> Named:
    one = abs(scale - 1) <= max(1e-7, 2 * tolerance)
    if name in ("sequence", "token") and scale < 0:
        return Named("wrong-sign", name, scale)
    if name in ("sequence", "token"):
        return Named(name if one else f"scaled-{name}", name, scale)
    if name in ("token-forward", "future") and one:
        return Named(name, name, scale)
    spelled = {"token-forward": "token-level forward KL", "future": "the future term alone"}.get(name, name)
    return Named("divergence", spelled, scale)


def _constant(scales: Mapping[int, float], tolerance: float) -> bool:
    values = list(scales.values())
    return max(values) - min(values) <= max(1e-7, 2 * tolerance) * max(map(abs, values))


def _scales(found: Found, name: str, tolerance: float) -> dict[int, float] | None:
    """Length -> factor of the field, or None where the gradients are not multiples of it."""
    scales = {}
    for length in lengths(found):
        g, f, truth = (joined(found, length, of) for of in ("", name, "sequence"))
        size, least = float(f @ f), tolerance * float(np.linalg.norm(truth))
        scale = float(g @ f) / size if size > (1e-12 * float(truth @ truth)) else 0.0
        if np.linalg.norm(g - scale * f) > max(tolerance * float(np.linalg.norm(g)), least):
            return None
        if abs(scale) * size**0.5 > least:  # else rounding: a field that is not there
            scales[length] = scale
    return scales or None


def lengths(found: Found) -> list[int]:
    """The lengths met, ascending."""
    return sorted({m.length for m, _ in found})


def joined(found: Found, length: int, field: str = "") -> np.ndarray:
    """The gradients at one length on all its models as one vector, or a known field's."""
    return np.concatenate([m.fields[field] if field else g for m, g in found if m.length == length])


def _by_length(found: Found, names: Iterable[str], tolerance: float) -> Named | None:
    """A multiple that depends on the length, on every model."""
    for name in names:
        scales = _scales(found, name, tolerance) if len(lengths(found)) > 1 else None
        if scales is not None:
            return _varying(name, scales, tolerance)
    return None


def _at_fixed_length(fixed: Found, names: Iterable[str], tolerance: float) -> Named | None:
    """A multiple at fixed length and none with an end token: replies of different length are treated unevenly."""
    if not fixed:
        return None
    if _vanishes(fixed, tolerance):
        return Named("other", "zero at fixed length, and not where replies differ in length", 0.0, True)
    for name in names:
        scales = _scales(fixed, name, tolerance) if len(lengths(fixed)) > 1 else None
        if scales is not None and _constant(scales, tolerance):
            weight = float(np.median(list(scales.values())))
            return Named("other", f"{phrase([weight], [name])} on models of fixed length alone", weight, True)
        if scales is not None:
            found = _varying(name, scales, tolerance)
            return Named(found.verdict, found.name, scales, True)
    return None


def _varying(name: str, scales: dict[int, float], tolerance: float) -> Named:
    clean = _named(name, 2.0 * np.sign(next(iter(scales.values()))), tolerance)
    return Named(clean.verdict, clean.name, scales)


def _combination(found: Found, names: list[str], tolerance: float) -> Named | None:
    """Two or three fields with the same factors on all models, the usual ones first."""
    found = [(m, g) for m, g in found if m.length > 1] or list(found)
    columns = {name: np.concatenate([m.fields[name] for m, _ in found]) for name in names}
    words = _fitted(found, columns, ((names[:3], 2), (names, 2), (names, 3)), tolerance)
    return None if words is None else Named("other", words)


def _mixture(fixed: Found, names: list[str], tolerance: float) -> Named | None:
    """The same at fixed length where weights may fall as 1/T: a mean over tokens met a sum."""
    fixed = [(m, g) for m, g in fixed if m.length > 1]
    columns = {name: [m.fields[name] for m, _ in fixed] for name in names}
    columns |= {f"{name}/T": [m.fields[name] / m.length for m, _ in fixed] for name in names}
    flat = {name: np.concatenate(each) for name, each in columns.items() if each}
    words = _fitted(fixed, flat, ((list(flat), 2), (list(flat), 3)), tolerance)
    return None if words is None else Named("other", f"{words} at a fixed length T", 1.0, True)


def _fitted(
    found: Found, columns: dict[str, np.ndarray], tries: Iterable[tuple[list[str], int]], tolerance: float
) -> str | None:
    """The combination of columns that the gradients are, in words; None too where anything would fit."""
    if not found:
        return None
    g = np.concatenate([g for _, g in found])
    every = np.stack(list(columns.values()), axis=1)
    free = np.linalg.matrix_rank(every / np.maximum(np.linalg.norm(every, axis=0), 1e-300), tol=1e-9)
    for usual, several in tries:
        for fields in itertools.combinations(usual, several) if several < free else ():
            table = np.stack([columns[name] for name in fields], axis=1)
            weights = np.linalg.lstsq(table, g, rcond=None)[0]
            if np.linalg.norm(table @ weights - g) <= tolerance * float(np.linalg.norm(g)):
                return phrase([round(w, 4) for w in weights.tolist()], fields)
    return None
