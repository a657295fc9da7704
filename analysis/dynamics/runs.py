"""Many training runs: in seeded, stored, resumable blocks, on several processes or machines, into one tidy table.

A block is runs of one algorithm, those of one configuration side by side, as many as stay in a core's cache. What a run
does depends on its own settings and seed alone, so neither the blocks nor who does them changes a number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from klgrad.analysis.arithmetic import arithmetic
from klgrad.analysis.dynamics.recipes import NONE, Run
from klgrad.analysis.dynamics.training import RECORDED, Record, train
from klgrad.analysis.montecarlo import content, fingerprint
from klgrad.analysis.store import load_block, save_block
from klgrad.synth.automata import markov
from klgrad.synth.objectives import Family
from klgrad.synth.policies import PolicyPair, log_softmax, tabular

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    from jaxtyping import Float

FORMAT = 1  # of stored blocks: raise it when the same seed gives other numbers
BLOCK = 50  # runs at most
_BLOCK_TOKENS = 1 << 18  # of one update
_MOST_ENTRIES = 1 << 27

Progress = Callable[[int, int], None]
ALGORITHM = (
    "advantage", "samples", "group", "clip", "ratio", "truncation", "minibatches", "staleness", "optimiser",
    "reset_every",
)  # fmt: skip
COLUMNS = (
    "task", "configuration", "estimator", "placement", "beta", "learning_rate", *ALGORITHM, "source", "seed",
    "step", *RECORDED, "collapsed", "cause",
)  # fmt: skip


def blocks(runs: Sequence[Run], length: int) -> list[list[int]]:
    """Indices of the runs of each block; the request alone decides them."""
    order = sorted(range(len(runs)), key=lambda i: (repr(runs[i].algorithm), runs[i].configuration, runs[i].beta, i))
    found: list[list[int]] = []
    for i in order:
        algorithm = runs[i].algorithm
        most = min(BLOCK, max(1, _BLOCK_TOKENS // (algorithm.samples * length)))
        if found and runs[found[-1][0]].algorithm == algorithm and len(found[-1]) < most:
            found[-1].append(i)
        else:
            found.append([i])
    return found


def study(
    family: Family,
    runs: Sequence[Run],
    steps: int,
    start: Float[np.ndarray, " d"],
    *,
    expected: bool = False,
    every: int = 1,
    workers: int = 1,
    scheduler: str | None = None,
    store: Path | None = None,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Train all the runs and tabulate them.

    Args:
        family: the task and its policies.
        steps: K updates of each.
        start: ``[d]`` parameters to start from.
        expected: follow expected updates exactly; seeds then make no difference.
        every: keep every so many steps, and the last.
        workers: processes; the numbers do not depend on it. More than one needs a main module that can be imported.
        scheduler: the address of a Dask scheduler whose workers do the blocks instead, bit for bit as here.
        store: a folder for finished blocks; those already there are taken up.
        progress: called with (updates done, updates in all), those of a block counted once; with several workers
            whenever a block is done.

    Returns:
        A frame with ``COLUMNS``: one row per run and kept step. ``collapsed`` is the step at which the run left the
        finite, -1 for none; its measures are missing from there on.

    Raises:
        ValueError: for no runs, no steps, an update without exact form, or more than fits.
    """
    if not runs:
        raise ValueError("no runs: give at least one configuration")
    if steps < 1 or every < 1:
        raise ValueError(f"steps = {steps} and every = {every} must be 1 or more")
    if len(runs) * (steps + 1) * len(RECORDED) > _MOST_ENTRIES:
        raise ValueError(f"{len(runs)} runs of {steps} steps do not fit in memory: take fewer, or shorter ones")
    todo = blocks(runs, family.task.length)
    folder = None if store is None else store_of(store, family, runs, steps, start, expected=expected)
    records: dict[int, tuple[Record, int]] = {}
    batch = Batch(family, [tuple(runs[i] for i in block) for block in todo], steps, start, expected)
    for index, record in _records(batch, workers, scheduler, folder, progress):
        records.update({i: (record, row) for row, i in enumerate(todo[index])})
    kept = np.unique(np.append(np.arange(0, steps + 1, every), steps))
    return _tabulate(family, runs, kept, records, expected=expected)


def store_of(
    store: Path, family: Family, runs: Sequence[Run], steps: int, start: np.ndarray, *, expected: bool = False
) -> Path:
    """The folder below ``store`` that holds this request's finished blocks."""
    task, digest = family.task, hashlib.sha256()
    for array in (task.reward.edge, task.reward.terminal, task.out_of_domain.edge, task.out_of_domain.terminal, start):
        digest.update(np.ascontiguousarray(array, float).tobytes())
    penalties = content(_apart(), [run.penalty for run in runs if run.penalty is not None])
    told = (penalties, task.length, steps, expected, list(runs), arithmetic())
    request = (FORMAT, fingerprint(task.pair), digest.hexdigest(), *told)
    return store / hashlib.sha256(repr(request).encode()).hexdigest()[:16]


def _apart() -> PolicyPair:
    """Log-ratios of all sizes that training may meet, on which two estimators of one name differ."""
    automaton = markov(4, 3)
    logits, reference = 4 * np.random.default_rng(0).standard_normal((2, *automaton.next_context.shape))
    return PolicyPair(automaton, tabular(automaton, logits), log_softmax(reference))


class Batch(NamedTuple):
    """All that the numbers of the blocks depend on: plain data that can be sent elsewhere."""

    family: Family
    blocks: list[tuple[Run, ...]]
    steps: int
    start: np.ndarray
    expected: bool

    def drawer(self) -> Callable[[int], Record]:
        """The function that does the block of an index."""
        return self.record

    def record(self, index: int, progress: Callable[[int], None] | None = None) -> Record:
        """What the runs of one block did; ``progress`` is called with the updates done."""
        return train(self.family, self.blocks[index], self.steps, self.start, expected=self.expected, progress=progress)


def _records(
    batch: Batch, workers: int, scheduler: str | None, folder: Path | None, progress: Progress | None
) -> Iterator[tuple[int, Record]]:
    """(block, record) as they are done; stored ones first."""
    steps, done = batch.steps, 0

    def so_far(updates: int) -> None:
        if progress:
            progress(done * steps + updates, len(batch.blocks) * steps)

    def keep(index: int, record: Record) -> None:
        if folder is not None:
            _save(folder, index, record)

    missing = []
    for index, runs in enumerate(batch.blocks):
        stored = None if folder is None else _load(folder, index, (len(runs), steps + 1, len(RECORDED)))
        if stored is None:
            missing.append(index)
            continue
        yield index, stored
        done += 1
        so_far(0)
    if scheduler is None or not missing:
        trained = _train_here(batch, missing, keep, workers, so_far)
    else:
        from klgrad.analysis.cluster import draw_on_cluster

        trained = draw_on_cluster(scheduler, batch, keep, [(index, index) for index in missing])
    with closing(trained):  # an interruption ends the training at once, not when its traceback is forgotten
        for index, record in trained:
            yield index, record
            done += 1
            so_far(0)


def _train_here(
    batch: Batch,
    missing: list[int],
    keep: Callable[[int, Record], None],
    workers: int,
    progress: Callable[[int], None],
) -> Generator[tuple[int, Record]]:
    """Yield (block, record); processes, because small arrays leave threads waiting for the interpreter's lock."""
    if workers <= 1 or len(missing) <= 1:
        for index in missing:
            record = batch.record(index, progress)
            keep(index, record)
            yield index, record
        return
    from klgrad.analysis.processes import in_processes

    alone = [partial(batch._replace(blocks=[batch.blocks[index]]).record, 0) for index in missing]  # as it travels
    with closing(in_processes(alone, workers, lambda i, record: keep(missing[i], record))) as trained:
        for i, record in trained:
            yield missing[i], record


# ----------------------------------------------------------------------------------------------- store and table


def _path(folder: Path, index: int) -> Path:
    return folder / f"block-{index}.npz"


def _load(folder: Path, index: int, shape: tuple[int, ...]) -> Record | None:
    """A finished block, or None where there is none that fits."""
    found = load_block(_path(folder, index), "measures", "theta", "collapsed", "causes")
    if found is None or found[0].shape != shape:
        return None
    measures, theta, collapsed, causes = found
    return Record(measures, theta, collapsed, tuple(causes.tolist()))


def _save(folder: Path, index: int, record: Record) -> None:
    save_block(
        _path(folder, index),
        measures=record.measures, theta=record.theta, collapsed=record.collapsed, causes=np.array(record.causes),
    )  # fmt: skip


def _tabulate(
    family: Family, runs: Sequence[Run], kept: np.ndarray, records: dict[int, tuple[Record, int]], *, expected: bool
) -> pd.DataFrame:
    import pandas as pd

    rows, size = [], len(kept)
    for i, run in enumerate(runs):
        record, row = records[i]
        estimator, _, place = run.configuration.partition("-in-")
        rows.append({
            "task": family.task.pair.name, "configuration": run.configuration, "estimator": estimator,
            "placement": place.partition("+")[0] or NONE, "beta": run.beta, "learning_rate": run.learning_rate,
            **{name: getattr(run.algorithm, name) for name in ALGORITHM},
            "source": "expected" if expected else "sampled", "seed": run.seed,
            "collapsed": int(record.collapsed[row]), "cause": record.causes[row],
        })  # fmt: skip
    settings = pd.DataFrame(rows)
    measured = np.concatenate([records[i][0].measures[records[i][1], kept] for i in range(len(runs))])
    frame = settings.loc[settings.index.repeat(size)].reset_index(drop=True)
    frame["step"] = np.tile(kept, len(runs))
    frame[list(RECORDED)] = measured
    return frame[list(COLUMNS)]


def ends(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per run: its last kept step."""
    keys = [name for name in COLUMNS[: COLUMNS.index("step")] if name not in ("estimator", "placement")]
    return frame.sort_values("step", kind="stable").groupby(keys, sort=False).tail(1).sort_index(ignore_index=True)


SETTINGS = ("task", "configuration", "estimator", "placement", "beta", "learning_rate", *ALGORITHM, "source")


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per setting, over its seeds: median, lowest and highest of each measure at the end, and what collapsed.

    Training amplifies rounding: where it is noisy, one run's end, and a mean that one run moves, depend on the last bit
    of a CPU's exp. The median and the range over seeds are what can be told.

    Columns: ``SETTINGS``, the measures (``cosine`` is each run's mean over steps) as medians, with ``NAME_low`` and
    ``NAME_high``, ``seeds``, ``collapses`` of them, and the first ``collapse_step`` and ``cause``. A setting of which
    every run collapsed has no measures.
    """
    import pandas as pd

    rows = []
    for keys, part in frame.groupby(list(SETTINGS), sort=False):
        last = ends(part).set_index("seed")
        last["cosine"] = part.groupby("seed")["cosine"].mean()
        over = last[list(RECORDED)].agg(["median", "min", "max"])
        gone = last[last["collapsed"] >= 0].sort_values("collapsed")
        rows.append({
            **dict(zip(SETTINGS, keys, strict=True)),
            **over.loc["median"],
            **over.loc["min"].add_suffix("_low"), **over.loc["max"].add_suffix("_high"),
            "seeds": len(last), "collapses": len(gone),
            "collapse_step": int(gone["collapsed"].iloc[0]) if len(gone) else -1,
            "cause": gone["cause"].iloc[0] if len(gone) else "",
        })  # fmt: skip
    return pd.DataFrame(rows)
