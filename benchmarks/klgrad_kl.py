"""The task of ``baseline_semiring.py`` done by klgrad: exact KL of sequences, its gradient, same output."""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from klgrad.synth.automata import markov
from klgrad.synth.exact import kl, true_gradient
from klgrad.synth.policies import PolicyPair, log_softmax, tabular


def main() -> None:
    """Run the task and print its JSON."""
    options = {"--vocabularies": "2,8,32", "--lengths": "50,200", "--gradient": "yes"}
    options |= dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    began, out = time.perf_counter(), {}
    lengths = [int(length) for length in options["--lengths"].split(",")]
    for V in map(int, options["--vocabularies"].split(",")):
        rng, automaton = np.random.default_rng(V), markov(V, 1, start=(0,))
        policy = tabular(automaton, rng.normal(size=(V, V)))
        pair = PolicyPair(automaton, policy, log_softmax(rng.normal(size=(V, V))))
        for length in lengths:  # one by one, as the other side does
            found = {"kl": float(kl(pair, [length])[0])}
            if options["--gradient"] == "yes":
                found["norm"] = float(np.linalg.norm(true_gradient(pair, [length])))
            out[f"V = {V}, T = {length}"] = found
    print(json.dumps({"seconds": time.perf_counter() - began, "found": out}))


if __name__ == "__main__":
    main()
