"""The paper's grid on a small model: every KL recipe x beta x seed x staleness, resumable, a process each."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.harness.recipe import Recipe
from klgrad.synth.configurations import parse

if TYPE_CHECKING:
    import pandas as pd

Progress = Callable[[int, int], None]
NO_KL = "no KL"
KLS = (NO_KL, *(f"{k}-in-{place}" for k in ("k1", "k3") for place in ("reward", "loss", "both")))
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
    cells: Sequence[Cell], base: Recipe, out: Path, *, processes: int = 2, progress: Progress | None = None
) -> None:
    """Run what is not finished, ``processes`` at a time, a thread each; an interrupted grid goes on where it was."""
    from klgrad.harness.train import start

    start(recipe_of(cells[0], base))  # a model that is not there is said once, here
    left = [cell for cell in cells if not finished(out / cell.name, base.steps)]
    done = len(cells) - len(left)
    if progress:
        progress(done, len(cells))
    if processes == 1:
        for cell in left:
            _run(cell, base, out / cell.name)
            done += 1
            if progress:
                progress(done, len(cells))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        waiting = [pool.submit(_run, cell, base, out / cell.name) for cell in left]
        try:
            for future in as_completed(waiting):
                future.result()
                done += 1
                if progress:
                    progress(done, len(cells))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


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
