"""One style for every figure: fonts, colours, a log axis that can show zero, one legend, atomic saving.

Colour says the estimator, line style and marker the placement, filled or open markers the estimator again, so that
a figure reads in grey. Colours are Okabe and Ito's, safe for the colour-blind.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter
from matplotlib.transforms import blended_transform_factory

from klgrad.files import write_together
from klgrad.zeros import zero_bias, zero_variance

WIDTH = 7.0  # inches: two columns of a paper
STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 7,
    "axes.titlesize": 8,
    "axes.labelsize": 7.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "ytick.minor.width": 0.4,
    "ytick.minor.size": 1.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.2,
    "legend.frameon": False,
    "legend.handlelength": 3.6,
    "pdf.fonttype": 42,
    "savefig.dpi": 200,
}

_FAMILIES = {"k1": "#0072B2", "k3": "#D55E00", "k2": "#009E73", "full": "#CC79A7"}
_OTHERS = ("#E69F00", "#56B4E9", "#000000", "#7F7F7F", "#8C564B", "#5D3A9B")
_PLACEMENTS: dict[str, tuple[Any, str]] = {
    "reward": ("-", "o"),
    "loss": ((0, (3.5, 1.5)), "s"),
    "both": ((0, (6, 1.4, 1.2, 1.4)), "^"),
}
_VARIANTS: tuple[tuple[Any, str], ...] = (
    ((0, (1.6, 1.1)), "D"),
    ((0, (7, 1.2, 1.2, 1.2, 1.2, 1.2)), "v"),
    ((0, (9, 2.5)), "P"),
    ((0, (3, 1.2, 1, 1.2)), "X"),
    ((0, (4, 1, 2, 1)), "<"),
    ((0, (2.4, 2.4)), ">"),
)
_TEXT = ("preset", "configuration", "estimator", "placement", "source")


@contextmanager
def context() -> Iterator[None]:
    """Matplotlib's defaults with this style on top, whatever the caller has set; all put back afterwards."""
    with matplotlib.style.context(STYLE, after_reset=True):
        yield


def checked(frame: pd.DataFrame, columns: Sequence[str], *, exact_only: bool = False) -> pd.DataFrame:
    """The rows to draw, by length.

    Raises:
        ValueError: for a frame without rows, without exact rows where only those count, or lacking a column.
    """
    lacking = [name for name in columns if name not in frame.columns]
    if lacking and len(frame):
        raise ValueError(f"the frame lacks the columns {', '.join(lacking)}")
    rows = frame if not exact_only or not len(frame) else frame[frame["source"] == "exact"]
    if not len(rows):
        raise ValueError(f"the frame has no {'exact ' if exact_only else ''}rows: nothing to show")
    numbers = {name: rows[name].astype(float) for name in columns if name not in _TEXT}  # None, as in a file, is NaN
    return rows.assign(**numbers).sort_values("length", kind="stable", ignore_index=True)


def names(frame: pd.DataFrame, column: str) -> list[str]:
    """The different entries of a column, in the order in which the frame first has them."""
    return [str(name) for name in frame[column].drop_duplicates()]


# -------------------------------------------------------------------------------------------------------- looks


@dataclass(frozen=True)
class Look:
    """How one configuration is drawn everywhere."""

    colour: str
    linestyle: Any
    marker: str
    filled: bool

    @property
    def face(self) -> str:
        """Marker face: white for open ones."""
        return self.colour if self.filled else "white"


def looks(frame: pd.DataFrame) -> dict[str, Look]:
    """Configuration -> look. Options on one estimator and placement take further shades, dashes and markers in turn."""
    families: list[str] = []
    seen: dict[tuple[str, str], int] = {}
    out = {}
    columns = ["configuration", "estimator", "placement"]
    for configuration, estimator, placement in frame[columns].drop_duplicates("configuration").astype(str).to_numpy():
        if estimator not in families:
            families.append(estimator)
        repeat = seen[(estimator, placement)] = seen.get((estimator, placement), -1) + 1
        others = [family for family in families if family not in _FAMILIES]
        colour = _FAMILIES.get(estimator) or _OTHERS[others.index(estimator) % len(_OTHERS)]
        plain = _PLACEMENTS.get(placement, _VARIANTS[0])
        linestyle, marker = plain if repeat == 0 else _VARIANTS[(repeat - 1) % len(_VARIANTS)]
        order = list(_FAMILIES).index(estimator) if estimator in _FAMILIES else others.index(estimator)
        turns = order + (repeat - 1) // len(_VARIANTS) if repeat else order
        out[configuration] = Look(_shade(colour, repeat), linestyle, marker, turns % 2 == 0)
    return out


def _shade(colour: str, repeat: int) -> str:
    """The colour itself, then darker and lighter by turns."""
    if repeat == 0:
        return colour
    toward, share = (0.0, 0.45) if repeat % 2 else (1.0, 0.35)
    red, green, blue = (channel + share * (toward - channel) for channel in to_rgb(colour))
    return to_hex((red, green, blue))


# --------------------------------------------------------------------------------------------------------- axes


def is_zero(rows: pd.DataFrame, quantity: str) -> pd.Series[bool]:
    """Which values of ``bias`` or ``variance`` are zero to rounding."""
    found = {"bias": zero_bias, "variance": zero_variance}[quantity](rows)
    return pd.Series(found, rows.index)


def log_axis(axes: Axes, values: Sequence[float], zeros: Sequence[str]) -> dict[str, float]:
    """A log y axis around the positive values, with a band for zero below a break where there are ``zeros``.

    Returns:
        For each name in ``zeros`` the height at which its zero is drawn: all within the band, none on another.
    """
    sizes = np.asarray(values, float)
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    if not len(sizes) and not zeros:
        axes.text(0.5, 0.5, "no finite values", transform=axes.transAxes, ha="center", color="0.4")
    low, high = (float(sizes.min()), float(sizes.max())) if len(sizes) else (0.1, 1.0)
    first = int(np.floor(np.log10(low)))
    last = np.log10(high) + 0.12
    decades = max(last - first, 0.5)
    foot = 10.0**first
    ticks = [10.0**k for k in range(first, int(np.floor(last)) + 1, int(decades // 6) + 1)]
    minor = [m * 10.0**k for k in range(first, int(np.floor(last)) + 1) for m in range(2, 10) if decades < 8]
    if zeros:
        axes.set_yscale("symlog", linthresh=foot, linscale=min(0.14 + 0.012 * max(len(zeros) - 4, 0), 0.3) * decades)
        axes.set_ylim(-0.75 * foot, 10.0 ** (first + decades))
        _zero_band(axes, foot)
        ticks = [0.0, *ticks]
    else:
        axes.set_yscale("log")
        tight = sum(0.7 * low < tick < 1.3 * high for tick in ticks) >= 2
        axes.set_ylim(0.7 * low if tight else 0.8 * foot, 10.0 ** (first + decades))
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(FixedLocator([tick for tick in minor if tick < 10.0**last]))
    axes.yaxis.set_major_formatter(FuncFormatter(_power_of_ten))
    axes.yaxis.set_minor_formatter(NullFormatter())
    heights = np.linspace(0.42, -0.42, len(zeros)) * foot if len(zeros) > 1 else np.zeros(len(zeros))
    return dict(zip(zeros, heights.tolist(), strict=True))


def heights(rows: pd.DataFrame, quantity: str, zeros: dict[str, float]) -> np.ndarray:
    """Where the values are drawn: themselves, zeros in their band, NaN for what is not finite."""
    values = rows[quantity].to_numpy(float)
    values = np.where(np.isfinite(values), values, np.nan)
    at = rows["configuration"].map(zeros).to_numpy(float)
    return np.where(is_zero(rows, quantity).to_numpy(bool), at, values)


def _power_of_ten(value: float, _position: int | None = None) -> str:
    return "0" if value == 0 else f"$10^{{{round(np.log10(value))}}}$"


def _zero_band(axes: Axes, foot: float) -> None:
    """A grey band around 0, veiling the bars that run into it, and the axis broken above it."""
    axes.axhspan(-0.75 * foot, 0.62 * foot, color="0.92", alpha=0.8, linewidth=0, zorder=2.2)
    place = blended_transform_factory(axes.transAxes, axes.transData)
    gap = [0.66 * foot, 0.88 * foot]
    axes.plot([0, 0], gap, color="white", linewidth=2.2, transform=place, clip_on=False, zorder=3, label="_break")
    slant = [(-1.0, -0.6), (1.0, 0.6)]
    axes.plot(
        [0, 0], gap, linestyle="none", marker=slant, markersize=5, color="black", markeredgewidth=0.6,
        transform=place, clip_on=False, zorder=4, label="_break",
    )  # fmt: skip


def legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """One legend below the panels, read in rows, in as many columns as the longest label leaves room for."""
    columns = legend_columns(labels)
    order = [i for column in range(columns) for i in range(column, len(labels), columns)]
    figure.legend(
        [handles[i] for i in order], [labels[i] for i in order],
        loc="outside lower center", ncols=columns, columnspacing=1.6, borderaxespad=0.2,
    )  # fmt: skip


def legend_columns(labels: Sequence[str]) -> int:
    """Three columns, a row for each estimator with its placements; four for a crowd, fewer for long names."""
    fits = int(WIDTH / (0.65 + 0.056 * max(map(len, labels))))
    return max(1, min(fits, 3 if len(labels) <= 15 else 4, len(labels)))


def legend_height(labels: Sequence[str]) -> float:
    """Inches that the legend takes."""
    return 0.1 + 0.155 * -(-len(labels) // legend_columns(labels))


def handle(look: Look) -> Line2D:
    """Legend entry of a configuration."""
    return Line2D(
        [], [], color=look.colour, linestyle=look.linestyle, marker=look.marker, markerfacecolor=look.face,
        markeredgewidth=0.8,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- saving


def save(figure: Figure, path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write ``path.png`` (200 dpi) and ``path.pdf`` (fonts embedded); both appear whole, or neither does.

    The files carry no date, so the same figure gives the same bytes. A ``.png`` or ``.pdf`` at the end of ``path``
    is dropped first.
    """
    stem = Path(path)
    stem = stem.with_suffix("") if stem.suffix in (".png", ".pdf") else stem
    stem.parent.mkdir(parents=True, exist_ok=True)
    png, pdf = (stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "pdf"))
    with context():
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once: each format would lay the same panels out again, slowly
        images = (_render(figure, "png", {"Software": None}), _render(figure, "pdf", {"CreationDate": None}))
    write_together(dict(zip((png, pdf), images, strict=True)))
    return png, pdf


def _render(figure: Figure, kind: str, metadata: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()
