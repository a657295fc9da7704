"""`klgrad stability`."""

from __future__ import annotations

from itertools import product
from typing import Any

import click

from klgrad.commands.display import Progress, dump, number, table
from klgrad.commands.options import json_option
from klgrad.commands.training import (
    Numbers,
    Training,
    beta_option,
    config_option,
    learning_rate_option,
    parsed,
    task_options,
)


@click.command(short_help="Will it hold, drift or collapse?")
@task_options
@config_option
@beta_option
@learning_rate_option
@click.option(
    "--samples", type=Numbers(whole=True), default="256", show_default=True, metavar="N[,N...]", help="Per update."
)
@click.option("--tolerance", type=float, default=0.5, show_default=True, help="Nats from its end that still hold.")
@click.option("--check", "runs", type=int, default=0, metavar="RUNS", help="Also simulate so many runs of each.")
@click.option("--steps", type=click.IntRange(min=1), default=200, show_default=True, help="Updates to simulate.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the simulation.")
@json_option
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def stability(
    training: Training,
    configs: tuple[str, ...],
    beta: tuple[float, ...] | None,
    learning_rate: tuple[float, ...] | None,
    samples: tuple[int, ...],
    tolerance: float,
    runs: int,
    steps: int,
    seed: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Will a configuration hold, drift or collapse at a beta, learning rate and batch size?

    From the linearised expected field at the point it leads to and the exact covariance of the update's noise: the
    factor by which the mean-square distance grows each update, the KL at which noise and pull balance, and the
    learning rate at which they no longer do. SGD, on-policy, leave-one-out advantages. HOLD: attracted, and within
    the tolerance. DRIFT: it does not settle: nothing pulls back to first order, there is no point at finite distance,
    noise carries it past the tolerance, or steps overshoot and swing within it. COLLAPSE: the mean field runs away,
    or step and noise outgrow the pull. --check trains runs from the start and shows how far from
    the point (from the start, where there is none) they are at the end.

    \b
    klgrad stability --task pattern --learning-rate 0.5,5 --check 20
    klgrad stability --preset near --reward none --start policy --length 10 --config k3-in-reward
    """
    family, configurations = training.family(), parsed(configs)
    start = training.parameters(family)
    grid = list(product(configurations, beta or (training.beta,), learning_rate or (training.learning_rate,), samples))
    rows = []
    with Progress(family.task.pair.name, quiet or as_json) as progress:
        for done, (configuration, b, rate, n) in enumerate(grid, 1):
            rows.append(_judge(family, configuration, b, rate, int(n), start, tolerance, runs, steps, seed))
            progress(done, len(grid))
    if as_json:
        from klgrad.analysis.results import finite

        return dump([{key: finite(value) for key, value in row.items()} for row in rows])
    _show(family.task.pair.name, rows, runs, steps)


def _judge(
    family: Any, configuration: Any, beta: float, rate: float, samples: int, start: Any, tolerance: float, runs: int,
    steps: int, seed: int,
) -> dict[str, Any]:  # fmt: skip
    import numpy as np

    from klgrad.analysis.dynamics import stability as engine

    found = engine.stability(family, configuration, beta, rate, start, samples=samples, tolerance=tolerance)
    row = {
        "configuration": str(configuration), "beta": beta, "learning_rate": rate, "samples": samples,
        "verdict": found.verdict, "because": found.because, "end": found.fixed_point.kind, "growth": found.growth,
        "expected_kl": found.expected_kl, "critical_learning_rate": found.critical_rate,
    }  # fmt: skip
    if runs > 0:
        away = found.fixed_point.theta if found.fixed_point.settled else start
        drawn = engine.simulate(
            family, configuration, beta, rate, start, [steps], samples=samples, runs=runs, seed=seed, away_from=away
        )
        row["simulated_kl"] = float(np.mean(drawn.distance))
        row["simulated_kl_median"] = float(np.median(drawn.distance))
        row["simulated_kl_low"], row["simulated_kl_high"] = (float(end(drawn.distance)) for end in (np.min, np.max))
    return row


def _show(name: str, rows: list[dict[str, Any]], runs: int, steps: int) -> None:
    header = ["configuration", "beta", "rate", "N", "verdict", "growth", "KL", "critical rate"]
    header += [f"simulated KL, {runs} runs", "median", "range"] if runs else []
    header += ["because"]
    shown = []
    for row in rows:
        kl = {end: number(row[f"simulated_kl{end}"], 3) for end in ("", "_median", "_low", "_high")} if runs else {}
        simulated = [kl[""], kl["_median"], f"[{kl['_low']}, {kl['_high']}]"] if runs else []
        shown.append((
            row["configuration"], f"{row['beta']:g}", f"{row['learning_rate']:g}", str(row["samples"]),
            row["verdict"].upper(), number(row["growth"]), number(row["expected_kl"], 3),
            number(row["critical_learning_rate"], 3), *simulated, row["because"],
        ))  # fmt: skip
    title = f"{name}: around the point that expected updates lead to"
    table(title + (f"; simulated for {steps} updates" if runs else ""), header, shown)
