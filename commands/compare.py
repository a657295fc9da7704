"""`klgrad compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from klgrad.commands.display import dump, number, table
from klgrad.commands.options import (
    Drawing,
    Source,
    config_option,
    json_option,
    lengths_option,
    pair_options,
    sampling_options,
)
from klgrad.commands.sweep import sweep

if TYPE_CHECKING:
    import pandas as pd


@click.command(short_help="Bias and variance of any configurations, as a table.")
@pair_options
@lengths_option
@config_option
@sampling_options
@click.option("--exact-only", is_flag=True, help="Leave the Monte Carlo out.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write compare.csv and compare.json to this folder.")
@json_option
def compare(
    source: Source,
    lengths: list[int] | None,
    configs: tuple[str, ...],
    drawing: Drawing,
    exact_only: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Bias and variance of any configurations on any pair, as a table.

    \b
    klgrad compare --preset far --lengths 5,10,20 --config k1-in-reward+loo --config k3-in-both
    klgrad compare --pair mine.npz --exact-only --json
    """
    frame = sweep("compare", [source], lengths, configs, drawing, out, exact_only=exact_only)
    if as_json:
        from klgrad.analysis.results import records

        dump(records(frame))
    else:
        _show(frame)


def _bias(row: dict[str, Any]) -> str:
    """An exact bias at rounding level is zero."""
    exact_zero = row["source"] == "exact" and row["bias"] is not None
    exact_zero = exact_zero and row["bias"] < 1e-9 * row["gradient_norm"] + 1e-15
    return "0" if exact_zero else number(row["bias"])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One table row; exact rows have neither interval nor floor."""

    def sampled(text: str) -> str:
        return "" if row["source"] == "exact" else text

    bias = _bias(row)
    return (
        row["configuration"],
        str(row["length"]),
        row["source"].replace("_", " "),
        bias,
        sampled(f"[{number(row['bias_low'], 3)}, {number(row['bias_high'], 3)}]"),
        sampled(number(row["bias_floor"], 2)),
        "0" if bias == "0" else number(row["relative_bias"], 3),
        number(row["cosine"]),
        number(row["variance"]),
        sampled(f"[{number(row['variance_low'], 3)}, {number(row['variance_high'], 3)}]"),
        number(row["estimate"]),
    )


def _show(frame: pd.DataFrame) -> None:
    from klgrad.analysis.results import records

    header = ["configuration", "T", "source", "bias", "95 % interval", "floor", "relative", "cosine"]
    header += ["variance", "95 % interval", "KL estimate"]
    for name, part in frame.groupby("preset", sort=False):
        table(f"{name}: gradient of the sequence-level KL", header, [_cells(row) for row in records(part)])
