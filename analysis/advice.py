"""What to use on a pair, for each gradient one may want, quietest first; and what to avoid.

The sequence level is searched for (``ranking``); what descends the token level is a list whose verdicts, on random
models, hold for every pair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from klgrad.analysis import ranking
from klgrad.analysis.results import compare
from klgrad.analysis.verdicts import verdict
from klgrad.synth.configurations import Configuration, parse
from klgrad.synth.policies import PolicyPair

if TYPE_CHECKING:
    import pandas as pd

GOALS = {
    "sequence": "the gradient of the sequence-level KL",
    "token": "the reverse KL of each token, its prefix held fixed",
    "token-forward": "the forward KL of each token, likewise",
    "avoid": "to be avoided",
}
ON_POLICY = {
    "token": ("k2-in-loss", "full-in-loss"),
    "token-forward": ("k3-in-loss",),
    "avoid": ("k1-in-loss", "k3-in-reward", "full-in-reward"),
}
OFF_POLICY = {
    "token": ("k2-in-loss+prefix-ratio", "full-in-loss+prefix-ratio"),
    "token-forward": ("k3-in-loss+prefix-ratio",),
    "avoid": ("k1-in-loss", "k3-in-reward", "k1-in-reward", "k3-in-loss", "k3-in-loss+live-token-ratio"),
}
ERROR = 0.1  # the relative error of the gradient that sequences are counted for
SHOWN = 6  # unbiased configurations


def advise(pair: PolicyPair, length: int, *, samples: int = 1000) -> pd.DataFrame:
    """A row for each configuration advised, by goal and exact variance.

    Args:
        samples: N, on which leave-one-out depends.

    Returns:
        Columns of ``results.compare`` and ``ranking.extend``, with ``goal`` (a key of ``GOALS``) and ``descends``, what
        the expected gradient is, in words.

    Raises:
        ValueError: for a length out of range.
    """
    import pandas as pd

    listed = ON_POLICY if pair.on_policy else OFF_POLICY
    wanted = {"sequence": _practical(pair, length)}
    wanted |= {goal: [parse(name) for name in names] for goal, names in listed.items()}
    parts = []
    for goal, configurations in wanted.items():
        frame = compare(pair, configurations, [length], exact_only=True, samples=samples)
        frame = ranking.extend(pair, frame, error=ERROR, rank="variance")
        words = [verdict(parse(name), off_policy=not pair.on_policy).phrase for name in frame["configuration"]]
        frame = frame.assign(goal=goal, descends=words)
        if goal == "sequence":  # others are unbiased by what this pair is: clamps that never bite, a single token
            frame = frame[frame["descends"] == goal][:SHOWN]
        parts.append(frame)
    return pd.concat(parts, ignore_index=True)


def _practical(pair: PolicyPair, length: int) -> list[Configuration]:
    """Unbiased configurations of which a training run knows every constant."""
    candidates = [c for c in ranking.grid(pair) if "exact constant" not in ranking.cost(c)]
    return ranking.unbiased(pair, candidates, [length])
