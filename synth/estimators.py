"""The registry of KL estimators: what one token contributes, and what autograd multiplies its score with.

A *sampled* estimator is a pair of array functions of the log-ratio ``delta = log pi - log pi_ref`` of the
sampled token: its **value** phi(delta), and its **slope**, the derivative along log pi (for straight-through
estimators, by design, another one). A *full-vocabulary* estimator takes the whole next-token log-probs
``(log_probs, reference) [..., V]``; its value is ``[...]`` and its slope ``[..., V]`` weighs every token's
score. The functions take numpy and torch arrays alike, so the same object serves the exact tables, the
sampler and a language model's loss. Values in nats; r = exp(-delta) = pi_ref / pi.

A new estimator is one entry in ``ESTIMATORS``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

Array = Any  # numpy.ndarray or torch.Tensor

PAPER = "A Comedy of Estimators, arXiv 2512.21852"
SCHULMAN = "Schulman 2020, joschu.net/blog/kl-approx.html"


def array_namespace(x: Array) -> Any:
    """numpy itself for numpy arrays, which follow the array API since numpy 2; the compatible namespace of others."""
    if isinstance(x, (np.ndarray, np.generic)):
        return np
    from array_api_compat import array_namespace  # its numpy wrapper imports a tenth of a second of numpy we do not use

    return array_namespace(x)


@dataclass(frozen=True)
class Estimator:
    """One KL estimator with its arguments bound; equal to another of the same name *and* the same functions.

    Args:
        name: normal form, arguments included: ``k3``, ``alpha(0.75)``.
        value: ``delta -> phi(delta)``; full-vocabulary: ``(log_probs, reference) [..., V] -> [...]``.
        slope: ``delta -> slope``; full-vocabulary: ``(log_probs, reference) [..., V] -> [..., V]``.
        full: whether it needs the whole next-token distribution.
        unbiased: whether the expected value is the reverse KL.
        consistent: whether the slope is the derivative of the value.
        together: ``delta -> value plus slope`` in closed form, where the two cancel far below the reference; ``None``
            where their sum is as good, and for full-vocabulary ones.
        family: the estimator at each value of an argument that is still open, as in ``alpha(best)``; else ``None``.
    """

    name: str
    value: Callable[..., Array]
    slope: Callable[..., Array]
    full: bool
    unbiased: bool
    consistent: bool
    together: Callable[[Array], Array] | None = None
    family: Callable[[float], Estimator] | None = None

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)


class Entry(NamedTuple):
    """A registered estimator: its functions, arguments with defaults, formulas and source.

    ``unbiased`` and ``consistent`` are laws that tests hold every entry to, on random models; the formulas are read by
    ``analysis.precise``, which holds the functions to them. ``linear`` says that value and slope are linear in the one
    argument: the one of least variance has a closed form then, ``NAME(best)``.
    """

    value: Callable[..., Array]
    slope: Callable[..., Array]
    formula: str
    slope_formula: str
    source: str
    parameters: tuple[tuple[str, float], ...] = ()
    positive: tuple[str, ...] = ()
    full: bool = False
    unbiased: bool = False
    consistent: bool = True
    together: Callable[..., Array] | None = None
    linear: bool = False


BEST = "best"


def _exp_tail(x: Array) -> Array:
    """exp(x) - 1 - x without cancellation near 0 (Taylor below 0.1, exact to rounding in float64)."""
    xp = array_namespace(x)
    small = xp.where(xp.abs(x) < 0.1, x, xp.zeros_like(x))
    series = xp.zeros_like(x)
    for n in range(12, 2, -1):
        series = (series + 1) * small / n
    return xp.where(xp.abs(x) < 0.1, (series + 1) * small * small / 2, xp.expm1(x) - x)


def _k1(delta: Array) -> Array:
    return delta + 0  # a new array: what is handed out is never the caller's


def _one(delta: Array) -> Array:
    return array_namespace(delta).ones_like(delta)


def _k1_together(delta: Array) -> Array:
    return delta + 1


def _k2(delta: Array) -> Array:
    return delta * delta / 2


def _k2_together(delta: Array) -> Array:
    return delta * (delta / 2 + 1)


def _k3(delta: Array) -> Array:
    return _exp_tail(-delta)


def _k3_slope(delta: Array) -> Array:
    return -array_namespace(delta).expm1(-delta)


def _abs(delta: Array) -> Array:
    return array_namespace(delta).abs(delta)


def _sign(delta: Array) -> Array:
    return array_namespace(delta).sign(delta)


def _alpha(delta: Array, a: float) -> Array:
    return (1 - a) * delta + a * _k3(delta)


def _alpha_slope(delta: Array, a: float) -> Array:
    return (1 - a) + a * _k3_slope(delta)


def _alpha_together(delta: Array, a: float) -> Array:
    return delta + (1 - a)


def _clamped(delta: Array, input: float, output: float) -> Array:
    xp = array_namespace(delta)
    return xp.clip(_k3(xp.clip(delta, -input, input)), -output, output)


def _passes(delta: Array, input: float, output: float) -> tuple[Array, Array]:
    """The log-ratio within the input's clamp, and where neither clamp is saturated."""
    xp = array_namespace(delta)
    held = xp.clip(delta, -input, input)
    return held, (xp.abs(delta) <= input) & (_k3(held) <= output)


def _clamped_slope(delta: Array, input: float, output: float) -> Array:
    """Zero where either clamp is saturated: that is what autograd through a clamp gives."""
    held, passes = _passes(delta, input, output)
    xp = array_namespace(delta)
    return xp.where(passes, _k3_slope(held), xp.zeros_like(delta))


def _clamped_together(delta: Array, input: float, output: float) -> Array:
    _, passes = _passes(delta, input, output)
    return array_namespace(delta).where(passes, delta, _clamped(delta, input, output))


def _forward(delta: Array) -> Array:
    xp = array_namespace(delta)
    # r log r - (r - 1) = r * (exp(delta) - 1 - delta): no cancellation near 0, no inf * 0 far out
    return xp.where(
        delta < 1, xp.exp(-delta) * _exp_tail(xp.clip(delta, None, 1.0)), -xp.expm1(-delta) - delta * xp.exp(-delta)
    )


def _forward_slope(delta: Array) -> Array:
    return delta * array_namespace(delta).exp(-delta)


def _jeffreys(delta: Array) -> Array:
    return -delta * array_namespace(delta).expm1(-delta)


def _jeffreys_slope(delta: Array) -> Array:
    return _k3_slope(delta) + _forward_slope(delta)


def _jeffreys_together(delta: Array) -> Array:
    return delta + _k3_slope(delta)


def _log_mean_ratio(delta: Array) -> Array:
    """log((1 + e^delta) / 2), without cancellation near 0 and without overflow."""
    xp = array_namespace(delta)
    return xp.clip(delta, 0.0, None) + xp.log1p(xp.expm1(-xp.abs(delta)) / 2)


def _jensen_shannon(delta: Array) -> Array:
    # with h = delta / 2: e^-h (h sinh h - cosh h log cosh h), of which two thirds cancel near 0 and not all digits
    xp = array_namespace(delta)
    far = xp.abs(delta)
    near = xp.clip(far, None, 2.0) / 2
    even = near * xp.sinh(near) - xp.cosh(near) * xp.log1p(2 * xp.sinh(near / 2) ** 2)
    r = xp.exp(-far)
    tail = ((1 + r) * (math.log(2) - xp.log1p(r)) - far * r) / 2
    scale = xp.exp(-xp.clip(delta, None, 0.0))  # the divergence is symmetric: r times its value at -delta
    return scale * xp.where(far < 2, xp.exp(-near) * even, tail)


def _jensen_shannon_slope(delta: Array) -> Array:
    return array_namespace(delta).exp(-delta) * _log_mean_ratio(delta) / 2


def _jensen_shannon_together(delta: Array) -> Array:
    return -_log_mean_ratio(-delta) / 2


def _chi_squared(delta: Array) -> Array:
    return array_namespace(delta).expm1(-delta) ** 2


def _chi_squared_slope(delta: Array) -> Array:
    xp = array_namespace(delta)
    return -2 * xp.exp(-delta) * xp.expm1(-delta)


def _chi_squared_together(delta: Array) -> Array:
    return -array_namespace(delta).expm1(-2 * delta)


def _full_slope(log_probs: Array, reference: Array) -> Array:
    xp = array_namespace(log_probs)
    probs = xp.exp(log_probs)
    possible = probs > 0
    zero = xp.zeros_like(log_probs)
    # a token that is never emitted adds nothing, whatever its log-ratio: 0 * inf is not NaN here
    return probs * (xp.where(possible, log_probs, zero) - xp.where(possible, reference, zero))


def relative_entropies(log_probs: Array, reference: Array) -> Array:
    """``[..., V]`` p log(p / q) - p + q of each token, none negative: their sum over normalised rows is the KL.

    The plain sum of p log(p / q) loses it near the reference: its terms are of the distance's size, the KL of its
    square. A token that the policy never emits counts with the reference's mass; one that the reference alone never
    emits is infinite.
    """
    xp = array_namespace(log_probs)
    p, q = xp.exp(log_probs), xp.exp(reference)
    zero = xp.zeros_like(p)
    delta = xp.where(p > 0, xp.where(p > 0, log_probs, zero) - xp.where(p > 0, reference, zero), zero)
    near = p * _k3(xp.clip(delta, -1.0, None))
    return xp.where(p > 0, xp.where(delta < -1, q + p * (delta - 1), near), q)  # e^-delta could overflow, q does not


def _full(log_probs: Array, reference: Array) -> Array:
    return array_namespace(log_probs).sum(relative_entropies(log_probs, reference), axis=-1)


ESTIMATORS: dict[str, Entry] = {
    "k1": Entry(_k1, _one, "delta", "1", f"{SCHULMAN}; {PAPER}, section 2 (K1)", unbiased=True, together=_k1_together),
    "k2": Entry(_k2, _k1, "delta^2 / 2", "delta", SCHULMAN, together=_k2_together),
    "k3": Entry(
        _k3, _k3_slope, "r - 1 + delta", "1 - r", f"{SCHULMAN}; {PAPER}, section 2 (K3)", unbiased=True, together=_k1
    ),
    "abs": Entry(_abs, _sign, "|delta|", "sign(delta)", "verl kl_penalty 'abs'; expectation at least the KL"),
    "alpha": Entry(
        _alpha,
        _alpha_slope,
        "delta + a (r - 1)",
        "1 - a r",
        f"control-variate family between k1 (a = 0) and k3 (a = 1); {SCHULMAN}",
        (("a", 0.5),),
        unbiased=True,
        together=_alpha_together,
        linear=True,
    ),
    "k3-clamped": Entry(
        _clamped,
        _clamped_slope,
        "clip(k3(clip(delta, -input, input)), -output, output)",
        "1 - r where neither clamp is saturated, else 0",
        "verl low_var_kl, SkyRL k3, ms-swift: input 20, output 10",
        (("input", 20.0), ("output", 10.0)),
        positive=("input", "output"),
        together=_clamped_together,
    ),
    "k3-straight-through": Entry(
        _k3,
        _k1,
        "r - 1 + delta",
        "delta",
        "verl kl_penalty 'k3+' (verl pull request 2953): slope of k2, by design",
        unbiased=True,
        consistent=False,
    ),
    "full": Entry(
        _full,
        _full_slope,
        "sum_v pi(v) delta(v)",
        "pi(v) delta(v) for every token v",
        "Rao-Blackwellised reverse KL: Amini, Vieira, Cotterell, arXiv 2504.10637",
        full=True,
        unbiased=True,
    ),
    "forward-kl": Entry(
        _forward,
        _forward_slope,
        "r log(r) - (r - 1)",
        "-r log(r)",
        "f-divergence generator of KL(pi_ref || pi)",
        together=_k3_slope,
    ),
    "jeffreys": Entry(
        _jeffreys,
        _jeffreys_slope,
        "(r - 1) log(r)",
        "1 - r - r log(r)",
        "KL(pi || pi_ref) + KL(pi_ref || pi)",
        together=_jeffreys_together,
    ),
    "jensen-shannon": Entry(
        _jensen_shannon,
        _jensen_shannon_slope,
        "[r log(2r / (1 + r)) + log(2 / (1 + r))] / 2",
        "-(r / 2) log(2r / (1 + r))",
        "f-divergence generator of the Jensen-Shannon divergence",
        together=_jensen_shannon_together,
    ),
    "chi-squared": Entry(
        _chi_squared,
        _chi_squared_slope,
        "(r - 1)^2",
        "-2 r (r - 1)",
        "f-divergence generator of chi^2(pi_ref || pi)",
        together=_chi_squared_together,
    ),
}


def number(value: float) -> str:
    """The shortest text that reads back as the same number; never with a plus sign, which separates options."""
    return repr(float(value)).removesuffix(".0").replace("e+", "e")


def meant(name: str, choices: Iterable[str]) -> str:
    """``did you mean NAME? `` for the nearest of the choices, capitals aside; empty where none is near."""
    import difflib

    known = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(name.lower(), known, n=1)
    return f"did you mean {known[near[0]]!r}? " if near else ""


def unknown(kind: str, name: str, choices: list[str]) -> ValueError:
    """The one form of 'no such name': says what there is, and the nearest."""
    return ValueError(f"unknown {kind} {name!r}: {meant(name, choices)}there is {', '.join(choices)}")


def _split(name: str) -> tuple[str, str | None]:
    """The entry's name and the text of its arguments.

    Raises:
        ValueError: for an unknown name, saying what there is.
    """
    match = re.fullmatch(r"\s*([^()\s]+)\s*(?:\(([^()]*)\))?\s*", name)
    if match is None or match[1] not in ESTIMATORS:
        raise unknown("estimator", match[1] if match else name, list(ESTIMATORS))
    return match[1], match[2]


def _arguments(name: str, entry: Entry, text: str | None) -> tuple[float | str, ...]:
    if text is None:
        return tuple(default for _, default in entry.parameters)
    wanted = ", ".join(parameter for parameter, _ in entry.parameters)
    pieces = [piece.strip() for piece in text.split(",")]
    if len(pieces) != len(entry.parameters):
        takes = f"takes {len(entry.parameters)}: {name}({wanted})" if entry.parameters else "takes none"
        raise ValueError(f"{name}({text}) has {len(pieces)} argument(s); it {takes}")
    if pieces == [BEST] and entry.linear:
        return (BEST,)
    values = []
    for piece, (parameter, _) in zip(pieces, entry.parameters, strict=True):
        try:
            value = float(piece)
        except ValueError:
            or_best = f", nor {BEST!r}" if entry.linear else ""
            raise ValueError(f"{parameter} = {piece!r} in {name}({text}) is not a number{or_best}") from None
        if not math.isfinite(value) or (parameter in entry.positive and value <= 0):
            kind = "positive" if parameter in entry.positive else "finite"
            raise ValueError(f"{parameter} = {piece} in {name}({text}) must be a {kind} number")
        values.append(value)
    return tuple(values)


def arguments(name: str) -> tuple[str, tuple[float | str, ...]]:
    """An estimator's entry and arguments, defaults filled in: ``("alpha", (0.5,))``.

    Raises:
        ValueError: for an unknown name or wrong arguments, saying what is possible.
    """
    entry, text = _split(name)
    return entry, _arguments(entry, ESTIMATORS[entry], text)


def estimator(name: str) -> Estimator:
    """The estimator of that name: ``k3``, ``alpha(0.75)``, ``k3-clamped(20, 10)``, ``alpha(best)``.

    Raises:
        ValueError: for an unknown name or wrong arguments, saying what is possible.
    """
    base, given = arguments(name)
    return _open(base, ESTIMATORS[base]) if BEST in given else _bound(base, ESTIMATORS[base], given)


@cache  # the same functions, hence equal, however often it is asked for
def _bound(base: str, entry: Entry, given: tuple[float, ...]) -> Estimator:
    shown = f"{base}({','.join(map(number, given))})" if given else base
    bound = {parameter: value for (parameter, _), value in zip(entry.parameters, given, strict=True)}
    return Estimator(
        shown,
        partial(entry.value, **bound) if bound else entry.value,
        partial(entry.slope, **bound) if bound else entry.slope,
        entry.full,
        entry.unbiased,
        entry.consistent,
        partial(entry.together, **bound) if entry.together and bound else entry.together,
    )


@cache
def _open(base: str, entry: Entry) -> Estimator:
    """An estimator whose argument is still to be found for a pair and a length."""
    name, (parameter, example) = f"{base}({BEST})", entry.parameters[0]

    def unknown_yet(*_: Array) -> Array:
        raise ValueError(
            f"{name} has a value only where its {parameter} has been found for a pair and a length, as compare, growth "
            f"and figure1 do: give a number here, such as {base}({number(example)})"
        )

    return Estimator(
        name, unknown_yet, unknown_yet, entry.full, entry.unbiased, entry.consistent,
        family=lambda value: estimator(f"{base}({number(value)})"),
    )  # fmt: skip
