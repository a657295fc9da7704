"""Models at the edge of double precision, for the fuzz suite: what a user could write down and nobody should.

Probabilities down to 1e-300 and exact zeros, contexts with one certain token, log-ratios of +-700, one token, one
context, ends that come at once or never.
"""

import numpy as np
from hypothesis import strategies as st

from klgrad.synth import automata
from klgrad.synth.policies import PolicyPair, _difference, linear, log_softmax, tabular

LENGTHS = (1, 2, 3, 7)
LOGITS = (0.0, 0.0, 1.0, -1.0, 1e-9, 5.0, -36.8, 40.0, -690.0, 700.0, -700.0, -np.inf)
MILD = (0.0, 0.0, 1.0, -1.0, 0.3, -2.0, -np.inf)  # of whole models: nothing overflows, so nothing may be missing


@st.composite
def automata_of_any_kind(draw):
    """Up to four tokens and a few contexts; the longest length it can describe."""
    vocabulary, eos = draw(st.integers(1, 4)), draw(st.booleans())
    eos = eos and vocabulary > 1
    length = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(("markov", "positional", "history", "counts", "table")))
    if kind == "markov":
        return automata.markov(vocabulary, draw(st.integers(0, 2)), eos=eos), 7
    if kind == "positional":
        return automata.positional(vocabulary, length, eos=eos), length
    if kind == "history":
        return automata.history(vocabulary, min(length, 3), eos=eos), min(length, 3)
    if kind == "counts":
        return automata.counts(vocabulary, length, last=draw(st.booleans()), eos=eos), length
    contexts = draw(st.integers(1 + eos, 4))  # any successors, unreachable contexts and an early end included
    rows = st.lists(st.integers(0, contexts - 1), min_size=vocabulary, max_size=vocabulary)
    table = draw(st.lists(rows, min_size=contexts, max_size=contexts))
    return automata.Automaton(np.array(table), 0, contexts - 1 if eos else -1), 7


def logits(draw, shape, among=LOGITS):
    """``[S, V]`` logits of these, at least one possible token in each row."""
    flat = draw(st.lists(st.sampled_from(among), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    found = np.array(flat).reshape(shape)
    found[(found == -np.inf).all(axis=1), 0] = 0.0
    return found


@st.composite
def extreme_pairs(draw):
    """``(pair, longest)``; supports made to agree, as a pair demands. Some are not extreme at all."""
    automaton, longest = draw(automata_of_any_kind())
    shape = automaton.next_context.shape
    among = draw(st.sampled_from((LOGITS, MILD)))
    own = logits(draw, shape, among)
    if draw(st.booleans()):
        own = np.where(np.isinf(own), -30.0, own)
        size = draw(st.integers(1, 3))
        features = np.random.default_rng(draw(st.integers(0, 99))).normal(size=(*shape, size))
        features[..., 0] = own
        policy = linear(automaton, features, np.append(1.0, np.zeros(size - 1)))
    else:
        policy = tabular(automaton, own)
    possible = policy.log_probs > -np.inf
    reference = logits(draw, shape, among)
    reference = log_softmax(np.where(possible & np.isinf(reference), 0.0, reference))
    behaviour = None
    if draw(st.booleans()):
        behaviour = np.where(possible, logits(draw, shape, among), -np.inf)
        none = (behaviour == -np.inf).all(axis=1)
        behaviour[none] = policy.log_probs[none]
        behaviour = log_softmax(behaviour)
    return PolicyPair(automaton, policy, reference, behaviour), longest


def log_size(pair, length):
    """A bound on the log of anything that is summed: squares of sums of values and weights along a sequence.

    Below 700 nothing overflows, so nothing may be infinite or NaN.
    """
    alive = pair.automaton.alive
    emitted = (pair.sampler > -np.inf) & alive[:, None]
    ratio = np.abs(np.where(emitted, pair.log_ratio, 0.0)).max()
    rho = np.abs(np.where(emitted, _difference(pair.policy.log_probs, pair.sampler), 0.0)).max()
    scores = np.log1p(np.abs(pair.policy.scores[alive]).max())
    return 2 * (2 * ratio + rho * (length + 1) + scores + 2 * np.log(length + 1)) + 40
