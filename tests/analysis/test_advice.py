"""What is advised descends what it says, on every pair, and stands in the order of its noise."""

import numpy as np
import pytest
from hypothesis import given, settings
from strategies import assert_close, worlds

from klgrad.analysis.advice import GOALS, OFF_POLICY, ON_POLICY, advise
from klgrad.analysis.verdicts import verdict
from klgrad.synth import exact
from klgrad.synth.configurations import parse
from klgrad.synth.enumeration import enumerate_configuration
from klgrad.synth.presets import preset

TABLES = {False: ON_POLICY, True: OFF_POLICY}
CASES = [(goal, name, off) for off, table in TABLES.items() for goal, names in table.items() for name in names]


@pytest.mark.parametrize(("goal", "name", "off"), CASES)
def test_candidates_descend_their_goal_and_the_others_none(goal, name, off):
    found = verdict(parse(name), off_policy=off)
    if goal == "avoid":
        assert found.phrase not in GOALS
    else:
        assert found.phrase == goal


@given(worlds(longest=3, cap=60))
@settings(max_examples=10)
def test_bias_and_variance_are_those_of_enumeration(world):
    true = exact.true_gradient(world.pair, [world.length])[0]
    for advice in advise(world.pair, world.length):
        if "loo" in advice.configuration:
            continue
        table = enumerate_configuration(parse(advice.configuration), world.pair, world.length)
        assert_close(advice.variance, np.trace(table.covariance), 1e-9)
        assert_close(advice.relative_bias * np.linalg.norm(true), np.linalg.norm(table.mean - true), 1e-9)


def test_quietest_first_and_sequences_from_the_definition():
    found = advise(preset("far"), 10)
    for goal in ("sequence", "token"):
        variances = [a.variance for a in found if a.goal == goal]
        assert variances == sorted(variances)
    size = np.linalg.norm(exact.true_gradient(preset("far"), [10]))
    for advice in found:
        assert np.sqrt(advice.variance / advice.sequences) <= 0.1 * size
        assert advice.sequences == 1 or np.sqrt(advice.variance / (advice.sequences - 1)) > 0.1 * size


def test_off_policy_pairs_get_other_advice():
    assert {a.configuration for a in advise(preset("stale"), 4)} == {
        str(parse(n)) for t in OFF_POLICY.values() for n in t
    }
