"""A derivation is data: steps with a left side, a right side and a reason, evaluated on an exact model.

Both sides of a step are functions of a ``Model``: one by plain sums over every sequence, the other by the exact
engine or by the next line of algebra. ``check`` evaluates them and raises where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from klgrad.analysis.derivations.inputs import EPS
from klgrad.analysis.derivations.latex import plain
from klgrad.analysis.derivations.model import Model
from klgrad.synth.configurations import PLACEMENTS
from klgrad.synth.policies import PolicyPair

TOLD = 0.01  # a step whose rounding would hide an error of this share of it says so
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
        zero: the claim is that both sides are zero, for the terms of each cancel: what an error is measured by are
            the terms.
    """

    printed: float | tuple[float, ...] | None = None
    zero: bool = False


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
    """A step with both sides as numbers.

    Args:
        gap: the largest difference of the sides.
        scale: the largest sum of absolute terms that a side is made of.
        rounding: how far rounding may have carried the two sides apart.
    """

    step: Step | Comparison
    left: np.ndarray
    right: np.ndarray
    gap: float
    scale: float
    rounding: float

    @property
    def residual(self) -> float:
        """The largest difference of the sides over their largest term."""
        return self.gap / self.scale if self.gap else 0.0

    @property
    def coincide(self) -> bool:
        """Whether the sides agree as closely as an equality must: to the rounding of their terms."""
        return self.gap <= self.rounding  # a NaN does not

    @property
    def size(self) -> float:
        """The largest number of the two sides, or of their terms where both are to be zero."""
        if isinstance(self.step, Step) and self.step.zero:
            return self.scale
        return max(_largest(self.left), _largest(self.right))

    @property
    def resolution(self) -> float:
        """The smallest share of the sides that an error could have and be seen: twice the rounding, over the size."""
        return 2 * self.rounding / self.size if self.size else 0.0

    @property
    def untold(self) -> str:
        """Why agreement says nothing here, in words; empty where an error of 1 % would be seen.

        The error shows up less what rounding hides of it, and must still be more than rounding: hence twice.
        """
        printed = isinstance(self.step, Step) and self.step.printed is not None
        if printed or self._of_nothing or 2 * self.rounding < TOLD * self.size:
            return ""
        if self.size == 0:
            return "cannot be told here: both sides are exactly zero"
        hidden = "both sides are below" if self.size <= self.rounding else "1 % of the sides is below"
        return f"cannot be told in double precision here: {hidden} rounding, {self.rounding:.0e}"

    @property
    def _of_nothing(self) -> bool:
        """Zero because there is no term at all, as it is claimed."""
        return isinstance(self.step, Step) and self.step.zero and self.scale == 0

    def vanishes(self, side: np.ndarray) -> bool:
        """Whether a side is nothing but the rounding of its terms."""
        return _largest(side) <= self.rounding


@dataclass(frozen=True, eq=False)
class Checked:
    """A derivation evaluated on a pair, at every length asked for: ``results[i][j]`` is step j at length i."""

    derivation: Derivation
    pair: PolicyPair
    lengths: tuple[int, ...]
    results: tuple[tuple[Result, ...], ...]

    @property
    def largest_residual(self) -> float:
        """The largest residual of all steps that claim equality to rounding, where that can be told."""
        told = (r for each in self.results for r in each if _is_exact(r.step) and not r.untold)
        return max((r.residual for r in told), default=0.0)

    @property
    def untold(self) -> int:
        """Of how many steps double precision can tell nothing at any of the lengths."""
        return sum(all(r.untold for r in each) for each in zip(*self.results, strict=True) if _is_exact(each[0].step))


def _largest(side: np.ndarray) -> float:
    return float(np.abs(side[np.isfinite(side)]).max(initial=0.0))


def _is_exact(step: Step | Comparison) -> bool:
    return isinstance(step, Step) and step.printed is None


def evaluate(step: Step | Comparison, model: Model) -> Result:
    """Both sides of one step; no judgement."""
    model.start()
    left, right = (np.asarray(side(model), float) for side in step.evaluate)
    if left.shape != right.shape:
        raise StepFailed(f"{plain(step.left)} has shape {left.shape} and {plain(step.right)} {right.shape}")
    both_infinite = np.isinf(left) & (left == right)
    gap = np.abs(np.where(both_infinite, 0.0, left) - np.where(both_infinite, 0.0, right)).max(initial=0.0)
    scale = max(_largest(left), _largest(right), model.largest_term)
    # what is in a side that notes no terms, a table or a number, is right to a rounding or two
    return Result(step, left, right, float(gap), scale, model.rounding + 4 * EPS * max(_largest(left), _largest(right)))


def verify(result: Result, where: str) -> Result:
    """The same result.

    Raises:
        StepFailed: when the sides of a step differ by more than the rounding of their terms, or from a published
            number by more than its last digit.
    """
    step = result.step
    if isinstance(step, Comparison):
        return result
    holds = (
        result.coincide
        if step.printed is None
        else bool((np.abs(result.left - result.right) <= np.asarray(step.printed)).all())
    )
    if not holds:
        raise StepFailed(
            f"{where}: the sides differ in {plain(step.left)} = {plain(step.right)} "
            f"(left {result.left.tolist()}, right {result.right.tolist()}, apart {result.gap:.3g}, "
            f"rounding {result.rounding:.1g})"
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
