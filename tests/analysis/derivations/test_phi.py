"""The derivation of any estimator from its formula: the grammar, the induced divergences, and both checked."""

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import assert_close, worlds

from klgrad.analysis.derivations import Comparison, StepFailed, check
from klgrad.analysis.derivations import formulas as module
from klgrad.analysis.derivations.formulas import KNOWN, Phi, within
from klgrad.analysis.derivations.grammar import parse, symbol
from klgrad.analysis.derivations.phi import phi_derivation
from klgrad.analysis.derivations.render import text
from klgrad.analysis.derivations.steps import Step
from klgrad.synth.estimators import estimator
from klgrad.synth.presets import preset

r = symbol()

# the registry's sampled estimators that are a formula
FORMULAS = {
    "k1": "-log(r)",
    "k2": "delta^2 / 2",
    "k3": "r - 1 - log(r)",
    "abs": "abs(delta)",
    "alpha(0.3)": "delta + 0.3*(r - 1)",
    "forward-kl": "r*log(r) - (r - 1)",
    "jeffreys": "(r - 1)*log(r)",
    "jensen-shannon": "(r*log(2*r/(1 + r)) + log(2/(1 + r)))/2",
    "chi-squared": "(r - 1)^2",
}


# ------------------------------------------------------------------------------------------------- the grammar


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("r - 1 - log(r)", r - 1 - sympy.log(r)),
        ("r^2 + 1", r**2 + 1),
        ("r**2 + 1", r**2 + 1),
        ("-delta", sympy.log(r)),
        ("0.5*r^(1/2)", sympy.sqrt(r) / 2),
        ("sqrt(r)*exp(-r)", sympy.sqrt(r) * sympy.exp(-r)),
        ("abs(r - 1)", sympy.Abs(r - 1)),
        ("--r", r),
        ("1e-3*r", r / 1000),
    ],
)
def test_what_the_grammar_reads(formula, expected):
    assert sympy.simplify(parse(formula) - expected) == 0


@pytest.mark.parametrize(
    ("formula", "piece"),
    [
        ("x + 1", "'x' in the formula is unknown"),
        ("__import__('os').system('true')", "is no function of the grammar"),
        ("r.real", r"'r\.real' in the formula is not allowed"),
        ("().__class__", "is no|is not allowed"),
        ("r[0]", "not allowed"),
        ("[r for r in (1,)]", "not allowed"),
        ("lambda: r", "not allowed"),
        ("r if r else 1", "not allowed"),
        ("r < 1", "not allowed"),
        ("(r, 1)", "not allowed"),
        ("f'{r}'", "not allowed"),
        ("(y := r)", "not allowed"),
        ("'r'", "is not a real number"),
        ("True", "is not a real number"),
        ("1j", "is not a real number"),
        ("1e400", "larger than a coefficient"),
        ("r^r", "'r' in the formula is no exponent"),
        ("9^9^9", r"'9\^9' in the formula is no exponent"),
        ("2^r", "is no exponent"),
        ("r^21", "'21' in the formula is no exponent between -20 and 20"),
        ("sin(r)", "'sin' in the formula is no function"),
        ("log(r, 2)", "must have exactly one argument"),
        ("log()", "must have exactly one argument"),
        ("log(*r)", "must have exactly one argument"),
        ("r // 2", "operator that is not allowed"),
        ("r % 2", "operator that is not allowed"),
        ("~r", "not allowed"),
        ("r / 0", "divides by zero"),
        ("1 / (r - r)", "divides by zero"),
        ("log(0)", "not a finite real number"),
        ("sqrt(-1)", "not a finite real number"),
        ("log(r", "no formula: '\\(' was never closed"),
        ("r +", "no formula: invalid syntax at its end"),
        ("2 r", "no formula"),
        ("", "no formula: it is empty"),
        ("r # x", "'#' in the formula is not allowed"),
        ("r; r", "';' in the formula is not allowed"),
        ("r*" * 150 + "r", "is 301 characters long: at most 200"),
    ],
)
def test_what_it_refuses(formula, piece):
    with pytest.raises(ValueError, match=piece):
        parse(formula)


@given(st.text(alphabet="r1.+-*/^() logexpsqrtabdelta_'\"[]{}:=,;\\\n#@!", max_size=30))
def test_any_text_is_a_formula_or_one_sentence(formula):
    try:
        found = parse(formula)
    except ValueError:
        return
    assert isinstance(found, sympy.Expr)


@pytest.mark.parametrize(
    ("formula", "where"),
    [
        ("log(r - 1)", "not real and finite at r ="),
        ("exp(exp(r))", "not real and finite at r ="),
        ("1/(r - 2)", r"not finite near r = 1\.9"),
    ],
)
def test_a_formula_must_hold_for_every_ratio(formula, where):
    with pytest.raises(ValueError, match=where):
        Phi(formula)


# -------------------------------------------------------------------------------------------- what it optimises


@pytest.mark.parametrize("name", FORMULAS)
def test_the_formula_is_the_estimator_of_the_registry(name):
    ours, theirs = Phi(FORMULAS[name]).estimator, estimator(name)
    delta = np.array([-3.0, -0.7, -0.1, 0.2, 1.0, 4.0])
    np.testing.assert_allclose(ours.value(delta), theirs.value(delta), rtol=1e-11)
    np.testing.assert_allclose(ours.slope(delta), theirs.slope(delta), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "value", "loss", "reward"),
    [
        # theory 2.2: what each estimates and optimises, as combinations of KL(pi || q) [0], KL(q || pi) [1], chi2 [2]
        ("k1", {0: 1}, {}, {0: 1}),
        ("k2", None, {0: 1}, None),
        ("k3", {0: 1}, {1: 1}, {0: 1, 1: -1}),
        ("alpha(0.3)", {0: 1}, {1: 0.3}, {0: 1, 1: -0.3}),
        ("jeffreys", {0: 1, 1: 1}, None, None),
        ("forward-kl", {1: 1}, None, None),
        ("chi-squared", {2: 1}, {1: -2, 2: 2}, {1: 2, 2: -1}),
        ("jensen-shannon", {5: 1}, None, None),
        ("abs", None, None, None),
    ],
)
def test_known_divergences_are_recognised(name, value, loss, reward):
    phi = Phi(FORMULAS[name])
    assert [phi.recognised(which) for which in ("phi", "h", "psi")] == [value, loss, reward]


@pytest.mark.parametrize(
    ("name", "h"),
    [
        ("k1", 1 - r),
        ("k2", r - 1 - sympy.log(r)),
        ("k3", r * sympy.log(r) + 1 - r),
        ("jeffreys", r * (sympy.log(r) ** 2 / 2 + sympy.log(r)) + 1 - r),
        ("forward-kl", r * sympy.log(r) ** 2 / 2),
    ],
)
def test_closed_forms_of_theory_2_2(name, h):
    found = Phi(FORMULAS[name]).closed
    assert found is not None
    assert sympy.simplify(found[0] - h) == 0
    assert sympy.simplify(sum(found) - parse(FORMULAS[name])) == 0  # h + psi = phi, since phi(1) = 0


@pytest.mark.parametrize("a", [-3, -1, sympy.Rational(-1, 2), 0, 2])
@pytest.mark.parametrize("n", [0, 1, 3])
def test_powers_times_logarithms_are_integrated_at_once(a, n):
    term = 3 * r**a * sympy.log(r) ** n
    found = module._primitive(sympy.expand(term + 1), r)
    assert sympy.simplify(sympy.diff(found, r) - term - 1) == 0
    assert module._primitive(term + sympy.exp(r), r) is None
    assert module._primitive(sympy.log(1 + r), r) is None


def test_usual_formulas_need_no_search(monkeypatch):
    monkeypatch.setattr(module, "within", None)  # so it does not depend on how busy the machine is
    for name in ("k1", "k2", "k3", "alpha(0.3)", "jeffreys", "forward-kl", "chi-squared"):
        assert Phi(FORMULAS[name]).closed is not None


def test_other_integrals_are_looked_for(monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 60.0)
    h, _ = Phi("log(1 + r)").closed
    points = np.array([0.2, 1.0, 3.0])
    np.testing.assert_allclose(sympy.lambdify(r, h)(points), Phi("log(1 + r)").h(np.log(points)), atol=1e-12)


def test_what_does_not_close_is_taken_numerically(monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.5)
    told = " ".join(text(check(phi_derivation(FORMULAS["jensen-shannon"]), preset("near"), [2])).split())
    assert "no closed form that was found" in told
    assert "by quadrature" not in told


@pytest.mark.parametrize("name", ["k2", "k3", "jeffreys", "forward-kl", "chi-squared"])
def test_quadrature_agrees_with_the_closed_forms(name):
    phi, points = Phi(FORMULAS[name]), np.exp(np.linspace(-5, 5, 11))
    for quadrature, closed in zip((phi.h, phi.psi), phi.closed, strict=True):
        np.testing.assert_allclose(
            quadrature(np.log(points)), sympy.lambdify(r, closed)(points), rtol=1e-12, atol=1e-12
        )


def test_terms_of_known_divergences_match_their_curvature():
    # the second derivative of D along a direction at pi = q is f''(1) times the Fisher information, for every f
    p, step = np.log(np.array([[0.2, 0.3, 0.5]])), 1e-3
    for known in KNOWN:
        q = p + step * np.array([[1.0, -0.5, 0.2]])
        q = q - np.log(np.exp(q).sum())
        fisher = np.exp(p) @ ((q - p) ** 2).T
        assert known.terms(p, p - q).sum() == pytest.approx(known.curvature(np.ones(1))[0] * fisher[0, 0] / 2, rel=5e-3)
    p, q = np.array([[0.2, 0.3, 0.5]]), np.array([[0.6, 0.1, 0.3]])  # far from it, as they are usually written
    m = (p + q) / 2
    plain = [
        p * np.log(p / q),
        q * np.log(q / p),
        (p - q) ** 2 / p,
        (p - q) ** 2 / q,
        (np.sqrt(p) - np.sqrt(q)) ** 2,
        (p * np.log(p / m) + q * np.log(q / m)) / 2,
    ]
    for known, terms in zip(KNOWN, plain, strict=True):
        assert known.terms(np.log(p), np.log(p / q)).sum() == pytest.approx(terms.sum(), rel=1e-13)


@pytest.mark.parametrize(
    "formula", [FORMULAS["k3"], FORMULAS["chi-squared"], "abs(delta)", "sqrt(r)", "2", "delta^3*r"]
)
@given(worlds(off=False, longest=4, cap=100))
@settings(max_examples=8)
def test_every_step_holds_on_random_models(formula, world):
    checked = check(shared(formula), world.pair, [world.length])
    assert checked.largest_residual <= 1e-10


_KEPT = {}


def shared(formula):
    """One derivation for all examples: sympy searches once."""
    if formula not in _KEPT:
        _KEPT[formula] = phi_derivation(formula)
    return _KEPT[formula]


def test_a_wrong_map_from_phi_to_h_fails(monkeypatch):
    right = Phi.h
    monkeypatch.setattr(Phi, "h", lambda self, x: right(self, x) + 1e-6 * np.exp(2 * x))
    with pytest.raises(StepFailed, match="phi on near"):
        check(phi_derivation("r - 1 - log(r)"), preset("near"), [2])


def test_unbiased_ones_are_told_so_and_others_not():
    last = {name: phi_derivation(FORMULAS[name]).steps[-1] for name in ("k1", "k3", "alpha(0.3)", "k2", "chi-squared")}
    assert [type(step) for step in last.values()] == [Step, Step, Step, Comparison, Comparison]
    assert "the true gradient" in phi_derivation("-log(r)").conclusion
    assert isinstance(phi_derivation("1 - log(r)").steps[-1], Comparison)  # off by a constant, so E is not the KL


def test_the_constant_estimator_optimises_nothing_token_by_token():
    assert "the loss gives nothing and the reward nothing" in phi_derivation("3").conclusion


def test_a_search_that_hangs_is_left_behind():
    from threading import Event

    assert within(0.05, Event().wait) is None
    assert within(1.0, lambda: 7) == 7
    assert within(1.0, lambda: 1 / 0) is None


def test_slopes_are_those_of_autograd(torch):
    for name in ("k3", "jeffreys", "jensen-shannon"):
        phi = Phi(FORMULAS[name])
        delta = torch.tensor([-1.5, 0.3, 2.0], dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(estimator(name).value(delta).sum(), delta)
        assert_close(phi.estimator.slope(delta.detach().numpy()), gradient.numpy(), 1e-12)


ROUGH = ["abs(log(r)-1)", "abs(r-2)*log(r)", "abs(delta-0.3)^1.5", "sqrt(delta^2+0.0001)", "abs(delta)^1.5"]


@pytest.mark.parametrize("formula", ROUGH)
@pytest.mark.parametrize("name", ["near", "far"])
def test_kinks_and_steep_places_are_integrated(monkeypatch, formula, name):
    monkeypatch.setattr(module, "within", lambda seconds, work: None)  # no search for closed forms
    assert check(phi_derivation(formula), preset(name), [3]).largest_residual <= 1e-10


def test_the_integral_over_a_kink_is_that_of_its_pieces():
    # h = r int phi'(s) / s ds with phi' = sign(log s - 1) / s, psi = -r int |x - 1| exp(-x) dx: by hand, at delta = -x
    phi, x = Phi("abs(log(r)-1)"), np.array([-2.0, 0.0, 0.5, 1.0, 3.0])
    h = np.where(x < 1, np.exp(-x) - 1, 2 * np.exp(-1.0) - 1 - np.exp(-x))
    psi = np.where(x < 1, x * np.exp(-x), 2 * np.exp(-1.0) - x * np.exp(-x))
    np.testing.assert_allclose(phi.h(x), np.exp(x) * h, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(phi.psi(x), -np.exp(x) * psi, rtol=1e-12, atol=1e-13)


def test_a_quadrature_that_does_not_converge_says_so():
    with pytest.raises(StepFailed, match=r"the integral in h\(r\) did not converge .* says nothing about the formula"):
        Phi("exp(r)").h(np.array([8.0]))  # past the largest double


def test_a_constant_keeps_the_gradient_and_the_text_says_so():
    told = text(check(phi_derivation("r - 1 - log(r) + 5"), preset("far"), [3]))
    assert "∇E[Σ_t φ(r_t)] against ∇KL(π‖q)\n      Here the two coincide.\n" in told
    assert "Which is not the KL." not in told
    assert "Which is not the KL." in text(check(phi_derivation("delta^2"), preset("far"), [3]))
