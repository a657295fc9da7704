"""The paper's grid on a small model: every KL recipe x beta x seed x staleness, resumable, a process each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from klgrad.files import whole_folder
from klgrad.harness.recipe import Recipe
from klgrad.synth.configurations import parse

if TYPE_CHECKING:
    import pandas as pd

Progress = Callable[[int, int], None]
NO_KL = "no KL"
KLS = (NO_KL, *(f"{k}-in-{place}" for k in ("k1", "k3") for place in ("reward", "loss", "both")))
_READ = ("metrics.jsonl", "evaluations.jsonl", "stopped.txt")  # all that tables and figures are made from
_LAST = 0.2  # of the rounds, over which "final" reward and KL are averaged


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    kl: str
    beta: float
    seed: int
    staleness: int

    @property
    def name(self) -> str:
        """Its folder."""
        return f"{self.kl.replace(' ', '-')}_beta-{self.beta:g}_stale-{self.staleness}_seed-{self.seed}"


def grid(kls: Sequence[str], betas: Sequence[float], seeds: int, staleness: Sequence[int]) -> list[Cell]:
    """All cells; without a KL there is one beta, 0. Seeds outermost, so that an interrupted grid is a smaller one.

    Raises:
        ValueError: for a configuration that does not exist, or a number that cannot be.
    """
    for kl in kls:
        if kl != NO_KL:
            parse(kl)
    if seeds < 1 or not kls or not staleness or (not betas and any(kl != NO_KL for kl in kls)):
        raise ValueError("the grid is empty: give at least one KL, one beta, one seed and one staleness")
    if any(not 0 < beta < float("inf") for beta in betas) or any(s < 0 for s in staleness):
        raise ValueError("betas must be positive (no KL is a recipe of its own) and staleness 0 or more")
    cells = [
        Cell(kl, 0.0 if kl == NO_KL else beta, seed, stale)
        for seed, stale, kl, beta in itertools.product(range(seeds), staleness, kls, betas or (0.0,))
    ]
    return list(dict.fromkeys(cells))


def recipe_of(cell: Cell, base: Recipe) -> Recipe:
    """The cell's recipe: the KL in the reward gets the group's leave-one-out baseline, and its ratio where stale."""
    changes: dict[str, Any] = {"beta": cell.beta, "seed": cell.seed, "staleness": cell.staleness, "monitor": True}
    if cell.kl == NO_KL:
        return replace(base, kl="", **changes)
    configuration = parse(cell.kl)
    if configuration.in_reward:
        configuration = replace(configuration, baseline="loo", baseline_value=float(base.group))
        if cell.staleness:  # as practice has it: token ratios on the reward, none in the loss (paper, section 3.2)
            configuration = replace(configuration, ratio="token")
    return replace(base, kl=str(configuration), **changes)


def _base(base: Recipe, staleness: int) -> Recipe:
    """Asynchronous cells train with clipped token ratios, on-policy ones need none."""
    return replace(base, ratio="token", clip_low=0.2, clip_high=0.2) if staleness else base


def _run(cell: Cell, base: Recipe, folder: Path) -> str:
    import torch

    from klgrad.harness.train import Stopped, train

    torch.set_num_threads(1)
    try:
        train(recipe_of(cell, _base(base, cell.staleness)), folder, resume=True)
    except Stopped as stopped:
        (folder / "stopped.txt").write_text(f"{stopped}\n")
    return cell.name


def finished(folder: Path, steps: int) -> bool:
    """Whether a run came to its end: evaluated after its last round, or stopped by a loss that is not finite."""
    from klgrad.harness.checkpoints import read_lines

    lines = read_lines(folder / "evaluations.jsonl")
    return (folder / "stopped.txt").exists() or bool(lines and lines[-1]["step"] >= steps)


def run(
    cells: Sequence[Cell],
    base: Recipe,
    out: Path,
    *,
    processes: int = 2,
    scheduler: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Run what is not finished; an interrupted grid goes on where it was.

    Args:
        processes: runs at once, a thread each.
        scheduler: the address of a Dask scheduler whose workers do the runs instead, with the same numbers. They read
            the recipe's models and data themselves, at the same place; metrics and evaluations come back, checkpoints
            do not.

    Raises:
        ValueError: for a model that cannot be used, or a cluster that cannot.
    """
    from klgrad.harness.train import start

    start(recipe_of(cells[0], base))  # a model that is not there is said once, here
    left = [cell for cell in cells if not finished(out / cell.name, base.steps)]
    done = len(cells) - len(left)
    if progress:
        progress(done, len(cells))
    if scheduler is not None:
        ran = _on_cluster(left, base, out, scheduler)
    elif processes == 1:
        ran = (_run(cell, base, out / cell.name) for cell in left)
    else:
        ran = _in_processes(left, base, out, processes)
    with closing(ran):  # an interruption ends the runs at once, not when its traceback is forgotten
        for count, _ in enumerate(ran, done + 1):
            if progress:
                progress(count, len(cells))


def _in_processes(cells: Sequence[Cell], base: Recipe, out: Path, processes: int) -> Generator[str]:
    """Yield the runs' names as they are done."""
    from klgrad.analysis.processes import in_processes

    runs = [partial(_run, cell, base, out / cell.name) for cell in cells]
    with closing(in_processes(runs, processes)) as done:
        for _, name in done:
            yield name


class Away(NamedTuple):
    """Runs of one recipe, as a cluster's workers are sent them."""

    base: Recipe

    def drawer(self) -> Callable[[Cell], dict[str, bytes]]:
        """The function that does a run and gives the files it is read from, by name."""

        def files(cell: Cell) -> dict[str, bytes]:
            with TemporaryDirectory() as folder:
                _run(cell, self.base, Path(folder))
                return {name: (Path(folder) / name).read_bytes() for name in _READ if (Path(folder) / name).exists()}

        return files


def _on_cluster(cells: Sequence[Cell], base: Recipe, out: Path, scheduler: str) -> Generator[str]:
    """Yield the runs' names as they come back; each is put in its place whole."""
    from klgrad.analysis.cluster import NUMERICS, draw_on_cluster

    def keep(cell: Cell, files: dict[str, bytes]) -> None:
        with whole_folder(out / cell.name) as folder:
            for name, content in files.items():
                (folder / name).write_bytes(content)

    task, packages = Away(_placed(base)), (*NUMERICS, "torch", "transformers")
    for index, _ in draw_on_cluster(scheduler, task, keep, list(enumerate(cells)), packages):
        yield cells[index].name


def _placed(base: Recipe) -> Recipe:
    """With its models' folders named from the root: a worker has another working directory.

    Raises:
        ValueError: for a task's file that is not: scores are kept under the name that was given.
    """
    from klgrad.harness.models import placed
    from klgrad.harness.tasks import file_of

    for name in (*base.tasks, *base.in_domain, *base.out_of_domain):
        file = file_of(name)
        if file is not None and not file.is_absolute():
            raise ValueError(f"{name}: a cluster's workers work in other folders: name its file {file.resolve()}")
    return replace(base, model=placed(base.model), reference=placed(base.reference))


# --------------------------------------------------------------------------------------------------------- tables


def curves(cells: Sequence[Cell], out: Path) -> pd.DataFrame:
    """One row a run and round: ``configuration, beta, seed, staleness, step, reward, kl, ...``."""
    import pandas as pd

    from klgrad.harness.checkpoints import read_lines

    rows = [
        {**line, **_labels(cell)}
        for cell in cells
        for line in read_lines(out / cell.name / "metrics.jsonl")
    ]  # fmt: skip
    return pd.DataFrame(rows)


def _labels(cell: Cell) -> dict[str, Any]:
    estimator, _, placement = cell.kl.partition("-in-")
    return {
        "configuration": cell.kl, "estimator": estimator, "placement": placement or "none",
        "beta": cell.beta, "seed": cell.seed, "staleness": cell.staleness,
    }  # fmt: skip


def final(cells: Sequence[Cell], base: Recipe, out: Path) -> pd.DataFrame:
    """One row a run: reward and KL averaged over the last fifth of the rounds, and the evaluations after the last."""
    import pandas as pd

    from klgrad.harness.checkpoints import read_lines

    rows = []
    for cell in cells:
        lines, scores = (read_lines(out / cell.name / f"{kind}.jsonl") for kind in ("metrics", "evaluations"))
        if not lines:
            continue
        last = lines[-max(1, round(_LAST * len(lines))) :]
        row = {**_labels(cell), "rounds": len(lines), "stopped": (out / cell.name / "stopped.txt").exists()}
        for name in ("reward", "kl", "forward_kl", "entropy", "gradient_norm"):
            row[name] = _mean([line.get(name) for line in last])
        for domain, tasks in (("in_domain", base.in_domain), ("out_of_domain", base.out_of_domain)):
            row[domain] = _mean([scores[-1][name]["mean"] for name in tasks]) if scores else np.nan
        rows.append(row)
    return pd.DataFrame(rows)


def _mean(values: Sequence[float | None]) -> float:
    kept = [np.nan if value is None else value for value in values]
    return float(np.mean(kept)) if kept else np.nan


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds with standard errors (``NAME_error``; not a number for one seed)."""
    keys = ["configuration", "estimator", "placement", "beta", "staleness"]
    values = ["reward", "kl", "forward_kl", "entropy", "in_domain", "out_of_domain"]
    grouped = runs.groupby(keys, sort=False, dropna=False)
    table = grouped[values].mean()
    errors = grouped[values].sem().add_suffix("_error")
    counts = grouped.agg(seeds=("seed", "size"), stopped=("stopped", "sum"))
    return table.join(errors).join(counts).reset_index()
