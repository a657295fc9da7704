"""The objective against the exact world and against autograd of the formulas as papers write them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from strategies import BASELINES, assert_close, configurations, worlds

from klgrad.synth.configurations import parse, score_coefficients
from klgrad.synth.enumeration import enumerate_configuration, log_probability, sequences

torch = pytest.importorskip("torch")

from klgrad.harness import objective as o  # noqa: E402
from klgrad.harness.tabular import TabularPolicy, tabular_pair  # noqa: E402
from klgrad.synth.presets import preset  # noqa: E402


def batch_of(pair, length):
    """Every sequence as a batch: prompt token in front."""
    every = sequences(pair.automaton, length)
    tokens = torch.as_tensor(every.tokens)
    return every, torch.cat([torch.zeros_like(tokens[:, :1]), tokens], 1), torch.as_tensor(every.mask)


def terms_of(policy, reference, tokens, mask, **more):
    ones = torch.ones_like(tokens, dtype=torch.bool)
    features = policy.features(tokens, ones)[0][:, :-1]
    theirs = reference.features(tokens, ones)[0][:, :-1]
    return o.token_terms(features, policy.head, tokens[:, 1:], mask, reference=(theirs, reference.head), **more)


@given(worlds(cap=100), configurations(baselines=BASELINES[:2]))
def test_expected_gradient_is_the_exact_one(world, configuration):
    pair = replace(world.pair, policy=world.pair.policy)
    table = TabularPolicy(pair.automaton, pair.policy.log_probs)
    tabular = replace(pair, policy=_tabular(pair))
    every, tokens, mask = batch_of(pair, world.length)
    reference = TabularPolicy(pair.automaton, pair.reference)
    terms = terms_of(table, reference, tokens, mask, summaries=o.estimator_summaries(configuration.estimator))
    picked = torch.as_tensor(np.where(every.mask, pair.sampler[every.contexts, every.tokens], 0.0))
    probability = torch.as_tensor(np.exp(log_probability(every, pair.sampler)))
    loss = (probability * o.kl_loss(configuration, terms, mask, picked)).sum()
    (gradient,) = torch.autograd.grad(loss, [table.theta])
    assert_close(gradient.numpy(), enumerate_configuration(configuration, tabular, world.length).mean, 1e-9)


def _tabular(pair):
    from klgrad.synth.policies import tabular

    return tabular(pair.automaton, pair.policy.log_probs)


def test_every_sequence_has_the_exact_gradient():
    pair = preset("far")
    policy, reference = tabular_pair(pair)
    _, tokens, mask = batch_of(pair, 4)
    terms = terms_of(policy, reference, tokens, mask)
    losses = o.kl_loss(parse("k3-in-both+rtg"), terms, mask)
    exact = enumerate_configuration(parse("k3-in-both+rtg"), pair, 4).gradient
    for i in (0, 5, 15):
        (g,) = torch.autograd.grad(losses[i], [policy.theta], retain_graph=True)
        assert_close(g.numpy(), exact[i])


@pytest.mark.parametrize("name", ["k1-in-reward+loo=4", "k3-in-loss+token-ratio", "full-in-both+prefix-ratio"])
def test_coefficients_are_the_bridge_s(name):
    configuration = parse(name)
    pair = preset("stale")
    policy, reference = tabular_pair(pair)
    _, tokens, mask = batch_of(pair, 4)
    picked = torch.tensor(pair.sampler[batch_of(pair, 4)[0].contexts, tokens[:, 1:].numpy()])
    terms = terms_of(policy, reference, tokens, mask, summaries=o.estimator_summaries(configuration.estimator))
    full = [torch.tensor(x[batch_of(pair, 4)[0].contexts]) for x in (pair.policy.log_probs, pair.reference)]
    token, vocab = score_coefficients(
        configuration, terms["log_probs"].detach(), terms["reference"], mask,
        behaviour=picked, full_log_probs=full[0], full_reference=full[1],
    )  # fmt: skip
    expected = (token * terms["log_probs"]).sum(1)
    if vocab is not None:
        table = torch.log_softmax(policy.head(torch.arange(2)[:, None]), -1)
        expected = expected + (vocab * table[torch.as_tensor(batch_of(pair, 4)[0].contexts)]).sum((1, 2))
    for a, b in zip(o.kl_loss(configuration, terms, mask, picked)[::5], expected[::5], strict=True):
        (one,) = torch.autograd.grad(a, [policy.theta], retain_graph=True)
        (two,) = torch.autograd.grad(b, [policy.theta], retain_graph=True)
        assert_close(one.numpy(), two.numpy())


# -------------------------------------------------------------------------------------------------- chunks, memory


def test_chunks_change_nothing():
    pair = preset("words")
    policy, reference = tabular_pair(pair)
    _, tokens, mask = batch_of(pair, 2)
    found = []
    summaries = {**o.estimator_summaries(parse("full-in-loss").estimator), **o.MONITORS}
    for chunk in (1 << 30, 1000):
        terms = terms_of(policy, reference, tokens, mask, summaries=summaries, chunk=chunk)
        loss = o.kl_loss(parse("full-in-both"), terms, mask).sum()
        first = torch.autograd.grad(loss, [policy.theta], retain_graph=True)[0]
        again = torch.autograd.grad(loss, [policy.theta])[0]  # the probe goes back through one graph many times
        found.append((*(terms[name].detach().numpy() for name in o.MONITORS), first.numpy(), again.numpy()))
    for one, two in zip(*found, strict=True):
        assert_close(one, two)


def test_monitors_are_the_exact_quantities():
    pair = preset("words")
    policy, reference = tabular_pair(pair)
    terms = terms_of(policy, reference, *batch_of(pair, 1)[1:], summaries=o.MONITORS)
    p, q = pair.policy.log_probs[0], pair.reference[0]
    expected = {
        "kl": (np.exp(p) * (p - q)).sum(),
        "forward_kl": (np.exp(q) * (q - p)).sum(),
        "entropy": -(np.exp(p) * p).sum(),
    }
    for name, value in expected.items():
        assert_close(terms[name].detach().numpy(), np.full((16, 1), value))


def test_another_vocabulary_is_refused():
    policy, _ = tabular_pair(preset("near"))
    _, reference = tabular_pair(preset("words"))
    with pytest.raises(ValueError, match="vocabulary of 16 and the policy of 2"):
        terms_of(policy, reference, *batch_of(preset("near"), 2)[1:])


# ------------------------------------------------------------------------------------------------ advantages, loss


def test_advantages_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    assert o.leave_one_out(rewards, 3).tolist() == pytest.approx([1, -0.5, -0.5, 0, 0, 0])
    assert o.group_mean(rewards, 3).tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0, 0, 0], abs=1e-6)
    standardised = o.group_standardised(rewards, 3)
    assert standardised.tolist() == pytest.approx([1.1545, -0.5772, -0.5772, 0, 0, 0], abs=1e-3)


def example(seed=0, rows=6, length=5):
    g = torch.Generator().manual_seed(seed)
    logp = (-torch.rand(rows, length, generator=g, dtype=torch.float64) * 2).requires_grad_()
    behaviour = logp.detach() + 0.4 * torch.randn(rows, length, generator=g, dtype=torch.float64)
    reference = logp.detach() + 0.4 * torch.randn(rows, length, generator=g, dtype=torch.float64)
    mask = torch.arange(length) < torch.tensor([5, 3, 1, 4, 5, 2])[:rows, None]
    advantages = torch.randn(rows, generator=g, dtype=torch.float64)
    return logp, behaviour, reference, mask, advantages


def clipped(logp, behaviour, advantages, low=0.2, high=0.2):
    ratio = (logp - behaviour).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def gradients(loss, written, logp):
    return (torch.autograd.grad(x, [logp], retain_graph=True)[0].numpy() for x in (loss, written))


def test_grpo_of_the_paper_keeps_the_kl_outside_the_mean():
    """v1 Eq. 4: mean over sequences of (per-sequence mean of the clipped term, plus beta times the summed k3)."""
    logp, behaviour, reference, mask, a = example()
    k3 = (reference - logp).exp() - 1 + logp - reference
    each = (clipped(logp, behaviour, a[:, None]) * mask).sum(1) / mask.sum(1) + 0.3 * (k3 * mask).sum(1)
    objective = o.Objective(
        parse("k3-in-loss"), 0.3, 3, "grpo", "sequence-mean", "outside", "token", clip_low=0.2, clip_high=0.2
    )
    terms = {"log_probs": logp, "reference": reference}
    loss, seen = o.policy_loss(objective, terms, mask, a, behaviour)
    assert_close(*gradients(loss, each.mean(), logp))
    assert 0 < seen["clip_share"] < 1
    inside, _ = o.policy_loss(replace(objective, kl_aggregation="policy"), terms, mask, a, behaviour)
    deepseek = ((clipped(logp, behaviour, a[:, None]) + 0.3 * k3) * mask).sum(1) / mask.sum(1)
    assert_close(*gradients(inside, deepseek.mean(), logp))


@pytest.mark.parametrize("aggregation", ["sum", "token-mean", "constant"])
def test_other_aggregations(aggregation):
    logp, behaviour, _, mask, a = example(1)
    token = clipped(logp, behaviour, a[:, None]) * mask
    written = {"sum": token.sum() / 6, "token-mean": token.sum() / mask.sum(), "constant": token.sum() / 6 / 8}
    objective = o.Objective(
        None, 0.0, 3, "dr-grpo", aggregation, ratio="token", clip_low=0.2, clip_high=0.2, max_length=8
    )
    loss, _ = o.policy_loss(objective, {"log_probs": logp}, mask, a, behaviour)
    assert_close(*gradients(loss, written[aggregation], logp), 1e-6)


def test_a_clipped_kl_in_the_reward_is_part_of_the_advantage():
    logp, behaviour, reference, mask, a = example(2)
    k1 = ((logp - reference) * mask).sum(1).detach()
    loo = (k1.reshape(-1, 3).sum(1, keepdim=True) - k1.reshape(-1, 3)).reshape(-1) / 2
    written = (clipped(logp, behaviour, (a - 0.5 * (k1 - loo))[:, None]) * mask).sum() / 6
    objective = o.Objective(parse("k1-in-reward+token-ratio+loo=3"), 0.5, 3, ratio="token", clip_low=0.2, clip_high=0.2)
    loss, _ = o.policy_loss(objective, {"log_probs": logp, "reference": reference}, mask, a, behaviour)
    assert_close(*gradients(loss, written, logp))


def test_rloo_folds_the_kl_into_the_reward():
    """Advantages are linear, so a KL with its own leave-one-out baseline is the KL subtracted from the reward."""
    logp, _, reference, mask, _ = example(3)
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    k1 = ((logp - reference) * mask).sum(1).detach()
    written = -((o.leave_one_out(rewards - 0.3 * k1, 3)[:, None] * logp * mask).sum()) / 6
    objective = o.Objective(parse("k1-in-reward+loo=3"), 0.3, 3)
    terms = {"log_probs": logp, "reference": reference}
    loss, _ = o.policy_loss(objective, terms, mask, o.leave_one_out(rewards, 3))
    assert_close(*gradients(loss, written, logp))


def test_sequence_ratio_of_rloo():
    logp, behaviour, _, mask, a = example(4)
    ratio = ((logp - behaviour) * mask).sum(1).exp()
    written = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
    objective = o.Objective(None, 0.0, 3, ratio="sequence", clip_low=0.2, clip_high=0.2)
    loss, _ = o.policy_loss(objective, {"log_probs": logp}, mask, a, behaviour)
    assert_close(*gradients(loss, written, logp))


BAD = {
    "did you mean 'rloo'": {"advantage": "rlo"},
    "beta = -1": {"beta": -1.0},
    "needs a KL configuration": {"beta": 0.1},
    "group = 1": {"group": 1},
    "go together": {"clip_low": 0.2, "ratio": "token"},
    "clipping needs": {"clip_low": 0.2, "clip_high": 0.2},
    "an exact baseline": {"configuration": parse("k1-in-reward+mean-baseline")},
    "no multiple of loo=3": {"configuration": parse("k1-in-reward+loo=3")},
}


@pytest.mark.parametrize("sentence", BAD)
def test_what_cannot_be_is_said(sentence):
    with pytest.raises(ValueError, match=sentence):
        o.Objective(**BAD[sentence])
