"""`klgrad llm study`: the paper's grid on a small model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from klgrad.commands.display import Progress, number, table
from klgrad.commands.folders import held, present, told
from klgrad.commands.llm.options import quiet_option, recipe_of, set_option
from klgrad.commands.options import out_option, scheduler_option


@click.command(short_help="The paper's grid on a small model.")
@click.option("--recipe", default="tiny-rloo", show_default=True, help="What every run has in common.")
@click.option(
    "--kl",
    "kls",
    multiple=True,
    metavar="NAME",
    help="'no KL' or a configuration; may be repeated. Default: the paper's.",
)
@click.option(
    "--beta", "betas", type=float, multiple=True, default=(0.3, 1.0), show_default=True, help="May be repeated."
)
@click.option("--seeds", type=int, default=3, show_default=True, help="Runs of each.")
@click.option(
    "--staleness", "stale", type=int, multiple=True, default=(0, 10), show_default=True, help="May be repeated."
)
@click.option(
    "--processes", type=click.IntRange(min=1), default=2, show_default=True, help="Runs at once, a thread each."
)
@scheduler_option
@set_option
@out_option
@quiet_option
def study(
    recipe: str, kls: tuple[str, ...], betas: tuple[float, ...], seeds: int, stale: tuple[int, ...], processes: int,
    scheduler: str | None, changes: tuple[str, ...], out: Path, quiet: bool,
) -> None:  # fmt: skip
    """Train with every KL recipe, beta, seed and staleness, and draw reward, KL, scores and the reward-KL frontier.

    Runs are kept in the --out folder and what is finished is not run again; an interrupted study goes on where it
    was. Writes study.csv (a row a run), study.json (means over seeds, with what was asked) and a figure for each
    staleness.
    """
    import json

    from klgrad.analysis import results
    from klgrad.figures import save_figure
    from klgrad.figures import study as draw
    from klgrad.files import write_whole
    from klgrad.harness import study as engine

    base = recipe_of(recipe, changes)
    cells = engine.grid(kls or engine.KLS, betas, seeds, stale)
    runs, there = out / "runs", present(out)
    with held(out):
        with Progress(f"{len(cells)} runs", quiet) as progress:
            try:
                engine.run(cells, base, runs, processes=processes, scheduler=scheduler, progress=progress)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(f": the same command goes on from {runs}") from None
        final = engine.final(cells, base, runs)
        means, curves = engine.summary(final), engine.curves(cells, runs)
        write_whole(out / "study.csv", final.to_csv(index=False, lineterminator="\n").encode())
        request = {
            "recipe": base.to_dict(),
            "kls": list(kls or engine.KLS),
            "betas": betas,
            "seeds": seeds,
            "staleness": stale,
        }
        content = {
            "manifest": results.manifest("klgrad llm study", [], request, torch=True),
            "rows": results.records(means),
        }
        write_whole(out / "study.json", (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
        files = [out / "study.csv", out / "study.json"]
        for value in stale:
            figure = draw(curves[curves["staleness"] == value], means[means["staleness"] == value])
            files += save_figure(figure, out / f"study-staleness-{value}")
    if not quiet:
        _study_table(means)
        click.echo(told(files, there))


def _study_table(means: Any) -> None:
    def cell(row: dict[str, Any], name: str) -> str:
        return f"{number(row[name], 3)} +- {number(row[f'{name}_error'], 2)}"

    rows = [
        [row["configuration"], f"{row['beta']:g}", str(row["staleness"]), str(row["seeds"]), str(row["stopped"])]
        + [cell(row, name) for name in ("reward", "kl", "in_domain", "out_of_domain")]
        for row in means.to_dict("records")
    ]
    head = ["KL", "beta", "staleness", "seeds", "stopped", "reward", "KL (nats)", "in-domain", "out-of-domain"]
    table("means over seeds with standard errors; reward and KL over the last fifth of the rounds", head, rows)
