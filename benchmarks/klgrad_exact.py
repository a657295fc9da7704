"""The task of ``baseline_enumeration.py`` done by klgrad: exact means and variances, same pair and printed results."""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from klgrad.synth.configurations import parse
from klgrad.synth.moments import moments
from klgrad.synth.presets import preset


def main() -> None:
    """Run the task and print its JSON."""
    length = int(dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True)).get("--length", 14))
    began = time.perf_counter()
    names = [f"{k}-in-{place}" for k in ("k1", "k3") for place in ("reward", "loss", "both")]
    out = {
        name: {"mean": float(np.linalg.norm(m.mean[0])), "variance": float(m.covariance[0])}
        for name, m in zip(names, moments(preset("far", length), [parse(n) for n in names], [length]), strict=True)
    }
    print(json.dumps({"seconds": time.perf_counter() - began, "found": out}))


if __name__ == "__main__":
    main()
