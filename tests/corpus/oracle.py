"""The second route: what an entry's expected gradient is, by torch's autograd over every sequence of a tiny model.

It shares no code with the checker. A world holds all sequences of one length of a tabular next-token model, in one
layout of the batch: all tokens real (``fixed``), padded on the right (``ends``) or left (``left``), or with a token of
the environment between the policy's (``holes``). Expectations are sums with the sequences' probabilities; the wanted
fields are derivatives of sums over them, prefix probabilities held or not.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from corpus.entries import Entry

V, LENGTH = 3, 3
DTYPE = torch.float64

_NAMES = {
    "log_probs": "logp logps log_prob log_probs per_token_logps action_log_probs new_logp new_log_probs new_logprobs "
    "logprobs student_logp token_logprobs log_pi policy_logps",
    "reference": "ref_logp ref_logps ref_log_prob ref_log_probs ref_per_token_logps log_probs_base ref_logprobs "
    "base_action_log_probs teacher_logp log_q ref reference_logps base_logprobs",
    "behaviour": "old_logp old_logps old_log_prob old_log_probs old_per_token_logps rollout_log_probs "
    "inference_logprobs old_action_log_probs old_logprobs rollout_logprobs log_mu",
    "mask": "mask response_mask completion_mask action_mask loss_mask attention_mask valid",
    "logits": "logits student_logits policy_logits new_logits",
    "ref_logits": "ref_logits teacher_logits reference_logits base_logits",
    "full_log_probs": "full_log_probs all_logp vocab_logprobs",
    "full_reference": "ref_full_log_probs all_ref_logp ref_vocab_log_probs",
    "tokens": "tokens input_ids labels completion_ids actions",
    "log_ratio": "log_ratio",
    "reverse_log_ratio": "log_r",
    "rewards": "rewards scores",
    "advantages": "advantages",
    "sequence_advantages": "seq_advantages",
    "token_rewards": "token_level_rewards token_level_scores",
    "beta": "beta kl_coef kl_coeff kl_loss_coef kl_ctl init_kl_coef",
}  # fmt: skip
ROLES = {name: role for role, names in _NAMES.items() for name in (role, *names.split())}


@dataclass(frozen=True, eq=False)
class World:
    """Every sequence of a model: M of them.

    Args:
        theta, reference: ``[S, V]`` logits of policy and reference by context; the policy's are the parameters. They
            are not normalised, and their logsumexp differs between contexts.
        contexts, tokens, mask: ``[M, T]``; mask is False where padded and at the environment's tokens.
        real: ``[M, T]`` True where there is a token at all.
        others: ``[M]`` probability of the environment's tokens.
    """

    theta: torch.Tensor
    reference: torch.Tensor
    contexts: torch.Tensor
    tokens: torch.Tensor
    mask: torch.Tensor
    real: torch.Tensor
    others: torch.Tensor

    def picked(self, table: torch.Tensor) -> torch.Tensor:
        """``[M, T]`` log-probs of the tokens; where padded, those of token 0: a model scores padding too."""
        return table.log_softmax(-1)[self.contexts].gather(-1, self.tokens[..., None])[..., 0]

    @property
    def score(self) -> torch.Tensor:
        """``[M]`` log-probability of the policy's own tokens."""
        return torch.where(self.mask, self.picked(self.theta), torch.zeros(())).sum(-1)

    @property
    def probability(self) -> torch.Tensor:
        """``[M]``, differentiable."""
        return self.score.exp() * self.others

    def at(self, theta: torch.Tensor) -> World:
        """The same sequences under other parameters."""
        return replace(self, theta=theta)


def _unroll(start: int, length: int, *, end: int | None) -> Iterator[list[tuple[int, int]]]:
    """Lists of (context, token); a context is the previous token, the start its own."""
    if length == 0:
        yield []
        return
    for token in range(V):
        rest = [[]] if token == end else _unroll(token, length - 1, end=end)
        for tail in rest:
            yield [(start, token), *tail]


@cache
def world(layout: str, length: int = LENGTH, spread: float = 1.0) -> World:
    """The world of a layout; ``spread`` scales the logits, and with them the log-ratios."""
    rng = np.random.default_rng(7)
    theta, reference = (torch.tensor(spread * rng.normal(size=(V + 1, V))) for _ in range(2))
    theta[:, -1] -= 0.7  # replies long enough where the last token ends them
    reference[:, -1] -= 0.7
    rows = list(_unroll(V, length + (layout == "holes"), end=V - 1 if layout in ("ends", "left") else None))
    width = max(map(len, rows))
    contexts, tokens = (np.zeros((len(rows), width), np.int64) for _ in range(2))
    real = np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        at = width - len(row) if layout == "left" else 0
        for j, (context, token) in enumerate(row, at):
            contexts[i, j], tokens[i, j], real[i, j] = context, token, True
    mask, others = real.copy(), np.ones(len(rows))
    if layout == "holes":  # the second token is the environment's, from probabilities of its own
        mask[:, 1] = False
        table = rng.dirichlet(np.ones(V), V + 1)
        others = table[contexts[:, 1], tokens[:, 1]]
    return World(theta.requires_grad_(), reference, *map(torch.tensor, (contexts, tokens, mask, real, others)))


# ------------------------------------------------------------------------------------------------- the fields


def _local(w: World, divergence: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """``[M, T]`` the divergence of the next-token distributions, 0 where masked."""
    each = divergence(w.theta.log_softmax(-1), w.reference.log_softmax(-1)).sum(-1)[w.contexts]
    return torch.where(w.mask, each, torch.zeros(()))


def _reverse(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return p.exp() * (p - q)


def _forward(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return q.exp() * (q - p)


def _jensen_shannon(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    m = ((p.exp() + q.exp()) / 2).log()
    return (_reverse(p, m) + _reverse(q, m)) / 2


def _chi_squared(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (q.exp() - p.exp()) ** 2 / p.exp()


def _neg_entropy(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return p.exp() * p + 0 * q


_DIVERGENCES = {
    "reverse": _reverse, "forward": _forward, "jensen-shannon": _jensen_shannon, "chi-squared": _chi_squared,
    "entropy": _neg_entropy,
}  # fmt: skip


def _held(w: World, name: str) -> torch.Tensor:
    return (w.probability.detach()[:, None] * _local(w, _DIVERGENCES[name])).sum()


def _through_prefixes(w: World, name: str) -> torch.Tensor:
    """The sum over sequences of probability times local divergences: each term's later factors sum to 1."""
    return (w.probability[:, None] * _local(w, _DIVERGENCES[name])).sum()


def _of_sequences(w: World) -> torch.Tensor:
    """KL(pi_ref || pi) of whole sequences."""
    q = World(w.reference, w.theta, w.contexts, w.tokens, w.mask, w.real, w.others)
    return (q.probability * (q.score - w.score)).sum()


# target -> the objectives that deserve the name: of whole sequences, or at each token with its prefix held
OBJECTIVES: dict[str, tuple[Callable[[World], torch.Tensor], ...]] = {
    "sequence": (lambda w: _through_prefixes(w, "reverse"),),
    "token": (lambda w: _held(w, "reverse"),),
    "token-forward": (lambda w: _held(w, "forward"),),
    "future": (lambda w: _through_prefixes(w, "reverse") - _held(w, "reverse"),),
    "forward-kl": (_of_sequences,),
    "jensen-shannon": tuple(lambda w, f=f: f(w, "jensen-shannon") for f in (_held, _through_prefixes)),
    "chi-squared": tuple(lambda w, f=f: f(w, "chi-squared") for f in (_held, _through_prefixes)),
    "entropy": tuple(lambda w, f=f: f(w, "entropy") for f in (_held, _through_prefixes)),
    "k2-in-loss": (lambda w: _held(w, "reverse"),),
}


def fields(w: World, target: str, weight: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The gradients ``[S, V]`` that are right for the target; ``weight [M]`` holds prefixes at another sampler's."""
    if weight is not None and target == "token":
        held = (weight[:, None] * _local(w, _reverse)).sum()
        return [torch.autograd.grad(held, w.theta)[0]]
    return [torch.autograd.grad(objective(w), w.theta)[0] for objective in OBJECTIVES[target]]


# --------------------------------------------------------------------------------- what a function's gradient is


@dataclass(frozen=True)
class Given:
    """What the function is given besides the model's numbers."""

    rewards: bool = False
    beta: float = 1.0
    mu: torch.Tensor | None = None


PLAIN = Given()


def arguments(entry: Entry, w: World, given: Given, mask: str) -> dict[str, Any]:
    """The function's arguments by name; tensors."""
    policy, reference = w.picked(w.theta), w.picked(w.reference)
    sampler = policy.detach() if given.mu is None else w.picked(given.mu)
    rows, last = len(w.tokens), w.real & ~w.real.roll(-1, 1)
    last[:, -1] = w.real[:, -1]
    reward = torch.where(w.real, w.tokens.to(DTYPE) * 1.7 - 0.4, torch.zeros(())).sum(-1) * given.rewards
    made: dict[str, Any] = {
        "log_probs": policy, "reference": reference, "behaviour": sampler, "mask": w.mask.to(_MASKS[mask]),
        "logits": w.theta[w.contexts], "ref_logits": w.reference[w.contexts],
        "full_log_probs": w.theta.log_softmax(-1)[w.contexts],
        "full_reference": w.reference.log_softmax(-1)[w.contexts],
        "tokens": w.tokens, "log_ratio": policy - reference, "reverse_log_ratio": reference - policy,
        "rewards": reward, "sequence_advantages": reward, "advantages": reward[:, None].expand(rows, w.tokens.shape[1]),
        "token_rewards": torch.where(last, reward[:, None], torch.zeros(())), "beta": given.beta,
    }  # fmt: skip
    fixed, mapping = entry.options.get("arguments", {}), entry.options.get("mapping", {})
    out = dict(fixed)
    for name, parameter in inspect.signature(getattr(entry.function, "forward", entry.function)).parameters.items():
        role, default = ROLES.get(mapping.get(name, name)), parameter.default
        stays = isinstance(default, (int, float)) or default is None
        if name in fixed or (stays and role != "beta" and name not in mapping) or role is None:
            continue
        out[name] = made[role]
    return out


_MASKS = {"bool": torch.bool, "float": DTYPE, "int": torch.int64}


def call(entry: Entry, w: World, given: Given = PLAIN) -> torch.Tensor:
    """What the function returns on these rows; numpy functions get arrays, and no gradient flows."""
    error: Exception | None = None
    for mask in _MASKS:
        made = arguments(entry, w, given, mask)
        try:
            return _called(entry, made)
        except (RuntimeError, TypeError, IndexError) as caught:
            error = error or caught
    assert error is not None
    raise error


def _called(entry: Entry, made: dict[str, Any]) -> torch.Tensor:
    if not is_numpy(entry):
        return torch.as_tensor(entry.function(**made), dtype=DTYPE)
    arrays = {n: v.detach().numpy() if isinstance(v, torch.Tensor) else v for n, v in made.items()}
    return torch.tensor(np.array(entry.function(**arrays), float))


def is_numpy(entry: Entry) -> bool:
    """Whether it is of a module that knows no torch."""
    return entry.function.__module__.endswith("_numpy")


def _rows(w: World, rows: list[int]) -> World:
    return replace(w, **{n: getattr(w, n)[rows] for n in ("contexts", "tokens", "mask", "real", "others")})


def _penalty(entry: Entry, w: World, given: Given) -> torch.Tensor:
    """``[B]`` penalties, or ``[]`` of a loss; ``[B, T]`` returns are left as they are."""
    out = call(entry, w, given)
    sign = -1.0 if entry.options.get("returns", "penalty") != "penalty" else 1.0
    if out.ndim == 2:
        out = torch.where(w.mask, out, torch.zeros(()))
        if entry.options.get("returns") != "return":
            out = out.sum(-1)
    return sign * out


def surrogate(entry: Entry, w: World, given: Given = PLAIN) -> torch.Tensor:
    """The number whose derivative, sampling held, is the expected gradient of the entry's use."""
    weight = w.probability.detach()
    if given.mu is not None:
        weight = w.at(given.mu).probability.detach()
    if entry.group > 1:
        return _grouped(entry, w, given, weight)
    value = _penalty(entry, w, given)
    if value.ndim == 0:
        each = [_penalty(entry, _rows(w, [i]), given) for i in range(len(weight))]
        return (weight * torch.stack(each)).sum()
    return (weight * _placed(entry, w, value)).sum()


def _placed(entry: Entry, w: World, value: torch.Tensor) -> torch.Tensor:
    """``[B]`` the term in its placement."""
    if value.ndim == 2:  # returns, each for its own token
        return (value.detach() * torch.where(w.mask, w.picked(w.theta), torch.zeros(()))).sum(-1)
    pathwise = value if entry.placement != "reward" else torch.zeros(())
    return pathwise + (value.detach() * w.score if entry.placement != "loss" else 0.0)


def _grouped(entry: Entry, w: World, given: Given, weight: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=DTYPE)
    for group in itertools.product(range(len(weight)), repeat=entry.group):
        part = _rows(w, list(group))
        value = _penalty(entry, part, given)
        value = value if value.ndim == 0 else _placed(entry, part, value).mean()
        total = total + weight[list(group)].prod() * value
    return total


def gradient(entry: Entry, w: World, given: Given = PLAIN) -> torch.Tensor:
    """``[S, V]`` the expected gradient: autograd, or central differences for numpy."""
    if not is_numpy(entry) or entry.placement == "reward":
        total = surrogate(entry, w, given)
        if not total.requires_grad:
            return torch.zeros_like(w.theta)
        found = torch.autograd.grad(total, w.theta, allow_unused=True)[0]
        return torch.zeros_like(w.theta) if found is None else found
    score = gradient(replace(entry, placement="reward"), w, given) if entry.placement == "both" else 0.0
    return _differences(entry, w, given) + score


def _differences(entry: Entry, w: World, given: Given, step: float = 1e-5) -> torch.Tensor:
    """Of a term: no loss of the corpus is numpy."""
    weight = w.probability.detach()
    entry = replace(entry, placement="loss")
    out = torch.zeros_like(w.theta)
    for place in np.ndindex(*w.theta.shape):
        for sign in (1, -1):
            theta = w.theta.detach().clone()
            theta[place] += sign * step
            out[place] += sign * (weight * _penalty(entry, w.at(theta), given)).sum() / (2 * step)
    return out
