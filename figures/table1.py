"""The paper's Table 1: estimator x placement, what the expected gradient is in words, and its exact relative bias."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

import numpy as np
import pandas as pd

from klgrad.figures import style
from klgrad.figures.page import table

COLUMNS = ("preset", "configuration", "estimator", "placement", "length", "source", "relative_bias")
FORMATS = ("text", "markdown", "latex", "html")
_HEAD = ("estimator", "placement", "expected gradient")
_WIDTH = 100
_PHRASE = 40  # columns of plain text a phrase may take before it is wrapped
_ZERO = 1e-9  # rounding level
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}",
}  # fmt: skip


@dataclass(frozen=True)
class _Section:
    """One preset's table: ``rows`` of estimator, placement and phrase, then a number for each length."""

    preset: str
    lengths: list[int]
    rows: list[tuple[list[str], list[float]]]

    @property
    def title(self) -> str:
        """What the numbers are."""
        return f"{self.preset + ': ' if self.preset else ''}relative bias |E g - grad KL| / |grad KL|, exact"

    @property
    def numbers(self) -> list[list[str]]:
        """The relative biases as printed."""
        return [[_number(value) for value in values] for _, values in self.rows]


def table1(frame: pd.DataFrame, words: Mapping[str, str], format: str = "text") -> str:
    """Lay the table out, one section per preset and one column of relative bias per length.

    Args:
        frame: exact rows are used, others are passed over.
        words: configuration -> what its expected gradient is, such as ``sequence - token-forward``; ``-`` if not given.
        format: ``text`` (fits 100 columns; many lengths are continued below), ``markdown``, ``latex`` (booktabs) or
            ``html`` (a fragment).

    Raises:
        ValueError: for an unknown format, a frame without exact rows or lacking a column.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is none of {', '.join(FORMATS)}")
    rows = style.checked(frame, COLUMNS, exact_only=True)
    lay_out = {"text": _text, "markdown": _markdown, "latex": _latex, "html": _html}[format]
    ordered = frame[frame["source"] == "exact"]
    order = style.names(ordered, "configuration")
    parts = [(preset, rows[rows["preset"].astype(str) == preset]) for preset in style.names(ordered, "preset")]
    return "\n\n".join(lay_out(_section(preset, part, order, words)) for preset, part in parts)


def _section(preset: str, rows: pd.DataFrame, order: list[str], words: Mapping[str, str]) -> _Section:
    lengths = [int(length) for length in rows["length"].drop_duplicates()]
    body = []
    for name in order:
        own = rows[rows["configuration"] == name].drop_duplicates("length").set_index("length")
        if own.empty:
            continue
        estimator = str(own["estimator"].iloc[0])
        placement = name.removeprefix(f"{estimator}-in-")  # with its options, if any
        values = own["relative_bias"].astype(float).reindex(lengths).tolist()
        body.append(([estimator, placement, words.get(name, "-")], values))
    return _Section(preset, lengths, body)


def _number(value: float) -> str:
    """Three digits; ``0`` at rounding level, ``-`` for what is not there."""
    if np.isnan(value):
        return "-"
    if np.isinf(value):
        return "inf"
    return "0" if abs(value) < _ZERO else f"{value:#.3g}".rstrip(".")


# ------------------------------------------------------------------------------------------------------- formats


def _text(section: _Section) -> str:
    """Aligned columns; phrases wrap, and lengths that do not fit go to a further block without the phrases."""
    numbers, heads = section.numbers, [f"T = {length}" for length in section.lengths]
    wide = max(len(cell) for row in [heads, *numbers] for cell in row)
    blocks: list[str] = []
    done = 0
    while done < len(heads):
        columns = list(range(3 if not blocks else 2))
        texts = [[row[i] for i in columns] for row, _ in section.rows]
        widths = [min(max(len(_HEAD[i]), *(len(row[i]) for row in texts)), _PHRASE) for i in columns]
        fits = max(1, (_WIDTH - sum(widths) - 2 * (len(widths) - 1)) // (wide + 2))
        part = slice(done, done + fits)
        lines = _aligned([_HEAD[i] for i in columns], heads[part], widths, wide)
        rule = "-" * max(len(line) for line in lines)
        for text, values in zip(texts, numbers, strict=True):
            lines += _aligned(text, values[part], widths, wide)
        blocks.append("\n".join([lines[0], rule, *lines[1:]]))
        done += fits
    return "\n\n".join([f"{section.title}\n{blocks[0]}", *blocks[1:]])


def _aligned(texts: list[str], values: list[str], widths: list[int], wide: int) -> list[str]:
    """One row as lines: texts wrapped to their widths on the left, numbers on the right of the first line."""
    sized = zip(texts, widths, strict=True)
    wrapped = [textwrap.wrap(text, width, break_on_hyphens=False) or [""] for text, width in sized]
    lines = []
    for k in range(max(map(len, wrapped))):
        cells = [(cell[k] if k < len(cell) else "").ljust(width) for cell, width in zip(wrapped, widths, strict=True)]
        lines.append("  ".join(cells + [value.rjust(wide) for value in values if k == 0]).rstrip())
    return lines


def _markdown(section: _Section) -> str:
    heads = [*_HEAD, *(f"T = {length}" for length in section.lengths)]
    ruler = ["---"] * 3 + ["---:"] * len(section.lengths)
    lines = [section.title.replace("|", "\\|"), "", pipes(heads), pipes(ruler)]
    lines += [pipes([*text, *values]) for (text, _), values in zip(section.rows, section.numbers, strict=True)]
    return "\n".join(lines)


def pipes(cells: list[str]) -> str:
    """One row of a Markdown table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _html(section: _Section) -> str:
    heads = [*_HEAD, *(f"T = {length}" for length in section.lengths)]
    rows = [[*text, *values] for (text, _), values in zip(section.rows, section.numbers, strict=True)]
    return f"<p>{escape(section.title)}</p>\n{table(heads, rows, text=len(_HEAD))}"


def _latex(section: _Section) -> str:
    """A booktabs tabular, a thin rule between estimators."""
    heads = [*_HEAD, *(f"$T = {length}$" for length in section.lengths)]
    preset = f"{escaped(section.preset)}: " if section.preset else ""
    lines = [
        f"% {section.title}".replace("\n", " "),
        rf"\begin{{tabular}}{{lll{'r' * len(section.lengths)}}}",
        r"\toprule",
        rf" & & & \multicolumn{{{len(section.lengths)}}}{{c}}{{{preset}relative bias}} \\",
        " & ".join(heads) + r" \\",
        r"\midrule",
    ]
    before = section.rows[0][0][0]
    for (text, _), values in zip(section.rows, section.numbers, strict=True):
        if text[0] != before:
            lines.append(r"\addlinespace")
        before = text[0]
        lines.append(" & ".join([*map(escaped, text), *map(_latex_number, values)]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def escaped(text: str) -> str:
    """Text for LaTeX, a minus sign where one is meant."""
    safe = "".join(_LATEX.get(character, character) for character in text)
    return re.sub(r"(^| )-(?= |\d)", r"\1$-$", safe)


def _latex_number(value: str) -> str:
    if value == "inf":
        return r"$\infty$"
    mantissa, mark, power = value.partition("e")
    return rf"${mantissa}\times 10^{{{int(power)}}}$" if mark else value.replace("-", "--")
