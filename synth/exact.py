"""Exact quantities of a policy pair: KLs, entropy, the true gradient and its parts, the regularised optimum.

Sequence-level throughout: a sum over tokens up to the length or the end. Nats. Shapes: L lengths asked for,
T length, S contexts, V tokens, d parameters. Labels in brackets name the identity in the theory of the paper's
Appendix F that tests hold the function to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from klgrad.synth.estimators import relative_entropies
from klgrad.synth.policies import PolicyPair

if TYPE_CHECKING:
    from jaxtyping import Float


_FEW_CONTEXTS = 64  # up to which contexts move by one matrix
_ROUNDINGS = 8  # of a log-prob: its logits', the softmax's, the ratio's, each times the token's probability
_MOST_VISITS = 1 << 27  # entries of the true gradient's two tables over time and contexts


def check_lengths(pair: PolicyPair, lengths: Sequence[int]) -> np.ndarray:
    """``[L]`` the lengths as integers.

    Raises:
        ValueError: for none, a length below 1, or one beyond the automaton's horizon.
    """
    if len(lengths) == 0:
        raise ValueError("no lengths: give at least one")
    wanted = np.asarray(lengths, int)
    for extreme in (wanted.min(), wanted.max()):
        pair.automaton.check_length(int(extreme))
    return wanted


def _probs(log_probs: np.ndarray, alive: np.ndarray) -> np.ndarray:
    return np.exp(log_probs) * alive[:, None]


def _forward(pair: PolicyPair, probs: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """One step of context probabilities; mass that has ended leaves."""
    flow = mass[:, None] * probs
    return np.bincount(pair.automaton.next_context.ravel(), flow.ravel(), minlength=len(mass))


def _transitions(pair: PolicyPair, probs: np.ndarray) -> np.ndarray:
    """``[S, S]`` the probability of each next context."""
    move = np.zeros((len(probs), len(probs)))
    np.add.at(move, (np.arange(len(probs))[:, None], pair.automaton.next_context), probs)
    return move


def visitation(
    pair: PolicyPair, lengths: Sequence[int], log_probs: Float[np.ndarray, "S V"] | None = None
) -> Float[np.ndarray, "L S"]:
    """``[L, S]`` expected number of tokens emitted in each context within each length, under ``log_probs``.

    The default is the policy. Memory does not grow with the length.
    """
    wanted = check_lengths(pair, lengths)
    alive = pair.automaton.alive
    probs = _probs(pair.policy.log_probs if log_probs is None else log_probs, alive)
    mass = np.zeros(pair.automaton.contexts)
    mass[pair.automaton.start] = 1.0
    total = np.zeros_like(mass)
    out = np.zeros((len(wanted), len(mass)))
    for t in range(1, wanted.max() + 1):
        total = total + mass * alive
        out[wanted == t] = total
        mass = _forward(pair, probs, mass)
    return out


def _expected_sum(pair: PolicyPair, lengths: Sequence[int], log_probs: np.ndarray, term: np.ndarray) -> np.ndarray:
    """``[L]`` expected sum of ``term [S]`` over the contexts that ``log_probs`` visits; inf only where it goes."""
    seen = visitation(pair, lengths, log_probs)
    infinite = np.isinf(term) & pair.automaton.alive
    total = seen @ np.where(infinite | ~pair.automaton.alive, 0.0, term)
    return np.where((seen[:, infinite] > 0).any(axis=1), np.inf, total)


def kl_rows(p: Float[np.ndarray, "S V"], q: Float[np.ndarray, "S V"]) -> Float[np.ndarray, " S"]:
    """``[S]`` KL(p || q) of each row of log-probs, never negative; +inf where q lacks a token that p emits."""
    missing = ((p > -np.inf) & (q == -np.inf)).any(axis=1)
    return np.where(missing, np.inf, relative_entropies(p, np.where(missing[:, None], p, q)).sum(axis=1))


def _kl_to_go_rows(pair: PolicyPair) -> np.ndarray:
    """``[S]`` the next token's KL; 0 in contexts that emit none or that the policy cannot reach."""
    rows = kl_rows(pair.policy.log_probs, pair.reference)
    return np.where(pair.automaton.alive & np.isfinite(rows), rows, 0.0)


def kl(pair: PolicyPair, lengths: Sequence[int]) -> Float[np.ndarray, " L"]:
    """``[L]`` sequence-level reverse KL(pi || pi_ref), the target (paper, section 1) [B1]."""
    return _expected_sum(pair, lengths, pair.policy.log_probs, kl_rows(pair.policy.log_probs, pair.reference))


def forward_kl(pair: PolicyPair, lengths: Sequence[int]) -> Float[np.ndarray, " L"]:
    """``[L]`` sequence-level KL(pi_ref || pi); +inf where the policy lacks a token that the reference emits."""
    return _expected_sum(pair, lengths, pair.reference, kl_rows(pair.reference, pair.policy.log_probs))


def entropy(pair: PolicyPair, lengths: Sequence[int]) -> Float[np.ndarray, " L"]:
    """``[L]`` sequence-level entropy of the policy."""
    p = pair.policy.log_probs
    return _expected_sum(pair, lengths, p, -(np.exp(p) * np.where(p > -np.inf, p, 0.0)).sum(axis=1))


def mean_length(pair: PolicyPair, lengths: Sequence[int]) -> Float[np.ndarray, " L"]:
    """``[L]`` expected number of tokens E|y| under the policy."""
    return _expected_sum(pair, lengths, pair.policy.log_probs, np.ones(pair.automaton.contexts))


def values(pair: PolicyPair, length: int) -> tuple[Float[np.ndarray, "T1 S"], Float[np.ndarray, "T S V"]]:
    """KL-to-go: ``V [T + 1, S]`` with k tokens left, and ``Q [T, S, V]`` with k + 1 left, k1 as the reward."""
    check_lengths(pair, [length])
    probs = _probs(pair.policy.log_probs, pair.automaton.alive)
    v = np.zeros((length + 1, pair.automaton.contexts))
    q = np.zeros((length, *pair.automaton.next_context.shape))
    own = _kl_to_go_rows(pair)  # sum_v pi delta would lose it near the reference
    for k in range(length):
        later = v[k][pair.automaton.next_context]
        q[k] = (pair.log_ratio + later) * pair.automaton.alive[:, None]
        v[k + 1] = own + (probs * later).sum(axis=1)
    return v, q


def true_gradient(pair: PolicyPair, lengths: Sequence[int]) -> Float[np.ndarray, "L d"]:
    """``[L, d]`` the gradient of the sequence-level KL, by the policy-gradient theorem [B2, B5].

    Sum over t and contexts of visitation x sum_v pi(v|s) score(s, v) Q_{T-t}(s, v). The second route is the
    expected gradient of k1-in-reward (``moments``).

    Raises:
        ValueError: for a length out of range, or more contexts over time than memory holds.
    """
    weighted = np.exp(pair.policy.log_probs) * pair.automaton.alive[:, None]
    return _paid_ahead(pair, lengths, pair.log_ratio, _kl_to_go_rows(pair), weighted[..., None] * pair.policy.scores)


def gradient_rounding(pair: PolicyPair, lengths: Sequence[int]) -> Float[np.ndarray, " L"]:
    """``[L]`` how far rounding of the log-probs alone can move a gradient that should be the true one, as a norm.

    A log-ratio is off by eps times the two log-probs it is the difference of; the same sums as for the true gradient,
    all terms positive, carry that on.
    """
    policy, reference = (np.where(p > -np.inf, np.abs(p), 0.0) for p in (pair.policy.log_probs, pair.reference))
    probs = np.exp(pair.policy.log_probs) * pair.automaton.alive[:, None]
    off = _ROUNDINGS * np.finfo(float).eps * (policy + reference)
    ahead = _paid_ahead(pair, lengths, off, (probs * off).sum(axis=1), probs[..., None] * np.abs(pair.policy.scores))
    return np.asarray(np.linalg.norm(ahead, axis=1))


def _paid_ahead(
    pair: PolicyPair, lengths: Sequence[int], own: np.ndarray, rows: np.ndarray, weighted: np.ndarray
) -> np.ndarray:
    """``[L, d]`` sum over tokens of visits x weighted [S, V, d] x (``own [S, V]`` and what the tokens after it pay).

    ``rows [S]`` is what a context pays on average.
    """
    wanted = check_lengths(pair, lengths)
    automaton, longest = pair.automaton, int(wanted.max())
    if longest * automaton.contexts > _MOST_VISITS:
        raise ValueError(
            f"length x contexts = {longest * automaton.contexts:.3g} is past the limit of {_MOST_VISITS:.3g} "
            "for the true gradient: take a shorter length or fewer contexts"
        )
    probs = _probs(pair.policy.log_probs, automaton.alive)
    mass = np.zeros((longest, automaton.contexts))
    to_go = np.zeros((longest, automaton.contexts))  # paid with k tokens left
    mass[0, automaton.start] = 1.0
    few = automaton.contexts <= _FEW_CONTEXTS
    move = _transitions(pair, probs) if few else np.zeros((0, 0))
    for t in range(1, longest):
        mass[t] = mass[t - 1] @ move if few else _forward(pair, probs, mass[t - 1])
        to_go[t] = rows + (move @ to_go[t - 1] if few else (probs * to_go[t - 1][automaton.next_context]).sum(axis=1))
    out = np.empty((len(wanted), pair.policy.parameters))
    for i, length in enumerate(wanted):
        # pairs of (context, successor) in one matrix product over time, then spread over tokens
        joint = mass[:length].T @ to_go[:length][::-1] if few else None
        if joint is not None:
            future = np.take_along_axis(joint, automaton.next_context, axis=1)
        else:
            future = sum(mass[t][:, None] * to_go[length - 1 - t][automaton.next_context] for t in range(length))
        q = mass[:length].sum(axis=0)[:, None] * own + future
        out[i] = np.tensordot(q, weighted, axes=2)
    return out


def token_gradient(pair: PolicyPair, lengths: Sequence[int]) -> Float[np.ndarray, "L d"]:
    """``[L, d]`` the token-level reverse-KL gradient on sampled prefixes (Lrev): prefixes are not differentiated [B7].

    Prefixes are the sampler's: the behaviour policy's off-policy.
    """
    return _local(pair, lengths, np.exp(pair.policy.log_probs) * pair.log_ratio)


def token_forward_gradient(pair: PolicyPair, lengths: Sequence[int]) -> Float[np.ndarray, "L d"]:
    """``[L, d]`` the token-level forward-KL gradient on sampled prefixes (Lfwd; paper, Appendix F.4) [B8].

    Sum over tokens that the policy can emit of -pi_ref(v|s) score(s, v): mass of the reference that the policy
    cannot reach is never sampled, and so is missing here as it is from k3-in-loss.
    """
    # scores average to zero under the policy: pi - pi_ref = pi (1 - r) does not lose the difference near the reference
    delta, p = pair.log_ratio, np.exp(pair.policy.log_probs)
    near = p * -np.expm1(-np.maximum(delta, -1.0))
    weight = np.where(delta < -1.0, p - np.exp(pair.reference), near)
    return _local(pair, lengths, np.where(pair.policy.log_probs > -np.inf, weight, 0.0))


def future_gradient(pair: PolicyPair, lengths: Sequence[int]) -> Float[np.ndarray, "L d"]:
    """``[L, d]`` the gradient through the prefixes alone (Fut): true minus token-level, on-policy [B5]."""
    on_policy = PolicyPair(pair.automaton, pair.policy, pair.reference)
    return true_gradient(on_policy, lengths) - token_gradient(on_policy, lengths)


def _local(pair: PolicyPair, lengths: Sequence[int], weight: np.ndarray) -> np.ndarray:
    return visitation(pair, lengths, pair.sampler) @ np.einsum("sv,svd->sd", weight, pair.policy.scores)


@dataclass(frozen=True, eq=False)
class Optimum:
    """The KL-regularised optimum of E[R] - beta KL at one length.

    Args:
        log_probs: ``[T, S, V]`` the optimal policy with T - t tokens left, t = 0 first.
        values: ``[T + 1, S]`` soft values at each t; the last row is the terminal reward.
        objective: beta log Z, the optimal E[R] - beta KL.
    """

    log_probs: Float[np.ndarray, "T S V"]
    values: Float[np.ndarray, "T1 S"]
    objective: float


def optimum(
    pair: PolicyPair,
    reward: Float[np.ndarray, "S V"],
    beta: float,
    length: int,
    terminal: Float[np.ndarray, " S"] | None = None,
) -> Optimum:
    """Soft Bellman recursion for pi* = pi_ref exp(R / beta) / Z (Ziegler et al. 1909.08593; Korbak et al. 2205.11275).

    ``V_t(s) = beta log sum_v pi_ref(v|s) exp((reward(s, v) + V_{t+1}(s')) / beta)`` [E8].

    Args:
        reward: ``[S, V]`` reward of each token in each context.
        beta: coefficient of the KL, positive.
        terminal: ``[S]`` reward of the context in which the sequence stops; zero if left out.

    Raises:
        ValueError: for a beta that is not positive, or rewards that are not finite or of the wrong shape.
    """
    check_lengths(pair, [length])
    if not 0 < beta < np.inf:
        raise ValueError(f"beta = {beta} must be positive: without a penalty the optimum is not unique")
    reward = np.asarray(reward, float)
    if reward.shape != pair.automaton.next_context.shape or not np.isfinite(reward).all():
        raise ValueError(f"reward must be finite with shape {pair.automaton.next_context.shape}; got {reward.shape}")
    automaton = pair.automaton
    soft = np.zeros((length + 1, automaton.contexts))
    if terminal is not None:
        terminal = np.asarray(terminal, float)
        if terminal.shape != (automaton.contexts,) or not np.isfinite(terminal).all():
            raise ValueError(f"terminal must be finite with shape {(automaton.contexts,)}; got {terminal.shape}")
        soft[:] = terminal
    log_probs = np.zeros((length, *reward.shape))
    for t in reversed(range(length)):
        tilted = pair.reference + (reward + soft[t + 1][automaton.next_context]) / beta
        log_z = np.logaddexp.reduce(tilted, axis=1)
        log_probs[t] = tilted - log_z[:, None]
        soft[t] = np.where(automaton.alive, beta * log_z, soft[t])
    return Optimum(log_probs, soft, float(soft[0, automaton.start]))
