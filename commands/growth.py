"""`klgrad growth`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from klgrad.commands.options import Drawing, Lengths, Source, config_option, out_option, pair_options
from klgrad.commands.sweep import figure_rows, sweep

if TYPE_CHECKING:
    import pandas as pd

GROWTH_LENGTHS = (
    "1:10,12,14,17,20,24,28,34,40,48,51,57,68,80,95,113,135,160,190,226,269,320,381,453,539,641,762,906,1000"
)


@click.command(short_help="Exact curves to T = 1,000 with growth exponents.")
@pair_options
@click.option(
    "--lengths", type=Lengths(), default=GROWTH_LENGTHS, metavar="LENGTHS", help="Default: 1 to 1000, log-spaced."
)
@config_option
@out_option
@click.option("-q", "--quiet", is_flag=True, help="No summary.")
def growth(source: Source, lengths: list[int], configs: tuple[str, ...], out: Path, quiet: bool) -> None:
    """Exact bias and variance on to T = 1,000 with growth exponents, which no sampling could show.

    Writes growth.png, growth.pdf, growth.csv and growth.json to the --out folder.
    """
    drawing = Drawing(trials=200, samples=1000, seed=0, workers=1, quiet=quiet)

    def draw(frame: pd.DataFrame) -> str:
        from klgrad.figures import growth, save_figure

        save_figure(growth(frame), out / "growth")
        return ""

    rows = figure_rows(source)
    sweep("growth", rows, [lengths] * len(rows), configs, drawing, out, exact_only=True, draw=draw)
