"""Random models small enough to enumerate, and the fixed ones that tables are checked on.

``worlds()`` draws a pair on any kind of automaton; ``configurations()`` draws from every option of the grammar;
``grid()`` lists them all. Hypothesis shrinks sizes and options; the numbers come from a seeded generator.
"""

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from hypothesis import strategies as st

from klgrad.synth import automata, enumeration
from klgrad.synth.configurations import CREDITS, RATIOS, parse
from klgrad.synth.estimators import ESTIMATORS, Estimator, estimator
from klgrad.synth.policies import Policy, PolicyPair, linear, log_softmax, tabular

KINDS = ("markov", "markov2", "positional", "history", "counts", "counts-last")
CAP = 300  # sequences that one example may enumerate
BASELINES = ("", "b=0.7", "mean-baseline", "optimal-baseline", "optimal-baseline-per-coordinate")


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: arrays have no truth value
class World:
    """A pair, the longest length it is tested at, and the features of its policy (``None`` if tabular)."""

    pair: PolicyPair
    length: int
    features: np.ndarray | None

    @property
    def on_policy(self) -> PolicyPair:
        return replace(self.pair, behaviour=None)


def automaton_of(kind, vocabulary, length, eos):
    """An automaton of that kind; ``start`` is fixed for first-order Markov, so both spellings are met."""
    if kind == "markov":
        return automata.markov(vocabulary, 1, start=(0,), eos=eos)
    if kind == "markov2":
        return automata.markov(vocabulary, 2, eos=eos)
    if kind == "positional":
        return automata.positional(vocabulary, length, eos=eos)
    if kind == "history":
        return automata.history(vocabulary, length, eos=eos)
    return automata.counts(vocabulary, length, last=kind == "counts-last", eos=eos)


def build_world(kind, vocabulary, length, *, eos=False, off=False, parameters=0, scale=1.0, seed=0):
    """A world from plain numbers: ``parameters`` 0 gives a tabular policy, else shared linear features."""
    rng = np.random.default_rng(seed)
    automaton = automaton_of(kind, vocabulary, length, eos)
    shape = automaton.next_context.shape
    features = None
    if parameters:
        features = rng.normal(size=(*shape, parameters))
        policy = linear(automaton, features, scale * rng.normal(size=parameters))
    else:
        policy = tabular(automaton, scale * rng.normal(size=shape))
    reference = log_softmax(scale * rng.normal(size=shape))
    behaviour = log_softmax(policy.log_probs + 0.5 * scale * rng.normal(size=shape)) if off else None
    return World(PolicyPair(automaton, policy, reference, behaviour), length, features)


@st.composite
def worlds(draw, *, off=None, cap=CAP, longest=6):
    """Random worlds: V 2-4, T to 6, at most ``cap`` sequences, d to 8, with and without an end."""
    kind = draw(st.sampled_from(KINDS))
    vocabulary = draw(st.integers(2, 4))
    most = max(t for t in range(1, longest + 1) if vocabulary**t <= cap)
    length, eos = draw(st.integers(1, most)), draw(st.booleans())
    contexts = automaton_of(kind, vocabulary, length, eos).contexts - eos
    small = contexts * vocabulary <= 8
    parameters = draw(st.integers(0 if small else 1, 8))
    # logits of this scale whatever d: log-ratios of 20 would leave float64 no digits for variances of baselines
    scale, seed = draw(st.sampled_from((0.3, 1.0, 2.0))), draw(st.integers(0, 2**16))
    off_policy = draw(st.booleans()) if off is None else off
    return build_world(
        kind,
        vocabulary,
        length,
        eos=eos,
        off=off_policy,
        parameters=parameters,
        scale=scale / max(parameters, 1) ** 0.5,
        seed=seed,
    )


def thinned(world, seed, share=0.6):
    """The world with exact zeros: each policy keeps about that share of its tokens, and more where it must.

    What the sampler emits the policy emits too, and what the policy emits the reference; the reverse need not be.
    """
    pair, rng = world.pair, np.random.default_rng(seed)
    contexts, vocabulary = pair.reference.shape
    sampled, emitted, known = rng.random((3, contexts, vocabulary)) < share
    sampled[np.arange(contexts), rng.integers(vocabulary, size=contexts)] = True  # no row without a token
    emitted |= sampled
    known |= emitted
    log_probs, reference, behaviour = (
        None if table is None else log_softmax(np.where(kept, table, -np.inf))
        for table, kept in ((pair.policy.log_probs, emitted), (pair.reference, known), (pair.behaviour, sampled))
    )
    scores = pair.policy.scores  # as features: the softmax over fewer tokens has another mean
    scores = scores - np.einsum("sv,svd->sd", np.exp(log_probs), scores)[:, None, :]
    policy = Policy(log_probs, scores, pair.policy.theta)
    return World(PolicyPair(pair.automaton, policy, reference, behaviour), world.length, None)


@st.composite
def thinned_worlds(draw, *, off=None, cap=CAP, longest=6):
    """``worlds()`` in which sampler, policy and reference each lack tokens."""
    return thinned(draw(worlds(off=off, cap=cap, longest=longest)), draw(st.integers(0, 2**16)))


def _join(head, *options):
    return "+".join([head, *(option for option in options if option)])


@st.composite
def configurations(draw, *, baselines=BASELINES, names=None):
    """A random configuration over every option of the grammar."""
    name = draw(st.sampled_from(names or sorted(ESTIMATORS)))
    placement = draw(st.sampled_from(("reward", "loss", "both")))
    ratio = draw(st.sampled_from(("", *(f"{r}-ratio" for r in RATIOS[1:]))))
    aggregation = draw(st.sampled_from(("", "divide=3", "length-mean")))
    if placement == "loss":
        return parse(_join(f"{name}-in-loss", ratio, aggregation))
    credit = draw(st.sampled_from(("", *CREDITS[1:])))
    frozen = "" if ESTIMATORS[name].full else draw(st.sampled_from(("", "rollout-value")))
    return parse(_join(f"{name}-in-{placement}", credit, ratio, draw(st.sampled_from(baselines)), aggregation, frozen))


def truncated_k3(bound, name="truncated-k3"):
    """An estimator of one's own: k3 of a clipped log-ratio, its functions made anew at each call."""
    k3 = estimator("k3")

    def slope(delta):
        return np.where(np.abs(delta) <= bound, k3.slope(delta), 0.0)

    return Estimator(name, lambda delta: k3.value(np.clip(delta, -bound, bound)), slope, False, False, True)


@lru_cache
def grid(name, baselines=BASELINES, aggregations=("", "divide=3", "length-mean")):
    """Every configuration of one estimator."""
    ratios = ("", *(f"{r}-ratio" for r in RATIOS[1:]))
    frozen = ("",) if ESTIMATORS[name].full else ("", "rollout-value")
    losses = [_join(f"{name}-in-loss", *o) for o in itertools.product(ratios, aggregations)]
    credits = ("", *CREDITS[1:])
    options = itertools.product(credits, ratios, baselines, aggregations, frozen)
    rewards = [_join(f"{name}-in-{p}", *o) for o in options for p in ("reward", "both")]
    return tuple(parse(text) for text in losses + rewards)


class Plain:
    """The plain twin's X (b = 0), Y and C for one world, kept: a baseline is linear in them, g = X - b Y."""

    def __init__(self, world, length=None):
        self.pair, self.length = world.pair, length or world.length
        self._kept = {}

    def parts(self, configuration):
        bare = replace(configuration, baseline="none", baseline_value=0.0)
        if bare not in self._kept:
            zero, one = (enumeration.enumerate_configuration(bare, self.pair, self.length, b) for b in (0.0, 1.0))
            self._kept[bare] = zero.probability, zero.gradient, zero.gradient - one.gradient, zero.value
        return self._kept[bare]

    def baseline(self, configuration):
        """b from its definition: the constants that the names stand for."""
        p, x, y, c = self.parts(configuration)
        xc, yc = x - p @ x, y - p @ y
        cross, var = p @ (xc * yc), p @ (yc * yc)
        return {
            "none": lambda: 0.0,
            "constant": lambda: configuration.baseline_value,
            "mean": lambda: p @ c,
            "optimal": lambda: cross.sum() / var.sum() if var.sum() > 1e-12 else 0.0,
            "optimal-per-coordinate": lambda: np.divide(cross, var, out=np.zeros_like(var), where=var > 1e-12),
        }[configuration.baseline]()

    def moments(self, configuration):
        """Mean ``[d]`` and covariance ``[d, d]`` of one sequence's gradient."""
        p, x, y, _ = self.parts(configuration)
        g = x - self.baseline(configuration) * y
        centred = g - p @ g
        return p @ g, (p[:, None] * centred).T @ centred


def assert_close(actual, expected, tol=1e-10):
    """Agreement to ``tol`` relative to the largest entry (or to 1): sums cancel, so entries cannot be asked alone."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    error = np.abs(actual - expected).max(initial=0.0)
    assert error <= tol * max(1.0, np.abs(expected).max(initial=0.0)), error


def finite_difference(function, theta, step=1e-5):
    """``[d]`` central differences of a scalar function."""
    return np.array(
        [(function(theta + step * e) - function(theta - step * e)) / (2 * step) for e in np.eye(len(theta))]
    )
