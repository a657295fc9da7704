"""Tables of what expected fields are like: where they end, curl by length, pull, the plane of two parameters.

One row per configuration and beta, length or point; figures draw them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.analysis.dynamics.flows import (
    closed_form,
    curl,
    field_of,
    follow,
    jacobian,
    penalty_field,
    pull,
    trajectory,
)
from klgrad.synth.configurations import Configuration
from klgrad.synth.exact import entropy, kl
from klgrad.synth.objectives import Family, best, expected_reward, objective, visited
from klgrad.synth.rewards import Task

if TYPE_CHECKING:
    import pandas as pd
    from jaxtyping import Float

Progress = Callable[[int, int], None]
ENDS = (
    "task", "configuration", "estimator", "placement", "beta", "length", "kind", "objective", "gap", "reward", "kl",
    "entropy", "out_of_domain", "residual", "eigenvalue", "rotation", "closed_form_distance", "curl", "pull_order",
    "pull_towards",
)  # fmt: skip
CURLS = ("task", "configuration", "estimator", "placement", "length", "curl")
PHASES = ("task", "configuration", "estimator", "placement", "beta", "what", "path", "x", "y", "u", "v", "objective")


def _named(task: Task, configuration: Configuration) -> dict[str, Any]:
    return {
        "task": task.pair.name,
        "configuration": str(configuration),
        "estimator": str(configuration.estimator),
        "placement": configuration.placement,
    }


def _direction(family: Family, seed: int) -> Float[np.ndarray, " d"]:
    """``[d]`` a standard normal step in the identifiable directions."""
    return family.basis @ np.random.default_rng(seed).normal(size=family.basis.shape[1])


def ends_table(
    family: Family,
    configurations: Sequence[Configuration],
    betas: Sequence[float],
    start: Float[np.ndarray, " d"],
    *,
    longest: float = 1e5,
    seed: int = 0,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Where each expected field leads from ``start``, and what it is like there and near the reference.

    Columns: ``kind`` of the end (``flows.FixedPoint``), the exact measures there, ``gap`` J* - J, the largest real
    part of an eigenvalue and the largest imaginary one (``rotation``), the largest difference of a log-prob from the
    closed form where there is one, ``curl`` of the penalty's own field a normal step from the reference, and the
    order and sense of its pull along that step.
    """
    import pandas as pd

    task, rows = family.task, []
    todo = [(beta, configuration) for beta in betas for configuration in configurations]
    for done, (beta, configuration) in enumerate(todo, 1):
        found = follow(family, field_of(family, configuration, beta), start, longest)
        pair = family.pair(found.theta)
        value = objective(task, pair, beta)
        eigenvalues = found.eigenvalues if found.settled else np.array([complex(np.nan, np.nan)])
        rows.append({
            **_named(task, configuration), "beta": beta, "length": task.length, "kind": found.kind,
            "objective": value, "gap": best(task, beta).objective - value,
            "reward": expected_reward(pair, task.reward, task.length), "kl": kl(pair, [task.length])[0],
            "entropy": entropy(pair, [task.length])[0],
            "out_of_domain": expected_reward(pair, task.out_of_domain, task.length),
            "residual": found.residual, "eigenvalue": eigenvalues.real.max(),
            "rotation": np.abs(eigenvalues.imag).max(),
            "closed_form_distance": _from_closed_form(family, configuration, beta, found.theta)
            if found.settled else np.nan,
            **_near_reference(family, configuration, seed),
        })  # fmt: skip
        if progress:
            progress(done, len(todo))
    return pd.DataFrame(rows, columns=list(ENDS))


def _from_closed_form(family: Family, configuration: Configuration, beta: float, theta: np.ndarray) -> float:
    try:
        expected = closed_form(family, configuration, beta)
    except ValueError:  # contexts that do not know their time
        return np.nan
    if expected is None:
        return np.nan
    return float(np.abs(family.policy(theta).log_probs - expected)[visited(family.task)].max())


def _near_reference(family: Family, configuration: Configuration, seed: int) -> dict[str, float]:
    step = _direction(family, seed)
    try:
        origin = family.parameters_of(family.task.pair.reference)
    except ValueError:  # a reference that no parameters give has no neighbourhood in the family
        return {"curl": np.nan, "pull_order": np.nan, "pull_towards": np.nan}
    near = pull(family, configuration, step)
    return {
        "curl": _own_curl(family, configuration, origin + step),
        "pull_order": near.order,
        "pull_towards": near.towards,
    }


def _own_curl(family: Family, configuration: Configuration, theta: np.ndarray) -> float:
    """Curl of the penalty's field alone; the reward's is a gradient and would only dilute it."""
    return curl(jacobian(family, penalty_field(family, configuration), theta))


def curl_table(
    families: Sequence[Family],
    configurations: Sequence[Configuration],
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Curl of each penalty's own field, a normal step from the reference, for one family per length."""
    import pandas as pd

    rows = []
    for done, family in enumerate(families, 1):
        theta = family.parameters_of(family.task.pair.reference) + _direction(family, seed)
        rows += [
            {
                **_named(family.task, configuration),
                "length": family.task.length,
                "curl": _own_curl(family, configuration, theta),
            }
            for configuration in configurations
        ]
        if progress:
            progress(done, len(families))
    return pd.DataFrame(rows, columns=list(CURLS))


def phase_table(
    family: Family,
    configurations: Sequence[Configuration],
    beta: float,
    *,
    extent: float = 4.0,
    points: int = 15,
    duration: float = 200.0,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """The plane of two parameters around the reference: the field on a grid, J, and trajectories of each field.

    Columns: ``what`` is ``field`` (u, v the field at x, y; ``objective`` J there), ``path`` (points of trajectory
    number ``path``, J along it), ``reference`` or ``end`` (where the trajectory from the reference leads).

    Args:
        extent: half the width of the plane, in the units of the parameters.
        points: grid points along a side.
        duration: tau that trajectories are followed for.

    Raises:
        ValueError: for a family that has not two identifiable directions.
    """
    import pandas as pd

    if family.basis.shape[1] != 2:
        raise ValueError(
            f"a phase portrait needs two identifiable directions; this policy has {family.basis.shape[1]}: "
            "take --task phase"
        )
    task, basis = family.task, family.basis
    centre = family.parameters_of(task.pair.reference)
    offset = basis.T @ centre
    sides = np.linspace(-extent, extent, points)
    starts = [(x, y) for x in (-0.8 * extent, 0.8 * extent) for y in (-0.8 * extent, 0.0, 0.8 * extent)]
    times = np.concatenate([[0.0], np.geomspace(0.05, duration, 60)])
    rows: list[dict[str, Any]] = []
    for done, configuration in enumerate(configurations, 1):
        field = field_of(family, configuration, beta)
        same = {**_named(task, configuration), "beta": beta}

        def row(what: str, theta: np.ndarray, same: dict[str, Any] = same, **more: Any) -> dict[str, Any]:
            x, y = basis.T @ theta
            return {
                **same,
                "what": what,
                "x": x,
                "y": y,
                "objective": objective(task, family.pair(theta), beta),
                **more,
            }

        grid = centre + np.array([(dx, dy) for dx in sides for dy in sides]) @ basis.T
        for theta, (u, v) in zip(grid, field(grid) @ basis, strict=True):
            rows.append(row("field", theta, u=u, v=v))
        for number, begin in enumerate([(0.0, 0.0), *starts]):
            path = trajectory(family, field, centre + basis @ np.array(begin), times.tolist(), 1e-3)
            inside = np.isfinite(path).all(axis=1)
            inside &= (np.abs(np.nan_to_num(path) @ basis - offset) <= 1.5 * extent).all(axis=1)
            rows += [row("path", theta, path=number) for theta in path[: int(np.argmin([*inside, False]))]]
        rows.append(row("reference", centre))
        end = follow(family, field, centre, longest=1e4)
        if end.settled:
            rows.append(row("end", end.theta))
        if progress:
            progress(done, len(configurations))
    return pd.DataFrame(rows, columns=list(PHASES))
