"""Objective, gradients, optimum and fixed points against enumeration, differences and theory."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import assert_close, build_world, finite_difference, thinned_worlds, worlds

from klgrad.synth import automata, exact, objectives
from klgrad.synth.configurations import parse
from klgrad.synth.enumeration import log_probability, sequences
from klgrad.synth.moments import moments
from klgrad.synth.policies import PolicyPair, from_function, log_softmax, tabular, with_behaviour
from klgrad.synth.rewards import Reward, lift, parse_reward, task
from klgrad.synth.tasks import TASKS, preset_task

REWARD = "contains(1,0)+0.3*each(0)+0.5*parity(1)"


def task_of(world, text=REWARD):
    """The world's task, and its lifted pair with the behaviour policy the world has."""
    found = task(world.on_policy, text, world.length, "ends(1)")
    lifted, _ = lift(world.pair, {k: parse_reward(t, world.pair.automaton) for k, t in (("r", text), ("o", "ends(1)"))})
    return found, lifted


def rewards_of(found, every):
    rows, last = np.arange(len(every.mask)), every.mask.sum(axis=1) - 1
    after = found.pair.automaton.next_context[every.contexts[rows, last], every.tokens[rows, last]]
    return (found.reward.edge[every.contexts, every.tokens] * every.mask).sum(axis=1) + found.reward.terminal[after]


@given(worlds(off=False), st.sampled_from((0.0, 0.1, 1.0)))
def test_objective_is_a_sum_over_sequences_and_its_gradient_a_derivative(world, beta):
    found, pair = task_of(world)
    every = sequences(pair.automaton, world.length)
    p, q = log_probability(every, pair.policy.log_probs), log_probability(every, pair.reference)
    assert_close(objectives.objective(found, pair, beta), np.exp(p) @ (rewards_of(found, every) - beta * (p - q)))
    family = objectives.family(found)
    numeric = finite_difference(lambda theta: objectives.objective(found, family.pair(theta), beta), pair.policy.theta)
    assert_close(objectives.objective_gradient(found, pair, beta), numeric, 1e-6)


@given(st.one_of(worlds(), thinned_worlds()), st.sampled_from(("none", "token", "prefix", "sequence")), st.booleans())
def test_reward_gradient_of_every_ratio_is_a_sum_over_sequences(world, ratio, centred):
    found, pair = task_of(world)
    every = sequences(pair.automaton, world.length)
    mu = np.exp(log_probability(every, pair.sampler))
    rho = np.where(every.mask, pair.importance_ratio[every.contexts, every.tokens], 1.0)
    running = np.cumprod(rho, axis=1)
    weight = {"none": np.ones_like(rho), "token": rho, "prefix": running, "sequence": running[:, -1:]}[ratio]
    earned = rewards_of(found, every)
    earned = earned - (mu @ earned if centred else 0.0)
    scores = pair.policy.scores[every.contexts, every.tokens] * (weight * every.mask)[..., None]
    expected = (mu * earned) @ scores.sum(axis=1)
    assert_close(objectives.reward_gradient(pair, found.reward, world.length, ratio, centred=centred), expected, 1e-9)


@given(worlds(off=False), st.sampled_from((0.2, 1.0, 5.0)))
def test_suboptimality_is_beta_times_the_kl_to_the_optimum(world, beta):
    found, pair = task_of(world)
    best = objectives.best(found, beta)
    gap = best.objective - objectives.objective(found, pair, beta)
    assert_close(gap, beta * objectives.kl_to(found, pair, best), 1e-9)
    assert gap > -1e-9


@given(worlds(off=False))
def test_without_a_penalty_the_best_is_the_greatest_reward(world):
    found, _ = task_of(world)
    every = sequences(found.pair.automaton, world.length)
    assert_close(objectives.best(found, 0.0).objective, rewards_of(found, every).max())


def test_the_best_takes_only_tokens_that_the_reference_emits():
    automaton = automata.markov(2, 1, start=(0,))
    pair = PolicyPair(automaton, tabular(automaton, np.array([[0.0, -np.inf]] * 2)), np.array([[0.0, -np.inf]] * 2))
    assert objectives.best(task(pair, "each(1)", 3), 0.0).objective == 0.0


# ------------------------------------------------------------------------------------------------- fixed points


def tree(eos, seed):
    """Every prefix a context, tabular: closed forms exist."""
    world = build_world("history", 3, 3, eos=eos, seed=seed)
    return task(world.pair, "contains(1,0)+0.7*parity(1)+0.1*each(0)", 3)


@pytest.mark.parametrize("beta", [0.2, 0.5, 3.0])
@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize(
    ("kind", "configuration"),
    [
        ("sequence", "k1-in-reward"),
        ("sequence", "k3-in-both"),
        ("token", "k2-in-loss"),
        ("token", "full-in-loss"),
        ("token-forward", "k3-in-loss"),
    ],
)
def test_closed_form_fixed_points_balance_reward_and_penalty(kind, configuration, eos, beta):
    found = tree(eos, seed=5)
    family = objectives.family(found)
    there = family.pair(family.parameters_of(objectives.token_fixed_point(found, beta, kind), "the fixed point"))
    reward = objectives.reward_gradient(there, found.reward, 3)
    penalty = moments(there, [parse(configuration)], [3], covariance="none")[0].mean[0]
    assert_close(reward, beta * penalty, 1e-9)
    assert np.linalg.norm(reward) > 1e-3 * beta  # a balance of two forces, not two zeros


@pytest.mark.parametrize("kind", ["sequence", "token", "token-forward"])
def test_a_token_that_the_reference_lacks_is_as_if_it_were_not_there(kind):
    """Even where it would be rewarded most."""
    logits = np.array([[0.3, -0.2], [0.5, 0.1], [-1.0, 0.4]])
    found = []
    for more in (np.zeros((3, 0)), np.full((3, 1), -np.inf)):
        automaton = automata.positional(2 + more.shape[1], 3)
        policy = tabular(automaton, np.concatenate([logits, more], axis=1))
        rewarded = "0.4*each(1)" if more.size == 0 else "0.4*each(1)+each(2)"
        there = task(PolicyPair(automaton, policy, policy.log_probs), rewarded, 3)
        found.append(np.exp(objectives.token_fixed_point(there, 0.5, kind)))
    assert_close(found[1][:, :2], found[0])
    assert np.array_equal(found[1][:, 2], np.zeros(3))


def test_the_sequence_fixed_point_is_the_optimum_and_the_others_fall_short():
    found = tree(False, seed=2)
    family, best = objectives.family(found), objectives.best(found, 0.5)
    reached = {}
    for kind in ("sequence", "token", "token-forward"):
        theta = family.parameters_of(objectives.token_fixed_point(found, 0.5, kind))
        reached[kind] = objectives.objective(found, family.pair(theta), 0.5)
    assert_close(reached["sequence"], best.objective)
    assert reached["token"] < best.objective - 1e-4
    assert reached["token-forward"] < best.objective - 1e-4


def test_at_one_token_the_token_fixed_point_is_the_optimum():
    found = task(build_world("history", 3, 1, seed=1).pair, "ends(1)+0.4*ends(2)", 1)
    assert_close(
        objectives.token_fixed_point(found, 0.3, "token"), objectives.token_fixed_point(found, 0.3, "sequence")
    )


def test_a_constant_reward_leaves_the_reference_alone():
    pair = build_world("history", 2, 2, seed=1).pair
    found = task(pair, "parity(1)", 2)
    found = replace(found, reward=Reward(found.reward.edge * 0, np.ones_like(found.reward.terminal)))
    for kind in ("sequence", "token", "token-forward"):
        assert_close(objectives.token_fixed_point(found, 0.3, kind), found.pair.reference)


def test_what_has_no_closed_form_is_refused():
    markov = task(build_world("markov", 2, 3).pair, "ends(1)", 3)
    with pytest.raises(ValueError, match="more than one time"):
        objectives.token_fixed_point(markov, 0.5, "token")
    with pytest.raises(ValueError, match="must be positive"):
        objectives.token_fixed_point(tree(False, 0), 0.0, "token")
    with pytest.raises(ValueError, match="no closed form for 'future'"):
        objectives.token_fixed_point(tree(False, 0), 0.5, "future")


# ------------------------------------------------------------------------------------------------------ families


@given(worlds(off=False), st.integers(0, 99))
def test_the_family_holds_the_policy_at_any_parameters(world, seed):
    found, pair = task_of(world)
    family = objectives.family(found)
    theta = pair.policy.theta + np.random.default_rng(seed).normal(size=pair.policy.parameters)
    policy = family.policy(theta)
    assert_close(family.policy(pair.policy.theta).log_probs[pair.automaton.alive],
                 pair.policy.log_probs[pair.automaton.alive])  # fmt: skip
    assert_close(family.policy_of(policy.log_probs).scores, policy.scores)
    met = objectives.visited(found)
    again = family.policy(family.parameters_of(policy.log_probs, "it"))
    assert_close(again.log_probs[met], policy.log_probs[met], 1e-7)
    # no gradient points out of the identifiable directions
    gradient = objectives.objective_gradient(found, family.pair(theta), 0.3)
    assert_close(family.basis @ (family.basis.T @ gradient), gradient)


def test_identifiable_directions_leave_out_a_constant_per_context():
    found = task(build_world("markov", 3, 4).pair, "ends(1)", 4)
    assert objectives.family(found).basis.shape == (9, 6)


def test_a_policy_that_is_not_log_linear_is_refused(torch):
    automaton = automata.markov(2, 1, start=(0,))
    reference = log_softmax(np.zeros((2, 2)))
    curved = from_function(automaton, lambda th: torch.stack([th**2, th]), np.array([0.5, 1.5]))
    with pytest.raises(ValueError, match="not linear in its parameters"):
        objectives.family(task(PolicyPair(automaton, curved, reference), "ends(1)", 2))
    sure = tabular(automaton, np.array([[0.0, -np.inf], [0.0, 0.0]]))
    with pytest.raises(ValueError, match="probability 0 cannot be trained"):
        objectives.family(task(PolicyPair(automaton, sure, reference), "ends(1)", 2))


def test_a_reference_outside_the_family_is_refused():
    found = task(build_world("markov", 2, 3, parameters=1).pair, "ends(1)", 3)
    with pytest.raises(ValueError, match="no parameters of this policy give the reference"):
        objectives.family(found).parameters_of(found.pair.reference)


# --------------------------------------------------------------------------------------------------------- tasks


@pytest.mark.parametrize("name", TASKS)
def test_task_presets_start_at_their_reference_and_can_improve(name):
    found = preset_task(name)
    family = objectives.family(found)
    pair = family.pair(family.parameters_of(found.pair.reference))
    assert_close(exact.kl(pair, [found.length]), [0.0])
    assert np.linalg.norm(objectives.objective_gradient(found, pair, TASKS[name].beta)) > 1e-2
    assert 0.1 < objectives.expected_reward(pair, found.out_of_domain, found.length) < 0.9


def test_task_presets_by_length_and_wrong_name():
    assert preset_task("pattern", 9).length == 9
    with pytest.raises(ValueError, match="did you mean 'pattern'"):
        preset_task("patern")


def test_off_policy_gradient_of_the_objective_leaves_the_behaviour_aside():
    world = build_world("markov", 2, 3, off=True)
    found, pair = task_of(world)
    assert pair.behaviour is not None
    assert_close(
        objectives.objective_gradient(found, pair, 0.3),
        objectives.objective_gradient(found, with_behaviour(pair, None), 0.3),
    )
