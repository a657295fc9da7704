"""Tiny worlds for cases: one token, two tokens, batches written by hand, and what a function gives on them."""

import numpy as np

from klgrad.analysis.checking.measuring import group_gradient, sequence_gradients
from klgrad.analysis.checking.models import model
from klgrad.analysis.checking.probing import probe
from klgrad.analysis.checking.subject import function_subject
from klgrad.synth.automata import history
from klgrad.synth.enumeration import Batch
from klgrad.synth.policies import PolicyPair, linear, log_of_probs, log_softmax, tabular


def logit(p):
    return np.log(p) - np.log1p(-p)


def one_token(pi, q, mu=None):
    """One binary token, one logit: the probabilities of y = 1 under policy, reference and sampler."""
    automaton = history(2, 1)
    features = np.zeros((*automaton.next_context.shape, 1))
    features[:, 1] = 1.0

    def table(p):
        return np.tile(np.log([1 - p, p]), (automaton.contexts, 1))

    return PolicyPair(
        automaton, linear(automaton, features, np.array([logit(pi)])), table(q), None if mu is None else table(mu)
    )


def two_tokens():
    """Two binary tokens, logits (a, b0, b1): pi has a = b0 = 0 and P(y2 = 1 | y1 = 1) = 0.9; the reference is 0."""
    automaton = history(2, 2)
    shape = automaton.next_context.shape
    features = np.zeros((*shape, 3))
    start = automaton.start
    for row, context in enumerate((start, *automaton.next_context[start])):
        features[context, 1, row] = 1.0
    policy = linear(automaton, features, np.array([0.0, 0.0, logit(0.9)]))
    return PolicyPair(automaton, policy, log_softmax(np.zeros(shape)))


def categorical(pi, q, mu=None):
    """One token with these probabilities; one free logit for each."""
    automaton = history(len(pi), 1)

    def table(p):
        return log_of_probs(np.tile(p, (automaton.contexts, 1)))

    return PolicyPair(automaton, tabular(automaton, table(pi)), table(q), None if mu is None else table(mu))


def by_hand(log_probs, reference, mask=None, behaviour=None, vocabulary=2):
    """A batch of given log-probs ``[B, T]``; its full log-probs say nothing."""
    log_probs, reference = np.array(log_probs, float), np.array(reference, float)
    mask = np.ones(log_probs.shape, bool) if mask is None else np.array(mask, bool)
    full = np.zeros((*log_probs.shape, vocabulary))
    tokens = np.zeros(log_probs.shape, np.int64)
    return Batch(
        tokens, mask, log_probs, reference, log_probs if behaviour is None else np.array(behaviour, float), full, full
    )


def each_gradient(function, placement, pair, length=1, **options):
    """``(probability [M], gradient [M, d])`` of every sequence."""
    m = model(pair, length)
    return m.probability, sequence_gradients(function_subject(function, probe(), **options), placement, m)


def expected_gradient(function, placement, pair, length=1, **options):
    probability, gradient = each_gradient(function, placement, pair, length, **options)
    return probability @ gradient


def expected_group_gradient(function, pair, length, size):
    """Over all groups of that many sequences."""
    return group_gradient(function_subject(function, probe()), "loss", model(pair, length), size)


def expected_value(function, pair, length=1, **options):
    """The mean and the variance of the value over all sequences."""
    m = model(pair, length)
    value = function_subject(function, probe(), **options).evaluate(m.batch, differentiate=False).by_sequence
    mean = float(m.probability @ value)
    return mean, float(m.probability @ (value - mean) ** 2)


def value_of(function, batch, **options):
    """What it returns on a batch."""
    return function_subject(function, probe(), **options).evaluate(batch, differentiate=False).value
