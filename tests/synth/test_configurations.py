"""Configurations: one normal form, refusals with a way out, and score coefficients against the plain formula."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import Plain, assert_close, build_world, configurations, grid, worlds

from klgrad.synth.automata import Automaton, markov
from klgrad.synth.configurations import (
    OPTIONS,
    PLACEMENTS,
    RATIOS,
    Configuration,
    importance_ratios,
    parse,
    score_coefficients,
)
from klgrad.synth.enumeration import sequences
from klgrad.synth.estimators import ESTIMATORS, estimator
from klgrad.synth.policies import PolicyPair, log_softmax, tabular

WORLD = build_world("markov2", 3, 3, eos=True, off=True, parameters=3, seed=1)
PLAIN = Plain(WORLD)
OPTIONAL = ("", "b=0.7", "mean-baseline", "optimal-baseline", "optimal-baseline-per-coordinate", "loo", "loo=4")


# ---------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_configuration_prints_back_and_parses_to_itself(name):
    family = grid(name, baselines=OPTIONAL)
    assert all(parse(str(c)) == c for c in family)
    assert len({str(c) for c in family}) == len(set(family)) == len(family)


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12), st.integers(2, 10**9))
def test_numbers_survive_the_round_trip(b, divisor, group):
    for text in (f"b={b!r}+divide={divisor!r}", f"loo={group}"):
        c = parse(f"k1-in-reward+{text}")
        assert parse(str(c)) == c
    assert parse(f"k1-in-reward+b={b!r}").baseline_value == b


@pytest.mark.parametrize("number", ["0.123456789", "1000000", "1e6", "1e+06", "1E-7", "-2.5e+3"])
def test_a_number_may_be_written_any_way(number):
    c = parse(f"alpha({number})-in-reward+b={number}")
    assert c.baseline_value == float(number)
    assert parse(str(c)) == c
    assert c.estimator.value(np.array([1.0]))[0] == pytest.approx(1 + float(number) * np.expm1(-1.0), rel=1e-15)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("k1-in-reward", "k1-in-reward"),
        (" k3-in-both + prefix-ratio+rtg ", "k3-in-both+rtg+prefix-ratio"),
        ("k1-in-reward+whole+sum", "k1-in-reward"),
        ("alpha( .75 )-in-reward+loo", "alpha(0.75)-in-reward+loo"),
        ("alpha-in-loss", "alpha(0.5)-in-loss"),
        ("k3-clamped(20, 10)-in-loss", "k3-clamped(20,10)-in-loss"),
        ("k3-straight-through-in-loss", "k3-straight-through-in-loss"),
        ("k1-in-reward+length-mean+optimal-baseline", "k1-in-reward+optimal-baseline+length-mean"),
        ("k1-in-reward+rollout-value+divide = 1024+b= -1", "k1-in-reward+b=-1+divide=1024+rollout-value"),
        ("k1-in-reward+loo=4.0", "k1-in-reward+loo=4"),
        ("k3-in-loss+live-token-ratio", "k3-in-both+token+token-ratio"),
        ("k3-in-loss+live-prefix-ratio", "k3-in-both+rtg+prefix-ratio"),
        ("k3-in-loss+live-sequence-ratio+length-mean", "k3-in-both+sequence-ratio+length-mean"),
    ],
)
def test_spellings_have_one_normal_form(text, normal):
    assert str(parse(text)) == normal
    assert parse(normal) == parse(text)


def test_every_option_of_the_grammar_is_in_the_generated_family():
    family = "+".join(str(c) for c in grid("k1", baselines=OPTIONAL))
    written = {name for name in OPTIONS if f"+{name}" in family}
    assert set(OPTIONS) - written == {"whole", "sum"} | {name for name in OPTIONS if name.startswith("live-")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no configuration: write ESTIMATOR-in-PLACEMENT"),
        ("k1", "'k1' is no configuration.*an estimator of k1, k2.*a placement of reward, loss, both"),
        ("k1-in-rewards", "unknown placement 'rewards': did you mean 'reward'"),
        ("k33-in-loss", "unknown estimator 'k33': did you mean 'k3'"),
        ("k1-in-reward+rgt", "unknown option 'rgt': did you mean 'rtg'"),
        ("k1-in-reward+", "unknown option ''"),
        ("k1-in-reward+rtg=1", "rtg takes no value"),
        ("k1-in-reward+b", "b takes a value"),
        ("k1-in-reward+divide", "divide takes a value"),
        ("k1-in-reward+b=x", "b=x in 'k1-in-reward.b=x' is not a finite number"),
        ("k1-in-reward+b=nan", "b=nan in .* is not a finite number"),
        ("k1-in-reward+b=inf", "b=inf in .* is not a finite number"),
        ("k1-in-reward+b=", "is not a finite number"),
        ("k1-in-reward+divide=0", "divide=0 must be positive"),
        ("k1-in-reward+divide=-2", "divide=-2 must be positive"),
        ("k1-in-reward+loo=1", "loo=1 must be a group size of 2 or more"),
        ("k1-in-reward+loo=2.5", "loo=2.5 must be a group size"),
        ("k1-in-reward+loo=0", "loo=0 must be a group size"),
        ("k1-in-reward+rtg+token", "gives 'rtg' and 'token': one credit at most"),
        ("k1-in-reward+token-ratio+prefix-ratio", "one ratio at most"),
        ("k1-in-reward+loo+b=1", "gives 'loo' and 'b=1': one baseline at most"),
        ("k1-in-reward+b=1+b=1", "one baseline at most"),
        ("k1-in-reward+sum+divide=2", "one aggregation at most"),
        ("k1-in-reward+rollout-value+rollout-value", "one rollout_value at most"),
        ("k1-in-loss+rtg", "credit 'rtg' belongs to the reward placement .* write -in-reward or -in-both"),
        ("k1-in-loss+whole", "credit 'whole' belongs to the reward placement"),
        ("k1-in-loss+loo", "a baseline belongs to the reward placement and k1-in-loss has none"),
        ("k1-in-loss+b=1", "a baseline belongs to the reward placement"),
        ("k1-in-loss+rollout-value", "rollout-value belongs to the reward placement"),
        ("full-in-reward+rollout-value", "a full-vocabulary estimator has none"),
        ("k3-in-reward+live-token-ratio", "is a way to write a loss: use it with -in-loss"),
        ("k3-in-loss+live-token-ratio+rtg", "gives 'live-token-ratio' and 'rtg': one credit at most"),
        ("k3-in-loss+live-token-ratio+token-ratio", "one ratio at most"),
    ],
)
def test_what_cannot_be_is_refused_with_a_message(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"placement": "policy"}, "unknown placement 'policy'"),
        ({"credit": "past"}, "unknown credit 'past'"),
        ({"ratio": "gspo"}, "unknown ratio 'gspo'"),
        ({"baseline": "critic"}, "unknown baseline 'critic'"),
        ({"aggregation": "token-mean"}, "unknown aggregation 'token-mean'"),
        ({"aggregation": "divide", "divisor": float("inf")}, "must be positive and finite"),
        ({"aggregation": "divide", "divisor": float("nan")}, "must be positive and finite"),
        ({"baseline": "constant", "baseline_value": float("nan")}, "baseline value nan must be finite"),
        ({"divisor": 2.0}, "a divisor of 2 needs the aggregation 'divide', not 'sum'"),
        ({"divisor": -1.0}, "a divisor of -1 needs the aggregation 'divide', not 'sum'"),
        ({"baseline": "loo", "baseline_value": float("inf")}, "must be a group size of 2 or more"),
        ({"placement": "loss", "credit": "rtg"}, "credit belongs to the reward placement"),
    ],
)
def test_fields_given_directly_are_checked_too(fields, message):
    with pytest.raises(ValueError, match=message):
        Configuration(**({"estimator": estimator("k1"), "placement": "reward"} | fields))


def test_placements_are_what_they_say():
    found = [(c.in_reward, c.in_loss) for c in (Configuration(estimator("k1"), p) for p in PLACEMENTS)]
    assert found == [(True, False), (False, True), (True, True)]


def test_group_sizes():
    assert parse("k1-in-reward+loo").group(12) == 12
    assert parse("k1-in-reward+loo=4").group(12) == 4
    assert parse("k1-in-reward+loo=2").group(2) == 2
    assert parse("k1-in-reward").group(1) == 1  # without groups one sample is enough
    for text, samples in (("loo", 1), ("loo=5", 12), ("loo=24", 12)):
        with pytest.raises(ValueError, match="cannot be split into groups"):
            parse(f"k1-in-reward+{text}").group(samples)


# --------------------------------------------------------------------------------------------------------- cautions


@pytest.mark.parametrize(
    ("text", "world", "word"),
    [
        ("k3-in-both+future", None, "own-token term"),
        ("k1-in-reward+mean-baseline", WORLD.pair, "off-policy without a ratio"),
        ("k1-in-reward+loo+length-mean", WORLD.on_policy, "random length"),
    ],
)
def test_likely_mistakes_are_cautioned(text, world, word):
    (caution,) = parse(text).cautions(world)
    assert word in caution
    assert caution.startswith(str(parse(text)))


def test_a_ratio_cannot_make_up_for_tokens_that_are_never_sampled():
    automaton = markov(3, 0)
    policy = tabular(automaton, np.zeros((1, 3)))
    behaviour = log_softmax(np.array([[0.0, -np.inf, -np.inf]]))
    pair = PolicyPair(automaton, policy, log_softmax(np.zeros((1, 3))), behaviour)
    c = parse("k1-in-reward+prefix-ratio")
    (caution,) = c.cautions(pair)  # the first gap of two
    assert caution == f"{c}: {pair.sampling_gaps()[0]}, so no ratio makes up for it"
    assert "never samples token 1" in caution
    assert parse("k1-in-reward").cautions(pair) == []


@pytest.mark.parametrize(
    ("text", "world"),
    [
        ("k1-in-reward", WORLD.pair),
        ("full-in-both+future", WORLD.pair),
        ("k3-straight-through-in-both+future", WORLD.pair),  # its slope is the own-token term of k1
        ("k1-in-reward+mean-baseline", WORLD.on_policy),
        ("k1-in-reward+mean-baseline+prefix-ratio", WORLD.pair),
        ("k1-in-reward+loo+length-mean", build_world("markov", 2, 3).pair),
        ("k1-in-reward+mean-baseline", None),
        ("k1-in-reward+prefix-ratio", None),
        ("k1-in-both", None),
        ("k1-in-reward+future", None),
    ],
)
def test_what_is_right_is_not_cautioned(text, world):
    assert parse(text).cautions(world) == []


def test_an_end_that_is_the_first_context_is_an_end_too():
    automaton = Automaton(np.array([[0, 0], [1, 0]]), 1, 0)
    pair = PolicyPair(automaton, tabular(automaton, np.zeros((2, 2))), log_softmax(np.array([[0.0, 0.0], [1.0, 0.0]])))
    (caution,) = parse("k1-in-reward+loo+length-mean").cautions(pair)
    assert "random length" in caution


@pytest.mark.parametrize("text", ["k1-in-reward+b=3", "k1-in-reward+b=3+length-mean", "k1-in-reward+b=3+token-ratio"])
@pytest.mark.parametrize("off", [False, True])
@pytest.mark.parametrize("eos", [False, True])
def test_cautions_about_baselines_are_about_a_mean_that_shifts(text, off, eos):
    world = build_world("markov", 3, 3, eos=eos, off=off, seed=6)
    c, plain = parse(text), Plain(world)
    without, _ = plain.moments(replace(c, baseline="none", baseline_value=0.0))
    shifts = np.abs(plain.moments(c)[0] - without).max() > 1e-10
    assert shifts == bool(c.cautions(world.pair))


# --------------------------------------------------------------------------------------------- score coefficients


@lru_cache
def arrays(world, poison=np.nan):
    """Every sequence of a world as the arguments of ``score_coefficients``, padding poisoned."""
    every, pair = sequences(world.pair.automaton, world.length), world.pair
    at = (every.contexts, every.tokens)
    taken = {
        "log_probs": pair.policy.log_probs[at],
        "reference": pair.reference[at],
        "behaviour": pair.sampler[at],
    }
    taken = {name: np.where(every.mask, table, poison) for name, table in taken.items()}
    full = {"full_log_probs": pair.policy.log_probs[every.contexts], "full_reference": pair.reference[every.contexts]}
    return taken | {name: np.where(every.mask[..., None], t, poison) for name, t in full.items()} | {"mask": every.mask}


def gradients(world, configuration, b, convert=lambda x: x):
    """``[M, d]`` by way of score coefficients."""
    every, scores = sequences(world.pair.automaton, world.length), world.pair.policy.scores
    given_arrays = {name: convert(table) for name, table in arrays(world).items()}
    token, vocab = score_coefficients(configuration, **given_arrays, baseline=b)
    assert (np.asarray(token)[~every.mask] == 0).all()
    own = np.einsum("mt,mtd->md", np.asarray(token), scores[every.contexts, every.tokens])
    if vocab is None:
        return own
    assert (np.asarray(vocab)[~every.mask] == 0).all()
    return own + np.einsum("mtv,mtvd->md", np.asarray(vocab), scores[every.contexts])


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("name", ["k1", "k3-straight-through", "full"])  # the second: value of k3, slope of k2
def test_score_coefficients_are_the_formula_for_every_option(name, library, request):
    convert = (lambda x: x) if library == "numpy" else request.getfixturevalue("torch").as_tensor
    for c in grid(name):
        _, x, y, _ = PLAIN.parts(c)
        b = PLAIN.baseline(c) if c.baseline != "optimal-per-coordinate" else 0.3
        assert_close(gradients(WORLD, c, b, convert), x - b * y, 1e-12)


@given(worlds(cap=60), configurations(baselines=("",)))
def test_score_coefficients_are_the_formula_on_random_worlds(world, c):
    _, x, _, _ = Plain(world).parts(c)
    possible = np.exp(np.where(arrays(world)["mask"], arrays(world)["behaviour"], 0.0).sum(1)) > 0
    assert_close(gradients(world, c, 0.0)[possible], x[possible], 1e-11)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e6])
@pytest.mark.parametrize(
    "name", ["k3-in-both+prefix-ratio+length-mean", "k1-in-reward+loo", "full-in-both+prefix-ratio"]
)
def test_padding_never_leaks(name, poison):
    clean = score_coefficients(parse(name), **arrays(WORLD, 0.0))
    with np.errstate(all="ignore"):  # arithmetic on the padding may complain; what comes out may not change
        dirty = score_coefficients(parse(name), **arrays(WORLD, poison))
    for a, b in zip(clean, dirty, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("padded", ["log_probs", "reference", "behaviour"])
@pytest.mark.parametrize("name", ["k3-in-both+prefix-ratio", "k3-in-reward+token-ratio+rollout-value"])
def test_padding_of_one_side_alone_overflows_nothing(name, padded):
    clean = arrays(WORLD, 0.0)
    dirty = clean | {padded: np.where(clean["mask"], clean[padded], -1e9)}  # a warning would fail this test
    np.testing.assert_array_equal(*(score_coefficients(parse(name), **batch)[0] for batch in (clean, dirty)))


def test_padding_that_counted_would_be_seen():
    # the negative control: the same poison under a mask that is True there does reach the coefficients
    everything = arrays(WORLD, 1e6) | {"mask": np.ones_like(arrays(WORLD)["mask"])}
    token, _ = score_coefficients(parse("k2-in-reward+token-ratio"), **everything)
    clean, _ = score_coefficients(parse("k2-in-reward+token-ratio"), **arrays(WORLD))
    assert np.isnan(token - clean).any() or np.abs(token - clean).max() > 1


@pytest.mark.parametrize("text", ["loo", "loo=3", "loo=5"])
@pytest.mark.parametrize("ratio", ["", *(f"+{ratio}-ratio" for ratio in RATIOS[1:])])
def test_leave_one_out_within_the_batch(text, ratio):
    c, size = parse(f"k3-in-both{ratio}+{text}"), {"loo": 15, "loo=3": 3, "loo=5": 5}[text]
    _, x, y, total = PLAIN.parts(c)
    for first in range(0, 15, size):
        rows = slice(first, first + size)
        others = (total[rows].sum() - total[rows]) / (size - 1)
        assert_close(gradients(WORLD, c, 0.0)[rows], x[rows] - others[:, None] * y[rows], 1e-12)


def test_leave_one_out_groups_must_divide_the_batch():
    with pytest.raises(ValueError, match="15 samples cannot be split into groups of 4"):
        score_coefficients(parse("k1-in-reward+loo=4"), **arrays(WORLD))


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_importance_ratios_by_hand(ratio, library):
    xp = np if library == "numpy" else pytest.importorskip("torch")
    rho = np.array([[2.0, 3.0, 0.5], [1.0, 4.0, 7.0]])
    ones, run = np.ones_like(rho), np.array([[2.0, 6.0, 3.0], [1.0, 4.0, 28.0]])
    whole = np.array([[3.0] * 3, [28.0] * 3])
    own, before = {"none": (ones, ones), "token": (rho, ones), "prefix": (run, run / rho), "sequence": (whole, whole)}[
        ratio
    ]
    for got, wanted in zip(importance_ratios(ratio, xp.asarray(np.log(rho)), xp), (own, before), strict=True):
        assert_close(np.asarray(got), wanted, 1e-14)  # shapes included


def test_a_torch_batch_has_the_leave_one_out_baselines_of_a_numpy_batch(torch):
    here = {name: table[:4] for name, table in arrays(WORLD).items()}
    there = {name: torch.as_tensor(table) for name, table in here.items()}
    for name in ("k3-in-reward+loo", "k1-in-both+rtg+loo=2"):
        wanted, got = (score_coefficients(parse(name), **batch)[0] for batch in (here, there))
        assert_close(np.asarray(got), wanted, 1e-14)


def test_without_a_baseline_given_it_is_zero():
    batch = {name: table for name, table in arrays(WORLD).items() if name != "baseline"}
    c = parse("k3-in-reward+mean-baseline")
    np.testing.assert_array_equal(score_coefficients(c, **batch)[0], score_coefficients(c, **batch, baseline=0.0)[0])


@pytest.mark.parametrize("missing", [["full_log_probs"], ["full_reference"], ["full_log_probs", "full_reference"]])
def test_a_full_vocabulary_estimator_needs_the_full_log_probs(missing):
    few = {name: table for name, table in arrays(WORLD).items() if name not in missing}
    with pytest.raises(ValueError, match="full-in-loss needs the full next-token log-probs"):
        score_coefficients(parse("full-in-loss"), **few)


def test_without_a_behaviour_the_policy_is_the_sampler():
    on = {name: table for name, table in arrays(WORLD).items() if name != "behaviour"}
    with_ratio, _ = score_coefficients(parse("k3-in-both+prefix-ratio"), **on)
    without, _ = score_coefficients(parse("k3-in-both"), **on)
    np.testing.assert_allclose(with_ratio, without, rtol=1e-12, atol=1e-14)


def test_coefficients_give_a_language_model_the_same_gradient(torch):
    # the gradient of (coefficients.detach() * log_probs).sum() is the formula's
    c, every = parse("k3-in-both+rtg+prefix-ratio"), sequences(WORLD.pair.automaton, WORLD.length)
    theta = torch.tensor(WORLD.pair.policy.theta, requires_grad=True)
    log_probs = torch.log_softmax(torch.as_tensor(WORLD.features) @ theta, -1)[every.contexts, every.tokens]
    given_arrays = {name: torch.as_tensor(table) for name, table in arrays(WORLD).items()} | {"log_probs": log_probs}
    token, _ = score_coefficients(c, **given_arrays)
    p = torch.as_tensor(PLAIN.parts(c)[0])
    (got,) = torch.autograd.grad((p[:, None] * token.detach() * log_probs).sum(), theta)
    assert_close(got.numpy(), PLAIN.moments(replace(c))[0])


def test_float32_batches_stay_float32(torch):
    single = {k: v.astype(np.float32) if v.dtype == float else v for k, v in arrays(WORLD, 0.0).items()}
    for convert in (np.asarray, torch.as_tensor):
        token, vocab = score_coefficients(parse("full-in-both+rtg"), **{k: convert(v) for k, v in single.items()})
        assert str(token.dtype).endswith("float32")
        assert str(vocab.dtype).endswith("float32")
