"""The oracle itself: all sequences, their probabilities, the formula by hand, and torch as autograd sees it."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import assert_close, build_world, worlds

from klgrad.synth import automata, enumeration, exact
from klgrad.synth.configurations import parse
from klgrad.synth.enumeration import (
    enumerate_configuration,
    enumerate_leave_one_out,
    expected_loss_gradient,
    log_probability,
    sequence_chunks,
    sequence_gradient,
    sequences,
    torch_batches,
    torch_policy,
)


def constant(log_probs, torch):
    table = torch.as_tensor(np.array(log_probs))
    return lambda contexts: table[contexts]


def batches_of(world, torch, chunk=4096):
    """``(theta, fresh iterator)`` over every sequence of a world, with its own sampler."""
    theta, model = torch_policy(world.pair, world.features)
    behaviour = None if world.pair.on_policy else constant(world.pair.behaviour, torch)
    reference = constant(world.pair.reference, torch)
    return theta, lambda: torch_batches(
        model, reference, world.pair.automaton, world.length, behaviour=behaviour, chunk=chunk
    )


# -------------------------------------------------------------------------------------------------- sequences


def test_without_an_end_the_sequences_are_the_product():
    every = sequences(automata.markov(3, 1), 3)
    assert [tuple(row) for row in every.tokens.tolist()] == list(itertools.product(range(3), repeat=3))
    assert every.mask.all()


def test_with_an_end_they_stop_there_and_are_padded():
    every = sequences(automata.markov(2, 1, eos=True), 3)
    assert every.mask.tolist() == [[True] * 3, [True] * 3, [True, True, False], [True, False, False]]
    assert every.tokens.tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]]


@given(worlds())
def test_probabilities_sum_to_one_and_contexts_follow_the_automaton(world):
    every = sequences(world.pair.automaton, world.length)
    assert np.exp(log_probability(every, world.pair.sampler)).sum() == pytest.approx(1.0, abs=1e-12)
    assert (every.contexts[:, 0] == world.pair.automaton.start).all()
    step = world.pair.automaton.next_context[every.contexts[:, :-1], every.tokens[:, :-1]]
    real = every.mask[:, 1:]
    assert (step[real] == every.contexts[:, 1:][real]).all()
    assert (every.contexts[every.mask] != world.pair.automaton.end).all()


def test_too_many_sequences_are_refused_with_the_way_out():
    with pytest.raises(
        ValueError, match=r"2\^30 = 1.07e\+09 sequences are past the limit .* exact moments or Monte Carlo"
    ):
        sequences(automata.markov(2, 1), 30)
    with pytest.raises(ValueError, match="past the limit of 7"):
        sequences(automata.markov(2, 1), 3, limit=7)
    assert len(sequences(automata.markov(2, 1), 3, limit=8).tokens) == 8


# --------------------------------------------------------------------------------------- the formula, by hand


HAND = build_world("markov", 2, 3, off=True, seed=4)
CONTEXTS, TOKENS = [0, 1, 0], [1, 0, 1]


def hand(name, b=0.0):
    return sequence_gradient(parse(name), HAND.pair, CONTEXTS, TOKENS, b)


@pytest.fixture
def by_hand():
    """Scores, log-ratios, token ratios and running ratios of the sequence 1, 0, 1."""
    at = (CONTEXTS, TOKENS)
    delta = (HAND.pair.policy.log_probs - HAND.pair.reference)[at]
    rho = np.exp((HAND.pair.policy.log_probs - HAND.pair.behaviour)[at])
    return HAND.pair.policy.scores[at], delta, rho, np.cumprod(rho)


def test_credits_by_hand(by_hand):
    p, c, _, _ = by_hand
    assert_close(hand("k1-in-reward"), c.sum() * p.sum(0), 1e-14)
    assert_close(hand("k1-in-reward+rtg"), c.sum() * p[0] + c[1:].sum() * p[1] + c[2] * p[2], 1e-14)
    assert_close(hand("k1-in-reward+token"), c @ p, 1e-14)
    assert_close(hand("k1-in-reward+future"), (c[1] + c[2]) * p[0] + c[2] * p[1], 1e-14)


def test_ratios_by_hand(by_hand):
    p, c, rho, run = by_hand
    prefix = sum(run[max(t, u)] * c[u] * p[t] for t in range(3) for u in range(3))
    assert_close(hand("k1-in-reward+token-ratio"), c.sum() * rho @ p, 1e-14)
    assert_close(hand("k1-in-reward+sequence-ratio"), run[2] * c.sum() * p.sum(0), 1e-14)
    assert_close(hand("k1-in-reward+prefix-ratio"), prefix, 1e-14)
    assert_close(hand("k2-in-loss+prefix-ratio"), (run * c) @ p, 1e-14)


def test_baselines_and_divisors_by_hand(by_hand):
    p, c, rho, _ = by_hand
    assert_close(hand("k1-in-reward", b=2.0), (c.sum() - 2.0) * p.sum(0), 1e-14)
    assert_close(hand("k1-in-reward+token-ratio+divide=4", b=2.0), (c.sum() - 2.0) * (rho @ p) / 4, 1e-14)
    assert_close(hand("k1-in-reward+length-mean"), c.sum() * p.sum(0) / 3, 1e-14)


def test_full_terms_do_not_depend_on_the_sampled_token(by_hand):
    _, _, _, run = by_hand
    pi, delta = np.exp(HAND.pair.policy.log_probs), HAND.pair.policy.log_probs - HAND.pair.reference
    w = [(pi[s] * delta[s]) @ HAND.pair.policy.scores[s] for s in CONTEXTS]
    assert_close(hand("full-in-loss"), w[0] + w[1] + w[2], 1e-14)
    assert_close(hand("full-in-loss+token-ratio"), w[0] + w[1] + w[2], 1e-14)
    assert_close(hand("full-in-loss+prefix-ratio"), w[0] + run[0] * w[1] + run[1] * w[2], 1e-14)
    assert_close(hand("full-in-loss+sequence-ratio"), run[2] * (w[0] + w[1] + w[2]), 1e-14)


def test_full_values_take_the_ratio_ahead_of_their_token(by_hand):
    p, _, _, run = by_hand
    kl = exact.kl_rows(HAND.pair.policy.log_probs, HAND.pair.reference)[CONTEXTS]
    before = [1.0, *run[:2]]
    expected = sum(max((t, run[t]), (u - 1, before[u]))[1] * kl[u] * p[t] for t in range(3) for u in range(3))
    assert_close(hand("full-in-reward+prefix-ratio"), expected, 1e-14)


def test_rollout_values_are_frozen_at_the_sampler(by_hand):
    p, _, _, _ = by_hand
    frozen = (HAND.pair.behaviour - HAND.pair.reference)[CONTEXTS, TOKENS]
    assert_close(hand("k1-in-reward+rollout-value"), frozen.sum() * p.sum(0), 1e-14)
    # and only the value: the loss term keeps the live slope
    difference = hand("k2-in-both+rollout-value") - hand("k2-in-reward+rollout-value")
    assert_close(difference, hand("k2-in-loss"), 1e-14)


def test_mean_and_covariance_of_the_tables():
    found = enumerate_configuration(parse("k1-in-reward"), HAND.pair, 2)
    assert found.probability.sum() == pytest.approx(1.0)
    draws = np.repeat(found.gradient, np.round(found.probability * 10**6).astype(int), axis=0)
    np.testing.assert_allclose(found.mean, draws.mean(0), atol=1e-4)
    np.testing.assert_allclose(found.covariance, np.cov(draws.T), atol=1e-3)


def test_leave_one_out_of_two_by_hand():
    # two sequences: each is the other's baseline, so the estimate is (C1 - C2)(G1 - G2) / 2
    found = enumerate_configuration(parse("k1-in-reward"), HAND.pair, 1)
    scores = enumerate_configuration(parse("k1-in-reward+b=-1"), HAND.pair, 1).gradient - found.gradient
    mean = sum(
        found.probability[i] * found.probability[j] * (found.value[i] - found.value[j]) * (scores[i] - scores[j]) / 2
        for i, j in itertools.product(range(2), repeat=2)
    )
    assert_close(enumerate_leave_one_out(parse("k1-in-reward"), HAND.pair, 1, 2)[0], mean, 1e-14)


def test_too_many_groups_are_refused():
    with pytest.raises(ValueError, match=r"8\^6 groups are past the limit"):
        enumerate_leave_one_out(parse("k1-in-reward+loo"), HAND.pair, 3, 6)


# ----------------------------------------------------------------------------------------------------- torch


@given(worlds(cap=100))
def test_torch_sees_the_same_policy_and_probabilities(torch, world):
    theta, batches = batches_of(world, torch, chunk=7)
    assert theta.shape == (world.pair.policy.parameters,)
    parts = list(batches())
    every = sequences(world.pair.automaton, world.length)
    weight = np.concatenate([w.detach().numpy() for w, _ in parts])
    log_probs = np.concatenate([batch.log_probs.detach().numpy() for _, batch in parts])
    assert_close(weight, np.exp(log_probability(every, world.pair.sampler)), 1e-13)
    assert_close(log_probs.sum(1), log_probability(every, world.pair.policy.log_probs), 1e-13)


@given(worlds(cap=100))
def test_autograd_of_a_sequence_log_prob_is_the_sum_of_scores(torch, world):
    theta, batches = batches_of(world, torch)
    every = sequences(world.pair.automaton, world.length)
    i = len(every.tokens) // 2
    (_, batch), n = next(iter(batches())), int(every.mask[i].sum())
    (got,) = torch.autograd.grad(batch.log_probs[i].sum(), theta)
    assert_close(got.numpy(), world.pair.policy.scores[every.contexts[i, :n], every.tokens[i, :n]].sum(0), 1e-13)


@given(worlds(cap=100))
def test_k3_loss_by_autograd_is_k3_in_loss(torch, world):
    def k3_loss(batch):
        delta = batch.log_probs - batch.reference
        return ((torch.exp(-delta) - 1 + delta) * batch.mask).sum(1)

    theta, batches = batches_of(world, torch, chunk=50)
    (got,) = expected_loss_gradient(k3_loss, theta, batches)
    assert_close(got.numpy(), enumerate_configuration(parse("k3-in-loss"), world.pair, world.length).mean)


def test_a_batch_coupled_loss_goes_through_all_groups(torch):
    # mean-centring within the group multiplies the gradient by 1 - 1/n [C2]
    world = build_world("markov", 2, 2, seed=2)
    true = exact.true_gradient(world.pair, [2])[0]

    def centred(batch):
        cost = (batch.log_probs - batch.reference).detach().sum(1)
        return ((cost - cost.mean()) * batch.log_probs.sum(1)).mean()

    for n in (2, 3):
        theta, batches = batches_of(world, torch)
        (got,) = expected_loss_gradient(centred, theta, batches, group=n)
        assert_close(got.numpy(), (1 - 1 / n) * true)


def test_a_group_of_one_is_the_per_sequence_loss(torch):
    world = build_world("markov", 3, 2, eos=True, seed=2)
    theta, batches = batches_of(world, torch)
    one = expected_loss_gradient(lambda b: (b.log_probs**2).sum(), theta, batches, group=1)[0]
    each = expected_loss_gradient(lambda b: (b.log_probs**2).sum(1), theta, batches)[0]
    assert_close(one.numpy(), each.numpy(), 1e-13)
    assert each.abs().max() > 1e-3


def test_a_detached_loss_has_no_gradient(torch):
    theta, batches = batches_of(build_world("markov", 2, 2), torch)
    (got,) = expected_loss_gradient(lambda b: b.log_probs.detach().sum(1), [theta], batches)
    assert (got == 0).all()
    assert got.shape == theta.shape


def test_losses_of_the_wrong_shape_and_too_many_groups_are_refused(torch):
    theta, batches = batches_of(build_world("markov", 2, 3), torch)
    with pytest.raises(ValueError, match=r"shape \(\), not one per sequence \(8,\).*give group=n"):
        expected_loss_gradient(lambda b: b.log_probs.sum(), theta, batches)
    with pytest.raises(ValueError, match=r"8\^6 groups are past the limit of 16384"):
        expected_loss_gradient(lambda b: b.log_probs.sum(), theta, batches, group=6)
    theta, chunked = batches_of(build_world("markov", 2, 3), torch, chunk=4)
    with pytest.raises(ValueError, match="fit one chunk"):
        expected_loss_gradient(lambda b: b.log_probs.sum(), theta, chunked, group=2)


def test_a_model_of_tokens_sees_no_future_and_agrees_with_the_history_automaton(torch):
    # a two-parameter recurrent model; its history automaton twin gets the same log-probs by table
    weight = torch.tensor([0.7, -0.4], dtype=torch.float64, requires_grad=True)

    def model(tokens):
        seen = torch.cumsum(2.0 * tokens - 1.0, 1) - (2.0 * tokens - 1.0)
        logit = weight[0] * torch.tanh(seen) + weight[1]
        return torch.log_softmax(torch.stack([torch.zeros_like(logit), logit], -1), -1)

    def uniform(tokens):
        return torch.full((*tokens.shape, 2), -np.log(2.0), dtype=torch.float64)

    automaton = automata.history(2, 3)
    parts = list(torch_batches(model, uniform, automaton, 3, inputs="tokens"))
    assert float(sum(w.sum() for w, _ in parts)) == pytest.approx(1.0)
    values = [enumeration.sequences(automaton, 3).tokens, np.concatenate([b.log_probs.detach() for _, b in parts])]
    first = {tuple(t[:2]): lp[1] for t, lp in zip(values[0].tolist(), values[1], strict=True)}
    assert all(first[t[0], t[1]] == pytest.approx(lp[1]) for t, lp in zip(values[0].tolist(), values[1], strict=True))


@given(world=worlds(), chunk=st.integers(1, 40))
def test_chunks_are_the_sequences_in_order(world, chunk):
    automaton = world.pair.automaton
    whole, parts = sequences(automaton, world.length), list(sequence_chunks(automaton, world.length, chunk))
    for field in ("tokens", "contexts", "mask"):
        assert np.array_equal(np.concatenate([getattr(part, field) for part in parts]), getattr(whole, field))
    assert max(len(part.tokens) for part in parts) <= max(chunk, automaton.vocabulary)


@pytest.mark.parametrize("chunk", [3, 20, 4096])
def test_no_prefix_is_evaluated_for_each_of_its_last_tokens(torch, chunk):
    """V^(T-1) rows of the model, not V^T, and the same log-probs as one call on everything."""
    automaton, rows = automata.history(3, 4), []
    table = torch.log_softmax(torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), -1)

    def model(tokens):  # the next token depends on the sum of those before
        rows.append(len(tokens))
        before = torch.cumsum(tokens, 1) - tokens
        return table[before % 3]

    batches = list(torch_batches(model, lambda tokens: table[tokens * 0], automaton, 4, inputs="tokens", chunk=chunk))
    assert sum(rows) == 3**3
    every = torch.as_tensor(sequences(automaton, 4).tokens)
    assert torch.equal(torch.cat([batch.full_log_probs for _, batch in batches]), model(every))
    assert sum(float(weight.sum()) for weight, _ in batches) == pytest.approx(1)
