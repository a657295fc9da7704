"""Cases of who sampled and what is compared: B11, B13, B15, B16, B19, B37 of the case collection.

Temperatures, a blocked end token, stale samples, another reference, log-probs shifted against each other.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kl_terms import k1, k1_by_sequence, k2, k3, masked
from toys import by_hand, categorical, expected_gradient, expected_value, logit, one_token, value_of

from klgrad.analysis import check
from klgrad.analysis.checking.models import model
from klgrad.analysis.checking.probing import probe
from klgrad.analysis.checking.subject import function_subject
from klgrad.synth import exact

ON, STALE = one_token(0.7, 0.2), one_token(0.7, 0.2, 0.5)


def sampling(function, **options):
    """Sampler -> its finding."""
    found = check(function, sections=("sampling",), **options).of("sampling")
    return {f.numbers["sampler"]: f for f in found}


def report_of(function, **options):
    return check(function, sections=("value", "gradient", "invariance"), **options)


# ------------------------------------------------------------------------------------------ B11: temperature


def picked(log_probs, tokens):
    return log_probs.gather(-1, tokens[..., None])[..., 0]


def two_temperatures(logits, ref_logits, tokens):
    return picked((logits / 0.6).log_softmax(-1) - ref_logits.log_softmax(-1), tokens)


def two_temperatures_numpy(full_log_probs, ref_full_log_probs):
    hot = full_log_probs / 0.6
    hot = hot - np.log(np.exp(hot).sum(-1, keepdims=True))
    return (np.exp(hot) * (hot - ref_full_log_probs)).sum(-1)


def divided_log_probs(logp, ref_logp):
    return logp / 0.6 - ref_logp


def both_divided(logp, ref_logp):
    return (logp - ref_logp) / 0.6


def test_b11_the_numbers():
    logits = np.array([2.0, 1.0, 0.0])
    at_one, at_t = (x - np.log(np.exp(x).sum()) for x in (logits, logits / 0.6))
    assert (at_t[0], at_one[0], at_one[0] / 0.6) == pytest.approx((-0.202573, -0.407606, -0.679343), abs=1e-6)
    assert np.exp(at_t[0] - at_one[0]) == pytest.approx(1.2276, abs=1e-4)
    assert np.exp(at_one / 0.6).sum() == pytest.approx(0.6208, abs=1e-4)
    pair = categorical(np.exp(at_t), np.exp(at_one))
    assert exact.kl(pair, [1])[0] == pytest.approx(0.063363, abs=1e-6)
    assert expected_value(k1, categorical(np.exp(at_one), np.exp(at_one)))[0] == pytest.approx(0, abs=1e-12)
    batch = model(categorical(np.exp(at_one), np.exp(at_one)), 1).batch
    mixed = function_subject(two_temperatures, probe()).evaluate(batch, differentiate=False).by_sequence
    assert np.exp(at_t) @ mixed == pytest.approx(0.063363, abs=1e-6)


@pytest.mark.parametrize("function", [two_temperatures, two_temperatures_numpy, divided_log_probs])
def test_b11_equal_weights_are_not_equal(function):
    report = report_of(function)
    assert report.value["at_identity"] > 0.01
    assert any("with equal log-probs" in f.message for f in report.of("value", "error"))
    assert not report.passed


def test_b11_dividing_both_log_probs_is_a_coefficient():
    """A variant that no identity finds: 1/0.6 times the penalty."""
    part = report_of(both_divided, placement="reward").gradient["reward"]
    assert part["verdict"] == "scaled-sequence"
    assert part["factor"] == pytest.approx(1 / 0.6)


def test_b11_the_sampler_runs_at_another_temperature():
    found = sampling(k1, placement="reward")["temperature 0.6"]
    assert "score both at the sampler's temperature" in found.message
    assert found.numbers["gradient_change"] > 0.1


# ------------------------------------------------------------------------------------------ B13: a blocked end token


def test_b13_the_numbers():
    """The end token has pi = .3 and q = .1 and is never drawn: k1 is negative with no variance; k3 is wrong too."""
    pair = categorical([0.7, 0.3], [0.9, 0.1])
    blocked = replace(pair, behaviour=np.array([[0.0, -np.inf]] * pair.automaton.contexts))
    assert exact.kl(pair, [1])[0] == pytest.approx(0.153664, abs=1e-6)
    assert expected_value(k1, pair)[0] == pytest.approx(0.153664, abs=1e-6)
    assert expected_value(k1, blocked) == pytest.approx((-0.251314, 0), abs=1e-6)
    assert expected_value(k3, blocked)[0] == pytest.approx(0.034400, abs=1e-6)


@pytest.mark.parametrize("function", [k1, k3, k1_by_sequence, k2])
def test_b13_no_estimator_survives_it(function):
    found = sampling(function)["a blocked end token"]
    assert found.numbers["gradient_change"] > 0.01
    assert "never drawn" in found.message


def test_b13_no_weight_mends_it():
    """A variant: even with the ratio that mends a stale policy, and it is not blamed for that."""
    for name in ("a blocked end token", "top-p 0.8", "top-k 2 of 4"):
        found = sampling(weighted, placement="reward")[name]
        assert found.level == "info"
        assert "never drawn" in found.message


# ------------------------------------------------------------------------------------------ B15, B16: stale samples


def weighted(logp, ref_logp, old_logp, mask):
    rho = masked(mask, logp - old_logp).sum(-1).exp().detach()
    return rho * masked(mask, logp - ref_logp).sum(-1)


def weighted_numpy(logp, ref_logp, behavior_log_probs, mask):
    rho = np.exp(np.where(mask, logp - behavior_log_probs, 0.0).sum(1))
    return rho * np.where(mask, logp - ref_logp, 0.0).sum(1)


def weighted_k3_live(logp, ref_logp, rollout_log_probs, mask):
    rho = masked(mask, logp - rollout_log_probs).cumsum(-1).exp()
    return rho * k3(masked(mask, logp), masked(mask, ref_logp))


def weighted_k2(logp, ref_logp, old_logp, mask):
    return masked(mask, logp - old_logp).exp().detach() * k2(masked(mask, logp), masked(mask, ref_logp))


def recomputed(logp, ref_logp, old_logp, mask):
    """The old log-probs are there, and the current ones are taken: the ratio is always 1."""
    old_logp = logp.detach()
    return weighted(logp, ref_logp, old_logp, mask)


def recomputed_loss(logp, ref_logp, old_logp, mask):
    ratio = masked(mask, logp - logp.detach() + 0 * old_logp).sum(-1).exp()
    return (ratio * masked(mask, logp - ref_logp).sum(-1)).mean()


def per_token(logp, ref_logp, old_logp, mask):
    """A ratio, of the wrong granularity: of each token."""
    return masked(mask, (masked(mask, logp - old_logp)).exp() * (logp - ref_logp))


def test_b15_and_b16_the_values():
    assert expected_value(k1, STALE)[0] == pytest.approx(0.135967, abs=1e-6)
    assert expected_value(k3, STALE)[0] == pytest.approx(0.612157, abs=1e-6)
    assert expected_value(weighted, STALE)[0] == pytest.approx(0.582685, abs=1e-6)
    assert expected_value(weighted_k3_live, STALE)[0] == pytest.approx(0.582685, abs=1e-6)
    m = model(STALE, 1)
    assert np.exp(m.batch.log_probs - m.batch.behaviour).ravel() == pytest.approx([0.6, 1.4])


@pytest.mark.parametrize(
    ("function", "placement", "number"),
    [
        (weighted, "reward", 0.469054),
        (weighted_numpy, "reward", 0.469054),
        (k1, "reward", 0.531205),
        (recomputed, "reward", 0.531205),
        (k3, "loss", 0.690476),
        (k2, "loss", 0.531205),
        (weighted_k2, "loss", 0.469054),
        (weighted_k3_live, "loss", 0.469054),
    ],
)
def test_b15_and_b16_the_gradients(function, placement, number):
    assert expected_gradient(function, placement, STALE)[0] == pytest.approx(number, abs=1e-6)


@pytest.mark.parametrize(
    ("function", "placement"), [(weighted, "reward"), (weighted_numpy, "reward"), (weighted_k3_live, "loss")]
)
def test_b16_weights_of_the_prefix_make_up_for_staleness(function, placement):
    found = sampling(function, placement=placement)
    assert found["a stale policy"].numbers["gradient_change"] < 1e-6
    assert found["temperature 0.6"].numbers["gradient_change"] < 1e-6


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (recomputed, {"placement": "reward"}),
        (recomputed_loss, {}),
        (per_token, {"placement": "reward"}),
        (weighted_k2, {"placement": "loss", "target": "token"}),
    ],
)
def test_b15_a_ratio_that_does_not_make_up_for_it(function, options):
    found = sampling(function, **options)["a stale policy"]
    assert found.level == "warning"
    assert "does not make up for it" in found.message


@pytest.mark.parametrize("function", [k1, k3, k2])
def test_b16_without_a_ratio_it_is_told(function):
    found = sampling(function)["a stale policy"]
    assert found.level == "info"
    assert "weigh by pi / mu of the whole prefix" in found.message


# ------------------------------------------------------------------------------------------ B19: another reference


def against_uniform(logp, ref_logp):
    return logp + np.log(2.0)


def against_uniform_full(logits, ref_logits):
    a = logits.log_softmax(-1)
    return (a.exp() * (a + np.log(logits.shape[-1]))).sum(-1)


def against_zero_logits(full_log_probs, ref_full_log_probs):
    base = np.full(full_log_probs.shape[-1], 1 / full_log_probs.shape[-1])
    return (np.exp(full_log_probs) * (full_log_probs - np.log(base))).sum(-1)


def test_b19_the_number():
    """The adapter is switched off and the base model is left: logits (0, 2) against (0, 0) at step 0."""
    assert exact.kl(one_token(1 / (1 + np.exp(-2.0)), 0.5), [1])[0] == pytest.approx(0.327813, abs=1e-6)
    same = one_token(1 / (1 + np.exp(-2.0)), 1 / (1 + np.exp(-2.0)))
    assert logit(np.exp(same.policy.log_probs[0, 1])) == pytest.approx(2)
    assert expected_value(k1, same)[0] == pytest.approx(0, abs=1e-12)
    assert expected_value(against_uniform, same)[0] == pytest.approx(0.327813, abs=1e-6)


@pytest.mark.parametrize("function", [against_uniform, against_uniform_full, against_zero_logits])
def test_b19_it_is_not_zero_at_the_start(function):
    report = report_of(function)
    assert not report.passed
    assert any("with equal log-probs" in f.message for f in report.of("value", "error"))
    assert any("does not depend on the reference" in f.message for f in report.of("gradient"))


# ------------------------------------------------------------------------------------------ B37: misaligned


def rolled(logp, ref_logp):
    return logp - torch.roll(ref_logp, 1, -1)


def rolled_numpy(logp, ref_logp, mask):
    return np.where(mask, (logp - np.roll(ref_logp, -1, axis=1)) ** 2 / 2, 0.0).sum(1)


def sliced_loss(logp, ref_logp, mask):
    """Labels were shifted for one of the two."""
    d = masked(mask[:, 1:], ref_logp[:, :-1] - logp[:, 1:])
    return (d.exp() - d - 1).sum(-1).mean()


def rows_out_of_step(logp, ref_logp, mask):
    """The reference of another reply of the batch."""
    return masked(mask, logp - torch.roll(ref_logp, 1, 0))


def test_b37_the_number():
    logs = np.array([[-1.0, -2.0, -3.0, -0.5]])
    same = by_hand(logs, logs)
    assert value_of(k1, same) == pytest.approx(np.zeros((1, 4)))

    def shifted(logp, ref_logp):
        return logp[:, 1:] - ref_logp[:, :-1]

    found = shifted(torch.tensor(logs), torch.tensor(logs))
    assert found.tolist() == [[-1.0, -1.0, 2.5]]
    d = value_of(rolled, same)[0, 1:]
    assert d == pytest.approx(found[0].numpy())
    assert (np.exp(-d) + d - 1).mean() == pytest.approx(1.006, abs=5e-4)


@pytest.mark.parametrize("function", [rolled, rolled_numpy, rows_out_of_step])
def test_b37_equal_log_probs_show_it(function):
    report = check(function, sections=("value",))
    assert report.value["at_identity"] > 0.1
    assert any("with equal log-probs" in f.message for f in report.of("value"))


@pytest.mark.parametrize("function", [rolled, rolled_numpy])
def test_b37_and_it_fails(function):
    assert not report_of(function).passed


def test_b37_in_a_loss_the_gradient_shows_it():
    report = report_of(sliced_loss)
    (error,) = report.of("gradient", "error")
    assert "with equal log-probs it still pushes" in error.message
    assert report.gradient["loss"]["at_identity"] > 0.1
    assert report_of(k3).gradient["loss"]["at_identity"] < 1e-12
