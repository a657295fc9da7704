"""Which field is the expected gradient, placement by placement, at every length, without and with an end token?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.analysis.checking.models import LENGTHS, Model, drifted, models, with_reference
from klgrad.analysis.checking.report import PLACE, WANTED, Finding
from klgrad.analysis.checking.subject import BuiltIn, Function
from klgrad.analysis.verdicts import phrase
from klgrad.synth.configurations import PLACEMENTS
from klgrad.synth.enumeration import rows_of
from klgrad.synth.moments import moments
from klgrad.synth.policies import log_softmax

if TYPE_CHECKING:
    from jaxtyping import Float

Subject = BuiltIn | Function
GROUPS = (2, 3, 4)
_MOST_GROUPS = 600


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

    A loss is called with one sequence at a time; a token or sequence term with all of them, since rows are
    independent (``groups`` serves those where they are not).
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
    batch = model.batch
    if subject.kind != "loss":
        return model.gradients(*_weights(subject, placement, batch, beta))
    terms = [subject.evaluate(rows_of(batch, [i]), beta=beta) for i in range(len(model.probability))]
    token = np.concatenate([t.token for t in terms if t.token is not None])
    vocab = [t.vocab for t in terms if t.vocab is not None]
    return model.gradients(token, np.concatenate(vocab) if vocab else None)


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


# ------------------------------------------------------------------------------------------------ which field


@dataclass(frozen=True)
class Named:
    """A verdict on expected gradients.

    Args:
        verdict: the vocabulary's word.
        name: the field, spelled out.
        scale: the factor on it: one number, or one per length where it depends on the length.
        only_fixed: the field fits at fixed length and not with an end token.
    """

    verdict: str
    name: str
    scale: float | dict[int, float] = 1.0
    only_fixed: bool = False


def classify(found: Sequence[tuple[Model, np.ndarray]], tolerance: float, *, dead: bool = False) -> Named:
    """Name the field that these expected gradients are.

    Args:
        found: models and the gradient on each.
        tolerance: relative.
        dead: every single sample's gradient is zero.
    """
    if dead:
        return Named("dead", "zero for every sample", 0.0)
    size = max(float(np.linalg.norm(m.truth)) for m, _ in found)
    if not all(np.isfinite(g).all() for _, g in found):
        return Named("other", "not finite")
    if max(float(np.linalg.norm(g)) for _, g in found) <= tolerance * size:
        return Named("zero", "zero in expectation", 0.0)
    names = list(found[0][0].fields)
    for name in names:
        scales = _scales(found, name, tolerance)
        if scales is not None and _constant(scales, tolerance):
            return _named(name, float(np.median(list(scales.values()))), tolerance)
    for some, only_fixed in ((found, False), ([(m, g) for m, g in found if not m.ends], True)):
        for name in names[:3]:
            scales = _scales(some, name, tolerance) if len({m.length for m, _ in some}) > 1 else None
            if scales is not None and (only_fixed or not _constant(scales, tolerance)):
                clean = _named(name, 2.0 * np.sign(next(iter(scales.values()))), tolerance)
                return Named(clean.verdict, clean.name, scales, only_fixed)
    return _combination(found, names, tolerance) or Named("other", "no combination of known fields")


def _named(name: str, scale: float, tolerance: float) -> Named:
    one = abs(scale - 1) <= 10 * tolerance
    if name in ("sequence", "token") and scale < 0:
        return Named("wrong-sign", name, scale)
    if name in ("sequence", "token"):
        return Named(name if one else f"scaled-{name}", name, scale)
    if name in ("token-forward", "future") and one:
        return Named(name, name, scale)
    spelled = {"token-forward": "token-level forward KL", "future": "the future term alone"}.get(name, name)
    return Named("divergence", spelled, scale)


def _constant(scales: dict[int, float], tolerance: float) -> bool:
    values = list(scales.values())
    return max(values) - min(values) <= 10 * tolerance * max(map(abs, values))


def _scales(found: Sequence[tuple[Model, np.ndarray]], name: str, tolerance: float) -> dict[int, float] | None:
    """Length -> factor of the field, or None where the gradients are not multiples of it."""
    scales = {}
    for length in sorted({m.length for m, _ in found}):
        g = np.concatenate([g for m, g in found if m.length == length])
        f = np.concatenate([m.fields[name] for m, _ in found if m.length == length])
        truth = np.concatenate([m.truth for m, _ in found if m.length == length])
        size = float(f @ f)
        scale = float(g @ f) / size if size > (1e-12 * float(truth @ truth)) else 0.0
        if np.linalg.norm(g - scale * f) > tolerance * max(float(np.linalg.norm(g)), float(np.linalg.norm(truth))):
            return None
        if scale:
            scales[length] = scale
    return scales or None


def _combination(found: Sequence[tuple[Model, np.ndarray]], names: list[str], tolerance: float) -> Named | None:
    """Two or three fields with the same factors on all models, the usual ones first."""
    found = [(m, g) for m, g in found if m.length > 1] or list(found)
    g = np.concatenate([g for _, g in found])
    columns = {name: np.concatenate([m.fields[name] for m, _ in found]) for name in names}
    for usual, several in ((names[:3], 2), (names, 2), (names, 3)):
        for fields in itertools.combinations(usual, several):
            table = np.stack([columns[name] for name in fields], axis=1)
            weights = np.linalg.lstsq(table, g, rcond=None)[0]
            if np.linalg.norm(table @ weights - g) <= tolerance * float(np.linalg.norm(g)):
                return Named("other", phrase([round(w, 4) for w in weights.tolist()], fields))
    return None


# ----------------------------------------------------------------------------------------------- the section


def comparison(found: Sequence[tuple[Model, np.ndarray]]) -> dict[str, dict[int, float | None]]:
    """``scale``, ``relative_bias`` and ``cosine`` to the sequence-level gradient, by length."""
    out: dict[str, dict[int, float | None]] = {"scale": {}, "relative_bias": {}, "cosine": {}}
    for length in sorted({m.length for m, _ in found}):
        g = np.concatenate([g for m, g in found if m.length == length])
        truth = np.concatenate([m.truth for m, _ in found if m.length == length])
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
        section.gradient[where] = (_coupled if coupled else _single)(subject, where, section)
    reached = [where for where, found in section.gradient.items() if found["verdict"] == target]
    for where, found in section.gradient.items():
        wrong = found["verdict"] != target
        level = "error" if wrong and (placement is not None or not reached) else "info"
        numbers = {key: found[key] for key in ("verdict", "scale", "relative_bias", "cosine")}
        message = f"in the {PLACE[where]}, {sentence(found, target)}"
        section.findings.append(Finding("gradient", level, message, numbers))
        if not coupled:
            section.findings.extend(_after_drift(subject, where, found))
    return section


def _after_drift(subject: Subject, placement: str, found: dict[str, Any]) -> list[Finding]:
    """A clamp shows only where policy and reference have come apart."""
    far = drifted()
    field, factor = far.fields.get(found["name"]), found["factor"]
    if field is None or not isinstance(factor, float):
        return []
    got = measure(subject, placement, far).mean
    off = float(np.linalg.norm(got - factor * field) / np.linalg.norm(factor * field))
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
    fixed, ends = ([(m, g) for m, g in found if m.ends is kind] for kind in (False, True))
    return {
        "verdict": named.verdict, "name": named.name, "factor": named.scale, "only_fixed_length": named.only_fixed,
        "reference_matters": _reference_matters(subject, placement, measured[-1]),
        **comparison(fixed), "with_end_token": comparison(ends),
    }  # fmt: skip


def _reference_matters(subject: Subject, placement: str, here: Measured) -> bool:
    other = with_reference(here.model, log_softmax(-here.model.pair.reference))
    changed = measure(subject, placement, other)
    if here.variance is None or changed.variance is None:
        return True
    return not (
        np.allclose(here.mean, changed.mean, rtol=0, atol=1e-12) and np.isclose(here.variance, changed.variance)
    )


def _coupled(subject: Subject, placement: str, section: Section) -> dict[str, Any]:
    """By groups of 2, 3 and 4 sequences: what it is, and how its size depends on the group's."""
    assert isinstance(subject, Function)
    by_size = {n: [(m, group_gradient(subject, placement, m, n)) for m in group_models(n)] for n in GROUPS}
    named = {n: classify(found, subject.tolerance) for n, found in by_size.items()}
    largest = named[2]
    scales = {n: v.scale for n, v in named.items()}
    found = by_size[2]
    steady = len({(v.verdict, v.name) for v in named.values()}) == 1
    same = steady and all(isinstance(s, float) and abs(s - 1) <= 1e-6 for s in scales.values())
    verdict = largest.verdict if steady else "other"
    if steady and not same and verdict in ("sequence", "token"):
        verdict = f"scaled-{verdict}"
    fixed, ends = ([(m, g) for m, g in found if m.ends is kind] for kind in (False, True))
    return {
        "verdict": verdict, "name": largest.name if steady else "; ".join(f"{n}: {v.name}" for n, v in named.items()),
        "factor": largest.scale, "only_fixed_length": largest.only_fixed, "reference_matters": True,
        "by_group_size": {n: v.scale for n, v in named.items()},
        **comparison(fixed), "with_end_token": comparison(ends) if ends else {},
    }  # fmt: skip


def sentence(found: dict[str, Any], target: str) -> str:
    """The verdict in plain words, with its number, why it matters and what to do."""
    verdict, scale = found["verdict"], found["factor"]
    worst = max((v for v in found["relative_bias"].values() if v is not None), default=0.0)
    cosines = [v for v in found["cosine"].values() if v is not None]
    far = f"relative bias {worst:.3g}" + (f", cosine down to {min(cosines):.3f}" if cosines else "")
    if found.get("by_group_size"):
        return _group_sentence(found, target)
    if verdict in WANTED and verdict == target:
        return f"the expected gradient is exactly the {WANTED[verdict]} gradient"
    free = "" if found["reference_matters"] else ", and it does not depend on the reference"
    words = {
        "sequence": "it is the sequence-level reverse-KL gradient, the future term included",
        "token": "it is the token-level reverse-KL gradient: the future term, what a token does to later KL, is "
        f"missing ({far}); for the sequence-level gradient put k1 in the reward, whole-sequence or reward-to-go",
        "token-forward": f"it descends the token-level forward KL(pi_ref || pi), not the reverse KL ({far}): "
        "an unbiased value does not make an unbiased gradient",
        "zero": "its expected gradient is zero: pure noise that holds nothing back"
        f"{free}; put the estimate in the reward instead",
        "dead": "the gradient is zero for every sample: detached, under no_grad, or clamped flat; "
        "logged, never optimised",
        "future": f"it is the future term alone: a token's own KL is missing ({far}); differentiate the exact "
        "per-position KL as well (placement both)",
        "divergence": f"it optimises another divergence: {_factor(scale)}{found['name']} ({far}){free}",
    }
    if verdict in words:
        return words[verdict]
    if verdict == "wrong-sign":
        size = _factor(scale, signed=False)
        return f"the sign is wrong: minus {size}the {found['name']}-level gradient, so drift is rewarded; negate it"
    if verdict.startswith("scaled-"):
        return _scaled_sentence(found, verdict.removeprefix("scaled-"))
    return f"it is no gradient of a known objective: {found['name']} ({far}){free}"


def _factor(scale: float | dict[int, float], *, signed: bool = True) -> str:
    if isinstance(scale, dict):
        return "a length-dependent multiple of "
    size = scale if signed else abs(scale)
    return "" if abs(size - 1) < 1e-6 else f"{size:.6g} times "


def _scaled_sentence(found: dict[str, Any], field: str) -> str:
    scale = found["factor"]
    what = f"the {WANTED[field]} gradient"
    if not isinstance(scale, dict):
        return (
            f"it is {scale:.6g} times {what}: the penalty's strength is {scale:.6g} beta, not beta; "
            f"divide by {scale:.6g}"
        )
    law = _law(scale)
    ends = "; with an end token it is no multiple of it at all, since replies of different length weigh differently"
    return (
        f"it is {what} scaled by {law}: the effective beta depends on the length (for "
        + ", ".join(f"T = {n}: {s:.4g}" for n, s in scale.items())
        + f"){ends if found['only_fixed_length'] else ''}; sum over tokens, or divide by a constant"
    )


def _law(scales: dict[int, float]) -> str:
    first = next(iter(scales.values())) * next(iter(scales))
    if all(abs(s * n - first) <= 1e-4 * abs(first) for n, s in scales.items()):
        return "1/T" if abs(first - 1) < 1e-4 else f"{first:.4g}/T"
    return "a factor that depends on the length"


def _group_sentence(found: dict[str, Any], target: str) -> str:
    scales = found["by_group_size"]
    sizes = ", ".join(f"G = {n}: {s:.4g}" if isinstance(s, float) else f"G = {n}: by length" for n, s in scales.items())
    start = "rows of a batch depend on each other; over all groups of G sequences "
    if found["verdict"] == target:
        return f"{start}the expected gradient is exactly the {WANTED[target]} gradient"
    if all(isinstance(s, float) and abs(s - (n - 1) / n) < 1e-4 for n, s in scales.items()):
        law = " = (G - 1)/G: the sequence's own value is part of its baseline; leave it out"
    elif all(isinstance(s, float) and abs(s - n) < 1e-4 for n, s in scales.items()):
        law = " = G: it sums over the batch where a mean is meant"
    elif found["verdict"].startswith("scaled-") and isinstance(found["factor"], dict):
        return start + _scaled_sentence(found, found["verdict"].removeprefix("scaled-"))
    else:
        law = ""
    return f"{start}it is {found['verdict']} ({found['name']}), factor by group size: {sizes}{law}"
