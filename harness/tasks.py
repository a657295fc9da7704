"""Tasks with verifiable rewards: problems to pose, answers to imitate, and a check. A new one is an entry in ``TASKS``.

The small ones, ``countdown`` and ``sort``, are written in the characters of ``tiny``. ``reasoning-gym:NAME``,
``math:PLACE`` and ``choices:PLACE`` are in ``data``, and ``FILE.py:NAME`` is the user's own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from klgrad.synth.estimators import unknown

_EVALUATION_SEED = 1_000_003  # evaluation problems come from another stream than training's


@dataclass(frozen=True)
class Problem:
    """One problem: ``prompt`` is shown, ``answer`` is one correct response, ``data`` what the check needs."""

    prompt: str
    answer: str = ""
    data: Any = None


class Task(Protocol):
    """What the harness asks of a task; a user's own class with these two is enough."""

    def problems(self, split: str, seed: int) -> Iterator[Problem]:
        """Problems of ``train`` or ``test``, without end or until the data is used up."""

    def reward(self, problem: Problem, response: str) -> float:
        """0 to 1."""


class Sort:
    """Put digits in order: ``s4291=`` wants ``1249``."""

    def __init__(self, low: int = 3, high: int = 5) -> None:
        self.low, self.high = low, high

    def problems(self, split: str, seed: int) -> Iterator[Problem]:
        """Endless."""
        rng = stream("sort", split, seed)
        while True:
            digits = [rng.choice("0123456789") for _ in range(rng.randint(self.low, self.high))]
            yield Problem(f"s{''.join(digits)}=", "".join(sorted(digits)))

    def reward(self, problem: Problem, response: str) -> float:
        """1 for exactly the digits in order."""
        return float(response == problem.answer)


class Countdown:
    """Reach a target with each number once and + - *: ``c3,5,7>38=`` wants such as ``5*7+3``."""

    def __init__(self, numbers: int = 3, largest: int = 9, most: int = 99) -> None:
        self.numbers, self.largest, self.most = numbers, largest, most

    def problems(self, split: str, seed: int) -> Iterator[Problem]:
        """Endless; the answer is one way."""
        rng = stream("countdown", split, seed)
        while True:
            numbers = [rng.randint(1, self.largest) for _ in range(self.numbers)]
            expression = str(numbers[0]) + "".join(rng.choice("+-*") + str(n) for n in numbers[1:])
            target = arithmetic(expression)
            if target is None or not 0 <= target <= self.most:
                continue
            shown = rng.sample(numbers, len(numbers))
            yield Problem(f"c{','.join(map(str, shown))}>{int(target)}=", expression, (sorted(numbers), target))

    def reward(self, problem: Problem, response: str) -> float:
        """1 for an expression of just these numbers with that value."""
        numbers, target = problem.data
        used = sorted(map(int, re.findall(r"\d+", response)))
        return float(used == numbers and arithmetic(response) == target)


def stream(name: str, split: str, seed: int) -> random.Random:
    """The random numbers of a split: of train, another stream for every seed; of test, yet another."""
    if split not in ("train", "test"):
        raise unknown("split", split, ["train", "test"])
    return random.Random(f"{name} {split} {seed + (_EVALUATION_SEED if split == 'test' else 0)}")


def arithmetic(text: str) -> int | None:
    """Value of digits, + - * and parentheses, by recursive descent; ``None`` for anything else. Nothing is executed."""
    tokens = re.findall(r"\d+|[-+*()]", text)
    if "".join(tokens) != text or len(tokens) > 64:
        return None
    position = 0

    def peek() -> str:
        return tokens[position] if position < len(tokens) else ""

    def take() -> str:
        nonlocal position
        position += 1
        return tokens[position - 1]

    def atom() -> int:
        if peek() == "(":
            take()
            value = total()
            if peek() != ")":
                raise ValueError
            take()
            return value
        if not peek().isdigit():
            raise ValueError
        return int(take())

    def product() -> int:
        value = atom()
        while peek() == "*":
            take()
            value *= atom()
        return value

    def total() -> int:
        value = product()
        while peek() in ("+", "-"):
            value += product() if take() == "+" else -product()
        return value

    try:
        value = total()
    except ValueError:
        return None
    return value if position == len(tokens) else None


def _of_the_user(name: str) -> Task:
    from klgrad.files import load_module

    place, _, attribute = name.rpartition(":")
    try:
        task: Task = getattr(load_module(place), attribute)()
    except Exception as error:
        raise ValueError(f"{name} gave no task: {type(error).__name__}: {error}") from error
    missing = [method for method in ("problems", "reward") if not callable(getattr(task, method, None))]
    if missing:
        raise ValueError(f"{name} is no task: it lacks {' and '.join(missing)}")
    return task


TASKS: dict[str, Callable[[], Task]] = {"countdown": Countdown, "sort": Sort}
_FROM = {"reasoning-gym": "ReasoningGym", "math": "Mathematics", "choices": "Choices"}  # names in data


def task(name: str) -> Task:
    """The task of that name: ``countdown``, ``sort``, ``reasoning-gym:NAME``, ``math:PLACE``, ``choices:PLACE``,
    ``FILE.py:NAME``. A place is a JSON-lines file or a data set of the hub, ``owner/name[/subset][@split]``.

    Raises:
        ValueError: for a name that is none, data that cannot be read, or a package that is missing.
    """
    if name in TASKS:
        return TASKS[name]()
    kind, colon, rest = name.partition(":")
    if colon and kind in _FROM:
        made: Task = getattr(import_module("klgrad.harness.data"), _FROM[kind])(rest)
        return made
    if colon:
        return _of_the_user(name)
    raise unknown("task", name, [*TASKS, *(f"{kind}:..." for kind in _FROM), "FILE.py:NAME"])


def file_of(name: str) -> Path | None:
    """The file that a task's name holds, if it holds one."""
    kind, _, place = name.partition(":")
    path = Path(place if kind in _FROM else name.rpartition(":")[0])
    return path if path.is_file() else None


def judged(posed: Sequence[tuple[Task, Problem]], responses: Sequence[str]) -> tuple[list[float], int]:
    """Rewards of responses to problems, and how many of them failed in isolation and count 0."""
    rewards, failed = [], 0
    for (judge, problem), response in zip(posed, responses, strict=True):
        before = getattr(judge, "failed", 0)
        rewards.append(judge.reward(problem, response))
        failed += getattr(judge, "failed", 0) - before
    return rewards, failed


def take(problems: Iterator[Problem], count: int) -> list[Problem]:
    """The next problems.

    Raises:
        ValueError: when there are none.
    """
    found = [problem for _, problem in zip(range(count), problems, strict=False)]
    if not found:
        raise ValueError("there are no problems: the data is empty")
    return found


def encoded(tokenizer: Any, problem: Problem) -> list[int]:
    """The prompt's tokens, in the chat template where the tokenizer has one.

    Raises:
        ValueError: for a prompt whose characters the tokenizer does not know.
    """
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": problem.prompt}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    found = list(tokenizer(problem.prompt)["input_ids"])
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in found:
        raise ValueError(f"the tokenizer lacks tokens that the prompt {problem.prompt!r} needs: take another model")
    return found


def decoded(tokenizer: Any, tokens: list[int]) -> str:
    """Text of a response, up to its end token."""
    if tokenizer.eos_token_id in tokens:
        tokens = tokens[: tokens.index(tokenizer.eos_token_id)]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))
