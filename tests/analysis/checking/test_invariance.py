"""Padding, order, splits, repetition, beta, reward shifts: a fault each, and no alarm for what is right."""

import pytest
import torch

from klgrad.analysis import check


def right(log_probs, ref_log_probs, mask, beta=0.1):
    k = torch.where(mask, log_probs - ref_log_probs, 0.0)
    if beta == 0:
        return 0.0 * torch.where(mask, log_probs, 0.0).sum(-1).mean()
    return beta * (k.detach().sum(-1) * torch.where(mask, log_probs, 0.0).sum(-1)).mean()


def report(function):
    return check(function, sections=("invariance",), strict=True)


def errors(function):
    return [f.message for f in report(function).findings if f.level == "error"]


def test_what_is_right_raises_no_alarm():
    found = report(right)
    assert [f.level for f in found.findings] == ["info"]


def multiplied(log_probs, ref_log_probs, mask):
    return ((log_probs - ref_log_probs) * mask).sum(-1).mean()


def token_multiplied(log_probs, ref_log_probs, mask):
    return ((ref_log_probs - log_probs).exp() - 1 + log_probs - ref_log_probs) * mask


def padded_mean(log_probs, ref_log_probs, mask):
    return torch.where(mask, (log_probs - ref_log_probs) ** 2, 0.0).mean(-1)


def random(log_probs, ref_log_probs):
    return torch.nn.functional.dropout(log_probs - ref_log_probs, 0.5)


def first_row(log_probs, ref_log_probs):
    return log_probs - ref_log_probs + (log_probs - ref_log_probs)[:1].detach()


def quadratic(log_probs, ref_log_probs, beta):
    return beta**2 * (log_probs - ref_log_probs)


def unused(log_probs, ref_log_probs, kl_coef=0.05):
    return log_probs - ref_log_probs


def floor(log_probs, ref_log_probs, beta):
    return (beta + 1e-3) * (log_probs - ref_log_probs)


def divided(log_probs, ref_log_probs, beta):
    return beta * (log_probs - ref_log_probs) * (torch.tensor(beta) / beta)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (multiplied, "leaks through the mask"),
        (token_multiplied, "not finite"),
        (padded_mean, "two more padded places"),
        (random, "second time"),
        (first_row, "another order"),
        (quadratic, "not linear in beta"),
        (unused, "never applied"),
        (floor, "bit for bit"),
        (divided, "beta = 0 it is NaN"),
    ],
)
def test_each_fault_is_named(function, words):
    assert any(words in message for message in errors(function)), errors(function)


def test_a_loss_without_a_mask_is_warned():
    def bare(log_probs, ref_log_probs):
        return (log_probs - ref_log_probs).sum(-1).mean()

    (warning,) = report(bare).of("invariance", "warning")
    assert "takes no mask" in warning.message


def test_rows_that_depend_on_each_other_are_warned():
    def centred(log_probs, ref_log_probs):
        k = log_probs - ref_log_probs
        return k - k.mean()

    (warning,) = [f for f in report(centred).of("invariance", "warning") if "split" in f.numbers]
    assert warning.numbers["split"] > 0.01


def test_a_constant_reward_must_not_matter():
    def scored(log_probs, ref_log_probs, mask, rewards):
        k = torch.where(mask, log_probs - ref_log_probs, 0.0).detach().sum(-1)
        return ((k - rewards) * torch.where(mask, log_probs, 0.0).sum(-1)).mean()

    def half_scored(log_probs, ref_log_probs, mask, rewards):
        k = torch.where(mask, log_probs - ref_log_probs, 0.0).detach().sum(-1)
        return ((k - rewards) * torch.where(mask, log_probs, 0.0)[:, 0] * mask.sum(-1)).mean()

    assert report(scored).of("invariance", "warning") == []
    (warning,) = report(half_scored).of("invariance", "warning")
    assert "constant added to every reward" in warning.message
