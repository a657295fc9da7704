"""How quickly the torch engine draws and reduces on a device, next to the numpy engine: in one process, taking turns.

Both draw the same requests and reduce them to per-trial gradients: on ``torch-cpu`` in CPU time with one thread each,
on ``cuda`` in wall time, of which the copy of the sums to the host is the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from klgrad.synth.automata import markov
from klgrad.synth.configurations import parse
from klgrad.synth.devices import TorchSampler, absence, identity
from klgrad.synth.policies import PolicyPair, log_softmax, tabular
from klgrad.synth.presets import preset
from klgrad.synth.sampling import Sampler

SIX = [f"{k}-in-{place}" for k in ("k1", "k3") for place in ("reward", "loss", "both")]


def words(vocabulary: int) -> PolicyPair:
    """That many tokens, no end, the context the last token; standard normal logits for policy and reference."""
    automaton, rng = markov(vocabulary, 1, start=(0,)), np.random.default_rng(0)
    shape = automaton.next_context.shape
    policy, reference = tabular(automaton, rng.normal(size=shape)), log_softmax(rng.normal(size=shape))
    return PolicyPair(automaton, policy, reference, name=f"V = {vocabulary}")


REQUESTS: list[tuple[PolicyPair, list[str]]] = [
    (preset("far"), SIX),
    (preset("far"), ["k3-in-both+rtg+prefix-ratio"]),
    (words(16), SIX),
    (words(32), SIX),
]


def measure(
    pair: PolicyPair, names: list[str], device: str, trials: int, samples: int, rounds: int
) -> dict[str, object]:
    """Nanoseconds per token of both engines, and the ratio of their times in each round."""
    length, configurations = 20, [parse(name) for name in names]
    here, there = Sampler(pair, configurations, [length]), TorchSampler(pair, configurations, device)
    rng, generator = np.random.Generator(np.random.SFC64(0)), there.generator(np.random.SeedSequence(0))
    clock = time.perf_counter if device.startswith("cuda") else time.process_time
    sides: dict[str, Callable[[], object]] = {
        "numpy": lambda: here.sums(length, trials, samples, rng),
        device: lambda: there.sums(length, trials, samples, generator),
    }

    def seconds(work: Callable[[], object]) -> float:
        began = clock()
        work()
        return clock() - began

    for work in sides.values():
        work()
    times = [{label: seconds(work) for label, work in sides.items()} for _ in range(rounds)]
    ratios = [t[device] / t["numpy"] for t in times]
    tokens = trials * samples * length
    asked = names[0] if len(names) == 1 else f"{len(names)} configurations"
    return {
        "request": f"{pair.name}, T = {length}, {asked}",
        "numpy sampler": here.name,
        **{f"{label}: ns per token": 1e9 * statistics.median(t[label] for t in times) / tokens for label in sides},
        f"{device} / numpy": statistics.median(ratios),
        "smallest": min(ratios),
        "largest": max(ratios),
    }


def main() -> None:
    """Measure and print the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="torch-cpu")
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if why := absence(arguments.device):
        parser.error(why)
    torch.set_num_threads(1)
    results = [
        measure(pair, names, arguments.device, arguments.trials, arguments.samples, arguments.rounds)
        for pair, names in REQUESTS
    ]
    print(json.dumps({"device": identity(arguments.device), "results": results}))


if __name__ == "__main__":
    main()
