"""`klgrad dynamics`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from klgrad.commands.display import Progress, dump, notes, number, table
from klgrad.commands.folders import STORE, present, resumable, told
from klgrad.commands.options import grouped, json_option, out_option, scheduler_option, workers_of
from klgrad.commands.training import DEFAULT_CONFIGS, Numbers, Training, beta_option, learning_rate_option, task_options

if TYPE_CHECKING:
    import pandas as pd

    from klgrad.analysis.dynamics.recipes import Run

SHOWN = 100  # steps kept of each run, about
ENOUGH = 5  # runs whose range says something
SUMMARISED = {
    "objective": "J", "gap": "J* - J", "reward": "E[R]", "kl": "KL", "forward_kl": "forward KL", "entropy": "entropy",
    "out_of_domain": "other reward", "cosine": "cosine",
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """How to train; each field of several values is a grid."""

    advantage: str
    samples: int
    group: int
    clip: float
    ratio: tuple[str, ...]
    truncation: float
    minibatches: int
    staleness: tuple[int, ...]
    optimiser: str
    reset_every: int

    def algorithms(self) -> list[Any]:
        """One for each ratio and staleness."""
        from klgrad.analysis.dynamics.recipes import Algorithm

        same = {name: value for name, value in asdict(self).items() if name not in ("ratio", "staleness")}
        ratios = self.ratio or ("none",)
        return [Algorithm(ratio=r, staleness=int(s), **same) for r, s in product(ratios, self.staleness)]


recipe_options = grouped(
    "recipe",
    Recipe,
    click.option(
        "--advantage", default="rloo", show_default=True, metavar="NAME", help="reinforce, rloo, grpo or dr-grpo."
    ),
    click.option("--samples", type=int, default=256, show_default=True, help="Sequences of one update (N)."),
    click.option("--group", type=int, default=0, help="Sequences that share a baseline. Default: all N."),
    click.option("--clip", type=float, default=0.0, help="PPO's epsilon. Default: no clipping."),
    click.option(
        "--ratio",
        multiple=True,
        metavar="NAME",
        help="Importance ratio of the reward: none, token, prefix, sequence or truncated; may be repeated. A "
        "configuration's own is in its name.",
    ),
    click.option("--truncation", type=float, default=2.0, show_default=True, help="Cap of the truncated ratio."),
    click.option("--minibatches", type=int, default=1, show_default=True, help="Updates per policy that samples."),
    click.option(
        "--staleness",
        type=Numbers(whole=True),
        default="0",
        show_default=True,
        metavar="S[,S...]",
        help="Updates by which the sampler lags behind.",
    ),
    click.option("--optimiser", default="sgd", show_default=True, metavar="NAME", help="sgd or adam."),
    click.option("--reset-every", type=int, default=0, help="Updates between reference resets. Default: none."),
)


@click.command(short_help="What bias does to training: exact and sampled runs.")
@task_options
@click.option(
    "--config",
    "configs",
    multiple=True,
    metavar="NAME",
    help="ESTIMATOR-in-PLACEMENT[+option], or none for no penalty; may be repeated. "
    "Default: k1 and k3 in reward and loss, and none.",
)
@beta_option
@learning_rate_option
@click.option("--steps", type=int, default=200, show_default=True, help="Updates of each run.")
@click.option("--seeds", type=click.IntRange(min=1), default=5, show_default=True, help="Runs of each setting.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="The first seed.")
@recipe_options
@click.option("--expected", is_flag=True, help="Follow the expected updates exactly instead of sampling.")
@click.option("--every", type=click.IntRange(min=1), help="Keep every so many steps. Default: about 100 of each run.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes. Default: the CPUs, up to 4.")
@scheduler_option
@out_option
@json_option
@click.option("-q", "--quiet", is_flag=True, help="No progress, notes or summary.")
def dynamics(
    training: Training,
    configs: tuple[str, ...],
    beta: tuple[float, ...] | None,
    learning_rate: tuple[float, ...] | None,
    steps: int,
    seeds: int,
    seed: int,
    recipe: Recipe,
    expected: bool,
    every: int | None,
    workers: int | None,
    scheduler: str | None,
    out: Path,
    as_json: bool,
    quiet: bool,
) -> None:
    """Train under each configuration, on a model whose every quantity is exact, and see what its bias does.

    At every step J = E[R] - beta KL, reward, KL, forward KL, entropy, out-of-domain reward, the distance to the
    optimum and the cosine of the step with the true gradient are computed exactly, not sampled. Writes dynamics.png,
    .pdf, .csv and .json to the --out folder, and with several --staleness also dynamics-staleness. A run that leaves
    the finite is reported as collapsed. Interrupted, the same command goes on from its finished blocks.

    \b
    klgrad dynamics --beta 0.02,0.05,0.2
    klgrad dynamics --task answer --expected --config k1-in-reward --config k2-in-loss
    klgrad dynamics --advantage dr-grpo --staleness 0,5,10,20 --ratio none --ratio token
    klgrad dynamics --pair mine.npz --reward "contains(1,1)" --length 12 --optimiser adam --learning-rate 0.02
    """
    from klgrad.analysis import results
    from klgrad.analysis.dynamics.recipes import NONE, Run
    from klgrad.analysis.dynamics.runs import store_of, study, summary

    family = training.family()
    start = training.parameters(family)
    names = configs or (*DEFAULT_CONFIGS, NONE)
    chosen = range(seed, seed + (1 if expected else seeds))  # expected updates have no noise to repeat
    grid = product(recipe.algorithms(), learning_rate or (training.learning_rate,), beta or (training.beta,), names)
    runs = list(dict.fromkeys(Run(name, b, r, a, s) for a, r, b, name in grid for s in chosen))
    store, there = out / STORE, present(out)
    with resumable(store):
        notes(_cautions(runs) + _few(0 if expected else seeds), quiet or as_json)
        with Progress(family.task.pair.name, quiet or as_json) as progress:
            frame = study(
                family, runs, steps, start, expected=expected, every=every or max(1, steps // SHOWN),
                workers=workers_of(workers), scheduler=scheduler, store=store, progress=progress,
            )  # fmt: skip
        ends = summary(frame)
        written = _draw(frame, ends, out)
        request = {
            "training": vars(training), "reward": family.task.reward.name, "length": family.task.length,
            "out_of_domain": family.task.out_of_domain.name, "runs": [asdict(run) for run in runs], "steps": steps,
            "expected": expected,
        }  # fmt: skip
        results.save(frame, results.manifest("klgrad dynamics", [family.task.pair], request), out / "dynamics")
        results.forget(store_of(store, family, runs, steps, start, expected=expected))  # until here nothing is lost
    if as_json:
        dump(results.records(ends))
    elif not quiet:
        _show(frame, ends, steps)
        click.echo(told(written, there))


def _cautions(runs: list[Run]) -> list[str]:
    """Sentences about settings that are allowed and probably not what is meant."""
    found = []
    for run in runs:
        stale = run.algorithm.longest_lag > 0
        if (
            run.penalty is not None
            and stale
            and run.penalty.in_reward
            and run.penalty.ratio == "none"
            and run.algorithm.ratio != "none"
        ):
            found.append(
                f"{run.configuration}: the reward has the {run.algorithm.ratio} ratio and the penalty none; "
                f"write {run.configuration}+{run.algorithm.base_ratio}-ratio to weigh it alike"
            )
    return found


def _few(seeds: int) -> list[str]:
    """What too few sampled runs cannot tell; 0 for expected updates, which have no noise."""
    if not 0 < seeds < ENOUGH:
        return []
    runs = "one run" if seeds == 1 else f"{seeds} runs"
    return [
        f"{runs} of each setting: noisy training amplifies rounding, so that another CPU may end elsewhere; "
        f"--seeds {ENOUGH} or more show the spread"
    ]


def _draw(frame: pd.DataFrame, ends: pd.DataFrame, out: Path) -> list[Path]:
    """Save the figures; all files."""
    from klgrad.figures import save_figure, staleness, training_curves

    save_figure(training_curves(frame), out / "dynamics")
    stems = ["dynamics"]
    if ends["staleness"].nunique() > 1:
        save_figure(staleness(ends), out / "dynamics-staleness")
        stems.append("dynamics-staleness")
    pictures = [out / f"{stem}.{kind}" for stem in stems for kind in ("png", "pdf")]
    return [*pictures, out / "dynamics.csv", out / "dynamics.json"]


def _show(frame: pd.DataFrame, ends: pd.DataFrame, steps: int) -> None:
    """Medians over seeds, each measure's range below its median."""
    from klgrad.analysis.results import records

    varied = [name for name in ("beta", "learning_rate", "ratio", "staleness") if ends[name].nunique() > 1]
    header = ["configuration", *(name.replace("_", " ") for name in varied), *SUMMARISED.values(), "collapsed"]
    rows = []
    for row in records(ends):
        gone = f"{row['collapses']} of {row['seeds']}, first at step {row['collapse_step']}: {row['cause']}"
        rows.append((
            row["configuration"], *(f"{row[name]:g}" if name != "ratio" else row[name] for name in varied),
            *(_over_seeds(row, name) for name in SUMMARISED), gone if row["collapses"] else "no",
        ))  # fmt: skip
    table(_title(ends, steps, varied), header, rows)
    identity = (frame["gap"] - frame["beta"] * frame["kl_to_optimum"]).abs().max()
    if identity == identity:  # there is no optimum to be compared with where beta is 0 throughout
        click.echo(f"J* - J = beta KL(pi || pi*) held to {identity:.1g} at every step kept")


def _title(ends: pd.DataFrame, steps: int, varied: list[str]) -> str:
    same = ends.iloc[0]
    fixed = [f"{name.replace('_', ' ')} {same[name]:g}" for name in ("beta", "learning_rate") if name not in varied]
    source = f"{same['advantage']}, {same['samples']} sequences a step"
    source = "expected updates" if same["source"] == "expected" else source
    seeds = [f"median and range over {same['seeds']} seeds"] if same["seeds"] > 1 else []
    return ", ".join([f"{same['task']} after {steps} steps of {source}", *fixed, *seeds])


def _over_seeds(row: dict[str, Any], name: str) -> str:
    """The median, and below it the range where there is more than one run."""
    if row["seeds"] == 1 or row[name] is None:
        return number(row[name])
    low, high = (number(row[f"{name}_{end}"], 3) for end in ("low", "high"))
    return f"{number(row[name])}\n[{low}, {high}]"
