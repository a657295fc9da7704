"""k3 in the reward, and the variance of estimators."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from klgrad.analysis.derivations.divergences import chi_squared, forward_kl, reverse_kl
from klgrad.analysis.derivations.model import Model
from klgrad.analysis.derivations.steps import Comparison, Derivation, Step
from klgrad.analysis.derivations.terms import FUTURE, TOKEN_FORWARD, true
from klgrad.synth.automata import markov
from klgrad.synth.exact import visitation
from klgrad.synth.policies import PolicyPair, log_softmax, tabular

if TYPE_CHECKING:
    from jaxtyping import Float

# ------------------------------------------------------------------------------------------- k3 in the reward

_X = 0.4  # how far the two-action policy stands from the uniform reference: p = (1 + x) / 2


@cache
def _two_actions() -> Model:
    automaton = markov(2, 0)
    logits = np.log([[(1 + _X) / 2, (1 - _X) / 2]])
    pair = PolicyPair(automaton, tabular(automaton, logits), log_softmax(np.zeros((1, 2))), name="two actions")
    return Model(pair, 1)


def _implied(x: float) -> float:
    p, q = np.array([(1 + x) / 2, (1 - x) / 2]), np.array([0.5, 0.5])
    return float(p @ np.log(p / q) - q @ np.log(q / p))


def _noted(m: Model, value: float) -> float:
    """A number made of a few terms of order one."""
    m.note(1.0)
    return value


def _slope(two: Model) -> np.ndarray:
    """The series' slope in x times the slope of x."""
    return _noted(two, _series(_X, slope=True)) * two.derivative(lambda lp: 2 * np.exp(lp[0, 0]) - 1)


def _series(x: float, *, slope: bool) -> float:
    k = np.arange(2, 200)
    weight = -(k - 1) / (k * (2 * k - 1))
    return float((2 * k * weight * x ** (2 * k - 1) if slope else weight * x ** (2 * k)).sum())


k3_in_reward = Derivation(
    name="k3-in-reward",
    title="Why k3 in the reward repels from the reference",
    source="klgrad; one-step form: xihuai18's post of 1 December 2025",
    steps=(
        Step(
            r"\E{\left(\sum_t k_{3,t}\right)\score}",
            r"\nabla\KL - " + TOKEN_FORWARD,
            "The true gradient less what k3 gives in the loss (see the derivation k3).",
            (lambda m: m.engine("k3-in-reward"), lambda m: true(m) - m.local(forward_kl)),
        ),
        Step(
            r"\E{\left(\sum_t k_{3,t}\right)\score}",
            FUTURE + r" + \E{\sum_t \nabla\KLt - \nabla\fKLt}",
            "Its credit for later tokens is right; of each token itself it takes the difference of two KLs.",
            (
                lambda m: m.engine("k3-in-reward"),
                lambda m: m.exact("future_gradient") + m.local(reverse_kl) - m.local(forward_kl),
            ),
        ),
        Comparison(
            r"\E{\left(\sum_t k_{3,t}\right)\score}",
            r"\nabla\KL",
            "Near the reference both KLs have the same quadratic form, half the Fisher information, so the pull "
            "cancels "
            "to first order; what is left often points the other way (a negative cosine).",
            (lambda m: m.engine("k3-in-reward"), true),
        ),
        Step(
            r"\KL - \mathrm{KL}(q\|\pi)",
            r"-\sum_{k \ge 2} \frac{k - 1}{k\,(2k - 1)}\,x^{2k} = -\frac{x^4}{6} - \cdots",
            f"For one token, two actions and a uniform reference the difference is a series of negative terms (x "
            f"= {_X}).",
            (lambda m: _noted(m, _implied(_X)), lambda m: _series(_X, slope=False)),
            where=r"\pi = \tfrac{1}{2}\,(1 + x,\ 1 - x),\ q = \tfrac{1}{2}\,(1,\ 1)",
        ),
        Step(
            r"\E{k_3\,\nabla\log\pi}",
            r"\nabla\left(-\sum_{k \ge 2} \frac{k - 1}{k\,(2k - 1)}\,x^{2k}\right)",
            "And k3 in the reward descends it: the slope in x is negative, so descent moves x away from the reference.",
            (
                lambda m: m.on(_two_actions(), lambda two: two.engine("k3-in-reward")),
                lambda m: m.on(_two_actions(), _slope),
            ),
        ),
    ),
    conclusion="k3 in the reward is no noisy KL penalty: near the reference it exerts no pull to first order and "
    "pushes "
    "outwards beyond it, without bound as the policy collapses onto one action. That needs no argument about variance.",
)

# --------------------------------------------------------------------------------------------------- variance


def _per_token_sum(m: Model, row: np.ndarray) -> float:
    """Expected sum over tokens of a quantity of the contexts, by the recurrence of visits."""
    visits = visitation(m.pair, [m.length])[0]
    terms = visits * np.where(visits > 0, row, 0.0)
    m.note(np.abs(terms).sum(), 3 * m.length * m.tables.lack_mass * np.abs(terms).sum())
    return float(terms.sum())


def _chi2_sum(m: Model) -> float:
    return _per_token_sum(m, chi_squared(m.log_policy, m.tables.delta.value).sum(axis=1))


def _jeffreys_sum(m: Model) -> float:
    both = reverse_kl(m.log_policy, m.tables.delta.value) + forward_kl(m.log_policy, m.tables.delta.value)
    return _per_token_sum(m, both.sum(axis=1))


def _token_variance(m: Model, values: Float[np.ndarray, "M T"], size: np.ndarray | None = None) -> np.ndarray:
    """Expected sum of the variances of each token's value given its prefix; all values have mean KL_t.

    Args:
        size: ``[M, T]`` the absolute terms that the values were made of, if they are differences.
    """
    mean = m.at_prefix(reverse_kl(m.log_policy, m.tables.delta.value).sum(axis=1))
    off = np.abs(values - mean)
    m.mean((2 * off * (np.abs(values) + mean if size is None else size)).sum(axis=1))  # only to note it
    return m.mean((off**2).sum(axis=1))


def _alpha_variance(m: Model, a: float) -> np.ndarray:
    return _token_variance(m, m.delta + a * m.excess, np.abs(m.delta) + a * np.abs(m.excess))


def _variance_difference(m: Model) -> np.ndarray:
    """E[sum_t 2 delta_t (r_t - 1) + (r_t - 1)^2]."""
    return m.mean(m.along(2 * m.delta * m.excess)) + m.mean(m.along(m.excess**2))


def _best(m: Model) -> float:
    chi2 = _chi2_sum(m)
    return _jeffreys_sum(m) / chi2 if chi2 else 0.0


def _sequence_chi2(m: Model) -> float:
    """E[prod r_t^2] by a product of matrices over contexts, one per token."""
    automaton = m.pair.automaton
    flow = np.zeros((automaton.contexts, automaton.contexts))
    weight = np.where(automaton.alive[:, None], np.exp(2 * m.log_reference - m.log_policy), 0.0)
    rows = np.broadcast_to(np.arange(automaton.contexts)[:, None], automaton.next_context.shape)
    np.add.at(flow, (rows, automaton.next_context), weight)
    if automaton.end >= 0:
        flow[automaton.end, automaton.end] = 1.0
    found = float(np.linalg.matrix_power(flow, m.length)[automaton.start].sum())
    m.note(found, 3 * m.length * m.tables.lack_mass * found)
    return found


variance = Derivation(
    name="variance",
    title="When k3 is noisier than k1: chi-squared against twice Jeffreys; and how noise grows with length",
    source="klgrad; Gaussian form in Schulman 2020",
    steps=(
        Step(
            r"\E{\sum_t \mathrm{Var}(k_{3,t}|y_{<t}) - \mathrm{Var}(k_{1,t}|y_{<t})}",
            r"\E{\sum_t 2\,\delta_t\,(r_t - 1) + (r_t - 1)^2}",
            r"Both have the same mean, so variances differ as squares do, and $k_3 = \delta + (r - 1)$.",
            (
                lambda m: _token_variance(m, m.k3) - _token_variance(m, m.delta),
                _variance_difference,
            ),
            part="value",
        ),
        Step(
            r"\E{\sum_t 2\,\delta_t\,(r_t - 1) + (r_t - 1)^2}",
            r"\E{\sum_t \chi^2_t - 2\,J_t}",
            r"$\E{(r - 1)^2} = \chi^2(q\|\pi)$ and $\E{\delta\,(r - 1)} = -\mathrm{KL}(q\|\pi) - \KL = -J$ after "
            r"each prefix: k3 is the noisier exactly where $\chi^2 > 2J$.",
            (
                _variance_difference,
                lambda m: _chi2_sum(m) - 2 * _jeffreys_sum(m),
            ),
            part="value",
        ),
        Step(
            r"\E{\sum_t \mathrm{Var}\left(\delta_t + a\,(r_t - 1)|y_{<t}\right)}",
            r"\E{\sum_t \mathrm{Var}(\delta_t|y_{<t})} - 2a\,J + a^2\chi^2",
            r"The whole family in between is a parabola in $a$, with $J$ and $\chi^2$ summed over tokens ($a = 0.3$).",
            (
                lambda m: _alpha_variance(m, 0.3),
                lambda m: _token_variance(m, m.delta) - 0.6 * _jeffreys_sum(m) + 0.09 * _chi2_sum(m),
            ),
            part="value",
        ),
        Step(
            r"\min_a \E{\sum_t \mathrm{Var}\left(\delta_t + a\,(r_t - 1)|y_{<t}\right)}",
            r"\E{\sum_t \mathrm{Var}(\delta_t|y_{<t})} - \frac{J^2}{\chi^2}",
            r"Its lowest point lies at $J/\chi^2$, near 1 for close policies and near 0 for distant ones.",
            (
                lambda m: _alpha_variance(m, _best(m)),
                lambda m: _token_variance(m, m.delta) - _best(m) * _jeffreys_sum(m),
            ),
            part="value",
            where=r"a^* = J/\chi^2 \text{ at the minimum}",
        ),
        Step(
            r"\Var{\sum_t (r_t - 1)}",
            r"\E{\sum_t \chi^2_t}",
            "Terms with mean zero after every prefix are uncorrelated: summed over tokens, the noise of the control "
            "variate grows linearly in the length.",
            (lambda m: m.mean(m.excess.sum(axis=1) ** 2, np.abs(m.excess).sum(axis=1) ** 2), _chi2_sum),
            part="value",
        ),
        Step(
            r"\Var{\prod_t r_t} + 1",
            r"\sum_y \frac{q(y)^2}{\pi(y)}",
            "The ratio of a whole sequence multiplies instead of adding: its second moment is a product of T matrices "
            r"over contexts, $(1 + \chi^2)^T$ for independent tokens.",
            (lambda m: m.mean(np.where(m.mask, m.r, 1.0).prod(axis=1) ** 2), _sequence_chi2),
            part="value",
        ),
        Comparison(
            r"\trVar{\text{k3 in loss}}",
            r"\trVar{\text{k1 in reward}}",
            "Of gradients: the loss adds uncorrelated terms (linear in $T$ near the reference), the reward "
            "multiplies two "
            "sums ($T^2$ to $T^3$); klgrad growth shows the exponents.",
            (lambda m: m.variance("k3-in-loss"), lambda m: m.variance("k1-in-reward")),
        ),
    ),
    notation=(
        (r"\chi^2_t", r"$\sum_v q(v|y_{<t})^2/\pi(v|y_{<t}) - 1$; without an index, its mean summed over tokens"),
        ("J_t", r"Jeffreys: $\KLt + \fKLt$; likewise"),
    ),
    conclusion="Close policies: k3 has the smaller variance. Distant ones: $\\chi^2$ outgrows $2J$, without "
    "bound where "
    "the policy "
    "all but drops a token that the reference keeps.",
)
