"""Will a configuration hold, drift or collapse? From its linearised field and the exact covariance of its noise.

Around a fixed point of the expected update, with A = 1 + eta J and Sigma the exact covariance of one update's
direction times N, the second moment P of the distance x obeys

    P' = A P A' + eta^2 / N (Sigma + 1/2 sum_ij d_i d_j Sigma P_ij),

whose linear part decides mean-square stability: noise that grows with the distance (the penalty's own, which
vanishes at the reference) counts as well as noise that does not (the reward's). Plain SGD, on-policy, the reward
with a leave-one-out baseline. Shapes: d parameters, r identifiable directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from klgrad.analysis.dynamics.batches import Sequences
from klgrad.analysis.dynamics.flows import RUNAWAY, Field, FixedPoint, field_of, follow, jacobian
from klgrad.analysis.dynamics.measures import Measures
from klgrad.analysis.dynamics.recipes import Algorithm
from klgrad.analysis.dynamics.updates import Tables, ascent
from klgrad.synth.configurations import Configuration, parse
from klgrad.synth.estimators import Estimator
from klgrad.synth.exact import kl
from klgrad.synth.moments import full_fits, moments
from klgrad.synth.objectives import Family
from klgrad.synth.policies import PolicyPair

if TYPE_CHECKING:
    from jaxtyping import Float

TOLERANCE = 0.5  # nats of expected KL between the fixed point and a policy that still counts as held
MAX_DIRECTIONS = 24
_STEP = 1e-3  # of the covariance's second differences


def with_reward(configuration: Configuration, family: Family, beta: float, group: int = 0) -> Configuration:
    """One configuration whose gradient is that of beta times the penalty minus the reward, for the exact moments.

    The reward is one more value of a token: what it pays, plus what the terminal reward rises by (the sum is the
    terminal reward less its value at the start, a constant that the leave-one-out baseline takes out).

    Raises:
        ValueError: for a configuration that is not one number per sequence in the reward, or a full-vocabulary loss.
    """
    plain = replace(configuration, baseline="none", baseline_value=0.0)
    usual = configuration.ratio == "none" and configuration.aggregation == "sum" and configuration.baseline == "none"
    if not usual or (configuration.in_reward and configuration.credit != "whole"):
        raise ValueError(
            f"{configuration}: stability is exact for a plain sum over tokens, whole credit, and no baseline of the "
            "configuration's own (the algorithm's acts on the sum); drop the options"
        )
    est, task = configuration.estimator, family.task
    if est.full:
        raise ValueError(f"{configuration}: stability is for estimators of the sampled token; take k2-in-loss")
    rise = task.reward.terminal[task.pair.automaton.next_context] - task.reward.terminal[:, None]
    paid = np.where(task.pair.automaton.alive[:, None], task.reward.edge + rise, 0.0)
    weight = beta if configuration.in_reward else 0.0

    def value(delta: np.ndarray) -> np.ndarray:
        return weight * est.value(delta) - paid

    def slope(delta: np.ndarray) -> np.ndarray:
        return beta * est.slope(delta)

    combined = Estimator(f"{est} and {task.reward.name}", value, slope, False, False, False)
    placement = "both" if configuration.in_loss else "reward"
    return replace(plain, estimator=combined, placement=placement, baseline="loo", baseline_value=float(group))


def noise(
    pair: PolicyPair, combined: Configuration, length: int, samples: int, basis: Float[np.ndarray, "d r"]
) -> Float[np.ndarray, "r r"]:
    """``[r, r]`` N times the exact covariance of one update's direction."""
    found = moments(pair, [combined], [length], covariance="full", samples=samples)[0].covariance
    assert found is not None
    return basis.T @ found[0] @ basis


@dataclass(frozen=True, eq=False)
class Stability:
    """What is expected of one configuration at one beta, learning rate and batch size.

    Args:
        fixed_point: where the mean field leads from the start.
        growth: the factor by which the mean-square distance grows per update near it; below 1 it is stable.
        expected_kl: KL(fixed point || policy) in the stationary state, to second order; inf where there is none.
        critical_rate: the learning rate at which growth reaches 1; NaN where there is no point that attracts.
        verdict: ``hold``, ``drift`` or ``collapse``.
        because: why, in a sentence.
    """

    fixed_point: FixedPoint
    growth: float
    expected_kl: float
    critical_rate: float
    verdict: str
    because: str


def stability(
    family: Family,
    configuration: Configuration,
    beta: float,
    learning_rate: float,
    start: Float[np.ndarray, " d"],
    *,
    samples: int = 256,
    tolerance: float = TOLERANCE,
) -> Stability:
    """The verdict on a configuration, trained by SGD on leave-one-out advantages of N sequences a step.

    ``hold``: an attracting point, and the noise keeps within ``tolerance`` of it. ``drift``: it does not settle: no
    restoring force to first order, no point at finite distance, noise that carries it past the tolerance, or steps
    that overshoot and swing within it. ``collapse``: the mean field runs away, or step and noise outgrow the pull of
    the point that attracts. Close to the critical rate the field is no longer linear on the way the noise carries it,
    and the predicted KL is too large.

    Raises:
        ValueError: for too many parameters, or a configuration outside ``with_reward``.
    """
    if learning_rate <= 0:
        raise ValueError(f"learning rate = {learning_rate:g} must be positive")
    if samples < 2:
        raise ValueError(f"samples = {samples} is too few: leave-one-out needs at least 2")
    basis = family.basis
    if basis.shape[1] > MAX_DIRECTIONS or not full_fits(family.task.pair):
        raise ValueError(
            f"stability takes up to {MAX_DIRECTIONS} identifiable directions; this policy has {basis.shape[1]}: "
            "take fewer contexts or share parameters"
        )
    combined = with_reward(configuration, family, beta)
    field = field_of(family, configuration, beta)
    point = follow(family, field, start, longest=1e5)
    if not point.settled:
        return _without_point(point)
    J = jacobian(family, field, point.theta)
    sigma, curvature = _noise_around(family, combined, point.theta, samples)
    growth = _growth(J, curvature, learning_rate, samples)
    attracts = point.kind in ("attracting", "spiral")
    expected, critical = np.inf, np.nan
    if attracts:
        critical = _critical(J, curvature, samples)
    if attracts and growth < 1:
        spread = _stationary(J, sigma, curvature, learning_rate, samples)
        fisher = noise(family.pair(point.theta), parse("k1-in-loss"), family.task.length, samples, basis)
        expected = max(float(np.einsum("ij,ji->", fisher, spread)) / 2, 0.0)  # below zero it is rounding
    overshoots = float(np.abs(1 + learning_rate * point.eigenvalues).max()) >= 1
    swing = _swing(family, field, point, learning_rate) if attracts and overshoots else np.nan
    decided = _verdict(point, growth, expected, swing, critical, tolerance)
    return Stability(point, growth, expected, critical, *decided)


def _swing(family: Family, field: Field, point: FixedPoint, rate: float, steps: int = 200) -> float:
    """The greatest KL from the point that expected steps of this length swing out to, from next to it."""
    worst = int(np.abs(1 + rate * point.eigenvalues).argmax())
    direction = np.linalg.eig(jacobian(family, field, point.theta))[1].real
    theta, target, furthest = point.theta + 1e-2 * family.basis @ direction[:, worst], point.theta, 0.0
    here = family.policy(target)
    for _ in range(steps):
        with np.errstate(all="ignore"):
            theta = theta + rate * field(theta)
        if not np.isfinite(theta).all() or np.abs(theta).max() > RUNAWAY:
            return np.inf
        reference = family.policy(theta).log_probs
        apart = kl(replace(family.task.pair, policy=here, reference=reference), [family.task.length])[0]
        furthest = max(furthest, float(apart))
    return furthest


def _without_point(point: FixedPoint) -> Stability:
    if point.runaway:
        return Stability(point, np.nan, np.inf, np.nan, "collapse", "the mean field runs away to infinity")
    return Stability(point, np.nan, np.inf, np.nan, "drift", "the mean field leads to no point at finite distance")


def _verdict(
    point: FixedPoint, growth: float, expected: float, swing: float, critical: float, tolerance: float
) -> tuple[str, str]:
    if point.kind == "unstable":
        return "drift", "the mean field leads away from the point"
    if point.kind == "neutral":
        return "drift", "nothing pulls back to first order"
    if growth >= 1 and swing <= tolerance:
        return "drift", f"learning rate past {critical:.3g}: it does not settle, but swings within {swing:.2g} nats"
    if growth >= 1:
        return "collapse", f"learning rate past {critical:.3g}: step or noise outgrow the pull"
    if expected > tolerance:
        return "drift", f"the noise carries it {expected:.3g} nats from the point that attracts, past the tolerance"
    return "hold", f"the noise keeps it within {expected:.3g} nats of the point that attracts"


def _noise_around(
    family: Family, combined: Configuration, theta: np.ndarray, samples: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sigma ``[r, r]``, and its second derivatives ``[r, r, r, r]`` (the last two are the directions)."""
    basis, length = family.basis, family.task.length
    r = basis.shape[1]

    def at(*moves: tuple[int, int]) -> np.ndarray:
        shift = sum((sign * _STEP * basis[:, i] for i, sign in moves), np.zeros(len(basis)))
        return noise(family.pair(theta + shift), combined, length, samples, basis)

    here = at()
    second = np.zeros((r, r, r, r))
    for i in range(r):
        second[:, :, i, i] = (at((i, 1)) - 2 * here + at((i, -1))) / _STEP**2
        for j in range(i):
            mixed = at((i, 1), (j, 1)) - at((i, 1), (j, -1)) - at((i, -1), (j, 1)) + at((i, -1), (j, -1))
            second[:, :, i, j] = second[:, :, j, i] = mixed / (4 * _STEP**2)
    return here, second


def _operator(J: np.ndarray, curvature: np.ndarray, rate: float, samples: int) -> np.ndarray:
    """``[r^2, r^2]`` what moves P one update on."""
    r = len(J)
    A = np.eye(r) + rate * J
    return np.kron(A, A) + rate**2 / (2 * samples) * curvature.reshape(r * r, r * r)


def _growth(J: np.ndarray, curvature: np.ndarray, rate: float, samples: int) -> float:
    return float(np.abs(np.linalg.eigvals(_operator(J, curvature, rate, samples))).max())


def _stationary(
    J: np.ndarray, sigma: np.ndarray, curvature: np.ndarray, rate: float, samples: int
) -> Float[np.ndarray, "r r"]:
    """``[r, r]`` the P that one update leaves as it is."""
    r = len(J)
    operator = np.eye(r * r) - _operator(J, curvature, rate, samples)
    return np.linalg.solve(operator, rate**2 / samples * sigma.ravel()).reshape(r, r)


def _critical(J: np.ndarray, curvature: np.ndarray, samples: int) -> float:
    """The learning rate at which the growth reaches 1, by bisection; 0 where small ones do not stay below."""
    scale = 1 / max(float(np.abs(np.linalg.eigvals(J)).max()), 1e-12)
    low, high = 1e-3 * scale, 4 * scale
    if _growth(J, curvature, low, samples) >= 1:
        return 0.0
    while _growth(J, curvature, high, samples) < 1:  # A alone makes it 1 at 2 / |J|
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _growth(J, curvature, middle, samples) < 1 else (low, middle)
    return low


# --------------------------------------------------------------------------------------------- the simulation


@dataclass(frozen=True, eq=False)
class Simulated:
    """Independent runs from one point.

    Args:
        distance: ``[C, L]`` KL of each run from the point at the steps asked for, inf once not finite.
        theta: ``[C, d]`` where they ended.
    """

    distance: Float[np.ndarray, "C L"]
    theta: Float[np.ndarray, "C d"]


def simulate(
    family: Family,
    configuration: Configuration,
    beta: float,
    learning_rate: float,
    point: Float[np.ndarray, " d"],
    steps: Sequence[int],
    *,
    samples: int = 256,
    runs: int = 32,
    seed: int = 0,
    away_from: Float[np.ndarray, " d"] | None = None,
) -> Simulated:
    """Runs by SGD on leave-one-out advantages, each with its own sequences, from a point: the verdict's check.

    Args:
        steps: the updates after which KL(``away_from`` || policy) is taken; from ``point`` itself if left out.
    """
    algorithm, task = Algorithm(samples=samples), family.task
    measures, sequences = Measures(family, np.full(runs, beta)), Sequences(family, runs, samples)
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(steps[-1], samples)))
    theta = np.repeat(np.asarray(point, float)[None], runs, axis=0)
    reference = np.broadcast_to(task.pair.reference, (runs, *task.pair.reference.shape))
    target, found = family.policy(point if away_from is None else away_from), np.full((runs, len(steps)), np.inf)
    fine = np.ones(runs, bool)
    for k in range(1, max(steps) + 1):
        log_probs = measures.log_probs(theta)
        tables = Tables(log_probs, reference, log_probs, measures.alive)
        batch = sequences.draw(log_probs, None, rng.random((task.length, runs, samples)))
        step = learning_rate * ascent(
            algorithm, [(configuration, slice(0, runs))], measures.beta, batch, tables, measures
        )
        fine &= np.isfinite(step).all(axis=1) & (np.abs(theta + step) < 1e6).all(axis=1)
        theta = np.where(fine[:, None], theta + step, theta)
        for column in np.flatnonzero(np.asarray(steps) == k):
            now = measures.log_probs(theta)
            each = [kl(replace(task.pair, policy=target, reference=q), [task.length])[0] for q in now]
            found[:, column] = np.where(fine, each, np.inf)
    return Simulated(found, theta)
