"""Unbiased configurations found by the engine, and the sequences each needs: by enumeration and by definition."""

import itertools
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from strategies import Plain, build_world

from klgrad.analysis import ranking, results
from klgrad.synth.automata import markov
from klgrad.synth.configurations import BASELINES, CREDITS, PLACEMENTS, RATIOS, Configuration, parse
from klgrad.synth.estimators import ESTIMATORS, estimator
from klgrad.synth.exact import true_gradient
from klgrad.synth.moments import best, moments
from klgrad.synth.policies import PolicyPair, log_softmax, tabular
from klgrad.synth.presets import preset

LENGTHS = list(range(5, 21))


def table(pair, configurations, lengths, **options):
    frame = results.compare(pair, configurations, lengths, exact_only=True)
    return ranking.extend(pair, frame, **options)


def needed(pair, names, lengths, error=0.1):
    frame = table(pair, [parse(name) for name in names], lengths, error=error)
    return frame.pivot(index="length", columns="configuration", values="sequences_for_error")


# ---------------------------------------------------------------------------------------------- what surprises


def test_near_the_reference_k3_in_both_needs_22_to_99_times_fewer_than_k1_in_reward():
    n = needed(
        preset("near"), ["k1-in-reward", "k3-in-both"], LENGTHS, error=0.001
    )  # so small that rounding is nothing
    fewer = n["k1-in-reward"] / n["k3-in-both"]
    assert (fewer.min(), fewer.max()) == pytest.approx((21.6, 99.1), rel=0.01)
    assert fewer.idxmin() == 5


def test_far_from_it_k3_in_both_needs_4_to_68_times_more():
    n = needed(preset("far"), ["k1-in-reward", "k3-in-both"], LENGTHS)
    more = n["k3-in-both"] / n["k1-in-reward"]
    assert more.is_monotonic_decreasing
    assert more.iloc[[0, -1]].to_numpy() == pytest.approx([68, 3.9], rel=0.02)


def test_far_from_it_the_full_vocabulary_with_the_optimal_baseline_needs_15000_times_fewer():
    n = needed(preset("far"), ["k1-in-reward", "full-in-both+optimal-baseline"], [20], error=0.001)
    fewer = n["k1-in-reward"] / n["full-in-both+optimal-baseline"]
    assert fewer[20] == pytest.approx(14_900, rel=0.01)


def test_a_biased_configuration_may_need_fewer_and_is_not_among_the_unbiased():
    pair = preset("far")
    n = needed(pair, ["k1-in-reward", "k1-in-loss"], [20])
    assert (n["k1-in-loss"] < n["k1-in-reward"]).all()
    assert parse("k1-in-loss") not in ranking.unbiased(pair, ranking.grid(pair), [20])


# ------------------------------------------------------------------------------------------------ what is found


def test_the_grid_has_every_estimator_and_all_that_varies():
    grid = ranking.grid(preset("near"))
    assert len(set(grid)) == len(grid)
    assert {str(c.estimator).partition("(")[0] for c in grid} == set(ESTIMATORS)
    assert {c.baseline for c in grid} == {"none", "loo", "mean", "optimal", "optimal-per-coordinate"}
    assert {c.credit for c in grid} == {"whole", "rtg", "future"}
    assert {c.ratio for c in grid} == {"none"}
    assert {c.ratio for c in ranking.grid(preset("stale"))} == {"none", "token", "prefix", "sequence"}


@pytest.mark.parametrize(
    ("kind", "eos", "off"), [("markov", False, False), ("history", True, False), ("markov", True, True)]
)
def test_what_is_found_unbiased_is_so_by_enumeration_and_nothing_else_is(kind, eos, off):
    """The second route takes the formula over every sequence; a baseline b, leave-one-out too, moves it by b Y."""
    world = build_world(kind, 2, 3, eos=eos, off=off, seed=7)
    grid = ranking.grid(world.pair)
    found = set(ranking.unbiased(world.pair, grid, [world.length]))
    plain, truth = Plain(world), true_gradient(world.pair, [world.length])[0]
    for named, configuration in zip(grid, best(world.pair, grid, [world.length])[0], strict=True):
        mean, _ = plain.moments(replace(configuration, baseline="none"))
        if configuration.baseline != "none":
            p, _, y, c = plain.parts(configuration)
            b = p @ c if configuration.baseline == "loo" else plain.baseline(configuration)
            mean = mean - b * (p @ y)
        relative = np.linalg.norm(mean - truth) / np.linalg.norm(truth)
        assert (relative < 1e-9) == (named in found), (str(configuration), relative)
    assert len(found) > 20


def test_off_policy_only_prefix_and_sequence_ratios_are_left():
    pair = preset("stale")
    found = ranking.unbiased(pair, ranking.grid(pair), [5, 8])
    assert {c.ratio for c in found} == {"prefix", "sequence"}
    assert parse("k3-in-both+prefix-ratio") in found


def test_every_length_counts():
    """One token of the ``far`` pair has no future: what leaves it out is unbiased there and nowhere else."""
    pair, candidates = preset("far"), [parse("k1-in-reward"), parse("full-in-loss")]
    assert ranking.unbiased(pair, candidates, [1]) == candidates
    assert ranking.unbiased(pair, candidates, [1, 2]) == candidates[:1]


def test_no_unbiased_configuration_is_said():
    with pytest.raises(ValueError, match="no unbiased one among the 1 configurations"):
        ranking.unbiased(preset("far"), [parse("k3-in-loss")], [5])


# ------------------------------------------------------------------------------------------------ the sequences


@pytest.mark.parametrize("error", [0.03, 0.3, 1.5])
@pytest.mark.parametrize("name", ["near", "far", "words"])
def test_n_is_the_least_that_keeps_to_the_error(name, error):
    """The variance of leave-one-out at the very N asked for, not at the table's."""
    pair, length = preset(name), 6
    names = ["k1-in-reward", "k3-in-both", "full-in-both+rtg+optimal-baseline"]
    names += [f"{n}+loo" for n in ("k1-in-reward", "k3-in-both", "full-in-both+rtg")]
    allowed = error**2 * np.sum(true_gradient(pair, [length])[0] ** 2)
    for text, n in needed(pair, names, [length], error).loc[length].items():
        least = 2 if text.endswith("loo") else 1
        assert n == int(n) >= least
        if n < 1e9:  # the quadratic's root keeps no more digits
            noise = [
                moments(pair, [parse(text)], [length], samples=k)[0].covariance[0] / k
                for k in (int(n), int(n) - 1)
                if k >= least
            ]
            assert noise[0] <= allowed * (1 + 1e-9)
            assert all(above > allowed * (1 - 1e-9) for above in noise[1:])


def test_groups_come_whole():
    n = needed(preset("near"), ["k1-in-reward+loo=8", "k1-in-reward"], [5]).loc[5]
    assert n["k1-in-reward+loo=8"] % 8 == 0
    assert needed(preset("near"), ["full-in-both+loo=8"], [20], 10.0).loc[20].item() == 8


def test_the_answer_does_not_depend_on_the_tables_n():
    pair, c = preset("far"), [parse("k1-in-reward+loo")]
    found = {
        samples: ranking.extend(pair, results.compare(pair, c, [5], exact_only=True, samples=samples), error=0.05)
        for samples in (2, 3, 1000)
    }
    assert len({float(frame.sequences_for_error[0]) for frame in found.values()}) == 1
    assert len({float(frame.variance[0]) for frame in found.values()}) == 3


# ---------------------------------------------------------------------------------------------------- the ranks


def test_ranks_are_by_variance_within_each_length_and_ties_share_one():
    pair = preset("near")
    found = ranking.unbiased(pair, ranking.grid(pair), [5, 20])
    frame = table(pair, found, [5, 20], rank="variance")
    assert len(frame) == 2 * len(found) > 100
    assert "sequences_for_error" not in frame
    for _, part in frame.groupby("length"):
        assert part["rank"].iloc[0] == 1
        assert part.variance.is_monotonic_increasing or np.all(np.diff(part.variance) > -1e-8 * part.variance.iloc[:-1])
        by_name = part.set_index("configuration")["rank"]
        assert by_name["k3-in-both"] == by_name["k3-clamped(20,10)-in-both"], "clamps that nothing here reaches"
        assert by_name["full-in-both+optimal-baseline"] < by_name["k3-in-both"] < by_name["k1-in-reward"]


def test_sampled_rows_carry_the_exact_ranks_and_come_after_them():
    frame = results.compare(preset("near"), [parse("k1-in-reward"), parse("k3-in-both")], [5], trials=3, samples=4)
    frame = ranking.extend(preset("near"), frame, rank="variance", error=0.1)
    assert tuple(frame.columns) == (*results.COLUMNS, "cost", "sequences_for_error", "rank")
    assert list(frame["rank"]) == [1, 1, 2, 2]
    assert list(frame.source) == ["exact", "monte_carlo"] * 2
    assert (frame.groupby("configuration").sequences_for_error.nunique() == 1).all()


def test_an_error_alone_leaves_the_order():
    names = ["k3-in-both", "k1-in-reward"]
    frame = table(preset("near"), [parse(n) for n in names], [5, 6], error=0.1)
    assert list(frame.configuration) == ["k3-in-both"] * 2 + ["k1-in-reward"] * 2
    assert "rank" not in frame


@pytest.mark.parametrize(
    ("name", "cost"),
    [
        ("k1-in-reward", "sampled tokens"),
        ("k3-in-both+loo", "sampled tokens"),
        ("k3-in-both+b=2", "sampled tokens"),
        ("k3-in-both+optimal-baseline", "sampled tokens + exact constant"),
        ("full-in-both+loo", "full vocabulary"),
        ("full-in-both+mean-baseline", "full vocabulary + exact constant"),
    ],
)
def test_costs(name, cost):
    assert ranking.cost(parse(name)) == cost


def test_saved_tables_keep_their_columns(tmp_path):
    frame = table(preset("near"), [parse("k1-in-reward")], [5], error=0.1, rank="variance")
    results.save(frame, results.manifest("test", [preset("near")], {}), tmp_path / "table")
    back, _ = results.load(tmp_path / "table.json")
    assert tuple(back.columns) == tuple(frame.columns)
    assert back.sequences_for_error[0] == frame.sequences_for_error[0]


# ------------------------------------------------------------------------------------------------- hard pairs


def pair_of(policy, reference):
    automaton = markov(2, 1, start=(0,))
    return PolicyPair(automaton, tabular(automaton, np.array(policy)), log_softmax(np.array(reference)))


def test_a_policy_at_its_reference_needs_no_number():
    """No gradient, so no share of it; everything with zero mean is unbiased, k3-in-both without noise."""
    logits = [[0.0, 1.0], [0.5, 0.0]]
    pair = pair_of(logits, logits)
    found = ranking.unbiased(pair, ranking.grid(pair), [4])
    assert parse("k1-in-loss") in found
    frame = table(pair, found, [4], error=0.1, rank="variance").set_index("configuration")
    assert frame.sequences_for_error.isna().all()
    assert frame.loc["k3-in-both", "rank"] == 1 < frame.loc["k1-in-loss", "rank"]


def test_tokens_out_of_the_policys_reach_break_nothing():
    pair = pair_of([[0.0, 0.5], [0.5, -np.inf]], [[0.0, 1.0], [0.0, 0.0]])
    found = ranking.unbiased(pair, ranking.grid(pair), [4])
    assert parse("k1-in-reward") in found
    assert parse("k3-in-both") not in found, "it loses the mass that the reference has where the policy never goes"
    assert table(pair, found, [4], error=0.1, rank="variance")["rank"].min() == 1


def test_what_overflows_is_ranked_last_and_has_no_number():
    steep = np.array([[0.0, 800.0], [800.0, 0.0]])
    pair = pair_of(steep, -steep)
    frame = table(pair, [parse("k3-in-loss"), parse("k1-in-reward")], [4], error=0.1, rank="variance")
    assert list(frame.configuration) == ["k1-in-reward", "k3-in-loss"]
    assert np.isnan(frame.sequences_for_error[1])
    assert parse("k1-in-reward") in ranking.unbiased(pair, ranking.grid(pair), [4])


# --------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("error", [0.0, -0.1, np.nan, np.inf])
def test_an_error_that_is_none_is_refused(error):
    with pytest.raises(ValueError, match="must be positive"):
        ranking.extend(preset("near"), table(preset("near"), [parse("k1-in-reward")], [5]), error=error)


def test_an_unknown_rank_is_refused():
    with pytest.raises(ValueError, match="unknown rank 'speed': there is variance"):
        ranking.check_request(None, "speed")


def test_every_name_reads_back():
    assert all(isinstance(c, Configuration) and parse(str(c)) == c for c in ranking.grid(preset("stale")))


# --------------------------------------------------------------------------------------------- nothing is missed


def everything(pair):
    """The whole grammar but for what only scales or clamps: alpha at 41 arguments, every credit, ratio, baseline."""
    ratios, baselines = ("none",) if pair.on_policy else RATIOS, [b for b in BASELINES if b != "constant"]
    names = [*(f"alpha({a:.3f})" for a in np.linspace(-0.5, 1.5, 41)), *(n for n in ESTIMATORS if n != "alpha")]
    for est, placement, credit, ratio, baseline, frozen in itertools.product(
        map(estimator, names), PLACEMENTS, CREDITS, ratios, baselines,
        (False, True),
    ):  # fmt: skip
        with suppress(ValueError):
            yield Configuration(est, placement, credit, ratio, baseline, rollout_value=frozen)


@pytest.mark.slow
@pytest.mark.parametrize("length", [5, 10])
@pytest.mark.parametrize("name", ["near", "far", "ending", "stale", "words"])
@pytest.mark.parametrize("constants", [True, False])
def test_the_ranking_is_never_beaten_by_hand(name, length, constants):
    """With exact constants and without, sampled tokens alone and the full vocabulary."""
    pair = preset(name, length)
    for full in (True, False):

        def allowed(c, full=full):
            return (full or not c.estimator.full) and (constants or "constant" not in ranking.cost(c))

        ranked = ranking.unbiased(pair, [c for c in ranking.grid(pair) if allowed(c)], [length])
        mine = min(m.covariance[0] for m in moments(pair, ranked, [length]))
        hand = ranking.unbiased(pair, [c for c in everything(pair) if allowed(c)], [length])
        found = moments(pair, hand, [length])
        best_by_hand = min(found, key=lambda m: m.covariance[0])
        assert mine <= best_by_hand.covariance[0] * (1 + 1e-9) + 1e-30, str(best_by_hand.configuration)
        assert len(hand) > 50


def test_the_best_alpha_is_ranked_on_and_off_policy_with_its_value():
    for name, length in (("far", 10), ("stale", 4)):
        pair = preset(name)
        frame = table(pair, ranking.unbiased(pair, ranking.grid(pair), [length]), [length], error=0.1, rank="variance")
        sampled = frame[frame["cost"].str.startswith("sampled")].iloc[0]
        assert sampled["configuration"].startswith("alpha(best)-in-both")
        assert 0 < float(sampled["estimator"].removeprefix("alpha(").removesuffix(")")) < 2


# -------------------------------------------------------------------------------------- nearly deterministic pairs


@pytest.mark.parametrize("logit", [20.0, 30.0, 36.0, 40.0])
def test_a_bias_is_seen_however_small_the_gradient(logit):
    """Logits +-36: the gradient is 5e-14, and the future that full-in-loss leaves out is 0.6 % of it."""
    rng = np.random.default_rng(0)
    policy = np.array([[logit, -logit], [-logit, logit]])
    pair = pair_of(policy, rng.normal(size=(2, 2)).tolist())
    found = ranking.unbiased(pair, ranking.grid(pair), [3])
    assert parse("k1-in-reward") in found
    assert parse("full-in-loss") not in found
    assert parse("jensen-shannon-in-both") not in found


@pytest.mark.parametrize("distance", [1e-12, 1e-9, 1e-6])
def test_the_unbiased_stay_so_near_the_reference(distance):
    logits = np.array([[0.0, 1.0], [0.5, 0.0]])
    pair = pair_of(logits.tolist(), (logits + distance * np.array([[1.0, 0.3], [-0.2, 0.7]])).tolist())
    found = ranking.unbiased(pair, ranking.grid(pair), [5])
    assert {parse(name) for name in ("k1-in-reward", "k3-in-both", "full-in-both")} <= set(found)
    assert parse("k1-in-loss") not in found
    assert parse("k3-in-reward") not in found
