"""Which field is the expected gradient, placement by placement, at every length, without and with an end token?"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.analysis.checking.models import LENGTHS, Model, drifted, each_row, models, with_reference
from klgrad.analysis.checking.naming import Found, Named, classify, joined, lengths
from klgrad.analysis.checking.report import PLACE, Finding
from klgrad.analysis.checking.subject import BuiltIn, Function
from klgrad.analysis.checking.wording import sentence
from klgrad.synth.configurations import PLACEMENTS
from klgrad.synth.enumeration import rows_of
from klgrad.synth.moments import moments
from klgrad.synth.policies import log_softmax

if TYPE_CHECKING:
    from jaxtyping import Float

Subject = BuiltIn | Function
GROUPS = (2, 3, 4)
_MOST_GROUPS = 600
_FEW = 6  # rows that are tried alone


@dataclass(frozen=True, eq=False)
class Measured:
    """The gradient of one placement on one model.

    Args:
        model: the model.
        mean: ``[d]`` expected gradient.
        variance: trace of the covariance of one sequence's gradient; None for groups.
        dead: zero for every sample.
    """

    model: Model
    mean: Float[np.ndarray, " d"]
    variance: float | None
    dead: bool


def placements(subject: Subject) -> tuple[str, ...]:
    """Where it can stand: a loss only where it is, a configuration of klgrad where its name says."""
    if isinstance(subject, BuiltIn):
        return PLACEMENTS if subject.anywhere else (subject.configuration.placement,)
    return {"loss": ("loss",)}.get(subject.kind, ("reward",) if subject.returns == "return" else PLACEMENTS)


def measure(subject: Subject, placement: str, model: Model, *, beta: float = 1.0) -> Measured:
    """The expected gradient and its variance, exactly.

    Rows are independent here (``group_gradient`` serves those where they are not), so all are given at once.
    """
    if isinstance(subject, BuiltIn):
        (m,) = moments(model.pair, [replace(subject.configuration, placement=placement)], [model.length])
        assert m.covariance is not None
        variance = float(m.covariance[0])
        dead = variance + float(m.mean[0] @ m.mean[0]) < (subject.tolerance * np.linalg.norm(model.truth)) ** 2
        return Measured(model, m.mean[0], variance, bool(dead))
    each = sequence_gradients(subject, placement, model, beta=beta)
    mean = model.probability @ each
    variance = float(model.probability @ ((each - mean) ** 2).sum(axis=1))
    return Measured(model, mean, variance, not np.any(each))


def sequence_gradients(
    subject: Function, placement: str, model: Model, *, beta: float = 1.0
) -> Float[np.ndarray, "M d"]:
    """Every sequence's own gradient."""
    if subject.kind != "loss":
        return model.gradients(*_weights(subject, placement, model.batch, beta))
    return model.gradients(*(_at_once(subject, model.batch, beta) or _one_by_one(subject, model.batch, beta)))


def _one_by_one(subject: Function, batch: Any, beta: float) -> tuple[np.ndarray, np.ndarray | None]:
    terms = [subject.evaluate(row, beta=beta) for row in each_row(batch)]
    token = np.concatenate([t.token for t in terms if t.token is not None])
    vocab = [t.vocab for t in terms if t.vocab is not None]
    return token, np.concatenate(vocab) if vocab else None


def _at_once(subject: Function, batch: Any, beta: float) -> tuple[np.ndarray, np.ndarray | None] | None:
    """A loss of all rows holds every row's gradient, where it is their mean or sum; a few rows alone must confirm it.

    None where they do not, or where there is nothing to compare.
    """
    rows = len(batch.tokens)
    if rows <= _FEW or subject.backend == "numpy":  # differences cost a call for every entry either way
        return None
    some = np.linspace(0, rows - 1, _FEW).astype(int).tolist()
    whole, alone = subject.evaluate(batch, beta=beta), _one_by_one(subject, rows_of(batch, some), beta)
    assert whole.token is not None
    together, each = _stacked(whole.token, whole.vocab), _stacked(*alone)
    size = float(np.abs(each).max())
    for factor in (rows, 1):
        off = float(np.abs(factor * together[some] - each).max())
        if size > 0 and off <= 1e-2 * subject.tolerance * size:
            return factor * whole.token, None if whole.vocab is None else factor * whole.vocab
    return None


def _stacked(token: np.ndarray, vocab: np.ndarray | None) -> np.ndarray:
    return token[..., None] if vocab is None else np.concatenate([token[..., None], vocab], axis=-1)


def _weights(subject: Function, placement: str, batch: Any, beta: float) -> tuple[np.ndarray, np.ndarray | None]:
    """``[B, T]`` weights on the sampled tokens' scores and ``[B, T, V]`` on all tokens'."""
    terms = subject.evaluate(batch, differentiate=placement != "reward", beta=beta)
    token, vocab = np.zeros(batch.mask.shape), terms.vocab
    if placement != "reward":
        assert terms.token is not None
        token = terms.token
    if placement != "loss":
        detached = terms.value if subject.returns == "return" else terms.by_sequence[:, None]
        token = token + detached
    return token, vocab


def group_gradient(subject: Function, placement: str, model: Model, size: int) -> Float[np.ndarray, " d"]:
    """The expected gradient over all groups of ``size`` sequences, for code whose rows depend on each other.

    A token or sequence term stands for the mean over its rows; a loss is what it returns.
    """
    total = np.zeros(model.pair.policy.parameters)
    for index in itertools.product(range(len(model.probability)), repeat=size):
        rows = list(index)
        part = rows_of(model.batch, rows)
        token, vocab = _weights(subject, placement, part, 1.0)
        member = replace(model, contexts=model.contexts[rows], batch=part, probability=model.probability[rows])
        each = member.gradients(token, vocab).sum(axis=0) / (1 if subject.kind == "loss" else size)
        total = total + float(member.probability.prod()) * each
    return total


@cache
def group_models(size: int) -> tuple[Model, ...]:
    """The probe models with few enough groups."""
    return tuple(m for m in models((1, 2, 3, 4), 1) if len(m.probability) ** size <= _MOST_GROUPS)


def comparison(found: Found) -> dict[str, dict[int, float | None]]:
    """``scale``, ``relative_bias`` and ``cosine`` to the sequence-level gradient, by length."""
    out: dict[str, dict[int, float | None]] = {"scale": {}, "relative_bias": {}, "cosine": {}}
    for length in lengths(found):
        g, truth = joined(found, length), joined(found, length, "sequence")
        size, own = float(np.linalg.norm(truth)), float(np.linalg.norm(g))
        out["scale"][length] = float(g @ truth) / size**2
        out["relative_bias"][length] = float(np.linalg.norm(g - truth)) / size
        out["cosine"][length] = float(g @ truth) / (size * own) if own > 1e-12 * size else None
    return out


@dataclass(frozen=True)
class Section:
    """The gradient's part of a report, and what later sections go on from."""

    gradient: dict[str, dict[str, Any]]
    findings: list[Finding]
    measured: dict[str, list[Measured]]


def examine(subject: Subject, target: str, placement: str | None, *, coupled: bool) -> Section:
    """Measure and name every placement asked for."""
    section = Section({}, [], {})
    for where in placements(subject) if placement is None else (placement,):
        section.gradient[where] = _coupled(subject, where) if coupled else _single(subject, where, section)
    reached = [where for where, found in section.gradient.items() if found["verdict"] == target]
    for where, found in section.gradient.items():
        wrong = found["verdict"] != target
        level = "error" if wrong and (placement is not None or not reached) else "info"
        numbers = {key: found[key] for key in ("verdict", "scale", "relative_bias", "cosine")}
        message = f"in the {PLACE[where]}, {sentence(found, target, where)}"
        section.findings.append(Finding("gradient", level, message, numbers))
        if not coupled:
            section.findings.extend(_after_drift(subject, where, found))
    return section


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


def _single(subject: Subject, placement: str, section: Section) -> dict[str, Any]:
    slow = isinstance(subject, Function) and subject.kind == "loss"
    measured = [measure(subject, placement, m) for m in models(LENGTHS, 1 if slow else 2)]
    section.measured[placement] = measured
    found = [(m.model, m.mean) for m in measured]
    named = classify(found, subject.tolerance, dead=all(m.dead for m in measured))
    return {
        **_described(named, found, _at_identity(lambda m: measure(subject, placement, m).mean)),
        "reference_matters": _reference_matters(subject, placement, measured[-1]),
    }


def _described(named: Named, found: Found, at_identity: float) -> dict[str, Any]:
    fixed, ends = ([(m, g) for m, g in found if m.ends is kind] for kind in (False, True))
    return {
        "verdict": named.verdict, "name": named.name, "factor": named.scale, "only_fixed_length": named.only_fixed,
        "at_identity": at_identity, **comparison(fixed), "with_end_token": comparison(ends),
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


def _coupled(subject: Subject, placement: str) -> dict[str, Any]:
    """By groups of 2, 3 and 4 sequences: what it is, and how its size depends on the group's."""
    assert isinstance(subject, Function)
    by_size = {n: [(m, group_gradient(subject, placement, m, n)) for m in group_models(n)] for n in GROUPS}
    named = classify(by_size[2], subject.tolerance)
    ratios = {n: _ratio(found, by_size[2], named, subject.tolerance) for n, found in by_size.items()}
    same = all(r is not None and abs(r - 1) <= max(1e-6, 2 * subject.tolerance) for r in ratios.values())
    if None in ratios.values():
        named = replace(named, verdict="other", name=f"{named.name} in groups of 2, something else in larger ones")
    elif not same and named.verdict in ("sequence", "token"):
        named = replace(named, verdict=f"scaled-{named.verdict}")
    elif not same and named.verdict in ("token-forward", "future"):
        named = replace(named, verdict="divergence")
    return {
        **_described(named, by_size[2], _at_identity(lambda m: group_gradient(subject, placement, m, 2))),
        "reference_matters": True,
        "by_group_size": {n: r and _times(named.scale, r) for n, r in ratios.items()},
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


def _times(scale: float | dict[int, float], ratio: float) -> float | dict[int, float]:
    return {n: s * ratio for n, s in scale.items()} if isinstance(scale, dict) else scale * ratio
