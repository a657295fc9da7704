"""Exact measures of many policies at once: objective, reward, KLs, entropy, and the gradient of the objective.

The single-policy twins are ``synth.exact`` and ``synth.objectives``. Shapes: C runs, S contexts, V tokens, T length,
d parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from klgrad.analysis.dynamics.passes import Passes
from klgrad.synth.objectives import Family, best
from klgrad.synth.rewards import Reward

if TYPE_CHECKING:
    from jaxtyping import Float

MEASURES = ("objective", "reward", "kl", "forward_kl", "entropy", "out_of_domain", "gap", "kl_to_optimum")


class Measures(Passes):
    """Measures of the policies of C runs of one task, by one pass forward and one back over the tokens.

    ``gap`` is J* - J and ``kl_to_optimum`` KL(pi || pi*), each computed on its own: the first is beta times the second
    [E12], at every step of every run. Where beta is 0 there is no such optimum and ``kl_to_optimum`` is NaN.

    Args:
        family: the task's policies.
        beta: ``[C]`` each run's coefficient of the KL.
    """

    def __init__(self, family: Family, beta: Float[np.ndarray, " C"]) -> None:
        super().__init__(family)
        self.beta, self.reference = np.asarray(beta, float), family.task.pair.reference
        self.reference_visits = self.visits(self.probs(self.reference[None]))[1][0]
        optima = {b: best(family.task, b) for b in set(self.beta.tolist())}
        self.optimal = np.array([optima[b].objective for b in self.beta.tolist()])
        # log pi* as [S, T, V], -inf set aside: a policy that emits such a token is infinitely far anyway
        stars = {b: np.where(np.isfinite(best.log_probs), best.log_probs, 0.0) for b, best in optima.items() if b > 0}
        self.star = [(self.beta == b, np.ascontiguousarray(star.transpose(1, 0, 2))) for b, star in stars.items()]

    def __call__(self, log_probs: Float[np.ndarray, "C S V"]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Each of ``MEASURES`` as ``[C]``, and ``[C, d]`` the gradient of each run's objective."""
        task, beta = self.family.task, self.beta
        probs = np.exp(log_probs) * self.alive
        delta = np.where(self.alive, log_probs - self.reference, 0.0)
        first = self.probs(log_probs)
        mass, visits = self.visits(first)
        kl = (visits * (probs * delta).sum(axis=2)).sum(axis=1)
        entropy = -(visits * (probs * log_probs).sum(axis=2)).sum(axis=1)
        reference = np.exp(self.reference) * self.alive
        forward = ((reference * -delta).sum(axis=2) * self.reference_visits).sum(axis=1)

        def total(reward: Reward) -> np.ndarray:
            return (visits * (probs * reward.edge).sum(axis=2)).sum(axis=1) + mass[-1] @ reward.terminal

        reward = total(task.reward)
        objective = reward - beta * kl
        found = {
            "objective": objective,
            "reward": reward,
            "kl": kl,
            "forward_kl": forward,
            "entropy": entropy,
            "out_of_domain": total(task.out_of_domain),
            "gap": self.optimal - objective,
            "kl_to_optimum": self._kl_to_optimum(probs, mass, entropy),
        }
        paid = np.ascontiguousarray((task.reward.edge - beta[:, None, None] * delta).transpose(2, 0, 1))
        weight = self.returns(first, mass, visits, paid, task.reward.terminal)
        return found, self.to_parameters((first * weight).transpose(1, 2, 0), probs)

    def _kl_to_optimum(self, probs: np.ndarray, mass: np.ndarray, entropy: np.ndarray) -> np.ndarray:
        found = np.full(len(probs), np.nan)
        for rows, star in self.star:
            expected = mass[:-1, rows].transpose(2, 1, 0) @ star  # [S, C, V]: sum over time of P(context) log pi*
            cross = (expected.transpose(1, 0, 2) * probs[rows]).sum(axis=(1, 2))
            found[rows] = -entropy[rows] - cross
        return found
