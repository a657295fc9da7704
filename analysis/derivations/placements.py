"""Each estimator in each placement, on-policy (paper, Appendix F.3 and F.4)."""

from __future__ import annotations

import numpy as np

from klgrad.analysis.derivations.divergences import forward_kl, k3, reverse_kl
from klgrad.analysis.derivations.steps import Comparison, Derivation, Step
from klgrad.analysis.derivations.terms import (
    FUTURE,
    PAPER,
    TOKEN,
    TOKEN_FORWARD,
    in_reward,
    k2,
    kl_t,
    to_go,
    true,
    zero,
)

ALPHA = 0.3  # the member of the alpha family that numbers are shown for

k1 = Derivation(
    name="k1",
    title="k1 = -log r: the true gradient in the reward, nothing at all in the loss",
    source=f"{PAPER}, Appendix F.3",
    steps=(
        Step(
            r"\E{\sum_t \delta_t}",
            r"\KL",
            r"k1 is the log-ratio $\delta_t = \log\pi_t - \log q_t$ itself: its mean is the KL by definition.",
            (lambda m: m.mean(m.along(m.delta)), lambda m: m.exact("kl")),
            part="value",
        ),
        Step(
            r"\E{\sum_t \nabla\delta_t}",
            r"\E{\sum_t \scoret}",
            "The reference does not depend on the parameters, so the gradient of the log-ratio is the score.",
            (lambda m: m.pathwise(lambda delta: delta), lambda m: m.mean(m.score, m.score_size)),
            part="loss",
            zero=True,
        ),
        Step(
            r"\E{\sum_t \scoret} = \E{\sum_t \nabla\sum_v \pi(v|y_{<t})}",
            "0",
            "The score of each token has mean zero after every prefix, because next-token probabilities sum to one.",
            (lambda m: m.mean(m.score, m.score_size), zero),
            part="loss",
            zero=True,
        ),
        Step(
            r"\trVar{\sum_t \nabla\delta_t}",
            r"\E{\sum_t |\scoret|^2}",
            "Zero in the mean is not zero: scores of different tokens are uncorrelated, so their variances add up, "
            "linearly in the length.",
            (lambda m: m.variance("k1-in-loss"), lambda m: m.mean((m.scores**2).sum(axis=(1, 2)))),
            part="loss",
        ),
        Step(
            r"\E{\left(\sum_t \delta_t\right)\score}",
            r"\nabla\,\E{\sum_t \delta_t} - \E{\sum_t \nabla\delta_t}",
            "Product rule: what the reward gives is the whole gradient less what the loss gives.",
            (
                lambda m: m.engine("k1-in-reward"),
                lambda m: m.expected(lambda delta: delta) - m.pathwise(lambda delta: delta),
            ),
            part="reward",
        ),
        Step(
            r"\E{\left(\sum_t \delta_t\right)\score}",
            r"\nabla\KL",
            "The term subtracted is zero in expectation: k1 in the reward is unbiased.",
            (lambda m: in_reward(m, m.delta), true),
            part="reward",
        ),
        Step(
            r"\E{\left(\sum_t \delta_t\right)\score} + \E{\sum_t \nabla\delta_t}",
            r"\nabla\KL",
            "Adding a zero changes nothing but the noise.",
            (lambda m: m.engine("k1-in-both"), true),
            part="both",
        ),
    ),
    conclusion="k1 in the reward is unbiased for the gradient of the sequence-level KL. k1 in the loss has gradient "
    "zero in expectation: no KL penalty at all, plus variance.",
)

k3_derivation = Derivation(
    name="k3",
    title="k3 = r - 1 - log r: a good value, and in the loss the gradient of another divergence",
    source=f"{PAPER}, Appendix F.4",
    steps=(
        Step(
            r"\E{\sum_t k_{3,t}}",
            r"\E{\sum_t (r_t - 1)} + \E{\sum_t \delta_t}",
            r"The definition, with $-\log r_t = \delta_t$: k1 plus the control variate $r_t - 1$.",
            (
                lambda m: m.mean(m.along(m.k3)),
                lambda m: m.mean(m.along(m.excess)) + m.mean(m.along(m.delta)),
            ),
            part="value",
            where=r"k_{3,t} = r_t - 1 - \log r_t",
        ),
        Step(
            r"\E{\sum_t r_t} = \E{\sum_t \sum_v \pi(v|y_{<t})\,\frac{q(v|y_{<t})}"
            r"{\pi(v|y_{<t})}}",
            r"\E{|y|}",
            r"After every prefix $\pi$ cancels and the reference's probabilities sum to one: the mean of $r_t$ is 1.",
            (lambda m: m.mean(m.along(m.r)), lambda m: m.exact("mean_length")),
            part="value",
        ),
        Step(
            r"\E{\sum_t k_{3,t}}",
            r"\KL",
            "So the control variate has mean zero and the value of k3 is unbiased, like that of k1.",
            (lambda m: m.mean(m.along(m.k3)), lambda m: m.exact("kl")),
            part="value",
        ),
        Step(
            r"\E{\sum_t \nabla k_{3,t}}",
            r"\E{\sum_t (1 - r_t)\,\scoret}",
            r"Differentiate with the samples held fixed: $\nabla r_t = -r_t\,\scoret$ and $\nabla(-\log r_t) = "
            r"\scoret$.",
            (lambda m: m.pathwise(k3), lambda m: m.mean(m.weigh(-m.excess))),
            part="loss",
        ),
        Step(
            r"\E{\sum_t (1 - r_t)\,\scoret}",
            r"-\E{\sum_t r_t\,\scoret}",
            "The part with 1 is that of k1, and scores have mean zero: only the control variate is left, whose value "
            "had mean zero.",
            (lambda m: m.mean(m.weigh(-m.excess)), lambda m: -m.mean(m.weigh(m.r))),
            part="loss",
        ),
        Step(
            r"-\E{\sum_t r_t\,\scoret}",
            r"-\E{\sum_t \sum_v q(v|y_{<t})\,\nabla\log\pi(v|y_{<t})}",
            r"Write the mean over token $t$ as a sum over $v$: again $\pi$ cancels, and the weight of a token is the "
            "reference's probability.",
            (lambda m: -m.mean(m.weigh(m.r)), lambda m: m.exact("token_forward_gradient")),
            part="loss",
        ),
        Step(
            r"-\E{\sum_t \sum_v q(v|y_{<t})\,\nabla\log\pi(v|y_{<t})}",
            TOKEN_FORWARD,
            r"The forward KL is $\sum_v q(v)\,(\log q(v) - \log\pi(v))$ and only $\log\pi(v)$ depends on the "
            r"parameters: a "
            "cross-entropy "
            "towards the reference, at each token, its prefix held fixed.",
            (lambda m: m.exact("token_forward_gradient"), lambda m: m.local(forward_kl)),
            part="loss",
        ),
        Step(
            r"\E{\sum_t \nabla k_{3,t}}",
            TOKEN_FORWARD,
            "First and last line together: k3 in the loss descends the token-level forward KL on prefixes of the "
            "policy.",
            (lambda m: m.engine("k3-in-loss"), lambda m: m.local(forward_kl)),
            part="loss",
        ),
        Comparison(
            r"\E{\sum_t \nabla k_{3,t}}",
            r"\nabla\KL",
            "It is not the gradient that was wanted.",
            (lambda m: m.engine("k3-in-loss"), true),
            part="loss",
        ),
        Comparison(
            r"\E{\sum_t \nabla k_{3,t}}",
            r"\nabla\mathrm{KL}(q\|\pi) = -\sum_y q(y)\,\score",
            "Nor is it the sequence-level forward KL, whose prefixes are the reference's (with one token they agree).",
            (
                lambda m: m.engine("k3-in-loss"),
                lambda m: -m.total(np.exp(m.log_prob(m.log_reference)), m.score, m.score_size),
            ),
            part="loss",
        ),
        Step(
            r"\E{\left(\sum_t k_{3,t}\right)\score}",
            r"\nabla\,\E{\sum_t k_{3,t}} - \E{\sum_t \nabla k_{3,t}}",
            "Product rule: what the reward gives is the whole gradient less what the loss gives.",
            (lambda m: in_reward(m, m.k3), lambda m: m.expected(k3) - m.pathwise(k3)),
            part="reward",
        ),
        Step(
            r"\E{\left(\sum_t k_{3,t}\right)\score}",
            r"\nabla\KL - " + TOKEN_FORWARD,
            "The first term is the true gradient because the value is unbiased; the second is what k3 gives in "
            "the loss.",
            (lambda m: m.engine("k3-in-reward"), lambda m: true(m) - m.local(forward_kl)),
            part="reward",
        ),
        Step(
            r"\E{\left(\sum_t k_{3,t}\right)\score} + \E{\sum_t \nabla k_{3,t}}",
            r"\nabla\KL",
            "The two biases cancel: k3 in both placements is unbiased, with coefficient one.",
            (lambda m: m.engine("k3-in-both"), true),
            part="both",
        ),
    ),
    conclusion="k3 in the loss is a token-level forward-KL gradient; k3 in the reward is the true gradient minus that; "
    "in both it is the true gradient.",
)

k2_derivation = Derivation(
    name="k2",
    title="k2 = (log r)^2 / 2: a biased value whose gradient in the loss is the token-level reverse KL",
    source="Schulman 2020; Tang and Munos, arXiv 2506.09477; Liu et al., arXiv 2510.01555",
    steps=(
        Comparison(
            r"\E{\sum_t \tfrac{1}{2}\delta_t^2}",
            r"\KL",
            "The value is biased, though little when the policies are close.",
            (lambda m: m.mean(m.along(k2(m.delta))), lambda m: m.exact("kl")),
            part="value",
        ),
        Step(
            r"\E{\sum_t \nabla\tfrac{1}{2}\delta_t^2}",
            r"\E{\sum_t \delta_t\,\scoret}",
            r"Chain rule, with $\nabla\delta_t = \scoret$: each token's log-ratio multiplies its own score.",
            (lambda m: m.pathwise(k2), lambda m: m.mean(m.weigh(m.delta))),
            part="loss",
        ),
        Step(
            r"\E{\sum_t \delta_t\,\scoret}",
            TOKEN,
            r"After each prefix, $\nabla\sum_v \pi(v)\,\delta(v) = \sum_v \pi(v)\,\delta(v)\,\nabla\log\pi(v)$, "
            r"since $\sum_v \pi(v)\,\nabla\log\pi(v) = 0$.",
            (lambda m: m.mean(m.weigh(m.delta)), lambda m: m.local(reverse_kl)),
            part="loss",
        ),
        Step(
            r"\E{\sum_t \nabla\tfrac{1}{2}\delta_t^2}",
            r"\nabla\KL - \E{\sum_t \scoret \sum_{u > t} \delta_u}",
            "The true gradient also credits a token for the divergence that follows it; k2 in the loss does not.",
            (
                lambda m: m.engine("k2-in-loss"),
                lambda m: true(m) - m.mean(m.weigh(to_go(m.delta) - m.delta)),
            ),
            part="loss",
        ),
        Step(
            r"\E{\left(\sum_t \tfrac{1}{2}\delta_t^2\right)\score}",
            r"\nabla\,\E{\sum_t \tfrac{1}{2}\delta_t^2} - " + TOKEN,
            "Product rule: the gradient of the biased value, less what the loss gives.",
            (lambda m: m.engine("k2-in-reward"), lambda m: m.expected(k2) - m.local(reverse_kl)),
            part="reward",
        ),
        Step(
            r"\E{\left(\sum_t \tfrac{1}{2}\delta_t^2\right)\score} + "
            r"\E{\sum_t \nabla\tfrac{1}{2}\delta_t^2}",
            r"\nabla\,\E{\sum_t \tfrac{1}{2}\delta_t^2}",
            "Both placements descend the expectation of k2, which is not the KL.",
            (lambda m: m.engine("k2-in-both"), lambda m: m.expected(k2)),
            part="both",
        ),
        Comparison(
            r"\nabla\,\E{\sum_t \tfrac{1}{2}\delta_t^2}",
            r"\nabla\KL",
            "So for k2, unlike k1 and k3, both placements are no cure.",
            (lambda m: m.expected(k2), true),
            part="both",
        ),
    ),
    conclusion="k2 in the loss is the reverse-KL gradient of each token with its prefix held fixed: with one token the "
    "true gradient, with more the true gradient without its future term.",
)

alpha = Derivation(
    name="alpha",
    title="alpha(a) = -log r + a (r - 1): the family from k1 (a = 0) to k3 (a = 1)",
    source="the control-variate family of Schulman 2020",
    steps=(
        Step(
            r"\E{\sum_t \left(\delta_t + a\,(r_t - 1)\right)}",
            r"\KL",
            f"$r_t - 1$ has mean zero, so any multiple of it may be added; numbers for $a = {ALPHA}$.",
            (
                lambda m: m.mean(m.along(m.delta)) + ALPHA * m.mean(m.along(m.excess)),
                lambda m: m.exact("kl"),
            ),
            part="value",
        ),
        Step(
            r"\E{\sum_t \nabla\left(\delta_t + a\,(r_t - 1)\right)}",
            r"\E{\sum_t (1 - a\,r_t)\,\scoret}",
            r"$\nabla\delta_t = \scoret$ and $\nabla r_t = -r_t\,\scoret$.",
            (
                lambda m: m.pathwise(lambda delta: delta + ALPHA * np.expm1(-delta)),
                lambda m: m.mean(m.weigh(np.where(m.mask, 1 - ALPHA * m.r, 0.0))),
            ),
            part="loss",
        ),
        Step(
            r"\E{\sum_t (1 - a\,r_t)\,\scoret}",
            r"a\," + TOKEN_FORWARD,
            "As for k3: the 1 gives nothing, and $-r_t$ gives the forward KL of each token.",
            (lambda m: m.engine(f"alpha({ALPHA})-in-loss"), lambda m: ALPHA * m.local(forward_kl)),
            part="loss",
        ),
        Step(
            r"\E{\sum_t \left(\delta_t + a\,(r_t - 1)\right)\,\score}",
            r"\nabla\KL - a\," + TOKEN_FORWARD,
            "Product rule: the true gradient less what the loss gives.",
            (lambda m: m.engine(f"alpha({ALPHA})-in-reward"), lambda m: true(m) - ALPHA * m.local(forward_kl)),
            part="reward",
        ),
        Step(
            r"\E{K\,\score} + \E{\nabla K}",
            r"\nabla\KL",
            "For every $a$ the two parts add up to the true gradient.",
            (lambda m: m.engine(f"alpha({ALPHA})-in-both"), true),
            part="both",
        ),
    ),
    conclusion="The control variate moves a share $a$ of the token-level forward KL from the reward to the loss; "
    "only in "
    "both placements does its coefficient leave the mean alone and change the noise only.",
)

full_vocabulary = Derivation(
    name="full-vocabulary",
    title="The exact next-token KL instead of an estimate: token level in the loss, only the future in the reward",
    source="Amini, Vieira, Cotterell, arXiv 2504.10637 (Rao-Blackwellised estimate)",
    steps=(
        Step(
            r"\E{\sum_t \KLt}",
            r"\KL",
            "Summing over the next token instead of sampling it leaves the mean as it was.",
            (lambda m: m.mean(m.along(kl_t(m))), lambda m: m.mean(m.along(m.delta))),
            part="value",
        ),
        Step(
            r"\E{\sum_t \nabla\KLt}",
            r"\E{\sum_t \delta_t\,\scoret}",
            "Differentiated as it stands it is the token-level reverse KL: the same field as k2 in the loss.",
            (lambda m: m.engine("full-in-loss"), lambda m: m.mean(m.weigh(m.delta))),
            part="loss",
        ),
        Step(
            r"\E{\sum_t \KLt\,\scoret}",
            "0",
            r"Detached, $\mathrm{KL}_t$ is fixed by the prefix, where the score of token $t$ has mean zero: no "
            r"token feels its "
            "own KL.",
            (lambda m: m.mean(m.weigh(kl_t(m))), zero),
            part="reward",
            zero=True,
        ),
        Step(
            r"\E{\left(\sum_t \KLt\right)\score}",
            FUTURE,
            "Earlier tokens feel it, as a mean of the log-ratios to come: what is left is the future term alone.",
            (lambda m: m.engine("full-in-reward"), lambda m: m.mean(m.weigh(to_go(m.delta) - m.delta))),
            part="reward",
        ),
        Step(
            r"\E{\left(\sum_t \mathrm{KL}_t\right)\score} + "
            r"\E{\sum_t \nabla\mathrm{KL}_t}",
            r"\nabla\KL",
            "Future term and token term together are the true gradient.",
            (lambda m: m.engine("full-in-both"), true),
            part="both",
        ),
    ),
    conclusion="An exact KL, detached and put in the reward, loses the very term it is meant for; it needs both "
    "placements, or the loss if the token level is enough.",
)
