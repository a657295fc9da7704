"""Context automata: successors, ends, horizons, and what they refuse."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import KINDS, automaton_of

from klgrad.synth import automata
from klgrad.synth.automata import END, Automaton


def walk(automaton, tokens):
    context = automaton.start
    for token in tokens:
        context = automaton.next_context[context, token]
    return automaton.states[context]


@given(st.lists(st.integers(0, 2), max_size=4), st.integers(0, 3))
def test_markov_remembers_the_last_tokens(tokens, order):
    expected = tuple(tokens[-order:]) if order else ()
    assert walk(automata.markov(3, order), tokens) == expected


@given(st.lists(st.integers(0, 2), max_size=4))
def test_history_remembers_everything(tokens):
    assert walk(automata.history(3, 5), tokens) == tuple(tokens)


@given(st.lists(st.integers(0, 2), max_size=4))
def test_positional_remembers_how_many(tokens):
    assert walk(automata.positional(3, 5), tokens) == len(tokens)


@given(st.lists(st.integers(0, 2), max_size=4))
def test_counts_remember_how_often_and_the_last(tokens):
    tally = tuple(tokens.count(v) for v in range(3))
    assert walk(automata.counts(3, 5), tokens) == tally
    assert walk(automata.counts(3, 5, last=True), tokens) == (tally, tokens[-1] if tokens else -1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_token_ends_and_the_end_absorbs(kind):
    automaton = automaton_of(kind, 3, 4, True)
    assert automaton.states[automaton.end] == END
    assert (automaton.next_context[automaton.alive, 2] == automaton.end).all()
    assert (automaton.next_context[automaton.end] == automaton.end).all()
    assert not (automaton.next_context[automaton.alive, :2] == automaton.end).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eos", [False, True])
def test_every_context_can_be_reached(kind, eos):
    automaton = automaton_of(kind, 3, 4, eos)
    assert set(automaton.next_context.ravel()) | {automaton.start} == set(range(automaton.contexts))
    assert len(automaton.states) == automaton.contexts == automaton.alive.sum() + eos


@pytest.mark.parametrize(
    ("automaton", "contexts"),
    [
        (automata.markov(3, 0), 1),
        (automata.markov(3, 1), 4),
        (automata.markov(3, 1, start=(0,)), 3),
        (automata.markov(3, 2), 13),
        (automata.markov(3, 2, start=(0, 0)), 9),
        (automata.markov(3, 1, eos=True), 4),
        (automata.history(2, 4), 15),
        (automata.positional(5, 4), 4),
        (automata.counts(2, 4), 10),
        (automata.history(2, 1), 1),
    ],
)
def test_numbers_of_contexts(automaton, contexts):
    assert automaton.contexts == contexts


def test_the_given_end_row_is_made_absorbing_and_the_table_read_only():
    given_table = np.array([[0, 1], [0, 0]])
    automaton = Automaton(given_table, 0, 1)
    assert automaton.next_context[1].tolist() == [1, 1]
    assert given_table[1].tolist() == [0, 0]
    with pytest.raises(ValueError, match="read-only"):
        automaton.next_context[0, 0] = 1


@pytest.mark.parametrize(
    ("table", "start", "end", "message"),
    [
        ([0, 1], 0, -1, r"shape \[S, V\]; got \(2,\)"),
        (np.zeros((0, 2), int), 0, -1, "got \\(0, 2\\)"),
        ([[0.0, 1.0]], 0, -1, "integers; got dtype float64"),
        ([[0, 1]], 0, -1, r"next_context\[0, 1\] = 1 is not a context: there are contexts 0 to 0"),
        ([[0, -1]], 0, -1, r"next_context\[0, 1\] = -1"),
        ([[0, 0]], 1, -1, "start = 1 is not a context"),
        ([[0, 0]], -1, -1, "start = -1 is not a context"),
        ([[0, 0]], 0, 1, "end = 1 is not a context: give -1 for none"),
        ([[0, 0]], 0, 0, "start and end are both context 0"),
    ],
)
def test_bad_automata_are_refused_by_name(table, start, end, message):
    with pytest.raises(ValueError, match=message):
        Automaton(np.array(table), start, end)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: automata.markov(2, -1), "order -1 is negative"),
        (lambda: automata.markov(2, 1, start=(2,)), r"start \(2,\) must be 1 tokens below 2"),
        (lambda: automata.markov(2, 1, start=(1,), eos=True), "tokens below 1"),
        (lambda: automata.markov(2, 2, start=(0,)), "must be 2 tokens"),
        (lambda: automata.markov(1, 1, eos=True), "vocabulary 1 is too small: at least 2"),
        (lambda: automata.markov(0, 1), "vocabulary 0 is too small: at least 1"),
        (lambda: automata.history(2, 0), "length 0 is too short"),
    ],
)
def test_bad_arguments_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_too_many_contexts_are_refused(monkeypatch):
    monkeypatch.setattr(automata, "MAX_CONTEXTS", 14)
    assert automata.history(2, 3).contexts == 7
    with pytest.raises(ValueError, match="more than 14 contexts"):
        automata.history(2, 4)


def test_lengths_are_checked_against_the_horizon():
    automata.history(2, 3).check_length(3)
    automata.markov(2, 1).check_length(10**6)
    with pytest.raises(ValueError, match="length 4 is beyond this automaton's horizon 3: build it with length=4"):
        automata.history(2, 3).check_length(4)
    with pytest.raises(ValueError, match="length 0 is too short"):
        automata.markov(2, 1).check_length(0)


def test_contexts_are_named_in_messages():
    assert automata.markov(2, 1).describe(1) == "1 (0,)"
    assert Automaton(np.array([[0, 0]])).describe(0) == "0"
