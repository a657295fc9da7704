"""Is what it returns an estimate of the KL at all? Expectation, sign, identity, support."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

from klgrad.analysis.checking.gradient import Subject
from klgrad.analysis.checking.models import LENGTHS, Model, models, with_reference
from klgrad.analysis.checking.report import Finding
from klgrad.synth.enumeration import Batch, rows_of


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
    rows = range(len(model.probability))
    return np.array([float(subject.evaluate(rows_of(model.batch, [i]), differentiate=False).value) for i in rows])


def examine(subject: Subject, *, coupled: bool) -> tuple[dict[str, Any], list[Finding]]:
    """The value's part of a report.

    A loss is a surrogate: its value need not be the KL, so what is amiss there is told and not held against it.
    """
    loose = subject.kind == "loss" or subject.returns == "return" or coupled
    chosen = [m for m in models(LENGTHS, 1) if not coupled or m.length <= 2]
    each = [outcomes(subject, m, coupled=coupled) for m in chosen]
    expected = [float(weight @ value) for value, weight in each]
    shown = max((i for i, m in enumerate(chosen) if not m.ends), key=lambda i: chosen[i].length)
    relative = max(abs(e - m.kl) / m.kl for e, m in zip(expected, chosen, strict=True))
    lowest = min(float(value.min()) for value, _ in each)
    identity = max(_at_identity(subject, m, coupled=coupled) for m in chosen if m.length <= 4)
    mismatch = None if coupled else support_mismatch(subject)
    unbiased = relative <= 10 * subject.tolerance
    numbers = {
        "expected": expected[shown], "kl": chosen[shown].kl, "bias": expected[shown] - chosen[shown].kl,
        "relative_bias": relative, "nonnegative": lowest >= -1e-9,
        "zero_at_identity": identity <= 100 * subject.tolerance, "at_identity": identity, "support_mismatch": mismatch,
    }  # fmt: skip
    return numbers, [*_findings(numbers, loose=loose, unbiased=unbiased)]


def _findings(numbers: dict[str, Any], *, loose: bool, unbiased: bool) -> list[Finding]:
    found = []

    def add(level: str, message: str, *keys: str) -> None:
        kept = {key: numbers[key] for key in keys}
        found.append(Finding("value", "info" if loose and level == "warning" else level, message, kept))

    expected, kl = numbers["expected"], numbers["kl"]
    if loose:
        add("info", f"a surrogate: its value, {expected:.4g} in expectation, is not an estimate of the KL "
            f"({kl:.4g}), and need not be: log the KL apart", "expected", "kl")  # fmt: skip
    elif unbiased:
        add("info", "the expected value is exactly the sequence-level KL", "expected", "kl", "bias")
    elif expected < 0 or not np.isfinite(expected):
        add("error", f"the expected value is {expected:.4g} where the KL is {kl:.4g}: no KL is negative; flip its "
            "sign, or say that it returns a reward", "expected", "kl", "bias")  # fmt: skip
    else:
        add("warning", f"the expected value is {expected:.4g} where the KL is {kl:.4g} (relative bias up to "
            f"{numbers['relative_bias']:.3g}): do not log it as the KL", "expected", "kl", "bias")  # fmt: skip
    if not loose and not numbers["nonnegative"]:
        add("info", "single estimates can be negative; their mean is what counts", "nonnegative")
    if not numbers["zero_at_identity"]:
        add("warning" if loose else "error",
            f"with equal log-probs it is {numbers['at_identity']:.4g}, not 0: the two are misaligned, scaled "
            "apart, or not compared at all", "at_identity")  # fmt: skip
    support = numbers["support_mismatch"]
    if support == "nan":
        add("error", "a token that the reference cannot emit gives NaN (the KL is infinite): guard -inf before "
            "subtracting or multiplying", "support_mismatch")  # fmt: skip
    elif support == "-inf" and not loose:
        add("error", "a token that the reference cannot emit gives -inf: the KL is +inf", "support_mismatch")
    elif support == "finite" and unbiased and not loose:
        add("warning", "a token that the reference cannot emit gives a quiet finite number (the KL is infinite): "
            "a clamp hides the mismatch", "support_mismatch")  # fmt: skip
    return found


def _at_identity(subject: Subject, m: Model, *, coupled: bool) -> float:
    same = with_reference(m, m.pair.policy.log_probs)
    worst = float(np.abs(outcomes(subject, same, coupled=coupled)[0]).max())
    return worst if np.isfinite(worst) else float("inf")


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
