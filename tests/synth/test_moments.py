"""Exact moments against enumeration of the plain formula: every option, both engines, all lengths at once."""

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import (
    Plain,
    World,
    assert_close,
    build_world,
    configurations,
    grid,
    thinned_worlds,
    truncated_k3,
    worlds,
)

from klgrad.synth import products, rows
from klgrad.synth.automata import Automaton, markov, positional
from klgrad.synth.configurations import Configuration, parse
from klgrad.synth.enumeration import enumerate_configuration, enumerate_leave_one_out, log_probability, sequences
from klgrad.synth.exact import true_gradient
from klgrad.synth.moments import full_fits, moments
from klgrad.synth.policies import PolicyPair, linear, log_softmax, tabular

# off-policy, random length, d = 3: nothing degenerate for an option to hide behind
GRID_WORLD = build_world("markov2", 3, 3, eos=True, off=True, parameters=3, seed=1)
GRID_NAMES = ("k1", "k3", "k3-straight-through", "full")
TINY = build_world("markov", 3, 2, eos=True, off=True, parameters=2, seed=3)  # 7 sequences: 343 groups of three


@pytest.fixture(params=["doubling", "stepping"])
def engine(request, monkeypatch):
    """Forces one of the two internal engines, and makes the other one fail."""
    monkeypatch.setattr(products, "_DENSE_WORK", np.inf if request.param == "doubling" else 0)
    other = "_by_steps" if request.param == "doubling" else "_by_doubling"
    monkeypatch.setattr(products._System, other, None)
    return request.param


def agrees(found, mean, covariance, at=-1, tol=1e-10):
    assert_close(found.mean[at], mean, tol)
    assert_close(found.covariance[at], covariance, tol)


# ------------------------------------------------------------------------------------------ against the plain twin


@pytest.mark.parametrize("name", GRID_NAMES)
def test_every_option_agrees_with_enumeration(name):
    plain, family = Plain(GRID_WORLD), grid(name)
    for first in range(0, len(family), 100):
        part = family[first : first + 100]
        for c, found in zip(part, moments(GRID_WORLD.pair, part, [3], covariance="full"), strict=True):
            agrees(found, *plain.moments(c))


@given(worlds(cap=120), st.lists(configurations(), min_size=1, max_size=3))
def test_random_worlds_and_configurations_agree_with_enumeration(world, chosen):
    plain = Plain(world)
    for c, found in zip(chosen, moments(world.pair, chosen, [world.length], covariance="full"), strict=True):
        agrees(found, *plain.moments(c))


@given(
    thinned_worlds(cap=120),
    st.lists(configurations(), min_size=1, max_size=2),
    configurations(names=("full",)),
)
def test_tokens_that_sampler_policy_or_reference_lack_agree_with_enumeration(world, chosen, full):
    plain, every = Plain(world), [*chosen, full]
    for c, found in zip(every, moments(world.pair, every, [world.length], covariance="full"), strict=True):
        agrees(found, *plain.moments(c))


@given(worlds(off=False), configurations(names=("k1", "k2", "k3", "full")))
def test_random_on_policy_worlds_agree_with_enumeration(world, chosen):
    mean, covariance = Plain(world).moments(chosen)
    agrees(moments(world.pair, [chosen], [world.length], covariance="full")[0], mean, covariance)


@pytest.mark.parametrize("kind", ["markov", "positional", "history", "counts"])
@pytest.mark.parametrize("eos", [False, True])
def test_both_engines_agree_with_enumeration(engine, kind, eos):
    world = build_world(kind, 2 + eos, 3, eos=eos, off=True, parameters=2, seed=5)
    plain = Plain(world)
    chosen = [
        parse(text)
        for text in (
            "k3-in-both+prefix-ratio+optimal-baseline+length-mean",
            "full-in-both+rtg+sequence-ratio+mean-baseline",
            "k1-in-reward+token-ratio+optimal-baseline-per-coordinate",
        )
    ]
    for c in chosen:
        agrees(moments(world.pair, [c], [world.length], covariance="full")[0], *plain.moments(c))


def test_both_engines_agree_far_past_enumeration(monkeypatch):
    # 200 tokens: several chunks of doubling, with what has ended carried over between them
    world = build_world("markov", 3, 200, eos=True, off=True, seed=8, scale=0.4)
    chosen, lengths = [parse("k3-in-both+prefix-ratio+length-mean"), parse("k1-in-reward+loo")], [1, 127, 128, 129, 200]
    one = moments(world.pair, chosen, lengths, covariance="diagonal")
    monkeypatch.setattr(products, "_DENSE_WORK", 0)
    for a, b in zip(one, moments(world.pair, chosen, lengths, covariance="diagonal"), strict=True):
        assert_close(a.mean, b.mean)
        assert_close(a.covariance, b.covariance)


@pytest.mark.parametrize("kind", ["markov2", "history", "counts"])
@pytest.mark.parametrize("eos", [False, True])
def test_scores_without_their_zeros_give_the_same_moments(monkeypatch, engine, kind, eos):
    """Every credit and ratio on tabular policies, whose contexts touch few coordinates; contexts differ in how many."""
    world = build_world(kind, 3, 3, eos=eos, off=True, seed=4)
    scores = world.pair.policy.scores.copy()
    scores[0, 1:, :2] = 0.0  # the first context has scores in fewer coordinates than the others
    pair = replace(world.pair, policy=replace(world.pair.policy, scores=scores))
    names = ["k1-in-reward+loo", "k3-in-both+rtg+prefix-ratio", "k3-in-loss+sequence-ratio", "full-in-both+future"]
    chosen = [parse(name) for name in (*names, "k1-in-both+token+token-ratio+length-mean+optimal-baseline")]
    monkeypatch.setattr(rows, "_SPARSE_ENTRIES", np.inf)
    whole = moments(pair, chosen, [1, 3], covariance="diagonal")
    monkeypatch.setattr(rows, "_SPARSE_ENTRIES", 0)
    assert rows.Rows(pair).score.shape[2] < pair.policy.parameters
    for a, b in zip(whole, moments(pair, chosen, [1, 3], covariance="diagonal"), strict=True):
        assert_close(a.mean, b.mean)
        assert_close(a.covariance, b.covariance)


def test_sixty_four_tokens_are_within_reach():
    """d = 4,096: the mean of k1-in-reward is the true gradient by the other route, and a variance comes with it."""
    automaton, rng = markov(64, 1, start=(0,)), np.random.default_rng(0)
    shape = automaton.next_context.shape
    pair = PolicyPair(automaton, tabular(automaton, rng.normal(size=shape)), log_softmax(rng.normal(size=shape)))
    (m,) = moments(pair, [parse("k1-in-reward")], [3])
    assert_close(m.mean, true_gradient(pair, [3]))
    assert m.covariance[0] > 0


@pytest.mark.parametrize("credit", ["", "+token"])
@pytest.mark.parametrize("far", [5.0, 20.0, 45.0])
def test_k3_in_both_does_not_cancel_near_determinism(credit, far):
    """(r - 1 + delta) + (1 - r) = delta: at one token the gradient is delta p, however large r is."""
    automaton = markov(3, 0)
    policy = tabular(automaton, np.array([[0.0, -far, 0.5]]))
    pair = PolicyPair(automaton, policy, log_softmax(np.array([[0.0, 0.3, -0.2]])))
    (m,) = moments(pair, [parse(f"k3-in-both{credit}")], [1], covariance="diagonal")
    probability, each = np.exp(policy.log_probs[0]), pair.log_ratio[0][:, None] * policy.scores[0]
    mean = probability @ each
    assert m.mean[0] == pytest.approx(mean, rel=1e-12, abs=1e-14)
    assert m.covariance[0] == pytest.approx(probability @ each**2 - mean**2, rel=1e-9, abs=1e-30)


@given(world=worlds(), configuration=configurations())
def test_reward_and_loss_in_one_row_give_the_same_moments(world, configuration):
    assume(configuration.placement == "both")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_CANCELS", np.inf)
        (two,) = moments(world.pair, [configuration], [world.length], covariance="diagonal")
        patch.setattr(rows, "_CANCELS", -1.0)
        (one,) = moments(world.pair, [configuration], [world.length], covariance="diagonal")
    assert_close(one.mean, two.mean)
    assert_close(one.covariance, two.covariance, 1e-8)


def test_a_token_whose_probability_underflows_is_not_left_out(engine):
    """k3's slope there is -e^3200: the variance is infinite, and must not come out as that of the other tokens."""
    automaton = markov(2, 1, start=(0,))
    steep = np.array([[0.0, 800.0], [800.0, 0.0]])
    pair = PolicyPair(automaton, tabular(automaton, steep), log_softmax(-steep))
    (m,) = moments(pair, [parse("k3-in-loss")], [4])
    assert not np.isfinite(m.covariance[0])


def test_full_vocabulary_losses_count_tokens_that_are_never_sampled(engine):
    automaton = markov(3, 1, start=(0,))
    behaviour = log_softmax(np.tile([0.0, 0.5, -np.inf], (3, 1)))
    rng = np.random.default_rng(5)
    policy, reference = tabular(automaton, rng.normal(size=(3, 3))), log_softmax(rng.normal(size=(3, 3)))
    world = World(PolicyPair(automaton, policy, reference, behaviour), 3, None)
    for name in ("full-in-loss", "full-in-both+prefix-ratio", "k3-in-both+token-ratio"):
        (m,) = moments(world.pair, [parse(name)], [3], covariance="full")
        agrees(m, *Plain(world).moments(parse(name)))


def test_an_optimal_baseline_of_scores_that_never_vary_is_zero(engine):
    """Of two tokens the sampler draws one: Y is the same number for every sequence, and not 0."""
    automaton = markov(2, 0)
    behaviour = log_softmax(np.array([[0.0, -np.inf]]))
    policy, reference = tabular(automaton, np.array([[0.3, 0.0]])), log_softmax(np.array([[0.1, 0.0]]))
    pair = PolicyPair(automaton, policy, reference, behaviour)
    for c in (parse(f"k3-in-reward+optimal-baseline{kind}") for kind in ("", "-per-coordinate")):
        (m,) = moments(pair, [c], [3, 7])
        assert np.array_equal(m.baseline, np.zeros((2, 2)))
        assert_close(m.mean, moments(pair, [parse("k3-in-reward")], [3, 7], covariance="none")[0].mean)


def test_sequences_that_have_all_ended_stay_as_they_are(engine):
    automaton = positional(2, 4, eos=True)
    certain = np.tile([-np.inf, 0.0], (automaton.contexts, 1))  # the end token, at once
    policy = tabular(automaton, np.zeros((automaton.contexts, 2)))
    pair = PolicyPair(automaton, policy, log_softmax(np.tile([0.0, 1.0], (automaton.contexts, 1))), certain)
    (m,) = moments(pair, [parse("k1-in-both+length-mean")], [1, 2, 4], covariance="diagonal")
    assert_close(m.mean, np.tile(m.mean[0], (3, 1)))
    assert np.abs(m.mean[0]).max() > 0.1
    assert_close(m.covariance, np.zeros_like(m.mean))


def test_rows_of_one_definition_are_carried_once():
    """The slope of k1 is 1, so its loss is the sum of scores that a baseline multiplies."""
    made = rows.Rows(GRID_WORLD.pair)
    k1, k3 = (made.loss(parse(f"{name}-in-loss+token-ratio")) for name in ("k1", "k3"))
    assert made.scores("token") == k1 != k3
    assert made.scores("none") != k1


def test_the_default_chooses_doubling_for_small_models_and_stepping_for_large(monkeypatch):
    chosen = [parse("k1-in-reward")]
    monkeypatch.setattr(products._System, "_by_steps", None)
    moments(build_world("markov", 2, 3).pair, chosen, [3])
    with pytest.raises(TypeError):
        moments(build_world("history", 2, 9, parameters=2).pair, chosen, [9])


def test_a_swapped_ratio_or_credit_would_not_pass():
    # the negative control of the comparisons above: neighbouring recipes are far apart on this world
    texts = [
        "k3-in-both",
        "k3-in-both+rtg",
        "k3-in-both+token-ratio",
        "k3-in-both+prefix-ratio",
        "k3-in-both+length-mean",
    ]
    found = moments(GRID_WORLD.pair, [parse(text) for text in texts], [3], covariance="full")
    for i, a in enumerate(found):
        for b in found[:i]:
            assert np.abs(a.mean - b.mean).max() > 1e-3
            assert np.abs(a.covariance - b.covariance).max() > 1e-3


# ------------------------------------------------------------------------------------------------------- lengths


@given(worlds(cap=100), st.lists(configurations(), min_size=1, max_size=2))
def test_lengths_in_one_pass_equal_each_alone(world, chosen):
    lengths = [world.length, 1, *range(1, world.length + 1)]  # unsorted, with repeats
    together = moments(world.pair, chosen, lengths, covariance="diagonal")
    for i, length in enumerate(lengths):
        for a, b in zip(together, moments(world.pair, chosen, [length], covariance="diagonal"), strict=True):
            assert_close(a.mean[i], b.mean[0])
            assert_close(a.covariance[i], b.covariance[0])
            assert_close(a.estimate[i], b.estimate[0])
            assert_close(a.estimate_variance[i], b.estimate_variance[0])


@pytest.mark.parametrize("length", [1, 2, 3])
def test_each_length_of_one_pass_agrees_with_enumeration(engine, length):
    c = parse("k3-in-both+prefix-ratio+mean-baseline+length-mean")
    mean, covariance = Plain(GRID_WORLD, length).moments(c)
    agrees(moments(GRID_WORLD.pair, [c], [1, 2, 3], covariance="full")[0], mean, covariance, at=length - 1)


# ---------------------------------------------------------------------------------------------------- covariances


@given(worlds(cap=60), configurations(baselines=("", "b=0.7", "optimal-baseline", "loo")))
def test_trace_and_diagonal_are_those_of_the_full_covariance(world, c):
    full, diagonal, trace, none = (
        moments(world.pair, [c], [1, world.length], covariance=kind, samples=4)[0]
        for kind in ("full", "diagonal", "trace", "none")
    )
    assert_close(diagonal.covariance, np.diagonal(full.covariance, axis1=1, axis2=2))
    assert_close(trace.covariance, diagonal.covariance.sum(1))
    assert_close(full.covariance, np.swapaxes(full.covariance, 1, 2))
    assert none.covariance is None
    assert np.isnan(none.estimate_variance).all()
    for found in (diagonal, trace, none):
        assert_close(found.mean, full.mean)


@given(worlds(cap=60), configurations(baselines=("", "optimal-baseline-per-coordinate", "loo")))
def test_covariances_are_positive_semidefinite(world, c):
    found = moments(world.pair, [c], [world.length], covariance="full", samples=6)[0].covariance[0]
    assert np.linalg.eigvalsh(found).min() >= -1e-10 * max(1.0, np.abs(found).max())


def test_configurations_together_equal_each_alone():
    chosen = list(grid("k3"))[::37]
    for c, found in zip(chosen, moments(GRID_WORLD.pair, chosen, [3], covariance="full"), strict=True):
        alone = moments(GRID_WORLD.pair, [c], [3], covariance="full")[0]
        assert found.configuration == c
        agrees(found, alone.mean[-1], alone.covariance[-1])


# ------------------------------------------------------------------------------------------------------ baselines


@pytest.mark.parametrize("ratio", ["", "+token-ratio", "+prefix-ratio", "+sequence-ratio"])
@pytest.mark.parametrize("off", [False, True])
def test_optimal_baselines_cannot_be_improved(ratio, off):
    pair = GRID_WORLD.pair if off else GRID_WORLD.on_policy
    p, x, y, _ = Plain(replace(GRID_WORLD, pair=pair)).parts(parse(f"k1-in-reward{ratio}"))

    def variances(b):
        g = x - b * y
        return p @ (g - p @ g) ** 2

    options = ("optimal-baseline", "optimal-baseline-per-coordinate")
    chosen = [parse(f"k1-in-reward{ratio}+{option}") for option in options]
    scalar, each = (m.covariance[0] for m in moments(pair, chosen, [3], covariance="diagonal"))
    trials = np.array([variances(b) for b in np.linspace(-6, 6, 2401)])
    assert trials.sum(1).min() == pytest.approx(scalar.sum(), rel=1e-4)
    np.testing.assert_allclose(trials.min(0), each, rtol=1e-4)
    assert scalar.sum() <= trials.sum(1).min()
    assert each.sum() < scalar.sum()


@pytest.mark.parametrize("ratio", ["", "+prefix-ratio"])
def test_the_baseline_reported_is_the_one_its_name_stands_for(ratio):
    plain, names = Plain(GRID_WORLD), ("b=0.7", "mean-baseline", "optimal-baseline", "optimal-baseline-per-coordinate")
    chosen = [parse(f"k3-in-both{ratio}+{name}+divide=3") for name in names]
    for c, found in zip(chosen, moments(GRID_WORLD.pair, chosen, [3], covariance="none"), strict=True):
        assert_close(found.baseline[0], np.broadcast_to(plain.baseline(c), 3))
    none, loo, mean = moments(
        GRID_WORLD.pair, [parse(f"k1-in-reward{ratio}{b}") for b in ("", "+loo", "+mean-baseline")], [3]
    )
    np.testing.assert_array_equal(none.baseline, np.zeros((1, 3)))
    np.testing.assert_array_equal(loo.baseline, mean.baseline)


@pytest.mark.parametrize("unit", [1e-8, 1e8])
def test_an_optimal_baseline_does_not_depend_on_the_units_of_parameters(unit):
    old, features = GRID_WORLD.pair, GRID_WORLD.features
    pair = replace(old, policy=linear(old.automaton, features * unit, old.policy.theta / unit))
    for option in ("optimal-baseline", "optimal-baseline-per-coordinate"):
        a, b = (moments(p, [parse(f"k1-in-reward+{option}")], [3], covariance="none")[0] for p in (old, pair))
        assert np.abs(a.baseline).min() > 0.01
        assert_close(b.baseline, a.baseline, 1e-8)


def test_a_coordinate_without_scores_has_the_optimal_baseline_zero():
    automaton = markov(2, 0)
    features = np.array([[[1.0, 0.0], [0.0, 0.0]]])  # the second parameter does nothing
    pair = PolicyPair(automaton, linear(automaton, features, np.zeros(2)), log_softmax(np.array([[0.4, 0.0]])))
    (m,) = moments(pair, [parse("k1-in-reward+optimal-baseline-per-coordinate")], [2], covariance="diagonal")
    assert m.baseline[0, 0] != 0
    assert m.baseline[0, 1] == m.covariance[0, 1] == m.mean[0, 1] == 0


@pytest.mark.parametrize("baseline", ["mean-baseline", "optimal-baseline", "b=-2", "loo"])
def test_on_policy_baselines_are_free(baseline):
    pair = GRID_WORLD.on_policy
    plain, with_b = moments(pair, [parse("k1-in-reward"), parse(f"k1-in-reward+{baseline}")], [1, 3])
    assert_close(plain.mean, with_b.mean)
    assert (np.abs(plain.covariance - with_b.covariance) > 1e-4).all()


@pytest.mark.parametrize("name", ["k1", "full"])
def test_leave_one_out_agrees_with_all_groups(name):
    family = grid(name, baselines=("loo",))[12:]  # without the loss placement, which has no baseline
    found = moments(TINY.pair, family, [2], covariance="full", samples=2)
    for c, m in zip(family, found, strict=True):
        mean, covariance = enumerate_leave_one_out(c, TINY.pair, 2, 2)
        agrees(m, mean, 2 * covariance)


@given(worlds(cap=9, longest=3), configurations(baselines=("loo",), names=("k1", "k3", "full")), st.integers(2, 3))
def test_leave_one_out_agrees_with_all_groups_on_random_worlds(world, c, samples):
    if c.baseline == "loo":
        found = moments(world.pair, [c], [world.length], covariance="full", samples=samples)[0]
        mean, covariance = enumerate_leave_one_out(c, world.pair, world.length, samples)
        agrees(found, mean, samples * covariance)


def test_leave_one_out_within_groups_depends_on_the_group_alone():
    c, found = parse("k3-in-both+rtg+prefix-ratio+length-mean+loo=3"), []
    for samples in (3, 6, 300):
        found.append(moments(TINY.pair, [c], [2], covariance="full", samples=samples)[0])
    mean, covariance = enumerate_leave_one_out(c, TINY.pair, 2, 3)
    for m in found:
        agrees(m, mean, 3 * covariance)
    larger = moments(
        TINY.pair, [parse("k3-in-both+rtg+prefix-ratio+length-mean+loo")], [2], covariance="full", samples=6
    )
    assert np.abs(larger[0].covariance - found[0].covariance).max() > 1e-3


def test_many_samples_turn_leave_one_out_into_its_limit():
    # Var(X - E[C] Y - E[Y] C): on-policy E[Y] = 0, so the mean baseline's
    pair = GRID_WORLD.on_policy
    loo = moments(pair, [parse("k1-in-reward+loo")], [3], samples=10**9)[0].covariance
    assert_close(loo, moments(pair, [parse("k1-in-reward+mean-baseline")], [3])[0].covariance, 1e-7)


# ------------------------------------------------------------------------------------------------- value estimates


def estimate_by_enumeration(c, world):
    """Probabilities and sum_t lambda_t c_t / D of every sequence, from the definition."""
    pair, every = world.pair, sequences(world.pair.automaton, world.length)
    at, est = (every.contexts, every.tokens), c.estimator
    rho = np.where(every.mask, np.exp(pair.policy.log_probs - pair.sampler)[at], 1.0)
    if est.full:
        values = est.value(pair.policy.log_probs, pair.reference)[every.contexts]
    else:
        top = pair.sampler if c.rollout_value else pair.policy.log_probs
        values = est.value(top - pair.reference)[at]
    run = np.cumprod(rho, axis=1)
    lam = {"none": np.ones_like(rho), "token": rho, "prefix": run, "sequence": run[:, -1:] + 0 * rho}[c.ratio]
    if est.full and c.ratio == "token":
        lam = np.ones_like(rho)
    if est.full and c.ratio == "prefix":
        lam = run / rho
    divisor = {"sum": 1.0, "divide": c.divisor, "length-mean": every.mask.sum(1)}[c.aggregation]
    return np.exp(log_probability(every, pair.sampler)), (lam * values * every.mask).sum(1) / divisor


@pytest.mark.parametrize("name", ["k3", "full"])
def test_value_estimates_agree_with_enumeration_for_every_option(name):
    family = grid(name, baselines=("",))
    for c, found in zip(family, moments(GRID_WORLD.pair, family, [3]), strict=True):
        p, k = estimate_by_enumeration(c, GRID_WORLD)
        assert_close(found.estimate[0], p @ k)
        assert_close(found.estimate_variance[0], p @ (k - p @ k) ** 2)


@given(worlds(cap=100), configurations(baselines=("",)))
def test_value_estimates_agree_with_enumeration_on_random_worlds(world, c):
    p, k = estimate_by_enumeration(c, world)
    found = moments(world.pair, [c], [world.length])[0]
    assert_close(found.estimate[0], p @ k)
    assert_close(found.estimate_variance[0], p @ (k - p @ k) ** 2)


# ------------------------------------------------------------------------------------------------- corners, refusals


def test_a_token_that_is_never_sampled_adds_nothing():
    world = build_world("markov", 3, 3, seed=2)
    holes = np.where(np.arange(3) == world.pair.automaton.next_context.shape[1] - 1, -np.inf, 0.0)
    logits = world.pair.policy.log_probs + holes
    pair = PolicyPair(world.pair.automaton, tabular(world.pair.automaton, logits), world.pair.reference)
    for text in ("k1-in-reward", "k3-in-loss", "full-in-both"):
        found = moments(pair, [parse(text)], [3], covariance="full")[0]
        table = enumerate_configuration(parse(text), pair, 3)
        agrees(found, table.mean, table.covariance)


def unreachable_mismatch():
    """Two contexts, the second never entered, where the reference lacks what the policy has."""
    automaton = build_world("markov", 2, 1).pair.automaton
    automaton = replace(automaton, next_context=np.array([[0, 0], [0, 1]]), states=())
    reference = log_softmax(np.array([[0.0, 1.0], [0.0, -np.inf]]))
    return PolicyPair(automaton, tabular(automaton, np.array([[0.3, 0.0], [0.0, 0.0]])), reference)


@pytest.mark.parametrize("text", ["k1-in-reward", "k3-in-both", "full-in-reward", "full-in-loss", "full-in-both+rtg"])
def test_a_mismatch_that_is_never_reached_changes_nothing(engine, text):
    pair = unreachable_mismatch()
    table = enumerate_configuration(parse(text), pair, 3)
    agrees(moments(pair, [parse(text)], [3], covariance="full")[0], table.mean, table.covariance)


@pytest.mark.parametrize("text", ["k1-in-reward", "full-in-reward", "full-in-loss", "full-in-both"])
def test_the_row_of_the_end_is_ignored(engine, text):
    world = build_world("markov", 2, 3, eos=True, seed=2)
    reference = np.array(world.pair.reference)
    reference[world.pair.automaton.end] = [0.0, -np.inf]
    odd = replace(world.pair, reference=reference)
    a, b = (moments(pair, [parse(text)], [3], covariance="full")[0] for pair in (world.pair, odd))
    agrees(a, b.mean[-1], b.covariance[-1])


@pytest.mark.parametrize("steep", [0.1, 0.3, 0.7, 1.1, 2.3])
def test_what_never_varies_has_no_negative_variance(steep):
    """One sequence has all the probability; subtracting squares would leave some variances a rounding below zero."""
    automaton = markov(2, 0)
    certain, lengths = np.array([[0.0, -np.inf]]), [1, 2, 3, 5, 7, 20]
    policy, reference = tabular(automaton, np.array([[0.0, 0.4]])), log_softmax(np.array([[0.0, steep]]))
    pair = PolicyPair(automaton, policy, reference, certain)
    (m,) = moments(pair, [parse("k1-in-reward")], lengths, covariance="diagonal")
    assert np.abs(m.mean).min() > 0
    assert m.covariance.min() >= 0
    assert m.estimate_variance.min() >= 0
    assert_close(m.covariance / m.mean**2, np.zeros_like(m.mean))


@pytest.mark.parametrize("covariance", ["none", "trace"])
def test_an_overflow_of_one_configuration_leaves_the_others_alone(covariance):
    automaton = markov(3, 1, start=(0,))
    logits = np.array([[0.0, 0.5, -800.0], [0.3, 0.0, -800.0], [0.0, 0.0, 0.0]])
    pair = PolicyPair(automaton, tabular(automaton, logits), log_softmax(np.zeros((3, 3))))
    texts = ("k1-in-reward", "k3-in-loss")
    (alone,) = moments(pair, [parse(texts[0])], [1, 3], covariance=covariance)
    beside, overflown = moments(pair, [parse(text) for text in texts], [1, 3], covariance=covariance)
    assert not np.isfinite(overflown.mean).all()
    assert np.isfinite(alone.mean).all()
    assert np.abs(alone.mean).max() > 0.1
    np.testing.assert_array_equal(beside.mean, alone.mean)
    np.testing.assert_array_equal(beside.covariance, alone.covariance)


def test_a_full_covariance_fits_up_to_a_bound_and_is_refused_beyond():
    automaton = markov(2, 1, start=(0,))  # 2 contexts x 2 tokens x d^2 = 2^20 at d = 512
    made = [linear(automaton, np.zeros((2, 2, d)), np.zeros(d)) for d in (512, 513)]
    fits, beyond = (PolicyPair(automaton, policy, log_softmax(np.zeros((2, 2)))) for policy in made)
    assert full_fits(fits)
    assert not full_fits(beyond)
    with pytest.raises(ValueError, match="a full covariance over d = 513 parameters does not fit: ask for the diag"):
        moments(beyond, [parse("k1-in-reward")], [1], covariance="full")
    assert moments(beyond, [parse("k1-in-reward")], [1])[0].covariance.shape == (1,)  # what the refusal offers


def test_no_configurations_have_no_moments():
    assert moments(TINY.pair, [], [2]) == []


def test_moments_cannot_be_altered():
    (m,) = moments(TINY.pair, [parse("k1-in-reward")], [2])
    with pytest.raises(FrozenInstanceError):
        m.mean = np.zeros((1, 2))
    assert m in {m}  # by identity: arrays have neither a truth value nor a hash


def test_moments_are_of_a_thousand_samples_unless_said_otherwise():
    default, thousand, fewer = (
        moments(TINY.pair, [parse("k1-in-reward+loo")], [2], **options)[0].covariance
        for options in ({}, {"samples": 1000}, {"samples": 999})
    )
    assert default == thousand < fewer


def test_the_numbers_of_contexts_mean_nothing(engine):
    """The end as context 0, where a careless ``end > 0`` would overlook it."""
    old, automaton = GRID_WORLD.pair, GRID_WORLD.pair.automaton
    back = np.roll(np.arange(automaton.contexts), 1)  # what a new number was before
    now = np.argsort(back)
    renumbered = Automaton(now[automaton.next_context[back]], int(now[automaton.start]), int(now[automaton.end]))
    policy = linear(renumbered, GRID_WORLD.features[back], old.policy.theta)
    pair = PolicyPair(renumbered, policy, old.reference[back], old.behaviour[back])
    assert renumbered.end == 0
    chosen = [parse("k3-in-both+prefix-ratio+length-mean"), parse("k1-in-reward+loo")]
    for a, b in zip(*(moments(p, chosen, [1, 3], covariance="diagonal") for p in (old, pair)), strict=True):
        assert_close(a.mean, b.mean)
        assert_close(a.covariance, b.covariance)


def test_a_divisor_acts_with_divide_only():
    with pytest.raises(ValueError, match="a divisor of 2 needs the aggregation 'divide', not 'sum'"):
        replace(parse("k1-in-reward+divide=2"), aggregation="sum")
    plain, divided = moments(TINY.pair, [parse("k1-in-reward"), parse("k1-in-reward+divide=2")], [2])
    for field, power in (("mean", 1), ("covariance", 2), ("estimate", 1), ("estimate_variance", 2)):
        assert_close(getattr(plain, field) / 2**power, getattr(divided, field))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"covariance": "all"}, "covariance 'all' is none of none, trace, diagonal, full"),
        ({"lengths": []}, "no lengths"),
        ({"lengths": [0]}, "length 0 is too short"),
        ({"samples": 1}, "1 samples cannot be split into groups of 1"),
        ({"samples": 1, "covariance": "none"}, "1 samples cannot be split into groups of 1"),
    ],
)
def test_bad_requests_are_refused(options, message):
    request = {"lengths": [2], "covariance": "trace", "samples": 4} | options
    with pytest.raises(ValueError, match=message):
        moments(TINY.pair, [parse("k1-in-reward+loo")], request.pop("lengths"), **request)


def test_groups_must_divide_the_samples():
    with pytest.raises(
        ValueError, match=r"loo=3: 10 samples cannot be split into groups of 3: give samples in a multiple"
    ):
        moments(TINY.pair, [parse("k1-in-reward+loo=3")], [2], samples=10)


def test_own_estimators_of_one_name_are_not_mixed_up():
    """Tables and rows are shared between configurations of one request: by functions, not by names."""
    asked = [
        Configuration(truncated_k3(bound), placement, credit=credit, ratio="token", rollout_value=frozen)
        for bound in (0.2, 0.9)
        for placement, credit, frozen in (("loss", "whole", False), ("both", "rtg", False), ("reward", "whole", True))
    ]
    together = moments(GRID_WORLD.pair, asked, [3])
    alone = [moments(GRID_WORLD.pair, [configuration], [3])[0] for configuration in asked]
    for one, other in zip(together, alone, strict=True):
        assert_close(one.mean, other.mean)
        assert_close(one.covariance, other.covariance)
        assert_close(one.estimate, other.estimate)
    assert np.abs(alone[0].mean - alone[3].mean).max() > 1e-3


@pytest.mark.parametrize("name", ["k3", "alpha(0.5)", "jensen-shannon"])
def test_values_frozen_by_a_sampler_that_is_the_policy_keep_their_digits(name):
    """Off-policy in name alone: value and slope cancel far below the reference as they do on-policy."""
    automaton = markov(2, 1, start=(0,))
    policy = tabular(automaton, np.tile([-30.0, 0.0], (len(automaton.next_context), 1)))
    reference = log_softmax(np.zeros_like(policy.log_probs))
    own = parse(f"{name}-in-both")
    frozen, pair = replace(own, rollout_value=True), PolicyPair(automaton, policy, reference)
    (usual,) = moments(pair, [own], [1])
    (stale,) = moments(replace(pair, behaviour=policy.log_probs), [frozen], [1])
    assert usual.covariance > 0
    np.testing.assert_allclose(stale.mean, usual.mean, rtol=1e-12)
    np.testing.assert_allclose(stale.covariance, usual.covariance, rtol=1e-12)


@pytest.mark.parametrize("placement", ["reward", "both"])
def test_large_values_of_the_past_leave_no_rounding_in_the_mean(placement):
    """Of 1e17 at a token of probability 1e-17, what the next token's score takes of it is zero and was 1e-17."""
    automaton = markov(2, 1)
    policy = tabular(automaton, np.array([[20.3, -19.2], [-19.7, 18.7], [-19.1, -19.6]]))
    pair = PolicyPair(automaton, policy, log_softmax(np.array([[-0.5, 0.6], [0.4, 0.3], [0.0, 0.5]])))
    truth = true_gradient(pair, [2])[0]
    (m,) = moments(pair, [parse(f"alpha(0.5)-in-{placement}")], [2], covariance="none")
    if placement == "both":
        np.testing.assert_allclose(m.mean[0], truth, rtol=1e-9)
    (rtg,) = moments(pair, [parse(f"alpha(0.5)-in-{placement}+rtg")], [2], covariance="none")
    np.testing.assert_allclose(m.mean, rtg.mean, rtol=1e-9)
