"""A derivation is data: steps with a left side, a right side and a reason, evaluated on an exact model.

Both sides of a step are functions of a ``Model``: one by plain sums over every sequence, the other by the exact
engine or by the next line of algebra. ``check`` evaluates them and raises where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from klgrad.analysis.derivations.latex import plain
from klgrad.analysis.derivations.model import COMPLEX_STEP, Model
from klgrad.synth.configurations import PLACEMENTS
from klgrad.synth.policies import PolicyPair

TOLERANCE = 1e-10
ROUNDING = 1e-13  # of the largest term: below it a number has no digits
PARTS = {
    "": "",
    "value": "The value",
    "loss": "In the loss: the path-wise term",
    "reward": "In the reward: the score-function term",
    "both": "In both: their sum",
}

Side = Callable[[Model], Any]


class StepFailed(ArithmeticError):
    """The two sides of a step differ: the algebra is wrong, or beyond double precision on this pair."""


@dataclass(frozen=True)
class Line:
    """One line of a derivation: two sides, and what is said of them.

    Args:
        left: LaTeX of the left side.
        right: LaTeX of the right side.
        reason: one sentence; mathematics in it stands between dollar signs.
        evaluate: the two sides as functions of the model.
        part: ``value``, ``loss``, ``reward``, ``both``, or empty where the placement does not matter.
        where: LaTeX of what the symbols mean, if the notation does not say so.
    """

    left: str
    right: str
    reason: str
    evaluate: tuple[Side, Side]
    part: str = ""
    where: str = ""


@dataclass(frozen=True)
class Step(Line):
    """``left = right``, because of ``reason``.

    Args:
        printed: the right side is a published number, rounded there: the sides may differ by this much.
    """

    printed: float | tuple[float, ...] | None = None


@dataclass(frozen=True)
class Comparison(Line):
    """Two quantities that are not equal in general, shown side by side: what a bias looks like in numbers."""


@dataclass(frozen=True)
class Derivation:
    """A named chain of steps.

    Args:
        name: what the command line calls it.
        title: what is shown, in one line.
        source: where the statement is from.
        steps: steps and comparisons, in the order of reading.
        conclusion: what has been shown, in one or two sentences.
        notation: symbols beyond the common ones: LaTeX and words.
        preset: the pair it is shown on when none is named.
        lengths: the lengths when none are asked for.
        off_policy: whether it needs a behaviour policy.
        fixed: it is about the numbers of its own pair and takes no other.
    """

    name: str
    title: str
    source: str
    steps: tuple[Step | Comparison, ...]
    conclusion: str
    notation: tuple[tuple[str, str], ...] = ()
    preset: str = "far"
    lengths: tuple[int, ...] = (3,)
    off_policy: bool = False
    fixed: bool = False

    @property
    def placements(self) -> tuple[str, ...]:
        """The placements that it has steps for."""
        return tuple(p for p in PLACEMENTS if any(step.part == p for step in self.steps))


@dataclass(frozen=True, eq=False)
class Result:
    """A step with both sides as numbers; ``residual``: their largest difference over their largest term, ``scale``."""

    step: Step | Comparison
    left: np.ndarray
    right: np.ndarray
    residual: float
    scale: float

    @property
    def coincide(self) -> bool:
        """Whether the sides agree as closely as an equality must."""
        return self.residual <= TOLERANCE

    def vanishes(self, side: np.ndarray) -> bool:
        """Whether a side is nothing but the rounding of its terms."""
        return float(np.abs(side).max(initial=0.0)) <= ROUNDING * self.scale


@dataclass(frozen=True, eq=False)
class Checked:
    """A derivation evaluated on a pair, at every length asked for: ``results[i][j]`` is step j at length i."""

    derivation: Derivation
    pair: PolicyPair
    lengths: tuple[int, ...]
    results: tuple[tuple[Result, ...], ...]

    @property
    def largest_residual(self) -> float:
        """The largest residual of all steps that claim equality to rounding."""
        return max(r.residual for each in self.results for r in each if _is_exact(r.step))


def _is_exact(step: Step | Comparison) -> bool:
    return isinstance(step, Step) and step.printed is None


def evaluate(step: Step | Comparison, model: Model) -> Result:
    """Both sides of one step; no judgement."""
    model.largest_term = 0.0
    left, right = (np.asarray(side(model), float) for side in step.evaluate)
    if left.shape != right.shape:
        raise StepFailed(f"{plain(step.left)} has shape {left.shape} and {plain(step.right)} {right.shape}")
    both_infinite = np.isinf(left) & (left == right)
    gap = np.abs(np.where(both_infinite, 0.0, left) - np.where(both_infinite, 0.0, right)).max(initial=0.0)
    scale = max(float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) for x in (left, right))
    scale = max(scale, model.largest_term, COMPLEX_STEP)  # below the complex step there is nothing but its rounding
    return Result(step, left, right, float(gap / scale), scale)


def verify(result: Result, where: str) -> Result:
    """The same result.

    Raises:
        StepFailed: when the sides of a step differ by more than 1e-10 of its largest term, or from a published number
            by more than its rounding.
    """
    step = result.step
    if isinstance(step, Comparison):
        return result
    holds = (
        result.coincide  # a NaN does not
        if step.printed is None
        else bool((np.abs(result.left - result.right) <= np.asarray(step.printed)).all())
    )
    if not holds:
        raise StepFailed(
            f"{where}: the sides differ in {plain(step.left)} = {plain(step.right)} "
            f"(left {result.left.tolist()}, right {result.right.tolist()}, residual {result.residual:.3g})"
        )
    return result


def check(derivation: Derivation, pair: PolicyPair, lengths: Sequence[int], *, placement: str | None = None) -> Checked:
    """Evaluate every step of a derivation on a pair.

    Args:
        lengths: sequence lengths; every sequence of each is enumerated.
        placement: only the steps that this placement needs; ``None`` for all.

    Raises:
        ValueError: for a placement that the derivation does not have, a pair that it cannot use, or too many
            sequences.
        StepFailed: for a step whose sides differ.
    """
    if placement is not None and placement not in derivation.placements:
        has = f"there is {', '.join(derivation.placements)}" if derivation.placements else "it has none: leave it out"
        raise ValueError(f"derivation {derivation.name} has no steps for the placement {placement!r}: {has}")
    if derivation.off_policy and pair.on_policy:
        raise ValueError(
            f"derivation {derivation.name} needs a behaviour policy and the pair {pair.name!r} is on-policy: "
            "give one with --behaviour, or use --preset stale"
        )
    wanted = [step for step in derivation.steps if placement is None or step.part in ("", "value", placement)]
    results = []
    for length in lengths:
        model = Model(pair, length, off_policy=derivation.off_policy)
        where = f"{derivation.name} on {pair.name} at T = {length}"
        results.append(tuple(verify(evaluate(step, model), where) for step in wanted))
    return Checked(derivation, pair, tuple(lengths), tuple(results))
