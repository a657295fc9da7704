"""What the parts add up to: both placements, and the token and future terms of the true gradient."""

from __future__ import annotations

import numpy as np

from klgrad.analysis.derivations.divergences import forward_kl, k3, reverse_kl
from klgrad.analysis.derivations.steps import Comparison, Derivation, Step
from klgrad.analysis.derivations.terms import (
    PAPER,
    TOKEN,
    TOKEN_FORWARD,
    by_prefix,
    in_reward,
    kl_t,
    past,
    through_prefixes,
    to_go,
    true,
    zero,
)

both = Derivation(
    name="both",
    title="In both placements every value-unbiased estimator is unbiased, with coefficient exactly one",
    source=f"{PAPER}, section 2.2 (which has it up to a factor) and Appendix D.2",
    steps=(
        Step(
            r"\E{K\,\score} + \E{\nabla K}",
            r"\nabla\,\E{K}",
            "The product rule read backwards; numbers for k3.",
            (lambda m: m.engine("k3-in-both"), lambda m: m.expected(k3)),
        ),
        Step(
            r"\nabla\,\E{K}",
            r"\nabla\KL",
            r"If $\E{K}$ is the KL for every parameter, so is its gradient: no factor appears.",
            (lambda m: m.expected(k3), true),
        ),
        Step(
            r"\text{k1, alpha and full vocabulary in both}",
            r"\nabla\KL",
            "The same for every estimator whose value is unbiased (one row each).",
            (
                lambda m: np.stack([m.engine(f"{name}-in-both") for name in ("k1", f"alpha({0.3})", "full")]),
                lambda m: np.stack([true(m)] * 3),
            ),
        ),
        Step(
            r"\tfrac{1}{2}\,\E{K\,\score} + \tfrac{1}{2}\,\E{\nabla K}",
            r"\tfrac{1}{2}\,\nabla\KL",
            "Splitting the coefficient over the two placements halves the penalty.",
            (
                lambda m: (m.engine("k3-in-reward") + m.engine("k3-in-loss")) / 2,
                lambda m: true(m) / 2,
            ),
        ),
        Step(
            r"\E{K\,\score} + \tfrac{1}{T}\,\E{\nabla K}",
            r"\nabla\KL - \left(1 - \tfrac{1}{T}\right)" + TOKEN_FORWARD,
            "Summed over tokens in the reward and averaged in the loss, k3's two biases no longer cancel.",
            (
                lambda m: m.engine("k3-in-reward") + m.engine(f"k3-in-loss+divide={m.length}"),
                lambda m: true(m) - (1 - 1 / m.length) * m.local(forward_kl),
            ),
        ),
        Comparison(
            r"\text{k2 in both}",
            r"\nabla\KL",
            "The value of k2 is biased, so the statement does not cover it.",
            (lambda m: m.engine("k2-in-both"), true),
        ),
    ),
    conclusion="Same estimator, same coefficient, same aggregation in both placements: unbiased on-policy.",
)

decomposition = Derivation(
    name="decomposition",
    title="True gradient = token-level reverse KL + the gradient through the prefixes",
    source="klgrad; the partial gradient of Tang and Munos, arXiv 2506.09477",
    steps=(
        Step(
            r"\nabla\KL",
            r"\E{\sum_{t,u} \delta_u\,\scoret}",
            "The true gradient pairs every token's log-ratio with every token's score.",
            (true, lambda m: in_reward(m, m.delta)),
        ),
        Step(
            r"\E{\sum_{u < t} \delta_u\,\scoret}",
            "0",
            "Log-ratios of the past are fixed by the prefix, where the score of token $t$ has mean zero.",
            (lambda m: past(m, m.delta), zero),
            zero=True,
        ),
        Step(
            r"\E{\sum_{u = t} \delta_u\,\scoret}",
            TOKEN,
            "A token's own log-ratio gives the gradient of the next-token KL, its prefix held fixed: the token term.",
            (lambda m: m.mean(m.weigh(m.delta)), lambda m: m.local(reverse_kl)),
        ),
        Step(
            r"\E{\sum_{u > t} \delta_u\,\scoret}",
            r"\E{\sum_u \KLu\,\nabla\log\pi(y_{<u})}",
            "Replace later log-ratios by their means given their prefix: the future term.",
            (
                lambda m: m.mean(m.weigh(to_go(m.delta) - m.delta)),
                lambda m: by_prefix(m, kl_t(m)),
            ),
        ),
        Step(
            r"\E{\sum_u \KLu\,\nabla\log\pi(y_{<u})}",
            r"\sum_u \sum_{y_{<u}} \nabla\pi(y_{<u})\,\KLu",
            "It is the derivative of the prefixes' probabilities alone, every next-token KL held fixed.",
            (lambda m: true(m) - m.exact("token_gradient"), through_prefixes),
        ),
        Step(
            r"\nabla\KL",
            TOKEN + r" + \E{\sum_u \KLu\,\nabla\log\pi(y_{<u})}",
            "The two terms that are left.",
            (true, lambda m: m.local(reverse_kl) + through_prefixes(m)),
        ),
    ),
    conclusion="What token-level methods (k2, full vocabulary, the k1 of each token alone) leave out is how a token "
    "changes the divergence of the tokens after it. Near the reference that is of second order, which is why they look "
    "right early in training.",
)
