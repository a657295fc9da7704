"""One check from end to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from klgrad.analysis.checking import gradient, invariance, numerics, sampling, value, variance
from klgrad.analysis.checking.calling import Fault, TimedOut, limit
from klgrad.analysis.checking.report import SECTIONS, WANTED, Finding, Report
from klgrad.analysis.checking.signature import functions_in, load
from klgrad.analysis.checking.subject import BuiltIn, Function, function_subject
from klgrad.synth.configurations import PLACEMENTS, Configuration, parse
from klgrad.synth.estimators import ESTIMATORS, estimator, meant, unknown

TIMEOUT = 30.0  # seconds that a call may take, where nothing is said
_IMPORT = 120.0  # that importing a file may take then


def run(
    function: str | Callable[..., Any],
    placement: str | None,
    target: str,
    returns: str,
    mapping: Mapping[str, str],
    arguments: Mapping[str, Any],
    error: float,
    timeout: float,
    progress: Callable[[int, int], None] | None,
    sections: Sequence[str],
) -> Report:
    """See ``check``."""
    if target not in WANTED:
        raise unknown("target", target, list(WANTED))
    if placement is not None and placement not in PLACEMENTS:
        raise unknown("placement", placement, list(PLACEMENTS))
    if not 0 < error < float("inf"):
        raise ValueError(f"error = {error} must be positive: 0.1 asks for a gradient within 10 %")
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout = {timeout} must be a positive number of seconds")
    subject: BuiltIn | Function
    name = function if isinstance(function, str) else getattr(function, "__qualname__", type(function).__name__)
    if isinstance(function, str) and ":" not in function:
        if mapping or arguments or returns != "penalty":
            raise ValueError(f"{function} is a built-in: --map, --arg and --returns are for functions of your own")
        subject = built_in(function)
        if not subject.anywhere:
            stated = subject.configuration.placement
            if placement not in (None, stated):
                raise ValueError(f"{function} names its placement: leave --placement {placement} out")
            placement = stated
    else:
        called = _loaded(function, timeout) if isinstance(function, str) else function
        try:
            subject = function_subject(
                called, invariance.probe(), name=name, returns=returns, mapping=mapping, constants=arguments,
                timeout=timeout,
            )  # fmt: skip
        except Fault as fault:
            return Report(name, target, placement, findings=(_broken(fault),))
    possible = gradient.placements(subject)
    if placement is not None and placement not in possible:
        what = (
            "a loss, which has no other placement than its own"
            if subject.kind == "loss"
            else "what goes into the reward"
        )
        raise ValueError(f"{name} returns {what}: leave --placement {placement} out")
    report = Report(name, target, placement)
    try:
        with np.errstate(all="ignore"):  # what overflows is a finding
            for done, grown in enumerate(_sections(subject, report, error, sections), 1):
                report = grown
                if progress is not None:
                    progress(done, len(SECTIONS))
    except Fault as fault:
        report = _with(report, findings=(*report.findings, _broken(fault)))
    return report


def built_in(name: str) -> BuiltIn:
    """A configuration by its full name, or an estimator in every placement.

    Raises:
        ValueError: when it is neither.
    """
    if "-in-" in name:
        return BuiltIn(parse(name))
    plain = name.partition("(")[0].strip()
    if name.endswith(".py"):
        raise ValueError(f"{name} is a file, and which function in it is not said: write {name}:{functions_in(name)}")
    if plain not in ESTIMATORS:
        raise ValueError(
            f"{name!r} is no built-in and no function: {meant(plain, ESTIMATORS)}write an estimator "
            f"({', '.join(ESTIMATORS)}), a configuration such as k3-in-loss, FILE.py:NAME or package.module:NAME"
        )
    return BuiltIn(Configuration(estimator(name), "both"), anywhere=True)


def _loaded(name: str, timeout: float) -> Callable[..., Any]:
    seconds = _IMPORT if timeout == TIMEOUT else timeout  # importing torch alone takes a while on a busy machine
    try:
        with limit(seconds):
            return load(name)
    except TimedOut:
        place = name.rpartition(":")[0]
        raise ValueError(f"importing {place} takes more than {seconds:g} seconds: give a longer --timeout") from None


def _broken(fault: Fault) -> Finding:
    return Finding("function", "error", str(fault), detail=fault.detail)


def _with(report: Report, **changes: Any) -> Report:
    from dataclasses import replace

    return replace(report, **changes)


def _sections(subject: BuiltIn | Function, report: Report, error: float, sections: Sequence[str]) -> Iterator[Report]:
    """The report after each section asked for."""

    def more(findings: list[Finding], **numbers: Any) -> Report:
        return _with(report, findings=(*report.findings, *findings), **numbers)

    coupled, off, before = False, 0.0, None
    if isinstance(subject, Function):
        before, random = invariance.repeated(subject)
        if random:
            yield more(random)
            return
        coupled, off = invariance.is_coupled(subject)
    yield report
    section = gradient.Section({}, [], {})
    if {"gradient", "variance", "numerics", "sampling"} & set(sections):
        section = gradient.examine(subject, report.target, report.placement, coupled=coupled)
        report = _with(report, gradient=section.gradient)
    yield report
    surrogate = report.gives == ["loss"]  # then the value of a term may be anything
    if "value" in sections or "variance" in sections:
        numbers, findings = value.examine(subject, coupled=coupled, surrogate=surrogate)
        surrogate &= numbers["relative_bias"] > 10 * subject.tolerance
        report = more(findings if "value" in sections else [], value=numbers)
    report = more(section.findings if "gradient" in sections else [])
    yield report
    verdicts = {where: found["verdict"] for where, found in section.gradient.items()}
    if "variance" in sections:
        spread, findings = variance.examine(section.measured, report.gives, error)
        if subject.kind != "loss" and not coupled and subject.returns != "return" and not surrogate:
            unbiased = report.value["relative_bias"] <= 10 * subject.tolerance
            tail, heavy = variance.tail(subject, unbiased=unbiased)
            spread, findings = {**spread, **tail}, findings + heavy
        report = more(findings, variance=spread)
    yield report
    if "numerics" in sections:
        report = more(numerics.examine(subject, coupled=coupled, dead=verdicts.get("loss") == "dead"))
    yield report
    if "invariance" in sections and isinstance(subject, Function):
        report = more(invariance.examine(subject, coupled=coupled, off=off))
    yield report
    if "sampling" in sections and not coupled:
        used = (report.gives or list(verdicts))[0]
        report = more(sampling.examine(subject, used, dead=verdicts[used] == "dead"))
    if isinstance(subject, Function):
        report = more(invariance.repeated(subject, before)[1])
        report = more([Finding("function", "info", note) for note in subject.notes])
    yield report
