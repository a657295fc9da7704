"""Which unbiased configuration needs the fewest sequences? Found and ranked by exact values, not from a list.

The true gradient can be had in many ways that differ in variance and in what they cost. Of every estimator,
placement, credit and baseline the engine keeps what is unbiased on the pair and lengths asked for. What compares
them is the number of sequences N for a relative error of the gradient: sqrt(variance / N) = error x |gradient|.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from klgrad.synth.configurations import PLACEMENTS, RATIOS, Configuration, parse
from klgrad.synth.estimators import BEST, ESTIMATORS, unknown
from klgrad.synth.exact import gradient_rounding, true_gradient
from klgrad.synth.moments import moments
from klgrad.synth.policies import PolicyPair
from klgrad.zeros import zero_bias, zero_gradient, zero_variance

if TYPE_CHECKING:
    import pandas as pd

RANKS = ("variance",)
CREDITS = ("", "+rtg", "+future")  # token credit leaves the future out
BASELINES = ("", "+loo", "+mean-baseline", "+optimal-baseline", "+optimal-baseline-per-coordinate")
_EXACT_CONSTANTS = ("mean", "optimal", "optimal-per-coordinate")
_ROUNDING = 1e-12


def check_request(error: float | None, rank: str | None) -> None:
    """Refuse what cannot be answered, before any work.

    Raises:
        ValueError: for an error that is not positive and finite, or an unknown key to rank by.
    """
    if error is not None and not 0 < error < math.inf:
        raise ValueError(f"error = {error:g} must be positive: a relative error of the gradient, 0.1 for 10 %")
    if rank is not None and rank not in RANKS:
        raise unknown("rank", rank, list(RANKS))


def grid(pair: PolicyPair) -> list[Configuration]:
    """Every estimator x placement x credit x baseline; off-policy each of them without and with each ratio.

    Where a family of estimators is linear in its argument, the one of least variance stands for all of them.
    """
    ratios = ("",) if pair.on_policy else ("", *(f"+{ratio}-ratio" for ratio in RATIOS[1:]))
    return [
        parse(f"{name}-in-{placement}{credit}{ratio}{baseline}")
        for name in (f"{name}({BEST})" if entry.linear else name for name, entry in ESTIMATORS.items())
        for placement in PLACEMENTS
        for credit in (("",) if placement == "loss" else CREDITS)
        for ratio in ratios
        for baseline in (("",) if placement == "loss" else BASELINES)
    ]


def unbiased(pair: PolicyPair, candidates: Sequence[Configuration], lengths: Sequence[int]) -> list[Configuration]:
    """The candidates whose exact bias is zero to rounding at every one of the lengths.

    A baseline can add a bias and mends none: candidates with one are looked at where it is unbiased without, since an
    optimal one takes second moments. With an argument left open a mean is linear in it: unbiased at 0 and 1, always.

    Raises:
        ValueError: when there is none.
    """
    bare = {c: replace(c, baseline="none", baseline_value=0.0) for c in candidates}
    plain = set(_without_bias(pair, list(dict.fromkeys(bare.values())), lengths))
    found = _without_bias(pair, [c for c in candidates if bare[c] in plain], lengths)
    if not found:
        raise ValueError(f"no unbiased one among the {len(candidates)} configurations, on this pair at these lengths")
    return found


def _without_bias(pair: PolicyPair, candidates: list[Configuration], lengths: Sequence[int]) -> list[Configuration]:
    members = {
        c: [replace(c, estimator=c.estimator.family(a)) for a in (0.0, 1.0)] if c.estimator.family else [c]
        for c in candidates
    }
    each = list(dict.fromkeys(member for of in members.values() for member in of))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        truth, means = true_gradient(pair, lengths), moments(pair, each, lengths, covariance="none")
        known = {"gradient_norm": np.linalg.norm(truth, axis=1), "bias_rounding": gradient_rounding(pair, lengths)}
        fine = {
            m.configuration for m in means if zero_bias({"bias": np.linalg.norm(m.mean - truth, axis=1), **known}).all()
        }
    return [c for c in candidates if fine.issuperset(members[c])]


def cost(configuration: Configuration) -> str:
    """What a training run must have at hand: ``sampled tokens`` or ``full vocabulary``, ``+ exact constant``.

    Leave-one-out needs only the other sequences; the mean and the optimal baselines are constants that an exact
    engine knows and a training run does not.
    """
    needs = "full vocabulary" if configuration.estimator.full else "sampled tokens"
    return f"{needs} + exact constant" if configuration.baseline in _EXACT_CONSTANTS else needs


def extend(
    pair: PolicyPair, frame: pd.DataFrame, *, error: float | None = None, rank: str | None = None
) -> pd.DataFrame:
    """A table of ``results.compare`` with what ranks its configurations, read from its exact rows.

    Args:
        frame: the table of one pair.
        error: adds ``sequences_for_error``: the least N whose noise sqrt(variance / N) is within this share of the
            true gradient's norm. NaN where that norm is zero or the variance beyond double precision. A bias stays.
        rank: adds ``rank``, 1 for the least within each length, equal for what is equal to rounding, and sorts by it.

    Returns:
        The rows of ``frame`` with ``cost`` and the columns asked for; Monte Carlo rows carry what the exact ones do.

    Raises:
        ValueError: for an error that is not positive and finite, or an unknown key to rank by.
    """
    check_request(error, rank)
    keys = ["configuration", "length"]
    known = {name: parse(name) for name in frame["configuration"].unique()}
    rows = frame[frame["source"] == "exact"].copy()
    rows["cost"] = [cost(known[name]) for name in rows["configuration"]]
    added = [*keys, "cost"]
    if error is not None:
        rows["sequences_for_error"] = _sequences(pair, rows, known, error)
        added.append("sequences_for_error")
    if rank is not None:
        value = (
            rows[rank]
            .mask(zero_variance(rows), 0.0)
            .clip(lower=rows["variance_rounding"].mask(zero_variance(rows), 0.0))
        )
        with np.errstate(divide="ignore"):
            rows["rank"] = np.round(np.log(value), 9)
        rows["rank"] = rows.groupby("length")["rank"].rank(method="min", na_option="bottom").astype(int)
        added.append("rank")
    out = frame.merge(rows[added], on=keys, how="left")
    return (
        out if rank is None else out.sort_values(["length", "rank", "configuration"], kind="stable", ignore_index=True)
    )


def _sequences(pair: PolicyPair, rows: pd.DataFrame, known: dict[str, Configuration], error: float) -> np.ndarray:
    """``[rows]`` the least N; groups of K come whole, and leave-one-out over all N solves for it."""
    configurations = [known[name] for name in rows["configuration"]]
    group = np.array([c.baseline_value if c.baseline == "loo" else 1.0 for c in configurations])
    variance, norm = rows["variance"].to_numpy(), rows["gradient_norm"].to_numpy()
    allowed = np.square(error * norm)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        n = variance / allowed
        if (group == 0).any():
            n = np.where(group == 0, _all_but_one(pair, rows, known, allowed), n)
        group, least = np.maximum(group, 1.0), np.where(group == 0, 2.0, 1.0)
        n = np.maximum(np.ceil(n * (1 - _ROUNDING) / group) * group, np.maximum(group, least))
    return np.where(zero_gradient(rows) | ~np.isfinite(variance), np.nan, n)


def _all_but_one(
    pair: PolicyPair, rows: pd.DataFrame, known: dict[str, Configuration], allowed: np.ndarray
) -> np.ndarray:
    """``[rows]`` N with variance(N) = N x allowed for leave-one-out over all N; NaN for others.

    variance(N) = A + B / (N - 1) (``moments``); A and B from the table's N and another one, N the larger root of
    allowed N (N - 1) = A (N - 1) + B.
    """
    here = int(rows["samples"].iloc[0])
    other = 2 if here > 2 else 3
    lengths = sorted(rows["length"].unique())
    coupled = [c for c in known.values() if c.baseline == "loo" and c.baseline_value == 0]
    found = {
        (str(m.configuration), length): float(variance)
        for m in moments(pair, coupled, lengths, samples=other)
        if m.covariance is not None
        for length, variance in zip(lengths, m.covariance, strict=True)
    }
    there = np.array([found.get(key, np.nan) for key in zip(rows["configuration"], rows["length"], strict=True)])
    variance = rows["variance"].to_numpy()
    b = (there - variance) / (1 / (other - 1) - 1 / (here - 1))
    a = variance - b / (here - 1)
    return (allowed + a + np.sqrt((a - allowed) ** 2 + 4 * allowed * np.maximum(b, 0.0))) / (2 * allowed)
