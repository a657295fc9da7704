"""Rewards of sequences that dynamic programming can carry, and the training task they make with a pair.

A *checker* is a small deterministic machine that reads tokens: it pays a gain for each token and the value of the
state it stands in when the sequence stops. A terminal reward of a context, a reward per token, a pattern or a parity
to be verified are all checkers. ``lift`` compiles a pair and its checkers to one product automaton, on which a reward
is ``edge [S, V]`` plus ``terminal [S]``; the lifted policy keeps its parameters, for it does not see the checker.

A reward is written ``[WEIGHT*]NAME(tokens)`` and summed with ``+``: ``contains(1,2,1)``, ``parity(1)+0.1*each(0)``.
A new checker is one entry in ``CHECKERS``. Shapes: S contexts, V tokens, M states of a checker.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from klgrad.synth.automata import MAX_CONTEXTS, Automaton
from klgrad.synth.estimators import unknown
from klgrad.synth.policies import Policy, PolicyPair

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True, eq=False)
class Checker:
    """A deterministic machine that reads tokens and pays.

    Args:
        next_state: ``[M, V]`` the state after each token.
        gain: ``[M, V]`` what reading a token pays.
        value: ``[M]`` what the state in which the sequence stops pays.
        start: the state of the empty prefix.
    """

    next_state: Int[np.ndarray, "M V"]
    gain: Float[np.ndarray, "M V"]
    value: Float[np.ndarray, " M"]
    start: int = 0


@dataclass(frozen=True, eq=False)
class Reward:
    """A reward on an automaton: the sum of its tokens' rewards, plus that of the context it stops in.

    Args:
        edge: ``[S, V]`` reward of each token in each context.
        terminal: ``[S]`` reward of the context in which a sequence stops at the horizon; 0 for the end context.
        name: how it is written.
    """

    edge: Float[np.ndarray, "S V"]
    terminal: Float[np.ndarray, " S"]
    name: str = "reward"

    def check(self, automaton: Automaton) -> None:
        """Raise ValueError unless the reward is finite and fits the automaton."""
        for name, array, shape in (
            ("edge", self.edge, automaton.next_context.shape),
            ("terminal", self.terminal, (automaton.contexts,)),
        ):
            if array.shape != shape or not np.isfinite(array).all():
                raise ValueError(f"{self.name}: {name} rewards must be finite with shape {shape}; got {array.shape}")


# ------------------------------------------------------------------------------------------------- the checkers


@dataclass(frozen=True)
class Entry:
    """A registered checker: what it verifies, how many tokens it takes, and its builder."""

    description: str
    arguments: tuple[str, ...]
    build: Callable[[tuple[int, ...], Automaton], Checker]


def _tokens(automaton: Automaton) -> range:
    """The tokens a checker reads: all but the one that only ends."""
    only_ends = (automaton.next_context[automaton.alive] == automaton.end).all(axis=0)
    return range(automaton.vocabulary - int(automaton.end >= 0 and bool(only_ends[-1])))


def _machine(
    automaton: Automaton, value: Sequence[float], step: Callable[[int, int], int], gain: float = 0.0, paid: int = -1
) -> Checker:
    """States 0 to M - 1 moved by ``step``; the end token leaves the state as it is; ``paid`` is worth ``gain``."""
    states, read = len(value), _tokens(automaton)
    table = [[step(m, v) if v in read else m for v in range(automaton.vocabulary)] for m in range(states)]
    gains = np.zeros((states, automaton.vocabulary))
    if paid >= 0:
        gains[:, paid] = gain
    return Checker(np.array(table), gains, np.asarray(value, float))


def _longest_border(pattern: tuple[int, ...], seen: tuple[int, ...]) -> int:
    return next(k for k in range(min(len(pattern), len(seen)), -1, -1) if seen[len(seen) - k :] == pattern[:k])


def _pattern(pattern: tuple[int, ...], automaton: Automaton, *, absorb: bool) -> Checker:
    """How much of the pattern the last tokens match (Knuth, Morris, Pratt 1977)."""
    n = len(pattern)

    def step(matched: int, token: int) -> int:
        return n if absorb and matched == n else _longest_border(pattern, (*pattern[:matched], token))

    return _machine(automaton, [0.0] * n + [1.0], step)


def _parity(arguments: tuple[int, ...], automaton: Automaton) -> Checker:
    return _machine(automaton, [1.0, 0.0], lambda odd, token: odd ^ (token == arguments[0]))


def _count(arguments: tuple[int, ...], automaton: Automaton) -> Checker:
    token, least = arguments
    if not 0 < least <= 1000:
        raise ValueError(f"count({token},{least}): give a number of times from 1 to 1000")
    return _machine(automaton, [0.0] * least + [1.0], lambda seen, v: min(seen + (v == token), least))


def _each(arguments: tuple[int, ...], automaton: Automaton) -> Checker:
    return _machine(automaton, [0.0], lambda m, v: m, 1.0, arguments[0])


def _context(arguments: tuple[int, ...], automaton: Automaton) -> Checker:
    (context,) = arguments
    if not 0 <= context < automaton.contexts or context == automaton.end:
        raise ValueError(f"context({context}) is not a context that emits: there are 0 to {automaton.contexts - 1}")
    value = np.arange(automaton.contexts) == context
    read = _tokens(automaton)

    def step(s: int, v: int) -> int:
        return int(automaton.next_context[s, v]) if v in read else s

    return replace(_machine(automaton, value.tolist(), step), start=automaton.start)


CHECKERS: dict[str, Entry] = {
    "contains": Entry(
        "1 if the tokens occur one after the other", ("token...",), lambda a, m: _pattern(a, m, absorb=True)
    ),
    "ends": Entry("1 if the sequence stops with the tokens", ("token...",), lambda a, m: _pattern(a, m, absorb=False)),
    "parity": Entry("1 if the token occurs an even number of times", ("token",), _parity),
    "count": Entry("1 if the token occurs at least so many times", ("token", "times"), _count),
    "each": Entry("1 for each time the token occurs (a reward per token)", ("token",), _each),
    "context": Entry("1 if the sequence stops in that context of the pair's automaton", ("context",), _context),
}

Terms = list[tuple[float, Checker]]


def parse_reward(text: str, automaton: Automaton) -> Terms:
    """The weighted checkers that a reward's text names; ``none`` names no reward.

    Raises:
        ValueError: for text outside the grammar, an unknown checker, or a token that is not in the vocabulary.
    """
    if text.strip() == "none":
        return []
    terms = []
    for piece in re.split(r"\+(?![^(]*\))", text):
        match = re.fullmatch(r"\s*(?:(-?[\d.]+(?:e-?\d+)?)\s*\*)?\s*([\w-]+)\s*\(([\d\s,]*)\)\s*", piece)
        if match is None:
            raise ValueError(
                f"{piece.strip()!r} in {text!r} is no reward: write [WEIGHT*]NAME(numbers), as in contains(1,0) or "
                f"0.5*parity(1), with a NAME of {', '.join(CHECKERS)}; or none"
            )
        terms.append((_weight(match[1], text), _checker(match[2], match[3], automaton)))
    return terms


def _weight(text: str | None, whole: str) -> float:
    try:
        weight = 1.0 if text is None else float(text)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise ValueError(f"the weight {text} in {whole!r} is not a finite number")
    return weight


def _checker(name: str, text: str, automaton: Automaton) -> Checker:
    if name not in CHECKERS:
        raise unknown("reward", name, list(CHECKERS))
    entry = CHECKERS[name]
    arguments = tuple(int(piece) for piece in text.replace(",", " ").split())
    variadic = entry.arguments[0].endswith("...")
    if not arguments or (not variadic and len(arguments) != len(entry.arguments)):
        raise ValueError(f"{name}({text}) has {len(arguments)} number(s): write {name}({', '.join(entry.arguments)})")
    tokens = arguments if variadic else arguments[:1] if entry.arguments[0] == "token" else ()
    for token in tokens:
        if token >= automaton.vocabulary:
            raise ValueError(f"{name}({text}): there is no token {token}; tokens are 0 to {automaton.vocabulary - 1}")
    return entry.build(arguments, automaton)


# ------------------------------------------------------------------------------------------------ the product


def lift(pair: PolicyPair, rewards: dict[str, Terms]) -> tuple[PolicyPair, list[Reward]]:
    """The pair on the product of its automaton with all the checkers, and each reward there.

    Contexts become (context, state of each checker), those that sequences reach; policy, reference and behaviour are
    as before and the parameters are the same. With an end, a reward of the final state is paid by the token that ends.

    Raises:
        ValueError: when the product has too many contexts.
    """
    old, checkers = pair.automaton, [checker for terms in rewards.values() for _, checker in terms]
    index, after = _explore(old, checkers)
    end = index.get((old.end,), -1)
    base = np.array([place[0] for place in index])
    states = tuple((old.states[place[0]] if old.states else place[0], *place[1:]) for place in index)
    automaton = Automaton(after, 0, end, old.horizon, states)
    scores = pair.policy.scores[base]
    lifted = PolicyPair(
        automaton,
        Policy(pair.policy.log_probs[base], scores, pair.policy.theta),
        pair.reference[base],
        None if pair.behaviour is None else pair.behaviour[base],
        pair.name,
    )
    found, first = [], 1
    for name, terms in rewards.items():
        edge, terminal = np.zeros(after.shape), np.zeros(len(base))
        for k, (weight, checker) in enumerate(terms, first):
            state = np.array([place[k] if len(place) > 1 else 0 for place in index])
            pays = checker.gain[state] + np.where(after == end, checker.value[checker.next_state[state]], 0.0)
            edge += weight * pays
            terminal += weight * checker.value[state]
        first += len(terms)
        if end >= 0:
            edge[end], terminal[end] = 0.0, 0.0
        found.append(Reward(edge, terminal, name))
    return lifted, found


def _explore(old: Automaton, checkers: list[Checker]) -> tuple[dict[tuple[int, ...], int], np.ndarray]:
    """Product contexts, numbered breadth first, and their successors ``[S, V]``."""
    start = (old.start, *(checker.start for checker in checkers))
    index, order, depth, rows = {start: 0}, [start], [0], []
    for here, place in enumerate(order):
        stops = place == (old.end,) or (old.horizon is not None and depth[here] >= old.horizon)
        row = []
        for token in range(old.vocabulary):
            to = int(old.next_context[place[0], token])
            states = (int(c.next_state[m, token]) for c, m in zip(checkers, place[1:], strict=False))
            after = place if stops else (to,) if to == old.end else (to, *states)
            if after not in index:
                if len(order) >= MAX_CONTEXTS:
                    raise ValueError(f"more than {MAX_CONTEXTS} contexts with the rewards' checkers: take simpler ones")
                index[after] = len(order)
                order.append(after)
                depth.append(depth[here] + 1)
            row.append(index[after])
        rows.append(row)
    return index, np.array(rows)


# --------------------------------------------------------------------------------------------------- the task


@dataclass(frozen=True, eq=False)
class Task:
    """What is trained: a pair on the automaton of its rewards, the reward, and one that is only looked at.

    Args:
        pair: policy and reference, on-policy.
        reward: what is maximised.
        out_of_domain: evaluated, never trained on.
        length: the horizon T.

    Raises:
        ValueError: for rewards that do not fit, a length out of range, or an off-policy pair.
    """

    pair: PolicyPair
    reward: Reward
    out_of_domain: Reward
    length: int

    def __post_init__(self) -> None:
        self.pair.automaton.check_length(self.length)
        for reward in (self.reward, self.out_of_domain):
            reward.check(self.pair.automaton)
        if not self.pair.on_policy:
            raise ValueError(
                f"{self.pair.name}: training samples from the policy or an older copy of it, not from a fixed "
                "behaviour policy: take --behaviour policy, and a staleness"
            )

    @property
    def verifiable(self) -> bool:
        """Whether every sequence is worth 0 or 1 for certain: nothing is paid twice on any path."""
        paid = np.concatenate([self.reward.edge[self.pair.automaton.alive].ravel(), self.reward.terminal])
        if not np.isin(paid, (0.0, 1.0)).all():
            return False
        automaton = self.pair.automaton
        inside = automaton.next_context != automaton.end
        return not self.reward.edge[automaton.alive][inside[automaton.alive]].any()


def task(pair: PolicyPair, reward: str, length: int, out_of_domain: str = "none") -> Task:
    """The task of a pair, a reward and an out-of-domain reward in the grammar of this module."""
    texts = {"reward": reward, "out_of_domain": out_of_domain}
    lifted, found = lift(pair, {key: parse_reward(text, pair.automaton) for key, text in texts.items()})
    named = [replace(r, name=text) for r, text in zip(found, texts.values(), strict=True)]
    return Task(lifted, named[0], named[1], length)
