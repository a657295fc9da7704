"""The paper's protocol: trials x samples sequences, one gradient estimate per trial and configuration.

A Comedy of Estimators (arXiv 2512.21852), section 3.3: 200 trials of N = 1,000 sequences for each length. All
configurations of one request see the same sequences. Work is split into seeded blocks of trials, a pure function
of the request, so the result does not depend on the number of workers, and a stored run goes on from its finished
blocks. Modules that only storing, resuming, threads or exact baselines need are imported there: a run without them
is short enough to feel their import.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from klgrad.synth.configurations import Configuration
from klgrad.synth.exact import check_lengths
from klgrad.synth.policies import PolicyPair
from klgrad.synth.sampling import Sampler, sampler_name
from klgrad.synth.sums import Sums, estimates

if TYPE_CHECKING:
    from pathlib import Path

    from jaxtyping import Float

FORMAT = 6  # of stored blocks: raise it when the same seed gives other numbers
CPU = "cpu"  # the numpy engine, the reference; ``klgrad.synth.devices`` knows the others
_BLOCK_SEQUENCES = 100_000  # of a block
_MOST_ENTRIES = 1 << 28
_MOST_TOKENS = 1e13

Progress = Callable[[int, int], None]


class Simulation(NamedTuple):
    """Per-trial estimates of every configuration at every length.

    Args:
        gradients: per length ``[trials, C, d]`` gradient estimates of ``samples`` sequences each.
        estimates: per length ``[trials, C]`` KL value estimates.
        sampler: which sampler drew: ``counts``, ``ordered`` or ``paths``.
    """

    gradients: list[Float[np.ndarray, "trials C d"]]
    estimates: list[Float[np.ndarray, "trials C"]]
    sampler: str


Drawn = tuple[np.ndarray, np.ndarray]  # a block's gradients [trials, C, d] and estimates [trials, C]


class Block(NamedTuple):
    """Consecutive trials of one length: the unit of work, of seeding and of resumption."""

    length: int
    first: int
    trials: int


class Task(NamedTuple):
    """All that a block's numbers depend on besides the block: plain data that can be sent elsewhere.

    Args:
        configurations: C of them.
        baselines: ``[C, L, d]`` the exact constants b.
        device: ``cpu`` for the numpy engine, else where torch draws.
    """

    pair: PolicyPair
    configurations: tuple[Configuration, ...]
    lengths: tuple[int, ...]
    samples: int
    seed: int
    baselines: np.ndarray
    device: str = CPU

    def drawer(self) -> Callable[[Block], Drawn]:
        """The function that draws a block; its tables are made here, once."""
        configurations, samples = self.configurations, self.samples
        units = _unit(configurations, samples)
        draw_sums, generator = self._engine()

        def draw(block: Block) -> Drawn:
            rng = generator(np.random.SeedSequence(self.seed, spawn_key=(block.length, block.first)))
            b = self.baselines[:, self.lengths.index(block.length)]
            with np.errstate(over="ignore", invalid="ignore"):
                sums = draw_sums(block.length, block.trials * (samples // units), units, rng)
                each = [
                    estimates(c, s, block.trials, samples, constant)
                    for c, s, constant in zip(configurations, sums, b, strict=True)
                ]
            return np.stack([g for g, _ in each], axis=1), np.stack([v for _, v in each], axis=1)

        return draw

    def _engine(self) -> tuple[Callable[..., list[Sums]], Callable[[np.random.SeedSequence], Any]]:
        """The sampler's ``sums(length, units, size, rng)``, and what makes its rng."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            if self.device != CPU:
                from klgrad.synth.devices import TorchSampler

                there = TorchSampler(self.pair, self.configurations, self.device)
                return there.sums, there.generator
            here = Sampler(self.pair, self.configurations, self.lengths)
        return here.sums, lambda stream: np.random.Generator(np.random.SFC64(stream))


def _unit(configurations: Sequence[Configuration], samples: int) -> int:
    """Sequences whose sums are kept: what divides every leave-one-out group."""
    return math.gcd(samples, *(c.group(samples) for c in configurations if c.baseline == "loo"))


def blocks(lengths: Sequence[int], trials: int, samples: int) -> list[Block]:
    """The request's blocks; nothing else decides them."""
    size = max(1, _BLOCK_SEQUENCES // samples)
    return [Block(int(n), first, min(size, trials - first)) for n in lengths for first in range(0, trials, size)]


def check_counts(trials: int, samples: int) -> None:
    """Raise ValueError unless there are at least two of each: one has no spread."""
    for name, count in (("trials", trials), ("samples", samples)):
        if count < 2:
            raise ValueError(f"{name} = {count} is too few: a variance needs at least 2")


def check_device(
    device: str, scheduler: str | None = None, mend: str = "leave out --device to draw on the CPU"
) -> None:
    """Raise ValueError for a device that is unknown, is not here, or is asked of the workers of a scheduler."""
    if device == CPU:
        return
    from klgrad.synth.devices import absence

    if why := absence(device):
        raise ValueError(f"{why}; {mend}")
    if scheduler is not None:
        raise ValueError(
            f"--device {device} draws here and --scheduler {scheduler} elsewhere: "
            "give one of them (KLGRAD_SCHEDULER counts too)"
        )


def identity(device: str) -> str:
    """What blocks of the same request must agree on besides, in words; nothing for the CPU, the reference."""
    if device == CPU:
        return ""
    from klgrad.synth.devices import identity

    return identity(device)


def sampler_used(pair: PolicyPair, configurations: Sequence[Configuration], device: str = CPU) -> str:
    """Which sampler draws; torch draws whole paths."""
    return sampler_name(pair, configurations) if device == CPU else "paths"


def fingerprint(pair: PolicyPair) -> str:
    """A hash of every number of the pair."""
    import hashlib

    digest = hashlib.sha256()
    arrays = (pair.automaton.next_context, pair.policy.log_probs, pair.policy.scores, pair.reference, pair.behaviour)
    for array in arrays:
        digest.update(b"none" if array is None else np.ascontiguousarray(array).tobytes())
    digest.update(repr((pair.automaton.start, pair.automaton.end)).encode())
    return digest.hexdigest()[:16]


def content(pair: PolicyPair, configurations: Sequence[Configuration]) -> str:
    """A hash of what the configurations' estimators are on the pair's edges, whatever their names.

    Their numbers depend on nothing else of an estimator: one whose functions were changed is another.
    """
    import hashlib

    from klgrad.synth.rows import edge_pathwise, edge_values

    digest = hashlib.sha256()
    used = dict.fromkeys((c.estimator, c.rollout_value) for c in configurations)
    ends = (0.0, 1.0)  # which say what a family is that is linear in its argument
    for est, rollout in ((e, r) for each, r in used for e in (map(each.family, ends) if each.family else (each,))):
        whole = Configuration(est, "both", rollout_value=rollout)
        together = np.where(pair.possible, est.together(pair.log_ratio), 0.0) if est.together else np.zeros(0)
        for table in (edge_values(pair, whole), edge_pathwise(pair, whole), together):
            digest.update(np.ascontiguousarray(table, float).tobytes())
    return digest.hexdigest()[:16]


def store_of(
    store: Path,
    pair: PolicyPair,
    configurations: Sequence[Configuration],
    trials: int,
    samples: int,
    seed: int,
    device: str = CPU,
) -> Path:
    """The folder below ``store`` that holds this request's finished blocks.

    Its name is a hash of all that they must agree on to be taken up again; numbers of different devices or vector
    units never mix.
    """
    import hashlib

    from klgrad.analysis.arithmetic import arithmetic

    names = [str(c) for c in configurations]
    request: tuple[Any, ...] = (FORMAT, fingerprint(pair), names, content(pair, configurations), trials, samples, seed)
    if device != CPU:
        request = (*request, identity(device))
    request = (*request, arithmetic(torch=device != CPU))
    return store / hashlib.sha256(repr(request).encode()).hexdigest()[:16]


def simulate(
    pair: PolicyPair,
    configurations: Sequence[Configuration],
    lengths: Sequence[int],
    *,
    trials: int = 200,
    samples: int = 1000,
    seed: int = 0,
    workers: int = 1,
    device: str = CPU,
    scheduler: str | None = None,
    store: Path | None = None,
    progress: Progress | None = None,
) -> Simulation:
    """Run the protocol.

    Args:
        configurations: C of them, all on the same sequences.
        lengths: horizons.
        trials, samples: K trials of N sequences, each at least 2.
        seed: the same seed gives the same numbers at any number of workers.
        workers: threads; the numbers do not depend on it.
        device: ``cpu``, or where torch draws: ``cuda``, ``cuda:N``, ``torch-cpu``. Other numbers of the same law.
        scheduler: the address of a Dask scheduler whose workers draw the blocks, bit for bit as here.
        store: a folder for finished blocks; those already there are taken up.
        progress: called with (blocks done, blocks in all).

    Raises:
        ValueError: for counts below 2, a length out of range, or groups that do not divide the samples, or
            more estimates than fit in memory, or a device that is not here.
    """
    check_counts(trials, samples)
    check_device(device, scheduler)
    wanted = check_lengths(pair, lengths)
    tokens = float(trials) * samples * float(wanted.sum())
    if tokens > _MOST_TOKENS:
        raise ValueError(f"{tokens:.3g} tokens are past the limit of {_MOST_TOKENS:.3g}: take fewer trials or samples")
    entries = trials * len(configurations) * pair.policy.parameters * len(wanted)
    if entries > _MOST_ENTRIES:
        raise ValueError(
            f"trials x configurations x parameters x lengths = {entries:.3g} estimates do not fit "
            f"(at most {_MOST_ENTRIES:.3g}): take fewer trials or lengths; more samples cost no memory"
        )
    for configuration in configurations:
        configuration.group(samples)
    if any(c.estimator.family for c in configurations):
        return _length_by_length(
            pair, configurations, wanted.tolist(), progress,
            trials=trials, samples=samples, seed=seed, workers=workers, device=device, scheduler=scheduler, store=store,
        )  # fmt: skip
    unit = _unit(configurations, samples)
    sums = samples // unit * len(configurations) * (3 * pair.policy.parameters + 2)
    if sums > _MOST_ENTRIES:
        raise ValueError(
            f"samples = {samples:.3g} in leave-one-out groups of {unit} are {sums:.3g} sums a trial, which do not fit "
            f"(at most {_MOST_ENTRIES:.3g}): take fewer samples, or larger groups"
        )
    task = Task(
        pair, tuple(configurations), tuple(wanted.tolist()), samples, seed,
        _baselines(pair, configurations, wanted), device,
    )  # fmt: skip
    folder = None if store is None else store_of(store, pair, configurations, trials, samples, seed, device)
    todo = blocks(wanted.tolist(), trials, samples)
    with _numerics(device):
        done = dict(_in_order(task, folder, todo, workers, scheduler, progress))
    gradients, values = [], []
    for length in wanted:
        parts = [done[i] for i, block in enumerate(todo) if block.length == length]
        gradients.append(np.concatenate([g for g, _ in parts])[:trials])
        values.append(np.concatenate([v for _, v in parts])[:trials])
    return Simulation(gradients, values, sampler_used(pair, configurations, device))


def _length_by_length(
    pair: PolicyPair, configurations: Sequence[Configuration], lengths: list[int], progress: Progress | None,
    *, samples: int, **drawing: Any,
) -> Simulation:  # fmt: skip
    """``simulate`` where an argument is open, and another one at each length; no block depends on the other lengths."""
    from klgrad.synth.moments import best

    if (store := drawing["store"]) is not None:  # one folder for all of them, which the request's own name finds again
        request = (pair, configurations, drawing["trials"], samples, drawing["seed"], drawing["device"])
        drawing["store"] = store_of(store, *request)
    each = len(blocks(lengths[:1], drawing["trials"], samples))

    def told(before: int) -> Progress | None:
        return progress and (lambda done, _: progress(before + done, each * len(lengths)))

    parts = [
        simulate(pair, row, [n], samples=samples, progress=told(i * each), **drawing)
        for i, (n, row) in enumerate(zip(lengths, best(pair, configurations, lengths, samples=samples), strict=True))
    ]
    return Simulation([p.gradients[0] for p in parts], [p.estimates[0] for p in parts], parts[0].sampler)


def _numerics(device: str) -> AbstractContextManager[None]:
    if device == CPU:
        return nullcontext()
    from klgrad.synth.devices import reproducible

    return reproducible(device)


def _baselines(pair: PolicyPair, configurations: Sequence[Configuration], lengths: np.ndarray) -> np.ndarray:
    """``[C, L, d]`` the exact constant b of every configuration and length."""
    found = np.zeros((len(configurations), len(lengths), pair.policy.parameters))
    which = [i for i, c in enumerate(configurations) if c.baseline not in ("none", "loo")]
    if which:
        from klgrad.synth.moments import moments

        constant = [configurations[i] for i in which]
        found[which] = [m.baseline for m in moments(pair, constant, lengths.tolist(), covariance="none")]
    return found


def _in_order(
    task: Task, folder: Path | None, todo: list[Block], workers: int, scheduler: str | None, progress: Progress | None
) -> Iterator[tuple[int, Drawn]]:
    """Yield (index, result) of every block: those stored first, then the others as they are drawn and stored."""
    stored = {i: found for i, block in enumerate(todo) if (found := None if folder is None else _load(folder, block))}
    missing = [(i, block) for i, block in enumerate(todo) if i not in stored]
    yield from stored.items()
    if not missing:
        return
    keep: Callable[[Block, Drawn], None] = (lambda *_: None) if folder is None else partial(_save, folder)
    if task.device.startswith("cuda"):
        workers = 1  # threads would only share its memory
    if scheduler is None:
        drawn = _draw_here(task.drawer(), keep, missing, workers)
    else:
        from klgrad.analysis.cluster import draw_on_cluster

        drawn = draw_on_cluster(scheduler, task, keep, missing)
    with closing(drawn):  # an interruption ends the drawing at once, not when its traceback is forgotten
        for count, (i, result) in enumerate(drawn, len(stored) + 1):
            yield i, result
            if progress:
                progress(count, len(todo))


def _draw_here(
    draw: Callable[[Block], Drawn], keep: Callable[[Block, Drawn], None], todo: list[tuple[int, Block]], workers: int
) -> Generator[tuple[int, Drawn]]:
    """Yield (index, result); an interruption stops running blocks, however large, and keeps those that were drawn."""
    if workers <= 1:
        for i, block in todo:
            result = draw(block)
            keep(block, result)
            yield i, result
        return
    from concurrent.futures import ThreadPoolExecutor, as_completed

    from klgrad.analysis.processes import Stoppable

    drawing = Stoppable()

    def run(block: Block) -> Drawn:
        with drawing:
            result = draw(block)
        keep(block, result)
        return result

    pool = ThreadPoolExecutor(workers)
    try:
        waiting = {pool.submit(run, block): i for i, block in todo}
        for future in as_completed(waiting):
            yield waiting.pop(future), future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        drawing.stop()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _path(folder: Path, block: Block) -> Path:
    return folder / f"length-{block.length}-trial-{block.first}.npz"


def _load(folder: Path, block: Block) -> Drawn | None:
    """A finished block, or None where there is none that fits."""
    from klgrad.analysis.store import load_block

    found = load_block(_path(folder, block), "gradients", "estimates")
    if found is None or any(array.shape[:1] != (block.trials,) for array in found):
        return None
    gradients, values = found
    return gradients, values


def _save(folder: Path, block: Block, result: Drawn) -> None:
    from klgrad.analysis.store import save_block

    save_block(_path(folder, block), gradients=result[0], estimates=result[1])
