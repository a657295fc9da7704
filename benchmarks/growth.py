"""How time grows in T, V, N and d: log-log slopes, next to the exponents that counting operations gives.

CPU time of one process, the least of the rounds at each size, sizes taking turns. A slope below its exponent means that
fixed costs still show at the small end, not that the large end is cheaper.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from klgrad.synth.automata import markov
from klgrad.synth.configurations import Configuration, parse
from klgrad.synth.enumeration import enumerate_configuration
from klgrad.synth.moments import moments
from klgrad.synth.policies import PolicyPair, linear, log_softmax, tabular
from klgrad.synth.presets import preset
from klgrad.synth.sampling import Sampler

CONFIGURATIONS = [parse(f"{k}-in-{place}") for k in ("k1", "k3") for place in ("reward", "loss", "both")]
PREFIX = [parse("k3-in-both+rtg+prefix-ratio")]


class Growth(NamedTuple):
    """What is timed at which sizes; ``make`` prepares, and its function is timed."""

    name: str
    expected: float
    sizes: tuple[int, ...]
    make: Callable[[int], Callable[[], object]]


def random_pair(V: int, d: int | None = None) -> PolicyPair:
    """Context = last token, standard normal logits; tabular, or linear in d features."""
    automaton, rng = markov(V, 1, start=(0,)), np.random.default_rng(V)
    if d is None:
        policy = tabular(automaton, rng.normal(size=(V, V)))
    else:
        policy = linear(automaton, rng.normal(size=(V, V, d)), rng.normal(size=d) / d**0.5)
    return PolicyPair(automaton, policy, log_softmax(rng.normal(size=(V, V))))


def exact(pair: PolicyPair, length: int) -> Callable[[], object]:
    """Means and variances of the six configurations."""
    return lambda: moments(pair, CONFIGURATIONS, [length])


def drawn(
    pair: PolicyPair, configurations: list[Configuration], length: int, trials: int, samples: int = 1_000
) -> Callable[[], object]:
    """Sequences drawn and reduced."""
    sampler, rng = Sampler(pair, configurations, [length]), np.random.Generator(np.random.SFC64(0))
    return lambda: sampler.sums(length, trials, samples, rng)


GROWTHS = (
    Growth("exact, in T", 1, (10_000, 20_000, 40_000, 80_000), lambda T: exact(preset("far", T), T)),
    Growth("exact, tabular, in V", 4, (16, 24, 32), lambda V: exact(random_pair(V), 10)),
    Growth("exact, linear features, in d", 1, (256, 512, 1024), lambda d: exact(random_pair(4, d), 50)),
    Growth("counts, in T", 0, (20, 40, 80, 160), lambda T: drawn(preset("near"), CONFIGURATIONS, T, 100)),
    Growth("counts, in trials", 1, (100, 200, 400), lambda K: drawn(preset("near"), CONFIGURATIONS, 100, K)),
    Growth("tallies, in T", 1, (25, 50, 100, 200), lambda T: drawn(preset("far"), CONFIGURATIONS, T, 10, 10**6)),
    Growth("tallies, in N", 0, (10**5, 10**6, 10**7), lambda N: drawn(preset("far"), CONFIGURATIONS, 100, 10, N)),
    Growth("paths, in T", 1, (50, 100, 200, 400), lambda T: drawn(preset("far"), PREFIX, T, 5)),
    Growth("paths, in trials", 1, (5, 10, 20), lambda K: drawn(preset("far"), PREFIX, 100, K)),
    Growth("paths, in V", 0, (8, 16, 32), lambda V: drawn(random_pair(V, 8), CONFIGURATIONS, 100, 5)),
)  # fmt: skip
ENUMERATED = (6, 8, 10)  # tokens: 2^T sequences


def least(work: list[Callable[[], object]], rounds: int) -> np.ndarray:
    """CPU seconds of each, the least of the rounds after one to warm up."""
    times = np.full((rounds + 1, len(work)), np.inf)
    for row in times:
        for i, each in enumerate(work):
            began = time.process_time()
            each()
            row[i] = time.process_time() - began
    return times[1:].min(axis=0)


def main() -> None:
    """Measure and print the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, default=9, help="how many sizes of each, from the smallest")
    arguments = parser.parse_args()
    results = []
    for name, expected, sizes, make in GROWTHS:
        used = sizes[: arguments.sizes]
        times = least([make(size) for size in used], arguments.rounds)
        slope = float(np.polyfit(np.log(used), np.log(times), 1)[0])
        results.append(_row(name, slope, expected, used, times))
    used = ENUMERATED[: arguments.sizes]
    work = [partial(enumerate_configuration, CONFIGURATIONS[0], preset("far", T), T) for T in used]
    times = least(work, arguments.rounds)
    slope = float(np.polyfit(used, np.log2(times), 1)[0])
    results.append(_row("enumeration, doublings for each token of T", slope, 1, used, times))
    print(json.dumps({"results": results}))


def _row(name: str, slope: float, expected: float, sizes: tuple[int, ...], times: np.ndarray) -> dict[str, object]:
    return {
        name: slope,
        "  expected": expected,
        "  sizes": f"{sizes[0]:,} to {sizes[-1]:,}",
        "  milliseconds": " to ".join(f"{1e3 * t:.3g}" for t in times[[0, -1]]),
    }


if __name__ == "__main__":
    main()
