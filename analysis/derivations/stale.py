"""Samples of an older policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from klgrad.analysis.derivations.divergences import forward_kl, k3, reverse_kl
from klgrad.analysis.derivations.model import Model
from klgrad.analysis.derivations.steps import Comparison, Derivation, Step
from klgrad.analysis.derivations.terms import PAPER, true

if TYPE_CHECKING:
    from jaxtyping import Float


def _prefix_ratio(m: Model) -> Float[np.ndarray, "M T"]:
    return np.where(m.mask, np.cumprod(m.rho, axis=1), 0.0)


def _sequence_ratio(m: Model) -> Float[np.ndarray, " M"]:
    return m.rho.prod(axis=1)


def _weighted_reward(m: Model) -> Float[np.ndarray, " d"]:
    """k1 in the reward, with the ratio of the whole sequence."""
    size = _sequence_ratio(m) * np.abs(m.delta).sum(axis=1)
    return m.mean_mu((_sequence_ratio(m) * m.delta.sum(axis=1))[:, None] * m.score, size[:, None] * m.score_size)


def _live_prefix(m: Model) -> Float[np.ndarray, " d"]:
    """Derivative of E_mu[sum_t rho_1:t k3_t], the ratio differentiated too."""
    return _live(m, lambda log_rho: np.cumsum(log_rho, axis=1), np.cumsum(m.score_terms.size, axis=1))


def _live_token(m: Model) -> Float[np.ndarray, " d"]:
    return _live(m, lambda log_rho: log_rho, m.score_terms.size)


def _live(m: Model, log_ratio: Callable[[np.ndarray], np.ndarray], scores: np.ndarray) -> Float[np.ndarray, " d"]:
    """The same with any ratio of log-ratios ``[M, T]``, whose own scores have the size ``[M, T, d]``."""

    def value(log_probs: np.ndarray) -> np.ndarray:
        return np.where(m.mask, np.exp(log_ratio(m.log_rho(log_probs))) * k3(m.log_ratio(log_probs)), 0.0).sum(axis=1)

    ratio = np.exp(log_ratio(m.log_rho(m.log_policy)))
    size = np.einsum("mt,mtd->md", ratio * m.k3, scores)
    return m.mean_mu(m.derivative(value), size + np.einsum("mt,mtd->md", ratio * np.abs(m.excess), m.score_terms.size))


def _to_sampler(m: Model) -> Float[np.ndarray, " d"]:
    return m.exact("true_gradient", toward="drift")


off_policy = Derivation(
    name="off-policy",
    title="Samples of an older policy: which importance ratio repairs what",
    source=f"{PAPER}, section 3.2; the live prefix ratio is klgrad's answer to what the paper leaves open",
    steps=(
        Step(
            r"\Emu{\rho_{\le T}\,\sum_t \delta_t}",
            r"\KL",
            r"Sequences come from $\mu$; the ratio of the whole sequence, $\pi(y)/\mu(y)$, turns their mean into "
            r"one over $\pi$.",
            (lambda m: m.mean_mu(_sequence_ratio(m) * m.along(m.delta)), lambda m: m.exact("kl")),
        ),
        Step(
            r"\Emu{\rho_{\le T}\,\left(\sum_t \delta_t\right)\score}",
            r"\nabla\KL",
            "k1 in the reward with the sequence ratio is unbiased, at the price of the variance of a product of "
            "T ratios.",
            (_weighted_reward, true),
            part="reward",
        ),
        Step(
            r"\Emu{\rho_{\le T}\,\left(\sum_t \log\frac{\mu_t}{q_t}\right)\score}",
            r"\nabla\KL - \nabla\mathrm{KL}(\pi\|\mu)",
            r"A penalty frozen at rollout time, $\log\mu/q = \log\pi/q - \log\pi/\mu$, pulls to the reference and "
            r"away from $\mu$.",
            (
                lambda m: m.engine("k1-in-reward+rollout-value+sequence-ratio"),
                lambda m: true(m) - _to_sampler(m),
            ),
            part="reward",
        ),
        Comparison(
            r"\Emu{\sum_t \rho_t\,\scoret \sum_{u \ge t}\delta_u}",
            r"\nabla\KL",
            "The usual surrogate weighs each token by its own ratio only: neither its prefix nor what follows is "
            "corrected.",
            (lambda m: m.engine("k1-in-reward+rtg+token-ratio"), true),
            part="reward",
        ),
        Step(
            r"\Emu{\sum_t \rho_t\,\nabla k_{3,t}}",
            r"\Emu{\sum_t \nabla\fKLt}",
            "A detached token ratio corrects the token and not its prefix: the forward KL on the prefixes of $\\mu$.",
            (lambda m: m.engine("k3-in-loss+token-ratio"), lambda m: m.local(forward_kl, m.mu)),
            part="loss",
        ),
        Comparison(
            r"\Emu{\sum_t \nabla k_{3,t}}",
            r"\Emu{\sum_t \nabla\fKLt}",
            "Without a ratio, GRPO's k3 in the loss is the gradient of neither KL.",
            (lambda m: m.engine("k3-in-loss"), lambda m: m.local(forward_kl, m.mu)),
            part="loss",
        ),
        Step(
            r"\nabla\,\Emu{\sum_t \rho_t\,k_{3,t}}",
            r"\Emu{\sum_t \nabla\KLt}",
            "Differentiated too, the token ratio makes both placements of each token at once: the reverse KL on the "
            r"prefixes of $\mu$, unbiased for the token level only.",
            (_live_token, lambda m: m.local(reverse_kl, m.mu)),
            part="both",
        ),
        Comparison(
            r"\nabla\,\Emu{\sum_t \rho_t\,k_{3,t}}",
            r"\nabla\KL",
            "So it is not unbiased for the sequence, whatever it is called.",
            (lambda m: m.engine("k3-in-loss+live-token-ratio"), true),
            part="both",
        ),
        Step(
            r"\Emu{\sum_t \rho_{\le t}\,k_{3,t}}",
            r"\E{\sum_t k_{3,t}}",
            "A token needs the ratios of its prefix and its own; those of later tokens have mean one.",
            (
                lambda m: m.mean_mu(m.along(_prefix_ratio(m) * m.k3)),
                lambda m: m.mean(m.along(m.k3)),
            ),
            part="both",
        ),
        Step(
            r"\nabla\,\Emu{\sum_t \rho_{\le t}\,k_{3,t}}",
            r"\Emu{\sum_t \rho_{\le t}\,\left(k_{3,t}\,\nabla\log\pi(y_{\le t}) + "
            r"(1 - r_t)\,\scoret\right)}",
            r"That holds for every parameter, so it may be differentiated; $\mu$ is fixed, and $\nabla\rho_{\le "
            r"t} = \rho_{\le t}\,\nabla\log\pi(y_{\le t})$.",
            (
                _live_prefix,
                lambda m: m.mean_mu(
                    np.einsum("mt,mtd->md", _prefix_ratio(m) * m.k3, np.cumsum(m.scores, axis=1))
                    + m.weigh(_prefix_ratio(m) * -m.excess)
                ),
            ),
            part="both",
        ),
        Step(
            r"\nabla\,\Emu{\sum_t \rho_{\le t}\,k_{3,t}}",
            r"\nabla\KL",
            "The live prefix ratio in the loss is unbiased for the sequence-level gradient off-policy.",
            (lambda m: m.engine("k3-in-loss+live-prefix-ratio"), true),
            part="both",
        ),
        Comparison(
            r"\trVar{\text{k3, live prefix ratio}}",
            r"\trVar{\text{k1 in reward, sequence ratio}}",
            "The two unbiased recipes differ in noise.",
            (
                lambda m: m.variance("k3-in-loss+live-prefix-ratio"),
                lambda m: m.variance("k1-in-reward+sequence-ratio"),
            ),
        ),
    ),
    conclusion="A token ratio repairs the token, a prefix ratio the token and its prefix. For the sequence-level "
    "gradient "
    "off-policy: the sequence ratio with k1 in the reward, or the live prefix ratio with k1 or k3 in the loss.",
    notation=(
        (r"\mu,\ \Emu{f}", "the older policy that sampled, and means over its sequences"),
        (
            r"\rho_t = \pi_t/\mu_t",
            r"importance ratio of a token; $\rho_{\le t}$ is the product of the first $t$, "
            r"$\rho_{\le T}$ that of the whole sequence",
        ),
    ),
    preset="stale",
    off_policy=True,
)
