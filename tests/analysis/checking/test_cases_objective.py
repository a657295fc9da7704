"""Cases of what a term really optimises: B01-B05, B31, B33, B47 of the case collection.

Each case has the wrong and the right version, its own number on its toy, and variants that it does not show. What a
pure function of log-probs cannot express, in this and the neighbouring modules: B32 (which policy the reference was
refreshed from) and B36 (an adaptive coefficient) are states of a run; of B19, B31 and B38 the part that lives in a
model (adapters, shared parameters, dropout in a forward pass) shows here only as the log-probs it leaves.
"""

import numpy as np
import pytest
import torch
from kl_terms import full_kl, half_alpha, k1, k1_by_sequence, k1_numpy, k2, k3, k3_numpy, masked, score_loss
from toys import (
    each_gradient,
    expected_gradient,
    expected_group_gradient,
    expected_value,
    one_token,
    two_tokens,
)

from klgrad.analysis import check
from klgrad.analysis.checking.models import model
from klgrad.analysis.checking.probing import probe
from klgrad.analysis.checking.subject import function_subject
from klgrad.synth import exact
from klgrad.synth.configurations import parse
from klgrad.synth.enumeration import rows_of
from klgrad.synth.moments import moments

TOY, TOY_TRUTH = one_token(0.7, 0.2), 0.469054
TWO, TWO_TRUTH = two_tokens(), (0.092016, 0, 0.098875)


def verdicts(function, **options):
    return {w: part["verdict"] for w, part in check(function, sections=("gradient",), **options).gradient.items()}


def test_the_toys_are_the_cases():
    assert exact.kl(TOY, [1])[0] == pytest.approx(0.582685, abs=1e-6)
    assert exact.true_gradient(TOY, [1])[0] == pytest.approx(TOY_TRUTH, abs=1e-6)
    assert exact.kl(TWO, [2])[0] == pytest.approx(0.184032, abs=1e-6)
    assert exact.true_gradient(TWO, [2])[0] == pytest.approx(TWO_TRUTH, abs=1e-6)


def flipped(logp, ref_logp):
    return ref_logp - logp


def flipped_numpy(logp, ref_logp, mask):
    return -0.5 * np.where(mask, logp - ref_logp, 0.0).sum(axis=1)


def flipped_loss(*, logp, ref_logp, mask, beta=0.1):
    return -score_loss(logp, ref_logp, mask, beta)


def flipped_return(logp, ref_logp, mask):
    """Rewards to go to which the KL is added where it should be taken off."""
    return np.cumsum(np.where(mask, logp - ref_logp, 0.0)[:, ::-1], axis=1)[:, ::-1]


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (flipped, {"placement": "reward"}),
        (flipped_numpy, {"placement": "reward"}),
        (flipped_loss, {}),
        (flipped_return, {"returns": "return"}),
        (k1, {"returns": "reward", "placement": "reward"}),
        (k2, {"returns": "reward", "placement": "loss"}),
    ],
)
def test_b01_a_flipped_sign(function, options):
    assert list(verdicts(function, **options).values()) == ["wrong-sign"]
    assert not check(function, sections=("gradient",), **options).passed


def test_b01_the_number():
    """One step of 0.1: down with the right sign, up with the other."""
    right = expected_gradient(k1, "reward", TOY)[0]
    wrong = expected_gradient(flipped, "reward", TOY)[0]
    assert right == pytest.approx(TOY_TRUTH, abs=1e-6)
    assert wrong == pytest.approx(-right)
    theta = TOY.policy.theta[0]
    for gradient, after in ((right, 0.560714), (wrong, 0.604706)):
        moved = one_token(1 / (1 + np.exp(-(theta - 0.1 * gradient))), 0.2)
        assert exact.kl(moved, [1])[0] == pytest.approx(after, abs=1e-6)
    report = check(flipped, placement="reward", sections=("value", "gradient"))
    assert report.value["expected"] == pytest.approx(-report.value["kl"])
    assert "flip its sign" in report.of("value", "error")[0].message
    assert check(flipped, returns="reward", placement="reward", sections=("value", "gradient")).passed


@torch.no_grad()
def k3_without_gradient(logp, ref_logp):
    return k3(logp, ref_logp)


def k2_of_detached(logp, ref_logp):
    return k2(logp.detach(), ref_logp)


def rebuilt(logp, ref_logp, mask):
    """Out of the graph and back in: a tensor of numbers."""
    numbers = torch.tensor((logp - ref_logp).tolist(), dtype=torch.float64)
    return masked(mask, numbers).sum(-1).mean()


@pytest.mark.parametrize("function", [k3_without_gradient, k2_of_detached, rebuilt])
def test_b02_a_dead_term(function):
    report = check(function, placement="loss", sections=("gradient",)) if function is not rebuilt else check(function)
    assert report.gradient["loss"]["verdict"] == "dead"
    assert "zero for every sample" in report.of("gradient", "error")[0].message


def test_b02_the_number():
    assert each_gradient(k3, "loss", TOY)[1].ravel() == pytest.approx([1.166667, 0.214286], abs=1e-6)
    assert not each_gradient(k3_without_gradient, "loss", TOY)[1].any()
    assert each_gradient(k3_numpy, "loss", TOY)[1].ravel() == pytest.approx([1.166667, 0.214286], abs=1e-6)


def test_b03_k3_in_the_reward():
    """A good value in the wrong place; over a grid of pairs the sign is wrong in 210 of 342."""
    assert expected_gradient(k3, "reward", TOY)[0] == pytest.approx(-0.030946, abs=1e-6)
    assert expected_gradient(k2, "reward", TOY)[0] == pytest.approx(0.063776, abs=1e-6)
    grid = [round(0.05 * i, 2) for i in range(1, 20)]
    wrong = 0
    for pi in grid:
        for q in grid:
            if pi != q:
                pair = one_token(pi, q)
                (found,) = moments(pair, [parse("k3-in-reward")], [1], covariance="trace")
                wrong += bool(found.mean[0] @ exact.true_gradient(pair, [1])[0] < -1e-12)
    assert wrong == 210
    report = check(k3, placement="reward", sections=("gradient",))
    assert report.gradient["reward"]["name"] == "sequence - token-forward"
    assert min(report.gradient["reward"]["cosine"].values()) < 0
    assert verdicts(k1, placement="reward") == {"reward": "sequence"}


@pytest.mark.parametrize("function", [k3_numpy, k2, half_alpha])
def test_b03_other_values_in_the_reward(function):
    assert not check(function, placement="reward", sections=("gradient",)).passed


class Penalty:
    def __call__(self, logp, ref_logp):
        return logp - ref_logp


@pytest.mark.parametrize("function", [k1, k1_numpy, k1_by_sequence, Penalty()])
def test_b04_k1_in_the_loss(function):
    report = check(function, placement="loss", sections=("gradient",))
    assert report.gradient["loss"]["verdict"] == "zero"
    assert "does not depend on the reference" in report.findings[0].message
    assert not report.passed
    assert verdicts(function, placement="reward") == {"reward": "sequence"}


def test_b04_the_number():
    for q in (0.2, 0.9):
        probability, each = each_gradient(k1, "loss", one_token(0.7, q))
        assert each.ravel() == pytest.approx([-0.7, 0.3])
        assert probability @ each == pytest.approx(0, abs=1e-12)
        assert probability @ each**2 == pytest.approx(0.21)


def test_b04_a_length_mean_is_not_even_zero():
    """A variant: with 1/|y| it optimises E[1/length]: it pays for longer replies, whatever the reference."""

    def averaged(logp, ref_logp, mask):
        return masked(mask, logp - ref_logp).sum(-1) / mask.sum(-1)

    (finding,) = check(averaged, placement="loss", sections=("gradient",)).findings
    assert "E[1/length]" in finding.message
    assert "does not depend on the reference" in finding.message


@pytest.mark.parametrize("function", [k3, k3_numpy])
def test_b05_k3_in_the_loss(function):
    assert verdicts(function, placement="loss") == {"loss": "token-forward"}
    assert not check(function, placement="loss", sections=("gradient",)).passed
    assert check(function, placement="loss", target="token-forward", sections=("gradient",)).passed


@pytest.mark.parametrize(
    ("pi", "q", "found", "truth"),
    [(0.7, 0.2, 0.5, 0.469054), (0.999, 0.5, 0.499, 0.006900), (0.01, 1e-6, 0.009999, 0.091282)],
)
def test_b05_the_numbers(pi, q, found, truth):
    pair = one_token(pi, q)
    assert expected_gradient(k3, "loss", pair)[0] == pytest.approx(found, abs=1e-6)
    assert exact.token_forward_gradient(pair, [1])[0] == pytest.approx(found, abs=1e-6)
    assert exact.true_gradient(pair, [1])[0] == pytest.approx(truth, abs=1e-6)


def test_b05_whole_sequences():
    """A variant: k3 of the summed log-ratio descends KL(pi_ref || pi) of whole sequences, another field again."""

    def of_sequences(logp, ref_logp, mask):
        d = masked(mask, ref_logp - logp).sum(-1)
        return d.exp() - d - 1

    report = check(of_sequences, sections=("gradient",))
    assert report.gradient["loss"]["name"] == "KL(pi_ref || pi) of whole sequences"
    assert report.gives == ["both"]


def alias(logp, ref_logp):
    d = logp.detach() - logp
    return d.exp() - d - 1


def alias_numpy(logp, ref_logp, mask):
    reference = logp
    return np.where(mask, logp - reference, 0.0).sum(axis=-1)


def alias_full(full_log_probs, ref_full_log_probs):
    a = b = full_log_probs.log_softmax(-1)
    return (a.exp() * (a - b)).sum(-1)


@pytest.mark.parametrize("function", [alias, alias_numpy, alias_full])
def test_b31_both_sides_are_the_same(function):
    report = check(function, sections=("value", "gradient"))
    assert report.value["always_zero"]
    assert "both sides are the same log-probs" in report.of("value", "error")[0].message
    assert {part["verdict"] for part in report.gradient.values()} == {"dead"}


def test_b31_the_number():
    """KL(old || new) from logits (0, 0) to (.5, 0); an alias has none."""
    p = 1 / (1 + np.exp(-0.5))
    pair = one_token(0.5, 1 - p)
    assert exact.kl(pair, [1])[0] == pytest.approx(0.030930, abs=1e-6)
    assert expected_value(k1, pair)[0] == pytest.approx(0.030930, abs=1e-6)
    assert expected_value(alias, pair)[0] == 0


def forward_full(logits, ref_logits):
    a, b = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return torch.nn.functional.kl_div(a, b, reduction="none", log_target=True).sum(-1)


def forward_numpy(full_log_probs, ref_full_log_probs):
    return (np.exp(ref_full_log_probs) * (ref_full_log_probs - full_log_probs)).sum(-1)


def k3_exchanged(logp, ref_logp):
    return k3(ref_logp, logp)


@pytest.mark.parametrize("function", [forward_full, forward_numpy, k3_exchanged])
def test_b33_policy_and_reference_exchanged(function):
    report = check(function, sections=("value", "gradient"))
    assert not report.passed
    assert report.value["exchanged"]
    assert any("swapped" in f.message for f in report.of("value", "warning"))


def test_b33_the_numbers():
    for function, expected in ((full_kl, 0.192745), (forward_full, 0.223144), (forward_numpy, 0.223144)):
        m = model(one_token(0.2, 0.5), 1)
        value = function_subject(function, probe()).evaluate(m.batch, differentiate=False).by_sequence
        assert value == pytest.approx([expected] * 2, abs=1e-6)
    assert verdicts(forward_full, placement="loss") == {"loss": "token-forward"}
    assert not check(full_kl, sections=("value",)).value["exchanged"]


def test_b47_a_loss_of_zero_may_learn():
    """Ratios of 1 and advantages that sum to 0: the value is 0 and the gradient is not; B02 is another thing."""

    def group_loss(logp, ref_logp, old_logp, mask, beta=1.0):
        k = beta * masked(mask, old_logp - ref_logp).sum(-1)
        advantage = -(k - (k.sum() - k) / max(len(k) - 1, 1)) if len(k) > 1 else -k
        ratio = masked(mask, logp - old_logp).sum(-1).exp()
        return -(ratio * advantage).mean()

    pair = one_token(0.7, 0.2)
    part = check(group_loss, sections=("gradient", "value"))
    assert part.gradient["loss"]["verdict"] == "sequence"
    assert part.passed
    found = expected_group_gradient(group_loss, pair, 1, 2)
    assert found == pytest.approx([TOY_TRUTH], abs=1e-6)

    def given(logp, old_logp):
        advantage = 1.0 - 2.0 * (torch.arange(len(logp)) % 2)  # 1, -1, ...
        return -((logp - old_logp).exp()[:, 0] * advantage).mean()

    m = model(pair, 1)
    terms = function_subject(given, probe()).evaluate(rows_of(m.batch, [1, 0]))
    assert terms.value == pytest.approx(0, abs=1e-12)
    assert terms.token[:, 0] @ m.scores[[1, 0], 0] == pytest.approx([-0.5])
