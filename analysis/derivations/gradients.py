"""The gradient of the sequence-level KL, and the two terms of the gradient of any expectation."""

from __future__ import annotations

import numpy as np

from klgrad.analysis.derivations.divergences import k3
from klgrad.analysis.derivations.model import Model
from klgrad.analysis.derivations.steps import Comparison, Derivation, Step
from klgrad.analysis.derivations.terms import (
    PAPER,
    in_reward,
    through_probability,
    to_go,
    true,
    zero,
)


def _definition(m: Model) -> np.ndarray:
    """KL as it is written: log-probabilities of whole sequences, one from the other."""
    policy, reference = m.log_prob(m.log_policy), m.log_prob(m.log_reference)
    return m.mean(policy - reference, np.abs(policy) + np.abs(reference))


true_gradient = Derivation(
    name="true-gradient",
    title="The gradient of the sequence-level KL, from its definition to the policy-gradient theorem",
    source=f"{PAPER}, Appendix F.1",
    steps=(
        Step(
            r"\KL = \sum_y \pi(y)\log\frac{\pi(y)}{q(y)}",
            r"\E{\sum_t \delta_t}",
            "The probability of a sequence is a product over its tokens, so its log-ratio is a sum.",
            (
                _definition,
                lambda m: m.mean(m.along(m.delta)),
            ),
        ),
        Step(
            r"\E{\sum_t \delta_t}",
            r"\E{\sum_t \KLt}",
            "Chain rule: given the prefix, the mean of a token's log-ratio is the KL of the next-token distributions.",
            (lambda m: m.mean(m.along(m.delta)), lambda m: m.exact("kl")),
        ),
        Step(
            r"\nabla\KL",
            r"\sum_y \nabla\pi(y)\,\log\frac{\pi(y)}{q(y)} + \sum_y \pi(y)\,\score",
            "Product rule; the reference q does not depend on the parameters.",
            (
                lambda m: m.expected(lambda delta: delta),
                lambda m: through_probability(m, m.delta) + m.mean(m.score, m.score_size),
            ),
        ),
        Step(
            r"\sum_y \pi(y)\,\score = \nabla\sum_y\pi(y)",
            "0",
            "Probabilities sum to one whatever the parameters.",
            (lambda m: m.mean(m.score, m.score_size), zero),
            zero=True,
        ),
        Step(
            r"\sum_y \nabla\pi(y)\,\log\frac{\pi(y)}{q(y)}",
            r"\E{\left(\sum_t \delta_t\right)\score}",
            r"$\nabla\pi(y) = \pi(y)\,\score$ turns the sum into an expectation that can be sampled.",
            (lambda m: through_probability(m, m.delta), lambda m: in_reward(m, m.delta)),
        ),
        Step(
            r"\E{\left(\sum_t \delta_t\right)\score}",
            r"\E{\sum_t \scoret \sum_{u \ge t}\delta_u}",
            "What came before token $t$ is fixed by the prefix, where the score of token $t$ has mean zero: "
            "only the log-ratio still to go counts.",
            (lambda m: in_reward(m, m.delta), lambda m: m.mean(m.weigh(to_go(m.delta)))),
        ),
        Step(
            r"\E{\sum_t \scoret \sum_{u \ge t}\delta_u}",
            r"\E{\sum_t Q_t\,\scoret}",
            "Replace the log-ratio to go by its mean $Q_t$ given the prefix and the token: the policy-gradient "
            "theorem, "
            "which the exact engine computes by a recurrence over contexts.",
            (lambda m: m.mean(m.weigh(to_go(m.delta))), true),
        ),
    ),
    conclusion="The true gradient is the mean of (sum of log-ratios) x (sum of scores): k1, detached, in the reward.",
)

product_rule = Derivation(
    name="product-rule",
    title="Why placement matters: the gradient of an expectation has two terms",
    source=f"{PAPER}, Appendix F.2 and section 2.2",
    steps=(
        Step(
            r"\nabla\,\E{K}",
            r"\sum_y \nabla\pi(y)\,K(y) + \sum_y \pi(y)\,\nabla K(y)",
            r"Product rule for any estimate $K(y) = \sum_t k(\delta_t)$ that depends on the parameters; numbers "
            "for k3.",
            (
                lambda m: m.expected(k3),
                lambda m: through_probability(m, m.k3) + m.pathwise(k3),
            ),
        ),
        Step(
            r"\sum_y \pi(y)\,\nabla K(y)",
            r"\E{\sum_t \nabla k(\delta_t)}",
            "The path-wise term is what autograd gives when the estimate stands in the loss: samples held fixed.",
            (lambda m: m.pathwise(k3), lambda m: m.engine("k3-in-loss")),
            part="loss",
        ),
        Step(
            r"\sum_y \nabla\pi(y)\,K(y)",
            r"\E{K(y)\,\score}",
            "The score-function term is what a policy gradient gives when the detached estimate stands in the reward.",
            (lambda m: through_probability(m, m.k3), lambda m: m.engine("k3-in-reward")),
            part="reward",
        ),
        Step(
            r"\E{K\,\score} + \E{\nabla K}",
            r"\nabla\,\E{K}",
            "In both placements the two terms are complete again, with coefficient one.",
            (lambda m: m.engine("k3-in-both"), lambda m: m.expected(k3)),
            part="both",
        ),
        Step(
            r"\nabla\,\E{K}",
            r"\nabla\KL",
            "The value of k3 is unbiased at every parameter, so its expectation has the gradient of the KL.",
            (lambda m: m.expected(k3), true),
            part="both",
        ),
        Comparison(
            r"\nabla\,\E{\sum_t \tfrac{1}{2}\delta_t^2}",
            r"\nabla\KL",
            "For k2, whose value is biased, both placements give the gradient of its own expectation, not of the KL.",
            (lambda m: m.engine("k2-in-both"), true),
            part="both",
        ),
    ),
    conclusion="One placement alone is half of a product rule; which half is missing is the subject of the other "
    "pages.",
)
