"""The six checks of the handbook page 'KL regularization in LLM RL', with its numbers, and where they stop holding."""

from __future__ import annotations

from functools import cache

import numpy as np

from klgrad.analysis.derivations.divergences import chi_squared, forward_kl, reverse_kl
from klgrad.analysis.derivations.model import Model
from klgrad.analysis.derivations.steps import Comparison, Derivation, Step
from klgrad.analysis.derivations.terms import k2, true, zero
from klgrad.synth.automata import markov
from klgrad.synth.estimators import estimator
from klgrad.synth.policies import PolicyPair, log_of_probs, tabular


def one_token(p: np.ndarray, q: np.ndarray) -> PolicyPair:
    """A pair of single next-token distributions, with softmax logits."""
    automaton = markov(len(p), 0)
    return PolicyPair(automaton, tabular(automaton, np.log(p[None])), log_of_probs(q[None]), name="one token")


@cache
def _drifted(eps: float) -> Model:
    """Eight tokens: the policy gives the first one mass 8 eps, the reference 32, against 1 for each other."""
    return Model(one_token(*(np.array([x, *[1.0] * 7]) / (x + 7) for x in (8 * eps, 32.0))), 1)


@cache
def _opposed() -> Model:
    return Model(one_token(np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])), 1)


def _variance(m: Model, values: np.ndarray) -> float:
    off = np.abs(values[:, 0] - m.mean(values[:, 0]))
    m.mean(2 * off * (np.abs(values[:, 0]) + off))  # only to note it
    return float(m.mean(off**2))


def _drift_row(eps: float) -> np.ndarray:
    m = _drifted(eps)
    return np.array([m.mean(m.delta[:, 0]), _variance(m, m.delta), _variance(m, m.k3)])


def _excess(m: Model) -> np.ndarray:
    """chi^2 - 2 J."""
    p, delta = m.log_policy, m.tables.delta.value
    chi2, jeffreys = chi_squared(p, delta).sum(), (reverse_kl(p, delta) + forward_kl(p, delta)).sum()
    m.note(chi2 + 2 * jeffreys)
    return chi2 - 2 * jeffreys


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def _overflows(log_ratio: float) -> np.ndarray:
    """Whether k1 and k3 are infinite in single precision (1: yes)."""
    delta = np.array([-log_ratio], np.float32)
    with np.errstate(over="ignore"):
        return np.array([float(np.isinf(estimator(name).value(delta))[0]) for name in ("k1", "k3")])


def _drift_step(eps: float, row: tuple[float, ...], text: str) -> Step:
    return Step(
        r"(\mathrm{KL},\ \mathrm{Var}\,k_1,\ \mathrm{Var}\,k_3)",
        rf"({text})",
        r"Check 4: Far policies: eight tokens, the policy's mass of one falling as $\varepsilon$ while the reference "
        r"keeps it.",
        (lambda m: _drift_row(eps), lambda m: np.array(row)),
        where=rf"\varepsilon = {eps:.5f}".rstrip("0"),
        printed=(5e-5, 5e-5, 0.05),
    )


handbook = Derivation(
    name="handbook",
    title="The handbook's six checks with its numbers, and where its advice stops being true",
    source="handbook page 'KL regularization in LLM RL'; corrections: klgrad",
    steps=(
        Step(
            r"\E{k_1}",
            "0.021007",
            "Check 1: Both estimators have the KL as their mean; first as printed.",
            (lambda m: m.mean(m.delta[:, 0]), lambda m: np.array(0.021007)),
            printed=5e-7,
        ),
        Step(
            r"\E{k_3}",
            r"\KL",
            "Check 1: then to rounding, by the exact engine.",
            (lambda m: m.mean(m.k3[:, 0]), lambda m: m.exact("kl")),
        ),
        Comparison(
            r"\min_v k_1(v)",
            r"\min_v k_3(v)",
            r"Check 2: k3 is never negative, because $\log r \le r - 1$; k1 is.",
            (lambda m: m.delta.min(), lambda m: m.k3.min()),
        ),
        Step(
            r"(\mathrm{Var}\,k_1,\ \mathrm{Var}\,k_3)",
            "(0.040058, 0.000279)",
            "Check 3: Close policies: k3 has 143 times less variance.",
            (lambda m: np.array([_variance(m, m.delta), _variance(m, m.k3)]), lambda m: np.array([0.040058, 0.000279])),
            printed=(5e-7, 5e-7),
        ),
        Step(
            r"\mathrm{Var}\,k_3 - \mathrm{Var}\,k_1",
            r"\chi^2(q\|\pi) - 2\,J",
            r"Why: $\chi^2$ less twice Jeffreys decides, and for close policies $\chi^2$ is about $J$ (see the "
            r"derivation variance).",
            (lambda m: _variance(m, m.k3) - _variance(m, m.delta), _excess),
        ),
        _drift_step(1e-1, (1.2311, 1.2525, 1.6), "1.2311, 1.2525, 1.6"),
        _drift_step(1e-3, (1.7070, 0.0784, 575.3), "1.7070, 0.0784, 575.3"),
        _drift_step(1e-5, (1.7175, 0.0019, 58887.2), "1.7175, 0.0019, 58887.2"),
        Step(
            r"\mathrm{Var}\,k_3 - \mathrm{Var}\,k_1",
            r"\chi^2(q\|\pi) - 2\,J",
            r"The same rule: there $\chi^2 = 588.8$ and $2J = 13.6$.",
            (
                lambda m: m.on(
                    _drifted(1e-3), lambda far: np.array(_variance(far, far.k3) - _variance(far, far.delta))
                ),
                lambda m: m.on(_drifted(1e-3), _excess),
            ),
            where=r"\varepsilon = 0.001",
        ),
        Step(
            r"\E{\nabla k_1}",
            "0",
            "Check 5: k1 in the loss has no gradient: in expectation, with a constant divisor; with $1/|y|$ it has one "
            "(see the derivation aggregation).",
            (lambda m: m.mean(m.score, m.score_size), zero),
            zero=True,
        ),
        Step(
            r"\E{\nabla k_3}",
            "(0.0452, -0.0432, 0.0507, -0.0527)",
            "Check 5: k3 in the loss, as printed.",
            (lambda m: m.engine("k3-in-loss"), lambda m: np.array([0.0452, -0.0432, 0.0507, -0.0527])),
            printed=5e-5,
        ),
        Step(
            r"\cos\left(\E{\nabla k_3},\ \nabla\mathrm{KL}\right)",
            "0.9986",
            "Check 5: and its angle to the true gradient.",
            (lambda m: np.array(_cosine(m.engine("k3-in-loss"), true(m))), lambda m: np.array(0.9986)),
            printed=5e-5,
        ),
        Step(
            r"\E{\nabla k_3}",
            r"\nabla\mathrm{KL}(q\|\pi)",
            "That angle is an artefact of close policies: what k3 in the loss descends is the forward KL.",
            (lambda m: m.engine("k3-in-loss"), lambda m: m.local(forward_kl)),
        ),
        Comparison(
            r"\E{\nabla k_3} ",
            r"\nabla\KL",
            "Farther apart, the second component has the other sign.",
            (lambda m: _opposed().engine("k3-in-loss"), lambda m: true(_opposed())),
            where=r"\pi = (.4,\ .3,\ .2,\ .1),\ q = (.1,\ .2,\ .3,\ .4)",
        ),
        Step(
            r"\E{\nabla k_2}",
            r"\nabla\KL",
            "And k3 is not the only one that works in a loss: for one token k2 gives the true gradient "
            "(for more, the token-level one).",
            (lambda m: m.pathwise(k2), true),
        ),
        Step(
            r"(k_1, k_3) \text{ overflow in float32}",
            "(0, 1)",
            r"Check 6: $\exp(100)$ is beyond single precision, whose largest number is $\exp(88.7)$; the log-ratio "
            r"itself is not.",
            (lambda m: _overflows(100.0), lambda m: np.array([0.0, 1.0])),
            where=r"\log r = 100;\ 0 \text{ no},\ 1 \text{ yes}",
        ),
    ),
    conclusion="All its numbers hold. Its advice to use only k3 in a loss does not follow from them: k2 works "
    "there too "
    "and targets the reverse KL, while k3 targets the forward one.",
    notation=(
        (r"\chi^2(q\|\pi)", r"$\sum_v q(v)^2/\pi(v) - 1$"),
        ("J", r"Jeffreys: $\KL + \mathrm{KL}(q\|\pi)$"),
    ),
    preset="handbook",
    lengths=(1,),
    fixed=True,
)
