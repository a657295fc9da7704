"""Numerics: what overflows, what is NaN, what a clamp leaves dead, in every precision."""

import numpy as np
import pytest
import torch

from klgrad.analysis import check
from klgrad.analysis.checking.numerics import DTYPES, batch_of, rounded
from klgrad.synth.estimators import ESTIMATORS


def found(function, level):
    return check(function, sections=("numerics",)).of("numerics", level)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_built_in_is_nan_or_overflows_needlessly(name):
    assert found(name, "error") == []


def k3(log_probs, ref_log_probs):
    d = torch.as_tensor(ref_log_probs) - torch.as_tensor(log_probs)
    return d.exp() - d - 1


def test_k3_overflows_where_its_value_does_not_fit():
    """cases.md B09: thresholds 88.7 in float32 and bfloat16, 11.09 in float16; a warning."""
    warnings = {f.numbers["dtype"]: f for f in found(k3, "warning")}
    assert set(warnings) == {"float32", "bfloat16", "float16"}
    first = {dtype: max(f.numbers["log_ratios"]) for dtype, f in warnings.items()}
    assert -88.9 < first["float32"] < -88.7
    assert -89.1 < first["bfloat16"] < -88.7
    assert -11.2 < first["float16"] < -11.0
    assert found(k3, "error") == []


def test_clamping_the_result_leaves_a_nan_gradient():
    """cases.md B09: the clamp's zero meets exp's infinity in the backward pass; clamping the argument is right."""

    def result(log_probs, ref_log_probs):
        d = ref_log_probs - log_probs
        return torch.clamp(d.exp() - d - 1, max=10.0)

    def argument(log_probs, ref_log_probs):
        d = torch.clamp(ref_log_probs - log_probs, max=10.0)
        return d.exp() - d - 1

    def zero_times_inf(log_probs, ref_log_probs):
        r = (ref_log_probs - log_probs).exp()
        return torch.where(r > 1e4, torch.full_like(r, 10.0), r * r / (1 + r))

    assert found(argument, "error") == []
    for function in (result, zero_times_inf):
        (error, *_) = found(function, "error")
        assert "NaN gradient" in error.message
        assert error.numbers["dtype"] == "float32"


def test_an_intermediate_that_overflows_is_an_error():
    def logarithm(log_probs, ref_log_probs):
        return torch.as_tensor(log_probs - ref_log_probs).exp().log()

    assert {f.numbers["dtype"] for f in found(logarithm, "error")} == {"float32", "bfloat16"}
    strict = check(logarithm, sections=("numerics",), strict=True).of("numerics", "error")
    assert {f.numbers["dtype"] for f in strict} >= {"float32", "float16"}


def test_a_clamp_is_reported_with_its_share():
    def clamped(log_probs: torch.Tensor, ref_log_probs):
        d = torch.clamp(ref_log_probs - log_probs, -20, 20)
        return torch.clamp(d.exp() - d - 1, -10, 10)

    (warning,) = [f for f in found(clamped, "warning") if "clamp leaves" in f.message]
    delta = np.arange(-200, 201) + 0.25
    k3_value = np.exp(-delta) + delta - 1
    dead = (np.abs(delta) > 20) | (k3_value > 10)
    assert warning.numbers["dead_share"] == pytest.approx(dead.mean())


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs", "forward-kl", "jensen-shannon", "chi-squared", "full"])
def test_a_smooth_tail_is_no_clamp(name):
    assert not any("clamp leaves" in f.message for f in found(name, "warning"))


def test_numpy_clamps_are_seen_too():
    def clipped(logp, ref_logp):
        return np.clip(logp - ref_logp, -5, 5)

    (warning,) = found(clipped, "warning")
    assert warning.numbers["dead_share"] == pytest.approx(390 / 401, abs=0.01)

    def forward(logp, ref_logp):
        r = np.exp(ref_logp - logp)
        return r * np.log(r) - r + 1

    assert not any("clamp leaves" in f.message for f in found(forward, "warning"))


def test_cancellation_is_information():
    notes = [f for f in found(k3, "info") if "digits" in f.message]
    assert {f.numbers["dtype"] for f in notes} >= {"float32", "float16"}
    assert not any("digits" in f.message for f in found("k3", "info") if f.numbers.get("dtype") == "float32")


def test_a_precision_that_is_refused_is_said():
    def fussy(log_probs, ref_log_probs):
        assert log_probs.dtype != torch.float16, "no half here"
        return log_probs - ref_log_probs

    (note,) = [f for f in found(fussy, "info") if "not tried" in f.message]
    assert "float16" in note.message
    assert "no half here" in note.message


def test_rounding_is_that_of_torch():
    batch = batch_of(np.array([-3.3, 0.1, 1e-3]))
    for dtype in DTYPES:
        kind = getattr(torch, dtype)
        expected = torch.tensor(batch.log_probs, dtype=kind).double().numpy()
        np.testing.assert_array_equal(rounded(batch, dtype).log_probs, expected)
