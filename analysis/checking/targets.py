"""What is wanted: a named field, or the gradient of another configuration or function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from klgrad.analysis.checking.fields import TARGETS
from klgrad.analysis.checking.models import Model
from klgrad.analysis.checking.naming import Known
from klgrad.analysis.checking.report import WANTED

Gradient = Callable[[Model], np.ndarray]
_WORDS = {
    "forward-kl": "sequence-level forward-KL", "jensen-shannon": "Jensen-Shannon", "jeffreys": "Jeffreys",
    "forward-kl-along-samples": "forward-KL (along the policy's own samples)", "k2": "E[k2]",
}  # fmt: skip
KL_FIELDS = ("sequence", "token", "token-forward", "future")


@dataclass(frozen=True)
class Target:
    """The gradient that is wanted.

    Args:
        name: as it was asked for.
        fields: the names of the fields that are it; any of them will do.
        words: the same for a sentence: ``token-level reverse-KL``.
        own: placement -> what another configuration or function gives on a model; empty for a named field.
    """

    name: str
    fields: tuple[str, ...]
    words: str
    own: Mapping[str, Gradient] = field(default_factory=dict)

    @property
    def estimates_kl(self) -> bool:
        """Whether a term with this gradient could be an estimate of the KL, and is held to its value."""
        return self.name in KL_FIELDS

    def known(self, placement: str, *, full: bool) -> Known:
        """The fields to compare a gradient in that placement with."""
        own = {self.fields[0]: self.own[placement]} if placement in self.own else {}
        return Known(self.fields, own, full)

    def reached(self, found: Mapping[str, Any], kind: str) -> bool:
        """Whether a described gradient is it. Of the entropy, a term may be the entropy itself or its negative."""
        if found["name"] not in self.fields:
            return False
        term = self.name == "entropy" and kind != "loss" and found["factor"] == found["factor"]
        minus = term and isinstance(found["factor"], float) and abs(found["factor"] + 1) < 1e-6
        return bool(found["one"]) or minus


def named(name: str) -> Target | None:
    """The target of that name, or None where there is none."""
    if name not in TARGETS:
        return None
    return Target(name, TARGETS[name], WANTED.get(name) or _WORDS.get(name) or name.replace("-", " "))


def like(name: str, own: Mapping[str, Gradient]) -> Target:
    """What another configuration or function gives, placement by placement."""
    return Target(name, (f"the gradient of {name}",), name, own)
