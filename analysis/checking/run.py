"""One check from end to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from klgrad.analysis.checking import (
    causes,
    gradient,
    invariance,
    measuring,
    numerics,
    ratios,
    sampling,
    targets,
    value,
    variance,
)
from klgrad.analysis.checking.calling import Fault, TimedOut, limit, one_thread
from klgrad.analysis.checking.compiled import confirm
from klgrad.analysis.checking.fields import TARGETS
from klgrad.analysis.checking.instead import instead
from klgrad.analysis.checking.loading import functions_in, load, mentions_torch
from klgrad.analysis.checking.probing import probe
from klgrad.analysis.checking.report import PLACE, SECTIONS, Finding, Report
from klgrad.analysis.checking.subject import COMPUTES, HALF, BuiltIn, Function, function_subject
from klgrad.analysis.checking.targets import Target
from klgrad.analysis.checking.wording import sentence
from klgrad.synth.configurations import PLACEMENTS, Configuration, parse
from klgrad.synth.estimators import ESTIMATORS, estimator, meant, unknown

Subject = BuiltIn | Function


@dataclass(frozen=True)
class Options:
    """How to check; see ``check``."""

    placement: str | None
    target: str
    returns: str
    mapping: Mapping[str, str]
    arguments: Mapping[str, Any]
    error: float
    timeout: float
    strict: bool
    sections: Sequence[str]

    def __post_init__(self) -> None:
        if self.placement is not None and self.placement not in PLACEMENTS:
            raise unknown("placement", self.placement, list(PLACEMENTS))
        if not 0 < self.error < float("inf"):
            raise ValueError(f"error = {self.error} must be positive: 0.1 asks for a gradient within 10 %")
        if not 0 < self.timeout < float("inf"):
            raise ValueError(f"timeout = {self.timeout} must be a positive number of seconds")


def run(function: str | Callable[..., Any], options: Options, progress: Callable[[int, int], None] | None) -> Report:
    """See ``check``."""
    name = function if isinstance(function, str) else getattr(function, "__qualname__", type(function).__name__)
    target = targets.named(options.target)
    if target is None and ":" not in options.target and "-in-" not in options.target:
        raise unknown("target", options.target, [*TARGETS, "a configuration such as k2-in-loss", "FILE.py:NAME"])
    try:
        subject = subject_of(function, options, name)
        target = target or _own_target(options)
    except Fault as fault:
        return Report(name, options.target, options.placement, findings=(_broken(fault),))
    placement = _placed(subject, options.placement, name)
    given = tuple(subject.plan.given()) if isinstance(subject, Function) else ()
    report = Report(name, options.target, placement, words=target.words, given=given)
    try:
        with np.errstate(all="ignore"), one_thread():  # what overflows is a finding
            for done, grown in enumerate(_sections(subject, target, report, options), 1):
                report = grown
                if progress is not None:
                    progress(done, len(SECTIONS))
    except Fault as fault:
        report = _more(report, [_broken(fault)])
    return _strict(report) if options.strict else report


def subject_of(function: str | Callable[..., Any], options: Options, name: str) -> Subject:
    """What is to be checked.

    Raises:
        ValueError: for bad use.
        Fault: when no way of calling it works.
    """
    if isinstance(function, str) and ":" not in function:
        if options.mapping or options.arguments or options.returns != "penalty":
            raise ValueError(f"{function} is a built-in: --map, --arg and --returns are for functions of your own")
        return built_in(function)
    called = _loaded(function, options.timeout) if isinstance(function, str) else function
    return function_subject(
        called, probe(), name=name, returns=options.returns, mapping=options.mapping,
        constants=options.arguments, timeout=options.timeout,
    )  # fmt: skip


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
    place = name.rpartition(":")[0]
    if mentions_torch(place):
        import torch  # noqa: F401  # its own import is not the user's to answer for
    try:
        with limit(timeout):
            return load(name)
    except TimedOut:
        raise ValueError(f"importing {place} takes more than {timeout:g} seconds: give a longer --timeout") from None


def _own_target(options: Options) -> Target:
    """What another configuration or function gives: a whole loss in its one place, any other where the subject is."""
    name = options.target
    other = subject_of(name, replace(options, mapping={}, arguments={}, returns="penalty"), name)
    possible = measuring.placements(other)

    def gradient_in(placement: str) -> targets.Gradient:
        return lambda model: measuring.measure(other, placement if placement in possible else possible[0], model).mean

    return targets.like(name, {where: gradient_in(where) for where in PLACEMENTS})


def _placed(subject: Subject, placement: str | None, name: str) -> str | None:
    """The placement that is asked for, or the only one there is."""
    possible = measuring.placements(subject)
    if isinstance(subject, BuiltIn) and len(possible) == 1 and placement not in (None, *possible):
        raise ValueError(f"{name} names its placement: leave --placement {placement} out")
    if placement is not None and placement not in possible:
        what = (
            "a loss, which has no other placement than its own"
            if subject.kind == "loss"
            else "what goes into the reward"
        )
        raise ValueError(f"{name} returns {what}: leave --placement {placement} out")
    return possible[0] if isinstance(subject, BuiltIn) and len(possible) == 1 else placement


def _note(sentence: str, subject: Function) -> Finding:
    coarse = sentence.startswith(COMPUTES) and subject.tolerance > HALF
    return Finding("function", "warning" if coarse else "info", sentence)


def _broken(fault: Fault) -> Finding:
    return Finding("function", "error", str(fault), detail=fault.detail, mend=fault.mend)


def _more(report: Report, findings: list[Finding], **changes: Any) -> Report:
    return replace(report, findings=(*report.findings, *findings), **changes)


def _strict(report: Report) -> Report:
    """What only odd input shows counts as an error."""
    return replace(
        report, findings=tuple(replace(f, level="error") if f.robust else f
                               for f in report.findings),
    )  # fmt: skip


def _verdicts(subject: Subject, target: Target, report: Report) -> tuple[list[Finding], tuple[str, ...]]:
    """What each placement gives, the cause where it is another gradient, and what to write instead."""
    findings, code = [], tuple[str, ...]()
    choice = report.placement is None and len(report.gradient) > 1 and bool(report.gives)
    for where, found in report.gradient.items():
        text, mend = sentence(found, target, where)
        wrong = not found["passes"]
        if wrong and not choice:
            cause = causes.find(subject, target, where, found)
            if cause:
                dead = cause.kind == "rewards" and found["verdict"] in ("dead", "zero")  # for want of rewards
                text, mend = cause.what if dead else f"{text}; {cause.what}", cause.mend or mend
            code = code or instead(found, target, where, cause.kind if cause else "")
        level = "error" if wrong and not choice else "info"
        numbers = {key: found[key] for key in ("verdict", "scale", "relative_bias", "cosine")}
        message = f"in the {PLACE[where]}, {text}" + (f"; {mend}" if mend else "")
        findings.append(Finding("gradient", level, message, numbers, mend=mend if level == "error" else ""))
    if choice and len(report.gives) < len(report.gradient):
        findings.insert(0, _to_choose(report))
    return findings, code


def _to_choose(report: Report) -> Finding:
    options = " or ".join(f"--placement {where}" for where in report.gives)
    wrong = [PLACE[where] for where in report.gradient if where not in report.gives]
    return Finding(
        "gradient", "error",
        f"where it stands decides: in the {' and in the '.join(PLACE[p] for p in report.gives)} it gives what is "
        f"wanted, in the {' and in the '.join(wrong)} it does not",
        mend=f"say where yours stands, {options}",
    )  # fmt: skip


def _sections(subject: Subject, target: Target, report: Report, options: Options) -> Iterator[Report]:
    """The report after each section asked for."""
    sections, before, coupled, off = set(options.sections), None, False, 0.0
    if isinstance(subject, Function):
        before, random = invariance.repeated(subject)
        if random:
            yield _more(report, random)
            return
        coupled, off = invariance.is_coupled(subject)
        subject = replace(subject, spread=1.0) if coupled and subject.rewarded else subject
    yield report
    section = gradient.Section({}, [], {})
    if {"gradient", "variance", "numerics", "sampling"} & sections:
        section = gradient.examine(subject, target, report.placement, coupled=coupled)
        report = replace(report, gradient=section.gradient)
    yield report
    surrogate = not target.estimates_kl or report.gives == ["loss"]  # then the value of a term may be anything
    if "value" in sections or "variance" in sections:
        numbers, findings = value.examine(subject, coupled=coupled, surrogate=surrogate, kl=target.estimates_kl)
        surrogate &= numbers["relative_bias"] > 10 * subject.tolerance
        report = _more(report, findings if "value" in sections else [], value=numbers)
    if "gradient" in sections:
        findings, code = _verdicts(subject, target, report)
        report = _more(report, findings + section.findings, instead=code)
    else:
        report = replace(report, gradient=report.gradient if sections & {"variance", "sampling"} else {})
    yield report
    if "variance" in sections:
        report = _noise(subject, target, report, section, options.error, coupled, surrogate)
    yield report
    words = {found["verdict"] for found in section.gradient.values()}
    dead = (bool(words) and words <= {"dead", "zero"}) or section.gradient.get("loss", {}).get("verdict") == "dead"
    if "numerics" in sections:
        report = _more(report, numerics.examine(subject, coupled=coupled, dead=dead))
    yield report
    if "invariance" in sections and isinstance(subject, Function):
        report = _more(report, invariance.examine(subject, coupled=coupled, off=off))
    yield report
    if "sampling" in sections and not coupled:
        used = (report.gives or list(section.gradient))[0]
        capped = ratios.examine(subject, used) if isinstance(subject, Function) else []
        still = section.gradient[used]["verdict"] == "dead"
        report = _more(report, capped + sampling.examine(subject, used, dead=still))
    if isinstance(subject, Function):
        report = _more(report, invariance.repeated(subject, before)[1])
        report = _more(report, confirm(subject, probe()))
        report = _more(report, [_note(note, subject) for note in subject.notes])
    yield report


def _noise(
    subject: Subject, target: Target, report: Report, section: gradient.Section, error: float, coupled: bool,
    surrogate: bool,
) -> Report:  # fmt: skip
    spread, findings = variance.examine(section.measured, target, section.gradient, error)
    if subject.kind != "loss" and not coupled and subject.returns != "return" and not surrogate:
        unbiased = report.value["relative_bias"] <= 10 * subject.tolerance
        tail, heavy = variance.tail(subject, unbiased=unbiased)
        spread, findings = {**spread, **tail}, findings + heavy
    return _more(report, findings, variance=spread)
