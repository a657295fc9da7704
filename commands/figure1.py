"""`klgrad figure1`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from klgrad.commands.options import (
    Drawing,
    Source,
    config_option,
    exact_only_option,
    lengths_option,
    out_option,
    pair_options,
    sampling_options,
)
from klgrad.commands.sweep import figure_rows, sweep

if TYPE_CHECKING:
    import pandas as pd


@click.command(short_help="The paper's Figure 1: bias and variance by length.")
@pair_options
@lengths_option
@config_option
@sampling_options
@out_option
@exact_only_option
def figure1(
    source: Source, lengths: list[int] | None, configs: tuple[str, ...], drawing: Drawing, out: Path, exact_only: bool
) -> None:
    """Regenerate the paper's Figure 1: exact bias and variance against length, Monte Carlo on top.

    Writes figure1.png, figure1.pdf, figure1.csv and figure1.json (manifest and rows) to the --out folder. Without
    --preset or --pair it shows the presets near and far: the paper does not publish its two models.
    """

    def draw(frame: pd.DataFrame) -> str:
        from klgrad.figures import figure1, figure1_caption, save_figure

        save_figure(figure1(frame), out / "figure1")
        return figure1_caption(frame)

    rows = figure_rows(source)
    sweep("figure1", rows, [lengths] * len(rows), configs, drawing, out, exact_only=exact_only, draw=draw)
