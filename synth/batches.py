"""Batches of paths: tokens weighted by the formula, collected by unit and edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from klgrad.synth.configurations import credit_sums, importance_ratios, loss_weights
from klgrad.synth.sums import Sums, Tables, scaled


class Batch:
    """One batch of paths, reduced for one configuration after another; what they share is computed once.

    Weights are ``[n, T]``, or ``[n, 1]`` where a sequence's tokens have the same.
    """

    def __init__(self, path: np.ndarray, unit: np.ndarray, edges: int, log_rho: np.ndarray) -> None:
        self.path, self.unit, self.units, self.edges = path.astype(np.intp), unit, int(unit[-1]) + 1, edges
        self.log_rho = np.append(log_rho, 0.0)
        self.place = (self.path + (unit * (edges + 1))[:, None]).ravel()
        self.one = np.ones((len(path), 1))
        self.shared: dict[tuple[str, ...], Any] = {}

    def once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """The value under the key, made at its first use."""
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]

    def by_edge(self, weight: np.ndarray) -> np.ndarray:
        """``[U, E]`` sum of each token's weight, by unit and edge."""
        each = None if weight is self.one else np.broadcast_to(weight, self.path.shape).ravel()
        found = np.bincount(self.place, each, self.units * (self.edges + 1))
        return found.reshape(self.units, -1)[:, : self.edges].astype(float, copy=False)

    def ratios(self, ratio: str) -> tuple[np.ndarray, np.ndarray]:
        """As ``importance_ratios``."""
        if ratio == "none":
            return self.one, self.one
        log_rho = self.log_rho.take(self.path)
        if ratio == "sequence":
            whole = np.exp(log_rho.sum(axis=1, keepdims=True))
            return whole, whole
        own, before = importance_ratios(ratio, log_rho, np)
        return own, self.one if ratio == "token" else before

    def sums(self, table: Tables) -> Sums:
        """The configuration's sums over this batch."""
        configuration, ratio, once = table.configuration, table.configuration.ratio, self.once
        key = (configuration.estimator, configuration.rollout_value)
        shared = (ratio, configuration.aggregation)
        value = once(("value", *key), lambda: np.append(table.value, 0.0).take(self.path))
        c = once(("c", *key), lambda: value.sum(axis=1, keepdims=True))
        own, before = once(("ratio", ratio), lambda: self.ratios(ratio))
        per_token = configuration.aggregation == "length-mean"
        length = once(("length",), lambda: (self.path < self.edges).sum(axis=1, keepdims=True)) if per_token else None

        def collect(weight: np.ndarray, terms: np.ndarray) -> np.ndarray:
            return self.by_edge(weight if length is None else weight / length) @ terms

        def credit() -> np.ndarray:
            if configuration.credit == "whole" and ratio != "prefix":
                return own * c
            inside = before if configuration.estimator.full and ratio == "prefix" else own
            return credit_sums(configuration, value, own, inside, np)

        weight = loss_weights(configuration, own, before)
        kind = "own" if weight is own else "before"
        y = once(("y", *shared), lambda: collect(own, table.plain_score))
        loo = configuration.baseline == "loo"
        cy = once(("cy", *shared, *key), lambda: collect(c * own, table.plain_score)) if loo else np.zeros_like(y)
        parts = []
        if configuration.in_reward:
            reward = ("reward", configuration.credit, *shared, *key)
            parts.append(once(reward, lambda: collect(credit(), table.plain_score)))
        if configuration.in_loss:
            parts.append(once(("loss", kind, *shared, *key), lambda: collect(weight, table.plain_pathwise)))
        estimate = once(("estimate", kind, *shared, *key), lambda: self._estimate(weight, value, c, length))
        return scaled(Sums(sum(parts), y, cy, self._by_unit(c[:, 0]), self._by_unit(estimate)), configuration)

    @staticmethod
    def _estimate(weight: np.ndarray, value: np.ndarray, c: np.ndarray, length: np.ndarray | None) -> np.ndarray:
        """``[n]`` sum of weighted values."""
        total = weight * c if weight.shape[1] == 1 else (weight * value).sum(axis=1, keepdims=True)
        return (total if length is None else total / length)[:, 0]

    def _by_unit(self, each: np.ndarray) -> np.ndarray:
        return np.bincount(self.unit, each, self.units)
