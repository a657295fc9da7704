"""Policies and pairs: scores, supports, and pairs from files and functions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import assert_close, finite_difference, worlds

from klgrad.synth import automata
from klgrad.synth import policies as module
from klgrad.synth.policies import (
    Policy,
    PolicyPair,
    SupportError,
    from_function,
    linear,
    load_function,
    load_npz,
    load_pair,
    log_of_probs,
    log_softmax,
    reachable,
    tabular,
    with_behaviour,
)

RNG = np.random.default_rng(0)
CHAIN = automata.markov(3, 1, start=(0,), eos=True)  # words 0 and 1, token 2 ends
SHAPE = CHAIN.next_context.shape


# --------------------------------------------------------------------------------------------- scores and log-probs


@given(worlds())
def test_scores_have_zero_mean_and_rows_are_normalised(world):
    probs = np.exp(world.pair.policy.log_probs)
    assert_close(probs.sum(1), np.ones(len(probs)), 1e-13)
    alive = world.pair.automaton.alive
    mean = np.einsum("sv,svd->sd", probs, world.pair.policy.scores)[alive]
    assert_close(mean, 0 * mean, 1e-13)


@given(worlds())
def test_scores_are_finite_differences_of_log_probs(world):
    automaton, policy = world.pair.automaton, world.pair.policy
    s, v = np.random.default_rng(1).integers((automaton.alive.sum(), automaton.vocabulary))

    def log_prob(theta):
        if world.features is not None:
            return log_softmax(world.features @ theta)[s, v]
        return log_softmax(theta.reshape(-1, automaton.vocabulary))[s, v]

    assert_close(policy.scores[s, v], finite_difference(log_prob, policy.theta), 1e-8)


def test_a_tabular_policy_is_a_linear_one_with_one_feature_per_logit():
    logits = RNG.normal(size=SHAPE)
    features = np.zeros((*SHAPE, 6))
    features[np.repeat([0, 1], 3), np.tile([0, 1, 2], 2), np.arange(6)] = 1.0
    a, b = tabular(CHAIN, logits), linear(CHAIN, features, logits[:2].ravel())
    assert a.parameters == b.parameters == 6
    assert_close(a.scores[:2], b.scores[:2], 1e-15)
    assert_close(a.log_probs[:2], b.log_probs[:2], 1e-15)
    np.testing.assert_array_equal(a.theta, b.theta)


def test_a_function_is_a_linear_policy_when_it_is_linear(torch):
    features, theta = RNG.normal(size=(*SHAPE, 4)), RNG.normal(size=4)
    a = from_function(CHAIN, lambda t: torch.as_tensor(features) @ t, theta)
    b = linear(CHAIN, features, theta)
    for name in ("log_probs", "scores", "theta"):
        assert_close(getattr(a, name), getattr(b, name), 1e-14)


def test_a_nonlinear_function_gets_its_scores_by_autograd(torch):
    base = RNG.normal(size=SHAPE)

    def logits(t):
        return torch.tanh(torch.as_tensor(base) * t[0]) + t[1] ** 2 * torch.as_tensor(base)

    theta = np.array([0.4, -0.7])
    policy = from_function(CHAIN, logits, theta)
    table = lambda t: log_softmax(np.tanh(base * t[0]) + t[1] ** 2 * base)[1, 2]  # noqa: E731
    assert_close(policy.scores[1, 2], finite_difference(table, theta), 1e-8)


def test_bad_functions_are_refused(torch):
    with pytest.raises(ValueError, match=r"logits\(theta\) has shape \(2, 2\); the automaton needs \(3, 3\)"):
        from_function(CHAIN, lambda t: t.reshape(2, 2), np.zeros(4))
    with pytest.raises(ValueError, match=r"gradient of logits.theta. is not finite"):
        from_function(CHAIN, lambda t: torch.sqrt(torch.abs(t)).reshape(3, 3), np.zeros(9))


@pytest.mark.parametrize(
    ("features", "theta", "message"),
    [
        (np.zeros((2, 3, 4)), np.zeros(4), r"features \(2, 3, 4\) and theta \(4,\) must be \[S, V, d\]"),
        (np.zeros((3, 3, 4)), np.zeros(5), "must be"),
        (np.zeros((3, 3)), np.zeros(3), "must be"),
        (np.full((3, 3, 1), np.nan), np.zeros(1), "must be finite"),
        (np.zeros((3, 3, 1)), np.full(1, np.inf), "must be finite"),
    ],
)
def test_bad_features_are_refused(features, theta, message):
    with pytest.raises(ValueError, match=message):
        linear(CHAIN, features, theta)


@pytest.mark.parametrize("shape", [(2, 3), (5, 3), (3, 2)])
def test_tabular_logits_of_the_wrong_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"\(3, 3\)"):
        tabular(CHAIN, np.zeros(shape))


def test_scores_too_large_for_memory_are_refused(monkeypatch):
    monkeypatch.setattr(module, "MAX_SCORE_ENTRIES", 53)
    with pytest.raises(ValueError, match=r"\[3, 3, 6\] do not fit: share parameters over contexts with linear"):
        tabular(CHAIN, np.zeros(SHAPE))


@given(st.lists(st.floats(-700, 700), min_size=2, max_size=4), st.floats(-500, 500))
def test_log_softmax_is_shift_invariant_and_stable(row, shift):
    one, other = log_softmax(np.array([row])), log_softmax(np.array([row]) + shift)
    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)
    assert np.exp(one).sum() == pytest.approx(1.0)


def test_minus_infinity_marks_a_token_that_is_never_emitted():
    assert log_softmax(np.array([[0.0, 0.0, -np.inf]])).tolist() == [[-np.log(2), -np.log(2), -np.inf]]


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (np.zeros(3), r"x must have shape \[S, V\]; got \(3,\)"),
        (np.array([[0.0, np.nan]]), r"x\[0, 1\] is nan: give finite numbers"),
        (np.array([[0.0, 1.0], [np.inf, 0.0]]), r"x\[1, 0\] is inf"),
        (np.array([[0.0, 1.0], [-np.inf, -np.inf]]), "x row 1 is -inf throughout"),
        (np.array([["a", "b"]]), "x must hold real numbers"),
        (np.array([[1j, 0]]), "x must hold real numbers"),
    ],
)
def test_bad_logits_are_refused_by_place(logits, message):
    with pytest.raises(ValueError, match=message):
        log_softmax(logits, name="x")


def test_log_of_probs_takes_zeros_and_rounds_off():
    found = log_of_probs(np.array([[0.5, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3 + 1e-12]]))
    assert found[0].tolist() == [np.log(0.5), np.log(0.5), -np.inf]
    assert np.exp(found[1]).sum() == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize(
    ("probs", "message"),
    [
        (np.zeros(2), r"p must have shape \[S, V\]"),
        (np.array([[0.5, 0.5], [1.5, -0.5]]), r"p\[1, 0\] = 1.5 is not a probability"),
        (np.array([[np.nan, 1.0]]), r"p\[0, 0\] = nan is not"),
        (np.array([[np.inf, 1.0]]), "is not a probability"),
        (np.array([[0.5, 0.5], [0.5, 0.4]]), "p row 1 sums to 0.9, not 1: normalise it"),
        (np.array([[0.5, 0.5 + 1e-8]]), "p row 0 sums to"),
    ],
)
def test_bad_probabilities_are_refused_by_place(probs, message):
    with pytest.raises(ValueError, match=message):
        log_of_probs(probs, name="p")


# -------------------------------------------------------------------------------------------------- pairs, supports


def rows_without(*missing):
    """Uniform log-probs on ``CHAIN`` but for the given (context, token)."""
    logits = np.zeros(SHAPE)
    for place in missing:
        logits[place] = -np.inf
    return log_softmax(logits)


def test_a_reference_that_lacks_a_token_is_refused_naming_context_and_token():
    with pytest.raises(
        SupportError, match=r"the KL is infinite: in context 1 \(1,\) the policy emits token 0 with prob"
    ) as e:
        PolicyPair(CHAIN, tabular(CHAIN, np.zeros(SHAPE)), rows_without((1, 0)))
    assert "0.333" in str(e.value)
    assert "the reference never does" in str(e.value)


def test_a_sampler_outside_the_policy_is_refused_naming_context_and_token():
    policy = tabular(CHAIN, rows_without((0, 1)))
    with pytest.raises(SupportError, match=r"in context 0 \(0,\) the behaviour policy emits token 1"):
        PolicyPair(CHAIN, policy, rows_without(), rows_without())


def test_a_sampler_that_emits_less_than_the_policy_is_allowed():
    pair = PolicyPair(CHAIN, tabular(CHAIN, np.zeros(SHAPE)), rows_without(), rows_without((0, 1)))
    assert pair.importance_ratio[0].tolist() == pytest.approx([2 / 3, 0.0, 2 / 3])


def test_mismatches_that_are_never_reached_or_at_the_end_are_tolerated():
    # token 1 is never emitted in context 0, so context 1 is never entered; context 2 is the end
    policy = tabular(CHAIN, rows_without((0, 1)))
    pair = PolicyPair(CHAIN, policy, rows_without((0, 1), (1, 0), (2, 0)))
    assert reachable(CHAIN, policy.log_probs).tolist() == [True, False, True]
    assert np.isfinite(pair.log_ratio).all()
    with pytest.raises(SupportError):  # the same reference under a policy that does go there
        PolicyPair(CHAIN, tabular(CHAIN, rows_without((1, 1))), rows_without((1, 0)))


def test_shapes_must_agree():
    policy = tabular(CHAIN, np.zeros(SHAPE))
    with pytest.raises(ValueError, match=r"reference log-probs have shape \(3, 2\); the automaton needs \(3, 3\)"):
        PolicyPair(CHAIN, policy, np.zeros((3, 2)))
    with pytest.raises(ValueError, match="behaviour log-probs have shape"):
        PolicyPair(CHAIN, policy, rows_without(), np.zeros((2, 3)))
    with pytest.raises(ValueError, match="policy log-probs have shape"):
        PolicyPair(CHAIN, Policy(np.zeros((1, 3)), np.zeros((1, 3, 1)), np.zeros(1)), rows_without())


@given(worlds(off=True))
def test_ratios_and_the_sampler_follow_the_behaviour_policy(world):
    pair, on = world.pair, with_behaviour(world.pair, None)
    assert not pair.on_policy
    assert on.on_policy
    assert pair.sampler is pair.behaviour
    assert on.sampler is on.policy.log_probs
    assert_close(pair.importance_ratio, np.exp(pair.policy.log_probs - pair.behaviour), 1e-14)
    assert (on.importance_ratio == 1).all()
    assert_close(pair.log_ratio, pair.policy.log_probs - pair.reference, 1e-14)


def test_pairs_can_be_compared():
    pair = PolicyPair(CHAIN, tabular(CHAIN, np.zeros(SHAPE)), rows_without())
    same = PolicyPair(CHAIN, tabular(CHAIN, np.zeros(SHAPE)), rows_without())
    assert pair in [same, pair]  # equal by value or by identity: either will do, an error will not


# ---------------------------------------------------------------------------------------------------- .npz files


def arrays(**changes):
    table = {
        "next_context": CHAIN.next_context,
        "start": 0,
        "end": 2,
        "policy_logits": RNG.normal(size=SHAPE),
        "reference_logits": RNG.normal(size=SHAPE),
    } | changes
    return {key: value for key, value in table.items() if value is not None}


def saved(tmp_path, **changes):
    np.savez(tmp_path / "pair.npz", **arrays(**changes))
    return tmp_path / "pair.npz"


def test_a_tabular_pair_comes_back_from_its_file(tmp_path):
    logits = RNG.normal(size=SHAPE)
    pair = load_npz(saved(tmp_path, policy_logits=logits, behaviour_logits=logits + 0.1))
    assert pair.name == "pair"
    assert (pair.automaton.next_context == CHAIN.next_context).all()
    assert pair.automaton.end == 2
    alive = pair.automaton.alive  # the end row is nobody's: whatever stands there is put to zero
    assert_close(pair.policy.log_probs[alive], log_softmax(logits)[alive], 1e-15)
    assert_close(pair.behaviour[alive], log_softmax(logits)[alive], 1e-14)
    assert load_pair(str(saved(tmp_path))).on_policy


@pytest.mark.parametrize("stated", [False, True])
def test_a_parametric_pair_comes_back_from_its_file(tmp_path, stated):
    features, theta = RNG.normal(size=(*SHAPE, 2)), RNG.normal(size=2)
    logits = features @ theta + np.array([[1.0], [2.0], [3.0]]) if stated else None  # any constant per context
    pair = load_npz(saved(tmp_path, policy_logits=logits, features=features, theta=theta))
    assert_close(pair.policy.scores, linear(CHAIN, features, theta).scores, 1e-15)
    assert pair.policy.parameters == 2


@pytest.mark.parametrize("key", ["next_context", "start", "end", "policy_logits", "reference_logits"])
def test_missing_keys_are_named(tmp_path, key):
    with pytest.raises(ValueError, match=f"pair.npz lacks {key}: a pair has next_context, start"):
        load_npz(saved(tmp_path, **{key: None}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"polciy_logits": np.zeros(2)}, "has unknown keys polciy_logits"),
        ({"features": np.zeros((*SHAPE, 1))}, "lacks theta"),
        ({"theta": np.zeros(1)}, "lacks features"),
        ({"features": np.ones((*SHAPE, 1)), "theta": np.ones(1)}, "policy_logits and features . theta are different"),
        ({"start": np.array([0, 1])}, "start and end must be single integers"),
        ({"start": 7}, "start = 7 is not a context"),
        ({"next_context": np.zeros((3, 3))}, "must hold integers; got dtype float64"),
        ({"policy_logits": np.full(SHAPE, np.nan)}, r"policy_logits\[0, 0\] is nan"),
        ({"reference_logits": np.full(SHAPE, np.inf)}, r"reference_logits\[0, 0\] is inf"),
        ({"policy_logits": np.zeros((2, 2))}, r"\(2, 2\)"),
        ({"reference_logits": np.zeros((2, 2))}, r"reference log-probs have shape \(2, 2\)"),
        ({"behaviour_logits": np.zeros((2, 2))}, r"behaviour log-probs have shape \(2, 2\)"),
    ],
)
def test_wrong_contents_are_refused_by_name(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_npz(saved(tmp_path, **changes))


def test_what_is_not_an_archive_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_npz(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("policy")
    with pytest.raises(ValueError, match=r"text.npz cannot be read as .npz"):
        load_npz(tmp_path / "text.npz")
    (tmp_path / "empty.npz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty.npz cannot be read as .npz"):
        load_npz(tmp_path / "empty.npz")
    cut = saved(tmp_path).read_bytes()[:200]
    (tmp_path / "cut.npz").write_bytes(cut)
    with pytest.raises(ValueError, match=r"cut.npz cannot be read as .npz"):
        load_npz(tmp_path / "cut.npz")


def test_a_single_array_is_not_an_archive(tmp_path):
    with open(tmp_path / "one.npz", "wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(ValueError, match=r"one.npz .*archive"):
        load_npz(tmp_path / "one.npz")


class Trap:
    """Unpickling one of these would leave a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_pickles_are_never_loaded(tmp_path):
    path = saved(tmp_path, policy_logits=np.array([Trap(tmp_path / "sprung")], dtype=object))
    with pytest.raises(ValueError, match=r"cannot be read as .npz"):
        load_npz(path)
    assert not (tmp_path / "sprung").exists()


# ------------------------------------------------------------------------------------------------------ functions

SOURCE = """
import numpy as np
from klgrad.synth.presets import preset

def good():
    return preset("near")

def wrong():
    return np.zeros(3)

def broken():
    raise RuntimeError("no luck")
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path / "mine.py"


def test_a_pair_comes_from_a_function_in_a_file_or_a_module(source, monkeypatch):
    assert load_function(f"{source}:good").name == "near"
    assert load_pair(f"{source}:good").name == "near"
    monkeypatch.syspath_prepend(str(source.parent))
    assert load_pair("mine:good").name == "near"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("wrong", r"wrong\(\) returned ndarray, not a klgrad.synth.policies.PolicyPair"),
        ("broken", "gave no pair: RuntimeError: no luck"),
        ("absent", "gave no pair: AttributeError"),
    ],
)
def test_functions_that_give_no_pair_are_refused(source, function, message):
    with pytest.raises(ValueError, match=message):
        load_function(f"{source}:{function}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_here:f", "gave no pair: ModuleNotFoundError"),
        ("nowhere.py:f", "gave no pair: (ImportError|FileNotFoundError)"),
        ("just-a-name", "'just-a-name' is neither FILE.npz nor MODULE:FUNCTION"),
        ("", "'' is neither"),
        (":f", "must be MODULE:FUNCTION"),
    ],
)
def test_names_that_lead_nowhere_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        load_pair(name)


@pytest.mark.parametrize("distance", [20.0, 40.0, 300.0])
def test_near_certain_tokens_keep_their_distance_to_one(distance):
    """1 - p of a token at p = 1 - exp(-distance), to 13 digits; 1 - exp(log p) would have none left."""
    automaton = automata.Automaton(np.zeros((1, 2), int))
    logits = np.array([[0.0, distance]])
    features = np.array([[[0.0], [1.0]]])
    expected = np.exp(-distance) / (1 + np.exp(-distance))
    for score in (
        tabular(automaton, logits).scores[0, 1, 1],
        linear(automaton, features, logits[0, 1:]).scores[0, 1, 0],
    ):
        assert score == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize(
    ("log_probs", "words"),
    [(np.zeros((1, 2)), "do not sum to one"), (np.full((1, 2), np.nan), "do not sum to one")],
)
def test_a_pair_made_by_hand_is_checked(log_probs, words):
    automaton = automata.Automaton(np.zeros((1, 2), int))
    good = tabular(automaton, np.zeros((1, 2)))
    for policy, reference in ((good, log_probs), (Policy(log_probs, good.scores, good.theta), good.log_probs)):
        with pytest.raises(ValueError, match=words):
            PolicyPair(automaton, policy, reference)
    with pytest.raises(ValueError, match="scores have shape"):
        PolicyPair(automaton, Policy(good.log_probs, good.scores[:, :1], good.theta), good.log_probs)
