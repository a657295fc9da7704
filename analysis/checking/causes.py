"""Why it is another gradient than the one wanted: counterfactual calls, each of which tells one cause from others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from klgrad.analysis.checking import coefficients, numerics, ratios
from klgrad.analysis.checking.calling import Fault
from klgrad.analysis.checking.gradient import sees_all
from klgrad.analysis.checking.measuring import measure
from klgrad.analysis.checking.models import models, vocabularies
from klgrad.analysis.checking.naming import classify
from klgrad.analysis.checking.probing import apart, probe, real
from klgrad.analysis.checking.subject import BuiltIn, Function, Terms
from klgrad.analysis.checking.targets import Target
from klgrad.synth.enumeration import Batch

_REACH = 5.0  # log-ratios that the probe models have
_LOGS = ("log_probs", "reference", "behaviour")


@dataclass(frozen=True)
class Cause:
    """A cause.

    Args:
        kind: one word, for what to write instead.
        what: in plain words.
        mend: what to do.
    """

    kind: str
    what: str
    mend: str


def find(subject: BuiltIn | Function, target: Target, placement: str, found: dict[str, Any]) -> Cause | None:
    """The first cause that shows; None for built-ins, and where none does."""
    if isinstance(subject, BuiltIn):
        return None
    for look in (_logits, _ratio, _rewards, _misaligned, _shifted_inside, _places, _clamped, _terms):
        try:
            cause = look(subject, target, placement, found)
        except Fault:
            continue
        if cause is not None:
            return cause
    return None


def _verdict(subject: Function, target: Target, placement: str) -> tuple[str, float]:
    """What it is named on a few models, and how hard it still pushes: for a subject that is changed."""
    chosen = [*(m for m in models((2, 4), 1)), *vocabularies()[:6]]
    measured = [(m, measure(subject, placement, m)) for m in chosen]
    named = classify([(m, x.mean) for m, x in measured], subject.tolerance,
                     dead=all(x.dead for _, x in measured),
                     known=target.known(placement, full=sees_all(subject)))  # fmt: skip
    reached = named.name in target.fields or named.verdict in ("sequence", "token", "token-forward", "future")
    return (named.name if reached and named.one else ""), named.off


def _clamped(subject: Function, target: Target, placement: str, found: dict[str, Any]) -> Cause | None:
    """A clamp within reach of ordinary log-ratios."""
    clamps = numerics.clamps(subject, coupled=bool(found.get("by_group_size")))
    near = [edge for edge in clamps.thresholds if abs(edge) < _REACH]
    if not near or found["verdict"] == "dead":
        return None
    at = " and ".join(f"{edge:.4g}" for edge in near)
    what = "clamped at 0, which kills the gradient wherever the log-ratio is negative" if clamps.at_zero else (
        f"clamped: no gradient is left for log pi/pi_ref {clamps.held}")  # fmt: skip
    return Cause("clamp", f"it is {what} (threshold {at})", "leave the clamp out, or put it where only overflow is")


def _terms(subject: Function, target: Target, placement: str, found: dict[str, Any]) -> Cause | None:
    """A sum over the vocabulary that is none of the known divergences: its terms are not those of a KL."""
    if not subject.plan.full or found["verdict"] not in ("other", "wrong-sign") or found["at_identity"] > 1e-3:
        return None
    if found["by"] or found["only_fixed_length"] or subject.kind == "loss":
        return None
    return Cause("terms", "the terms of the vocabulary are clipped, weighted or left out before the sum: single "
                 "terms of a KL are negative, and only their whole sum is a KL", "sum pi * log(pi / pi_ref) over all "
                 "tokens first")  # fmt: skip


def _logits(subject: Function, target: Target, placement: str, found: dict[str, Any]) -> Cause | None:
    """Right, or at least another, once it is given log-probs."""
    if not (subject.plan.takes("logits") or subject.plan.takes("reference_logits")):
        return None
    calm = replace(subject, plan=subject.plan.normalised)
    batch = probe()
    if not apart(real(batch, subject.evaluate(batch)), real(batch, calm.evaluate(batch)), subject.tolerance):
        return None
    return Cause("logits", "its logits are used as if they were log-probs: another constant added to all logits of a "
                 "place changes the result", "normalise first, logits.log_softmax(-1); if it is given log-probs, say "
                 "so with --map logits=full_log_probs")  # fmt: skip


def _ratio(subject: Function, target: Target, placement: str, found: dict[str, Any]) -> Cause | None:
    if ratios.law(subject, placement).power != -1:
        return None
    return Cause("ratio", ratios.INVERTED, ratios.INVERT)


def _rewards(subject: Function, target: Target, placement: str, found: dict[str, Any]) -> Cause | None:
    if not subject.rewarded or found.get("by_group_size"):
        return None
    times = coefficients.multiplied(subject, probe())
    return Cause("rewards", times[0].message.partition("; ")[0], times[0].mend) if times else None


# ------------------------------------------------------------------------------------------ places


def _changed(batch: Batch, where: np.ndarray, roles: tuple[str, ...] = _LOGS) -> Batch:
    """The batch with other log-probs at some places; the full ones of those places follow."""
    rng = np.random.default_rng(5)
    fields: dict[str, Any] = {}
    for role in roles:
        fields[role] = np.where(where, -rng.exponential(size=batch.mask.shape) - 0.1, getattr(batch, role))
    for role, full in (("log_probs", "full_log_probs"), ("reference", "full_reference")):
        if role in roles:
            table = np.asarray(getattr(batch, full))
            other = rng.normal(size=table.shape)
            other = other - np.log(np.exp(other).sum(-1, keepdims=True))
            fields[full] = np.where(where[..., None], other, table)
    return replace(batch, **fields)


def _moves(subject: Function, batch: Batch, where: np.ndarray) -> bool:
    """Whether what stands at these places has any effect: on a value, or on a gradient anywhere."""
    here, there = (subject.evaluate(x) for x in (batch, _changed(batch, where)))
    return bool(apart(_all(here), _all(there), subject.tolerance))


def _all(terms: Terms) -> np.ndarray:
    assert terms.token is not None
    parts = [terms.value.ravel(), terms.token.ravel()]
    return np.nan_to_num(np.concatenate(parts if terms.vocab is None else [*parts, terms.vocab.ravel()]))


def _places(subject: Function, target: Target, placement: str, found: dict[str, Any]) -> Cause | None:
    """Which real tokens have no effect, which padded ones have, and which place looks at which."""
    batch = probe()
    mask = np.asarray(batch.mask)
    index = np.arange(mask.shape[1])
    count = mask.sum(axis=1, keepdims=True)
    last, first, after = mask & (index == count - 1), mask & (index == 0), ~mask & (index == count)
    # a prompt of one token is not among the rows: every place of a reply counts
    lost_last, lost_first, padded = not _moves(subject, batch, last), not _moves(subject, batch, first), False
    if subject.plan.takes("mask"):
        padded = _moves(subject, batch, after)
    if padded and lost_first:
        return Cause("mask", "the mask is shifted by one against the log-probs: the first token has no effect, the "
                     "first padded place has",
                     "use the mask that belongs to the same places as the log-probs")  # fmt: skip
    if lost_last and lost_first and not padded:
        return (
            None
            if not _moves(subject, batch, mask)
            else Cause(
                "mask",
                "neither the first nor the last real token's log-prob has an effect",
                "mask only what is no token",
            )
        )
    if lost_last:
        return Cause("mask", "the last real token's log-prob has no effect: the end token is dropped, or the mask is "
                     "shifted by one", "keep the end token in the mask: the policy chose it too")  # fmt: skip
    if lost_first:
        return Cause("mask", "the first token's log-prob has no effect: the mask, or a slice, begins one place late",
                     "let the mask begin with the first sampled token")  # fmt: skip
    if padded:
        return Cause("mask", "padded places count: what stands right after the last token has an effect",
                     "mask with where() before anything is summed")  # fmt: skip
    return None


def _misaligned(subject: Function, target: Target, placement: str, found: dict[str, Any]) -> Cause | None:
    """Places whose result follows another place's reference: everything is shifted by one."""
    (m,) = (m for m in models((4,), 1) if not m.ends)
    batch = m.batch
    length = batch.mask.shape[1]
    own, other = [], []
    base = subject.evaluate(batch)
    for place in range(1, length - 1):
        where = np.broadcast_to(np.arange(length) == place, batch.mask.shape)
        terms = subject.evaluate(_changed(batch, where, ("reference",)))
        moved = _by_place(base, terms, subject.tolerance)
        own.append(place in moved)
        other.append({at - place for at in moved})
    shifts = set.union(*other) if other else set()
    if len(shifts) != 1 or 0 in shifts or any(own):
        return None
    (shift,) = shifts
    return Cause("shift", f"policy and reference are shifted by one against each other: place t is compared with the "
                 f"reference's place t {'+' if shift < 0 else '-'} {abs(shift)}",
                 "compare the same tokens: log-probs are "
                 "given aligned, place t for token t")  # fmt: skip


def _by_place(before: Terms, after: Terms, tolerance: float) -> set[int]:
    """The places at which value or gradient differ."""
    assert before.token is not None
    assert after.token is not None
    off = np.abs(before.token - after.token)
    if before.value.ndim == 2:
        off = off + np.abs(before.value - after.value)
    if before.vocab is not None and after.vocab is not None:
        off = off + np.abs(before.vocab - after.vocab).sum(axis=-1)
    worst = np.asarray(off.max(axis=0))
    return (
        set(np.flatnonzero(worst > 1e-6 * max(float(worst.max()), 1e-12)).tolist())
        if worst.max() > tolerance
        else set()
    )


# ------------------------------------------------------------------------------------------ a shift inside


def _with_prompt(function: Callable[..., Any], roles: dict[str, str]) -> Callable[..., Any]:
    """The function as Hugging Face code is called: one prompt token in front, logits[t] predicting token t + 1."""

    def called(**given: Any) -> Any:
        import torch

        moved = {}
        for name, value in given.items():
            role = roles.get(name, "")
            if role in ("logits", "full_log_probs", "reference_logits", "full_reference"):
                moved[name] = torch.cat([value, value[:, -1:].detach()], 1)
            elif role in ("tokens", "mask", *_LOGS):
                moved[name] = torch.cat([torch.zeros_like(value[:, :1]), value], 1)
            else:
                moved[name] = value
        return function(**moved)

    return called


def _shifted_inside(subject: Function, target: Target, placement: str, found: dict[str, Any]) -> Cause | None:
    """Right once its logits predict the next token: it shifts inside."""
    if not subject.plan.full or subject.backend != "torch" or subject.plan.positional or subject.kind != "loss":
        return None
    moved = replace(subject, function=_with_prompt(subject.function, subject.plan.roles))
    name, _ = _verdict(moved, target, placement)
    if not name:
        return None
    return Cause("shifted", f"it shifts inside (logits[:, :-1] against ids[:, 1:]), and klgrad's logits[t] predict "
                 f"token t already; given the logits of the next token it is the {name} gradient",
                 "leave the shift to the "
                 "caller, or check the function after it")  # fmt: skip
