"""Training under twenty configurations as one would write it in plain PyTorch: one run after another, autograd.

Imports nothing of klgrad. The task is the preset ``pattern``: a binary policy whose context is the last token,
reference logits [[0, 0.2], [0.1, 0]], start in context 0, T = 20, reward 1 if 1,1,0,1,1,1 occurs; 0,0,0,0 is evaluated
and not trained on. Each step draws ``samples`` sequences, takes leave-one-out advantages, adds the penalty (whole
credit, or reward-to-go), and makes an SGD step. It also measures exactly, by dynamic programming over contexts and
matched tokens: J, E[R], KL, forward KL, entropy, the other reward, and the gradient of J by autograd, for its norm and
cosine with the step. Prints where each run ended as JSON, with the seconds that the work took after the imports.

What makes it competent: sequences are drawn together, token by token, with one comparison each; everything else is
vectorised over sequences and tokens; the measures share one pass over time with dense matrices.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor

ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: torch.expm1(-d) + d,
    "abs": torch.abs,
    "forward-kl": lambda d: -torch.expm1(-d) - d * torch.exp(-d),
}
PLACES = ("reward", "loss", "both", "both+rtg")
CONFIGURATIONS = tuple(f"{name}-in-{place}" for name in ESTIMATORS for place in PLACES)
BETA, RATE, LENGTH = 0.05, 0.5, 20
REFERENCE = ((0.0, 0.2), (0.1, 0.0))
PATTERN, OTHER = (1, 1, 0, 1, 1, 1), (0, 0, 0, 0)


def matcher(pattern: tuple[int, ...]) -> list[list[int]]:
    """``[matched][token]`` how much of the pattern the last tokens match; the whole pattern stays matched."""
    rows = []
    for matched in range(len(pattern)):
        seen = [(*pattern[:matched], token) for token in (0, 1)]
        rows.append([max(k for k in range(len(s) + 1) if s[len(s) - k :] == pattern[:k]) for s in seen])
    return [*rows, [len(pattern)] * 2]


class Machine:
    """States (last token, matched of the pattern, matched of the other), their successors and the two rewards."""

    def __init__(self) -> None:
        a, b = matcher(PATTERN), matcher(OTHER)
        states = [(0, 0, 0)]
        table: list[list[int]] = []
        for _, i, j in states:
            after = [(v, a[i][v], b[j][v]) for v in (0, 1)]
            states += [s for s in after if s not in states]
            table.append([states.index(s) for s in after])
        self.table = torch.tensor(table)
        self.last = torch.tensor([s[0] for s in states])
        self.reward = torch.tensor([float(s[1] == len(PATTERN)) for s in states], dtype=torch.float64)
        self.other = torch.tensor([float(s[2] == len(OTHER)) for s in states], dtype=torch.float64)
        moves = torch.nn.functional.one_hot(self.table, len(states)).to(torch.float64)
        self.moves = moves  # [S, 2, S]


def measures(machine: Machine, log_probs: Tensor, reference: Tensor) -> dict[str, Tensor]:
    """Exact measures of a policy ``[2, 2]``, differentiable."""
    own, ref = log_probs[machine.last], reference[machine.last]
    probs, ref_probs = own.exp(), ref.exp()
    step = torch.einsum("sv,svz->sz", probs, machine.moves)
    ref_step = torch.einsum("sv,svz->sz", ref_probs, machine.moves)
    mass = torch.zeros(len(machine.last), dtype=torch.float64)
    mass[0] = 1.0
    ref_mass, visits, ref_visits = mass, torch.zeros_like(mass), torch.zeros_like(mass)
    for _ in range(LENGTH):
        visits, ref_visits = visits + mass, ref_visits + ref_mass
        mass, ref_mass = mass @ step, ref_mass @ ref_step
    kl = visits @ (probs * (own - ref)).sum(1)
    reward = mass @ machine.reward
    return {
        "objective": reward - BETA * kl,
        "reward": reward,
        "kl": kl,
        "forward_kl": ref_visits @ (ref_probs * (ref - own)).sum(1),
        "entropy": -(visits @ (probs * own).sum(1)),
        "out_of_domain": mass @ machine.other,
    }


def draw(machine: Machine, probs: Tensor, samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """``[T, samples]`` contexts and tokens, and the final states."""
    uniform = torch.rand(LENGTH, samples, dtype=torch.float64, generator=generator)
    one = probs[:, 1][machine.last]
    state = torch.zeros(samples, dtype=torch.int64)
    contexts, tokens = torch.empty(LENGTH, samples, dtype=torch.int64), torch.empty(LENGTH, samples, dtype=torch.int64)
    for t in range(LENGTH):
        token = (uniform[t] < one[state]).long()
        contexts[t], tokens[t] = machine.last[state], token
        state = machine.table[state, token]
    return contexts, tokens, state


def train(machine: Machine, configuration: str, steps: int, samples: int, seed: int) -> list[dict[str, float]]:
    """One run; what was measured at every step."""
    name, _, place = configuration.partition("-in-")
    place, _, credit = place.partition("+")
    generator = torch.Generator().manual_seed(seed)
    reference = torch.tensor(REFERENCE, dtype=torch.float64).log_softmax(1)
    theta = reference.clone().requires_grad_()
    optimiser = torch.optim.SGD([theta], lr=RATE)
    record = []
    for k in range(steps + 1):
        log_probs = theta.log_softmax(1)
        found = measures(machine, log_probs, reference)
        (truth,) = torch.autograd.grad(found["objective"], theta)
        row = {key: value.item() for key, value in found.items()}
        record.append(row)
        if k == steps:
            break
        log_probs = theta.log_softmax(1)
        with torch.no_grad():
            contexts, tokens, final = draw(machine, log_probs.exp(), samples, generator)
            reward = machine.reward[final]
        taken = log_probs[contexts, tokens]
        value = ESTIMATORS[name](taken - reference[contexts, tokens])
        score = taken.sum(0)
        loss = torch.zeros((), dtype=torch.float64)
        if place != "loss" and not credit:
            reward = reward - BETA * value.detach().sum(0)
        advantage = (reward - reward.mean()) * samples / (samples - 1)
        loss = loss - (advantage * score).mean()
        if credit:
            detached = value.detach()
            to_go = detached.sum(0) - detached.cumsum(0) + detached
            loss = loss + BETA * (to_go * taken).sum(0).mean()
        if place != "reward":
            loss = loss + BETA * value.sum(0).mean()
        optimiser.zero_grad()
        loss.backward()
        before = theta.detach().clone()
        optimiser.step()
        moved = (theta.detach() - before).flatten()
        row["gradient_norm"] = float(truth.norm())
        row["cosine"] = float(torch.nn.functional.cosine_similarity(moved, truth.flatten(), dim=0))
    return record


def main() -> None:
    """Run the task and print its JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=256)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began, machine = time.perf_counter(), Machine()
    ends = {}
    for name in CONFIGURATIONS:
        last = [train(machine, name, arguments.steps, arguments.samples, seed)[-1] for seed in range(arguments.seeds)]
        ends[name] = {key: sum(row[key] for row in last) / len(last) for key in ("objective", "kl")}
    print(json.dumps({"seconds": time.perf_counter() - began, "ends": ends}))


if __name__ == "__main__":
    main()
