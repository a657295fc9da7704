"""The tidy table: fixed columns, two sources, honest zeros, saved whole or not at all."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from strategies import truncated_k3

from klgrad.analysis import results
from klgrad.analysis.montecarlo import Simulation, simulate
from klgrad.synth import fourth
from klgrad.synth.automata import markov
from klgrad.synth.configurations import Configuration, parse
from klgrad.synth.exact import kl, true_gradient
from klgrad.synth.moments import full_fits, moments
from klgrad.synth.policies import PolicyPair, log_softmax, tabular
from klgrad.synth.presets import preset

NAMES = ["k1-in-reward", "k1-in-loss", "k3-in-reward", "k3-in-loss", "k3-in-both", "k1-in-reward+loo"]


@pytest.fixture(scope="module")
def frame():
    return results.compare(preset("far"), [parse(n) for n in NAMES], [5, 8], trials=50, samples=200)


def rows(frame, source):
    return frame[frame.source == source].set_index(["configuration", "length"])


def test_columns_and_rows(frame):
    assert tuple(frame.columns) == results.COLUMNS
    assert len(frame) == len(NAMES) * 2 * 2
    assert set(frame.source) == {"exact", "monte_carlo"}


def test_exact_rows_have_no_floor_and_no_width(frame):
    exact = rows(frame, "exact")
    assert (exact.bias_floor == 0).all()
    assert (exact.bias_low == exact.bias_high).all()
    assert (exact.variance_low == exact.variance_high).all()


def test_truth_stands_in_every_row(frame):
    pair = preset("far")
    for length in (5, 8):
        part = frame[frame.length == length]
        assert part.kl.to_numpy() == pytest.approx(np.full(len(part), kl(pair, [length])[0]))
        assert part.gradient_norm.to_numpy() == pytest.approx(
            np.full(len(part), np.linalg.norm(true_gradient(pair, [length])[0]))
        )


def test_exact_biases_are_those_of_the_theory(frame):
    exact = rows(frame, "exact")
    norm = exact.gradient_norm
    assert (exact.bias["k1-in-reward"] < 1e-12).all()
    assert (exact.bias["k3-in-both"] < 1e-12).all()
    assert exact.bias["k1-in-loss"].to_numpy() == pytest.approx(norm["k1-in-loss"].to_numpy())
    assert exact.cosine["k1-in-loss"].isna().all()
    assert exact.scale["k1-in-reward"].to_numpy() == pytest.approx([1, 1])


def test_floor_and_debiased_follow_their_definitions(frame):
    mc = rows(frame, "monte_carlo")
    floor = np.sqrt(mc.variance / (mc.trials * mc.samples))
    assert mc.bias_floor.to_numpy() == pytest.approx(floor.to_numpy())
    assert mc.bias_debiased.to_numpy() == pytest.approx(np.sqrt(np.maximum(mc.bias**2 - floor**2, 0)).to_numpy())


def test_intervals_hold_the_exact_values_at_about_their_level():
    """95 % intervals over 6 x 2 correlated rows and 20 seeds: below 85 % covered would be 4 sigma even if
    only one row in six were independent."""
    hit = {"bias": [], "variance": []}
    for seed in range(20):
        frame = results.compare(preset("far"), [parse(n) for n in NAMES], [5, 8], trials=50, samples=200, seed=seed)
        exact, mc = rows(frame, "exact"), rows(frame, "monte_carlo")
        for name, seen in hit.items():
            seen.append(((mc[f"{name}_low"] <= exact[name] + 1e-9) & (exact[name] <= mc[f"{name}_high"])).mean())
    assert np.mean(hit["bias"]) > 0.85
    assert np.mean(hit["variance"]) > 0.80


# ------------------------------------------------------------------------------------- coverage of the variance

NAMED = ["k1-in-reward", "k1-in-loss", "k1-in-reward+loo", "k1-in-reward+loo=10", "k3-in-reward", "k3-in-loss"]
NAMED += ["k3-in-both+rtg", "k2-in-both+mean-baseline", "k3-in-both+optimal-baseline"]
STALE = [f"{name}+prefix-ratio" for name in NAMED if "loo=" not in name]


def coverage(name, names, lengths, trials, samples, repeats, monkeypatch, *, blind=False):
    """Per configuration and length: the share of intervals that hold the exact variance, and what they are from.

    ``blind`` hides the fourth moments.
    """
    pair, chosen = preset(name, max(lengths)), [parse(text) for text in names]
    full = full_fits(pair) and pair.policy.parameters <= 64
    exact = moments(pair, chosen, lengths, covariance="full" if full else "trace", samples=samples)
    cumulants = results.fourth_cumulants(pair, exact, lengths, samples)
    if blind:
        cumulants = cumulants._replace(kappa=np.full_like(cumulants.kappa, np.nan))
    monkeypatch.setattr(results, "fourth_cumulants", lambda *_: cumulants)  # the same each time
    drawn = simulate(pair, chosen, lengths, trials=trials * repeats, samples=samples, seed=7)
    truth, kls, hits, kinds = true_gradient(pair, lengths), kl(pair, lengths), [], []
    for k in range(repeats):
        part = slice(k * trials, (k + 1) * trials)
        one = Simulation([g[part] for g in drawn.gradients], [v[part] for v in drawn.estimates], drawn.sampler)
        rows = results._monte_carlo_rows(pair, exact, lengths, kls, truth, np.zeros(len(lengths)), one, trials, samples)
        size = [results._trace(m, i) for m in exact for i in range(len(lengths))]
        hits.append([row["variance_low"] <= s <= row["variance_high"] for row, s in zip(rows, size, strict=True)])
        kinds.append([row["variance_interval"] for row in rows])
    assert all(kind == kinds[0] for kind in kinds), "it depends on what was drawn"
    asked = [f"{text} at {length}" for text in names for length in lengths]
    return dict(zip(asked, zip(np.mean(hits, axis=0), kinds[0], strict=True), strict=True))


def assert_covered(found, repeats, rows):
    """0.95, less three binomial standard errors and the same for each more row that is looked at.

    The least of R rows that all cover 0.95 is 3 standard errors down once in 740 / R times; z is set for the same
    false alarm whatever R, 0.0013. Rows of one pair share their sequences: that makes alarms rarer.
    """
    z = stats.norm.isf(stats.norm.sf(3) / rows)
    least = 0.95 - z * np.sqrt(0.95 * 0.05 / repeats)
    assert {name: at for name, at in found.items() if at[0] < least} == {}


@pytest.mark.parametrize(("name", "names"), [("far", NAMED[:6:2]), ("ending", NAMED[:6:2]), ("stale", STALE[:6:2])])
def test_small_protocols_cover_the_exact_variance(name, names, monkeypatch):
    found = coverage(name, names, [5], 20, 50, 200, monkeypatch)
    assert_covered(found, 200, len(found))
    assert {kind for _, kind in found.values()} <= {"fourth moment", "low end"}


def test_the_trials_own_spread_would_fail_the_same_count(monkeypatch):
    """The negative control: what a tail was not drawn in does not show its width either."""
    ((share, kind),) = coverage("ending", ["k1-in-reward"], [8], 50, 100, 200, monkeypatch, blind=True).values()
    assert kind == "sampled"
    assert share < 0.75


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "names", "lengths", "trials", "samples", "repeats"),
    [
        ("near", NAMED, [5, 20], 50, 100, 1000),
        ("far", NAMED, [5, 20], 50, 100, 1000),
        ("ending", NAMED, [8, 20], 50, 100, 1000),
        ("stale", STALE, [5, 10], 50, 100, 1000),
        ("drift", NAMED, [1, 5], 50, 100, 1000),
        ("counts", NAMED, [8], 50, 100, 400),
        ("handbook", NAMED, [1], 50, 100, 1000),
        ("words", NAMED[:-1], [3, 8], 50, 100, 200),
        ("far", NAMED, [5, 20], 200, 1000, 300),
        ("ending", NAMED, [8, 20], 200, 1000, 300),
        ("far", NAMED, [5, 20], 10, 20, 2000),
        ("ending", NAMED, [8, 20], 5, 10, 2000),
    ],
)
def test_every_protocol_covers_the_exact_variance(name, names, lengths, trials, samples, repeats, monkeypatch):
    found = coverage(name, names, lengths, trials, samples, repeats, monkeypatch)
    for who, (share, kind) in found.items():
        print(f"{name:8} {trials:3} x {samples:4} {who:34} {kind:14} {share:.3f}")
    assert_covered(found, repeats, len(found))


def test_the_variance_that_was_reported_as_covered_too_little_has_a_low_end_and_a_reason():
    frame = results.compare(
        preset("ending", 8), [parse("k1-in-reward"), parse("k1-in-loss")], [8], trials=50, samples=100
    )
    tail, mild = (rows(frame, "monte_carlo").loc[(name, 8)] for name in ("k1-in-reward", "k1-in-loss"))
    assert (tail.variance_interval, tail.variance_high) == ("low end", np.inf)
    assert 0 < tail.variance_low < rows(frame, "exact").loc[("k1-in-reward", 8)].variance
    assert (mild.variance_interval, np.isfinite(mild.variance_high)) == ("fourth moment", True)
    (sentence,) = results.short_of_variance(frame)
    assert sentence.startswith("ending: k1-in-reward at T = 8: no upper end of the variance's interval")
    assert results.short_of_variance(rows(frame, "exact").reset_index()) == []


def test_a_tail_that_was_never_drawn_does_not_make_the_variance_zero():
    """A token of probability 1e-9 carries the variance; four sequences do not have it. The old interval was [0, 0]."""
    automaton = markov(2, 0)
    pair = PolicyPair(automaton, tabular(automaton, np.array([[20.7, 0.0]])), log_softmax(np.array([[20.7, 0.0]])))
    found = results.compare(pair, [parse("abs-in-reward"), parse("k1-in-loss")], [1], trials=2, samples=2)
    mc = found[(found.source == "monte_carlo") & (found.configuration == "k1-in-loss")].iloc[0]
    assert (mc.variance_low, mc.variance_high, mc.variance_interval) == (pytest.approx(0), np.inf, "low end")


def test_where_the_fourth_moment_is_out_of_reach_the_table_says_so(monkeypatch):
    nothing = fourth.Cumulants(np.full((1, 1), np.nan), np.array([False]))
    monkeypatch.setattr(results, "fourth_cumulants", lambda *_: nothing)
    frame = results.compare(preset("near"), [parse("k1-in-reward")], [5], trials=50, samples=100)
    assert frame.variance_interval.tolist() == ["exact", "sampled"]
    (sentence,) = results.short_of_variance(frame)
    assert sentence.startswith("near: k1-in-reward at T = 5: the variance's interval is from the trials alone")


def test_wide_pairs_use_the_sampled_covariance():
    frame = results.compare(preset("words"), [parse("k1-in-reward")], [3], trials=30, samples=100)
    mc = frame[frame.source == "monte_carlo"].iloc[0]
    assert 0 <= mc.bias_low <= mc.bias_high
    assert mc.bias_low < 1e-9, "an unbiased configuration must not exclude zero here"


def test_saved_tables_come_back(frame, tmp_path):
    results.save(frame, results.manifest("test", [preset("far")], {"seed": 0}), tmp_path / "table")
    back, provenance = results.load(tmp_path / "table.json")
    assert provenance["request"] == {"seed": 0}
    for column in results.COLUMNS:
        a, b = frame[column].to_list(), back[column].to_list()
        assert all(x == y or (x != x and (y is None or y != y)) for x, y in zip(a, b, strict=True)), column


def test_a_table_of_another_command_comes_back_with_its_own_columns(tmp_path):
    frame = pd.DataFrame(
        {"task": ["a", "b"], "step": [0, 1], "reward": [0.5, float("nan")], "configuration": ["x", "y"]}
    )
    results.save(frame, results.manifest("klgrad dynamics", [], {}), tmp_path / "table")
    back, _ = results.load(tmp_path / "table.json")
    pd.testing.assert_frame_equal(back, frame)


def test_json_holds_no_nan(frame):
    assert "NaN" not in json.dumps(results.records(frame), allow_nan=False)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"rows": 3}'])
def test_a_file_that_is_no_table_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match="not a saved klgrad table"):
        results.load(tmp_path / "x.json")


def test_an_unwritable_folder_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write"):
        results.writable_folder(tmp_path / "file" / "below")


def test_no_configurations_is_refused():
    with pytest.raises(ValueError, match="no configurations"):
        results.compare(preset("near"), [], [5])


def test_two_estimators_of_one_name_are_refused():
    """Rows go by names: figures and rankings could not tell them apart."""
    two = [Configuration(truncated_k3(bound), "reward") for bound in (0.5, 2.0)]
    with pytest.raises(ValueError, match="'truncated-k3': give each a name of its own"):
        results.compare(preset("near"), two, [5], exact_only=True)
    both = [replace(two[0], placement=placement) for placement in ("reward", "both")]
    assert len(results.compare(preset("near"), both, [5], exact_only=True)) == 2
