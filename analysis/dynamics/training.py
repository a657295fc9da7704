"""The loop: C runs of one algorithm side by side, by sampled or by expected updates, exact measures at every step.

A run whose estimate or parameters are no longer finite has *collapsed*: it stops where it was, with step and cause.
Shapes: C runs, K updates, S contexts, V tokens, d parameters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from klgrad.analysis.dynamics.batches import Sequences
from klgrad.analysis.dynamics.fields import expected_ascent
from klgrad.analysis.dynamics.measures import MEASURES, Measures
from klgrad.analysis.dynamics.recipes import Algorithm, Run
from klgrad.analysis.dynamics.updates import Tables, ascent
from klgrad.synth.objectives import Family

if TYPE_CHECKING:
    from jaxtyping import Float

RECORDED = (*MEASURES, "gradient_norm", "cosine")
_FURTHEST = 1e6  # a logit beyond this is past any difference that exp can show


@dataclass(frozen=True, eq=False)
class Record:
    """What became of C runs.

    Args:
        measures: ``[C, K + 1, R]`` each of ``RECORDED`` before every update and after the last; NaN once collapsed.
            ``gradient_norm`` is that of the objective's true gradient, ``cosine`` the step's with it.
        theta: ``[C, d]`` where each run ended, or was last finite.
        collapsed: ``[C]`` the step at which a run collapsed, -1 for none.
        causes: why, or empty.
    """

    measures: Float[np.ndarray, "C K1 R"]
    theta: Float[np.ndarray, "C d"]
    collapsed: np.ndarray
    causes: tuple[str, ...]


class _Optimiser:
    """SGD or Adam (Kingma and Ba, 1412.6980), each run with its own learning rate."""

    def __init__(self, name: str, rates: np.ndarray) -> None:
        self.name, self.rates, self.count = name, rates[:, None], 0
        self.first: np.ndarray | float = 0.0
        self.second: np.ndarray | float = 0.0

    def step(self, gradient: np.ndarray) -> np.ndarray:
        """``[C, d]`` what is added to the parameters."""
        if self.name == "sgd":
            return self.rates * gradient
        self.count += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        first, second = self.first / (1 - 0.9**self.count), self.second / (1 - 0.999**self.count)
        return self.rates * first / (np.sqrt(second) + 1e-8)


def train(
    family: Family,
    runs: Sequence[Run],
    steps: int,
    start: Float[np.ndarray, " d"],
    *,
    expected: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Record:
    """Train runs of one algorithm from the same parameters.

    Args:
        runs: C of them.
        steps: K updates.
        start: ``[d]`` parameters to start from.
        expected: follow the expected update exactly instead of sampling.
        progress: called after every update with how many are done.

    Raises:
        ValueError: for runs of different algorithms, or an expected update that has no exact form.
    """
    if any(run.algorithm != runs[0].algorithm for run in runs):
        raise ValueError("runs that are trained side by side must share their algorithm")
    order = sorted(range(len(runs)), key=lambda i: _neighbours(runs[i]))
    loop = _Loop(family, [runs[i] for i in order], start, expected)
    record = np.full((len(runs), steps + 1, len(RECORDED)), np.nan)
    for k in range(steps):
        record[:, k] = loop.update(k)
        if progress:
            progress(k + 1)
    record[:, steps] = loop.measured()
    back = np.argsort(order)
    return Record(record[back], loop.theta[back], loop.collapsed[back], tuple(loop.causes[i] for i in back))


def _neighbours(run: Run) -> tuple[str, str]:
    """Runs that can be worked on together stand together."""
    return (run.penalty.credit, run.configuration) if run.penalty else ("", "")


class _Loop:
    """The state of C runs, ordered by configuration."""

    def __init__(self, family: Family, runs: Sequence[Run], start: np.ndarray, expected: bool) -> None:
        self.family, self.runs, self.expected = family, runs, expected
        self.algorithm: Algorithm = runs[0].algorithm
        C = len(runs)
        self.beta = np.array([run.beta for run in runs])
        self.measures = Measures(family, self.beta)
        self.optimiser = _Optimiser(self.algorithm.optimiser, np.array([run.learning_rate for run in runs]))
        self.theta = np.repeat(start[None].astype(float), C, axis=0)
        self.reference = np.repeat(family.task.pair.reference[None], C, axis=0)
        self.lagging: deque[np.ndarray] = deque(maxlen=self.algorithm.longest_lag + 1)
        self.collapsed, self.causes = np.full(C, -1), [""] * C
        self.penalties, first = [], 0
        for configuration, group in groupby(run.penalty for run in runs):
            size = len(list(group))
            self.penalties.append((configuration, slice(first, first + size)))
            first += size
        self.sequences = None if expected else Sequences(family, C, self.algorithm.samples)
        seeds = sorted({run.seed for run in runs})
        self.stream_of = np.array([seeds.index(run.seed) for run in runs])
        shape = (family.task.length, self.algorithm.samples)
        streams = [np.random.SeedSequence(seed, spawn_key=shape) for seed in seeds]
        self.streams = [np.random.Generator(np.random.SFC64(stream)) for stream in streams]

    def update(self, k: int) -> np.ndarray:
        """Make update k; ``[C, R]`` what was measured before it."""
        log_probs = self.measures.log_probs(self.theta)
        found, truth = self.measures(log_probs)
        if self.algorithm.reset_every and k and k % self.algorithm.reset_every == 0:
            self.reference = log_probs
        self.lagging.append(log_probs)
        sampler = self.lagging[-1 - self.algorithm.lag(k)]
        tables = Tables(log_probs, self.reference, sampler, self.measures.alive)
        step = self.optimiser.step(self.direction(tables))
        after = self.theta + step
        rows = self._rows(found, truth, step)
        fine = self._check(k + 1, step, after)
        self.theta = np.where(fine[:, None], after, self.theta)
        return rows

    def direction(self, tables: Tables) -> np.ndarray:
        """``[C, d]`` sampled or expected direction of ascent."""
        if self.sequences is None:
            return expected_ascent(self.measures, self.algorithm, self.penalties, self.beta, tables)
        log_rho = None
        if tables.sampler is not tables.log_probs:
            log_rho = np.where(self.measures.alive, tables.log_probs - tables.sampler, 0.0)
            if self.algorithm.ratio == "truncated":
                log_rho = np.minimum(log_rho, np.log(self.algorithm.truncation))
        batch = self.sequences.draw(tables.sampler, log_rho, self.uniforms())
        return ascent(self.algorithm, self.penalties, self.beta, batch, tables, self.measures)

    def uniforms(self) -> np.ndarray:
        """``[T, K, N]`` of the K seeds where runs take them in turn, else ``[T, C, N]`` of each run's."""
        shape = (self.family.task.length, self.algorithm.samples)
        drawn = np.stack([stream.random(shape) for stream in self.streams], axis=1)
        seeds, runs = len(self.streams), len(self.runs)
        in_turn = runs % seeds == 0 and (self.stream_of.reshape(-1, seeds) == np.arange(seeds)).all()
        return drawn if in_turn else drawn[:, self.stream_of]

    def measured(self) -> np.ndarray:
        """``[C, R]`` now."""
        found, truth = self.measures(self.measures.log_probs(self.theta))
        return self._rows(found, truth, np.full_like(truth, np.nan))

    def _rows(self, found: dict[str, np.ndarray], truth: np.ndarray, step: np.ndarray) -> np.ndarray:
        norm = np.linalg.norm(truth, axis=1)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            cosine = (truth * step).sum(axis=1) / (norm * np.linalg.norm(step, axis=1))
        rows = np.stack([*(found[name] for name in MEASURES), norm, cosine], axis=1)
        rows[self.collapsed >= 0] = np.nan
        return rows

    def _check(self, step_number: int, step: np.ndarray, after: np.ndarray) -> np.ndarray:
        """``[C]`` runs that go on; the others are marked, once, with step and cause."""
        bad_step = ~np.isfinite(step).all(axis=1)
        far = ~bad_step & (np.abs(after) > _FURTHEST).any(axis=1)
        for bad, cause in ((bad_step, "the estimate is not finite"), (far, "the parameters run away")):
            for i in np.flatnonzero(bad & (self.collapsed < 0)):
                self.collapsed[i], self.causes[i] = step_number, cause
        return self.collapsed < 0
