"""Checkers against plain Python on token sequences; the lifted pair is the old one in every respect."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import assert_close, build_world, worlds

from klgrad.synth import automata, exact
from klgrad.synth.enumeration import log_probability, sequences
from klgrad.synth.policies import PolicyPair, log_softmax, tabular
from klgrad.synth.rewards import CHECKERS, Reward, Task, lift, parse_reward, task


def has(pattern, y):
    return any(y[i : i + len(pattern)] == pattern for i in range(len(y) - len(pattern) + 1))


PLAIN = {  # text -> the same reward of the tokens that were read (the end token is not)
    "contains(1,0)": lambda y: has([1, 0], y),
    "contains(1,0,1)": lambda y: has([1, 0, 1], y),
    "ends(0)": lambda y: y[-1:] == [0],
    "ends(0,0,1)": lambda y: y[-3:] == [0, 0, 1],
    "parity(1)": lambda y: y.count(1) % 2 == 0,
    "count(0,2)": lambda y: y.count(0) >= 2,
    "each(1)": lambda y: y.count(1),
    "2*each(0)+-0.5*parity(0)+ends(1)": lambda y: 2 * y.count(0) - 0.5 * (y.count(0) % 2 == 0) + (y[-1:] == [1]),
    "none": lambda y: 0.0,
}


def earned(reward, pair, every):
    """``[M]`` of each sequence, from the arrays: every token's reward and the terminal one."""
    last = every.mask.sum(axis=1) - 1
    rows = np.arange(len(last))
    after = pair.automaton.next_context[every.contexts[rows, last], every.tokens[rows, last]]
    return (reward.edge[every.contexts, every.tokens] * every.mask).sum(axis=1) + reward.terminal[after]


def read(every, automaton):
    """The tokens of every sequence; with an end, without the token that only ends."""
    skip = automaton.vocabulary - 1 if automaton.end >= 0 else -1
    return [
        [int(v) for v, real in zip(tokens, mask, strict=True) if real and v != skip]
        for tokens, mask in zip(every.tokens, every.mask, strict=True)
    ]


@pytest.mark.parametrize("text", PLAIN)
@pytest.mark.parametrize(("kind", "eos"), [("markov", False), ("markov", True), ("history", True), ("counts", False)])
def test_a_checker_pays_what_plain_python_says(text, kind, eos):
    pair = build_world(kind, 3, 4, eos=eos, parameters=2).pair
    lifted = task(pair, text, 4).pair
    reward = task(pair, text, 4).reward
    every = sequences(lifted.automaton, 4)
    assert_close(earned(reward, lifted, every), [float(PLAIN[text](y)) for y in read(every, lifted.automaton)])


def test_every_checker_is_tested():
    tested = {name for name in CHECKERS if any(name in text for text in PLAIN)}
    assert tested | {"context"} == set(CHECKERS)


@pytest.mark.parametrize("eos", [False, True])
def test_a_context_is_paid_when_the_sequence_stops_there(eos):
    pair = build_world("markov", 3, 4, eos=eos).pair
    found = task(pair, "context(1)", 4)
    every = sequences(found.pair.automaton, 4)
    # the context of this automaton is the last token
    assert_close(earned(found.reward, found.pair, every), [float(y[-1:] == [1]) for y in read(every, pair.automaton)])


@given(worlds())
def test_the_lifted_pair_is_the_old_one(world):
    pair, length = world.pair, world.length
    lifted, _ = lift(pair, {"r": parse_reward("contains(0,1)+parity(1)", pair.automaton)})
    old, new = sequences(pair.automaton, length), sequences(lifted.automaton, length)
    for a, b in (
        (pair.policy.log_probs, lifted.policy.log_probs),
        (pair.reference, lifted.reference),
        (pair.sampler, lifted.sampler),
    ):
        assert_close(log_probability(new, b), log_probability(old, a))
    assert lifted.policy.parameters == pair.policy.parameters
    assert_close(exact.kl(lifted, [length]), exact.kl(pair, [length]))
    assert_close(exact.true_gradient(lifted, [length]), exact.true_gradient(pair, [length]))


def test_the_product_holds_only_what_sequences_reach():
    pair = build_world("markov", 2, 4).pair
    # two last tokens x three states, less (last token 0, one matched), (1, none matched) and (1, all matched at once)
    assert task(pair, "contains(1,0)", 4).pair.automaton.contexts == 4
    assert task(pair, "none", 4).pair.automaton.contexts == pair.automaton.contexts


def test_verifiable_is_zero_or_one_for_every_sequence():
    pair = build_world("markov", 3, 4, eos=True).pair
    verdicts = {text: task(pair, text, 4).verifiable for text in ("contains(0,1)", "each(1)", "2*ends(1)", "none")}
    assert verdicts == {"contains(0,1)": True, "each(1)": False, "2*ends(1)": False, "none": True}


@given(st.sampled_from(sorted(PLAIN)), st.booleans())
def test_verifiable_agrees_with_the_sequences(text, eos):
    found = task(build_world("markov", 3, 3, eos=eos).pair, text, 3)
    values = earned(found.reward, found.pair, sequences(found.pair.automaton, 3))
    assert not found.verifiable or set(values) <= {0.0, 1.0}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("contain(1)", "did you mean 'contains'"),
        ("contains()", "has 0 number"),
        ("contains(7)", "there is no token 7"),
        ("parity(0,1)", r"write parity\(token\)"),
        ("count(0,0)", "from 1 to 1000"),
        ("context(9)", "not a context"),
        ("1.2.3*each(0)", "not a finite number"),
        ("each(0", "is no reward"),
        ("", "is no reward"),
    ],
)
def test_a_wrong_reward_is_named(text, says):
    automaton = automata.markov(3, 1, start=(0,))
    with pytest.raises(ValueError, match=says):
        parse_reward(text, automaton)


def test_a_task_refuses_what_does_not_fit():
    pair = build_world("markov", 2, 3).pair
    found = task(pair, "ends(1)", 3)
    with pytest.raises(ValueError, match="edge rewards must be finite"):
        replace(found, reward=Reward(np.zeros((1, 2)), found.reward.terminal))
    with pytest.raises(ValueError, match="horizon"):
        task(build_world("history", 2, 3).pair, "ends(1)", 4)
    with pytest.raises(ValueError, match="older copy"):
        task(build_world("markov", 2, 3, off=True).pair, "ends(1)", 3)


def test_too_large_a_product_is_refused(monkeypatch):
    monkeypatch.setattr("klgrad.synth.rewards.MAX_CONTEXTS", 10)
    automaton = automata.markov(2, 1)
    pair = PolicyPair(automaton, tabular(automaton, np.zeros((3, 2))), log_softmax(np.zeros((3, 2))))
    with pytest.raises(ValueError, match="more than 10 contexts"):
        task(pair, "count(0,9)", 3)


def test_a_task_is_built_by_hand_too():
    automaton = automata.markov(2, 1, start=(0,))
    pair = PolicyPair(automaton, tabular(automaton, np.zeros((2, 2))), log_softmax(np.zeros((2, 2))))
    reward = Reward(np.array([[0.0, 1.0], [0.0, 0.5]]), np.array([0.0, 2.0]))
    found = Task(pair, reward, reward, 2)
    # tokens 00, 01, 10, 11 from context 0
    assert earned(found.reward, pair, sequences(automaton, 2)).tolist() == [0.0, 3.0, 1.0, 3.5]
