"""What the commands about training share: the task, lists of numbers, where training starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from klgrad.commands.options import Source, grouped, pair_of

if TYPE_CHECKING:
    import numpy as np

    from klgrad.synth.configurations import Configuration
    from klgrad.synth.objectives import Family
    from klgrad.synth.tasks import TaskPreset

DEFAULT_TASK = "pattern"
DEFAULT_BETA, DEFAULT_RATE, DEFAULT_LENGTH = 0.1, 0.5, 8
DEFAULT_CONFIGS = ("k1-in-reward", "k1-in-loss", "k3-in-reward", "k3-in-loss")
STARTS = ("reference", "policy")


class Numbers(click.ParamType[tuple[float, ...]]):
    """``0.1``, or several: ``0.02,0.05,0.2``; integers where ``whole``."""

    name = "numbers"

    def __init__(self, *, whole: bool = False) -> None:
        self.whole = whole

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """The numbers in their order, without repeats."""
        if isinstance(value, tuple):
            return value
        found = []
        for piece in str(value).split(","):
            try:
                number = int(piece) if self.whole else float(piece)
            except ValueError:
                number = math.nan
            if not math.isfinite(number):
                kind = "whole numbers" if self.whole else "numbers"
                raise ValueError(f"{value!r} is no list of {kind}: {piece.strip()!r} is not one; write 1,2 or 5")
            found.append(number)
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Training:
    """Which task, and where its training starts."""

    task: str | None
    preset: str | None
    pair: str | None
    reward: str | None
    out_of_domain: str | None
    length: int | None
    start: str

    @property
    def published(self) -> TaskPreset | None:
        """The task preset, where the pair is none of the user's."""
        from klgrad.synth.estimators import unknown
        from klgrad.synth.tasks import TASKS

        if self.preset is not None or self.pair is not None:
            if self.task is not None:
                raise ValueError("give --task, or --preset or --pair with --reward, not both")
            return None
        name = DEFAULT_TASK if self.task is None else self.task
        if name not in TASKS:
            raise unknown("task", name, list(TASKS))
        return TASKS[name]

    @property
    def beta(self) -> float:
        """The beta that is usual for it."""
        return DEFAULT_BETA if self.published is None else self.published.beta

    @property
    def learning_rate(self) -> float:
        """The learning rate that is usual for it."""
        return DEFAULT_RATE if self.published is None else self.published.learning_rate

    def family(self, length: int | None = None) -> Family:
        """The policies of the task, at its own length or another."""
        from dataclasses import replace

        from klgrad.synth.objectives import family
        from klgrad.synth.rewards import task

        found = self.published
        length = length or self.length or (DEFAULT_LENGTH if found is None else found.length)
        if found is not None:
            pair = replace(found.pair(length), name=self.task or DEFAULT_TASK)
            reward, other = self.reward or found.reward, self.out_of_domain or found.out_of_domain
        else:
            if self.reward is None:
                raise ValueError("--preset and --pair need a --reward, such as --reward 'contains(1,1)', or none")
            pair = pair_of(Source(self.preset, self.pair, None), length)
            reward, other = self.reward, self.out_of_domain or "none"
        return family(task(pair, reward, length, other))

    def parameters(self, family: Family) -> np.ndarray:
        """``[d]`` where training starts."""
        return family.policy_parameters if self.start == "policy" else family.parameters_of(family.task.pair.reference)


task_options = grouped(
    "training",
    Training,
    click.option(
        "--task", metavar="NAME", help="A published task; `klgrad presets --tasks` lists them.  [default: pattern]"
    ),
    click.option("--preset", metavar="NAME", help="Instead of a task: a published pair, with --reward."),
    click.option("--pair", metavar="FILE|MODULE:FUNCTION", help="Instead of a task: your own pair, with --reward."),
    click.option(
        "--reward",
        metavar="REWARD",
        help="What is trained on: contains(1,0), ends(2), parity(1), count(1,3), each(1), context(0); "
        "weighted and summed as in 2*contains(1,0)+0.1*each(0); or none. Default: the task's.",
    ),
    click.option("--out-of-domain", metavar="REWARD", help="A reward that is looked at and not trained on."),
    click.option("--length", type=click.IntRange(min=1), metavar="T", help="Tokens. Default: the task's, or 8."),
    click.option(
        "--start",
        type=click.Choice(STARTS),
        default="reference",
        show_default=True,
        help="Start at the reference, or at the pair's own policy.",
    ),
)
beta_option = click.option(
    "--beta", type=Numbers(), metavar="B[,B...]", help="Coefficients of the KL. Default: the task's, or 0.1."
)
learning_rate_option = click.option(
    "--learning-rate", type=Numbers(), metavar="R[,R...]", help="Learning rates. Default: the task's, or 0.5."
)
config_option = click.option(
    "--config",
    "configs",
    multiple=True,
    metavar="NAME",
    help="ESTIMATOR-in-PLACEMENT[+option]; may be repeated. Default: k1 and k3 in reward and loss.",
)


def parsed(names: tuple[str, ...]) -> list[Configuration]:
    """The configurations, each once."""
    from klgrad.synth.configurations import parse

    return list(dict.fromkeys(parse(name) for name in names or DEFAULT_CONFIGS))
