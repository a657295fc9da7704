"""Tasks: their answers are right, wrong ones are not, splits differ, names and files that are wrong."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from klgrad.harness import tasks


@pytest.mark.parametrize("name", tasks.TASKS)
def test_answers_are_right_and_nothing_else_is(name):
    task = tasks.task(name)
    train, test = (list(islice(task.problems(split, 0), 50)) for split in ("train", "test"))
    for problem in train:
        assert task.reward(problem, problem.answer) == 1
        assert task.reward(problem, problem.answer + "0") == 0
        assert task.reward(problem, "") == 0
    assert train != test
    assert train == list(islice(task.problems("train", 0), 50))


def test_countdown_wants_each_number_once():
    task, problem = tasks.Countdown(), tasks.Problem("c3,5,7>38=", "5*7+3", ([3, 5, 7], 38))
    for right in ("5*7+3", "3+7*5", "(5*7)+3"):
        assert task.reward(problem, right) == 1
    for wrong in ("38", "5*7+3+0", "5*7", "5*7+3)", "35+3", "5*7+3;import os"):
        assert task.reward(problem, wrong) == 0


@given(st.text(alphabet="0123456789+-*()", max_size=12))
def test_arithmetic_agrees_with_python(text):
    import re

    got = tasks.arithmetic(text)
    if got is not None and not re.search(r"\b0\d|\*\*|[-+*]\s*[-+]", text):
        assert got == eval(text)  # digits and operators only
    if re.search(r"\*\*|[^-0-9+*()]", text):
        assert got is None


def test_a_task_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    def problems(self, split, seed):\n        yield from ()\n"
        "    def reward(self, problem, response):\n        return 1.0\n"
        "class Half:\n    pass\n"
    )
    task = tasks.task(f"{tmp_path / 'mine.py'}:Mine")
    with pytest.raises(ValueError, match="the data is empty"):
        tasks.take(task.problems("train", 0), 3)
    with pytest.raises(ValueError, match="lacks problems and reward"):
        tasks.task(f"{tmp_path / 'mine.py'}:Half")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("contdown", "did you mean 'countdown'"),
        ("math:nowhere.jsonl", "nowhere.jsonl cannot be read: No such file"),
        ("nowhere.py:Task", "gave no task"),
    ],
)
def test_bad_names(name, sentence):
    with pytest.raises(ValueError, match=sentence):
        tasks.task(name)
