"""The Monte Carlo of Figure 1 (arXiv 2512.21852) as one would write it in plain PyTorch: autograd for each trial.

Imports nothing of klgrad. The task: a binary policy and reference whose contexts are the last token, with softmax
logits [[0, 4.5], [4, 0]] and [[0, -0.5], [0, 0.8]] and start in context 0; for each length, ``trials`` gradient
estimates from ``samples`` sequences each, for k1 and k3 in the reward, in the loss and in both. Bias is the norm of
the mean estimate less the true gradient; variance is samples times the trace of the estimates' covariance.
Prints them as JSON, with the seconds that the work took once everything was imported.

What makes it competent: all sequences of many trials are drawn together, the loop over tokens touches booleans
only, everything else is vectorised over sequences and tokens, and the log-probs and values of a trial are built once
and serve all configurations. Log-probs are read as one writes it, ``log_probs[context, token]``; ``--tuned`` reads them
with ``index_select`` on 32-bit indices instead, whose backward pass was the quickest of nine ways tried, and keeps the
cyclic collector out of start-up, as klgrad's side does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator

if "--tuned" in sys.argv:
    import uncollected  # noqa: F401

import torch
from torch import Tensor

POLICY = [[0.0, 4.5], [4.0, 0.0]]
REFERENCE = [[0.0, -0.5], [0.0, 0.8]]
CONFIGURATIONS = tuple(f"{k}-in-{place}" for k in ("k1", "k3") for place in ("reward", "loss", "both"))
DRAWN_TOGETHER = 2_000_000  # tokens whose uniforms are held at once


def draw(
    policy: Tensor, length: int, trials: int, samples: int, generator: torch.Generator, index: torch.dtype
) -> Iterator[Tensor]:
    """``[length, samples]`` for each trial in turn: which of the four log-probs each token has, 2 x context + token."""
    together = max(1, min(trials, DRAWN_TOGETHER // (length * samples)))
    probs = policy.softmax(dim=1)[:, 1]
    uniform = torch.empty(length, together * samples, dtype=policy.dtype)
    for first in range(0, trials, together):
        uniform.uniform_(generator=generator)
        after_zero, after_one = uniform < probs[0], uniform < probs[1]
        tokens = torch.zeros(length + 1, together * samples, dtype=torch.bool)  # row 0 is the start
        for t in range(length):
            torch.where(tokens[t], after_one[t], after_zero[t], out=tokens[t + 1])
        codes = torch.add(tokens[1:], tokens[:-1].to(torch.uint8), alpha=2)
        for block in torch.split(codes, samples, dim=1)[: trials - first]:
            yield block.to(index)


def to_go(values: Tensor) -> Tensor:
    """Sum over this token and the later ones."""
    return values.sum(dim=0) - values.cumsum(dim=0) + values


def surrogate(place: str, credit: str, values: Tensor, log_probs: Tensor) -> Tensor:
    """The scalar whose gradient, divided by the number of sequences, the configuration is.

    The sum over sequences, not their mean: in float32 the backward pass would add up many equal thousandths, whose
    roundings all point one way (0.3 standard errors of the mean over 200 trials at length 200).
    """
    total = log_probs.new_zeros(())
    if place in ("reward", "both"):
        detached = values.detach()
        if credit == "whole":
            total = total + (detached.sum(dim=0) * log_probs.sum(dim=0)).sum()
        else:
            total = total + (to_go(detached) * log_probs).sum()
    if place in ("loss", "both"):
        total = total + values.sum()
    return total


def read(table: Tensor, codes: Tensor, tuned: bool) -> Tensor:
    """``[length, samples]`` entries of a ``[context, token]`` table."""
    if tuned:
        return table.flatten().index_select(0, codes.flatten()).view(codes.shape)
    return table[codes // 2, codes % 2]


def estimate(theta: Tensor, reference: Tensor, codes: Tensor, credit: str, tuned: bool) -> Tensor:
    """``[configurations, d]`` one trial's gradient estimates."""
    log_probs = read(theta.log_softmax(dim=1), codes, tuned)
    delta = log_probs - read(reference, codes, tuned)
    values = {"k1": delta, "k3": torch.expm1(-delta) + delta}
    gradients = []
    for name in CONFIGURATIONS:
        k, place = name.split("-in-")
        loss = surrogate(place, credit, values[k], log_probs)
        gradients.append(torch.autograd.grad(loss, theta, retain_graph=True)[0].flatten())
    return torch.stack(gradients) / codes.shape[1]


def true_gradient(policy: Tensor, reference: Tensor, length: int) -> Tensor:
    """``[d]`` gradient of the sequence-level KL, through the distribution of the context at each token."""
    theta = policy.clone().requires_grad_()
    log_probs = theta.log_softmax(dim=1)
    probs = log_probs.exp()
    per_context = (probs * (log_probs - reference.log_softmax(dim=1))).sum(dim=1)
    context, kl = torch.tensor([1.0, 0.0], dtype=theta.dtype), torch.zeros((), dtype=theta.dtype)
    for _ in range(length):
        kl = kl + context @ per_context
        context = context @ probs
    return torch.autograd.grad(kl, theta)[0].flatten()


def simulate(length: int, trials: int, samples: int, credit: str, dtype: torch.dtype, seed: int, tuned: bool) -> Tensor:
    """``[trials, configurations, d]`` gradient estimates."""
    generator = torch.Generator().manual_seed(seed)
    policy = torch.tensor(POLICY, dtype=dtype)
    reference = torch.tensor(REFERENCE, dtype=dtype).log_softmax(dim=1)
    theta = policy.clone().requires_grad_()
    drawn = draw(policy, length, trials, samples, generator, torch.int32 if tuned else torch.int64)
    return torch.stack([estimate(theta, reference, codes, credit, tuned) for codes in drawn])


def summary(gradients: Tensor, length: int, samples: int) -> dict[str, dict[str, float]]:
    """Bias and variance of each configuration at one length."""
    gradients = gradients.double()
    policy, reference = torch.tensor(POLICY, dtype=torch.float64), torch.tensor(REFERENCE, dtype=torch.float64)
    truth = true_gradient(policy, reference, length)
    bias = (gradients.mean(dim=0) - truth).norm(dim=1)
    variance = samples * gradients.var(dim=0).sum(dim=1)
    return {
        name: {"bias": float(b), "variance": float(v)}
        for name, b, v in zip(CONFIGURATIONS, bias, variance, strict=True)
    }


def main() -> None:
    """Run the task and print its JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", default="5,10,20,50,100,200")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--credit", choices=("whole", "rtg"), default="whole")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--tuned", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lengths = [int(length) for length in arguments.lengths.split(",")]
    began, out = time.perf_counter(), {}
    for i, length in enumerate(lengths):
        gradients = simulate(
            length,
            arguments.trials,
            arguments.samples,
            arguments.credit,
            getattr(torch, arguments.dtype),
            arguments.seed * 1000 + i,
            arguments.tuned,
        )
        out[str(length)] = summary(gradients, length, arguments.samples)
    print(json.dumps({"seconds": time.perf_counter() - began, "lengths": out}))


if __name__ == "__main__":
    main()
