"""The registry of estimators: each entry is held to its laws, so a new entry is tested by being there."""

import itertools
import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import assert_close, finite_difference

from klgrad.synth.estimators import ESTIMATORS, Estimator, array_namespace, estimator
from klgrad.synth.policies import log_softmax

SAMPLED = [name for name, entry in ESTIMATORS.items() if not entry.full]
FULL = [name for name, entry in ESTIMATORS.items() if entry.full]
FAR = np.array([s * d for d in (0.0, 1e-7, 1e-3, 0.0999, 0.1, 1.0, 2.61, 19.9, 20.1, 300.0) for s in (1, -1)])
SEEDS = st.integers(0, 2**16)

# phi and phi' as functions of r = pi_ref / pi, from the catalogue of theory; independent of the code under test
PHI = {
    "k1": (lambda r: -np.log(r), lambda r: -1 / r),
    "k2": (lambda r: np.log(r) ** 2 / 2, lambda r: np.log(r) / r),
    "k3": (lambda r: r - 1 - np.log(r), lambda r: 1 - 1 / r),
    "abs": (lambda r: np.abs(np.log(r)), lambda r: np.sign(np.log(r)) / r),
    "alpha": (lambda r: -np.log(r) + 0.5 * (r - 1), lambda r: 0.5 - 1 / r),
    "forward-kl": (lambda r: r * np.log(r) - (r - 1), np.log),
    "jeffreys": (lambda r: (r - 1) * np.log(r), lambda r: np.log(r) + 1 - 1 / r),
    "jensen-shannon": (
        lambda r: (r * np.log(2 * r / (1 + r)) + np.log(2 / (1 + r))) / 2,
        lambda r: np.log(2 * r / (1 + r)) / 2,
    ),
    "chi-squared": (lambda r: (r - 1) ** 2, lambda r: 2 * (r - 1)),
}


# far enough apart for the output clamp of k3-clamped to bite on token 0 (log r = 3.6)
APART = log_softmax(np.array([[-3.0, 0.0, 0.2, 0.5], [1.0, 0.0, 0.3, 0.1]]))


def rows(seed, vocabulary=4, scale=1.0):
    """Two random next-token distributions, as log-probs."""
    return log_softmax(np.random.default_rng(seed).normal(size=(2, vocabulary)) * scale)


def kl(log_p, log_q):
    return float(np.exp(log_p) @ (log_p - log_q))


def expected_value(est, log_p, log_q):
    return float(est.value(log_p, log_q)) if est.full else float(np.exp(log_p) @ est.value(log_p - log_q))


def reverse_kl_gradient(log_p, log_q):
    """In softmax logits."""
    p = np.exp(log_p)
    return p * (log_p - log_q - kl(log_p, log_q))


# ---------------------------------------------------------------------------------------------- laws of an entry


@pytest.mark.parametrize("name", ESTIMATORS)
@given(SEEDS)
def test_unbiased_means_that_the_expected_value_is_the_reverse_kl(name, seed):
    log_p, log_q = rows(seed)
    if estimator(name).unbiased:
        assert_close(expected_value(estimator(name), log_p, log_q), kl(log_p, log_q), 1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_entry_not_called_unbiased_is_biased(name):
    # the pair is far enough apart for the clamps of k3-clamped to bite
    log_p, log_q = log_softmax(np.array([[-8.0, 1.0, 0.5], [2.0, 0.0, 0.0]]))
    error = abs(expected_value(estimator(name), log_p, log_q) - kl(log_p, log_q))
    assert (error < 1e-12) == estimator(name).unbiased, error


@pytest.mark.parametrize("name", SAMPLED)
@given(st.lists(st.floats(-6, 6), min_size=1, max_size=5))
def test_consistent_means_that_the_slope_is_autograd_of_the_value(name, torch, deltas):
    est, delta = estimator(name), torch.tensor(deltas, dtype=torch.float64, requires_grad=True)
    (derivative,) = torch.autograd.grad(est.value(delta).sum(), delta)
    if est.consistent:
        assert_close(est.slope(np.array(deltas)), derivative.numpy(), 1e-12)


@pytest.mark.parametrize("name", SAMPLED)
def test_an_entry_not_called_consistent_has_another_slope(name, torch):
    est, delta = estimator(name), torch.tensor([-1.0, 0.7, 2.0], dtype=torch.float64, requires_grad=True)
    (derivative,) = torch.autograd.grad(est.value(delta).sum(), delta)
    error = (est.slope(delta.detach()) - derivative).abs().max()
    assert (error < 1e-12) == est.consistent, error


@pytest.mark.parametrize("name", FULL)
@given(SEEDS)
def test_a_full_slope_weighs_scores_into_the_gradient_of_the_value(name, torch, seed):
    log_p, log_q = rows(seed)
    est, logits = estimator(name), torch.tensor(log_p, requires_grad=True)
    value = est.value(torch.log_softmax(logits, -1), torch.as_tensor(log_q))
    (derivative,) = torch.autograd.grad(value, logits)
    scores = np.eye(4) - np.exp(log_p)
    assert_close(est.slope(log_p, log_q) @ scores, derivative.numpy(), 1e-12)
    assert_close(derivative.numpy(), reverse_kl_gradient(log_p, log_q), 1e-12)


@pytest.mark.parametrize("name", SAMPLED)
def test_numpy_and_torch_agree(name, torch):
    est = estimator(name)
    for function in (est.value, est.slope):
        ours, theirs = function(FAR), function(torch.as_tensor(FAR))
        np.testing.assert_allclose(theirs.numpy(), ours, rtol=1e-13, atol=1e-300)


@pytest.mark.parametrize("name", FULL)
def test_numpy_and_torch_agree_on_full_rows(name, torch):
    log_p, log_q = rows(3)
    for function in (estimator(name).value, estimator(name).slope):
        theirs = function(torch.as_tensor(log_p), torch.as_tensor(log_q)).numpy()
        np.testing.assert_allclose(theirs, function(log_p, log_q), rtol=1e-14)


@pytest.mark.parametrize("name", FULL)
def test_full_rows_are_taken_one_by_one(name):
    log_p, log_q = (log_softmax(np.random.default_rng(seed).normal(size=(6, 4))).reshape(2, 3, 4) for seed in (1, 2))
    est = estimator(name)
    for index in np.ndindex(2, 3):
        assert_close(est.value(log_p, log_q)[index], est.value(log_p[index], log_q[index]), 1e-14)
        assert_close(est.slope(log_p, log_q)[index], est.slope(log_p[index], log_q[index]), 1e-14)


@pytest.mark.parametrize("name", SAMPLED)
def test_float32_stays_float32_and_is_accurate(name, torch):
    est, single = estimator(name), np.linspace(-4, 4, 41, dtype=np.float32)
    for function in (est.value, est.slope):
        exact = function(single.astype(float))
        for got in (function(single), function(torch.as_tensor(single)).numpy()):
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, exact, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("size", [0.0, 1e-300, 1e-7, 1.0, 40.0, 700.0])
def test_no_nan_from_tiny_to_700(name, size, torch):
    est, delta = estimator(name), np.array([size, -size])
    with np.errstate(over="ignore"):  # chi-squared squares exp(700): infinite, and rightly so
        for function in (est.value, est.slope):
            assert not np.isnan(function(delta)).any()
            assert not torch.isnan(function(torch.as_tensor(delta))).any()


@pytest.mark.parametrize("name", SAMPLED)
def test_autograd_of_the_value_is_never_nan(name, torch):
    # a where() that hides an infinite branch passes forward and poisons backward
    if name == "chi-squared":
        return  # exp(700)^2 overflows in the value itself
    delta = torch.tensor([0.0, 1e-7, 0.1, -0.1, 700.0, 1000.0, -700.0], dtype=torch.float64, requires_grad=True)
    (derivative,) = torch.autograd.grad(estimator(name).value(delta).sum(), delta)
    assert torch.isfinite(derivative).all()


@pytest.mark.parametrize("name", SAMPLED)
def test_what_is_handed_out_is_never_the_callers(name):
    est, delta = estimator(name), np.array([0.3, -0.3])
    for function in (est.value, est.slope):
        assert not np.shares_memory(function(delta), delta)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_values_vanish_at_the_reference(name, dtype, torch):
    """Exactly: score coefficients count on it, where padding has a log-ratio of zero."""
    zeros = np.zeros((2, 3), dtype)
    for at in (zeros, torch.as_tensor(zeros)):
        assert not estimator(name).value(*([at, at] if ESTIMATORS[name].full else [at])).any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_entry_states_its_formulas_and_source(name):
    entry = ESTIMATORS[name]
    assert entry.formula
    assert entry.slope_formula
    assert entry.source
    assert set(entry.positive) <= {parameter for parameter, _ in entry.parameters}


# ------------------------------------------------------------------------------------- formulas and objectives


@pytest.mark.parametrize("name", PHI)
def test_values_and_slopes_are_those_of_the_catalogue(name):
    phi, dphi = PHI[name]
    delta = np.linspace(-3, 3, 60)  # 0 itself is left out: the kink of |delta|
    r = np.exp(-delta)
    assert_close(estimator(name).value(delta), phi(r), 1e-13)
    assert_close(estimator(name).slope(delta), -r * dphi(r), 1e-13)


def test_every_sampled_entry_is_in_the_catalogue():
    # a new entry must either come with its formula here, or say why not
    variants = {"k3-clamped", "k3-straight-through"}  # k3 by value; tested by name below
    assert set(SAMPLED) == set(PHI) | variants


KINKS = (-11.0, 0.0, 2.610887)  # log r where |delta| or a clamp of k3 has a corner


def integral(function, r):
    """Integral of function(s) ds from 1 to r, in log s and split at the corners."""
    low, high = sorted((0.0, math.log(r)))
    edges = [low, *(k for k in KINKS if low < k < high), high]
    nodes, weights = np.polynomial.legendre.leggauss(30)
    total = 0.0
    for a, b in itertools.pairwise(edges):
        s = np.exp(a + (b - a) / 2 * (nodes + 1))
        total += (b - a) / 2 * float(weights @ (function(s) * s))
    return math.copysign(1.0, math.log(r)) * total


def divergence(induced, log_q):
    """z -> E_p[induced(q / p)] with p = softmax(z)."""

    def function(z):
        p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        return sum(p[i] * induced(math.exp(log_q[i]) / p[i]) for i in range(len(p)))

    return function


@pytest.mark.parametrize("name", SAMPLED)
def test_in_loss_descends_the_divergence_of_h(name):
    # h(r) = r * integral from 1 to r of phi'(s) / s ds; with phi'(s) = -slope / s
    est, (log_p, log_q) = estimator(name), APART
    got = (np.exp(log_p) * est.slope(log_p - log_q)) @ (np.eye(4) - np.exp(log_p))
    objective = divergence(lambda r: r * integral(lambda s: -est.slope(-np.log(s)) / s**2, r), log_q)
    assert_close(got, finite_difference(objective, log_p), 1e-8)


@pytest.mark.parametrize("name", SAMPLED)
def test_in_reward_descends_the_divergence_of_psi(name):
    # psi(r) = -r * integral from 1 to r of phi(s) / s^2 ds
    est, (log_p, log_q) = estimator(name), APART
    got = (np.exp(log_p) * est.value(log_p - log_q)) @ (np.eye(4) - np.exp(log_p))
    objective = divergence(lambda r: -r * integral(lambda s: est.value(-np.log(s)) / s**2, r), log_q)
    assert_close(got, finite_difference(objective, log_p), 1e-8)


@pytest.mark.parametrize("name", SAMPLED)
def test_both_descends_the_expected_value_of_consistent_estimators_only(name):
    est, (log_p, log_q) = estimator(name), APART
    weight = est.value(log_p - log_q) + est.slope(log_p - log_q)
    got = (np.exp(log_p) * weight) @ (np.eye(4) - np.exp(log_p))
    phi = divergence(lambda r: float(est.value(np.array([-math.log(r)]))[0]), log_q)
    error = np.abs(got - finite_difference(phi, log_p)).max()
    assert (error < 1e-8) == est.consistent, error


def test_l1_is_what_abs_in_the_loss_descends():
    log_p, log_q = rows(8)
    got = (np.exp(log_p) * estimator("abs").slope(log_p - log_q)) @ (np.eye(4) - np.exp(log_p))
    p = lambda z: np.exp(z) / np.exp(z).sum()  # noqa: E731
    assert_close(got, finite_difference(lambda z: np.abs(p(z) - np.exp(log_q)).sum(), log_p), 1e-8)


# --------------------------------------------------------------------------------------------------- numerics


def k3_series(delta):
    """exp(-delta) - 1 + delta by its Taylor series in extended precision; for |delta| <= 1."""
    x, term, total = np.longdouble(-delta), np.longdouble(-delta), np.longdouble(0)
    for n in range(2, 40):
        term = term * x / n
        total += term
    return total


@given(st.floats(-1, 1).filter(lambda x: abs(x) > 1e-150))
def test_k3_keeps_its_digits_near_zero(delta):
    got = estimator("k3").value(np.array([delta]))[0]
    assert abs(got / k3_series(delta) - 1) < 3e-14  # rounding alone just past the switch to expm1
    if abs(delta) < 0.1:
        assert abs(got / k3_series(delta) - 1) < 1e-15


def test_the_naive_k3_would_fail_that_test():
    delta = 1e-7
    assert abs((math.exp(-delta) - 1 + delta) / float(k3_series(delta)) - 1) > 1e-4


@given(st.floats(1e-9, 0.5))
def test_forward_kl_keeps_its_digits_near_zero(delta):
    # r log r - (r - 1) = exp(-delta) * k3(-delta)
    expected = np.exp(-np.longdouble(delta)) * k3_series(-delta)
    assert abs(estimator("forward-kl").value(np.array([delta]))[0] / expected - 1) < 3e-14


@pytest.mark.parametrize("name", ["k2", "k3", "abs", "forward-kl", "jeffreys", "jensen-shannon", "chi-squared"])
@given(st.floats(-30, 30))
def test_divergence_generators_are_never_negative(name, delta):
    assert estimator(name).value(np.array([delta]))[0] >= -1e-15


def test_clamps_hold_the_value_and_kill_the_slope():
    est, delta = estimator("k3-clamped"), np.array([-2.61, -2.62, 10.99, 11.01, 19.0, 25.0, -25.0])
    active = (delta > -2.6109) & (delta < 11.0)
    expected = np.minimum(np.exp(-delta) - 1 + delta, 10.0)
    assert_close(est.value(delta), expected, 1e-12)
    assert_close(est.slope(delta), np.where(active, 1 - np.exp(-delta), 0.0), 1e-12)


def test_the_input_clamp_acts_by_itself():
    est, delta = estimator("k3-clamped(1,1000)"), np.array([-3.0, -0.5, 0.5, 3.0])
    inside = np.clip(delta, -1, 1)
    assert_close(est.value(delta), np.exp(-inside) - 1 + inside, 1e-14)
    assert_close(est.slope(delta), np.array([0.0, 1 - math.exp(0.5), 1 - math.exp(-0.5), 0.0]), 1e-14)


def test_a_clamp_still_passes_at_its_edge_as_autograd_does(torch):
    at_output = float(estimator("k3").value(np.array([1.5]))[0])
    for est, edges in (
        (estimator("k3-clamped(1,10)"), [-1.0, 1.0]),
        (estimator(f"k3-clamped(20,{at_output!r})"), [1.5]),
    ):
        delta = torch.tensor(edges, dtype=torch.float64, requires_grad=True)
        (derivative,) = torch.autograd.grad(est.value(delta).sum(), delta)
        assert_close(est.slope(np.array(edges)), derivative.numpy(), 1e-14)
        assert (derivative != 0).all()


def test_clamps_keep_the_farthest_log_ratios_from_overflowing():
    est, far = estimator("k3-clamped"), np.array([-1e4, 1e4])  # a warning would fail this test
    np.testing.assert_array_equal(est.value(far), [10.0, 10.0])
    np.testing.assert_array_equal(est.slope(far), [0.0, 0.0])


def test_the_series_near_zero_is_not_evaluated_far_out():
    far = np.array([1e30])  # its powers overflow, and a warning would fail this test
    np.testing.assert_array_equal(estimator("k3").value(far), far)


def test_the_straight_through_slope_is_that_of_k2():
    est, delta = estimator("k3-straight-through"), np.array([-2.0, 0.5])
    np.testing.assert_array_equal(est.slope(delta), delta)
    np.testing.assert_array_equal(est.value(delta), estimator("k3").value(delta))


def test_full_takes_tokens_that_are_never_emitted():
    with np.errstate(divide="ignore"):
        log_p, log_q = np.log([0.5, 0.5, 0.0]), np.log([0.25, 0.5, 0.25])
    assert estimator("full").value(log_p, log_q) == pytest.approx(0.5 * math.log(2))
    assert estimator("full").slope(log_p, log_q)[2] == 0
    both_missing = np.array([0.0, -np.inf])
    assert estimator("full").value(both_missing, both_missing) == 0


def test_full_says_infinite_where_the_reference_lacks_a_token():
    with np.errstate(divide="ignore"):
        log_p, log_q = np.log([0.5, 0.5]), np.log([1.0, 0.0])
    assert estimator("full").value(log_p, log_q) == np.inf


# ------------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("k3", "k3"),
        (" k3 ", "k3"),
        ("alpha", "alpha(0.5)"),
        ("alpha( 0.75 )", "alpha(0.75)"),
        ("alpha(-1)", "alpha(-1)"),
        ("k3-clamped", "k3-clamped(20,10)"),
        ("k3-clamped(20, 10)", "k3-clamped(20,10)"),
        ("k3-clamped (5,2.5)", "k3-clamped(5,2.5)"),
    ],
)
def test_names_have_one_normal_form(text, normal):
    assert str(estimator(text)) == normal
    assert estimator(normal) == estimator(text)
    assert hash(estimator(normal)) == hash(estimator(text))


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_estimators_with_different_arguments_are_different(a, b):
    a, b = a + 0.0, b + 0.0  # no negative zero
    one, other = estimator(f"alpha({a!r})"), estimator(f"alpha({b!r})")
    assert (one == other) == (a == b)
    assert estimator(str(one)) == one
    assert estimator(str(one)).value(np.array([1.0])) == one.value(np.array([1.0]))


@pytest.mark.parametrize("argument", ["0.1234567", "1234567", "1e-7", "1e20"])
def test_the_normal_form_keeps_every_digit(argument):
    again = estimator(str(estimator(f"alpha({argument})")))
    assert again.value(np.array([1.0]))[0] == estimator(f"alpha({argument})").value(np.array([1.0]))[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k33", "unknown estimator 'k33': did you mean 'k3'"),
        ("jefreys(1)", "unknown estimator 'jefreys': did you mean 'jeffreys'"),
        ("kl-squared", "there is k1, k2, k3"),
        ("", "unknown estimator ''"),
        ("k3)", "unknown estimator"),
        ("k3(1)", r"k3\(1\) has 1 argument\(s\); it takes none"),
        ("k3()", "takes none"),
        ("alpha(1,2)", r"has 2 argument\(s\); it takes 1: alpha\(a\)"),
        ("k3-clamped(20)", r"takes 2: k3-clamped\(input, output\)"),
        ("alpha(x)", "a = 'x' in alpha.x. is not a number"),
        ("alpha()", "is not a number"),
        ("alpha(inf)", "a = inf in alpha.inf. must be a finite number"),
        ("alpha(nan)", "must be a finite number"),
        ("k3-clamped(0,10)", "input = 0 in .* must be a positive number"),
        ("k3-clamped(20,-1)", "output = -1 in .* must be a positive number"),
    ],
)
def test_bad_names_are_refused_saying_what_is_possible(text, message):
    with pytest.raises(ValueError, match=message):
        estimator(text)


def test_numpy_is_its_own_namespace(torch):
    assert array_namespace(np.ones(1)) is array_namespace(np.float64(1)) is np
    assert array_namespace(torch.ones(1)) is not torch  # torch's own clip, sum and where follow other conventions


def test_an_estimator_cannot_be_altered():
    with pytest.raises(FrozenInstanceError):
        estimator("k1").unbiased = False


def test_an_estimator_is_not_its_name():
    assert estimator("k1") != "k1"
    assert isinstance(estimator("k1"), Estimator)
    assert estimator("k1") != estimator("k2")


@pytest.mark.parametrize("name", [name for name, entry in ESTIMATORS.items() if entry.together])
def test_value_and_slope_together_are_their_sum(name):
    est, delta = estimator(name), np.linspace(-6, 6, 41)
    assert est.together(delta) == pytest.approx(est.value(delta) + est.slope(delta), rel=1e-9, abs=1e-12)
    assert {"k3", "alpha"} <= {n for n, entry in ESTIMATORS.items() if entry.together}


@pytest.mark.parametrize("name", ["k3", "alpha(0.75)", "full"])
def test_estimators_are_equal_by_name_and_functions(name):
    """Own ones of one name are two, whose numbers no cache may mix up."""
    one = estimator(name)
    assert one == estimator(f" {name} ")
    assert hash(one) == hash(estimator(name))
    for changed in ({"name": "other"}, {"value": lambda *given: 0.0}, {"slope": lambda *given: 0.0}):
        assert replace(one, **changed) != one
    assert len({one, replace(one, together=lambda delta: delta), estimator(name)}) == 2
