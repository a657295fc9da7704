"""Tables, numbers, notes, JSON and progress, alike in every command."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click


def notes(sentences: Iterable[str], quiet: bool) -> None:
    """Sentences on standard error, each once."""
    for sentence in dict.fromkeys(() if quiet else sentences):
        click.echo(f"note: {sentence}", err=True)


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """A table on standard output, its first ``left`` columns flush left; off a terminal lines are not wrapped."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for i, name in enumerate(header):
        table.add_column(
            name, justify="left" if i < left else "right", overflow="fold", no_wrap=not sys.stdout.isatty()
        )
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 1000, emoji=False)
    if sys.stdout.isatty():
        console.print(table)
    else:
        with console.capture() as captured:
            console.print(table)
        click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


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
