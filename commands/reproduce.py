"""`klgrad reproduce`."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from klgrad.commands.display import dump, number, table
from klgrad.commands.options import Drawing, Source, json_option, pair_of, scheduler_option
from klgrad.commands.sweep import sweep

if TYPE_CHECKING:
    import pandas as pd

    from klgrad.analysis.reproduce import Request
    from klgrad.synth.policies import PolicyPair


@click.command(short_help="Run a saved table again from its manifest and compare.")
@click.argument("manifest", type=click.Path(path_type=Path), metavar="FILE.json")
@click.option(
    "--pair",
    metavar="FILE|MODULE:FUNCTION",
    help="Where your own pair is now. Needed for a MODULE:FUNCTION: no code is run because a manifest names it.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Relative difference that still passes, besides what rounding alone can make.",
)
@click.option("--workers", type=click.IntRange(min=1), default=None, help="Threads. Default: the CPUs, up to 4.")
@scheduler_option
@click.option("--out", type=click.Path(path_type=Path), help="Also write the new table to this folder; resumable.")
@click.option("-q", "--quiet", is_flag=True, help="No progress or notes.")
@json_option
@click.pass_context
def reproduce(
    ctx: click.Context,
    manifest: Path,
    pair: str | None,
    tolerance: float,
    workers: int | None,
    scheduler: str | None,
    out: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run again what figure1, growth or compare saved as FILE.json, and compare every number.

    On the same platform, vector unit and versions every byte of the CSV comes out the same. Elsewhere this says what
    changed, how far each column is off, and whether rounding alone can be the cause, measured by the terms that each
    number is a sum of. Exit code 0: reproduced, to the bit or to rounding; 1: it differs; 2: not a manifest that can
    be run.
    """
    from klgrad.analysis import reproduce as again
    from klgrad.analysis import results
    from klgrad.analysis.montecarlo import check_device

    then, provenance = results.load(manifest)
    asked = again.request(provenance)
    if out is not None and out.resolve() == manifest.resolve().parent:
        raise ValueError(f"--out {out} is where {manifest} lies: give another folder, so that it is not overwritten")
    saved = manifest.with_suffix(".csv")
    text = saved.read_bytes() if saved.exists() else None
    check_device(
        asked.device, mend=f"{manifest} was drawn on {asked.device}, and only there its numbers come out again"
    )
    drawing = Drawing(asked.trials, asked.samples, asked.seed, workers, quiet, scheduler, asked.device)
    sources = [_source(given, pair) for given in asked.sources]
    pairs = [pair_of(source, max(lengths)) for source, lengths in zip(sources, asked.lengths, strict=True)]
    now = _run(asked, sources, drawing, out)
    now = now.drop(columns=[name for name in results.LATER if name in now and name not in then])
    same_bytes = text is None or text == results.csv_bytes(now)
    found = again.differences(then, _as_saved(now))
    changed = again.changes(provenance, pairs)
    passes = all(each.rounded or each.largest <= tolerance for each in found) and bool(same_bytes or found)
    apart = _apart(again.arithmetic_of(provenance), changed)
    if as_json:
        rows = [results.finite(list(each)) for each in found]
        dump({
            "reproduced": passes,
            "to_rounding": all(each.rounded for each in found),
            "arithmetic": apart,
            "csv_bytes": None if text is None else same_bytes,
            "changed": {name: list(values) for name, values in changed.items()},
            "differences": [dict(zip(again.Difference._fields, row, strict=True)) for row in rows],
        })  # fmt: skip
    else:
        _show(now, saved if text is not None else None, same_bytes, changed, found, passes, apart)
    ctx.exit(0 if passes else 1)


def _source(given: dict[str, str | None], pair: str | None) -> Source:
    source = Source(given["preset"], given["pair"], given["behaviour"])
    if pair is not None:
        if source.pair is None:
            raise ValueError(f"--pair {pair}: the table was made from a preset, not from a pair of your own")
        return replace(source, pair=pair)
    if source.pair is not None and not source.pair.endswith(".npz"):
        raise ValueError(
            f"the table was made from the function {source.pair!r}, which a manifest cannot be trusted to run: "
            f"if it is yours, name it with --pair {source.pair}"
        )
    return source


def _run(asked: Request, sources: list[Source], drawing: Drawing, out: Path | None) -> pd.DataFrame:
    from klgrad.analysis import ranking

    error, rank = asked.question.get("error"), asked.question.get("rank")
    ranking.check_request(error, rank)

    def extend(pair: PolicyPair, frame: pd.DataFrame) -> pd.DataFrame:
        return ranking.extend(pair, frame, error=error, rank=rank)

    return sweep(
        asked.command, sources, asked.lengths, asked.configurations, drawing, out,
        exact_only=asked.exact_only, extend=extend if any(asked.question.values()) else None, asked=asked.question,
    )  # fmt: skip


def _as_saved(frame: pd.DataFrame) -> pd.DataFrame:
    """What a saved table keeps: no difference between what is not finite and what is not there."""
    import pandas as pd

    from klgrad.analysis.results import records

    return pd.DataFrame(records(frame), columns=list(frame.columns))


def _show(
    now: pd.DataFrame,
    saved: Path | None,
    same_bytes: bool,
    changed: dict[str, tuple[str | None, str | None]],
    found: list[Any],
    passes: bool,
    apart: str,
) -> None:
    """What came out, what changed, and how far off each column is."""
    for name, (before, after) in changed.items():
        click.echo(f"changed: {name} was {before or 'absent'}, is {after or 'absent'}")
    if found:
        rows = [
            [each.source, each.column, f"{each.rows:,}", number(each.largest, 3), "yes" if each.rounded else "no"]
            for each in found
        ]
        head = ["rows", "column", "differ", "by at most (relative)", "rounding"]
        table("columns that differ", head, rows, left=2)
    elif not same_bytes:
        click.echo(f"every number is the same, but {saved} has other bytes: it was changed, or another pandas wrote it")
    csv = f", and {saved} byte for byte" if saved is not None and same_bytes else ""
    if not passes:
        click.echo("not reproduced" + (": some differences are past what rounding can make" if found else ""))
    elif not found:
        click.echo(f"reproduced: all {len(now):,} rows are the same{csv}")
    elif all(each.rounded for each in found):
        click.echo(f"reproduced: same to {_digits(max(each.of_terms for each in found))}; {apart}")
    else:
        click.echo("reproduced: within the tolerance")


def _digits(difference: float) -> str:
    """The power of ten above it."""
    return f"{10.0 ** math.ceil(math.log10(difference)):.0g}" if difference > 0 else "0"


def _apart(saved: dict[str, str], changed: dict[str, Any]) -> str:
    """Why the last bits may differ, in words."""
    from klgrad.analysis.arithmetic import apart, arithmetic, described

    torch = "torch" in saved
    kind = apart(saved, arithmetic(torch=torch)) if saved else None
    if kind is not None:
        return f"{kind[0]} (saved: {kind[1]}, here: {kind[2]})"
    if not saved:
        return f"the table does not say which arithmetic made it (here: {described(arithmetic(torch=torch))})"
    if any(not name.startswith("pair ") for name in changed):
        return "other versions, the same arithmetic"
    return "the same arithmetic and versions, so every bit should be: was the table changed?"
