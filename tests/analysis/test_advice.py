"""What is advised descends what it says, and stands in the order of its noise."""

import numpy as np
import pytest
from hypothesis import given, settings
from strategies import assert_close, worlds

from klgrad.analysis.advice import GOALS, OFF_POLICY, ON_POLICY, SHOWN, advise
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
@settings(max_examples=4)
def test_bias_and_variance_are_those_of_enumeration(world):
    true = exact.true_gradient(world.pair, [world.length])[0]
    found = advise(world.pair, world.length)
    for row in found[~found["configuration"].str.contains("loo")].itertuples():
        found_at = parse(row.configuration.replace("alpha(best)", row.estimator))
        table = enumerate_configuration(found_at, world.pair, world.length)
        assert_close(row.variance, np.trace(table.covariance), 1e-9)
        assert_close(row.bias, np.linalg.norm(table.mean - true), 1e-9)


@pytest.mark.parametrize("name", ["far", "stale"])
def test_the_sequence_level_is_unbiased_and_quietest_first(name):
    found = advise(preset(name), 10)
    best = found[found["goal"] == "sequence"]
    assert len(best) == SHOWN
    assert set(best["descends"]) == {"sequence"}
    assert best["relative_bias"].max() < 1e-9
    assert not best["cost"].str.contains("constant").any()
    for _, part in found.groupby("goal"):
        assert part["variance"].is_monotonic_increasing


def test_off_policy_pairs_get_other_advice():
    assert set(advise(preset("stale"), 4)["configuration"]) >= {str(parse(n)) for t in OFF_POLICY.values() for n in t}
