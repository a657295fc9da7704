"""Named pairs: they build, they are as published, and the numbers quoted for them hold."""

import re
from ast import literal_eval

import numpy as np
import pytest

from klgrad.synth import exact
from klgrad.synth.configurations import parse
from klgrad.synth.moments import moments
from klgrad.synth.policies import log_softmax
from klgrad.synth.presets import PRESETS, preset


def variances(pair, name, lengths, **options):
    return moments(pair, [parse(name)], lengths, **options)[0].covariance


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_and_both_routes_to_its_gradient_agree(name):
    lengths = sorted({1, *PRESETS[name].lengths[:1]})
    pair = preset(name, lengths[-1])
    assert pair.name == name
    on_policy = type(pair)(pair.automaton, pair.policy, pair.reference)
    route = moments(on_policy, [parse("k1-in-reward")], lengths, covariance="none")[0].mean
    np.testing.assert_allclose(exact.true_gradient(pair, lengths), route, rtol=1e-10, atol=1e-13)
    assert (exact.kl(pair, lengths) > 0).all()


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_says_what_it_is(name):
    entry = PRESETS[name]
    assert entry.description
    assert entry.numbers
    assert entry.source
    pair = preset(name, max(entry.lengths))
    pair.automaton.check_length(max(entry.lengths))
    stated = re.search(r"d = (\d+)", entry.numbers)
    assert stated is None or int(stated[1]) == pair.policy.parameters


@pytest.mark.parametrize("name", ["near", "far"])
def test_published_logits_are_the_ones_built(name):
    policy, reference = (literal_eval(text) for text in re.findall(r"\[\[.*?\]\]", PRESETS[name].numbers))
    pair = preset(name)
    np.testing.assert_array_equal(pair.policy.theta, np.ravel(policy))
    np.testing.assert_allclose(pair.reference, log_softmax(np.array(reference)), rtol=1e-14)


def test_an_unknown_preset_says_what_there_is():
    with pytest.raises(ValueError, match="unknown preset 'fat': did you mean 'far'\\? there is near, far"):
        preset("fat")


def test_only_stale_is_off_policy():
    assert [name for name in PRESETS if not preset(name, 5).on_policy] == ["stale"]


@pytest.mark.parametrize(
    ("name", "at_5", "at_20"),
    [("k1-in-reward", 0.316, 133), ("k3-in-loss", 295, 1150), ("k3-in-reward", 321, 2435)],
)
def test_far_variances_are_the_published_ones(name, at_5, at_20):
    found = variances(preset("far"), name, [5, 20])
    assert found[0] == pytest.approx(at_5, rel=2e-3)
    assert found[1] == pytest.approx(at_20, rel=5e-3)


def test_far_order_of_k1_in_reward_and_k3_in_loss_reverses_at_51():
    lengths = [49, 50, 51, 52]
    pair = preset("far")
    above = variances(pair, "k1-in-reward", lengths) > variances(pair, "k3-in-loss", lengths)
    assert above.tolist() == [False, False, True, True]


def test_far_leave_one_out_and_reward_to_go_are_no_free_lunch():
    # the baseline pays from T = 10 only; at T = 5 it multiplies the variance by ten
    pair, lengths = preset("far"), [5, 10]
    plain, loo, rtg = (variances(pair, f"k1-in-reward{o}", lengths) for o in ("", "+loo", "+rtg"))
    assert loo[0] == pytest.approx(3.43, rel=5e-3)
    assert rtg[0] / plain[0] == pytest.approx(2.6, rel=2e-2)
    assert loo[1] < plain[1]


def test_far_growth_exponents():
    # d log Var / d log T, far out: leave-one-out takes one power off k1-in-reward
    lengths = [1000, 2000]
    for name, exponent in (("k1-in-reward", 3.0), ("k1-in-reward+loo", 2.0)):
        low, high = variances(preset("far"), name, lengths, samples=10**9)
        assert np.log2(high / low) == pytest.approx(exponent, abs=0.05)


def test_handbook_numbers():
    pair = preset("handbook")
    true = exact.true_gradient(pair, [1])[0]
    k3 = moments(pair, [parse("k3-in-loss")], [1], covariance="none")[0].mean[0]
    assert exact.kl(pair, [1])[0] == pytest.approx(0.021007, abs=5e-7)
    np.testing.assert_allclose(k3, (0.0452, -0.0432, 0.0507, -0.0527), atol=5e-5)
    assert k3 @ true / np.linalg.norm(k3) / np.linalg.norm(true) == pytest.approx(0.9986, abs=5e-5)


def test_handbook_values_have_the_published_variances():
    pair = preset("handbook")
    k1, k3 = moments(pair, [parse("k1-in-reward"), parse("k3-in-reward")], [1])
    assert k1.estimate_variance[0] == pytest.approx(0.040058, abs=5e-7)
    assert k3.estimate_variance[0] == pytest.approx(0.000279, abs=5e-7)


def test_drift_is_the_handbook_row():
    pair = preset("drift")
    k1, k3 = moments(pair, [parse("k1-in-reward"), parse("k3-in-reward")], [1])
    assert exact.kl(pair, [1])[0] == pytest.approx(1.7070, abs=5e-5)
    assert k1.estimate_variance[0] == pytest.approx(0.0784, abs=5e-5)
    assert k3.estimate_variance[0] == pytest.approx(575.3, abs=0.05)


def test_words_ends_at_random_and_counts_has_a_horizon():
    length = exact.mean_length(preset("words"), [20])[0]
    assert 1 < length < 20
    with pytest.raises(ValueError, match="beyond this automaton's horizon 5"):
        exact.kl(preset("counts", 5), [6])
