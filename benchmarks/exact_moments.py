"""Milliseconds of exact means and variances, how they grow with the length, and whether memory does.

Six configurations (k1 and k3 in the reward, in the loss and in both) on the preset ``far``: at the Monte Carlo's
six lengths in one call, and at one long one; and on a pair of 32 tokens whose context is the last one, d = 1024.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import tracemalloc
from collections.abc import Sequence

import numpy as np

from klgrad.synth.automata import markov
from klgrad.synth.configurations import parse
from klgrad.synth.moments import moments
from klgrad.synth.policies import PolicyPair, log_softmax, tabular
from klgrad.synth.presets import preset

CONFIGURATIONS = [parse(f"{k}-in-{place}") for k in ("k1", "k3") for place in ("reward", "loss", "both")]


def thirty_two(seed: int) -> PolicyPair:
    """V = 32, context = last token, standard normal logits for policy and reference."""
    automaton, rng = markov(32, 1, start=(0,)), np.random.default_rng(seed)
    shape = automaton.next_context.shape
    return PolicyPair(automaton, tabular(automaton, rng.normal(size=shape)), log_softmax(rng.normal(size=shape)))


def milliseconds(pair: PolicyPair, lengths: Sequence[int], rounds: int) -> float:
    """Median time of one call, after one to warm up."""
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        moments(pair, CONFIGURATIONS, lengths)
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[1:])


def peak_kilobytes(pair: PolicyPair, length: int) -> float:
    """Most memory held at once during one call."""
    tracemalloc.start()
    moments(pair, CONFIGURATIONS, [length])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1024


def slope(lengths: Sequence[int], times: Sequence[float]) -> float:
    """Of log time against log length: 1 is linear."""
    return float(np.polyfit(np.log(lengths), np.log(times), 1)[0])


def main() -> None:
    """Measure and print the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--doublings", type=int, default=4, help="lengths 10,000 x 2^k for the slope")
    arguments = parser.parse_args()
    rounds, far = arguments.rounds, preset("far", 200)
    longer = [10_000 * 2**k for k in range(arguments.doublings)]
    times = [milliseconds(far, [length], rounds) for length in longer]
    peaks = {length: peak_kilobytes(far, length) for length in (1_000, 10_000)}
    results = {
        "far, six lengths to 200: ms": milliseconds(far, [5, 10, 20, 50, 100, 200], 20 * rounds),
        "far, length 10,000: ms": times[0],
        "V = 32, d = 1024, length 100: ms": milliseconds(thirty_two(0), [100], rounds),
        f"log-log slope, lengths {longer[0]:,} to {longer[-1]:,}": slope(longer, times),
        "peak memory at length 1,000: kB": peaks[1_000],
        "peak memory at length 10,000: kB": peaks[10_000],
        "peak memory growth, 1,000 to 10,000": peaks[10_000] / peaks[1_000],
    }
    print(json.dumps({"results": [results]}))


if __name__ == "__main__":
    main()
