"""The study on a language model: reward and KL over training, in- against out-of-domain, and the reward-KL frontier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from klgrad.figures import style

CURVES = ("configuration", "estimator", "placement", "beta", "seed", "staleness", "step", "reward", "kl")
SUMMARY = (
    "configuration", "estimator", "placement", "beta", "staleness", "reward", "kl", "in_domain", "out_of_domain",
)  # fmt: skip
_SMOOTH = 9  # rounds in a running mean of the reward
_SIZES = (5.0, 3.2)  # of markers: the larger beta is the larger mark


def study(curves: pd.DataFrame, table: pd.DataFrame) -> Figure:
    """Four panels for one staleness: curves are means over seeds, bands run from the lowest to the highest seed.

    Args:
        curves: one row per run and round, with the columns ``CURVES``.
        table: one row per configuration and beta, with ``SUMMARY`` and the standard errors ``NAME_error``.

    Raises:
        ValueError: for a frame without rows or lacking a column.
    """
    for frame, columns in ((curves, CURVES), (table, SUMMARY)):
        lacking = [name for name in columns if name not in frame.columns]
        if lacking or not len(frame):
            raise ValueError(f"the frame has no rows or lacks the columns {', '.join(lacking)}: nothing to show")
    looks, betas = style.looks(table), sorted(table["beta"][table["beta"] > 0].unique(), reverse=True)
    with style.context():
        handles, labels = _legend(looks, betas)
        figure = Figure(figsize=(style.WIDTH, 5.0 + style.legend_height(labels)), layout="constrained")
        (reward, kl), (domains, frontier) = figure.subplots(2, 2)
        _over_training(reward, curves, "reward", looks, betas)
        reward.set(title="reward over training", ylabel="mean reward")
        _over_training(kl, curves, "kl", looks, betas)
        kl.set(title="KL over training", ylabel="exact sequence KL (nats)")
        _points(domains, table, "in_domain", "out_of_domain", looks, betas)
        domains.set(title="in-domain against out-of-domain", xlabel="in-domain score", ylabel="out-of-domain score")
        _points(frontier, table, "kl", "reward", looks, betas)
        frontier.set(title="frontier: reward against KL", xlabel="exact sequence KL (nats)", ylabel="final reward")
        if (curves["kl"] > 0).any():
            kl.set_yscale("log")
        if (table["kl"] > 0).all():
            frontier.set_xscale("log")
        for axes in (reward, kl):
            axes.set_xlabel("round")
        style.legend(figure, handles, labels)
    return figure


def _width(beta: float, betas: Sequence[float]) -> tuple[float, float]:
    """Line width and opacity: the larger beta is the heavier line."""
    rank = list(betas).index(beta) if beta in betas else 0
    return 1.5 - 0.6 * min(rank, 1), 1.0 if rank == 0 else 0.65


def _over_training(
    axes: Axes, curves: pd.DataFrame, name: str, looks: dict[str, style.Look], betas: Sequence[float]
) -> None:
    for (configuration, beta), rows in curves.astype({"beta": float}).groupby(["configuration", "beta"], sort=False):
        runs = rows.pivot_table(index="step", columns="seed", values=name).astype(float)
        runs = runs.rolling(_SMOOTH, min_periods=1, center=True).mean()
        look, (width, opacity) = looks[str(configuration)], _width(float(str(beta)), betas)
        low, high = runs.min(axis=1).to_numpy(float), runs.max(axis=1).to_numpy(float)
        axes.fill_between(runs.index, low, high, color=look.colour, alpha=0.10 * opacity, linewidth=0)
        axes.plot(
            runs.index, runs.mean(axis=1), color=look.colour, linestyle=look.linestyle, linewidth=width, alpha=opacity,
            label=f"{configuration} {beta:g}",
        )  # fmt: skip


def _points(
    axes: Axes, table: pd.DataFrame, x: str, y: str, looks: dict[str, style.Look], betas: Sequence[float]
) -> None:
    for row in table.to_dict("records"):
        look = looks[str(row["configuration"])]
        rank = list(betas).index(row["beta"]) if row["beta"] in betas else 0
        errors = [row.get(f"{name}_error", np.nan) for name in (x, y)]
        axes.errorbar(
            row[x], row[y], xerr=_bar(errors[0]), yerr=_bar(errors[1]), color=look.colour, marker=look.marker,
            markerfacecolor=look.face, markersize=_SIZES[min(rank, 1)], markeredgewidth=0.9, elinewidth=0.7,
            linestyle="none", label=f"{row['configuration']} {row['beta']:g}",
        )  # fmt: skip


def _bar(error: Any) -> Any:
    return None if error is None or not np.isfinite(error) else error


def _legend(looks: dict[str, style.Look], betas: Sequence[float]) -> tuple[list[Any], list[str]]:
    handles: list[Any] = [style.handle(look) for look in looks.values()]
    labels = list(looks)
    for rank, beta in enumerate(betas):
        width, opacity = _width(beta, betas)
        handles.append(Line2D(
            [], [], color="0.3", linewidth=width, alpha=opacity, marker="o", markersize=_SIZES[min(rank, 1)],
        ))  # fmt: skip
        labels.append(f"beta = {beta:g}")
    return handles, labels
