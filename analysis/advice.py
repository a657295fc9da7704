"""Which configurations to use on a pair: those that descend a wanted field, quietest first, and those to avoid.

What each descends is a verdict on random models and holds for every pair; the order by variance is the pair's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from klgrad.analysis.verdicts import verdict
from klgrad.synth.configurations import Configuration, parse
from klgrad.synth.exact import true_gradient
from klgrad.synth.moments import moments
from klgrad.synth.policies import PolicyPair

GOALS = {
    "sequence": "the gradient of the sequence-level KL",
    "token": "the reverse KL of each token, its prefix held fixed",
    "token-forward": "the forward KL of each token, likewise",
    "avoid": "to be avoided",
}
ON_POLICY = {
    "sequence": (
        "k1-in-reward",
        "k1-in-reward+rtg",
        "k1-in-reward+loo",
        "k3-in-both",
        "k3-in-both+rtg",
        "full-in-both",
    ),
    "token": ("k2-in-loss", "full-in-loss"),
    "token-forward": ("k3-in-loss",),
    "avoid": ("k1-in-loss", "k3-in-reward", "full-in-reward"),
}
OFF_POLICY = {
    "sequence": (
        "k1-in-reward+sequence-ratio",
        "k1-in-reward+rtg+prefix-ratio",
        "k3-in-loss+live-prefix-ratio",
        "full-in-loss+live-prefix-ratio",
    ),
    "token": ("k2-in-loss+prefix-ratio", "full-in-loss+prefix-ratio"),
    "token-forward": ("k3-in-loss+prefix-ratio",),
    "avoid": ("k1-in-loss", "k3-in-reward", "k1-in-reward", "k3-in-loss", "k3-in-loss+live-token-ratio"),
}


@dataclass(frozen=True)
class Advice:
    """One configuration on a pair.

    Args:
        goal: a key of ``GOALS``.
        configuration: its name.
        descends: what its expected gradient is, in words.
        relative_bias: |E g - grad KL| / |grad KL| on the pair.
        variance: N times the trace of the covariance of its estimate.
        sequences: how many bring the noise down to a tenth of the true gradient; infinite where that is zero.
    """

    goal: str
    configuration: str
    descends: str
    relative_bias: float
    variance: float
    sequences: float


def advise(pair: PolicyPair, length: int, *, samples: int = 1000) -> list[Advice]:
    """The candidates for each goal, quietest first, with their exact bias and variance on the pair.

    Args:
        samples: N, on which leave-one-out depends.

    Raises:
        ValueError: for a length out of range.
    """
    candidates = ON_POLICY if pair.on_policy else OFF_POLICY
    out: list[Advice] = []
    for goal, names in candidates.items():
        each = _measured(pair, goal, [parse(name) for name in names], length, samples)
        out += each if goal == "avoid" else sorted(each, key=lambda advice: advice.variance)
    return out


def _measured(
    pair: PolicyPair, goal: str, configurations: Sequence[Configuration], length: int, samples: int
) -> list[Advice]:
    true = true_gradient(pair, [length])[0]
    size = float(np.linalg.norm(true))
    out = []
    for m in moments(pair, configurations, [length], samples=samples):
        assert m.covariance is not None
        bias, variance = float(np.linalg.norm(m.mean[0] - true)), float(m.covariance[0])
        out.append(
            Advice(
                goal,
                str(m.configuration),
                verdict(m.configuration, off_policy=not pair.on_policy).phrase,
                bias / size if size else np.nan,
                variance,
                float(np.ceil(variance / (0.1 * size) ** 2)) if size else np.inf,
            )
        )
    return out
