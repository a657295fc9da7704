"""`klgrad digits`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from klgrad.commands.display import dump, number, table
from klgrad.commands.options import json_option

if TYPE_CHECKING:
    from klgrad.analysis.digits import Line

ARITHMETICS = ("numpy float64", "torch float64", "numpy float32", "torch float32")


@click.command(short_help="How many digits the numbers have, against 60-digit arithmetic.")
@json_option
def digits(as_json: bool) -> None:
    """How many digits the numbers have, on this machine, against 60-digit arithmetic.

    Each figure is a worst relative error. Every estimator is evaluated on log-ratios from 1e-12 to 700 of both signs,
    in numpy and torch, float64 and float32; every exact quantity and every kind of configuration on small pairs at all
    distances from the reference and nearly deterministic ones, by enumeration in 60 digits.

    Promised are 1e-13 in float64 and 1e-5 in float32, beside what the log-probs themselves leave open: a log-ratio of
    1e-8 between two float64 log-probs has eight digits, whoever computes with it. Exit code 1 where that is not kept.
    """
    from klgrad.analysis.digits import estimator_lines, pair_lines, worst
    from klgrad.analysis.results import finite

    estimators, pairs = worst(estimator_lines()), worst(pair_lines())
    lost = [line for line in (*estimators, *pairs) if not line.kept]
    if as_json:
        lines = (*estimators, *pairs)
        dump([{key: finite(value) for key, value in (line._asdict() | {"kept": line.kept}).items()} for line in lines])
    else:
        _show(
            "Estimators: worst relative error beyond what is left open, |delta| from 1e-12 to 700",
            estimators,
            ARITHMETICS,
        )
        click.echo()
        _show_pairs(pairs)
    for line in lost:
        click.echo(
            f"{line.quantity}, {line.where}, {line.arithmetic}: off by {line.error:.2g} at {line.at or line.where}, "
            f"which is more than is left open ({line.open:.2g})",
            err=True,
        )
    sys.exit(bool(lost))


def _show(title: str, lines: Sequence[Line], columns: Sequence[str]) -> None:
    """A row for each quantity, the worst of its ranges; what its inputs leave open is taken off."""
    beyond: dict[tuple[str, str], float] = {}
    for line in lines:
        key = line.quantity, line.arithmetic
        beyond[key] = max(beyond.get(key, 0.0), max(line.error - line.open, 0.0))
    rows = [
        [quantity, *(number(beyond[quantity, column], 2) for column in columns)]
        for quantity in dict.fromkeys(line.quantity for line in lines)
    ]
    table(title, ["", *columns], rows)


def _show_pairs(lines: Sequence[Line]) -> None:
    """A row for each kind of pair: worst errors as they are, and what its log-ratios leave open."""
    quantities = list(dict.fromkeys(line.quantity for line in lines))
    found = {(line.where, line.quantity): line for line in lines}
    rows = []
    for where in dict.fromkeys(line.where for line in lines):
        each = [found[where, quantity] for quantity in quantities]
        rows.append([where, number(each[0].open, 2), *(number(line.error, 2) for line in each)])
    table("Pairs: worst relative error, float64", ["policy", "log-ratios leave open", *quantities], rows)
