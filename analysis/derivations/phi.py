"""The derivation of an estimator that nobody has written down yet: from its formula phi(r) to what it optimises.

With D_f = sum_v pi(v) f(q(v) / pi(v)), the f-divergence of q from pi, an estimator phi(r) per token has the mean
D_phi; in the loss it descends D_h with h(r) = r int_1^r phi'(s)/s ds, and in the reward (each token's own) D_psi with
psi(r) = -r int_1^r phi(s)/s^2 ds. Only second derivatives of f matter, and h'' = phi'' + phi'/r, psi'' = -phi'/r: so
known divergences are recognised without an integral, and h + psi = phi up to c_1 + c_2 r.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.analysis.derivations.divergences import Terms
from klgrad.analysis.derivations.evaluation import Formula
from klgrad.analysis.derivations.formulas import KNOWN, Phi, ratio_terms
from klgrad.analysis.derivations.model import Model
from klgrad.analysis.derivations.steps import Comparison, Derivation, Step, StepFailed
from klgrad.analysis.derivations.terms import by_prefix, true
from klgrad.synth.configurations import Configuration
from klgrad.synth.exact import visitation

if TYPE_CHECKING:
    from jaxtyping import Float


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
    def terms(p: np.ndarray, delta: np.ndarray) -> np.ndarray:
        return sum((w * KNOWN[i].terms(p, delta) for i, w in weights.items()), np.zeros_like(p * delta))

    return terms


def _engine(phi: Phi, placement: str) -> Callable[[Model], Float[np.ndarray, " d"]]:
    def side(m: Model) -> Float[np.ndarray, " d"]:
        _note(phi, m)
        return m.engine(Configuration(phi.estimator, placement))

    return side


def _note(phi: Phi, m: Model) -> None:
    """Note what evaluating phi and its slope loses.

    Raises:
        StepFailed: where either is past the largest double.
    """
    x = -m.tables.delta.value
    for name, function in (("", phi.value), ("the slope of ", phi.along)):
        found = m.taken(function(x))
        if not np.isfinite(found).all():
            bad = np.argwhere(~np.isfinite(found))[0]
            raise StepFailed(
                f"{name}{phi.text} is {found[*bad]} in double precision at r = {m.r[*bad]:.4g}, which this pair meets, "
                "so no step can be checked there: take a pair closer to its reference"
            )
    value, slope = (m.taken(f.error(x)) for f in (phi.value, phi.along))
    m.note(0.0, m.p @ value.sum(axis=1))
    m.note(0.0, m.p @ (value.sum(axis=1)[:, None] * m.score_size))
    m.note(0.0, m.p @ np.einsum("mt,mtd->md", slope, m.score_terms.size))


def _values(phi: Phi, m: Model) -> Float[np.ndarray, "M T"]:
    """``[M, T]`` phi at every token."""
    _note(phi, m)
    return m.taken(phi.value(-m.tables.delta.value))


def _pathwise(phi: Phi, m: Model) -> Float[np.ndarray, " d"]:
    _note(phi, m)
    return m.pathwise(lambda delta: phi.value(-delta))


def _mean_divergence(m: Model, terms: Terms) -> np.ndarray:
    visits = visitation(m.pair, [m.length])[0]
    rows = np.where(visits[:, None] > 0, terms(m.log_policy, m.tables.delta.value), 0.0)
    size = visits @ np.abs(rows).sum(axis=1)
    m.note(size, 3 * m.length * m.tables.lack_mass * size)
    return visits @ rows.sum(axis=1)


def _through_prefixes(phi: Phi, m: Model) -> Float[np.ndarray, " d"]:
    rows = ratio_terms(phi.value)(m.log_policy, m.tables.delta.value)
    _note(phi, m)
    by_prefix(m, m.at_prefix(np.abs(rows).sum(axis=1)))  # only to note it
    return by_prefix(m, m.at_prefix(rows.sum(axis=1)))


def _divergence(phi: Phi, which: int) -> Callable[[Model], Float[np.ndarray, " d"]]:
    """The token-level gradient of D_h (0) or D_psi (1), by quadrature."""
    function = (phi.h, phi.psi)[which]

    def side(m: Model) -> Float[np.ndarray, " d"]:
        visits, t = m.visits(m.p), m.tables
        off = np.exp(t.log_policy) * phi.error(which, -t.delta.value)
        m.note(0.0, np.tensordot(visits, np.einsum("sv,svd->sd", off, np.abs(t.scores)), axes=1))
        _note(phi, m)
        return m.local(ratio_terms(function))

    return side


_POINTS = np.log(np.array([0.25, 0.5, 2.0, 4.0]))
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
                lambda m: m.mean(m.along(_values(phi, m))),
                lambda m: _mean_divergence(m, ratio_terms(phi.value)),
            ),
            part="value",
            where=rf"\varphi(r) = {_latex(phi.formula)}",
        )
    ]
    weights = phi.recognised("phi")
    if weights is not None:
        constant = float(phi.value(np.zeros(1))[0])
        same = _combination(weights) if weights or not constant else ""
        offset = f"{' + ' if same and constant > 0 else ' '}{constant:.6g}" if constant else ""
        steps.append(
            Step(
                d_phi,
                rf"\E{{\sum_t \left({same}{offset}\right)}}",
                r"It has the second derivative of this combination, and $c\,(r - 1)$ has mean zero"
                + ("; the constant is what it gives where the policies agree." if constant else "."),
                (
                    lambda m: m.mean(m.along(_values(phi, m))),
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
                (lambda m: m.mean(m.along(_values(phi, m))), lambda m: m.exact("kl")),
                part="value",
            )
        )
    return steps


def _unbiased(phi: Phi) -> bool:
    return phi.recognised("phi") == {0: 1.0} and abs(float(phi.value(np.zeros(1))[0])) < 1e-12


def _closed_step(phi: Phi, which: int) -> list[Step]:
    symbol_of, quadrature = (("h", phi.h), (r"\psi", phi.psi))[which]
    if phi.closed is None:
        return []
    closed = Formula(phi.closed[which])

    def by_quadrature(m: Model) -> np.ndarray:
        m.note(0.0, closed.error(_POINTS) + phi.error(which, _POINTS))
        return quadrature(_POINTS)

    return [
        Step(
            rf"{symbol_of}(r) \text{{ by quadrature}}",
            _latex(phi.closed[which]),
            "The integral closes." if which == 0 else r"$h + \psi = \varphi$ up to terms $c_1 + c_2\,r$, fixed at 1.",
            (by_quadrature, lambda m: closed(_POINTS)),
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
                zero=not weights,
            )
        ]
    return []


def _loss_steps(phi: Phi) -> list[Step | Comparison]:
    pathwise = r"\E{\sum_t \nabla\varphi(r_t)}"
    d_h = rf"\E{{\sum_t \nabla {_D}_h(y_{{<t}})}}"
    h, nothing = _divergence(phi, 0), phi.recognised("h") == {}
    return [
        Step(
            pathwise,
            r"\E{\sum_t -r_t\,\varphi'(r_t)\,\scoret}",
            r"Chain rule with the samples held fixed: $\nabla r_t = -r_t\,\scoret$.",
            (lambda m: _pathwise(phi, m), _engine(phi, "loss")),
            part="loss",
            zero=nothing,
            where=rf"-r\,\varphi'(r) = {_latex(phi.slope)}",
        ),
        Step(
            pathwise,
            d_h,
            r"$\nabla\mathrm{D}_f$ has the coefficient $f - r f'$, and this $h$ has $h - r h' = -r\,\varphi'$"
            + ("." if phi.closed else "; the integral has no closed form that was found and is taken numerically."),
            (_engine(phi, "loss"), h),
            part="loss",
            zero=nothing,
            where=r"h(r) = r\,\int_1^r \varphi'(s)/s\,ds",
        ),
        *_closed_step(phi, 0),
        *_field_step(phi, "h", "loss", d_h, h),
        Comparison(
            pathwise, r"\nabla\KL", "Next to the true gradient.", (_engine(phi, "loss"), true), part="loss"
        ),
    ]  # fmt: skip


def _reward_steps(phi: Phi) -> list[Step | Comparison]:
    score = r"\E{\left(\sum_t \varphi(r_t)\right)\score}"
    own, d_psi = r"\E{\sum_t \varphi(r_t)\,\scoret}", rf"\E{{\sum_t \nabla {_D}_\psi(y_{{<t}})}}"
    future = rf"\E{{\sum_t {_D}_\varphi(y_{{<t}})\,\nabla\log\pi(y_{{<t}})}}"
    psi, nothing = _divergence(phi, 1), phi.recognised("psi") == {}
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
            (lambda m: m.mean(m.weigh(_values(phi, m))), psi),
            part="reward",
            zero=nothing,
            where=r"\psi(r) = -r\,\int_1^r \varphi(s)/s^2\,ds",
        ),
        *_closed_step(phi, 1),
        *_field_step(phi, "psi", "reward", d_psi, psi),
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
            (_engine(phi, "both"), lambda m: m.expected(lambda delta: phi.value(-delta))),
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
