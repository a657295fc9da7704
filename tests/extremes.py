"""Models at the edge of double precision, for the fuzz suite: what a user could write down and nobody should.

Probabilities down to 1e-300 and exact zeros, contexts with one certain token, log-ratios of +-700, one token, one
context, ends that come at once or never; and pairs on which digits are easily lost, near each other or saturated.
"""

from dataclasses import dataclass

import mpmath
import numpy as np
from hypothesis import strategies as st
from strategies import truncated_k3

from klgrad.analysis.precise import PrecisePair
from klgrad.synth import automata
from klgrad.synth.estimators import Estimator, estimator
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


# ---------------------------------------------------------------------------------------- where digits are easily lost


@dataclass(frozen=True)
class Logits:
    """A pair by its logits, from which it is made in double precision and in any other.

    ``behaviour`` is None on-policy.
    """

    automaton: automata.Automaton
    policy: np.ndarray
    reference: np.ndarray
    behaviour: np.ndarray | None
    length: int

    def pair(self):
        """In double precision."""
        behaviour = None if self.behaviour is None else log_softmax(self.behaviour)
        return PolicyPair(self.automaton, tabular(self.automaton, self.policy), log_softmax(self.reference), behaviour)

    def twin(self):
        """In as many digits as mpmath works with: all sequences, by the formula."""
        return PrecisePair(self.automaton, self.policy, self.reference, self.behaviour)


@st.composite
def _small(draw):
    """An automaton with few sequences, a length, and a generator for what need not shrink."""
    vocabulary, eos = draw(st.sampled_from(((2, False), (2, True), (3, True), (3, False))))
    automaton = automata.markov(vocabulary, draw(st.integers(0, 1)), eos=eos)
    return (
        automaton,
        draw(st.integers(1, 3 if vocabulary == 2 else 2)),
        np.random.default_rng(draw(st.integers(0, 999))),
    )


def _behaviour(draw, policy, rng, kinds=("none", "other", "policy")):
    """Of another policy not far away, or by name the policy itself, which is off-policy with every ratio 1."""
    kind = draw(st.sampled_from(kinds))
    return None if kind == "none" else policy + (kind == "other") * 0.5 * rng.normal(size=policy.shape)


@st.composite
def near_pairs(draw):
    """Policy and reference 1e-12 to 1e-2 apart, each of whose logits is moved by 0.5 to 2 of that."""
    automaton, length, rng = draw(_small())
    distance = 10.0 ** draw(st.integers(-12, -2))
    policy = draw(st.sampled_from((0.3, 1.0, 5.0))) * rng.normal(size=automaton.next_context.shape)
    moved = rng.uniform(0.5, 2.0, size=policy.shape) * rng.choice((-1.0, 1.0), size=policy.shape)
    return Logits(automaton, policy, policy + distance * moved, _behaviour(draw, policy, rng), length)


@st.composite
def saturated_pairs(draw):
    """Logits of +-20 to +-40 in the policy, the reference, or both; a token of probability e^-80 is the rarest."""
    automaton, length, rng = draw(_small())
    shape = automaton.next_context.shape
    size = draw(st.sampled_from((20.0, 25.0, 30.0, 36.0, 40.0)))
    policy, reference = rng.normal(size=(2, *shape))
    which = draw(st.sampled_from(("policy", "reference", "both", "both alike")))
    if which != "reference":
        policy = policy + size * rng.choice((-1.0, 1.0), size=shape)
    if which in ("reference", "both"):
        reference = reference + size * rng.choice((-1.0, 1.0), size=shape)
    if which == "both alike":
        reference = policy + reference
    return Logits(automaton, policy, reference, _behaviour(draw, policy, rng), length)


def _mixture(a, b):
    """a k3 + b k2, and its slope, in whichever of numpy and mpmath the functions are of."""
    k3, k2 = estimator("k3"), estimator("k2")
    ours = Estimator(
        f"{a:g} k3 + {b:g} k2",
        lambda delta: a * k3.value(delta) + b * k2.value(delta),
        lambda delta: a * k3.slope(delta) + b * delta,
        False, False, True,
    )  # fmt: skip
    return ours, (
        lambda delta, _=1: a * (mpmath.exp(-delta) - 1 + delta) + b * delta**2 / 2,
        lambda delta, _=1: a * (1 - mpmath.exp(-delta)) + b * delta,
    )


def _truncated(bound):
    """k3 where the log-ratio is within the bound, and where it is not the value there and no slope."""
    ours = truncated_k3(bound, f"truncated-k3({bound:g})")
    held = lambda delta: max(-bound, min(bound, delta))  # noqa: E731
    return ours, (
        lambda delta, _=1: mpmath.exp(-held(delta)) - 1 + held(delta),
        lambda delta, _=1: 1 - mpmath.exp(-delta) if abs(delta) <= bound else mpmath.mpf(0),
    )


# Estimators of one's own, with no closed form of value plus slope, and their functions in mpmath: k3 itself under
# another name, one whose value and slope add, and one that is cut off
OWN = (_mixture(1.0, 0.0), _mixture(0.25, 3.0), _truncated(2.5))
