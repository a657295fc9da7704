"""The tidy table: fixed columns, two sources, honest zeros, saved whole or not at all."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from strategies import truncated_k3

from klgrad.analysis import results
from klgrad.synth.configurations import Configuration, parse
from klgrad.synth.exact import kl, true_gradient
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
