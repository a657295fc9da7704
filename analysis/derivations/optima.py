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

from klgrad.analysis.derivations.model import Model, check_size
from klgrad.analysis.derivations.steps import Comparison, Derivation, Step
from klgrad.analysis.derivations.terms import PAPER
from klgrad.synth.automata import history
from klgrad.synth.exact import optimum as soft_bellman
from klgrad.synth.policies import PolicyPair, tabular

if TYPE_CHECKING:
    from jaxtyping import Float

BETA = 0.5
Rule = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, float]]


def _token_rewards(vocabulary: int) -> Float[np.ndarray, " V"]:
    return np.arange(vocabulary) / (vocabulary - 1)


def _returns(m: Model) -> Float[np.ndarray, " M"]:
    """``[M]`` R(y)."""
    rewards = np.broadcast_to(_token_rewards(m.pair.automaton.vocabulary), m.log_policy.shape)
    return np.asarray(m.taken(rewards).sum(axis=1))


def _objective(m: Model) -> float:
    """E[R] - beta KL, as a plain sum."""
    return float(m.mean(_returns(m) - BETA * m.delta.sum(axis=1)))


# ------------------------------------------------------------------------------------- policies free at every prefix


def _soft(q: np.ndarray, returns: np.ndarray) -> tuple[np.ndarray, float]:
    """pi* of one prefix and its soft value."""
    value = BETA * np.log(q @ np.exp(returns / BETA))
    return q * np.exp((returns - value) / BETA), float(value)


def _greedy_backup(q: np.ndarray, returns: np.ndarray) -> tuple[np.ndarray, float]:
    """The fixed point of k2 in the loss: exponential in the plain returns."""
    tilted = q * np.exp((returns - returns.max()) / BETA)
    policy = tilted / tilted.sum()
    return policy, float(policy @ returns)


def _hyperbolic(q: np.ndarray, returns: np.ndarray) -> tuple[np.ndarray, float]:
    """The fixed point of k3 in the loss: pi = beta q / (V + beta - Q), with V + beta found by Newton's method.

    The sum of beta q / (c - Q) is convex and falls in c, so Newton from the left of the root climbs to it.
    """
    best = int(np.argmax(np.where(q > 0, returns, -np.inf)))
    c = returns[best] + BETA * q[best]
    for _ in range(100):
        share = BETA * q / np.where(q > 0, c - returns, 1.0)
        step = (share.sum() - 1) / np.where(q > 0, share / (c - returns), 0.0).sum()
        if abs(step) <= 1e-16 * max(1.0, abs(c)):
            break
        c += step
    policy = share / share.sum()
    return policy, float(policy @ returns)


@dataclass(frozen=True, eq=False)
class Tree:
    """A policy free at every prefix, with its model."""

    model: Model

    @property
    def pull(self) -> Float[np.ndarray, " d"]:
        """``[d]`` gradient of E[R]."""
        return self.model.mean(_returns(self.model)[:, None] * self.model.score)


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
    for node in reversed(range(len(context))):
        ahead = values[tree.next_context[node]] if len(tree.states[node]) < length - 1 else 0.0
        policy[node], values[node] = rule(reference[node], rewards + ahead)
    log_reference = np.zeros(tree.next_context.shape)
    log_reference[: len(context)] = pair.reference[context]
    with np.errstate(divide="ignore"):
        logits = np.log(policy)
    return Tree(Model(PolicyPair(tree, tabular(tree, logits), log_reference, name=pair.name), length))


def tree_of(m: Model, rule: Rule) -> Tree:
    """The tree of the model's pair under a rule.

    Raises:
        ValueError: when there are too many prefixes.
    """
    prefixes = sum(m.pair.automaton.vocabulary**t for t in range(m.length))
    check_size(len(m.p), m.length, prefixes * m.pair.automaton.vocabulary)
    return _tree(m.pair, m.length, rule)


def _log_z(m: Model) -> float:
    return float(np.log(np.exp(m.log_prob(m.log_reference)) @ np.exp(_returns(m) / BETA)))


def _kl_to_optimum(m: Model) -> float:
    """KL(pi || pi*) as a plain sum, pi* = q exp(R / beta) / Z."""
    star = m.log_prob(m.log_reference) + _returns(m) / BETA - _log_z(m)
    return float(m.mean(m.log_prob(m.log_policy) - star))


def _soft_objective(m: Model) -> float:
    rewards = np.broadcast_to(_token_rewards(m.pair.automaton.vocabulary), m.log_policy.shape)
    return soft_bellman(m.pair, rewards, BETA, m.length).objective


def _penalty(configuration: str, rule: Rule) -> Callable[[Model], Float[np.ndarray, " d"]]:
    return lambda m: BETA * tree_of(m, rule).model.engine(configuration)


def _pull(rule: Rule) -> Callable[[Model], Float[np.ndarray, " d"]]:
    def side(m: Model) -> Float[np.ndarray, " d"]:
        tree = tree_of(m, rule)
        pull = tree.pull
        m.note(tree.model.largest_term)
        return pull

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
            (_penalty("k1-in-loss", _soft), lambda m: BETA * _noted(m)),
            part="loss",
            where=r"\pi = \pi^*",
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


def _noted(m: Model) -> Float[np.ndarray, " d"]:
    model = tree_of(m, _soft).model
    mean = model.mean(model.score)
    m.note(model.largest_term)
    return mean
