"""`klgrad field`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from klgrad.commands.display import Progress, dump, number, table
from klgrad.commands.folders import held, present, told
from klgrad.commands.options import Lengths, json_option
from klgrad.commands.training import Training, beta_option, config_option, parsed, task_options

if TYPE_CHECKING:
    import pandas as pd

    from klgrad.synth.configurations import Configuration
    from klgrad.synth.objectives import Family


@click.command(short_help="Where each configuration's expected updates lead.")
@task_options
@config_option
@beta_option
@click.option(
    "--lengths", type=Lengths(), metavar="LENGTHS", help="Also curl by length, such as 1:8 or 1,2,4,8. Default: none."
)
@click.option("--longest", type=float, default=1e5, show_default=True, help="Time to follow: learning rate x updates.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write field.png, .pdf, .csv and .json there.")
@json_option
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def field(
    training: Training,
    configs: tuple[str, ...],
    beta: tuple[float, ...] | None,
    lengths: list[int] | None,
    longest: float,
    out: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Where each configuration's expected updates lead, whether they are a gradient at all, and how they pull.

    Follows d theta / d tau = expected update from the start to its end: attracting, spiral, neutral, unstable, moving
    (no end within --longest) or runaway. With the exact J there, the largest eigenvalue, the difference from the
    closed form where theory has one, the curl |J - J'| / |J| of the penalty's own field, and the order of its pull
    near the reference (1 is a spring; 2 or 3 no pull to first order) with its sense (1 back, -1 away).

    With --out also figures: ends against beta (several --beta), curl by length (--lengths), and the phase portrait
    (a task of two parameters).

    \b
    klgrad field --task tree --beta 0.2,0.5,1,2 --out out
    klgrad field --task pattern --lengths 1:8 --config k2-in-loss --config k3-in-reward
    klgrad field --task phase --out out
    """
    from klgrad.analysis import results
    from klgrad.analysis.dynamics.portraits import curl_table, ends_table

    configurations, family = parsed(configs), training.family()
    betas = beta or (training.beta,)
    if min(betas) <= 0:
        raise ValueError(f"beta = {min(betas):g} must be positive: without a penalty there is no end to compare")
    if longest <= 0:
        raise ValueError(f"longest = {longest:g} must be positive")
    there = present(out)
    with held(out):
        with Progress(family.task.pair.name, quiet or as_json) as progress:
            ends = ends_table(
                family, configurations, betas, training.parameters(family), longest=longest, progress=progress
            )
            curls = None
            if lengths:
                curls = curl_table([training.family(n) for n in lengths], configurations, progress=progress)
        if as_json:
            dump({"ends": results.records(ends), "curl": [] if curls is None else results.records(curls)})
        else:
            _show(ends, curls)
        if out is not None:
            written = _save(out, family, configurations, ends, curls, training, quiet or as_json)
            if not (quiet or as_json):
                click.echo(told(written, there))


def _save(
    folder: Path,
    family: Family,
    configurations: list[Configuration],
    ends: pd.DataFrame,
    curls: pd.DataFrame | None,
    training: Training,
    quiet: bool,
) -> list[Path]:
    """Tables with their manifest, and the figures that there is something for."""
    from klgrad.analysis import results
    from klgrad.analysis.dynamics.portraits import phase_table
    from klgrad.figures import curl_by_length, fixed_points, phase_portrait, save_figure

    request: dict[str, Any] = {"training": vars(training), "configurations": [str(c) for c in configurations]}
    provenance = results.manifest("klgrad field", [family.task.pair], request)
    results.save(ends, provenance, folder / "field")
    written = [folder / "field.csv", folder / "field.json"]
    if ends["beta"].nunique() > 1:
        written += save_figure(fixed_points(ends), folder / "field")
    if curls is not None:
        results.save(curls, provenance, folder / "field-curl")
        written += [folder / "field-curl.csv", folder / "field-curl.json"]
        written += save_figure(curl_by_length(curls), folder / "field-curl")
    if family.basis.shape[1] == 2:
        with Progress("phase portrait", quiet) as progress:
            plane = phase_table(family, configurations[:4], float(ends["beta"].iloc[0]), progress=progress)
        written += save_figure(phase_portrait(plane), folder / "field-phase")
    return written


def _show(ends: pd.DataFrame, curls: pd.DataFrame | None) -> None:
    from klgrad.analysis.results import records

    header = ["configuration", "beta", "end", "J", "J* - J", "E[R]", "KL", "eigenvalue", "rotation", "closed form"]
    header += ["curl", "pull", "sense"]
    rows = []
    for row in records(ends):
        apart = row["closed_form_distance"]
        rows.append((
            row["configuration"], f"{row['beta']:g}", row["kind"],
            *(number(row[name]) for name in ("objective", "gap", "reward", "kl", "eigenvalue")),
            "-" if row["rotation"] is None else number(row["rotation"], 2),
            "-" if apart is None else f"to {apart:.1g}",
            _curl(row["curl"]),
            number(row["pull_order"], 3), number(row["pull_towards"], 2),
        ))  # fmt: skip
    table(f"{ends['task'].iloc[0]}: where expected updates lead", header, rows)
    if curls is not None:
        lengths = sorted(curls["length"].unique())
        shown = [
            (str(name), *(_curl(value) for value in part.sort_values("length")["curl"]))
            for name, part in curls.groupby("configuration", sort=False)
        ]
        table("curl by length", ["configuration", *map(str, lengths)], shown)


def _curl(value: float | None) -> str:
    return "0" if value is not None and value < 1e-8 else number(value, 3)
