"""Exact mean and variance of Figure 1's six configurations by going through all 2^T sequences in PyTorch.

Imports nothing of klgrad. The pair is the one of ``baseline_torch.py``; the gradient of every sequence's surrogate
comes from ``torch.func``: vmap over sequences of the gradient in the logits, as one would write it. In float64.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch import Tensor
from torch.func import grad, vmap

POLICY = torch.tensor([[0.0, 4.5], [4.0, 0.0]], dtype=torch.float64)
REFERENCE = torch.tensor([[0.0, -0.5], [0.0, 0.8]], dtype=torch.float64).log_softmax(dim=1)
CHUNK = 1 << 14  # sequences whose gradients are held at once


def surrogate(theta: Tensor, tokens: Tensor, k: str, place: str) -> Tensor:
    """The scalar whose gradient one sequence's contribution is."""
    before = torch.cat([torch.zeros_like(tokens[:1]), tokens[:-1]])
    log_probs = theta.log_softmax(dim=1)[before, tokens]
    delta = log_probs - REFERENCE[before, tokens]
    values = delta if k == "k1" else torch.expm1(-delta) + delta
    total = torch.zeros((), dtype=theta.dtype)
    if place != "loss":
        total = total + values.detach().sum() * log_probs.sum()
    if place != "reward":
        total = total + values.sum()
    return total


def main() -> None:
    """Run the task and print its JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=14)
    length = parser.parse_args().length
    torch.set_num_threads(1)
    began, out = time.perf_counter(), {}
    table = POLICY.log_softmax(dim=1)
    for k in ("k1", "k3"):
        for place in ("reward", "loss", "both"):
            each = vmap(grad(lambda theta, y, k=k, place=place: surrogate(theta, y, k, place)), in_dims=(None, 0))
            mean, square = torch.zeros(4, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
            for first in range(0, 1 << length, CHUNK):
                number = torch.arange(first, min(first + CHUNK, 1 << length))
                tokens = number[:, None] >> torch.arange(length) & 1
                before = torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, :-1]], dim=1)
                probability = table[before, tokens].sum(dim=1).exp()
                gradient = each(POLICY, tokens).flatten(1)
                mean += probability @ gradient
                square += probability @ (gradient * gradient).sum(dim=1)
            out[f"{k}-in-{place}"] = {"mean": float(mean.norm()), "variance": float(square - mean @ mean)}
    print(json.dumps({"seconds": time.perf_counter() - began, "found": out}))


if __name__ == "__main__":
    main()
