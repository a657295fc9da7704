"""The floor of any sampler that spends one uniform on each token: draw them and do nothing with them.

One float64 for every token of the Monte Carlo task, by numpy's quickest bit generator, into one reused buffer that
stays in cache. SFC64 has the least work per number of numpy's generators (no 128-bit product as in PCG64 and
PCG64DXSM, no rounds as in Philox, no state of kilobytes as in MT19937). Prints the seconds as JSON.
"""

from __future__ import annotations

import uncollected  # noqa: F401

# isort: split
import argparse
import json
import time

import numpy as np

BUFFER = 1 << 14


def main() -> None:
    """Draw them and print the seconds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", default="5,10,20,50,100,200")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.perf_counter()
    rng = np.random.Generator(np.random.SFC64(arguments.seed))
    tokens = arguments.trials * arguments.samples * sum(int(length) for length in arguments.lengths.split(","))
    buffer = np.empty(BUFFER)
    for _ in range(tokens // BUFFER):
        rng.random(out=buffer)
    rng.random(out=buffer[: tokens % BUFFER])
    print(json.dumps({"seconds": time.perf_counter() - began, "uniforms": tokens}))


if __name__ == "__main__":
    main()
