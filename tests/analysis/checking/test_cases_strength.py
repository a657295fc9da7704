"""Cases of how strong the penalty is: B14, B21-B24, B40, B51, B52 of the case collection.

Coefficients that are never applied, padding that counts, normalisers that disagree, rewards that do not arrive.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kl_terms import k1, k2, masked
from toys import by_hand, value_of

from klgrad.analysis import check
from klgrad.analysis.checking.probing import probe
from klgrad.analysis.checking.subject import function_subject
from klgrad.synth.enumeration import rows_of


def messages(function, level="error", section="invariance", **options):
    return [f.message for f in check(function, sections=(section,), **options).of(section, level)]


def raw(function, batch, shift=0.0, beta=1.0, **options):
    """What it returns, where rewards and advantages are all ``shift``."""
    subject = replace(function_subject(function, probe(), **options), shift=shift)
    return subject.evaluate(batch, differentiate=False, beta=beta).raw


def kl_batch(kl, mask=None):
    """Log-ratios of one or more replies."""
    kl = np.atleast_2d(kl)
    return by_hand(np.full(kl.shape, -0.5), -0.5 - kl, np.ones(kl.shape) if mask is None else np.atleast_2d(mask))


# ------------------------------------------------------------------------------------------ B14: dead coefficients


def whole_returns(logp, ref_logp, mask, rewards, kl_coef):
    total = rewards - kl_coef * np.where(mask, logp - ref_logp, 0.0).sum(1)
    return np.where(mask, total[:, None], 0.0)


def returns_to_go(logp, ref_logp, mask, rewards, kl_coef):
    paid = -kl_coef * np.where(mask, logp - ref_logp, 0.0)
    paid[np.arange(len(paid)), mask.sum(1) - 1] += rewards
    return np.cumsum(paid[:, ::-1], axis=1)[:, ::-1]


def own_returns(logp, ref_logp, mask, rewards, kl_coef):
    """Each token pays for itself alone: the returns without their future KL."""
    return np.where(mask, rewards[:, None] - kl_coef * (logp - ref_logp), 0.0)


def returns_without(logp, ref_logp, mask, rewards, kl_coef):
    return np.where(mask, rewards[:, None] + 0 * logp, 0.0)


@pytest.mark.parametrize(
    ("function", "expected", "verdict"),
    [
        (whole_returns, [0.8, 0.8], "sequence"),
        (returns_to_go, [0.8, 0.85], "sequence"),
        (own_returns, [0.95, 0.85], "token"),
        (returns_without, [1.0, 1.0], "dead"),
    ],
)
def test_b14_a_penalty_in_the_returns(function, expected, verdict):
    found = raw(function, kl_batch([0.1, 0.3]), shift=1.0, beta=0.5, returns="return")
    assert found[0] == pytest.approx(expected)
    report = check(function, returns="return", sections=("gradient", "invariance"))
    assert report.gradient["reward"]["verdict"] == verdict
    assert report.passed is (verdict == "sequence")
    assert any("never applied" in f.message for f in report.of("invariance")) is (verdict == "dead")


def unused(logp, ref_logp, beta=0.05):
    return logp - ref_logp


def switched_off(logp, ref_logp, mask, beta=0.05, use_kl_loss=False):
    """The flag that turns it on is never passed."""
    base = 0.0 * masked(mask, logp).sum(-1)
    return (base + beta * masked(mask, k2(logp, ref_logp)).sum(-1) if use_kl_loss and beta else base).mean()


def hard_wired(logp, ref_logp, mask, kl_loss_coef):
    return (kl_loss_coef * 0 + 0.001) * masked(mask, k2(logp, ref_logp)).sum(-1)


@pytest.mark.parametrize("function", [unused, switched_off, hard_wired])
def test_b14_accepted_and_never_applied(function):
    (message,) = messages(function)
    assert "accepted and never applied" in message
    assert "beta = 0, 1 and 2" in message


def squared(logp, ref_logp, beta):
    return beta**2 * (logp - ref_logp)


def capped(logp, ref_logp, kl_coef):
    return min(kl_coef, 0.75) * (logp - ref_logp)


def shared_scale(logp, ref_logp, mask, beta):
    """A weighted mean of the policy loss and the penalty: the coefficient stands below the line too."""
    return beta / (1 + beta) * masked(mask, k2(logp, ref_logp)).sum(-1)


@pytest.mark.parametrize("function", [squared, capped, shared_scale])
def test_b14_not_linear(function):
    assert any("not linear in beta" in m or "give the same" in m for m in messages(function))


def test_b14_switched_on_is_right():
    report = check(switched_off, arguments={"use_kl_loss": True}, target="token", sections=("gradient", "invariance"))
    assert report.passed


# ------------------------------------------------------------------------------------------ B21, B40: padding


def mean_over_all(logp, ref_logp):
    return (logp - ref_logp).mean(-1)


def mean_over_all_masked(logp, ref_logp, mask):
    return np.where(mask, logp - ref_logp, 0.0).mean(axis=-1)


def mean_over_real(logp, ref_logp, mask):
    return masked(mask, logp - ref_logp).sum(-1) / mask.sum(-1)


def entropy_over_all(logp, ref_logp):
    return -logp.sum(-1)


def entropy_over_real(logp, ref_logp, mask):
    return -masked(mask, logp).sum(-1)


def test_b21_and_b40_the_numbers():
    mask = [1, 1, 1, 0, 0]
    batch = kl_batch([0.1, 0.2, 0.3, 1, 1], mask)
    assert value_of(mean_over_real, batch) == pytest.approx([0.2])
    assert value_of(mean_over_all, batch) == pytest.approx([0.52])
    logs = by_hand([[-0.5, -0.7, 1, 1, 1]], np.zeros((1, 5)), [[1, 1, 0, 0, 0]])
    assert value_of(entropy_over_real, logs) == pytest.approx([1.2])
    assert value_of(entropy_over_all, logs) == pytest.approx([-1.8])


def padded_loss(logp, ref_logp, mask):
    return masked(mask, k2(logp, ref_logp)).mean()


def counted_by_shape(logp, ref_logp, mask):
    return np.where(mask, (logp - ref_logp) ** 2 / 2, 0.0).sum() / mask.size


@pytest.mark.parametrize("function", [mean_over_all_masked, padded_loss, counted_by_shape])
def test_b21_padding_counts(function):
    assert any("padding is counted" in m for m in messages(function))


def test_b21_no_mask_at_all():
    assert any("takes no mask" in m for m in messages(mean_over_all, "warning"))
    (message,) = messages(mean_over_real)
    assert "a reply with no tokens (all masked) gives NaN" in message


def test_b21_a_mean_over_real_tokens_is_another_objective():
    part = check(mean_over_real, placement="reward", sections=("gradient",)).gradient["reward"]
    assert part["verdict"] == "scaled-sequence"
    assert part["factor"] == pytest.approx({n: 1 / n for n in (1, 2, 3, 4, 8)})
    assert part["only_fixed_length"]


# ------------------------------------------------------------------------------------------ B22: group deviations


def group_normalised(logp, ref_logp, mask, beta):
    reward = -beta * masked(mask, logp - ref_logp).detach().sum(-1)
    return (reward - reward.mean()) / (reward.std() + 1e-12)


def leave_one_out(logp, ref_logp, mask, beta):
    reward = -beta * masked(mask, logp - ref_logp).detach().sum(-1)
    return reward - (reward.sum() - reward) / max(len(reward) - 1, 1)


def test_b22_the_numbers():
    batch = kl_batch([[0.1], [0.2], [0.3], [0.4]])
    normal = np.array([1.161895, 0.387298, -0.387298, -1.161895])
    plain = np.array([2e-4, 6.667e-5, -6.667e-5, -2e-4])
    for beta in (0.001, 0.1):
        assert raw(group_normalised, batch, beta=beta) == pytest.approx(normal, abs=1e-6)
        assert raw(leave_one_out, batch, beta=beta) == pytest.approx(plain * beta / 0.001, rel=1e-4)


def grpo_whitened(logp, ref_logp, old_logp, mask, rewards, kl_coef):
    """KL in the reward, whitened, PPO's clipped surrogate: a whole loss."""
    reward = rewards - kl_coef * masked(mask, old_logp - ref_logp).sum(-1)
    advantage = ((reward - reward.mean()) / (reward.std(correction=0) + 1e-6))[:, None]
    ratio = masked(mask, logp - old_logp).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -masked(mask, surrogate).sum(-1).mean()


def whitened_numpy(logp, ref_logp, mask, beta):
    reward = -beta * np.where(mask, logp - ref_logp, 0.0).sum(1)
    return -(reward - reward.mean()) / np.sqrt(reward.var() + 1e-20)


@pytest.mark.parametrize("function", [group_normalised, grpo_whitened, whitened_numpy])
def test_b22_the_deviation_divides_beta_out(function):
    assert any("beta = 1 and beta = 2 give the same" in m for m in messages(function))


def test_b22_without_the_deviation_beta_counts():
    assert messages(leave_one_out, returns="reward") == []


# ------------------------------------------------------------------------------------------ B23, B24: aggregation


def two_normalisers(logp, ref_logp, old_logp, advantages, mask, beta):
    """Policy loss over all tokens, penalty over replies."""
    policy = masked(mask, (logp - old_logp).exp() * advantages).sum() / mask.sum()
    penalty = (masked(mask, k2(logp, ref_logp)).sum(-1) / mask.sum(-1)).mean()
    return beta * penalty - policy


def one_normaliser(logp, ref_logp, old_logp, advantages, mask, beta):
    per_token = beta * k2(logp, ref_logp) - (logp - old_logp).exp() * advantages
    return masked(mask, per_token).sum(-1).mean()


def test_b23_the_numbers():
    """Lengths 2 and 8, log-ratios of 1: what a token weighs in the penalty against the policy loss."""
    mask = np.arange(8) < np.array([[2], [8]])
    batch = by_hand(np.full((2, 8), -1.0), np.full((2, 8), -2.0), mask)
    for function, effective in ((two_normalisers, (2.5, 0.625)), (one_normaliser, (1.0, 1.0))):
        subject = function_subject(function, probe())
        penalty = subject.evaluate(batch).token
        policy = replace(subject, shift=1.0).evaluate(batch).token - penalty
        assert -penalty[:, 0] / policy[:, 0] == pytest.approx(effective)
    penalty = function_subject(two_normalisers, probe()).evaluate(batch).token
    assert penalty[:, 0] == pytest.approx([1 / 4, 1 / 16])


def test_b23_the_penalty_depends_on_the_length():
    report = check(two_normalisers, target="token", sections=("gradient",))
    assert not report.passed
    assert "scaled by 1/T" in report.of("gradient", "error")[0].message
    assert check(one_normaliser, target="token", sections=("gradient",)).passed


def test_b23_spread_over_tokens_and_summed_again():
    """A variant: a reply's penalty on each of its tokens: long to short is 16 to 1 instead of 4 to 1."""

    def spread(logp, ref_logp, mask):
        whole = masked(mask, k2(logp, ref_logp)).sum(-1, keepdim=True)
        return masked(mask, whole.expand_as(logp))

    mask = np.arange(8) < np.array([[2], [8]])
    batch = by_hand(np.full((2, 8), -1.0), np.full((2, 8), -2.0), mask)
    short, long = value_of(spread, batch).sum(1)
    assert long / short == pytest.approx(16)
    report = check(spread, placement="loss", target="token", sections=("gradient",))
    assert "scaled by T:" in report.of("gradient", "error")[0].message


def token_mean(logp, ref_logp, mask):
    return masked(mask, logp - ref_logp).sum() / mask.sum()


def token_mean_numpy(logp, ref_logp, mask):
    return np.average(np.where(mask, logp - ref_logp, 0.0), weights=mask)


def global_mean(logp, ref_logp, mask):
    """Per reply, to be divided by the global number of tokens: a constant here."""
    return masked(mask, logp - ref_logp).sum(-1).mean() / 4.0


@pytest.mark.parametrize("function", [token_mean, token_mean_numpy])
def test_b24_a_mean_of_means(function):
    mask = np.arange(100) < np.array([[10], [100]])
    batch = by_hand(np.full((2, 100), -2.0), np.array([[-3.0], [-2.1]]) * np.ones((2, 100)), mask)
    assert value_of(function, batch) == pytest.approx(0.181818, abs=1e-6)
    halves = [float(value_of(function, rows_of(batch, [i]))) for i in range(2)]
    assert np.mean(halves) == pytest.approx(0.55)
    (message,) = messages(function, "warning")
    assert "micro-batches and ranks disagree" in message


def test_b24_sums_and_means_over_rows():
    assert messages(global_mean, "warning") == []

    def summed(logp, ref_logp, mask):
        return masked(mask, k2(logp, ref_logp)).sum()

    (message,) = messages(summed, "warning")
    assert "sums over the rows" in message


# ------------------------------------------------------------------------------------------ B51: rewards that get lost


def on_the_first_pad(logp, ref_logp, mask, rewards, beta):
    paid = -beta * np.where(mask, logp - ref_logp, 0.0)
    paid[np.arange(len(paid)), np.minimum(mask.sum(1), mask.shape[1] - 1)] += rewards
    return np.cumsum(np.where(mask, paid, 0.0)[:, ::-1], axis=1)[:, ::-1]


def on_the_last_column(logp, ref_logp, mask, rewards, beta):
    """The end of the row, not of the reply."""
    paid = masked(mask, beta * (ref_logp - logp))
    paid = torch.cat([paid[:, :-1], paid[:, -1:] + rewards[:, None]], -1)
    return masked(mask, paid).flip(-1).cumsum(-1).flip(-1)


def lost_in_the_loss(logp, ref_logp, mask, rewards):
    """The same in a whole loss: only replies that fill the row are rewarded."""
    kl = masked(mask, logp - ref_logp).detach().sum(-1)
    paid = rewards * mask[:, -1] - kl
    return -(paid * masked(mask, logp).sum(-1)).mean()


def test_b51_the_numbers():
    batch = kl_batch([0.0, 0.0, 0.0, 0.0], [1, 1, 1, 0])
    for function, expected in ((returns_to_go, [1, 1, 1, 0]), (on_the_first_pad, [0, 0, 0, 0])):
        assert raw(function, batch, shift=1.0, returns="return")[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("function", "options"),
    [(on_the_first_pad, {"returns": "return"}), (on_the_last_column, {"returns": "return"}), (lost_in_the_loss, {})],
)
def test_b51_the_reward_never_arrives(function, options):
    (message,) = [m for m in messages(function, **options) if "never reaches" in m]
    assert "last real token" in message


def test_b51_it_arrives_or_is_never_used():
    assert messages(returns_to_go, returns="return") == []
    assert messages(returns_to_go, "warning", returns="return") == []

    def ignored(logp, ref_logp, mask, advantages):
        return masked(mask, k2(logp, ref_logp)).sum(-1).mean()

    assert any("change nothing" in m for m in messages(ignored, "warning"))


# ------------------------------------------------------------------------------------------ B52: names that select


def by_name(logp, ref_logp, kind="k1"):
    lr = logp - ref_logp
    return {"k1": lr, "k2": lr**2 / 2, "k3": torch.expm1(-lr) + lr}[kind]


def falls_through(logp, ref_logp, kind="k1"):
    return by_name(logp, ref_logp, kind if kind in ("k1", "k3") else "k1")


def test_b52_names_select():
    batch = kl_batch([0.3])
    for name, expected in (("k1", 0.3), ("k2", 0.045), ("k3", 0.040818)):
        assert value_of(by_name, batch, constants={"kind": name}) == pytest.approx(np.array([[expected]]), abs=1e-6)
    assert value_of(falls_through, batch, constants={"kind": "k2"}) == pytest.approx(np.array([[0.3]]))

    def of(function, name):
        return check(function, placement="loss", arguments={"kind": name}, sections=("gradient",)).gradient["loss"]

    found = [of(by_name, name)["verdict"] for name in ("k1", "k2", "k3")]
    assert found == ["zero", "token", "token-forward"]
    assert of(falls_through, "k2")["verdict"] == "zero"


def nan_without(logp, ref_logp, beta):
    reference = ref_logp if beta > 0 else ref_logp * float("nan")
    return beta * (logp - reference)


def unbound_without(logp, ref_logp, beta):
    if beta:
        kl = logp - ref_logp
    return beta * kl


def skipped_without(logp, ref_logp, beta):
    return beta * (logp - ref_logp) if beta else torch.zeros_like(logp)


@pytest.mark.parametrize("function", [nan_without, unbound_without])
def test_b52_without_a_coefficient(function):
    assert any(m.startswith("with beta = 0") for m in messages(function))
    assert messages(skipped_without) == []
    assert messages(k1) == []
