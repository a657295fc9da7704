"""The paper's Table 2, alive: what each library's defaults optimise, and its settings for the sequence-level gradient.

Lays out the frame of ``analysis.lint.survey``; every verdict in it was computed.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from klgrad.figures.table1 import escaped, pipes

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("text", "markdown", "latex")
_HEADS = {
    "name": "--library",
    "library": "library",
    "version": "version",
    "read": "run or read, of",
    "default": "default",
    "switched_on": "with a penalty",
    "settings": "settings for the sequence-level gradient",
    "verdict": "which give",
    "cannot": "cannot have",
}
_WIDTHS = {"library": 17, "version": 12, "default": 37, "switched_on": 37}
_WIDTH = 110
_TITLE = "What each library's KL settings optimise (on-policy, first update)"


def libraries(frame: pd.DataFrame, format: str = "text") -> str:
    """The table as text, Markdown or LaTeX.

    Args:
        frame: columns ``name, library, version, read, default, switched_on, settings, verdict, cannot``, one row per
            library.
        format: one of ``FORMATS``.

    Raises:
        ValueError: for an unknown format or a missing column.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is none of {', '.join(FORMATS)}")
    if missing := [name for name in _HEADS if name not in frame.columns]:
        raise ValueError(f"the frame lacks {', '.join(missing)}")
    rows = [{str(k): str(v) for k, v in row.items()} for row in frame[list(_HEADS)].to_dict("records")]
    return {"text": _text, "markdown": _markdown, "latex": _latex}[format](rows)


def _text(rows: list[dict[str, str]]) -> str:
    """The verdicts as columns, then the settings library by library: they are too long for a column."""
    lines = [_TITLE, *_columns({name: _HEADS[name] for name in _WIDTHS})]
    lines.append("-" * max(map(len, lines[1:])))
    for row in rows:
        again = {**row, "switched_on": "the same"} if row["switched_on"] == row["default"] else row
        lines += _columns(again)
    lines += ["", "Settings for the sequence-level gradient, or the closest there is"]
    for row in rows:
        lines += ["", f"{row['library']} {row['version']} (--library {row['name']})"]
        if row["settings"]:
            lines += _wrapped("", row["settings"])
            lines += _wrapped("-> ", row["verdict"])
        if row["cannot"]:
            lines += _wrapped("cannot have: ", row["cannot"])
    return "\n".join(lines)


def _columns(row: dict[str, str]) -> list[str]:
    cells = [(textwrap.wrap(row[name], width) or [""], width) for name, width in _WIDTHS.items()]
    height = max(len(cell) for cell, _ in cells)
    return [
        "  ".join((cell[k] if k < len(cell) else "").ljust(width) for cell, width in cells).rstrip()
        for k in range(height)
    ]


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        label + text, _WIDTH, initial_indent="  ", subsequent_indent="  " + " " * len(label), break_on_hyphens=False
    )


def _markdown(rows: list[dict[str, str]]) -> str:
    lines = [pipes(list(_HEADS.values())), pipes(["---"] * len(_HEADS))]
    return "\n".join(lines + [pipes([row[name] or "-" for name in _HEADS]) for row in rows])


def _latex(rows: list[dict[str, str]]) -> str:
    """A booktabs tabular; the settings break at commas in a paragraph column."""
    heads = {**_HEADS, "name": r"\texttt{-{}-library}"}  # two hyphens would be set as a dash
    lines = [
        f"% {_TITLE}",
        r"\begin{tabular}{llllp{0.16\linewidth}p{0.16\linewidth}p{0.24\linewidth}p{0.12\linewidth}p{0.14\linewidth}}",
        r"\toprule",
        " & ".join(heads.values()) + r" \\",
        r"\midrule",
    ]
    lines += [" & ".join(escaped(row[name] or "--") for name in _HEADS) + r" \\" for row in rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])
