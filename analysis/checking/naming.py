"""Which field is an expected gradient? One verdict in the vocabulary of the design, from gradients on many models.

A field fits where the gradients are one multiple of it on every model; else where the multiple depends on the
vocabulary's size alone, or on the length alone, which tells a mean over the vocabulary from a mean over tokens; else
where it fits with two words only, or at fixed length only; else a combination of fields is looked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from klgrad.analysis.checking.fields import TRUNCATED
from klgrad.analysis.checking.models import Model
from klgrad.analysis.verdicts import phrase

Found = Sequence[tuple[Model, np.ndarray]]
_HALF = 1e-3  # tolerances past this are those of half precision, where a factor is told by its mean over models
_ROUNDED = 4e-3  # two units in the last place of bfloat16: what its rounding may do to a factor
_NEAR = 0.25  # a field nearer than this is worth naming where none fits


@dataclass(frozen=True)
class Named:
    """A verdict on expected gradients.

    Args:
        verdict: the vocabulary's word.
        name: the field, spelled out.
        scale: the factor on it: one number, or one per length or vocabulary where it depends on that.
        only_fixed: the field fits at fixed length and not with an end token.
        by: what the factor depends on: ``length``, ``vocabulary``, ``both`` or nothing.
        off: the largest relative distance from the field times its factor.
        nearest: where nothing fits, the field that comes nearest, in words.
        one: the factor is 1, as far as that can be told.
    """

    verdict: str
    name: str
    scale: float | dict[Any, float] = 1.0
    only_fixed: bool = False
    by: str = ""
    off: float = 0.0
    nearest: str = ""
    one: bool = False


@dataclass(frozen=True)
class Known:
    """The fields to compare with: those of the models, and one of the user's.

    Args:
        wanted: those tried first: what was asked for.
        own: name -> the gradient that another function or configuration has on a model.
        full: whether the whole vocabulary is seen, so that truncations of it are worth trying.
    """

    wanted: tuple[str, ...] = ()
    own: Mapping[str, Callable[[Model], np.ndarray]] = ()  # type: ignore[assignment]
    full: bool = False

    def of(self, model: Model, name: str) -> np.ndarray:
        """The field of that name on the model."""
        return self.own[name](model) if name in self.own else model.fields[name]

    def names(self, model: Model) -> list[str]:
        """All of them, those asked for first; truncations last, and only where they are to be tried."""
        rest = [name for name in model.fields if self.full or name not in TRUNCATED]
        return list(dict.fromkeys((*self.wanted, *rest)))

    def joined(self, found: Found, name: str) -> np.ndarray:
        """A field on all these models as one vector; the gradients themselves for no name."""
        return np.concatenate([self.of(m, name) if name else g for m, g in found])


def classify(found: Found, tolerance: float, *, dead: bool = False, known: Known = Known()) -> Named:
    """Name the field that these expected gradients are.

    Args:
        found: models and the gradient on each.
        tolerance: relative.
        dead: every single sample's gradient is zero.
        known: the fields to compare with.
    """
    if dead:
        return Named("dead", "zero for every sample", 0.0)
    if not all(np.isfinite(g).all() for _, g in found):
        return Named("other", "not finite")
    if _vanishes(found, tolerance):
        return Named("zero", "zero in expectation", 0.0)
    names, fit = known.names(found[0][0]), _Fit(known, tolerance)
    usual = list(dict.fromkeys((*known.wanted, *names[: len(known.wanted) + 3])))
    return (
        fit.constant(found, names)
        or fit.by(found, usual, "vocabulary")
        or fit.by(found, usual, "length")
        or fit.two_words(found, usual)
        or fit.at_fixed_length(found, usual)
        or fit.combination(found, names)
        or replace(Named("other", "no combination of known fields"), nearest=fit.nearest(found, usual))
    )


def _vanishes(found: Found, tolerance: float) -> bool:
    size = max(float(np.linalg.norm(m.truth)) for m, _ in found)
    return max(float(np.linalg.norm(g)) for _, g in found) <= tolerance * size


_KEYS: dict[str, Callable[[Model], Any]] = {
    "length": lambda m: m.length, "vocabulary": lambda m: m.vocabulary, "both": lambda m: (m.vocabulary, m.length),
}  # fmt: skip


@dataclass(frozen=True)
class _Fit:
    """How gradients are fitted: against these fields, to this tolerance."""

    known: Known
    tolerance: float

    def constant(self, found: Found, names: Iterable[str]) -> Named | None:
        """One multiple of a field on every model."""
        for name in names:
            scales = self.scales(found, name, "length")
            if scales is not None and self._same(scales):
                scale = float(np.median(list(scales.values())))
                named = _named(name, scale, self._doubt(found, name))
                return replace(named, off=self.off(found, name, scale))
        return None

    def by(self, found: Found, names: Iterable[str], key: str) -> Named | None:
        """A multiple that depends on the length, or on the vocabulary's size, on every model."""
        for name in names:
            if len({_KEYS[key](m) for m, _ in found}) > 1:
                scales = self.scales(found, name, key)
                if scales is not None:
                    return self._varying(name, scales, key)
        return None

    def two_words(self, found: Found, names: Iterable[str]) -> Named | None:
        """Right with a vocabulary of two tokens and not with more."""
        two = [(m, g) for m, g in found if m.vocabulary == 2]
        if len(two) == len(found) or {m.ends for m, _ in two} != {False, True}:
            return None
        named = self.constant(two, names)
        if named is None or named.verdict == "zero":
            return None
        return Named("other", f"{_worded(named)} at V = 2 alone", named.scale, by="two words")

    def at_fixed_length(self, found: Found, names: Iterable[str]) -> Named | None:
        """A multiple at fixed length and none with an end token: replies of different length are treated unevenly."""
        fixed = [(m, g) for m, g in found if not m.ends]
        if not fixed or len(fixed) == len(found):
            return None
        if _vanishes(fixed, self.tolerance):
            return Named("other", "zero at fixed length, and not where replies differ in length", 0.0, True)
        constant = self.constant(fixed, names)
        if constant is not None:
            weight = constant.scale
            assert isinstance(weight, float)
            name = f"{phrase([weight], [constant.name])} on models of fixed length alone"
            return Named("other", name, weight, True)
        for key in ("length", "vocabulary", "both"):
            varying = self.by(fixed, names, key)
            if varying is not None and (key != "both" or _law_of_both(varying.scale)):
                return replace(varying, only_fixed=True)
        return None

    def combination(self, found: Found, names: list[str]) -> Named | None:
        """Two or three fields with the same factors on all models, the usual ones first; then at fixed length."""
        longer = [(m, g) for m, g in found if m.length > 1] or list(found)
        plain = [name for name in names if name not in TRUNCATED]
        columns = {name: self.known.joined(longer, name) for name in plain}
        words = self._fitted(longer, columns, ((plain[:3], 2), (plain, 2), (plain, 3)))
        if words is not None:
            return Named("other", words)
        fixed = [(m, g) for m, g in longer if not m.ends]
        usual = plain[:3]
        flat = {name: self.known.joined(fixed, name) for name in usual if fixed}
        flat |= {f"{n}/T": np.concatenate([self.known.of(m, n) / m.length for m, _ in fixed]) for n in usual if fixed}
        words = self._fitted(fixed, flat, ((list(flat), 2), (list(flat), 3)))
        return None if words is None else Named("other", f"{words} at a fixed length T", 1.0, True)

    def nearest(self, found: Found, names: Iterable[str]) -> str:
        """The usual field that comes nearest, with its factor and what is left, where it is near at all."""
        tried = []
        for name in names:
            f, g = self.known.joined(found, name), self.known.joined(found, "")
            scale = float(f @ g) / max(float(f @ f), 1e-300)
            tried.append((float(np.linalg.norm(g - scale * f) / np.linalg.norm(g)), scale, name))
        off, scale, name = min(tried)
        return f"{phrase([round(scale, 4)], [name])} within {off:.2g}" if off < _NEAR else ""

    def scales(self, found: Found, name: str, key: str) -> dict[Any, float] | None:
        """Group -> factor of the field, or None where the gradients are not multiples of it."""
        of, scales = _KEYS[key], {}
        for value in sorted({of(m) for m, _ in found}):
            part = [(m, g) for m, g in found if of(m) == value]
            g, f, truth = (self.known.joined(part, n) for n in ("", name, "sequence"))
            size, least = float(f @ f), self.tolerance * float(np.linalg.norm(truth))
            scale = float(g @ f) / size if size > (1e-12 * float(truth @ truth)) else 0.0
            if np.linalg.norm(g - scale * f) > max(self.tolerance * float(np.linalg.norm(g)), least):
                return None
            if abs(scale) * size**0.5 > least:  # else rounding: a field that is not there
                scales[value] = scale
        return scales or None

    def off(self, found: Found, name: str, scale: float) -> float:
        """The largest relative distance from the field times the factor, over lengths."""
        worst = 0.0
        for length in lengths(found):
            part = [(m, g) for m, g in found if m.length == length]
            g, f = self.known.joined(part, ""), scale * self.known.joined(part, name)
            worst = max(worst, float(np.linalg.norm(g - f)) / max(float(np.linalg.norm(f)), 1e-300))
        return worst

    def _same(self, scales: Mapping[Any, float]) -> bool:
        values = list(scales.values())
        return max(values) - min(values) <= max(1e-7, 2 * self.tolerance) * max(map(abs, values))

    def _doubt(self, found: Found, name: str) -> float:
        """How far from 1 a factor may be and count as 1: rounding; in half precision what its mean over models shows.

        Four standard errors of the models' own factors: a factor that is 1 is called another once in 15,000 functions.
        """
        if self.tolerance < _HALF:
            return max(1e-7, 2 * self.tolerance)
        pairs = [(self.known.of(m, name), g) for m, g in found]
        each = [float(f @ g) / float(f @ f) for f, g in pairs if f @ f > 1e-12]
        return max(_ROUNDED, min(2 * self.tolerance, 4 * float(np.std(each)) / max(len(each), 1) ** 0.5))

    def _varying(self, name: str, scales: dict[Any, float], key: str) -> Named:
        clean = _named(name, 2.0 * np.sign(next(iter(scales.values()))), 1e-7)
        return Named(clean.verdict, clean.name, scales, by=key)

    def _fitted(
        self, found: Found, columns: dict[str, np.ndarray], tries: Iterable[tuple[list[str], int]]
    ) -> str | None:
        """The combination of columns that the gradients are, in words; None too where anything would fit."""
        if not found:
            return None
        g = np.concatenate([g for _, g in found])
        every = np.stack(list(columns.values()), axis=1)
        free = np.linalg.matrix_rank(every / np.maximum(np.linalg.norm(every, axis=0), 1e-300), tol=1e-9)
        for usual, several in tries:
            if several < free:
                for fields in _likely(np.stack([columns[name] for name in usual], axis=1), g, usual, several):
                    table = np.stack([columns[name] for name in fields], axis=1)
                    weights = np.linalg.lstsq(table, g, rcond=None)[0]
                    if np.linalg.norm(table @ weights - g) <= self.tolerance * float(np.linalg.norm(g)):
                        return phrase([round(w, 4) for w in weights.tolist()], fields)
        return None


def _likely(table: np.ndarray, g: np.ndarray, names: Sequence[str], several: int) -> list[tuple[str, ...]]:
    """The sets of so many columns whose span comes near the vector, in order; by normal equations, all sets at once."""
    size = np.maximum(np.linalg.norm(table, axis=0), 1e-300)
    unit = table / size
    index = np.array(list(itertools.combinations(range(len(names)), several)))
    gram, inner = (unit.T @ unit)[index[:, :, None], index[:, None, :]], (unit.T @ g)[index]
    weights = np.linalg.solve(gram + 1e-12 * np.eye(several), inner[..., None])[..., 0]
    left = g @ g - np.einsum("ns,ns->n", weights, inner)
    near = left <= 1e-4 * (g @ g)  # normal equations lose half the digits: least squares confirms
    return [tuple(names[i] for i in row) for row in index[near]]


def _named(name: str, scale: float, doubt: float) -> Named:
    one = abs(scale - 1) <= doubt
    if name in ("sequence", "token"):
        word = "wrong-sign" if scale < 0 else name if one else f"scaled-{name}"
    else:
        word = name if one and name in ("token-forward", "future") else "divergence"
    return Named(word, name, scale, one=one)


def _worded(named: Named) -> str:
    assert isinstance(named.scale, float)
    return phrase([round(named.scale, 6)], [named.name])


def _law_of_both(scales: float | dict[Any, float]) -> bool:
    """Whether the factor is a constant over V, over T, or over both: else anything would fit."""
    assert isinstance(scales, dict)
    for a, b in ((1, 1), (1, 0), (0, 1)):
        base = [s * v**a * n**b for (v, n), s in scales.items()]
        if max(base) - min(base) <= 1e-6 * abs(base[0]):
            return True
    return False


def lengths(found: Found) -> list[int]:
    """The lengths met, ascending."""
    return sorted({m.length for m, _ in found})


def joined(found: Found, length: int, field: str = "") -> np.ndarray:
    """The gradients at one length on all its models as one vector, or a known field's."""
    return np.concatenate([m.fields[field] if field else g for m, g in found if m.length == length])
