"""Every derivation holds on every model, and a wrong one does not pass."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from strategies import assert_close, build_world, finite_difference, worlds

from klgrad.analysis.derivations import DERIVATIONS, Comparison, Derivation, Step, StepFailed, check, derivation
from klgrad.analysis.derivations.divergences import forward_kl, reverse_kl
from klgrad.analysis.derivations.model import Model
from klgrad.analysis.derivations.steps import evaluate, verify
from klgrad.synth import exact
from klgrad.synth.configurations import parse
from klgrad.synth.enumeration import enumerate_configuration
from klgrad.synth.policies import PolicyPair, log_softmax
from klgrad.synth.presets import PRESETS, preset

NAMES = ["true-gradient", "product-rule", "k1", "k3", "k2", "alpha", "full-vocabulary", "both", "decomposition"]
NAMES += ["off-policy", "aggregation", "baseline", "k3-in-reward", "variance", "optimum", "handbook"]
GENERAL = [name for name, d in DERIVATIONS.items() if not d.fixed]


def test_all_that_were_promised_are_there_in_the_order_of_reading():
    assert list(DERIVATIONS) == NAMES


# ------------------------------------------------------------------------------------------------ they hold


@pytest.mark.parametrize("name", GENERAL)
@given(worlds(off=True, longest=4, cap=100))
def test_every_step_holds_on_random_models(name, world):
    checked = check(derivation(name), world.pair, [world.length])
    assert checked.largest_residual <= 1e-12
    assert all(np.isfinite(r.left).all() and np.isfinite(r.right).all() for r in checked.results[0])


@pytest.mark.parametrize("name", DERIVATIONS)
def test_every_derivation_holds_where_it_is_shown(name):
    shown = derivation(name)
    checked = check(shown, preset(shown.preset, max(shown.lengths)), shown.lengths)
    assert len(checked.results) == len(shown.lengths)
    assert checked.largest_residual < 1e-12


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "words"])
def test_every_preset_can_be_shown(name):
    for found in DERIVATIONS.values():
        pair = preset(name, 3)
        if not found.fixed and not (found.off_policy and pair.on_policy):
            assert check(found, pair, [1, 3]).largest_residual < 1e-12


def test_at_the_reference_itself_everything_is_zero_and_still_holds():
    world = build_world("markov", 3, 3, seed=5, parameters=2)
    pair = replace(world.pair, reference=world.pair.policy.log_probs)
    for name in GENERAL:
        if not derivation(name).off_policy:
            check(derivation(name), pair, [3])


# ------------------------------------------------------------------------------------------ and wrong ones do not

WRONG = {
    "sign": (lambda m: m.engine("k3-in-loss"), lambda m: -m.local(forward_kl)),
    "divergence": (lambda m: m.engine("k3-in-loss"), lambda m: m.local(reverse_kl)),
    "future": (lambda m: m.engine("k2-in-loss"), lambda m: m.exact("true_gradient")),
    "a billionth": (lambda m: m.engine("k1-in-reward"), lambda m: m.exact("true_gradient") * (1 + 1e-9)),
    "not a number": (lambda m: m.engine("k1-in-reward"), lambda m: m.exact("true_gradient") * np.nan),
    "infinite": (lambda m: m.exact("kl"), lambda m: np.array(np.inf)),
}


def of(step):
    return Derivation("wrong", "a wrong step", "this test", (step,), "")


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_step_fails(kind):
    step = Step("a", "b", "because", WRONG[kind])
    with pytest.raises(StepFailed, match="wrong on far at T = 3: the sides differ in a = b"):
        check(of(step), preset("far"), [3])
    check(of(Comparison("a", "b", "because", WRONG[kind])), preset("far"), [3])  # a comparison claims nothing


@pytest.mark.parametrize("name", NAMES)
def test_every_step_of_every_derivation_can_fail(name):
    # each step with its right side a little off goes the same way, and no other
    shown = derivation(name)
    pair = preset(shown.preset, max(shown.lengths))
    model = Model(pair, shown.lengths[0], off_policy=shown.off_policy)
    for step in shown.steps:
        if isinstance(step, Comparison):
            continue
        result = evaluate(step, model)
        shift = 1e-8 * max(model.largest_term, np.abs(result.right).max()) + (10.0 * np.max(step.printed or 0))
        off = replace(step, evaluate=(step.evaluate[0], lambda m, f=step.evaluate[1], s=shift: f(m) + s))
        verify(result, "here")
        with pytest.raises(StepFailed, match="here: the sides differ"):
            verify(evaluate(off, model), "here")


def test_sides_of_different_shape_fail():
    step = Step("a", "b", "because", (lambda m: m.exact("kl"), lambda m: m.exact("true_gradient")))
    with pytest.raises(StepFailed, match="shape"):
        check(of(step), preset("near"), [3])


def test_a_printed_number_is_held_to_its_digits():
    close = Step("KL", "0.021", "printed", (lambda m: m.exact("kl"), lambda m: np.array(0.021)), printed=5e-4)
    check(of(close), preset("handbook"), [1])
    with pytest.raises(StepFailed):
        check(of(replace(close, printed=5e-6)), preset("handbook"), [1])


# -------------------------------------------------------------------------------------------------- bad requests


def test_unknown_names_and_placements_are_refused():
    with pytest.raises(ValueError, match="unknown derivation 'varience': did you mean 'variance'"):
        derivation("varience")
    with pytest.raises(ValueError, match="variance has no steps for the placement 'loss': it has none: leave it out"):
        check(derivation("variance"), preset("near"), [2], placement="loss")
    with pytest.raises(ValueError, match="no steps for the placement 'other': there is reward, loss, both"):
        check(derivation("k3"), preset("near"), [2], placement="other")
    with pytest.raises(ValueError, match="needs a behaviour policy and the pair 'near' is on-policy"):
        check(derivation("off-policy"), preset("near"), [2])
    with pytest.raises(ValueError, match="past the limit"):
        check(derivation("k3"), preset("near"), [15])
    with pytest.raises(ValueError, match="past the limit for a derivation"):
        check(derivation("optimum"), preset("words"), [3])


@pytest.mark.parametrize("placement", ["reward", "loss", "both"])
def test_a_placement_keeps_its_own_steps(placement):
    whole = check(derivation("k3"), preset("near"), [3])
    part = check(derivation("k3"), preset("near"), [3], placement=placement)
    assert {r.step.part for r in part.results[0]} == {"value", placement}
    assert len(part.results[0]) < len(whole.results[0])


def test_a_policy_that_cannot_reach_the_reference_is_refused():
    near = preset("near")
    policy = replace(near.policy, log_probs=np.array([[0.0, -np.inf], [0.0, -np.inf]]))
    with pytest.raises(ValueError, match=r"the reference emits token 1 and the policy never does, so E\[r\] is not 1"):
        Model(PolicyPair(near.automaton, policy, near.reference), 2)
    never = log_softmax(np.array([[0.0, -np.inf], [0.0, -np.inf]]))
    with pytest.raises(ValueError, match="never samples token 1, so no ratio makes up for it"):
        Model(replace(near, behaviour=never), 2, off_policy=True)


def test_tokens_that_nobody_emits_do_no_harm():
    near = preset("near")
    hole = np.array([[0.0, -1.0, -np.inf], [0.5, 0.0, -np.inf]])
    from klgrad.synth.automata import markov
    from klgrad.synth.policies import tabular

    automaton = markov(3, 1, start=(0,))
    logits = np.vstack([hole, [[0.0, 0.0, 0.0]]])
    pair = PolicyPair(automaton, tabular(automaton, logits), log_softmax(np.where(logits > -1, -logits, logits)))
    assert near.on_policy
    for name in GENERAL:
        if not derivation(name).off_policy:
            assert check(derivation(name), pair, [3]).largest_residual < 1e-12


# ----------------------------------------------------------------------------------------- the model they stand on


@given(worlds(longest=4))
def test_the_complex_step_is_the_derivative_of_the_kl(world):
    model = Model(world.pair, world.length)
    assert_close(model.expected(lambda delta: delta), exact.true_gradient(world.pair, [world.length])[0], 1e-12)


def test_the_complex_step_agrees_with_finite_differences():
    world = build_world("history", 2, 3, parameters=3, seed=7)

    def kl(theta):
        table = log_softmax(world.features @ theta)
        every = Model(world.pair, 3)
        return np.exp(every.log_prob(table)) @ every.log_ratio(table).sum(axis=1)

    got = Model(world.pair, 3).expected(lambda delta: delta)
    assert_close(got, finite_difference(kl, world.pair.policy.theta), 1e-8)


@given(worlds(off=True, longest=4))
def test_the_model_is_the_enumeration_of_the_oracle(world):
    model = Model(world.pair, world.length, off_policy=True)
    table = enumerate_configuration(parse("k3-in-loss"), world.pair, world.length)
    assert_close(model.mean_mu(model.weigh(np.where(model.mask, 1 - model.r, 0.0))), table.mean, 1e-12)
    assert_close(model.visits(model.mu), exact.visitation(world.pair, [world.length], world.pair.sampler)[0], 1e-12)


def test_the_scale_of_a_sum_is_that_of_its_terms():
    model = Model(preset("near"), 2)
    model.mean(np.where(np.arange(len(model.p)) % 2, 1e6, -1e6))
    assert model.largest_term == pytest.approx(1e6)
