"""The task of ``baseline_torch.py`` done by klgrad: same pair, configurations, counts, options and printed results.

Options are read by hand: argparse and what it imports would be a twentieth of this process.
"""

from __future__ import annotations

import uncollected  # noqa: F401

# isort: split
import json
import sys
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
    options = {"--lengths": "5,10,20,50,100,200", "--trials": "200", "--samples": "1000", "--seed": "0"}
    options |= {"--credit": "whole", **dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))}
    began = time.perf_counter()
    lengths = [int(length) for length in options["--lengths"].split(",")]
    trials, samples, seed = (int(options[name]) for name in ("--trials", "--samples", "--seed"))
    names = configurations(options["--credit"])
    pair = preset("far", max(lengths))
    recipes = [parse(name) for name in names.values()]
    simulation = simulate(pair, recipes, lengths, trials=trials, samples=samples, seed=seed)
    out = {}
    for length, gradients, truth in zip(lengths, simulation.gradients, true_gradient(pair, lengths), strict=True):
        bias = np.linalg.norm(gradients.mean(axis=0) - truth, axis=1)
        variance = samples * gradients.var(axis=0, ddof=1).sum(axis=1)
        out[str(length)] = {
            name: {"bias": float(b), "variance": float(v)} for name, b, v in zip(names, bias, variance, strict=True)
        }
    print(json.dumps({"seconds": time.perf_counter() - began, "sampler": simulation.sampler, "lengths": out}))


if __name__ == "__main__":
    main()
