"""The expected update of each configuration, exactly: a vector field on the parameters, and what it is like.

Ascent throughout: the field of k1-in-reward is the gradient of J = E[R] - beta KL. Shapes: C runs, S contexts,
V tokens, d parameters, r identifiable directions (``Family.basis``).
"""

from __future__ import annotations

from dataclasses import replace
from math import comb
from typing import TYPE_CHECKING

import numpy as np

from klgrad.analysis.dynamics.recipes import Algorithm, is_folded
from klgrad.analysis.dynamics.updates import EPSILON, Penalties, Tables
from klgrad.synth.configurations import Configuration
from klgrad.synth.moments import moments
from klgrad.synth.objectives import Family, expected_reward, reward_gradient
from klgrad.synth.policies import PolicyPair
from klgrad.synth.rewards import Task

if TYPE_CHECKING:
    from jaxtyping import Float


def expected_update(
    task: Task, pair: PolicyPair, configuration: Configuration | None, beta: float, algorithm: Algorithm | None = None
) -> Float[np.ndarray, " d"]:
    """``[d]`` the mean of a sampled direction of ascent, at the pair's policy, reference and behaviour.

    Raises:
        ValueError: for what has no exact form: clipping and truncation off-policy; GRPO's standard deviation unless
            the reward is 0 or 1, lengths are fixed, the policy samples, and the penalty is not in its reward.
    """
    algorithm = algorithm or Algorithm()
    folded = configuration is not None and is_folded(configuration, algorithm)
    _check_exact(task, pair, algorithm, folded)
    factor = _standardised(task, pair, algorithm) if algorithm.advantage == "grpo" else algorithm.shrinkage
    centred = algorithm.advantage != "reinforce"
    field = factor * reward_gradient(pair, task.reward, task.length, algorithm.base_ratio, centred=centred)
    if configuration is None or beta == 0:
        return field
    if not folded:
        return field - beta * _mean(pair, configuration, task.length)
    # what is part of the reward shares its baseline and its factor; the in-loss part of `both` does not
    in_reward = replace(configuration, placement="reward", baseline="loo" if centred else "none")
    field = field - beta * factor * _mean(pair, in_reward, task.length)
    if configuration.in_loss:
        field = field - beta * _mean(pair, replace(configuration, placement="loss"), task.length)
    return field


def _mean(pair: PolicyPair, configuration: Configuration, length: int) -> np.ndarray:
    # what overflows is the run's outcome, not an error
    with np.errstate(over="ignore", invalid="ignore"):
        return moments(pair, [configuration], [length], covariance="none")[0].mean[0]


def _check_exact(task: Task, pair: PolicyPair, algorithm: Algorithm, folded: bool) -> None:
    if not pair.on_policy and (algorithm.clip or algorithm.ratio == "truncated"):
        what = "clipping" if algorithm.clip else "a truncated ratio"
        raise ValueError(f"the expected update under {what} has no exact form off-policy: sample it instead")
    if algorithm.advantage == "grpo" and (
        folded or not task.verifiable or not pair.on_policy or task.pair.automaton.end >= 0
    ):
        raise ValueError(
            "the expected update of grpo is exact only on-policy, for a reward of 0 or 1, sequences of one length and "
            "a penalty outside the reward: take dr-grpo or rloo, or sample it"
        )


def _standardised(task: Task, pair: PolicyPair, algorithm: Algorithm) -> float:
    """The factor on the gradient of the success rate p that a group's mean and standard deviation make, over T.

    A sequence's advantage depends on the group only through the number k of successes among the other G - 1:
    ``sum_k Binomial(G - 1, p)(k) [A(success | k) - A(failure | k)]``.
    """
    p, G = expected_reward(pair, task.reward, task.length), algorithm.size
    total = 0.0
    for k in range(G):
        chance = comb(G - 1, k) * p**k * (1 - p) ** (G - 1 - k)
        total += chance * (_advantage(1, k + 1, G) - _advantage(0, k, G))
    return total / task.length


def _advantage(reward: int, successes: int, group: int) -> float:
    mean = successes / group
    deviation = np.sqrt(group / (group - 1) * mean * (1 - mean))
    return float((reward - mean) / (deviation + EPSILON))


def expected_ascent(
    family: Family,
    algorithm: Algorithm,
    penalties: Penalties,
    beta: Float[np.ndarray, " C"],
    tables: Tables,
) -> Float[np.ndarray, "C d"]:
    """``[C, d]`` the expected direction of each run, in the place of ``batches.ascent``."""
    out = np.empty((len(beta), family.features.shape[2]))
    for configuration, rows in penalties:
        for i in range(*rows.indices(len(beta))):
            behaviour = None if tables.sampler is tables.log_probs else tables.sampler[i]
            pair = replace(
                family.task.pair,
                policy=family.policy_of(tables.log_probs[i]),
                reference=tables.reference[i],
                behaviour=behaviour,
            )
            out[i] = expected_update(family.task, pair, configuration, float(beta[i]), algorithm)
    return out
