"""`klgrad compare`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from klgrad.commands.display import count, dump, notes, number, table
from klgrad.commands.options import (
    Drawing,
    Source,
    config_option,
    configurations_of,
    grouped,
    json_option,
    lengths_of,
    lengths_option,
    pair_of,
    pair_options,
    sampling_options,
)
from klgrad.commands.sweep import sweep

if TYPE_CHECKING:
    import pandas as pd

    from klgrad.synth.policies import PolicyPair


BENCHMARKS = ("k1-in-reward", "k3-in-both")  # printed at any rank: the plain choices that others are measured by


@dataclass(frozen=True)
class Question:
    """What is asked of the exact values: which configurations, in which order, with how many sequences."""

    unbiased: bool
    rank: str | None
    error: float | None
    top: int

    @property
    def asked(self) -> dict[str, Any]:
        """What decides the table."""
        return {"unbiased": self.unbiased, "rank": self.rank, "error": self.error}


question_options = grouped(
    "question",
    Question,
    click.option(
        "--unbiased",
        is_flag=True,
        help="Only what the exact bias shows to be unbiased here: of --config, or else of every estimator, placement, "
        "credit and baseline there is. No Monte Carlo.",
    ),
    click.option("--rank", metavar="KEY", help="Sort each length by KEY, the least first. KEY: variance."),
    click.option(
        "--error",
        type=float,
        metavar="SHARE",
        help="Sequences needed for this relative error of the gradient, such as 0.1 for 10 %: "
        "variance / (SHARE x |true gradient|)^2. A bias stays.",
    ),
    click.option(
        "--top",
        type=click.IntRange(min=1),
        default=10,
        show_default=True,
        help=f"With --rank: ranks to print of each length, and {' and '.join(BENCHMARKS)}. --json and --out have all.",
    ),
)


@click.command(short_help="Bias and variance of any configurations, as a table.")
@pair_options
@lengths_option
@config_option
@question_options
@sampling_options
@click.option("--exact-only", is_flag=True, help="Leave the Monte Carlo out.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write compare.csv and compare.json to this folder.")
@json_option
def compare(
    source: Source,
    lengths: list[int] | None,
    configs: tuple[str, ...],
    question: Question,
    drawing: Drawing,
    exact_only: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Bias and variance of any configurations on any pair, as a table.

    \b
    klgrad compare --preset far --lengths 5,10,20 --config k1-in-reward+loo --config k3-in-both
    klgrad compare --pair mine.npz --exact-only --json
    klgrad compare --preset far --lengths 20 --unbiased --rank variance --error 0.1

    The last asks which unbiased gradient needs the fewest sequences. Its cost says what a run must have at hand: the
    sampled tokens alone, or the full vocabulary's log-probs; and whether the baseline is a constant that only an
    exact engine knows.
    """
    from klgrad.analysis import ranking

    ranking.check_request(question.error, question.rank)
    if question.unbiased:
        lengths = lengths_of(lengths, source)
        pair = pair_of(source, max(lengths))
        candidates = configurations_of(configs, [pair], drawing.quiet) if configs else ranking.grid(pair)
        found = ranking.unbiased(pair, candidates, lengths)
        configs = tuple(str(c) for c in found)
        clamped = dict.fromkeys(str(c.estimator) for c in found if not c.estimator.unbiased)
        notes(
            (f"{name} is unbiased here alone: its clamp is not reached on this pair" for name in clamped), drawing.quiet
        )

    def extend(pair: PolicyPair, frame: pd.DataFrame) -> pd.DataFrame:
        return ranking.extend(pair, frame, error=question.error, rank=question.rank)

    frame = sweep(
        "compare", [source], [lengths], configs, drawing, out, exact_only=exact_only or question.unbiased,
        extend=extend if any(question.asked.values()) else None, asked=question.asked,
    )  # fmt: skip
    if as_json:
        from klgrad.analysis.results import records

        dump(records(frame))
    else:
        _show(frame, question)


def _bias(row: dict[str, Any]) -> str:
    """An exact bias at rounding level is zero."""
    from klgrad.zeros import zero_bias

    sure = row["source"] == "exact" and row["bias"] is not None
    return "0" if sure and zero_bias(row) else number(row["bias"])


def _interval(row: dict[str, Any], of: str) -> str:
    return f"[{number(row[f'{of}_low'], 3)}, {number(row[f'{of}_high'], 3)}]"


def _named(row: dict[str, Any]) -> str:
    """The configuration, with the value that was found for an argument left open."""
    from klgrad.synth.estimators import BEST

    found = row["estimator"].partition("(")[2].rstrip(")")
    opened = f"({BEST})" in row["configuration"]
    return row["configuration"].replace(BEST, f"{BEST} = {float(found):.4g}", 1) if opened else row["configuration"]


def _cells(row: dict[str, Any]) -> list[tuple[str, str]]:
    """(header, text) of one row; exact rows have neither interval nor floor."""
    from klgrad.zeros import zero_variance

    sampled, bias = row["source"] != "exact", _bias(row)
    cells = [
        ("configuration", _named(row)),
        ("T", str(row["length"])),
        ("source", row["source"].replace("_", " ")),
        ("bias", bias),
        ("95 % interval", _interval(row, "bias") if sampled else ""),
        ("floor", number(row["bias_floor"], 2) if sampled else ""),
        ("relative", "0" if bias == "0" else number(row["relative_bias"], 3)),
        ("cosine", number(row["cosine"])),
        ("variance", "0" if not sampled and zero_variance(row) else number(row["variance"])),
        ("95 % interval", _interval(row, "variance") if sampled else ""),
        ("KL estimate", number(row["estimate"])),
    ]
    if "rank" in row:
        cells.insert(2, ("rank", str(row["rank"])))
    if "sequences_for_error" in row:
        cells.append(("sequences", count(row["sequences_for_error"])))
    return [*cells, ("cost", row["cost"])] if "cost" in row else cells


def _show(frame: pd.DataFrame, question: Question) -> None:
    """The table without columns that say nothing: intervals of exact rows, biases of what is unbiased."""
    from klgrad.analysis.results import records

    if question.rank is not None:
        frame = frame[(frame["rank"] <= question.top) | frame["configuration"].isin(BENCHMARKS)]
    dull = {"source", "bias", "relative", "cosine", "KL estimate"} if question.unbiased else set()
    for name, part in frame.groupby("preset", sort=False):
        rows = [_cells(row) for row in records(part)]
        shown = [
            i for i, (header, _) in enumerate(rows[0]) if header not in dull and any(cells[i][1] for cells in rows)
        ]
        title = f"{name}: gradient of the sequence-level KL"
        if question.error is not None:
            title += f"; sequences for a relative error of {question.error:g}"
        table(title, [rows[0][i][0] for i in shown], [[cells[i][1] for i in shown] for cells in rows])
