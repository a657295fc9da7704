"""Where training ends: the KL-regularised optimum, and the fixed points of the biased gradients on a tree.

The policy is free at every prefix (one logit for every token after every prefix), the reference is the pair's, and
token v of V is worth v / (V - 1), with beta = 0.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from klgrad.analysis.derivations.inputs import EPS
from klgrad.analysis.derivations.model import Model
from klgrad.analysis.derivations.sequences import check_size
from klgrad.analysis.derivations.steps import Comparison, Derivation, Step
from klgrad.analysis.derivations.terms import PAPER
from klgrad.synth.automata import history
from klgrad.synth.exact import optimum as soft_bellman
from klgrad.synth.policies import PolicyPair, tabular

if TYPE_CHECKING:
    from jaxtyping import Float

BETA = 0.5
# (q, returns) -> the policy, its value, and how steeply its log-probs follow the returns; all but the value [V]
Rule = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, float, np.ndarray]]


def _token_rewards(vocabulary: int) -> Float[np.ndarray, " V"]:
    return np.arange(vocabulary) / (vocabulary - 1)


def _returns(m: Model) -> Float[np.ndarray, " M"]:
    """``[M]`` R(y)."""
    rewards = np.broadcast_to(_token_rewards(m.pair.automaton.vocabulary), m.log_policy.shape)
    return np.asarray(m.taken(rewards).sum(axis=1))


def _objective(m: Model) -> float:
    """E[R] - beta KL, as a plain sum."""
    returns, penalty = _returns(m), BETA * m.delta
    return float(m.mean(returns - penalty.sum(axis=1), returns + np.abs(penalty).sum(axis=1)))


# ------------------------------------------------------------------------------------- policies free at every prefix


def _soft(q: np.ndarray, returns: np.ndarray) -> tuple[np.ndarray, float, np.ndarray]:
    """pi* of one prefix and its soft value."""
    value = BETA * np.log(q @ np.exp(returns / BETA))
    return q * np.exp((returns - value) / BETA), float(value), np.full_like(q, 1 / BETA)


def _greedy_backup(q: np.ndarray, returns: np.ndarray) -> tuple[np.ndarray, float, np.ndarray]:
    """The fixed point of k2 in the loss: exponential in the plain returns."""
    tilted = q * np.exp((returns - returns.max()) / BETA)
    policy = tilted / tilted.sum()
    return policy, float(policy @ returns), np.full_like(q, 1 / BETA)


def _hyperbolic(q: np.ndarray, returns: np.ndarray) -> tuple[np.ndarray, float, np.ndarray]:
    """The fixed point of k3 in the loss: pi = beta q / (V + beta - Q), with V + beta found by Newton's method.

    Unknown is how far V + beta lies above the largest Q, which keeps its digits where the reference all but lacks
    that token. The sum of beta q / (above + gap) is convex and falls, so Newton from the left of the root climbs to it.
    """
    best = int(np.argmax(np.where(q > 0, returns, -np.inf)))
    gaps = np.where(q > 0, returns[best] - returns, 1.0)
    above = BETA * q[best]
    for _ in range(200):
        share = BETA * q / (above + gaps)
        step = (share.sum() - 1) / (share / (above + gaps)).sum()
        above += step
        if abs(step) <= EPS * above:
            break
    policy = BETA * q / (above + gaps)
    policy /= policy.sum()
    steep = np.where(gaps > 0, 1 / (above + gaps), 0.0)
    steep[gaps == 0] = policy @ steep / policy[best]  # it takes what the others lose
    return policy, float(policy @ returns), steep


@dataclass(frozen=True, eq=False)
class Tree:
    """A policy free at every prefix, with its model.

    Args:
        model: the policy's own.
        off: ``[S, V]`` how far rounding may have moved its log-probs.
    """

    model: Model
    off: Float[np.ndarray, "S V"]

    def pull(self, m: Model) -> Float[np.ndarray, " d"]:
        """``[d]`` gradient of E[R]."""
        return m.mean(_returns(m)[:, None] * m.score, _returns(m)[:, None] * m.score_size)


@lru_cache(maxsize=8)
def _tree(pair: PolicyPair, length: int, rule: Rule) -> Tree:
    """Backward induction over prefixes with one rule for the policy at a prefix."""
    eos = pair.automaton.end >= 0
    tree = history(pair.automaton.vocabulary, length, eos=eos)
    at = {(): pair.automaton.start}
    for prefix in tree.states[1 : tree.contexts - eos]:
        at[prefix] = int(pair.automaton.next_context[at[prefix[:-1]], prefix[-1]])
    context = list(at.values())
    reference = np.exp(pair.reference[context])
    rewards, values = _token_rewards(tree.vocabulary), np.zeros(tree.contexts)
    policy = np.full(tree.next_context.shape, 1 / tree.vocabulary)
    off, off_values = np.zeros_like(policy), np.zeros(tree.contexts)
    for node in reversed(range(len(context))):
        more = float(len(tree.states[node]) < length - 1)
        returns = rewards + more * values[tree.next_context[node]]
        policy[node], values[node], steep = rule(reference[node], returns)
        off_returns = more * off_values[tree.next_context[node]] + EPS * (1 + returns)
        off[node] = 2 * off_returns.max() * steep + EPS * (tree.vocabulary + 6)
        off_values[node] = policy[node] @ (off_returns + off[node] * returns) + EPS * tree.vocabulary * values[node]
    log_reference = np.zeros(tree.next_context.shape)
    log_reference[: len(context)] = pair.reference[context]
    with np.errstate(divide="ignore"):
        logits = np.log(policy)
    return Tree(Model(PolicyPair(tree, tabular(tree, logits), log_reference, name=pair.name), length), off)


def tree_of(m: Model, rule: Rule) -> Tree:
    """The tree of the model's pair under a rule.

    Raises:
        ValueError: when there are too many prefixes.
    """
    prefixes = sum(m.pair.automaton.vocabulary**t for t in range(m.length))
    check_size(len(m.p), m.length, prefixes * m.pair.automaton.vocabulary)
    return _tree(m.pair, m.length, rule)


def _log_z(m: Model) -> float:
    log_q, exponent = m.log_prob(m.log_reference), _returns(m) / BETA
    weights = np.exp(log_q + exponent)
    m.note(weights @ (1 + np.abs(log_q) + exponent) / weights.sum())
    return float(np.log(weights.sum()))


def _kl_to_optimum(m: Model) -> float:
    """KL(pi || pi*) as a plain sum, pi* = q exp(R / beta) / Z."""
    own, reference, tilt = m.log_prob(m.log_policy), m.log_prob(m.log_reference), _returns(m) / BETA
    log_z = _log_z(m)
    return float(m.mean(own - (reference + tilt - log_z), np.abs(own) + np.abs(reference) + tilt + abs(log_z)))


def _soft_objective(m: Model) -> float:
    rewards = np.broadcast_to(_token_rewards(m.pair.automaton.vocabulary), m.log_policy.shape)
    found = soft_bellman(m.pair, rewards, BETA, m.length).objective
    m.note(m.length * (1 + abs(found)), BETA * m.length * m.tables.lack_mass)
    return found


def _penalty(configuration: str, rule: Rule) -> Callable[[Model], Float[np.ndarray, " d"]]:
    return lambda m: BETA * m.on(tree_of(m, rule).model, lambda tree: tree.engine(configuration))


def _pull(rule: Rule) -> Callable[[Model], Float[np.ndarray, " d"]]:
    """The gradient of E[R]; the tree's policy solves its equation to rounding only, and that is noted too."""

    def side(m: Model) -> Float[np.ndarray, " d"]:
        tree = tree_of(m, rule)
        off = tree.model.taken(tree.off).sum(axis=1)
        m.note(0.0, BETA * (tree.model.p * off) @ tree.model.score_size)
        return m.on(tree.model, tree.pull)

    return side


optimum = Derivation(
    name="optimum",
    title="Where training ends: the regularised optimum, and the other policies at which biased gradients stop",
    source=f"Ziegler et al., arXiv 1909.08593; Korbak et al., arXiv 2205.11275; {PAPER}, section 3; fixed points: "
    f"klgrad",
    steps=(
        Step(
            r"\E{R} - \beta\,\KL",
            r"\beta\log Z - \beta\,\mathrm{KL}(\pi\|\pi^*)",
            "Collect the terms into one logarithm: the objective is a constant less a KL, so $\\pi^*$ is the "
            "only optimum.",
            (_objective, lambda m: BETA * _log_z(m) - BETA * _kl_to_optimum(m)),
            where=r"\pi^*(y) = q(y)\,e^{R(y)/\beta} / Z",
        ),
        Step(
            r"\beta\log Z = \beta\log\sum_y q(y)\,e^{R(y)/\beta}",
            r"V(s_0)",
            "The sum over sequences is taken one token at a time, from the end: a soft Bellman recursion.",
            (lambda m: BETA * _log_z(m), _soft_objective),
            where=r"V(s) = \beta\log\sum_v q(v|s)\,e^{(R(s, v) + V(s'))/\beta},\ V = 0 \text{ after the last token}",
        ),
        Step(
            r"\nabla\,\E{R}",
            r"\beta\,\E{\left(\sum_t \delta_t\right)\score}",
            r"At $\pi^*$ reward and penalty balance, so training with k1 in the reward stops there.",
            (_pull(_soft), _penalty("k1-in-reward", _soft)),
            part="reward",
            where=r"\pi = \pi^*",
        ),
        Step(
            r"\nabla\,\E{R}",
            r"\beta\,\E{\sum_t \nabla\tfrac{1}{2}\delta_t^2}",
            "k2 in the loss stops where the policy is exponential in its own plain returns $Q$: the penalty still "
            "to come is "
            "missing from them.",
            (_pull(_greedy_backup), _penalty("k2-in-loss", _greedy_backup)),
            part="loss",
            where=r"\pi(v|s) \propto q(v|s)\,e^{Q(s, v)/\beta}",
        ),
        Step(
            r"\nabla\,\E{R}",
            r"\beta\,\E{\sum_t \nabla k_{3,t}}",
            "k3 in the loss stops at another shape altogether, with heavy tails: a forward-KL-regularised policy.",
            (_pull(_hyperbolic), _penalty("k3-in-loss", _hyperbolic)),
            part="loss",
            where=r"\pi(v|s) = \beta\,q(v|s) / (V(s) + \beta - Q(s, v))",
        ),
        Step(
            r"\beta\,\E{\sum_t \nabla\delta_t}",
            r"\beta\,\E{\score} = 0",
            "k1 in the loss never balances the reward: training goes on to the greedy policy, as with no penalty.",
            (_penalty("k1-in-loss", _soft), lambda m: BETA * _score(m)),
            part="loss",
            where=r"\pi = \pi^*",
            zero=True,
        ),
        Comparison(
            r"\E{R} - \beta\,\KL \text{ where k2 and k3 in the loss stop}",
            r"(\beta\log Z,\ \beta\log Z)",
            "What it costs to stop there instead of at $\\pi^*$.",
            (
                lambda m: np.array([_objective(tree_of(m, rule).model) for rule in (_greedy_backup, _hyperbolic)]),
                lambda m: np.full(2, BETA * _log_z(m)),
            ),
        ),
    ),
    notation=(
        (
            r"R(y),\ \beta",
            "the reward, here v / (V - 1) for each token v of V, and the penalty's coefficient, here 0.5",
        ),
        (
            "V(s)",
            r"value of the prefix $s$; $s'$ is $s$ with token $v$ added; the policies below are free at every prefix",
        ),
        ("Q(s, v)", r"$R(s, v)$ plus the mean of the rewards to come, without a penalty"),
    ),
    conclusion="A biased gradient does not just take longer: it stops at another policy, or never.",
)


def _score(m: Model) -> Float[np.ndarray, " d"]:
    return np.asarray(m.on(tree_of(m, _soft).model, lambda tree: tree.mean(tree.score, tree.score_size)))
