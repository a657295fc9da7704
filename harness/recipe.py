"""Recipes: one training run as a TOML file, read strictly, with everything a run needs and nothing else.

``harness/recipes/`` holds the paper's runs and their ``tiny`` twins; a recipe is named by file or by its name there.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from klgrad.synth.configurations import Configuration, parse
from klgrad.synth.estimators import unknown

FOLDER = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class Recipe:
    """One run. Plain data; each field is a key of the TOML file.

    Args:
        model: folder or hub name of the policy at step 0.
        reference: folder or hub name; empty: the policy at step 0.
        parameters: how many the model has, for ``plan`` where it is not at hand.
        tasks, in_domain, out_of_domain: names as in ``tasks.task``; the last two are only evaluated.
        kl: configuration of the KL; empty: none.
        beta: its weight.
        advantage, aggregation, kl_aggregation, ratio, clip_low, clip_high: as in ``objective.Objective``; clip 0: none.
        steps: optimiser rounds, each on one batch of rollouts.
        batch: prompts of one round.
        group: samples a prompt.
        minibatch: prompts of one optimiser step; 0: the whole batch. A smaller one goes off-policy within the batch.
        micro: prompts in memory at once; 0: the minibatch. Changes memory, not numbers (beyond rounding).
        staleness: rollouts are this many rounds behind the policy (asynchronous training).
        reset_every: rounds after which the reference becomes the present policy; 0: never.
        length: most response tokens.
        temperature: of sampling, and of every log-prob.
        learning_rate, warmup, weight_decay, max_norm: AdamW, linear warm-up in rounds, gradient clipping (0: none).
        seed: of everything.
        monitor: measure exact KL, forward KL and entropy each round, also without a KL in the loss.
        dtype, device: of the models.
        evaluate_every, evaluate_problems, evaluate_samples: rounds between evaluations (0: only at the end), and size.
        checkpoint_every: rounds between checkpoints; 0: only at the end.
        source, note: where it is from, what it is.
    """

    model: str = "tiny"
    reference: str = ""
    parameters: float = 0.0
    tasks: tuple[str, ...] = ("countdown",)
    in_domain: tuple[str, ...] = ("countdown",)
    out_of_domain: tuple[str, ...] = ("sort",)
    kl: str = ""
    beta: float = 0.0
    advantage: str = "rloo"
    aggregation: str = "sum"
    kl_aggregation: str = "outside"
    ratio: str = "none"
    clip_low: float = 0.0
    clip_high: float = 0.0
    steps: int = 100
    batch: int = 16
    group: int = 5
    minibatch: int = 0
    micro: int = 0
    staleness: int = 0
    reset_every: int = 0
    length: int = 12
    temperature: float = 1.0
    learning_rate: float = 1e-4
    warmup: int = 0
    weight_decay: float = 0.0
    max_norm: float = 1.0
    seed: int = 0
    monitor: bool = True
    dtype: str = "float32"
    device: str = "cpu"
    evaluate_every: int = 0
    evaluate_problems: int = 200
    evaluate_samples: int = 1
    checkpoint_every: int = 0
    source: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "length", "evaluate_problems", "evaluate_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be 1 or more")
        for name in (
            "minibatch", "micro", "staleness", "reset_every", "warmup", "weight_decay", "max_norm", "seed",
            "evaluate_every", "checkpoint_every", "clip_low", "clip_high",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be 0 or more")
        for name in ("learning_rate", "temperature"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} = {getattr(self, name)} must be positive")
        for part, whole in (("minibatch", self.batch), ("micro", self.minibatch or self.batch)):
            size = getattr(self, part)
            if size and whole % size:
                raise ValueError(f"{part} = {size} prompts do not divide {whole}: take a divisor")
        if not self.tasks:
            raise ValueError("tasks is empty: name at least one task to train on")
        if self.beta and not self.kl:
            raise ValueError(f"beta = {self.beta} without a KL: name a configuration, such as kl = 'k1-in-reward'")
        if self.micro and self.aggregation == "token-mean":
            raise ValueError(f"token-mean divides by the tokens of the whole batch and micro = {self.micro} splits it")
        loo = self.configuration
        if loo is not None and loo.baseline == "loo" and loo.baseline_value == 0 and self.micro:
            raise ValueError(
                f"{loo} couples the whole batch and micro = {self.micro} splits it: write +loo={self.group}"
            )

    @property
    def configuration(self) -> Configuration | None:
        """The KL's configuration."""
        return parse(self.kl) if self.kl else None

    @property
    def minibatches(self) -> int:
        """Optimiser steps in one round."""
        return self.batch // (self.minibatch or self.batch)

    @property
    def on_policy(self) -> bool:
        """Whether every importance ratio is 1 by construction."""
        return self.minibatches == 1 and self.staleness == 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def names() -> list[str]:
    """The recipes that come with klgrad."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str, changes: Sequence[str] = ()) -> Recipe:
    """The recipe of a file or name, with ``key=value`` changes (values as in TOML; bare words are text).

    Raises:
        ValueError: for no such recipe, a key that does not exist, or a value of the wrong kind.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        if name.endswith(".toml"):
            raise ValueError(f"{name} does not exist")
        raise unknown("recipe", name, names())
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} is not TOML: {error}") from None
    return changed(Recipe(**_typed(given)), changes)


def changed(recipe: Recipe, changes: Sequence[str]) -> Recipe:
    """The recipe with ``key=value`` changes."""
    return replace(recipe, **_typed(dict(change(text) for text in changes))) if changes else recipe


def change(text: str, option: str = "--set", example: str = "beta=0.1") -> tuple[str, Any]:
    """Key and value of ``key=value``, the value as in TOML; bare words are text."""
    key, equals, value = (piece.strip() for piece in text.partition("="))
    if not equals:
        raise ValueError(f"{option} {text!r}: write KEY=VALUE, such as {option} {example}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _typed(given: dict[str, Any]) -> dict[str, Any]:
    kinds = {field.name: type(field.default) for field in fields(Recipe)}
    found = {}
    for key, value in given.items():
        if key not in kinds:
            raise unknown("key", key, list(kinds))
        found[key] = of_kind(kinds[key], key, value)
    return found


def of_kind(kind: type, key: str, value: Any) -> Any:
    """A key's value as what its default is.

    Raises:
        ValueError: when it is of another kind.
    """
    if kind is tuple and isinstance(value, str):
        value = [value]
    if kind is tuple and isinstance(value, list) and all(isinstance(each, str) for each in value):
        value = tuple(value)
    elif kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        wanted = {tuple: "a list of names", float: "a number", int: "a whole number", bool: "true or false"}
        raise ValueError(f"{key} = {value!r} must be {wanted.get(kind, 'text')}")
    return value
