"""Named pairs, published with all their numbers.

The paper (arXiv 2512.21852) does not publish the parameters of its models A and B; these are ours. What does not
depend on the choice: the expected gradient of k1-in-reward is the true one, of k1-in-loss zero, of k3-in-loss the
token-level forward-KL gradient, and k3-in-reward and k3-in-loss add up to the true gradient. What does: every
magnitude, and the order of the variances.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from klgrad.synth.automata import counts, markov, positional
from klgrad.synth.estimators import unknown
from klgrad.synth.policies import PolicyPair, linear, log_softmax, tabular


class Preset(NamedTuple):
    """A named pair.

    Args:
        description: one line for lists.
        numbers: every parameter, in words and figures.
        build: makes the pair for sequences up to a length.
        lengths: the lengths shown when none are asked for.
        source: where it comes from.
    """

    description: str
    numbers: str
    build: Callable[[int], PolicyPair]
    lengths: tuple[int, ...]
    source: str


def _binary(
    policy: list[list[float]], reference: list[list[float]], behaviour: list[list[float]] | None = None
) -> PolicyPair:
    automaton = markov(2, 1, start=(0,))
    return PolicyPair(
        automaton,
        tabular(automaton, np.array(policy)),
        log_softmax(np.array(reference)),
        None if behaviour is None else log_softmax(np.array(behaviour)),
    )


_NEAR = ([[0.0, 0.5], [0.4, 0.0]], [[0.0, 0.2], [0.1, 0.0]])
_FAR = ([[0.0, 4.5], [4.0, 0.0]], [[0.0, -0.5], [0.0, 0.8]])
_STALE = [[0.0, 0.9], [0.0, 0.1]]
_HANDBOOK = ([[0.4, -0.2, 1.1, 0.0]], [[0.1, 0.0, 0.9, 0.2]])


def _handbook(length: int) -> PolicyPair:
    automaton = markov(4, 0)
    return PolicyPair(automaton, tabular(automaton, np.array(_HANDBOOK[0])), log_softmax(np.array(_HANDBOOK[1])))


def _drift(length: int) -> PolicyPair:
    automaton = markov(8, 0)
    policy = np.log(np.array([[8e-3, *[1.0] * 7]]))
    reference = np.log(np.array([[32.0, *[1.0] * 7]]))
    return PolicyPair(automaton, tabular(automaton, policy), log_softmax(reference))


def _count_features(state: Any) -> list[float]:
    (zeros, ones), last = state
    past = zeros + ones
    return [1.0, float(2 * last - 1) if past else 0.0, ones / past if past else 0.5]


def _counts(length: int) -> PolicyPair:
    automaton = counts(2, length, last=True)
    features = np.zeros((automaton.contexts, 2, 3))
    features[:, 1] = [_count_features(state) for state in automaton.states]
    return PolicyPair(
        automaton,
        linear(automaton, features, np.array([0.3, 0.9, -0.7])),
        log_softmax(features @ np.array([-0.1, 0.2, 0.4])),
    )


def _ending(length: int) -> PolicyPair:
    automaton = positional(2, length, eos=True)
    features = np.zeros((automaton.contexts, 2, 2))
    features[:-1, 1] = [[1.0, t] for t in range(length)]
    return PolicyPair(
        automaton, linear(automaton, features, np.array([-0.3, 0.25])), log_softmax(features @ np.array([0.4, -0.1]))
    )


def _words(length: int) -> PolicyPair:
    """V = 16, the last token ends: each word prefers its successor, the policy more sharply than the reference."""
    automaton = markov(16, 1, start=(0,), eos=True)
    word, token = np.arange(15)[:, None], np.arange(16)[None, :]
    distance = (token - word - 1) % 15
    reference = np.zeros((16, 16))
    reference[:15] = np.where(token == 15, -1.5, -0.15 * distance)
    policy = np.zeros((16, 16))
    policy[:15] = np.where(token == 15, -1.0, -0.3 * distance + 0.2 * np.cos(word + 2.0 * token))
    return PolicyPair(automaton, tabular(automaton, policy), log_softmax(reference))


PRESETS: dict[str, Preset] = {
    "near": Preset(
        "a reference a little away, as early in training",
        "V = 2, context = last token, start in context 0, d = 4 softmax logits; "
        f"policy logits {_NEAR[0]}, reference logits {_NEAR[1]}",
        lambda length: _binary(*_NEAR),
        tuple(range(5, 21)),
        "klgrad",
    ),
    "far": Preset(
        "a reference far enough that the order of the paper's Figure 1 shows",
        "V = 2, context = last token, start in context 0, d = 4 softmax logits; "
        f"policy logits {_FAR[0]}, reference logits {_FAR[1]}",
        lambda length: _binary(*_FAR),
        tuple(range(5, 21)),
        "klgrad",
    ),
    "handbook": Preset(
        "the handbook's one-token check",
        f"V = 4, one token, d = 4 softmax logits; policy logits {_HANDBOOK[0][0]}, reference logits {_HANDBOOK[1][0]}",
        _handbook,
        (1,),
        "handbook page 'KL regularization in LLM RL'",
    ),
    "drift": Preset(
        "the policy all but dropped a token that the reference favours: k3 explodes",
        "V = 8, independent tokens, d = 8 softmax logits; "
        "policy mass 0.008 : 1 : ... : 1, reference mass 32 : 1 : ... : 1",
        _drift,
        (1, 2, 5, 10, 20),
        "handbook page 'KL regularization in LLM RL', drift row eps = 0.001",
    ),
    "counts": Preset(
        "genuinely history-dependent: the mean of all past tokens is a feature",
        "V = 2, d = 3, logit of token 1 = theta . (1, last token as -1 or 1 (0 at the start), "
        "mean of the past (1/2 at the start)); policy theta (0.3, 0.9, -0.7), reference theta (-0.1, 0.2, 0.4)",
        _counts,
        tuple(range(5, 21)),
        "klgrad",
    ),
    "ending": Preset(
        "a token or the end: the smallest pair with replies of random length",
        "V = 2, token 1 ends, context = position t from 0, d = 2, logit of the end = theta . (1, t); "
        "policy theta (-0.3, 0.25), reference theta (0.4, -0.1)",
        _ending,
        tuple(range(5, 21)),
        "klgrad",
    ),
    "words": Preset(
        "sixteen words with an end token; replies of random length",
        "V = 16, context = last word, start in context 0, token 15 ends, d = 240 softmax logits; "
        "with k = (v - w - 1) mod 15 for word w and token v: "
        "reference logit -0.15 k (end: -1.5), policy logit -0.3 k + 0.2 cos(w + 2 v) (end: -1.0)",
        _words,
        tuple(range(5, 21)),
        "klgrad",
    ),
    "stale": Preset(
        "the near pair, sampled by an older policy",
        f"as near, with behaviour logits {_STALE}",
        lambda length: _binary(*_NEAR, _STALE),
        tuple(range(5, 21)),
        "klgrad",
    ),
}


def preset(name: str, length: int = 20) -> PolicyPair:
    """The pair of that name, with contexts for sequences up to ``length``.

    Raises:
        ValueError: for an unknown name, saying what there is.
    """
    if name not in PRESETS:
        raise unknown("preset", name, list(PRESETS))
    return replace(PRESETS[name].build(length), name=name)
