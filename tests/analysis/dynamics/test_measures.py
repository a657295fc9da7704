"""Measures of many policies at once against their single twins, and the suboptimality identity."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from strategies import assert_close, build_world, worlds

from klgrad.analysis.dynamics.measures import MEASURES, Measures
from klgrad.synth import exact, objectives
from klgrad.synth.rewards import task

REWARD = "contains(1,0)+0.3*each(0)+0.5*parity(1)"


@given(worlds(off=False), st.integers(0, 99))
def test_measures_are_those_of_each_policy_alone(world, seed):
    found = task(world.pair, REWARD, world.length, "ends(1)+0.2*each(1)")
    family, beta = objectives.family(found), np.array([0.5, 0.0, 2.0, 0.5])
    theta = np.random.default_rng(seed).normal(size=(4, world.pair.policy.parameters))
    measures = Measures(family, beta)
    many, gradient = measures(measures.log_probs(theta))
    assert tuple(many) == MEASURES
    for i, b in enumerate(beta):
        pair, lengths = family.pair(theta[i]), [world.length]
        best = objectives.best(found, b)
        value = objectives.objective(found, pair, b)
        alone = {
            "objective": value,
            "reward": objectives.expected_reward(pair, found.reward, world.length),
            "kl": exact.kl(pair, lengths)[0],
            "forward_kl": exact.forward_kl(pair, lengths)[0],
            "entropy": exact.entropy(pair, lengths)[0],
            "out_of_domain": objectives.expected_reward(pair, found.out_of_domain, world.length),
            "gap": best.objective - value,
        }
        for name, expected in alone.items():
            assert_close(many[name][i], expected, 1e-9)
        assert_close(gradient[i], objectives.objective_gradient(found, pair, b), 1e-9)
        if b > 0:
            assert_close(many["kl_to_optimum"][i], objectives.kl_to(found, pair, best), 1e-9)
            assert_close(many["gap"][i], b * many["kl_to_optimum"][i], 1e-9)
        else:
            assert np.isnan(many["kl_to_optimum"][i])


def test_scores_are_applied_without_being_built():
    found = task(build_world("counts", 3, 3, parameters=4, eos=True).pair, "ends(1)", 3)
    family, rng = objectives.family(found), np.random.default_rng(0)
    theta = rng.normal(size=(3, 4))
    measures = Measures(family, np.ones(3))
    log_probs = measures.log_probs(theta)
    weight = rng.normal(size=log_probs.shape) * measures.alive
    applied = measures.to_parameters(weight, np.exp(log_probs))
    for i in range(3):
        assert_close(applied[i], np.tensordot(weight[i], family.policy(theta[i]).scores, axes=2))
