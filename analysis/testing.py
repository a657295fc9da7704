"""Assertions for a test suite: what a KL estimator or loss of yours gives, exactly, on every run.

    from klgrad.analysis.testing import assert_gradient

    def test_kl_loss():
        assert_gradient(my_kl_loss, placement="loss", target="sequence")

They take the options of ``klgrad.analysis.check`` and fail with its findings. With klgrad installed, pytest offers
them as fixtures of the same names too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from klgrad.analysis.checking import Finding, Report, check

__all__ = ["assert_finite", "assert_gradient", "assert_mask_invariant", "assert_value"]

KL = str | Callable[..., Any]


def assert_gradient(function: KL, *, placement: str | None = None, target: str = "sequence", **options: Any) -> Report:
    """The expected gradient is the target: in the placement, or without one in every one that applies.

    Args:
        function, placement, target, options: as for ``klgrad.analysis.check``.

    Returns:
        The report, for more questions.

    Raises:
        AssertionError: naming the gradient that it is instead, with its relative bias.
        ValueError: for bad use.
    """
    __tracebackhide__ = True
    return _asserted(check(function, placement=placement, target=target, sections=("gradient",), **options))


def assert_value(function: KL, **options: Any) -> Report:
    """The expected value is the sequence-level KL, zero for equal log-probs, and never NaN on a support mismatch.

    Raises:
        AssertionError: with the expected value and the KL.
        ValueError: for bad use.
    """
    __tracebackhide__ = True
    report = check(function, sections=("value",), **{"strict": True, **options})
    return _asserted(report, [f for f in report.of("value", "warning") if "bias" in f.numbers])


def assert_finite(function: KL, **options: Any) -> Report:
    """No NaN, and nothing infinite that the precision could hold, in value and gradient, for log-ratios up to 200.

    Raises:
        AssertionError: with precision and log-ratio.
        ValueError: for bad use.
    """
    __tracebackhide__ = True
    return _asserted(check(function, sections=("numerics",), **{"strict": True, **options}))


def assert_mask_invariant(function: KL, **options: Any) -> Report:
    """Padding changes nothing, whatever it holds (NaN, infinite, huge), nor do order and repetition.

    Raises:
        AssertionError: with what leaks.
        ValueError: for bad use.
    """
    __tracebackhide__ = True
    report = check(function, sections=("invariance",), **{"strict": True, **options})
    return _asserted(report, [f for f in report.of("invariance", "warning") if "takes no mask" in f.message])


def _asserted(report: Report, more: list[Finding] | None = None) -> Report:
    __tracebackhide__ = True
    wrong = [f for f in report.findings if f.level == "error"] + (more or [])
    if wrong:
        lines = [f"{report.function}:", *(f"  {f.section}: {f.message}" for f in wrong)]
        details = [f.detail for f in wrong if f.detail]
        raise AssertionError("\n".join([*lines, *details]))
    return report
