"""The task of ``baseline_torch.py`` done by klgrad: same pair, configurations, counts and printed results."""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from klgrad.analysis.montecarlo import simulate
from klgrad.synth.configurations import parse
from klgrad.synth.exact import true_gradient
from klgrad.synth.presets import preset


def configurations(credit: str) -> dict[str, str]:
    """What each of the six is called in klgrad: reward-to-go is an option of those with a reward."""
    names = [f"{k}-in-{place}" for k in ("k1", "k3") for place in ("reward", "loss", "both")]
    return {name: f"{name}+rtg" if credit == "rtg" and not name.endswith("loss") else name for name in names}


def main() -> None:
    """Run the task and print its JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", default="5,10,20,50,100,200")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--credit", choices=("whole", "rtg"), default="whole")
    arguments = parser.parse_args()
    began = time.perf_counter()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    names = configurations(arguments.credit)
    pair = preset("far", max(lengths))
    simulation = simulate(
        pair,
        [parse(name) for name in names.values()],
        lengths,
        trials=arguments.trials,
        samples=arguments.samples,
        seed=arguments.seed,
    )
    out = {}
    for length, gradients, truth in zip(lengths, simulation.gradients, true_gradient(pair, lengths), strict=True):
        bias = np.linalg.norm(gradients.mean(axis=0) - truth, axis=1)
        variance = arguments.samples * gradients.var(axis=0, ddof=1).sum(axis=1)
        out[str(length)] = {
            name: {"bias": float(b), "variance": float(v)} for name, b, v in zip(names, bias, variance, strict=True)
        }
    print(json.dumps({"seconds": time.perf_counter() - began, "sampler": simulation.sampler, "lengths": out}))


if __name__ == "__main__":
    main()
