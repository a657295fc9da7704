"""What weight does the sampler get: none, pi / mu, its inverse, or a capped one? Seen on single tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from klgrad.analysis.checking.calling import Fault
from klgrad.analysis.checking.models import each_row
from klgrad.analysis.checking.report import Finding
from klgrad.analysis.checking.sampling import sampled
from klgrad.analysis.checking.subject import Function
from klgrad.analysis.checking.value import one_token
from klgrad.synth.enumeration import Batch

_DELTA, _AT = 0.7, -1.1  # log pi / pi_ref, and log pi, of every token tried
_SMALL, _FAR, _STEPS = 0.05, 4.0, 40
INVERTED = "the importance ratio is upside down: it is mu / pi, exp(old_logp - logp)"
INVERT = "invert the ratio: exp(logp - old_logp)"
CAPS = (1.2, 1.5, 2.0, 5.0, 10.0)


@dataclass(frozen=True)
class Law:
    """How the penalty of a token depends on rho = pi / mu.

    Args:
        power: of rho near 1: 1 for pi / mu, -1 for its inverse, 0 for no weight; None for anything else.
        cap, floor: where the weight stops following rho, as ratios; None where it does not.
    """

    power: int | None
    cap: float | None = None
    floor: float | None = None


def _tokens(log_rho: np.ndarray) -> Batch:
    batch = one_token(np.full(len(log_rho), _AT), np.full(len(log_rho), _AT - _DELTA))
    return replace(batch, behaviour=_AT - log_rho[:, None])


def _strength(subject: Function, placement: str, log_rho: np.ndarray) -> np.ndarray:
    """The weight on the token's score in that placement, for each ratio."""
    batch = _tokens(log_rho)
    parts = each_row(batch) if subject.kind == "loss" else [batch]
    found = []
    for part in parts:
        terms = subject.evaluate(part, differentiate=placement != "reward")
        weight = np.reshape(terms.by_sequence, -1) if placement != "loss" else np.zeros(len(part.tokens))
        if placement != "reward" and terms.token is not None:
            weight = weight + terms.token[:, 0] + (0 if terms.vocab is None else np.abs(terms.vocab[:, 0]).sum(-1))
        found.append(weight)
    return np.concatenate(found)


def law(subject: Function, placement: str) -> Law:
    """The law of the weight; no weight where the sampler's log-probs are not asked for."""
    if not subject.plan.takes("behaviour"):
        return Law(0)

    def relative(log_rho: np.ndarray) -> np.ndarray:
        each = _strength(subject, placement, np.append(log_rho, 0.0))
        with np.errstate(all="ignore"):
            return np.asarray(each[:-1] / each[-1])

    near = np.array([-_SMALL, _SMALL])
    try:
        powers = [
            p for p in (1, -1, 0) if np.allclose(relative(near), np.exp(p * near), rtol=max(1e-6, subject.tolerance))
        ]
        if not powers:
            return Law(None)
        if powers[0] == 0:
            return Law(0)
        ends = [_end(relative, sign, powers[0], subject.tolerance) for sign in (1, -1)]
    except Fault:
        return Law(None)
    return Law(powers[0], *ends)


def _end(relative: Any, sign: int, power: int, tolerance: float) -> float | None:
    """Where the weight leaves its law, by bisection."""

    def holds(x: np.ndarray) -> np.ndarray:
        return np.isclose(relative(sign * x), np.exp(power * sign * x), rtol=max(1e-6, tolerance), atol=0)

    grid = np.linspace(_SMALL, _FAR, 33)
    kept = holds(grid)
    if kept.all():
        return None
    high = float(grid[np.argmin(kept)])
    low = high - float(grid[1] - grid[0])
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(np.array([middle]))[0] else (low, middle)
    return float(np.exp(sign * high))


def examine(subject: Function, placement: str) -> list[Finding]:
    """A cap on the ratio: what it is, how often it acts, and what it costs at other values."""
    found = law(subject, placement)
    if found.power == -1:
        return [Finding("sampling", "error", f"{INVERTED}; {INVERT}", mend=INVERT)]
    if found.power != 1 or found.cap is None:
        return []
    stale, _ = sampled("a stale policy")
    rho = np.exp(np.where(stale.batch.mask, stale.batch.log_probs - stale.batch.behaviour, 0.0))
    weight = stale.probability[:, None] * stale.batch.mask
    share = float((weight * (rho > found.cap)).sum() / weight.sum())
    full = stale.probability @ stale.gradients(rho * stale.log_ratio)

    def bias(cap: float) -> float:
        held = stale.probability @ stale.gradients(np.minimum(rho, cap) * stale.log_ratio)
        return float(np.linalg.norm(held - full) / np.linalg.norm(full))

    table = {cap: bias(cap) for cap in sorted({round(found.cap, 4), *CAPS})}
    listed = ", ".join(f"{cap:g}: {100 * off:.2g} %" for cap, off in table.items())
    floor = "" if found.floor is None else f" and {found.floor:.4g}"
    return [Finding(
        "sampling", "warning",
        f"the importance ratio on the KL is capped at {found.cap:.4g}{floor}: no longer pi / mu, so no longer the "
        f"gradient wanted on stale samples; on a stale policy here {share:.1%} of tokens are capped, and the bias "
        f"of k1 with a capped token ratio is, by cap, {listed}",
        {"cap": found.cap, "floor": found.floor, "capped_share": share, "bias_by_cap": table},
    )]  # fmt: skip
