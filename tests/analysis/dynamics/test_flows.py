"""The expected field: where it ends, whether it is a gradient, how it acts near the reference."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import assert_close, build_world, configurations, worlds

from klgrad.analysis.dynamics import flows
from klgrad.analysis.dynamics.fields import expected_update
from klgrad.analysis.dynamics.flows import closed_form, curl, field_of, follow, jacobian, pull, trajectory
from klgrad.analysis.dynamics.recipes import Algorithm
from klgrad.synth import automata, objectives
from klgrad.synth.configurations import parse
from klgrad.synth.policies import PolicyPair, log_softmax, tabular
from klgrad.synth.rewards import task
from klgrad.synth.tasks import preset_task


def setting(name="tree", length=None):
    family = objectives.family(preset_task(name, length))
    return family, family.parameters_of(family.task.pair.reference)


# --------------------------------------------------------------------------------------------------- the field


@given(worlds(off=False), configurations(), st.sampled_from(("reinforce", "rloo", "dr-grpo")), st.integers(0, 99))
def test_many_points_at_once_are_the_updates_one_by_one(world, configuration, advantage, seed):
    family = objectives.family(task(world.pair, "contains(1,0)+0.3*each(0)+0.5*parity(1)", world.length))
    algorithm = Algorithm(advantage, samples=4)
    theta = world.pair.policy.theta + np.random.default_rng(seed).normal(size=(3, world.pair.policy.parameters))
    found = field_of(family, configuration, 0.6, algorithm)(theta)
    for point, update in zip(theta, found, strict=True):
        assert_close(update, expected_update(family.task, family.pair(point), configuration, 0.6, algorithm), 1e-8)
    assert_close(field_of(family, configuration, 0.6, algorithm)(theta[0]), found[0])


# ------------------------------------------------------------------------------------------------- fixed points


@pytest.mark.parametrize("name", ["k1-in-reward", "k3-in-both+rtg", "k2-in-loss", "full-in-loss", "k3-in-loss",
                                  "alpha(0.5)-in-loss"])  # fmt: skip
def test_following_the_field_ends_at_the_closed_form(name):
    family, start = setting()
    configuration = parse(name)
    found = follow(family, field_of(family, configuration, 0.5), start)
    met = objectives.visited(family.task)
    assert found.kind == "attracting"
    assert_close(family.policy(found.theta).log_probs[met], closed_form(family, configuration, 0.5)[met], 1e-9)


def test_the_alpha_family_in_the_loss_is_a_forward_kl_of_less_weight():
    family, _ = setting()
    half, whole = closed_form(family, parse("alpha(0.5)-in-loss"), 0.5), closed_form(family, parse("k3-in-loss"), 0.25)
    assert_close(half, whole)


@pytest.mark.parametrize("name", ["k1-in-loss", "k3-in-reward", "k2-in-reward", "abs-in-loss"])
def test_no_closed_form_is_claimed_for_other_fields(name):
    assert closed_form(setting()[0], parse(name), 0.5) is None


@pytest.mark.parametrize(("name", "kind"), [("k1-in-loss", "moving"), ("k3-in-reward", "runaway")])
def test_fields_without_a_point_are_said_to_have_none(name, kind):
    family, start = setting()
    found = follow(family, field_of(family, parse(name), 0.5), start, longest=1e3)
    assert (found.settled, found.kind) == (False, kind)


def test_a_saddle_is_unstable_and_a_free_point_neutral():
    family, start = setting("phase")
    settled = task(family.task.pair, "none", 6)
    free = objectives.family(settled)
    neutral = follow(free, field_of(free, parse("k1-in-loss"), 0.3), start)
    assert (neutral.settled, neutral.kind) == (True, "neutral")
    found = flows.FixedPoint(start, 0.0, True, False, np.array([0.3 + 0j, -1.0]))
    assert found.kind == "unstable"
    assert flows.FixedPoint(start, 0.0, True, False, np.array([-0.1 + 0.5j, -0.1 - 0.5j])).kind == "spiral"


def test_trajectory_keeps_its_times():
    family, start = setting("phase")
    field = field_of(family, parse("k2-in-loss"), 0.3)
    path = trajectory(family, field, start, [0.0, 1.0, 4.0])
    assert_close(path[0], start)
    assert_close(trajectory(family, field, path[1], [3.0])[0], path[2], 1e-6)
    speed = (
        trajectory(family, field, start, [1.0 + 1e-4])[0] - trajectory(family, field, start, [1.0 - 1e-4])[0]
    ) / 2e-4
    assert_close(speed, field(path[1]), 1e-4)
    with pytest.raises(ValueError, match="must rise"):
        trajectory(family, field, start, [2.0, 1.0])


# --------------------------------------------------------------------------------------- is it a gradient at all?


@pytest.mark.parametrize(
    ("name", "conservative"),
    [
        ("k1-in-reward", True), ("k3-in-both", True), ("full-in-both+rtg", True), ("k1-in-loss", True),
        ("k2-in-loss", False), ("k3-in-loss", False), ("k3-in-reward", False), ("full-in-reward", False),
    ],
)  # fmt: skip
def test_only_gradients_have_a_symmetric_jacobian(name, conservative):
    pair = build_world("history", 2, 3, seed=4).pair
    family = objectives.family(task(pair, "none", 3))  # the penalty alone
    found = curl(jacobian(family, field_of(family, parse(name), 1.0), pair.policy.theta))
    assert (np.isnan(found) or found < 1e-6) if conservative else found > 0.05


@pytest.mark.parametrize("name", ["k2-in-loss", "k3-in-loss", "k3-in-reward"])
def test_at_one_token_every_field_is_a_gradient(name):
    pair = build_world("history", 3, 1, seed=4).pair
    family = objectives.family(task(pair, "ends(1)", 1))
    assert curl(jacobian(family, field_of(family, parse(name), 1.0), pair.policy.theta)) < 1e-6


def test_the_jacobian_of_a_gradient_is_the_hessian():
    family, start = setting("phase")
    basis, theta = family.basis, start + 0.3

    def value(x):
        return objectives.objective(family.task, family.pair(theta + basis @ x), 0.3)

    step, eye = 1e-3, np.eye(2)
    hessian = [[(value(step * (a + b)) - value(step * (a - b)) - value(step * (b - a)) + value(-step * (a + b)))
                / (4 * step**2) for b in eye] for a in eye]  # fmt: skip
    assert_close(jacobian(family, field_of(family, parse("k1-in-reward"), 0.3), theta), np.array(hessian), 1e-5)


# ------------------------------------------------------------------------------------------- near the reference


@pytest.mark.parametrize(
    ("name", "order"),
    [("k1-in-reward", 1), ("k2-in-loss", 1), ("k3-in-loss", 1), ("k3-in-reward", 2), ("k2-in-reward", 2),
     ("full-in-reward", 2)],
)  # fmt: skip
def test_order_of_the_pull(name, order):
    family, _ = setting("phase")
    found = pull(family, parse(name), np.array([0.7, -0.4]))
    assert_close(found.order, order, 0.02)
    if order == 1:
        assert found.towards > 0.5


@pytest.mark.parametrize("name", ["k2-in-reward", "k3-in-reward"])
def test_a_uniform_reference_repels(name):
    automaton = automata.markov(2, 1, start=(0,))
    uniform = np.zeros((2, 2))
    pair = PolicyPair(automaton, tabular(automaton, uniform), log_softmax(uniform))
    family = objectives.family(task(pair, "none", 1))
    found = pull(family, parse(name), np.array([1.0, 0.0, 0.0, 0.0]), distance=0.05)
    # with x = 2p - 1 the penalty descended is -x^4 / 6 (k3) or -x^4 / 8 (k2): a force of third order, and outward
    assert_close(found.order, 3, 0.02)
    assert_close(found.towards, -1, 1e-6)


def test_no_penalty_does_not_pull():
    family, start = setting("phase")
    assert np.isnan(pull(family, parse("k1-in-loss"), start).order)
    with pytest.raises(ValueError, match="changes no policy"):
        pull(setting()[0], parse("k1-in-reward"), np.ones(14))
