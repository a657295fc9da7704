"""The paper's protocol: trials x samples sequences, one gradient estimate per trial and configuration.

A Comedy of Estimators (arXiv 2512.21852), section 3.3: 200 trials of N = 1,000 sequences for each length. All
configurations of one request see the same sequences. Work is split into seeded blocks of trials, a pure function
of the request, so the result does not depend on the number of workers, and a stored run goes on from its finished
blocks. Standard modules that only storing, resuming or threads need are imported there: a run without them is
short enough to feel their import.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from klgrad.files import write_whole
from klgrad.synth.configurations import Configuration
from klgrad.synth.exact import check_lengths
from klgrad.synth.moments import moments
from klgrad.synth.policies import PolicyPair
from klgrad.synth.sampling import Sampler, estimates

if TYPE_CHECKING:
    from pathlib import Path

    from jaxtyping import Float

FORMAT = 2  # of stored blocks: raise it when the same seed gives other numbers
_BLOCK_SEQUENCES = 50_000  # of a block
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


class Block(NamedTuple):
    """Consecutive trials of one length: the unit of work, of seeding and of resumption."""

    length: int
    first: int
    trials: int


def blocks(lengths: Sequence[int], trials: int, samples: int) -> list[Block]:
    """The request's blocks; nothing else decides them."""
    size = max(1, _BLOCK_SEQUENCES // samples)
    return [Block(int(n), first, min(size, trials - first)) for n in lengths for first in range(0, trials, size)]


def check_counts(trials: int, samples: int) -> None:
    """Raise ValueError unless there are at least two of each: one has no spread."""
    for name, count in (("trials", trials), ("samples", samples)):
        if count < 2:
            raise ValueError(f"{name} = {count} is too few: a variance needs at least 2")


def fingerprint(pair: PolicyPair) -> str:
    """A hash of every number of the pair."""
    import hashlib

    digest = hashlib.sha256()
    arrays = (pair.automaton.next_context, pair.policy.log_probs, pair.policy.scores, pair.reference, pair.behaviour)
    for array in arrays:
        digest.update(b"none" if array is None else np.ascontiguousarray(array).tobytes())
    digest.update(repr((pair.automaton.start, pair.automaton.end)).encode())
    return digest.hexdigest()[:16]


def store_of(
    store: Path, pair: PolicyPair, configurations: Sequence[Configuration], trials: int, samples: int, seed: int
) -> Path:
    """The folder below ``store`` that holds this request's finished blocks."""
    return store / request_key(pair, configurations, trials, samples, seed)


def request_key(pair: PolicyPair, configurations: Sequence[Configuration], trials: int, samples: int, seed: int) -> str:
    """What a stored block must agree on to be taken up again."""
    import hashlib

    request = (FORMAT, fingerprint(pair), [str(c) for c in configurations], trials, samples, seed)
    return hashlib.sha256(repr(request).encode()).hexdigest()[:16]


def simulate(
    pair: PolicyPair,
    configurations: Sequence[Configuration],
    lengths: Sequence[int],
    *,
    trials: int = 200,
    samples: int = 1000,
    seed: int = 0,
    workers: int = 1,
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
        store: a folder for finished blocks; those already there are taken up.
        progress: called with (blocks done, blocks in all).

    Raises:
        ValueError: for counts below 2, a length out of range, or groups that do not divide the samples, or
            more estimates than fit in memory.
    """
    check_counts(trials, samples)
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
    units = math.gcd(samples, *(c.group(samples) for c in configurations if c.baseline == "loo"))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        sampler = Sampler(pair, configurations, wanted.tolist())
    baseline = _baselines(pair, configurations, wanted)
    folder = None if store is None else store_of(store, pair, configurations, trials, samples, seed)

    def run(block: Block) -> tuple[np.ndarray, np.ndarray]:
        stored = None if folder is None else _load(folder, block)
        if stored is not None:
            return stored
        stream = np.random.SeedSequence(seed, spawn_key=(block.length, block.first))
        rng = np.random.Generator(np.random.SFC64(stream))
        with np.errstate(over="ignore", invalid="ignore"):
            sums = sampler.sums(block.length, block.trials * (samples // units), units, rng)
            each = [
                estimates(c, s, block.trials, samples, baseline[c, block.length])
                for c, s in zip(configurations, sums, strict=True)
            ]
        result = np.stack([g for g, _ in each], axis=1), np.stack([v for _, v in each], axis=1)
        if folder is not None:
            _save(folder, block, result)
        return result

    todo = blocks(wanted.tolist(), trials, samples)
    done = dict(_in_order(run, todo, workers, progress))
    gradients, values = [], []
    for length in wanted:
        parts = [done[i] for i, block in enumerate(todo) if block.length == length]
        gradients.append(np.concatenate([g for g, _ in parts])[:trials])
        values.append(np.concatenate([v for _, v in parts])[:trials])
    return Simulation(gradients, values, sampler.name)


def _baselines(
    pair: PolicyPair, configurations: Sequence[Configuration], lengths: np.ndarray
) -> dict[tuple[Configuration, int], np.ndarray]:
    """The exact constant b of every configuration and length."""
    constant = [c for c in configurations if c.baseline not in ("none", "loo")]
    none = np.zeros(pair.policy.parameters)
    found = {(c, int(n)): none for c in configurations for n in lengths}
    for m in moments(pair, constant, lengths.tolist(), covariance="none") if constant else []:
        found.update({(m.configuration, int(n)): b for n, b in zip(lengths, m.baseline, strict=True)})
    return found


def _in_order(
    run: Callable[[Block], tuple[np.ndarray, np.ndarray]], todo: list[Block], workers: int, progress: Progress | None
) -> Iterator[tuple[int, tuple[np.ndarray, np.ndarray]]]:
    """Yield (index, result); an interruption lets running blocks finish and starts no others."""
    if workers <= 1:
        for i, block in enumerate(todo):
            yield i, run(block)
            if progress:
                progress(i + 1, len(todo))
        return
    from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

    pool = ThreadPoolExecutor(workers)
    try:
        waiting = {pool.submit(run, block): i for i, block in enumerate(todo)}
        while waiting:
            finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in finished:
                yield waiting.pop(future), future.result()
            if progress:
                progress(len(todo) - len(waiting), len(todo))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _path(folder: Path, block: Block) -> Path:
    return folder / f"length-{block.length}-trial-{block.first}.npz"


def _load(folder: Path, block: Block) -> tuple[np.ndarray, np.ndarray] | None:
    """A finished block, or None where there is none or it cannot be read."""
    import zipfile

    broken = (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile)
    with suppress(*broken), _path(folder, block).open("rb") as file:
        stored = np.load(file)
        gradients, values = stored["gradients"], stored["estimates"]
        if len(gradients) == len(values) == block.trials:
            return gradients, values
    return None


def _save(folder: Path, block: Block, result: tuple[np.ndarray, np.ndarray]) -> None:
    import io

    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, gradients=result[0], estimates=result[1])
    write_whole(_path(folder, block), buffer.getvalue())
