"""What each configuration's expected gradient is: the identities of the paper's Appendix F and beyond.

Labels in brackets are those of the catalogue of theory. On the left of every comparison stand exact moments or
enumeration of a configuration, on the right a field that is computed another way.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given
from strategies import Plain, assert_close, build_world, finite_difference, worlds

from klgrad.synth import exact
from klgrad.synth.configurations import parse
from klgrad.synth.enumeration import (
    enumerate_configuration,
    expected_loss_gradient,
    log_probability,
    sequences,
    torch_batches,
    torch_policy,
)
from klgrad.synth.estimators import ESTIMATORS
from klgrad.synth.moments import moments
from klgrad.synth.policies import PolicyPair, log_softmax


def mean(name, pair, length):
    return moments(pair, [parse(name)], [length], covariance="none")[0].mean[0]


def fields(world):
    """Every named field, by the routes of ``exact``; 'on mu' has the sampler's prefixes."""
    on, length = world.on_policy, [world.length]
    sequence, forward = (f(on, length)[0] for f in (exact.true_gradient, exact.token_forward_gradient))
    return {
        "sequence": sequence,
        "token": exact.token_gradient(on, length)[0],
        "token on mu": exact.token_gradient(world.pair, length)[0],
        "token-forward": forward,
        "token-forward on mu": exact.token_forward_gradient(world.pair, length)[0],
        "sequence - token-forward": sequence - forward,
        "future": exact.future_gradient(on, length)[0],
        "zero": np.zeros_like(sequence),
    }


# ------------------------------------------------------------------------------------- the table 'what it gives'

# configurations: on-policy, token ratio, prefix or sequence ratio, no ratio off-policy
TABLE = {
    "k1-in-reward, k1-in-reward+rtg": ("sequence", "biased", "sequence", "biased"),
    "k1-in-reward+token, k1-in-both+token": ("token", "token on mu", "token", "neither"),
    "k1-in-loss": ("zero", "zero", "zero", "not zero"),
    "k3-in-loss": ("token-forward", "token-forward on mu", "token-forward", "neither"),
    "k3-in-reward, k3-in-reward+rtg": (*["sequence - token-forward", "biased"] * 2,),
    "k1-in-both, k1-in-both+rtg, k3-in-both, k3-in-both+rtg": ("sequence", "biased", "sequence", "biased"),
    "k3-in-both+token": ("token", "token on mu", "token", "neither"),
    "full-in-loss": ("token", "token on mu", "token", "token on mu"),
    "full-in-reward, full-in-reward+rtg, full-in-reward+future": ("future", "biased", "future", "biased"),
    "full-in-both, full-in-both+rtg, full-in-both+future": ("sequence", "biased", "sequence", "biased"),
}
COLUMNS = ((False, ""), (True, "+token-ratio"), (True, "+prefix-ratio"), (True, "+sequence-ratio"), (True, ""))
CELLS = [
    (name.strip(), off, ratio, row[(0, 1, 2, 2, 3)[column]])
    for names, row in TABLE.items()
    for name in names.split(",")
    for column, (off, ratio) in enumerate(COLUMNS)
]
MARGIN = 0.02  # of the true gradient's norm


@lru_cache
def table_world(eos):
    world = build_world("markov", 3, 4, eos=eos, off=True, scale=1.5, seed=11)
    named = fields(world)
    for a in named:  # fields that coincide could not tell one cell from another
        for b in named:
            assert a == b or np.linalg.norm(named[a] - named[b]) > MARGIN * np.linalg.norm(named["sequence"])
    return world, named


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize(("name", "off", "ratio", "cell"), CELLS)
def test_what_each_configuration_gives(name, off, ratio, cell, eos):
    world, named = table_world(eos)
    got = mean(name + ratio, world.pair if off else world.on_policy, 4)
    assert_close(
        got, enumerate_configuration(parse(name + ratio), world.pair if off else world.on_policy, 4).mean, 1e-12
    )
    if cell in named:
        assert_close(got, named[cell], 1e-12)
    else:  # biased, neither, not zero: none of the names
        distance = {field: np.linalg.norm(got - value) for field, value in named.items()}
        assert min(distance.values()) > MARGIN * np.linalg.norm(named["sequence"]), distance


@pytest.mark.parametrize("eos", [False, True])
def test_whole_and_reward_to_go_have_one_mean_with_a_token_ratio_and_two_without(eos):
    world, named = table_world(eos)
    whole, rtg = (mean(f"k1-in-reward{c}+token-ratio", world.pair, 4) for c in ("", "+rtg"))
    assert_close(whole, rtg, 1e-12)
    whole, rtg = (mean(f"k1-in-reward{c}", world.pair, 4) for c in ("", "+rtg"))
    assert np.linalg.norm(whole - rtg) > MARGIN / 4 * np.linalg.norm(named["sequence"])


# --------------------------------------------------------------------------------- sequence level, on-policy (2.3)


@given(worlds())
def test_invariants_of_the_figure(world):
    named, on = fields(world), world.on_policy
    found = {n: mean(n, on, world.length) for n in ("k1-in-reward", "k1-in-loss", "k3-in-reward", "k3-in-loss")}
    true, size = named["sequence"], np.linalg.norm(named["sequence"])
    assert_close(found["k1-in-reward"], true, 1e-12)  # bias 0 [B2]
    assert np.linalg.norm(found["k1-in-loss"] - true) == pytest.approx(size, abs=1e-12)  # 100 per cent [B6, F1]
    assert_close(found["k3-in-loss"], named["token-forward"])  # [B8]
    assert_close(found["k3-in-reward"] + found["k3-in-loss"], true)  # [B9]
    assert_close(mean("full-in-reward", on, world.length), named["future"])  # [B15]
    assert_close(named["token"] + named["future"], true)  # the master decomposition [B5]


@pytest.mark.parametrize("name", [n for n, e in ESTIMATORS.items() if e.unbiased and e.consistent])
@pytest.mark.parametrize("credit", ["", "+rtg"])
@given(worlds(longest=4))
def test_both_of_an_unbiased_and_consistent_estimator_is_the_true_gradient(name, credit, world):
    got = mean(f"{name}-in-both{credit}", world.on_policy, world.length)
    assert_close(got, exact.true_gradient(world.pair, [world.length])[0])  # coefficient exactly 1 [B11, B16]


@pytest.mark.parametrize("name", [n for n, e in ESTIMATORS.items() if not (e.unbiased and e.consistent)])
def test_both_of_any_other_estimator_is_not(name):
    # far enough apart for clamps to bite
    world = build_world("markov", 3, 4, scale=3.0, seed=1)
    true = exact.true_gradient(world.pair, [4])[0]
    assert np.linalg.norm(mean(f"{name}-in-both", world.pair, 4) - true) > 0.01 * np.linalg.norm(true)


@pytest.mark.parametrize("name", ["k2-in-loss", "k3-straight-through-in-loss", "full-in-loss", "k1-in-reward+token"])
@given(worlds(longest=4))
def test_token_level_reverse_kl_comes_under_four_names(name, world):
    assert_close(mean(name, world.on_policy, world.length), fields(world)["token"])  # [B7, B14, B26]


@pytest.mark.parametrize("a", [-0.5, 0.3, 2.0])
@given(worlds(longest=4))
def test_the_alpha_family_moves_a_share_of_the_forward_gradient(a, world):
    named, on = fields(world), world.on_policy
    share = a * named["token-forward"]
    assert_close(mean(f"alpha({a})-in-loss", on, world.length), share)  # [B13']
    assert_close(mean(f"alpha({a})-in-reward", on, world.length), named["sequence"] - share)  # [B13]


def at_theta(world, theta):
    """The world's pair at another theta, for finite differences; prefix mass and samplers move with it."""
    log_probs = log_softmax(world.features @ theta)
    mean_feature = np.einsum("sv,svd->sd", np.exp(log_probs), world.features)
    policy = replace(world.pair.policy, log_probs=log_probs, scores=world.features - mean_feature[:, None], theta=theta)
    return PolicyPair(world.pair.automaton, policy, world.pair.reference)


LINEAR = build_world("history", 2, 4, off=True, parameters=3, seed=7)
LINEAR_EOS = build_world("markov", 3, 4, eos=True, off=True, parameters=3, seed=7)


def gradient_of(function, world):
    """Finite differences in theta of a scalar function of the on-policy pair."""
    return finite_difference(lambda theta: function(at_theta(world, theta)), world.pair.policy.theta)


@pytest.mark.parametrize("world", [LINEAR, LINEAR_EOS])
def test_both_of_k2_descends_the_expected_k2(world):
    def expected_k2(pair):
        return moments(pair, [parse("k2-in-reward")], [4], covariance="none")[0].estimate[0]

    slope, on = gradient_of(expected_k2, world), world.on_policy
    assert_close(mean("k2-in-both", on, 4), slope, 1e-8)  # [B12]
    assert_close(mean("k2-in-reward", on, 4), slope - fields(world)["token"], 1e-8)  # [B10]


def enumerated(loss, world, torch):
    theta, model = torch_policy(world.on_policy, world.features)
    table = torch.as_tensor(np.array(world.pair.reference))

    def batches():
        return torch_batches(model, lambda contexts: table[contexts], world.pair.automaton, world.length)

    return expected_loss_gradient(loss, theta, batches)[0].numpy()


@pytest.mark.parametrize("world", [LINEAR, LINEAR_EOS])
def test_sequence_level_estimators(world, torch):
    # the estimator of the whole sequence's log-ratio, not a sum over tokens [B17, B18]
    def total(batch):
        return (batch.log_probs - batch.reference).sum(1)

    def k3(batch):
        return torch.exp(-total(batch)) - 1 + total(batch)

    true = exact.true_gradient(world.pair, [4])[0]
    forward = gradient_of(lambda pair: exact.forward_kl(pair, [4])[0], world)
    assert_close(enumerated(lambda b: total(b) ** 2 / 2, world, torch), true)
    assert_close(enumerated(k3, world, torch), forward, 1e-8)
    assert_close(enumerated(lambda b: k3(b).detach() * b.log_probs.sum(1), world, torch), true - forward, 1e-8)
    assert np.abs(forward - fields(world)["token-forward"]).max() > 1e-3  # Lfwd is not this one


def test_a_geometric_mean_ratio_is_no_kl_gradient(torch):
    # k3 times exp(mean log-ratio) at value 1 [B21]
    def loss(batch):
        delta = batch.log_probs - batch.reference
        ratio = torch.exp((batch.log_probs - batch.log_probs.detach()).mean(1))
        return ratio * (torch.exp(-delta) - 1 + delta).sum(1)

    named = fields(LINEAR)
    expected = named["sequence - token-forward"] / 4 + named["token-forward"]
    assert_close(enumerated(loss, LINEAR, torch), expected)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("k1-in-reward+token", "k2-in-loss"),  # [B26]
        ("k3-straight-through-in-loss", "k2-in-loss"),
        ("k3-in-both+token+token-ratio", "k2-in-loss+token-ratio"),  # [D1']
        ("k3-in-loss+live-prefix-ratio", "k3-in-both+rtg+prefix-ratio"),
    ],
)
@pytest.mark.parametrize("world", [LINEAR, LINEAR_EOS])
def test_recipes_that_are_the_same_for_every_sample(one, other, world):
    a, b = (enumerate_configuration(parse(name), world.pair, 4).gradient for name in (one, other))
    assert_close(a, b, 1e-12)


def test_the_causal_both_per_sample():
    # prefix-ratio k3 on-policy is sum over t of [k1_t + the k3 of later tokens] times the score [B25]
    on = LINEAR.on_policy
    parts = [enumerate_configuration(parse(n), on, 4).gradient for n in ("k1-in-reward+token", "k3-in-reward+future")]
    assert_close(enumerate_configuration(parse("k3-in-both+rtg+prefix-ratio"), on, 4).gradient, sum(parts), 1e-12)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs", "chi-squared", "full"])
@given(worlds(longest=4))
def test_past_cross_terms_vanish(name, world):
    # reward-to-go changes nothing in expectation, for any function of prefix and token [B3, B4']
    whole, rtg = (mean(f"{name}-in-reward{c}", world.on_policy, world.length) for c in ("", "+rtg"))
    assert_close(whole, rtg)


# ------------------------------------------------------------------------------------------------ off-policy (3.1)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("k3-in-both+token+token-ratio", "token on mu"),  # [D1]
        ("k1-in-both+token+token-ratio", "token on mu"),  # [D2]
        ("k2-in-loss+token-ratio", "token on mu"),  # [D1']
        ("k2-in-loss+prefix-ratio", "token"),  # [D4]
        ("k2-in-loss+sequence-ratio", "token"),
        ("k3-in-loss+live-prefix-ratio", "sequence"),  # [D5]
        ("k1-in-loss+live-prefix-ratio", "sequence"),  # [D5']
        ("k1-in-reward+sequence-ratio", "sequence"),  # [D6]
        ("k3-in-loss+live-sequence-ratio", "sequence"),  # [D6']
        ("k3-in-loss+live-token-ratio", "token on mu"),
        ("full-in-loss+live-prefix-ratio", "sequence"),
    ],
)
@given(worlds(longest=4))
def test_ratios_off_policy(name, field, world):
    assert_close(mean(name, world.pair, world.length), fields(world)[field])


def test_a_live_token_ratio_on_k2_has_the_wrong_target():
    # grad of E_pi[k2] on frozen mu prefixes, which is no KL [D3]; checked by differentiating the rows
    for world in (LINEAR, LINEAR_EOS):
        weight = exact.visitation(world.pair, [4], world.pair.sampler)[0]

        def on_frozen_prefixes(pair, weight=weight):
            return weight @ (np.exp(pair.policy.log_probs) * pair.log_ratio**2 / 2).sum(1)

        got, named = mean("k2-in-loss+live-token-ratio", world.pair, 4), fields(world)
        assert_close(got, gradient_of(on_frozen_prefixes, world), 1e-8)
        assert min(np.abs(got - value).max() for value in named.values()) > 1e-2


@given(worlds(longest=4))
def test_a_value_frozen_at_rollout_time_aims_between_reference_and_sampler(world):
    # grad [KL(pi || pi_ref) - KL(pi || mu)] [D7]
    to_sampler = PolicyPair(world.pair.automaton, world.pair.policy, world.pair.sampler)
    expected = exact.true_gradient(world.pair, [world.length]) - exact.true_gradient(to_sampler, [world.length])
    got = mean("k1-in-reward+rollout-value+sequence-ratio", world.pair, world.length)
    assert_close(got, expected[0])


# -------------------------------------------------------------------------------- aggregation and baselines (4.1, 4.2)


def test_a_length_mean_turns_k1_in_loss_into_length_pressure():
    # E[G / |y|] = grad E[1 / |y|], not zero [E14, E14'']
    def inverse_length(pair):
        every = sequences(pair.automaton, 4)
        return np.exp(log_probability(every, pair.policy.log_probs)) @ (1 / every.mask.sum(1))

    got = mean("k1-in-loss+length-mean", LINEAR_EOS.on_policy, 4)
    assert_close(got, gradient_of(inverse_length, LINEAR_EOS), 1e-8)
    assert np.linalg.norm(got) > 0.01
    assert_close(mean("k1-in-loss+length-mean", LINEAR.on_policy, 4), np.zeros(3), 1e-14)  # a fixed length


def test_the_length_normalised_kl_needs_that_pressure():
    # grad E[K / |y|] = E[(K / |y|) G] + E[G / |y|] [E14']
    def per_token(pair):
        return moments(pair, [parse("k1-in-reward+length-mean")], [4], covariance="none")[0].estimate[0]

    on = LINEAR_EOS.on_policy
    got = mean("k1-in-reward+length-mean", on, 4) + mean("k1-in-loss+length-mean", on, 4)
    assert_close(got, gradient_of(per_token, LINEAR_EOS), 1e-8)


@given(worlds(longest=4))
def test_a_constant_divisor_only_rescales(world):
    for name in ("k1-in-reward", "k3-in-both+prefix-ratio", "full-in-loss"):
        one, tenth = moments(world.pair, [parse(name), parse(f"{name}+divide=10")], [world.length])
        assert_close(tenth.mean * 10, one.mean, 1e-12)
        assert_close(tenth.covariance * 100, one.covariance, 1e-12)


def test_different_divisors_in_the_two_placements_are_not_proportional():
    # summed in the reward, averaged in the loss: TRUE - (1 - 1/T) Lfwd [B22]
    named, on = fields(LINEAR), LINEAR.on_policy
    got = mean("k3-in-reward", on, 4) + mean("k3-in-loss+divide=4", on, 4)
    assert_close(got, named["sequence"] - 0.75 * named["token-forward"])
    true = named["sequence"]
    assert got @ true / np.linalg.norm(got) / np.linalg.norm(true) < 0.95


@given(worlds(longest=4))
def test_on_policy_leave_one_out_is_unbiased(world):
    for name in ("k1-in-reward", "k3-in-both"):
        got = mean(f"{name}+loo", world.on_policy, world.length)
        assert_close(got, exact.true_gradient(world.pair, [world.length])[0])  # [C1]


@pytest.mark.parametrize("ratio", ["token-ratio", "prefix-ratio", "sequence-ratio"])
@given(worlds(longest=4))
def test_with_a_ratio_baselines_are_free_off_policy_too(ratio, world):
    with_b, without = (mean(f"k1-in-reward+{ratio}{b}", world.pair, world.length) for b in ("+b=2", ""))
    assert_close(with_b, without)


# ------------------------------------------------------------------------------- vector fields and scaling (4.3, 2.4)


@lru_cache
def curl(name):
    """Relative antisymmetric part of the Jacobian of the expected gradient, on a tree with free logits."""
    world = build_world("history", 2, 3, parameters=7, seed=13)
    theta = world.pair.policy.theta
    step = 1e-5 * np.eye(7)
    jacobian = [(mean(name, at_theta(world, theta + e), 3) - mean(name, at_theta(world, theta - e), 3)) for e in step]
    return np.linalg.norm(np.subtract(jacobian, np.transpose(jacobian))) / np.linalg.norm(jacobian)


@pytest.mark.parametrize("name", ["k1-in-reward", "k3-in-both", "k2-in-both", "full-in-both"])
def test_fields_that_are_gradients_have_no_curl(name):
    assert curl(name) < 1e-6  # [C3]


@pytest.mark.parametrize("name", ["k2-in-loss", "k3-in-loss", "k3-in-reward", "full-in-reward"])
def test_fields_that_are_no_gradients_have_curl(name):
    assert curl(name) > 0.02  # [C3]


def test_with_one_token_every_field_is_a_gradient():
    world = build_world("positional", 3, 1, parameters=4, seed=2)
    theta, step = world.pair.policy.theta, 1e-5 * np.eye(4)
    for name in ("k2-in-loss", "k3-in-loss", "k3-in-reward"):
        j = np.array(
            [(mean(name, at_theta(world, theta + e), 1) - mean(name, at_theta(world, theta - e), 1)) for e in step]
        )
        assert np.linalg.norm(j - j.T) < 1e-6 * np.linalg.norm(j)


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("k1-in-reward", 1),
        ("k2-in-loss", 1),
        ("k3-in-loss", 1),
        ("k3-in-reward", 2),
        ("k2-in-reward", 2),
        ("full-in-reward", 2),
    ],
)
def test_orders_near_the_reference(name, order):
    # [C4]: rewarded k3 and k2 exert no pull to first order
    world = build_world("markov2", 2, 4, parameters=3, seed=4)
    anchor, direction = world.pair.policy.theta, np.array([0.5, -0.7, 0.4])
    at_anchor = replace(world, pair=replace(world.pair, reference=world.pair.policy.log_probs))
    near, far = (np.linalg.norm(mean(name, at_theta(at_anchor, anchor + e * direction), 4)) for e in (1e-4, 1e-3))
    assert np.log10(far / near) == pytest.approx(order, abs=0.02)


def test_the_plain_twin_of_the_helpers_is_the_oracle_itself():
    # Plain keeps X, Y and C; with nothing kept it must be what enumeration gives
    c = parse("k3-in-both+b=0.7+prefix-ratio+length-mean")
    table = enumerate_configuration(c, LINEAR_EOS.pair, 4)
    assert_close(Plain(LINEAR_EOS).moments(c)[0], table.mean, 1e-14)
    assert_close(Plain(LINEAR_EOS).moments(c)[1], table.covariance, 1e-13)
