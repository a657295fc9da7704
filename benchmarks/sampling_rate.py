"""How quickly sequences over sixteen words are drawn, next to bare uniforms: in one process, taking turns.

Times three things: drawing sequences, drawing them and reducing them to the gradients of six configurations, and one
float64 uniform for each token that was drawn. On two pairs of V = 16 whose context is the last token: the preset
``words``, whose last token ends (only tokens up to and with the end count; the work spent on places after it does not
earn any), and one without an end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from klgrad.synth.automata import markov
from klgrad.synth.configurations import parse
from klgrad.synth.policies import PolicyPair, log_softmax, tabular
from klgrad.synth.presets import preset
from klgrad.synth.sampling import Sampler

CONFIGURATIONS = [parse(f"{k}-in-{place}") for k in ("k1", "k3") for place in ("reward", "loss", "both")]


def endless(seed: int) -> PolicyPair:
    """V = 16, no end, standard normal logits for policy and reference."""
    automaton, rng = markov(16, 1, start=(0,)), np.random.default_rng(seed)
    shape = automaton.next_context.shape
    pair = PolicyPair(automaton, tabular(automaton, rng.normal(size=shape)), log_softmax(rng.normal(size=shape)))
    return replace(pair, name="endless")


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(pair: PolicyPair, length: int, sequences: int, rounds: int, seed: int) -> dict[str, object]:
    """Nanoseconds per token of each, and the median over rounds of their ratio to the uniforms."""
    sampler = Sampler(pair, CONFIGURATIONS, [length])
    rng = np.random.Generator(np.random.SFC64(seed))
    tokens = int((sampler.paths(length, sequences, rng) < len(sampler.edges)).sum())
    buffer = np.empty(min(tokens, 1 << 14))

    def uniforms() -> None:
        for _ in range(tokens // len(buffer)):
            rng.random(out=buffer)
        rng.random(out=buffer[: tokens % len(buffer)])

    work: dict[str, Callable[[], object]] = {
        "uniforms": uniforms,
        "sequences": lambda: sampler.paths(length, sequences, rng),
        "gradients": lambda: sampler.sums(length, 1, sequences, rng),
    }
    for each in work.values():
        each()
    times = [{name: seconds(each) for name, each in work.items()} for _ in range(rounds)]
    out: dict[str, object] = {"pair": pair.name, "length": length, "sampler": sampler.name, "tokens": tokens}
    for name in work:
        out[f"{name}: ns per token"] = 1e9 * statistics.median(t[name] for t in times) / tokens
    for name in ("sequences", "gradients"):
        out[f"{name} / uniforms"] = statistics.median(t[name] / t["uniforms"] for t in times)
    return out


def main() -> None:
    """Measure and print the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", default="20,100")
    parser.add_argument("--sequences", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    results = [
        measure(pair, length, arguments.sequences, arguments.rounds, arguments.seed)
        for length in lengths
        for pair in (preset("words", length), endless(0))
    ]
    print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
