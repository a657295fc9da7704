"""Exact measures of many policies at once: objective, reward, KLs, entropy, and the gradient of the objective.

The single-policy twins are ``synth.exact`` and ``synth.objectives``. Shapes: C runs, S contexts, V tokens, T length,
d parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from klgrad.synth.objectives import Family, best

if TYPE_CHECKING:
    from jaxtyping import Float

MEASURES = ("objective", "reward", "kl", "forward_kl", "entropy", "out_of_domain", "gap", "kl_to_optimum")


class Measures:
    """Measures of the policies of C runs of one task, by one pass forward and one back over the tokens.

    ``gap`` is J* - J and ``kl_to_optimum`` KL(pi || pi*), each computed on its own: the first is beta times the second
    [E12], at every step of every run. Where beta is 0 there is no such optimum and ``kl_to_optimum`` is NaN.

    Args:
        family: the task's policies.
        beta: ``[C]`` each run's coefficient of the KL.
    """

    def __init__(self, family: Family, beta: Float[np.ndarray, " C"]) -> None:
        self.family, self.beta = family, np.asarray(beta, float)
        task = family.task
        automaton, C = task.pair.automaton, len(self.beta)
        S, V = automaton.next_context.shape
        # tokens come first in the loops over time, [V, C, S]: sums over them are then sums of whole arrays
        self.to = np.arange(C)[:, None] * S + automaton.next_context.T[:, None, :]
        self.shape = (S, V)
        self.alive = automaton.alive[:, None]
        self.features = family.features.reshape(S * V, -1)
        self.reference = task.pair.reference
        self.reference_visits = self._visits((np.exp(self.reference) * self.alive).T[:, None])[1][0]
        optima = {b: best(task, b) for b in set(self.beta.tolist())}
        self.optimal = np.array([optima[b].objective for b in self.beta.tolist()])
        self.star = [(self.beta == b, optima[b].log_probs) for b in optima if b > 0]  # [T, S, V] each

    def log_probs(self, theta: Float[np.ndarray, "C d"]) -> Float[np.ndarray, "C S V"]:
        """``[C, S, V]`` of each run's policy."""
        logits = (theta @ self.features.T).reshape(len(theta), *self.shape)
        shifted = logits - logits.max(axis=2, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=2, keepdims=True))

    def to_parameters(self, weight: Float[np.ndarray, "C S V"], probs: np.ndarray) -> Float[np.ndarray, "C d"]:
        """``[C, d]`` sum of ``weight`` times the score of each token in each context."""
        on_logits = weight - probs * weight.sum(axis=2, keepdims=True)
        return on_logits.reshape(len(weight), -1) @ self.features

    def _visits(self, probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``[T + 1, C, S]`` probability of standing in each context, and ``[C, S]`` tokens emitted there."""
        task = self.family.task
        _, C, S = probs.shape
        mass = np.zeros((task.length + 1, C, S))
        mass[0, :, task.pair.automaton.start] = 1.0
        to = self.to[:, :C].ravel()
        for t in range(task.length):
            mass[t + 1] = np.bincount(to, (mass[t] * probs).ravel(), C * S).reshape(C, S)
        return mass, mass[:-1].sum(axis=0) * self.alive[:, 0]

    def __call__(self, log_probs: Float[np.ndarray, "C S V"]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Each of ``MEASURES`` as ``[C]``, and ``[C, d]`` the gradient of each run's objective."""
        task, beta = self.family.task, self.beta
        probs = np.exp(log_probs) * self.alive
        delta = np.where(self.alive, log_probs - self.reference, 0.0)
        first = np.ascontiguousarray(probs.transpose(2, 0, 1))
        mass, visits = self._visits(first)
        kl = (visits * (probs * delta).sum(axis=2)).sum(axis=1)
        entropy = -(visits * (probs * log_probs).sum(axis=2)).sum(axis=1)
        reference = np.exp(self.reference) * self.alive
        forward = ((reference * -delta).sum(axis=2) * self.reference_visits).sum(axis=1)

        def total(edge: np.ndarray, terminal: np.ndarray) -> np.ndarray:
            return (visits * (probs * edge).sum(axis=2)).sum(axis=1) + mass[-1] @ terminal

        reward = total(task.reward.edge, task.reward.terminal)
        objective = reward - beta * kl
        found = {
            "objective": objective,
            "reward": reward,
            "kl": kl,
            "forward_kl": forward,
            "entropy": entropy,
            "out_of_domain": total(task.out_of_domain.edge, task.out_of_domain.terminal),
            "gap": self.optimal - objective,
            "kl_to_optimum": self._kl_to_optimum(probs, mass, entropy),
        }
        paid = task.reward.edge - beta[:, None, None] * delta
        paid = np.ascontiguousarray(paid.transpose(2, 0, 1))
        weight = visits * paid
        to_go = np.broadcast_to(task.reward.terminal, mass[0].shape)
        for t in reversed(range(task.length)):
            ahead = to_go.take(self.to)
            weight += mass[t] * ahead
            ahead += paid
            ahead *= first
            to_go = ahead.sum(axis=0)
        return found, self.to_parameters((first * weight).transpose(1, 2, 0), probs)

    def _kl_to_optimum(self, probs: np.ndarray, mass: np.ndarray, entropy: np.ndarray) -> np.ndarray:
        found = np.full(len(probs), np.nan)
        for rows, star in self.star:
            finite = np.where(probs[rows].any(axis=0) & np.isfinite(star), star, 0.0)
            cross = np.einsum("tcs,csv,tsv->c", mass[:-1, rows], probs[rows], finite, optimize=True)
            found[rows] = -entropy[rows] - cross
        return found
