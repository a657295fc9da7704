"""How bias and variance grow with length: exact curves on log-log axes, with the growth exponent at each line's end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from klgrad.figures import style
from klgrad.figures.figure1 import LABELS, QUANTITIES
from klgrad.figures.style import Look

COLUMNS = ("preset", "configuration", "estimator", "placement", "length", "source", "gradient_norm", *QUANTITIES)
CROSSING = ("k1-in-reward", "k3-in-loss")
_ROW = 2.3  # inches for one row of panels
_LINE = 0.145  # inches for one line of label text


def growth(frame: pd.DataFrame) -> Figure:
    """A row of panels per preset: bias and variance against length, exact rows only.

    The exponent at the end of a line is the log-log slope between its last two lengths. A ring marks where the
    variances of k1-in-reward and k3-in-loss cross, with the first length on the other side.

    Raises:
        ValueError: for a frame without exact rows or lacking a column.
    """
    rows = style.checked(frame, COLUMNS, exact_only=True)
    presets, found = style.names(rows, "preset"), style.looks(rows)
    with style.context():
        size = max(_ROW, 0.6 + _LINE * len(found))
        height = size * len(presets) + style.legend_height(list(found))
        figure = Figure(figsize=(style.WIDTH, height), layout="constrained")
        panels = figure.subplots(len(presets), 2, squeeze=False, sharex="col")
        for preset, pair in zip(presets, panels, strict=True):
            for quantity, axes in zip(QUANTITIES, pair, strict=True):
                _panel(axes, rows[rows["preset"].astype(str) == preset], quantity, found, _LINE / (size - 0.5))
                axes.set_title(f"{preset}: {quantity}" if preset else quantity)
        for axes in panels[-1]:
            axes.set_xlabel("sequence length $T$ (tokens)")
        style.legend(figure, [style.handle(look) for look in found.values()], list(found))
    return figure


def _panel(axes: Axes, rows: pd.DataFrame, quantity: str, found: dict[str, Look], gap: float) -> None:
    zero = style.is_zero(rows, quantity)
    heights = style.log_axis(axes, rows.loc[~zero, quantity].tolist(), style.names(rows[zero], "configuration"))
    _length_axis(axes, rows["length"].to_numpy(float))
    ends: list[_End] = []
    for name, look in found.items():
        line = rows[rows["configuration"] == name]
        if line.empty:
            continue
        lengths, drawn = line["length"].to_numpy(float), style.heights(line, quantity, heights)
        _curve(axes, lengths, drawn, look, name)
        text = _end_label(lengths, line[quantity].to_numpy(float), style.is_zero(line, quantity).to_numpy(bool))
        if text and len(lengths) > 1:
            ends.append(_End(lengths[-1], drawn[-1], text, look))
    _label_ends(axes, ends, gap)
    if quantity == "variance":
        _mark_crossings(axes, rows)
    axes.set_ylabel(LABELS[quantity])


def _curve(axes: Axes, lengths: np.ndarray, heights: np.ndarray, look: Look, name: str) -> None:
    axes.plot(
        lengths, heights, color=look.colour, linestyle=look.linestyle, label=f"exact {name}", marker=look.marker,
        markerfacecolor=look.face, markeredgewidth=0.7, markersize=2.8, markevery=_sparse(lengths),
        zorder=2.5,
    )  # fmt: skip


def _sparse(lengths: np.ndarray) -> list[int]:
    """Which lengths carry a marker: about nine, evenly spread over the log axis, the last one included."""
    wanted = np.linspace(np.log(lengths[0]), np.log(lengths[-1]), 9)
    return sorted({int(np.abs(np.log(lengths) - at).argmin()) for at in wanted})


def _length_axis(axes: Axes, lengths: np.ndarray) -> None:
    low, high = float(lengths.min()), float(lengths.max())
    axes.set_xscale("log")
    axes.set_xlim((low / 1.08, high * 1.08) if high > low else (low / 2, low * 2))
    narrow = high < 50 * low
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)) if high > low else FixedLocator([low]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


# -------------------------------------------------------------------------------------------- labels at the ends


def exponent(lengths: Sequence[float] | np.ndarray, values: Sequence[float] | np.ndarray) -> float:
    """Local log-log slope between the last two points; NaN for a single point or values that have no logarithm."""
    if len(lengths) < 2:
        return float("nan")
    (a, b), (u, v) = lengths[-2:], values[-2:]
    if not (0 < u < np.inf and 0 < v < np.inf and 0 < a < b):
        return float("nan")
    return float(np.log(v / u) / np.log(b / a))


def _end_label(lengths: np.ndarray, values: np.ndarray, zero: np.ndarray) -> str:
    """``T^2.98``, ``0`` for a line of exact zeros, nothing where there is no slope."""
    if zero[-1]:
        return "0"
    slope = float("nan") if zero[-2:].any() else exponent(lengths, values)
    return f"$T^{{\\,{slope:.2f}}}$".replace("{\\,-", "{\\,\N{MINUS SIGN}") if np.isfinite(slope) else ""


@dataclass(frozen=True)
class _End:
    """Where a line ends, what is written there, and how the line looks."""

    x: float
    y: float
    text: str
    look: Look


def _label_ends(axes: Axes, ends: list[_End], gap: float) -> None:
    """Labels right of the panel, pushed apart to ``gap`` (a share of its height), each with a leader and its marker."""
    to_axes = axes.transScale + axes.transLimits
    ends = sorted(ends, key=lambda end: end.y)
    wanted = [float(to_axes.transform((end.x, end.y))[1]) for end in ends]
    for end, start, at in zip(ends, wanted, spread(wanted, gap), strict=True):
        look, edge = end.look, float(to_axes.transform((end.x, end.y))[0])
        axes.plot(
            [edge, 1.05], [start, at], color="0.6", linewidth=0.4, transform=axes.transAxes, clip_on=False,
            label="_leader", zorder=2.4, marker=look.marker, markerfacecolor=look.face, markeredgecolor=look.colour,
            markersize=2.8, markeredgewidth=0.7, markevery=[1],
        )  # fmt: skip
        axes.annotate(
            end.text, xy=(1.05, at), xycoords="axes fraction", xytext=(4, 0), textcoords="offset points",
            color=look.colour, va="center", ha="left", annotation_clip=False,
        )  # fmt: skip


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Places in [0, 1] near the ascending ``wanted`` ones and at least ``gap`` apart (closer if they do not fit)."""
    count = len(wanted)
    gap = min(gap, 1 / max(count - 1, 1))
    blocks: list[list[float]] = []  # wanted places less their own offsets; each block shares its mean
    for i, place in enumerate(wanted):
        blocks.append([place - i * gap])
        while len(blocks) > 1 and np.mean(blocks[-2]) > np.mean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    bases = [float(np.mean(block)) for block in blocks for _ in block]
    return [min(max(base, 0.0), 1 - (count - 1) * gap) + i * gap for i, base in enumerate(bases)]


# ----------------------------------------------------------------------------------------------------- crossings


def crossings(
    lengths: Sequence[float] | np.ndarray, first: Sequence[float] | np.ndarray, second: Sequence[float] | np.ndarray
) -> Iterator[tuple[float, float, str]]:
    """Where two positive curves cross: length, height and label, straight between points on log-log axes.

    The label names the first whole length on the other side, as about where the points are too far apart to tell.
    """
    x, a, b = (np.asarray(values, float) for values in (lengths, first, second))
    fine = (a > 0) & (b > 0) & np.isfinite(a) & np.isfinite(b)
    x, level, apart = np.log(x[fine]), np.log(a[fine]), np.log(a[fine]) - np.log(b[fine])
    sure = np.flatnonzero(np.abs(apart) > 1e-9)  # equal to rounding is neither side
    for i, j in pairwise(sure):
        if apart[i] * apart[j] < 0:
            share = apart[i] / (apart[i] - apart[j])
            at = float(np.exp(x[i] + share * (x[j] - x[i])))
            sharp = np.exp(x[j] - x[i]) < 1.1 and abs(at - round(at)) > 0.05
            near = "=" if sharp or np.exp(x[j]) - np.exp(x[i]) < 1.5 else "\\approx"
            yield at, float(np.exp(level[i] + share * (level[j] - level[i]))), f"$T {near} {int(np.ceil(at - 1e-6))}$"


def _mark_crossings(axes: Axes, rows: pd.DataFrame) -> None:
    by_length = rows.drop_duplicates(["configuration", "length"]).set_index(["configuration", "length"])["variance"]
    if not set(CROSSING) <= set(by_length.index.get_level_values(0)):
        return
    first, second = by_length.loc[CROSSING[0]].align(by_length.loc[CROSSING[1]], join="inner")
    for x, y, text in crossings(first.index.to_numpy(float), first.to_numpy(float), second.to_numpy(float)):
        axes.plot(
            [x], [y], marker="o", markersize=7, markerfacecolor="none", color="black", markeredgewidth=0.9, zorder=4,
            label="_crossing",
        )  # fmt: skip
        axes.annotate(
            text, xy=(x, y), xytext=_clear(axes, x, y), textcoords="offset points", ha="center", va="center", zorder=5,
            arrowprops={"arrowstyle": "-", "color": "0.4", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3.5},
        )  # fmt: skip


def _clear(axes: Axes, x: float, y: float) -> tuple[float, float]:
    """Where around a point, in points, a short text stays furthest from the curves: the nearer place if it is clear."""
    to_axes, panel = axes.transScale + axes.transLimits, np.array([190.0, 125.0])
    traces = []
    for line in axes.lines:
        if line.get_label().startswith("exact"):  # type: ignore[attr-defined]
            at = to_axes.transform(line.get_xydata()) * panel
            steps = np.linspace(0, len(at) - 1, 400)
            traces.append(np.stack([np.interp(steps, np.arange(len(at)), column) for column in at.T], axis=1))
    curves, here = np.concatenate(traces), to_axes.transform((x, y)) * panel
    best, room = (18.0, -9.0), -np.inf
    for out in (1.0, 1.5, 2.0):
        for angle in np.arange(0, 2 * np.pi, np.pi / 8):
            offset = out * np.array([20.0, 13.0]) * (np.cos(angle), np.sin(angle))
            inside = (np.abs(here + offset - panel / 2) < panel / 2 - (14, 5)).all()
            free = np.nanmin(np.hypot(*((curves - here - offset) / (14, 5)).T)) if inside else -np.inf
            if min(free, 1.3) > room:
                best, room = (float(offset[0]), float(offset[1])), min(free, 1.3)
    return best
