"""Responses sampled from a model, and the features that score them.

Shapes: B sequences, P prompt tokens (padding first), T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from klgrad.harness.models import LanguageModel
from klgrad.harness.objective import log_softmax


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Prompts with sampled responses.

    Args:
        tokens: ``[B, P + T]`` prompt and response; anything where not real.
        real: ``[B, P + T]`` True for real tokens: prompts are padded in front, responses behind.
        prompt: P.
        behaviour: ``[B, T]`` log-probs under the policy that sampled, 0 where masked.
    """

    tokens: Tensor
    real: Tensor
    prompt: int
    behaviour: Tensor

    @property
    def responses(self) -> Tensor:
        """``[B, T]``."""
        return self.tokens[:, self.prompt :]

    @property
    def mask(self) -> Tensor:
        """``[B, T]`` True for response tokens; the end token counts."""
        return self.real[:, self.prompt :]

    def rows(self, index: Any) -> Rollouts:
        """Some of the rows."""
        return Rollouts(self.tokens[index], self.real[index], self.prompt, self.behaviour[index])

    def features(self, model: LanguageModel) -> Tensor:
        """``[B, T, H]`` the features that predict each response token, with a graph where gradients are on.

        The responses of one prompt share its keys and values, and their gradient: it is read once for all of them.
        """
        if not getattr(model, "forks", False):
            return model.features(self.tokens[:, :-1], self.real[:, :-1])[0][:, self.prompt - 1 :]
        last, cache = read_prompts(model, self.tokens[:, : self.prompt], self.real[:, : self.prompt])
        if self.tokens.shape[1] == self.prompt + 1:  # responses of one token
            return last
        return torch.cat([last, model.features(self.tokens[:, self.prompt : -1], self.real[:, :-1], cache)[0]], 1)


def pad_prompts(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """``[B, P]`` tokens and mask, padding first.

    Raises:
        ValueError: for no prompts, or one without tokens.
    """
    if not prompts:
        raise ValueError("there are no prompts: the data is empty")
    if not all(prompts):
        raise ValueError(f"prompt {[bool(p) for p in prompts].index(False)} has no tokens")
    width = max(map(len, prompts))
    tokens = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts])
    return tokens, mask


def check_fits(model: LanguageModel, prompt: int, length: int) -> None:
    """Prompt and response must fit the context window.

    Raises:
        ValueError: when they do not, with the numbers.
    """
    window = model.context_window
    if window is not None and prompt + length > window:
        raise ValueError(
            f"a prompt of {prompt} tokens and a response of {length} do not fit the model's context of {window}: "
            "take shorter prompts or responses"
        )


def read_prompts(model: LanguageModel, prompts: Tensor, real: Tensor) -> tuple[Tensor, Any]:
    """``[B, 1, H]`` the features after each prompt, and the cache to go on from.

    Of neighbouring rows with the same prompt one is read, where the model's cache can be forked.
    """
    if not getattr(model, "forks", False):
        features, cache = model.features(prompts, real, keep=True)
        return features[:, -1:], cache
    _, row = torch.unique_consecutive(torch.where(real, prompts, -1), dim=0, return_inverse=True)
    first = torch.cat([torch.ones_like(row[:1], dtype=torch.bool), row[1:] != row[:-1]])
    features, cache = model.features(prompts[first], real[first], keep=True)
    return features[:, -1:].index_select(0, row), model.fork(cache, row)


def sample(
    model: LanguageModel,
    prompts: Tensor,
    real: Tensor,
    length: int,
    *,
    end: int | None,
    generator: torch.Generator,
    temperature: float = 1.0,
) -> Rollouts:
    """Responses of at most ``length`` tokens, ended by ``end`` where there is one; temperature 0 takes the likeliest.

    Args:
        prompts, real: ``[B, P]`` from ``pad_prompts``.
        generator: on the model's device.

    Raises:
        ValueError: when prompt and response do not fit the model.
    """
    check_fits(model, prompts.shape[1], length)
    with torch.inference_mode():
        tokens, seen, log_probs = _decode(model, prompts, real, length, end, generator, temperature)
    return Rollouts(tokens.clone(), seen.clone(), prompts.shape[1], log_probs.clone())  # usable in a graph again


def _decode(
    model: LanguageModel,
    prompts: Tensor,
    real: Tensor,
    length: int,
    end: int | None,
    generator: torch.Generator,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``tokens``, ``real`` and ``behaviour`` of rollouts; no longer than the longest response."""
    alive = torch.ones(len(prompts), dtype=torch.bool, device=prompts.device)
    tokens, seen, log_probs = prompts, real, list[Tensor]()
    features, cache = read_prompts(model, prompts, real)
    while True:
        full = log_softmax(model.head(features[:, -1]), temperature or 1.0)
        choice = torch.multinomial(full.exp(), 1, generator=generator) if temperature else full.argmax(-1, keepdim=True)
        log_probs.append(torch.where(alive, full.gather(-1, choice)[:, 0], 0.0))
        tokens, seen = torch.cat([tokens, choice], 1), torch.cat([seen, alive[:, None]], 1)
        if end is not None:
            alive = alive & (choice[:, 0] != end)
        if len(log_probs) == length or not alive.any():
            return tokens, seen, torch.stack(log_probs, 1)
        features, cache = model.features(choice, seen, cache, keep=True)
