"""Appendix F as executable steps: every line of a derivation is evaluated, both sides, on an exact model."""

from __future__ import annotations

from types import ModuleType

from klgrad.analysis.derivations import averages, gradients, handbook, noise, optima, placements, stale, sums
from klgrad.analysis.derivations.steps import Checked, Comparison, Derivation, Step, StepFailed, check
from klgrad.synth.estimators import unknown

__all__ = ["DERIVATIONS", "Checked", "Comparison", "Derivation", "Step", "StepFailed", "check", "derivation"]


def _found(*modules: ModuleType) -> dict[str, Derivation]:
    every = [value for module in modules for value in vars(module).values() if isinstance(value, Derivation)]
    return {found.name: found for found in every}


DERIVATIONS: dict[str, Derivation] = _found(
    gradients, placements, sums, stale, averages, noise, optima, handbook
)  # in the order of reading


def derivation(name: str) -> Derivation:
    """The derivation of that name.

    Raises:
        ValueError: for an unknown name, saying what there is.
    """
    if name not in DERIVATIONS:
        raise unknown("derivation", name, list(DERIVATIONS))
    return DERIVATIONS[name]
