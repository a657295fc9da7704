"""Which field is the expected gradient, placement by placement, at every length, without and with an end token?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from klgrad.analysis.checking.measuring import (
    GROUPS,
    Measured,
    Subject,
    group_gradient,
    group_models,
    limit_gradient,
    limit_models,
    measure,
    placements,
)  # fmt: skip
from klgrad.analysis.checking.models import LENGTHS, Model, drifted, models, vocabularies, with_reference
from klgrad.analysis.checking.naming import Found, Known, Named, classify, joined, lengths
from klgrad.analysis.checking.report import PLACE, Finding
from klgrad.analysis.checking.subject import BuiltIn, Function
from klgrad.analysis.checking.targets import Target
from klgrad.synth.policies import log_softmax

_LIMIT = 1e-5  # of a large batch: what is left falls as 1 / rows^2, from 64 rows on


def comparison(found: Found, known: Known | None = None, field: str = "sequence") -> dict[str, dict[int, float | None]]:
    """``scale``, ``relative_bias`` and ``cosine`` to a field, by length."""
    out: dict[str, dict[int, float | None]] = {"scale": {}, "relative_bias": {}, "cosine": {}}
    known = known or Known()
    for length in lengths(found):
        part = [(m, g) for m, g in found if m.length == length]
        g, truth = joined(found, length), known.joined(part, field)
        size, own = float(np.linalg.norm(truth)), float(np.linalg.norm(g))
        out["scale"][length] = float(g @ truth) / size**2 if size else None
        out["relative_bias"][length] = float(np.linalg.norm(g - truth)) / size if size else None
        out["cosine"][length] = float(g @ truth) / (size * own) if own > 1e-12 * size and size else None
    return out


@dataclass(frozen=True)
class Section:
    """The gradient's part of a report, and what later sections go on from."""

    gradient: dict[str, dict[str, Any]]
    findings: list[Finding]
    measured: dict[str, list[Measured]]


def examine(subject: Subject, target: Target, placement: str | None, *, coupled: bool) -> Section:
    """Measure and name every placement asked for."""
    section = Section({}, [], {})
    for where in placements(subject) if placement is None else (placement,):
        known = target.known(where, full=sees_all(subject))
        found = _coupled(subject, where, known) if coupled else _single(subject, where, known, section)
        found["passes"] = target.reached(found, subject.kind)
        section.gradient[where] = found
        if not coupled:
            section.findings.extend(_after_drift(subject, where, found))
    return section


def sees_all(subject: Subject) -> bool:
    """Whether it looks at the whole vocabulary."""
    return subject.configuration.estimator.full if isinstance(subject, BuiltIn) else subject.plan.full


def _after_drift(subject: Subject, placement: str, found: dict[str, Any]) -> list[Finding]:
    """A clamp shows only where policy and reference have come apart."""
    far = drifted()
    field, factor = far.fields.get(found["name"]), found["factor"]
    if field is None or not isinstance(factor, float) or not field.any():
        return []
    got = measure(subject, placement, far).mean
    wanted = factor * field
    # context by context, since the one that drifted has the smallest gradient; in lower precision its digits are gone
    rows = (len(np.flatnonzero(far.pair.automaton.alive)) if subject.tolerance <= 1e-6 else 1, -1)
    apart, size = (np.linalg.norm(each.reshape(rows), axis=1) for each in (got - wanted, wanted))
    off = float(np.max(apart / np.where(size > 0, size, np.linalg.norm(wanted))))  # a last token has no future term
    if off <= max(1e-6, 100 * subject.tolerance):
        return []
    message = (
        f"in the {PLACE[placement]}, that holds only while the log-ratios are moderate: on a pair that has drifted "
        f"apart (log-ratios to 25) it is off by {off:.3g} relative: a clamp, or digits lost"
    )
    return [Finding("gradient", "warning", message, {"relative_bias_after_drift": off})]


def _single(subject: Subject, placement: str, known: Known, section: Section) -> dict[str, Any]:
    """By single sequences; the models of other vocabularies name it with the usual ones, and are not in the numbers."""
    slow = isinstance(subject, Function) and subject.kind == "loss"
    lengths_tried = LENGTHS[:3] if slow and subject.backend == "numpy" else LENGTHS
    measured = [measure(subject, placement, m) for m in models(lengths_tried, 1 if slow else 2)]
    section.measured[placement] = measured
    more = () if isinstance(subject, BuiltIn) else vocabularies(known.full)
    others = [(m, measure(subject, placement, m).mean) for m in more]
    found = [(m.model, m.mean) for m in measured]
    named = classify([*found, *others], subject.tolerance, dead=all(m.dead for m in measured), known=known)
    return {
        **_described(named, found, known, _at_identity(lambda m: measure(subject, placement, m).mean)),
        "reference_matters": _reference_matters(subject, placement, measured[-1]),
    }


def _described(named: Named, found: Found, known: Known, at_identity: float) -> dict[str, Any]:
    fixed, ends = ([(m, g) for m, g in found if m.ends is kind] for kind in (False, True))
    wanted = known.wanted[0] if known.wanted else "sequence"
    return {
        "verdict": named.verdict, "name": named.name, "factor": named.scale, "one": named.one, "by": named.by,
        "only_fixed_length": named.only_fixed, "off": named.off, "nearest": named.nearest, "at_identity": at_identity,
        **comparison(fixed), "with_end_token": comparison(ends), "to_target": comparison(found, known, wanted),
    }  # fmt: skip


def _at_identity(expected: Callable[[Model], np.ndarray]) -> float:
    """How hard it still pushes where policy and reference are the same, in units of the KL's gradient elsewhere.

    Every divergence is least there, so its gradient is zero.
    """
    (m,) = (m for m in models((2,), 1) if m.ends)
    pushed = expected(with_reference(m, m.pair.policy.log_probs))
    return float(np.linalg.norm(pushed) / np.linalg.norm(m.truth))


def _reference_matters(subject: Subject, placement: str, here: Measured) -> bool:
    other = with_reference(here.model, log_softmax(-here.model.pair.reference))
    changed = measure(subject, placement, other)
    if here.variance is None or changed.variance is None:
        return True
    least = subject.tolerance * float(np.linalg.norm(here.model.truth))
    moved = float(np.abs(here.mean - changed.mean).max())
    return moved > least or not np.isclose(here.variance, changed.variance, rtol=max(1e-5, subject.tolerance))


# ------------------------------------------------------------------------------------------ rows that depend


def _coupled(subject: Subject, placement: str, known: Known) -> dict[str, Any]:
    """By groups of 2, 3 and 4 sequences: what it is, how its size depends on the group's; and in large batches."""
    assert isinstance(subject, Function)
    by_size = {n: [(m, group_gradient(subject, placement, m, n)) for m in group_models(n)] for n in GROUPS}
    named = classify(by_size[2], subject.tolerance, known=known)
    ratios = {n: _ratio(found, by_size[2], named, subject.tolerance) for n, found in by_size.items()}
    same = all(r is not None and abs(r - 1) <= max(1e-6, 2 * subject.tolerance) for r in ratios.values())
    if None in ratios.values():
        named = replace(named, verdict="other", name=f"{named.name} in groups of 2, something else in larger ones")
    elif not same and named.verdict in ("sequence", "token"):
        named = replace(named, verdict=f"scaled-{named.verdict}", one=False)
    elif not same:
        named = replace(named, verdict="divergence" if named.one else named.verdict, one=False)
    return {
        **_described(named, by_size[2], known, _at_identity(lambda m: group_gradient(subject, placement, m, 2))),
        "reference_matters": True,
        "by_group_size": {n: r and _times(named.scale, r) for n, r in ratios.items()},
        "large_batch": None if named.one else _large_batch(subject, placement, known),
    }


def _large_batch(subject: Function, placement: str, known: Known) -> dict[str, Any] | None:
    """The field that large batches tend to, as it is or divided by the mean length E|y|, and how far small ones are."""
    calm = replace(subject, spread=0.0)
    found = [(m, limit_gradient(calm, placement, m)) for m in limit_models()]
    if not all(np.isfinite(g).all() for _, g in found):
        return None
    tolerance = max(_LIMIT, subject.tolerance)
    for per in ("", "E|y|"):
        times = [(m, g * _mean_length(m) if per else g) for m, g in found]
        named = classify(times, tolerance, known=known)
        if isinstance(named.scale, float) and named.verdict not in ("other", "dead", "zero"):
            return {
                "name": named.name, "factor": named.scale, "per": per,
                "remainder": _remainder(subject, placement, found),
            }  # fmt: skip
    return None


def _mean_length(m: Model) -> float:
    return float(m.probability @ m.batch.mask.sum(axis=1))


def _remainder(subject: Function, placement: str, limits: Found) -> dict[int, float]:
    """Group size -> how far its expected gradient is from the large batch's, relative."""
    m, limit = next((m, g) for m, g in limits if m.ends and m.length == 2)
    return {
        n: float(np.linalg.norm(group_gradient(subject, placement, m, n) - limit) / np.linalg.norm(limit))
        for n in (2, 4)
        if len(m.probability) ** n <= 5000
    }


def _ratio(found: Found, base: Found, named: Named, tolerance: float) -> float | None:
    """The one factor between the gradients of two group sizes on the models of both; None where there is none."""
    known = {id(m): g for m, g in base}
    both = [(known[id(m)], g) for m, g in found if id(m) in known and not (named.only_fixed and m.ends)]
    a, b = (np.concatenate(each) for each in zip(*both, strict=True))
    size = max(float(np.linalg.norm(m.truth)) for m, _ in found)
    if max(np.linalg.norm(a), np.linalg.norm(b)) <= tolerance * size:
        return 1.0
    ratio = float(a @ b) / max(float(a @ a), 1e-300)
    return ratio if np.linalg.norm(b - ratio * a) <= tolerance * max(float(np.linalg.norm(b)), size) else None


def _times(scale: float | dict[Any, float], ratio: float) -> float | dict[Any, float]:
    return {n: s * ratio for n, s in scale.items()} if isinstance(scale, dict) else scale * ratio
