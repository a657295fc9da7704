"""What a penalty made of recipes is: its verdict, under the fewest idealisations that give it one.

Batch coupling, clamps and length means keep an expected gradient from being any known field outright. A reading says
which field it is and what would have to hold: ``sequence / T, provided every reply has the same length``. Decided by
the engine on the probe models, as ``verdicts`` is; nothing here is looked up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from klgrad.analysis.recipes import Recipe, Terms, expected, unit_of
from klgrad.analysis.verdicts import LENGTH, Verdict, classify, phrase, probes
from klgrad.synth.estimators import estimator

_GROUP, _GROUP_LENGTH = 3, 2  # verdicts on group-std: the probes' sequences and groups must be few enough to enumerate


@dataclass(frozen=True)
class Reading:
    """A verdict and its conditions.

    Args:
        verdict: as in ``verdicts``, with the normaliser taken out.
        per: the normaliser: ``E|y|``, ``T`` or nothing.
        provided: what is assumed, in words.
        largest: the largest coefficient, of which the verdict's are multiples.
    """

    verdict: Verdict
    per: str = ""
    provided: tuple[str, ...] = ()
    largest: float = 1.0

    @property
    def name(self) -> str:
        """The verdict's name: ``sequence``, ``token``, ``zero``, ``other``, ..."""
        return self.verdict.name

    @property
    def unbiased(self) -> bool:
        """Whether it is the gradient of the sequence-level KL, up to one positive scale."""
        return self.name in ("sequence", "scaled-sequence")

    @property
    def phrase(self) -> str:
        """``0.875 sequence / E|y|``: the field with its scale."""
        if self.verdict.coefficients is None:
            return "no known field"
        return self._per(self.verdict.phrase)

    @property
    def scaled(self) -> str:
        """In full, with the coefficients themselves: ``(0.001 sequence + 0.01 token) / E|y|``."""
        if self.verdict.coefficients is None:
            return str(self)
        return self._per(phrase([self.largest * w for w in self.verdict.coefficients])) + self._conditions

    def _per(self, text: str) -> str:
        named = self.verdict.coefficients is not None and any(self.verdict.coefficients)
        if not named or not self.per:
            return text
        return f"({text}) / {self.per}" if " - " in text or " + " in text else f"{text} / {self.per}"

    @property
    def _conditions(self) -> str:
        return f", provided {' and '.join(self.provided)}" if self.provided else ""

    def __str__(self) -> str:
        return self.phrase + self._conditions


def _unclamped(recipe: Recipe) -> Recipe:
    c = recipe.configuration
    if c.estimator.name.startswith("k3-clamped"):
        c = replace(c, estimator=estimator("k3"))
    return replace(recipe, configuration=c, clamp=math.inf)


def _levelled(recipe: Recipe) -> Recipe:
    return replace(recipe, advantage="group-mean") if recipe.advantage == "group-std" else recipe


def _untruncated(recipe: Recipe) -> Recipe:
    if recipe.weight != "truncated":
        return recipe
    return replace(recipe, weight="none", cap=math.inf, configuration=replace(recipe.configuration, ratio="token"))


@dataclass(frozen=True)
class _Relaxation:
    """One idealisation: what it says, what it does to a recipe, and whether only sequences of one length are left."""

    says: str
    apply: Callable[[Recipe], Recipe] = lambda recipe: recipe
    fixed_length: bool = False


_CLAMPS = _Relaxation("no clamp is hit", _unclamped)
_CAPS = _Relaxation("no ratio is truncated", _untruncated)
_SPREAD = _Relaxation("every group has the same spread of penalised rewards", _levelled)
_LENGTHS = _Relaxation("all replies have the same length", fixed_length=True)


def reading(terms: Terms, *, off_policy: bool = False) -> Reading:
    """What the weighted sum of recipes is, relative to its largest weight, under the fewest idealisations.

    Raises:
        ValueError: for no terms, or all weights zero.
    """
    largest = max((abs(weight) for weight, _ in terms), default=0.0)
    if largest == 0:
        raise ValueError("no terms with a weight: there is no penalty to read")
    terms = [(weight / largest, recipe) for weight, recipe in terms]
    needed: list[_Relaxation] = []
    for relaxation in (_CLAMPS, _CAPS) if off_policy else (_CLAMPS,):  # whether they bite is a matter of the models
        relaxed = [(weight, relaxation.apply(recipe)) for weight, recipe in terms]
        if relaxed != terms:
            needed, terms = [*needed, relaxation], relaxed
    possible = [_SPREAD] if any(recipe.advantage == "group-std" for _, recipe in terms) else []
    possible += [_LENGTHS] if any(_by_length(recipe) for _, recipe in terms) else []
    for count in range(len(possible) + 1):
        for chosen in itertools.combinations(possible, count):
            found = _read(terms, chosen, off_policy)
            if found.verdict.coefficients is not None:
                return replace(found, largest=largest, provided=tuple(_says(r, terms) for r in (*needed, *chosen)))
    return Reading(Verdict("other", "other", None))


def _says(relaxation: _Relaxation, terms: Terms) -> str:
    """Its words, with the length at hand where the verdict's numbers depend on it."""
    per_reply = {_per_reply(recipe) for _, recipe in terms}
    depends = relaxation.fixed_length and (
        any(recipe.weight == "geometric" for _, recipe in terms) or len(per_reply) > 1
    )
    return f"{relaxation.says}, here T = {LENGTH}" if depends else relaxation.says


def _by_length(recipe: Recipe) -> bool:
    return recipe.configuration.aggregation == "length-mean" or recipe.weight == "geometric"


def _per_reply(recipe: Recipe) -> bool:
    """Whether it is divided by the length where all replies have one."""
    return recipe.token_mean or recipe.configuration.aggregation == "length-mean"


def _read(terms: Terms, chosen: tuple[_Relaxation, ...], off_policy: bool) -> Reading:
    """The verdict under the chosen idealisations, with a common normaliser taken out."""
    for relaxation in chosen:
        terms = [(weight, relaxation.apply(recipe)) for weight, recipe in terms]
    length = LENGTH
    if any(recipe.advantage == "group-std" for _, recipe in terms):
        terms = [(w, replace(r, group=min(r.group, _GROUP)) if r.advantage != "none" else r) for w, r in terms]
        length = _GROUP_LENGTH
    fixed = any(relaxation.fixed_length for relaxation in chosen)
    pairs = probes(off_policy=off_policy)[: 1 if fixed else None]
    outcomes = [expected(terms, pair, length) for pair in pairs]
    units = [unit_of(terms, pair, length) for pair in pairs]
    per = "E|y|" if all(recipe.token_mean for _, recipe in terms) else ""
    if fixed and not per and all(_per_reply(recipe) for _, recipe in terms):
        units, per = [float(length)], "T"
    gradients = [outcome.mean * unit for outcome, unit in zip(outcomes, units, strict=True)]
    spread = sum(outcome.variance for outcome in outcomes)
    return Reading(classify(gradients, spread, off_policy=off_policy, length=length), per)
