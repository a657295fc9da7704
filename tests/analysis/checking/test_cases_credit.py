"""Cases of what a token answers for: B06, B07, B18, B41, B48, B50 of the case collection.

Reward-to-go, ratios that are 1 in value and differentiated, both placements at once, sums against token estimates.
"""

import functools

import numpy as np
import pytest
from kl_terms import full_kl, half_alpha, k1, k1_by_sequence, k2, k3, live, masked, score_loss
from toys import (
    by_hand,
    expected_gradient,
    expected_value,
    one_token,
    two_tokens,
    value_of,
)

from klgrad.analysis import check
from klgrad.analysis.checking.models import model
from klgrad.analysis.checking.probing import probe
from klgrad.analysis.checking.subject import function_subject
from klgrad.synth.enumeration import rows_of

TOY, TOY_TRUTH = one_token(0.7, 0.2), 0.469054
TWO, TWO_TRUTH = two_tokens(), (0.092016, 0, 0.098875)


def own_token(logp, ref_logp, mask):
    return (masked(mask, logp - ref_logp).detach() * masked(mask, logp)).sum(-1).mean()


def to_go(logp, ref_logp, mask):
    k = masked(mask, logp - ref_logp).detach()
    later = k.flip(-1).cumsum(-1).flip(-1)
    return (later * masked(mask, logp)).sum(-1).mean()


def k3_with(ratio):
    """k3 times the ratio pi / sg(pi), 1 in value and differentiated: of the token, the prefix, the reply, its mean."""

    def term(logp, ref_logp, mask):
        steps = live(logp, mask)
        total = steps.sum(-1, keepdim=True)
        log_ratio = {
            "token": steps, "prefix": steps.cumsum(-1), "sequence": total,
            "geometric": total / mask.sum(-1, keepdim=True),
        }[ratio]  # fmt: skip
        return masked(mask, log_ratio.exp() * k3(masked(mask, logp), masked(mask, ref_logp)))

    return term


def own_reward(logp, ref_logp, mask):
    return -np.where(mask, logp - ref_logp, 0.0)


def rewards_to_go(logp, ref_logp, mask):
    return np.cumsum(own_reward(logp, ref_logp, mask)[:, ::-1], axis=1)[:, ::-1]


def summed_past(logp, ref_logp, mask):
    """Summed the wrong way: what is past adds nothing, so the token's own term alone is left."""
    return np.cumsum(own_reward(logp, ref_logp, mask), axis=1)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (own_token, {}),
        (k2, {"placement": "loss"}),
        (k3_with("token"), {"placement": "loss"}),
        (full_kl, {"placement": "loss"}),
        (own_reward, {"returns": "return"}),
        (summed_past, {"returns": "return"}),
    ],
)
def test_b06_the_future_is_missing(function, options):
    """Right for the token objective, wrong for the sequence's."""
    report = check(function, sections=("gradient",), **options)
    assert [part["verdict"] for part in report.gradient.values()] == ["token"]
    assert not report.passed
    assert "future term" in report.of("gradient", "error")[0].message
    assert check(function, sections=("gradient",), target="token", **options).passed


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (to_go, {}),
        (score_loss, {"arguments": {"beta": 1.0}}),
        (k3_with("prefix"), {"placement": "loss"}),
        (k3_with("sequence"), {"placement": "loss"}),
        (rewards_to_go, {"returns": "return"}),
        (full_kl, {"placement": "both"}),
        (lambda lp, ref, mask: 0.5 * masked(mask, lp - ref).sum(-1) ** 2, {"placement": "loss"}),
    ],
)
def test_b06_with_the_future(function, options):
    """The last one: k2 of the whole sequence's log-ratio."""
    report = check(function, sections=("gradient",), **options)
    assert [part["verdict"] for part in report.gradient.values()] == ["sequence"]
    assert report.passed


@pytest.mark.parametrize(
    ("function", "placement", "options", "gradient"),
    [
        (own_token, "loss", {}, (0, 0, 0.098875)),
        (own_reward, "reward", {"returns": "return"}, (0, 0, 0.098875)),
        (k3, "loss", {}, (0, 0, 0.2)),
        (to_go, "loss", {}, TWO_TRUTH),
        (rewards_to_go, "reward", {"returns": "return"}, TWO_TRUTH),
        (k1_by_sequence, "reward", {}, TWO_TRUTH),
        (k3_with("token"), "loss", {}, (0, 0, 0.098875)),  # from here on case B07
        (k3_with("geometric"), "loss", {}, (0.046008, 0, 0.149438)),
        (k3_with("sequence"), "loss", {}, TWO_TRUTH),
        (k3_with("prefix"), "loss", {}, TWO_TRUTH),
    ],
)
def test_b06_and_b07_the_numbers(function, placement, options, gradient):
    assert expected_gradient(function, placement, TWO, 2, **options) == pytest.approx(gradient, abs=1e-6)


def test_b07_the_mean_ratio_is_neither():
    part = check(k3_with("geometric"), placement="loss", sections=("gradient",)).gradient["loss"]
    assert part["verdict"] == "other"
    assert part["name"] == "token-forward + sequence/T - token-forward/T at a fixed length T"


def test_b07_sum_and_mean_in_both_is_the_same_kind():
    """A variant: the penalty is summed in the reward and averaged in the loss."""

    def both(logp, ref_logp, mask):
        d = masked(mask, ref_logp - logp)
        k = d.exp() - d - 1
        return (k.detach().sum(-1) * live(logp, mask).sum(-1) + k.sum(-1) / mask.sum(-1))[:, None].expand_as(k)

    def as_sequence(logp, ref_logp, mask):
        return both(logp, ref_logp, mask)[:, 0]

    report = check(as_sequence, placement="loss", sections=("gradient",))
    assert report.gradient["loss"]["name"] == "sequence - token-forward + token-forward/T at a fixed length T"
    assert "mean over tokens meets a sum" in report.findings[0].message


def times_ratio(estimator):
    def term(logp, ref_logp, mask):
        value = estimator(masked(mask, logp), masked(mask, ref_logp))
        return live(logp, mask).exp() * value

    return term


@pytest.mark.parametrize(
    ("estimator", "ratio", "number", "verdict"),
    [
        (k1, True, 0.469054, "token"),
        (k3, True, 0.469054, "token"),
        (k2, True, 0.532830, "divergence"),
        (k2, False, 0.469054, "token"),
    ],
)
def test_b18_which_estimator_takes_a_ratio(estimator, ratio, number, verdict):
    function = times_ratio(estimator) if ratio else estimator
    assert expected_gradient(function, "loss", TOY)[0] == pytest.approx(number, abs=1e-6)
    report = check(function, placement="loss", target="token", sections=("gradient",))
    assert report.gradient["loss"]["verdict"] == verdict
    assert report.passed is (verdict == "token")


def test_b18_any_unbiased_value_will_do():
    """The rule behind the table, on a value that it does not list."""
    report = check(times_ratio(half_alpha), placement="loss", target="token", sections=("gradient",))
    assert report.passed


@pytest.mark.parametrize(("estimator", "number"), [(k1, 0.469054), (k3, 0.469054), (k2, 0.532830)])
def test_b41_in_both_places_is_once_for_k1_and_k3(estimator, number):
    assert expected_gradient(estimator, "both", TOY)[0] == pytest.approx(number, abs=1e-6)
    assert check(estimator, placement="both", sections=("gradient",)).passed is (estimator is not k2)


def test_b41_twice_in_one_place_is_twice():
    """A variant: k1 in the reward, and the surrogate of it in the loss as well."""

    def twice(logp, ref_logp, mask):
        return 2 * score_loss(logp, ref_logp, mask, 1.0)

    part = check(twice, sections=("gradient",)).gradient["loss"]
    assert part["verdict"] == "scaled-sequence"
    assert part["factor"] == pytest.approx(2)


def test_b48_token_and_sequence_estimates():
    """Both unbiased; k1's are one and the same, k3's are not."""

    def k3_by_sequence(logp, ref_logp, mask):
        d = masked(mask, ref_logp - logp).sum(-1)
        return d.exp() - d - 1

    batch = by_hand([[-1.0, -1.0]], [[-0.5, -1.5]])
    assert value_of(k3, batch).sum() == pytest.approx(0.255252, abs=1e-6)
    assert value_of(k3_by_sequence, batch)[0] == pytest.approx(0, abs=1e-12)
    numbers = {k3: 0.261118, k3_by_sequence: 0.261118, k1: 0.251119, k1_by_sequence: 0.251119}
    for function, variance in numbers.items():
        assert expected_value(function, TWO, 2) == pytest.approx((0.184032, variance), abs=1e-6)
        assert check(function, sections=("value",)).value["relative_bias"] < 1e-8


def test_b50_a_self_normalised_weight_is_biased():
    """Target .7, proposal .2: the weighted mean of y over n draws against n, and the gradient's (G - 1)/G."""

    def weighted_mean(logp, old_logp, actions):
        w = (logp - old_logp).exp()
        return (w * actions).sum() / w.sum()

    m = model(one_token(0.7, 0.5, 0.2), 1)
    subject = function_subject(weighted_mean, probe())
    for n, expected in ((1, 0.2), (2, 0.329), (4, 0.475), (8, 0.590)):
        mean = 0.0
        for ones in range(n + 1):  # order does not matter: a binomial over how many drew y = 1
            chance = float(np.prod([(n - i) / (i + 1) for i in range(ones)])) * 0.2**ones * 0.8 ** (n - ones)
            rows = rows_of(m.batch, [1] * ones + [0] * (n - ones))
            mean += chance * float(subject.evaluate(rows, differentiate=False).value)
        assert mean == pytest.approx(expected, abs=5e-4)

    def self_normalised(logp, ref_logp, old_logp, mask):
        w = masked(mask, logp - old_logp).sum(-1).exp()
        return (w * masked(mask, logp - ref_logp).detach().sum(-1)).sum() / w.sum()

    report = check(self_normalised, sections=("gradient",))
    assert report.gradient["loss"]["by_group_size"] == pytest.approx({2: 1 / 2, 3: 2 / 3, 4: 3 / 4})
    assert not report.passed


def test_b50_a_missing_score():
    """The cost is differentiated and the score forgotten; with it, adding a constant moves nothing."""

    def shifted(constant, logp, ref_logp):
        return logp - ref_logp + constant

    missing = expected_gradient(k1, "loss", TOY)
    for constant in (0.0, 5.0):
        whole = expected_gradient(functools.partial(shifted, constant), "both", TOY)
        assert whole == pytest.approx([TOY_TRUTH], abs=1e-6)
    assert missing == pytest.approx([0], abs=1e-12)
