"""Cases of arithmetic: B09, B10, B25-B27, B34, B38, B39, B44, B46 of the case collection.

Overflow, what leaks from padding, clamps, heavy tails, coarse precision, probability 0, dropout, other penalties.
"""

import random

import numpy as np
import pytest
import torch
from kl_terms import full_kl, k1, k1_numpy, k2, k3, k3_numpy, masked
from scipy import stats
from toys import by_hand, categorical, expected_value, one_token, value_of

from klgrad.analysis import check
from klgrad.analysis.checking.models import model
from klgrad.analysis.checking.probing import probe
from klgrad.analysis.checking.subject import function_subject
from klgrad.synth import exact
from klgrad.synth.enumeration import Batch


def messages(function, section, level="error", **options):
    """With ``strict``, where what only odd input shows is an error."""
    return [f.message for f in check(function, sections=(section,), strict=True, **options).of(section, level)]


def logits_batch(logits, ref_logits):
    """One place of one reply; the first word was drawn."""
    full, reference = (np.array(x, float)[None, None] for x in (logits, ref_logits))
    first = np.zeros((1, 1))
    return Batch(np.zeros((1, 1), np.int64), np.ones((1, 1), bool), first, first, first, full, reference)


# ------------------------------------------------------------------------------------------ B09: overflow


def clamped_result(logp, ref_logp):
    return k3(logp, ref_logp).clamp(-10, 10)


def no_infinities(logp, ref_logp):
    return torch.nan_to_num(k3(logp, ref_logp))


def replaced_result(logp, ref_logp, mask):
    value = k3(logp, ref_logp)
    return masked(mask & torch.isfinite(value), value).sum(-1)


def clamped_loss(logp, ref_logp, mask):
    return masked(mask, torch.minimum(k3(logp, ref_logp), torch.full_like(logp, 50.0))).sum(-1).mean()


def clamped_argument(logp, ref_logp):
    return k3(torch.clamp(logp - ref_logp, -10, 10), torch.zeros_like(logp))


def clamped_argument_numpy(logp, ref_logp):
    return k3_numpy(np.clip(logp - ref_logp, -10, 10), np.zeros_like(logp))


@pytest.mark.parametrize("function", [clamped_result, no_infinities, replaced_result, clamped_loss])
def test_b09_finite_with_a_nan_gradient(function):
    (first, *_) = messages(function, "numerics")
    assert "NaN gradient" in first
    assert "float32" in first


@pytest.mark.parametrize("function", [clamped_argument, clamped_argument_numpy, k1, k2])
def test_b09_finite_in_every_precision(function):
    assert messages(function, "numerics") == []


def by_probabilities(logp, ref_logp):
    return ref_logp.exp() / logp.exp() - 1 + logp - ref_logp


def by_probabilities_numpy(logp, ref_logp):
    return np.log(np.exp(logp) / np.exp(ref_logp))


@pytest.mark.parametrize("function", [by_probabilities, by_probabilities_numpy])
def test_b09_probabilities_instead_of_log_probs(function):
    """A variant: underflow, then a division."""
    assert any("float32" in m for m in messages(function, "numerics"))


def test_b09_the_number():
    d = by_hand([[-90.0]], [[-1.0]])
    assert value_of(k3, d)[0, 0] == pytest.approx(4.489613e38, rel=1e-6)
    subject = function_subject(k3, probe())
    for dtype, threshold in (("float32", 88.7228), ("bfloat16", 88.719), ("float16", 11.0899)):
        for past in (-0.6, 0.6):
            value = subject.evaluate(by_hand([[-1.0 - threshold - past]], [[-1.0]]), dtype=dtype).value[0, 0]
            assert np.isfinite(value) == (past < 0), (dtype, past)


# ------------------------------------------------------------------------------------------ B10: poisoned padding


def multiplied(logp, ref_logp, mask):
    return k3(logp, ref_logp) * mask


def multiplied_loss(logp, ref_logp, mask):
    return (k2(logp, ref_logp) * mask).sum() / mask.sum()


def weighted_numpy(logp, ref_logp, mask):
    return np.einsum("bt,bt->b", logp - ref_logp, mask)


def where_after_exp(logp, ref_logp, mask):
    """The value is clean, the backward pass is not."""
    return torch.where(mask, k3(logp, ref_logp), torch.zeros_like(logp)).sum(-1)


def where_before(logp, ref_logp, mask):
    return k3(masked(mask, logp), masked(mask, ref_logp))


def indexed(logp, ref_logp, mask):
    out = torch.zeros_like(logp)
    out[mask] = k3(logp[mask], ref_logp[mask])
    return out


def masked_array(logp, ref_logp, mask):
    return np.ma.masked_array(logp - ref_logp, ~mask).sum(axis=-1).filled(0.0)


@pytest.mark.parametrize("function", [multiplied, multiplied_loss, weighted_numpy, where_after_exp])
def test_b10_padding_leaks(function):
    assert any("padded places" in m for m in messages(function, "invariance"))


@pytest.mark.parametrize("function", [where_before, indexed, masked_array])
def test_b10_padding_does_not_leak(function):
    assert messages(function, "invariance") == []


def test_b10_the_number():
    batch = by_hand([[-1, -200]], [[-1.2, 0]], [[1, 0]])
    assert value_of(where_before, batch).sum() == pytest.approx(0.018731, abs=1e-6)
    with_inf = by_hand([[-1, -2000]], [[-1.2, 0]], [[1, 0]])
    subject = function_subject(multiplied, probe())
    assert np.isnan(subject.evaluate(with_inf).raw[0, 1])


# ------------------------------------------------------------------------------------------ B25, B26: clamps, tails


def dropped(logp, ref_logp):
    """Outliers thrown away."""
    delta = logp - ref_logp
    return torch.where(delta.abs() > 5, torch.zeros_like(delta), delta)


@pytest.mark.parametrize("function", [clamped_result, clamped_argument, clamped_argument_numpy, dropped])
def test_b25_a_clamp_is_seen(function):
    assert any("clamp leaves no gradient" in m for m in messages(function, "numerics", "warning"))
    assert any("quiet finite number" in m for m in messages(function, "value", "warning"))


def test_b25_a_lower_clamp_never_acts():
    def floored(logp, ref_logp):
        return k3(logp, ref_logp).clamp(min=-10)

    assert not any("clamp" in m for m in messages(floored, "numerics", "warning"))


def test_b25_the_numbers():
    pair = categorical([1 - 1e-6, 1e-6], [0.5, 0.5])
    assert exact.kl(pair, [1])[0] == pytest.approx(0.693132, abs=1e-6)
    assert expected_value(k3, pair)[0] == pytest.approx(0.693132, abs=1e-6)
    assert expected_value(clamped_result, pair)[0] == pytest.approx(0.193156, abs=1e-6)
    far = by_hand([[-24.0]], [[-1.0]])
    assert value_of(k3, far)[0, 0] == pytest.approx(9.74e9, rel=1e-3)
    terms = function_subject(clamped_result, probe()).evaluate(far)
    assert (terms.value[0, 0], terms.token[0, 0]) == (10, 0)


def chi_squared(logp, ref_logp):
    return torch.expm1(ref_logp - logp) ** 2


def k3_by_sequence_numpy(logp, ref_logp, mask):
    d = np.where(mask, ref_logp - logp, 0.0).sum(1)
    return np.exp(d) - d - 1


@pytest.mark.parametrize("function", [k3, k3_numpy, chi_squared, k3_by_sequence_numpy])
def test_b26_a_heavy_tail(function):
    (message,) = messages(function, "variance", "warning")
    assert "never see the token that carries the mean" in message
    assert "90.5%" in message


@pytest.mark.parametrize("function", [k1, k1_numpy, k2, full_kl])
def test_b26_a_light_tail(function):
    assert messages(function, "variance", "warning") == []


def test_b26_the_numbers():
    pair = categorical([1 - 1e-4, 1e-4], [0.5, 0.5])
    assert expected_value(k1, pair) == pytest.approx((0.692126, 0.00848), rel=1e-3)
    mean, variance = expected_value(k3, pair)
    assert mean == pytest.approx(0.692126, abs=1e-6)
    assert variance == pytest.approx(2490, rel=1e-3)
    m = model(pair, 1)
    common, rare = function_subject(k3, probe()).evaluate(m.batch).by_sequence
    assert stats.binom.pmf(0, 1000, 1e-4) == pytest.approx(0.905, abs=5e-4)
    assert common == pytest.approx(0.193, abs=5e-4)
    assert common + (rare - common) / 1000 == pytest.approx(5.18, abs=5e-3)


# ------------------------------------------------------------------------------------------ B27: coarse precision


def one_side_rounded(logits, ref_logits):
    """The policy's logits in bfloat16, the reference's not: equal weights differ."""
    a, b = logits.log_softmax(-1), ref_logits.bfloat16().double().log_softmax(-1)
    return (a.exp() * (a - b)).sum(-1)


def k1_one_side_rounded(logits, ref_logits, tokens):
    a, b = logits.log_softmax(-1), ref_logits.bfloat16().double().log_softmax(-1)
    return (a - b).gather(-1, tokens[..., None])[..., 0]


def half_numpy(logp, ref_logp):
    return logp.astype(np.float16).astype(float) - ref_logp


LOG_PROBS = {"logits": "full_log_probs", "ref_logits": "full_reference"}  # these logits as they are, with no offset


def test_b27_the_number():
    logits = (10.03, 9.97, 3.0)
    same = logits_batch(logits, logits)
    assert value_of(k1_one_side_rounded, same, mapping=LOG_PROBS)[0, 0] == pytest.approx(0.029550, abs=1e-6)
    assert value_of(one_side_rounded, same, mapping=LOG_PROBS)[0, 0] == pytest.approx(4.496e-4, rel=1e-3)
    assert value_of(full_kl, same)[0, 0] == 0


@pytest.mark.parametrize("function", [one_side_rounded, k1_one_side_rounded, half_numpy])
def test_b27_the_floor_of_a_precision(function):
    report = check(function, sections=("value",))
    assert report.value["at_identity"] > 1e-6
    assert any("with equal log-probs" in f.message for f in report.findings if f.level != "info")


# ------------------------------------------------------------------------------------------ B34: probability 0


def guarded(logits, ref_logits):
    a, b = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    possible = (a > -torch.inf) & (b > -torch.inf)
    a, b = (masked(possible, x) for x in (a, b))
    return masked(possible, a.exp() * (a - b)).sum(-1)


def guarded_value(logits, ref_logits):
    """Only the result is guarded: its gradient is 0 x NaN."""
    a, b = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return masked(a > -torch.inf, a.exp() * (a - b)).sum(-1)


def by_kl_div(logits, ref_logits):
    return torch.nn.functional.kl_div(
        ref_logits.log_softmax(-1), logits.softmax(-1), reduction="none"
    ).sum(-1)  # fmt: skip


def guarded_numpy(full_log_probs, ref_full_log_probs):
    p = np.exp(full_log_probs)
    difference = np.subtract(full_log_probs, ref_full_log_probs, where=p > 0, out=np.zeros_like(p))
    return (p * difference).sum(-1)


@pytest.mark.parametrize(
    ("function", "what"),
    [(full_kl, "value"), (guarded_value, "gradient"), (by_kl_div, "value"), (guarded, None), (guarded_numpy, None)],
)
def test_b34_a_masked_vocabulary(function, what):
    found = [m for m in messages(function, "value") if "neither can emit" in m]
    assert [what in m for m in found] == ([] if what is None else [True])


def test_b34_the_number():
    batch = logits_batch((0, 0, -np.inf), (1, 0, -np.inf))
    terms = function_subject(guarded, probe()).evaluate(batch)
    assert terms.value[0, 0] == pytest.approx(0.120115, abs=1e-6)
    assert np.isfinite(terms.vocab).all()
    assert np.isnan(value_of(full_kl, batch)).all()
    assert np.isnan(function_subject(guarded_value, probe()).evaluate(batch).vocab).any()


# ------------------------------------------------------------------------------------------ B38: dropout


def with_dropout(logp, ref_logp):
    return torch.nn.functional.dropout(logp, 0.1) - ref_logp


def with_numpy_noise(logp, ref_logp):
    return logp - ref_logp + 1e-3 * np.random.random(logp.shape)  # noqa: NPY002


def with_python_noise(logp, ref_logp, mask):
    return masked(mask, k2(logp, ref_logp)).sum(-1).mean() * random.uniform(0.9, 1.1)


class WarmingUp:
    """The coefficient grows with every call: state, not chance."""

    def __init__(self):
        self.calls = 0

    def __call__(self, logp, ref_logp):
        self.calls += 1
        return min(self.calls, 40) / 40 * (logp - ref_logp)


@pytest.mark.parametrize("function", [with_dropout, with_numpy_noise, with_python_noise, WarmingUp()])
@pytest.mark.parametrize("sections", [("gradient",), ("value", "invariance")])
def test_b38_the_same_input_twice(function, sections):
    """Nothing else is said of it: nothing exact can be."""
    if isinstance(function, WarmingUp):
        function = WarmingUp()
    (finding,) = check(function, sections=sections).findings
    assert "second time" in finding.message
    assert finding.level == "error"


def test_b38_state_that_shows_later():
    calls = []

    def drifting(logp, ref_logp):
        calls.append(1)
        return (1.0 if len(calls) < 20 else 2.0) * (logp - ref_logp)

    assert any("keeps state" in m for m in messages(drifting, "invariance"))


def test_b38_a_draw_that_is_not_used_is_no_fault():
    def unused_draw(logp, ref_logp):
        torch.rand(3)
        return logp - ref_logp

    assert messages(unused_draw, "invariance") == []


def test_b38_the_number():
    """Two features of weight 1 with dropout 0.1: logits 2.222, 1.111, 0 against 2."""
    scale = 1 / 0.9
    mean = sum(
        chance * exact.kl(one_token(1 / (1 + np.exp(-z)), 1 / (1 + np.exp(-2.0))), [1])[0]
        for z, chance in ((2 * scale, 0.81), (scale, 0.18), (0.0, 0.01))
    )
    assert mean == pytest.approx(0.017461, abs=1e-6)


# ------------------------------------------------------------------------------------------ B39, B44, B46: values


def absolute(logp, ref_logp):
    return (logp - ref_logp).abs()


def absolute_numpy(logp, ref_logp, mask):
    return np.abs(np.where(mask, logp - ref_logp, 0.0)).sum(1)


def test_b39_the_numbers():
    toy, batch = one_token(0.7, 0.2), by_hand([[-0.5, -1.5]], [[-1.0, -0.8]])
    for function, by_sum, expected in ((k1, -0.2, 0.582685), (absolute, 1.2, 1.171183), (k2, 0.37, 0.693599)):
        assert value_of(function, batch).sum() == pytest.approx(by_sum)
        assert expected_value(function, toy)[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("function", [absolute, absolute_numpy, k2])
def test_b39_not_to_be_logged_as_the_kl(function):
    (message,) = messages(function, "value", "warning")
    assert "do not log it as the KL" in message


def generalised_jsd(logits, ref_logits, weight, *, rescaled=False):
    """Of student and teacher, as distillation losses have it; ``weight`` on the teacher."""
    student, teacher = logits.softmax(-1), ref_logits.softmax(-1)
    middle = (weight * teacher + (1 - weight) * student).log()
    sides = [(teacher * (teacher.log() - middle)).sum(-1), (student * (student.log() - middle)).sum(-1)]
    value = weight * sides[0] + (1 - weight) * sides[1]
    return value / (weight * (1 - weight)) if rescaled else value


def test_b44_the_numbers():
    batch = logits_batch(np.log([0.3, 0.7]), np.log([0.8, 0.2]))
    assert value_of(full_kl, batch)[0, 0] == pytest.approx(0.582685, abs=1e-6)
    for weight, expected in ((0.5, 0.132505), (0.9, 0.050887), (0.999, 5.82e-4), (1 - 1e-6, 5.8e-7)):
        value = value_of(generalised_jsd, batch, constants={"weight": weight})[0, 0]
        assert value == pytest.approx(expected, rel=5e-3)
    limit = value_of(generalised_jsd, batch, constants={"weight": 1 - 1e-6, "rescaled": True})[0, 0]
    assert limit == pytest.approx(0.582685, abs=1e-4)


def test_b44_its_limit_is_nothing():
    def gradient(weight, **more):
        found = check(generalised_jsd, placement="loss", arguments={"weight": weight, **more}, sections=("gradient",))
        return found.gradient["loss"]

    assert gradient(0.5)["name"] == "token-level Jensen-Shannon"
    assert max(gradient(1 - 1e-6)["scale"].values()) < 1e-5
    near = gradient(1 - 1e-6, rescaled=True)
    assert near["scale"][1] == pytest.approx(1, abs=1e-3)


def test_b46_a_negative_mean_may_be_noise():
    m = model(one_token(0.55, 0.5), 1)
    values = function_subject(k1, probe()).evaluate(m.batch).by_sequence
    mean = float(m.probability @ values)
    assert mean == pytest.approx(0.005008, abs=1e-6)
    assert float(m.probability @ (values - mean) ** 2) ** 0.5 == pytest.approx(0.0998, abs=1e-4)
    ones = np.arange(65)
    batch = (ones * values[1] + (64 - ones) * values[0]) / 64
    assert stats.binom.pmf(ones, 64, m.probability[1])[batch < 0].sum() == pytest.approx(0.334, abs=5e-4)
    (note,) = [f for f in check(k1, sections=("value",)).findings if "can be negative" in f.message]
    assert note.level == "info"
