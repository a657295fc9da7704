"""Right code passes: built-ins and whole losses written by hand, numpy and torch, double and single precision inside.

The checks are exact, so the false-alarm rate is none; random models are met through random policies of the probe.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kl_terms import masked
from toys import expected_gradient, expected_value

from klgrad.analysis import check
from klgrad.synth import exact
from klgrad.synth.automata import markov
from klgrad.synth.policies import PolicyPair, log_softmax, tabular

# name -> (value of delta in torch, in numpy, {placement: the target it gives})
TERMS = {
    "k1": (lambda d: d + 0, lambda d: d + 0, {"reward": "sequence", "both": "sequence"}),
    "k2": (lambda d: d.square() / 2, lambda d: np.square(d) / 2, {"loss": "token"}),
    "k3": (
        lambda d: torch.expm1(-d) + d,
        lambda d: np.expm1(-d) + d,
        {"loss": "token-forward", "both": "sequence"},
    ),
    "alpha": (
        lambda d: d + 0.5 * torch.expm1(-d),
        lambda d: d + 0.5 * np.expm1(-d),
        {"both": "sequence"},
    ),
}
CELLS = [(name, placement, target) for name, entry in TERMS.items() for placement, target in entry[2].items()]


def written(name, how):
    """The term with a mask, as library code has it."""
    in_torch, in_numpy, _ = TERMS[name]

    def double(logp, ref_logp, mask):
        return masked(mask, in_torch(masked(mask, logp - ref_logp)))

    def single(logp, ref_logp, mask):
        return masked(mask, in_torch(masked(mask, logp.float() - ref_logp.float())))

    def by_sequence(logp, ref_logp, mask):
        return double(logp, ref_logp, mask).sum(-1)

    def numpy_double(logp, ref_logp, mask):
        return np.where(mask, in_numpy(np.where(mask, logp - ref_logp, 0.0)), 0.0)

    def numpy_single(logp, ref_logp, mask):
        return numpy_double(np.asarray(logp, np.float32), np.asarray(ref_logp, np.float32), mask)

    return {
        "torch": double, "torch, single": single, "torch, by sequence": by_sequence,
        "numpy": numpy_double, "numpy, single": numpy_single,
    }[how]  # fmt: skip


@pytest.mark.parametrize("how", ["torch", "torch, single", "torch, by sequence", "numpy", "numpy, single"])
@pytest.mark.parametrize(("name", "placement", "target"), CELLS)
def test_a_right_term_passes_everything(name, placement, target, how):
    report = check(written(name, how), placement=placement, target=target)
    assert report.passed, str(report)
    assert report.of("invariance", "warning") == []
    assert not any("clamp" in f.message for f in report.findings)


# ------------------------------------------------------------------------------------------ whole losses


def reinforce(logp, ref_logp, mask, beta):
    if beta == 0:
        return 0.0 * masked(mask, logp).sum()
    k = masked(mask, logp - ref_logp).detach().sum(-1)
    return beta * (k * masked(mask, logp).sum(-1)).mean()


def ppo_kl_in_reward(logp, ref_logp, old_logp, mask, rewards, kl_coef):
    """Whole-reply advantages, clipped; on-policy every ratio is 1."""
    paid = kl_coef * masked(mask, old_logp - ref_logp).sum(-1) if kl_coef else 0.0  # no KL, however large, at 0
    advantage = (rewards - paid)[:, None]
    ratio = masked(mask, logp - old_logp).exp()
    return -masked(mask, torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)).sum(-1).mean()


def grpo_k3_in_loss(logp, ref_logp, old_logp, mask, advantages, beta, clip=0.2):
    """The advantages are 0 here: PPO's part must add nothing, and hide nothing."""
    ratio = masked(mask, logp - old_logp).exp()
    policy = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    delta = masked(mask, logp - ref_logp)
    kl = beta * (torch.expm1(-delta) + delta) if beta else torch.zeros_like(delta)
    return masked(mask, kl - policy).sum(-1).mean()


def rloo(logp, ref_logp, old_logp, mask, rewards, beta):
    reward = rewards - (beta * masked(mask, old_logp - ref_logp).sum(-1) if beta else 0.0)
    others = (reward.sum() - reward) / max(len(reward) - 1, 1)
    return -((reward - others) * masked(mask, logp).sum(-1)).mean()


def full_vocabulary(logits, ref_logits, mask, beta):
    a, b = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    possible = (a > -torch.inf) & (b > -torch.inf)
    a, b = (masked(possible, x) for x in (a, b))
    kl = masked(mask, masked(possible, a.exp() * (a - b)).sum(-1)).sum(-1).mean()
    return beta * kl if beta else 0.0 * logits.sum()


@pytest.mark.parametrize(
    ("function", "target"),
    [
        (reinforce, "sequence"),
        (ppo_kl_in_reward, "sequence"),
        (grpo_k3_in_loss, "token-forward"),
        (rloo, "sequence"),
        (full_vocabulary, "token"),
    ],
)
def test_a_right_loss_passes(function, target):
    report = check(function, target=target, sections=("value", "gradient", "invariance"))
    assert report.passed, str(report)
    assert report.gradient["loss"]["verdict"] == target


def test_a_right_loss_in_single_precision_passes():
    def loss(logp, ref_logp, mask):
        return reinforce(logp.float(), ref_logp.float(), mask, 1.0)

    report = check(loss, sections=("gradient", "invariance", "numerics"))
    assert report.passed, str(report)


def rewards_to_go(logp, ref_logp, mask, rewards, beta):
    paid = -beta * np.where(mask, logp - ref_logp, 0.0)
    paid[np.arange(len(paid)), mask.sum(1) - 1] += rewards
    return np.cumsum(paid[:, ::-1], axis=1)[:, ::-1]


def rewards_to_go_torch(log_probs, ref_log_probs, response_mask, kl_ctl):
    paid = -kl_ctl * masked(response_mask, log_probs - ref_log_probs)
    return paid.flip(-1).cumsum(-1).flip(-1)


@pytest.mark.parametrize("function", [rewards_to_go, rewards_to_go_torch])
def test_right_returns_pass(function):
    report = check(function, returns="return")
    assert report.passed, str(report)
    assert [f for f in report.findings if f.level == "warning"] == []


# ------------------------------------------------------------------------------------------ random models


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from(["torch", "numpy"]))
def test_on_random_models_too(seed, eos, how):
    """What the check measures is the engine's value and gradient, on any model."""
    rng = np.random.default_rng(seed)
    automaton = markov(3, 1, start=(0,), eos=eos)
    policy, reference = rng.normal(size=(2, *automaton.next_context.shape))
    pair = PolicyPair(automaton, tabular(automaton, policy), log_softmax(reference))
    for name in ("k1", "k3"):
        function = written(name, how)
        assert expected_value(function, pair, 3)[0] == pytest.approx(exact.kl(pair, [3])[0], rel=1e-9)
        both = expected_gradient(function, "both", pair, 3)
        assert both == pytest.approx(exact.true_gradient(pair, [3])[0], abs=1e-8)
