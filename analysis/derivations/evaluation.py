"""A formula in r evaluated without the digits that it loses as it is written.

``r - 1 - log(r)`` next to r = 1 is a difference of numbers of order one that leaves delta^2 / 2. Formulas are typed by
users and come in every shape, so none is rewritten: in x = log r a formula has a Taylor series around 0, whose
coefficients are taken with fifty digits, and where the series does not reach (a singularity near r = 1) each number is
evaluated with as many if it has lost digits. Far from r = 1 it is evaluated as it stands, and the size of its terms
says what that loses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from klgrad.analysis.derivations.grammar import symbol
from klgrad.analysis.derivations.inputs import DIGITS, EPS

NEAR = 0.1  # |log r| up to which nothing is evaluated as it stands
_RADII = (NEAR, NEAR / 10, NEAR / 100)  # the series is tried on each
_ORDER = 24
_TRIED = (1.0, -1.0, 0.5, -0.5, 0.1, -0.1)  # of the radius: where a series is held to the formula
_LOSS = 1e-13  # of a value: what evaluating it as it stands may lose near 0
_OPERATIONS = 8  # roundings that a term of a formula meets, a few functions deep


def log_ratio_symbol() -> Any:
    """x = log r."""
    import sympy

    return sympy.Symbol("x", real=True)


def numeric(expression: Any, of: Any) -> Callable[[np.ndarray], np.ndarray]:
    """A sympy expression in one symbol as a function of arrays; complex near the real axis, for the complex step."""
    import sympy

    kinks = {"Abs": lambda x: np.where(np.real(x) < 0, -x, x), "sign": lambda x: np.sign(np.real(x))}
    function = sympy.lambdify(of, expression, modules=[kinks, "numpy"])

    def evaluate(at: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return function(at) + np.zeros_like(at)

    return evaluate


class Formula:
    """A function of x = log r from an expression in r, right to rounding around r = 1.

    Args:
        expression: in sympy's ``symbol()``.
    """

    def __init__(self, expression: Any) -> None:
        import sympy

        self.expression = expression.subs(symbol(), sympy.exp(log_ratio_symbol()))
        self._as_it_stands = numeric(self.expression, log_ratio_symbol())

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """The formula at each x, complex arguments near the real axis allowed."""
        x = np.asarray(x)
        near = np.abs(np.real(x)) <= NEAR
        found = np.asarray(self._as_it_stands(np.where(near, 1.0, x)))
        if near.any():
            found[near] = self._close(x[near])
        return found

    def error(self, x: np.ndarray) -> np.ndarray:
        """How far rounding may have carried the value at each real x."""
        size = np.asarray(np.abs(self._size(np.where(x == 0, 1.0, x))))
        for side in (-1, 1):
            inside = (np.abs(x) <= self._series[side][0]) & (x * side >= 0)
            size[inside] = np.abs(self(x[inside]))
        return _OPERATIONS * EPS * size

    def _close(self, x: np.ndarray) -> np.ndarray:
        """``[n]`` by the series of the side of 0 on which each x lies, or number by number."""
        found = np.zeros_like(x)
        for side in (-1, 1):
            here = (np.real(x) < 0) if side < 0 else (np.real(x) >= 0)
            radius, coefficients = self._series[side]
            inside = here & (np.abs(np.real(x)) <= radius)
            found[inside] = np.polynomial.polynomial.polyval(x[inside], coefficients)
            rest = here & ~inside
            found[rest] = self._as_it_stands(x[rest])
            size = np.abs(self._size(np.real(x[rest])))
            lost = np.flatnonzero(rest)[~(_OPERATIONS * EPS * size <= _LOSS * np.abs(found[rest]))]
            found[lost] = [self._one(value, side) for value in x[lost]]
        return found

    def _one(self, x: complex, side: int) -> Any:
        from mpmath import mp

        with mp.workdps(DIGITS):
            found = self._precise(side)(mp.mpc(x) if isinstance(x, complex) else mp.mpf(float(x)))
            return complex(found) if isinstance(x, complex) else float(mp.re(found))

    def _precise(self, side: int) -> Callable[[Any], Any]:
        """The formula in many digits; a kink at 0 is taken from one side of it."""
        import sympy
        from mpmath import mp

        def sign(z: Any) -> int:
            return int(mp.sign(mp.re(z))) or side

        kinks = {"Abs": lambda z: z * sign(z), "sign": sign}
        return sympy.lambdify(log_ratio_symbol(), self.expression, modules=[kinks, "mpmath"])

    @cached_property
    def _series(self) -> dict[int, tuple[float, np.ndarray]]:
        """By side of 0: up to which |x| the series holds (-1: nowhere), and its coefficients."""
        import sympy

        if self.expression.has(sympy.Abs, sympy.sign):
            return {side: self._expand(side) for side in (-1, 1)}
        whole = self._expand(0)
        return {-1: whole, 1: whole}

    def _expand(self, side: int) -> tuple[float, np.ndarray]:
        from mpmath import mp

        exact = self._precise(side or 1)
        with mp.workdps(DIGITS):
            try:
                terms = mp.taylor(exact, 0, _ORDER, direction=side)
                largest = max(abs(term) for term in terms)
                terms = [
                    mp.re(term) if abs(term) > largest * mp.mpf(10) ** (-DIGITS // 2) else mp.mpf(0) for term in terms
                ]
                for radius in _RADII:
                    tried = [mp.mpf(radius * share) for share in _TRIED if share * side >= 0]
                    if all(_agree(mp.polyval(terms[::-1], at), exact(at)) for at in tried):
                        return radius, np.array([float(term) for term in terms])
            except (ArithmeticError, ValueError, TypeError):
                pass
        return -1.0, np.zeros(1)

    @cached_property
    def _size(self) -> Callable[[np.ndarray], np.ndarray]:
        return numeric(size_of_terms(self.expression), log_ratio_symbol())


def _agree(one: Any, other: Any) -> bool:
    return abs(one - other) <= EPS / 8 * abs(other)


def size_of_terms(expression: Any) -> Any:
    """The expression that a rounding of each term of another is a share of: its value with no two terms cancelling."""
    import sympy

    if expression.is_Add:
        return sympy.Add(*map(size_of_terms, expression.args))
    if expression.is_Mul:
        return sympy.Mul(*map(size_of_terms, expression.args))
    if expression.is_Pow or isinstance(expression, sympy.exp):
        base, power = expression.as_base_exp() if expression.is_Pow else (sympy.E, expression.exp)
        if power.is_Rational:  # the relative rounding of the base, as often as the power says
            return sympy.Abs(expression) * (1 + sympy.Abs(power) * size_of_terms(base) / sympy.Abs(base))
        return expression * (1 + size_of_terms(power))
    if isinstance(expression, sympy.log):
        (inside,) = expression.args
        return sympy.Abs(expression) + size_of_terms(inside) / sympy.Abs(inside)
    return size_of_terms(expression.args[0]) if isinstance(expression, sympy.Abs) else sympy.Abs(expression)
