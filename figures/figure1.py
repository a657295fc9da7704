"""The paper's Figure 1 regenerated: bias and variance of the gradient against sequence length.

Exact values are lines, Monte Carlo is points with bars from the low to the high end of the 95 % interval. The noise
floor, what a configuration without any bias would measure, is dotted: it is not bias. Exact zeros lie in a band of
their own, since a log axis has no place for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator

from klgrad.figures import style
from klgrad.figures.style import Look

COLUMNS = (
    "preset", "configuration", "estimator", "placement", "length", "source", "gradient_norm",
    "bias", "bias_low", "bias_high", "bias_floor", "variance", "variance_low", "variance_high", "samples", "trials",
)  # fmt: skip
QUANTITIES = ("bias", "variance")
LABELS = {
    "bias": "bias  $\\|\\mathrm{E}\\,g - \\nabla\\mathrm{KL}\\|$  (nats)",
    "variance": "variance  $N\\,\\mathrm{tr}\\,\\mathrm{Cov}\\,g$  (nats$^2$)",
}


def figure1(frame: pd.DataFrame) -> Figure:
    """A row of panels per preset, bias and variance side by side.

    Args:
        frame: one row per preset, configuration, length and source (``exact`` or ``monte_carlo``). Values that are
            not finite are left out; ``figure1_caption`` names them.

    Raises:
        ValueError: for a frame without rows or lacking a column.
    """
    rows = style.checked(frame, COLUMNS)
    presets, found = style.names(frame, "preset"), style.looks(frame)
    with style.context():
        handles, labels = _legend(rows, found)
        figure = Figure(figsize=(style.WIDTH, 2.35 * len(presets) + style.legend_height(labels)), layout="constrained")
        panels = figure.subplots(len(presets), 2, squeeze=False, sharex="col")
        for preset, pair in zip(presets, panels, strict=True):
            for quantity, axes in zip(QUANTITIES, pair, strict=True):
                _panel(axes, rows[rows["preset"].astype(str) == preset], quantity, found)
                axes.set_title(f"{preset}: {quantity}" if preset else quantity)
        for axes in panels[-1]:
            axes.set_xlabel("sequence length $T$ (tokens)")
        style.legend(figure, handles, labels)
    return figure


def _panel(axes: Axes, rows: pd.DataFrame, quantity: str, found: dict[str, Look]) -> None:
    exact, drawn = rows[rows["source"] == "exact"], rows[rows["source"] != "exact"]
    zero = style.is_zero(rows, quantity)
    floors = drawn["bias_floor"].tolist() if quantity == "bias" else []
    shown = [*rows.loc[~zero, quantity], *drawn[f"{quantity}_high"], *floors]
    heights = style.log_axis(axes, shown, style.names(rows[zero], "configuration"))
    shifts = _dodge(rows, list(found))
    for name, look in found.items():
        line = exact[exact["configuration"] == name]
        at_zero = np.flatnonzero(zero.loc[line.index].to_numpy(bool))[-1:]  # no points there to tell lines apart
        every: Any = max(1, len(line) // 8) if drawn.empty else at_zero.tolist()
        _exact(axes, line, style.heights(line, quantity, heights), look, name, every)
        points = drawn[drawn["configuration"] == name]
        if quantity == "bias":
            _floor(axes, points, look, name)
        _points(axes, points, quantity, style.heights(points, quantity, heights), shifts[name], look, name)
    axes.set_ylabel(LABELS[quantity])
    _integer_ticks(axes, rows["length"].to_numpy(int))


def _exact(axes: Axes, rows: pd.DataFrame, heights: np.ndarray, look: Look, name: str, every: Any) -> None:
    """The exact curve; with markers where there is nothing else to carry them, or no curve but a point."""
    if rows.empty:
        return
    axes.plot(
        rows["length"], heights, color=look.colour, linestyle=look.linestyle, label=f"exact {name}", zorder=2.5,
        marker=look.marker, markerfacecolor=look.face, markeredgewidth=0.8, markevery=every if len(rows) > 1 else 1,
    )  # fmt: skip


def _floor(axes: Axes, rows: pd.DataFrame, look: Look, name: str) -> None:
    """What the Monte Carlo would measure on average if the bias were zero."""
    rows = rows[rows["bias_floor"] > 0]
    if rows.empty:
        return
    length, floor = rows["length"].to_numpy(float), rows["bias_floor"].to_numpy(float)
    if len(rows) == 1:  # a point has no line: a short one across it
        length, floor = length + np.array([-0.3, 0.3]), np.repeat(floor, 2)
    axes.plot(length, floor, color=look.colour, linestyle=":", linewidth=0.8, label=f"floor {name}", zorder=1.5)


def _points(
    axes: Axes, rows: pd.DataFrame, quantity: str, heights: np.ndarray, shift: float, look: Look, name: str
) -> None:
    """Monte Carlo: the value as measured, and a bar from low to high.

    It runs to the bottom where zero is not excluded, and to the top where there is no upper end.
    """
    if rows.empty:
        return
    length = rows["length"].to_numpy(float) + shift
    low, high = (rows[f"{quantity}_{end}"].to_numpy(float) for end in ("low", "high"))
    low = np.where(low <= 0, axes.get_ylim()[0], low)
    high = np.where(np.isposinf(high), axes.get_ylim()[1], high)
    real = np.isfinite(low) & np.isfinite(high) & np.isfinite(heights) & (high > 0)
    axes.vlines(
        length[real], low[real], high[real], color=look.colour, linewidth=0.7, alpha=0.6, zorder=2,
        label=f"interval {name}",
    )  # fmt: skip
    axes.plot(
        length, heights, linestyle="none", marker=look.marker, color=look.colour, markerfacecolor=look.face,
        markersize=2.4, markeredgewidth=0.6, label=f"monte carlo {name}", zorder=3,
    )  # fmt: skip


def _dodge(rows: pd.DataFrame, configurations: Sequence[str]) -> dict[str, float]:
    """Sideways shifts that keep the bars of one length apart, within two thirds of the space between lengths."""
    lengths = np.unique(rows["length"].to_numpy(float))
    space = float(np.diff(lengths).min()) if len(lengths) > 1 else 1.0
    shifts = np.linspace(-0.31, 0.31, len(configurations)) * space if len(configurations) > 1 else np.zeros(1)
    return dict(zip(configurations, shifts.tolist(), strict=True))


def _integer_ticks(axes: Axes, lengths: np.ndarray) -> None:
    different = np.unique(lengths)
    margin = 0.4 * np.diff(different).min() + 0.03 * np.ptp(different) if len(different) > 1 else 1.0
    axes.set_xlim(different[0] - margin, different[-1] + margin)
    if len(different) == 1:
        axes.xaxis.set_major_locator(FixedLocator(different.tolist()))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))


def _legend(rows: pd.DataFrame, found: dict[str, Look]) -> tuple[list[Any], list[str]]:
    handles: list[Any] = [style.handle(look) for look in found.values()]
    labels = list(found)
    drawn = rows[rows["source"] != "exact"]
    if len(drawn) < len(rows):
        handles.append(Line2D([], [], color="0.2"))
        labels.append("exact")
    if len(drawn):
        bar = Line2D([], [], color="0.2", linestyle="none", marker="|", markersize=8, markeredgewidth=0.8)
        point = Line2D([], [], color="0.2", linestyle="none", marker="o", markersize=2.8)
        handles.append((bar, point))
        labels.append("Monte Carlo, 95 % interval")
    if (drawn["bias_floor"] > 0).any():
        handles.append(Line2D([], [], color="0.2", linestyle=":", linewidth=0.8))
        labels.append("noise floor (not bias)")
    return handles, labels


# ------------------------------------------------------------------------------------------------------ caption


def figure1_caption(frame: pd.DataFrame) -> str:
    """What the figure shows, whose models they are, what holds for any model, and how to read the Monte Carlo.

    Raises:
        ValueError: for a frame without rows or lacking a column.
    """
    rows = style.checked(frame, COLUMNS)
    shown = ", ".join(filter(None, style.names(frame, "preset"))) or "one pair"
    parts = [
        f"Bias (Euclidean norm of expected minus true gradient) and variance (N times the trace of the covariance) "
        f"of the sequence-level KL gradient against length, {_range(rows['length'].to_numpy(int))}.",
        f"The paper does not publish its models A and B: what is shown ({shown}) is not them, so magnitudes and the "
        "order of the variances are this choice's.",
        "On-policy and whatever the pair, k1-in-reward is exactly unbiased, and so is any value-unbiased estimator in "
        "both placements; k1-in-loss has expectation zero, so its bias is the norm of the true gradient; the bias of "
        "k3-in-reward is the norm of the token-level forward-KL gradient, which is what k3-in-loss gives; and "
        "k3-in-reward plus k3-in-loss is the true gradient.",
    ]
    return " ".join([*parts, *_monte_carlo_note(rows), *_missing_note(rows)])


def _range(lengths: np.ndarray) -> str:
    low, high = int(lengths.min()), int(lengths.max())
    return f"T = {low}" if low == high else f"T = {low} to {high}"


def _monte_carlo_note(rows: pd.DataFrame) -> list[str]:
    drawn = rows[rows["source"] != "exact"]
    if drawn.empty:
        return ["All values are exact."]
    counts = drawn[["trials", "samples"]].drop_duplicates().to_numpy(float)
    known = len(counts) == 1 and np.isfinite(counts).all()
    run = "{:,.0f} trials of {:,.0f} sequences".format(*counts[0]) if known else "trials and samples as in the table"
    note = (
        f"Lines are exact; points are Monte Carlo ({run}) with bars over the 95 % interval, down to the axis where "
        "zero is not excluded. The Monte Carlo 'bias' of an unbiased configuration is its noise floor, "
        "sqrt(variance / (trials x samples)), dotted: it falls with more samples and is not bias."
    )
    endless = (np.isposinf(drawn["variance_high"]) & np.isfinite(drawn["variance"])).any()
    why = "A bar to the top has no upper end: sequences too rare to be drawn may carry the variance."
    return [note, why] if endless else [note]


def _missing_note(rows: pd.DataFrame) -> list[str]:
    bad = rows.loc[~np.isfinite(rows[list(QUANTITIES)].to_numpy(float)).all(axis=1), "configuration"]
    who = ", ".join(name for name in style.names(rows, "configuration") if name in set(bad))
    return [f"Not finite at some length, and not drawn there: {who}."] if who else []
