"""The training of ``baseline_dynamics.py`` with klgrad: many runs side by side, exact measures at every step."""

from __future__ import annotations

import argparse
import json
import time

import baseline_dynamics as task

from klgrad.analysis.dynamics.recipes import Algorithm, Run
from klgrad.analysis.dynamics.runs import ends, study
from klgrad.synth.objectives import family
from klgrad.synth.tasks import preset_task


def main() -> None:
    """Run the task and print its JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    import pandas  # noqa: F401  # loaded before the clock starts, as torch is on the other side

    began = time.perf_counter()
    policies = family(preset_task("pattern"))
    algorithm = Algorithm("rloo", samples=arguments.samples)
    runs = [
        Run(name, task.BETA, task.RATE, algorithm, seed)
        for seed in range(arguments.seeds)
        for name in task.CONFIGURATIONS
    ]
    start = policies.parameters_of(policies.task.pair.reference)
    frame = ends(study(policies, runs, arguments.steps, start, workers=arguments.workers, every=5))
    seconds = time.perf_counter() - began
    mean = frame.groupby("configuration")[["objective", "kl"]].mean().to_dict("index")
    print(json.dumps({"seconds": seconds, "ends": mean}))


if __name__ == "__main__":
    main()
