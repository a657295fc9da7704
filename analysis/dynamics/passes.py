"""Passes over the tokens, forward and back, for the policies of many runs at once.

In the loops over time tokens come first, ``[V, C, S]``: sums over them are then sums of whole arrays. Shapes: C runs,
S contexts, V tokens, T length, d parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from klgrad.synth.objectives import Family

if TYPE_CHECKING:
    from jaxtyping import Float


class Passes:
    """The recurrences of one task, for the policies of its family."""

    def __init__(self, family: Family) -> None:
        automaton = family.task.pair.automaton
        self.family, self.length = family, family.task.length
        self.shape = automaton.next_context.shape
        self.start, self.next = automaton.start, automaton.next_context.T[:, None, :]
        self.alive = automaton.alive[:, None]
        self.features = family.features.reshape(-1, family.features.shape[2])
        self._to = self.next  # [V, C, S] flat successors, for the last C asked for

    def log_probs(self, theta: Float[np.ndarray, "C d"]) -> Float[np.ndarray, "C S V"]:
        """``[C, S, V]`` of each run's policy."""
        logits = (theta @ self.features.T).reshape(len(theta), *self.shape)
        shifted = logits - logits.max(axis=2, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=2, keepdims=True))

    def probs(self, log_probs: Float[np.ndarray, "C S V"]) -> Float[np.ndarray, "V C S"]:
        """``[V, C, S]`` probabilities, tokens first; 0 in the end context."""
        return np.ascontiguousarray((np.exp(log_probs) * self.alive).transpose(2, 0, 1))

    def to_parameters(self, weight: Float[np.ndarray, "C S V"], probs: np.ndarray) -> Float[np.ndarray, "C d"]:
        """``[C, d]`` sum of ``weight`` times the score of each token in each context."""
        on_logits = weight - probs * weight.sum(axis=2, keepdims=True)
        return on_logits.reshape(len(weight), -1) @ self.features

    def _successors(self, runs: int) -> np.ndarray:
        if self._to.shape[1] != runs:
            self._to = np.arange(runs)[:, None] * self.shape[0] + self.next
        return self._to

    def visits(self, probs: Float[np.ndarray, "V C S"]) -> tuple[Float[np.ndarray, "T1 C S"], Float[np.ndarray, "C S"]]:
        """``[T + 1, C, S]`` probability of standing in each context, and ``[C, S]`` tokens emitted there."""
        _, C, S = probs.shape
        mass = np.zeros((self.length + 1, C, S))
        mass[0, :, self.start] = 1.0
        to = self._successors(C).ravel()
        for t in range(self.length):
            mass[t + 1] = np.bincount(to, (mass[t] * probs).ravel(), C * S).reshape(C, S)
        return mass, mass[:-1].sum(axis=0) * self.alive[:, 0]

    def returns(
        self,
        probs: Float[np.ndarray, "V C S"],
        mass: Float[np.ndarray, "T1 C S"],
        visits: Float[np.ndarray, "C S"],
        paid: Float[np.ndarray, "V C S"],
        terminal: Float[np.ndarray, " S"],
    ) -> Float[np.ndarray, "V C S"]:
        """``[V, C, S]`` sum over time of P(context) x expected return from the token on: ``paid`` and ``terminal``."""
        to = self._successors(probs.shape[1])
        weight = visits * paid
        to_go = np.broadcast_to(terminal, mass[0].shape)
        for t in reversed(range(self.length)):
            ahead = to_go.take(to)
            weight += mass[t] * ahead
            ahead += paid
            ahead *= probs
            to_go = ahead.sum(axis=0)
        return weight
