"""Tasks out of packages and data sets: reasoning-gym, MATH-style problems, multiple choice.

Whatever runs code that is not ours on text that a model wrote, reasoning-gym and math-verify, does so in an isolated
worker (``isolation``): ``Gym`` and ``MathVerify`` below live there, the tasks live here.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from klgrad.harness.isolation import Limits, Worker
from klgrad.harness.tasks import Problem, stream

_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?:/([\w.-]+))?(?:@([\w.-]+))?")  # owner/name, then /subset and @split
_LINE = 1 << 20  # bytes; no problem is longer
_ANSWER = 1000  # characters; MATH's longest are a fifth of it
_BLOCK, _BLOCKS = 1024, 1 << 20  # of reasoning-gym's seeds; two halves of _BLOCKS blocks are its 2 ** 31
Row = tuple[str, dict[str, Any]]


@functools.cache
def _worker(name: str, target: str, *args: Any, cpu: int = 10) -> Worker:
    """One for each package and task, for as long as this process lives."""
    return Worker(name, f"{__name__}:{target}", *args, limits=Limits(cpu=cpu))


# --------------------------------------------------------------------------------------------------- reasoning-gym


class ReasoningGym:
    """Any task of the package reasoning-gym, by its name there, made and judged in a worker."""

    ASK = "\nThink step by step, and put your final answer between <answer> and </answer>."

    def __init__(self, name: str) -> None:
        self.name, self.worker = name, _worker(f"reasoning-gym:{name}", "Gym", name)

    @property
    def failed(self) -> int:
        """Problems so far that could not be made or judged."""
        return self.worker.failures.total()

    def problems(self, split: str, seed: int) -> Iterator[Problem]:
        """Endless. Train and test come from different halves of the generator's seeds, whatever ``seed``."""
        start, half = stream("reasoning-gym", split, seed).randrange(_BLOCKS), _BLOCKS * (split == "test")
        for block in itertools.count(start):
            first, made = (half + block % _BLOCKS) * _BLOCK, 0
            for index in range(_BLOCK):
                found = self.worker.call("pose", first, index)
                if found is not None:
                    made += 1
                    yield Problem(found[0] + self.ASK, found[1], (first, index))
            if not made:
                raise ValueError(f"reasoning-gym:{self.name} makes no problems: {dict(self.worker.failures)}")

    def reward(self, problem: Problem, response: str) -> float:
        """The package's own score of what stands in the last <answer>, or of the whole response."""
        found = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
        answer = (found[-1] if found else response).strip()
        return float(self.worker.call("score", *problem.data, answer, otherwise=0.0))


class Gym:
    """Lives in the worker. Entries are made from (first, index) alone, so one that was lost with a worker is made anew.

    Args:
        name: of the task in reasoning-gym.

    Raises:
        ValueError: without the package, or such a task in it.
    """

    def __init__(self, name: str) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ValueError(
                f"reasoning-gym:{name} needs reasoning-gym: pip install 'klgrad[tasks]' ({error})"
            ) from None
        if name not in DATASETS:
            from klgrad.synth.estimators import unknown

            near = difflib.get_close_matches(name, DATASETS, 6, 0.5)
            raise unknown("reasoning-gym task", name, near or sorted(DATASETS))
        self.name, self.package = name, reasoning_gym
        self.data = functools.lru_cache(4)(self._data)
        self.entry = functools.lru_cache(1 << 14)(self._entry)
        self._data(0)  # some of them want settings that only they know: said at the start

    def pose(self, first: int, index: int) -> tuple[str, str] | None:
        """Question and answer; ``None`` where codeio's program failed on its own input."""
        entry = self.entry(first, index)
        metadata = entry["metadata"]
        if self.name == "codeio" and not metadata["input_data"] and not metadata["output_data"]:
            return None
        return entry["question"], str(entry["answer"] or "")

    def score(self, first: int, index: int, answer: str) -> float:
        """0 to 1."""
        return min(max(float(self.data(first).score_answer(answer=answer, entry=self.entry(first, index))), 0.0), 1.0)

    def _data(self, first: int) -> Any:
        return self.package.create_dataset(self.name, size=_BLOCK, seed=first)

    def _entry(self, first: int, index: int) -> dict[str, Any]:
        import numpy as np

        random.seed(first + index)  # for programs that draw without a seed of their own
        np.random.seed(first + index)  # noqa: NPY002 - theirs is the global one
        return dict(self.data(first)[index])


# ----------------------------------------------------------------------------------------- problems from data sets


class _FromData:
    """Problems out of a file or a data set of the hub: each kind says how a row becomes one."""

    kind, example = "", ""

    def __init__(self, place: str) -> None:
        self.place, self.rows = place, functools.cache(self._rows)
        self.local = Path(place).suffix in (".jsonl", ".json") or Path(place).is_file() or not _HUB.fullmatch(place)
        if self.local:
            self.rows("")  # what is wrong with a file is said at the start; a file has no splits

    def problem(self, row: dict[str, Any]) -> Problem:
        """The problem of a row; ``ValueError`` says what is wrong with it."""
        raise NotImplementedError

    def problems(self, split: str, seed: int) -> Iterator[Problem]:
        """In random order, again and again for ``train``; once and in order for ``test``."""
        rng, rows = stream(self.kind, split, seed), self.rows("" if self.local else split)
        if split == "test":
            yield from rows
            return
        while True:
            yield from rng.sample(rows, len(rows))

    def _rows(self, split: str) -> list[Problem]:
        found = []
        for where, row in _from_file(self.place, self.example) if self.local else _from_hub(self.place, split):
            try:
                found.append(self.problem(row))
            except ValueError as error:
                raise ValueError(f"{where} {error}: a row is like {self.example}") from None
        if not found:
            raise ValueError(f"{self.place} holds no problem: the data is empty")
        return found


class Mathematics(_FromData):
    """Problems whose boxed answer is compared by math-verify, in a worker.

    A row has ``problem``, and ``answer`` or a ``solution`` with a boxed one (MATH, MATH-500).
    """

    kind, example = "math", '{"problem": "1 + 1?", "answer": "2"}'
    ASK = "\nPlease reason step by step, and put your final answer within \\boxed{}."

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.worker = _worker("math-verify", "MathVerify", cpu=3)

    @property
    def failed(self) -> int:
        """Answers so far that could not be judged, by any task of this kind."""
        return self.worker.failures.total()

    def problem(self, row: dict[str, Any]) -> Problem:
        """From ``problem`` and ``answer`` or ``solution``."""
        answer = row.get("answer")
        if answer is None:
            answer = boxed(_text(row, "solution")) if "solution" in row else None
            if answer is None:
                raise ValueError("has neither 'answer' nor a 'solution' with a \\boxed{} one")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise ValueError(f"has {type(answer).__name__} as 'answer', which must be text or a number")
        return Problem(_text(row, "problem") + self.ASK, str(answer))

    def reward(self, problem: Problem, response: str) -> float:
        """1 if the last boxed answer equals the truth, as text or as mathematics; very long ones are wrong unread."""
        given = boxed(response)
        if given is None or len(given) > _ANSWER:
            return 0.0
        if given.strip() == problem.answer.strip():
            return 1.0
        return float(self.worker.call("equal", problem.answer, given, otherwise=False))


class MathVerify:
    """Lives in the worker."""

    def __init__(self) -> None:
        try:
            import math_verify
        except ImportError as error:
            raise ValueError(f"math:... needs math-verify: pip install 'klgrad[tasks]' ({error})") from None
        self.package = math_verify
        self.parsed = functools.lru_cache(1 << 14)(self._parsed)
        self.equal("1", "1.0")  # loads the rest of it

    def equal(self, truth: str, given: str) -> bool:
        """Whether two answers are the same. The package's own time limits are off: they hide what they stop."""
        return bool(self.package.verify(self.parsed(truth), self._parsed(given), timeout_seconds=None))

    def _parsed(self, answer: str) -> list[Any]:
        return list(self.package.parse(f"\\boxed{{{answer}}}", parsing_timeout=None))


class Choices(_FromData):
    """Multiple choice judged by the boxed letter: a row has ``question``, ``choices`` and ``answer`` (MMLU)."""

    kind, example = "choices", '{"question": "1 + 1?", "choices": ["1", "2"], "answer": 1}'
    ASK = "\nPlease reason step by step, and put the letter of your final answer within \\boxed{}."

    def problem(self, row: dict[str, Any]) -> Problem:
        """From ``question``, ``choices`` and ``answer``, an index from 0 or a letter."""
        question, choices, answer = _text(row, "question"), row.get("choices"), row.get("answer")
        if not isinstance(choices, list) or not 2 <= len(choices) <= 26 or not all(isinstance(c, str) for c in choices):
            raise ValueError("has no 'choices' of 2 to 26 texts")
        letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(choices)]
        if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
            answer = letters[answer]
        if not isinstance(answer, str) or len(answer) != 1 or answer not in letters:
            raise ValueError(f"has {answer!r} as 'answer', which must be an index below {len(choices)} or its letter")
        shown = "\n".join(f"{letter}. {choice}" for letter, choice in zip(letters, choices, strict=True))
        return Problem(f"{question}\n{shown}{self.ASK}", answer)

    def reward(self, problem: Problem, response: str) -> float:
        """1 if the last box holds the letter: ``B``, ``(B)``, ``\\text{B}``, ``B.`` or ``B. its text``."""
        given = re.sub(r"\\(?:text|textbf|mathbf|mathrm)\b", "", boxed(response) or "")
        found = re.match(r"[\s({]*([A-Z])(?![A-Za-z])", given)
        return float(found is not None and found[1] == problem.answer)


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


def _text(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"has {'no' if value is None else type(value).__name__ + ' as'} {key!r}, which must be text")
    return value


def _from_file(place: str, example: str) -> Iterator[Row]:
    """Rows of a JSON-lines file, with file and line."""
    try:
        with open(place, "rb") as file:
            for number in itertools.count(1):
                line = file.readline(_LINE + 1)
                where = f"{place}, line {number}"
                if not line:
                    return
                if len(line) > _LINE:
                    raise ValueError(f"{where} is longer than {_LINE:,} bytes: write one {example} a line")
                if line.strip():
                    yield where, _object(where, line, example)
    except OSError as error:
        raise ValueError(f"{place} cannot be read: {error.strerror}") from None


def _object(where: str, line: bytes, example: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}): write one {example} a line") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is no JSON object: write one {example} a line")
    return row


def _from_hub(place: str, split: str) -> Iterator[Row]:
    """Rows of ``owner/name``, ``owner/name/subset``, either with ``@split`` instead of the split asked for."""
    match = _HUB.fullmatch(place)
    assert match is not None
    name, subset, fixed = match.groups()
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(f"{place} is no file here, and the hub needs datasets: pip install datasets") from None
    try:
        with _offline_if_unreachable():
            data = load_dataset(name, subset, split=fixed or split)
    except Exception as error:  # whatever the hub, the network or the disk gives
        first = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(
            f"{place} ({fixed or split}) is neither a file nor a hub data set at hand ({first}): "
            "give a JSON-lines file, or load it once online"
        ) from None
    for number, row in enumerate(data):
        yield f"{place} ({fixed or split}), row {number}", dict(row)


@contextlib.contextmanager
def _offline_if_unreachable() -> Iterator[None]:
    """Without a network the hub's clients try again for half a minute: ask once, then let them use what is kept."""
    from datasets import config
    from huggingface_hub import constants, get_session

    before = config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    try:
        if not any(before):
            get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:
        config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
