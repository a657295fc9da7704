"""Functions that misbehave, and functions that only look odd: a finding in one sentence, never a traceback."""

import functools
import sys
import time

import numpy as np
import pytest
import torch
from kl_terms import masked

from klgrad.analysis import check


def k(logp, ref_logp):
    return logp - ref_logp


def after(act):
    """k1 that does something else first."""

    def function(logp, ref_logp):
        act(logp, ref_logp)
        return logp - ref_logp

    return function


def returning(make):
    def function(logp, ref_logp):
        return make(logp - ref_logp)

    return function


def fails(logp, ref_logp):
    raise ValueError("two\nlines " + "and a lot more " * 50)


def sleeps(logp, ref_logp):
    try:
        time.sleep(60)
    except Exception:
        return logp - ref_logp


def spins(logp, ref_logp):
    while True:
        pass


def steps_backward(logp, ref_logp):
    loss = ((logp - ref_logp) ** 2).sum()
    loss.backward()
    return loss


async def asynchronous(logp, ref_logp):
    return logp - ref_logp


def generator(logp, ref_logp):
    yield logp - ref_logp


def clears_mask(logp, ref_logp, mask):
    mask[:, 0] = 0
    return (logp - ref_logp) * mask


def only_small_batches(logp, ref_logp):
    if len(logp) > 8:
        raise RuntimeError("out of memory")
    return logp - ref_logp


BROKEN = {
    "raises": (fails, "it raises ValueError: two lines"),
    "sleeps": (sleeps, "did not return within 0.5 seconds"),
    "spins": (spins, "did not return within 0.5 seconds"),
    "exits": (after(lambda *_: sys.exit(3)), "it raises SystemExit: 3"),
    "backward": (steps_backward, "gradient cannot be taken"),
    "asynchronous": (asynchronous, "asynchronous"),
    "generator": (generator, "returns generator"),
    "late": (only_small_batches, "out of memory"),
    "dict": (returning(lambda x: {"loss": x.mean()}), "returns dict"),
    "none": (returning(lambda x: None), "returns NoneType"),
    "list": (returning(lambda x: [[1.0]]), "returns list"),
    "string": (returning(str), "returns str"),
    "empty": (returning(lambda x: ()), "returns tuple"),
    "float": (returning(lambda x: float(x.sum())), "Python number"),
    "whole numbers": (returning(lambda x: x.long()), "not floating-point"),
    "truth values": (returning(lambda x: x > 0), "not floating-point"),
    "complex": (returning(lambda x: x.to(torch.complex64)), "not floating-point"),
    "NaN": (returning(lambda x: x * float("nan")), "NaN or infinity"),
    "infinite": (returning(lambda x: x + float("inf")), "NaN or infinity"),
    "summed over rows": (returning(lambda x: x.sum(0)), "returns the shape [4]"),
    "kept dimension": (returning(lambda x: x.sum(-1, keepdim=True)), "returns the shape [7, 1]"),
    "one number in a row": (returning(lambda x: x.mean()[None]), "returns the shape [1]"),
    "squeezed": (returning(lambda x: x.squeeze()), "returns the shape"),
    "transposed": (returning(lambda x: x.T), "returns the shape [4, 7]"),
    "one short": (returning(lambda x: x[:, 1:]), "returns the shape [7, 3]"),
    "writes policy": (after(lambda a, b: a.mul_(2)), "changes its argument 'logp'"),
    "writes reference": (after(lambda a, b: b.zero_()), "changes its argument 'ref_logp'"),
    "writes mask": (clears_mask, "changes its argument 'mask'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_function_is_one_finding(name):
    function, words = BROKEN[name]
    report = check(function, timeout=0.5)
    assert not report.passed
    errors = [f for f in report.findings if f.level == "error"]
    assert [f.section for f in errors] == ["function"]
    assert words in errors[0].message
    assert "\n" not in errors[0].message
    assert len(errors[0].message) < 300


def test_it_ends_in_time():
    start = time.monotonic()
    check(spins, timeout=0.2)
    assert time.monotonic() - start < 5


def test_an_interrupt_is_the_users():
    """Not a fault of the function: it stops the check."""

    def interrupted(logp, ref_logp):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(interrupted)


def test_what_it_prints_is_told_once(capsys):
    report = check(after(lambda a, b: print("shape", a.shape, file=sys.stderr)), placement="reward")
    assert report.passed
    assert [f.message for f in report.of("function")] == ["it prints, first: 'shape torch.Size([7, 4])'"]
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


# ------------------------------------------------------------------------------------------ odd, and right


class Term(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, logp, ref_logp):
        return self.scale * (logp - ref_logp)


class Estimators:
    scale = 1.0

    def __call__(self, logp, ref_logp):
        return self.scale * (logp - ref_logp)

    def method(self, logp, ref_logp):
        return self.scale * (logp - ref_logp)

    @staticmethod
    def static(logp, ref_logp):
        return logp - ref_logp

    @classmethod
    def of_class(cls, logp, ref_logp):
        return cls.scale * (logp - ref_logp)


def logged(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@logged
def decorated(logp, ref_logp):
    return logp - ref_logp


def scaled(scale, logp, ref_logp):
    return scale * (logp - ref_logp)


def by_position(logp, ref_logp, /):
    return logp - ref_logp


def by_keyword(*, logp, ref_logp, **others):
    return logp - ref_logp


def with_metrics(logp, ref_logp):
    value = logp - ref_logp
    return value, {"kl": value.detach().mean().item()}


def metrics_first(logp, ref_logp):
    return {"kl": 0.0}, logp - ref_logp


def ratio_given(log_ratio):
    return log_ratio + 0.0


def whole_numbers_mask(logp, ref_logp, mask):
    """Wants 0 and 1 as integers: it subtracts the mask from 1 and indexes with its sum."""
    last = (1 - mask).argmax(-1) - 1 + mask.sum(-1) * 0
    rows = torch.arange(len(mask))[last * 0 + torch.arange(len(mask))]
    return torch.where((1 - mask)[rows] == 0, logp - ref_logp, 0.0)


def float_mask(logp, ref_logp, mask):
    return torch.where(mask - 0.5 > 0, logp - ref_logp, 0.0)


def bool_mask(logp, ref_logp, mask):
    return (logp - ref_logp).masked_fill(~mask, 0.0)


def bool_mask_numpy(logp, ref_logp, mask):
    return np.where(~mask, 0.0, logp - ref_logp)


def float_mask_numpy(logp, ref_logp, mask):
    return np.where(1 - mask, 0.0, logp - ref_logp)


def out_of_torch(logp, ref_logp):
    """Detached and in numpy, as a reward is."""
    return torch.as_tensor((logp - ref_logp).detach().numpy())


RIGHT = {
    "class": Estimators(), "method": Estimators().method, "static": Estimators.static, "of class": Estimators.of_class,
    "module": Term(), "partial": functools.partial(scaled, 1.0), "decorated": decorated,
    "by position": by_position, "by keyword": by_keyword, "metrics": with_metrics, "metrics first": metrics_first,
    "lambda": lambda logp, ref_logp: logp - ref_logp, "log-ratio": ratio_given, "integers": whole_numbers_mask,
    "floats": float_mask, "truth values": bool_mask, "truth values in numpy": bool_mask_numpy,
    "floats in numpy": float_mask_numpy, "out of torch": out_of_torch,
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_an_odd_function_passes(name):
    report = check(RIGHT[name], placement="reward", sections=("value", "gradient", "invariance"))
    assert report.passed, str(report)
    assert report.gradient["reward"]["verdict"] == "sequence"


def rows_against_tokens(logp, ref_logp, mask, rewards):
    """[B, T] - [B]: an error, or silently wrong where B = T."""
    return (masked(mask, logp - ref_logp) - rewards).sum(-1)


def rows_against_tokens_numpy(logp, ref_logp, seq_advantages):
    return (logp - ref_logp) * (1 + seq_advantages)


@pytest.mark.parametrize("function", [rows_against_tokens, rows_against_tokens_numpy])
def test_rows_are_not_taken_for_tokens(function):
    """It is never given as many rows as tokens first, so what works only then does not pass."""
    (error,) = [f for f in check(function).findings if f.level == "error"]
    assert "it raises" in error.message


def kept_in_float32(logp, ref_logp):
    return (logp.float() - ref_logp.float()).double()


def kept_in_bfloat16(logp, ref_logp):
    return logp.bfloat16() - ref_logp.bfloat16()


def numpy_in_float32(logp, ref_logp):
    return np.subtract(logp, ref_logp, dtype=np.float32, casting="same_kind")


def numpy_in_float16(logp, ref_logp):
    return logp.astype(np.float16) - ref_logp.astype(np.float16)


@pytest.mark.parametrize(
    ("function", "precision"),
    [
        (kept_in_float32, "single"),
        (kept_in_bfloat16, "half"),
        (numpy_in_float32, "single"),
        (numpy_in_float16, "half"),
    ],
)
def test_lower_precision_is_said_and_is_no_fault(function, precision):
    assert check(function, placement="reward").passed
    report = check(function)
    assert report.gives == ["reward", "both"]
    assert report.gradient["loss"]["verdict"] == "zero"
    assert f"computes in {precision} precision" in report.of("function")[0].message
    assert not any("clamp leaves" in f.message for f in report.findings)


def test_a_coarse_precision_hides_no_factor():
    def halved(logp, ref_logp):
        return 0.5 * (logp.bfloat16() - ref_logp.bfloat16())

    part = check(halved, placement="reward", sections=("gradient",)).gradient["reward"]
    assert part["verdict"] == "scaled-sequence"
    assert part["factor"] == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda *args: args[0] - args[1], "asks for the policy's log-probs"),
        (lambda logp, other: logp - other, "cannot fill the parameter 'other'"),
        (lambda ref_logp: ref_logp, "asks for the policy's log-probs"),
        (lambda logp, log_probs: logp - log_probs, "would both be given"),
    ],
)
def test_what_cannot_be_filled_is_bad_use(function, words):
    with pytest.raises(ValueError, match=words):
        check(function)


def test_a_surrogate_per_token_is_not_held_to_its_value():
    """Reward-to-go of k1 times log pi, [B, T]: right in the loss, and its value is anything."""

    def surrogate(logp, ref_logp, mask):
        k = masked(mask, logp - ref_logp).detach()
        return k.flip(-1).cumsum(-1).flip(-1) * masked(mask, logp)

    for placement in (None, "loss"):
        report = check(surrogate, placement=placement)
        assert report.passed is (placement == "loss"), str(report)
        assert report.gives == ["loss"]
    assert any("surrogate" in f.message for f in report.of("value", "info"))
    assert report.of("variance", "warning") == []


def test_padding_is_not_praised_and_blamed_at_once():
    def whole(logp, ref_logp):
        return (logp - ref_logp).sum(-1)

    findings = check(whole, sections=("invariance",)).findings
    assert [f.level for f in findings] == ["warning"]
