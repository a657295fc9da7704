"""Is what it returns an estimate of the KL at all? Expectation, sign, identity, support."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from klgrad.analysis.checking.measuring import Subject
from klgrad.analysis.checking.models import LENGTHS, Model, each_row, models, with_reference
from klgrad.analysis.checking.report import Finding
from klgrad.analysis.checking.subject import BuiltIn
from klgrad.synth.enumeration import Batch, rows_of

_REPEATED = 1e-6  # what the same arithmetic on the same numbers may differ by


def outcomes(subject: Subject, m: Model, *, coupled: bool) -> tuple[np.ndarray, np.ndarray]:
    """Every value there is and its probability: of sequences, or where rows depend on each other of pairs of them."""
    if not coupled:
        return by_sequence(subject, m), m.probability
    pairs = list(itertools.product(range(len(m.probability)), repeat=2))
    found = [subject.evaluate(rows_of(m.batch, list(pair)), differentiate=False).by_sequence.mean() for pair in pairs]
    return np.array(found), np.array([m.probability[list(pair)].prod() for pair in pairs])


def by_sequence(subject: Subject, model: Model) -> np.ndarray:
    """``[M]`` each sequence's penalty; a loss is called with one sequence at a time."""
    if subject.kind != "loss":
        return subject.evaluate(model.batch, differentiate=False).by_sequence
    return np.array([float(subject.evaluate(row, differentiate=False).value) for row in each_row(model.batch)])


def examine(
    subject: Subject, *, coupled: bool, surrogate: bool = False, kl: bool = True
) -> tuple[dict[str, Any], list[Finding]]:
    """The value's part of a report.

    A loss is a surrogate: its value need not be the KL, so what is amiss there is told and not held against it.

    Args:
        surrogate: a term that gives the wanted gradient in the loss alone: its value may be anything too.
        kl: what is wanted is the gradient of a KL, whose value is 0 where policy and reference agree.
    """
    loose = not kl or subject.kind == "loss" or subject.returns == "return" or coupled
    longest = 2 if coupled else 4 if subject.kind == "loss" else LENGTHS[-1]  # a loss is called row by row
    chosen = [m for m in models(LENGTHS, 1) if m.length <= longest]
    each = [outcomes(subject, m, coupled=coupled) for m in chosen]
    expected = [float(weight @ value) for value, weight in each]
    shown = max((i for i, m in enumerate(chosen) if not m.ends), key=lambda i: chosen[i].length)
    ratios = np.array([e / m.kl for e, m in zip(expected, chosen, strict=True)])
    relative = float(np.abs(ratios - 1).max())
    worst = int(np.argmax(np.abs(ratios - 1))) if abs(ratios[shown] - 1) < 0.01 else shown
    lowest = min(float(value.min()) for value, _ in each)
    identity = max(_at_identity(subject, m, coupled=coupled) for m in chosen if m.length <= 4)
    unbiased = relative <= 10 * subject.tolerance
    nothing = max(float(np.abs(value).max()) for value, _ in each) <= 1e-12
    numbers = {
        "expected": expected[shown], "kl": chosen[shown].kl, "bias": expected[shown] - chosen[shown].kl,
        "relative_bias": relative, "nonnegative": lowest >= -1e-9, "always_zero": nothing,
        "zero_at_identity": identity <= _REPEATED, "at_identity": identity,
        "support_mismatch": None if coupled else support_mismatch(subject),
        "impossible_token": None if coupled else impossible_token(subject),
        "coarse": subject.tolerance > 1e-3,
        "exchanged": not (loose or unbiased or nothing) and is_exchanged(subject),
    }  # fmt: skip
    said = f"{expected[worst]:.4g} where the KL is {chosen[worst].kl:.4g}"
    found = list(_estimate(numbers, said, ratios, loose=loose, surrogate=surrogate, unbiased=unbiased))
    found += _identity(numbers, subject.tolerance, loose=loose, surrogate=surrogate)
    found += _support(numbers, loose=loose or surrogate, unbiased=unbiased)
    return numbers, found


def _finding(level: str, message: str, numbers: dict[str, Any], *keys: str) -> Finding:
    return Finding("value", level, message, {key: numbers[key] for key in keys})


def _estimate(
    numbers: dict[str, Any], said: str, ratios: np.ndarray, *, loose: bool, surrogate: bool, unbiased: bool
) -> Iterator[Finding]:
    """Is its expectation the KL?"""
    keys = ("expected", "kl", "bias")
    if numbers["always_zero"]:
        level = "info" if loose or surrogate else "error"
        yield _finding(
            level,
            "it is 0 for every sample, whatever policy and reference are: both sides are the same log-probs, or the "
            "term never enters",
            numbers,
            *keys,
        )
    elif unbiased:
        off = numbers["relative_bias"]
        much = "exactly" if off <= 1e-6 else f"within {100 * off:.2g} % of"
        yield _finding("info", f"the expected value is {much} the sequence-level KL", numbers, *keys)
    elif loose or surrogate:
        yield _finding(
            "info",
            f"a surrogate: its expected value, {said}, is no estimate of the KL, and need not be: log the KL apart",
            numbers,
            *keys,
        )
    elif numbers["expected"] < 0 or not np.isfinite(numbers["expected"]):
        mirrored = bool(np.isfinite(ratios).all() and np.ptp(ratios) <= 1e-3 * abs(ratios[0]))
        mend = (
            "flip its sign, or say that it returns a reward"
            if mirrored
            else "single terms of a KL are negative and only their whole sum is not: terms are clipped, weighted or "
            "left out before the sum"
            if numbers["zero_at_identity"]
            else "what it compares is not policy and reference on the same tokens at the same temperature"
        )
        yield _finding("error", f"the expected value is {said}: no KL is negative or undefined; {mend}", numbers, *keys)
    else:
        mend = (
            "what the rounding of half precision leaves of it"
            if numbers["coarse"]
            else "with policy and reference exchanged it is exactly the KL: are the two arguments swapped?"
            if numbers["exchanged"]
            else "do not log it as the KL"
        )
        yield _finding(
            "warning",
            f"the expected value is {said} (relative bias up to {numbers['relative_bias']:.3g}): {mend}",
            numbers,
            *keys,
        )
    if not (loose or surrogate or numbers["nonnegative"]):
        yield _finding("info", "single estimates can be negative; their mean is what counts", numbers, "nonnegative")


def _identity(numbers: dict[str, Any], tolerance: float, *, loose: bool, surrogate: bool) -> Iterator[Finding]:
    """Is it 0 where policy and reference are the same?"""
    if numbers["zero_at_identity"]:
        return
    floor = numbers["at_identity"]
    if tolerance > _REPEATED and floor <= tolerance:
        yield _finding(
            "warning",
            f"with equal log-probs it is {floor:.3g}, not 0: the floor of the precision it computes in; a logged KL "
            "below that says nothing",
            numbers,
            "at_identity",
        )
        return
    level = "info" if loose or surrogate else "error"
    yield _finding(
        level,
        f"with equal log-probs it is {floor:.4g}, not 0"
        + ("" if loose else ": the two are misaligned, scaled apart, or not compared at all"),
        numbers,
        "at_identity",
    )


def _support(numbers: dict[str, Any], *, loose: bool, unbiased: bool) -> Iterator[Finding]:
    """What becomes of probability 0?"""
    support, impossible = numbers["support_mismatch"], numbers["impossible_token"]
    if support == "nan":
        yield replace(
            _finding(
                "warning",
                "a token that the reference cannot emit gives NaN (the KL is infinite): guard -inf before subtracting "
                "or multiplying",
                numbers,
                "support_mismatch",
            ),
            robust=True,
        )
    elif support == "-inf" and not loose:
        message = "a token that the reference cannot emit gives -inf: the KL is +inf"
        yield _finding("error", message, numbers, "support_mismatch")
    elif support == "finite" and unbiased and not loose:
        yield _finding(
            "warning",
            "a token that the reference cannot emit gives a quiet finite number (the KL is infinite): a clamp hides "
            "the mismatch",
            numbers,
            "support_mismatch",
        )
    if impossible not in (None, "finite"):
        yield replace(_finding(
            "warning",
            f"a token that neither can emit (-inf in both, as a mask on the vocabulary leaves it) makes the "
            f"{impossible} NaN or infinite, where it adds nothing: 0 x (-inf - -inf); replace both by 0 with where() "
            "before subtracting",
            numbers,
            "impossible_token",
        ), robust=True)  # fmt: skip


def _at_identity(subject: Subject, m: Model, *, coupled: bool) -> float:
    same = with_reference(m, m.pair.policy.log_probs)
    worst = float(np.abs(outcomes(subject, same, coupled=coupled)[0]).max())
    return worst if np.isfinite(worst) else float("inf")


def is_exchanged(subject: Subject) -> bool:
    """Whether its expected value would be the KL with policy and reference changed for each other."""
    for m in models((2,), 1):
        b = m.batch
        other = replace(
            b, log_probs=b.reference, reference=b.log_probs, full_log_probs=b.full_reference,
            full_reference=b.full_log_probs,
        )  # fmt: skip
        value = subject.evaluate(other, differentiate=False).by_sequence
        if not abs(float(m.probability @ value) - m.kl) <= 10 * subject.tolerance * m.kl:
            return False
    return True


def impossible_token(subject: Subject) -> str | None:
    """What is not finite where the vocabulary holds a token of probability 0 for both: ``value``, ``gradient``.

    ``finite`` where nothing is; None for what does not look at the vocabulary.
    """
    takes = subject.configuration.estimator.full if isinstance(subject, BuiltIn) else subject.plan.full
    if not takes:
        return None
    (m,) = (m for m in models((2,), 1) if m.ends)
    rows = rows_of(m.batch, [0])
    masked = np.arange(rows.full_log_probs.shape[-1]) == int(rows.tokens[0, 0] + 1)
    full, reference = (np.where(masked, -np.inf, a) for a in (rows.full_log_probs, rows.full_reference))
    autograd = isinstance(subject, BuiltIn) or subject.backend == "torch"
    terms = subject.evaluate(replace(rows, full_log_probs=full, full_reference=reference), differentiate=autograd)
    if not np.isfinite(terms.by_sequence).all():
        return "value"
    return "finite" if terms.vocab is None or np.isfinite(terms.vocab).all() else "gradient"


def support_mismatch(subject: Subject) -> str:
    """What comes out where the reference has no mass on a sampled token: ``inf``, ``-inf``, ``nan`` or ``finite``."""
    (m,) = (m for m in models((2,), 1) if not m.ends)
    rows = rows_of(m.batch, [0])
    token = int(rows.tokens[0, 1])
    reference, full = np.array(rows.reference), np.array(rows.full_reference)
    reference[0, 1] = -np.inf
    full[0, 1] = np.where(np.arange(full.shape[-1]) == token, -np.inf, 0.0)
    with np.errstate(all="ignore"):
        value = subject.evaluate(replace(rows, reference=reference, full_reference=full), differentiate=False)
    total = float(value.by_sequence.sum())
    if np.isnan(total):
        return "nan"
    return "finite" if np.isfinite(total) else ("inf" if total > 0 else "-inf")


def one_token(log_probs: np.ndarray, reference: np.ndarray) -> Batch:
    """``[n, 1]`` single tokens of a two-word vocabulary with these log-probs, the other word taking the rest."""
    n = len(log_probs)

    def full(taken: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.stack([taken, np.log(-np.expm1(np.minimum(taken, -1e-300)))], axis=-1)[:, None]

    column = (log_probs[:, None], reference[:, None], log_probs[:, None])
    tokens, mask = np.zeros((n, 1), np.int64), np.ones((n, 1), bool)
    return Batch(tokens, mask, *column, full(log_probs), full(reference))
