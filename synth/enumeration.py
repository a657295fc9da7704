"""The oracle: every sequence, any configuration, any torch model, any loss.

Slow and obvious. ``sequence_gradient`` transcribes the formula of ``configurations`` line by line and is the
twin that every fast path is tested against; the torch functions take the expected gradient of any callable
as autograd sees it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from klgrad.synth.automata import Automaton
from klgrad.synth.configurations import Configuration
from klgrad.synth.policies import PolicyPair

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

MAX_SEQUENCES = 1 << 20


@dataclass(frozen=True, eq=False)
class Sequences:
    """All sequences up to a length: M of them, those that end early padded.

    Args:
        tokens: ``[M, T]`` tokens, 0 where padded.
        contexts: ``[M, T]`` the context each token was emitted in.
        mask: ``[M, T]`` True for real tokens; the end token counts.
    """

    tokens: Int[np.ndarray, "M T"]
    contexts: Int[np.ndarray, "M T"]
    mask: Bool[np.ndarray, "M T"]


def sequences(automaton: Automaton, length: int, *, limit: int = MAX_SEQUENCES) -> Sequences:
    """Every sequence of the automaton up to the length.

    Raises:
        ValueError: when there could be more than ``limit``, saying how many and what to use instead.
    """
    _check_count(automaton, length, limit)
    return _longer(automaton, _empty(), np.array([automaton.start]), length)[0]


def sequence_chunks(
    automaton: Automaton, length: int, chunk: int, *, limit: int = MAX_SEQUENCES
) -> Iterator[Sequences]:
    """The rows of ``sequences`` in order, at most ``chunk`` (or V) at a time: memory does not grow with their number.

    A chunk holds whole families: all continuations of each of its prefixes.
    """
    _check_count(automaton, length, limit)
    V, depth = automaton.vocabulary, 1
    while depth < length and V ** (depth + 1) <= chunk:
        depth += 1
    prefixes, now = _longer(automaton, _empty(), np.array([automaton.start]), length - depth)
    each = max(1, chunk // V**depth)
    for first in range(0, len(now), each):
        rows = slice(first, first + each)
        part = Sequences(prefixes.tokens[rows], prefixes.contexts[rows], prefixes.mask[rows])
        yield _longer(automaton, part, now[rows], depth)[0]


def _check_count(automaton: Automaton, length: int, limit: int) -> None:
    automaton.check_length(length)
    most = automaton.vocabulary**length
    if most > limit:
        raise ValueError(
            f"{automaton.vocabulary}^{length} = {most:.3g} sequences are past the limit of {limit} for enumeration: "
            "take a shorter length, or the exact moments or Monte Carlo, which do not enumerate"
        )


def _empty() -> Sequences:
    return Sequences(np.zeros((1, 0), np.intp), np.zeros((1, 0), np.intp), np.zeros((1, 0), bool))


def _longer(automaton: Automaton, prefixes: Sequences, now: np.ndarray, steps: int) -> tuple[Sequences, np.ndarray]:
    """All continuations by so many tokens of prefixes that are in contexts ``now``, and the contexts they reach."""
    tokens, contexts, mask = prefixes.tokens, prefixes.contexts, prefixes.mask
    for _ in range(steps):
        alive = now != automaton.end
        fan = np.where(alive, automaton.vocabulary, 1)
        parent = np.repeat(np.arange(len(now)), fan)
        first = np.repeat(np.cumsum(fan) - fan, fan)
        token = np.arange(len(parent)) - first
        tokens = np.column_stack([tokens[parent], token])
        contexts = np.column_stack([contexts[parent], now[parent]])
        mask = np.column_stack([mask[parent], alive[parent]])
        now = automaton.next_context[now[parent], token]
    return Sequences(tokens, contexts, mask), now


def log_probability(every: Sequences, log_probs: Float[np.ndarray, "S V"]) -> Float[np.ndarray, " M"]:
    """``[M]`` log-probability of each sequence."""
    return np.where(every.mask, log_probs[every.contexts, every.tokens], 0.0).sum(axis=1)


def sequence_gradient(
    configuration: Configuration, pair: PolicyPair, contexts: list[int], tokens: list[int], b: float = 0.0
) -> Float[np.ndarray, " d"]:
    """``[d]`` g(y) of one sequence, transcribed from the formula of ``configurations``."""
    est, T = configuration.estimator, len(tokens)
    edge = list(zip(contexts, tokens, strict=True))
    p = [pair.policy.scores[e] for e in edge]
    log_pi, log_ref = pair.policy.log_probs, pair.reference
    rho = [float(np.exp(log_pi[e] - pair.sampler[e])) for e in edge]
    c = token_values(configuration, pair, contexts, tokens)

    def running(t: int) -> float:  # rho_1:t, tokens counted from 1
        return float(np.prod(rho[:t]))

    def omega(t: int, u: int) -> float:
        if configuration.ratio == "prefix":
            return running(max(t + 1, u if est.full else u + 1))
        return {"none": 1.0, "token": rho[t], "sequence": running(T)}[configuration.ratio]

    def in_credit(t: int, u: int) -> bool:
        return {"whole": True, "rtg": t <= u, "token": t == u, "future": t < u}[configuration.credit]

    g = np.zeros(pair.policy.parameters)
    for t in range(T):
        if configuration.in_reward:
            g += p[t] * (sum(omega(t, u) * c[u] for u in range(T) if in_credit(t, u)) - b * omega(t, t))
        if configuration.in_loss and not est.full:
            g += omega(t, t) * float(est.slope(np.array([log_pi[edge[t]] - log_ref[edge[t]]]))[0]) * p[t]
        if configuration.in_loss and est.full:
            weight = {"token": 1.0, "prefix": running(t)}.get(configuration.ratio, omega(t, t))
            g += weight * est.slope(log_pi[contexts[t]], log_ref[contexts[t]]) @ pair.policy.scores[contexts[t]]
    divisor = {"sum": 1.0, "divide": configuration.divisor, "length-mean": T}[configuration.aggregation]
    return g / divisor


def token_values(configuration: Configuration, pair: PolicyPair, contexts: list[int], tokens: list[int]) -> list[float]:
    """c_u of each token: the estimator's value, detached."""
    est, out = configuration.estimator, []
    for s, v in zip(contexts, tokens, strict=True):
        if est.full:
            out.append(float(est.value(pair.policy.log_probs[s], pair.reference[s])))
        else:
            top = pair.sampler if configuration.rollout_value else pair.policy.log_probs
            out.append(float(est.value(np.array([top[s, v] - pair.reference[s, v]]))[0]))
    return out


@dataclass(frozen=True, eq=False)
class Enumerated:
    """Per-sequence tables of one configuration: ``probability [M]``, ``gradient [M, d]``, ``value [M]`` (sum of c)."""

    probability: Float[np.ndarray, " M"]
    gradient: Float[np.ndarray, "M d"]
    value: Float[np.ndarray, " M"]

    @property
    def mean(self) -> Float[np.ndarray, " d"]:
        """``[d]`` expected gradient under the sampler."""
        return self.probability @ self.gradient

    @property
    def covariance(self) -> Float[np.ndarray, "d d"]:
        """``[d, d]`` covariance of one sequence's gradient."""
        centred = self.gradient - self.mean
        return (self.probability[:, None] * centred).T @ centred


def enumerate_configuration(
    configuration: Configuration, pair: PolicyPair, length: int, b: float = 0.0, *, limit: int = 1 << 14
) -> Enumerated:
    """The plain formula over every sequence; baselines other than a constant are given as ``b``."""
    every = sequences(pair.automaton, length, limit=limit)
    b = configuration.baseline_value if configuration.baseline == "constant" else b
    probability = np.exp(log_probability(every, pair.sampler))
    gradient = np.zeros((len(probability), pair.policy.parameters))
    value = np.zeros(len(probability))
    for i in np.flatnonzero(probability):
        n = int(every.mask[i].sum())
        contexts, tokens = every.contexts[i, :n].tolist(), every.tokens[i, :n].tolist()
        gradient[i] = sequence_gradient(configuration, pair, contexts, tokens, b)
        value[i] = sum(token_values(configuration, pair, contexts, tokens))
    return Enumerated(probability, gradient, value)


def enumerate_leave_one_out(
    configuration: Configuration, pair: PolicyPair, length: int, samples: int, *, limit: int = 1 << 16
) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, "d d"]]:
    """Mean ``[d]`` and covariance ``[d, d]`` of the leave-one-out estimate, over all groups of N sequences."""
    at_zero = enumerate_configuration(configuration, pair, length, 0.0)
    at_one = enumerate_configuration(configuration, pair, length, 1.0)
    y = at_zero.gradient - at_one.gradient
    if len(y) ** samples > limit:
        raise ValueError(f"{len(y)}^{samples} groups are past the limit of {limit}: take fewer samples or tokens")
    mean = np.zeros(y.shape[1])
    second = np.zeros((y.shape[1], y.shape[1]))
    for group in itertools.product(range(len(y)), repeat=samples):
        index = list(group)
        others = (at_zero.value[index].sum() - at_zero.value[index]) / (samples - 1)
        g = (at_zero.gradient[index] - others[:, None] * y[index]).mean(axis=0)
        weight = at_zero.probability[index].prod()
        mean += weight * g
        second += weight * np.outer(g, g)
    return mean, second - np.outer(mean, mean)


# ------------------------------------------------------------------------------------------- torch callables


@dataclass(frozen=True, eq=False)
class Batch:
    """What a loss function is given, as torch tensors: B sequences of length T over V tokens.

    ``log_probs [B, T]`` carries the graph; ``full_log_probs [B, T, V]`` too. ``reference``, ``behaviour``
    (``[B, T]``) and ``full_reference`` are constants. ``mask [B, T]`` is True for real tokens.
    """

    tokens: Any
    mask: Any
    log_probs: Any
    reference: Any
    behaviour: Any
    full_log_probs: Any
    full_reference: Any


def torch_policy(
    pair: PolicyPair, features: Float[np.ndarray, "S V d"] | None = None, *, device: Any = None
) -> tuple[Any, Callable[..., Any]]:
    """The pair's policy as ``(theta, model)``: a torch leaf ``[d]``, and ``contexts [B, T] -> log-probs [B, T, V]``.

    Tabular policies need no features; others are given theirs. ``device`` is torch's; ``None`` for the CPU.
    """
    import torch

    theta = torch.tensor(pair.policy.theta, dtype=torch.float64, device=device, requires_grad=True)
    alive = torch.as_tensor(np.flatnonzero(pair.automaton.alive), device=device)
    shape = pair.automaton.next_context.shape

    def model(contexts: Any) -> Any:
        if features is not None:
            logits = torch.as_tensor(features, device=device) @ theta
        else:
            logits = torch.zeros(shape, dtype=torch.float64, device=device).index_put(
                (alive,), theta.reshape(-1, shape[1])
            )
        return torch.log_softmax(logits, -1)[contexts]

    return theta, model


def torch_batches(
    model: Callable[[Any], Any],
    reference: Callable[[Any], Any],
    automaton: Automaton,
    length: int,
    *,
    behaviour: Callable[[Any], Any] | None = None,
    inputs: str = "contexts",
    chunk: int = 4096,
    limit: int = MAX_SEQUENCES,
    device: Any = None,
) -> Iterator[tuple[Any, Batch]]:
    """Every sequence in chunks, as ``(probability [B] under the sampler, Batch)``.

    No position sees the last token, so sequences that differ in it alone share one row of the model: V times fewer
    evaluations, V^(T-1) rows of T tokens.

    Args:
        model: next-token log-probs ``[B, T, V]`` in torch, from ``[B, T]`` contexts, or, with
            ``inputs="tokens"``, from the ``[B, T]`` tokens themselves (position t must see tokens before t only).
        reference: the same for the reference.
        behaviour: the same for the sampler; ``None`` on-policy.
        chunk: sequences held at once.
        device: torch's, where the models are and the batches will be; ``None`` for the CPU.
    """
    import torch

    for every in sequence_chunks(automaton, length, chunk, limit=limit):
        tokens, mask = (torch.as_tensor(array, device=device) for array in (every.tokens, every.mask))
        seen = every.contexts if inputs == "contexts" else every.tokens
        family, of = _families(seen if inputs == "contexts" else seen[:, :-1])
        given, rows = (torch.as_tensor(array, device=device) for array in (seen[family], of))
        full = model(given)[rows]
        with torch.no_grad():
            full_reference = reference(given)[rows]
            full_behaviour = full.detach() if behaviour is None else behaviour(given)[rows]

        def taken(log_probs: Any, tokens: Any = tokens, mask: Any = mask) -> Any:
            picked = log_probs.gather(-1, tokens[..., None])[..., 0]
            return torch.where(mask, picked, torch.zeros_like(picked))

        sampled = taken(full_behaviour)
        yield (
            sampled.sum(1).exp(),
            Batch(tokens, mask, taken(full), taken(full_reference), sampled, full, full_reference),
        )


def _families(seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first of each run of equal rows, and every row's run."""
    fresh = np.append(True, (seen[1:] != seen[:-1]).any(axis=1))
    return np.flatnonzero(fresh), np.cumsum(fresh) - 1


def expected_loss_gradient(
    loss: Callable[[Batch], Any],
    parameters: Any,
    batches: Callable[[], Iterator[tuple[Any, Batch]]],
    *,
    group: int = 0,
    limit: int = 1 << 14,
) -> list[Any]:
    """The expected gradient of any loss as autograd sees it, sequences weighted by their probability.

    Args:
        loss: ``Batch -> [B]`` (each sequence's own loss), or a scalar for ``group >= 1``.
        parameters: a tensor or list of tensors to differentiate in.
        batches: makes the iterator of ``torch_batches`` afresh.
        group: 0 for per-sequence losses; n for a scalar loss that couples n sequences: all groups of n are tried.
        limit: the most groups.

    Returns:
        One gradient per parameter.

    Raises:
        ValueError: for a loss of the wrong shape, or more groups than ``limit``.
    """
    import torch

    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for chunks, (weight, batch) in enumerate(batches()):
        if group > 1 and chunks:
            raise ValueError("groups of sequences must fit one chunk: give torch_batches a larger chunk")
        if group == 0:
            each = loss(batch)
            if tuple(each.shape) != (len(batch.tokens),):
                raise ValueError(
                    f"the loss has shape {tuple(each.shape)}, not one per sequence ({len(batch.tokens)},): "
                    "return that, or give group=n for a loss of n sequences"
                )
            objective = (weight.detach() * each).sum()
        else:
            if len(batch.tokens) ** group > limit:
                raise ValueError(
                    f"{len(batch.tokens)}^{group} groups are past the limit of {limit} for enumeration: "
                    "take a shorter length or a smaller group"
                )
            objective = sum(
                weight[list(index)].detach().prod() * loss(rows_of(batch, list(index)))
                for index in itertools.product(range(len(batch.tokens)), repeat=group)
            )
        if not getattr(objective, "requires_grad", False):
            continue  # a detached loss has no gradient at all
        gradients = torch.autograd.grad(objective, parameters, allow_unused=True)
        total = [t if g is None else t + g for t, g in zip(total, gradients, strict=True)]
    return total


def rows_of(batch: Batch, index: Any) -> Batch:
    """The batch of some of the rows."""
    return Batch(**{name: getattr(batch, name)[index] for name in Batch.__dataclass_fields__})
