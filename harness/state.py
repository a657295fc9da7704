"""What a training run is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from klgrad.harness.models import Base, CausalLM
from klgrad.harness.recipe import Recipe
from klgrad.harness.rollouts import Rollouts
from klgrad.harness.tasks import Problem, Task


@dataclass(frozen=True, eq=False)
class Experience:
    """Rollouts with rewards ``[B]``, drawn in round ``version`` of the policy; those ``unjudged`` count 0."""

    rollouts: Rollouts
    rewards: Tensor
    version: int
    unjudged: int = 0


@dataclass
class Run:
    """Everything a run is made of; what changes in it is what a checkpoint keeps."""

    recipe: Recipe
    policy: CausalLM
    reference: CausalLM | Base | None
    tokenizer: Any
    optimizer: torch.optim.Optimizer
    problems: Iterator[tuple[Task, Problem]]
    step: int = 0
    drawn: int = 0
    queue: list[Experience] = field(default_factory=list)
