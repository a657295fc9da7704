"""Tasks with verifiable rewards: problems to pose, answers to imitate, and a check. A new one is an entry in ``TASKS``.

The small ones, ``countdown`` and ``sort``, are written in the characters of ``tiny``. ``reasoning-gym:NAME`` and
``math:FILE`` take theirs from packages of the extra ``tasks``, and ``FILE.py:NAME`` is the user's own.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
        rng = _stream("sort", split, seed)
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
        rng = _stream("countdown", split, seed)
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


def _stream(name: str, split: str, seed: int) -> random.Random:
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


class ReasoningGym:
    """Any task of the package reasoning-gym, by its name there."""

    def __init__(self, name: str) -> None:
        try:
            import reasoning_gym
        except ImportError:
            raise ValueError(
                f"the task reasoning-gym:{name} needs reasoning-gym: pip install 'klgrad[tasks]'"
            ) from None
        self.name, self.package = name, reasoning_gym
        self._check: Callable[..., float] = lambda answer, entry: 0.0

    def problems(self, split: str, seed: int) -> Iterator[Problem]:
        """Endless, in blocks of a thousand."""
        start = seed * 1_000_003 + (_EVALUATION_SEED if split == "test" else 0)
        block = 0
        while True:
            try:
                data = self.package.create_dataset(self.name, size=1000, seed=(start + block) % 2**31)
            except ValueError as error:
                raise ValueError(f"reasoning-gym:{self.name}: {error}") from None
            self._check = data.score_answer
            yield from (Problem(entry["question"], str(entry["answer"]), entry) for entry in data)
            block += 1

    def reward(self, problem: Problem, response: str) -> float:
        """The package's own score of what stands in the last <answer>, or of the whole response."""
        found = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
        return float(self._check(answer=(found[-1] if found else response).strip(), entry=problem.data))


class Mathematics:
    """Problems with answers from a JSON-lines file with ``problem`` and ``answer`` (or a boxed ``solution``)."""

    ASK = "\nPlease reason step by step, and put your final answer within \\boxed{}."

    def __init__(self, path: str) -> None:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ValueError(f"math:{path} cannot be read: {error.strerror}") from None
        self.rows = []
        for i, line in enumerate(filter(str.strip, lines), start=1):
            try:
                row = json.loads(line)
                answer = row.get("answer", boxed(row.get("solution", "")))
                self.rows.append(Problem(row["problem"] + self.ASK, str(answer), answer))
            except (ValueError, KeyError, AttributeError):
                raise ValueError(f'{path}, line {i}: write one {{"problem": ..., "answer": ...}} a line') from None
        if not self.rows:
            raise ValueError(f"{path} holds no problem: the data is empty")

    def problems(self, split: str, seed: int) -> Iterator[Problem]:
        """The file in random order, again and again for ``train``; once and in order for ``test``."""
        if split == "test":
            yield from self.rows
            return
        rng = _stream("math", split, seed)
        while True:
            yield from rng.sample(self.rows, len(self.rows))

    def reward(self, problem: Problem, response: str) -> float:
        """1 if the last boxed answer equals the truth: by math-verify where it is installed, else as text."""
        given = boxed(response)
        if given is None:
            return 0.0
        try:
            from math_verify import parse, verify
        except ImportError:
            return float(given.strip() == problem.answer.strip())
        return float(verify(parse(f"\\boxed{{{problem.answer}}}"), parse(f"\\boxed{{{given}}}")))


def boxed(text: str) -> str | None:
    """What stands in the last ``\\boxed{...}``, braces balanced; ``None`` without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, first = 1, start + len("\\boxed{")
    for i, letter in enumerate(text[first:], start=first):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return text[first:i]
    return None


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
_FROM: dict[str, Callable[[str], Task]] = {"reasoning-gym": ReasoningGym, "math": Mathematics}


def task(name: str) -> Task:
    """The task of that name: ``countdown``, ``sort``, ``reasoning-gym:NAME``, ``math:FILE.jsonl``, ``FILE.py:NAME``.

    Raises:
        ValueError: for a name that is none, data that cannot be read, or a package that is missing.
    """
    if name in TASKS:
        return TASKS[name]()
    kind, colon, rest = name.partition(":")
    if colon and kind in _FROM:
        return _FROM[kind](rest)
    if colon:
        return _of_the_user(name)
    raise unknown("task", name, [*TASKS, *(f"{kind}:..." for kind in _FROM), "FILE.py:NAME"])


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
