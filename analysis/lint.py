"""What a library's settings amount to: recipes, verdict, exact numbers, and the traps they fall into (``findings``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.analysis.findings import Finding, findings
from klgrad.analysis.libraries import Library, libraries
from klgrad.analysis.readings import Reading, reading
from klgrad.analysis.recipes import Recipe, Terms, expected
from klgrad.analysis.resolution import Resolution, resolve, written
from klgrad.analysis.settings import Repeat, Setting
from klgrad.synth.estimators import number
from klgrad.synth.exact import kl, true_gradient
from klgrad.synth.policies import PolicyPair

if TYPE_CHECKING:
    import pandas as pd

_ZERO = 1e-9


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


def lint(entry: Library, settings: Sequence[Setting], repeated: Sequence[Repeat] = ()) -> Report:
    """The report on a library's settings; ``repeated`` are keys that a file writes twice."""
    resolution = resolve(entry, settings)
    terms = active(resolution)
    total = reading(terms) if terms else None
    stale = reading(terms, off_policy=True) if terms else None
    found = findings(resolution, total, repeated)
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

SURVEY = ("name", "library", "version", "default", "switched_on", "settings", "verdict", "cannot")


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
                "default": _with_errors(default),
                "switched_on": _with_errors(_lint_of(entry, entry.switched_on)),
                "settings": _shown(best),
                "verdict": _lint_of(entry, best).verdict if best else "",
                "cannot": entry.cannot,
            }
        )
    return pd.DataFrame(rows, columns=list(SURVEY))
