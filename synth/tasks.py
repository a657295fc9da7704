"""Named training tasks, published with all their numbers.

Small enough for exact dynamics, and each with something at stake: a reward that the reference rarely earns, and an
out-of-domain one that it earns and training may lose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from klgrad.synth.automata import Automaton, history, markov
from klgrad.synth.estimators import unknown
from klgrad.synth.policies import PolicyPair, linear, log_softmax, tabular
from klgrad.synth.rewards import Task, task


@dataclass(frozen=True)
class TaskPreset:
    """A named task.

    Args:
        description: one line for lists.
        numbers: the pair's parameters, in words and figures.
        pair: makes the pair, whose policy is the reference, for sequences up to a length.
        reward, out_of_domain: in the grammar of ``rewards``.
        length: T.
        beta, learning_rate: what commands take when none is given.
    """

    description: str
    numbers: str
    pair: Callable[[int], PolicyPair]
    reward: str
    out_of_domain: str
    length: int
    beta: float
    learning_rate: float


def _at_reference(automaton: Automaton, logits: list[list[float]] | np.ndarray) -> PolicyPair:
    given = np.asarray(logits, float)
    return PolicyPair(automaton, tabular(automaton, given), log_softmax(given))


_PATTERN = [[0.0, 0.2], [0.1, 0.0]]
_ANSWER = [[1.0, -1.0, 0.5, -1.5], [0.0, -1.0, 0.5, 0.0], [0.0, -1.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]]
_PHASE = (-1.0, 0.5)
_TREE = [[0.4, -0.3], [0.2, 0.5], [-0.6, 0.1], [0.3, 0.3], [-0.2, 0.7], [0.9, 0.0], [0.1, -0.5]]


def _pattern(length: int) -> PolicyPair:
    return _at_reference(markov(2, 1, start=(0,)), _PATTERN)


def _answer(length: int) -> PolicyPair:
    return _at_reference(markov(4, 1, start=(0,), eos=True), _ANSWER)


def _tree(length: int) -> PolicyPair:
    automaton = history(2, length)
    logits = np.zeros((automaton.contexts, 2))
    logits[: len(_TREE)] = _TREE[: automaton.contexts]
    return _at_reference(automaton, logits)


def _phase(length: int) -> PolicyPair:
    automaton = markov(2, 1, start=(0,))
    features = np.zeros((2, 2, 2))
    features[[0, 1], 1, [0, 1]] = 1.0
    policy = linear(automaton, features, np.array(_PHASE))
    return PolicyPair(automaton, policy, policy.log_probs)


TASKS: dict[str, TaskPreset] = {
    "pattern": TaskPreset(
        "a pattern of six tokens to be found in twenty: the reference does it one time in five",
        f"V = 2, context = last token, start in context 0, d = 4 softmax logits; reference logits {_PATTERN}",
        _pattern,
        "contains(1,1,0,1,1,1)",
        "contains(0,0,0,0)",
        20,
        0.05,
        0.5,
    ),
    "answer": TaskPreset(
        "replies of random length that must end with the right answer",
        "V = 4, context = last token, start in context 0, token 3 ends, d = 12 softmax logits; "
        f"reference logits {_ANSWER[:3]}",
        _answer,
        "ends(1)",
        "count(0,3)",
        12,
        0.1,
        0.5,
    ),
    "tree": TaskPreset(
        "every prefix has its own logits, so fixed points have closed forms",
        f"V = 2, context = whole prefix, d = 14 softmax logits; reference logits {_TREE}, 0 for longer prefixes",
        _tree,
        "contains(1,0)+0.7*parity(1)",
        "ends(1)",
        3,
        0.5,
        0.5,
    ),
    "phase": TaskPreset(
        "two parameters, for pictures of the field",
        f"V = 2, context = last token, start in context 0, d = 2: the logit of token 1 after each; reference {_PHASE}",
        _phase,
        "contains(1,0,1)",
        "contains(0,0,0)",
        6,
        0.3,
        0.5,
    ),
}


def preset_task(name: str, length: int | None = None) -> Task:
    """The task of that name, at its own length or another.

    Raises:
        ValueError: for an unknown name, saying what there is.
    """
    if name not in TASKS:
        raise unknown("task", name, list(TASKS))
    found = TASKS[name]
    length = found.length if length is None else length
    pair = replace(found.pair(length), name=name)
    return task(pair, found.reward, length, found.out_of_domain)
