"""A policy of the exact world as a torch language model: the two worlds meet here, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from klgrad.synth.automata import Automaton
from klgrad.synth.policies import PolicyPair


class TabularPolicy(nn.Module):
    """One free logit for every token in every context of an automaton that emits, as ``synth.policies.tabular``.

    A prompt is one token, whatever it is; responses start in the automaton's start context.

    Args:
        automaton: the contexts.
        logits: ``[S, V]``; -inf for a token never emitted.
    """

    def __init__(self, automaton: Automaton, logits: Any) -> None:
        super().__init__()
        table = torch.tensor(np.asarray(logits, float))
        if tuple(table.shape) != automaton.next_context.shape:
            raise ValueError(f"logits {tuple(table.shape)} do not fit the automaton's {automaton.next_context.shape}")
        self.automaton = automaton
        alive = torch.tensor(np.flatnonzero(automaton.alive))
        self.register_buffer("next_context", torch.tensor(automaton.next_context))
        self.register_buffer("alive", alive)
        self.theta = nn.Parameter(table[alive].reshape(-1).clone())

    @property
    def vocabulary(self) -> int:
        """Number of tokens V."""
        return self.automaton.vocabulary

    @property
    def context_window(self) -> None:
        """Any length."""
        return None

    def features(
        self, tokens: Tensor, mask: Tensor, cache: Tensor | None = None, *, keep: bool = False
    ) -> tuple[Tensor, Tensor]:
        """``[B, L, 1]`` the context after each token, and the last one as the cache of a later call."""
        assert isinstance(self.next_context, Tensor)
        if cache is None:
            now = torch.full((len(tokens),), self.automaton.start, device=tokens.device)
            seen, tokens = [now], tokens[:, 1:]
        else:
            now, seen = cache, []
        for token in tokens.unbind(1):
            now = self.next_context[now, token]
            seen.append(now)
        return torch.stack(seen, 1)[..., None], now

    forks = True

    def fork(self, cache: Tensor, rows: Tensor) -> Tensor:
        """The contexts of these rows."""
        return cache[rows]

    def head(self, features: Tensor) -> Tensor:
        """``[..., V]`` next-token logits."""
        assert isinstance(self.alive, Tensor)
        shape = self.automaton.next_context.shape
        table = torch.zeros(shape, dtype=self.theta.dtype, device=self.theta.device)
        return table.index_put((self.alive,), self.theta.reshape(-1, shape[1]))[features[..., 0]]


def tabular_pair(pair: PolicyPair) -> tuple[TabularPolicy, TabularPolicy]:
    """Policy and reference of a pair with a tabular policy.

    Raises:
        ValueError: for a policy with shared parameters.
    """
    if pair.policy.parameters != int(pair.automaton.alive.sum()) * pair.automaton.vocabulary:
        raise ValueError(f"{pair.name}: the policy shares parameters over contexts; a TabularPolicy has one per logit")
    return TabularPolicy(pair.automaton, pair.policy.log_probs), TabularPolicy(pair.automaton, pair.reference)
