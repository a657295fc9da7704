"""An estimator's formula phi(r), and the divergences that it stands for.

h and psi, the divergences of the loss and of the reward, are defined in ``phi``; here they are evaluated, closed
where the integrals close, and recognised by their second derivatives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from klgrad.analysis.derivations.divergences import Terms, chi_squared, forward_kl, k3, reverse_kl
from klgrad.analysis.derivations.evaluation import Formula, numeric
from klgrad.analysis.derivations.grammar import parse, symbol
from klgrad.analysis.derivations.quadrature import Integral, integral
from klgrad.synth.estimators import Estimator

SECONDS = 5.0  # that sympy may look for one integral
_GRID = np.exp(np.linspace(-6.0, 6.0, 241))  # where a formula must be real and finite


def ratio_terms(f: Callable[[np.ndarray], np.ndarray]) -> Terms:
    """The terms pi f(q / pi) of a divergence, f being given in x = log r; complex arguments allowed."""
    return lambda p, delta: np.exp(p) * f(-delta)


def _jensen_shannon(x: np.ndarray) -> np.ndarray:
    """Half of KL(pi || m) + KL(q || m), m their mean, over pi: each KL by terms that are not negative."""
    middle = np.log1p(np.expm1(x) / 2)
    return (k3(-middle) + np.exp(x) * k3(x - middle)) / 2


@dataclass(frozen=True)
class Known:
    """A divergence that can be recognised: LaTeX, the second derivative of its f, and its terms.

    Of all f that differ by c (r - 1) only, whose sums are the same, the terms are those of the one that is flat at
    r = 1, so that nothing cancels near the reference.
    """

    latex: str
    curvature: Callable[[np.ndarray], np.ndarray]
    terms: Terms


KNOWN = (
    Known(r"\KLt", lambda r: r**-2.0, reverse_kl),
    Known(r"\fKLt", lambda r: 1 / r, forward_kl),
    Known(r"\chi^2_t(q\|\pi)", lambda r: 2 * np.ones_like(r), chi_squared),
    Known(r"\chi^2_t(\pi\|q)", lambda r: 2 * r**-3.0, ratio_terms(lambda x: np.expm1(x) ** 2 * np.exp(-x))),
    Known(r"\mathrm{H}^2_t(\pi, q)", lambda r: r**-1.5 / 2, ratio_terms(lambda x: np.expm1(x / 2) ** 2)),
    Known(
        r"\mathrm{JS}_t(\pi, q)",
        lambda r: 1 / (2 * r * (1 + r)),
        ratio_terms(_jensen_shannon),
    ),
)


# ------------------------------------------------------------------------------------------------- the formula


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """What ``work`` returns, or ``None`` when it fails or takes longer; a search that hangs is left behind."""
    found: list[Any] = []

    def attempt() -> None:
        try:
            found.append(work())
        except Exception:  # sympy gives up in many ways; all of them mean that no closed form was found
            return

    worker = threading.Thread(target=attempt, daemon=True)
    worker.start()
    worker.join(seconds)
    return found[0] if found else None


class Phi:
    """An estimator's formula, with its slope, h and psi.

    Args:
        text: the formula, in the grammar of ``grammar``.

    Raises:
        ValueError: for a formula outside the grammar, or one that is not real and finite for every r > 0.
    """

    def __init__(self, text: str) -> None:
        import sympy

        self.text = text
        self.formula = parse(text)
        self.derivative = sympy.diff(self.formula, symbol())
        for name, expression in (("the formula", self.formula), ("its derivative", self.derivative)):
            values = (
                numeric(expression, symbol())(_GRID + 0j)
                if not expression.has(sympy.Abs)
                else numeric(expression, symbol())(_GRID)
            )
            bad = ~(np.isfinite(values) & (np.abs(np.imag(values)) <= 1e-12 * np.abs(values)))
            if bad.any():
                raise ValueError(
                    f"{text!r}: {name} is not real and finite at r = {_GRID[bad][0]:.4g}; it must be for every r > 0, "
                    "since any ratio of probabilities can be met"
                )

        pole = _sign_change(numeric(sympy.fraction(sympy.together(self.formula))[1], symbol()))
        if pole is not None:
            raise ValueError(f"{text!r}: the formula is not finite near r = {pole:.4g}; it must be for every r > 0")

    @cached_property
    def value(self) -> Formula:
        """phi as a function of x = log r."""
        return Formula(self.formula)

    @cached_property
    def slope(self) -> Any:
        """-r phi'(r), the derivative along log pi, in sympy."""
        import sympy

        return sympy.expand(-symbol() * self.derivative)

    @cached_property
    def along(self) -> Formula:
        """-r phi'(r) as a function of x = log r."""
        return Formula(-symbol() * self.derivative)

    @cached_property
    def estimator(self) -> Estimator:
        """The estimator that the exact engine takes."""
        return Estimator("phi", lambda delta: self.value(-delta), lambda delta: self.along(-delta), False, False, True)

    @cached_property
    def _integrands(self) -> tuple[Formula, Formula]:
        return Formula(self.derivative), Formula(-self.formula / symbol())

    def h(self, x: np.ndarray) -> np.ndarray:
        """h(r) by quadrature, at x = log r."""
        return self._divergence(0, "h(r)", x).value

    def psi(self, x: np.ndarray) -> np.ndarray:
        """psi(r) by quadrature, at x = log r."""
        return self._divergence(1, "psi(r)", x).value

    def error(self, which: int, x: np.ndarray) -> np.ndarray:
        """How far h (0) or psi (1) may be off at each real x."""
        return self._divergence(which, ("h(r)", "psi(r)")[which], x).error

    def _divergence(self, which: int, of: str, x: np.ndarray) -> Integral:
        found = integral(self._integrands[which], x, of)
        return Integral(np.exp(x) * found.value, np.exp(np.real(x)) * found.error)

    @cached_property
    def closed(self) -> tuple[Any, Any] | None:
        """(h, psi) in closed form, or ``None`` where the integral does not close."""
        import sympy

        r, s = symbol(), sympy.Symbol("s", positive=True)
        integrand = sympy.expand(self.derivative.subs(r, s) / s)
        primitive = _primitive(integrand, s)
        if primitive is None:  # outside the family that is integrated at once: sympy may look for a while
            primitive = within(SECONDS, lambda: sympy.integrate(integrand, s, manual=True))
        if primitive is None or primitive.has(sympy.Integral):
            return None
        found = sympy.expand(r * (primitive.subs(s, r) - primitive.subs(s, 1)))
        if not _is_elementary(found):
            return None
        at_one = self.formula.subs(r, 1)  # psi(1) = 0 and psi'(1) = -phi(1) fix c_1 and c_2
        return found, sympy.expand(self.formula - found - at_one * r)

    def curvature(self, which: str) -> list[np.ndarray]:
        """The terms that the second derivative of phi, h or psi is the sum of, on a grid."""
        import sympy

        second = numeric(sympy.diff(self.derivative, symbol()), symbol())(_GRID)
        first = numeric(self.derivative, symbol())(_GRID) / _GRID
        return {"phi": [second], "h": [second, first], "psi": [-first]}[which]

    def recognised(self, which: str) -> dict[int, float] | None:
        """The divergence as a combination of ``KNOWN`` (index to coefficient), or ``None``."""
        import sympy

        if self.formula.has(sympy.Abs):
            return None  # a kink has no second derivative to recognise it by
        terms = self.curvature(which)
        basis = np.stack([known.curvature(_GRID) for known in KNOWN], axis=1)
        scale = basis.sum(axis=1) + sum(np.abs(term) for term in terms)
        weights = np.linalg.lstsq(basis / scale[:, None], sum(terms) / scale, rcond=None)[0]
        weights = np.array([_nearest_fraction(w) for w in weights])
        used = basis @ np.abs(weights) + sum(np.abs(term) for term in terms)
        if (np.abs(basis @ weights - sum(terms)) > 1e-9 * used).any():
            return None
        return {i: float(w) for i, w in enumerate(weights) if w}


def _sign_change(function: Callable[[np.ndarray], np.ndarray]) -> float | None:
    """Where a real function crosses zero on the grid."""
    signs = np.sign(np.real(function(_GRID)))
    crossings = np.flatnonzero(signs[1:] * signs[:-1] < 0)
    return float(_GRID[crossings[0]]) if crossings.size else None


def _nearest_fraction(weight: float) -> float:
    near = float(Fraction(float(weight)).limit_denominator(1000))
    return near if abs(near - weight) < 1e-8 else float(weight)


def _primitive(integrand: Any, s: Any) -> Any:
    """The integral of a sum of terms c s^a log(s)^n; ``None`` where another term stands in it."""
    import sympy

    log = sympy.log(s)
    total = sympy.S.Zero
    for term in sympy.Add.make_args(integrand):
        coefficient, rest = term.as_independent(s)
        powers = dict(rest.as_powers_dict()) if rest != 1 else {}
        a, n = powers.pop(s, sympy.S.Zero), powers.pop(log, sympy.S.Zero)
        if powers or not (a.is_Rational and n.is_Integer and n >= 0):
            return None
        total += coefficient * _power_times_log(s, log, a, int(n))
    return total


def _power_times_log(s: Any, log: Any, a: Any, n: int) -> Any:
    """The integral of s^a log(s)^n, by parts."""
    if a == -1:
        return log ** (n + 1) / (n + 1)
    by_parts = n * _power_times_log(s, log, a, n - 1) if n else 0
    return (s ** (a + 1) * log**n - by_parts) / (a + 1)


def _is_elementary(expression: Any) -> bool:
    import sympy

    functions = {type(f) for f in expression.atoms(sympy.Function)}
    return functions <= {sympy.log, sympy.exp} and not expression.has(sympy.I, sympy.nan, sympy.oo, sympy.zoo)
