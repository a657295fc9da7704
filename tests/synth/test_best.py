"""``alpha(best)``: the argument of least variance, in closed form, against a search and against enumeration."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from strategies import build_world, configurations, worlds

from klgrad.synth.configurations import parse
from klgrad.synth.enumeration import enumerate_configuration
from klgrad.synth.estimators import ESTIMATORS, estimator
from klgrad.synth.moments import best, moments
from klgrad.synth.presets import preset

LENGTHS = [3, 6]


def variance(pair, name, length):
    (m,) = moments(pair, [parse(name)], [length])
    return m.covariance[0]


@given(world=worlds(), configuration=configurations(names=["alpha"]))
@settings(max_examples=30)
def test_no_other_argument_has_less_variance(world, configuration):
    """In any placement, with any credit, ratio, baseline and aggregation; to the rounding of the variances."""
    open_ = replace(configuration, estimator=estimator("alpha(best)"))
    (m,) = moments(world.pair, [open_], [world.length])
    (found,) = m.found
    assume(np.isfinite(m.covariance[0]))
    a = float(str(found.estimator).partition("(")[2].rstrip(")"))
    for other in (*np.linspace(-0.5, 1.5, 9), a - 1e-3, a + 1e-3):
        (o,) = moments(
            world.pair, [replace(configuration, estimator=estimator(f"alpha({other:.17g})"))], [world.length]
        )
        assert m.covariance[0] <= o.covariance[0] * (1 + 1e-9) + m.rounding[0, 0] + o.rounding[0, 0]


def test_its_moments_are_those_of_what_it_stands_for_by_enumeration():
    world = build_world("markov", 2, 3, eos=True, off=False, seed=3)
    (m,) = moments(world.pair, [parse("alpha(best)-in-both+rtg")], [world.length], covariance="full")
    table = enumerate_configuration(m.at(0), world.pair, world.length)
    assert m.mean[0] == pytest.approx(table.mean, rel=1e-10, abs=1e-13)
    assert m.covariance[0] == pytest.approx(table.covariance, rel=1e-9, abs=1e-13)
    assert str(m.configuration) == "alpha(best)-in-both+rtg"


def test_each_length_has_its_own():
    (m,) = moments(preset("far"), [parse("alpha(best)-in-both+optimal-baseline-per-coordinate")], [5, 10])
    assert [str(c.estimator)[:9] for c in m.found] == ["alpha(0.1", "alpha(0.1"]
    assert m.found[0] != m.found[1]
    assert m.covariance[1] == pytest.approx(0.03318, rel=1e-3)  # alpha(0.1): 0.03485, k1-in-both: 1.294


def test_the_order_of_a_request_stays():
    names = ["k3-in-both", "alpha(best)-in-both", "k1-in-reward", "alpha(best)-in-both+rtg", "alpha(best)-in-both"]
    found = moments(preset("near"), [parse(name) for name in names], LENGTHS, covariance="none")
    assert [str(m.configuration) for m in found] == names
    assert [m.found is None for m in found] == ["best" not in name for name in names]
    assert np.isnan(found[1].estimate_variance).all()


def test_where_the_variance_is_the_same_for_all_it_is_k1():
    """At the reference itself, and in the reward alone a reference that is the policy gives nothing to choose by."""
    pair = replace(preset("near"), reference=preset("near").policy.log_probs)
    ((found,),) = best(pair, [parse("alpha(best)-in-reward")], [3])
    assert str(found.estimator) == "alpha(0)"


def test_beyond_double_precision_it_is_k1():
    from klgrad.synth.automata import markov
    from klgrad.synth.policies import PolicyPair, log_softmax, tabular

    automaton, steep = markov(2, 1, start=(0,)), np.array([[0.0, 800.0], [800.0, 0.0]])
    pair = PolicyPair(automaton, tabular(automaton, steep), log_softmax(-steep))
    ((found,),) = best(pair, [parse("alpha(best)-in-both")], [3])
    assert str(found.estimator) == "alpha(0)"


@pytest.mark.parametrize("name", [name for name, entry in ESTIMATORS.items() if entry.linear])
def test_linear_entries_are_linear(name):
    """Value and slope at a are the mixture of those at 0 and 1: what the closed form stands on."""
    delta, entry = np.linspace(-5, 5, 31), ESTIMATORS[name]
    assert len(entry.parameters) == 1
    at = {a: estimator(f"{name}({a})") for a in (0, 1, 0.3, -2)}
    for kind in ("value", "slope"):
        zero, one = (getattr(at[a], kind)(delta) for a in (0, 1))
        for a in (0.3, -2):
            assert getattr(at[a], kind)(delta) == pytest.approx((1 - a) * zero + a * one, rel=1e-12, abs=1e-12)


def test_without_a_pair_it_has_no_value_and_says_so():
    with pytest.raises(ValueError, match=r"alpha\(best\) has a value only where .* such as alpha\(0\.5\)"):
        estimator("alpha(best)").value(np.zeros(1))


@pytest.mark.parametrize("name", ["k1(best)", "k3-clamped(best,10)", "alpha(worst)"])
def test_only_a_linear_argument_may_be_left_open(name):
    with pytest.raises(ValueError, match=r"takes none|is not a number"):
        estimator(name)
