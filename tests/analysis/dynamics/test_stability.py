"""The noise and the verdict: against sampled covariances and simulated runs."""

import numpy as np
import pytest
from strategies import assert_close

from klgrad.analysis.dynamics.fields import expected_update
from klgrad.analysis.dynamics.recipes import Algorithm, Run
from klgrad.analysis.dynamics.stability import noise, simulate, stability, with_reward
from klgrad.analysis.dynamics.training import _Loop
from klgrad.analysis.dynamics.updates import Tables, ascent
from klgrad.synth import objectives
from klgrad.synth.configurations import parse
from klgrad.synth.moments import moments
from klgrad.synth.rewards import task
from klgrad.synth.tasks import preset_task


def setting(reward=None, name="phase"):
    found = preset_task(name)
    found = found if reward is None else task(found.pair, reward, found.length)
    family = objectives.family(found)
    return family, family.parameters_of(found.pair.reference)


NAMES = ("k1-in-reward", "k3-in-reward", "k3-in-loss", "k2-in-both", "k1-in-loss")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("task_name", ["phase", "answer"])
def test_the_combined_configuration_is_minus_the_field(name, task_name):
    family, start = setting(name=task_name)
    theta = start + 0.3 * np.random.default_rng(0).normal(size=start.shape)
    combined = with_reward(parse(name), family, 0.4)
    mean = moments(family.pair(theta), [combined], [family.task.length], covariance="none")[0].mean[0]
    assert_close(-mean, expected_update(family.task, family.pair(theta), parse(name), 0.4))


@pytest.mark.parametrize("name", NAMES)
def test_the_noise_is_that_of_sampled_updates(name):
    family, start = setting()
    runs, samples, theta = 6000, 8, start + np.array([0.5, -0.4])
    loop = _Loop(family, [Run(name, 0.4, 1.0, Algorithm(samples=samples))] * runs, theta, False)
    log_probs = loop.measures.log_probs(loop.theta)
    batch = loop.sequences.draw(log_probs, None, np.random.default_rng(5).random((6, runs, samples)))
    tables = Tables(log_probs, loop.reference, log_probs, loop.measures.alive)
    drawn = ascent(Algorithm(samples=samples), loop.penalties, loop.beta, batch, tables, loop.measures) @ family.basis
    centred = drawn - drawn.mean(axis=0)
    products = samples * centred[:, :, None] * centred[:, None, :]
    exact = noise(family.pair(theta), with_reward(parse(name), family, 0.4), 6, samples, family.basis)
    z = (products.mean(axis=0) - exact) / (products.std(axis=0) / np.sqrt(runs))
    # three different entries in five cases: beyond 4.5 once in 10,000 seeds
    assert np.abs(z).max() < 4.5


@pytest.mark.parametrize("name", ["k1-in-reward", "k2-in-loss", "k3-in-loss"])
def test_what_holds_is_as_far_away_as_predicted(name):
    family, start = setting()
    found = stability(family, parse(name), 0.3, 0.5, start, samples=64)
    assert (found.verdict, found.fixed_point.kind) == ("hold", "attracting")
    assert found.growth < 0.95
    drawn = simulate(family, parse(name), 0.3, 0.5, found.fixed_point.theta, [60, 90, 120, 150], samples=64, runs=300)
    mean, error = drawn.distance.mean(), drawn.distance.mean(axis=1).std() / np.sqrt(300)
    # the prediction is of second order: its own error, a few per cent here, beside 4 standard errors (1 in 16,000)
    assert abs(mean - found.expected_kl) < 4 * error + 0.08 * found.expected_kl


def test_the_predicted_growth_is_that_of_a_linear_run():
    # without a reward the reference is the fixed point, and all noise is the penalty's own, growing with distance
    family, start = setting("none")
    near = start + 1e-4 * np.array([1.0, -0.5])
    found = stability(family, parse("k1-in-reward"), 0.3, 1.0, near, samples=64)
    drawn = simulate(family, parse("k1-in-reward"), 0.3, 1.0, near, [2], samples=64, runs=2000)
    moved = ((drawn.theta - start) ** 2).sum(axis=1)
    assert found.verdict == "hold"
    assert found.expected_kl < 1e-12
    # two updates from outside the leading direction: no faster than the growth, and the noise is in it
    assert moved.mean() / ((near - start) ** 2).sum() < found.growth**2 * 1.05


def test_too_large_a_step_is_lost_where_it_is_said_to():
    family, start = setting()
    configuration = parse("k1-in-reward")
    critical = stability(family, configuration, 0.3, 0.5, start, samples=64).critical_rate
    rates = (0.5 * critical, 1.1 * critical, 3 * critical)
    calm, swinging, lost = (stability(family, configuration, 0.3, rate, start, samples=64) for rate in rates)
    assert (calm.verdict, swinging.verdict, lost.verdict) == ("hold", "drift", "collapse")
    assert calm.growth < 1 < swinging.growth < lost.growth
    drawn = [
        np.median(
            simulate(family, configuration, 0.3, rate, calm.fixed_point.theta, [150], samples=64, runs=50).distance
        )
        for rate in rates
    ]
    assert drawn[0] < 0.02 < drawn[1] < 0.5 < drawn[2]  # the tolerance is half a nat


def test_no_pull_drifts_and_a_repelling_one_collapses():
    family, start = setting()
    drift, collapse = (stability(family, parse(n), 0.3, 0.5, start, samples=64) for n in ("k1-in-loss", "k3-in-reward"))
    assert (drift.verdict, collapse.verdict) == ("drift", "collapse")
    creeping, gone = (
        simulate(family, parse(n), 0.3, 0.5, start, [40, 400], samples=64, runs=20)
        for n in ("k1-in-loss", "k3-in-reward")
    )
    assert (creeping.distance[:, 1] > 1.2 * creeping.distance[:, 0]).all()
    assert np.median(gone.distance[:, 1]) > 3 * np.median(creeping.distance[:, 1])


def test_without_a_reward_k1_in_the_loss_is_a_random_walk():
    family, start = setting("none")
    found = stability(family, parse("k1-in-loss"), 0.3, 0.5, start, samples=64)
    assert (found.verdict, found.fixed_point.kind) == ("drift", "neutral")
    drawn = simulate(family, parse("k1-in-loss"), 0.3, 0.5, start, [20, 40, 80], samples=64, runs=400)
    mean = drawn.distance.mean(axis=0)
    # diffusion: twice the time, twice the distance squared; 400 runs know the ratio to about a tenth
    assert_close(mean[1:] / mean[:-1], [2.0, 2.0], 0.2)


@pytest.mark.parametrize(
    ("name", "says"), [("k1-in-reward+rtg", "whole credit"), ("k1-in-reward+loo", "baseline"), ("full-in-loss", "k2")]
)
def test_what_is_not_covered_is_refused(name, says):
    family, start = setting()
    with pytest.raises(ValueError, match=says):
        stability(family, parse(name), 0.3, 0.5, start)


def test_too_many_directions_and_absurd_numbers_are_refused(monkeypatch):
    family, start = setting()
    monkeypatch.setattr("klgrad.analysis.dynamics.stability.MAX_DIRECTIONS", 1)
    with pytest.raises(ValueError, match="up to 1 identifiable"):
        stability(family, parse("k1-in-reward"), 0.3, 0.5, start)
    with pytest.raises(ValueError, match="must be positive"):
        stability(family, parse("k1-in-reward"), 0.3, -1.0, start)


def test_the_expected_kl_is_never_negative(monkeypatch):
    """Where the noise vanishes, what is left of its covariance is rounding, and may have any sign."""
    from klgrad.analysis.dynamics import stability as module

    family, start = setting()
    rounding = -1e-20 * np.eye(family.basis.shape[1])
    monkeypatch.setattr(module, "_stationary", lambda *given: rounding)
    found = stability(family, parse("k1-in-reward"), 0.3, 0.5, start, samples=64)
    assert found.expected_kl == 0
    assert found.because == "the noise keeps it within 0 nats of the point that attracts"
