"""Exact quantities against enumeration, autograd, finite differences and closed forms."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import assert_close, build_world, finite_difference, worlds

from klgrad.synth import automata, exact
from klgrad.synth.configurations import parse
from klgrad.synth.enumeration import (
    enumerate_configuration,
    expected_loss_gradient,
    log_probability,
    sequences,
    torch_batches,
    torch_policy,
)
from klgrad.synth.moments import moments
from klgrad.synth.policies import PolicyPair, log_softmax, tabular


def tables(world, length=None):
    """Sequences, and the probabilities of each under policy, reference and sampler."""
    every = sequences(world.pair.automaton, length or world.length)
    names = (world.pair.policy.log_probs, world.pair.reference, world.pair.sampler)
    return every, *(log_probability(every, log_probs) for log_probs in names)


def rebuilt(world, theta):
    """The same pair at another theta."""
    pair = world.pair
    if world.features is not None:
        log_probs = log_softmax(world.features @ theta)
    else:
        log_probs = np.array(pair.policy.log_probs)
        log_probs[pair.automaton.alive] = log_softmax(theta.reshape(-1, pair.automaton.vocabulary))
    return PolicyPair(pair.automaton, replace(pair.policy, log_probs=log_probs, theta=theta), pair.reference)


# --------------------------------------------------------------------------------------------------------- scalars


@given(worlds())
def test_kl_forward_kl_entropy_and_length_are_sums_over_sequences(world):
    every, p, q, _ = tables(world)
    lengths = [world.length]
    assert_close(exact.kl(world.pair, lengths), [np.exp(p) @ (p - q)])
    assert_close(exact.forward_kl(world.pair, lengths), [np.exp(q) @ (q - p)])
    assert_close(exact.entropy(world.pair, lengths), [-np.exp(p) @ p])
    assert_close(exact.mean_length(world.pair, lengths), [np.exp(p) @ every.mask.sum(1)])


@given(worlds())
def test_visitation_counts_tokens_in_contexts(world):
    every, _, _, sampler = tables(world)
    expected = np.zeros(world.pair.automaton.contexts)
    np.add.at(expected, every.contexts[every.mask], np.repeat(np.exp(sampler), every.mask.sum(1)))
    assert_close(exact.visitation(world.pair, [world.length], world.pair.sampler)[0], expected)


@given(worlds(longest=4))
def test_all_lengths_in_one_pass_equal_each_alone(world):
    lengths = [world.length, *range(1, world.length + 1)]
    functions = (
        exact.kl,
        exact.forward_kl,
        exact.entropy,
        exact.mean_length,
        exact.true_gradient,
        exact.token_gradient,
        exact.token_forward_gradient,
        exact.future_gradient,
        exact.visitation,
    )
    for function in functions:
        assert_close(function(world.pair, lengths), np.stack([function(world.pair, [n])[0] for n in lengths]))


def test_swapping_the_arguments_would_be_seen():
    # the negative control of the two KLs: they differ on this pair
    world = build_world("markov", 3, 4, seed=1)
    assert abs(exact.kl(world.pair, [4])[0] - exact.forward_kl(world.pair, [4])[0]) > 0.05


@given(worlds(longest=4))
def test_values_are_the_kl_to_go(world):
    v, q = exact.values(world.pair, world.length)
    start = world.pair.automaton.start
    assert_close(v[:, start], [0.0, *exact.kl(world.pair, range(1, world.length + 1))])
    assert_close(np.exp(world.pair.policy.log_probs[start]) @ q[-1][start], v[-1, start])


# ------------------------------------------------------------------------------------------------------- gradients


@given(worlds())
def test_the_true_gradient_is_the_mean_of_k1_in_reward(world):
    table = enumerate_configuration(parse("k1-in-reward"), world.on_policy, world.length)
    assert_close(exact.true_gradient(world.pair, [world.length])[0], table.mean)
    found = moments(world.on_policy, [parse("k1-in-reward")], [world.length], covariance="none")
    assert_close(found[0].mean[0], table.mean)


@given(worlds(cap=100))
def test_the_true_gradient_is_autograd_of_the_enumerated_kl(torch, world):
    theta, model = torch_policy(world.pair, world.features)
    table = torch.as_tensor(np.array(world.pair.reference))
    batches = torch_batches(model, lambda contexts: table[contexts], world.pair.automaton, world.length)
    # the weights of the batches are constants: what is differentiated is the policy's own probability
    kl = sum((b.log_probs.sum(1).exp() * (b.log_probs - b.reference).sum(1)).sum() for _, b in batches)
    (got,) = torch.autograd.grad(kl, theta)
    assert_close(exact.kl(world.pair, [world.length])[0], float(kl.detach()))
    assert_close(exact.true_gradient(world.pair, [world.length])[0], got.numpy())


@given(worlds(cap=100))
def test_the_true_gradient_is_the_expected_gradient_of_its_surrogate(torch, world):
    theta, model = torch_policy(world.pair, world.features)
    table = torch.as_tensor(np.array(world.pair.reference))

    def surrogate(batch):
        cost = (batch.log_probs - batch.reference).detach().sum(1)
        return cost * batch.log_probs.sum(1)

    def batches():
        return torch_batches(model, lambda contexts: table[contexts], world.pair.automaton, world.length)

    (got,) = expected_loss_gradient(surrogate, theta, batches)
    assert_close(exact.true_gradient(world.pair, [world.length])[0], got.numpy())


@given(worlds(longest=4))
def test_the_true_gradient_is_finite_differences_of_the_kl(world):
    lengths = [world.length]
    found = finite_difference(lambda t: exact.kl(rebuilt(world, t), lengths)[0], world.pair.policy.theta)
    assert_close(exact.true_gradient(world.pair, lengths)[0], found, 1e-6)


def test_many_contexts_take_the_other_route_to_the_same_gradient():
    # past 64 contexts no matrix over pairs of contexts is formed
    world = build_world("history", 3, 5, parameters=3, seed=2)
    assert world.pair.automaton.contexts > 64
    found = exact.true_gradient(world.pair, [1, 3, 5])
    for i, length in enumerate((1, 3, 5)):
        assert_close(found[i], enumerate_configuration(parse("k1-in-reward"), world.pair, length).mean)


@given(worlds())
def test_token_gradients_hold_the_prefixes_of_the_sampler(world):
    every, _, _, sampler = tables(world)
    pair, p, q = world.pair, np.exp(world.pair.policy.log_probs), np.exp(world.pair.reference)
    weight = np.repeat(np.exp(sampler), every.mask.sum(1))
    contexts = every.contexts[every.mask]
    reverse = np.einsum("sv,svd->sd", p * np.log(p / q), pair.policy.scores)
    forward = -np.einsum("sv,svd->sd", q, pair.policy.scores)
    assert_close(exact.token_gradient(pair, [world.length])[0], weight @ reverse[contexts])
    assert_close(exact.token_forward_gradient(pair, [world.length])[0], weight @ forward[contexts])


@given(worlds(longest=4))
def test_the_future_gradient_is_that_of_the_prefixes(world):
    # sum over t of KL_t(prefix) times the scores of the tokens before t, under the policy
    pair, (every, p, _, _) = world.on_policy, tables(world)
    kl_rows = (np.exp(pair.policy.log_probs) * (pair.policy.log_probs - pair.reference)).sum(1)
    scores = pair.policy.scores[every.contexts, every.tokens] * every.mask[..., None]
    before = np.cumsum(scores, 1) - scores
    expected = np.exp(p) @ ((kl_rows[every.contexts] * every.mask)[..., None] * before).sum(1)
    assert_close(exact.future_gradient(world.pair, [world.length])[0], expected)


def test_the_future_gradient_ignores_the_sampler():
    world = build_world("markov", 3, 4, eos=True, off=True, seed=3)
    np.testing.assert_array_equal(exact.future_gradient(world.pair, [4]), exact.future_gradient(world.on_policy, [4]))
    assert np.abs(exact.token_gradient(world.pair, [4]) - exact.token_gradient(world.on_policy, [4])).max() > 1e-3


# ------------------------------------------------------------------------------------------------- missing support


def two_words(policy, reference):
    automaton = automata.markov(2, 1, start=(0,))
    return PolicyPair(automaton, tabular(automaton, np.array(policy)), log_softmax(np.array(reference)))


def test_forward_kl_is_infinite_where_the_policy_lacks_a_token():
    pair = two_words([[0.0, 0.0], [0.0, -np.inf]], [[0.0, 0.0], [0.0, 0.0]])
    assert exact.forward_kl(pair, [1, 2]).tolist() == [0.0, np.inf]  # context 1 emits from the second token on
    assert np.isfinite(exact.kl(pair, [1, 2])).all()


def test_mass_that_the_policy_lacks_is_missing_from_the_token_forward_gradient():
    pair = two_words([[0.3, 0.0], [0.0, -np.inf]], [[0.0, 0.4], [0.2, 0.0]])
    table = enumerate_configuration(parse("k3-in-loss"), pair, 3)
    assert_close(exact.token_forward_gradient(pair, [3])[0], table.mean)


def test_a_mismatch_that_is_never_reached_leaves_everything_finite():
    automaton = replace(automata.markov(2, 1, start=(0,)), next_context=np.array([[0, 0], [0, 1]]), states=())
    policy, reference = tabular(automaton, np.array([[0.3, 0], [0, 0]])), np.array([[0.0, 1.0], [0.0, -np.inf]])
    pair = PolicyPair(automaton, policy, log_softmax(reference))
    expected = enumerate_configuration(parse("k1-in-reward"), pair, 3)
    assert_close(exact.true_gradient(pair, [3])[0], expected.mean)
    assert_close(exact.kl(pair, [3])[0], expected.probability @ expected.value)


# --------------------------------------------------------------------------------------------------------- optimum


@given(worlds(cap=120), st.sampled_from((0.2, 1.0, 5.0)))
def test_the_optimum_tilts_the_reference_and_is_worth_beta_log_z(world, beta):
    # pi*(y) is proportional to pi_ref(y) exp(R(y) / beta) [E8]
    pair, (every, _, q, _) = world.pair, tables(world)
    rng = np.random.default_rng(3)
    reward, terminal = rng.normal(size=pair.reference.shape), rng.normal(size=pair.automaton.contexts)
    found = exact.optimum(pair, reward, beta, world.length, terminal)
    n = every.mask.sum(1) - 1
    last = pair.automaton.next_context[every.contexts[np.arange(len(n)), n], every.tokens[np.arange(len(n)), n]]
    total = (reward[every.contexts, every.tokens] * every.mask).sum(1) + terminal[last]
    z = np.exp(q) @ np.exp(total / beta)
    star = np.where(every.mask, found.log_probs[np.arange(world.length), every.contexts, every.tokens], 0.0).sum(1)
    assert_close(found.objective, beta * np.log(z))
    assert_close(np.exp(star), np.exp(q + total / beta) / z)


def tree(length=3, seed=0):
    """A tabular tree: V = 2, whole histories, one free logit pair per prefix."""
    world = build_world("history", 2, length, seed=seed)
    reward = np.random.default_rng(seed + 1).normal(size=world.pair.reference.shape)
    return world, reward


def at(world, log_probs):
    """The pair with another tabular policy on the tree."""
    return PolicyPair(world.pair.automaton, tabular(world.pair.automaton, log_probs), world.pair.reference)


def depths(world):
    return np.array([len(state) for state in world.pair.automaton.states])


def reward_gradient(pair, reward, length):
    every = sequences(pair.automaton, length)
    p, total = np.exp(log_probability(every, pair.policy.log_probs)), reward[every.contexts, every.tokens].sum(1)
    return (p * total) @ pair.policy.scores[every.contexts, every.tokens].sum(1), p, total


def star_of(world, reward, beta):
    found, depth = exact.optimum(world.pair, reward, beta, world.length), depths(world)
    return at(world, found.log_probs[depth, np.arange(len(depth))]), found


@pytest.mark.parametrize("beta", [0.3, 2.0])
def test_the_gradient_of_reward_less_beta_kl_vanishes_at_the_optimum(beta):
    # [E9], with the KL's gradient by k1-in-reward
    world, reward = tree()
    star, _ = star_of(world, reward, beta)
    pull = moments(star, [parse("k1-in-reward")], [3], covariance="none")[0].mean[0]
    up, _, _ = reward_gradient(star, reward, 3)
    assert_close(up - beta * pull, np.zeros_like(up), 1e-12)
    assert np.abs(up).max() > 1e-3


def test_what_is_lost_is_beta_kl_to_the_optimum():
    # beta log Z - J(pi) = beta KL(pi || pi*) [E12]
    world, reward = tree(seed=4)
    star, found = star_of(world, reward, 0.5)
    _, p, total = reward_gradient(world.pair, reward, 3)
    objective = p @ total - 0.5 * exact.kl(world.pair, [3])[0]
    to_star = PolicyPair(star.automaton, world.pair.policy, star.policy.log_probs)
    assert_close(found.objective - objective, 0.5 * exact.kl(to_star, [3])[0])


def fixed_point(world, reward, rule):
    """Backward induction with unregularised returns: ``rule(q, Q) -> pi`` in each context."""
    automaton, depth = world.pair.automaton, depths(world)
    value, pi = np.zeros(automaton.contexts), np.zeros_like(reward)
    for s in np.argsort(-depth, kind="stable"):
        ahead = value[automaton.next_context[s]] if depth[s] < world.length - 1 else 0.0
        q_values = reward[s] + ahead
        pi[s] = rule(np.exp(world.pair.reference[s]), q_values)
        value[s] = pi[s] @ q_values
    return at(world, np.log(pi))


def forward_rule(q, q_values, beta=0.5):
    """pi = beta q / (V + beta - Q), the normaliser V + beta by bisection."""
    low, high = q_values.max() + 1e-14, q_values.max() + beta
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (beta * q / (middle - q_values)).sum() > 1 else (low, middle)
    pi = beta * q / (middle - q_values)
    return pi / pi.sum()


def reverse_rule(q, q_values, beta=0.5):
    tilted = q * np.exp((q_values - q_values.max()) / beta)
    return tilted / tilted.sum()


@pytest.mark.parametrize(("name", "rule"), [("k2-in-loss", reverse_rule), ("k3-in-loss", forward_rule)])
def test_biased_configurations_stop_at_their_own_fixed_points(name, rule):
    # [E10], [E11]: stationary for the biased gradient, and not for the true one
    world, reward = tree(seed=2)
    pair = fixed_point(world, reward, rule)
    up, p, total = reward_gradient(pair, reward, 3)
    pull = moments(pair, [parse(name)], [3], covariance="none")[0].mean[0]
    assert_close(up - 0.5 * pull, np.zeros_like(up), 1e-9)
    assert np.abs(up - 0.5 * exact.true_gradient(pair, [3])[0]).max() > 1e-3
    assert p @ total - 0.5 * exact.kl(pair, [3])[0] < exact.optimum(world.pair, reward, 0.5, 3).objective - 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 0.0}, "beta = 0.0 must be positive"),
        ({"beta": np.nan}, "must be positive"),
        ({"beta": np.inf}, "must be positive"),
        ({"reward": np.zeros((2, 2))}, "reward must be finite with shape"),
        ({"reward": np.full((7, 2), np.inf)}, "reward must be finite"),
        ({"length": 4}, "beyond this automaton's horizon 3"),
    ],
)
def test_bad_optima_are_refused(change, message):
    world, reward = tree()
    with pytest.raises(ValueError, match=message):
        exact.optimum(world.pair, **({"reward": reward, "beta": 1.0, "length": 3} | change))


def test_an_end_takes_its_terminal_reward_once():
    # with an end, the optimum over sequences that stop at different times [E8]
    world = build_world("markov", 2, 4, eos=True, seed=5)
    terminal = np.array([0.0, 2.0])
    found = exact.optimum(world.pair, np.zeros((2, 2)), 1.0, 4, terminal)
    every, _, q, _ = tables(world)
    ended = ~every.mask[:, -1] | (every.tokens[:, -1] == 1)
    assert_close(found.objective, np.log(np.exp(q) @ np.exp(2.0 * ended)))


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "function", [exact.kl, exact.forward_kl, exact.true_gradient, exact.token_gradient, exact.visitation]
)
def test_lengths_are_checked_everywhere(function):
    pair = build_world("history", 2, 3, parameters=1).pair
    for lengths, message in (([], "no lengths"), ([3, 4], "beyond this automaton's horizon 3"), ([0], "too short")):
        with pytest.raises(ValueError, match=message):
            function(pair, lengths)
