"""Published and derived numbers that must come out: the test oracles of the catalogue of theory, by number.

Each is a number computed outside this package, or a closed form; where one pair cannot tell a mistake from the
truth, the test says so and another pair does.
"""

import itertools

import numpy as np
import pytest
from strategies import assert_close, finite_difference

from klgrad.synth import automata, exact
from klgrad.synth.configurations import parse
from klgrad.synth.enumeration import (
    enumerate_configuration,
    log_probability,
    sequences,
)
from klgrad.synth.estimators import estimator
from klgrad.synth.moments import moments
from klgrad.synth.policies import PolicyPair, linear, log_of_probs, log_softmax, tabular


def one(name, pair, length, **options):
    return moments(pair, [parse(name)], [length], **options)[0]


def mean(name, pair, length):
    return one(name, pair, length, covariance="none").mean[0]


def bias(name, pair, length):
    return np.linalg.norm(mean(name, pair, length) - exact.true_gradient(pair, [length])[0])


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def categorical(p, q):
    """One token, softmax logits."""
    automaton = automata.markov(len(p), 0)
    return PolicyPair(automaton, tabular(automaton, np.log([p])), log_of_probs(np.array([q])))


def logistic(automaton, features, theta, reference, behaviour=None):
    """Binary models: the logit of token 1 is features . theta, of token 0 zero."""
    table = np.zeros((automaton.contexts, 2, len(theta)))
    table[:, 1] = features
    other = None if behaviour is None else log_softmax(table @ np.array(behaviour))
    return PolicyPair(
        automaton, linear(automaton, table, np.array(theta)), log_softmax(table @ np.array(reference)), other
    )


def markov(behaviour=None):
    """One logit for the first token and one after each token."""
    return logistic(automata.markov(2, 1), np.eye(3), [0.4, -0.8, 1.1], [-0.2, 0.3, 0.2], behaviour)


def history(length, theta, reference, behaviour=None):
    """Features of the whole past: 1, last token as -1 or 1, mean of the past, 0.3 t."""
    automaton = automata.history(2, length)
    features = [
        [1.0, 2.0 * y[-1] - 1 if y else 0.0, sum(y) / len(y) if y else 0.5, 0.3 * len(y)] for y in automaton.states
    ]
    return logistic(automaton, np.array(features), theta, reference, behaviour)


def history_near(length=4, behaviour=None):
    return history(length, [0.3, 0.9, -0.7, 0.5], [-0.1, 0.2, 0.4, -0.2], behaviour)


def bernoulli(a, b):
    return logistic(automata.markov(2, 0), np.ones((1, 1)), [a], [b])


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x)))


# ---------------------------------------------------------------------------------------- 1-3: one categorical each

SYMMETRIC = categorical([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4])


def test_oracle_1_values():
    found = {n: one(f"{n}-in-reward", SYMMETRIC, 1) for n in ("k1", "k2", "k3", "abs", "chi-squared", "jeffreys")}
    expected = {
        "k1": 0.456435,
        "k2": 0.521554,
        "k3": 0.456435,
        "abs": 0.895880,
        "chi-squared": 1.208333,
        "jeffreys": 0.912870,
    }
    for name, value in expected.items():
        assert found[name].estimate[0] == pytest.approx(value, abs=6e-7)
    for name, variance in (("k1", 0.834774), ("k2", 0.193031), ("k3", 0.217368)):
        assert found[name].estimate_variance[0] == pytest.approx(variance, abs=6e-7)
    # this pair is symmetric, so that it cannot see a swapped KL; oracle 2 and 3 can
    assert exact.kl(SYMMETRIC, [1])[0] == pytest.approx(exact.forward_kl(SYMMETRIC, [1])[0], abs=1e-12)


@pytest.mark.parametrize(
    ("name", "gradient"),
    [
        ("k1-in-reward", (0.371944, -0.015291, -0.172380, -0.184273)),
        ("k2-in-loss", (0.371944, -0.015291, -0.172380, -0.184273)),
        ("k3-in-loss", (0.3, 0.1, -0.1, -0.3)),
        ("k3-in-reward", (0.071944, -0.115291, -0.072380, 0.115727)),
        ("k2-in-reward", (0.175741, -0.131806, -0.087871, 0.043935)),
        ("k1-in-loss", (0.0, 0.0, 0.0, 0.0)),
    ],
)
def test_oracle_1_gradients(name, gradient):
    np.testing.assert_allclose(mean(name, SYMMETRIC, 1), gradient, atol=6e-7)


def test_oracle_1_best_control_variate():
    found = one("alpha(0.755478)-in-reward", SYMMETRIC, 1)
    assert found.estimate_variance[0] == pytest.approx(0.145121, abs=6e-7)
    for a in (0.75, 0.76):  # a minimum
        assert one(f"alpha({a})-in-reward", SYMMETRIC, 1).estimate_variance[0] > found.estimate_variance[0]


@pytest.mark.parametrize("seed", range(5))
def test_oracle_1_variance_identities(seed):
    # Var k3 - Var k1 = chi2 - 2 J, and a* = J / chi2 with minimum Var k1 - J^2 / chi2 [A9]
    p, q = np.random.default_rng(seed).dirichlet(np.ones(5), size=2)
    pair = categorical(p, q)
    k1, k3, best = (
        one(f"{n}-in-reward", pair, 1).estimate_variance[0]
        for n in ("k1", "k3", f"alpha({(p - q) @ np.log(p / q) / (q @ (q / p) - 1):.12g})")
    )
    j, chi2 = (p - q) @ np.log(p / q), q @ (q / p) - 1
    assert_close(k3 - k1, chi2 - 2 * j, 1e-9)
    assert_close(best, k1 - j**2 / chi2, 1e-9)


def test_oracle_2_two_points():
    pair = categorical([0.8, 0.2], [0.5, 0.5])
    step = 0.8 * 0.2  # d p / d logit
    assert mean("k1-in-reward", pair, 1)[0] / step == pytest.approx(np.log(4), rel=1e-12)
    assert mean("k3-in-loss", pair, 1)[0] / step == pytest.approx(1.875, rel=1e-12)
    assert exact.kl(pair, [1])[0] != pytest.approx(exact.forward_kl(pair, [1])[0], rel=0.1)


HANDBOOK = categorical(
    *(np.exp(x) / np.exp(x).sum() for x in (np.array([0.4, -0.2, 1.1, 0.0]), np.array([0.1, 0.0, 0.9, 0.2])))
)


def test_oracle_3_handbook():
    assert exact.kl(HANDBOOK, [1])[0] == pytest.approx(0.021007, abs=5e-7)
    assert exact.forward_kl(HANDBOOK, [1])[0] == pytest.approx(0.021878, abs=5e-7)
    for name, variance in (("k1", 0.040058), ("k3", 0.000279)):
        assert one(f"{name}-in-reward", HANDBOOK, 1).estimate_variance[0] == pytest.approx(variance, abs=5e-7)
    assert one("chi-squared-in-reward", HANDBOOK, 1).estimate[0] == pytest.approx(0.045991, abs=5e-7)
    k3 = mean("k3-in-loss", HANDBOOK, 1)
    np.testing.assert_allclose(k3, (0.0452, -0.0432, 0.0507, -0.0527), atol=5e-5)
    assert cosine(k3, exact.true_gradient(HANDBOOK, [1])[0]) == pytest.approx(0.9986, abs=5e-5)


def drift(eps):
    return categorical(*(np.array([x, *[1.0] * 7]) / (x + 7) for x in (8 * eps, 32.0)))


@pytest.mark.parametrize(
    ("eps", "kl", "k1", "k3", "chi2", "twice_j"),
    [
        (1e-1, 1.2311, 1.2525, 1.6, 5.6, 5.30),
        (1e-3, 1.7070, 0.0784, 575.3, 588.8, 13.59),
        (1e-5, 1.7175, 0.0019, 58887.2, 58908.3, 21.17),
    ],
)
def test_oracle_3_drift_rows(eps, kl, k1, k3, chi2, twice_j):
    pair = drift(eps)
    assert exact.kl(pair, [1])[0] == pytest.approx(kl, abs=5.1e-5)
    assert one("k1-in-reward", pair, 1).estimate_variance[0] == pytest.approx(k1, abs=5.1e-5)
    assert one("k3-in-reward", pair, 1).estimate_variance[0] == pytest.approx(k3, abs=0.051)
    assert one("chi-squared-in-reward", pair, 1).estimate[0] == pytest.approx(chi2, abs=0.051)
    assert 2 * one("jeffreys-in-reward", pair, 1).estimate[0] == pytest.approx(twice_j, abs=5.1e-3)


def test_clamps_switch_the_drifted_token_off():
    # section 2.5, drift row eps = 0.001: the clamped loss hardly pulls back the one token that matters
    pair = drift(1e-3)
    assert one("k3-clamped-in-reward", pair, 1).estimate[0] == pytest.approx(0.9066, abs=5e-5)
    assert np.linalg.norm(mean("k3-in-loss", pair, 1)) == pytest.approx(0.8759, abs=5e-5)
    assert np.linalg.norm(mean("k3-clamped-in-loss", pair, 1)) == pytest.approx(0.0010, abs=5e-5)
    corners = np.array([-2.6108, -2.6110, 10.9999, 11.0001])
    assert (estimator("k3-clamped").slope(corners) == 0).tolist() == [False, True, False, True]


@pytest.mark.parametrize(("name", "share"), [("k3", 6), ("k2", 8)])
def test_rewarded_k3_and_k2_repel_from_the_reference(name, share):
    # section 2.4, uniform reference, x = 2p - 1: penalties -x^4/6 and -x^4/8, so slopes -4 x^3 / share [A21]
    x = 0.03
    pair = categorical([(1 + x) / 2, (1 - x) / 2], [0.5, 0.5])
    slope = mean(f"{name}-in-reward", pair, 1)[0] / ((1 - x * x) / 4) / 2  # d / dx: p' = 1/2
    assert slope == pytest.approx(-4 * x**3 / share, rel=5e-3)


@pytest.mark.parametrize("mu", [0.1, 1.0])
def test_gaussian_variances(mu):
    # section 4.4: Var k1 = mu^2, k2 = mu^4/2 + mu^6/4, k3 = exp(mu^2) - 1 - mu^2 [A16]
    z = np.linspace(-12, 12, 40001)
    weight = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi) * (z[1] - z[0])
    delta = mu * z + mu**2 / 2
    for name, variance in (("k1", mu**2), ("k2", mu**4 / 2 + mu**6 / 4), ("k3", np.expm1(mu**2) - mu**2)):
        value = estimator(name).value(delta)
        assert weight @ value**2 - (weight @ value) ** 2 == pytest.approx(variance, rel=1e-9)


def test_gaussian_crossover():
    assert np.expm1(1.256431) - 1.256431 == pytest.approx(1.256431, abs=5e-6)  # Var k3 = Var k1 at KL .628216


# ------------------------------------------------------------------------------------------------ 4: Markov chains


@pytest.mark.parametrize(("length", "kl"), [(1, 0.044336213), (2, 0.152923139), (4, 0.373538432), (6, 0.595441558)])
def test_oracle_4_markov_numbers(length, kl):
    assert exact.kl(markov(), [length])[0] == pytest.approx(kl, abs=5.1e-10)


@pytest.mark.parametrize("length", [1, 2, 5, 40, 1000])
def test_oracle_4_markov_closed_form(length):
    (p0, p01, p11), q = sigmoid([0.4, -0.8, 1.1]), sigmoid([-0.2, 0.3, 0.2])
    rows = [p * np.log(p / r) + (1 - p) * np.log((1 - p) / (1 - r)) for p, r in zip((p0, p01, p11), q, strict=True)]
    lam, stationary = p11 - p01, p01 / (1 - p11 + p01)
    transient = (rows[2] - rows[1]) * (p0 - stationary) * (1 - lam ** (length - 1)) / (1 - lam)
    expected = rows[0] + (length - 1) * (rows[1] * (1 - stationary) + rows[2] * stationary) + transient
    assert exact.kl(markov(), [length])[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("pair", "length", "kl", "true", "token", "future", "forward", "cosines"),
    [
        (markov(), 5, 0.484430, 0.569008, 0.575898, 0.039760, 0.661077, (0.9964, 0.9977, -0.8484)),
        (history_near(6), 6, 0.329111, 0.899786, 0.840098, 0.095301, 1.088898, (0.9956, 0.9963, -0.8747)),
    ],
)
def test_section_b_models(pair, length, kl, true, token, future, forward, cosines):
    true_gradient = exact.true_gradient(pair, [length])[0]
    norms = [
        np.linalg.norm(f(pair, [length]))
        for f in (exact.true_gradient, exact.token_gradient, exact.future_gradient, exact.token_forward_gradient)
    ]
    assert exact.kl(pair, [length])[0] == pytest.approx(kl, abs=6e-7)
    assert norms == pytest.approx([true, token, future, forward], abs=6e-7)
    found = [cosine(mean(n, pair, length), true_gradient) for n in ("k3-in-loss", "k2-in-loss", "k3-in-reward")]
    assert found == pytest.approx(cosines, abs=6e-5)


# ------------------------------------------------------------------------------------------ 5: independent tokens


@pytest.mark.parametrize("length", [1, 3, 6, 50])
def test_oracle_5_means(length):
    a, b = 0.7, -0.4
    pair, p, q = bernoulli(a, b), sigmoid(a), sigmoid(b)
    kl1, true = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)), length * p * (1 - p) * (a - b)
    assert exact.kl(pair, [length])[0] == pytest.approx(length * kl1)
    assert mean("k1-in-reward", pair, length)[0] == pytest.approx(true)
    assert mean("k2-in-loss", pair, length)[0] == pytest.approx(true)  # no future term
    assert mean("k3-in-loss", pair, length)[0] == pytest.approx(length * (p - q))
    assert exact.future_gradient(pair, [length])[0, 0] == pytest.approx(0.0, abs=1e-13)


@pytest.mark.parametrize("length", [1, 3, 6, 50, 500])
def test_oracle_5_variances(length):
    a, b = 0.7, -0.4
    pair, p, q, T = bernoulli(a, b), sigmoid(a), sigmoid(b), length
    kl1, d, v = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)), a - b, p * (1 - p)
    m3, m4 = v * (1 - 2 * p), v * ((1 - p) ** 3 + p**3)
    fourth = T * m4 + 3 * T * (T - 1) * v**2
    k1 = (T * kl1) ** 2 * T * v + 2 * T * kl1 * d * T * m3 + d**2 * fourth - (T * v * d) ** 2
    k3 = T * (p * (1 - q / p) ** 2 * (1 - p) ** 2 + (1 - p) * (1 - (1 - q) / (1 - p)) ** 2 * p**2 - (p - q) ** 2)
    found = [one(n, pair, T).covariance[0] for n in ("k1-in-reward", "k1-in-loss", "k3-in-loss")]
    assert found == pytest.approx([k1, T * v, k3], rel=1e-9)


@pytest.mark.parametrize(("length", "variance"), [(1, 0.011242), (3, 0.716520), (6, 3.900011)])
def test_oracle_5_numbers(length, variance):
    assert one("k1-in-reward", bernoulli(0.7, -0.4), length).covariance[0] == pytest.approx(variance, abs=6e-7)


def test_martingale_differences_add_up():
    # Var(sum of r_t - 1) = sum of E[chi2_t], linear in T: alpha(1) less alpha(0) is that sum [E5]
    pair, every = history_near(6), sequences(automata.history(2, 6), 6)
    p, q = np.exp(pair.policy.log_probs), np.exp(pair.reference)
    weight = np.exp(log_probability(every, pair.policy.log_probs))
    r = (q / p)[every.contexts, every.tokens]
    chi2 = exact.visitation(pair, [6])[0] @ ((q**2 / p).sum(1) - 1)
    assert weight @ (r - 1).sum(1) ** 2 == pytest.approx(chi2)


# -------------------------------------------------------------- Rao-Blackwellisation, off-policy, aggregation: numbers


def test_summed_conditional_kl_can_have_the_larger_variance():
    # section 4.4, the two-step counterexample [E6]
    automaton = automata.history(2, 2)
    policy = log_of_probs(np.array([[0.5, 0.5], [0.5, 0.5], [0.01, 0.99]]))
    reference = log_of_probs(np.array([[0.25, 0.75], [0.5, 0.5], [0.99, 0.01]]))
    pair = PolicyPair(automaton, tabular(automaton, policy), reference)
    k1, full = one("k1-in-reward", pair, 2), one("full-in-reward", pair, 2)
    assert k1.estimate[0] == pytest.approx(2.39545, abs=1e-5)
    assert full.estimate[0] == pytest.approx(2.39545, abs=1e-5)
    assert k1.estimate_variance[0] == pytest.approx(3.31591, abs=1e-5)
    assert full.estimate_variance[0] == pytest.approx(5.06974, abs=1e-5)


OFF = [
    (markov([0.1, -0.3, 0.6]), 0.4334, (0.0290, 0.0850, 0.0285, 0.1932, 0.0873), (0.7946, 0.1415, 0.0712)),
    (
        history_near(4, [0.0, 0.4, -0.2, 0.3]),
        0.2846,
        (0.0688, 0.0889, 0.0465, 0.1719, 0.0807),
        (0.2639, 0.0767, 0.0613),
    ),
]


@pytest.mark.parametrize(("pair", "true", "biases", "variances"), OFF)
def test_off_policy_numbers(pair, true, biases, variances):
    # section 3.1, T = 4
    names = (
        "k1-in-reward+rtg+token-ratio",
        "k1-in-reward+rtg",
        "k3-in-both+token+token-ratio",
        "k3-in-loss",
        "k2-in-loss",
    )
    assert np.linalg.norm(exact.true_gradient(pair, [4])) == pytest.approx(true, abs=6e-5)
    assert [bias(name, pair, 4) for name in names] == pytest.approx(biases, abs=6e-5)
    recipes = ("k1-in-reward+sequence-ratio", "k3-in-loss+live-prefix-ratio", "k3-in-both+token+token-ratio")
    assert [one(name, pair, 4).covariance[0] for name in recipes] == pytest.approx(variances, abs=6e-5)


def ending(length=5):
    """Token 1 ends; the logit of the end is theta . (1, tokens before)."""
    automaton = automata.positional(2, length, eos=True)
    features = np.array([[1.0, t] if isinstance(t, int) else [0.0, 0.0] for t in automaton.states])
    return logistic(automaton, features, [-0.3, 0.25], [0.4, -0.1])


def test_length_normalised_numbers():
    # section 4.1: k1-in-loss with 1/|y| has norm .195 against |TRUE| .215, and points the other way
    pair, true = ending(), exact.true_gradient(ending(), [5])[0]
    found = {n: mean(f"{n}+length-mean", pair, 5) for n in ("k1-in-reward", "k3-in-both", "k1-in-loss")}
    np.testing.assert_allclose(true, (-0.215105, 0.00158), atol=1e-6)
    np.testing.assert_allclose(found["k1-in-reward"], (-0.116817, 0.012365), atol=1e-6)
    np.testing.assert_allclose(found["k3-in-both"], (-0.133994, -0.005228), atol=1e-6)
    np.testing.assert_allclose(found["k1-in-loss"], (0.188536, 0.050271), atol=1e-6)
    assert np.linalg.norm(found["k1-in-loss"]) == pytest.approx(0.19512, abs=6e-6)
    assert cosine(found["k1-in-loss"], true) == pytest.approx(-0.9643, abs=6e-5)


def test_a_token_mean_over_the_batch_leaves_a_bias_of_order_one_over_n():
    # section 4.1 [E15]: |E k1-in-loss| when n responses are divided by their total number of tokens
    pair = ending()
    table = enumerate_configuration(parse("k1-in-loss"), pair, 5)
    lengths = sequences(pair.automaton, 5).mask.sum(1)
    norms = []
    for n in (1, 2, 3, 4):
        groups = np.array(list(itertools.product(range(len(lengths)), repeat=n)))
        weight = table.probability[groups].prod(1) / lengths[groups].sum(1)
        norms.append(np.linalg.norm(weight @ table.gradient[groups].sum(1)))
    assert norms == pytest.approx([0.19512, 0.1105, 0.07595, 0.05756], abs=6e-6)


# -------------------------------------------------------------------------- 6-7: the optimum and the fixed points
# (also in test_exact.py, where the identities are; here the suboptimality of the biased points in one token)


@pytest.mark.parametrize("beta", [0.2, 0.5, 2.0])
def test_oracle_6_and_7_one_token(beta):
    # at T = 1 k2-in-loss stops at pi* itself, k3-in-loss at the forward-KL-regularised optimum beta q / (c - R)
    q, reward = np.array([0.5, 0.3, 0.2]), np.array([0.3, -0.4, 1.0])
    star = q * np.exp(reward / beta)
    for p, name in ((star / star.sum(), "k2-in-loss"), (forward_point(q, reward, beta), "k3-in-loss")):
        pair = categorical(p, q)
        up = (p * reward) @ (np.eye(3) - p)
        assert_close(up - beta * mean(name, pair, 1), np.zeros(3), 1e-9)
    found = exact.optimum(categorical(q, q), reward[None], beta, 1)
    assert_close(found.objective, beta * np.log(star.sum()))
    assert_close(np.exp(found.log_probs[0, 0]), star / star.sum())


def forward_point(q, reward, beta):
    low, high = reward.max(), reward.max() + beta
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (beta * q / (middle - reward)).sum() > 1 else (low, middle)
    return beta * q / (high - reward) / (beta * q / (high - reward)).sum()


# ---------------------------------------------------------------------------------------- 8: bias, variance, length

FIGURE = {
    # T: bias of k1-in-loss, k3-in-loss, k3-in-reward, k2-in-loss; variance of k1-in-reward and others
    1: ((0.1442, 0.0044, 0.1485, 0.0), (0.0013, 0.2403, 0.0036, 0.0006, 0.0013)),
    4: ((0.4334, 0.0791, 0.5048, 0.0293), (0.6597, 0.8359, 0.1831, 0.1490, 0.1090)),
    12: ((1.5488, 0.3000, 1.7838, 0.1326), (13.2065, 2.4295, 0.4983, 4.1016, 0.3458)),
}
OPTIONS = {
    # variance of k1-in-reward with the mean baseline, reward-to-go; k3-in-both, with prefix credit; full-in-both
    4: (0.6131, 0.3907, 0.1310, 0.1412, 0.1849),
    12: (8.4388, 5.5031, 3.5231, 1.6659, 2.7561),
}


@pytest.mark.parametrize("length", FIGURE)
def test_oracle_8_figure_rows(length):
    biases, variances = FIGURE[length]
    found = [bias(n, markov(), length) for n in ("k1-in-loss", "k3-in-loss", "k3-in-reward", "k2-in-loss")]
    assert found == pytest.approx(biases, abs=6e-5)
    names = ("k1-in-reward", "k1-in-loss", "k3-in-loss", "k3-in-reward", "k2-in-loss")
    assert [one(n, markov(), length).covariance[0] for n in names] == pytest.approx(variances, abs=6e-5)


@pytest.mark.parametrize("length", OPTIONS)
def test_oracle_8_options(length):
    names = ("k1-in-reward+mean-baseline", "k1-in-reward+rtg", "k3-in-both", "k3-in-both+rtg", "full-in-both+future")
    assert [one(n, markov(), length).covariance[0] for n in names] == pytest.approx(OPTIONS[length], abs=6e-5)


def test_oracle_8_far_history():
    pair = history(12, [0.3, 1.2, -1.4, 0.5], [-0.6, -0.8, 1.0, -0.4])
    assert exact.kl(pair, [8])[0] == pytest.approx(2.9609, abs=6e-5)
    found = moments(pair, [parse(n) for n in ("k1-in-reward", "k3-in-loss", "k3-in-reward")], [8, 12])
    assert [m.covariance[0] for m in found] == pytest.approx([64.2286, 16.9277, 54.3882], abs=6e-5)
    assert [m.covariance[1] for m in found] == pytest.approx([600.4746, 127.2029, 711.4952], abs=6e-5)


def test_oracle_8_the_monte_carlo_floor_grows_with_the_length():
    # sqrt(tr Var / (trials N)) at 200 x 1000: what a plotted 'bias' of k1-in-reward really shows
    variance = one("k1-in-reward", markov(), 1).covariance[0], one("k1-in-reward", markov(), 12).covariance[0]
    assert np.sqrt(np.array(variance) / 2e5) == pytest.approx([8.12e-5, 8.13e-3], rel=1e-3)


# ----------------------------------------------------------------------------------------------- 9: scaling near q


def test_oracle_9_norms_near_the_reference():
    anchor, direction = np.array([-0.2, 0.3, 0.2]), np.array([0.5, -0.7, 0.4])
    pair = logistic(automata.markov(2, 1), np.eye(3), anchor + 0.1 * direction, anchor)
    names = ("k1-in-reward", "k2-in-loss", "k3-in-loss", "k3-in-reward", "k2-in-reward", "full-in-reward")
    expected = (3.159e-2, 3.160e-2, 3.153e-2, 2.586e-4, 2.628e-4, 1.739e-4)
    assert [np.linalg.norm(mean(n, pair, 4)) for n in names] == pytest.approx(expected, rel=5e-4)


def test_the_oracles_would_notice_another_sign():
    # the negative control: descending the KL, not climbing it
    def kl(theta):
        pair = logistic(automata.markov(2, 1), np.eye(3), theta, [-0.2, 0.3, 0.2])
        return exact.kl(pair, [4])[0]

    slope = finite_difference(kl, np.array([0.4, -0.8, 1.1]))
    assert_close(mean("k1-in-reward", markov(), 4), slope, 1e-8)
    assert np.abs(mean("k1-in-reward", markov(), 4) + slope).max() > 0.1
