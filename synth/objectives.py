"""Exact objective of a task, J = E[R] - beta KL, its gradient and its optimum; policies at other parameters.

Sequence-level throughout, in nats; rewards in their own unit. The gradient ascends J. Shapes: S contexts, V tokens,
T length, d parameters. Labels in brackets name the identity that tests hold the function to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.synth.exact import Optimum, kl, optimum, true_gradient
from klgrad.synth.policies import Policy, PolicyPair, linear
from klgrad.synth.rewards import Reward, Task

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

_SAME = 1e-8  # log-probs that agree to this are one policy


# --------------------------------------------------------------------------------- policies at other parameters


@dataclass(frozen=True, eq=False)
class Family:
    """The policies whose logits are linear in the parameters, ``logit(s, v) = features[s, v] . theta``.

    Tabular softmax policies are of this kind. Features of a policy are its scores: they differ from any other by a
    constant in each context, which the softmax takes out.

    Args:
        task: the task; its pair gives automaton and reference.
        features: ``[S, V, d]``.
        basis: ``[d, r]`` orthonormal columns that span all scores within the length. Other directions change no
            policy, and no gradient has a part in them.
    """

    task: Task
    features: Float[np.ndarray, "S V d"]
    basis: Float[np.ndarray, "d r"]

    @property
    def policy_parameters(self) -> Float[np.ndarray, " d"]:
        """``[d]`` the parameters of the task's own policy."""
        return self.task.pair.policy.theta

    def policy(self, theta: Float[np.ndarray, " d"]) -> Policy:
        """The policy at theta."""
        return linear(self.task.pair.automaton, self.features, theta)

    def pair(self, theta: Float[np.ndarray, " d"]) -> PolicyPair:
        """The task's pair with the policy at theta."""
        return replace(self.task.pair, policy=self.policy(theta))

    def policy_of(self, log_probs: Float[np.ndarray, "S V"]) -> Policy:
        """The policy with these log-probs, which must be one of the family's; its theta is not worked out."""
        mean = np.einsum("sv,svd->sd", np.exp(log_probs), self.features)
        return Policy(log_probs, self.features - mean[:, None, :], self.task.pair.policy.theta)

    def parameters_of(self, log_probs: Float[np.ndarray, "S V"], name: str = "the reference") -> np.ndarray:
        """``[d]`` the parameters of least norm at which the policy has these log-probs.

        Raises:
            ValueError: when no parameters give them.
        """
        met = visited(self.task)
        centred = self.features[met] - self.features[met].mean(axis=1, keepdims=True)
        with np.errstate(invalid="ignore"):
            wanted = log_probs[met] - log_probs[met].mean(axis=1, keepdims=True)
        if np.isfinite(wanted).all():
            theta = np.linalg.lstsq(centred.reshape(-1, centred.shape[2]), wanted.ravel(), rcond=None)[0]
            if np.abs(centred @ theta - wanted).max() < _SAME:
                return np.asarray(theta)
        raise ValueError(f"no parameters of this policy give {name}: start from the pair's own policy")


def family(task: Task) -> Family:
    """The family of the task's policy.

    Raises:
        ValueError: for a policy whose logits are not linear in its parameters, or with tokens of probability 0.
    """
    pair = task.pair
    features, met = np.where(pair.automaton.alive[:, None, None], pair.policy.scores, 0.0), visited(task)
    theta = pair.policy.theta
    if not np.isfinite(theta).all() or not np.isfinite(pair.policy.log_probs[met]).all():
        raise ValueError(f"{pair.name}: a policy that gives a token probability 0 cannot be trained: give it some")
    found = linear(pair.automaton, features, theta).log_probs
    if np.abs(found - pair.policy.log_probs)[met].max() > _SAME:
        raise ValueError(
            f"{pair.name}: the policy's logits are not linear in its parameters; dynamics are for tabular and linear "
            "policies"
        )
    flat = features[met].reshape(-1, features.shape[2])
    _, sizes, rows = np.linalg.svd(flat, full_matrices=False)
    rank = int((sizes > 1e-10 * max(sizes[0], 1e-300)).sum())
    return Family(task, features, np.eye(len(theta)) if rank == len(theta) else rows[:rank].T)


# --------------------------------------------------------------------------------------------------- objective


def expected_reward(pair: PolicyPair, reward: Reward, length: int) -> float:
    """E[R] of the policy within ``length`` tokens."""
    return float(_reward_to_go(pair, reward, length, np.exp(pair.policy.log_probs))[0][length, pair.automaton.start])


def objective(task: Task, pair: PolicyPair, beta: float) -> float:
    """J = E[R] - beta KL of the pair's policy (paper, section 1)."""
    penalty = beta * float(kl(pair, [task.length])[0]) if beta else 0.0
    return expected_reward(pair, task.reward, task.length) - penalty


def objective_gradient(task: Task, pair: PolicyPair, beta: float) -> Float[np.ndarray, " d"]:
    """``[d]`` the gradient of J at the pair's policy; a behaviour policy is left aside."""
    pair = replace(pair, behaviour=None)
    found = reward_gradient(pair, task.reward, task.length)
    return found - beta * true_gradient(pair, [task.length])[0] if beta else found


def reward_gradient(
    pair: PolicyPair, reward: Reward, length: int, ratio: str = "none", *, centred: bool = True
) -> Float[np.ndarray, " d"]:
    """``[d]`` expected ``(R - E[R]) sum_t w_t p_t`` under the sampler: the gradient of E[R] where on-policy.

    Args:
        ratio: the weight w_t off-policy: 1 (``none``), rho_t (``token``), rho_1:t (``prefix``) or rho_1:T
            (``sequence``, the gradient of E[R] again where the sampler lacks no token of the policy).
        centred: subtract E[R], as leave-one-out baselines do; without a ratio, off-policy, that is not nothing.
    """
    automaton, drawn = pair.automaton, pair.automaton.alive[:, None] & (pair.sampler > -np.inf)
    sampler = np.exp(pair.sampler) * drawn
    policy = np.exp(pair.policy.log_probs) * drawn  # rho mu: no ratio brings back what is never sampled
    lost = np.where(drawn, 0.0, np.exp(pair.policy.log_probs)).sum(axis=1) if ratio == "sequence" else 0.0
    ahead = policy if ratio == "sequence" else sampler  # who has drawn what follows token t
    before = policy if ratio in ("prefix", "sequence") else sampler  # whose prefixes count
    own = sampler if ratio == "none" else policy
    to_go, left = _reward_to_go(pair, reward, length, ahead, lost)
    mass, past = np.zeros(automaton.contexts), np.zeros(automaton.contexts)  # E[1; s] and E[reward so far; s]
    mass[automaton.start] = 1.0
    shift = float(_reward_to_go(pair, reward, length, sampler)[0][length, automaton.start]) if centred else 0.0
    weight = np.zeros(automaton.next_context.shape)
    for t in range(length):
        rest = left[length - 1 - t][automaton.next_context]
        paid = reward.edge * rest + to_go[length - 1 - t][automaton.next_context] - shift * rest
        weight += own * (mass[:, None] * paid + past[:, None] * rest)
        past = _move(automaton.next_context, before * (past[:, None] + mass[:, None] * reward.edge))
        mass = _move(automaton.next_context, before * mass[:, None])
    return np.tensordot(weight, pair.policy.scores, axes=2)


def _move(next_context: np.ndarray, flow: np.ndarray) -> np.ndarray:
    return np.bincount(next_context.ravel(), flow.ravel(), minlength=len(next_context))


def _reward_to_go(
    pair: PolicyPair, reward: Reward, length: int, probs: np.ndarray, lost: Any = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """``[T + 1, S]`` expected reward with k tokens left under ``probs [S, V]``, and how much of the mass is left then.

    That is 1 where ``probs`` are a policy's, and less where rows lack what is ``lost [S]``.
    """
    automaton = pair.automaton
    to_go, left = np.zeros((length + 1, automaton.contexts)), np.ones((length + 1, automaton.contexts))
    to_go[0] = reward.terminal
    for k in range(length):
        rest = left[k][automaton.next_context]
        paid = (probs * (reward.edge * rest + to_go[k][automaton.next_context])).sum(axis=1)
        to_go[k + 1] = np.where(automaton.alive, paid, 0.0)
        left[k + 1] = np.where(automaton.alive, 1.0 - lost + (probs * (rest - 1.0)).sum(axis=1), 1.0)
    return to_go, left


# ----------------------------------------------------------------------------------------------------- optimum


def best(task: Task, beta: float) -> Optimum:
    """The optimum of J over all policies, by soft Bellman [E8]; for beta = 0 the greatest reward there is.

    A policy that does not know how many tokens are left, or shares parameters, may not reach it.
    """
    if beta > 0:
        return optimum(task.pair, task.reward.edge, beta, task.length, task.reward.terminal)
    automaton, can = task.pair.automaton, np.isfinite(task.pair.reference)
    values = np.zeros((task.length + 1, automaton.contexts))
    values[:] = task.reward.terminal
    log_probs = np.full((task.length, *can.shape), -np.inf)
    for t in reversed(range(task.length)):
        paid = np.where(can, task.reward.edge + values[t + 1][automaton.next_context], -np.inf)
        greedy = paid.argmax(axis=1)
        log_probs[t, np.arange(len(greedy)), greedy] = 0.0
        values[t] = np.where(automaton.alive, paid.max(axis=1), 0.0)
    return Optimum(log_probs, values, float(values[0, automaton.start]))


def kl_to(task: Task, pair: PolicyPair, target: Optimum) -> float:
    """KL(pi || pi*) of whole sequences, forward in time: the identity's other side [E12].

    beta log Z - J(pi) = beta KL(pi || pi*) for every policy. +inf where pi* lacks a token that pi emits.
    """
    automaton, log_probs = pair.automaton, pair.policy.log_probs
    probs = np.exp(log_probs) * automaton.alive[:, None]
    mass, total = np.zeros(automaton.contexts), 0.0
    mass[automaton.start] = 1.0
    for t in range(task.length):
        flow = mass[:, None] * probs
        used = flow > 0
        total += float((flow[used] * (log_probs[used] - target.log_probs[t][used])).sum())
        mass = _move(automaton.next_context, flow)
    return total


def token_fixed_point(task: Task, beta: float, kind: str) -> Float[np.ndarray, "S V"]:
    """``[S, V]`` log-probs at which a token-level penalty and the reward balance, where every context has its time.

    With Q and V the *unregularised* returns under that policy, by backward induction: for ``token`` (k2-in-loss, the
    full-vocabulary loss) ``pi(v|s) ~ pi_ref(v|s) exp(Q(s, v) / beta)`` [E10]; for ``token-forward`` (k3-in-loss)
    ``pi(v|s) = beta pi_ref(v|s) / (V(s) + beta - Q(s, v))`` [E11]. ``sequence`` (k1-in-reward) is the first with
    soft returns: the optimum [E8].

    Raises:
        ValueError: for another kind, beta that is not positive, or an automaton where a context recurs.
    """
    if kind not in ("sequence", "token", "token-forward"):
        raise ValueError(f"no closed form for {kind!r}: there is sequence, token, token-forward")
    if not 0 < beta < np.inf:
        raise ValueError(f"beta = {beta} must be positive for a fixed point to exist")
    automaton, when = task.pair.automaton, times(task)
    log_probs, values = task.pair.reference.copy(), task.reward.terminal.copy()
    for t in reversed(range(task.length)):
        for s in np.flatnonzero(when == t):
            can = task.pair.reference[s] > -np.inf  # what the reference never emits stays so
            q = (task.reward.edge[s] + values[automaton.next_context[s]])[can]
            log_ref = task.pair.reference[s, can]
            if kind == "token-forward":
                found = np.log(beta) + log_ref - np.log(_level(np.exp(log_ref), q, beta) - q)
            else:
                tilted = log_ref + q / beta
                found = tilted - np.logaddexp.reduce(tilted)
            soft = beta * (found - log_ref) if kind == "sequence" else 0.0
            values[s] = float(np.exp(found) @ (q - soft))
            log_probs[s, can] = found
    return log_probs


def _level(ref: np.ndarray, q: np.ndarray, beta: float) -> float:
    """V + beta: the level above every Q at which ``sum beta ref / (level - Q)`` is 1."""
    from scipy.optimize import brentq

    top = float(q.max())

    def excess(above: float) -> float:
        return float((beta * ref / (top + above - q)).sum() - 1)

    # the most rewarded token alone makes the sum 1 at beta x its mass; all tokens at the top do at beta
    lowest = beta * float(ref[q == top].sum())
    return top + float(brentq(excess, lowest * (1 - 1e-12), beta * (1 + 1e-12), xtol=1e-15 * beta, rtol=1e-15))


def visited(task: Task) -> Bool[np.ndarray, " S"]:
    """``[S]`` True for the contexts in which a token can be emitted within the length."""
    automaton = task.pair.automaton
    seen = here = np.arange(automaton.contexts) == automaton.start
    for _ in range(task.length - 1):
        reached = np.zeros_like(seen)
        reached[automaton.next_context[here]] = True
        here = reached & automaton.alive & ~seen
        seen = seen | here
        if not here.any():
            break
    return seen


def times(task: Task) -> Int[np.ndarray, " S"]:
    """``[S]`` the time at which each context emits, -1 for those that never do.

    Raises:
        ValueError: when a context is met at two times, as with Markov contexts.
    """
    automaton = task.pair.automaton
    when = np.full(automaton.contexts, -1)
    here = np.array([automaton.start])
    for t in range(task.length):
        if (when[here] >= 0).any():
            s = int(here[when[here] >= 0][0])
            raise ValueError(
                f"context {automaton.describe(s)} is met at more than one time: closed forms are for contexts that "
                "know their time (positional or history automata)"
            )
        when[here] = t
        reached = np.zeros(automaton.contexts, bool)
        reached[automaton.next_context[here]] = True
        here = np.flatnonzero(reached & automaton.alive)
    return when
