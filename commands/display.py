"""Tables, numbers, notes, JSON and progress, alike in every command."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import click


def notes(sentences: Iterable[str], quiet: bool) -> None:
    """Sentences on standard error, each once."""
    for sentence in dict.fromkeys(() if quiet else sentences):
        click.echo(f"note: {sentence}", err=True)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """A table on standard output, its first ``left`` columns flush left; off a terminal lines are not wrapped."""
    if not sys.stdout.isatty():
        click.echo("\n".join([title, *_lines([header, *rows], left)]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False, emoji=False).print(table)


def _lines(rows: Sequence[Sequence[str]], left: int) -> Iterator[str]:
    """Plain ones, in a time that a table of many rows allows; a cell may have several."""
    from rich.cells import cell_len
    from rich.control import strip_control_codes

    split = [[strip_control_codes(cell).split("\n") for cell in row] for row in rows]
    widths = [max(cell_len(line) for cell in column for line in cell) for column in zip(*split, strict=True)]
    for row in split:
        for cells in zip_longest(*row, fillvalue=""):
            gaps = [" " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=True)]
            parts = (c + gap if i < left else gap + c for i, (c, gap) in enumerate(zip(cells, gaps, strict=True)))
            yield "  ".join(parts).rstrip()


def number(value: float | None, digits: int = 4) -> str:
    """To so many significant digits; a dash for what is not there."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.{digits}g}"


def count(value: float | None) -> str:
    """A whole number with its thousands apart, from 10^12 to three digits; a dash for what is not there."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value < 1e12 else number(value, 3)


def dump(value: Any) -> None:
    """JSON on standard output.

    Raises:
        ValueError: for a number that is not finite: JSON has none.
    """
    click.echo(json.dumps(value, indent=1, allow_nan=False))


class Progress:
    """A bar on standard error, shown only on a terminal and only for work that lasts."""

    def __init__(self, label: str, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=console, transient=True, disable=quiet or not console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task(label, total=None)

    def __enter__(self) -> Callable[[int, int], None]:
        self.bar.start()
        return lambda done, total: self.bar.update(self.task, completed=done, total=total)

    def __exit__(self, *stopped: object) -> None:
        self.bar.stop()
