"""What one training run is: an algorithm, a configuration of the penalty, beta, a learning rate and a seed. Plain data.

One update ascends, for each sequence y of the batch with token scores p_t,

    sum_t w_t A p_t  -  beta g(y),

A the advantage of its reward, w_t the algorithm's importance weight, g the configuration's gradient of the penalty.
An in-reward estimate with whole credit, no baseline of its own, and the algorithm's ratio and aggregation is part of
the sequence's reward, ``R - beta C``: the algorithm's baseline and standardisation act on it, as in the libraries. Any
other stands beside the reward, as its name says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from klgrad.synth.configurations import Configuration, parse
from klgrad.synth.estimators import number, unknown

ADVANTAGES = ("reinforce", "rloo", "grpo", "dr-grpo")
RATIOS = ("none", "token", "prefix", "sequence", "truncated")
OPTIMISERS = ("sgd", "adam")
NONE = "none"  # the configuration that is no penalty


@dataclass(frozen=True)
class Algorithm:
    """How a batch of sequences becomes an update, all but the penalty.

    Args:
        advantage: ``reinforce`` (the reward itself), ``rloo`` (leave-one-out), ``dr-grpo`` (group mean) or ``grpo``
            (group mean and standard deviation with Bessel's correction plus 1e-4; each sequence's sum over |y|).
        samples: N, sequences of one update.
        group: sequences that share a baseline; 0 for all N.
        clip: PPO's epsilon, on every token's whole in-reward coefficient; 0 for no clipping.
        ratio: the weight w_t off-policy: ``none`` 1, ``token`` rho_t, ``prefix`` rho_1:t, ``sequence`` rho_1:T,
            ``truncated`` min(rho_t, truncation), which caps a configuration's token ratio too.
        truncation: the cap.
        minibatches: updates made from the sequences of one policy; from the second on, omega is not 1.
        staleness: updates by which the sampling policy lags behind, asynchronously.
        optimiser: ``sgd``, or ``adam`` with 0.9, 0.999 and 1e-8.
        reset_every: updates after which the policy becomes its own reference; 0 for never. What is reported
            stays measured against the first reference.

    Raises:
        ValueError: for a value out of range, naming it.
    """

    advantage: str = "rloo"
    samples: int = 256
    group: int = 0
    clip: float = 0.0
    ratio: str = "none"
    truncation: float = 2.0
    minibatches: int = 1
    staleness: int = 0
    optimiser: str = "sgd"
    reset_every: int = 0

    def __post_init__(self) -> None:
        for field, choices in (("advantage", ADVANTAGES), ("ratio", RATIOS), ("optimiser", OPTIMISERS)):
            if getattr(self, field) not in choices:
                raise unknown(field, str(getattr(self, field)), list(choices))
        if self.samples < 2:
            raise ValueError(f"samples = {self.samples} is too few: an update needs at least 2 sequences")
        if self.group and not (2 <= self.group <= self.samples and self.samples % self.group == 0):
            raise ValueError(
                f"{self.samples} samples cannot be split into groups of {self.group}: give a group of 2 or more that "
                "divides the samples"
            )
        if not 0 <= self.clip < 1:
            raise ValueError(f"clip = {number(self.clip)} must be from 0 (no clipping) to below 1")
        if not 0 < self.truncation < math.inf:
            raise ValueError(f"truncation = {number(self.truncation)} must be positive and finite")
        for field, least in (("minibatches", 1), ("staleness", 0), ("reset_every", 0)):
            if getattr(self, field) < least:
                raise ValueError(f"{field} = {getattr(self, field)} must be {least} or more")

    @property
    def size(self) -> int:
        """Sequences that share one baseline."""
        return self.group or self.samples

    @property
    def base_ratio(self) -> str:
        """The ratio in the grammar of configurations: a truncated one is a token ratio on capped ratios."""
        return "token" if self.ratio == "truncated" else self.ratio

    @property
    def aggregation(self) -> str:
        """How a sequence's tokens are weighed: GRPO divides by |y|, the others do not."""
        return "length-mean" if self.advantage == "grpo" else "sum"

    @property
    def shrinkage(self) -> float:
        """What the expected advantage is multiplied with: 1 - 1/G for a group's own mean [C2]."""
        return 1 - 1 / self.size if self.advantage in ("grpo", "dr-grpo") else 1.0

    def lag(self, step: int) -> int:
        """How many updates old the policy is that sampled the sequences of this update."""
        return min(step, step % self.minibatches + self.staleness)

    @property
    def longest_lag(self) -> int:
        """The oldest sampling policy that is ever needed."""
        return self.minibatches - 1 + self.staleness


@dataclass(frozen=True)
class Run:
    """One training run.

    Args:
        configuration: a configuration's name, or ``none`` for no penalty.
        beta: coefficient of the penalty, and of the KL in the objective that is reported.
        learning_rate: of the optimiser.
        algorithm: the rest of the update.
        seed: runs of one seed see the same random numbers, whatever their other settings.

    Raises:
        ValueError: for a configuration outside the grammar, or a number out of range.
    """

    configuration: str
    beta: float
    learning_rate: float
    algorithm: Algorithm = Algorithm()
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.beta < math.inf:
            raise ValueError(f"beta = {number(self.beta)} must be 0 or more, and finite")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning rate = {number(self.learning_rate)} must be positive and finite")
        if self.seed < 0:
            raise ValueError(f"seed = {self.seed} must be 0 or more")
        if self.configuration != NONE:
            parsed = parse(self.configuration)
            object.__setattr__(self, "configuration", str(parsed))
            if parsed.baseline == "loo":
                parsed.group(self.algorithm.samples)
            if self.algorithm.clip and parsed.baseline == "optimal-per-coordinate":
                raise ValueError(f"{parsed}: a baseline per coordinate has no token coefficient that PPO could clip")

    @property
    def penalty(self) -> Configuration | None:
        """The configuration, ``None`` where there is none or beta is 0."""
        return None if self.configuration == NONE or self.beta == 0 else _parsed(self.configuration)


@cache
def _parsed(name: str) -> Configuration:
    return parse(name)


def is_folded(configuration: Configuration, algorithm: Algorithm) -> bool:
    """Whether the in-reward part is a number per sequence that the algorithm would add to the reward."""
    return (
        configuration.in_reward
        and configuration.credit == "whole"
        and configuration.baseline == "none"
        and configuration.ratio == algorithm.base_ratio
        and configuration.ratio != "prefix"
        and configuration.aggregation == algorithm.aggregation
    )
