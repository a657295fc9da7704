"""The objective of one policy-gradient step, in pure torch: task advantages and a KL configuration, clipped or not.

Nothing here knows of models or trainers: the inputs are per-token log-probs. Both backends call it, and the KL part
is ``synth.configurations.score_coefficients`` unchanged, so a language model descends the very gradient whose bias
and variance the exact engine computes.

Shapes: B sequences in groups of consecutive rows (the samples of one prompt), T response tokens, V vocabulary.
Losses are descended: the task part has the sign of minus the reward, the KL part of plus the penalty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from klgrad.synth.configurations import Configuration, importance_ratios, score_coefficients
from klgrad.synth.estimators import Estimator, unknown

Summary = Callable[[Tensor, Tensor], Tensor]  # (log_probs, reference) [m, V] -> [m]

_STD_FLOOR = 1e-4  # added to a group's standard deviation, as TRL does: a group that agrees gives no signal


# --------------------------------------------------------------------------------------------------- advantages


def _grouped(rewards: Tensor, group: int) -> Tensor:
    if group < 2 or len(rewards) % group:
        raise ValueError(f"{len(rewards)} sequences cannot be split into groups of {group}: a group has 2 or more")
    return rewards.reshape(-1, group)


def leave_one_out(rewards: Tensor, group: int) -> Tensor:
    """``[B]`` reward minus the mean of the *other* rewards of its group (RLOO)."""
    r = _grouped(rewards, group)
    return ((r - r.mean(1, keepdim=True)) * group / (group - 1)).reshape(-1)


def group_mean(rewards: Tensor, group: int) -> Tensor:
    """``[B]`` reward minus the group's mean (Dr. GRPO, arXiv 2503.20783): 1 - 1/G times leave-one-out."""
    r = _grouped(rewards, group)
    return (r - r.mean(1, keepdim=True)).reshape(-1)


def group_standardised(rewards: Tensor, group: int) -> Tensor:
    """``[B]`` reward minus the group's mean, over its standard deviation (GRPO, arXiv 2402.03300)."""
    r = _grouped(rewards, group)
    return ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + _STD_FLOOR)).reshape(-1)


ADVANTAGES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "rloo": leave_one_out,
    "grpo": group_standardised,
    "dr-grpo": group_mean,
}
AGGREGATIONS = ("sum", "sequence-mean", "token-mean", "constant")
KL_AGGREGATIONS = ("outside", "policy")


@dataclass(frozen=True)
class Objective:
    """How rewards and the KL become one loss. Plain data.

    Args:
        configuration: the KL's recipe; ``None`` for no KL.
        beta: the weight of the KL; 0 is no KL.
        group: samples of one prompt.
        advantage: ``rloo``, ``grpo`` or ``dr-grpo``.
        aggregation: of the task loss over tokens: ``sum`` (RLOO), ``sequence-mean`` (GRPO), ``token-mean`` (over
            the batch), ``constant`` (Dr. GRPO: over ``max_length``); then the mean over sequences.
        kl_aggregation: ``outside``: the KL keeps its configuration's own aggregation, as in v1 Eq. 4 of A Comedy of
            Estimators, where it stands outside the per-sequence mean; ``policy``: its tokens are weighted like
            the task's (DeepSeekMath's GRPO, most libraries).
        ratio: importance ratio of the task: ``none``, ``token`` or ``sequence``.
        clip_low, clip_high: the ratio is clipped to [1 - low, 1 + high]; ``None`` does not clip. A KL in the reward
            with ``token-ratio`` is then part of the advantage, and clipped with it.
        max_length: the divisor of ``constant``.

    Raises:
        ValueError: for names that do not exist and numbers that cannot be.
    """

    configuration: Configuration | None = None
    beta: float = 0.0
    group: int = 4
    advantage: str = "rloo"
    aggregation: str = "sum"
    kl_aggregation: str = "outside"
    ratio: str = "none"
    clip_low: float | None = None
    clip_high: float | None = None
    max_length: int = 1

    def __post_init__(self) -> None:
        for field, choices in (
            ("advantage", tuple(ADVANTAGES)),
            ("aggregation", AGGREGATIONS),
            ("kl_aggregation", KL_AGGREGATIONS),
            ("ratio", ("none", "token", "sequence")),
        ):
            if getattr(self, field) not in choices:
                raise unknown(field, str(getattr(self, field)), list(choices))
        if not 0 <= self.beta < float("inf"):
            raise ValueError(f"beta = {self.beta} must be 0 or a positive number")
        if self.beta and self.configuration is None:
            raise ValueError(f"beta = {self.beta} needs a KL configuration, such as k1-in-reward")
        if self.group < 2:
            raise ValueError(f"group = {self.group} must be 2 or more: the baseline is the other samples of a prompt")
        if (self.clip_low is None) != (self.clip_high is None):
            raise ValueError("clip_low and clip_high go together: give both or neither")
        if self.clip_low is not None and self.clip_high is not None:
            if not (0 < self.clip_low < 1 and self.clip_high > 0):
                raise ValueError(f"clip to [1 - {self.clip_low}, 1 + {self.clip_high}] must hold 1 and stay positive")
            if self.ratio == "none":
                raise ValueError("clipping needs an importance ratio: ratio = token or sequence")
        kl = self.configuration
        if kl is not None and kl.baseline not in ("none", "constant", "loo"):
            raise ValueError(f"{kl}: an exact baseline is not known for a language model: use b=X or loo")
        if kl is not None and kl.baseline == "loo" and kl.baseline_value and self.group % int(kl.baseline_value):
            raise ValueError(f"{kl}: a group of {self.group} samples is no multiple of loo={int(kl.baseline_value)}")

    @property
    def penalised(self) -> bool:
        """Whether there is a KL in the loss at all; without, no reference model is needed."""
        return self.configuration is not None and self.beta > 0


# --------------------------------------------------------------------------------------- what a forward pass gives


def token_terms(
    features: Tensor,
    head: Callable[[Tensor], Tensor],
    tokens: Tensor,
    mask: Tensor,
    *,
    reference: tuple[Tensor, Callable[[Tensor], Tensor]] | None = None,
    summaries: Mapping[str, Summary] | None = None,
    temperature: float = 1.0,
    chunk: int = 1 << 24,
) -> dict[str, Tensor]:
    """Log-probs of the tokens, and anything else summed out of the next-token distributions, in chunks.

    The logits of a whole batch never exist: real tokens are taken in chunks, and a chunk's logits are recomputed in
    the backward pass. Statistics are float32 at least, whatever the model's precision.

    Args:
        features: ``[B, T, H]`` what the head turns into next-token logits for each response token.
        head: ``[m, H] -> [m, V]``.
        tokens: ``[B, T]`` sampled tokens.
        mask: ``[B, T]`` True for real ones.
        reference: the reference's features ``[B, T, H']`` and head.
        summaries: name -> function of ``(log_probs, reference) [m, V]`` that returns ``[m]``; may carry a gradient.
        chunk: logits held at once, as m x V entries.

    Returns:
        ``log_probs``, ``reference`` (with a reference) and each summary, ``[B, T]``, 0 where masked.

    Raises:
        ValueError: when the reference has another vocabulary, or summaries are asked for without one.
    """
    wanted = dict(summaries or {})
    if wanted and reference is None:
        raise ValueError("full-vocabulary terms compare with a reference: there is none")
    vocabulary = int(head(features[:1, :1]).shape[-1])
    rows = max(1, chunk // vocabulary)
    places = mask.nonzero(as_tuple=True)
    flat, targets = features[places], tokens[places]
    other = reference[0][places] if reference is not None else None

    def part(hidden: Tensor, target: Tensor, theirs: Tensor | None) -> tuple[Tensor, ...]:
        full = log_softmax(head(hidden), temperature)
        found = [full.gather(-1, target[:, None])[:, 0]]
        if theirs is not None and reference is not None:
            with torch.no_grad():
                base = log_softmax(reference[1](theirs), temperature)
            if base.shape != full.shape:
                raise ValueError(
                    f"the reference has a vocabulary of {base.shape[-1]} and the policy of {full.shape[-1]}: "
                    "a KL needs the same tokens in both"
                )
            found.append(base.gather(-1, target[:, None])[:, 0])
            found += [function(full, base) for function in wanted.values()]
        return tuple(found)

    pieces = []
    whole = len(targets) <= rows
    for first in range(0, max(len(targets), 1), rows):
        cut = slice(first, first + rows)
        theirs = None if other is None else other[cut]
        if whole or not torch.is_grad_enabled():
            pieces.append(part(flat[cut], targets[cut], theirs))
        else:
            from torch.utils.checkpoint import checkpoint

            pieces.append(checkpoint(part, flat[cut], targets[cut], theirs, use_reentrant=False))
    names = ["log_probs", *(["reference"] if reference is not None else []), *wanted]
    columns = [torch.cat(column) for column in zip(*pieces, strict=True)]
    return {
        name: torch.zeros(mask.shape, dtype=column.dtype, device=column.device).index_put(places, column)
        for name, column in zip(names, columns, strict=True)
    }


def log_softmax(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Next-token log-probs in float32 or better, at the temperature that tokens are sampled with."""
    precise = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(precise / temperature, -1)


def _masked_product(weight: Tensor, value: Tensor) -> Tensor:
    """weight * value, 0 where the weight is: tokens that are never emitted have a log-prob of -inf."""
    return torch.where(weight != 0, weight * torch.where(weight != 0, value, torch.zeros_like(value)), 0.0)


def weighted_score(weight: Callable[[Tensor, Tensor], Tensor]) -> Summary:
    """A summary whose gradient is sum_v weight_v times the score of v; the weights ``[m, V]`` carry none."""
    return lambda full, base: _masked_product(weight(full.detach(), base), full).sum(-1)


def exact_kl(full: Tensor, base: Tensor) -> Tensor:
    """``[m]`` KL(pi || pi_ref) of the next-token distributions; no gradient."""
    return _masked_product(full.detach().exp(), full.detach() - base).sum(-1)


def exact_forward_kl(full: Tensor, base: Tensor) -> Tensor:
    """``[m]`` KL(pi_ref || pi) of the next-token distributions; no gradient."""
    return _masked_product(base.exp(), base - full.detach()).sum(-1)


def exact_entropy(full: Tensor, base: Tensor) -> Tensor:
    """``[m]`` entropy of the policy's next-token distribution; no gradient."""
    return -_masked_product(full.detach().exp(), full.detach()).sum(-1)


MONITORS: dict[str, Summary] = {"kl": exact_kl, "forward_kl": exact_forward_kl, "entropy": exact_entropy}


def estimator_summaries(estimator: Estimator) -> dict[str, Summary]:
    """The summaries that a full-vocabulary estimator needs; none for a sampled one."""
    if not estimator.full:
        return {}
    return {
        "value": lambda full, base: estimator.value(full.detach(), base),
        "path": weighted_score(estimator.slope),
    }


# ---------------------------------------------------------------------------------------------------- the KL's part


def kl_coefficients(
    configuration: Configuration, terms: Mapping[str, Tensor], mask: Tensor, behaviour: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Weights ``[B, T]`` on the scores of sampled tokens, and on ``terms["path"]`` for full-vocabulary estimators.

    ``score_coefficients`` unchanged: a full-vocabulary estimator whose vocabulary was summed out chunk by chunk is
    one over a vocabulary of 1, with ``terms["value"]`` as its value and ``terms["path"]`` as what it differentiates.
    """
    log_probs = terms["log_probs"].detach()
    b = configuration.baseline_value if configuration.baseline == "constant" else 0.0
    full: dict[str, Tensor] = {}
    if configuration.estimator.full:
        summed = replace(
            configuration.estimator, value=lambda value, _: value[..., 0], slope=lambda value, _: torch.ones_like(value)
        )
        configuration = replace(configuration, estimator=summed)
        full = {"full_log_probs": terms["value"][..., None], "full_reference": terms["value"][..., None]}
    token, vocab = score_coefficients(
        configuration, log_probs, terms["reference"], mask, behaviour=behaviour, baseline=b, **full
    )
    return token, None if vocab is None else vocab[..., 0]


def reward_part(configuration: Configuration) -> Configuration:
    """What a configuration does in the reward alone."""
    return replace(configuration, placement="reward")


def loss_part(configuration: Configuration) -> Configuration:
    """What a configuration does in the loss alone, where there is no credit and no baseline."""
    return replace(
        configuration, placement="loss", credit="whole", baseline="none", baseline_value=0.0, rollout_value=False
    )


def kl_loss(
    configuration: Configuration, terms: Mapping[str, Tensor], mask: Tensor, behaviour: Tensor | None = None
) -> Tensor:
    """``[B]`` losses whose gradients are the configuration's g(y), each sequence its own."""
    token, path = kl_coefficients(configuration, terms, mask, behaviour)
    return _surrogate(token, path, terms).sum(1)


def _surrogate(token: Tensor, path: Tensor | None, terms: Mapping[str, Tensor]) -> Tensor:
    loss = token.detach() * terms["log_probs"]
    return loss if path is None else loss + path.detach() * terms["path"]


# ------------------------------------------------------------------------------------------------------- the loss


def token_weights(aggregation: str, mask: Tensor, max_length: int = 1, dtype: Any = torch.float64) -> Tensor:
    """``[B, T]`` weight of each token's loss; the loss is the plain sum of weight x token loss."""
    ones = mask.to(dtype)
    if aggregation == "token-mean":
        return ones / ones.sum().clamp(min=1)
    per_sequence = ones / len(mask)
    if aggregation == "sequence-mean":
        return per_sequence / ones.sum(1, keepdim=True).clamp(min=1)
    return per_sequence / max_length if aggregation == "constant" else per_sequence


def policy_loss(
    objective: Objective,
    terms: Mapping[str, Tensor],
    mask: Tensor,
    advantages: Tensor,
    behaviour: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The scalar loss of a batch: clipped task surrogate plus beta times the KL, and what happened in it.

    Args:
        terms: from ``token_terms``: ``log_probs`` with a graph; with a KL ``reference``, and ``value`` and ``path``
            for a full-vocabulary estimator.
        mask: ``[B, T]`` True for real tokens, which come first.
        advantages: ``[B]`` of the task, without any KL.
        behaviour: ``[B, T]`` log-probs of the policy that sampled; ``None`` on-policy, where every ratio is 1.

    Returns:
        The loss, and ``clip_share`` (of tokens whose gradient the clip holds back), ``ratio_max``.
    """
    log_probs = terms["log_probs"].detach()
    weights = token_weights(objective.aggregation, mask, objective.max_length, log_probs.dtype)
    kl_weights = weights if objective.kl_aggregation == "policy" else torch.full_like(weights, 1 / len(mask))
    log_rho = torch.where(mask, log_probs - (log_probs if behaviour is None else behaviour), 0.0)
    own, _ = importance_ratios(objective.ratio, log_rho, torch)
    pull = weights * advantages.to(log_probs)[:, None]  # on each score, upwards; the ratio comes last
    apart = objective.configuration if objective.penalised else None
    if apart is not None and objective.clip_low is not None and apart.in_reward and apart.ratio == objective.ratio:
        folded = replace(reward_part(apart), ratio="none")
        pull = pull - objective.beta * kl_weights * kl_coefficients(folded, terms, mask, behaviour)[0]
        apart = loss_part(apart) if apart.in_loss else None
    held = _held(objective, own, pull) & mask
    loss = -(torch.where(held, 0.0, own * pull).detach() * terms["log_probs"]).sum()
    if apart is not None:
        token, path = kl_coefficients(apart, terms, mask, behaviour)
        loss = loss + objective.beta * (kl_weights * _surrogate(token, path, terms)).sum()
    real = int(mask.sum()) or 1
    return loss, {"clip_share": float(held.sum()) / real, "ratio_max": float(log_rho.max().exp())}


def _held(objective: Objective, own: Tensor, pull: Tensor) -> Tensor:
    """Where min(rho A, clip(rho) A) is the clipped branch, which has no gradient."""
    if objective.clip_low is None or objective.clip_high is None:
        return torch.zeros_like(pull, dtype=torch.bool)
    return ((pull > 0) & (own > 1 + objective.clip_high)) | ((pull < 0) & (own < 1 - objective.clip_low))
