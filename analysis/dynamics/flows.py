"""Following a configuration's expected field: trajectories, where they end, and what the field is like there.

d theta / d tau = field(theta), with tau = learning rate x updates. Only the r identifiable directions of the
parameters move (``Family.basis``); Jacobians and eigenvalues are stated in them. Shapes: d parameters, K times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.analysis.dynamics.fields import expected_update, is_quick, on_policy_fields
from klgrad.analysis.dynamics.passes import Passes
from klgrad.analysis.dynamics.recipes import Algorithm
from klgrad.analysis.verdicts import verdict
from klgrad.synth.configurations import Configuration
from klgrad.synth.objectives import Family, token_fixed_point
from klgrad.synth.rewards import Reward

if TYPE_CHECKING:
    from jaxtyping import Complex, Float

STEP = 1e-5  # of the central differences: their error is its square
_ROUNDING = 1e-9  # what those differences make of a field that is zero
SETTLED = 1e-9  # norm of a field that has come to rest, in the units of its start
_LONGEST = 1e7  # tau after which a trajectory that has not settled is said not to
RUNAWAY = 200.0  # a parameter this far out leaves no doubt: its softmax differs from a limit by exp(-200)

Field = Callable[[np.ndarray], np.ndarray]  # of one point [d] or many [C, d]


def field_of(
    family: Family, configuration: Configuration | None, beta: float, algorithm: Algorithm | None = None
) -> Field:
    """``theta [d] -> [d]``, or ``[C, d] -> [C, d]``: the expected on-policy update of a configuration."""
    algorithm, passes = algorithm or Algorithm(), Passes(family)
    reference = family.task.pair.reference

    def quick(theta: np.ndarray) -> np.ndarray:
        many = np.atleast_2d(theta)
        log_probs = passes.log_probs(many)
        same = np.broadcast_to(reference, log_probs.shape)
        found = on_policy_fields(passes, configuration, np.full(len(many), beta), log_probs, same, algorithm)
        return found.reshape(theta.shape)

    def one(theta: np.ndarray) -> np.ndarray:
        return expected_update(family.task, family.pair(theta), configuration, beta, algorithm)

    def each(theta: np.ndarray) -> np.ndarray:
        return one(theta) if theta.ndim == 1 else np.stack([one(row) for row in theta])

    return quick if is_quick(configuration, algorithm) else each


def trajectory(
    family: Family, field: Field, start: Float[np.ndarray, " d"], times: Sequence[float], tolerance: float = 1e-9
) -> Float[np.ndarray, "K d"]:
    """``[K, d]`` the solution of the ODE at the times; NaN from where a parameter has run away.

    Args:
        start: ``[d]`` parameters at time 0.
        times: rising, 0 or more.
        tolerance: relative, of the solver's steps.
    """
    wanted = np.asarray(times, float)
    if wanted.size == 0 or (np.diff(wanted) < 0).any() or wanted[0] < 0:
        raise ValueError("times must rise and not be negative")
    out = np.full((len(wanted), len(start)), np.nan)
    out[wanted == 0] = start
    later = np.unique(wanted[wanted > 0])
    if later.size:
        solved = _solve(family, field, start, float(later[-1]), tolerance, t_eval=later)
        for time, moved in zip(solved.t, solved.y.T, strict=True):
            out[wanted == time] = start + family.basis @ moved
    return out


def _solve(family: Family, field: Field, start: np.ndarray, end: float, tolerance: float, **options: Any) -> Any:
    """The way from ``start`` in the identifiable directions, ``y [r, times]``; stops where a parameter has run away.

    LSODA, as fields become stiff when policies become certain.
    """
    from scipy.integrate import solve_ivp

    basis = family.basis

    def place(moved: np.ndarray) -> np.ndarray:
        # a trial step may be absurd: the solver rejects it by its error
        return np.clip(start + basis @ np.nan_to_num(moved), -2 * RUNAWAY, 2 * RUNAWAY)

    def rate(_: float, moved: np.ndarray) -> np.ndarray:
        return np.nan_to_num(basis.T @ field(place(moved)))

    def gone(_: float, moved: np.ndarray) -> float:
        return RUNAWAY - float(np.abs(start + basis @ moved).max())

    gone.terminal = True  # type: ignore[attr-defined]
    with np.errstate(all="ignore"):
        return solve_ivp(
            rate, (0.0, end), np.zeros(basis.shape[1]), method="LSODA", rtol=tolerance, atol=tolerance / 100,
            events=gone, **options,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class FixedPoint:
    """Where a trajectory ends.

    Args:
        theta: ``[d]`` the parameters there.
        residual: norm of the field there.
        settled: whether the field vanishes there.
        runaway: whether a parameter passed ``RUNAWAY``.
        eigenvalues: ``[r]`` of the field's Jacobian there, largest real part first: below 0 all, it attracts.
    """

    theta: Float[np.ndarray, " d"]
    residual: float
    settled: bool
    runaway: bool
    eigenvalues: Complex[np.ndarray, " r"]

    @property
    def kind(self) -> str:
        """``attracting``, ``spiral`` (attracting, with rotation), ``neutral``, ``unstable``; or no point at all:

        ``runaway``, or ``moving`` where the trajectory still creeps on.
        """
        if not self.settled:
            return "runaway" if self.runaway else "moving"
        real, imaginary = self.eigenvalues.real, self.eigenvalues.imag
        nothing = max(1e-6 * float(np.abs(self.eigenvalues).max()), 1e-8)  # differences know no better
        if real.max() > nothing:
            return "unstable"
        if real.max() > -nothing:
            return "neutral"
        return "spiral" if np.abs(imaginary).max() > nothing else "attracting"


def follow(family: Family, field: Field, start: Float[np.ndarray, " d"], longest: float = _LONGEST) -> FixedPoint:
    """The limit of the trajectory from ``start``: the ODE over ever longer times, then Newton's method.

    Args:
        longest: tau after which to give up.
    """
    theta, span = np.asarray(start, float), 10.0
    begun = max(float(np.linalg.norm(field(theta))), 1e-12)
    gone, runaway = 0.0, False
    while gone < longest:
        solved = _solve(family, field, theta, span, 1e-6)
        theta, runaway = theta + family.basis @ solved.y[:, -1], solved.status != 0
        if runaway:
            break
        gone, span = gone + span, 4 * span
        if np.linalg.norm(field(theta)) < 1e-3 * begun:
            refined = _newton(family, field, theta)
            if refined is not None:
                theta = refined
                break
    with np.errstate(all="ignore"):
        residual = float(np.linalg.norm(field(theta)))
    matrix = jacobian(family, field, theta)
    finite = np.isfinite(matrix).all()
    values = np.linalg.eigvals(matrix) if finite else np.full(len(matrix), np.nan + 0j)
    order = np.argsort(-values.real, kind="stable")
    return FixedPoint(theta, residual, not runaway and residual <= SETTLED * max(begun, 1e-3), runaway, values[order])


def _newton(family: Family, field: Field, theta: np.ndarray, near: float = 0.5) -> np.ndarray | None:
    """The zero next to theta, or None where Newton's method leaves its neighbourhood or does not arrive."""
    at, basis = theta.copy(), family.basis
    for _ in range(20):
        value = basis.T @ field(at)
        if np.linalg.norm(value) < 1e-14:
            break
        move = np.linalg.lstsq(jacobian(family, field, at), -value, rcond=1e-12)[0]
        if not np.isfinite(move).all() or np.linalg.norm(at + basis @ move - theta) > near:
            return None
        at = at + basis @ move
        if np.linalg.norm(move) < 1e-13:
            break
    return at if np.linalg.norm(basis.T @ field(at)) < 1e-10 else None


def jacobian(
    family: Family, field: Field, theta: Float[np.ndarray, " d"], step: float = STEP
) -> Float[np.ndarray, "r r"]:
    """``[r, r]`` derivatives of the field by central differences, in the identifiable directions."""
    basis = family.basis
    moved = field(np.concatenate([theta + step * basis.T, theta - step * basis.T]))
    ahead, behind = np.split(moved, 2)
    return basis.T @ ((ahead - behind) / (2 * step)).T


def curl(matrix: Float[np.ndarray, "r r"]) -> float:
    """|J - J'| / |J| (Frobenius): 0 for a gradient, 2 for pure rotation; NaN where the Jacobian is zero [C3]."""
    size = float(np.linalg.norm(matrix))
    return float(np.linalg.norm(matrix - matrix.T)) / size if size > _ROUNDING else np.nan


# ---------------------------------------------------------------------------------------- near the reference


@dataclass(frozen=True)
class Pull:
    """How a penalty acts near its reference.

    Args:
        order: how its field grows with the distance: 1 is a spring, 2 or more no pull to first order, ``nan`` no
            field at all.
        towards: share of the field that points back to the reference at a small distance, -1 (away) to 1.
    """

    order: float
    towards: float


def pull(
    family: Family, configuration: Configuration, direction: Float[np.ndarray, " d"], distance: float = 1e-3
) -> Pull:
    """Order and sense of the penalty's pull at ``distance`` from the reference along a direction [C4].

    Raises:
        ValueError: when the reference is not one of the family's policies, or the direction changes no policy.
    """
    origin = family.parameters_of(family.task.pair.reference)
    along = family.basis @ (family.basis.T @ np.asarray(direction, float))
    if not np.linalg.norm(along) > 1e-9 * np.linalg.norm(direction):
        raise ValueError("the direction changes no policy")
    along = along / np.linalg.norm(along)
    near, further = penalty_field(family, configuration)(origin + np.array([[distance], [2 * distance]]) * along)
    size = float(np.linalg.norm(near))
    if size < 1e-14:
        return Pull(np.nan, np.nan)
    return Pull(float(np.log2(np.linalg.norm(further) / size)), -float(near @ along) / size)


def penalty_field(family: Family, configuration: Configuration) -> Field:
    """The expected update of the penalty alone, at beta = 1."""
    task = family.task
    nothing = Reward(np.zeros_like(task.reward.edge), np.zeros_like(task.reward.terminal), "none")
    return field_of(replace(family, task=replace(task, reward=nothing)), configuration, 1.0)


# --------------------------------------------------------------------------------------------- closed forms


def closed_form(family: Family, configuration: Configuration, beta: float) -> np.ndarray | None:
    """``[S, V]`` log-probs of the configuration's fixed point where it has a closed form, else None.

    What the expected gradient is decides (``verdicts``): one known field, scaled by any positive factor.

    Raises:
        ValueError: where contexts do not know their time.
    """
    found = verdict(configuration).coefficients
    if found is None or sum(weight != 0 for weight in found) != 1:
        return None
    kind, weight = next(
        (kind, w) for kind, w in zip(("sequence", "token", "token-forward"), found, strict=True) if w != 0
    )
    return token_fixed_point(family.task, beta * weight, kind) if weight > 0 else None
