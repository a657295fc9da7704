"""What a library's settings amount to: recipes, verdict, exact numbers, and the traps they fall into (``findings``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.analysis.findings import Finding, findings
from klgrad.analysis.libraries import Library, libraries
from klgrad.analysis.readings import Reading, reading
from klgrad.analysis.recipes import Recipe, Terms, expected
from klgrad.analysis.recognition import Recognition, is_main, program, recognise
from klgrad.analysis.resolution import Resolution, resolve, written
from klgrad.analysis.settings import Document, Gap, Repeat, Setting
from klgrad.synth.estimators import number
from klgrad.synth.exact import kl, true_gradient
from klgrad.synth.policies import PolicyPair

if TYPE_CHECKING:
    import pandas as pd

_ZERO = 1e-9


@dataclass(frozen=True)
class Run:
    """One run that a text describes: which of several it is, its report, what gave its library away, and what else
    it may be, as other trainers or editions with other verdicts.
    """

    label: str
    report: Report
    clues: tuple[str, ...] = ()
    others: tuple[Report, ...] = ()


def examine(documents: Sequence[Document], entry: Library | None = None) -> list[Run]:
    """The runs of a text, alike ones once; those of no library only where no other run is of one.

    Args:
        entry: whose settings they are; recognised for each where it is not said.

    Raises:
        ValueError: when no run's library can be told.
    """
    runs, problems = [], []
    for document in documents:
        try:
            runs.append(_run(document, entry))
        except ValueError as error:
            problems.append(error)
    if not runs:
        raise problems[0]
    alike: dict[tuple[Any, ...], Run] = {}
    for run in runs:
        key = (run.report.resolution.library.name, run.report.resolution.penalties, _said(run.report))
        before = alike.get(key)
        label = "; ".join(dict.fromkeys(filter(None, [before.label if before else "", run.label])))
        alike[key] = replace(before or run, label=label)
    return list(alike.values())


def _said(report: Report) -> tuple[Any, ...]:
    return tuple((finding.id, finding.message) for finding in report.findings)


def _run(document: Document, entry: Library | None) -> Run:
    found = Recognition(entry, ()) if entry else recognise(document)
    report = _report(found.entry, document)
    others = [_report(each, document) for each in found.others]
    differing: dict[tuple[Any, ...], Report] = {}
    for other in others:
        if not other.open and _amounts(other) != _amounts(report):
            differing.setdefault(_amounts(other), other)
    return Run(document.label, report, found.clues, tuple(differing.values()))


def _report(entry: Library, document: Document) -> Report:
    gaps = [*document.gaps]
    name = program(document)
    if name is not None and entry.mains and not is_main(name, entry):
        message = f"{name} is no program of {entry.title} that is known here: it may read these settings otherwise"
        gaps.append(Gap("entry-point", message, "note"))
    return lint(entry, document.settings, document.repeated, gaps)


def _amounts(report: Report) -> tuple[Any, ...]:
    """What two reports have in common where it makes no difference which of them holds."""
    return report.verdict, tuple((p.placement, p.coefficient) for p in report.resolution.penalties)


@dataclass(frozen=True)
class Report:
    """What settings amount to.

    Args:
        resolution: the settings in force.
        reading: the verdict on-policy; ``None`` without a penalty.
        off_policy: the verdict with stale samples, the policy loss unclipped.
        findings: errors first.
        not_read: settings that the entry does not know, by their names.
    """

    resolution: Resolution
    reading: Reading | None
    off_policy: Reading | None
    findings: tuple[Finding, ...]
    not_read: tuple[str, ...]

    @property
    def errors(self) -> int:
        """How many findings are errors."""
        return sum(finding.level == "error" for finding in self.findings)

    @property
    def open(self) -> bool:
        """Whether a verdict would rest on a guess, so that there is none."""
        return any(finding.level == "open" for finding in self.findings)

    @property
    def provided(self) -> tuple[str, ...]:
        """All that the verdict assumes."""
        own = self.reading.provided if self.reading else ()
        return (*own, *dict.fromkeys(p for penalty in self.resolution.penalties for p in penalty.provided))

    @property
    def verdict(self) -> str:
        """The verdict and its conditions in words."""
        if self.reading is None:
            return "no KL penalty"
        coefficients = {weight for weight, _ in active(self.resolution)}
        unit = f", in units of {number(max(coefficients, key=abs))}" if len(coefficients) > 1 else ""
        return self.reading.phrase + unit + (f", provided {' and '.join(self.provided)}" if self.provided else "")


def active(resolution: Resolution) -> list[tuple[float, Recipe]]:
    """The terms that count: those with a coefficient."""
    return [(weight, recipe) for weight, recipe in resolution.terms if weight]


def lint(
    entry: Library, settings: Sequence[Setting], repeated: Sequence[Repeat] = (), gaps: Sequence[Gap] = ()
) -> Report:
    """The report on a library's settings; ``repeated`` are keys written twice, ``gaps`` what the text leaves open."""
    resolution = resolve(entry, settings)
    terms = active(resolution)
    total = reading(terms) if terms else None
    stale = reading(terms, off_policy=True) if terms else None
    found = findings(resolution, total, repeated, gaps)
    unknown = {key for finding in found if finding.id == "unknown-key" for key, _ in finding.keys}
    not_read = dict.fromkeys(setting.key for setting in resolution.unread if setting.key not in unknown)
    return Report(resolution, total, stale, tuple(found), tuple(not_read))


def numbers(terms: Terms, pair: PolicyPair, length: int) -> dict[str, Any]:
    """Bias and variance of a penalty on a pair, its largest coefficient taken for 1.

    ``bias`` is the norm of expected minus true gradient; ``rescaled_bias`` the least that any positive scale leaves of
    it, relative to the true gradient; ``scale`` the least-squares scale.
    """
    largest = max(abs(weight) for weight, _ in terms)
    outcome = expected([(weight / largest, recipe) for weight, recipe in terms], pair, length)
    truth = true_gradient(pair, [length])[0]
    size, norm = float(np.linalg.norm(truth)), float(np.linalg.norm(outcome.mean))
    cosine = float(outcome.mean @ truth) / (size * norm) if size and norm > _ZERO * size else math.nan
    return {
        "preset": pair.name,
        "length": length,
        "kl": float(kl(pair, [length])[0]),
        "gradient_norm": size,
        "penalty_norm": norm,
        "bias": float(np.linalg.norm(outcome.mean - truth)),
        "scale": float(outcome.mean @ truth) / size**2 if size else math.nan,
        "cosine": cosine,
        "rescaled_bias": 1.0 if not cosine > 0 else math.sqrt(max(1 - min(cosine, 1.0) ** 2, 0.0)),
        "variance": outcome.variance,
        "method": outcome.method,
        "noise": outcome.noise,
    }


# ----------------------------------------------------------------------------------------------------------- overview

SURVEY = ("name", "library", "version", "read", "default", "switched_on", "settings", "verdict", "cannot")


def _shown(settings: Any) -> str:
    return ", ".join(f"{key}={written(value)}" for key, value in settings.items())


def _lint_of(entry: Library, settings: Any) -> Report:
    return lint(entry, [Setting(key, value) for key, value in settings.items()])


def _with_errors(report: Report) -> str:
    errors = dict.fromkeys(finding.id for finding in report.findings if finding.level == "error")
    return report.verdict + (f" [{', '.join(errors)}]" if errors else "")


def survey(names: Sequence[str] = ()) -> pd.DataFrame:
    """One row per library: what its defaults give, and the settings for the sequence-level gradient.

    ``default`` and ``switched_on`` are verdicts (the latter with the least settings that turn a penalty on), with the
    errors that lint finds in brackets;
    ``settings`` are for the sequence-level gradient, or the closest where ``cannot`` says why there are none;
    ``verdict`` is theirs.
    """
    import pandas as pd

    rows = []
    for name in names or libraries():
        entry = libraries()[name]
        default = _lint_of(entry, {})
        best = entry.unbiased or entry.closest
        rows.append(
            {
                "name": name,
                "library": entry.title,
                "version": entry.version,
                "read": entry.how,
                "default": _with_errors(default),
                "switched_on": _with_errors(_lint_of(entry, entry.switched_on)),
                "settings": _shown(best),
                "verdict": _lint_of(entry, best).verdict if best else "",
                "cannot": entry.cannot,
            }
        )
    return pd.DataFrame(rows, columns=list(SURVEY))
