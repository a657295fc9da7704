"""Does a saved table come out again? Its manifest is read as untrusted data, the rerun compared number by number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from klgrad.analysis.arithmetic import arithmetic, system
from klgrad.analysis.montecarlo import CPU, fingerprint
from klgrad.analysis.results import drawn_on, software
from klgrad.analysis.rounding import rounding

if TYPE_CHECKING:
    import pandas as pd

    from klgrad.synth.policies import PolicyPair

_SOURCE = ("preset", "pair", "behaviour")
_QUESTION: dict[str, tuple[type, ...]] = {"unbiased": (bool,), "rank": (str,), "error": (float, int)}
REPRODUCIBLE = ("figure1", "growth", "compare")
_MISSING = object()
_KEYS = ("preset", "configuration", "length", "source")


class Request(NamedTuple):
    """What a manifest says was asked.

    Args:
        command: without the program's name: ``figure1``.
        sources: each pair's preset, pair and behaviour as given, ``None`` where not.
        lengths: one list for each source.
        device: which engine drew; ``cpu`` where nothing was drawn.
        question: what ``compare`` was asked besides: ``unbiased``, ``rank`` and ``error``; empty for others.
    """

    command: str
    sources: list[dict[str, str | None]]
    lengths: list[list[int]]
    configurations: list[str]
    exact_only: bool
    trials: int
    samples: int
    seed: int
    device: str
    question: dict[str, Any]


class Difference(NamedTuple):
    """How far one column of one kind of row (exact or monte_carlo) is off.

    Args:
        rows: how many rows differ.
        largest: the largest difference, relative to the larger value; of biases to the true gradient's norm, of
            ratios and cosines to 1 where they are smaller. Infinite where only one of the two is a number.
        of_terms: the largest difference, relative to the terms that the number is a sum of (``rounding``); infinite
            for what is no sum.
        rounded: whether rounding alone can be the cause of all of them.
    """

    source: str
    column: str
    rows: int
    largest: float
    of_terms: float
    rounded: bool


def request(manifest: Mapping[str, Any]) -> Request:
    """The request in a manifest.

    Raises:
        ValueError: where it is not one that a command of klgrad writes, naming the field.
    """
    command = _of(manifest, "command", str).removeprefix("klgrad ")
    if command not in REPRODUCIBLE:
        raise ValueError(
            f"the manifest is of {command!r}: reproduce knows {', '.join(REPRODUCIBLE)}; "
            "run another command again yourself with what its request says"
        )
    asked = _of(manifest, "request", dict)
    sources = [{key: _of(source, key, str, type(None)) for key in _SOURCE} for source in _list(asked, "sources", dict)]
    lengths = [[_positive(n) for n in each] for each in _list(asked, "lengths", list)]
    if not sources or len(sources) != len(lengths) or not all(lengths):
        raise ValueError(f"the manifest has {len(sources)} sources and {len(lengths)} lists of lengths: one for each")
    exact_only = _of(asked, "exact_only", bool)
    device = _of(asked, "device", str) if "device" in asked and not exact_only else CPU  # older manifests have none
    trials, samples, seed = (_of(asked, key, int) for key in ("trials", "samples", "seed"))
    if seed < 0:
        raise ValueError(f"the manifest's seed is {seed}: a seed is 0 or more")
    return Request(
        command,
        sources,
        lengths,
        _list(asked, "configurations", str),
        exact_only,
        trials,
        samples,
        seed,
        device,
        {key: _of(asked, key, *kinds, type(None)) for key, kinds in _QUESTION.items() if key in asked},
    )


def _of(where: Any, key: str, *kinds: type) -> Any:
    value = where.get(key, _MISSING)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        shown = "missing" if value is _MISSING else repr(value)[:80]
        raise ValueError(f"the manifest's {key} is {shown}, not what klgrad writes")
    return value


def _list(where: Any, key: str, kind: type) -> list[Any]:
    return [_of({key: item}, key, kind) for item in _of(where, key, list)]


def _positive(length: Any) -> int:
    length = int(_of({"lengths": length}, "lengths", int))
    if length < 1:
        raise ValueError(f"the manifest's lengths hold {length}: a sequence has at least one token")
    return length


def changes(manifest: Mapping[str, Any], pairs: Sequence[PolicyPair]) -> dict[str, tuple[str | None, str | None]]:
    """(then, now) of all that the numbers depend on and is not as it was: versions, hardware, the pairs' numbers."""
    then: dict[str, str] = {key: _printable(manifest[key]) for key in ("platform", "device") if key in manifest}
    for field, prefix in (("software", ""), ("pairs", "pair ")):
        given = manifest.get(field)
        then |= {prefix + _printable(k): _printable(v) for k, v in given.items()} if isinstance(given, dict) else {}
    device = drawn_on(manifest["request"])
    saved = arithmetic_of(manifest)
    then |= {f"arithmetic of {name}": what for name, what in saved.items()}
    here = arithmetic(torch=bool(device)) if saved else {}  # older manifests have none
    now = {
        "platform": system(),
        **device,
        **{f"arithmetic of {name}": what for name, what in here.items()},
        **software(),
        **{f"pair {pair.name}": fingerprint(pair) for pair in pairs},
    }
    names = dict.fromkeys([*then, *now])
    return {name: (then.get(name), now.get(name)) for name in names if then.get(name) != now.get(name)}


def arithmetic_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Which arithmetic made a table; nothing where its manifest is older than that question."""
    given = manifest.get("arithmetic")
    return {_printable(k): _printable(v) for k, v in given.items()} if isinstance(given, dict) else {}


def _printable(value: Any) -> str:
    """Without what a terminal would obey."""
    return ascii(str(value))[1:-1]


def differences(then: pd.DataFrame, now: pd.DataFrame) -> list[Difference]:
    """What differs between two tables of the same rows, the largest first.

    Raises:
        ValueError: for tables of other rows or columns.
    """
    missing = [key for key in (*_KEYS, "gradient_norm") if key not in then]
    if missing or list(then.columns) != list(now.columns):
        raise ValueError("the saved table has other columns than its request gives: it was changed, or klgrad was")
    if len(then) != len(now) or any(list(then[key]) != list(now[key]) for key in _KEYS):
        raise ValueError("the saved table has other rows than its request gives: it was changed, or klgrad was")
    known, nothing = rounding(now), np.zeros(len(now))
    found = []
    for source in dict.fromkeys(now["source"]):
        rows = np.asarray(now["source"] == source)
        norm = np.abs(_numbers(now["gradient_norm"][rows]))
        for column in map(str, now.columns):
            a, b = list(then[column][rows]), list(now[column][rows])
            off = _off(a, b, _floor(column, norm))
            if off.any():
                size, share = (each[rows] for each in known.get(column, (nothing, nothing)))
                of_terms = _of_terms(a, b, size, off)
                rounded = bool((of_terms <= share).all())
                found.append(
                    Difference(source, column, int((off > 0).sum()), float(off.max()), float(of_terms.max()), rounded)
                )
    return sorted(found, key=lambda each: -each.largest)


def _of_terms(then: Sequence[Any], now: Sequence[Any], size: np.ndarray, off: np.ndarray) -> np.ndarray:
    """Differences as shares of ``size``; infinite where only one is a number, and where nothing is known of size."""
    if not size.any():
        return np.where(off > 0, np.inf, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.abs(_numbers(then) - _numbers(now)) / size
    return np.where(off == 0, 0.0, np.where(np.isfinite(found), found, np.inf))


def _floor(column: str, gradient_norm: np.ndarray) -> np.ndarray:
    """Below what a number of this column is small: a bias is a distance from the true gradient, however near."""
    if column.startswith("bias"):
        return gradient_norm
    return np.full_like(gradient_norm, 1.0 if column in ("relative_bias", "scale", "cosine") else 0.0)


def _off(then: Sequence[Any], now: Sequence[Any], floor: np.ndarray) -> np.ndarray:
    texts = np.array([isinstance(a, str) or isinstance(b, str) for a, b in zip(then, now, strict=True)])
    if texts.any():
        return np.array([0.0 if a == b else np.inf for a, b in zip(then, now, strict=True)])
    a, b = _numbers(then), _numbers(now)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", divide="ignore"):
        off = np.abs(a - b) / np.fmax(np.fmax(np.abs(a), np.abs(b)), floor)
    return np.where(same, 0.0, np.where(np.isfinite(off), off, np.inf))


def _numbers(values: Any) -> np.ndarray:
    """Floats; NaN for what is not finite, as a saved table's JSON cannot tell them apart."""
    found = np.array([np.nan if value is None else value for value in values], float)
    return np.where(np.isfinite(found), found, np.nan)
