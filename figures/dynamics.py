"""Training and its fields: curves with seed bands, ends against beta, curl by length, the phase plane, staleness."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator, StrMethodFormatter

from klgrad.figures import style
from klgrad.figures.style import Look

CURVES = {
    "objective": r"objective $J = E[R] - \beta\,\mathrm{KL}$",
    "reward": "reward $E[R]$",
    "kl": "KL to the reference (nats)",
    "out_of_domain": "out-of-domain reward",
}
FACETS = {"beta": r"$\beta$ = {:g}", "staleness": "staleness {:g}", "learning_rate": "learning rate {:g}"}
_NO_CURL = 1e-8  # what differences make of a symmetric Jacobian
_SQUARE = 1.75  # inches: height of one row of panels


def training_curves(frame: pd.DataFrame) -> Figure:
    """Exact measures against steps, after the paper's Figures 2, 3, 5 and 12: medians as lines, seeds as bands.

    Rows of panels are measures; columns are the values of beta, staleness or learning rate, the first that varies.
    A cross marks where a run left the finite.

    Args:
        frame: ``analysis.dynamics.runs.study``.

    Raises:
        ValueError: for a frame without rows or lacking a column.
    """
    rows = _checked(frame, ("configuration", "estimator", "placement", "seed", "step", "collapsed", *FACETS, *CURVES))
    found = style.looks(rows)
    facet = next((name for name in FACETS if rows[name].nunique() > 1), "beta")
    columns = sorted(rows[facet].unique())[:4]
    shown = [name for name in CURVES if name != "out_of_domain" or rows[name].abs().max() > 0]
    with style.context():
        height = _SQUARE * len(shown) + style.legend_height(list(found)) + 0.2
        figure = Figure(figsize=(style.WIDTH, height), layout="constrained")
        panels = figure.subplots(len(shown), len(columns), squeeze=False, sharex=True)
        for name, line in zip(shown, panels, strict=True):
            for value, axes in zip(columns, line, strict=True):
                _curves(axes, rows[rows[facet] == value], name, found)
                _limits(axes, rows[rows[facet] == value], name)
            line[0].set_ylabel(CURVES[name])
        for value, axes in zip(columns, panels[0], strict=True):
            axes.set_title(f"{rows['task'].iloc[0]}: {FACETS[facet].format(value)}")
        for axes in panels[-1]:
            axes.set_xlabel("step")
        style.legend(figure, [style.handle(look) for look in found.values()], list(found))
    return figure


def _curves(axes: Axes, rows: pd.DataFrame, name: str, found: dict[str, Look]) -> None:
    for k, (configuration, look) in enumerate(found.items()):
        mine = rows[rows["configuration"] == configuration]
        if mine.empty:
            continue
        by_step = mine.groupby("step")[name]
        middle, low, high = by_step.median(), by_step.min(), by_step.max()
        steps = middle.index.to_numpy(float)
        shown = max(1, len(steps) // 6)
        axes.fill_between(steps, low, high, color=look.colour, alpha=0.15, linewidth=0)
        axes.plot(
            steps, middle, color=look.colour, linestyle=look.linestyle, marker=look.marker, markerfacecolor=look.face,
            markeredgewidth=0.8, markevery=(k % shown, shown), label=configuration,
        )  # fmt: skip
        _mark_collapses(axes, mine, name, look)


def _mark_collapses(axes: Axes, mine: pd.DataFrame, name: str, look: Look) -> None:
    for _, run in mine[mine["collapsed"] >= 0].groupby("seed"):
        last = run[run[name].notna()].tail(1)
        axes.plot(
            last["step"], last[name], linestyle="none", marker="x", color=look.colour, markersize=5, label="_collapse"
        )


def _limits(axes: Axes, rows: pd.DataFrame, name: str) -> None:
    """Where most curves are: one that runs away leaves the picture and does not flatten the others."""
    low, high = float(rows[name].min()), float(rows[name].max())
    if name == "objective":
        begun = float(rows.loc[rows["step"] == rows["step"].min(), name].median())
        low = max(low, high - 2.5 * max(high - begun, 0.02))
    if name == "kl":
        ends = rows[rows["step"] == rows["step"].max()].groupby("configuration")[name].mean()
        usual = float(ends.quantile(0.75, interpolation="lower"))
        high = min(high, 3 * usual) if usual > 0 else high
    pad = 0.05 * (high - low) or 0.05
    axes.set_ylim(low - pad, high + pad)


def fixed_points(frame: pd.DataFrame) -> Figure:
    """Where each configuration's expected field ends: how far J stays below the optimum, and the KL, against beta.

    Markers as everywhere where the field settles; a cross where it runs away, a bar where it still moves. Grey: the
    optimum over all policies.

    Args:
        frame: ``analysis.dynamics.portraits.ends_table``.
    """
    rows = _checked(frame, ("configuration", "estimator", "placement", "beta", "kind", "objective", "gap", "kl"))
    found = style.looks(rows)
    with style.context():
        figure = Figure(figsize=(style.WIDTH, 2.6 + style.legend_height(list(found))), layout="constrained")
        left, right = figure.subplots(1, 2)
        optimum = rows.assign(best=rows["objective"] + rows["gap"]).groupby("beta")["best"].max()
        left.plot(optimum.index, optimum, color="0.6", linewidth=2.5, label="_optimum", zorder=1)
        left.annotate("optimum", (optimum.index[0], optimum.iloc[0]), xytext=(2, 3), textcoords="offset points",
                      color="0.45", va="bottom")  # fmt: skip
        for configuration, look in found.items():
            mine = rows[rows["configuration"] == configuration].sort_values("beta")
            for axes, name in ((left, "objective"), (right, "kl")):
                _ends(axes, mine, name, look, configuration)
        left.set_ylabel("objective $J$ at the end")
        right.set_ylabel("KL to the reference at the end (nats)")
        span = rows.loc[rows["kind"].isin(("attracting", "spiral")), "objective"]
        if len(span):
            depth = max(float(optimum.max() - span.min()), 1e-3)
            left.set_ylim(span.min() - 0.5 * depth, optimum.max() + 0.15 * depth)
        for axes in (left, right):
            axes.set_xscale("log")
            _plain_ticks(axes, rows["beta"])
            axes.set_xlabel(r"$\beta$")
        left.set_title(f"{rows['task'].iloc[0]}: where expected updates lead")
        if (~rows["kind"].isin(("attracting", "spiral"))).any():
            right.set_title("cross: runs away; bar: still moves")
        style.legend(figure, [style.handle(look) for look in found.values()], list(found))
    return figure


def _ends(axes: Axes, mine: pd.DataFrame, name: str, look: Look, label: str) -> None:
    stays = mine[mine["kind"] != "runaway"]  # how far a run away had come is the solver's affair
    axes.plot(stays["beta"], stays[name], color=look.colour, linestyle=look.linestyle, label=label)
    for kinds, marker in ((("runaway",), "x"), (("moving",), "|"), (("attracting", "spiral"), look.marker)):
        some = mine[mine["kind"].isin(kinds)]
        axes.plot(
            some["beta"], some[name], linestyle="none", color=look.colour, marker=marker, markerfacecolor=look.face,
            markeredgewidth=0.9, markersize=4.5, label=f"_{kinds[0]}",
        )  # fmt: skip


def _plain_ticks(axes: Axes, values: pd.Series[float]) -> None:
    ticks = sorted(values.unique())
    axes.xaxis.set_major_locator(FixedLocator(ticks[:: -(-len(ticks) // 6)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def curl_by_length(frame: pd.DataFrame) -> Figure:
    """The antisymmetric share of each penalty's Jacobian against length: 0 for a gradient, exactly.

    Args:
        frame: ``analysis.dynamics.portraits.curl_table``.
    """
    rows = _checked(frame, ("configuration", "estimator", "placement", "length", "curl"))
    rows = rows[rows["curl"].notna()]
    found = style.looks(rows)
    with style.context():
        figure = Figure(figsize=(style.WIDTH * 0.62, 2.5 + style.legend_height(list(found))), layout="constrained")
        axes = figure.subplots()
        zero = rows["curl"] < _NO_CURL
        at_zero = style.log_axis(axes, rows.loc[~zero, "curl"].tolist(), style.names(rows[zero], "configuration"))
        drawn = rows["curl"].where(~zero, rows["configuration"].map(at_zero).astype(float))
        for configuration, look in found.items():
            mine = rows[rows["configuration"] == configuration].sort_values("length")
            axes.plot(
                mine["length"], drawn[mine.index], color=look.colour, linestyle=look.linestyle, marker=look.marker,
                markerfacecolor=look.face, markeredgewidth=0.8, label=configuration, zorder=3,
            )  # fmt: skip
        _plain_ticks(axes, rows["length"])
        axes.set_xlabel("sequence length $T$ (tokens)")
        axes.set_ylabel("curl $|J - J^\\top|\\,/\\,|J|$")
        axes.set_title(f"{rows['task'].iloc[0]}: is the penalty's field a gradient?")
        style.legend(figure, [style.handle(look) for look in found.values()], list(found))
    return figure


def phase_portrait(frame: pd.DataFrame) -> Figure:
    """A panel per configuration: J in grey, the expected field as arrows, trajectories, reference and end.

    Args:
        frame: ``analysis.dynamics.portraits.phase_table``.
    """
    rows = _checked(frame, ("configuration", "what", "path", "x", "y", "u", "v", "objective", "beta"))
    found = style.looks(rows)
    columns = min(len(found), 2)
    lines = -(-len(found) // columns)
    with style.context():
        figure = Figure(figsize=(style.WIDTH, 0.9 + 2.7 * lines), layout="constrained")
        panels = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).ravel()
        for (configuration, look), axes in zip(found.items(), panels, strict=False):
            _plane(axes, rows[rows["configuration"] == configuration], look)
            axes.set_title(configuration)
        for axes in panels[len(found) :]:
            axes.set_axis_off()
        for axes in panels[-columns:]:
            axes.set_xlabel("first parameter")
        for axes in panels[::columns]:
            axes.set_ylabel("second parameter")
        what = rf"{rows['task'].iloc[0]}, $\beta$ = {rows['beta'].iloc[0]:g}: expected updates on the objective"
        legend = "(grey, lighter is better)\nblack: from the reference (ring) to the end (star); thin: from elsewhere"
        figure.suptitle(f"{what} {legend}", fontsize=7.5)
    return figure


def _plane(axes: Axes, rows: pd.DataFrame, look: Look) -> None:
    grid = rows[rows["what"] == "field"]
    x, y = np.sort(grid["x"].unique()), np.sort(grid["y"].unique())
    shaped = grid.sort_values(["y", "x"])

    def table(name: str) -> np.ndarray:
        return shaped[name].to_numpy(float).reshape(len(y), len(x))

    value = table("objective")
    levels = np.unique(np.quantile(value, np.linspace(0, 1, 14)))
    axes.contourf(x, y, value, levels=levels, cmap="Greys_r", alpha=0.45)
    u, v = table("u"), table("v")
    size = np.hypot(u, v)
    scale = np.divide(size ** (1 / 3), size, out=np.zeros_like(size), where=size > 0)  # directions, faintly their size
    axes.quiver(x, y, u * scale, v * scale, color="0.25", angles="xy", width=0.003, alpha=0.7)
    for number, path in rows[rows["what"] == "path"].groupby("path"):
        main = number == 0
        axes.plot(path["x"], path["y"], color="black" if main else look.colour, linewidth=1.8 if main else 0.8)
    for what, marker, side in (("reference", "o", 5.0), ("end", "*", 9.0)):
        point = rows[rows["what"] == what]
        axes.plot(point["x"], point["y"], linestyle="none", marker=marker, markersize=side, color="black",
                  markerfacecolor="white", zorder=5)  # fmt: skip
    axes.set_xlim(x.min(), x.max())
    axes.set_ylim(y.min(), y.max())


def staleness(frame: pd.DataFrame) -> Figure:
    """J at the end against staleness: a line through medians, the range over seeds as bars, crosses for collapses.

    Args:
        frame: ``analysis.dynamics.runs.summary``.
    """
    columns = ("configuration", "estimator", "placement", "staleness", "objective", "objective_low", "objective_high")
    rows = _checked(frame, (*columns, "collapses", "ratio"))
    found = style.looks(rows)
    with style.context():
        ratios = style.names(rows, "ratio")
        figure = Figure(figsize=(style.WIDTH, 2.5 + style.legend_height(list(found))), layout="constrained")
        panels = figure.subplots(1, len(ratios), squeeze=False, sharey=True)[0]
        for ratio, axes in zip(ratios, panels, strict=True):
            part = rows[rows["ratio"] == ratio]
            for k, (configuration, look) in enumerate(found.items()):
                mine = part[part["configuration"] == configuration].sort_values("staleness")
                shift = (k - len(found) / 2) * 0.008 * float(rows["staleness"].max() or 1)
                _bars(axes, mine, shift, look, configuration)
            axes.set_xlabel("staleness (updates)")
            axes.set_title(f"{rows['task'].iloc[0]}: importance ratio of the reward: {ratio}")
        panels[0].set_ylabel("objective $J$ at the end")
        best = float(rows["objective_high"].max())
        typical = float(rows["objective"].median())
        low = max(float(rows["objective_low"].min()), typical - 4 * max(best - typical, 0.02))
        panels[0].set_ylim(low - 0.05 * (best - low), best + 0.08 * (best - low))
        style.legend(figure, [style.handle(look) for look in found.values()], list(found))
    return figure


def _bars(axes: Axes, mine: pd.DataFrame, shift: float, look: Look, label: str) -> None:
    x = mine["staleness"].to_numpy(float) + shift
    axes.plot(
        x, mine["objective"], color=look.colour, linestyle=look.linestyle, marker=look.marker,
        markerfacecolor=look.face, markeredgewidth=0.8, label=label,
    )  # fmt: skip
    axes.vlines(x, mine["objective_low"], mine["objective_high"], color=look.colour, linewidth=0.8)
    gone = mine["collapses"].to_numpy() > 0
    axes.plot(x[gone], mine["objective"][gone], linestyle="none", marker="x", color="black", markersize=6, label="_x")


def _checked(frame: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    lacking = [name for name in ("task", *columns) if name not in frame.columns]
    if lacking and len(frame):
        raise ValueError(f"the frame lacks the columns {', '.join(lacking)}")
    if not len(frame):
        raise ValueError("the frame has no rows: nothing to show")
    return frame
