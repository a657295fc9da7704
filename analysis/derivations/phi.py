"""The derivation of an estimator that nobody has written down yet: from its formula phi(r) to what it optimises.

With D_f = sum_v pi(v) f(q(v) / pi(v)), the f-divergence of q from pi, an estimator phi(r) per token has the mean
D_phi; in the loss it descends D_h with h(r) = r int_1^r phi'(s)/s ds, and in the reward (each token's own) D_psi with
psi(r) = -r int_1^r phi(s)/s^2 ds. Only second derivatives of f matter, and h'' = phi'' + phi'/r, psi'' = -phi'/r: so
known divergences are recognised without an integral, and h + psi = phi up to c_1 + c_2 r.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.analysis.derivations.grammar import parse, symbol
from klgrad.analysis.derivations.model import Model, forward_kl, reverse_kl
from klgrad.analysis.derivations.steps import TOLERANCE, Comparison, Derivation, Step, StepFailed
from klgrad.analysis.derivations.terms import true
from klgrad.synth.configurations import Configuration
from klgrad.synth.estimators import Estimator
from klgrad.synth.exact import visitation

if TYPE_CHECKING:
    from jaxtyping import Float

Terms = Callable[[np.ndarray, np.ndarray], np.ndarray]

SECONDS = 5.0  # that sympy may look for one integral
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)
_HALVINGS = 50  # of a panel around a kink: to the last digits of its place
_MOST_PANELS = 256  # that are halved at once
_GRID = np.exp(np.linspace(-6.0, 6.0, 241))  # where a formula must be real and finite


def _ratio_terms(f: Callable[[np.ndarray], np.ndarray]) -> Terms:
    """The terms pi f(q / pi) of a divergence, complex arguments allowed."""
    return lambda p, q: np.exp(p) * f(np.exp(q - p))


@dataclass(frozen=True)
class Known:
    """A divergence that can be recognised: LaTeX, the second derivative of its f, and its terms."""

    latex: str
    curvature: Callable[[np.ndarray], np.ndarray]
    terms: Terms


KNOWN = (
    Known(r"\KLt", lambda r: r**-2.0, reverse_kl),
    Known(r"\fKLt", lambda r: 1 / r, forward_kl),
    Known(r"\chi^2_t(q\|\pi)", lambda r: 2 * np.ones_like(r), _ratio_terms(lambda r: (r - 1) ** 2)),
    Known(r"\chi^2_t(\pi\|q)", lambda r: 2 * r**-3.0, _ratio_terms(lambda r: 1 / r - 1)),
    Known(r"\mathrm{H}^2_t(\pi, q)", lambda r: r**-1.5 / 2, _ratio_terms(lambda r: (np.sqrt(r) - 1) ** 2)),
    Known(
        r"\mathrm{JS}_t(\pi, q)",
        lambda r: 1 / (2 * r * (1 + r)),
        _ratio_terms(lambda r: (r * np.log(2 * r / (1 + r)) + np.log(2 / (1 + r))) / 2),
    ),
)


# ------------------------------------------------------------------------------------------------- the formula


def _numeric(expression: Any) -> Callable[[np.ndarray], np.ndarray]:
    """A sympy expression in r as a function of arrays; complex near the real axis, for the complex step."""
    import sympy

    kinks = {"Abs": lambda x: np.where(np.real(x) < 0, -x, x), "sign": lambda x: np.sign(np.real(x))}
    function = sympy.lambdify(symbol(), expression, modules=[kinks, "numpy"])

    def evaluate(r: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return function(r) + np.zeros_like(r)

    return evaluate


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
            values = _numeric(expression)(_GRID + 0j) if not expression.has(sympy.Abs) else _numeric(expression)(_GRID)
            bad = ~(np.isfinite(values) & (np.abs(np.imag(values)) <= 1e-12 * np.abs(values)))
            if bad.any():
                raise ValueError(
                    f"{text!r}: {name} is not real and finite at r = {_GRID[bad][0]:.4g}; it must be for every r > 0, "
                    "since any ratio of probabilities can be met"
                )

        pole = _sign_change(_numeric(sympy.fraction(sympy.together(self.formula))[1]))
        if pole is not None:
            raise ValueError(f"{text!r}: the formula is not finite near r = {pole:.4g}; it must be for every r > 0")

    @cached_property
    def value(self) -> Callable[[np.ndarray], np.ndarray]:
        """phi as a function of arrays."""
        return _numeric(self.formula)

    @cached_property
    def slope(self) -> Any:
        """-r phi'(r), the derivative along log pi, in sympy."""
        import sympy

        return sympy.expand(-symbol() * self.derivative)

    @cached_property
    def estimator(self) -> Estimator:
        """The estimator that the exact engine takes."""
        slope = _numeric(-symbol() * self.derivative)
        return Estimator(
            "phi", lambda delta: self.value(np.exp(-delta)), lambda delta: slope(np.exp(-delta)), False, False, True
        )

    def h(self, r: np.ndarray) -> np.ndarray:
        """h(r) by quadrature in log s."""
        slope = _numeric(self.derivative)
        return r * _integral(lambda x: slope(np.exp(x)), np.log(r), "h(r)")

    def psi(self, r: np.ndarray) -> np.ndarray:
        """psi(r) by quadrature."""
        return -r * _integral(lambda x: self.value(np.exp(x)) * np.exp(-x), np.log(r), "psi(r)")

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

        second = _numeric(sympy.diff(self.derivative, symbol()))(_GRID)
        first = _numeric(self.derivative)(_GRID) / _GRID
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


def _integral(f: Callable[[np.ndarray], np.ndarray], end: np.ndarray, of: str) -> np.ndarray:
    """The integral of f from 0 to each end, by Gauss-Legendre on panels fine enough for the kinks of f.

    An end may lie off the real axis by a complex step, which differentiates the last piece as a quadrature.

    Raises:
        StepFailed: when the panels do not reach the accuracy that a step is held to.
    """
    reached = np.real(end)[np.isfinite(end)]
    edges = np.concatenate([_panels(f, min(reached.min(initial=0.0), 0.0), of), [0.0]])
    edges = np.unique(np.concatenate([edges, _panels(f, max(reached.max(initial=0.0), 0.0), of)]))
    upto = np.concatenate([[0.0], np.cumsum(_gauss(f, edges[:-1], edges[1:]))])
    upto = upto - upto[np.searchsorted(edges, 0.0)]
    below = np.clip(np.searchsorted(edges, np.real(end), side="right") - 1, 0, len(edges) - 1)
    # the panel's edge on the side of 0, so that an end in a fine panel takes no difference of large sums
    start = np.where(np.real(end) < 0, np.minimum(below + 1, len(edges) - 1), below)
    return upto[start] + _gauss(f, edges[start], end)


def _gauss(f: Callable[[np.ndarray], np.ndarray], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The integral of f over each [a, b], by one Gauss-Legendre rule."""
    width = b - a
    points = a + width * ((_NODES + 1) / 2).reshape(-1, *[1] * np.ndim(width))
    return np.asarray(width * np.tensordot(_WEIGHTS / 2, f(points), axes=1))


def _panels(f: Callable[[np.ndarray], np.ndarray], end: float, of: str) -> np.ndarray:
    """Edges of panels from 0 to ``end``, halved wherever one rule and two disagree: around kinks and steep places."""
    edges, error, size = [np.array([0.0, end])], 0.0, 0.0
    a, b = np.array([0.0]), np.array([end])
    for depth in range(_HALVINGS + 1):
        middle = (a + b) / 2
        with np.errstate(invalid="ignore"):  # where f overflows there is no convergence, and that is told below
            gap = np.abs(_gauss(f, a, b) - _gauss(f, a, middle) - _gauss(f, middle, b))
            whole = np.abs(_gauss(lambda x: np.abs(f(x)), a, b))
        coarse = ~(gap <= 1e-13 * whole)
        if depth == _HALVINGS or coarse.sum() > _MOST_PANELS:
            coarse[:] = False
        error, size = error + gap[~coarse].sum(), size + whole[~coarse].sum()
        if not coarse.any():
            break
        edges.append(middle[coarse])
        a, b = np.concatenate([a[coarse], middle[coarse]]), np.concatenate([middle[coarse], b[coarse]])
    if not error <= TOLERANCE / 10 * size:
        raise StepFailed(
            f"the integral in {of} did not converge between r = 1 and r = {np.exp(end):.4g} (estimated error "
            f"{error:.2g}), so the steps that use it cannot be checked on this pair: that is a limit of the "
            "quadrature and says nothing about the formula"
        )
    return np.concatenate(edges)


# ---------------------------------------------------------------------------------------------- the derivation


def _combination(weights: dict[int, float], *, gradient: bool = False) -> str:
    out, nabla = "", r"\nabla" if gradient else ""
    for i, w in weights.items():
        size = "" if abs(w) == 1 else rf"{_coefficient(abs(w))}\,"
        sign = ("-" if w < 0 else "") if not out else (" - " if w < 0 else " + ")
        out += f"{sign}{size}{nabla}{KNOWN[i].latex}"
    return out or "0"


def _coefficient(w: float) -> str:
    fraction = Fraction(w).limit_denominator(1000)
    if abs(float(fraction) - w) > 1e-12:
        return f"{w:.6g}"
    return (
        str(fraction.numerator)
        if fraction.denominator == 1
        else rf"\tfrac{{{fraction.numerator}}}{{{fraction.denominator}}}"
    )


def _terms(weights: dict[int, float]) -> Terms:
    def terms(p: np.ndarray, q: np.ndarray) -> np.ndarray:
        return sum((w * KNOWN[i].terms(p, q) for i, w in weights.items()), np.zeros_like(p * q))

    return terms


def _engine(phi: Phi, placement: str) -> Callable[[Model], Float[np.ndarray, " d"]]:
    return lambda m: m.engine(Configuration(phi.estimator, placement))


def _values(phi: Phi, m: Model) -> Float[np.ndarray, "M T"]:
    return np.where(m.mask, phi.value(np.where(m.mask, m.r, 1.0)), 0.0)


def _mean_divergence(m: Model, terms: Terms) -> np.ndarray:
    rows = terms(m.log_policy, m.log_reference)
    visits = visitation(m.pair, [m.length])[0]
    m.note(visits @ np.abs(rows).sum(axis=1))
    return visits @ rows.sum(axis=1)


def _through_prefixes(phi: Phi, m: Model) -> Float[np.ndarray, " d"]:
    rows = m.at_prefix(_ratio_terms(phi.value)(m.log_policy, m.log_reference).sum(axis=1))
    return m.mean(np.einsum("mt,mtd->md", rows, np.cumsum(m.scores, axis=1) - m.scores))


_POINTS = np.array([0.25, 0.5, 2.0, 4.0])
_D = r"\mathrm{D}"


def _latex(expression: Any) -> str:
    import sympy

    return str(sympy.latex(expression, ln_notation=False, fold_short_frac=False))


def _value_steps(phi: Phi) -> list[Step | Comparison]:
    d_phi = rf"\E{{\sum_t {_D}_\varphi(y_{{<t}})}}"
    steps: list[Step | Comparison] = [
        Step(
            r"\E{\sum_t \varphi(r_t)}",
            d_phi,
            r"The mean over the next token is the $f$-divergence $\mathrm{D}_f = \sum_v \pi(v)\,f(q(v)/\pi(v))$ with "
            r"$f = \varphi$.",
            (
                lambda m: m.mean(_values(phi, m).sum(axis=1)),
                lambda m: _mean_divergence(m, _ratio_terms(phi.value)),
            ),
            part="value",
            where=rf"\varphi(r) = {_latex(phi.formula)}",
        )
    ]
    weights = phi.recognised("phi")
    if weights is not None:
        constant = float(phi.value(np.ones(1))[0])
        same = _combination(weights) if weights or not constant else ""
        offset = f"{' + ' if same and constant > 0 else ' '}{constant:.6g}" if constant else ""
        steps.append(
            Step(
                d_phi,
                rf"\E{{\sum_t \left({same}{offset}\right)}}",
                r"It has the second derivative of this combination, and $c\,(r - 1)$ has mean zero"
                + ("; the constant is what it gives where the policies agree." if constant else "."),
                (
                    lambda m: m.mean(_values(phi, m).sum(axis=1)),
                    lambda m: _mean_divergence(m, _terms(weights)) + constant * m.exact("mean_length"),
                ),
                part="value",
            )
        )
    if not _unbiased(phi):
        steps.append(
            Comparison(
                r"\E{\sum_t \varphi(r_t)}",
                r"\KL",
                "So as an estimate of the KL its value is biased.",
                (lambda m: m.mean(_values(phi, m).sum(axis=1)), lambda m: m.exact("kl")),
                part="value",
            )
        )
    return steps


def _unbiased(phi: Phi) -> bool:
    return phi.recognised("phi") == {0: 1.0} and abs(float(phi.value(np.ones(1))[0])) < 1e-12


def _closed_step(phi: Phi, which: int) -> list[Step]:
    symbol_of, quadrature = (("h", phi.h), (r"\psi", phi.psi))[which]
    if phi.closed is None:
        return []
    closed = _numeric(phi.closed[which])
    return [
        Step(
            rf"{symbol_of}(r) \text{{ by quadrature}}",
            _latex(phi.closed[which]),
            "The integral closes." if which == 0 else r"$h + \psi = \varphi$ up to terms $c_1 + c_2\,r$, fixed at 1.",
            (lambda m: quadrature(_POINTS), lambda m: closed(_POINTS)),
            part=("loss", "reward")[which],
            where=r"r = 1/4,\ 1/2,\ 2,\ 4",
        )
    ]


def _field_step(
    phi: Phi, which: str, part: str, left: str, evaluate: Callable[[Model], Any]
) -> list[Step | Comparison]:
    weights = phi.recognised(which)
    if weights is not None:
        return [
            Step(
                left,
                rf"\E{{\sum_t \left({_combination(weights, gradient=True)}\right)}}" if weights else "0",
                "Its second derivative says which divergence that is.",
                (evaluate, lambda m: m.local(_terms(weights))),
                part=part,
            )
        ]
    return []


def _loss_steps(phi: Phi) -> list[Step | Comparison]:
    pathwise = r"\E{\sum_t \nabla\varphi(r_t)}"
    d_h = rf"\E{{\sum_t \nabla {_D}_h(y_{{<t}})}}"
    h = _ratio_terms(phi.h)
    return [
        Step(
            pathwise,
            r"\E{\sum_t -r_t\,\varphi'(r_t)\,\scoret}",
            r"Chain rule with the samples held fixed: $\nabla r_t = -r_t\,\scoret$.",
            (lambda m: m.pathwise(lambda delta: phi.value(np.exp(-delta))), _engine(phi, "loss")),
            part="loss",
            where=rf"-r\,\varphi'(r) = {_latex(phi.slope)}",
        ),
        Step(
            pathwise,
            d_h,
            r"$\nabla\mathrm{D}_f$ has the coefficient $f - r f'$, and this $h$ has $h - r h' = -r\,\varphi'$"
            + ("." if phi.closed else "; the integral has no closed form that was found and is taken numerically."),
            (_engine(phi, "loss"), lambda m: m.local(h)),
            part="loss",
            where=r"h(r) = r\,\int_1^r \varphi'(s)/s\,ds",
        ),
        *_closed_step(phi, 0),
        *_field_step(phi, "h", "loss", d_h, lambda m: m.local(h)),
        Comparison(
            pathwise, r"\nabla\KL", "Next to the true gradient.", (_engine(phi, "loss"), true), part="loss"
        ),
    ]  # fmt: skip


def _reward_steps(phi: Phi) -> list[Step | Comparison]:
    score = r"\E{\left(\sum_t \varphi(r_t)\right)\score}"
    own, d_psi = r"\E{\sum_t \varphi(r_t)\,\scoret}", rf"\E{{\sum_t \nabla {_D}_\psi(y_{{<t}})}}"
    future = rf"\E{{\sum_t {_D}_\varphi(y_{{<t}})\,\nabla\log\pi(y_{{<t}})}}"
    psi = _ratio_terms(phi.psi)
    return [
        Step(
            score,
            rf"{own} + {future}",
            r"A token's own value with its own score, and later values, whose means are $\mathrm{D}_\varphi$, with the "
            "scores of their prefix; earlier ones have mean zero.",
            (
                _engine(phi, "reward"),
                lambda m: m.mean(m.weigh(_values(phi, m))) + _through_prefixes(phi, m),
            ),
            part="reward",
        ),
        Step(
            own,
            d_psi,
            r"The coefficient $\varphi$ is that of $\psi$: $\psi - r\,\psi' = \varphi$ up to a constant.",
            (lambda m: m.mean(m.weigh(_values(phi, m))), lambda m: m.local(psi)),
            part="reward",
            where=r"\psi(r) = -r\,\int_1^r \varphi(s)/s^2\,ds",
        ),
        *_closed_step(phi, 1),
        *_field_step(phi, "psi", "reward", d_psi, lambda m: m.local(psi)),
        Comparison(score, r"\nabla\KL", "Next to the true gradient.", (_engine(phi, "reward"), true), part="reward"),
    ]


def _both_steps(phi: Phi) -> list[Step | Comparison]:
    total = r"\E{\left(\sum_t \varphi(r_t)\right)\score} + \E{\sum_t \nabla\varphi(r_t)}"
    mean = r"\nabla\,\E{\sum_t \varphi(r_t)}"
    steps: list[Step | Comparison] = [
        Step(
            total,
            mean,
            "Product rule: both placements descend the expectation of the value itself.",
            (_engine(phi, "both"), lambda m: m.expected(lambda delta: phi.value(np.exp(-delta)))),
            part="both",
        )
    ]
    if _unbiased(phi):
        reason = "Which is the KL: unbiased."
        return [*steps, Step(mean, r"\nabla\KL", reason, (_engine(phi, "both"), true), part="both")]
    reason = "Which is not the KL."
    return [*steps, Comparison(mean, r"\nabla\KL", reason, (_engine(phi, "both"), true), part="both")]


def _named(phi: Phi, which: str, f: str) -> str:
    weights = phi.recognised(which)
    if weights is None:
        return rf"$\nabla\mathrm{{D}}_{f}$"
    return f"${_combination(weights, gradient=True)}$" if weights else "nothing"


def phi_derivation(text: str) -> Derivation:
    """The derivation of the estimator phi(r) given as a formula.

    Raises:
        ValueError: for a formula outside the grammar, naming the piece, or one that is not real and finite.
    """
    phi = Phi(text)
    in_reward = _named(phi, "psi", r"\psi")
    both = (
        r"$\nabla\KL$, the true gradient"
        if _unbiased(phi)
        else "the gradient of its own mean, and that mean is not the KL"
    )
    return Derivation(
        name="phi",
        title=f"phi(r) = {text}: what it estimates, and what it optimises where",
        source="the map from an estimator to the two divergences that it optimises; klgrad",
        steps=(*_value_steps(phi), *_loss_steps(phi), *_reward_steps(phi), *_both_steps(phi)),
        conclusion=f"Token by token the loss gives {_named(phi, 'h', 'h')} and the reward {in_reward} (over a "
        f"sequence, "
        f"also its own mean through the prefixes). Both placements together give {both}.",
        notation=(
            (r"\varphi(r)", "the estimator's value for one token"),
            (r"\mathrm{D}_f(y_{<t})", r"$\sum_v \pi(v|y_{<t})\,f(q(v|y_{<t})/\pi(v|y_{<t}))$, for a function $f$"),
        ),
    )
