"""Recipes by two routes: sums of configurations against enumeration of sequences, groups and torch losses."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import assert_close, build_world, configurations, thinned_worlds, worlds

from klgrad.analysis import recipes
from klgrad.analysis.recipes import Recipe, expected, parse_recipe
from klgrad.synth.configurations import parse
from klgrad.synth.enumeration import enumerate_configuration, log_probability, sequences
from klgrad.synth.exact import mean_length
from klgrad.synth.mixtures import Term, mixture_moments
from klgrad.synth.moments import moments

SEEDS = st.integers(0, 2**16)
ALONE = (
    "k3-in-loss+geometric-ratio", "k3-in-loss+geometric-ratio+length-mean", "k2-in-loss+truncated-ratio=0.8",
    "k3-in-loss+live-token-ratio+clamp=0.3", "k1-in-reward+clamp=0.5", "k2-in-loss+clamp=0.1",
    "k3-in-loss+geometric-ratio+clamp=0.2+divide=3", "k1-in-reward+rtg+token-ratio+clamp=0.4+rollout-value",
)  # fmt: skip


def small(*, eos=True, off=False, seed=0, length=3):
    return build_world("markov", 2, length, eos=eos, off=off, seed=seed)


# ------------------------------------------------------------------------------------------------------- the grammar


@pytest.mark.parametrize(
    "name", [*ALONE, "k1-in-reward+group-std=8+token-mean", "k1-in-reward+loo=4+token-mean", "k3-in-loss"]
)
def test_names_print_back(name):
    assert str(parse_recipe(str(parse_recipe(name)))) == str(parse_recipe(name))


def test_options_may_stand_anywhere():
    assert parse_recipe("k1-in-reward+token-mean+group-mean=4+rtg") == parse_recipe(
        "k1-in-reward+rtg+group-mean=4+token-mean"
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("k1-in-reward+group-mean", "needs a whole number"),
        ("k1-in-reward+group-mean=1", "2 samples or more"),
        ("k1-in-reward+group-mean=2.5", "needs a whole number"),
        ("k1-in-loss+group-mean=4", "baseline of a reward"),
        ("k1-in-reward+loo=4+group-std=4", "no room for it"),
        ("k1-in-reward+group-mean=4+group-std=4", "one baseline at most"),
        ("k3-in-reward+geometric-ratio", "only ratio of a sampled loss"),
        ("k3-in-loss+token-ratio+truncated-ratio=2", "only ratio of a sampled loss"),
        ("full-in-loss+geometric-ratio", "only ratio of a sampled loss"),
        ("k3-in-loss+truncated-ratio=-1", "must be positive"),
        ("k3-in-loss+truncated-ratio", "needs a number"),
        ("k3-in-both+clamp=3", "in two"),
        ("k3-in-loss+sequence-ratio+clamp=3", "has another"),
        ("k3-in-loss+length-mean+token-mean", "divides already"),
        ("k3-in-loss+token-mean+token-mean", "twice"),
        ("k4-in-loss+token-mean", "unknown estimator"),
    ],
)
def test_what_cannot_be_is_refused_in_words(name, says):
    with pytest.raises(ValueError, match=says):
        parse_recipe(name)


# ------------------------------------------------------------------------------------------- sums of configurations


@given(worlds(), configurations(baselines=("", "b=0.7", "mean-baseline", "loo=5")))
def test_one_configuration_has_the_moments_it_has_alone(world, configuration):
    alone = moments(world.pair, [configuration], [world.length], samples=5)[0]
    mixed = mixture_moments(world.pair, [Term(2.0, configuration)], [world.length], samples=5)
    assert_close(mixed.mean / 2, alone.mean)
    assert_close(mixed.variance / 4, alone.covariance, 1e-8)


@given(
    worlds(),
    configurations(baselines=("", "b=0.7")),
    configurations(baselines=("", "b=-1")),
    st.tuples(st.booleans(), st.booleans()),
)
def test_a_sum_has_the_moments_of_the_enumerated_sum(world, first, second, per_token):
    parts = [enumerate_configuration(c, world.pair, world.length) for c in (first, second)]
    size = sequences(world.pair.automaton, world.length).mask.sum(axis=1)
    p, terms = parts[0].probability, (0.3 * parts[0].gradient, -1.7 * parts[1].gradient)
    mean, off = 0.0, 0.0
    for g, divided in zip(terms, per_token, strict=True):
        long = p @ size if divided else 1.0
        own = p @ g / long
        mean, off = mean + own, off + (g - own * (size[:, None] if divided else 1.0)) / long
    found = [Term(0.3, first, 0, per_token[0]), Term(-1.7, second, 0, per_token[1])]
    mixed = mixture_moments(world.pair, found, [world.length])
    assert_close(mixed.mean[0], mean, 1e-9)
    assert_close(mixed.variance[0], p @ (off**2).sum(axis=1), 1e-7)


def test_a_further_power_of_the_length():
    world = small()
    every = sequences(world.pair.automaton, 3)
    found = enumerate_configuration(parse("k3-in-reward"), world.pair, 3)
    mean = found.probability @ (found.gradient / every.mask.sum(axis=1)[:, None] ** 2)
    assert_close(mixture_moments(world.pair, [Term(1.0, parse("k3-in-reward+length-mean"), 1)], [3]).mean[0], mean)


@pytest.mark.parametrize(
    ("terms", "says"),
    [
        ([], "no terms"),
        (["k1-in-reward+optimal-baseline"], "optimal baseline"),
        (["k1-in-reward+loo=2", "k3-in-reward+loo=2"], "at most one"),
    ],
)
def test_sums_that_cannot_be_are_refused(terms, says):
    with pytest.raises(ValueError, match=says):
        mixture_moments(small().pair, [Term(1.0, parse(name)) for name in terms], [2])


def test_the_token_mean_of_large_batches_is_what_the_delta_method_says():
    """600 batches of 200: the mean within 5 standard errors (false alarm 3e-6 for d = 4), the variance to 25 %."""
    pair, n, batches = small().pair, 200, 600
    recipe = parse_recipe("k1-in-reward+token-mean")
    rng = np.random.default_rng(11)
    contexts, tokens, mask = recipes._draw(pair, 3, n * batches, rng)
    x, _, _ = recipes._tables(recipe, pair, contexts, tokens, mask)
    each = x.reshape(batches, n, -1).sum(axis=1) / mask.sum(axis=1).reshape(batches, n).sum(axis=1)[:, None]
    exact = expected([(1.0, recipe)], pair, 3)
    error = each.std(axis=0, ddof=1) / math.sqrt(batches)
    assert (np.abs(each.mean(axis=0) - exact.mean) < 5 * error + 2 / n * np.abs(exact.mean)).all()
    assert n * each.var(axis=0, ddof=1).sum() == pytest.approx(exact.variance, rel=0.25)


# -------------------------------------------------------------------------------------------- against enumeration


@given(
    st.one_of(worlds(cap=40, longest=3), thinned_worlds(cap=40, longest=3)),
    configurations(baselines=("", "b=0.7", "loo=2")),
    configurations(baselines=("", "b=0.7"), names=("full",)),
    st.booleans(),
)
def test_sums_with_full_vocabulary_terms_are_what_enumeration_makes_of_them(world, one, two, per_token):
    """Tokens that sampler, policy or reference lack included."""
    chosen = [Recipe(c, token_mean=per_token and c.aggregation == "sum") for c in (one, two)]
    terms = list(zip((0.7, -0.4), chosen, strict=True))
    exact = expected(terms, world.pair, world.length)
    enumerated = recipes._by_groups(terms, world.pair, world.length, 0, 0)
    assert (exact.method, enumerated.method) == ("exact", "enumeration")
    assert_close(exact.mean, enumerated.mean)
    assert exact.variance == pytest.approx(enumerated.variance, rel=1e-8, abs=1e-10)


@pytest.mark.parametrize("name", ["full-in-reward+group-std=2", "full-in-reward+rtg+group-std=2+token-mean"])
def test_a_group_std_of_the_full_vocabulary_is_enumerated(name):
    """On one token the full value is the same for every sample: nothing is left of it; on three it has a spread."""
    pair = small(seed=3).pair
    assert np.array_equal(expected([(1.0, parse_recipe(name))], pair, 1).mean, np.zeros(pair.policy.parameters))
    found = expected([(1.0, parse_recipe(name))], pair, 3)
    assert (found.method, found.variance > 0.01) == ("enumeration", True)


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("eos", [False, True])
def test_on_policy_recipes_are_sums_of_configurations(name, eos):
    """Exact route against enumeration of the batch formula."""
    pair = small(eos=eos, seed=4).pair
    recipe = parse_recipe(name)
    exact = expected([(1.0, recipe)], pair, 3)
    enumerated = recipes._by_groups([(1.0, recipe)], pair, 3, 0, 0)
    assert (exact.method, enumerated.method) == ("exact", "enumeration")
    assert_close(exact.mean, enumerated.mean)
    assert exact.variance == pytest.approx(enumerated.variance, rel=1e-9)


@pytest.mark.parametrize("name", [*ALONE, "k3-in-loss+live-token-ratio", "k2-in-loss+live-token-ratio"])
@pytest.mark.parametrize("off", [False, True])
def test_recipes_are_what_autograd_makes_of_their_loss(name, off, torch):
    """Third route: the loss as a library writes it, differentiated; a reward as a detached value times log-probs."""
    pair, T = small(off=off, seed=8).pair, 3
    recipe, c = parse_recipe(name), parse_recipe(name).configuration
    every = sequences(pair.automaton, T)
    theta = torch.tensor(pair.policy.theta, requires_grad=True)
    # the policy to first order in theta: its log-probs and their scores are all that a gradient sees
    log_p = torch.as_tensor(pair.policy.log_probs[every.contexts, every.tokens])
    scores = torch.as_tensor(pair.policy.scores[every.contexts, every.tokens])
    log_p = log_p + scores @ (theta - theta.detach())
    mask = torch.as_tensor(every.mask)
    delta = log_p - torch.as_tensor(pair.reference[every.contexts, every.tokens])
    log_rho = torch.where(mask, log_p - torch.as_tensor(pair.sampler[every.contexts, every.tokens]), 0.0)
    length = mask.sum(1, keepdim=True)
    # torch.clamp passes the gradient at the bound itself; nothing sits there
    if recipe.weight == "geometric":
        ratio = (log_rho.sum(1, keepdim=True) / length).exp()
    elif recipe.weight == "truncated":
        ratio = log_rho.exp().clamp(max=recipe.cap).detach()
    elif recipe.live:
        ratio = log_rho.exp()
    else:
        ratio = torch.ones_like(log_rho)
    k = c.estimator.value(delta - log_rho.detach() if c.rollout_value else delta)
    if c.placement == "reward":
        k = k.clamp(-recipe.clamp, recipe.clamp).detach()
        rho = log_rho.exp().detach() if c.ratio == "token" else torch.ones_like(log_rho)
        to_go = torch.where(mask, k, 0.0)
        to_go = to_go.flip(1).cumsum(1).flip(1) if c.credit == "rtg" else to_go.sum(1, keepdim=True)
        loss = torch.where(mask, rho * to_go * log_p, 0.0).sum(1)
    else:
        loss = torch.where(mask, (ratio * k).clamp(-recipe.clamp, recipe.clamp), 0.0).sum(1)
    loss = loss / (length[:, 0] if c.aggregation == "length-mean" else c.divisor)
    weight = torch.as_tensor(np.exp(log_probability(every, pair.sampler)))
    (gradient,) = torch.autograd.grad((weight * loss).sum(), theta)
    assert_close(expected([(1.0, recipe)], pair, T).mean, gradient.numpy())


@pytest.mark.parametrize("kind", ["group-mean", "group-std", "loo"])
@pytest.mark.parametrize("ratio", ["", "+token-ratio"])
def test_groups_are_all_ordered_groups_with_their_probabilities(kind, ratio):
    """The multisets against a plain loop over ordered groups."""
    pair, G, T = small(eos=True, off=bool(ratio), seed=3, length=2).pair, 3, 2
    recipe = parse_recipe(f"k1-in-reward{ratio}+{kind}={G}")
    plain = parse_recipe(f"k1-in-reward{ratio}")
    zero, one = (enumerate_configuration(plain.configuration, pair, T, b) for b in (0.0, 1.0))
    x, y, c, p = zero.gradient, zero.gradient - one.gradient, zero.value, zero.probability
    total, second = np.zeros(x.shape[1]), 0.0
    for group in itertools.product(range(len(p)), repeat=G):
        i = list(group)
        mean = c[i].mean() if kind != "loo" else (c[i].sum() - c[i]) / (G - 1)
        scale = c[i].std(ddof=1) + 1e-6 if kind == "group-std" else 1.0
        g = ((x[i] - np.reshape(mean, (-1, 1)) * y[i]) / scale).mean(axis=0)
        total += p[i].prod() * g
        second += p[i].prod() * g @ g
    found = recipes._by_groups([(1.0, recipe)], pair, T, 0, 0)
    assert found.method == "enumeration"
    assert_close(found.mean, total)
    assert found.variance == pytest.approx(G * (second - total @ total), rel=1e-9)
    if kind != "group-std":  # the exact route: leave-one-out, or (1 - 1/G) of it
        exact = expected([(1.0, recipe)], pair, T)
        assert exact.method == "exact"
        assert_close(exact.mean, total)
        assert exact.variance == pytest.approx(found.variance, rel=1e-9)


@given(SEEDS, st.integers(2, 9))
def test_a_group_mean_is_one_minus_one_over_g_of_no_baseline(seed, group):
    """Theory C2, on-policy."""
    pair = small(seed=seed).pair
    with_mean = expected([(1.0, parse_recipe(f"k3-in-reward+group-mean={group}"))], pair, 3).mean
    without = expected([(1.0, parse_recipe("k3-in-reward"))], pair, 3).mean
    assert_close(with_mean, (1 - 1 / group) * without)


def test_the_coefficient_has_no_effect_behind_a_group_std():
    """Case B22: the penalty alone, divided by its own spread, is the same at any coefficient."""
    pair = small(length=2).pair
    recipe = parse_recipe("k1-in-reward+group-std=3")
    x, y, c = recipes._tables(recipe, pair, *recipes._draw(pair, 2, 60, np.random.default_rng(0)))
    groups = np.arange(60).reshape(20, 3)
    one, thousand = (recipes._coupled(recipe, s * x[groups], y[groups], s * c[groups]) for s in (1.0, 1000.0))
    assert np.abs(one - thousand).max() < 1e-3 * np.abs(one).max()


def test_what_cannot_be_enumerated_is_sampled_and_says_so():
    """Sampled against enumerated where both can be: within 6 standard errors of the norm."""
    pair = small(length=3).pair
    terms = [(1.0, parse_recipe("k1-in-reward+group-std=3"))]
    exact = expected(terms, pair, 3)
    drawn_pair = build_world("markov", 16, 5, eos=True).pair
    sampled = expected(terms, drawn_pair, 5, samples=300)
    assert (exact.method, exact.noise) == ("enumeration", 0.0)
    assert sampled.method == "sampling"
    assert sampled.noise > 0
    index = np.arange(30_000).reshape(-1, 3)
    found = recipes._unit_sums(terms, pair, recipes._draw(pair, 3, 30_000, np.random.default_rng(5)), index)
    drawn = recipes._finish(*found, np.full(len(index), 1 / len(index)), 3, len(index))
    assert np.linalg.norm(drawn.mean - exact.mean) < 6 * drawn.noise
    assert drawn.variance == pytest.approx(exact.variance, rel=0.1)


def test_the_same_seed_gives_the_same_numbers():
    pair = build_world("markov", 16, 5, eos=True).pair
    terms = [(1.0, parse_recipe("k1-in-reward+group-std=4+token-mean"))]
    a, b, other = (expected(terms, pair, 5, samples=200, seed=s).mean for s in (1, 1, 2))
    assert np.array_equal(a, b)
    assert not np.array_equal(a, other)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ([], "no terms"),
        (["k1-in-reward+group-std=2", "k1-in-reward+group-std=3"], "one size"),
        (["k1-in-reward+group-std=2", "k1-in-reward+mean-baseline"], "only constant"),
    ],
)
def test_sums_of_recipes_that_cannot_be_are_refused(names, says):
    with pytest.raises(ValueError, match=says):
        expected([(1.0, parse_recipe(name)) for name in names], small().pair, 2)


@pytest.mark.parametrize("off", [False, True])
def test_token_means_and_others_add_up(off):
    """SkyRL's two reductions in one sum: exact where it can be, against enumeration of the batch formula."""
    pair = small(off=off, seed=6).pair
    names = ("k3-in-reward+loo=2+token-mean", "k3-in-loss+length-mean")
    terms = [(w, parse_recipe(name)) for w, name in zip((0.7, 0.2), names, strict=True)]
    exact, enumerated = expected(terms, pair, 3), recipes._by_groups(terms, pair, 3, 0, 0)
    assert (exact.method, enumerated.method) == ("exact", "enumeration")
    assert_close(exact.mean, enumerated.mean)
    assert exact.variance == pytest.approx(enumerated.variance, rel=1e-9)


def test_the_unit_of_a_token_mean_is_the_samplers_mean_length():
    on, off = small(seed=2).pair, small(off=True, seed=2).pair
    terms = [(1.0, parse_recipe("k1-in-reward+token-mean"))]
    assert recipes.unit_of(terms, on, 3) == pytest.approx(mean_length(on, [3])[0])
    every = sequences(off.automaton, 3)
    longest = np.exp(log_probability(every, off.sampler)) @ every.mask.sum(axis=1)
    assert recipes.unit_of(terms, off, 3) == pytest.approx(longest)
    assert recipes.unit_of([(1.0, Recipe(parse("k1-in-reward")))], on, 3) == 1.0


def test_a_clamped_estimator_has_no_closed_form_of_the_one_without():
    (term,) = recipes.exact_terms(parse_recipe("k3-in-loss+clamp=0.3"), on_policy=True)
    assert term.configuration.estimator.together is None
