"""Averages over tokens and over samples: aggregation and baselines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from klgrad.analysis.derivations.divergences import forward_kl
from klgrad.analysis.derivations.model import Model
from klgrad.analysis.derivations.steps import Comparison, Derivation, Step
from klgrad.analysis.derivations.terms import TOKEN_FORWARD, past, true, zero

if TYPE_CHECKING:
    from jaxtyping import Float


def _inverse_length(m: Model) -> Float[np.ndarray, " d"]:
    moved = m.derivative(lambda log_probs: np.exp(m.log_prob(log_probs)))
    return m.total(1 / m.count, moved, m.p[:, None] * m.score_size)


def _per_token(m: Model) -> Float[np.ndarray, " d"]:
    def weighted(log_probs: np.ndarray) -> np.ndarray:
        return np.exp(m.log_prob(log_probs)) * m.log_ratio(log_probs).sum(axis=1)

    size = m.p * (1 + np.abs(m.delta).sum(axis=1))
    return m.total(1 / m.count, m.derivative(weighted), size[:, None] * m.score_size)


aggregation = Derivation(
    name="aggregation",
    title="Averaging over a sequence's tokens changes what is optimised, and k1 in the loss lengthens answers",
    source="klgrad; mode weights: SaifPunjwani/polgrad, docs/derivations/aggregation.md",
    steps=(
        Step(
            r"\E{\tfrac{1}{D}\sum_t \nabla\delta_t}",
            r"\tfrac{1}{D}\,\E{\score} = 0",
            "Dividing by a constant D only rescales: k1 in the loss stays zero (D = 10).",
            (lambda m: m.engine("k1-in-loss+divide=10"), lambda m: m.mean(m.score, m.score_size) / 10),
            part="loss",
            zero=True,
        ),
        Step(
            r"\E{\tfrac{1}{|y|}\,\sum_t \nabla\delta_t}",
            r"\E{\tfrac{1}{|y|}\,\score}",
            r"The sequence's own length is random where sequences can end, and $1/|y|$ is not a constant.",
            (lambda m: m.engine("k1-in-loss+length-mean"), lambda m: m.mean(m.score / m.count[:, None], m.score_size)),
            part="loss",
        ),
        Step(
            r"\E{\tfrac{1}{|y|}\,\score}",
            r"\nabla\,\E{\tfrac{1}{|y|}}",
            r"$\pi(y)\,\score = \nabla\pi(y)$: this descends the mean of $1/|y|$, so it lengthens answers, "
            r"whatever the "
            "reference.",
            (lambda m: m.mean(m.score / m.count[:, None], m.score_size), _inverse_length),
            part="loss",
        ),
        Step(
            r"\E{\tfrac{1}{|y|}\,\left(\sum_t \delta_t\right)\score}",
            r"\nabla\,\E{\tfrac{1}{|y|}\,\sum_t \delta_t} - \nabla\,\E{\tfrac{1}{|y|}}",
            "Product rule: k1 per token in the reward is not the gradient of the KL per token, which needs the length "
            "pressure as well.",
            (lambda m: m.engine("k1-in-reward+length-mean"), lambda m: _per_token(m) - _inverse_length(m)),
            part="reward",
        ),
        Step(
            r"\E{\tfrac{1}{|y|}\,K\,\score} + \E{\tfrac{1}{|y|}\,\nabla K}",
            r"\nabla\,\E{\tfrac{1}{|y|}\,K}",
            "In both placements the length-normalised KL is descended, exactly.",
            (lambda m: m.engine("k1-in-both+length-mean"), _per_token),
            part="both",
            where=r"K = \sum_t \delta_t",
        ),
        Comparison(
            r"\E{\tfrac{1}{|y|}\,\sum_t \nabla\delta_t}",
            r"\nabla\KL",
            "The length pressure next to the gradient that was wanted.",
            (lambda m: m.engine("k1-in-loss+length-mean"), true),
            part="loss",
        ),
        Step(
            r"\E{K\,\score} + \tfrac{1}{T}\,\E{\nabla K}",
            r"\nabla\KL - \left(1 - \tfrac{1}{T}\right)" + TOKEN_FORWARD,
            "Different divisors in the two placements: for k3 summed in the reward and averaged in the loss, the "
            "biases "
            "no longer cancel.",
            (
                lambda m: m.engine("k3-in-reward") + m.engine(f"k3-in-loss+divide={m.length}"),
                lambda m: true(m) - (1 - 1 / m.length) * m.local(forward_kl),
            ),
            part="both",
        ),
    ),
    conclusion="Sum over tokens, or divide by a constant. With $1/|y|$ the KL is another objective, and k1 in the "
    "loss is "
    "no longer nothing.",
    notation=((r"|y|,\ T", "tokens of the sequence, and their largest number"),),
    preset="ending",
    lengths=(5,),
)

_PAIRS_AT_ONCE = 1 << 22


def _grouped(m: Model, weight: float) -> Float[np.ndarray, " d"]:
    """Mean over all groups of two of (K_i - K_j) weight on the score of i, averaged over the two."""
    k, p = m.along(m.delta), m.p
    first, second = np.zeros_like(p), np.zeros_like(p)
    rows = max(1, _PAIRS_AT_ONCE // len(p))
    for start in range(0, len(p), rows):
        part = slice(start, start + rows)
        difference = weight * (k[part, None] - k[None, :]) * p[None, :]
        first[part] = difference.sum(axis=1)
        second -= p[part] @ (weight * (k[part, None] - k[None, :]))
    size = np.abs(m.delta).sum(axis=1)
    size = weight * (size + p @ size)[:, None] * m.score_size
    return (m.mean(first[:, None] * m.score, size) + m.mean(second[:, None] * m.score, size)) / 2


def _four(m: Model) -> Float[np.ndarray, " n"]:
    """Sum of log-ratios of four sequences spread over the list."""
    some = np.linspace(0, len(m.p) - 1, 4).astype(int)
    m.note(np.abs(m.delta[some]).sum())
    return m.delta.sum(axis=1)[some]


def _own_mean(m: Model) -> Float[np.ndarray, " n"]:
    return _four(m) - _four(m).mean()


def _leave_one_out(m: Model) -> Float[np.ndarray, " n"]:
    k = _four(m)
    return np.array([k[i] - np.delete(k, i).mean() for i in range(len(k))])


baseline = Derivation(
    name="baseline",
    title="Baselines: leave-one-out is free, the mean of one's own group shrinks the penalty",
    source="Kool et al. 2019 (leave-one-out); the factor of the group mean: xihuai18's post of 1 December 2025, "
    "section 8.3",
    steps=(
        Step(
            r"\E{b\,\score}",
            "0",
            "A constant comes out of the expectation, and the score has mean zero (b = 2).",
            (lambda m: m.mean(2.0 * m.score, 2.0 * m.score_size), zero),
            part="reward",
            zero=True,
        ),
        Step(
            r"\E{\sum_t b(y_{<t})\,\scoret}",
            "0",
            "So has the score of every token after its prefix: any function of the prefix is free (here the log-ratio "
            "so far).",
            (
                lambda m: past(m, m.delta),
                zero,
            ),
            part="reward",
            zero=True,
        ),
        Step(
            r"\E{\tfrac{1}{n}\sum_i \left(K_i - \tfrac{1}{n-1}\sum_{j \ne i} K_j\right)"
            r"\nabla\log\pi(y_i)}",
            r"\nabla\KL",
            "The other sequences of a group are independent of $y_i$, so their mean is a constant for it "
            "($n = 2$, over all pairs of sequences).",
            (lambda m: _grouped(m, 1.0), true),
            part="reward",
        ),
        Step(
            r"K_i - \tfrac{1}{n}\sum_j K_j",
            r"\left(1 - \tfrac{1}{n}\right)\left(K_i - \tfrac{1}{n-1}\sum_{j \ne i} K_j\right)",
            "The group's own mean contains $K_i$: subtracting it subtracts a share $1/n$ of the signal (four "
            "sequences).",
            (_own_mean, lambda m: 0.75 * _leave_one_out(m)),
            part="reward",
        ),
        Step(
            r"\E{\tfrac{1}{n}\sum_i \left(K_i - \tfrac{1}{n}\sum_j K_j\right)\nabla\log\pi(y_i)}",
            r"\left(1 - \tfrac{1}{n}\right)\nabla\KL",
            "With the group's mean (GRPO) the KL coefficient is smaller than it says, by exactly $1 - 1/n$ (here "
            "$n = 2$).",
            (lambda m: _grouped(m, 0.5), lambda m: 0.5 * true(m)),
            part="reward",
        ),
        Comparison(
            r"\trVar{\text{k1 in reward, optimal constant}}",
            r"\trVar{\text{k1 in reward}}",
            "What a baseline can gain: the best constant against none.",
            (lambda m: m.variance("k1-in-reward+optimal-baseline"), lambda m: m.variance("k1-in-reward")),
            part="reward",
        ),
    ),
    conclusion="Subtract what does not depend on the sequence itself. Dividing by the group's standard deviation "
    "is not "
    "covered: that rescales by a quantity of the data.",
)
