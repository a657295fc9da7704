"""The expected update of each configuration, exactly: a vector field on the parameters, and what it is like.

Ascent throughout: the field of k1-in-reward is the gradient of J = E[R] - beta KL. Shapes: C runs, S contexts,
V tokens, d parameters, r identifiable directions (``Family.basis``).
"""

from __future__ import annotations

from dataclasses import replace
from math import comb
from typing import TYPE_CHECKING

import numpy as np

from klgrad.analysis.dynamics.passes import Passes
from klgrad.analysis.dynamics.recipes import Algorithm, is_folded
from klgrad.analysis.dynamics.updates import EPSILON, Penalties, Tables
from klgrad.synth.configurations import Configuration
from klgrad.synth.moments import moments
from klgrad.synth.objectives import expected_reward, reward_gradient
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


def on_policy_fields(
    passes: Passes,
    configuration: Configuration | None,
    beta: Float[np.ndarray, " C"],
    log_probs: Float[np.ndarray, "C S V"],
    reference: Float[np.ndarray, "C S V"],
    algorithm: Algorithm,
) -> Float[np.ndarray, "C d"]:
    """``[C, d]`` expected on-policy updates at many policies at once, by one pass forward and one back.

    On-policy the past and every baseline drop out in the mean, and ratios are 1. For what ``is_quick`` says; the
    single-policy twin is ``expected_update``.
    """
    tables, task = Tables(log_probs, reference, log_probs, passes.alive), passes.family.task
    probs, factor = passes.probs(log_probs), algorithm.shrinkage
    mass, visits = passes.visits(probs)
    paid = np.broadcast_to(factor * task.reward.edge.T[:, None, :], probs.shape)
    beside, loss = np.zeros(probs.shape), np.zeros(log_probs.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        each = None if configuration is None else (beta / configuration.divisor)[:, None]
        if configuration is not None and configuration.in_reward:
            value = each * tables.values(configuration).transpose(2, 0, 1)
            value = np.where(probs > 0, value, 0.0)  # a token that is never emitted has no value, however far out
            if configuration.credit in ("whole", "rtg"):
                paid = paid - (factor if is_folded(configuration, algorithm) else 1.0) * value
            else:
                beside = visits * value
            if configuration.credit == "future":
                beside = passes.returns(probs, mass, visits, value, np.zeros(passes.shape[0])) - beside
        weight = passes.returns(probs, mass, visits, paid, factor * task.reward.terminal) - beside
        weight = (np.where(probs > 0, probs * weight, 0.0)).transpose(1, 2, 0)
        if configuration is not None and configuration.in_loss:
            slope = tables.slopes(configuration)
            own = slope if configuration.estimator.full else probs.transpose(1, 2, 0) * slope
            loss = (each * visits)[:, :, None] * np.where(probs.transpose(1, 2, 0) > 0, own, 0.0)
        return passes.to_parameters(weight - loss, np.exp(log_probs))


def is_quick(configuration: Configuration | None, algorithm: Algorithm) -> bool:
    """Whether ``on_policy_fields`` covers it: no standard deviation, and no division by random lengths."""
    return algorithm.advantage != "grpo" and (configuration is None or configuration.aggregation != "length-mean")


def expected_ascent(
    passes: Passes,
    algorithm: Algorithm,
    penalties: Penalties,
    beta: Float[np.ndarray, " C"],
    tables: Tables,
) -> Float[np.ndarray, "C d"]:
    """``[C, d]`` the expected direction of each run, in the place of ``updates.ascent``."""
    family, on_policy = passes.family, tables.sampler is tables.log_probs
    out = np.empty((len(beta), family.features.shape[2]))
    for configuration, rows in penalties:
        if on_policy and is_quick(configuration, algorithm):
            here, reference = tables.log_probs[rows], tables.reference[rows]
            out[rows] = on_policy_fields(passes, configuration, beta[rows], here, reference, algorithm)
            continue
        for i in range(*rows.indices(len(beta))):
            policy, behaviour = family.policy_of(tables.log_probs[i]), None if on_policy else tables.sampler[i]
            pair = replace(family.task.pair, policy=policy, reference=tables.reference[i], behaviour=behaviour)
            out[i] = expected_update(family.task, pair, configuration, float(beta[i]), algorithm)
    return out
